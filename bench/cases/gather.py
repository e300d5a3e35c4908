"""Fetching scattered pieces of 4 to 64 KiB from the pool, against a loop of memcpy in C."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cxlkv.bench.cases.transfer import Fetches
from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result
from cxlkv.bench.streams import size_name


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
            pages = max(1, size.call_bytes // (one.layout.token_bytes * page_tokens))
            fetches = Fetches(pool, path, shape, pages)
            name = size_name(fetches.mapped.piece_bytes)
            fetches.measure(result, f"fetch_{name}", f"memcpy_{name}", size.rounds)
