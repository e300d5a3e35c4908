"""vLLM's attention in the pool for tensors on a device: a GPU's, or the host's with the kernels'
references. tests/adapters/test_vllm_pool_attention.py has what host and device have in common."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.adapters.vllm.messages import Message
from cxlkv.errors import GpuMemoryError, MemoryShortError, UnsupportedError, WorkerError

pytest.importorskip("torch", reason="vLLM's tensors are torch's")

import torch

from cxlkv.adapters.vllm import device_steps as subject
from cxlkv.adapters.vllm.device_steps import DeviceSteps, Engine
from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows
from cxlkv.adapters.vllm.settings import Settings, read_options, read_settings
from cxlkv.gpu.decode import Decoder

from ..support.damaging import damage_piece
from ..support.graphs import HostGraph
from ..support.pool_attention_texts import (
    CAPACITY,
    CLOSE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    NAMES,
    PAGE,
    Text,
    is_right,
    layout,
    on_device,
    run,
    scores_of,
    without_interpreter,
)

Row = tuple[int, Text, int, int]


@dataclass
class Running:
    text: Text
    tokens: int = 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    without_interpreter(monkeypatch)
    return torch.device(request.param)


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], None]) -> None:
        with torch.cuda.graph(self._graph):
            work()

    def replay(self) -> None:
        self._graph.replay()


def are_right(
    attention: PoolAttention, message: Message, rows: list[Row], device: torch.device
) -> bool:
    """Take a step; whether all of its rows are right."""
    return all(map(is_right, run(attention, message, rows, device=device)))


def drafted(text: Text, tokens: int) -> Text:
    """The text with other keys and values from there on, as rejected tokens have."""
    found = copy.copy(text)
    found.k, found.v = text.k.clone(), text.v.clone()
    found.k[:, tokens:] += 1
    found.v[:, tokens:] -= 1
    return found


METHODS = pytest.mark.parametrize("method", ["exact", "sketch"])
"""By which the host chooses, or an index on the device."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(tmp_path / "a.pool", layout=layout(), capacity=CAPACITY) as made:
        yield made


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@METHODS
def test_rows_see_their_own_text(
    tmp_path: Path, dtype: torch.dtype, method: str, device: torch.device
) -> None:
    """First chunks, later ones, decode, requests that end, request rows that others take."""
    name = str(dtype).removeprefix("torch.")
    with CXLPool.create(tmp_path / "b.pool", layout=layout(name), capacity=CAPACITY) as pool:
        attention = on_device(pool, method, device)
        one, two, three = (
            Text(*given, dtype=dtype) for given in (("one", 90), ("two", 33), ("three", 70))
        )
        started = Message(started=[one.start(1), two.start(2)])
        assert all(
            map(
                is_right, run(attention, started, [(1, one, 0, 41), (2, two, 0, 30)], device=device)
            )
        )
        # In another order, with a newcomer between them. 41 + 29: from the middle of a page.
        rows = [(2, two, 30, 1), (5, three, 0, 17), (1, one, 41, 29)]
        assert all(
            map(is_right, run(attention, Message(started=[three.start(5)]), rows, device=device))
        )
        # One ends, and its request row is another's in the same step; 3 rows are a decode.
        four = Text("four", 20, dtype=dtype)
        message = Message(started=[four.start(2)], ended=["two"])
        rows = [(1, one, 70, 3), (2, four, 0, 20), (5, three, 17, 53)]
        assert are_right(attention, message, rows, device)
        assert not attention.bad_blocks()
        assert not attention.report().failures
        attention.close()


def test_chunks_that_begin_and_end_anywhere(pool: CXLPool, device: torch.device) -> None:
    """Several later chunks in one call, from every place in a page, of every length around it."""
    texts = [Text(f"text {number}", 40) for number in range(9)]
    starts = [text.start(row) for row, text in enumerate(texts)]
    rows = [(row, text, 0, 8 + row) for row, text in enumerate(texts)]
    attention = on_device(pool, device=device)
    assert are_right(attention, Message(started=starts), rows, device)
    for row, text in enumerate(texts):
        rows = [(row, text, 8 + row, 4 + row), (8 - row, texts[8 - row], 16 - row, 13)]
        assert are_right(attention, Message(), rows[: 1 + (row != 4)], device)
    attention.close()


