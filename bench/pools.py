"""Pools that cases measure in: their shape, the numbers in them, and the files that they lie in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from cxlkv.arrays import Floats, Names, RecordBytes
from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool
from cxlkv.prefix import key_hashes, prefix_keys
from cxlkv.sequence import Sequence

if TYPE_CHECKING:  # it takes seconds to load, and not all who make pools have it
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """8 kv heads of 128 channels in bf16, pages of 16 tokens: what the Size of a case adds to. The
    noise is in bf16."""

    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    group: int = 4  # query heads of each kv head
    tokens: int = 32768
    dtype: str = "bfloat16"

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_tokens=self.page_tokens,
        )

    def noise(self, seed: int, tokens: int | None = None) -> Floats:
        """Gaussian K, or V, of one layer: [tokens, kv_heads, head_dim]."""
        shape = (self.tokens if tokens is None else tokens, self.kv_heads, self.head_dim)
        rng = np.random.default_rng(seed)
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


@contextmanager
def pool_in_file(
    layout: KVLayout,
    capacity: int,
    *,
    checksum: bool = True,
    sketch: bool = True,
    threads: int | None = None,
) -> Iterator[tuple[CXLPool, Path]]:
    """A pool in a file of /dev/shm, which others may map; both are gone when the block ends."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cxlkv-bench-") as folder:
        path = Path(folder) / "bench.pool"
        with CXLPool.create(
            path,
            layout=layout,
            capacity=capacity,
            checksum=checksum,
            sketch=sketch,
            threads=threads,
        ) as pool:
            yield pool, path


@contextmanager
def filled(shape: Shape, k: Floats | Tensor) -> Iterator[tuple[CXLPool, Sequence]]:
    """A pool whose layers all hold the keys k [tokens, kv_heads, head_dim], in the pages of two
    sequences that grow in turn; the first one is to be measured."""
    # Digests and sketches are up to 0.16 of the keys and values.
    capacity = int(shape.layout.token_bytes * shape.tokens * 2 * 1.18) + (256 << 20)
    with CXLPool.create(
        "anonymous:", layout=shape.layout, capacity=capacity, checksum=False, threads=1
    ) as pool:
        sequences = [pool.sequence() for _ in range(2)]
        for layer in range(shape.layers):
            for first in range(0, shape.tokens, shape.page_tokens):
                rows = k[first : first + shape.page_tokens]
                for sequence in sequences:
                    sequence.append(layer, rows, rows)
        yield pool, sequences[0]


def publish(pool: CXLPool, sequence: Sequence) -> Names:
    """Publishes a sequence's pages and lets go of it; their names [pages, 16]."""
    ids = np.arange(len(sequence))
    pool.publish_prefix(sequence, ids)
    sequence.release()
    hashes = key_hashes(prefix_keys(ids, pool.layout.page_tokens))
    return pool.records.names(hashes, 1).reshape(-1, 16)


def read_records(pool: CXLPool, names: Names) -> RecordBytes:
    """The whole records of published pages."""
    records = np.zeros((len(names), pool.records.shape[0]), np.uint8)
    codes = pool.records.read(*pool.records.find(names), records)
    if codes.any():
        raise RuntimeError(f"records that were just published are not to be had: {codes}")
    return records
