"""What a worker does with blocks on a device, in the small engine with paged blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.paged_engine import Grouping, text
from ..support.paged_engines import Engines, engines_in

pytest.importorskip("torch", reason="the engine's blocks are torch's")

from cxlkv.adapters.vllm.device_blocks import Link


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


def noted(called: list[str], name: str) -> object:
    """The method of a Link, which enters its name there."""
    method = getattr(Link, name)

    def call(*given: object) -> object:
        called.append(name)
        return method(*given)

    return call
