"""The binding of the worker near the memory, and of its use by this process."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv._core.base import (
    VISIBILITY_MODES,
    Handle,
    check,
    flat,
    int32s,
    made,
    numbers_from,
    numbers_of,
    with_capacity,
)
from cxlkv._native import ffi, lib
from cxlkv.arrays import BudgetRow, PageIndices, Starts

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
    return numbers_from("cxlkv_worker_state *", lib.cxlkv_worker_state_of, worker, ffi.NULL)


class WorkerQuestion(NamedTuple):
    """What a client asks one of a worker's choosers. queries: bytes of [rows, q_heads, head_dim];
    sequences: the worker's own, until it answers;
    tokens and tables: of each."""

    chooser: int
    layer: int
    q_heads: int
    dtype: int
    queries: bytes
    starts: Starts
    budgets: list[BudgetRow]
    per: int
    scale: float
    sequences: list[Handle]
    tokens: list[int]
    tables: list[int]


def worker_asked(worker: Handle) -> WorkerQuestion | None:
    """What a client asks now, if anything. Copies."""
    got = ffi.new("cxlkv_question *")
    if not check(lib.cxlkv_worker_asked(worker, got)):
        return None
    asked, n = got.asked, got.count
    starts = np.frombuffer(bytes(ffi.buffer(asked.starts, 4 * (n + 1))), np.int32).copy()
    size = int(starts[-1]) * asked.queries.stride_bytes[0]
    return WorkerQuestion(
        chooser=asked.by.scorer,
        layer=asked.layer,
        q_heads=asked.q_heads,
        dtype=asked.queries.dtype,
        queries=bytes(ffi.buffer(ffi.cast("uint8_t *", asked.queries.data), size)),
        starts=starts,
        budgets=[
            BudgetRow(each.kind, each.pages, each.amount, each.sinks, each.recent)
            for each in asked.by.budgets[0 : asked.by.budget_count]
        ],
        per=asked.by.per,
        scale=asked.scale,
        sequences=list(got.sequences[0:n]),
        tokens=list(got.tokens[0:n]),
        tables=list(got.tables[0:n]),
    )


def worker_answer(
    worker: Handle,
    pages: PageIndices,
    log_weights: npt.NDArray[np.float32] | None,
    rows: tuple[npt.NDArray[np.float32], ...] | None,
    bytes_scored: int,
    bytes_fetched: int,
) -> None:
    """pages [lists, kv_heads, k], log_weights [lists, kv_heads, k, page_tokens], rows: k, v and
    log_counts [lists, kv_heads, n, ..], all contiguous."""
    choice: Any = ffi.new("cxlkv_choice *")
    picked = choice.picked
    picked.pages, picked.lists, picked.k = int32s(pages), pages.shape[0], pages.shape[2]
    if log_weights is not None:
        picked.log_weights = flat("float", log_weights)
        picked.weight_tokens = log_weights.shape[3]
    if rows is not None:
        keys, values, counts = (flat("float", each) for each in rows)
        picked.row_keys, picked.row_values, picked.row_log_counts = keys, values, counts
        picked.row_count = rows[2].shape[2]
    choice.bytes_scored, choice.bytes_fetched = bytes_scored, bytes_fetched
    check(lib.cxlkv_worker_answer(worker, choice, 0, ffi.NULL))


def worker_refuse(worker: Handle, text: str, again: bool) -> None:
    """again: the client is to ask at once, for what is now being made."""
    code = lib.CXLKV_E_BUSY if again else lib.CXLKV_E_ARGUMENT
    check(lib.cxlkv_worker_answer(worker, ffi.NULL, code, text.encode(errors="replace")))


def worker_tables(worker: Handle) -> set[int]:
    """Numbers of the sequences that it has for its clients."""

    def fill(capacity: int) -> tuple[npt.NDArray[np.uint64], int]:
        found = np.empty(capacity, np.uint64)
        n = check(lib.cxlkv_worker_tables(worker, flat("uint64_t", found, True), capacity))
        return found[:n], n

    return set(with_capacity(fill).tolist())


def pool_use_worker(pool: Handle, use: str, deadline_s: float) -> None:
    check(lib.cxlkv_pool_use_worker(pool, WORKER_USES.index(use), deadline_s))


def pool_worker_state(pool: Handle) -> tuple[dict[str, int], str]:
    """What this process's use of its worker has come to, and why the last call was not its."""
    got = ffi.new("cxlkv_worker_state *")
    check(lib.cxlkv_worker_state_of(ffi.NULL, pool, got))
    return numbers_of(got[0]), ffi.string(got.why).decode(errors="replace")
