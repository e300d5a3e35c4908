"""SGLang's storage path without a GPU and a model: its own controller, threads and host pools.

What is missing is what copies K and V between the GPU and the host pools; here tests write a host
pool's pages. All else is SGLang: its factory makes our backend, its controller hashes tokens, asks,
loads and stores, and its ranks agree over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cxlkv.arrays import Bytes

from . import imports  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.dsa import (
    DSAIndexerPoolHost,
    make_dsa_indexer_pool_decl,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE_TOKENS = 16
HOST_PAGES = 256
WAIT_S = 60
CLASS = {
    "backend_name": "cxlkv",
    "module_path": "cxlkv.adapters.sglang",
    "class_name": "CXLHiCache",
}


class Place(NamedTuple):
    """A rank's place in its engine."""

    rank: int = 0
    ranks: int = 1


ALONE = Place()


def device_pool(kind: str, page_tokens: int) -> KVCache:
    """SGLang's pool of the GPU, in the memory of the host; small, as nothing is in it."""
    tokens = 4 * page_tokens
    if kind == "mamba":
        return MHATokenToKVPool(tokens, page_tokens, torch.bfloat16, 1, 8, 1, "cpu", False)
    if kind == "mha":
        return MHATokenToKVPool(tokens, page_tokens, torch.bfloat16, 2, 128, 4, "cpu", False)
    if kind == "mla":
        return MLATokenToKVPool(tokens, page_tokens, torch.bfloat16, 512, 64, 4, "cpu", False)
    return DSATokenToKVPool(tokens, page_tokens, 512, torch.bfloat16, 64, 4, "cpu", 128, False, 576)


def host_pool(kind: str, layout: str, device: KVCache, page_tokens: int) -> HostKVCache:
    """SGLang's host pool for a pool of the GPU."""
    how = {
        "host_to_device_ratio": HOST_PAGES / 4,
        "host_size": 0,
        "page_size": page_tokens,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": 4 * page_tokens,
        "start_layer": 0,
        "end_layer": 3,
    }
    if kind == "mamba":
        return MHATokenToKVPoolHost(device._mha_buffer_info(), **{**how, "end_layer": 0})
    if kind == "mha":
        return MHATokenToKVPoolHost(device._mha_buffer_info(), **how)
    return MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=4, **how)


def state_pool() -> MambaPoolHost:
    """SGLang's host pool of states, 84 KiB each: those of two layers, in bf16 and float32."""
    temporal = torch.zeros((2, 4, 2, 64, 80), dtype=torch.float32)
    info = MambaStateBufferInfo(temporal=temporal, conv=(torch.zeros((2, 4, 256, 4)).bfloat16(),))
    how = {"device_capacity": 4, "pin_memory": False, "layout": "page_first"}
    return MambaPoolHost(info, 4.0, 0, **how)


def page_bytes(host: HostKVCache) -> int:
    page = host.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def write_pages(host: HostKVCache, indices: torch.Tensor, payloads: Sequence[Bytes]) -> None:
    """Write pages as the GPU would."""
    for begin, payload in zip(indices[:: host.page_size].tolist(), payloads, strict=True):
        page = host.get_dummy_flat_data_page()
        page.view(torch.uint8).copy_(torch.from_numpy(payload))
        host.set_from_flat_data_page(begin, page)


def read_pages(host: HostKVCache, indices: torch.Tensor) -> list[Bytes]:
    """Read pages as the GPU would."""
    begins = indices[:: host.page_size].tolist()
    pages = [host.get_data_page(begin).contiguous().view(torch.uint8) for begin in begins]
    return [page.numpy().copy() for page in pages]


