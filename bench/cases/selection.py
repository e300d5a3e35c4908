"""Exact select and attend over one layer of a long sequence, against torch's fastest forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence


@dataclass(frozen=True)
class Size:
    """131,072 tokens, 8 kv heads of 128, bf16, 4 query heads each, 5 % of the pages."""

    tokens: int = 131072
    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    group: int = 4
    page_tokens: int = 16
    rounds: int = 9
    settle_s: float = 0.25


def run(result: Result, size: Size = Size(), threads: tuple[int, ...] = (1, 2)) -> None:
    """Metrics in GB/s of one layer's keys (attend: of K and V), for 1 and 2 threads."""
    generator = torch.Generator().manual_seed(11)
    shape = (size.tokens, size.kv_heads, size.head_dim)
    k = torch.randn(shape, generator=generator).bfloat16()
    query = torch.randn(size.kv_heads * size.group, size.head_dim, generator=generator).bfloat16()
    before = torch.get_num_threads()
    with filled(size, k) as (pool, sequence):
        for count in threads:
            pool.set_threads(count)
            torch.set_num_threads(count)
            measure(result, sequence, k, query, size, count)
    torch.set_num_threads(before)


@contextmanager
def filled(size: Size, k: torch.Tensor) -> Iterator[tuple[CXLPool, Sequence]]:
    """A pool whose layers all hold the keys k [tokens, kv_heads, head_dim], in mixed pages."""
    layout = KVLayout(
        layers=size.layers,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        page_tokens=size.page_tokens,
    )
    # Digests and sketches are up to 0.16 of the keys and values.
    capacity = int(layout.token_bytes * size.tokens * 2 * 1.18) + (256 << 20)
    with CXLPool.create(
        "anonymous:", layout=layout, capacity=capacity, checksum=False, threads=1
    ) as pool:
        yield pool, fill_interleaved(pool, size, k)


def fill_interleaved(pool: CXLPool, size: Size, k: torch.Tensor) -> Sequence:
    """Two sequences that grow page by page in turn; the first one is measured."""
    first, second = pool.sequence(), pool.sequence()
    batch = pool.batch([first, second])
    step = size.page_tokens
    starts = np.array([0, step, 2 * step], np.int32)
    for layer in range(size.layers):
        for at in range(0, size.tokens, step):
            pair = k[at : at + step].repeat(2, 1, 1)
            batch.append(layer, pair, pair, starts)
    return first


def measure(
    result: Result, sequence: Sequence, k: torch.Tensor, query: torch.Tensor, size: Size, count: int
) -> None:
    pages = size.tokens // size.page_tokens
    wanted = max(1, pages // 20)
    layer = size.layers // 2
    keys = k.permute(1, 0, 2).contiguous()  # torch's own best layout
    queries = query.view(size.kv_heads, size.group, size.head_dim).transpose(1, 2).contiguous()
    words = keys.view(torch.int64)
    budget = Budget(pages=wanted, sinks=0, recent=0)

    def torch_select() -> torch.Tensor:
        scores = torch.bmm(keys, queries).view(size.kv_heads, pages, -1).amax(-1)
        return scores.topk(wanted, dim=-1).indices

    picked = sequence.select(layer, query, budget, method="exact")
    agreement = overlap(picked.pages, torch_select().numpy())
    result.measure(f"agreement_with_torch_{count}_threads", [agreement], "share of pages")
    # torch rounds scores to bf16, which makes ties and swaps at the border.
    result.checks[f"select_agrees_with_torch_{count}_threads"] = agreement > 0.95

    def sdpa() -> torch.Tensor:
        rows = query.view(1, size.kv_heads, size.group, size.head_dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(rows, keys[None], keys[None])

    out, _ = sequence.attend(layer, query)
    difference = (torch.as_tensor(out) - sdpa().view_as(query)).abs().max().item()
    result.checks[f"attend_agrees_with_torch_{count}_threads"] = difference < 0.02
    samples = interleave(
        {
            "torch": torch_select,
            "exact": lambda: sequence.select(layer, query, budget, method="exact"),
            "digest": lambda: sequence.select(layer, query, budget, method="digest"),
            "read": lambda: words.sum(),
            "torch_sdpa": sdpa,
            "attend": lambda: sequence.attend(layer, query),
        },
        size.rounds,
        settle_s=size.settle_s,
    )
    key_bytes = size.tokens * size.kv_heads * size.head_dim * 2
    speed = {}
    for name, seconds in samples.items():
        moved = key_bytes * (2 if name in ("attend", "torch_sdpa") else 1)
        speed[name] = result.measure(
            f"{name}_{count}_threads", [moved / s / 1e9 for s in seconds], "GB/s"
        ).median
    result.ratios[f"exact_to_torch_{count}_threads"] = speed["exact"] / speed["torch"]
    result.ratios[f"digest_to_exact_{count}_threads"] = speed["digest"] / speed["exact"]
    result.ratios[f"exact_to_read_{count}_threads"] = speed["exact"] / speed["read"]
    result.ratios[f"attend_to_torch_sdpa_{count}_threads"] = speed["attend"] / speed["torch_sdpa"]


def overlap(pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]], other: object) -> float:
    """Share of pages that both lists name, over all heads."""
    others = np.asarray(other)
    same = sum(len(np.intersect1d(a, b)) for a, b in zip(pages, others, strict=True))
    return same / pages.size
