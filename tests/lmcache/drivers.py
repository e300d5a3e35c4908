"""CXLStorage for the suite of all stores, as LMCache's storage manager uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import ClassVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from cxlkv import ObjectPool
from cxlkv.adapters.lmcache.storage import CXLStorage
from cxlkv.arrays import Bytes
from cxlkv.prefix import PageKeys

from ..support.stores import CAPACITY
from .engines import OBJECT_BYTES, config_of, metadata_of
from .objects import DTYPE, SHAPE, foreign, key


class MemoryDriver:
    """The pool is LMCache's memory: chunks are written and read where they lie."""

    payload_bytes: ClassVar[int] = OBJECT_BYTES
    form: ClassVar[str] = "memory"

    def __init__(
        self, where: str, *, model: str = "a", salt: str = "", capacity: str = CAPACITY
    ) -> None:
        config = config_of(
            where, form=self.form, capacity=capacity, extra_config={"cxlkv.salt": salt}
        )
        role = "worker" if self.form == "memory" else "scheduler"
        about = metadata_of(role=role, model_name=model)
        self.model, self.storage = model, CXLStorage(config=config, metadata=about)

    @property
    def pool(self) -> ObjectPool:
        return self.storage.pool

    def chunks(self, names: Sequence[str]) -> list[CacheEngineKey]:
        """LMCache's keys: a chunk's hash is a number."""
        hashes = [blake2b(name.encode(), digest_size=8).digest() for name in names]
        return [key(int.from_bytes(one, "little"), self.model) for one in hashes]

    def keys(self, names: Sequence[str]) -> PageKeys:
        return self.storage._keys(self.chunks(names))

    def room(self) -> MemoryObj | None:
        """Memory of one chunk; None: there is none."""
        return self.storage.allocate(SHAPE, DTYPE, busy_loop=False)

    def store(self, names: Sequence[str], payloads: Sequence[Bytes]) -> list[bool]:
        objects: list[MemoryObj] = []
        for one in payloads:
            made = self.room()
            if made is None:
                break
            made.tensor.copy_(torch.from_numpy(one).view(DTYPE).reshape(SHAPE))
            objects.append(made)
        self.storage.batched_submit_put_task(self.chunks(names[: len(objects)]), objects)
        for made in objects:
            made.ref_count_down()
        self.storage.drain()
        return self.exists(names)

    def load(self, names: Sequence[str]) -> list[Bytes | None]:
        found: list[Bytes | None] = []
        for one in self.storage.batched_get_blocking(self.chunks(names)):
            found.append(one and one.tensor.reshape(-1).view(torch.uint8).numpy().copy())
            if one is not None:
                one.ref_count_down()
        return found

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self.storage.contains(one) for one in self.chunks(names)]

    def failures(self) -> Mapping[str, int]:
        return self.storage.counting.failures

    def close(self) -> None:
        self.storage.close()


class TierDriver(MemoryDriver):
    """Behind memory of LMCache's own, from which chunks are copied."""

    form: ClassVar[str] = "tier"

    def room(self) -> MemoryObj:
        return foreign(0)