class Engine:
    """One rank of an engine. kind: "mha", "mla", "dsa", which is MLA with an indexer beside it, or
    "mamba", which is MHA with states beside it.

    Texts are lists of token ids, whole pages of them.
    """

    def __init__(
        self,
        where: str,
        kind: str = "mha",
        layout: str = "page_first",
        *,
        model: str = "a",
        place: Place = ALONE,
        metrics: bool = False,
        zero_copy: bool = True,
        **extra: object,
    ):
        self.page_tokens = 64 if kind in ("dsa", "mamba") else PAGE_TOKENS
        ours = {"where": where, "capacity": "16MiB", "identity": model, **extra}
        settings = {**CLASS, "interface_v1": int(zero_copy), "cxlkv": ours}
        with in_place(place):
            self._make(kind, layout, model, settings, metrics)
        self.backend = self.controller.storage_backend

    def _make(
        self, kind: str, layout: str, model: str, settings: dict[str, object], metrics: bool
    ) -> None:
        device = device_pool(kind, self.page_tokens)
        self.host = host_pool(kind, layout, device, self.page_tokens)
        self.hosts = {"kv": self.host}
        entries = [PoolEntry(PoolName.KV, self.host, device, lambda layer: layer, True)]
        if kind == "dsa":
            indexer = DSAIndexerPoolHost(
                make_dsa_indexer_pool_decl(device), self.host, pin_memory=False
            )
            entries.append(PoolEntry(PoolName.INDEXER, indexer, device, lambda layer: layer))
            self.hosts["indexer"] = indexer
        if kind == "mamba":
            states = state_pool()
            entries.append(PoolEntry(PoolName.MAMBA, states, device, lambda layer: layer))
            self.hosts["mamba"] = states
        if not dist.is_initialized():
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        tokens = 4 * self.page_tokens
        self.controller = HybridCacheController(
            PagedTokenToKVPoolAllocator(
                tokens, self.page_tokens, torch.bfloat16, "cpu", device, False
            ),
            HostPoolGroup(entries),
            self.page_tokens,
            dist.group.WORLD,
            threading.Event(),
            io_backend="direct",
            model_name=model,
            storage_backend="dynamic",
            storage_backend_extra_config=settings,
            enable_storage_metrics=metrics,
        )

    def hashes(self, text: list[int]) -> list[str]:
        found: list[str] = get_storage_hash_str(text, None, page_size=self.page_tokens)
        return found

    def sides(self) -> list[PoolTransfer]:
        """What SGLang's radix cache adds to each operation for the pools beside K and V."""
        names = [name for name in self.hosts if name != "kv"]
        return [PoolTransfer(PoolName(name), indices_from_pool=PoolName.KV) for name in names]

    def save(
        self, text: list[int], payloads: dict[str, list[Bytes]], before: list[str] | None = None
    ) -> int:
        """Pages of each host pool, as the backup thread stores them; returns tokens that it says
        are stored. before: hashes that it passes, with "hicache_storage_pass_prefix_keys"."""
        indices = self.host.alloc(len(text))
        for name, host in self.hosts.items():
            write_pages(host, indices, payloads[name])
        sides = self.sides() or None
        self.controller.write_storage(indices, text, self.hashes(text), before, sides)
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.host.free(indices)
        return int(done.completed_tokens)

    def fetch(self, text: list[int]) -> tuple[int, dict[str, list[Bytes]]]:
        """Load as the prefetch threads do: tokens that are there, and pages of each host pool."""
        controller = self.controller
        sides = self.sides() or None
        handle = CacheRequestHandle("request", 0)
        controller.prefetch(handle, text, extra_pools=sides)
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        if operation.pool_transfers:
            controller._resolve_sidecar_kv_derived_pool_transfers(operation)
        controller.prefetch_buffer.put(operation)
        tokens = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.completed_req:
                break
            tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens
        indices = operation.host_indices
        found = {name: read_pages(host, indices[:tokens]) for name, host in self.hosts.items()}
        self.host.free(indices)
        return tokens, found

    def close(self) -> None:
        self.controller.detach_storage_backend()


@contextmanager
def in_place(place: Place) -> Iterator[None]:
    """Tell a process of SGLang's its rank; its pools and controllers read it when they are made."""
    ranks = {"tp_rank": place.rank, "tp_size": place.ranks}
    attention = {f"attn_{name}": value for name, value in ranks.items()}
    names = {"pp_size": 1, "attn_dcp_size": 1, "launch_world_size": 1, "nnodes": 1}
    rest = {"pp_rank": 0, "attn_dcp_rank": 0, **names}
    with get_parallel().override(**ranks, **attention, **rest):
        yield
