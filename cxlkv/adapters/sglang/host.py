"""SGLang's host memory: how large its pages are, where they lie, and of which shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from cxlkv.adapters.sglang.names import Config, suffixes_of
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.objects import Buffers

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_first_kv_split")


class Memory(Protocol):
    """What is read of SGLang's HostKVCache."""

    layout: str
    page_size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]: ...

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor, split_factor: int
    ) -> tuple[list[int], list[int]]: ...

    def get_dummy_flat_data_page(self) -> torch.Tensor: ...


class HostMemory:
    """The engine's host memory: where its pages are, and of which shape."""

    def __init__(self, pool: Memory, config: Config):
        self._pool, self._config = pool, config
        self.layout = pool.layout
        if self.layout not in LAYOUTS or getattr(pool, "kv_buffer", None) is None:
            raise UnsupportedError(
                f"cxlkv: --hicache-mem-layout {self.layout} of {type(pool).__name__}: one of "
                f"{', '.join(LAYOUTS)} is served, in memory of its own"
            )
        logical = getattr(pool, "logical_page_size", None)
        self.page_tokens = int(logical or pool.page_size)
        try:
            _, sizes = self._meta(torch.arange(self.page_tokens))
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise UnsupportedError(
                f"cxlkv: {type(pool).__name__} with --hicache-mem-layout {self.layout} cannot say "
                f"where its pages lie: {error}"
            ) from error
        self.page_bytes = sum(sizes)

    def words(self) -> dict[str, object]:
        names = (
            "layer_num",
            "start_layer",
            "end_layer",
            "head_num",
            "head_dim",
            "v_head_dim",
            "kv_cache_dim",
            "storage_format_tag",
        )
        return {
            "memory": [type(self._pool).__name__, self.layout],
            "dtype": str(getattr(self._pool, "dtype", None)),
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            **{name: getattr(self._pool, name, None) for name in names},
        }

    def _meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self._config.should_split_heads:
            parts = (self._config.tp_lcm_size or 1) // self._config.tp_size
            return self._pool.get_split_heads_page_buffer_meta(indices, parts)
        return self._pool.get_page_buffer_meta(indices)

    def buffers(self, indices: torch.Tensor, pages: int) -> Buffers:
        """Of the objects of these pages."""
        addresses, sizes = self._meta(indices)
        objects = pages * len(suffixes_of(self._config))
        if not objects or len(addresses) % objects:
            raise BadArgumentError(f"{len(addresses)} buffers of {pages} pages")
        starts = np.arange(0, len(addresses) + 1, len(addresses) // objects)
        return Buffers(np.array(addresses, np.uint64), np.array(sizes, np.uint64), starts)

    def flat_pages(self, given: object, count: int) -> list[torch.Tensor]:
        """What flat pages are copied to: the caller's, or new ones."""
        if isinstance(given, Sequence) and len(given) == count:
            return list(given)
        return [self._pool.get_dummy_flat_data_page() for _ in range(count)]
