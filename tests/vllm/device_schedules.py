"""schedules.py with blocks as vLLM lays them out on a device: the memory is the host's, the rest of
what a worker on a GPU does is as there, its threads too.

vLLM's own functions plan and cut the memory: layers, blocks, heads and tokens in any of its orders,
also where its kernels take shorter blocks than its tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from cxlkv import CXLPool
from cxlkv.adapters.vllm.device_attention import DeviceAttention
from cxlkv.sequence import Hit

from .schedules import (
    BLOCK,
    DIM,
    HEADS,
    Bits,
    Case,
    Engine,
    Layer,
    Rows,
    Runner,
    Running,
    States,
    Text,
    Worker,
    answer,
    rows_of,
    run,
)

BITS = {2: torch.int16, 4: torch.int32}


class DeviceCase(Case):
    """layout: as vLLM names it; kernel: tokens of its kernels' blocks; dtype: of K and V. parts:
    in which a step's tokens run beside each other."""

    layout: str
    kernel: int
    dtype: str
    parts: int


class DeviceRows(Rows):
    """In the place of the engine's attention on a device."""

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens = kv_cache.shape[2]
        blocks, places = slot_mapping // tokens, slot_mapping % tokens
        kv_cache[blocks, :, places] = torch.cat([key, value], -1)


class DeviceLayer(Layer):
    impl = DeviceRows()


class DeviceWorker(Worker):
    def _device_of(self, kv_caches: Mapping[str, torch.Tensor]) -> torch.device:
        return torch.device("cpu")


def bits_of(rows: npt.NDArray[np.float32], dtype: torch.dtype) -> Bits:
    return cast(Bits, torch.from_numpy(rows).to(dtype).view(BITS[dtype.itemsize]).numpy())


class DeviceRunner(Runner):
    worker: ClassVar[type[Worker]] = DeviceWorker

    def __init__(self, engine: DeviceEngine, made: KVCacheConfig):
        self._case, self._dtype = engine.own, engine.dtype
        super().__init__(engine.vllm_config, made, engine.windows)

    def allocated(self) -> dict[str, torch.Tensor]:
        layout = KVCacheLayout[self._case["layout"]]
        kernels = [self._case["kernel"]] * len(self.config.kv_cache_groups)
        found = allocate_kv_cache(self.config, torch.device("cpu"), layout, kernels)
        assert all(one.shape[2] == self._case["kernel"] for one in found.values())
        return dict(found)

    def poison(self, group: int, blocks: list[int]) -> None:
        ratio = BLOCK // self._case["kernel"]
        super().poison(group, [one * ratio + place for one in blocks for place in range(ratio)])

    def rows(self, states: States, layer: int) -> Bits:
        return bits_of(rows_of(states, layer), self._dtype)

    def halves(self, layer: int) -> list[Bits]:
        raw = self.caches[self.layers[layer]].view(BITS[self._dtype.itemsize]).numpy()
        return [raw[..., :DIM], raw[..., DIM:]]

    def _slots(
        self, own: Running, layer: int, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        blocks, places = super()._slots(own, layer, first, end)
        kernel = self._case["kernel"]
        return blocks * (BLOCK // kernel) + places // kernel, places % kernel


class DeviceEngine(Engine):
    def __post_init__(self) -> None:
        self.own = cast(DeviceCase, self.case)
        self.layout, self.dtype = self.own["layout"], getattr(torch, self.own["dtype"])
        super().__post_init__()

    def layers(self) -> dict[str, KVCacheSpec]:
        found = super().layers()
        of_model = self.vllm_config.compilation_config.static_forward_context
        of_model.update({name: DeviceLayer() for name in self.windows})
        self.vllm_config.model_config.dtype = self.dtype
        self.vllm_config.parallel_config.ubatch_size = self.own["parts"]
        return found

    def runner_of(self, made: KVCacheConfig) -> Runner:
        return DeviceRunner(self, made)

    def settle(self) -> None:
        for worker in self.runner.connector._workers:
            assert isinstance(worker, DeviceAttention)
            worker._saver.wait()

    def check_hit(self, pool: CXLPool, hit: Hit, text: Text, name: str) -> None:
        sequence, (shard, shards, *_) = pool.adopt(hit.handle), pool.layout.shard
        heads = slice(shard * HEADS // shards, (shard + 1) * HEADS // shards)
        for layer, window in enumerate(self.case["kinds"]):
            first = max(0, hit.tokens - window + 1) // BLOCK if window else 0
            count = hit.tokens // BLOCK - first
            shape = (count, HEADS // shards, BLOCK, DIM)
            keys, values = (torch.zeros(shape, dtype=self.dtype) for _ in range(2))
            where = (range(count), [0, count], [first])
            pool.batch([sequence]).fetch_blocks(layer, keys, values, *where)
            right = self.runner.rows(text.upto(first * BLOCK, hit.tokens), layer)[:, :, heads]
            for kind, half in enumerate((keys, values)):
                rows = half.view(BITS[self.dtype.itemsize]).transpose(1, 2).flatten(0, 1)
                assert np.array_equal(rows.numpy(), right[:, kind]), (name, layer)
        sequence.release()


if __name__ == "__main__":
    answer(partial(run, kind=DeviceEngine))
