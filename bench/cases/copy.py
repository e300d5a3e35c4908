"""How fast bytes are copied in memory as a pool has it, in blocks, plainly and past the cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench import loops, streams
from cxlkv.bench.loops import Stream
from cxlkv.bench.measure import interleave_reported
from cxlkv.bench.result import Result


@dataclass(frozen=True)
class Size:
    region_bytes: int = 256 << 20
    block_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20)
    sample_s: float = 0.1
    rounds: int = 21


QUICK = Size(region_bytes=128 << 20, block_bytes=(4 << 10, 1 << 20), sample_s=0.02, rounds=6)


@contextmanager
def shared(size_bytes: int) -> Iterator[Bytes]:
    """A file of /dev/shm, mapped, as a pool in memory is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-bench-") as folder:
        yield np.memmap(Path(folder) / "copied", np.uint8, "w+", shape=(size_bytes,))


def run(result: Result, size: Size = Size()) -> None:
    """In GB/s copied, one thread: private memory in huge pages, and a file in /dev/shm."""
    cpu = streams.allowed_cpus()[0]
    with loops.memory_taken(size.region_bytes) as private, shared(size.region_bytes) as file:
        running = {}
        for place, memory in (("private", private), ("shm", file)):
            streams.number(memory)
            for block in size.block_bytes:
                for kind in ("copy", "copy_past"):
                    name = f"{kind}_{place}_{streams.size_name(block)}"
                    running[name] = Stream(kind, memory, cpu, block_bytes=block)
        calls = {
            name: partial(loops.memory_run, [stream], size.sample_s)
            for name, stream in running.items()
        }
        for name, found in interleave_reported(calls, size.rounds).items():
            speeds = [streams.speed(did) for did in found]
            result.measure(name, speeds, "GB/s")
        for name, stream in running.items():
            memory = stream.memory
            memory[memory.size // 2 :] = 0
            (did,) = loops.memory_run([stream], 0.001)
            result.checks[f"{name}_right"] = streams.contents_are_right(stream, did)
    for place in ("private", "shm"):
        for tail in (f"{place}_{streams.size_name(block)}" for block in size.block_bytes):
            past, plain = (
                result.metrics[f"{kind}_{tail}"].median for kind in ("copy_past", "copy")
            )
            result.ratios[f"copy_past_to_copy_{tail}"] = past / plain
