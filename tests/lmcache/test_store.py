"""LMCache's plugin passes the suite of adapters that store whole blocks for an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from cxlkv.adapters.lmcache.storage import CXLStorage

from ..stores import StoreSuite
from .engines import config_of, metadata_of
from .objects import foreign, key, room, value


class Driver:
    """As LMCache's storage manager uses it: as its memory, or behind memory of its own."""

    def __init__(self, folder: Path, form: str):
        self.folder, self.form = folder, form
        self.storage = self._open()
        self.room = self.storage.pool.stats()["pages_total"]

    def again(self) -> None:
        self.storage.close()
        self.storage = self._open()

    def _open(self) -> CXLStorage:
        config = config_of(self.folder, form=self.form)
        about = metadata_of(role="worker" if self.form == "memory" else "scheduler")
        return CXLStorage(config=config, metadata=about)

    def store(self, blocks: Sequence[int]) -> bool:
        objects = []
        for block in blocks:
            one = room(self.storage) if self.form == "memory" else foreign(block)
            one.tensor.copy_(value(block))
            objects.append(one)
        self.storage.batched_submit_put_task([key(block) for block in blocks], objects)
        for one in objects:
            one.ref_count_down()
        self.storage.drain()
        return all(self.storage.contains(key(block)) for block in blocks)

    def load(self, blocks: Sequence[int]) -> list[bool]:
        found = self.storage.batched_get_blocking([key(block) for block in blocks])
        for block, one in zip(blocks, found, strict=True):
            if one is not None:
                assert torch.equal(one.tensor, value(block)), block
                one.ref_count_down()
        return [one is not None for one in found]

    def leading(self, blocks: Sequence[int]) -> int:
        return self.storage.batched_contains([key(block) for block in blocks])

    def bytes_of(self, block: int) -> bytes:
        return value(block).view(torch.uint8).reshape(-1)[1000:1064].numpy().tobytes()

    def failures(self) -> int:
        return self.storage.counting.failures.total()

    def close(self) -> None:
        self.storage.close()


class TestLMCache(StoreSuite):
    @pytest.fixture(params=["memory", "tier"])
    def driver(self, request: pytest.FixtureRequest, where: Path) -> Iterator[Driver]:
        made = Driver(where, request.param)
        yield made
        made.close()
