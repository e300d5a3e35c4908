"""Hints in transformers: a layer's query beforehand, what comes near by it, and what does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import CXLCache, Hints, LayerStep, layout_of
from cxlkv.adapters.transformers.attention import DecoderLayer, asked_query
from cxlkv.adapters.transformers.hints import layers_of, unhinted
from cxlkv.adapters.transformers.steps import Call
from cxlkv.demo.facts import load_model
from cxlkv.demo.task import make_context
from cxlkv.errors import ReleasedError
from cxlkv.ndp.engine import Selection
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.prefetch import Hinted

from ..support.small_models import LAYERS, pool_for, prompts, run
from .test_transformers_models import make

BUDGET = Budget(pages=3, sinks=1, recent=1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(request.param)


@pytest.fixture
def pool(model: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(model) as made:
        yield made


def test_a_layers_own_input_gives_its_own_query(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotations and all: to the bit what the layer hands to its attention."""
    asked: list[Tensor] = []
    handed: list[Tensor] = []
    forward = CXLCache.forward

    def record(self: CXLCache, layer: object, call: Call) -> Tensor:
        handed.append(call.query)
        return forward(self, layer, call)  # type: ignore[arg-type]

    def ask(layer: torch.nn.Module, args: tuple[Tensor], given: dict[str, object]) -> None:
        asked.append(asked_query(cast(DecoderLayer, layer), args[0], given))

    monkeypatch.setattr(CXLCache, "forward", record)
    ids, mask = prompts((40, 33))
    cache = CXLCache(pool, model, BUDGET)
    hooks = [layer.register_forward_pre_hook(ask, with_kwargs=True) for layer in layers_of(model)]
    run(model, ids[:, :39], cache, mask[:, :39])
    run(model, ids[:, 39:], cache, mask)
    for hook in hooks:
        hook.remove()
    assert len(asked) == len(handed) == 2 * LAYERS
    assert all(torch.equal(a, h) for a, h in zip(asked, handed, strict=True))


@pytest.mark.parametrize("wait", [True, False])
def test_outputs_are_what_they_are_without_hints(
    model: PreTrainedModel, pool: CXLPool, wait: bool
) -> None:
    ids, mask = prompts((60, 47))
    steps = torch.randint(1, 60, (12, 2, 1), generator=torch.Generator().manual_seed(5))

    def decode(cache: CXLCache) -> list[Tensor]:
        run(model, ids, cache, mask)
        shown, found = mask, []
        for step in steps:
            shown = torch.cat([shown, torch.ones(2, 1, dtype=torch.long)], 1)
            found.append(run(model, step, cache, shown))
        return found

    plain = decode(CXLCache(pool, model, BUDGET, method="exact"))
    cache = CXLCache(pool, model, BUDGET, method="exact")
    with LocalTier(pool, "1MiB") as tier, Hints(model, cache, tier, wait=wait) as hints:
        assert hints.why is None
        hinted = decode(cache)
        stats = hints.stats()
        assert stats["failed"] == 0
        if wait:
            assert stats["late"] == 0
            assert tier.stats()["promoted"] > 0
            assert tier.stats()["reads_local"] > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, hinted, strict=True))
    assert cache.on_choice is None  # and a step is one call again


@pytest.mark.parametrize("error", [TypeError("a fault"), ReleasedError("gone")])
def test_a_hint_that_fails_is_counted_and_fails_no_step(
    model: PreTrainedModel, pool: CXLPool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Hinted, "hint", fail)
    ids, mask = prompts((40, 33))
    cache = CXLCache(pool, model, BUDGET, method="exact")
    with LocalTier(pool, "1MiB") as tier, Hints(model, cache, tier, wait=True) as hints:
        run(model, ids[:, :39], cache, mask[:, :39])
        run(model, ids[:, 39:], cache, mask)
        assert hints.stats()["failed"] == LAYERS


def test_what_has_no_hints_says_why(pool: CXLPool) -> None:
    for name, words in (("mistral", "windows"), ("deepseek-v3", "MLA")):
        other = make(name)
        with pool_for(other) as own:
            cache = CXLCache(own, other, BUDGET)
            assert words in (unhinted(other, cache) or "")
            with LocalTier(own, "1MiB") as tier, Hints(other, cache, tier) as hints:
                assert hints.why == unhinted(other, cache)
                assert cache.on_choice is None
                run(other, prompts((20,))[0], cache)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64))
    assert "GPT2LMHeadModel has no list" in (unhinted(gpt2, CXLCache(pool, make("llama"))) or "")


def test_hints_that_come_too_late_are_left_out(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one holds the thread up until the step is over; of the others the last is left."""
    go, done = threading.Event(), threading.Semaphore(0)
    seen: list[int] = []

    def hold(self: Hinted, layer: int, *_: object, **__: object) -> int:
        go.wait()
        seen.append(layer)
        done.release()
        return 0

    monkeypatch.setattr(Hinted, "hint", hold)
    cache = CXLCache(pool, model, BUDGET)
    with LocalTier(pool, "1MiB") as tier, Hints(model, cache, tier) as hints:
        run(model, prompts((40,))[0], cache)
        run(model, torch.tensor([[3]]), cache)
        go.set()
        done.acquire()
        done.acquire()
        assert seen == [1, 0]
        assert hints.stats()["late"] == LAYERS - 2


class Watched(CXLCache):
    """Keeps what the second layer chose, and what its query was expected to be."""

    wanted: Selection | None = None
    guess: Tensor | None = None

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        picked = super().choose(part, queries)
        self.wanted = picked if part.index == 1 else None
        return picked

    def ask(self, first: torch.nn.Module, args: tuple[Tensor], given: dict[str, object]) -> None:
        second = cast(DecoderLayer, self.layers_of_model[1])
        self.guess = asked_query(second, args[0], given)[0, :, 0]

    layers_of_model: tuple[torch.nn.Module, ...] = ()


def test_of_a_trained_model_hints_find_far_more_than_chance() -> None:
    """The demo's model is asked for facts of a text: which pages its second layer reads is known
    from the first one's input."""
    model = load_model()
    model.set_attn_implementation("cxlkv")
    context, layers = make_context(7, 4096, 64, 24), layers_of(model)
    budget = Budget(share=0.05, sinks=0, recent=0)
    found: list[float] = []
    with CXLPool.create("anonymous:", layout=layout_of(model), capacity="64MiB") as pool:
        base = CXLCache(pool, model, budget)
        run(model, torch.from_numpy(context.tokens)[None], base)
        for question in context.questions.tolist():
            own = [base.sequences[0].fork()]
            cache = Watched(pool, model, budget, method="exact", sequences=own)
            cache.layers_of_model = layers
            hook = layers[0].register_forward_pre_hook(cache.ask, with_kwargs=True)
            run(model, torch.tensor([[question]]), cache)
            hook.remove()
            assert cache.wanted is not None
            guessed = own[0].select(1, cache.guess, budget, method="exact")
            for pages, wanted in zip(guessed.pages, cache.wanted.pages[0], strict=True):
                found.append(float(np.isin(wanted, pages).mean()))
            cache.release()
    assert np.mean(found) > 5 * 0.05, np.mean(found)
