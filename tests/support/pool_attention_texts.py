"""Texts that go through the worker's side of attention in the pool, and what each row must get."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.common.keys import block_keys, namespace
from cxlkv.adapters.vllm.device_steps import DeviceSteps, Engine
from cxlkv.adapters.vllm.messages import Message, Options, Started
from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows, Scores, attend_alone
from cxlkv.kernels import runtime
from cxlkv.layout import LayerGroup

LAYERS, HEADS, KV_HEADS, DIM, PAGE, BLOCK = 2, 4, 2, 32, 8, 16
NAMES = ["layer.0", "layer.1"]
WINDOW = 24
SINKS = torch.linspace(-1.0, 3.0, HEADS)
CAPACITY = "2560KiB"
HOST = torch.device("cpu")
REQUESTS, TOKENS_MAX = 12, 128
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Text:
    """A request's whole text: its q, k and v of each layer, and what attention must give."""

    def __init__(
        self,
        name: str,
        tokens: int,
        options: Options | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        made = torch.Generator().manual_seed(seed)
        self.name, self.tokens, self.options = name, tokens, options or Options()
        shape = (LAYERS, tokens)
        self.q = torch.randn((*shape, HEADS, DIM), generator=made).to(dtype)
        self.k = torch.randn((*shape, KV_HEADS, DIM), generator=made).to(dtype)
        self.v = torch.randn((*shape, KV_HEADS, DIM), generator=made).to(dtype)
        hashes = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(tokens // BLOCK)]
        self.keys = block_keys(hashes, BLOCK, namespace({})).packed.tobytes()

    def wanted(self, layer: int, scores: Scores) -> torch.Tensor:
        return attend_alone(self.q[layer], self.k[layer], self.v[layer], scores)

    def start(self, request_row: int, *, handle: bytes | None = None, tokens: int = 0) -> Started:
        handles = None if handle is None else [handle]
        return Started(self.name, [[request_row]], self.keys, handles, tokens, options=self.options)


def scores_of(layer: int) -> Scores:
    return Scores(DIM**-0.5, 20.0, WINDOW, SINKS) if layer else Scores(DIM**-0.5, 20.0)


def run(
    attention: PoolAttention,
    message: Message,
    rows: list[tuple[int, Text, int, int]],
    close: float | None = None,
    device: torch.device = HOST,
) -> list[torch.Tensor]:
    """One step of rows (request row, text, first token, tokens); what each row got in each layer,
    or asserts that it is what the text wants: returns the last layer's, by row. close: instead of
    what goes with the type."""
    attention.hear(message)
    starts = np.concatenate([[0], np.cumsum([count for *_, count in rows])]).astype(np.int32)
    lengths = [first + count for _, _, first, count in rows]
    found = []
    for layer in range(LAYERS):
        step = attention.step([request_row for request_row, *_ in rows], starts, lengths)

        def gather(name: str, layer: int = layer) -> torch.Tensor:
            parts = [getattr(text, name)[layer, i : i + n] for _, text, i, n in rows]
            heads = HEADS if name == "q" else KV_HEADS
            padding = torch.full((1, heads, DIM), torch.nan)
            both = torch.cat([*parts, padding.to(parts[0].dtype if parts else None)])
            return both.to(device)

        q = gather("q")
        out = torch.full_like(q, torch.nan)
        step.attend(layer, Rows(q, gather("k"), gather("v"), out), scores_of(layer))
        assert not out.isnan().any()
        found.append(out)
    attention.end_step()
    found = [out.cpu() for out in found]
    pieces = []
    for place, (_, text, first, count) in enumerate(rows):
        both = [out[starts[place] : starts[place + 1]] for out in found]
        right = [
            torch.allclose(
                both[layer].float(),
                text.wanted(layer, scores_of(layer))[first : first + count].float(),
                atol=close or CLOSE[text.q.dtype],
            )
            for layer in range(LAYERS)
        ]
        pieces.append(torch.tensor([all(right), not any(o.any() for o in both)]))
    return pieces


def is_right(piece: torch.Tensor) -> bool:
    return bool(piece[0])


def is_zero(piece: torch.Tensor) -> bool:
    return bool(piece[1])


def layout(dtype: str = "float32") -> KVLayout:
    group = LayerGroup(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
    windowed = LayerGroup(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, window=WINDOW)
    return KVLayout.of([group, windowed], page_tokens=PAGE)


def on_device(pool: CXLPool, method: str = "exact", device: torch.device = HOST) -> PoolAttention:
    """Serve like a GPU, with tensors of the host in the place of a device's. By "exact" the host
    chooses, by "sketch" the device."""
    engine = Engine(device, REQUESTS, 3, HEADS, TOKENS_MAX, scores_of(0))
    steps = DeviceSteps(pool, engine, Budget(share=1.0), method)
    return PoolAttention(pool, NAMES, block_tokens=BLOCK, decode_rows=3, method=method, steps=steps)


def by_index(pool: CXLPool) -> PoolAttention:
    return on_device(pool, "sketch")


def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch in place of the kernels: interpreted, they take their time."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
