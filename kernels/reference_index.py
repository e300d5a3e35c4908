"""The reference of `index.py`, in torch: scores of pages by summaries, and the best of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cxlkv.kernels.reference_encode import SKETCH_CHANNELS, SKETCH_TOKENS, hadamard

if TYPE_CHECKING:
    from cxlkv.kernels.index import Choosing, Form, Scoring


def numbers(summaries: torch.Tensor, dtype: torch.dtype, dim: int) -> tuple[torch.Tensor, ...]:
    """Both rows of digests, or of means and deviations, float32 [..., dim]."""
    rows = summaries[..., : 2 * dim * dtype.itemsize].contiguous().view(dtype).float()
    return rows[..., :dim], rows[..., dim:]


def sketched(
    summaries: torch.Tensor, page_tokens: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., page_tokens, dim] and scales [..., page_tokens], float32."""
    lines = -(-dim // SKETCH_CHANNELS)
    blocks = summaries.contiguous().view(torch.int32)
    blocks = blocks.unflatten(-1, (-1, lines + 1, SKETCH_TOKENS))
    places = 2 * torch.arange(SKETCH_CHANNELS, dtype=torch.int32, device=blocks.device)
    codes = (blocks[..., :lines, :].unsqueeze(-1) >> places & 3).float()
    codes = codes.transpose(-3, -2).flatten(-2).flatten(-3, -2)  # [..., tokens, channels]
    scales = blocks[..., lines, :].contiguous().view(torch.float32).flatten(-2)
    return codes[..., :page_tokens, :dim], scales[..., :page_tokens]


def rounded(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries in whole numbers of up to 127, and what one stands for: sketch.h has it."""
    turned = hadamard(q.float())
    largest = turned.abs().amax(-1, keepdim=True)
    some = largest.isfinite() & (largest > 1e-30)
    codes = torch.where(some, (turned * (127 / largest)).round(), 0.0)
    factor = torch.where(largest.isfinite(), scale * largest / 127, torch.nan)
    return codes, factor


def score(call: Scoring) -> None:
    """See index.score(); request by request, head by head."""
    form, summaries, slots, q, positions, out, scale = call
    requests, _, q_heads, dim = q.shape
    heads = summaries.shape[1]
    out.fill_(-torch.inf)
    for request in range(requests):
        seen = positions[request] >= 0
        there = (slots[request] >= 0).nonzero().flatten()
        if not seen.any() or not len(there):
            continue
        entries = summaries[slots[request, there].long()]
        asked = q[request, seen].unflatten(1, (heads, q_heads // heads))
        for head in range(heads):
            of = asked[:, head].reshape(-1, dim).float()
            out[request, head, there] = _scored(form, entries[:, head], of, scale)


def _scored(form: Form, entries: torch.Tensor, q: torch.Tensor, scale: float) -> torch.Tensor:
    """[pages]: the best of the queries [n, dim]; NaN above all."""
    if form.name == "sketch":
        codes, scales = sketched(entries, form.page_tokens, form.dim)
        whole, factor = rounded(q, scale)
        sums = torch.einsum("ptd,nd->npt", codes, whole) - 1.5 * whole.sum(1)[:, None, None]
        found = sums * factor[:, None] * scales
        return _best(found.transpose(0, 1).flatten(1))
    first, second = numbers(entries, form.dtype, form.dim)
    parts = (q.abs(), q) if form.name == "mean_std" else (q.clamp(min=0), q.clamp(max=0))
    return _best(scale * (second @ parts[0].T + first @ parts[1].T))


def _best(found: torch.Tensor) -> torch.Tensor:
    best = found.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    return best.masked_fill(found.isnan().any(1), torch.nan)


def choose(call: Choosing) -> None:
    """See index.choose(); by sorting."""
    scores, first, last, sinks, wanted, out = call
    requests, heads, k = out.shape
    out.fill_(-1)
    for request in range(requests):
        low, high = int(first[request]), min(int(last[request]), scores.shape[2])
        forced = torch.arange(low, max(low, min(low + sinks, high)), device=out.device)
        free = torch.arange(low + len(forced), max(low + len(forced), high), device=out.device)
        for head in range(heads):
            of = scores[request, head, free]
            order = of.nan_to_num(torch.inf, torch.inf, -torch.inf)
            rank = torch.argsort(order, descending=True, stable=True)
            isnan = of[rank].isnan()
            rank = torch.cat([rank[isnan], rank[~isnan]])
            count = max(0, min(int(wanted[request]), k) - len(forced))
            best = free[rank[:count].sort().values]
            pages = torch.cat([forced, best])[:k]
            out[request, head, : len(pages)] = pages.to(torch.int32)
