"""CXLRequests: the suite of adapters over a model, and calls of generate() that share prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as once
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.transformers import CXLCache, CXLRequests, layout_of
from cxlkv.arrays import Doubles
from cxlkv.errors import BadArgumentError, GeometryError, PoolFullError
from cxlkv.tiers import Tiers

from ..support.adapters import AdapterSuite
from ..support.small_models import VOCABULARY_SIZE, Generates, built, pool_for, prompts

PAGE = 8
WINDOWS: dict[str, object] = {
    "use_sliding_window": True,
    "sliding_window": 23,
    "layer_types": ["sliding_attention", "full_attention"],
}


@once
def llama(seed: int = 7) -> PreTrainedModel:
    return built(LlamaConfig, LlamaForCausalLM, seed)


@once
def windowed() -> PreTrainedModel:
    return built(Qwen3Config, Qwen3ForCausalLM, 7, **WINDOWS)


# ---- the suite ----


class ModelDriver:
    """K and V are a model's; its forward passes make them in a cache of one row."""

    page_size: ClassVar[int] = PAGE

    def __init__(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        self.adapter = CXLRequests(pool, self.model(), tiers)

    @staticmethod
    def model() -> PreTrainedModel:
        return llama()

    @classmethod
    def layout(cls) -> KVLayout:
        return layout_of(cls.model(), PAGE)

    @torch.no_grad()
    def give(self, request: str, ids: list[int]) -> None:
        has = len(self.adapter.sequence(request))
        if has < len(ids):
            cache = self.adapter.cache([request])
            self.model()(torch.tensor([ids[has:]]), past_key_values=cache)

    @torch.no_grad()
    def attends(self, request: str, ids: list[int]) -> Doubles:
        """Keys and values, and the logits of one more token."""
        sequence = self.adapter.sequence(request)
        assert len(sequence) == len(ids)
        seen: list[Doubles] = []
        for layer, window in enumerate(self.layout().windows):
            if window is None:
                seen += [np.asarray(piece, np.float64).ravel() for piece in sequence.fetch(layer)]
        cache = CXLCache(self.adapter.pool, self.model(), sequences=[sequence.fork()])
        logits = self.model()(torch.tensor([[1]]), past_key_values=cache).logits
        cache.release()
        return np.concatenate([*seen, logits.double().numpy().ravel()])

    def query(self) -> object:
        return np.ones((4, 16), np.float32)


class WindowsDriver(ModelDriver):
    @staticmethod
    def model() -> PreTrainedModel:
        return windowed()


class TestModel(AdapterSuite):
    driver = ModelDriver


class TestModelWithWindows(AdapterSuite):
    driver = WindowsDriver


# ---- generate() ----


@pytest.fixture(params=[llama, windowed], ids=["llama", "windows"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = request.param()
    assert isinstance(made, PreTrainedModel)
    return made


@pytest.fixture
def pool(model: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(model, PAGE) as made:
        yield made


def generate(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: object, **more: object
) -> Tensor:
    settings = {"max_new_tokens": 12, "do_sample": False, **more}
    if mask is not None:
        settings["attention_mask"] = mask
    return cast(Generates, model).generate(ids, past_key_values=cache, **settings)


def stock(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **more: object
) -> Tensor:
    model.set_attn_implementation("sdpa")
    made = generate(model, ids, mask, DynamicCache(), **more)
    model.set_attn_implementation("cxlkv")
    return made


def test_a_talk_goes_on_from_what_was_kept(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, _ = prompts((30,))
    for begins in (0, 40, 72):  # 42 tokens, 41 of them in the cache; 10 more and 12 of an answer
        with requests.begin(ids) as cache:
            assert cache.get_seq_length() == begins
            out = generate(model, ids, None, cache)
            assert requests.keep(cache, out) > 0
        assert torch.equal(out, stock(model, ids))
        ids = torch.cat((out, ids[:, :20]), dim=1)
        assert pool.stats()["sequences"] == 0
    assert not requests.failures()


def test_a_padded_batch_begins_where_all_rows_are_known(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    requests = CXLRequests(pool, model)
    ids, mask = prompts((45, 37, 21))
    wanted = stock(model, ids, mask)
    for begins in (0, 40):  # the first row has 5 pages, the second 4 behind 8 of padding
        with requests.begin(ids, mask) as cache:
            assert cache.get_seq_length() == begins
            assert torch.equal(generate(model, ids, mask, cache), wanted)
    other = torch.cat((ids[:2], ids[:1].flip(1)))
    mask = torch.ones_like(mask) * (other > 0)
    with requests.begin(other, mask) as cache:
        assert cache.get_seq_length() == 0, "one row is not known"
        assert torch.equal(generate(model, other, mask, cache), stock(model, other, mask))
    assert pool.stats()["sequences"] == 0


def test_a_cut_within_a_page(model: PreTrainedModel, pool: CXLPool) -> None:
    """Padding that is no number of pages: rows are cut, or where windows forbid it made anew."""
    requests = CXLRequests(pool, model)
    ids, mask = prompts((45, 40))
    wanted = stock(model, ids, mask)
    with requests.begin(ids, mask) as cache:
        generate(model, ids, mask, cache)
    with requests.begin(ids, mask) as cache:  # rows have 40 and 32, behind no and 5 of padding
        cut = not requests.failures()["window"]
        assert cache.get_seq_length() == (37 if cut else 0)
        assert cut == (model is llama())
        assert torch.equal(generate(model, ids, mask, cache), wanted)


def test_samples_are_kept_and_beams_are_not(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, mask = prompts((26, 19))
    with requests.begin(ids, mask) as cache:
        beams = generate(model, ids, mask, cache, num_beams=3)
        assert torch.equal(beams, stock(model, ids, mask, num_beams=3))
        with pytest.raises(BadArgumentError, match="beam search"):
            requests.keep(cache, beams)
    with requests.begin(ids, mask) as cache:
        assert cache.get_seq_length() == 23, "the prompts were published: 24 and 16 tokens"
        torch.manual_seed(2)
        out = generate(model, ids, mask, cache, do_sample=True, num_return_sequences=2)
        assert requests.keep(cache, out) > 0
        with pytest.raises(BadArgumentError, match="rows"):
            requests.keep(cache, out[:2])
        with pytest.raises(BadArgumentError, match="row 0 is not what"):
            requests.keep(cache, out.flip(0))
    for row in (0, 1):
        with requests.begin(out[row : row + 1]) as cache:
            assert cache.get_seq_length() == 32, "each sample by itself"
    assert pool.stats()["sequences"] == 0


def test_prompt_lookup_crops_and_is_kept(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids = torch.tensor([[5, 6, 7, 8, 9] * 6])
    settings = {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY_SIZE}
    with requests.begin(ids) as cache:
        out = generate(model, ids, None, cache, **settings)
        assert requests.keep(cache, out) > 0
    with requests.begin(out) as cache:
        assert cache.get_seq_length() == 40
        found = generate(model, out, None, cache)
    assert torch.equal(found, stock(model, out))


def test_what_is_no_longer_the_prompt_is_not_published(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    requests = CXLRequests(pool, model)
    ids, _ = prompts((30,))
    for undo in ("reset", "crop"):
        with requests.begin(ids) as cache, torch.no_grad():
            model(ids[:, :29], past_key_values=cache)
            cache.reset() if undo == "reset" else cache.crop(-20)
            model(ids[:, :20].flip(1), past_key_values=cache)
            with pytest.raises(BadArgumentError, match="released or cut back"):
                requests.keep(cache, ids)
        with requests.match(requests.keys(ids[0].tolist())) as hit:
            assert hit.tokens == (0 if undo == "reset" else 8), "9 tokens were read and stayed"
        del hit
    assert requests.failures() == {"unseen": 2}
    pool.forget(requests.keys(ids[0].tolist()))
    pair, _ = prompts((30, 30))
    for move in ("reorder_cache", "batch_select_indices"):
        with requests.begin(pair) as cache, torch.no_grad():
            model(pair, past_key_values=cache)
            getattr(cache, move)(torch.tensor([1, 0]))
        assert pool.stats()["pages_published"] == 0
    broken = requests.begin(ids)
    with torch.no_grad():
        model(ids[:, :17], past_key_values=broken.__enter__())
    assert not broken.__exit__(None, None, None)
    with requests.begin(ids) as cache:
        assert cache.get_seq_length() == 16, "what was there when it ended"
    with pytest.raises(BadArgumentError, match="a cache of begin"):
        requests.keep(CXLCache(pool, model), ids)
    assert pool.stats()["sequences"] == 0


def test_answers_under_a_budget_are_not_kept(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, _ = prompts((64,))
    for begins in (0, 56):
        with requests.begin(ids, budget=Budget(pages=3)) as cache:
            assert cache.get_seq_length() == begins
            out = generate(model, ids, None, cache)
            with pytest.raises(BadArgumentError, match="under a budget"):
                requests.keep(cache, out)
    with requests.begin(ids) as cache:
        assert torch.equal(generate(model, ids, None, cache), stock(model, ids))


def test_a_full_pool_is_counted(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, _ = prompts((30,))
    with requests.begin(ids) as cache:
        generate(model, ids, None, cache)
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    longer = torch.cat((ids, ids), dim=1)
    with pytest.raises(PoolFullError), requests.begin(longer) as cache:
        generate(model, longer, None, cache)
    assert requests.failures() == {"full": 1}
    pool.pages.free(taken)
    with requests.begin(longer) as cache:
        assert cache.get_seq_length() == 24
        assert torch.equal(generate(model, longer, None, cache), stock(model, longer))


def test_only_the_same_model_and_salt_find_a_prefix(tmp_path: Path) -> None:
    ids, _ = prompts((30,))
    layout = layout_of(llama(), PAGE)

    def begins(requests: CXLRequests) -> int:
        with requests.begin(ids) as cache:
            return cache.get_seq_length()

    with CXLPool.create(tmp_path / "pool", layout=layout, capacity="8MiB") as pool:
        requests = CXLRequests(pool, llama())
        with requests.begin(ids) as cache:
            generate(llama(), ids, None, cache)
        assert begins(CXLRequests(pool, llama())) == 24
        same = built(LlamaConfig, LlamaForCausalLM, 7)
        assert begins(CXLRequests(pool, same)) == 24, "made again, the same"
        assert begins(CXLRequests(pool, llama(8))) == 0
        assert begins(CXLRequests(pool, llama(), salt=b"another tenant")) == 0
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        assert begins(CXLRequests(pool, built(LlamaConfig, LlamaForCausalLM, 7, **rope))) == 0
        with torch.no_grad():
            rows = same.get_input_embeddings().weight
            assert isinstance(rows, Tensor)
            rows[[3, 4]] = rows[[4, 3]]
        assert begins(CXLRequests(pool, same)) == 0, "two rows have changed places"
        with torch.device("meta"):
            far = built(LlamaConfig, LlamaForCausalLM, 7)
        with pytest.raises(BadArgumentError, match="say weights="):
            CXLRequests(pool, far)
        assert begins(CXLRequests(pool, llama(), weights="revision 1")) == 0
        with (
            pytest.raises(BadArgumentError, match="pad on the left"),
            requests.begin(ids, torch.arange(30)[None] < 29),
        ):
            pass
        with pytest.raises(BadArgumentError, match="both"), requests.begin(ids, ids[:, 1:]):
            pass
    with pool_for(windowed(), PAGE) as pool, pytest.raises(GeometryError):
        CXLRequests(pool, llama())


def test_a_batch_in_which_all_rows_are_padded(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, mask = prompts((33, 27))
    ids, mask = (torch.nn.functional.pad(of, (4, 0)) for of in (ids, mask))
    wanted = stock(model, ids, mask)
    for begins in (0, 34):  # 32 tokens behind 4 of padding, 24 behind 10
        with requests.begin(ids, mask) as cache:
            assert cache.get_seq_length() == begins
            assert torch.equal(generate(model, ids, mask, cache), wanted)


def test_a_request_of_several_rows_gives_all_back(model: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, model)
    ids, _ = prompts((20,))
    requests.load("one", None, 0)
    cache = requests.cache(["one"])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    assert pool.stats()["pages_held"] > 0
    assert requests.store("one", requests.keys(ids[0].tolist())) > 0
    requests.release("one")
    assert pool.stats()["pages_held"] == 0, "while the cache is there"
    with requests.match(requests.keys(ids[0].tolist())) as hit:
        assert hit.tokens == 16
