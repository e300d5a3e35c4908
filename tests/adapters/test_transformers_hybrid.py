"""CXLCache and CXLRequests over models with recurrent or convolution states beside attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import CXLCache, CXLRequests, hand_over, layout_of, take_over
from cxlkv.adapters.transformers.pieces import pieces
from cxlkv.adapters.transformers.states import StateForm, StateTensor, state_layers
from cxlkv.errors import BadArgumentError, CorruptError, GeometryError, UnsupportedError
from cxlkv.layout import States
from cxlkv.machine.sizes import pages_for, plan_for
from cxlkv.ops.models import layout_of_model
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

from ..support.hybrid_models import MODELS, WHOLE_TEXTS, dynamic, make
from ..support.small_models import PAGE_TOKENS, Generates, generate, pool_for, prompts, run

GATE = ("qwen3-next", "jamba", "falcon-h1", "lfm3", "nemotron-h", "kimi-linear", "zaya")
NEW = 8
SIZED = [
    pytest.param(name, marks=[] if name in GATE else [pytest.mark.nightly])
    for name in MODELS
    if name != "lfm3"  # a window frees what others of the text keep
]
EACH = [pytest.param(name, marks=[] if name in GATE else [pytest.mark.nightly]) for name in MODELS]


@pytest.fixture(scope="module", params=EACH)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(request.param)


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return make("qwen3.5")


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[CXLPool]:
    name = "model" if "model" in request.fixturenames else "qwen"
    with pool_for(request.getfixturevalue(name)) as made:
        yield made


def ones(ids: Tensor) -> Tensor:
    return torch.ones_like(ids)


def answer(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: object, **more: object
) -> Tensor:
    given = ones(ids) if mask is None else mask
    return generate(model, ids, given, cache, **{"max_new_tokens": NEW, **more})


@torch.no_grad()
def placed(model: PreTrainedModel, ids: Tensor, cache: CXLCache) -> Tensor:
    """Logits of a pass that tells its positions, which Bamba does not count itself."""
    model.set_attn_implementation("cxlkv")
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + ids.shape[1])[None]
    logits = model(ids, position_ids=positions, past_key_values=cache).logits
    assert isinstance(logits, Tensor)
    return logits


def texts() -> list[Tensor]:
    ids, _ = prompts((30, 30, 30))
    return [ids[:1], ids[1:2, :17], ids[2:, :5]]


def turn(ids: Tensor, out: Tensor) -> Tensor:
    return torch.cat([out, ids[:, 3:9]], dim=1)


class Found:
    """How many tokens, padding included, each begin() went on from."""

    def __init__(self, requests: CXLRequests, monkeypatch: pytest.MonkeyPatch):
        self.tokens: list[int] = []
        load = requests._load

        def loaded(names: list[str], rows: list[tuple[list[int], int]]) -> int:
            self.tokens.append(load(names, rows))
            return self.tokens[-1]

        monkeypatch.setattr(requests, "_load", loaded)


def served(
    model: PreTrainedModel, requests: CXLRequests, ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    given = ones(ids) if mask is None else mask
    model.set_attn_implementation("cxlkv")
    with requests.begin(ids, given) as cache:
        out = cast(Generates, model).generate(
            ids,
            attention_mask=given,
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
        )
        requests.keep(cache, out)
    return out


# ---- one cache ----


def check_tokens(model: PreTrainedModel, pool: CXLPool, new: int) -> None:
    for ids in texts():
        cache = CXLCache(pool, model)
        ours = answer(model, ids, None, cache, max_new_tokens=new)
        assert torch.equal(ours, answer(model, ids, None, dynamic(model), max_new_tokens=new))
        cache.release()


def test_greedy_tokens_are_the_librarys(model: PreTrainedModel, pool: CXLPool) -> None:
    check_tokens(model, pool, NEW)


@pytest.mark.nightly
def test_64_greedy_tokens_are_the_librarys(model: PreTrainedModel, pool: CXLPool) -> None:
    check_tokens(model, pool, 64)


def test_budgets_and_chunks(qwen: PreTrainedModel, pool: CXLPool) -> None:
    ids = texts()[0]
    wanted = answer(qwen, ids, None, dynamic(qwen))
    cache = CXLCache(pool, qwen, budget=Budget(share=1.0))
    assert torch.equal(answer(qwen, ids, None, cache, prefill_chunk_size=7), wanted)
    cache.release()
    cache.budget = 0.3
    answer(qwen, ids, None, cache)
    assert cache.counters.bytes_read > 0
    cache.release()


def test_a_padded_batch_and_beams(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((23, 9, 16))
    cache = CXLCache(pool, model)
    ours = answer(model, ids, mask, cache)
    assert torch.equal(ours, answer(model, ids, mask, dynamic(model)))
    for row, (text, length) in enumerate(zip(ids, (23, 9, 16), strict=True)):
        alone = answer(model, text[None, -length:], None, dynamic(model))
        assert torch.equal(ours[row, -NEW:], alone[0, -NEW:])
    cache.release()
    ours = answer(model, ids[:1], None, cache, num_beams=3)
    assert torch.equal(ours, answer(model, ids[:1], None, dynamic(model), num_beams=3))
    cache.release()


def test_a_turn_goes_on_and_a_fork_leaves_its_parent(model: PreTrainedModel, pool: CXLPool) -> None:
    ids = texts()[1]
    cache = CXLCache(pool, model)
    out = answer(model, ids, None, cache)
    fork, seen = cache.fork(), cache.states(0)
    if model.config.model_type in WHOLE_TEXTS:
        with pytest.raises(UnsupportedError, match="one token at a time"):
            answer(model, turn(ids, out), None, fork)
        fork.release()
        fork = cache.fork()
        placed(model, out[:, -1:], fork)
    else:
        longer = turn(ids, out)
        whole = answer(model, longer, None, dynamic(model))
        assert torch.equal(answer(model, longer, None, fork), whole)
    assert np.array_equal(cache.states(0), seen)
    assert not np.array_equal(fork.states(0), seen)
    ours = answer(model, out, None, cache)
    assert torch.equal(ours, answer(model, ids, None, dynamic(model), max_new_tokens=2 * NEW))
    fork.release()
    cache.release()


def test_states_come_back_byte_for_byte_and_zeros_tell_other_tokens(
    model: PreTrainedModel, pool: CXLPool
) -> None:
    ids = texts()[0]
    cache = CXLCache(pool, model)
    placed(model, ids[:, :-1], cache)
    states = cache.states(0)
    assert states.any()
    again = CXLCache(pool, model, sequences=[cache.sequences[0].fork()], states=[states])
    zeros = CXLCache(
        pool, model, sequences=[cache.sequences[0].fork()], states=[np.zeros_like(states)]
    )
    assert np.array_equal(again.states(0), states)
    own, back, lost = (placed(model, ids[:, -1:], one) for one in (cache, again, zeros))
    assert torch.equal(own, back)
    assert not torch.allclose(own, lost, atol=1e-3)
    assert np.array_equal(again.states(0), cache.states(0))
    for one in (cache, again, zeros):
        one.release()


# ---- requests ----


def test_requests_hit_up_to_the_last_token(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = CXLRequests(pool, model)
    found = Found(requests, monkeypatch)
    ids = texts()[0]
    wanted = answer(model, ids, None, dynamic(model))
    for _ in range(2):
        assert torch.equal(served(model, requests, ids), wanted)
    assert found.tokens == [0, 29]
    longer = turn(ids, wanted)
    whole = answer(model, longer, None, dynamic(model))
    assert torch.equal(served(model, requests, longer), whole)
    assert found.tokens[-1] == wanted.shape[1] - 1  # the end of the turn
    batch, mask = prompts((30, 19))
    both = answer(model, batch, mask, dynamic(model))
    for _ in range(2):
        assert torch.equal(served(model, requests, batch, mask), both)
    assert found.tokens[-1] == 29
    assert not requests.failures()


def test_checkpoints_on_the_way_serve_texts_that_begin_alike(
    qwen: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = CXLRequests(pool, qwen, every_tokens=8)
    found = Found(requests, monkeypatch)
    ids = texts()[0]
    other = ids.clone()
    other[:, 21:] = other[:, 21:] % 60 + 1
    for text in (ids, other):
        wanted = answer(qwen, text, None, dynamic(qwen))
        assert torch.equal(served(qwen, requests, text), wanted)
    assert found.tokens == [0, 16]
    with pytest.raises(BadArgumentError, match="every_tokens"):
        CXLRequests(pool, qwen, every_tokens=0)


def test_where_texts_part_the_next_one_finds_a_checkpoint(
    qwen: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = CXLRequests(pool, qwen)
    found = Found(requests, monkeypatch)
    ids = texts()[0]
    for shift in (0, 1, 2):
        text = ids.clone()
        text[:, 20:] = (text[:, 20:] + shift - 1) % 63 + 1
        served(qwen, requests, text)
    assert found.tokens == [0, 0, 20]


def test_several_answers_of_a_prompt(qwen: PreTrainedModel, pool: CXLPool) -> None:
    requests = CXLRequests(pool, qwen)
    ids = texts()[1]
    qwen.set_attn_implementation("cxlkv")
    with requests.begin(ids) as cache:
        out = generate(qwen, ids, None, cache, do_sample=True, num_return_sequences=3)
        assert len(cache.sequences) == 3
        assert requests.keep(cache, out) > 0
    assert torch.equal(served(qwen, requests, ids), answer(qwen, ids, None, dynamic(qwen)))


@pytest.mark.parametrize("cold", [False, True])
def test_a_quota_of_states(
    qwen: PreTrainedModel,
    pool: CXLPool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cold: bool,
) -> None:
    """The tenant's oldest checkpoints go; what has no room is computed, and counted."""
    most = 2 * pool.records.state_pages
    tiers = Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB") if cold else Tiers(pool)
    quota = Quota(tiers, 10 * most, state_pages=most)
    requests = CXLRequests(pool, qwen, tiers, quota=quota)
    found = Found(requests, monkeypatch)
    first, second = texts()[0], texts()[0].flip(1)
    wanted = answer(qwen, first, None, dynamic(qwen))
    for ids in (first, first, second, first):  # each has one at the prompt's and at the turn's end
        served(qwen, requests, ids)
        stats = quota.stats()
        assert stats["used_state_pages"] == most
        assert stats["used_pages"] == pool.stats()["pages_published"]
    assert found.tokens == [0, 29, 0, 29 if cold else 0]
    assert not requests.failures()
    space = requests._space(29)
    if not cold:
        with quota.match_prefix(first[0, :-1], space), quota.match_prefix(wanted[0, :-1], space):
            served(qwen, requests, second)
        assert requests.failures() == {"quota": 3}  # behind known pages, the prompt and the turn
    assert torch.equal(served(qwen, requests, first), wanted)
    assert found.tokens[-1] == 29
    tiers.close()


