"""An object cache, as SGLang's store uses it: the suite of all stores, without the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from cxlkv import Buffers, CXLPool, KVLayout
from cxlkv.adapters.common import pools
from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.common.metrics import Counting
from cxlkv.adapters.common.object_cache import COUNTS, KINDS, ObjectCache
from cxlkv.prefix import PageKeys

from ...support.stores import CAPACITY, Payload, StoreSuite

SIZE = 96 << 10


class ObjectCacheDriver:
    """Payloads of four buffers each, by their addresses."""

    payload_bytes: ClassVar[int] = SIZE

    def __init__(
        self, where: str, *, model: str = "a", salt: str = "", capacity: str = CAPACITY
    ) -> None:
        path = pools.path_for(where, f"{model}.pool")
        layout = KVLayout.objects(self.payload_bytes)
        pool, _ = pools.make_or_open(path, layout, capacity)
        self.counting = Counting(COUNTS, KINDS)
        space = namespace({"model": model, "salt": salt})
        self.cache = ObjectCache(pool, space, self.payload_bytes, self.counting)

    @property
    def pool(self) -> CXLPool:
        return self.cache.pool

    def keys(self, names: Sequence[str]) -> PageKeys:
        return self.cache.keys(names)

    def buffers(self, memory: Sequence[Payload]) -> Buffers:
        quarter = self.payload_bytes // 4
        begins = np.array([one.ctypes.data for one in memory], np.uint64)
        addresses = begins[:, None] + np.arange(4, dtype=np.uint64) * np.uint64(quarter)
        sizes = np.full(addresses.size, quarter, np.uint64)
        return Buffers(addresses.reshape(-1), sizes, np.arange(0, addresses.size + 1, 4))

    def store(self, names: Sequence[str], payloads: Sequence[Payload]) -> list[bool]:
        found: list[bool] = self.cache.store(names, self.buffers(payloads)).tolist()
        return found

    def load(self, names: Sequence[str]) -> list[Payload | None]:
        memory = [np.full(self.payload_bytes, 7, np.uint8) for _ in names]
        good = self.cache.load(names, self.buffers(memory))
        return [one if right else None for one, right in zip(memory, good, strict=True)]

    def exists(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = self.cache.present(names).tolist()
        return found

    def failures(self) -> Mapping[str, int]:
        return self.counting.failures

    def close(self) -> None:
        self.cache.close()


class TestObjectCache(StoreSuite):
    driver = ObjectCacheDriver
