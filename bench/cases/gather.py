"""Fetching scattered pieces of 4 to 64 KiB from the pool, against a loop of memcpy in C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench import loops
from cxlkv.bench.cases.transfer import Mapped, append_all
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, pool_in_file, same_for_all
from cxlkv.bench.result import Result
from cxlkv.bench.streams import size_name
from cxlkv.pool import CXLPool


@dataclass(frozen=True)
class Size:
    """kv_bytes of K and V, of which each call fetches call_bytes; pages of 16, 64, 256 tokens."""

    kv_bytes: int = 256 << 20
    call_bytes: int = 16 << 20
    page_tokens: tuple[int, ...] = (16, 64, 256)
    rounds: int = 21


QUICK = Size(kv_bytes=128 << 20, rounds=9)


def run(result: Result, size: Size = Size()) -> None:
    """fetch_* and memcpy_* in GB/s, one thread, without CRC; ratio fetch_*_to_memcpy."""
    for page_tokens in size.page_tokens:
        one = Shape(layers=1, page_tokens=page_tokens, tokens=page_tokens)
        shape = replace(one, tokens=size.kv_bytes // one.layout.token_bytes)
        capacity = int(size.kv_bytes * 1.2) + (64 << 20)
        with pool_in_file(shape.layout, capacity, sketch=False, checksum=False, threads=1) as (
            pool,
            path,
        ):
            _measure(result, pool, path, shape, size)


def _measure(result: Result, pool: CXLPool, path: Path, shape: Shape, size: Size) -> None:
    sequence = append_all(pool, shape, shape.noise(1), shape.noise(2))
    batch = pool.batch([sequence])
    mapped = Mapped(pool, path, shape)
    ids = sequence.pages.astype(np.int64)
    pages = max(1, size.call_bytes // (2 * shape.kv_heads * mapped.piece_bytes))
    order = np.random.default_rng(3).permutation(len(ids))
    # The pages of each call, and where their pieces of K and of V lie.
    calls = []
    for first in range(0, len(ids) - pages + 1, pages):
        chosen = np.sort(order[first : first + pages]).astype(np.int32)
        picked = same_for_all(chosen, shape.kv_heads)
        calls.append((picked, mapped.offsets(ids[chosen], 0)))
    full = (1, shape.kv_heads, pages, shape.page_tokens, shape.head_dim)
    out = (np.empty(full, ml_dtypes.bfloat16), np.empty(full, ml_dtypes.bfloat16))
    flat = [array.view(np.uint8).reshape(-1) for array in out]

    def fetch_one(call: int) -> None:
        batch.fetch(0, calls[call][0], out=out)

    def memcpy_one(call: int) -> None:
        for offsets, to in zip(calls[call][1], flat, strict=True):
            loops.memory_gather_s(to, mapped.bytes, offsets, mapped.piece_bytes)

    def every(one: Callable[[int], None]) -> Callable[[], None]:
        def loop() -> None:
            for call in range(len(calls)):
                one(call)

        return loop

    name = size_name(mapped.piece_bytes)
    result.checks[f"fetch_{name}_right"] = all(
        _same(flat, fetch_one, memcpy_one, call) for call in (0, len(calls) - 1)
    )
    functions = {f"memcpy_{name}": every(memcpy_one), f"fetch_{name}": every(fetch_one)}
    total = len(calls) * sum(array.size for array in flat)
    speed = result.speeds(interleave(functions, size.rounds), total)
    result.ratios[f"fetch_{name}_to_memcpy"] = speed[f"fetch_{name}"] / speed[f"memcpy_{name}"]
    sequence.release()


def _same(
    flat: list[Bytes],
    fetch_one: Callable[[int], None],
    memcpy_one: Callable[[int], None],
    call: int,
) -> bool:
    fetch_one(call)
    got = [array.copy() for array in flat]
    for array in flat:
        array[:] = 0
    memcpy_one(call)
    return all(np.array_equal(a, b) for a, b in zip(got, flat, strict=True))
