"""Keys and values as a pool of an encoding holds them, and its attention to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cxlkv.layout import KVLayout, LayerGroup
from cxlkv.pool import CXLPool

PAGE_TOKENS = 16
SCALE_BITS = 16
"""Bits of the scale of a row of codes."""


class Read(NamedTuple):
    """Bits of an element in sight that were read, without scales, mean of keys and values; and the
    squared error of the outputs, relative to the values' mean squared length. Means of the queries
    that count."""

    bits: float
    error: float


def pool_of(key: Tensor, value: Tensor, encoding: str, window: int | None = None) -> CXLPool:
    """A pool of one layer in this process's memory, for float32 rows [kv_heads, tokens, dim]."""
    heads, tokens, dim = key.shape
    group = LayerGroup(
        layers=1,
        kv_heads=heads,
        head_dim=dim,
        value_head_dim=value.shape[-1],
        dtype="float32",
        window=window,
    )
    layout = KVLayout.of([group], page_tokens=PAGE_TOKENS).encoded(encoding)
    pages = -(-tokens // PAGE_TOKENS) + 4
    capacity = 2 * pages * PAGE_TOKENS * layout.stored_token_bytes + (8 << 20)
    return CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1)


def by_token(rows: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """[heads, tokens, dim] as [tokens, heads, dim]."""
    return np.ascontiguousarray(rows.transpose(0, 1).numpy())


def stored(rows: Tensor, encoding: str) -> Tensor:
    """What rows [heads, tokens, dim] are when they come back from a pool of the encoding."""
    with pool_of(rows, rows, encoding) as pool:
        sequence = pool.sequence()
        sequence.append(0, by_token(rows), by_token(rows))
        pages, _ = sequence.fetch(0)
        return torch.from_numpy(np.array(pages)).flatten(1, 2)[:, : rows.shape[1]]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    error: float,
    counted: int,
    window: int | None = None,
) -> tuple[Tensor, Read]:
    """The outputs [heads, tokens, dim] of a pool in `progressive` that may be off by `error`, each
    token as a decode step of its own, and what the last `counted` of them read. key, value:
    [kv_heads, tokens, dim]; window: each token sees so many, itself among them."""
    rows = [by_token(one) for one in (query, key, value)]
    tokens, out = len(rows[0]), np.empty((len(rows[0]), len(query), value.shape[-1]), np.float32)
    before = 0.0
    with pool_of(key, value, "progressive", window) as pool:
        sequence = pool.sequence()
        for at in range(tokens):
            if at == tokens - counted:
                before = pool.stats()["attended_bytes"]
            q, k, v = (one[at : at + 1] for one in rows)
            sequence.append(0, k, v)
            out[at] = sequence.attend(0, q, scale=scale, error=error)[0]
        read = pool.stats()["attended_bytes"] - before
    lasts = np.arange(tokens - counted, tokens) + 1
    firsts = np.maximum(0, lasts - (window or tokens)) // PAGE_TOKENS * PAGE_TOKENS
    seen = int((lasts - firsts).sum()) * len(key)  # a page is read from its first token on
    bits = (8 * read / seen - 2 * SCALE_BITS) / (key.shape[-1] + value.shape[-1])
    found = torch.from_numpy(out).transpose(0, 1)
    exact = exactly(query, key, value, scale, window)
    off = (found - exact)[:, -counted:].square().sum(-1).mean()
    return found, Read(bits, float(off / value.square().sum(-1).mean()))


def in_sight(tokens: int, window: int | None) -> Tensor:
    """Which tokens each one sees: those up to itself, `window` at most. bool [tokens, tokens]"""
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def exactly(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Full attention of one row: [heads, tokens, dim]."""
    seen = in_sight(query.shape[1], window)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=scale, enable_gqa=len(query) != len(key)
    )
