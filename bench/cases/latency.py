"""How long one load takes that depends on the last: by size of the region, idle and loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result

LOADS = {"read": "", "mixed": "2r1w_"}
"""What other threads do meanwhile, and what it is called: reads, or two of them to a store."""


@dataclass(frozen=True)
class Size:
    """Regions that lie in each cache and in memory; the last one is the one that is loaded.

    pace_ns: what streaming threads take for 4 KiB at least, 0: as fast as they go.
    """

    region_bytes: tuple[int, ...] = (16 << 10, 512 << 10, 8 << 20, 256 << 20)
    load_bytes: int = 256 << 20
    pace_ns: tuple[int, ...] = (4000, 1600, 800, 400, 200, 0)
    sample_s: float = 0.1
    rounds: int = 21


QUICK = Size(
    region_bytes=(16 << 10, 8 << 20, 128 << 20),
    load_bytes=128 << 20,
    pace_ns=(1600, 400, 0),
    sample_s=0.04,
    rounds=7,
)


def run(result: Result, size: Size = Size(), where: str | None = None) -> None:
    """idle_*_ns; loaded_*_ns with loaded_*_speed of the threads that stream meanwhile, and the same
    as loaded_2r1w_* with two reads to a store.

    where: a place whose memory it is (streams.memories()); without it also the matrix of nodes.
    """
    cpus = streams.allowed_cpus()
    result.notes.append(
        f"latency: loads in random order over all lines, huge pages where they are to be had, on "
        f"CPU {cpus[0]}"
    )
    sizes = [*size.region_bytes, size.load_bytes]
    with streams.memories(where, sizes, result.notes) as (*rings, load):
        for ring in rings:
            loops.memory_ring(ring, seed=1)
        streams.number(load)
        functions = {
            f"idle_{streams.size_name(ring.size)}": _chasing(result, Stream("chase", ring, cpus[0]))
            for ring in rings
        }
        if len(cpus) > 1:
            for (kind, tag), pace in product(LOADS.items(), size.pace_ns):
                much = f"{streams.PACED_BYTES / pace:.3g}_each" if pace else "full"
                others = streams.split(kind, load, cpus[1:], pace)
                chase = Stream("chase", rings[-1], cpus[0])
                functions[f"loaded_{tag}{much}"] = _chasing(result, chase, others)
        else:
            result.notes.append("latency: not measured loaded, this process has one CPU only")
        _take_turns(result, functions, size)
    if where is None:
        _matrix(result, size)
    if len(cpus) > 1 and size.pace_ns[-1] == 0:
        idle = result.metrics[f"idle_{streams.size_name(size.region_bytes[-1])}_ns"].median
        result.ratios["loaded_cost_to_idle"] = result.metrics["loaded_full_ns"].median / idle


Sampler = Callable[[float], tuple[float, float]]
"""Of seconds: nanoseconds a load, and GB/s of the other threads."""


def _chasing(result: Result, chase: Stream, load: Sequence[Stream] = ()) -> Sampler:
    def sample(seconds: float) -> tuple[float, float]:
        found = loops.memory_run([chase, *load], seconds)
        first_words = [0, *(int(one.memory.view("u8")[0]) for one in load)]
        right = [
            streams.sum_is_right(one, did, first)
            for one, did, first in zip([chase, *load], found, first_words, strict=True)
        ]
        before = result.checks.get("latency_sums_right", True)
        result.checks["latency_sums_right"] = before and all(right)
        return streams.ns_a_load(found[0]), streams.speed(found[1:])

    return sample


def _take_turns(result: Result, functions: dict[str, Sampler], size: Size) -> None:
    calls = {name: partial(function, size.sample_s) for name, function in functions.items()}
    for name, samples in interleave_reported(calls, size.rounds).items():
        result.measure(f"{name}_ns", [nanoseconds for nanoseconds, _ in samples], "ns")
        if name.startswith("loaded"):
            result.measure(f"{name}_speed", [speed for _, speed in samples], "GB/s")


def _matrix(result: Result, size: Size) -> None:
    """Every node's memory from every node's CPUs, where there are several."""
    region_bytes = size.region_bytes[-1]
    where = streams.places(region_bytes)
    for node in where.memory if where.several else ():
        with loops.memory_taken(region_bytes, node.node) as ring:
            loops.memory_ring(ring, seed=1)
            functions = {
                f"node{node.node}_from_node{near}": _chasing(result, Stream("chase", ring, cpus[0]))
                for near, cpus in where.cpus.items()
            }
            _take_turns(result, functions, size)
