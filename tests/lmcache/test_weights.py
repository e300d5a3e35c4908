"""LMCache in an engine that loads weights anew: nothing is shared from there on.

LMCache's own engine; the model is a few layers of torch, whose attention's class is of vLLM's.
"""

from __future__ import annotations

import pytest

from cxlkv.adapters.common import loaded

from ..support.reloaded import Model, model_of
from .conftest import MakeEngine
from .engines import CHUNK, Engine, text

TOKENS = 4 * CHUNK


@pytest.fixture
def model() -> Model:
    return model_of("vllm")


def found(engine: Engine, seed: int) -> tuple[int, int]:
    """Tokens by a lookup, and those that were retrieved."""
    return engine.lookup(text(seed, TOKENS)), engine.retrieve(text(seed, TOKENS))


def store(engine: Engine, seed: int) -> int:
    """Objects that are new in the pool."""
    before = engine.storage.counting.counts["stored_objects"]
    engine.fill(seed)
    engine.store(text(seed, TOKENS))
    return engine.storage.counting.counts["stored_objects"] - before


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("form", ["memory", "staged"])
@pytest.mark.parametrize("how", ["load", "write"])
def test_other_weights_find_and_store_nothing(
    make_engine: MakeEngine,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    form: str,
    layerwise: bool,
) -> None:
    """A fresh engine finds what was stored before, and nothing of after."""
    engine = make_engine(form=form, use_layerwise=layerwise)
    store(engine, 1)
    assert found(engine, 1) == (TOKENS, TOKENS)
    getattr(model, how)(1)
    if how == "write":  # without load_weights(): seen after a second without loads and stores
        monkeypatch.setattr(loaded, "IDLE_S", -1.0)
        assert engine.retrieve(text(1, TOKENS)) == 0  # by layers a lookup goes before it
        monkeypatch.setattr(loaded, "IDLE_S", 1.0)
    assert found(engine, 1) == (0, 0)
    assert store(engine, 2) == 0
    model.load(0)
    assert (store(engine, 2), *found(engine, 1)) == (0, 0, 0), "what vLLM has may be of either"
    assert engine.storage.allocator.out == 0
    assert engine.storage.counting.failures["weights"] > 0
    fresh = make_engine(form=form, use_layerwise=layerwise)
    assert found(fresh, 1) == (TOKENS, TOKENS)
    assert found(fresh, 2) == (0, 0)


def test_the_same_weights_loaded_again_lose_nothing(make_engine: MakeEngine, model: Model) -> None:
    engine = make_engine()
    store(engine, 1)
    model.load(0)
    assert store(engine, 2) > 0
    assert found(engine, 1) == (TOKENS, TOKENS)


def test_of_several_ranks_each_load_counts(make_engine: MakeEngine, model: Model) -> None:
    """Another rank's part may have changed, and this one's K and V with it."""
    engine = make_engine(workers=2)
    store(engine, 1)
    model.load(0)
    assert (store(engine, 2), *found(engine, 1)) == (0, 0, 0)
