"""What a worker does with blocks on a device, in the small engine with paged blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.gpu import streams
from cxlkv.sequence import Batch

from ..support.damaging import damage_piece
from ..support.paged_engine import TOKENS, Engine, Grouping, text
from ..support.paged_engines import Engines, engines_in, use_references

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")
if TYPE_CHECKING:
    from torch import Tensor

from cxlkv.adapters.vllm import device_attention, device_blocks  # noqa: E402  they need torch
from cxlkv.adapters.vllm.device_attention import DeviceAttention  # noqa: E402
from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link  # noqa: E402
from cxlkv.adapters.vllm.loading import Load, Part  # noqa: E402
from cxlkv.adapters.vllm.saving import Saver  # noqa: E402
from cxlkv.gpu.read import PageReader  # noqa: E402


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path, grouping=Grouping(on_device=True)) as made:
        yield made


def test_what_the_engine_queues_behind_a_step_waits_for_the_gathers(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It zeroes blocks, and copies some, before it says that the next step begins."""
    called = list[str]()
    for name in ("gather", "fence"):
        monkeypatch.setattr(Link, name, noted(called, name))
    engine = engines()
    engine.serve("a", text(1, 22))
    assert called[called.index("gather") :] == ["gather"] * 3 + ["fence"]


def noted(called: list[str], name: str, kind: type = Link) -> object:
    """The method, which enters its name there."""
    method = getattr(kind, name)

    def call(*given: object, **named: object) -> object:
        called.append(name)
        return method(*given, **named)

    return call


def arrive(engine: Engine, name: str) -> None:
    engine.add(name, text(1, 30))
    for _ in range(3):
        engine.step()
        engine.settle()


FULL, WINDOW = BlockGroup(TOKENS), BlockGroup(TOKENS, 10)