@METHODS
def test_any_steps(pool: CXLPool, method: str, device: torch.device, seed: int) -> None:
    """Chunks and decodes of any length, drafts that are rejected, ends, preemptions, pages that are
    damaged: every row is right, or its request is in bad_blocks()."""
    chance, attention = random.Random(seed), on_device(pool, method, device)
    names, broken = iter(range(1 << 30)), 0
    free, running = list(range(1, 11)), dict[int, Running]()
    ended, message = list[str](), Message()
    for _ in range(60):
        message = Message(ended=ended)
        ended = []
        while free and chance.random() < 0.5:
            row, text = free.pop(), Text(f"{next(names)}", 100)
            message.started.append(text.start(row))
            running[row] = Running(text)
        rows, kept = list[Row](), dict[int, int]()
        for row, one in running.items():
            text, tokens = one.text, one.tokens
            count = chance.choice([1, 1, 1, 2, 3, chance.randrange(1, 40)])
            if chance.random() < 0.8 and tokens + count <= text.tokens:
                kept[row] = tokens + count - (chance.randrange(count) if count <= 3 else 0)
                rows.append((row, drafted(text, kept[row]), tokens, count))
        if not rows:
            attention.hear(message)
            attention.end_step()
            continue
        chance.shuffle(rows)
        whole = [text.name for _, text, tokens, _ in rows if tokens >= PAGE]
        hurt = bool(whole) and chance.random() < 0.2
        if hurt:  # a page of which the pool has a checksum
            sequence = attention.requests.sequences[chance.choice(whole)]
            damage_piece(pool, int(chance.choice(sequence.places(0).pages)), 0)
        found = run(attention, message, rows, device=device)
        bad = attention.bad_blocks()
        broken += len(bad)
        assert hurt or broken or not bad
        for (row, _, tokens, count), piece in zip(rows, found, strict=True):
            assert is_right(piece) or row in bad, (row, tokens, count)
            running[row].tokens = 0 if row in bad else kept[row]
        for row, one in list(running.items()):
            if chance.random() < 0.1 or one.tokens == one.text.tokens:
                ended.append(one.text.name)
                del running[row]
                free.append(row)
    assert pool.admin.check()["clean"]
    attention.close()


