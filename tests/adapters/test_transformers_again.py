"""Passes that feed a filled CXLCache its text again, that come without it, or lead gradients to it.

Assisted decoding feeds the whole prompt again. Such passes once were taken as new tokens, and what
they made was published under the prompt's keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, CXLRequests
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.kernels import runtime

from ..support.small_models import VOCABULARY_SIZE, pool_for
from .test_transformers_models import make

NEW = 10
ASSISTED = ("prompt_lookup", "assistant")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    found = make(request.param)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in found.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
    return found


@pytest.fixture
def pool(model: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(model) as found:
        yield found


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """A text that repeats itself, so that a lookup finds something."""
    part = torch.randint(6, VOCABULARY_SIZE, (1, 20), generator=torch.Generator().manual_seed(2))
    return torch.cat([part, part, part[:, :9]], dim=1)


def generate(
    model: PreTrainedModel, ids: Tensor, cache: object, how: str = "", **more: object
) -> list[int]:
    attention = "sdpa" if isinstance(cache, DynamicCache) else "cxlkv"
    model.set_attn_implementation(attention)
    if how == "prompt_lookup":
        more["prompt_lookup_num_tokens"] = 3
    if how == "assistant":
        more["assistant_model"] = make("llama")
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=NEW,
        **more,
    )
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def wanted(model: PreTrainedModel, ids: Tensor) -> list[int]:
    return generate(model, ids, DynamicCache(config=model.config))


@pytest.mark.parametrize("how", ASSISTED)
@pytest.mark.parametrize("filled", [0, 20, 40])
def test_assisted_decoding_on_a_filled_cache(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor, how: str, filled: int
) -> None:
    right = wanted(model, ids)
    cache = CXLCache(pool, model)
    if filled:
        model.set_attn_implementation("cxlkv")
        with torch.no_grad():
            model(ids[:, :filled], past_key_values=cache)
    assert generate(model, ids, cache, how) == right
    assert cache.get_seq_length() >= ids.shape[1]
    cache.release()


@pytest.mark.parametrize("how", ASSISTED)
def test_assisted_decoding_publishes_right_pages(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor, how: str
) -> None:
    right = wanted(model, ids)
    model.set_attn_implementation("cxlkv")
    requests = CXLRequests(pool, model)
    for step, text in enumerate((ids[:, :30], ids, ids)):
        with requests.begin(text) as cache:
            assert (cache.get_seq_length() > 0) == (step > 0)
            if step < 2:
                generate(model, text, cache, how)
            else:
                assert generate(model, text, cache) == right


def test_a_part_that_is_fed_again_is_refused(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor
) -> None:
    model.set_attn_implementation("cxlkv")
    cache = CXLCache(pool, model)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        for first, last in ((20, 40), (29, 40), (20, 30)):
            positions = torch.arange(first, last)[None]
            with pytest.raises(BadArgumentError, match="the cache holds 30 tokens"):
                model(ids[:, first:last], past_key_values=cache, position_ids=positions)
        cache.crop(20)
        model(ids[:, 20:], past_key_values=cache, position_ids=torch.arange(20, 49)[None])
    cache.release()


def test_guidance_and_early_exit_are_refused_by_name(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor
) -> None:
    cache = CXLCache(pool, model)
    with pytest.raises(BadArgumentError, match="guidance_scale and assistant_early_exit"):
        generate(model, ids, cache, guidance_scale=1.5)
    cache.release()


# ---- gradients ----


def loss(model: PreTrainedModel, ids: Tensor, cache: object, parts: int) -> Tensor:
    model.zero_grad()
    for part in ids.chunk(parts, dim=1):
        logits = model(part, past_key_values=cache).logits
    found = logits.square().mean()
    assert isinstance(found, Tensor)
    return found


def test_gradients_of_a_pass_on_an_empty_cache_are_right(
    model: PreTrainedModel, pool: CXLPool, ids: Tensor
) -> None:
    model.set_attn_implementation("sdpa")
    found = loss(model, ids, DynamicCache(config=model.config), 1)
    found.backward()  # type: ignore[no-untyped-call]
    right = {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }
    model.set_attn_implementation("cxlkv")
    loss(model, ids, CXLCache(pool, model), 1).backward()  # type: ignore[no-untyped-call]
    for name, one in model.named_parameters():
        assert (one.grad is None) == (name not in right)
        if one.grad is not None:
            assert torch.allclose(one.grad, right[name], rtol=1e-3, atol=1e-6), name
    model.zero_grad()


@pytest.mark.parametrize("settings", [{}, {"attention": "gpu", "budget": 0.5}])
@pytest.mark.parametrize("parts", [2, 49])
def test_gradients_through_the_pool_are_refused(
    model: PreTrainedModel,
    pool: CXLPool,
    ids: Tensor,
    parts: int,
    settings: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    model.set_attn_implementation("cxlkv")
    cache = CXLCache(pool, model, **settings)  # type: ignore[arg-type]
    found = loss(model, ids, cache, parts)
    with pytest.raises(UnsupportedError, match="no_grad"):
        found.backward()  # type: ignore[no-untyped-call]
    cache.release()
    with torch.no_grad():
        assert not loss(model, ids, CXLCache(pool, model), parts).requires_grad
    for one in model.parameters():
        one.requires_grad_(False)
    assert not loss(model, ids, CXLCache(pool, model), parts).requires_grad
    for one in model.parameters():
        one.requires_grad_(True)
