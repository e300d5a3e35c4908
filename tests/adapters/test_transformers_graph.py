"""CXLCache.compile(): decode steps replayed, by a stand-in for CUDA graphs or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

pytest.importorskip("transformers", "5.10", reason="these are steps of its models")

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import CXLCache, Hints
from cxlkv.adapters.transformers import gpu_steps as steps_of_gpu
from cxlkv.adapters.transformers.graph import CompiledSteps
from cxlkv.errors import BadArgumentError, PoolFullError, UnsupportedError
from cxlkv.kernels import runtime

from ..support.graphs import HostGraph
from ..support.lengths import nightly
from ..support.small_models import attend_by, generate, pool_for, prompts, run
from .test_transformers_models import MODES, all_free, assistant_of, dynamic, make

Place = dict[str, str]
HOST: Place = {}
SKETCH: Place = {"index": "device", "method": "sketch"}
DENSE = ("llama", "qwen3", "qwen3-windows", "mistral", "phi3", "gemma2", "gemma3", "latents")
NEW = 8


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, with the references of all kernels and graphs that note calls; or a GPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr("cxlkv.adapters.transformers.graph.graph_on", HostGraph)
    return torch.device("cpu")


def model_on(device: torch.device, name: str = "llama") -> PreTrainedModel:
    dense: dict[str, object] = {"n_routed_experts": 0, "first_k_dense_replace": 3}
    model = make("deepseek-v3", **dense) if name == "latents" else make(name)
    torch.nn.Module.to(model, device)
    return model


def by_gpu(
    pool: CXLPool, model: PreTrainedModel, budget: Budget | None = None, place: Place = SKETCH
) -> CXLCache:
    return CXLCache(pool, model, budget, attention="gpu", **place)  # type: ignore[arg-type]


def on(device: torch.device, *lengths: int) -> tuple[Tensor, Tensor]:
    ids, mask = prompts(lengths)
    return ids.to(device), mask.to(device)


@torch.no_grad()
def step(model: PreTrainedModel, cache: object, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits [rows, vocabulary] of the last tokens, which are new."""
    attend_by(model, cache)
    positions = mask.cumsum(1)[:, -1:] - 1
    logits = model(
        ids[:, -1:], attention_mask=mask, position_ids=positions, past_key_values=cache
    ).logits
    assert isinstance(logits, Tensor)
    return logits[:, -1]


def steps(
    model: PreTrainedModel, cache: object, ids: Tensor, mask: Tensor, first: int, last: int
) -> list[Tensor]:
    """Steps whose rows have then first + 1, ..., last tokens."""
    return [step(model, cache, ids[:, :end], mask[:, :end]) for end in range(first + 1, last + 1)]


@pytest.mark.parametrize(
    ("name", "place", "mode"),
    [
        ("llama", HOST, "greedy"),
        ("gemma3", SKETCH, "beams"),
        *(
            nightly(name, place, mode)
            for name in DENSE
            for place in (HOST, SKETCH)
            for mode in ("greedy", "beams", "samples", "assisted")
        ),
    ],
)
def test_replays_give_the_tokens_of_dynamic_cache(
    device: torch.device, name: str, place: Place, mode: str
) -> None:
    """At 100 % of the pages; of a batch of four of unlike lengths, of one, of rows that move."""
    model, settings = model_on(device, name), {"max_new_tokens": NEW, **MODES[mode]}
    ids, mask = on(device, 33, 20, 27, 5)
    if mode != "greedy":
        ids, mask = ids[:1], mask[:1]
    if mode == "assisted":
        assistant = assistant_of(model)
        torch.nn.Module.to(assistant, device)
        settings["assistant_model"] = assistant
    wanted = generate(model, ids, mask, dynamic(model), **settings)
    with pool_for(model, capacity="32MiB") as pool:
        cache = by_gpu(pool, model, Budget(share=1.0), place)
        with cache.compile(model, batch_sizes=(1, 4)) as compiled:
            assert torch.equal(generate(model, ids, mask, cache, **settings), wanted)
            if mode == "greedy":  # the prefill, and the step that makes a decoder
                assert (compiled.replays, compiled.captures) == (NEW - 2, 1)
                assert cache.counters.steps == NEW - 1
            assert mode == "assisted" or compiled.replays > 2
        assert "forward" not in vars(model)
        cache.release()
        assert all_free(pool)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the kernels are compiled here, for the GPU")