def test_what_a_device_keeps_of_rejected_tokens_is_loaded_anew(
    pool: CXLPool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the page on that they have completed."""
    seen, changed = list[int](), Decoder.changed

    def noted(self: Decoder, request: int, tokens: int) -> None:
        seen.append(tokens)
        changed(self, request, tokens)

    monkeypatch.setattr(Decoder, "changed", noted)
    attention, text = on_device(pool, "sketch", device), Text("one", 90)
    assert are_right(attention, Message(started=[text.start(1)]), [(1, text, 0, 38)], device)
    assert are_right(attention, Message(), [(1, drafted(text, 39), 38, 3)], device)
    assert are_right(attention, Message(), [(1, text, 39, 2)], device)
    assert seen == [39]
    attention.close()


@pytest.mark.parametrize("late", [False, True])
@METHODS
def test_what_goes_wrong_ends_its_own_requests(
    pool: CXLPool, method: str, late: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged page that is fetched: one request of those that decode. A late host: all of these.
    A chunk beside them goes on, and so does the next step."""
    attention = on_device(pool, method, device)
    one, two, three = (Text(name, 90) for name in ("one", "two", "three"))
    started = Message(started=[text.start(row) for row, text in enumerate((one, two, three), 1)])
    found = run(
        attention, started, [(1, one, 0, 70), (2, two, 0, 40), (3, three, 0, 20)], device=device
    )
    assert all(map(is_right, found))
    if late:
        check = Decoder.end_each

        def is_late(self: Decoder, **given: bool) -> object:
            monkeypatch.setattr(Decoder, "end_each", check)
            check(self, **given)
            self.abandon()
            return {number: WorkerError("late") for number in (0, 1)}

        monkeypatch.setattr(Decoder, "end_each", is_late)
    else:
        damage_piece(pool, 3, 0)
    early, end_step = list[set[int]](), attention.end_step

    def end() -> None:
        early.append(set(attention.bad_blocks()))  # as vLLM asks where it speculates
        end_step()

    monkeypatch.setattr(attention, "end_step", end)
    rows = [(1, one, 70, 1), (2, two, 40, 1), (3, three, 20, 16)]
    found = run(attention, Message(), rows, device=device)
    assert early[0] == attention.bad_blocks() == ({1, 2} if late else {1})
    assert is_right(found[2])
    failures = attention.report().failures
    assert failures["other" if late else "corrupt"] == (2 if late else 1)
    # The engine begins again with what failed.
    rows = [(1, one, 0, 71), (3, three, 36, 1)]
    assert are_right(attention, Message(), rows, device)
    attention.close()


Graphs = dict[int, tuple["CudaGraph | HostGraph", list[Rows]]]


def graphs_of(attention: PoolAttention, device: torch.device) -> Graphs:
    """Of batches of these sizes, with the tensors that each reads and writes."""
    graphs: Graphs = {}
    for size in (2, 4, 6):
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        given = [
            Rows(*(torch.zeros(size, n, DIM, device=device) for n in heads)) for _ in range(LAYERS)
        ]
        attention.capture()
        graph = CudaGraph() if device.type == "cuda" else HostGraph(device)

        def layers(given: list[Rows] = given) -> None:
            for layer, rows in enumerate(given):
                attention.replayed(layer, rows, scores_of(layer))

        graph.capture(layers)
        graphs[size] = graph, given
    return graphs


def by_graph(attention: PoolAttention, message: Message, rows: list[Row], graphs: Graphs) -> None:
    """A step of rows of one token, each of which is right, or in bad_blocks()."""
    graph, given = graphs[min(size for size in graphs if size >= len(rows))]
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    attention.plan([row for row, *_ in rows], starts, [at + 1 for _, _, at, _ in rows])
    attention.hear(message)
    for layer, buffers in enumerate(given):
        for name in "qkv":
            own = torch.stack([getattr(text, name)[layer, at] for _, text, at, _ in rows])
            getattr(buffers, name)[: len(rows)] = own.to(buffers.q.device)
    graph.replay()
    attention.end_step()
    for place, (row, text, at, _) in enumerate(rows):
        for layer, buffers in enumerate(given):
            wanted = text.wanted(layer, scores_of(layer))[at]
            close = torch.allclose(buffers.out[place].cpu(), wanted, atol=1e-5)
            assert close or row in attention.bad_blocks()


def test_a_graph_has_all_layers_of_a_step_that_decodes(
    pool: CXLPool, device: torch.device, seed: int
) -> None:
    """Captured once for each size of a batch, with padding behind its rows; requests come, go and
    change places between steps by the graph and others, and one fails in it."""
    chance, engine = random.Random(seed), Engine(device, 6, 1, HEADS, 128, scores_of(0))
    steps = DeviceSteps(pool, engine, Budget(share=1.0), "sketch", index="device")
    attention = PoolAttention(pool, NAMES, block_tokens=16, method="sketch", steps=steps)
    graphs, running = graphs_of(attention, device), dict[int, Running]()
    names, ended, begun, failed = iter(range(1 << 30)), list[str](), set[int](), 0
    for number in range(400):
        if failed and number > 50:
            break
        message, ended = Message(ended=ended), []
        free = [row for row in range(1, 7) if row not in running]
        fresh: list[Row] = []
        if free and chance.random() < 0.4:
            text = Text(f"{next(names)}", 100)
            message.started.append(text.start(free[0]))
            running[free[0]] = Running(text)
            fresh = [(free[0], text, 0, chance.randrange(2, 60))]
        decoding = [(row, one.text, one.tokens, 1) for row, one in running.items() if one.tokens]
        chance.shuffle(decoding)
        rows, bad = [*fresh, *decoding[: chance.randrange(1, 7)]], set[int]()
        if not rows:
            attention.hear(message)
            attention.end_step()
        elif fresh:
            assert are_right(attention, message, rows, device)
        else:
            unread = [row for row, _, at, _ in rows if row in begun and at > 4 * PAGE]
            hurt = {unread[0]} if unread and number > 20 and chance.random() < 0.5 else set()
            for row in hurt:  # a page that the device does not have
                where = attention.requests.sequences[running[row].text.name].places(0)
                damage_piece(pool, int(where.pages[0]), 0)
            failed += len(hurt)
            by_graph(attention, message, rows, graphs)
            bad = attention.bad_blocks()
            assert bad == hurt
        begun = begun - {row for row, *_ in rows} | {row for row, *_ in fresh}
        for row, _, at, count in rows:
            running[row].tokens = at + count
        for row in list(running):
            if row in bad or chance.random() < 0.05:
                ended.append(running.pop(row).text.name)
    assert failed
    attention.close()


def test_what_the_hot_buffer_has_is_counted(pool: CXLPool, device: torch.device) -> None:
    attention, text = on_device(pool, "sketch", device), Text("one", 90)
    run(attention, Message(started=[text.start(1)]), [(1, text, 0, 80)], device=device)
    assert attention.device_counts() == {"hot_bytes": 0, "hot_missed_bytes": 0}
    run(attention, Message(), [(1, text, 80, 1)], device=device)
    first = attention.device_counts()
    run(attention, Message(), [(1, text, 81, 1)], device=device)
    second = attention.device_counts()
    assert first["hot_bytes"] == 0
    assert second["hot_bytes"] == second["hot_missed_bytes"] == first["hot_missed_bytes"] > 0
    attention.close()


def test_hot_slots_are_given_in_bytes(pool: CXLPool, device: torch.device) -> None:
    engine = Engine(device, 4, 1, HEADS, 128, scores_of(0))
    slot = PAGE * DIM * 4 * 2 * KV_HEADS * LAYERS * 4
    steps = DeviceSteps(pool, engine, Budget(pages=4), "exact", hot_bytes=7 * slot)
    resident = steps._decoder._resident
    assert resident is not None
    assert resident.hot is not None
    assert resident.hot.limits[0][0] == 7
    steps.close()
    with pytest.raises(MemoryShortError, match=r'"hot" is .*are .*KiB.* --max-num-seqs'):
        DeviceSteps(pool, engine, Budget(pages=4), "exact", hot_bytes=3 * slot)


def test_with_an_index_on_the_device_a_request_asks_for_no_more_than_the_engine() -> None:
    from cxlkv.errors import BadArgumentError

    settings = read_settings(
        {"attention": "pool", "budget": {"share": 0.1}, "index": "device", "where": "/x/"}
    )

    def asked(budget: object) -> Budget | None:
        return read_options({"cxlkv": {"budget": budget}}, settings).budget

    assert asked(0.05) == Budget(share=0.05)
    for more in (0.2, None, {"pages": 4}, {"share": 0.05, "recent": 3}):
        with pytest.raises(BadArgumentError, match="fewer pages"):
            asked(more)


def test_with_an_index_on_the_device_all_pages_are_a_budget_like_others() -> None:
    """What its decoder does not take, no graph computes: the request would begin again for ever."""
    from cxlkv.errors import BadArgumentError

    settings = Settings(attention="pool", index="device", where="/x/")

    def asked(budget: object) -> Budget | None:
        return read_options({"cxlkv": {"budget": budget}}, settings).budget

    assert (asked({"pages": 4}), asked(None)) == (Budget(pages=4), None)
    for other in ({"pages": 4, "sinks": 2}, {"pages": 9, "recent": 8}, {"mass": 0.9}):
        with pytest.raises(BadArgumentError, match="fewer pages"):
            asked(other)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("lost_at", [0, 1, 2])
def test_a_pool_that_is_lost_in_a_step_breaks_its_requests(
    tmp_path: Path, tokens: int, lost_at: int, device: torch.device
) -> None:
    """Another thread closes it: before a layer, or before the step ends."""
    pool = CXLPool.create(tmp_path / "b.pool", layout=layout(), capacity=CAPACITY)
    attention, text = on_device(pool, "sketch", device), Text("one", 90)
    attention.decode_rows = 1
    attention.hear(Message(started=[text.start(1)]))
    step = attention.step([1], np.array([0, tokens], np.int32), [tokens])
    for layer in range(LAYERS):
        if layer == lost_at:
            pool.close()
        rows = [of[layer, :tokens].to(device) for of in (text.q, text.k, text.v)]
        out = torch.empty_like(rows[0])
        step.attend(layer, Rows(rows[0], rows[1], rows[2], out), scores_of(layer))
        wanted = text.wanted(layer, scores_of(layer))[:tokens]
        assert torch.allclose(out.cpu(), wanted, atol=1e-5)
    if lost_at == LAYERS:
        pool.close()
    attention.end_step()
    assert attention.report().failures["host"]
    assert "one" not in attention.requests.sequences
    attention.close()


def test_a_lost_pool_stays_until_a_step_ends(tmp_path: Path, device: torch.device) -> None:
    """Another thread closes it in the middle: the device may be reading it."""
    pool = CXLPool.create(tmp_path / "b.pool", layout=layout(), capacity=CAPACITY)
    ended = threading.Event()
    pool.before_close(ended.set)  # the last call, as it is the first that is registered
    attention, text = on_device(pool, "sketch", device), Text("one", 90)
    assert are_right(attention, Message(started=[text.start(1)]), [(1, text, 0, 60)], device)
    attention.hear(Message())
    step = attention.step([1], np.array([0, 1], np.int32), [61])
    closing = threading.Thread(target=pool.close)
    closing.start()
    for layer in range(LAYERS):
        rows = [of[layer, 60:61].to(device) for of in (text.q, text.k, text.v)]
        out = torch.empty_like(rows[0])
        step.attend(layer, Rows(rows[0], rows[1], rows[2], out), scores_of(layer))
        closing.join(0.05)  # time to do it too early
        assert not ended.is_set()
        assert torch.allclose(out.cpu(), text.wanted(layer, scores_of(layer))[60:61], atol=1e-5)
    attention.end_step()
    closing.join()
    assert ended.is_set()
    assert not attention.bad_blocks()
    attention.hear(Message())
    attention.step([1], np.array([0, 1], np.int32), [62])
    assert attention.bad_blocks() == {1}
    attention.close()


@METHODS
def test_a_pool_that_is_opened_anew_needs_the_device_memory_of_one(
    pool: CXLPool, method: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines freeze the collector, and a hot buffer may be most of a device."""
    attention = on_device(pool, method, device)
    steps = attention._steps
    assert isinstance(steps, DeviceSteps)
    resident = weakref.ref(steps._decoder._resident)
    assert resident() is not None
    there, make = list[object](), Decoder.__init__

    def noted(self: Decoder, *given: object, **named: object) -> None:
        there.append(resident())
        make(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "__init__", noted)
    gc.disable()
    try:
        steps.reopened(pool)
    finally:
        gc.enable()
    assert there == [None]
    attention.close()


@METHODS
@pytest.mark.parametrize("name", ["Decoder", "GpuWrites", "pinned"])
def test_a_device_without_memory_for_a_pool_that_is_open_again_is_asked_again(
    tmp_path: Path, name: str, method: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile requests are computed from their own K and V."""

    def short(*given: object, **named: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    lost = CXLPool.create(tmp_path / "b.pool", layout=layout(), capacity=CAPACITY)
    attention = on_device(lost, method, device)
    one, two = Text("one", 90), Text("two", 90)
    assert are_right(attention, Message(started=[one.start(1)]), [(1, one, 0, 60)], device)
    assert are_right(attention, Message(), [(1, one, 60, 1)], device)
    lost.close()
    with CXLPool.create(tmp_path / "c.pool", layout=layout(), capacity=CAPACITY) as again:
        for tokens in (40, 30):
            with monkeypatch.context() as patch:
                patch.setattr(subject, name, short)
                with pytest.raises(GpuMemoryError, match="open again: the GPU has too little"):
                    attention.reopened(again)
            message = Message(ended=["two"], started=[two.start(2)])
            rows = [(1, one, 0, tokens), (2, two, 0, tokens)]
            assert are_right(attention, message, rows, device)
            assert attention.device_counts()["hot_bytes"] == 0
            attention.tiers.close()
        attention.reopened(again)
        message = Message(ended=["one", "two"], started=[one.start(1)])
        assert are_right(attention, message, [(1, one, 0, 60)], device)
        assert not attention.bad_blocks()
        assert are_right(attention, Message(), [(1, one, 60, 1)], device)
        attention.close()


def test_layers_of_one_decoder_are_alike(pool: CXLPool) -> None:
    class Layer:
        num_heads, scores = 4, scores_of(0)

    class Other(Layer):
        num_heads = 2

    with pytest.raises(UnsupportedError, match="one scale, softcap and number of heads"):
        subject.steps_on(torch.device("cuda"), pool, [Layer(), Other()], (1, 1, 1), Settings())
