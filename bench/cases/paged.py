"""Whole blocks of an engine into pages of a pool and back, against memcpy by as many threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from cxlkv.arrays import Floats
from cxlkv.bench import loops
from cxlkv.bench.cases.memory import shared
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result
from cxlkv.pool import CXLPool

POOLS = {  # name: checksum, sketch
    "plain": (False, False),
    "crc": (True, False),
    "sketches": (True, True),
}


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """One layer of 256 MiB in a call, of 4 requests; the engine has twice as many blocks."""

    layers: int = 1
    kv_bytes: int = 256 << 20
    sequences: int = 4
    block_tokens: int = 32
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 15


def run(result: Result, size: Size = Size()) -> None:
    """append_* and fetch_* in GB/s of K and V, by pool (POOLS) and threads, and memcpy_* of the
    same bytes, to memory of the same kind; ratios *_to_memcpy."""
    capacity = int(size.kv_bytes * 1.3) + (64 << 20)
    for name, (checksum, sketch) in POOLS.items():
        for threads in size.threads:
            with pool_in_file(
                size.layout, capacity, checksum=checksum, sketch=sketch, threads=threads
            ) as (pool, path):
                _measure(result, pool, path, size, f"{name}_{threads}", threads)


def _measure(
    result: Result, pool: CXLPool, path: Path, size: Size, name: str, threads: int
) -> None:
    row = 2 * size.block_tokens * size.head_dim * 2  # bytes of K and V of a head
    wanted = size.kv_bytes // (row * size.kv_heads) // size.sequences * size.sequences
    shape = (2 * wanted, size.kv_heads, 2 * size.block_tokens, size.head_dim)
    rng = np.random.default_rng(7)
    engine = rng.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16)
    back = np.zeros_like(engine)
    table = rng.permutation(2 * wanted)[:wanted].astype(np.int32)
    starts = np.arange(0, wanted + 1, wanted // size.sequences, dtype=np.int32)
    batch = pool.batch([pool.sequence() for _ in range(size.sequences)])
    first = np.zeros(size.sequences, np.int32)

    def halves(cache: Floats) -> tuple[object, object]:
        return cache[:, :, : size.block_tokens], cache[:, :, size.block_tokens :]

    def append() -> None:
        batch.append_blocks(0, *halves(engine), table, starts)

    def append_again() -> None:
        for sequence in batch.sequences:
            sequence.truncate(0)
        append()

    def fetch() -> None:
        batch.fetch_blocks(0, *halves(back), table, starts, first)

    append()
    fetch()
    flat = engine.view(np.uint8).reshape(2 * wanted, -1)
    result.checks[f"{name}_right"] = np.array_equal(
        flat[table], back.view(np.uint8).reshape(2 * wanted, -1)[table]
    )
    ids = np.concatenate([s.pages for s in batch.sequences])
    places = pool.pages.places(ids, 0)
    assert places.values is not None
    runs = np.concatenate([places.keys, places.values]).astype(np.uint64)
    blocks = table.astype(np.uint64) * flat.shape[1]
    engine_bytes, back_bytes = (a.view(np.uint8).reshape(-1) for a in (engine, back))
    file = np.memmap(path, np.uint8, "r+")
    with shared(size.kv_bytes) as other, ThreadPoolExecutor(threads) as workers:
        # Into memory like the pool's: the pool's own pages stay what their CRCs say.
        functions: dict[str, Callable[[], object]] = {
            f"memcpy_append_{name}": loops.Gather(workers, threads, other, engine_bytes, blocks),
            f"append_{name}": append_again,
            f"memcpy_fetch_{name}": loops.Gather(workers, threads, back_bytes, file, runs),
            f"fetch_{name}": fetch,
        }
        speeds = result.speeds(interleave(functions, size.rounds), size.kv_bytes)
    for verb in ("append", "fetch"):
        ratio = speeds[f"{verb}_{name}"] / speeds[f"memcpy_{verb}_{name}"]
        result.ratios[f"{verb}_{name}_to_memcpy"] = ratio
    for sequence in batch.sequences:
        sequence.release()