def test_audits_compute_again_from_the_checkpoint_before(
    model: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of turns, whose states were made step by step; nothing is found wrong."""
    requests = CXLRequests(pool, model, audit_hits=2)
    found = Found(requests, monkeypatch)
    ids = texts()[0]
    wanted = answer(model, ids, None, dynamic(model))
    longer = turn(ids, wanted)
    whole = answer(model, longer, None, dynamic(model))
    for prompt, right in ((ids, wanted), *[(ids, wanted)] * 2, *[(longer, whole)] * 2):
        assert torch.equal(served(model, requests, prompt), right)
    assert found.tokens == [0, 29, 0, 37, 37]
    batch, mask = prompts((30, 19))
    both = answer(model, batch, mask, dynamic(model))
    for _ in range(3):
        assert torch.equal(served(model, requests, batch, mask), both)
    assert found.tokens[5:] == [0, 29, 0]
    assert requests.audited_hits == 4
    assert not requests.failures()
    assert pool.stats()["pages_held"] == 0


@pytest.mark.parametrize("planted", ["states", "keys"])
def test_an_audit_finds_what_was_planted(
    qwen: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Another model's states, or keys and values, under this one's key."""
    ids = texts()[0]
    wanted = answer(qwen, ids, None, dynamic(qwen))
    requests = CXLRequests(pool, qwen, audit_hits=2)
    found = Found(requests, monkeypatch)
    caches = [CXLCache(pool, qwen), CXLCache(pool, make("qwen3.5", seed=8))]
    for one, of in zip(caches, (qwen, make("qwen3.5", seed=8)), strict=True):
        placed(of, ids[:, :-1], one)
    keys, states = caches[::-1] if planted == "keys" else caches
    space = requests._space(29)
    pool.publish_prefix(keys.sequences[0], ids[0, :-1], space, states=states.states(0))
    for one in caches:
        one.release()
    assert not torch.equal(served(qwen, requests, ids), wanted)
    with pytest.raises(CorruptError, match="do it again"):
        served(qwen, requests, ids)
    assert requests.failures() == {"audit": 1}
    assert found.tokens == [29, 0]
    for other in (requests, CXLRequests(pool, qwen)):
        assert torch.equal(served(qwen, other, ids), wanted)
    assert found.tokens[-1] == 0
    assert pool.stats()["pages_held"] == 0


# ---- coming back ----


def test_crop_comes_back_to_a_checkpoint_and_nowhere_else(
    qwen: PreTrainedModel, pool: CXLPool
) -> None:
    ids = texts()[0]
    cache = CXLCache(pool, qwen)
    run(qwen, ids[:, :11], cache)
    cache.checkpoint()
    kept = cache.states(0)
    run(qwen, ids[:, 11:20], cache)
    with pytest.raises(
        BadArgumentError, match=r"behind 15 tokens are not kept, only .* behind: 11"
    ):
        cache.crop(15)
    assert cache.get_seq_length() == 20
    after = run(qwen, ids[:, 20:], cache)
    for back in (11, -19):
        cache.crop(back)
        assert cache.get_seq_length() == 11
        assert np.array_equal(cache.states(0), kept)
        again = run(qwen, ids[:, 11:], cache)
        assert torch.allclose(again[:, 9:], after, atol=1e-4)
    cache.crop(-30)
    assert cache.get_seq_length() == 0
    assert torch.equal(run(qwen, ids, cache), run(qwen, ids, dynamic(qwen)))
    cache.release()


def test_a_pass_that_failed_is_not_built_upon(
    qwen: PreTrainedModel, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = texts()[0]
    cache = CXLCache(pool, qwen)
    run(qwen, ids[:, :10], cache)
    cache.checkpoint()
    with monkeypatch.context() as broken:
        broken.setattr(CXLCache, "_begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(qwen, ids[:, 10:], cache)
    with pytest.raises(BadArgumentError, match="a pass failed on its way"):
        run(qwen, ids[:, 10:], cache)
    with pytest.raises(BadArgumentError, match="a pass failed on its way"):
        cache.states(0)
    cache.crop(10)
    whole = run(qwen, ids, dynamic(qwen))
    assert torch.allclose(run(qwen, ids[:, 10:], cache), whole[:, 10:], atol=1e-4)
    cache.release()


def test_convolutions_take_drafted_tokens_back() -> None:
    model = make("lfm2")
    ids = texts()[0].repeat(1, 2)
    with pool_for(model) as pool:
        cache = CXLCache(pool, model)
        ours = answer(model, ids, None, cache, prompt_lookup_num_tokens=3)
        assert torch.equal(ours, answer(model, ids, None, dynamic(model)))
        other = CXLCache(pool, model)
        run(model, ours[:, :-1], other)
        assert len(cache.sequences[0]) == ours.shape[1] - 1
        found, wanted = (one.states(0).view(np.float32) for one in (cache, other))
        assert np.allclose(found, wanted, atol=1e-4)
        before = other.states(0)
        other.activate_past_recording()
        run(model, ids[:, :5], other)
        assert other.states(0).shape == before.shape  # what is recorded before is no part of it
        other.crop(-5)
        assert np.array_equal(other.states(0), before)
        other.release()
        cache.release()


# ---- hand-over ----


def test_a_hand_over_takes_the_states_along(model: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((23, 9))
    cache = CXLCache(pool, model)
    out = answer(model, ids, mask, cache)
    there = take_over(hand_over(cache, model), pool, model)
    assert [*map(len, there.sequences)] == [22 + NEW, 8 + NEW]
    for row in range(2):
        assert np.array_equal(there.states(row), cache.states(row))
    longer = torch.cat([mask, torch.ones(2, NEW, dtype=mask.dtype)], dim=1)
    ours = answer(model, out, longer, there)
    assert torch.equal(ours, answer(model, ids, mask, dynamic(model), max_new_tokens=2 * NEW))
    there.release()
    cache.release()


# ---- refusals ----


def test_what_is_refused_by_name(qwen: PreTrainedModel, pool: CXLPool) -> None:
    for differs in ({"linear_key_head_dim": 8}, {"linear_conv_kernel_dim": 3}):
        with pytest.raises(GeometryError, match="laid out for States"):
            CXLCache(pool, make("qwen3.5", **differs))
    with pytest.raises(GeometryError, match="laid out for States"):
        CXLCache(pool, make("qwen3.5").bfloat16())
    cache = CXLCache(pool, qwen)
    run(qwen, texts()[0], cache)
    rows = [cache.sequences[0].fork()]
    with pytest.raises(BadArgumentError, match="1 sequences with 0 states"):
        CXLCache(pool, qwen, sequences=rows)
    with pytest.raises(BadArgumentError, match="states are uint8"):
        CXLCache(pool, qwen, sequences=rows, states=[np.zeros(3, np.uint8)])
    with pytest.raises(UnsupportedError, match="no drafted ones can be taken back"):
        cache.activate_past_recording()
    with pytest.raises(BadArgumentError, match="row 1"):
        cache.states(1)
    with pytest.raises(BadArgumentError, match="2 rows, the cache holds states of 1"):
        run(qwen, texts()[0].repeat(2, 1), cache)
    rows[0].release()
    cache.release()


# ---- the parts ----


def test_the_layout_is_known_without_weights(model: PreTrainedModel) -> None:
    layout = layout_of(model, PAGE_TOKENS)
    own = dynamic(model)
    ids = texts()[2]
    run(model, ids, own)
    assert layout.layers == sum(hasattr(one, "keys") and one.keys is not None for one in own.layers)
    assert layout_of(model.config, PAGE_TOKENS) == layout
    kept = [
        tensor
        for layer in own.layers
        if isinstance(layer, LinearAttentionLayer)
        for states in (layer.conv_states, layer.recurrent_states)
        for tensor in states.values()
        if tensor is not None
    ]
    lines = sum(-(-one.nbytes // 64) * 64 for one in kept)
    assert layout.states is not None
    assert layout.states.bytes == lines


def test_rows_as_bytes_and_back() -> None:
    print("seed 5")
    torch.manual_seed(5)
    form = StateForm(
        (
            StateTensor(0, "conv_states", 0, (3, 5), torch.bfloat16),
            StateTensor(2, "conv_states", 0, (1,), torch.float32),
            StateTensor(2, "recurrent_states", 0, (2, 7), torch.float32),
        )
    )
    assert form.states == States.of(
        [(one.name, one.shape, str(one.dtype).removeprefix("torch.")) for one in form]
    )
    layers = {0: LinearAttentionLayer(), 2: LinearAttentionLayer()}
    tensors = [torch.randn(4, *one.shape).to(one.dtype) for one in form]
    form.put(layers, tensors)
    rows = [form.pack(form.tensors(layers), row) for row in range(4)]
    assert rows[1][:30].tobytes() == tensors[0][1].view(torch.uint8).numpy().tobytes()
    assert rows[1][64:68].tobytes() == tensors[1][1].numpy().tobytes()
    back = form.unpack([rows[2], None], torch.device("cpu"))
    for one, tensor in zip(back, tensors, strict=True):
        assert torch.equal(one[0], tensor[2])
        assert not one[1].any()
    assert state_layers([layers[0], object()]) == {0: layers[0]}
    odd = {0: layers[0], 2: LinearAttentionLayer()}
    with pytest.raises(GeometryError, match="another number of them"):
        form.tensors(odd)
    form.put(layers, [tensors[0].float(), *tensors[1:]])
    with pytest.raises(GeometryError, match=r"layer 0: conv_states 0 \[3, 5\] float32, the pool"):
        form.tensors(layers)


def test_pieces_end_at_the_stops() -> None:
    assert pieces(3, [8, 10], at_once=True) == [(3, 8), (8, 10)]
    assert pieces(0, [4, 6], at_once=False) == [(0, 4), (4, 5), (5, 6)]
    assert pieces(4, [6], at_once=False) == [(4, 5), (5, 6)]
    assert pieces(4, [], at_once=True) == []


@pytest.mark.parametrize("name", SIZED)
def test_cxlkv_size_says_what_a_pool_takes(name: str, tmp_path: Path) -> None:
    """Of requests of 3,200 tokens, each with a checkpoint at its end and one a token before."""
    model = make(name)
    model.config.save_pretrained(tmp_path)
    layout = layout_of_model(str(tmp_path))
    assert (layout.states, layout.groups) == (layout_of(model).states, layout_of(model).groups)
    tokens, planned = 3200, plan_for(layout, 3200, requests=2)
    states = np.zeros(planned.layout.states.bytes if planned.layout.states else 0, np.uint8)
    with CXLPool.create("anonymous:", layout=layout, capacity=planned.capacity_bytes) as pool:
        for request in range(2):
            sequence = pool.sequence()
            for layer in range(layout.layers):
                rows = torch.zeros((2, tokens, layout.kv_heads, max(layout.head_dim, 1)))
                values = rows[1, :, :, : layout.value_head_dim]
                sequence.append(layer, rows[0], values if layout.values == "own" else None)
            ids = np.arange(tokens) + request * tokens
            pool.publish_prefix(sequence, ids[:-1], states=states)
            pool.publish_prefix(sequence, ids, states=states)
        used = pool.stats()["pages_total"] - pool.stats()["pages_free"]
        assert 0.99 <= used / pages_for(layout, planned.geometry, tokens, 2) <= 1
