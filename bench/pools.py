"""Pools that cases measure in: their shape, the numbers in them, and the files that they lie in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cxlkv.layout import KVLayout
from cxlkv.pool import CXLPool

Elements = npt.NDArray[np.float32]  # numpy's types have no bfloat16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """8 kv heads of 128 channels in bf16, pages of 16 tokens: what the Size of a case adds to."""

    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    group: int = 4  # query heads of each kv head
    tokens: int = 32768

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
        )

    def noise(self, seed: int, tokens: int | None = None) -> Elements:
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
