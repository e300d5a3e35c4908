"""The transformers adapter over models and ways to generate: windows, MLA, sinks, budgets."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_sliding_window_causal_mask

from cxlkv import Budget, CXLPool
from cxlkv.adapters.common.prefill import attend_to_new
from cxlkv.adapters.common.shapes import LATENT_MODELS
from cxlkv.adapters.transformers import CXLCache, LayerStep, Step, layout_of
from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.kernels import runtime

from ..support.lengths import matrix
from ..support.small_models import (
    LAYERS,
    PAGE_TOKENS,
    SHAPE,
    VOCABULARY_SIZE,
    Generates,
    LargestTensor,
    attend_by,
    close,
    generate,
    pool_for,
    prompts,
    run,
)
from ..support.threads import run_all

LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # of the rotary channels, as these configs mean it
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Name in transformers, and what differs from SHAPE. Prompts are longer than every window.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", {"sliding_window": 25}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 13, "sliding_window_pattern": 3, "query_pre_attn_scalar": 9},
    ),
    "gpt-oss": ("GptOss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2", LATENT),
    "deepseek-v3": ("DeepseekV3", LATENT),
}
WINDOWS = {
    "qwen3-windows": (None, 12, 12),
    "mistral": (25, 25, 25),
    "phi3": (20, 20, 20),
    "gemma2": (16, None, 16),
    "gemma3": (13, 13, None),
    "gpt-oss": (8, None, 8),
}
WINDOWED = pytest.mark.parametrize("model", WINDOWS, indirect=True)


def make(name: str, **more: object) -> PreTrainedModel:
    kind, differs = MODELS[name]
    config_class = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    config = config_class.from_dict({**SHAPE, **differs, **more})
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert isinstance(model, PreTrainedModel)
    if "kv_lora_rank" in differs and not any(hasattr(m, "expand_kv") for m in model.modules()):
        pytest.skip(f"transformers {transformers.__version__} caches latents expanded")
    model.train(False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "norm.weight")):  # zeros and ones at first
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make("llama")


@pytest.fixture(scope="module")
def mistral() -> PreTrainedModel:
    return make("mistral")


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    return make("deepseek-v3")


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    """A pool for the test's model, whichever fixture that is; in the end it is clean and free."""
    models = [n for n in ("model", "mistral", "deepseek", "llama") if n in request.fixturenames]
    with pool_for(request.getfixturevalue(models[0]), capacity="32MiB") as made:
        yield made


def dynamic(model: PreTrainedModel) -> DynamicCache:
    """With windowed layers of its own, where these can be cropped."""
    croppable = hasattr(DynamicCache, "activate_past_recording")
    return DynamicCache(config=model.config) if croppable else DynamicCache()


def all_free(pool: CXLPool) -> bool:
    stats = pool.stats()
    return stats["pages_free"] == stats["pages_total"]


# ---- equal to DynamicCache ----

MODES: dict[str, dict[str, object]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "samples": {"num_return_sequences": 4, "do_sample": True},
    "samples-of-assisted": {"do_sample": True},
    "assisted": {},
    "looked-up": {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY_SIZE},
}
# The prefill of an assistant comes with its first candidates, of which some are taken back.
REWIND_TOKENS = 24


