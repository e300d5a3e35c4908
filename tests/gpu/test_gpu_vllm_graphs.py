"""Steps of vLLM by a graph, which replays on whatever the device was told last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool
from cxlkv.adapters.vllm.messages import Message, unpacked

pytest.importorskip("torch", reason="vLLM's tensors are torch's")

import torch

from cxlkv.adapters.vllm.device_steps import DeviceSteps, Engine
from cxlkv.adapters.vllm.pool_attention import PoolAttention, Rows
from cxlkv.gpu.decode import Decoder

from ..support.graphs import HostGraph
from ..support.pool_attention_texts import (
    BLOCK,
    CAPACITY,
    DIM,
    HEADS,
    HOST,
    KV_HEADS,
    LAYERS,
    NAMES,
    Text,
    is_right,
    layout,
    run,
    scores_of,
    without_interpreter,
)

Row = tuple[int, Text, int]


class Graphed:
    """A worker whose layers of one or two rows are a graph."""

    def __init__(self, pool: CXLPool, budget: Budget | None = None, size: int = 2):
        engine = Engine(HOST, 6, 1, HEADS, 128, scores_of(0))
        steps = DeviceSteps(pool, engine, budget, "sketch", index="device")
        self.worker = PoolAttention(pool, NAMES, block_tokens=16, method="sketch", steps=steps)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        self.given = [Rows(*(torch.zeros(size, n, DIM) for n in heads)) for _ in range(LAYERS)]
        self.worker.capture()
        self.graph = HostGraph(HOST)
        self.graph.capture(self._layers)

    def _layers(self) -> None:
        for layer, rows in enumerate(self.given):
            self.worker.replayed(layer, rows, scores_of(layer))

    def begin(self, rows: list[Row], message: Message | None = None) -> None:
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        self.worker.plan([row for row, *_ in rows], starts, [at + 1 for *_, at in rows])
        self.worker.hear(message or Message())

    def step(self, rows: list[Row]) -> list[bool]:
        """Which rows of a step are right."""
        self.begin(rows)
        for layer, buffers in enumerate(self.given):
            for name in "qkv":
                own = [getattr(text, name)[layer, at] for _, text, at in rows]
                getattr(buffers, name)[: len(rows)] = torch.stack(own)
        self.graph.replay()
        self.worker.end_step()
        return [
            all(
                torch.allclose(
                    buffers.out[place], text.wanted(layer, scores_of(layer))[at], atol=1e-5
                )
                for layer, buffers in enumerate(self.given)
            )
            for place, (_, text, at) in enumerate(rows)
        ]

    def start(self, *rows: Row) -> None:
        """First chunks, up to these tokens."""
        message = Message(started=[text.start(row) for row, text, _ in rows])
        assert all(
            map(is_right, run(self.worker, message, [(row, text, 0, at) for row, text, at in rows]))
        )


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    without_interpreter(monkeypatch)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(tmp_path / "a.pool", layout=layout(), capacity=CAPACITY) as made:
        yield made


def test_a_step_in_which_nobody_decodes_leaves_others_as_they_were(pool: CXLPool) -> None:
    """Its only request has lost its pages; the one before it has rows in the ring."""
    graphed, one, two = Graphed(pool), Text("one", 90), Text("two", 90)
    graphed.start((1, one, 41), (2, two, 30))
    assert graphed.step([(1, one, 41)]) == [True]
    assert graphed.step([(2, two, 60)]) == [False]
    assert graphed.worker.bad_blocks() == {2}
    assert graphed.step([(1, one, 42)]) == [True]
    assert not graphed.worker.bad_blocks()
    graphed.worker.close()


def test_a_row_of_an_unknown_request_has_failed(pool: CXLPool) -> None:
    graphed, one = Graphed(pool), Text("one", 90)
    graphed.start((1, one, 41))
    assert graphed.step([(7, Text("two", 90), 30), (1, one, 41)])[1]
    assert graphed.worker.bad_blocks() == {7}
    graphed.worker.close()


def test_what_a_device_has_counted_is_said_after_a_capture(pool: CXLPool) -> None:
    graphed = Graphed(pool)
    assert graphed.worker.device_counts() == {"hot_bytes": 0, "hot_missed_bytes": 0}
    graphed.worker.close()


def test_graphs_of_a_pool_that_was_lost_are_not_replayed(pool: CXLPool, tmp_path: Path) -> None:
    graphed, one = Graphed(pool), Text("one", 90)
    graphed.start((1, one, 41))
    with (
        CXLPool.create(tmp_path / "b.pool", layout=layout(), capacity=CAPACITY) as again,
        pytest.raises(RuntimeError, match="graphs have addresses of the old one"),
    ):
        graphed.worker.reopened(again)


def test_nothing_of_a_step_that_has_raised_is_published(pool: CXLPool) -> None:
    """Without a layer it looks like one by a graph: its rows would be those of the step before."""
    graphed, one = Graphed(pool), Text("one", 90)
    graphed.start((1, one, 47))
    graphed.begin([(1, one, 47)])
    graphed.worker.drop_step()
    graphed.worker.end_step()
    with pool.match(unpacked(one.keys, BLOCK)) as hit:
        assert hit.tokens == 32
    graphed.worker.close()


def test_what_a_graph_captures_was_launched_before(
    pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, once: vLLM's first runner warms up without them."""
    seen, layer = list[int](), Decoder.layer

    def noted(self: Decoder, number: int, *rows: torch.Tensor) -> torch.Tensor:
        seen.append(number)
        return layer(self, number, *rows)

    monkeypatch.setattr(Decoder, "layer", noted)
    graphed = Graphed(pool)
    assert seen == 2 * [*range(LAYERS)]
    graphed.worker.capture()
    assert seen == 2 * [*range(LAYERS)]
    graphed.worker.close()
