"""SGLang's own unified radix tree with states, host pools and our backend, in a process of its own.

    python -m tests.sglang.tree FOLDER TEXTS

Its arguments are the whole process's, hence that. What is missing is a GPU: its pools are in the
memory of the host, where two functions here copy what a GPU's kernels would. Each text has three
nodes with a state each, and is backed up as it comes; then all goes from the GPU, the first ones
from the host, too, and eight of them are fetched. Printed is how many of their tokens the tree
found in the host before and after that; all bytes that came back are compared.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Iterator

import numpy as np

from .hicache import ALONE, CLASS, WAIT_S, in_place

# isort: split
import torch
import torch.distributed as dist
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE_TOKENS, PAGES = 64, 3
ATTENTION, STATES = [1, 3], [0, 2]  # layers
FETCHED = 8


def back_up(self: MHATokenToKVPoolHost, _: object, host: object, device: object, how: str) -> None:
    for layer, (keys, values) in enumerate(
        zip(self.device_k_buffers, self.device_v_buffers, strict=True)
    ):
        self.k_buffer[host, layer], self.v_buffer[host, layer] = keys[device], values[device]


def back_up_states(self: MambaPoolHost, _: object, host: object, device: object, how: str) -> None:
    for layer, own in enumerate(self.temporal_device_layers):
        self.temporal_buffer[host, layer, 0] = own[device]
        for kept, layers in zip(self.conv_buffer, self.conv_device_layers, strict=True):
            kept[host, layer, 0] = layers[layer][device]


def without_gpu() -> None:
    MHATokenToKVPoolHost.backup_from_device_all_layer = back_up
    MambaPoolHost.backup_from_device_all_layer = back_up_states
    common._cuda_host_register = lambda *_: None  # no GPU reads this memory


def arguments(folder: str) -> ServerArgs:
    ours = {"where": folder, "capacity": "64MiB", "identity": "a"}
    extra = {**CLASS, "interface_v1": 1, "cxlkv": ours, "prefetch_threshold": PAGE_TOKENS}
    made = ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=PAGE_TOKENS,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_size=0,
        hicache_mem_layout="page_first",
        hicache_io_backend="kernel",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
    )
    made._mamba_cache_chunk_size = PAGE_TOKENS
    return made


class Tree:
    def __init__(self, given: ServerArgs):
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=64,
            n_groups=1,
            num_heads=2,
            head_dim=16,
            state_size=16,
            conv_kernel=4,
        )
        here = {"device": "cpu", "enable_memory_saver": False}
        requests = HybridReqToTokenPool(
            size=4,
            mamba_size=8,
            mamba_spec_state_size=4,
            max_context_len=1024,
            cache_params=Mamba2CacheParams(shape=shape, layers=STATES),
            mamba_layer_ids=STATES,
            enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=3,
            **here,
        )
        device = HybridLinearKVPool(
            size=1024,
            dtype=torch.bfloat16,
            page_size=PAGE_TOKENS,
            head_num=1,
            head_dim=8,
            full_attention_layer_ids=ATTENTION,
            mamba_pool=requests.mamba_pool,
            **here,
        )
        self.rows = PagedTokenToKVPoolAllocator(
            1024, PAGE_TOKENS, torch.bfloat16, "cpu", device, False
        )
        self.slots = requests.mamba_allocator
        params = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.rows,
            page_size=PAGE_TOKENS,
            disable=False,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tp_cache_group=dist.group.WORLD,
            enable_mamba_extra_buffer=True,
            tree_core_backend="python",
        )
        self.tree = UnifiedRadixCache(params=params)
        self.tree.init_hicache(given, params)
        hosts = {str(name.value): one for name, one in self.tree.host_pool_group.entry_map.items()}
        self.kv, self.states = hosts["kv"].host_pool, hosts["mamba"].host_pool

    def insert(self, seed: int) -> None:
        """A text, node after node, as chunks of its prefill come."""
        rows, ids = torch.empty(0, dtype=torch.int64), text(seed)
        for page in range(PAGES):
            while self.rows.available_size() < PAGE_TOKENS or self.slots.available_size() < 1:
                self.tree.evict(EvictParams(num_tokens=PAGE_TOKENS, mamba_num=1))
            new, slot = self.rows.alloc(PAGE_TOKENS), self.slots.alloc(1)
            wanted = right(self, seed, page)
            for memory in (*self.kv.device_k_buffers, *self.kv.device_v_buffers):
                memory[new] = next(wanted).view(PAGE_TOKENS, *memory.shape[1:]).to(memory.dtype)
            for memory in self.state_memory():
                memory[slot] = next(wanted).view(1, *memory.shape[1:]).to(memory.dtype)
            rows = torch.cat([rows, new])
            self.tree.insert(
                InsertParams(
                    key=RadixKey(array("q", ids[: len(rows)])),
                    value=rows.clone(),
                    mamba_value=slot,
                    prev_prefix_len=page * PAGE_TOKENS,
                )
            )
            self.settle()

    def state_memory(self) -> list[torch.Tensor]:
        convolutions = [one for layers in self.states.conv_device_layers for one in layers]
        return [*self.states.temporal_device_layers, *convolutions]

    def settle(self) -> None:
        """What was inserted is in the host and in the store."""
        until_s = time.monotonic() + WAIT_S
        own = self.tree
        own.check_hicache_events()
        while own.ongoing_write_through or own.ongoing_backup or own.cache_controller.write_queue:
            assert time.monotonic() < until_s, "backups that do not end"
            own.check_hicache_events()

    def match(self, seed: int) -> MatchResult:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", text(seed)))))

    def fetch(self, seed: int) -> MatchResult:
        found, ids, handle = self.match(seed), text(seed), CacheRequestHandle(str(seed), 0)
        there = found.device_prefix_len + found.host_hit_length
        last = self.tree.get_last_hash_value(found.last_host_node)
        rest = array("q", ids[there:])
        self.tree.prefetch_from_storage(handle, found.last_host_node, rest, last, None, ids[:there])
        until_s = time.monotonic() + WAIT_S
        while not self.tree.check_prefetch_progress(handle):
            assert time.monotonic() < until_s, "a prefetch that does not end"
            self.tree.check_hicache_events()
        return self.match(seed)

    def check(self, seed: int, found: MatchResult) -> None:
        """What came back: pages of K and V, and the state after the last."""
        node = self.tree.tree_core.node_by_id(found.last_host_node)
        kinds = (ComponentType.FULL, ComponentType.MAMBA)
        rows, (slot,) = (node.component_data[kind].host_value for kind in kinds)
        assert len(rows) == PAGES * PAGE_TOKENS
        for page in range(PAGES):
            own, wanted = rows[page * PAGE_TOKENS :][:PAGE_TOKENS], right(self, seed, page)
            kept = [memory[own] for memory in (self.kv.k_buffer, self.kv.v_buffer)]
            layers = [part[:, layer] for part in kept for layer in range(len(ATTENTION))]
            if page == PAGES - 1:
                for memory in (self.states.temporal_buffer, *self.states.conv_buffer):
                    layers += [memory[slot, layer] for layer in range(len(STATES))]
            for layer in layers:
                assert torch.equal(layer.flatten().float(), next(wanted)), (seed, page)


def text(seed: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, PAGES * PAGE_TOKENS)
    return [int(one) for one in tokens]


def right(tree: Tree, seed: int, page: int) -> Iterator[torch.Tensor]:
    """Numbers of a node: K of all layers, V of all, states, convolutions."""
    chance = np.random.default_rng([seed, page])
    rows = [PAGE_TOKENS * 8] * (2 * len(ATTENTION))
    for count in [*rows, *(memory[0].numel() for memory in tree.state_memory())]:
        yield torch.from_numpy(chance.integers(0, 256, count).astype(np.float32))


def main() -> None:
    folder, texts = sys.argv[1], int(sys.argv[2])
    without_gpu()
    given = arguments(folder)
    set_global_server_args_for_scheduler(given)
    with in_place(ALONE):
        made = Tree(given)
    for seed in range(texts):
        made.insert(seed)
    made.tree.evict(EvictParams(num_tokens=1 << 20, mamba_num=1 << 10))
    before = [made.match(seed).host_hit_length for seed in range(FETCHED)]
    after = []
    for seed in range(FETCHED):
        found = made.fetch(seed)
        after.append(found.host_hit_length)
        assert found.mamba_host_hit_length == 1
        made.check(seed, found)
    failures = made.tree.cache_controller.storage_backend.counting.failures
    made.tree.shutdown()
    said = {"before": before, "after": after, "failures": failures.total()}
    print(json.dumps({**said, "slots": made.states.size, "pages": made.kv.size // PAGE_TOKENS}))


if __name__ == "__main__":
    main()
