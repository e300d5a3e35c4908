"""`cxlkv tune --profile NAME`: this machine's memory as a profile for emulation."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result
from cxlkv.emulation.profiles import Profile
from cxlkv.machine.topology import probe


@dataclass(frozen=True)
class Size:
    """Memory for each kind of loop, larger than caches are; pace_ns: what 4 KiB take at least."""

    bytes: int = 256 << 20
    pace_ns: tuple[int, ...] = (4000, 1600, 800, 400, 200)
    sample_s: float = 0.1
    rounds: int = 7


SIZE = Size()  # a name, so that tests can make it small


def run(result: Result) -> Profile:
    """Idle latency by one chain of loads, bandwidth of all threads reading, writing (past the
    cache where the CPU can) and doing two reads for a write, and latency while the others read.

    Medians of alternating rounds. A process with one CPU has no loaded curve.
    """
    cpus = streams.allowed_cpus()
    past = "_past" if probe().cpu.architecture == "x86_64" else ""
    kinds = {"read": "read", "write": f"write{past}", "mixed": f"mixed{past}"}
    paces = SIZE.pace_ns if len(cpus) > 1 else ()
    with ExitStack() as stack:
        ring, memory = (stack.enter_context(loops.memory_taken(SIZE.bytes)) for _ in range(2))
        loops.memory_ring(ring, seed=1)
        chase = Stream("chase", ring, cpus[0])
        running = {
            "idle": [chase],
            **{name: streams.split(kind, memory, cpus) for name, kind in kinds.items()},
            **{
                f"loaded_{pace}": [chase, *streams.split("read", memory, cpus[1:], pace)]
                for pace in paces
            },
        }
        calls = {
            name: partial(loops.memory_run, some, SIZE.sample_s) for name, some in running.items()
        }
        found = interleave_reported(calls, SIZE.rounds)
    chases = [found["idle"], *(found[f"loaded_{pace}"] for pace in paces)]
    result.checks["latency_sums_right"] = all(
        streams.sum_is_right(chase, did[0], 0) for samples in chases for did in samples
    )
    medians = {
        name: result.measure(name, [streams.speed(did) for did in found[name]], "GB/s").median
        for name in kinds
    }
    latency_ns = result.measure(
        "latency", [streams.ns_a_load(did[0]) for did in found["idle"]], "ns"
    ).median
    loaded = [
        [(streams.speed(did[1:]), streams.ns_a_load(did[0])) for did in samples]
        for samples in chases[1:]
    ]
    return Profile(
        what=f"memory of this process, {len(cpus)} threads, {probe().cpu.model or 'CPU not known'}",
        source="cxlkv tune --profile",
        standing="measured",
        latency_ns=latency_ns,
        read_gb_per_s=medians["read"],
        write_gb_per_s=medians["write"],
        mixed_gb_per_s=medians["mixed"],
        loaded=curve(latency_ns, loaded, max(medians.values())),
    )


def curve(
    idle_ns: float, samples: list[list[tuple[float, float]]], most: float
) -> tuple[tuple[float, float], ...]:
    """Points of rising load and latency: medians of each pace; what noise puts out of order, or
    above what the link gives, is left out."""
    points = sorted(
        (statistics.median(load for load, _ in one), statistics.median(ns for _, ns in one))
        for one in samples
    )
    found: list[tuple[float, float]] = []
    for load, latency in points:
        last, before = found[-1] if found else (0.0, idle_ns)
        if last < load <= most and latency >= before:
            found.append((load, latency))
    return tuple(found)