@pytest.mark.parametrize("place", [nightly(HOST), nightly(SKETCH)])
def test_launches_in_the_interpreter_are_replayed(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """Each launch of a kernel by itself, as a graph has it."""
    monkeypatch.setattr("cxlkv.adapters.transformers.graph.graph_on", HostGraph)
    model = make("llama")
    ids, mask = prompts((21,))
    wanted = generate(model, ids, mask, DynamicCache(), max_new_tokens=6)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model, None, place)
        with cache.compile(model) as compiled:
            assert torch.equal(generate(model, ids, mask, cache, max_new_tokens=6), wanted)
            assert compiled.replays == 4
        cache.release()


@pytest.mark.parametrize("place", [SKETCH, nightly(HOST)])
def test_texts_budgets_and_decoders_change_between_replays(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """Tokens taken back, another text in the same cache, a text that outgrows its decoder, another
    budget; the same as of a cache that is not compiled."""
    monkeypatch.setattr(steps_of_gpu, "PAGES_MORE", 1)  # room for 8 pages, of 4 tokens
    model, few = model_on(device), Budget(pages=4, sinks=1, recent=2)
    if place is HOST:  # a step attends to the hot buffer, too, which the stand-in's capture fills
        few = Budget(share=1.0, sinks=0)
    ids, mask = on(device, 40)
    other = ids.flip(1)
    with pool_for(model, capacity="32MiB") as pool:
        plain = by_gpu(pool, model, few, place)
        cache = by_gpu(pool, model, few, place)
        with cache.compile(model) as compiled:

            def same(text: Tensor, first: int, last: int) -> None:
                made = [torch.stack(steps(model, one, text, mask, first, last)) for one in both]
                torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)

            both = (plain, cache)
            for one in both:
                run(model, ids[:, :26], one, mask[:, :26])
            same(ids, 26, 30)
            assert (compiled.replays, compiled.captures) == (3, 1)
            for one in both:
                one.crop(-7)
            same(other, 23, 26)  # other tokens in the place of those
            assert (compiled.replays, compiled.captures) == (6, 1)
            for one in both:
                one.restart()  # another text
                run(model, other[:, :28], one, mask[:, :28])
            same(other, 28, 36)  # the ninth page
            assert compiled.captures == 2
            assert compiled.eager["a decoder is to be made"] == 2
            for one in both:
                one.budget = Budget(share=1.0)
            same(other, 36, 38)
            assert (compiled.replays, compiled.captures) == (14, 3)
        for one in both:
            one.release()


def test_rows_change_their_budgets_between_replays(device: torch.device) -> None:
    """The graph reads how many pages each row wants; it is captured once."""
    model, few, all_pages = model_on(device), Budget(pages=4, sinks=1), Budget(share=1.0, sinks=1)
    ids, mask = on(device, 40, 33)
    with pool_for(model, capacity="32MiB") as pool:
        cache = by_gpu(pool, model)
        both = (by_gpu(pool, model), cache)
        with cache.compile(model, batch_sizes=(2,)) as compiled:
            for one in both:
                one.budget = [few, all_pages]
                run(model, ids[:, :34], one, mask[:, :34])
            for first, last in ((34, 37), (37, 40)):
                made = [torch.stack(steps(model, one, ids, mask, first, last)) for one in both]
                torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)
                for one in both:
                    one.budget = [all_pages, few]
            assert (compiled.replays, compiled.captures) == (5, 1)
        for one in both:
            one.release()


@pytest.mark.parametrize("place", [SKETCH, nightly(HOST)])
def test_hints_are_part_of_what_is_replayed(device: torch.device, place: Place) -> None:
    """They bring pages in each replay; without them the model is another, and captured anew."""
    model, few = model_on(device), Budget(pages=4, sinks=1, recent=2)
    if place is HOST:  # where hints add pages to those that are attended to
        few = Budget(share=0.99, sinks=1)
    ids, mask = on(device, 44)
    with pool_for(model, capacity="32MiB") as pool:
        cache = by_gpu(pool, model, few, place)
        plain = by_gpu(pool, model, few if place is SKETCH else None, place)
        for one in (plain, cache):
            run(model, ids[:, :34], one, mask[:, :34])
        wanted = torch.stack(steps(model, plain, ids, mask, 34, 44))
        with cache.compile(model) as compiled:
            with Hints(model, cache) as hints:
                made = steps(model, cache, ids, mask, 34, 37)
                before = cache.counters.by_layer
                made += steps(model, cache, ids, mask, 37, 41)
                after = cache.counters.by_layer
                assert hints.stats()["failed"] == 0
            assert before is not None
            assert after is not None
            assert after.hinted.sum() > before.hinted.sum()
            assert (compiled.replays, compiled.captures) == (6, 1)
            made += steps(model, cache, ids, mask, 41, 44)
            assert (compiled.replays, compiled.captures) == (8, 2)
        torch.testing.assert_close(torch.stack(made), wanted, rtol=1e-4, atol=1e-4)
        for one in (plain, cache):
            one.release()


