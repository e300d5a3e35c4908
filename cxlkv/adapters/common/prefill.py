"""Attends over tensors: the prefill of an empty cache, and blocks of keys that are merged later.

No tensor of [tokens x tokens] is made: where no kernel does it, queries go by blocks of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.common.steps import LayerStep

BLOCK_ROWS = 256
BLOCK_LOGITS = 1 << 24  # in one block, of all heads and rows: 64 MiB


def attend_to_new(part: LayerStep, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Prefill of an empty cache, from the given tensors: [batch, tokens, q_heads, value_dim].

    query [batch, q_heads, tokens, dim], key and value [batch, kv_heads, tokens, dim]; or more than
    the queries' own, which are then of the last tokens.
    """
    step, is_cut = part.step, query.shape[2] < key.shape[2]
    if step.real is None and not is_cut:
        return _causal(part, query, key, value).transpose(1, 2)
    out = query.new_zeros((step.batch, step.tokens, query.shape[1], value.shape[3]))
    for row, count in enumerate(step.new.tolist()):
        if count and is_cut:
            length = int(step.lengths[row])
            own = (query[row, :, -count:], key[row, :, -length:], value[row, :, -length:])
            found, lse = attend_to_block(part, *own, length - count)
            out[row, step.tokens - count :] = beside_sinks(found, lse, part.sinks)
        elif count:  # each row without its padding, so that no mask has to show it
            one = (slice(row, row + 1), slice(None), slice(step.tokens - count, None))
            made = _causal(part, query[one], key[one], value[one])
            out[row, step.tokens - count :] = made[0].transpose(0, 1)
    return out


def attend_to_seen(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, seen: Tensor
) -> Tensor:
    """As above, of all tokens so far, where `seen` says which: bool [batch, 1, tokens, so far]."""
    if part.sinks is None and part.softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=part.scale)
        return out.nan_to_num().transpose(1, 2)
    found, lse = (one.transpose(1, 2) for one in weighed(part, query, key, value, seen))
    return beside_sinks(found.nan_to_num(), lse, part.sinks)


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
        seen = _seen(range(first, last), range(start, last), part.window, query.device)
        block = (query[:, :, first:last], key[:, :, start:last], value[:, :, start:last], seen)
        if plain:
            out[:, :, first:last] = _kernel(part, *block)
        else:
            found, lse = (one.transpose(1, 2) for one in weighed(part, *block))
            out[:, :, first:last] = beside_sinks(found, lse, part.sinks).transpose(1, 2)
        first = last
    return out[..., :dim]


def _seen(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys], both by the places of their tokens: which keys the queries see."""
    at, of = (torch.arange(one.start, one.stop, device=device) for one in (queries, keys))
    behind = at[:, None] - of
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


def weighed(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention in plain operations, with softcap and without sinks: out [batch, q_heads, rows,
    value_dim], NaN for rows that see nothing, and its log-sum-exp, float32 [batch, q_heads, rows].
    """
    batch, q_heads, rows, _ = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[3])
    logits = _capped(part, grouped @ key.mT).view(batch, q_heads, rows, -1)
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(logits, dim=-1).to(value.dtype)
    out = weights.view(batch, key.shape[1], -1, key.shape[2]) @ value
    return out.view(*query.shape[:3], -1), torch.logsumexp(logits, dim=-1)


def _capped(part: LayerStep, logits: Tensor) -> Tensor:
    """Scaled, float32, and under the softcap if there is one."""
    logits = logits.float() * part.scale
    return logits if part.softcap is None else part.softcap * torch.tanh(logits / part.softcap)


def attend_to_block(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, ahead: int
) -> tuple[Tensor, Tensor]:
    """Attention of rows to some of the keys at or before them, to be merged with that to others:
    out [rows, q_heads, value_dim], and its log-sum-exp, float32 [rows, q_heads].

    query [q_heads, rows, dim], key and value [kv_heads, n, dim]. Row i is that of token ahead + i,
    counted from the first key's, and sees one of the keys at least. Sinks take no part.
    """
    (q_heads, rows, _), tokens, window = query.shape, key.shape[1], part.window
    is_whole = ahead >= tokens - 1  # each row sees each key
    within = window is None or ahead + rows <= window
    if part.softcap is None and within and (is_whole or (ahead == 0 and rows == tokens)):
        found = _by_flash(part, query, key, value, not is_whole)
        if found is not None:
            return found
    out = query.new_empty((rows, q_heads, value.shape[2]))
    lse = query.new_empty((rows, q_heads), dtype=torch.float32)
    first = 0
    while first < rows:
        start = 0 if window is None else max(0, ahead + first - window + 1)
        rows_max = BLOCK_LOGITS // (q_heads * (tokens - start))
        last = min(rows, first + max(1, min(BLOCK_ROWS, rows_max)))
        end = min(tokens, ahead + last)
        seen = None
        if not (is_whole and within):
            seen = _seen(range(ahead + first, ahead + last), range(start, end), window, key.device)
        block = (query[None, :, first:last], key[None, :, start:end], value[None, :, start:end])
        made, sums = weighed(part, *block, seen)
        out[first:last], lse[first:last] = made[0].transpose(0, 1), sums[0].T
        first = last
    return out, lse


def _by_flash(
    part: LayerStep, query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """attend_to_block() by torch's flash attention; None where this has no kernel for it."""
    (q_heads, rows, dim), heads = query.shape, key.shape[0]
    # The rows of a group lie side by side, as if they were of one head, where no mask is wanted.
    asked = query if is_causal else query.reshape(heads, -1, dim)
    given = (asked[None], key[None], pad(value, (0, dim - value.shape[2]))[None])
    if query.device.type == "cuda":
        params = torch.backends.cuda.SDPAParams(*given, None, 0.0, is_causal, q_heads != heads)
        if dim % 8 or not torch.backends.cuda.can_use_flash_attention(params):
            return None
        made = torch.ops.aten._scaled_dot_product_flash_attention(
            *given, 0.0, is_causal, False, scale=part.scale
        )
    else:
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, is_causal, scale=part.scale
        )
    out, lse = made[0][0].reshape(q_heads, rows, dim), made[1][0].reshape(q_heads, rows)
    return out[..., : value.shape[2]].transpose(0, 1).contiguous(), lse.T.contiguous()
