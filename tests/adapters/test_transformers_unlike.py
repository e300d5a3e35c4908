"""CXLCache and CXLRequests over models whose layers differ in what they store of a token: Gemma 4's
full layers, layers that share keys, an indexer's rows beside latent ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import (
    CXLCache,
    CXLRequests,
    LastQueries,
    hand_over,
    layout_of,
    take_over,
)
from cxlkv.errors import BadArgumentError, GeometryError, PoolFullError, UnsupportedError
from cxlkv.machine.sizes import pages_for, plan_for
from cxlkv.ops.models import layout_of_model
from cxlkv.sequence import Batch, Sequence

from ..support.hybrid_models import dynamic
from ..support.small_models import PAGE_TOKENS, generate, pool_for, prompts, run
from ..support.unlike_models import IMAGES, INDEXED, MODELS, SHARED, make, make_with_images

GATE = ("gemma4-shared", "glm-moe-dsa")
NEW = 12
EACH = [pytest.param(name, marks=[] if name in GATE else [pytest.mark.nightly]) for name in MODELS]


@pytest.fixture(scope="module", params=EACH)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> PreTrainedModel:
    return make(name)


@pytest.fixture
def pool(model: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(model) as made:
        yield made


def answer(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: object, **more: object
) -> Tensor:
    given = torch.ones_like(ids) if mask is None else mask
    return generate(model, ids, given, cache, **{"max_new_tokens": NEW, **more})


def turn(ids: Tensor, out: Tensor) -> Tensor:
    return torch.cat([out, ids[:, 3:9]], dim=1)


# ---- one cache ----


def test_greedy_tokens_of_three_prompts_of_64(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((64, 64, 64))
    wanted = answer(model, ids, None, dynamic(model))
    cache = CXLCache(pool, model)
    assert torch.equal(answer(model, ids, None, cache), wanted)
    assert cache.counters.steps == NEW - 1
    cache.release()
    assert torch.equal(answer(model, ids, None, cache, prefill_chunk_size=7), wanted)
    cache.release()


def test_a_batch_of_unlike_lengths_and_beams(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((64, 19, 40))
    cache = CXLCache(pool, model)
    assert torch.equal(answer(model, ids, mask, cache), answer(model, ids, mask, dynamic(model)))
    cache.release()
    ours = answer(model, ids[:2], mask[:2], cache, num_beams=3)
    assert torch.equal(ours, answer(model, ids[:2], mask[:2], dynamic(model), num_beams=3))
    cache.release()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [{"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 3, "do_sample": True}],
    ids=["drafts", "samples"],
)
def test_drafts_and_samples(model: PreTrainedModel, pool: CXLPool, more: dict[str, object]) -> None:
    ids = prompts((30,))[0].repeat(1, 2)
    cache = CXLCache(pool, model)
    ours = answer(model, ids, None, cache, **more)
    plain = {name: value for name, value in more.items() if "lookup" not in name}
    assert torch.equal(ours, answer(model, ids, None, dynamic(model), **plain))
    cache.release()


def test_a_turn_goes_on_and_a_fork_leaves_its_parent(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((40,))
    cache = CXLCache(pool, model)
    out = answer(model, ids, None, cache)
    fork, longer = cache.fork(), turn(ids, out)
    assert torch.equal(
        answer(model, longer, None, fork), answer(model, longer, None, dynamic(model))
    )
    ours = answer(model, out, None, cache)
    assert torch.equal(ours, answer(model, ids, None, dynamic(model), max_new_tokens=2 * NEW))
    cache.crop(-NEW)
    assert torch.equal(answer(model, out, None, cache), ours)
    fork.release()
    cache.release()


def test_budgets(name: str, model: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((64,))
    if name in INDEXED:
        with pytest.raises(
            UnsupportedError, match=r"chooses by its own indexers .* a budget would"
        ):
            CXLCache(pool, model, budget=0.3)
        with pytest.raises(UnsupportedError, match="prefill_mass would choose once more"):
            CXLCache(pool, model, prefill_mass=0.9)
        return
    full = CXLCache(pool, model, budget=Budget(share=1.0))
    assert torch.equal(answer(model, ids, None, full), answer(model, ids, None, dynamic(model)))
    few = CXLCache(pool, model, Budget(pages=4, sinks=1, recent=1), method="exact")
    answer(model, ids, None, few)
    assert 0 < few.counters.bytes_read < full.counters.bytes_read
    assert full.counters.steps == few.counters.steps == NEW - 1
    for cache in (full, few):
        cache.release()
    run(model, ids[:, :40], few)
    last = model(ids[:, 40:], past_key_values=few, logits_to_keep=1).logits  # of a prompt
    assert torch.allclose(last, run(model, ids, dynamic(model))[:, -1:], rtol=1e-3, atol=1e-3)
    few.release()


def test_encodings(name: str, model: PreTrainedModel) -> None:
    if name in INDEXED:
        with pytest.raises(BadArgumentError, match="'key_prefix' with an encoding"):
            layout_of(model, encoding="int8")
        return
    ids, mask = prompts((40, 23))
    with pool_for(model, encoding="int8") as pool:
        cache = CXLCache(pool, model)
        whole = answer(model, ids, mask, cache)
        cache.release()
        assert torch.equal(answer(model, ids, mask, cache, prefill_chunk_size=7), whole)
        cache.release()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", IMAGES)
def test_the_text_of_models_that_read_images(kind: str) -> None:
    model = make_with_images(kind)
    ids, mask = prompts((64, 19, 40))
    ids = ids % 62 + mask  # none is an image
    with pool_for(model) as pool:
        cache = CXLCache(pool, model)
        assert torch.equal(
            answer(model, ids, mask, cache), answer(model, ids, mask, dynamic(model))
        )
        cache.release()


def test_a_pass_that_failed_is_taken_back(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = prompts((30,))
    wanted = run(model, ids, dynamic(model))[:, 20:]
    append = Batch.append
    for broken in range(pool.layout.layers):

        def full(batch: Batch, layer: int, *rows: object) -> None:
            if layer == broken:  # noqa: B023
                raise PoolFullError("as told")
            append(batch, layer, *rows)  # type: ignore[arg-type]

        cache = CXLCache(pool, model)
        run(model, ids[:, :20], cache)
        with monkeypatch.context() as failing:
            failing.setattr(Batch, "append", full)
            with pytest.raises(PoolFullError, match="as told"):
                run(model, ids[:, 20:], cache)
        cache.crop(20)
        assert torch.allclose(run(model, ids[:, 20:], cache), wanted, rtol=1e-4, atol=1e-4)
        cache.release()


def test_gradients_through_cached_tokens_are_refused(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((12,))
    cache = CXLCache(pool, model)
    run(model, ids[:, :8], cache)
    logits = model(ids[:, 8:], past_key_values=cache).logits
    with pytest.raises(UnsupportedError, match=r"backward|gradient"):
        logits.sum().backward()
    cache.release()


# ---- requests, and other processes ----


def test_a_second_request_hits(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, mask = prompts((64, 47))
    wanted, hits = answer(model, ids, mask, dynamic(model)), list[int]()
    for _ in range(2):
        model.set_attn_implementation("cxlkv")
        with requests.begin(ids, mask) as cache:
            hits.append(cache.get_seq_length())
            assert torch.equal(answer(model, ids, mask, cache), wanted)
            requests.keep(cache, wanted)
    assert hits == [0, 60]
    longer = turn(ids[:1], wanted[:1])
    with requests.begin(longer) as cache:
        assert cache.get_seq_length() == (64 + NEW - 1) // PAGE_TOKENS * PAGE_TOKENS
        ours = answer(model, longer, None, cache)
    assert torch.equal(ours, answer(model, longer, None, dynamic(model)))
    assert not requests.failures()


def test_a_hand_over(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((30, 9))
    cache = CXLCache(pool, model)
    out = answer(model, ids, mask, cache)
    there = take_over(hand_over(cache, model), pool, model)
    longer = torch.cat([mask, torch.ones(2, NEW, dtype=mask.dtype)], dim=1)
    ours = answer(model, out, longer, there)
    assert torch.equal(ours, answer(model, ids, mask, dynamic(model), max_new_tokens=2 * NEW))
    there.release()
    cache.release()


# ---- what would be seen ----


def test_each_layers_rows_decide_what_comes_next(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zeros in any one of the pool's layers, the next logits are others."""
    ids, _ = prompts((40,))
    wanted = run(model, ids, dynamic(model))[:, -1:]
    append = Batch.append
    for lost in (None, *range(pool.layout.layers)):

        def zeroed(
            batch: Batch,
            layer: int,
            k: Tensor,
            v: Tensor | None,
            starts: npt.ArrayLike,
            rewind: int | None,
        ) -> None:
            kept = float(layer != lost)  # noqa: B023
            append(batch, layer, k * kept, None if v is None else v * kept, starts, rewind)

        cache = CXLCache(pool, model)
        with monkeypatch.context() as broken:
            broken.setattr(Batch, "append", zeroed)
            run(model, ids[:, :-1], cache)
        found = run(model, ids[:, -1:], cache)
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3) == (lost is None), lost
        cache.release()


