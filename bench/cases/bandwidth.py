"""How fast memory is read, written and both (2:1), by threads and by NUMA nodes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cxlkv.arrays import Bytes
from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result

KINDS = ("read", "write", "write_past", "mixed", "mixed_past")
X86_ONLY = ("write_past", "mixed_past")


@dataclass(frozen=True)
class Size:
    """All threads together work on `region_bytes`; threads 0: as many as there are CPUs."""

    region_bytes: int = 384 << 20
    threads: tuple[int, ...] = (1, 2, 4, 8, 0)
    sample_s: float = 0.1
    rounds: int = 21


QUICK = Size(region_bytes=192 << 20, threads=(1, 0), sample_s=0.03, rounds=7)


def kinds() -> tuple[str, ...]:
    """Those that this CPU has."""
    x86 = platform.machine() == "x86_64"
    return tuple(kind for kind in KINDS if x86 or kind not in X86_ONLY)


def run(result: Result, size: Size = Size(), where: str | None = None) -> None:
    """Metrics KIND_Nt in GB/s, as a program sees it: what a cache reads before it writes is not
    counted. `past`: by stores past the cache, others are plain.

    where: a place whose memory it is (streams.memories()); without it also the matrix of nodes.
    """
    cpus = streams.allowed_cpus()
    counts = sorted({count or len(cpus) for count in size.threads if count <= len(cpus)})
    result.notes.append(
        f"bandwidth: {size.region_bytes >> 20} MiB, each thread a part of its own, on CPUs "
        f"{', '.join(str(cpu) for cpu in cpus[: counts[-1]])}"
    )
    with streams.memories(where, [size.region_bytes], result.notes) as (memory,):
        functions = {
            f"{kind}_{count}t": Sampler(result, kind, memory, cpus[:count])
            for kind in kinds()
            for count in counts
        }
        take_turns(result, functions, size)
    if where is None:
        _matrix(result, size)
    for kind in kinds() if counts[-1] > 1 else ():
        one, most = (result.metrics[f"{kind}_{count}t"].median for count in (1, counts[-1]))
        result.ratios[f"{kind}_{counts[-1]}t_to_1t"] = most / one


class Sampler:
    """Streams of one kind on some CPUs, each over its own part of the memory."""

    def __init__(
        self, result: Result, kind: str, memory: Bytes, cpus: Sequence[int], tail: str = ""
    ):
        self.result, self.memory, self.cpus = result, memory, cpus
        self.kind, self.check = kind, f"{kind}{tail}_{len(cpus)}t_right"
        self.turn = 0

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

    def check_contents(self) -> None:
        """One more run, on memory whose words are known before it."""
        streams.number(self.memory)
        part_words = streams.parts(self.memory, len(self.cpus))[0].size // 8
        self.result.checks[self.check] = all(
            streams.sum_is_right(stream, did, index * part_words)
            and (self.kind == "read" or streams.contents_are_right(stream, did))
            for index, (stream, did) in enumerate(zip(*self.run(0.001), strict=True))
        )


def take_turns(result: Result, functions: dict[str, Sampler], size: Size) -> None:
    calls = {name: partial(sampler, size.sample_s) for name, sampler in functions.items()}
    for name, speeds in interleave_reported(calls, size.rounds).items():
        result.measure(name, speeds, "GB/s")
    for sampler in functions.values():
        sampler.check_contents()


def _matrix(result: Result, size: Size) -> None:
    """Reads of every node's memory by every node's CPUs, where there are several."""
    where = streams.places(size.region_bytes)
    for node in where.memory if where.several else ():
        with loops.memory_taken(size.region_bytes, node.node) as memory:
            tails = {near: f"_node{node.node}_from_node{near}" for near in where.cpus}
            functions = {
                f"read{tails[near]}": Sampler(result, "read", memory, cpus, tails[near])
                for near, cpus in where.cpus.items()
            }
            take_turns(result, functions, size)