def test_logits_that_were_kept_stay(device: torch.device) -> None:
    model = model_on(device)
    ids, mask = on(device, 30)
    wanted = run(model, ids, DynamicCache(), mask)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)
        with cache.compile(model) as compiled:
            run(model, ids[:, :25], cache, mask[:, :25])
            kept = torch.stack(steps(model, cache, ids, mask, 25, 30), 1)
            assert compiled.replays == 4
        torch.testing.assert_close(kept, wanted[:, 25:], rtol=1e-4, atol=1e-4)
        cache.release()


def test_what_is_no_step_of_the_graph_runs_eagerly(device: torch.device) -> None:
    """And gives the same logits; a reason is counted for each."""
    model = model_on(device)
    ids, mask = on(device, 30, 30)
    wanted = run(model, ids, dynamic(model), mask)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)
        other = by_gpu(pool, model)
        with cache.compile(model, batch_sizes=(2, 3)) as compiled:
            for one in (cache, other):
                run(model, ids[:, :24], one, mask[:, :24])
            steps(model, cache, ids, mask, 24, 26)
            with other.compile(model, batch_sizes=(1, 3)) as more:
                steps(model, other, ids, mask, 24, 26)
            assert (more.replays, dict(more.eager)) == (0, {"batch of 2": 2})
            steps(model, other, ids, mask, 26, 27)  # not of this cache
            assert (compiled.replays, sum(compiled.eager.values())) == (1, 2)
            run(model, ids[:, 26:27], cache, mask[:, :27])
            assert compiled.eager["no position_ids"] == 1
            model.train(True)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(cache, "on_query", lambda *_: None)
                steps(model, cache, ids, mask, 27, 28)
            assert compiled.eager["on_query or on_choice is set"] == 1
            steps(model, cache, ids, mask, 28, 29)
            assert compiled.eager["training"] == 1
            model.train(False)
            hidden = model(
                ids[:, 29:],
                attention_mask=mask,
                position_ids=mask.cumsum(1)[:, -1:] - 1,
                past_key_values=cache,
                output_hidden_states=True,
            )
            assert compiled.eager["output_hidden_states= is given"] == 1
            assert len(hidden.hidden_states) == 4
            torch.testing.assert_close(hidden.logits, wanted[:, 29:], rtol=1e-4, atol=1e-4)
            assert compiled.replays == 1
        for one in (cache, other):
            one.release()


def test_a_step_that_fails_leaves_the_cache_as_it_was(device: torch.device) -> None:
    """The pool is full in a replay; with room it goes on, and an error ends the `with` rightly."""
    model = model_on(device)
    ids, mask = on(device, 35)
    wanted = run(model, ids, DynamicCache(), mask)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)

        def until_full(compiled: CompiledSteps) -> None:
            with compiled:
                run(model, ids[:, :28], cache, mask[:, :28])
                filler = pool.pages.alloc(pool.stats()["pages_free"])
                try:
                    steps(model, cache, ids, mask, 28, 32)  # the tail has room for three
                finally:
                    pool.pages.free(filler)
                    assert compiled.replays == 2

        with pytest.raises(PoolFullError):
            until_full(cache.compile(model))
        assert "forward" not in vars(model)
        assert [len(one) for one in cache.sequences] == [31]
        assert cache.get_seq_length() == 31
        with cache.compile(model) as compiled:
            made = torch.stack(steps(model, cache, ids, mask, 31, 35), 1)
            assert compiled.captures == 1
        torch.testing.assert_close(made, wanted[:, 31:], rtol=1e-4, atol=1e-4)
        cache.release()


def test_a_model_that_has_changed_is_captured_anew(device: torch.device) -> None:
    """A weight in another place, a number in a module: a graph would go on with the old ones."""
    model = model_on(device)
    ids, mask = on(device, 40)
    norm = model.model.norm
    with pool_for(model) as pool:
        plain, cache = by_gpu(pool, model), by_gpu(pool, model)
        with cache.compile(model) as compiled:
            for one in (plain, cache):
                run(model, ids[:, :25], one, mask[:, :25])

            def same(first: int, last: int) -> None:
                both = (plain, cache)
                made = [torch.stack(steps(model, one, ids, mask, first, last)) for one in both]
                torch.testing.assert_close(*made, rtol=1e-4, atol=1e-4)

            same(25, 27)
            norm.weight.data = norm.weight.data * torch.linspace(0.2, 2, 64, device=device)
            same(27, 29)
            assert (compiled.replays, compiled.captures) == (2, 2)
            norm.variance_epsilon = 0.5
            same(29, 31)
            assert (compiled.replays, compiled.captures) == (3, 3)
            assert compiled.eager["the model has changed"] == 2
        for one in (plain, cache):
            one.release()


