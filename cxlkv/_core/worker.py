"""The binding of the worker near the memory, and of its use by this process."""

from __future__ import annotations

from cxlkv._core.base import VISIBILITY_MODES, Handle, check, made, numbers_from, numbers_of
from cxlkv._native import ffi, lib

WORKER_USES = ("none", "if_there", "only")  # by the core's number


def worker_make(
    pool: Handle, slots: int, request_bytes: int, response_bytes: int, mode: str
) -> Handle:
    of = (pool, slots, request_bytes, response_bytes, VISIBILITY_MODES.index(mode))
    return made("cxlkv_worker **", lib.cxlkv_worker_destroy, lib.cxlkv_worker_make, *of)


def worker_destroy(worker: Handle) -> None:
    ffi.release(worker)


def worker_serve(worker: Handle, timeout_s: float) -> int:
    """Answers requests for so long; returns how many."""
    return check(lib.cxlkv_worker_serve(worker, timeout_s))


def worker_state(worker: Handle) -> dict[str, int]:
    """What the worker says of itself."""
    return numbers_from("cxlkv_worker_state *", lib.cxlkv_worker_state_of, worker)


def pool_use_worker(pool: Handle, use: str, deadline_s: float) -> None:
    check(lib.cxlkv_pool_use_worker(pool, WORKER_USES.index(use), deadline_s))


def pool_worker_state(pool: Handle) -> tuple[dict[str, int], str]:
    """What this process's use of its worker has come to, and why the last call was not its."""
    got = ffi.new("cxlkv_worker_state *")
    check(lib.cxlkv_pool_worker_state(pool, got))
    return numbers_of(got[0]), ffi.string(got.why).decode(errors="replace")
