"""Plain memory: how long a load takes that depends on the last, how fast threads read, write and
copy, alone and beside each other."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result

KINDS = ("read", "write", "write_past", "mixed", "mixed_past")
X86_ONLY = ("write_past", "mixed_past")
LOADS = {"read": "", "mixed": "2r1w_"}
"""What other threads do while one waits for loads, and its name: reads, or two to a store."""


@dataclass(frozen=True)
class Size:
    """Rings of loads that lie in each cache and in memory, the last one beside other threads.

    All threads together work on `data_bytes`; threads 0: as many as there are CPUs. pace_ns: what
    streaming threads take for 4 KiB at least, 0: as fast as they go. block_bytes: of copies.
    """

    ring_bytes: tuple[int, ...] = (16 << 10, 512 << 10, 8 << 20, 256 << 20)
    data_bytes: int = 384 << 20
    pace_ns: tuple[int, ...] = (4000, 1600, 800, 400, 200, 0)
    threads: tuple[int, ...] = (1, 2, 4, 8, 0)
    block_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20)
    sample_s: float = 0.1
    rounds: int = 21


QUICK = Size(
    ring_bytes=(16 << 10, 8 << 20, 128 << 20),
    data_bytes=192 << 20,
    pace_ns=(1600, 400, 0),
    threads=(1, 0),
    block_bytes=(4 << 10, 1 << 20),
    sample_s=0.03,
    rounds=7,
)


@contextmanager
def shared(size_bytes: int) -> Iterator[Bytes]:
    """A file of /dev/shm, mapped, as a pool in memory is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-bench-") as folder:
        yield np.memmap(Path(folder) / "copied", np.uint8, "w+", shape=(size_bytes,))


def run(result: Result, size: Size = Size(), where: str | None = None) -> None:
    """idle_*_ns; loaded_*_ns with loaded_*_speed of the threads that stream meanwhile, and the same
    as loaded_2r1w_* with two reads to a store. KIND_Nt in GB/s by N threads, as a program sees it:
    what a cache reads before it writes is not counted; `past`: by stores past the cache. copy_* and
    copy_past_* in GB/s copied by one thread, in private memory and in a file of /dev/shm.

    where: a place whose memory it is (streams.memories()); without it also each node's memory from
    each node's CPUs.
    """
    cpus = streams.allowed_cpus()
    with streams.memories(where, [*size.ring_bytes, size.data_bytes], result.notes) as lent:
        *rings, data = lent
        latency(result, size, rings, data, cpus)
        bandwidth(result, size, data, cpus)
        with ExitStack() as stack:
            copied = {"private" if where is None else "place": data}
            if where is None:
                copied["shm"] = stack.enter_context(shared(size.data_bytes))
            copies(result, size, copied, cpus[0])
    if where is None:
        nodes(result, size)


# ---- latency ----

Sampler = Callable[[float], tuple[float, float]]
"""Sample for so many seconds: nanoseconds a load, and GB/s of the other threads."""


def latency(
    result: Result, size: Size, rings: Sequence[Bytes], data: Bytes, cpus: Sequence[int]
) -> None:
    result.notes.append(
        f"latency: loads in random order over all lines, huge pages where they are to be had, on "
        f"CPU {cpus[0]}"
    )
    for ring in rings:
        loops.memory_ring(ring, seed=1)
    streams.number(data)
    functions = {
        f"idle_{streams.size_name(ring.size)}": chasing(result, Stream("chase", ring, cpus[0]))
        for ring in rings
    }
    if len(cpus) == 1:
        result.notes.append("latency: not measured loaded, this process has one CPU only")
    for (kind, tag), pace in product(LOADS.items(), size.pace_ns) if len(cpus) > 1 else ():
        much = f"{streams.PACED_BYTES / pace:.3g}_each" if pace else "full"
        others = streams.split(kind, data, cpus[1:], pace)
        chase = Stream("chase", rings[-1], cpus[0])
        functions[f"loaded_{tag}{much}"] = chasing(result, chase, others)
    chase_in_turn(result, size, functions)
    if len(cpus) > 1 and size.pace_ns[-1] == 0:
        idle = result.metrics[f"idle_{streams.size_name(rings[-1].size)}_ns"].median
        result.ratios["loaded_cost_to_idle"] = result.metrics["loaded_full_ns"].median / idle


def chasing(result: Result, chase: Stream, load: Sequence[Stream] = ()) -> Sampler:
    def sample(seconds: float) -> tuple[float, float]:
        found = loops.memory_run([chase, *load], seconds)
        first_words = [0, *(int(one.memory.view("u8")[0]) for one in load)]
        right = map(streams.sum_is_right, [chase, *load], found, first_words)
        result.checks["latency_sums_right"] = all(right) and result.checks.get(
            "latency_sums_right", True
        )
        return streams.ns_a_load(found[0]), streams.speed(found[1:])

    return sample


