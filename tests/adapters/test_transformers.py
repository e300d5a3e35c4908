"""The transformers adapter on small random models: equal to DynamicCache, and nothing beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cxlkv import Budget, CXLPool, Selection
from cxlkv.adapters.transformers import CXLCache, LayerStep, _installed, layout_of
from cxlkv.bench.cases.calls import counted_calls
from cxlkv.errors import BadArgumentError, PoolFullError, UnsupportedError

from ..support.small_models import (
    LAYERS,
    PAGE_TOKENS,
    Generates,
    LargestTensor,
    close,
    generate,
    pool_for,
    prompts,
    run,
)
from ..support.worker_thread import serving
from .test_transformers_models import llama as llama  # a fixture
from .test_transformers_models import make


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    """A pool for any of MODELS; what a test leaves in it must be clean."""
    with pool_for(llama, capacity="32MiB") as made:
        yield made


class Watched(CXLCache):
    """Keeps what was chosen."""

    picked: list[Selection]

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        chosen = super().choose(part, queries)
        if chosen is not None:
            self.picked = [*getattr(self, "picked", []), chosen]
        return chosen


# ---- equal to DynamicCache ----


@pytest.mark.parametrize("method", ["exact", "mean"])
def test_few_pages_differ(llama: PreTrainedModel, pool: CXLPool, method: str) -> None:
    if method == "mean":
        pytest.importorskip("numba", reason="numba compiles scorers")
    ids, mask = prompts((96, 80))
    wanted = generate(llama, ids, mask, DynamicCache())
    cache = CXLCache(pool, llama, Budget(pages=4), method=method)
    assert not torch.equal(generate(llama, ids, mask, cache), wanted)


def test_a_chooser_attends_in_the_pool(llama: PreTrainedModel, pool: CXLPool) -> None:
    pytest.importorskip("numba", reason="numba compiles choosers")
    ids, mask = prompts((96, 80))
    wanted = generate(llama, ids, mask, DynamicCache())
    whole = CXLCache(pool, llama, Budget(share=1.0), method="retro")
    assert torch.equal(generate(llama, ids, mask, whole), wanted)
    cache = Watched(pool, llama, Budget(pages=6), method="retro")
    generate(llama, ids, mask, cache)
    assert all(picked.rows is not None for picked in cache.picked)
    assert cache.counters.bytes_scored > 0
    at_once = CXLCache(pool, llama, Budget(pages=6), method="retro")
    again = Watched(pool, llama, Budget(pages=6), method="retro")
    assert torch.equal(*(generate(llama, ids, mask, each) for each in (at_once, again)))


def test_a_worker_chooses_and_attends_for_a_model(llama: PreTrainedModel, path: Path) -> None:
    pytest.importorskip("numba", reason="numba compiles choosers")
    ids, mask = prompts((96, 80))
    layout = layout_of(llama, page_tokens=4)
    with CXLPool.create(path, layout=layout, capacity="8MiB", threads=1) as pool:
        forms = [
            partial(CXLCache, pool, llama, Budget(pages=6), method=method)
            for method in ("retro", "vattention")
        ]
        wanted = [generate(llama, ids, mask, make_cache()) for make_cache in forms]
        with serving(pool, ["retro", "vattention"]):
            pool.use_worker("only", deadline_s=60)
            found = [generate(llama, ids, mask, make_cache()) for make_cache in forms]
            use = pool.worker
        assert all(map(torch.equal, found, wanted))
        assert use.selects > 0
        assert use.attends >= use.selects
        assert (use.selects_here, use.attends_here) == (0, 0)


def test_where_attention_is_has_two_words(llama: PreTrainedModel, pool: CXLPool) -> None:
    for attention in ("pool", "gpu"):
        assert CXLCache(pool, llama, attention=attention).attention == attention
    with pytest.raises(BadArgumentError, match="attention='cuda': one of pool, gpu"):
        CXLCache(pool, llama, attention="cuda")


def test_outputs_of_padding_are_zero_in_the_attention(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    outputs: list[Tensor] = []
    hook = llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: outputs.append(inputs[0])
    )
    ids, mask = prompts((12, 7))
    run(llama, ids, CXLCache(pool, llama), mask)
    hook.remove()
    assert (outputs[0][1, :5] == 0).all()
    assert (outputs[0][1, 5:] != 0).any()


def test_softcap_and_scaling_are_the_models_own(pool: CXLPool) -> None:
    model = make("gemma2", layer_types=["full_attention"] * LAYERS)
    ids, mask = prompts((30, 17))
    cache = CXLCache(pool, model)
    found = run(model, ids, cache, mask)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    assert close(found[mask.bool()], logits[mask.bool()])
    wanted = cast(Generates, model).generate(
        ids, attention_mask=mask, max_new_tokens=16, do_sample=False
    )
    cache = CXLCache(pool, model, Budget(share=1.0))
    assert torch.equal(generate(model, ids, mask, cache), wanted)


# ---- what generate() does with a cache ----


@pytest.mark.parametrize("keep", [1, 9, 10, 24, 26])
def test_crop_forgets_the_last_tokens(llama: PreTrainedModel, pool: CXLPool, keep: int) -> None:
    ids, mask = prompts((29, 20))  # keep=9 leaves only padding in the second row
    wanted = run(llama, ids[:, : keep + 3], DynamicCache(), mask[:, : keep + 3])
    for argument in (keep - 26, keep):
        cache = CXLCache(pool, llama)
        run(llama, ids[:, :26], cache, mask[:, :26])
        cache.crop(argument)
        assert cache.get_seq_length() == keep
        found = run(llama, ids[:, keep : keep + 3], cache, mask[:, : keep + 3])
        real = mask[:, keep : keep + 3].bool()
        assert close(found[real], wanted[:, keep:][real])
        cache.release()


def test_a_fork_goes_on_without_the_parent(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((30, 22))
    parent = CXLCache(pool, llama, Budget(share=1.0))
    run(llama, ids[:, :20], parent, mask[:, :20])
    for child in (parent.fork(), copy.deepcopy(parent)):
        held = pool.stats()["pages_held"]
        found = run(llama, ids[:, 20:21], child, mask[:, :21])
        wanted = run(llama, ids[:, :21], DynamicCache(), mask[:, :21])[:, -1:]
        assert close(found, wanted)
        assert pool.stats()["pages_held"] == held  # one token fits the copied tails
        child.release()
    assert parent.get_seq_length() == 20
    assert close(
        run(llama, ids[:, 20:], parent, mask),
        run(llama, ids, DynamicCache(), mask)[:, 20:],
    )


def test_rows_are_repeated_and_picked(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((18, 11, 16))
    wanted = run(llama, ids, DynamicCache(), mask)[:, -1]
    cache = CXLCache(pool, llama)
    run(llama, ids[:, :-1], cache, mask[:, :-1])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 2, 3]))
    cache.reorder_cache(torch.tensor([1, 1, 0, 3]))
    rows = [0, 0, 2, 1]
    assert len(cache.sequences) == 4
    assert close(run(llama, ids[rows, -1:], cache, mask[rows])[:, -1], wanted[rows])
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert [len(s) for s in cache.sequences] == [18, 11]


def test_a_cache_starts_from_sequences_of_the_pool(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((30,))
    first = CXLCache(pool, llama)
    run(llama, ids[:, :24], first)
    (sequence,) = first.sequences
    pool.publish_prefix(sequence, ids[0, :24].numpy())
    first.release()
    hit = pool.match_prefix(ids[0].numpy())
    assert hit.tokens == 24
    second = CXLCache(pool, llama, sequences=[hit.sequence()])
    hit.release()
    wanted = run(llama, ids, DynamicCache())[:, 24:]
    assert close(run(llama, ids[:, 24:], second), wanted)


def test_a_released_cache_is_empty_and_usable(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((9,))
    cache = CXLCache(pool, llama)
    wanted = run(llama, ids, cache)
    for empty in (cache.release, cache.reset):
        empty()
        assert (cache.get_seq_length(), cache.is_initialized) == (0, False)
        assert close(run(llama, ids, cache), wanted)


# ---- bad input ----


@pytest.mark.parametrize("row", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 0, 1]])
def test_padding_on_the_right_and_holes_are_refused(
    llama: PreTrainedModel, pool: CXLPool, row: list[int]
) -> None:
    cache = CXLCache(pool, llama)
    with pytest.raises(BadArgumentError, match="pad on the left"):
        run(llama, torch.ones(2, 4, dtype=torch.long), cache, torch.tensor([[1] * 4, row]))
    assert cache.get_seq_length() == 0


def test_a_mask_that_changes_its_mind_is_refused(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((10, 6))
    cache = CXLCache(pool, llama)
    run(llama, ids[:, :9], cache, mask[:, :9])
    with pytest.raises(BadArgumentError, match="cannot change"):
        run(llama, ids[:, 9:], cache, torch.ones_like(mask))
    with pytest.raises(BadArgumentError, match="in every step"):
        run(llama, ids[:, 9:], cache)
    with pytest.raises(BadArgumentError, match="4 dimensions"):
        run(llama, ids[:, 9:], cache, torch.zeros(2, 1, 1, 10))
    with pytest.raises(BadArgumentError, match="a batch of 1 rows"):
        run(llama, ids[:1, 9:], cache, mask[:1])
    run(llama, ids[:, 9:], cache, mask)


def test_a_window_longer_than_the_model_counts_until_it_is_passed(pool: CXLPool) -> None:
    model = make("mistral", max_position_embeddings=16, sliding_window=16)
    ids, _ = prompts((17,))
    cache = CXLCache(pool, model)
    run(model, ids[:, :16], cache)
    with pytest.raises(UnsupportedError, match="sliding windows of 16"):
        run(model, ids[:, 16:], cache)
    assert cache.get_seq_length() == 16


def test_the_attention_and_the_cache_need_each_other(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, _ = prompts((6,))
    llama.set_attn_implementation("cxlkv")
    with pytest.raises(BadArgumentError, match="pass past_key_values=CXLCache"):
        cast(Generates, llama).generate(ids, max_new_tokens=2)
    cache = CXLCache(pool, llama)
    llama.set_attn_implementation("sdpa")
    with pytest.raises(BadArgumentError, match="set_attn_implementation"):
        llama(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_full_pool_is_named_and_crop_undoes_the_pass(llama: PreTrainedModel) -> None:
    ids, _ = prompts((8,))
    with pool_for(llama) as pool:
        taken = pool.pages.alloc(pool.stats()["pages_free"] - 2)
        cache = CXLCache(pool, llama)
        run(llama, ids, cache)
        with pytest.raises(PoolFullError):
            run(llama, ids, cache)
        cache.crop(8)
        pool.pages.free(taken)
        wanted = run(llama, torch.cat([ids, ids], dim=1), DynamicCache())[:, 8:]
        assert close(run(llama, ids, cache), wanted)


# ---- nothing beside the pool ----


def piece(pool: CXLPool, path: Path, page: int, layer: int, kind: str) -> npt.NDArray[np.float32]:
    """The pool's own bytes: keys or values of (page, layer), [kv_heads, page_tokens, dim]."""
    geometry = pool.pages.geometry
    extent, slot = divmod(page, geometry["slab_slots"])
    heads, dim = pool.layout.kv_heads, pool.layout.head_dim
    piece_bytes = geometry[f"{kind}_piece_bytes"]
    assert piece_bytes == PAGE_TOKENS * dim * 4, "pieces lie side by side without gaps"
    offset = (
        geometry["extents_offset"]
        + extent * geometry["extent_bytes"]
        + geometry["layers_offset"]
        + layer * geometry["layer_bytes"]
        + geometry[f"{kind}s_offset"]
        + slot * heads * piece_bytes
    )
    shape = (heads, PAGE_TOKENS, dim)
    return np.memmap(path, np.float32, "r+", offset, shape)


