"""What compressors make of a cache's records: whole, by byte planes, and the top bytes alone.

    python bench/spikes/compress.py          wants zstandard, lz4 and transformers

Of decision 0019; speeds are of one thread, in GB/s of the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import lz4.block
import numpy as np
import zstandard

from cxlkv.bench.cases.packing import DTYPES, Size, named_sources, records_of
from cxlkv.tiers.cold_file import Bytes

ZSTD = {f"zstd {level}": zstandard.ZstdCompressor(level=level).compress for level in (-1, 1, 3, 9)}
COMPRESSORS: dict[str, Callable[[memoryview], bytes]] = {**ZSTD, "lz4": lz4.block.compress}


def whole(record: Bytes) -> tuple[Bytes, int]:
    return record, 0


def planes(record: Bytes) -> tuple[Bytes, int]:
    return np.concatenate([record[::2], record[1::2]]), 0


def top(record: Bytes) -> tuple[Bytes, int]:
    return np.ascontiguousarray(record[1::2]), record.nbytes // 2


def main() -> None:
    size = Size()
    for name, layers in named_sources(size).items():
        for dtype in DTYPES:
            records, _ = records_of(layers, dtype, size)
            for form in (whole, planes, top):
                given = [form(record) for record in records]
                row = []
                for label, compress in COMPRESSORS.items():
                    began = time.perf_counter()
                    kept = sum(len(compress(part.data)) + rest for part, rest in given)
                    speed = records.nbytes / (time.perf_counter() - began) / 1e9
                    row.append(f"{label} {kept / records.nbytes:.3f} ({speed:.2f})")
                print(f"{name} {dtype} {form.__name__}: {', '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
