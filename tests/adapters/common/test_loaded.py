"""Models whose weights are loaded anew: what is seen of it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from cxlkv.adapters.common import loaded
from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.loaded import Loaded, models_of, models_with
from cxlkv.adapters.common.parameters import fingerprint

from ...support.reloaded import Model, model_of


def test_weights_that_a_kernel_has_taken_are_others_when_they_are_made_anew() -> None:
    model = Model()
    model.pack()
    own = Loaded([model])
    assert (own.look(), own.state) == (False, b"")
    model.pack()
    assert own.look()
    assert own.state


def test_the_model_is_found_by_its_attention() -> None:
    one, other = Model(), Model()
    gc.collect()
    assert models_with([one.attention]) == [one]
    assert models_with([other.attention, one.attention]) == [other, one]


def test_a_fingerprint_sees_each_tensor_and_its_shape() -> None:
    tensors = {
        "plain": torch.zeros(3000),
        "transposed": torch.zeros(200, 300).T,
        "sliced": torch.zeros(50, 400)[:, ::2],
        "expanded": torch.zeros(1, 4).expand(8, 4),
        "none": torch.zeros(0),
        "scalar": torch.tensor(0.0),
        "bf16": torch.zeros(64, dtype=torch.bfloat16),
        "bool": torch.zeros(5, dtype=torch.bool),
    }
    before = fingerprint(tensors.items())
    assert fingerprint(tensors.items()) == before
    for name, tensor in tensors.items():
        if name in ("none", "expanded"):
            continue
        kept = tensor.clone()
        tensor.view(-1)[-1:].fill_(1) if tensor.is_contiguous() else tensor[-1, -1].fill_(1)
        assert fingerprint(tensors.items()) != before, name
        tensor.copy_(kept)
    assert fingerprint(tensors.items()) == before
    assert fingerprint({**tensors, "plain": torch.zeros(3001)}.items()) != before


def test_models_are_found_by_the_package_of_their_layers() -> None:
    one, other = model_of("engine_a"), Model()
    assert models_of("engine_a", "engine_b") == [one]
    assert models_of("engine_b") == []
    gc.freeze()
    try:
        assert models_of("engine_a") == [one], "engines freeze what lives as long as they do"
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert other not in models_of("engine_a")


def test_of_several_ranks_each_load_counts() -> None:
    """Another rank's part may have changed where this one's did not."""
    alone, together = model_of("a"), model_of("a")
    states = [Loaded([alone]), Loaded([together], are_alone=False)]
    for model in (alone, together):
        model.load(0)
    assert [one.may_differ for one in states] == [True, True]
    assert [one.look() for one in states] == [False, True]
    assert not any(one.may_differ for one in states)
    first = states[1].state
    together.load(0)
    states[1].look()
    assert len({first, states[1].state, b""}) == 3
    assert [one.look() for one in states] == [False, False]


# ---- keys ----


def test_nothing_is_shared_between_other_weights_and_a_flush() -> None:
    model = model_of("engine_c")
    weights = KeyedWeights(["engine_c"], are_alone=True)
    assert weights.state == b""
    model.load(1)
    assert weights.state is None
    weights.look()
    assert weights.state is None
    weights.flushed()
    other = weights.state
    assert other
    model.load(0)
    weights.look()
    assert weights.state is None, "though they are those of the start: what is cached is not"
    weights.flushed()
    assert weights.state == b""
    model.load(1)
    weights.flushed()
    assert weights.state == other


def test_what_was_loaded_again_and_is_the_same_loses_nothing() -> None:
    model = model_of("engine_d")
    weights = KeyedWeights(["engine_d"], are_alone=True)
    model.load(0)
    assert weights.state is None, "nobody has looked"
    weights.look()
    assert weights.state == b""


def test_after_a_second_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("engine_e")
    weights = KeyedWeights(["engine_e"], are_alone=True)
    model.write(1)
    weights.look()
    assert weights.state == b""
    monkeypatch.setattr(loaded, "IDLE_S", -1.0)
    weights.look()
    assert weights.state is None
    monkeypatch.setattr(loaded, "IDLE_S", 1.0)
    weights.flushed()
    assert weights.state


@pytest.mark.parametrize("how", ["away", "broken"])
def test_weights_that_cannot_be_read_are_shared_with_nobody(how: str) -> None:
    model = model_of(f"engine_{how}")
    is_there = True
    weights = KeyedWeights([f"engine_{how}"], True, lambda: is_there)
    is_there = how == "broken"
    if how == "broken":
        model.embedding.weight = nn.Parameter(torch.empty(64, 32, device="meta"))
    weights.flushed()
    assert weights.state is None
    is_there = True
    if how == "broken":
        model.embedding.weight = nn.Parameter(torch.zeros(64, 32))
    weights.look()
    assert weights.state is None
    weights.flushed()
    assert weights.state == b""