def test_a_step_reads_the_selected_pages_from_the_pool_and_no_others(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "pool"
    layout = layout_of(llama, PAGE_TOKENS)
    with CXLPool.create(path, layout=layout, capacity="16MiB", checksum=False, threads=1) as pool:
        ids, _ = prompts((161,))
        parent = Watched(pool, llama, Budget(pages=6))
        run(llama, ids[:, :160], parent)

        def step() -> tuple[Tensor, list[Selection]]:
            fork = parent.fork()
            logits = run(llama, ids[:, 160:], fork)
            assert isinstance(fork, Watched)
            fork.release()
            return logits, fork.picked

        before, picked = step()
        assert torch.equal(step()[0], before)
        pages = parent.sequences[0].pages
        chosen = [{int(index) for index in p.pages.flat} for p in picked]
        unselected = sorted(set(range(40)) - chosen[0].union(*chosen))
        assert len(unselected) > 8
        for layer in range(LAYERS):
            for index in unselected:
                piece(pool, path, int(pages[index]), layer, "value")[:] = 1e3
                # Keys are read to be scored: these stay such that nobody chooses them.
                first = piece(pool, path, int(pages[unselected[0]]), layer, "key")
                piece(pool, path, int(pages[index]), layer, "key")[:] = first
        after, again = step()
        assert torch.equal(after, before)
        for old, new in zip(picked, again, strict=True):
            assert np.array_equal(old.pages, new.pages)
        for layer, indices in enumerate(chosen):
            index = min(indices)
            values = piece(pool, path, int(pages[index]), layer, "value")
            values += 1
            assert not torch.equal(step()[0], before), f"layer {layer}"
            values -= 1


def test_live_kv_in_a_step_is_that_of_its_tokens(llama: PreTrainedModel, pool: CXLPool) -> None:
    rows, tokens, selected = 4, 402, 5
    ids, _ = prompts((tokens,) * rows)
    cache = CXLCache(pool, llama, Budget(pages=selected))
    run(llama, ids[:, :-1], cache)
    assert all(vars(layer)["keys"] is None for layer in cache.layers)
    with LargestTensor(llama) as seen:
        run(llama, ids[:, -1:], cache)
    layer_token_bytes = pool.layout.token_bytes // LAYERS
    assert cache.counters.live_bytes_peak == rows * layer_token_bytes
    assert seen.largest_bytes <= rows * 96 * 4  # the widest activations: of the MLP
    assert cache.counters.steps == 1
    # The new token is the second in its page, and that page is always selected.
    read = rows * LAYERS * ((selected - 1) * PAGE_TOKENS + 2) * layer_token_bytes
    assert cache.counters.bytes_read == read
    assert cache.counters.bytes_scored == rows * tokens * pool.layout.token_bytes // 2


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_makes_as_many_calls_for_any_number_of_sequences(
    llama: PreTrainedModel, pool: CXLPool, rows: int, padded: bool
) -> None:
    lengths = tuple(320 - (row % 7 if padded else 0) for row in range(rows))
    ids, mask = prompts(lengths)
    cache = CXLCache(pool, llama, Budget(share=0.9))
    run(llama, ids[:, :-6], cache, mask[:, :-6])
    run(llama, ids[:, -6:-5], cache, mask[:, :-5])  # learns how long the lists are
    for last in range(315, 320):
        with counted_calls() as calls:
            run(llama, ids[:, last : last + 1], cache, mask[:, : last + 1])
        assert calls == {"cxlkv_batch_decode": LAYERS}


def test_a_number_is_a_share_of_the_pages(llama: PreTrainedModel, pool: CXLPool) -> None:
    cache = CXLCache(pool, llama, budget=0.05)
    assert cache.budget == Budget(share=0.05)
    cache.budget = [0.5, None, Budget(pages=3)]
    assert cache.budget == (Budget(share=0.5), None, Budget(pages=3))
    with pytest.raises(BadArgumentError, match=r"Budget\(pages=64\)"):
        CXLCache(pool, llama, budget=64)


@pytest.mark.parametrize(
    ("rows", "tokens", "what"),
    [
        (1, 40, "the cache holds 41 tokens, and the prompt ends at token 40"),
        (1, 41, "the cache holds 41 tokens, and the prompt ends at token 41"),
        (1, 21, "the cache holds 41 tokens, and the prompt ends at token 21"),
        (1, 20, "a prompt shorter than what the cache holds"),
        (2, 60, "a batch of 2 rows, the cache holds 1 sequences"),
    ],
)
def test_another_prompt_for_a_filled_cache_is_refused(
    llama: PreTrainedModel, pool: CXLPool, rows: int, tokens: int, what: str
) -> None:
    """transformers drops as many tokens of it as are cached, whatever they are."""
    ids, _ = prompts((26,))
    cache = CXLCache(pool, llama)
    text = generate(llama, ids, None, cache)
    other = text.new_full((rows, tokens), 7)
    with pytest.raises(BadArgumentError, match=rf"{what}.*cache\.release\(\) first"):
        generate(llama, other, None, cache)
    longer = torch.cat([text, text[:, :5]], dim=1)
    goes_on = generate(llama, longer, None, cache)
    cache.release()
    assert torch.equal(generate(llama, longer, None, cache), goes_on)


@pytest.mark.parametrize("installed", ["4.57.3", "5.9.1", None])
def test_a_transformers_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    _installed.check()
    monkeypatch.setattr(_installed, "version", version)
    with pytest.raises(UnsupportedError, match=r"5\.10 or later .*pip install 'cxlkv\[transform"):
        _installed.check()