def test_what_waits_for_the_host_is_refused_where_it_is_captured(device: torch.device) -> None:
    """A read of a tensor, a count of the cached tokens; then the cache goes on eagerly."""
    model = model_on(device)
    ids, mask = on(device, 30)
    wanted = run(model, ids, DynamicCache(), mask)
    last = model.model.layers[2]
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)
        run(model, ids[:, :25], cache, mask[:, :25])

        def reads(_: object, args: tuple[Tensor, ...], made: Tensor) -> Tensor:
            return made * (float(made.sum()) < 1e9)

        def counts(_: object, args: tuple[Tensor, ...], made: Tensor) -> Tensor:
            return made * (cache.get_seq_length() * 0 + 1)

        end = 25
        for hook, match in ((reads, "cannot be captured"), (counts, "counts the cached tokens")):
            handle = last.register_forward_hook(hook)
            with cache.compile(model) as compiled:
                steps(model, cache, ids, mask, end, end + 1)
                with pytest.raises(UnsupportedError, match=match):
                    steps(model, cache, ids, mask, end + 1, end + 2)
                assert compiled.captures == 0
            assert cache.get_seq_length() == end + 1
            end += 2
            found = steps(model, cache, ids, mask, end - 1, end)[0]
            torch.testing.assert_close(found, wanted[:, end - 1], rtol=1e-4, atol=1e-4)
            handle.remove()
            cache._gpu.close()  # type: ignore[union-attr]  # the next decoder is another
        cache.release()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gpt-oss", "GptOssForCausalLM has experts .num_local_experts=4."),
        ("deepseek-v3", "DeepseekV3ForCausalLM has experts .n_routed_experts=4."),
    ],
)
def test_experts_are_refused_by_name_and_run_eagerly(
    device: torch.device, name: str, match: str
) -> None:
    model = model_on(device, name)
    ids, mask = on(device, 20)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)
        with pytest.raises(UnsupportedError, match=match):
            cache.compile(model)
        assert "forward" not in vars(model)
        wanted = generate(model, ids, mask, dynamic(model), max_new_tokens=3)
        assert torch.equal(generate(model, ids, mask, cache, max_new_tokens=3), wanted)
        cache.release()


@pytest.fixture
def llama() -> PreTrainedModel:
    return make("llama")


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(llama) as made:
        yield made


def test_what_cannot_be_compiled_is_refused_by_name(pool: CXLPool, llama: PreTrainedModel) -> None:
    cache = by_gpu(pool, llama)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="the model lies on cpu: move it to a GPU"):
            cache.compile(llama)
    with patch("cxlkv.adapters.transformers.graph.graph_on", HostGraph):
        for sizes in ((), (0,), (1, 2.5), 4, None):
            with pytest.raises(BadArgumentError, match="batch_sizes="):
                cache.compile(llama, sizes)  # type: ignore[arg-type]
        with pytest.raises(BadArgumentError, match="not LlamaConfig"):
            cache.compile(llama.config)
        with pytest.raises(UnsupportedError, match="made with attention"):
            CXLCache(pool, llama).compile(llama)
        dynamic_rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        with pytest.raises(UnsupportedError, match="dynamic or longrope"):
            cache.compile(make("llama", rope_parameters=dynamic_rope))
        llama.lm_head.to("meta")
        with pytest.raises(UnsupportedError, match="the weights lie on cpu, meta"):
            cache.compile(llama)
    assert "forward" not in vars(llama)


def test_beyond_a_window_that_the_pool_has_not_a_step_is_eager_and_refused(
    device: torch.device,
) -> None:
    """As long as the text is shorter such a window hides nothing, and its layers are as others."""
    model = model_on(device)
    for layer in model.model.layers:
        attention, given = layer.self_attn, layer.self_attn.forward
        attention.forward = lambda *args, given=given, **kwargs: given(
            *args, **{**kwargs, "sliding_window": 30}
        )
    ids, mask = on(device, 33)
    with pool_for(model) as pool:
        cache = by_gpu(pool, model)
        with cache.compile(model) as compiled:
            run(model, ids[:, :26], cache, mask[:, :26])
            steps(model, cache, ids, mask, 26, 30)
            assert compiled.replays == 3
            with pytest.raises(UnsupportedError, match="sliding windows of 30 tokens"):
                steps(model, cache, ids, mask, 30, 31)
            assert compiled.eager["beyond a window that the pool does not have"] == 1
        cache.release()