def chase_in_turn(result: Result, size: Size, functions: dict[str, Sampler]) -> None:
    calls = {name: partial(function, size.sample_s) for name, function in functions.items()}
    for name, samples in interleave_reported(calls, size.rounds).items():
        result.measure(f"{name}_ns", [nanoseconds for nanoseconds, _ in samples], "ns")
        if name.startswith("loaded"):
            result.measure(f"{name}_speed", [speed for _, speed in samples], "GB/s")


# ---- bandwidth ----


def kinds() -> tuple[str, ...]:
    """Those that this CPU has."""
    x86 = platform.machine() == "x86_64"
    return tuple(kind for kind in KINDS if x86 or kind not in X86_ONLY)


def bandwidth(result: Result, size: Size, data: Bytes, cpus: Sequence[int]) -> None:
    counts = sorted({count or len(cpus) for count in size.threads if count <= len(cpus)})
    result.notes.append(
        f"bandwidth: {data.size >> 20} MiB, each thread a part of its own, on CPUs "
        f"{', '.join(str(cpu) for cpu in cpus[: counts[-1]])}"
    )
    stream_in_turn(
        result,
        size,
        {
            f"{kind}_{count}t": Streaming(kind, data, cpus[:count])
            for kind in kinds()
            for count in counts
        },
    )
    for kind in kinds() if counts[-1] > 1 else ():
        one, most = (result.metrics[f"{kind}_{count}t"].median for count in (1, counts[-1]))
        result.ratios[f"{kind}_{counts[-1]}t_to_1t"] = most / one


class Streaming:
    """Streams of one kind on some CPUs, each over its own part of the memory."""

    def __init__(self, kind: str, memory: Bytes, cpus: Sequence[int]):
        self.kind, self.memory, self.cpus, self.turn = kind, memory, cpus, 0

    def run(self, seconds: float) -> tuple[list[Stream], list[loops.Streamed]]:
        # What is written is new each time: else what an earlier stream wrote would pass for it.
        self.turn += 1
        running = [
            one._replace(first_word=(self.turn << 40) + (index << 32))
            for index, one in enumerate(streams.split(self.kind, self.memory, self.cpus))
        ]
        return running, loops.memory_run(running, seconds)

    def __call__(self, seconds: float) -> float:
        return streams.speed(self.run(seconds)[1])

    def is_right(self) -> bool:
        """By one more run, on memory whose words are known before it."""
        streams.number(self.memory)
        part_words = streams.parts(self.memory, len(self.cpus))[0].size // 8
        return all(
            streams.sum_is_right(stream, did, index * part_words)
            and (self.kind == "read" or streams.contents_are_right(stream, did))
            for index, (stream, did) in enumerate(zip(*self.run(0.001), strict=True))
        )


def stream_in_turn(result: Result, size: Size, functions: dict[str, Streaming]) -> None:
    calls = {name: partial(streaming, size.sample_s) for name, streaming in functions.items()}
    for name, speeds in interleave_reported(calls, size.rounds).items():
        result.measure(name, speeds, "GB/s")
    for name, streaming in functions.items():
        result.checks[f"{name}_right"] = streaming.is_right()


# ---- copies ----


def copies(result: Result, size: Size, memories: dict[str, Bytes], cpu: int) -> None:
    """By one thread, in each memory, in blocks, plainly and past the cache."""
    running = {}
    for place, memory in memories.items():
        streams.number(memory)
        for block, kind in product(size.block_bytes, ("copy", "copy_past")):
            name = f"{kind}_{place}_{streams.size_name(block)}"
            running[name] = Stream(kind, memory, cpu, block_bytes=block)
    calls = {
        name: partial(loops.memory_run, [stream], size.sample_s) for name, stream in running.items()
    }
    for name, found in interleave_reported(calls, size.rounds).items():
        result.measure(name, [streams.speed(did) for did in found], "GB/s")
    for name, stream in running.items():
        stream.memory[stream.memory.size // 2 :] = 0
        (did,) = loops.memory_run([stream], 0.001)
        result.checks[f"{name}_right"] = streams.contents_are_right(stream, did)
    for place, block in product(memories, size.block_bytes):
        tail = f"{place}_{streams.size_name(block)}"
        past, plain = (result.metrics[f"{kind}_{tail}"].median for kind in ("copy_past", "copy"))
        result.ratios[f"copy_past_to_copy_{tail}"] = past / plain


# ---- nodes ----


def nodes(result: Result, size: Size) -> None:
    """Loads and reads of every node's memory by every node's CPUs, where there are several."""
    where = streams.places(size.data_bytes)
    for node in where.memory if where.several else ():
        names = {near: f"node{node.node}_from_node{near}" for near in where.cpus}
        with loops.memory_taken(size.ring_bytes[-1], node.node) as ring:
            loops.memory_ring(ring, seed=1)
            chased = {
                names[near]: chasing(result, Stream("chase", ring, cpus[0]))
                for near, cpus in where.cpus.items()
            }
            chase_in_turn(result, size, chased)
        with loops.memory_taken(size.data_bytes, node.node) as memory:
            read = {
                f"read_{names[near]}": Streaming("read", memory, cpus)
                for near, cpus in where.cpus.items()
            }
            stream_in_turn(result, size, read)