# ---- layouts ----


def test_the_layout_is_what_the_librarys_cache_holds(
    name: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    layout = layout_of(model, PAGE_TOKENS)
    own = dynamic(model)
    run(model, prompts((6,))[0], own)
    held = list[tuple[int, int, int]]()
    for layer in own.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        heads, dim, other = keys.shape[1], keys.shape[3], values.shape[3]
        latent = layout.of_layer(len(held)).values == "key_prefix"
        held.append((heads, dim + other, dim) if latent else (heads, dim, other))
        if (rows := getattr(layer, "indexer_keys", None)) is not None:
            held.append((1, rows.shape[2], 1))
    stored = (layout.of_layer(layer) for layer in range(layout.layers))
    assert [(one.kv_heads, one.head_dim, one.value_head_dim) for one in stored] == held
    assert layout.has_shapes == (name != "gemma3n")
    assert (name in SHARED) == (layout.layers < len(own.layers))
    model.config.save_pretrained(tmp_path)
    sized = layout_of_model(str(tmp_path), PAGE_TOKENS)
    assert (sized.groups, sized.order) == (layout.groups, layout.order)
    assert layout_of(model.config, PAGE_TOKENS).groups == layout.groups


def test_cxlkv_sizes_pool_holds_its_tokens(model: PreTrainedModel) -> None:
    layout, tokens = layout_of(model), 3200
    planned = plan_for(layout, tokens, requests=2)
    with CXLPool.create("anonymous:", layout=layout, capacity=planned.capacity_bytes) as pool:
        requests = [pool.sequence() for _ in range(2)]
        for end in range(64, tokens + 64, 64):
            for sequence in requests:
                fill(sequence, end)
        assert [*map(len, requests)] == [tokens] * 2
        used = pool.stats()["pages_total"] - pool.stats()["pages_free"]
        assert 0.9 <= used / pages_for(layout, planned.geometry, tokens, 2) <= 1


def fill(sequence: Sequence, tokens: int) -> None:
    """Give all layers zeros up to so many tokens."""
    layout = sequence._layout
    for layer in range(layout.layers):
        own, count = layout.of_layer(layer), tokens - sequence.tokens(layer)
        k, v = (
            np.zeros((count, own.kv_heads, dim), np.float32)
            for dim in (own.head_dim, own.value_head_dim)
        )
        sequence.append(layer, k, v if own.values == "own" else None)


def test_what_is_refused_by_name(name: str, model: PreTrainedModel, pool: CXLPool) -> None:
    why = "layers that attend to the keys of others" if name in SHARED else "layers of unlike"
    with pytest.raises(UnsupportedError, match=rf"{why}.*attention=.gpu. does not serve yet"):
        CXLCache(pool, model, attention="gpu")
    if name in INDEXED:
        model.set_attn_implementation("cxlkv")
        cache, shown = CXLCache(pool, model), torch.zeros((1, 1, 4, 4))
        with pytest.raises(UnsupportedError, match="custom masks"):
            model(torch.ones((1, 4), dtype=torch.long), shown, past_key_values=cache)
    if pool.layout.has_shapes:
        with pytest.raises(UnsupportedError, match="layers of unlike shapes"):
            LastQueries(CXLCache(pool, model))
    other = {"index_head_dim": 24} if name in INDEXED else {"head_dim": 24}
    if name != "dots3-note":
        with pytest.raises(GeometryError, match=r"head_dim=.*, the model has"):
            CXLCache(pool, make(name, **other))
