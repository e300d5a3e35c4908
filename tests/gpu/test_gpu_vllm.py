"""vLLM's worker with blocks on a device: saved and loaded, driven by the scheduler's messages.

The blocks are tensors as vLLM lays them out; every byte is compared. On a GPU the streams, copies
and pinned memory are true; vLLM itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cxlkv import CXLPool, KVLayout, LayerGroup
from cxlkv.adapters.vllm.messages import Message, Span

from ..support.damaging import damage_piece
from ..support.device_worker import HEADS_FIRST, TOKENS_FIRST, keys_of, worker_of

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TOKENS, HEADS, DIM, LAYERS, BLOCKS = 16, 4, 64, 3, 64
LATENT_DIM = 576


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(params=["float32", "bfloat16", "float16", "latents", "short blocks"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(kind: str, tmp_path: Path) -> Iterator[CXLPool]:
    dtype = kind if kind.startswith(("float", "bfloat")) else "bfloat16"
    group = LayerGroup(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    if kind == "latents":
        group = LayerGroup(
            layers=LAYERS, kv_heads=1, head_dim=LATENT_DIM, dtype=dtype, values="key_prefix"
        )
    layout = KVLayout.of([group], page_tokens=TOKENS)
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="32MiB") as made:
        yield made


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("order", [HEADS_FIRST, TOKENS_FIRST], ids=["heads", "tokens"])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_blocks_come_back_to_the_byte(
    pool: CXLPool, kind: str, order: tuple[int, ...], load: str, hooks: bool, device: torch.device
) -> None:
    """Also those that the engine gives to others right behind the step that filled them, and where
    no layer calls, as in a replayed graph. Of a damaged page the block does not arrive."""
    worker = worker_of(pool, BLOCKS, device, order=order, ratio=1 + (kind == "short blocks"))
    attention, keys, layers = worker.attention, keys_of(1, 40), range(LAYERS)
    assert (attention._reader is not None) == (device.type == "cuda")
    blocks = list(range(1, 41))
    worker.step(worker.begin_text("a", keys, blocks), blocks, hooks)
    right = [worker.bits(layer, blocks) for layer in layers]
    worker.step(Message(ended=["a"]), blocks)  # another request's now
    attention._saver.wait()
    assert attention.report().stored == [Span("a", 0, 40)]

    def hit(name: str, into: list[int]) -> set[int]:
        worker.step(worker.begin_hit(name, keys, into, load), hooks=hooks)
        if load == "async":
            while not attention.finished():
                pass
            worker.step(worker.go_on(name, 40 * TOKENS), hooks=hooks)
        return attention.bad_blocks()

    others = list(reversed(range(21, 61)))
    assert hit("b", others) == set()
    for layer in layers:
        assert torch.equal(worker.bits(layer, others), right[layer])
    worker.step(Message(ended=["b"]), others)
    begun = worker.begin_hit("c", keys, blocks, load).started[0].handles
    assert begun is not None
    sequence = pool.adopt(begun[0])
    damage_piece(pool, int(sequence.places(1, 7).pages[0]), 1, "keys")
    sequence.release()
    assert hit("c", others) == set(others[7:])
    for layer in layers:
        assert torch.equal(worker.bits(layer, others[:7]), right[layer][: 7 * worker.ratio])
    attention.close()
