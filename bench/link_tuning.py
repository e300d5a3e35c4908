"""`cxlkv tune --profile NAME`: this machine's memory as a profile for emulation."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv._core import Stream, Streamed
from cxlkv.bench.report import Result
from cxlkv.emulation.profiles import Profile
from cxlkv.topology import probe

BLOCK_BYTES = 4096
UNIT_BYTES = 6 * 4096  # of a part, so that its thirds are whole pages


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
    cpus = sorted(os.sched_getaffinity(0))
    past = "_past" if probe().cpu.architecture == "x86_64" else ""
    kinds = {"read": "read", "write": f"write{past}", "mixed": f"mixed{past}"}
    paces = SIZE.pace_ns if len(cpus) > 1 else ()
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    idle_ns: list[float] = []
    loaded: dict[int, list[tuple[float, float]]] = {pace: [] for pace in paces}
    with ExitStack() as stack:
        ring, memory = (stack.enter_context(_core.memory_taken(SIZE.bytes)) for _ in range(2))
        _core.memory_ring(ring, seed=1)
        chase = Stream("chase", ring, cpus[0])
        for _ in range(SIZE.rounds):
            (idle,) = _core.memory_run([chase], SIZE.sample_s)
            idle_ns.append(1e9 * idle.seconds / idle.steps)
            for name, kind in kinds.items():
                found = _core.memory_run(loops(kind, memory, cpus), SIZE.sample_s)
                speeds[name].append(gb_per_s(found))
            for pace in paces:
                load = [
                    one._replace(block_bytes=BLOCK_BYTES, pace_ns=pace)
                    for one in loops("read", memory, cpus[1:])
                ]
                chased, *others = _core.memory_run([chase, *load], SIZE.sample_s)
                point = gb_per_s(others), 1e9 * chased.seconds / chased.steps
                loaded[pace].append(point)
    medians = {
        name: result.measure(name, samples, "GB/s").median for name, samples in speeds.items()
    }
    latency_ns = result.measure("latency", idle_ns, "ns").median
    result.checks["measured"] = True
    return Profile(
        what=f"memory of this process, {len(cpus)} threads, {probe().cpu.model or 'CPU not known'}",
        source="cxlkv tune --profile",
        standing="measured",
        latency_ns=latency_ns,
        read_gb_per_s=medians["read"],
        write_gb_per_s=medians["write"],
        mixed_gb_per_s=medians["mixed"],
        loaded=curve(latency_ns, list(loaded.values()), max(medians.values())),
    )


def loops(kind: str, memory: npt.NDArray[np.uint8], cpus: Sequence[int]) -> list[Stream]:
    """One on each CPU, each over a part of its own."""
    each = memory.size // len(cpus) // UNIT_BYTES * UNIT_BYTES
    return [Stream(kind, memory[i * each : (i + 1) * each], cpu) for i, cpu in enumerate(cpus)]


def gb_per_s(found: Sequence[Streamed]) -> float:
    """Of loops that ran at once."""
    return sum(one.moved_bytes / one.seconds for one in found) / 1e9


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
