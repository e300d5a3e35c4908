"""Pools of one layer, of any form, and what a test puts into them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup

ISAS = ("serial", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OneLayer:
    """latent: values are the first channels of the keys."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    value_dim: int = 16
    page: int = 16
    dtype: str = "float32"
    window: int | None = None
    latent: bool = False
    encoding: str = "none"

    @property
    def layout(self) -> KVLayout:
        group = LayerGroup(
            layers=1,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            value_head_dim=self.value_dim,
            dtype=self.dtype,
            window=self.window,
            values="key_prefix" if self.latent else "own",
        )
        layout = KVLayout.of([group], page_tokens=self.page)
        return layout if self.encoding == "none" else layout.encoded(self.encoding)

    def pool(self, threads: int = 2) -> CXLPool:
        return CXLPool.create("anonymous:", layout=self.layout, capacity="32MiB", threads=threads)

    def drawn(self, rng: np.random.Generator, *sizes: int) -> object:
        """Normal numbers of its dtype."""
        values = rng.standard_normal(sizes, np.float32)
        if self.dtype == "bfloat16":
            return pytest.importorskip("torch").from_numpy(values).bfloat16()
        return values.astype(self.dtype)


def doubles(array: object) -> Doubles:
    """Array of doubles, from numpy or torch."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64)
    return np.asarray(array.double().numpy())  # type: ignore[attr-defined]
