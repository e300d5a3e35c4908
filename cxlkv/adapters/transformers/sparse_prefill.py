"""Block-sparse prefill: a query head attends to the blocks of keys that hold most of its attention.

The method is XAttention's (Xu et al., arXiv 2503.16428). Queries and keys go by blocks of 128. In a
block, the logits on every 16th antidiagonal are added up, which touches each query and each key,
and a softmax over these sums estimates how much of the attention a block of keys holds.

    for each query head and block of its queries:
        take the first block of keys, the one of the queries' own tokens, and the one before
        take the best of the other blocks until all that are taken hold `mass`
        attend to them, causal within the last one

Which blocks are taken depends on all queries of a block: a token may change what the up to 127
tokens before it attend to, never what they see. All else is causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cxlkv.adapters.common.steps import LayerStep, Step
from cxlkv.layout import parse_share

BLOCK_TOKENS = 128
STRIDE = 16
"""Antidiagonals that are added up are so far apart, in tokens."""
CELLS = BLOCK_TOKENS // STRIDE
TOKENS_LEAST = 2048
"""A text with fewer tokens is attended to densely: choosing takes as long as it saves. With 7,000
tokens of SmolLM2's shape (9 query heads of 64, bf16, one thread) attention takes 0.2 to 0.35 of the
dense one's time at a mass of 0.9, and 0.8 in the first layer, whose attention is spread; with 2,048
tokens 0.5 to 1.15."""
ESTIMATES_MOST = 1 << 24  # at one time, of all heads: 64 MiB
GATHERED_MOST = 1 << 24  # numbers of keys at one time, and as many of values


class Prefill(NamedTuple):
    """Attention [q_heads, rows, value_dim]. attended: how many blocks of 128 queries by 128 keys it
    took, over all query heads; causal: of how many."""

    out: Tensor
    attended: int
    causal: int


def check_mass(mass: float | None) -> float | None:
    """The share of the attention to keep as it is. Raises BadArgumentError when it is none."""
    return None if mass is None else parse_share(mass, "a prefill_mass, a share of the attention")


def long_rows(part: LayerStep) -> npt.NDArray[np.bool_]:
    """Which sequences have a prefill that is long enough to be sparse, [batch]; none of layers with
    windows, softcap or sinks."""
    plain = part.window is None and part.softcap is None and part.sinks is None
    return plain & is_long(part.step)


def is_long(step: Step) -> npt.NDArray[np.bool_]:
    """Which sequences have a prefill of at least so many tokens, [batch]."""
    return (step.new >= BLOCK_TOKENS) & (step.lengths >= TOKENS_LEAST)


def attend_sparsely(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mass: float
) -> Prefill:
    """Causal attention of a text's last tokens over the blocks that are estimated to hold `mass`.

    query [q_heads, rows, dim]: of the last `rows` tokens. key, value [kv_heads, tokens, dim].
    Raises BadArgumentError as check_mass().
    """
    check_mass(mass)
    rows, tokens = query.shape[1], key.shape[1]
    first, before = divmod(tokens - rows, BLOCK_TOKENS)
    behind = -tokens % BLOCK_TOKENS
    queries = pad(query, (0, 0, before, behind))
    keys, values = (pad(one, (0, 0, 0, behind)) for one in (key, value))
    chosen = torch.cat(
        [
            choose_blocks(shares, first + at, mass)
            for at, shares in _shares_of_blocks(queries, keys, scale, first, (before, behind))
        ],
        dim=1,
    )
    out = _attend_to_chosen(queries, keys, values, chosen, scale)
    blocks = torch.arange(first, first + chosen.shape[1]) + 1
    causal = int(blocks.sum()) * len(query)
    return Prefill(out[:, before : before + rows], int(chosen.sum()), causal)


def _shares_of_blocks(
    query: Tensor, key: Tensor, scale: float, first: int, padding: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    """Some blocks of queries at a time: the number of the first one, and their shares."""
    blocks = query.shape[1] // BLOCK_TOKENS
    at_once = ESTIMATES_MOST // (len(query) * CELLS * key.shape[1] // STRIDE)
    real = torch.ones(query.shape[1], dtype=torch.bool, device=query.device)
    real[: padding[0]] = False
    real[len(real) - padding[1] :] = False
    for at in range(0, blocks, max(1, at_once)):
        some = slice(at * BLOCK_TOKENS, min(blocks, at + max(1, at_once)) * BLOCK_TOKENS)
        yield at, estimate_shares(query[:, some], key, scale, first + at, real[some])


def estimate_shares(query: Tensor, key: Tensor, scale: float, first: int, real: Tensor) -> Tensor:
    """How much of the attention each block of keys holds: float32 [q_heads, blocks, key blocks].

    query [q_heads, blocks * 128, dim], the first one being block `first` of the text; key
    [kv_heads, key blocks * 128, dim]. real: bool [blocks * 128], False for rows of padding.
    """
    q_heads, rows, dim = query.shape
    turned = query.reshape(len(key), -1, STRIDE, dim).flip(2).flatten(2)
    sums = (turned @ key.reshape(len(key), -1, STRIDE * dim).mT).view(q_heads, rows // STRIDE, -1)
    at = torch.arange(sums.shape[1], device=query.device) + first * CELLS
    unseen = torch.arange(sums.shape[2], device=query.device) > at[:, None]
    logits = (sums.float() * (scale / STRIDE)).masked_fill_(unseen, float("-inf"))
    weights = torch.softmax(logits, dim=-1) * real.view(-1, STRIDE).any(dim=1)[:, None]
    shares = weights.view(q_heads, -1, CELLS, sums.shape[2] // CELLS, CELLS).sum(dim=(2, 4))
    return shares / shares.sum(dim=-1, keepdim=True)


def choose_blocks(shares: Tensor, first: int, mass: float) -> Tensor:
    """The smallest sets that hold `mass` and the forced blocks: bool, as the shares, which are
    [q_heads, blocks, key blocks]; the first block of queries is block `first` of the text."""
    own = torch.arange(first, first + shares.shape[1], device=shares.device)[:, None]
    key_block = torch.arange(shares.shape[2], device=shares.device)
    causal = key_block <= own
    if mass == 1:
        return causal.expand_as(shares)
    forced = causal & ((key_block == 0) | (key_block >= own - 1))
    order = (shares + 2 * forced).argsort(dim=-1, descending=True)
    ordered = shares.gather(-1, order)
    is_short = ordered.cumsum(dim=-1) - ordered < mass
    chosen = torch.zeros_like(is_short).scatter_(-1, order, is_short)
    return (chosen | forced) & causal


def _attend_to_chosen(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scale: float
) -> Tensor:
    """[q_heads, rows, dim]. Blocks of queries with as many blocks of keys go through one call."""
    group, key_blocks = len(query) // len(key), chosen.shape[2]
    blocks = query.reshape(-1, BLOCK_TOKENS, query.shape[2])
    keys, values = (one.reshape(-1, BLOCK_TOKENS * one.shape[2]) for one in (key, value))
    out = query.new_empty((len(blocks), BLOCK_TOKENS, value.shape[2]))
    chosen = chosen.flatten(0, 1)
    kv_head = torch.arange(len(blocks), device=query.device) // (chosen.shape[0] // len(query))
    kv_head //= group
    counts = chosen.sum(dim=1)
    for count in sorted(set(counts.tolist())):
        at_once = max(1, GATHERED_MOST // (count * keys.shape[1]))
        for some in (counts == count).nonzero().flatten().split(at_once):
            lists = chosen[some].nonzero()[:, 1].view(-1, count)
            flat = (lists + kv_head[some, None] * key_blocks).flatten()
            shape = (1, len(some), count * BLOCK_TOKENS, -1)
            out[some] = scaled_dot_product_attention(
                blocks[some][None],
                keys.index_select(0, flat).view(shape),
                values.index_select(0, flat).view(shape),
                attn_mask=_seen(count, query.device),
                scale=scale,
            )[0]
    return out.view(*query.shape[:2], -1)


def _seen(count: int, device: torch.device) -> Tensor:
    """bool [128, count * 128]: all of the blocks but the last, which is the queries' own."""
    shape = (BLOCK_TOKENS, count * BLOCK_TOKENS)
    return torch.ones(shape, dtype=torch.bool, device=device).tril((count - 1) * BLOCK_TOKENS)
