"""An engine that lays out its blocks in another way than this adapter reads them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm.groups import BlockGroup, layout_of
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.errors import UnsupportedError

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")
if TYPE_CHECKING:
    from torch import Tensor

from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link  # noqa: E402  it needs torch
from cxlkv.adapters.vllm.probe import Probe  # noqa: E402

from ..support.late_streams import Schedule  # noqa: E402

GROUPS = [BlockGroup(8), BlockGroup(4, 10)]
OF_LAYER = {"one": (1, 4), "two": (0, 2), "three": (1, 4)}  # group, kv heads
DIM, BLOCKS = 16, 9
Write = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], None]


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    specs = [
        (group, SimpleNamespace(num_kv_heads=heads, head_size=DIM))
        for group, heads in OF_LAYER.values()
    ]
    layout = layout_of(specs, GROUPS, "float32", (0, 1, 0, 1))
    layout = layout.encoded(getattr(request, "param", "none"))
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as made:
        yield made


def usual(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As vLLM's backend for CPUs lays them out: keys of a block and head before its values."""
    size = cache.shape[2]
    halves = cache.view(BLOCKS, cache.shape[1], 2 * size, DIM)
    for row, slot in enumerate(slots.tolist()):
        halves[slot // size, :, slot % size] = key[row]
        halves[slot // size, :, size + slot % size] = value[row]


def values_first(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    size = cache.shape[2]
    halves = cache.view(BLOCKS, cache.shape[1], 2 * size, DIM)
    for row, slot in enumerate(slots.tolist()):
        halves[slot // size, :, 2 * (slot % size)] = key[row]
        halves[slot // size, :, 2 * (slot % size) + 1] = value[row]


def heads_side_by_side(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    size, heads = cache.shape[2], cache.shape[1]
    rows = cache.view(BLOCKS, 2 * size, heads, DIM)
    for row, slot in enumerate(slots.tolist()):
        rows[slot // size, slot % size] = key[row]
        rows[slot // size, size + slot % size] = value[row]


def a_block_before(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    usual(key, value, cache, slots - cache.shape[2])


def half_of_it(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    usual(key, torch.zeros_like(value), cache, slots)


def probe_of(write: Write) -> tuple[Probe, dict[str, Tensor]]:
    """Of an engine that writes so in its second layer, and as usual in the others."""

    def layer(own: Write) -> SimpleNamespace:
        def update(
            layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            own(key, value, kv_cache, slot_mapping)

        return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))

    caches, memory = {}, {}
    for name, (group, heads) in OF_LAYER.items():
        size = GROUPS[group].block_tokens
        caches[name] = torch.zeros((BLOCKS, heads, size, 2 * DIM))
        halves = caches[name].view(BLOCKS, heads, 2 * size, DIM)
        memory[name] = BlockMemory(halves[:, :, :size], halves[:, :, size:], group)
    layers = {name: layer(write if name == "two" else usual) for name in caches}
    return Probe(layers, caches, memory, GROUPS, torch.float32), caches


@pytest.mark.parametrize("pool", ["none", "int8", "int4", "progressive,int4"], indirect=True)
def test_the_usual_layout_is_served_and_nothing_is_left_behind(pool: CXLPool) -> None:
    probe, caches = probe_of(usual)
    probe.run(pool)
    assert not any(cache.any() for cache in caches.values())
    stats = pool.stats()
    assert stats["appended_bytes"] > 0 < stats["fetched_bytes"]
    assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.parametrize("write", [values_first, heads_side_by_side, a_block_before, half_of_it])
def test_another_layout_is_refused_by_name(pool: CXLPool, write: Write) -> None:
    probe, caches = probe_of(write)
    with pytest.raises(UnsupportedError, match=r"cxlkv: two: .* lays out its cache in a way"):
        probe.run(pool)
    assert not any(cache.any() for cache in caches.values())
    assert pool.stats()["pages_held"] == 0


def test_a_pool_that_mixes_up_bytes_is_told(pool: CXLPool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cxlkv.sequence import Batch

    fetch = Batch.fetch_blocks

    def fetch_wrongly(self: Batch, layer: int, keys: Tensor, *rest: object) -> None:
        fetch(self, layer, keys, *rest)  # type: ignore[arg-type]
        keys[3:, 0, 0, 0] += layer == 2

    monkeypatch.setattr(Batch, "fetch_blocks", fetch_wrongly)
    probe, _ = probe_of(usual)
    with pytest.raises(UnsupportedError, match="cxlkv: three: the pool gives back another block"):
        probe.run(pool)


def test_a_full_pool_is_no_reason_to_refuse(pool: CXLPool) -> None:
    probe, _ = probe_of(usual)
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    probe.run(pool)
    pool.pages.free(taken)


def rows(layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """As vLLM's backends for GPUs lay them out."""
    size = kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)


def test_blocks_of_a_device_are_looked_at_when_they_are_there(
    pool: CXLPool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(seed)
    schedule.stand_in(monkeypatch)
    caches, memory, link = {}, {}, Link(torch.device("cpu"))
    for name, (group, heads) in OF_LAYER.items():
        size = GROUPS[group].block_tokens
        caches[name] = torch.zeros((BLOCKS, heads, size, 2 * DIM))
        memory[name] = DeviceMemory(caches[name], DIM, size, group, link)
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=rows)) for name in caches
    }
    probe = Probe(layers, caches, memory, GROUPS, torch.float32, link)
    with schedule:
        probe.run(pool)
    assert pool.stats()["fetched_bytes"] > 0
