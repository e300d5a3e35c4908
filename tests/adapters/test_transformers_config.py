"""What a config may say otherwise with equal keys: identity.ALLOWED, tried in each family."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from cxlkv.adapters.common.identity import (
    ALLOWED,
    LENGTH,
    LENGTH_FREE,
    config_words,
    depends_on_length,
)
from cxlkv.adapters.transformers.layouts import config_words as words_of

from ..support.small_models import VOCABULARY_SIZE
from .test_transformers_models import MODELS, make

OTHER: dict[str, object] = {
    "_name_or_path": "/elsewhere",
    "transformers_version": "4.0",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 5,
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "initializer_range": 0.5,
}
ROPES: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def keys_and_values(model: PreTrainedModel) -> list[torch.Tensor]:
    ids = torch.randint(6, VOCABULARY_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    asked = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True, **asked)
    found = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    assert all(isinstance(one, torch.Tensor) for one in found)
    return found


def changed(model: PreTrainedModel, words: Mapping[str, object]) -> PreTrainedModel:
    """The same weights under another config."""
    config = type(model.config).from_dict({**model.config.to_dict(), **words})
    other = type(model)(config)
    other.train(False)
    other.load_state_dict(model.state_dict())
    assert isinstance(other, PreTrainedModel)
    return other


def test_each_allowed_field_is_tried() -> None:
    assert OTHER.keys() == ALLOWED.keys()
    assert ROPES.keys() == set(LENGTH_FREE)


@pytest.mark.parametrize("family", MODELS)
def test_allowed_fields_change_no_bit(family: str) -> None:
    model = make(family)
    right, given = keys_and_values(model), model.config.to_dict()
    assert right
    tried = {name: value for name, value in OTHER.items() if given.get(name, value) != value}
    assert len(tried) > 8
    if not depends_on_length(given):
        tried[LENGTH] = given[LENGTH] * 2
    for name, value in tried.items():
        other = changed(model, {name: value})
        assert words_of(other) == words_of(model), name
        for one, wanted in zip(keys_and_values(other), right, strict=True):
            assert torch.equal(one, wanted), name


@pytest.mark.parametrize("kind", ROPES)
def test_the_length_changes_no_bit_with_these_ropes(kind: str) -> None:
    rope = {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, **ROPES[kind]}}
    model = make("llama", **rope)
    other = changed(model, {LENGTH: 2 * model.config.max_position_embeddings})
    assert words_of(other) == words_of(model)
    for one, wanted in zip(keys_and_values(other), keys_and_values(model), strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("family", MODELS)
def test_every_other_field_counts(family: str) -> None:
    given = make(family).config.to_dict()
    before = config_words(given)
    for name in given.keys() - ALLOWED.keys() - {LENGTH}:
        assert config_words({**given, name: "another"}) != before, name
