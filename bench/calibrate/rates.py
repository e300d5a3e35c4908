"""What things cost on this machine: reading, writing, scoring, attending, through a pool itself.

For `cxlkv tune` and `cxlkv advise`. The engine's prefill is not measured here: it needs the model.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cxlkv.arrays import NUMPY_DTYPES
from cxlkv.bench.measure import interleave, median_interval
from cxlkv.bench.result import HERE, Result
from cxlkv.errors import BadArgumentError, MemoryShortError, PoolFullError, SystemCallError
from cxlkv.layout import DTYPES, KVLayout, format_bytes
from cxlkv.machine.costs import Costs, Tier, key_share
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as PoolSequence

LAYOUT = KVLayout(layers=1, kv_heads=8, head_dim=128)  # of `cxlkv tune`, which knows no model
ALIGNMENT_BYTES = 4096  # of O_DIRECT, on all common disks
SAMPLE_TOKENS = 4096  # that differ; then they come again
STEP_TOKENS = 1024  # a call appends
SMALL_REPEATS = 20
SCORED = Budget(share=0.05)
LOCAL = "memory of this process"
DIRECT = "O_DIRECT"
FORGOTTEN = "page cache dropped by posix_fadvise, which file systems in memory ignore"


@dataclass(frozen=True)
class Size:
    """How much is moved: more than the caches of most CPUs hold, so that memory is measured."""

    bytes: int = 128 << 20
    cold_bytes: int = 64 << 20
    run_bytes: int = 8 << 20
    rounds: int = 11  # six at least tell where a median lies


SIZE = Size()  # a name, so that tests can make it small


def run(
    result: Result,
    layout: KVLayout,
    *,
    pool: Path | None = None,
    cold: Path | None = None,
    group: int = 4,
    threads: int | None = None,
) -> Costs:
    """Costs of local (memory of this process), of far (in the pool, if one is given), of cold.

    Without a pool far costs what local does, and says so. group: query heads for each kv head.
    """
    measured = memory(result, "local", layout, group=group, threads=threads)
    assert measured.far is not None
    local = replace(measured.far, write_bytes_per_s=None)  # its copies are not appended
    costs = replace(
        measured,
        local=local,
        engine_score_bytes_per_s=measured.score_bytes_per_s,  # of what is fetched or recomputed
        engine_attend_bytes_per_s=measured.attend_bytes_per_s,
        engine_step_latency_s=measured.step_latency_s,
    )
    if pool is not None:
        with CXLPool.open(pool, threads=threads) as opened:
            there = through(result, "far", opened, group)
        costs = replace(
            costs,
            far=there.far,
            score_bytes_per_s=there.score_bytes_per_s,
            attend_bytes_per_s=there.attend_bytes_per_s,
            step_latency_s=there.step_latency_s,
        )
    if cold is not None:
        costs = replace(costs, cold=file(result, layout, cold))
    return replace(costs, emulated=result.emulated or "")


def memory(
    result: Result, name: str, layout: KVLayout, *, group: int = 4, threads: int | None = None
) -> Costs:
    """In a pool of this process's own memory, of one layer of the layout's shape."""
    one = one_layer(layout)
    capacity = SIZE.bytes * 2 + (64 << 20)
    with CXLPool.create("anonymous:", layout=one, capacity=capacity, threads=threads) as pool:
        return through(result, name, pool, group)


def one_layer(layout: KVLayout) -> KVLayout:
    shape = replace(layout.shape, layers=1, window=None)
    return KVLayout.of([shape], page_tokens=layout.page_tokens)


def through(result: Result, name: str, pool: CXLPool, group: int = 4) -> Costs:
    """Costs with `far` measured through `pool`: sequences are appended, read, and released.

    They take at most half of the free pages; raises PoolFullError when these are too few.
    """
    layout = pool.layout
    rows = _Rows.of(pool)
    rng = np.random.default_rng(7)
    q = rng.standard_normal((layout.kv_heads * group, layout.head_dim), np.float32)
    large = rows.append(pool)
    small = rows.append(pool, layout.page_tokens)
    readers = {"large": _Reader(large, layout, q), "small": _Reader(small, layout, q)}
    try:
        # One call after the other, as in use: threads that were asleep are slow to wake.
        times = interleave(readers["small"].functions("small"), SIZE.rounds, SMALL_REPEATS)
        functions = readers["large"].functions("large")
        functions["write"] = lambda: rows.append(pool).release()
        times |= interleave(functions, SIZE.rounds)
    finally:
        small.release()
        large.release()
    shares = {"read": 1.0, "score": key_share(layout), "attend": 1.0}
    fits = {}
    for verb, share in shares.items():
        sizes = [share * readers[size].bytes for size in ("large", "small")]
        took = zip(times[f"{verb}_large"], times[f"{verb}_small"], strict=True)
        rates, calls_s = zip(*(fit(*pair, *sizes) for pair in took), strict=True)
        call_s = median_interval(calls_s)[0]  # other programs only add to it
        fits[verb] = statistics.median(rates), call_s / layout.layers
        result.measure(f"{name}_{verb}", [sizes[0] / s for s in times[f"{verb}_large"]], "bytes/s")
        result.measure(f"{name}_{verb}_call", [1e6 * s / layout.layers for s in calls_s], "us")
        if fits[verb][1] == 0:
            result.notes.append(f"{name}_{verb}_call: too short to be told from the time of bytes")
    written = [rows.bytes / seconds for seconds in times["write"]]
    write = result.measure(f"{name}_write", written, "bytes/s")
    far = Tier(
        bytes_per_s=fits["read"][0],
        latency_s=fits["read"][1],
        write_bytes_per_s=write.median,
        where=pool.path or LOCAL,
    )
    return Costs(
        far=far,
        score_bytes_per_s=fits["score"][0],
        attend_bytes_per_s=fits["attend"][0],
        step_latency_s=fits["score"][1] + fits["attend"][1],
    )


class _Rows:
    """Keys and values to append: as many tokens as are measured with, or as there is room for."""

    def __init__(self, layout: KVLayout, tokens: int):
        self.layout = layout
        self.tokens = tokens
        self.bytes = layout.stored_token_bytes * tokens
        rng = np.random.default_rng(11)
        self.step = min(tokens, STEP_TOKENS // layout.page_tokens * layout.page_tokens)
        count = max(1, SAMPLE_TOKENS // self.step)
        shape = (count, self.step, layout.kv_heads)
        dtype = NUMPY_DTYPES[DTYPES.index(layout.dtype)]
        self.k = rng.standard_normal((*shape, layout.head_dim), np.float32).astype(dtype)
        values = rng.standard_normal((*shape, layout.value_head_dim), np.float32).astype(dtype)
        self.v = values if layout.values == "own" else None

    @classmethod
    def of(cls, pool: CXLPool) -> _Rows:
        layout, parts = pool.layout, pool.pages.geometry["part_count"]
        free = pool.stats()["pages_free"]
        page_bytes = layout.stored_token_bytes * layout.page_tokens
        pages = min(free // parts // 4, SIZE.bytes // page_bytes)
        if free // parts < 8:
            raise PoolFullError(
                f"{pool.path}: {free} pages are free, measuring takes {8 * parts}: free some, or "
                "leave the pool out"
            )
        return cls(layout, max(2, pages) * layout.page_tokens)

    def append(self, pool: CXLPool, tokens: int | None = None) -> PoolSequence:
        """A new sequence of so many tokens, of all if not given."""
        sequence, wanted = pool.sequence(), tokens or self.tokens
        for index, first in enumerate(range(0, wanted, self.step)):
            count = min(self.step, wanted - first)
            k = self.k[index % len(self.k), :count]
            v = None if self.v is None else self.v[index % len(self.k), :count]
            for layer in range(self.layout.layers):
                sequence.append(layer, k, v)
        return sequence


class _Reader:
    """Reads all that a sequence holds, layer by layer; bytes: of K and V."""

    def __init__(self, sequence: PoolSequence, layout: KVLayout, q: object):
        self.sequence = sequence
        self.q = q
        whole = Budget(share=1.0)
        self.picked = [sequence.select(layer, q, whole) for layer in range(layout.layers)]
        self.out = [sequence.fetch(layer, picked) for layer, picked in enumerate(self.picked)]
        self.bytes = sum(picked.bytes_fetched for picked in self.picked)

    def functions(self, size: str) -> dict[str, Callable[[], object]]:
        return {
            f"read_{size}": self.fetch,
            f"score_{size}": self.select,
            f"attend_{size}": self.attend,
        }

    def fetch(self) -> None:
        for layer, picked in enumerate(self.picked):
            self.sequence.fetch(layer, picked, self.out[layer])

    def select(self) -> None:
        for layer in range(len(self.picked)):
            self.sequence.select(layer, self.q, SCORED)

    def attend(self) -> None:
        for layer in range(len(self.picked)):
            self.sequence.attend(layer, self.q)


def fit(large_s: float, small_s: float, large: float, small: float) -> tuple[float, float]:
    """(bytes/s, seconds of what does not grow) of a line through two sizes in bytes.

    Where noise makes the small one take as long as the large one, all of it is given to the bytes.
    """
    if large <= small or large_s <= small_s:
        return large / large_s, 0.0
    byte_s = (large_s - small_s) / (large - small)
    return 1 / byte_s, max(0.0, small_s - byte_s * small)


# ---- files ----


def file(result: Result, layout: KVLayout, path: Path) -> Tier:
    """Costs of a cold file at `path`, or in that folder: measured on a file that is removed.

    Records of a page's size are read one at a time, in random order, and runs of them. Reads go
    around the page cache (O_DIRECT), or it is told to forget them first; `where` says which.
    """
    folder = path if path.is_dir() else path.absolute().parent
    if not folder.is_dir():
        raise BadArgumentError(f"{path}: its folder does not exist")
    record_bytes, kv_bytes = _record(layout)
    count = max(8, SIZE.cold_bytes // record_bytes)
    free = shutil.disk_usage(folder).free
    if free < 2 * count * record_bytes:
        raise MemoryShortError(
            f"{folder}: {format_bytes(free)} free; measuring takes "
            f"{format_bytes(count * record_bytes)}, and as much is left for others"
        )
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as made:
            written_s = _write(made.fileno(), record_bytes, count)
            fd, how = _open_past_the_cache(made.fileno())
            try:
                run = max(2, min(count, SIZE.run_bytes // record_bytes))
                large, small = _read(fd, record_bytes, count, run, how)
            finally:
                os.close(fd)
    except OSError as error:
        raise SystemCallError(f"{folder}: a file to measure with: {error.strerror}") from error
    rate, latency_s = fit(
        statistics.median(large), statistics.median(small), run * kv_bytes, kv_bytes
    )
    result.measure("cold_read", [run * kv_bytes / took for took in large], "bytes/s", HERE)
    result.measure("cold_read_record", [1e6 * took for took in small], "us", HERE)
    written = [records * kv_bytes / took for records, took in written_s]
    write = result.measure("cold_write", written, "bytes/s", HERE)
    return Tier(
        bytes_per_s=rate,
        latency_s=latency_s,
        write_bytes_per_s=write.median,
        where=f"{folder}, {how}",
    )


def _record(layout: KVLayout) -> tuple[int, float]:
    """Bytes of a page as a file holds it, and how many of them are K and V: by the record of one
    layer, as digests, sketches and checksums grow as the layers do."""
    one = one_layer(layout)
    with CXLPool.create("anonymous:", layout=one, capacity="64MiB", threads=1) as pool:
        exact = pool.pages.geometry["record_bytes"] * layout.layers / len(layout.groups)
    kv_bytes = layout.stored_token_bytes * layout.page_tokens / len(layout.groups)
    return math.ceil(exact / ALIGNMENT_BYTES) * ALIGNMENT_BYTES, kv_bytes


def _write(fd: int, record_bytes: int, count: int) -> list[tuple[int, float]]:
    """(records, seconds to write and fsync them) of each part of a file; random bytes, as some
    disks and file systems compress."""
    data = np.random.default_rng(3).bytes(record_bytes)
    parts = list[tuple[int, float]]()
    for part in np.array_split(range(count), SIZE.rounds):
        began = time.perf_counter()
        for index in map(int, part):
            # A record of its own each time: some file systems store equal ones once.
            done = os.pwrite(fd, index.to_bytes(8, "little") + data[8:], index * record_bytes)
            if done != record_bytes:
                raise OSError(errno.ENOSPC, f"{done} of {record_bytes} bytes were written")
        os.fsync(fd)
        parts.append((len(part), time.perf_counter() - began))
    return parts


def _open_past_the_cache(fd: int) -> tuple[int, str]:
    """The same file for reading, and in words what keeps the page cache out of it."""
    name = f"/proc/self/fd/{fd}"
    with suppress(OSError):  # not on every file system
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), DIRECT
    return os.open(name, os.O_RDONLY | os.O_CLOEXEC), FORGOTTEN


def _read(
    fd: int, record_bytes: int, count: int, run: int, how: str
) -> tuple[list[float], list[float]]:
    """Seconds of reads of `run` records, and of single ones, in random order."""
    order = random.Random(5)
    runs = list(range(count // run)) * math.ceil(SIZE.rounds * run / count)
    singles = order.sample(range(count), min(count, 8 * SIZE.rounds))
    order.shuffle(runs)
    with mmap.mmap(-1, run * record_bytes) as buffer:

        def read(first: int, records: int) -> float:
            offset, wanted = first * record_bytes, records * record_bytes
            if how == FORGOTTEN:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with memoryview(buffer) as whole, whole[:wanted] as part:
                began = time.perf_counter()
                done = os.preadv(fd, [part], offset)
                took = time.perf_counter() - began
            if done != wanted:
                raise OSError(errno.EIO, f"{done} of {wanted} bytes were read")
            return took

        read(0, run)  # the buffer's pages are there after this
        return [read(index * run, run) for index in runs], [read(index, 1) for index in singles]