@matrix(model=MODELS, mode=MODES, times=2, indirect=["model"])
def test_generated_tokens_equal_those_of_dynamic_cache(
    model: PreTrainedModel, pool: CXLPool, mode: str
) -> None:
    ids, mask = prompts((103, 70, 5))
    settings = dict(MODES[mode])
    if "assisted" in mode or mode == "looked-up":  # transformers does these for one row only
        ids, mask = ids[:1], mask[:1]
    if "assisted" in mode:  # with other weights at the end, so that it is right now and then
        settings["assistant_model"] = assistant_of(model)
    wanted = generate(model, ids, mask, dynamic(model), **settings)
    for budget in (None, Budget(share=1.0), Budget(mass=1.0, per="sequence")):
        if budget and budget.mass and mode != "greedy":
            continue
        cache = CXLCache(pool, model, budget)
        cache.rewind_tokens = REWIND_TOKENS
        assert torch.equal(generate(model, ids, mask, cache, **settings), wanted)
        if mode == "greedy":  # of 16 tokens the last is not read, and no padding is stored
            assert [len(s) for s in cache.sequences] == [103 + 15, 70 + 15, 5 + 15]
        cache.release()
        assert all_free(pool)


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with slightly other weights: some of its guesses are wrong."""
    kind = type(model)
    made = kind(copy.deepcopy(model.config))
    made.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    made.train(False)
    attend_by(made, None)
    return made


def test_an_assistant_may_keep_its_tokens_in_the_same_pool(
    llama: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts((103,))
    assistant = assistant_of(llama)
    # An assistant's mask is made from its tokens, so that none of them may be the padding's.
    padding = {"pad_token_id": VOCABULARY_SIZE}
    settings = {"assistant_model": assistant, "max_new_tokens": 40, **padding}
    wanted = generate(llama, ids, mask, dynamic(llama), **settings)
    drafts = CXLCache(pool, assistant)
    attend_by(assistant, drafts)
    own = cast(Generates, assistant).generate

    def with_cache(**arguments: object) -> Tensor:  # transformers hands it on, once it has it
        return own(**{"past_key_values": drafts, **arguments})  # type: ignore[arg-type]

    monkeypatch.setattr(assistant, "generate", with_cache)
    cache = CXLCache(pool, llama)
    assert torch.equal(generate(llama, ids, mask, cache, **settings), wanted)
    assert 103 < drafts.get_seq_length() <= 143
    drafts.release()
    cache.release()
    assert all_free(pool)


def test_logits_of_every_step_equal_those_of_one_pass(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    ids, mask = prompts((90, 61, 3))
    wanted = run(model, ids, dynamic(model), mask)
    cache = CXLCache(pool, model, Budget(share=1.0))
    cache.rewind_tokens = 0
    chunks, ends = [], (41, 58, 59, 84, 85, 86, 87, 88, 89, 90)
    for first, last in zip((0, *ends), ends, strict=False):
        chunks.append(run(model, ids[:, first:last], cache, mask[:, :last]))
        assert cache.get_seq_length() == last
    found = torch.cat(chunks, dim=1)
    assert close(found[mask.bool()], wanted[mask.bool()])


@matrix(
    name=["llama", "gemma2", "gemma3", "gpt-oss", "deepseek-v3"],
    dtypes=[("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float16")],
)
def test_pools_of_shorter_numbers_are_near_dynamic_cache(
    name: str, dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    of_model, of_pool = getattr(torch, dtypes[0]), dtypes[1]
    model = make(name).to(of_model)
    ids, mask = prompts((60, 37))
    wanted = run(model, ids, dynamic(model), mask)[:, -5:]
    for attention in ("pool", "gpu"):
        with pool_for(model, dtype=of_pool) as pool:
            cache = CXLCache(pool, model, Budget(share=1.0), attention=attention)
            run(model, ids[:, :-5], cache, mask[:, :-5])
            steps = [run(model, ids[:, 55:57], cache, mask[:, :57])]
            steps += [run(model, ids[:, t : t + 1], cache, mask[:, : t + 1]) for t in (57, 58, 59)]
        found = torch.cat(steps, dim=1)
        assert found.dtype == of_model
        assert torch.allclose(found.float(), wanted.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu"])
def test_other_models_of_latents_equal_dynamic_cache(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    more = {"rope_parameters": {**yarn, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4}}
    monkeypatch.setitem(MODELS, kind, (kind, {**LATENT, **(more if kind == "Mistral4" else {})}))
    model = make(kind)
    assert model.config.model_type in LATENT_MODELS
    ids, mask = prompts((40, 23))
    wanted = run(model, ids, dynamic(model), mask)
    with pool_for(model) as pool:
        cache = CXLCache(pool, model, Budget(share=1.0))
        found = [run(model, ids[:, :30], cache, mask[:, :30])]
        found += [run(model, ids[:, 30:38], cache, mask[:, :38])]
        found += [run(model, ids[:, t : t + 1], cache, mask[:, : t + 1]) for t in (38, 39)]
    assert close(torch.cat(found, dim=1)[mask.bool()], wanted[mask.bool()])


def test_samples_of_a_prompt_that_was_read_once_share_its_pages(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    ids, mask = prompts((103,))
    settings = {"do_sample": True, "num_return_sequences": 4}
    wanted = generate(model, ids, mask, dynamic(model), **settings)
    cache = CXLCache(pool, model)
    run(model, ids[:, :-1], cache)
    held = pool.stats()["pages_held"]
    cache.batch_repeat_interleave(4)
    assert len(cache.sequences) == 4
    assert pool.stats()["pages_held"] == held
    assert torch.equal(generate(model, ids, mask, cache, **settings), wanted)
    cache.release()
    assert all_free(pool)


# ---- windows ----


def first_seen(window: int | None, token: int) -> int:
    """The first page that a token sees."""
    return 0 if window is None else max(0, token - window + 1) // PAGE_TOKENS


@WINDOWED
def test_pages_behind_a_window_are_freed_or_never_taken(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    assert pool.layout.windows in WINDOWS.values()
    geometry = pool.pages.geometry
    # A page holds so many layers; groups with more have several pages for the same tokens.
    windows = pool.layout.windows
    parts = [w for w in set(windows) for _ in range(windows.count(w) // geometry["record_layers"])]
    ids, _ = prompts((203,))
    cache = CXLCache(pool, model)
    cache.rewind_tokens = 0
    before = pool.stats()
    run(model, ids[:, :163], cache)
    whole = 163 // PAGE_TOKENS
    held = sum(whole - first_seen(w, 163) for w in parts)
    stats = pool.stats()
    assert stats["pages_held"] == held < whole * len(parts)
    skipped = stats["window_pages_skipped"] - before["window_pages_skipped"]
    assert skipped == whole * len(parts) - held
    assert stats["window_pages_freed"] == before["window_pages_freed"]
    for last in range(163, 203):
        run(model, ids[:, last : last + 1], cache)
    stats = pool.stats()
    freed = stats["window_pages_freed"] - before["window_pages_freed"]
    # The last step's own token, 202, still sees all of its window.
    assert freed == sum(first_seen(w, 202) - first_seen(w, 163) for w in parts)
    assert stats["pages_held"] == held + 40 // PAGE_TOKENS * len(parts) - freed
    cache.release()
    assert all_free(pool)


@WINDOWED
def test_a_prefill_keeps_what_a_crop_takes_back(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((120, 90))
    wanted = run(model, ids, dynamic(model), mask)
    cache = CXLCache(pool, model)
    cache.rewind_tokens = 20
    run(model, ids[:, :110], cache, mask[:, :110])
    held = pool.stats()["pages_held"]
    with pytest.raises(BadArgumentError, match="window"):
        cache.crop(-60)
    assert cache.get_seq_length() == 110
    assert pool.stats()["pages_held"] == held
    cache.crop(-20)
    for first, last in ((90, 101), (101, 102), (102, 103)):
        found = run(model, ids[:, first:last], cache, mask[:, :last])
        assert close(found, wanted[:, first:last])
        cache.crop(first - last)  # a step is always taken back
        found = run(model, ids[:, first:last], cache, mask[:, :last])
        assert close(found, wanted[:, first:last])


@WINDOWED
def test_many_steps_of_one_token_are_taken_back_at_once(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    ids, _ = prompts((120,))
    wanted = run(model, ids, dynamic(model))
    cache = CXLCache(pool, model)
    cache.rewind_tokens = 20
    run(model, ids[:, :80], cache)
    for last in range(80, 110):
        run(model, ids[:, last : last + 1], cache)
    cache.crop(-20)
    assert close(run(model, ids[:, 90:91], cache), wanted[:, 90:91])


@WINDOWED
def test_rows_with_windows_are_forked_and_picked(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((60, 41))
    wanted = run(model, ids, dynamic(model), mask)
    cache = CXLCache(pool, model)
    run(model, ids[:, :50], cache, mask[:, :50])
    child = cache.fork()
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    rows = [1, 0, 1]
    for last in range(50, 60):
        found = run(model, ids[rows, last : last + 1], cache, mask[rows, : last + 1])
        assert close(found, wanted[rows, last : last + 1])
    cache.release()
    assert close(run(model, ids[:, 50:], child, mask), wanted[:, 50:])


def test_layers_with_windows_ignore_the_budget(pool: CXLPool, mistral: PreTrainedModel) -> None:
    ids, mask = prompts((103, 70))
    wanted = generate(mistral, ids, mask, dynamic(mistral))
    cache = CXLCache(pool, mistral, Budget(pages=3))
    assert torch.equal(generate(mistral, ids, mask, cache), wanted)
    assert cache.counters.bytes_scored == 0
    assert cache.counters.bytes_read == 15 * 2 * 25 * pool.layout.token_bytes


@pytest.mark.parametrize("window", [None, 7, 100, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_by_blocks_is_attention_with_a_mask_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    monkeypatch.setattr("cxlkv.adapters.common.prefill.BLOCK_ROWS", 64)
    monkeypatch.setattr("cxlkv.adapters.common.prefill.BLOCK_LOGITS", 1 << 16)
    tokens, (q_heads, kv_heads, dim, value_dim) = 333, (4, 2, 8, 6)
    torch.manual_seed(1)
    query = torch.randn(1, q_heads, tokens, dim)
    key, value = torch.randn(1, kv_heads, tokens, dim), torch.randn(1, kv_heads, tokens, value_dim)
    sinks = torch.randn(q_heads) if with_sinks else None
    starts = torch.tensor([0, tokens], dtype=torch.int32).numpy()
    new = torch.tensor([tokens]).numpy()
    part = LayerStep(0, Step(1, tokens, True, starts, new, new, None), 0.5, softcap, window, sinks)
    with LargestTensor() as seen:
        found = attend_to_new(part, query, key, value)
    logits = query @ key.repeat_interleave(2, 1).mT * 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = (behind < 0) | (behind >= (window or tokens))
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(1, -1, tokens, 1)], dim=3)
    weights = logits.softmax(3)[..., :tokens]
    assert close(found, (weights @ value.repeat_interleave(2, 1)).transpose(1, 2))
    if window in (7, 100) or softcap is not None:
        assert seen.largest_bytes // 4 < tokens * tokens


# ---- MLA ----


def test_latents_are_stored_as_they_are_and_never_expanded(
    deepseek: PreTrainedModel, pool: CXLPool
) -> None:
    layout = pool.layout
    assert (layout.kv_heads, layout.head_dim, layout.value_head_dim) == (1, 40, 32)
    assert layout.token_bytes == LAYERS * 40 * 4
    ids, _ = prompts((400,))
    cache = CXLCache(pool, deepseek, Budget(pages=5))
    run(deepseek, ids[:, :-1], cache)
    with LargestTensor() as seen:
        run(deepseek, ids[:, -1:], cache)
    weights = max(p.numel() for p in deepseek.parameters())
    assert seen.largest_bytes // 4 <= weights < 400 * 4 * (24 + 12)
    assert cache.counters.live_bytes_peak == 40 * 4  # of one token in one layer


def test_a_layer_whose_expansion_is_no_plain_matrix_is_refused() -> None:
    model = make("deepseek-v3")
    with pool_for(model) as pool:
        ids, _ = prompts((9,))
        cache = CXLCache(pool, model)
        run(model, ids[:, :8], cache)
        attention = model.get_submodule("model.layers.1.self_attn")
        plain = attention.kv_b_proj
        attention.kv_b_proj = torch.nn.Sequential(cast(torch.nn.Module, plain))
        with pytest.raises(UnsupportedError, match="kv_b_proj is a Sequential"):
            run(model, ids[:, 8:], cache)
        cache.crop(8)
        attention.kv_b_proj = plain
        assert close(run(model, ids[:, 8:], cache), run(model, ids, dynamic(model))[:, 8:])


def test_threads_find_their_own_layers_of_latents(deepseek: PreTrainedModel, pool: CXLPool) -> None:
    rows, tokens = 3, 6
    ids, _ = prompts((tokens,) * rows)
    wanted = run(deepseek, ids, dynamic(deepseek))
    caches = [CXLCache(pool, deepseek) for _ in range(rows)]
    attend_by(deepseek, caches[0])
    meeting = threading.Barrier(rows, timeout=60)
    found: dict[int, Tensor] = {}

    def work(row: int) -> None:
        with torch.no_grad():
            steps = [
                deepseek(ids[row : row + 1, t : t + 1], past_key_values=caches[row]).logits
                for t in range(tokens)
            ]
        found[row] = torch.cat(steps, dim=1)[0]

    def meet(module: torch.nn.Module, inputs: object) -> None:
        meeting.wait()

    # All have given their latents to their caches, and none has attended yet.
    expansions = [m for name, m in deepseek.named_modules() if name.endswith("kv_b_proj")]
    hooks = [module.register_forward_pre_hook(meet) for module in expansions]
    run_all(partial(work, row) for row in range(rows))
    for hook in hooks:
        hook.remove()
    assert sorted(found) == list(range(rows))
    assert close(torch.stack([found[row] for row in range(rows)]), wanted)


def test_latents_that_were_expanded_before_are_refused(
    deepseek: PreTrainedModel, pool: CXLPool
) -> None:
    cache = CXLCache(pool, deepseek)
    expanded = torch.zeros(1, 4, 5, 24), torch.zeros(1, 4, 5, 12)
    with pytest.raises(GeometryError, match="must cache latents before it expands them"):
        cache.update(*expanded, 0)


# ---- budgets of rows ----

FEW = Budget(pages=4)


def has_few(cache: CXLCache) -> list[bool]:
    assert isinstance(cache.budget, tuple)
    return [budget is FEW for budget in cache.budget]


def test_each_row_has_its_own_budget(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((96, 96, 96))
    full = generate(llama, ids, mask, dynamic(llama))
    few = generate(llama, ids, mask, CXLCache(pool, llama, FEW, method="exact"))
    assert not torch.equal(few[1], full[1])
    cache = CXLCache(pool, llama, [None, FEW, None], method="exact")
    assert has_few(cache) == [False, True, False]
    found = generate(llama, ids, mask, cache)
    assert torch.equal(found, torch.stack([full[0], few[1], full[2]]))
    cache = CXLCache(pool, llama, [None, None, None])
    assert torch.equal(generate(llama, ids, mask, cache), full)
    assert cache.counters.bytes_scored == 0


def test_budgets_move_with_their_rows(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((96, 96))
    full = run(llama, ids, dynamic(llama))[:, -1]
    cache = CXLCache(pool, llama, [None, FEW], method="exact")
    run(llama, ids[:, :-1], cache)
    fork = cache.fork()
    few = run(llama, ids[:, -1:], fork)[1, -1]
    assert not close(few, full[1])
    cache.batch_repeat_interleave(2)
    assert has_few(cache) == [False, False, True, True]
    cache.batch_select_indices(torch.tensor([2, 1, 3]))
    cache.reorder_cache(torch.tensor([0, 0, 1]))
    assert has_few(cache) == [True, True, False]
    found = run(llama, ids[[1, 1, 0], -1:], cache)[:, -1]
    assert close(found, torch.stack([few, few, full[0]]))
    cache.release()
    assert has_few(cache) == [False, True]


def test_a_budget_changes_between_steps(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((96, 96))
    full = run(llama, ids, dynamic(llama))[:, -1:]
    cache = CXLCache(pool, llama, FEW, method="exact")
    run(llama, ids[:, :-1], cache)
    few = run(llama, ids[:, -1:], cache)
    assert not close(few, full)
    for budget, wanted in ((None, full), ([FEW, None], torch.stack([few[0], full[1]]))):
        cache.crop(-1)
        cache.budget = budget
        assert close(run(llama, ids[:, -1:], cache), wanted)


def test_beams_and_samples_repeat_the_budgets_of_prompts(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    ids, mask = prompts((96, 80))
    for more in ({"num_beams": 4}, {"num_return_sequences": 4, "do_sample": True}):
        full = generate(llama, ids, mask, dynamic(llama), **more)
        few = generate(llama, ids, mask, CXLCache(pool, llama, FEW, method="exact"), **more)
        found = generate(
            llama, ids, mask, CXLCache(pool, llama, [FEW, None], method="exact"), **more
        )
        half = len(full) // 2
        assert torch.equal(found[half:], full[half:])
        if "num_beams" in more:  # samples of one batch share their random numbers
            assert torch.equal(found[:half], few[:half])
            assert not torch.equal(found[:half], full[:half])


def test_dense_layers_attend_to_all_pages(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((96,))
    full = run(llama, ids, dynamic(llama))[:, -1:]
    scored = []
    for dense_layers in range(LAYERS + 1):
        cache = CXLCache(pool, llama, replace(FEW, dense_layers=dense_layers), method="exact")
        run(llama, ids[:, :-1], cache)
        found = run(llama, ids[:, -1:], cache.fork())
        assert close(found, full) == (dense_layers == LAYERS)
        run(llama, ids[:, -1:], cache)
        scored.append(cache.counters.bytes_scored)
    assert [LAYERS * s for s in scored] == [scored[0] * (LAYERS - n) for n in range(LAYERS + 1)]


def test_budgets_that_fit_no_rows_are_refused(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((9, 9))
    with pytest.raises(BadArgumentError, match="3 budgets for 2 rows"):
        run(llama, ids, CXLCache(pool, llama, [None, FEW, None]))
    with pytest.raises(BadArgumentError, match="share union= and per="):
        CXLCache(pool, llama, [FEW, Budget(pages=4, union="layer")])
    for wrong, what in (([], "one for each row"), ([2], "Budget\\(pages=2"), (["few"], "'few'")):
        with pytest.raises(BadArgumentError, match=what):
            CXLCache(pool, llama, cast("list[Budget]", wrong))


# ---- bad input ----


def test_empty_prompts_are_refused_and_padded_ones_are_as_in_dynamic_cache(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    cache = CXLCache(pool, llama)
    with pytest.raises(BadArgumentError, match="an empty prompt"):
        run(llama, torch.zeros(2, 0, dtype=torch.long), cache)
    ids, mask = prompts((9, 0, 4))
    ids = ids + 5 * (1 - mask)  # a padding token that is not all zeros inside the model
    wanted = generate(llama, ids, mask, dynamic(llama), pad_token_id=5)
    assert torch.equal(generate(llama, ids, mask, cache, pad_token_id=5), wanted)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_hidden_layers": 2}, "layers=3, the model has 2"),
        ({"num_key_value_heads": 4}, "kv_heads=2, the model has 4"),
        ({"head_dim": 32}, "head_dim=16, the model has 32"),
        ({"sliding_window": 24}, r"windows=\(25, 25, 25\), the model has \(24, 24, 24\)"),
        ({"sliding_window": None}, r"windows=\(25, 25, 25\), the model has \(None, None, None\)"),
    ],
)
def test_a_pool_for_another_model_is_refused(
    mistral: PreTrainedModel, pool: CXLPool, more: dict[str, object], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        CXLCache(pool, make("mistral", **more))
    with pytest.raises(BadArgumentError, match="no transformers model"):
        CXLCache(pool, object())


def test_a_model_with_other_windows_or_shapes_than_the_caches_is_refused(
    mistral: PreTrainedModel, pool: CXLPool
) -> None:
    ids, _ = prompts((30,))
    for other in (24, None):
        cache = CXLCache(pool, mistral)
        with pytest.raises(UnsupportedError, match="laid out for 25"):
            run(make("mistral", sliding_window=other), ids, cache)
        assert cache.get_seq_length() == 0
    cache = CXLCache(pool, mistral)
    with pytest.raises(GeometryError, match="4 heads of 16 channels, the pool stores 2 of 16"):
        run(make("mistral", num_key_value_heads=4), ids, cache)
    assert close(run(mistral, ids, cache), run(mistral, ids, dynamic(mistral)))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("MambaConfig", {}, "no layer attends"),
        (
            "LlamaConfig",
            {"layer_types": ["conv", "full_attention"] * 16},
            "fail with transformers' own",
        ),
        ("MiniMaxConfig", {}, "keeps its states in a MiniMaxCache"),
        ("RecurrentGemmaConfig", {}, "keeps its states in its modules"),
        ("RwkvConfig", {}, "has no attention"),
        ("Glm5NextTextConfig", {}, "layer 3 has indexed_attention; indexers are built for axk2"),
        ("Qwen4ExpTextConfig", {}, "layer 3 has indexed_attention; indexers are built for axk2"),
        ("MistralLarge4TextConfig", {"kv_source_layers": [0] * 200}, "indexers that share latents"),
        ("DeepseekV4Config", {}, "layer 0 has .*compressed_attention"),
        (
            "MiniMaxM3VLTextConfig",
            {"layer_types": ["minimax_m3_sparse"] * LAYERS},
            "layer 0 has minimax_m3_sparse",
        ),
        ("InklingTextConfig", {}, "position biases"),
        ("Llama4TextConfig", {"layer_types": ["chunked_attention"] * LAYERS}, "layer 0 has chunk"),
        ("T5Config", {}, "encoder-decoder"),
        ("LongcatFlashConfig", LATENT, "latent keys are built for .*deepseek_v2"),
    ],
)
def test_models_that_no_pool_can_hold_are_refused_by_name(
    name: str, more: dict[str, object], message: str
) -> None:
    config = getattr(transformers, name)()
    for key, value in more.items():
        setattr(config, key, value)
    assert isinstance(config, PreTrainedConfig)
    with pytest.raises(UnsupportedError, match=message):
        layout_of(config)


def test_what_is_laid_over_a_window_is_refused(mistral: PreTrainedModel, pool: CXLPool) -> None:
    cache = CXLCache(pool, mistral)
    attend_by(mistral, cache)
    mask = partial(
        create_sliding_window_causal_mask,
        mistral.config,
        torch.zeros(1, 30, 64),
        torch.ones(1, 30),
        cache,
    )
    made = mask()
    assert isinstance(made, Tensor)
    assert made.shape == (1, 30)
    with pytest.raises(UnsupportedError, match="custom masks"):
        mask(or_mask_function=lambda batch, head, query, key: key < 3)
    with pytest.raises(UnsupportedError, match="custom masks"):
        mask(block_sequence_ids=torch.zeros(1, 30, dtype=torch.long))
