"""What software coherence costs: publish, acquire, calls, and the bare instructions, in mode fast.

All flushes and fences are really executed, on memory of this one host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool, KVLayout, Sequence, _core
from cxlkv.arrays import Bytes
from cxlkv.bench import loops
from cxlkv.bench.measure import Samples, interleave_reported
from cxlkv.bench.result import Result
from cxlkv.errors import StaleError
from cxlkv.machine.coherence import Host, parse_sharing

BATCH = 16
SIZE_NAMES = {64: "64_b", 16384: "16_kib", 2831360: "2_7_mib"}
# Beluga's table (arXiv 2511.20172): writes end with a fence, reads begin with one.
TABLE = {
    "store": "store",
    "store_write_back": "write_back",
    "store_invalidate": "invalidate",
    "store_evict": "evict",
    "stream": "stream",
    "read": "read",
    "read_invalidated": "read_invalidated",
    "read_evicted": "read_evicted",
}
# What is compared with what. An acquire as the pool does it pins first and looks at the descriptor
# once; an unpinned one looks at it before the copy and after it.
BARE = {"stream": ("publish",), "read_invalidated": ("acquire", "acquire_unpinned")}


@dataclass(frozen=True)
class Size:
    """Records of 16 KiB and of 2.7 MiB, the pages of a small and of a large model."""

    record_bytes: tuple[int, ...] = (16384, 2831360)
    table_bytes: tuple[int, ...] = (64, 16384, 2831360)
    memory_bytes: int = 256 << 20
    sample_bytes: int = 1 << 20  # what a sample copies at least, so that the clock costs nothing
    rounds: int = 41
    calls: int = 2000
    call_bytes: int = 64
    call_rounds: int = 21
    pool_bytes: int = 80 << 20  # for some 150,000 pages of the smallest kind
    pool_rounds: int = 11


QUICK = Size(
    record_bytes=(16384,),
    table_bytes=(),
    memory_bytes=64 << 20,
    rounds=9,
    calls=400,
    call_rounds=7,
    pool_bytes=16 << 20,
    pool_rounds=5,
)


def at_page(size: int) -> Bytes:
    """Memory that is there and begins at a page."""
    whole = np.ones(size + 4096, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + size]


class Timed:
    """Operations on records of one size, each call on the next ones."""

    def __init__(self, memory: Bytes, record_bytes: int, sample_bytes: int):
        rng = np.random.default_rng(record_bytes)
        self.memory = memory
        self.source = at_page(record_bytes)
        self.source[:] = rng.integers(0, 256, record_bytes, np.uint8)
        self.target = at_page(record_bytes)
        self.record_count = memory.size // (record_bytes + 128)
        self.sample_records = max(1, min(sample_bytes // record_bytes, 4096))
        self.next = 0

    def run(self, operation: str, batch: int = 1, checksum: bool = False) -> float:
        """Seconds a record."""
        reads = operation.startswith(("read", "acquire"))
        repeat = max(1, self.sample_records // batch)
        seconds = loops.coherence_time_s(
            operation,
            self.memory,
            self.target if reads else self.source,
            self.next,
            repeat,
            batch,
            checksum,
        )
        self.next += repeat * batch
        return seconds / (repeat * batch)

    def publish_all(self) -> None:
        """So that each record has a CRC and can be acquired."""
        args = (self.memory, self.source, 0, self.record_count)
        loops.coherence_time_s("publish", *args, checksum=True)


def run(result: Result, size: Size = Size()) -> None:
    """Metrics in us, ns and GB/s; ratios *_cost: time over the bare loop's of the same run."""
    memory = at_page(size.memory_bytes)
    result.notes.append(f"lines are written back by {loops.flush_name()}")
    for record_bytes in size.record_bytes:
        measure_records(result, memory, record_bytes, size)
    for record_bytes in size.table_bytes:
        measure_table(result, memory, record_bytes, size)
    measure_pairs(result, size)
    measure_pools(result, size)


def p99(samples: list[float] | npt.NDArray[np.uint64]) -> float:
    return float(np.percentile(samples, 99))


def measure_records(result: Result, memory: Bytes, record_bytes: int, size: Size) -> None:
    """Batches are of 16 records; the bare loops have one fence a batch, too."""
    timed = Timed(memory, record_bytes, size.sample_bytes)
    tail = "" if record_bytes == 16384 else f"_{SIZE_NAMES.get(record_bytes, record_bytes)}"
    samples: Samples = {}
    for bare, verbs in BARE.items():
        timed.publish_all()
        functions = {
            f"bare_{verbs[0]}": partial(timed.run, bare),
            f"bare_{verbs[0]}_batch": partial(timed.run, bare, BATCH),
            f"{verbs[0]}_crc": partial(timed.run, verbs[0], checksum=True),
        }
        for verb in verbs:
            functions[verb] = partial(timed.run, verb)
            functions[f"{verb}_batch"] = partial(timed.run, verb, BATCH)
        samples.update(interleave_reported(functions, size.rounds))
    timed.publish_all()
    samples.update(interleave_reported({"unpin": partial(timed.run, "unpin")}, size.rounds))
    result.checks[f"copy_is_what_was_published{tail}"] = np.array_equal(timed.source, timed.target)
    result.checks[f"next_generation_is_refused{tail}"] = is_refused(timed)
    median = result.times(samples, "us", f"{{}}{tail}_us")
    for verbs in BARE.values():
        bare = f"bare_{verbs[0]}"
        result.measure(f"{verbs[0]}{tail}_p99_us", [p99(samples[verbs[0]]) * 1e6], "us")
        result.ratios[f"{verbs[0]}_crc_cost{tail}"] = median[f"{verbs[0]}_crc"] / median[bare]
        for verb in verbs:
            result.ratios[f"{verb}_cost{tail}"] = median[verb] / median[bare]
            result.ratios[f"{verb}_batch_cost{tail}"] = (
                median[f"{verb}_batch"] / median[f"{bare}_batch"]
            )