@pytest.mark.parametrize(
    "groups",
    [((FULL,), (2,), (0, 0, 0)), ((FULL, WINDOW), (2, 2), (1, 0, 1))],
    ids=["full", "windows"],
)
def test_a_device_that_has_the_pool_registered_reads_it_itself(
    groups: tuple[tuple[BlockGroup, ...], tuple[int, ...], tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host copies where something was wrong, and says what."""
    use_references(monkeypatch)
    grouping, copied, read = Grouping(*groups, on_device=True, reads=True), list[str](), list[str]()
    for kind, name, calls in ((Batch, "fetch_blocks", copied), (PageReader, "copy", read)):
        monkeypatch.setattr(kind, name, noted(calls, name, kind))
    with engines_in(tmp_path, grouping=grouping) as engines:
        first, second = engines(), engines()
        first.serve("a", text(1, 30))
        first.step()
        arrive(second, "b")
        assert len(read) == 3
        assert not copied
        with CXLPool.open(engines.paths[0], threads=1) as pool:
            damage_piece(pool, 3, 1)
        arrive(engines(), "c")
        assert copied
        assert "page 3, layer 1, kv head 0: the CRC" in caplog.text


def test_memory_goes_back_in_order_also_behind_a_step_that_did_not_end(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request leaves is taken first in the next step."""
    taken, given = list[int](), list[int]()
    engine = engines()
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    take, submit = worker._ring.take, worker._saver.submit
    monkeypatch.setattr(worker._ring, "take", lambda size: noted_place(taken, take(size)))
    monkeypatch.setattr(
        worker._saver, "submit", lambda save: (noted_place(given, save.memory), submit(save))
    )
    with monkeypatch.context() as patch:
        patch.setattr(worker, "end_step", lambda: None)
        engine.serve("a", text(1, 22))
    engine.end("a")
    engine.step()
    assert len(taken) == 2
    assert given == taken
    assert engines.published() == 5


def noted_place(places: list[int], memory: Tensor | None) -> Tensor | None:
    if memory is not None:
        places.append(memory.data_ptr())
    return memory


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("unnamed", [set[int](), {0, 1, 2}])
def test_a_device_without_memory_for_copies_is_no_end(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, layer: int, unnamed: set[int]
) -> None:
    """The engine goes on, and a later step saves the blocks."""
    engine = engines()
    engine.unnamed = unnamed
    gathered, gather = list[object](), Link.gather

    def short(*given: object) -> object:
        gathered.append(given)
        if len(gathered) == layer + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gather(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "gather", short)
    engine.serve("a", text(1, 22))
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    assert (engines.published(), worker.requests.failures()) == (0, {"save": 1})
    assert not worker._ring._taken
    for _ in range(2):
        engine.step()
    assert (engines.published(), engine.wrongly_stored) == (6, [])


def test_what_a_request_leaves_is_lost_alone_where_the_device_has_no_memory(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "end_step", lambda: None)
        engine.serve("a", text(1, 22))
    engine.end("a")

    def short(*given: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Link, "gather", short)
    engine.step()
    assert (engines.published(), worker.requests.failures()) == (0, {"save": 1})
    assert not worker._ring._taken


def test_no_save_begins_while_the_pool_is_lost(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each step that would fail no block is copied."""
    called = list[str]()
    monkeypatch.setattr(Link, "gather", noted(called, "gather"))
    engine = engines()
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    engine._lose()
    engine.serve("a", text(1, 22))
    worker._saver.wait()
    assert (len(called), worker._saver._requests.failures()) == (3, {"host": 1})
    for _ in range(3):
        engine.step()
    engine.serve("b", text(2, 22))
    engine.end("b")
    engine.step()
    worker._saver.wait()
    assert (len(called), worker._saver._requests.failures()) == (3, {"host": 1})
    assert not worker._ring._taken
    for scheduler in (True, False):
        engine.find(scheduler=scheduler)
    worker._saver.wait()
    engine.step()
    assert (engines.published(), engine.wrongly_stored) == (7, [])


@pytest.mark.parametrize("units", [1, 2])
def test_of_what_a_request_leaves_as_much_is_saved_as_there_is_memory_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    unit_bytes = 3 * 2 * 2 * TOKENS * 8 * 4  # layers, K and V, heads, tokens, dim, bytes
    monkeypatch.setattr(device_attention, "ROOM_BYTES", units * unit_bytes)
    engine = engines()
    worker = engine.ranks[0].worker
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_plan", list)  # as when there was no memory in its step
        engine.serve("a", text(1, 22))
    engine.end("a")
    engine.step()
    assert engines.published() == units


def test_a_request_leaves_nothing_where_all_memory_is_taken(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "end_step", lambda: None)
        engine.serve("a", text(1, 22))
    engine.end("a")
    worker.drop_step()
    worker._saver.wait()
    worker._ring.take(worker._ring.room)
    engine.step()
    worker._ring.give_back()
    assert engines.published() == 0


def test_a_load_ends_also_where_the_device_has_failed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for ever, and nothing of it counts as right."""

    def failed(link: Link) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Link, "end_loads", failed)
    pool = engines().ranks[0].worker.pool
    part = Part("a", pool.sequence(), [[1]], [0], 0, TOKENS)
    load = Load(pool, [part], 20, Link(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load.run(())
    assert (load.has_ended, part.has_failed) == (True, True)


@pytest.mark.parametrize(("kind", "name"), [(Load, "run"), (Saver, "_save")])
def test_nothing_is_on_its_way_when_the_engine_takes_the_memory_of_its_blocks(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    first, second = engines(), engines(load="async")
    first.serve("a", text(1, 22))
    held, may_go, ended = getattr(kind, name), threading.Event(), list[str]()

    def slow(*given: object) -> None:
        may_go.wait()
        ended.append("moves")
        held(*given)

    monkeypatch.setattr(kind, name, slow)
    second.ranks[0].wait_for_saves = lambda: None  # type: ignore[method-assign]
    second.serve("a" if kind is Load else "b", text(1 if kind is Load else 2, 22))
    worker = second.ranks[0].worker

    def rest() -> None:
        worker.rest()
        ended.append("rests")

    resting = threading.Thread(target=rest)
    resting.start()
    resting.join(0.05)  # time to do it too early
    may_go.set()
    resting.join()
    assert ended == ["moves", "rests"]


def test_a_load_takes_little_memory_of_the_device(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its text is."""
    counts, fetch = list[int](), DeviceMemory.fetch

    def counted(
        own: DeviceMemory, batch: Batch, layer: int, blocks: object, *where: object
    ) -> None:
        counts.append(np.size(np.asarray(blocks)))
        fetch(own, batch, layer, blocks, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(device_blocks, "LOAD_BYTES", 3 * 2 * 2 * TOKENS * 8 * 4)  # of 3 blocks
    monkeypatch.setattr(DeviceMemory, "fetch", counted)
    first, second = engines(), engines()
    first.serve("a", text(1, 30))
    second.serve("a", text(1, 30))
    assert counts == [3, 3, 1] * 3
    assert second.cached["a"] == 28


def test_threads_sleep_while_they_wait_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has two of them, and they wait for whole steps."""
    events = list[bool]()

    def event(device: object, *, sleeps: bool = False) -> streams.Done:
        events.append(sleeps)
        return streams.Done()

    monkeypatch.setattr(streams, "event", event)
    link = Link(torch.device("cpu"))
    assert events == [False, True, True]  # of gathers, and of each buffer
    memory = DeviceMemory(torch.zeros(4, 1, TOKENS, 16), 8, TOKENS, 0, link)
    link.gather(
        memory, link.numbers(memory, [1]), torch.zeros(memory.bytes_of(1), dtype=torch.uint8)
    )
    assert events[3:] == [False, True]  # for the other stream, and for the thread
    link.end_loads()
    assert events[5:] == [True]
