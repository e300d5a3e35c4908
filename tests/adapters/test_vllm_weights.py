"""Weights and adapters that a running vLLM loads anew: what is hit, loaded and stored then.

The model here is a few layers of torch; the engine is tests/support/paged_engine.py, whose K and V
say of which weights they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cxlkv.adapters.common import loaded
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.lora import Adapters

from ..support.paged_engine import TOKENS, Adapter, Engine, Request, layout_of, make_pool, text
from ..support.reloaded import Model
from ..support.weight_files import change, safetensors

IDS = text(1, 5 * TOKENS + 3)


class Served:
    """An engine of one or more ranks on a pool of its own, each with a model."""

    def __init__(self, folder: Path, ranks: int = 1):
        self.paths = [str(folder / f"{rank}of{ranks}.pool") for rank in range(ranks)]
        for path in self.paths:
            if not Path(path).exists():
                make_pool(path, layout_of(0))
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


def test_one_that_skips_reading_waits_for_no_look_at_weights(served: Served) -> None:
    """The engine begins it, whatever is said; of which weights its K and V are is not known yet."""
    served.load(2)
    scheduling = served.engine.scheduling
    scheduling.forgotten()
    request = Request("a", list(IDS), skip_reading_prefix_cache=True)
    assert scheduling.match(request, 0) == (0, False)
    assert not scheduling._options["a"].save
    scheduling.ended(request)


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "adapter_model.safetensors")


def test_an_adapter_that_is_loaded_in_place_is_another(file: Path) -> None:
    adapters, one = Adapters(), Adapter(str(file.parent))
    first, _ = adapters.space_of(one)
    assert adapters.space_of(replace(one, load_inplace=True)) == (first, False)
    change(file, -1)
    second, changed = adapters.space_of(replace(one, load_inplace=True))
    assert (changed, second == first) == (True, False)
    assert second == Adapters().space_of(one)[0], "a new engine loads the same"
    assert adapters.may_save(one, 0)
    assert not adapters.may_save(one, 8), "the engine's own prefix cache has blocks of the first"
    adapters.forgotten()
    assert adapters.may_save(one, 8)


def test_an_adapter_that_changed_on_disk_alone_shares_nothing_until_it_is_loaded(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine may load it between two requests, where it had no room for it."""
    adapters, one = Adapters(), Adapter(str(file.parent))
    adapters.space_of(one)
    change(file, -1)
    found = [adapters.space_of(one) for _ in range(3)]
    assert [changed for _, changed in found] == [True, False, False]
    known, _ = Adapters().space_of(one)
    assert len({known, *(space for space, _ in found)}) == 4
    assert not adapters.may_save(one, 0)
    assert caplog.text.count("may have either") == 1
    assert adapters.space_of(replace(one, load_inplace=True)) == (known, True)
    assert adapters.may_save(one, 0)


def test_an_adapter_whose_files_are_touched_is_the_same(file: Path) -> None:
    adapters, one = Adapters(), Adapter(str(file.parent))
    first, _ = adapters.space_of(one)
    os.utime(file)
    assert adapters.space_of(one) == (first, False)


def test_an_adapter_that_was_removed_is_loaded_once(file: Path) -> None:
    adapters, one = Adapters(), Adapter(str(file.parent))
    adapters.space_of(one)
    adapters.removed(1)
    change(file, -1)
    assert adapters.space_of(one) == (Adapters().space_of(one)[0], True)
    change(file, -2)
    adapters.space_of(one)
    assert not adapters.may_save(one, 0)


def test_two_ids_of_one_path_share_the_engines_own_blocks(file: Path) -> None:
    adapters, one = Adapters(), Adapter(str(file.parent))
    adapters.space_of(one)
    change(file, -1)
    other = replace(one, lora_int_id=2)
    adapters.space_of(other)
    assert adapters.may_save(other, 0)
    assert not adapters.may_save(other, 8)


def test_a_request_whose_adapter_is_loaded_in_each_step_stores_no_more_when_it_changes(
    served: Served, file: Path
) -> None:
    engine, adapter = served.engine, Adapter(str(file.parent), load_inplace=True)
    engine.join(Request("a", list(IDS), lora_request=adapter))
    engine.step()
    engine.step()
    stored = engine.told_blocks
    assert stored == 6
    change(file, -1)
    for _ in range(3 * TOKENS):
        engine.step()
    engine.end("a")
    engine.step()
    assert engine.told_blocks == stored


def test_an_adapter_that_is_loaded_beside_requests_is_named_then(
    served: Served, file: Path
) -> None:
    """And what the engine does not load is not."""
    scheduling, one = served.engine.scheduling, Adapter(str(file.parent))
    scheduling.adapter_loaded(one)
    change(file, -1)
    for name in "ab":
        request = served.engine.join(Request(name, list(IDS), lora_request=one))
        served.engine.settle()
        served.engine.end(request.request_id)
        served.engine.step()
        assert served.engine.cached[name] == 0
    assert served.engine.told_blocks == 0
    scheduling.adapter_removed(1)
    for name, cached in {"c": 0, "d": 5 * TOKENS}.items():
        served.engine.join(Request(name, list(IDS), lora_request=one))
        served.engine.settle()
        served.engine.step()
        served.engine.end(name)
        served.engine.step()
        assert served.engine.cached[name] == cached