def is_refused(timed: Timed) -> bool:
    try:
        loops.coherence_time_s("acquire", timed.memory, timed.target, 0, 1, generation=2)
    except StaleError:
        return True
    return False


def measure_table(result: Result, memory: Bytes, record_bytes: int, size: Size) -> None:
    """Each operation on one record at a time, as it is and as speed."""
    timed = Timed(memory, record_bytes, size.sample_bytes)
    functions = {name: partial(timed.run, operation) for name, operation in TABLE.items()}
    samples, name = interleave_reported(functions, size.rounds), SIZE_NAMES.get(record_bytes)
    result.times(samples, "ns", f"{{}}_{name or record_bytes}_ns")
    result.speeds(samples, record_bytes, f"{{}}_{name or record_bytes}_speed")


def measure_pairs(result: Result, size: Size) -> None:
    """Two threads on two cores: medians and p99 of each round, in turn for the modes."""
    nanoseconds = interleave_reported(
        {
            "rpc_round_trip": lambda: loops.coherence_calls_ns(
                "coherent", size.call_bytes, size.calls
            ),
            "rpc_flushed": lambda: loops.coherence_calls_ns("fast", size.call_bytes, size.calls),
            "visible": lambda: loops.coherence_visible_ns("fast", 16384, size.calls // 4),
        },
        size.call_rounds,
    )
    for name, rounds in nanoseconds.items():
        result.measure(f"{name}_us", [float(np.median(one)) / 1e3 for one in rounds], "us")
        result.measure(f"{name}_p99_us", [p99(one) / 1e3 for one in rounds], "us")


# Whose pages are 0.5 KiB: what is measured is the work for each page, not its bytes.
SMALLEST = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
# Sharing, certified, how many hosts.
POOLS = {
    "": ("software", False, 8),
    "_64_hosts": ("software", False, 64),
    "_fast": ("software", True, 8),
    "_host": ("host", False, 1),
}


def measure_pools(result: Result, size: Size) -> None:
    """Opening a pool whose pages are all published; releasing what other hosts may know, or read;
    a match() of what nobody has, when there is no news."""
    with TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-bench-") as folder:
        for name, (sharing, certified, hosts) in POOLS.items():
            path = f"{folder}/pool{name}"
            shared = parse_sharing(sharing, "host", hosts)
            owner, reader = (
                None if sharing == "host" else (number, certified, 2.0) for number in (0, 1)
            )
            handle = _core.pool_create(
                path, SMALLEST, True, False, shared, size.pool_bytes, False, owner
            )
            opened_s = reopen(path, CXLPool(handle, path), owner, size.pool_rounds)
            result.measure(f"reopen{name}_s_per_100k", opened_s, "s")
            if sharing == "host":
                continue
            with (
                CXLPool(_core.pool_open(path, owner), path) as own,
                CXLPool(_core.pool_open(path, reader), path) as other,
            ):
                for figure, samples in share(own, other, size.pool_rounds).items():
                    result.measure(f"{figure}{name}_us", samples, "us")


def keys_of(first: int, count: int) -> list[bytes]:
    return [(first + i).to_bytes(8, "little") for i in range(count)]


def filled(pool: CXLPool, pages: int) -> Sequence:
    rows = np.ones((pages * SMALLEST.page_tokens, 1, SMALLEST.head_dim), np.float32)
    sequence = pool.sequence()
    sequence.append(0, rows, rows)
    return sequence


def reopen(path: str, pool: CXLPool, host: Host | None, rounds: int) -> list[float]:
    """Seconds for 100,000 pages. A twentieth of them is left free."""
    pages = pool.stats()["pages_total"]
    for first in range(0, pages * 19 // 20, 1000):
        sequence = filled(pool, min(1000, pages * 19 // 20 - first))
        pool.publish(sequence, keys_of(first, len(sequence) // 4), SMALLEST.page_tokens)
        sequence.release()
    pool.close()
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        handle = _core.pool_open(path, host)
        samples.append((time.perf_counter() - began) / pages * 1e5)
        CXLPool(handle, path).close()
    return samples


def share(own: CXLPool, other: CXLPool, rounds: int) -> Samples:
    """Microseconds a page, and of a match; the pages are half of those that reopen() left free."""
    pages = own.stats()["pages_total"] // 40
    samples: Samples = {}

    def take(name: str, count: int, began: float) -> None:
        samples.setdefault(name, []).append((time.perf_counter() - began) / count * 1e6)

    for _ in range(rounds):
        sequence = filled(own, pages)
        handle = sequence.handle
        began = time.perf_counter()
        adopted = other.adopt(handle)
        take("adopt", pages, began)
        began = time.perf_counter()
        adopted.release()
        take("release_borrowed", pages, began)
        began = time.perf_counter()
        sequence.release()
        take("release_shown", pages, began)
        began = time.perf_counter()
        for _ in range(200):
            other.match([b"none"])
        take("match_no_news", 200, began)
    return samples
