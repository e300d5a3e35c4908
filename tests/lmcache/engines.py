"""LMCache's engine over K and V of the host: connectors for CPU tensors, engines, their pools.

LMCache ships connectors for GPUs only, and a mock that moves nothing. These move the same bytes to
and from paged memory as its own for vLLM do, layer by layer where it wants that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemLayerwiseGPUConnector
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

from cxlkv.adapters.lmcache.storage import CXLStorage

LAYERS, HEADS, DIM, CHUNK = 4, 4, 32, 16
SLOTS = 256
OBJECT_BYTES = 2 * LAYERS * CHUNK * HEADS * DIM * 2

_names = count()


class Paged(GPUConnectorInterface):
    """K and V [2, slots, hidden] of each layer; a chunk is [2, layers, tokens, hidden]."""

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: object) -> None:
        slots = _slots(kwargs)[start:end]
        for layer, kept in enumerate(_kept(kwargs)):
            kept[:, slots] = memory_obj.tensor[:, layer]

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: object) -> None:
        slots = _slots(kwargs)[start:end]
        for layer, kept in enumerate(_kept(kwargs)):
            memory_obj.tensor[:, layer].copy_(kept[:, slots])

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: object,
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **kwargs)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: object,
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HEADS * DIM])


class PagedLayers(VLLMPagedMemLayerwiseGPUConnector):
    """The same, a layer at a time: [tokens, 2, hidden]."""

    def __init__(self) -> None:
        """Nothing of what a GPU needs."""

    def batched_to_gpu(
        self, starts: Sequence[int], ends: Sequence[int], **kwargs: object
    ) -> Generator[None, Sequence[MemoryObj], None]:
        for kept in _kept(kwargs):
            for one, start, end in zip((yield), starts, ends, strict=True):
                kept[:, _slots(kwargs)[start:end]] = one.tensor.swapaxes(0, 1)
        yield
        yield

    def batched_from_gpu(
        self,
        memory_objs: Sequence[Sequence[MemoryObj]],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: object,
    ) -> Generator[None, None, None]:
        for kept, objects in zip(_kept(kwargs), memory_objs, strict=True):
            for one, start, end in zip(objects, starts, ends, strict=True):
                one.tensor.copy_(kept[:, _slots(kwargs)[start:end]].swapaxes(0, 1))
            yield
        yield

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, 2, HEADS * DIM])


def _slots(kwargs: dict[str, object]) -> torch.Tensor:
    found = kwargs["slot_mapping"]
    assert isinstance(found, torch.Tensor)
    return found


def _kept(kwargs: dict[str, object]) -> list[torch.Tensor]:
    found = kwargs["kvcaches"]
    assert isinstance(found, list)
    return found


@dataclass
class Engine:
    """LMCache's engine, and K and V of a serving engine that is none: a slot for each token.

    said: what the requests' kv_transfer_params have for LMCache."""

    engine: LMCacheEngine
    name: str
    kept: list[torch.Tensor] = field(
        default_factory=lambda: [
            torch.zeros(2, SLOTS, HEADS * DIM, dtype=torch.bfloat16) for _ in range(LAYERS)
        ]
    )
    said: dict[str, object] = field(default_factory=dict)

    @property
    def storage(self) -> CXLStorage:
        backends = self.engine.storage_manager.storage_backends.values()
        return next(one for one in backends if isinstance(one, CXLStorage))

    def fill(self, seed: int) -> list[torch.Tensor]:
        """New K and V in all slots; a copy of them."""
        made = torch.Generator().manual_seed(seed)
        for layer in self.kept:
            layer.copy_(torch.randn(layer.shape, generator=made))
        return [layer.clone() for layer in self.kept]

    def clear(self) -> None:
        for layer in self.kept:
            layer.fill_(torch.nan)

    def check(self, was: list[torch.Tensor], tokens: list[int], count: int) -> None:
        """K and V of the first `count` tokens are what they were, and after clear() nothing else
        was written."""
        slots = self.slots(tokens)[:count]
        others = torch.ones(SLOTS, dtype=torch.bool)
        others[slots] = False
        for before, now in zip(was, self.kept, strict=True):
            assert torch.equal(before[:, slots], now[:, slots])
            assert now[:, others].isnan().all()

    def _where(self, tokens: list[int]) -> dict[str, object]:
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(5))
        slots = order[: len(tokens)]
        where = {"kvcaches": self.kept, "slot_mapping": slots, "sync": True}
        return {**where, "request_configs": self.said or None}

    def slots(self, tokens: list[int]) -> torch.Tensor:
        return _slots(self._where(tokens))

    def store(self, tokens: list[int]) -> None:
        """All of it is in the pool then."""
        if self.engine.use_layerwise:
            for _ in self.engine.store_layer(tokens, req_id="r", **self._where(tokens)):
                pass
        else:
            self.engine.store(tokens, req_id="r", **self._where(tokens))
        self.storage.drain()

    def retrieve(self, tokens: list[int], request: str = "r") -> int:
        """Tokens that were found."""
        where = self._where(tokens)
        if not self.engine.use_layerwise:
            return int(self.engine.retrieve(tokens, req_id=request, **where).sum())
        if not self.lookup(tokens, "none"):
            return 0  # else LMCache 0.5.6 ends at an UnboundLocalError of its own
        found = None
        for step in self.engine.retrieve_layer(tokens, req_id=request, **where):
            found = step if step is not None else found
        assert found is not None
        return int(found.sum())

    def lookup(self, tokens: list[int], request: str = "r", pin: bool = False) -> int:
        return int(self.engine.lookup(tokens, lookup_id=request, pin=pin))

    def run_pending(self) -> None:
        """What LMCache's loop has to do comes a step further."""
        loop = self.engine.storage_manager.loop
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), loop).result()

    def close(self) -> None:
        """A second time does nothing."""
        LMCacheEngineBuilder.destroy(self.name)
        self.engine.storage_manager.loop.close()  # it does not do this itself


