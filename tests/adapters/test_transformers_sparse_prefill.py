"""Block-sparse prefill: against plain attention under the mask of the chosen blocks, and others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLCache, sparse_prefill
from cxlkv.adapters.transformers.sparse_prefill import (
    BLOCK_TOKENS,
    STRIDE,
    attend_sparsely,
    choose_blocks,
)
from cxlkv.errors import BadArgumentError

from ..support.small_models import close, pool_for, prompts, run
from .test_transformers_models import llama as llama  # a fixture
from .test_transformers_models import make

SCALE, Q_HEADS, KV_HEADS, DIM = 0.5, 4, 2, 16
TOKENS = 900
LENGTHS = (700, 300, 420)


@pytest.fixture
def pool(llama: PreTrainedModel) -> Iterator[CXLPool]:
    with pool_for(llama, capacity="32MiB") as made:
        yield made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of few tokens count as long ones."""
    monkeypatch.setattr(sparse_prefill, "TOKENS_LEAST", 384)


def text(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a text: a few keys are near to all queries."""
    random = torch.Generator().manual_seed(5)
    query = torch.randn((Q_HEADS, tokens, DIM), generator=random)
    key = torch.randn((KV_HEADS, tokens, DIM), generator=random)
    query[..., 0] += 3
    key[:, 200:240, 0] += 4
    return query, key, torch.randn((KV_HEADS, tokens, DIM), generator=random)


def by_one_block_at_a_time(query: Tensor, key: Tensor, mass: float) -> Tensor:
    """The blocks to attend to, spelled out: bool [q_heads, query blocks, key blocks]."""
    rows, tokens = query.shape[1], key.shape[1]
    blocks, first = -(-tokens // BLOCK_TOKENS), (tokens - rows) // BLOCK_TOKENS
    chosen = torch.zeros((Q_HEADS, blocks - first, blocks), dtype=torch.bool)
    whole = torch.zeros((Q_HEADS, blocks * BLOCK_TOKENS, DIM))
    whole[:, tokens - rows : tokens] = query
    keys = torch.zeros((KV_HEADS, blocks * BLOCK_TOKENS, DIM))
    keys[:, :tokens] = key
    for head in range(Q_HEADS):
        logits = whole[head] @ keys[head * KV_HEADS // Q_HEADS].T * SCALE
        count = blocks * BLOCK_TOKENS // STRIDE
        antidiagonal = torch.eye(STRIDE).flip(0)[:, None]
        sums = (logits.view(count, STRIDE, count, STRIDE) * antidiagonal).sum((1, 3)) / STRIDE
        sums = sums.masked_fill(~torch.ones_like(sums, dtype=torch.bool).tril(), float("-inf"))
        sums = sums[(tokens - rows) // STRIDE : -(-tokens // STRIDE)]
        weights = sums.softmax(-1)
        skipped = (tokens - rows) // STRIDE
        for block in range(first, blocks):
            cells = range(
                max(skipped, block * BLOCK_TOKENS // STRIDE) - skipped,
                min(len(weights), (block + 1) * BLOCK_TOKENS // STRIDE - skipped),
            )
            shares = torch.stack([weights[cell] for cell in cells]).mean(0)
            shares = shares.view(blocks, -1).sum(1)
            taken = {0, block, max(0, block - 1)}
            rest = sorted(set(range(block + 1)) - taken, key=lambda b: -shares[b])
            while rest and sum(shares[b] for b in taken) < mass:
                taken.add(rest.pop(0))
            chosen[head, block - first, list(taken)] = True
    return chosen


def masked(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Plain softmax of the tokens of chosen blocks, up to a query's own."""
    rows, tokens = query.shape[1], key.shape[1]
    at = torch.arange(tokens - rows, tokens)
    own = at // BLOCK_TOKENS - (tokens - rows) // BLOCK_TOKENS
    seen = chosen.repeat_interleave(BLOCK_TOKENS, dim=2)[:, own, :tokens]
    seen &= torch.arange(tokens) <= at[:, None]
    keys, values = (one.repeat_interleave(Q_HEADS // KV_HEADS, dim=0) for one in (key, value))
    logits = (query @ keys.mT * SCALE).masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ values


@pytest.mark.parametrize("rows", [TOKENS, 300, 128, 1])
@pytest.mark.parametrize("mass", [0.5, 0.9])
def test_it_is_attention_to_the_best_blocks(rows: int, mass: float) -> None:
    query, key, value = text()
    query = query[:, TOKENS - rows :]
    chosen = by_one_block_at_a_time(query, key, mass)
    found = attend_sparsely(query, key, value, SCALE, mass)
    assert found.attended == int(chosen.sum())
    assert found.attended < found.causal or rows == 1
    assert close(found.out, masked(query, key, value, chosen))


def test_estimates_in_parts_and_gathering_in_parts_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = text()
    whole = attend_sparsely(query, key, value, SCALE, 0.8)
    monkeypatch.setattr(sparse_prefill, "ESTIMATES_MOST", 1)
    monkeypatch.setattr(sparse_prefill, "GATHERED_MOST", 1)
    parts = attend_sparsely(query, key, value, SCALE, 0.8)
    assert parts[1:] == whole[1:]
    assert close(parts.out, whole.out)


@pytest.mark.parametrize("rows", [TOKENS, 333])
def test_all_of_the_mass_is_dense_attention(rows: int) -> None:
    query, key, value = text()
    query = query[:, TOKENS - rows :]
    found = attend_sparsely(query, key, value, SCALE, 1.0)
    everything = torch.ones((Q_HEADS, 8, 8), dtype=torch.bool)
    assert found.attended == found.causal
    assert close(found.out, masked(query, key, value, everything))


def test_first_own_and_previous_blocks_are_always_in() -> None:
    shares = torch.zeros((1, 6, 6))
    shares[..., 2] = 1
    chosen = choose_blocks(shares, 0, 0.9)[0]
    assert chosen[5].tolist() == [True, False, True, False, True, True]
    assert chosen[1].tolist() == [True, True, False, False, False, False]


def test_a_later_token_changes_no_earlier_block_and_its_value_no_earlier_token() -> None:
    query, key, value = text()
    before = attend_sparsely(query, key, value, SCALE, 0.7).out
    other = value.clone()
    other[:, 700] += 5
    assert torch.equal(attend_sparsely(query, key, other, SCALE, 0.7).out[:, :700], before[:, :700])
    query[:, 700], key[:, 700] = 9, 9
    after = attend_sparsely(query, key, other, SCALE, 0.7).out
    assert close(after[:, :640], before[:, :640])
    assert not close(after[:, 700:], before[:, 700:])


# ---- in a CXLCache ----


@pytest.mark.usefixtures("short")
def test_padded_rows_and_chunks_with_all_of_the_mass_equal_dense(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    ids, mask = prompts(LENGTHS)
    wanted = run(llama, ids, CXLCache(pool, llama), mask)
    cache = CXLCache(pool, llama, prefill_mass=1.0)
    found = run(llama, ids, cache, mask)
    assert close(found[mask.bool()], wanted[mask.bool()])
    assert cache.counters.prefill_blocks == cache.counters.prefill_blocks_causal > 0
    cache.release()
    first = run(llama, ids[:, :350], cache, mask[:, :350])
    found = torch.cat([first, run(llama, ids[:, 350:], cache, mask)], dim=1)
    assert close(found[mask.bool()], wanted[mask.bool()])


@pytest.mark.usefixtures("short")
def test_each_row_is_as_alone_and_a_chunk_as_the_whole(
    llama: PreTrainedModel, pool: CXLPool
) -> None:
    """The chunk begins with a block, so that the same queries choose together."""
    ids, mask = prompts((640, 512))
    cache = CXLCache(pool, llama, prefill_mass=0.6)
    both = run(llama, ids, cache, mask)
    assert 0 < cache.counters.prefill_blocks < cache.counters.prefill_blocks_causal
    for row, length in enumerate((640, 512)):
        alone = CXLCache(pool, llama, prefill_mass=0.6)
        own = ids[row : row + 1, 640 - length :]
        first = run(llama, own[:, :384], alone)
        found = torch.cat([first, run(llama, own[:, 384:], alone)], dim=1)
        assert close(found[0], both[row, 640 - length :])


def test_short_texts_windows_and_softcap_stay_dense(llama: PreTrainedModel, pool: CXLPool) -> None:
    ids, mask = prompts((600,))
    cache = CXLCache(pool, llama, prefill_mass=0.5)
    run(llama, ids, cache, mask)
    assert cache.counters.prefill_blocks_causal == 0


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_what_is_not_plain_attention_stays_dense(name: str) -> None:
    model = make(name)
    ids, mask = prompts((500,))
    with pool_for(model, capacity="32MiB") as pool:
        wanted = run(model, ids, CXLCache(pool, model), mask)
        cache = CXLCache(pool, model, prefill_mass=0.5)
        assert torch.equal(run(model, ids, cache, mask), wanted)
        assert cache.counters.prefill_blocks_causal == 0


@pytest.mark.parametrize("mass", [0, -0.1, 1.1, float("nan")])
def test_a_mass_that_is_no_share_is_refused(
    llama: PreTrainedModel, pool: CXLPool, mass: float
) -> None:
    with pytest.raises(BadArgumentError, match="a share of the attention: write it like"):
        CXLCache(pool, llama, prefill_mass=mass)
    text = torch.zeros(1, BLOCK_TOKENS, 8)  # it may be set between steps, too
    with pytest.raises(BadArgumentError, match="a share of the attention: write it like"):
        attend_sparsely(text, text, text, 1.0, mass)


def test_a_fork_has_the_same_mass(llama: PreTrainedModel, pool: CXLPool) -> None:
    assert CXLCache(pool, llama, prefill_mass=0.9).fork().prefill_mass == 0.9
