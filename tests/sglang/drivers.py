"""CXLHiCache for the suite of all stores: made by SGLang's factory, over SGLang's host pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from cxlkv import ObjectPool
from cxlkv.arrays import Bytes
from cxlkv.prefix import PageKeys

from ..support.stores import CAPACITY
from .hicache import (
    ALONE,
    CLASS,
    PAGE_TOKENS,
    device_pool,
    host_pool,
    in_place,
    read_pages,
    write_pages,
)

# isort: split
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.storage import StorageBackendFactory

from cxlkv.adapters.sglang import CXLHiCache


def made(
    host: HostKVCache, ours: Mapping[str, object], *, zero_copy: int = 1, **words: object
) -> CXLHiCache:
    """Backend as SGLang's controller makes it. ours: settings; words: of SGLang's configuration."""
    given: dict[str, object] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": host.layout == "page_first",
        "model_name": "a",
        **words,
    }
    extra = {**CLASS, "interface_v1": zero_copy, "cxlkv": ours}
    config = HiCacheStorageConfig(**given, extra_config=extra)
    backend: CXLHiCache = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    return backend


class HiCacheDriver:
    """Pages of K and V of all heads in place, as SGLang's controller gives them."""

    payload_bytes: ClassVar[int] = 64 << 10
    kind: ClassVar[str] = "mha"
    layout: ClassVar[str] = "page_first"
    zero_copy: ClassVar[int] = 1

    def __init__(
        self, where: str, *, model: str = "a", salt: str = "", capacity: str = CAPACITY
    ) -> None:
        with in_place(ALONE):
            device = device_pool(self.kind, PAGE_TOKENS)
            self.host = host_pool(self.kind, self.layout, device, PAGE_TOKENS)
        self.backend = made(
            self.host,
            {"where": where, "capacity": capacity, "salt": salt, "identity": model},
            zero_copy=self.zero_copy,
            is_mla_model=self.kind == "mla",
            model_name=model,
        )
        self._pool: ObjectPool = self.backend.store.cache().pool
        self._keys = self.backend.store.cache().keys

    @property
    def pool(self) -> ObjectPool:
        return self._pool

    def keys(self, names: Sequence[str]) -> PageKeys:
        found: PageKeys = self._keys([f"{name}.0" for name in names])  # of the first rank
        return found

    def store(self, names: Sequence[str], payloads: Sequence[Bytes]) -> list[bool]:
        indices = self.host.alloc(len(names) * PAGE_TOKENS)
        write_pages(self.host, indices, payloads)
        found: list[bool] = self.set_pages(list(names), indices)
        self.host.free(indices)
        return found

    def load(self, names: Sequence[str]) -> list[Bytes | None]:
        indices = self.host.alloc(len(names) * PAGE_TOKENS)
        write_pages(self.host, indices, [self.nothing() for _ in names])
        good = self.get_pages(list(names), indices)
        pages = read_pages(self.host, indices)
        self.host.free(indices)
        return [page if right else None for page, right in zip(pages, good, strict=True)]

    def nothing(self) -> Bytes:
        return np.full(self.payload_bytes, 7, np.uint8)

    def set_pages(self, names: list[str], indices: torch.Tensor) -> list[bool]:
        found: list[bool] = self.backend.batch_set_v1(names, indices)
        return found

    def get_pages(self, names: list[str], indices: torch.Tensor) -> list[bool]:
        found: list[bool] = self.backend.batch_get_v1(names, indices)
        return found

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self.backend.exists(name) for name in names]

    def failures(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.backend.counting.failures
        return found

    def close(self) -> None:
        self.backend.close()


class LatentDriver(HiCacheDriver):
    """Rows of MLA, each layer's in a buffer of its own."""

    payload_bytes: ClassVar[int] = 16 * 576 * 2 * 4
    kind: ClassVar[str] = "mla"
    layout: ClassVar[str] = "layer_first"


class CopiesDriver(HiCacheDriver):
    """Copies of pages, as without "interface_v1"; SGLang hears whether all of a call are stored."""

    zero_copy: ClassVar[int] = 0

    def set_pages(self, names: list[str], indices: torch.Tensor) -> list[bool]:
        begins = indices[::PAGE_TOKENS]
        pages = [self.host.get_data_page(begin) for begin in begins]
        stored: bool = self.backend.batch_set(names, pages)
        return [True] * len(names) if stored else self.exists(names)

    def get_pages(self, names: list[str], indices: torch.Tensor) -> list[bool]:
        targets = [self.host.get_dummy_flat_data_page() for _ in names]
        pages = self.backend.batch_get(names, targets)
        for begin, page in zip(indices[::PAGE_TOKENS], pages, strict=True):
            if page is not None:
                self.host.set_from_flat_data_page(begin, page)
        return [page is not None for page in pages]
