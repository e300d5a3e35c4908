"""The binding of cxlkv._measure, which is no part of the product: loops that `cxlkv bench` times
and `cxlkv bench litmus` runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core import abi
from cxlkv._core.base import (
    VISIBILITY_MODES,
    Handle,
    error_of,
    handle_of,
    new_place,
    numbers_of,
)
from cxlkv._measure import ffi, lib

abi.check(lib, "cxlkv._measure")  # before any of the loops is used


def check(code: int) -> int:
    """`code` if it is >= 0, else the exception that its number stands for."""
    if code >= 0:
        return code
    raise error_of(code, lib.cxlkv_error_text())


# By the core's number: writes that end with a fence, reads after one, and the protocol.
COHERENCE_OPERATIONS = (
    "store",
    "stream",
    "write_back",
    "invalidate",
    "evict",
    "read",
    "read_invalidated",
    "read_evicted",
    "publish",
    "acquire",
    "acquire_unpinned",
    "unpin",
)


def coherence_time_s(
    operation: str,
    memory: npt.NDArray[np.uint8],
    local: npt.NDArray[np.uint8],
    first: int,
    repeat: int,
    batch: int = 1,
    checksum: bool = False,
    generation: int = 1,
    mode: str = "fast",
) -> float:
    """Seconds for `repeat` batches of records of local.size bytes, taken in turn from `first` on.

    memory is at a line and is split into as many records as it holds, 128 bytes more for each.
    """
    args = ffi.new("cxlkv_coherence_args *")
    args.operation = COHERENCE_OPERATIONS.index(operation)
    args.mode = VISIBILITY_MODES.index(mode)
    args.batch, args.checksum, args.generation = batch, int(checksum), generation
    args.record_bytes, args.record_count = local.size, memory.size // (local.size + 128)
    args.first, args.repeat = first, repeat
    args.memory = ffi.cast("uint8_t *", memory.ctypes.data)
    args.local = ffi.cast("uint8_t *", local.ctypes.data)
    return check(lib.cxlkv_coherence_time(args)) * 1e-9


def _coherence_ns(
    measure: Callable[..., int], mode: str, size: int, count: int
) -> npt.NDArray[np.uint64]:
    out = np.zeros(count, np.uint64)
    at = ffi.cast("uint64_t *", out.ctypes.data)
    check(measure(VISIBILITY_MODES.index(mode), size, count, at))
    return out


# Of a mode, a size and a count. Each of `count` round trips, with `size` bytes there and back.
coherence_calls_ns = partial(_coherence_ns, lib.cxlkv_coherence_calls)
# From before each of `count` records of `size` bytes is copied until another thread has it.
coherence_visible_ns = partial(_coherence_ns, lib.cxlkv_coherence_visible)


# By the core's number; "past": by stores that go past the cache.
MEMORY_KINDS = (
    "chase",
    "read",
    "write",
    "write_past",
    "mixed",
    "mixed_past",
    "copy",
    "copy_past",
)


class Stream(NamedTuple):
    """One thread's loop over memory, as cxlkv_memory_stream says."""

    kind: str
    memory: npt.NDArray[np.uint8]
    cpu: int = -1
    block_bytes: int = 256 << 10
    pace_ns: int = 0
    first_word: int = 0


class Streamed(NamedTuple):
    """What a loop did."""

    moved_bytes: int
    steps: int
    seconds: float
    sum: int


@contextlib.contextmanager
def memory_taken(size: int, node: int = -1) -> Iterator[npt.NDArray[np.uint8]]:
    """Private memory, of one NUMA node if that is given; gone when the block ends."""
    at = ffi.new("uint8_t **")
    try:
        check(lib.cxlkv_memory_take(size, node, at))
        yield np.frombuffer(ffi.buffer(at[0], size), np.uint8)
    finally:
        if at[0] != ffi.NULL:
            check(lib.cxlkv_memory_give(at[0], size))


def memory_ring(memory: npt.NDArray[np.uint8], seed: int) -> None:
    """Make one ring of its lines, for "chase"."""
    at = ffi.cast("uint8_t *", memory.ctypes.data)
    check(lib.cxlkv_memory_ring(at, memory.size, seed))


def memory_run(streams: Sequence[Stream], seconds: float) -> list[Streamed]:
    """Run all of them at once, each for so long."""
    args = ffi.new("cxlkv_memory_stream[]", len(streams))
    for into, stream in zip(args, streams, strict=True):
        into.kind, into.cpu = MEMORY_KINDS.index(stream.kind), stream.cpu
        into.memory = ffi.cast("uint8_t *", stream.memory.ctypes.data)
        into.bytes, into.block_bytes = stream.memory.size, stream.block_bytes
        into.pace_ns, into.first_word = stream.pace_ns, stream.first_word
    check(lib.cxlkv_memory_run(args, len(streams), round(seconds * 1e9)))
    return [Streamed(s.moved_bytes, s.steps, s.elapsed_ns * 1e-9, s.sum) for s in args]


