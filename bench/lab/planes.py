"""Attention that reads codes of 8 bits in two planes of 4: the upper one of all pages, the lower
one where a page's share of attention makes the rounding of 4 bits matter.

An output is off by the sum, over pages read in 4 bits, of share times error. Errors of pages have
random signs, so that their squares add up, and the sum of m^2 over pages with a share m < tau is at
most tau. With s^2 for the variance of a logit in 4 bits and r^2 for the relative squared error of
values, the output's squared error, relative to the values' length, is at most
tau_k s^2 + tau_v r^2. Limits that give each half of E^2 follow from the wanted error E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cxlkv.bench.lab import codes

PAGE_TOKENS = 16
VALUES_ERROR = 0.0108
"""Relative squared error of values in 4 bits: docs/decisions/0034-encodings.md."""


@dataclass(frozen=True)
class Planes:
    """error: E, the root-mean-square error of an output relative to the values' length; 0 reads
    all in 8 bits. limits: shares from which keys and values are read in 8 bits, in its place."""

    error: float = 0.0
    limits: tuple[float, float] | None = None


class Read(NamedTuple):
    """Bits of an element in sight that were read, without scales; and the squared error of the
    outputs, relative to the values' mean squared length. Means of the queries that count."""

    key_bits: float
    value_bits: float
    error: float


class Rows(NamedTuple):
    """Of one kv head, [tokens, dim] each, as both planes and as the upper one stand for them;
    steps: of the 4 bits, [tokens]."""

    eight: Tensor
    four: Tensor
    steps: Tensor


def rows_of(raw: Tensor) -> list[Rows]:
    """Of [heads, tokens, dim]."""
    eight = codes.encode_rows(raw.contiguous().numpy(), 8)
    four = codes.upper_half(eight)
    decoded = codes.unrotate(codes.decode(eight, 8)), codes.unrotate(codes.decode(four, 4))
    parts = *decoded, four.scales.astype(np.float32)
    heads = zip(*(torch.from_numpy(part) for part in parts), strict=True)
    return [Rows(*head) for head in heads]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    planes: Planes,
    counted: int,
    window: int | None = None,
) -> tuple[Tensor, Read]:
    """The outputs [heads, tokens, dim] of one row's queries over keys and values [kv_heads, tokens,
    dim], each token as a decode step of its own; what the last `counted` of them read. window: each
    token sees so many, itself among them."""
    window = min(window or key.shape[1], key.shape[1])
    group = query.shape[0] // key.shape[0]
    outputs, reads = [], []
    for head, (keys, values) in enumerate(zip(rows_of(key), rows_of(value), strict=True)):
        some = query[head * group : (head + 1) * group]
        limits = limits_of(some, keys.steps, scale, planes, window)
        output, heavy = by_shares(some * scale, keys, values, limits, window)
        exact = plain(some * scale, key[head], value[head], window)
        length = value[head].square().sum(-1).mean()
        error = (output - exact)[:, -counted:].square().sum(-1).mean() / length
        outputs.append(output)
        reads.append((*(bits_of(part, counted, window) for part in heavy), float(error)))
    return torch.cat(outputs), Read(*np.mean(reads, axis=0).tolist())


def limits_of(
    query: Tensor, steps: Tensor, scale: float, planes: Planes, window: int
) -> tuple[Tensor | float, float]:
    """Shares of keys, one for each query token [tokens, 1], and of values. query: [group, tokens,
    dim], without the scale; steps: [tokens]."""
    if planes.limits is not None:
        return planes.limits
    lengths = query.square().sum(-1).amax(0)
    squares = steps.square().cumsum(0)
    squares[window:] -= squares[:-window].clone()
    squares /= torch.arange(1, len(steps) + 1).clamp(max=window)
    variances = scale**2 * lengths * squares / 12
    half = planes.error**2 / 2
    return (half / variances)[:, None], half / VALUES_ERROR


def by_shares(
    query: Tensor,
    keys: Rows,
    values: Rows,
    limits: tuple[Tensor | float, float],
    window: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Outputs [group, tokens, dim]; tokens whose keys, and whose values, were read in 8 bits:
    bool [tokens, tokens] each."""
    rough = scores_of(query, keys.four, window)
    heavy = from_limit(rough.softmax(-1), limits[0])
    weights = torch.where(heavy, scores_of(query, keys.eight, window), rough).softmax(-1)
    best = from_limit(weights, limits[1])
    return weights @ values.four + (weights * best) @ (values.eight - values.four), (heavy, best)


def scores_of(query: Tensor, keys: Tensor, window: int) -> Tensor:
    """Of tokens in sight: [group, tokens, tokens], the others minus infinity."""
    return (query @ keys.mT).masked_fill_(~in_sight(len(keys), window), -math.inf)


def in_sight(tokens: int, window: int) -> Tensor:
    """Of each token those up to itself, `window` at most."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)


def plain(query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    return scores_of(query, keys, window).softmax(-1) @ values


def from_limit(weights: Tensor, limit: Tensor | float) -> Tensor:
    """Tokens in pages whose share, the largest of a kv head's query heads, is the limit or more."""
    tokens = weights.shape[-1]
    padded = pad(weights, (0, -tokens % PAGE_TOKENS))
    shares = padded.reshape(*weights.shape[:-1], -1, PAGE_TOKENS).sum(-1).amax(0)
    return (shares >= limit).repeat_interleave(PAGE_TOKENS, dim=-1)[:, :tokens]


def bits_of(heavy: Tensor, counted: int, window: int) -> float:
    """Mean over the elements in sight of the last `counted` queries."""
    seen = in_sight(len(heavy), window)[-counted:]
    return float(4 + 4 * (heavy[-counted:] & seen).sum() / seen.sum())


PROGRESSIVE = (
    ("progressive 0", Planes(0.0)),
    ("progressive 0.02", Planes(0.02)),
    ("progressive 0.03", Planes(0.03)),
    ("progressive 0.05", Planes(0.05)),
    ("progressive 0.1", Planes(0.1)),
    ("progressive 0.2", Planes(0.2)),
    ("progressive from 0.5 and 5 %", Planes(limits=(0.005, 0.05))),
)
