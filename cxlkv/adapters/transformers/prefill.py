"""Attends over tensors: the prefill of an empty cache, and pages that were fetched.

No tensor of [tokens x tokens] is made: where no kernel does it, queries go by blocks of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cxlkv.adapters.transformers.steps import LayerStep

BLOCK_ROWS = 256
BLOCK_LOGITS = 1 << 24  # in one block, of all heads and rows: 64 MiB


def attend_to_new(part: LayerStep, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prefill of an empty cache, from the given tensors: [batch, tokens, q_heads, value_dim].

    query [batch, q_heads, tokens, dim], key and value [batch, kv_heads, tokens, dim].
    """
    step = part.step
    if step.real is None:
        return _causal(part, query, key, value).transpose(1, 2)
    out = query.new_zeros((step.batch, step.tokens, query.shape[1], value.shape[3]))
    for row, count in enumerate(step.new.tolist()):
        if count:  # each row without its padding, so that no mask has to show it
            one = (slice(row, row + 1), slice(None), slice(step.tokens - count, None))
            made = _causal(part, query[one], key[one], value[one])
            out[row, step.tokens - count :] = made[0].transpose(0, 1)
    return out


def _causal(part: LayerStep, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tokens, dim = key.shape[2], value.shape[3]
    plain = part.softcap is None and part.sinks is None
    if plain:  # its kernels want values as long as keys; zeros more change nothing
        value = pad(value, (0, key.shape[3] - dim))
    if plain and (part.window is None or tokens <= part.window):
        return _kernel(part, query, key, value, None)[..., :dim]
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    first = 0
    while first < tokens:
        start = 0 if part.window is None else max(0, first - part.window + 1)
        rows_max = BLOCK_LOGITS // (query.shape[0] * query.shape[1] * (first + BLOCK_ROWS - start))
        last = min(tokens, first + max(1, min(BLOCK_ROWS, rows_max)))
        seen = _seen(first, last, start, part.window, query.device)
        attend = _kernel if plain else _spelled_out
        block = (query[:, :, first:last], key[:, :, start:last], value[:, :, start:last])
        out[:, :, first:last] = attend(part, *block, seen)
        first = last
    return out[..., :dim]


def _seen(first: int, last: int, start: int, window: int | None, device: torch.device) -> Tensor:
    """bool [last - first, last - start]: which keys from `start` on the queries see."""
    behind = torch.arange(first, last, device=device)[:, None] - torch.arange(
        start, last, device=device
    )
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _kernel(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None
) -> Tensor:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        is_causal=seen is None and query.shape[2] > 1,
        scale=part.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _spelled_out(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, seen: Tensor
) -> Tensor:
    """Attention with softcap and sinks, which the kernels do not have: [batch, q_heads, rows,
    value_dim]."""
    batch, q_heads, rows, _ = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[3])
    logits = _capped(part, grouped @ key.mT).view(batch, q_heads, rows, -1)
    logits = logits.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(logits, dim=-1).to(value.dtype)
    out = (weights.view(batch, key.shape[1], -1, key.shape[2]) @ value).view(*query.shape[:3], -1)
    if part.sinks is None:
        return out
    lse = torch.logsumexp(logits, dim=-1)  # [batch, q_heads, rows]
    return beside_sinks(out.transpose(1, 2), lse.transpose(1, 2), part.sinks).transpose(1, 2)


def _capped(part: LayerStep, logits: Tensor) -> Tensor:
    """Scaled, float32, and under the softcap if there is one."""
    logits = logits.float() * part.scale
    return logits if part.softcap is None else part.softcap * torch.tanh(logits / part.softcap)


def attend_to_pages(
    part: LayerStep, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor
) -> Tensor:
    """queries [rows, q_heads, dim] over pages [rows, kv_heads, k, page_tokens, dim], one device.

    seen: bool [rows, kv_heads, k, page_tokens]. Returns [rows, q_heads, value_dim].
    """
    rows, kv_heads = keys.shape[:2]
    grouped = queries.reshape(rows, kv_heads, -1, queries.shape[2])
    logits = _capped(part, grouped @ keys.flatten(2, 3).to(queries.dtype).mT)
    logits = logits.masked_fill(~seen.flatten(2)[:, :, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1).to(queries.dtype)
    out = weights @ values.flatten(2, 3).to(queries.dtype)
    out = out.reshape(rows, queries.shape[1], values.shape[-1])
    return beside_sinks(out, torch.logsumexp(logits, dim=-1).flatten(1), part.sinks)


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention as if there were one more key of logit `sinks` [q_heads] and of no value.

    out [.., q_heads, dim] and its lse [.., q_heads], the natural log of the sum of exponentials.
    """
    if sinks is None:
        return out
    kept = torch.sigmoid(lse - sinks.to(lse.device, torch.float32))
    return out * kept[..., None].to(out.dtype)