def memory_gather_s(
    to: npt.NDArray[np.uint8],
    memory: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.uint64],
    piece_bytes: int,
) -> float:
    """Seconds for a memcpy of each piece of `memory`; they come one behind the other in `to`."""
    if to.size < offsets.size * piece_bytes or not offsets.flags.c_contiguous:
        raise errors.BadArgumentError("the pieces do not fit into `to`")
    return 1e-9 * check(
        lib.cxlkv_memory_gather(
            ffi.cast("uint8_t *", to.ctypes.data),
            ffi.cast("uint8_t *", memory.ctypes.data),
            memory.size,
            ffi.cast("uint64_t *", offsets.ctypes.data),
            offsets.size,
            piece_bytes,
        )
    )


class Gather:
    """Copies a piece at each offset of `memory` to `to`, one behind the other, each of the
    `workers` an equal part of them; a call returns the seconds that it took."""

    def __init__(
        self,
        workers: ThreadPoolExecutor,
        threads: int,
        to: npt.NDArray[np.uint8],
        memory: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.uint64],
        piece_bytes: int = 0,
    ):
        self.workers, self.to, self.memory = workers, to, memory
        self.piece_bytes = piece_bytes or to.size // len(offsets)
        self.parts = np.array_split(offsets, threads)
        lengths = [0, *(len(part) * self.piece_bytes for part in self.parts)]
        self.firsts = np.cumsum(lengths).tolist()

    def _copy(self, number: int) -> None:
        to = self.to[self.firsts[number] :]
        memory_gather_s(to, self.memory, self.parts[number], self.piece_bytes)

    def __call__(self) -> float:
        began = time.perf_counter()
        list(self.workers.map(self._copy, range(len(self.parts))))
        return time.perf_counter() - began


def _products_per_s(kernels: str, kind: int, seconds: float) -> float:
    found = ffi.new("cxlkv_arithmetic *")
    check(lib.cxlkv_arithmetic_run(kernels.encode(), kind, round(seconds * 1e9), found))
    return float(found.products / (found.elapsed_ns * 1e-9))


def products_per_s(kernels: str, dtype: str, threads: int, seconds: float) -> float:
    """How often so many threads multiply and add a second, each for so long, on registers alone:
    keys of `dtype` by queries, with the instructions of a table of kernels, as _core.isa() names
    it. "float32" also stands for values by weights, of any dtype; "codes" for both, encoded."""
    kinds = {"bfloat16": lib.CXLKV_ARITHMETIC_BF16, "codes": lib.CXLKV_ARITHMETIC_CODES}
    kind = kinds.get(dtype, lib.CXLKV_ARITHMETIC_FP32)
    with ThreadPoolExecutor(threads) as team:
        each = [team.submit(_products_per_s, kernels, kind, seconds) for _ in range(threads)]
        return sum(one.result() for one in each)


_LITMUS = ffi.typeof("cxlkv_litmus **")
LITMUS_REGIONS_MAX: int = lib.CXLKV_LITMUS_REGIONS_MAX
LITMUS_REGION_BYTES: int = lib.CXLKV_LITMUS_REGION_BYTES
LITMUS_MESSAGE_BYTES: int = lib.CXLKV_LITMUS_MESSAGE_BYTES
LITMUS_TESTS = ("message passing", "store buffering", "late eviction")  # by the core's number
LITMUS_KINDS = ("", "lost", "stale", "both old", "overwritten")


def flush_name() -> str:
    """What lines are written back with: "clwb", "clflushopt", "clflush", "dc" or "none"."""
    return str(ffi.string(lib.cxlkv_flush_name()).decode())


def litmus_make(addresses: Sequence[int], role: int, pressure_bytes: int, wait_s: float) -> Handle:
    """The regions stay mapped until the handle is gone, or released by litmus_destroy()."""
    out = new_place(_LITMUS, lib.cxlkv_litmus_destroy_at, pressure_bytes)
    regions = ffi.new("void *[]", [ffi.cast("void *", address) for address in addresses])
    check(lib.cxlkv_litmus_make(regions, len(addresses), role, pressure_bytes, wait_s, out))
    return handle_of(out)


def litmus_destroy(litmus: Handle) -> None:
    ffi.release(litmus)


def litmus_meet(litmus: Handle) -> bool:
    """One look for the other role."""
    return check(lib.cxlkv_litmus_meet(litmus)) == 1


def litmus_exchange(litmus: Handle, message: bytes) -> bytes:
    """Both roles: the other's message, filled up with zeros."""
    own = message.ljust(LITMUS_MESSAGE_BYTES, b"\0")
    peer = ffi.new("uint8_t[]", LITMUS_MESSAGE_BYTES)
    check(lib.cxlkv_litmus_exchange(litmus, own, peer))
    return bytes(ffi.buffer(peer))


class LitmusCounts:
    """A cxlkv_litmus_found that rounds add to."""

    def __init__(self) -> None:
        self.struct = ffi.new("cxlkv_litmus_found *")

    def numbers(self) -> dict[str, int]:
        return numbers_of(self.struct[0])


def litmus_run(
    litmus: Handle, test: int, pair: tuple[int, int], rounds: range, counts: LitmusCounts
) -> None:
    which = ffi.new("cxlkv_litmus_case *")
    which.test, (which.first, which.second) = test, pair
    which.first_round, which.rounds = rounds.start, len(rounds)
    check(lib.cxlkv_litmus_run(litmus, which, counts.struct))


def litmus_give_up(litmus: Handle) -> None:
    lib.cxlkv_litmus_give_up(litmus)
