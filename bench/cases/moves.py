"""How fast units move from the pool into the local tier, beside memcpy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Units
from cxlkv.bench import loops
from cxlkv.bench.cases.transfer import Mapped, append_all
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result
from cxlkv.pool import CXLPool
from cxlkv.tiers.local import LocalTier


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """256 MiB of K and V by default, in units of 64 KiB (8 kv heads, 128 channels, bf16)."""

    tokens: int = 8192
    batch_units: int = 256
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7


def run(result: Result, size: Size = Size()) -> None:
    """Metrics move_*, memcpy_* in GB/s, for each number of threads, with CRCs verified and without:
    the units go from the pool to slots, in random order, in batches.

    memcpy_runs copies the same bytes from the same addresses (in another mapping), run of K by run
    of V; memcpy_flat as many bytes in one piece, which memory likes best. Ratios move_*_to_memcpy
    are to the faster of the two, move_*_to_memcpy_runs to the first.
    """
    moved_bytes = size.layout.token_bytes * size.tokens
    capacity = int(moved_bytes * 1.2) + (64 << 20)
    for checksum in (True, False):
        with pool_in_file(size.layout, capacity, checksum=checksum, sketch=False) as (pool, path):
            _measure_moves(result, pool, path, size, checksum)
    result.ratios["move_to_memcpy"] = result.ratios["move_crc_1_to_memcpy"]
    result.notes.append(
        f"moves: {moved_bytes >> 20} MiB of K and V, {size.batch_units} units "
        "a call, from a pool in /dev/shm to private memory with huge pages where there are any"
    )


def _measure_moves(result: Result, pool: CXLPool, path: Path, size: Size, checksum: bool) -> None:
    sequence = append_all(pool, size, size.noise(1), size.noise(2))
    ids = sequence.pages.astype(np.int64)
    units = (ids[:, None] * size.layers + np.arange(size.layers)).ravel()
    units = np.random.default_rng(4).permutation(units)
    total = pool.layout.token_bytes * size.tokens
    mapped = Mapped(pool, path)
    offsets = _offsets(mapped, units, size.layers)
    name = "crc" if checksum else "plain"
    # This process's own memory, got and touched as a local tier's is.
    with LocalTier(pool, total) as tier, loops.memory_taken(total) as local:
        for threads in size.threads:
            pool.set_threads(threads)

            def promote() -> None:
                for first in range(0, len(units), size.batch_units):
                    tier.promote(units[first : first + size.batch_units])

            def move() -> None:
                promote()
                tier.demote(units)

            part = total // threads
            firsts = np.arange(threads, dtype=np.uint64) * part
            with ThreadPoolExecutor(threads) as workers:
                flat = loops.Gather(workers, threads, local, mapped.bytes, firsts, part)
                runs = loops.Gather(workers, threads, local, mapped.bytes, offsets)
                functions: dict[str, Callable[[], object]]
                functions = {"move": move, "memcpy_flat": flat, "memcpy_runs": runs}
                samples = interleave(functions, size.rounds)
            speed = result.speeds(samples, total, f"{{}}_{name}_{threads}")
            best = max(speed["memcpy_flat"], speed["memcpy_runs"])
            result.ratios[f"move_{name}_{threads}_to_memcpy"] = speed["move"] / best
            to_runs = speed["move"] / speed["memcpy_runs"]
            result.ratios[f"move_{name}_{threads}_to_memcpy_runs"] = to_runs
            promote()
            stats = tier.stats()
            result.checks[f"move_{name}_{threads}_all"] = stats["slots_held"] == len(units)
            tier.demote(units)
    sequence.release()


def _offsets(mapped: Mapped, units: Units, layers: int) -> npt.NDArray[np.uint64]:
    """Offsets of the runs of K and V of each unit, one unit behind the other."""
    found = np.zeros((len(units), 2), np.uint64)
    pages, rows = np.divmod(units, layers)
    for layer in range(layers):
        here = rows == layer
        found[here] = np.stack(mapped.runs(pages[here].astype(np.uint32), layer), axis=1)
    return found.ravel()