def metadata_of(worker: int = 0, workers: int = 1, **changes: object) -> LMCacheMetadata:
    given: dict[str, object] = {
        "model_name": "m",
        "world_size": workers,
        "local_world_size": workers,
        "worker_id": worker,
        "local_worker_id": worker,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (LAYERS, 2, CHUNK, HEADS, DIM),
        "chunk_size": CHUNK,
        "role": "worker",
    }
    return LMCacheMetadata(**{**given, **changes})


def config_of(
    where: Path | str, *, form: str = "memory", capacity: str = "8MiB", **changes: object
) -> LMCacheEngineConfig:
    """form: "memory": the pool is LMCache's memory; "tier": behind memory of its own, which keeps
    what was read; "staged": behind memory that keeps nothing."""
    plugin = "LocalCPUBackend" if form == "memory" else "cxlkv"
    extra = changes.pop("extra_config", {})
    assert isinstance(extra, dict)
    given: dict[str, object] = {
        "chunk_size": CHUNK,
        "local_cpu": form == "tier",
        "max_local_cpu_size": 0.0 if form == "memory" else 0.01,
        "storage_plugins": [plugin],
        "extra_config": {
            f"storage_plugin.{plugin}.module_path": "cxlkv.adapters.lmcache",
            f"storage_plugin.{plugin}.class_name": "CXLStorage",
            "cxlkv.where": str(where),
            "cxlkv.capacity": capacity,
            "cxlkv.identity": "stated",
            **extra,
        },
    }
    return LMCacheEngineConfig.from_defaults(**{**given, **changes})


def make_engine(config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> Engine:
    name = f"engine{next(_names)}"
    connector = PagedLayers() if config.use_layerwise else Paged()
    made = LMCacheEngineBuilder.get_or_create(
        name, config, metadata, connector, lambda tensor, rank: None, lambda thing, rank: thing
    )
    made.post_init()
    return Engine(made, name)


def text(seed: int, tokens: int) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return [int(one) for one in torch.randint(0, 50000, (tokens,), generator=made)]
