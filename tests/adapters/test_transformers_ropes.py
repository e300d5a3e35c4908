"""Ropes that depend on the length of a text, on both sides of their border.

Every text gives DynamicCache's tokens. The border is at 64 tokens, and pages have 8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache as once
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, CXLRequests, hand_over, take_over
from cxlkv.adapters.transformers.ropes import depends_on_length, form_now, form_of
from cxlkv.errors import BadArgumentError

from ..support.small_models import Generates, built, prompts
from .test_transformers_requests import pool as pool

BORDER = 64
LONGROPE: dict[str, object] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": BORDER,
    "factor": 4.0,
}
PLAIN: dict[str, object] = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC: dict[str, object] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
BEYOND: dict[str, object] = {
    "hidden_size": 64,  # of four heads of 16 channels, for which the factors are
    "max_position_embeddings": 4 * BORDER,
    "original_max_position_embeddings": BORDER,
}


def phi3(**more: object) -> PreTrainedModel:
    given = {"rope_parameters": LONGROPE, "sliding_window": None, **BEYOND, **more}
    return built(Phi3Config, Phi3ForCausalLM, **given)


def phi3_in_part() -> PreTrainedModel:
    """Only half of the channels turn."""
    rope = {**LONGROPE, "partial_rotary_factor": 0.5, "short_factor": [1.0] * 4}
    return phi3(rope_parameters={**rope, "long_factor": [4.0, 5.0, 6.0, 7.0]})


def phimoe() -> PreTrainedModel:
    rope = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
    return built(PhimoeConfig, PhimoeForCausalLM, rope_parameters=rope, **BEYOND, **more)


def longrope_llama() -> PreTrainedModel:
    """Its generate() does not read a text anew at the border."""
    return built(LlamaConfig, LlamaForCausalLM, rope_parameters=LONGROPE, **BEYOND)


def gemma3(full: dict[str, object] = LONGROPE, longest: int = 4 * BORDER) -> PreTrainedModel:
    """A rope for each type of layers, of which one depends on the length."""
    return built(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        rope_parameters={"full_attention": full, "sliding_attention": PLAIN},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=23,
        max_position_embeddings=longest,
    )


def dynamic_gemma3() -> PreTrainedModel:
    return gemma3(DYNAMIC, BORDER)


def dynamic() -> PreTrainedModel:
    more = {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}
    return built(LlamaConfig, LlamaForCausalLM, **more)


LONG = (phi3, phi3_in_part, phimoe, longrope_llama, gemma3)
ALL = (*LONG, dynamic, dynamic_gemma3)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = request.param()
    assert isinstance(made, PreTrainedModel)
    return made


@once
def text() -> Tensor:
    return prompts((160,))[0]


def generate(model: PreTrainedModel, ids: Tensor, cache: object, **more: object) -> Tensor:
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, **more}
    return cast(Generates, model).generate(ids, past_key_values=cache, **settings)


def wanted(model: PreTrainedModel, ids: Tensor, **more: object) -> Tensor:
    """By a copy, whose rope has seen what the model's has."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    return generate(other, ids, DynamicCache(config=other.config), **more)


def read(requests: CXLRequests, model: PreTrainedModel, ids: Tensor, **more: object) -> int:
    """How much was found of a text; what comes of it is right."""
    expected = wanted(model, ids, **more)
    with requests.begin(ids) as cache:
        found = cache.get_seq_length()
        out = generate(model, ids, cache, **more)
        if not more:
            requests.keep(cache, out)
    assert torch.equal(out, expected)
    return found


def names(one: Callable[[], PreTrainedModel]) -> str:
    return one.__name__


@pytest.mark.parametrize("model", ALL, ids=names, indirect=True)
def test_a_cache_across_the_border(model: PreTrainedModel, pool: CXLPool) -> None:
    """Behind it from the start, across it, and just before it; then the other way round."""
    for length in (100, 58, 64, 40, 65, 63, 100, 20):
        ids = text()[:, :length]
        expected = wanted(model, ids)
        cache = CXLCache(pool, model)
        assert torch.equal(generate(model, ids, cache), expected)
        assert cache.get_seq_length() == length + 11, "in the pool"
        cache.release()


