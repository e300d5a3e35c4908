"""SGLang's own parts round the adapter: factory, config, host memory. No GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from cxlkv.adapters.sglang.host import Memory

from . import images

if TYPE_CHECKING:
    from cxlkv.adapters.sglang.storage import CXLHiCache

LAYERS, HEADS, DIM, PAGE_TOKENS, PAGES = 4, 2, 16, 8, 64
MLA_RANK, MLA_ROPE = 48, 16
CAPACITY = "3MiB"


class Host(Memory, Protocol):
    """More of SGLang's host memory, to fill it and to look at it."""

    kv_buffer: torch.Tensor

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...

    def get_data_page(self, index: int) -> torch.Tensor: ...


def mha_memory(layout: str, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> Host:
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    rows = [torch.zeros(PAGE_TOKENS, heads, DIM, dtype=dtype) for _ in range(2 * LAYERS)]
    k, v = tuple(rows[:LAYERS]), tuple(rows[LAYERS:])
    pointers = [torch.tensor([one.data_ptr() for one in some]) for some in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE_TOKENS,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made: Host = MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE_TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=PAGES * PAGE_TOKENS,
    )
    return made


def mla_memory(layout: str) -> Host:
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    width = MLA_RANK + MLA_ROPE
    rows = tuple(torch.zeros(PAGE_TOKENS, 1, width, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([one.data_ptr() for one in rows]),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE_TOKENS,
        kv_lora_rank=MLA_RANK,
        qk_rope_head_dim=MLA_ROPE,
        kv_cache_dim=width,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    made: Host = MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE_TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=PAGES * PAGE_TOKENS,
    )
    return made


def created(
    memory: Memory, extra: Mapping[str, object] | None = None, **words: object
) -> CXLHiCache:
    """By the factory, as the cache controller does it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    given: dict[str, object] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": memory.layout != "layer_first",
        "model_name": "some/model",
        **words,
    }
    ours: dict[str, object] = {
        "backend_name": "cxlkv",
        "module_path": "cxlkv.adapters.sglang",
        "class_name": "CXLHiCache",
        "interface_v1": 1,
        "cxlkv": extra or {},
    }
    config = HiCacheStorageConfig(**given, extra_config=ours)
    backend = StorageBackendFactory.create_backend("dynamic", config, memory)
    backend.register_mem_pool_host(memory)
    backend.on_host_pools_registered()
    found: CXLHiCache = backend
    return found


def hashes(blocks: Sequence[int]) -> list[str]:
    """As the engine's: sha256 in hex, so 64 letters."""
    return [f"{block:064x}" for block in blocks]


def indices(count: int) -> torch.Tensor:
    """Pages of the host's memory that do not lie side by side."""
    chosen = torch.randperm(PAGES, generator=torch.Generator().manual_seed(count))[:count]
    tokens = chosen[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
    return tokens.flatten()


@dataclass
class Engine:
    """One rank of an engine: pages of its host memory, stored and loaded by the adapter."""

    folder: Path
    kind: str  # of the memory: mha or mla
    layout: str
    words: dict[str, object] = field(default_factory=dict)
    room: int = 0

    def __post_init__(self) -> None:
        images.leave_out()
        self.extra = {"where": f"{self.folder}/", "capacity": CAPACITY}
        self.again()
        pool = self.cache.pool
        assert pool is not None
        self.room = pool.stats()["pages_total"]

    def again(self) -> None:
        if hasattr(self, "cache"):
            self.close()
        memory = mha_memory(self.layout) if self.kind == "mha" else mla_memory(self.layout)
        self.memory = memory
        words = {"is_mla_model": self.kind == "mla", **self.words}
        self.cache = created(memory, self.extra, **words)

    def page(self, block: int) -> torch.Tensor:
        """Its bytes as the engine's flat pages have them."""
        like = self.memory.get_dummy_flat_data_page()
        made = torch.Generator().manual_seed(block)
        return torch.randn(like.shape, generator=made).to(like.dtype)

    def store(self, blocks: Sequence[int]) -> bool:
        found = True
        for first in range(0, len(blocks), PAGES):
            some = blocks[first : first + PAGES]
            places = indices(len(some))
            for block, place in zip(some, places[::PAGE_TOKENS].tolist(), strict=True):
                self.memory.set_from_flat_data_page(place, self.page(block))
            found &= all(self.cache.batch_set_v1(hashes(some), places))
        return found

    def load(self, blocks: Sequence[int]) -> list[bool]:
        found: list[bool] = []
        for first in range(0, len(blocks), PAGES):
            some = blocks[first : first + PAGES]
            places = indices(len(some))
            self.memory.kv_buffer.fill_(7)
            came = self.cache.batch_get_v1(hashes(some), places)
            for block, place, right in zip(some, places[::PAGE_TOKENS].tolist(), came, strict=True):
                if right:
                    got = self.memory.get_data_page(place)
                    assert torch.equal(got, self.page(block))
            found += came
        return found

    def leading(self, blocks: Sequence[int]) -> int:
        return self.cache.batch_exists(hashes(blocks))

    def bytes_of(self, block: int) -> bytes:
        """Of the first layer's first keys: together in all layouts."""
        places = indices(1)
        self.memory.set_from_flat_data_page(int(places[0]), self.page(block))
        addresses, _ = self.memory.get_page_buffer_meta(places)
        buffer = self.memory.kv_buffer
        at = addresses[0] - buffer.data_ptr()
        return bytes(buffer.view(torch.uint8).flatten()[at : at + 32].tolist())

    def failures(self) -> int:
        return sum(self.cache.failures.values())

    def close(self) -> None:
        self.cache.close()


class FlatEngine(Engine):
    """The same by the calls that take flat tensors, where interface_v1 is not set."""

    def store(self, blocks: Sequence[int]) -> bool:
        return self.cache.batch_set(hashes(blocks), [self.page(block) for block in blocks])

    def load(self, blocks: Sequence[int]) -> list[bool]:
        like = self.memory.get_dummy_flat_data_page
        came = self.cache.batch_get(hashes(blocks), [like() for _ in blocks])
        for block, page in zip(blocks, came, strict=True):
            assert page is None or torch.equal(page, self.page(block))
        return [page is not None for page in came]

    def leading(self, blocks: Sequence[int]) -> int:
        for place, name in enumerate(hashes(blocks)):
            if not self.cache.exists(name):
                return place
        return len(blocks)

    def bytes_of(self, block: int) -> bytes:
        return bytes(self.page(block).view(torch.uint8)[:32].tolist())
