"""vLLM's worker with blocks on a device: saved and loaded, driven by the scheduler's messages.

The blocks are tensors as vLLM lays them out; every byte is compared. On a GPU the streams, copies
and pinned memory are true; vLLM itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.adapters.vllm.device_attention import DeviceAttention
from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.messages import Continued, Message, Options, Span, Started
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.prefix import HASH_BYTES, PageKeys

from ..support.damaging import damage_piece

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TOKENS, HEADS, DIM, LAYERS, BLOCKS = 16, 4, 64, 3, 64
LATENT_DIM = 576
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
ORDERS = {"heads before tokens": (0, 1, 2, 3), "tokens before heads": (0, 2, 1, 3)}


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@dataclass
class Worker:
    """A worker, and its layers' blocks, [blocks, heads, tokens, channels] as its kernels count."""

    attention: DeviceAttention
    caches: list[torch.Tensor]
    ratio: int

    def bits(self, layer: int, blocks: list[int]) -> torch.Tensor:
        ids = [one * self.ratio + place for one in blocks for place in range(self.ratio)]
        cache = self.caches[layer]
        return cache.view(RAW[cache.element_size()])[ids].cpu()

    def fill(self, layer: int, blocks: list[int]) -> None:
        """What the engine's kernels do, on its own stream."""
        cache = self.caches[layer]
        raw = cache.view(torch.uint8)
        for one in blocks:
            own = raw[one * self.ratio : (one + 1) * self.ratio]
            own.copy_(torch.randint(0, 64, own.shape, dtype=torch.uint8, device=cache.device))

    def step(self, message: Message, writes: list[int], hooks: bool = True) -> None:
        """hooks: as where nothing is replayed; writes: blocks that it computes."""
        self.attention.hear(message)
        self.attention.start_loads()
        for layer in range(LAYERS):
            if hooks:
                self.attention.wait_for_layer(f"{layer}")
            self.fill(layer, writes)
            if hooks:
                self.attention.save_layer(f"{layer}")
        self.attention.end_step()


@pytest.fixture(params=["float32", "bfloat16", "float16", "latents", "short blocks"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(kind: str, tmp_path: Path) -> Iterator[CXLPool]:
    dtype = kind if kind.startswith(("float", "bfloat")) else "bfloat16"
    if kind == "latents":
        group = LayerGroup(
            layers=LAYERS, kv_heads=1, head_dim=LATENT_DIM, dtype=dtype, values="key_prefix"
        )
        layout = KVLayout.of([group], page_tokens=TOKENS)
    else:
        layout = KVLayout(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=TOKENS, dtype=dtype
        )
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="32MiB") as made:
        yield made


def worker_of(pool: CXLPool, kind: str, order: str, device: torch.device) -> Worker:
    layout = pool.layout
    ratio = 2 if kind == "short blocks" else 1
    channels = layout.head_dim * (1 if kind == "latents" else 2)
    shape = (BLOCKS * ratio, layout.kv_heads, TOKENS // ratio, channels)
    permutation = ORDERS[order]
    dtype = cast("torch.dtype", getattr(torch, layout.dtype))
    caches = [
        torch.zeros([shape[at] for at in permutation], dtype=dtype, device=device).permute(
            permutation
        )  # each of them is its own inverse
        for _ in range(LAYERS)
    ]
    link = Link(device)
    layers = {
        f"{layer}": DeviceMemory(cache, layout.head_dim, TOKENS, 0, link)
        for layer, cache in enumerate(caches)
    }
    attention = DeviceAttention(
        pool, layers, Settings(), groups=[BlockGroup(TOKENS)], link=link, step_tokens=1024
    )
    return Worker(attention, caches, ratio)


def keys_of(text: int, count: int) -> bytes:
    made = np.random.default_rng(text).integers(0, 256, (count, HASH_BYTES), np.uint8)
    return made.tobytes()


def page_keys(keys: bytes) -> PageKeys:
    return PageKeys(np.frombuffer(keys, np.uint8).reshape(-1, HASH_BYTES), TOKENS)


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_come_back_to_the_byte(
    pool: CXLPool, kind: str, order: str, load: str, hooks: bool, device: torch.device
) -> None:
    """Also those that the engine gives to others right behind the step that filled them, and where
    no layer calls, as in a replayed graph. Of a damaged page the block does not arrive."""
    worker = worker_of(pool, kind, order, device)
    attention, keys = worker.attention, keys_of(1, 40)
    blocks = list(range(1, 41))
    begin = Started("a", [blocks], keys, computed=0, scheduled=40 * TOKENS)
    worker.step(Message([begin]), blocks, hooks)
    right = [worker.bits(layer, blocks) for layer in range(LAYERS)]
    attention.hear(Message(ended=["a"]))
    for layer in range(LAYERS):
        worker.fill(layer, blocks)  # another request's now
    attention.end_step()
    attention._saver.wait()
    assert attention.report().stored == [Span("a", 0, 40)]

    def hit(name: str, into: list[int], tokens: int) -> set[int]:
        with pool.match(page_keys(keys)) as found:
            assert found.tokens == 40 * TOKENS
            start = Started(name, [into], keys, [found.handle], tokens=tokens, computed=tokens)
            start.scheduled = 0 if load == "async" else 1
            start.options = Options(save=False)
            worker.step(Message([start]), [], hooks)
        while load == "async" and not attention.finished():
            pass
        if load == "async":
            more = Continued(name, [[]], b"", tokens, 1)
            worker.step(Message(continued=[more]), [], hooks)
        return attention.bad_blocks()

    others = list(reversed(range(21, 61)))
    assert hit("b", others, 40 * TOKENS) == set()
    for layer in range(LAYERS):
        assert torch.equal(worker.bits(layer, others), right[layer])
    attention.hear(Message(ended=["b"]))
    for layer in range(LAYERS):
        worker.fill(layer, others)
    with pool.match(page_keys(keys)) as found:
        page = int(found.sequence().places(1, 7).pages[0])
    damage_piece(pool, page, 1, "keys")
    assert hit("c", others, 40 * TOKENS) == set(others[7:])
    for layer in range(LAYERS):
        assert torch.equal(worker.bits(layer, others[:7]), right[layer][: 7 * worker.ratio])
    attention.close()