@pytest.mark.parametrize("model", LONG, ids=names, indirect=True)
def test_longrope_is_shared_on_each_side(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    short, long = text()[:, :40], text()[:, :100]
    assert read(requests, model, short) == 0
    assert read(requests, model, long) == 0, "40 of its tokens are there, of the short form"
    assert read(requests, model, short) == 32
    assert read(requests, model, long) == 96
    assert read(requests, model, text()[:, :120]) == 96
    assert not requests.failures()


@pytest.mark.parametrize("model", ALL, ids=names, indirect=True)
def test_a_talk_that_grows_beyond_the_border(model: PreTrainedModel, pool: CXLPool) -> None:
    requests, ids, found = CXLRequests(pool, model), text()[:, :30], list[int]()
    for _ in range(6):
        expected = wanted(model, ids)
        with requests.begin(ids) as cache:
            found.append(cache.get_seq_length())
            out = generate(model, ids, cache)
            requests.keep(cache, out)
        assert torch.equal(out, expected)
        ids = torch.cat((out, text()[:, :5]), dim=1)
    assert found[:2] == [0, 40]


@pytest.mark.parametrize("model", ALL, ids=names, indirect=True)
def test_beams_and_drafts_across(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    for length in (60, 100, 60, 100):
        read(requests, model, text()[:, :length], num_beams=3)
    for length in (60, 100):
        ids = text()[:, :length].flip(1)
        read(requests, model, ids, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("model", [phi3, dynamic], ids=names, indirect=True)
def test_a_padded_batch_across(model: PreTrainedModel, pool: CXLPool) -> None:
    """The longest row decides for all."""
    requests = CXLRequests(pool, model)
    for lengths in ((60, 30), (100, 30), (60, 30), (30, 20), (100, 30)):
        ids, mask = prompts(lengths)
        expected = wanted(model, ids, attention_mask=mask)
        with requests.begin(ids, mask) as cache:
            out = generate(model, ids, cache, attention_mask=mask)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("model", [dynamic, dynamic_gemma3], ids=names, indirect=True)
def test_dynamic_ntk(model: PreTrainedModel, pool: CXLPool) -> None:
    """Texts within the border are shared, whatever came between; longer ones where the rope has
    not grown since."""
    requests = CXLRequests(pool, model)
    short, long = text()[:, :40], text()[:, :100]
    assert read(requests, model, short) == 0
    assert read(requests, model, short) == 32
    assert read(requests, model, long) == 0, "for 100 tokens"
    assert read(requests, model, long) == 0, "for 111 tokens, which the first one had in the end"
    assert read(requests, model, long) == 96
    assert read(requests, model, short) == 32
    assert read(requests, model, long) == 96, "for 100 tokens: the short text took all back"


@pytest.mark.parametrize("model", [phi3], ids=names, indirect=True)
def test_a_config_that_was_edited(model: PreTrainedModel, pool: CXLPool) -> None:
    requests, ids = CXLRequests(pool, model), text()[:, :40]
    assert [read(requests, model, ids), read(requests, model, ids)] == [0, 32]
    before = copy.deepcopy(model.config.rope_parameters)
    model.config.rope_parameters["original_max_position_embeddings"] = 32
    model.config.original_max_position_embeddings = 32
    assert [read(requests, model, ids), read(requests, model, ids)] == [0, 32]
    model.config.rope_parameters = before
    model.config.original_max_position_embeddings = BORDER
    assert read(requests, model, ids) == 32


@pytest.mark.parametrize("model", [phi3, dynamic], ids=names, indirect=True)
def test_a_part_of_a_long_text_is_refused_on_pages_of_all_of_it(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    """A pass that ends before the border would turn its keys otherwise."""
    requests, ids = CXLRequests(pool, model), text()[:, :100]
    with requests.begin(ids) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
    rest = torch.cat((ids[:, :40], ids[:, :60]), dim=1)
    with requests.begin(rest) as cache, torch.no_grad():
        assert cache.get_seq_length() == 40
        if model.config.model_type == "llama":  # its rope was as the long text left it
            model.model.rotary_emb(torch.zeros(1), torch.arange(20)[None])
        with pytest.raises(BadArgumentError, match="in one pass"):
            model(rest[:, 40:60], past_key_values=cache)


@pytest.mark.parametrize("model", [phi3, dynamic], ids=names, indirect=True)
def test_hand_over(model: PreTrainedModel, pool: CXLPool) -> None:
    """Taken over where the next pass is the same; a rope that has grown beyond is another one."""
    other = copy.deepcopy(model)
    for length in (40, 100):
        ids = text()[:, :length]
        cache = CXLCache(pool, model)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
        data = hand_over(cache, model)
        expected = generate(copy.deepcopy(model), ids, cache.fork())
        taken = take_over(data, pool, other)
        assert torch.equal(generate(other, ids, taken), expected)
        if length == 100 and model.config.model_type == "llama":
            with pytest.raises(BadArgumentError, match="longer texts made of its rope"):
                take_over(hand_over(cache, model), pool, other)
        taken.release()
        cache.release()


@pytest.mark.parametrize("model", ALL, ids=names, indirect=True)
def test_asking_changes_nothing(model: PreTrainedModel) -> None:
    ropes = [one for one in model.modules() if depends_on_length(one)]
    assert len(ropes) == 1
    before = form_now(ropes), str(vars(ropes[0]))
    forms = {length: form_of(ropes, length) for length in (1, 40, 63, 64, 65, 100, 40)}
    assert (form_now(ropes), str(vars(ropes[0]))) == before
    assert forms[1] == forms[40] == forms[63] == forms[64] != forms[65]
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        for length in (40, 65, 100):
            fresh = copy.deepcopy(model)
            fresh(text()[:, :length])
            assert (
                form_now([one for one in fresh.modules() if depends_on_length(one)])
                == (forms[length])
            )
