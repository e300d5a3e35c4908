"""Weights and adapters that a running vLLM loads anew: what is hit, loaded and stored then.

The model here is a few layers of torch; the engine is tests/support/paged_engine.py, whose K and V
say of which weights they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common import loaded
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.lora import Adapters

from ..support.paged_engine import TOKENS, Adapter, Engine
from ..support.reloaded import Model
from ..support.weight_files import change, safetensors
from .test_vllm_engine_attention import layout_of, text

IDS = text(1, 5 * TOKENS + 3)


class Served:
    """An engine of one or more ranks on a pool of its own, each with a model."""

    def __init__(self, folder: Path, ranks: int = 1):
        self.paths = [str(folder / f"{rank}of{ranks}.pool") for rank in range(ranks)]
        for path in self.paths:
            if not Path(path).exists():
                made = CXLPool.create(path, layout=layout_of(0), capacity="8MiB", sketch=False)
                made.close()
        self.engine = Engine(self.paths)
        self.models = [Model() for _ in range(ranks)]
        self.watched = [
            LoadedWeights([model.attention], rank) for rank, model in enumerate(self.models)
        ]
        for rank, own in zip(self.engine.ranks, self.watched, strict=True):
            rank.loaded = own

    def load(self, number: float) -> None:
        """Other weights in all ranks, as a trainer writes them."""
        for model in self.models:
            model.write(number)
        self.engine.weights = b"%g" % number if number else b""

    def run(self, name: str, ids: list[int] = IDS) -> int:
        """Tokens that came from the pool; what was computed and stored is right."""
        found = self.engine.run_to_end(name, ids)
        assert not self.engine.wrongly_stored
        return found


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    found = Served(tmp_path, getattr(request, "param", 1))
    yield found
    found.engine.close()


@pytest.mark.parametrize("served", [1, 2], indirect=True)
def test_after_a_reset_other_weights_hit_nothing_and_have_pages_of_their_own(
    served: Served,
) -> None:
    assert served.run("a") == 0
    assert served.run("b") == 5 * TOKENS
    served.load(2)
    served.engine.scheduling.forgotten()  # the engine's own prefix cache was reset
    assert served.run("c") == 0
    assert served.run("d") == 5 * TOKENS
    served.load(0)
    served.engine.scheduling.forgotten()
    assert served.run("e") == 5 * TOKENS, "those of the start are found again"


def test_another_engine_finds_pages_of_the_start_only(served: Served, tmp_path: Path) -> None:
    served.load(2)
    served.engine.scheduling.forgotten()
    assert served.run("a") == 0
    other = Served(tmp_path)
    assert other.run("b") == 0
    assert other.run("c") == 5 * TOKENS
    other.engine.close()


def test_a_reset_without_other_weights_loses_nothing(served: Served) -> None:
    served.run("a")
    served.engine.scheduling.forgotten()
    assert served.run("b") == 5 * TOKENS


@pytest.mark.parametrize("how", ["idle", "load_weights"])
def test_other_weights_without_a_reset_are_noticed_in_the_step(
    served: Served, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hit of that step is computed, and nothing of it is stored."""
    served.run("a")
    if how == "idle":
        monkeypatch.setattr(loaded, "IDLE_S", -1.0)
        served.load(3)
    else:
        served.engine.weights = b"3"
        served.models[0].load(3)
    served.run("b")
    assert served.engine.recomputed == 1
    assert served.run("c") == 0
    assert served.run("d") == 5 * TOKENS


def test_a_request_that_runs_through_a_change_stores_no_more(served: Served) -> None:
    engine = served.engine
    engine.serve("a", IDS)
    stored = engine.told_blocks
    served.load(2)
    served.engine.scheduling.forgotten()
    engine.add("b", text(2, 3 * TOKENS))
    for _ in range(2 * TOKENS):
        engine.step()
    assert not engine.wrongly_stored
    engine.end("a")
    engine.step()
    assert engine.told_blocks > stored
    served.load(0)
    served.engine.scheduling.forgotten()
    assert served.run("c") == 5 * TOKENS


# ---- adapters ----


def test_adapters_are_named_by_their_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    safetensors(tmp_path / "a/adapter_model.safetensors")
    (tmp_path / "a/adapter_config.json").write_text('{"lora_alpha": 16}')
    first = Adapter(str(tmp_path / "a"))
    space, changed = Adapters().space_of(first)
    assert not changed
    assert Adapters().space_of(first) == (space, False)
    (tmp_path / "a/adapter_config.json").write_text('{"lora_alpha": 32}')
    scaled, _ = Adapters().space_of(first)
    change(tmp_path / "a/adapter_model.safetensors", -1)
    trained, _ = Adapters().space_of(first)
    assert len({space, scaled, trained}) == 3


def test_an_adapter_that_is_loaded_in_place_is_another(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "adapter_model.safetensors")
    adapters, one = Adapters(), Adapter(str(tmp_path))
    first, _ = adapters.space_of(one)
    shutil.copy(path, tmp_path / "kept")
    change(path, -1)
    second, changed = adapters.space_of(Adapter(str(tmp_path), load_inplace=True))
    assert changed
    assert second not in (first,)
    assert second == Adapters().space_of(one)[0], "a new engine loads the same"


def test_an_adapter_that_changed_on_disk_alone_is_shared_with_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = safetensors(tmp_path / "adapter_model.safetensors")
    adapters, one = Adapters(), Adapter(str(tmp_path))
    adapters.space_of(one)
    change(path, -1)
    found, changed = adapters.space_of(one)
    assert changed
    assert found != Adapters().space_of(one)[0]
    assert "may have either" in caplog.text
    assert adapters.space_of(one) == (found, False)
