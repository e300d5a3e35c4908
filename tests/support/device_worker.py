"""vLLM's worker over blocks on a device, driven by messages as its scheduler's side sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from cxlkv import CXLPool
from cxlkv.adapters.vllm.device_attention import DeviceAttention
from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.messages import Continued, Message, Options, Started
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.prefix import HASH_BYTES, PageKeys

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)
"""Orders in memory of [blocks, heads, tokens, channels]; each is its own inverse."""


def keys_of(text: int, count: int) -> bytes:
    made = np.random.default_rng(text).integers(0, 256, (count, HASH_BYTES), np.uint8)
    return made.tobytes()


@dataclass
class Worker:
    """A worker, and its layers' blocks, [blocks, heads, tokens, channels] as its kernels count:
    `ratio` of these are a block of its tables."""

    pool: CXLPool
    attention: DeviceAttention
    caches: list[torch.Tensor]
    ratio: int

    @property
    def block_tokens(self) -> int:
        return self.attention.unit

    def bits(self, layer: int, blocks: list[int]) -> torch.Tensor:
        ids = [one * self.ratio + place for one in blocks for place in range(self.ratio)]
        cache = self.caches[layer]
        return cache.view(RAW[cache.element_size()])[ids].cpu()

    def fill(self, layer: int, blocks: list[int]) -> None:
        """What the engine's kernels do, on its own stream; no number is NaN."""
        raw = self.caches[layer].view(torch.uint8)
        for one in blocks:
            own = raw[one * self.ratio : (one + 1) * self.ratio]
            own.copy_(torch.randint(0, 64, own.shape, dtype=torch.uint8, device=raw.device))

    def step(self, message: Message, writes: Sequence[int] = (), hooks: bool = True) -> None:
        """hooks: layers call, as where nothing is replayed; writes: blocks that it computes."""
        self.attention.hear(message)
        self.attention.start_loads()
        for layer in range(len(self.caches)):
            if hooks:
                self.attention.wait_for_layer(f"{layer}")
            self.fill(layer, list(writes))
            if hooks:
                self.attention.save_layer(f"{layer}")
        self.attention.end_step()

    def begin_text(self, name: str, keys: bytes, blocks: list[int]) -> Message:
        """A step that computes all of a text."""
        count = len(blocks) * self.block_tokens
        return Message([Started(name, [blocks], keys, computed=0, scheduled=count)])

    def begin_hit(self, name: str, keys: bytes, blocks: list[int], load: str) -> Message:
        """A step that begins behind a hit of so many blocks, or where a request waits for it."""
        packed = np.frombuffer(keys, np.uint8).reshape(-1, HASH_BYTES)[: len(blocks)]
        with self.pool.match(PageKeys(packed, self.block_tokens)) as found:
            tokens = len(blocks) * self.block_tokens
            assert found.tokens == tokens, found.tokens
            start = Started(name, [blocks], keys, [found.handle], tokens=tokens, computed=tokens)
        start.scheduled = 0 if load == "async" else 1
        start.options = Options(save=False)
        return Message([start])

    def go_on(self, name: str, tokens: int) -> Message:
        return Message(continued=[Continued(name, [[]], b"", tokens, 1)])


def worker_of(
    pool: CXLPool,
    blocks: int,
    device: torch.device,
    *,
    order: tuple[int, ...] = TOKENS_FIRST,
    ratio: int = 1,
    step_tokens: int = 1024,
) -> Worker:
    """A worker whose engine has so many blocks, of a page each."""
    layout = pool.layout
    channels = layout.head_dim * (2 if layout.values == "own" else 1)
    shape = (blocks * ratio, layout.kv_heads, layout.page_tokens // ratio, channels)
    dtype = cast("torch.dtype", getattr(torch, layout.dtype))
    caches = [
        torch.zeros([shape[at] for at in order], dtype=dtype, device=device).permute(order)
        for _ in range(layout.layers)
    ]
    link = Link(device)
    layers = {
        f"{layer}": DeviceMemory(cache, layout.head_dim, layout.page_tokens, 0, link)
        for layer, cache in enumerate(caches)
    }
    attention = DeviceAttention(
        pool,
        layers,
        Settings(deadline_s=60),
        groups=[BlockGroup(layout.page_tokens)],
        link=link,
        step_tokens=step_tokens,
    )
    return Worker(pool, attention, caches, ratio)
