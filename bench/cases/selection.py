"""Exact select and attend over one layer of a long sequence, against torch's fastest forms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cxlkv.bench.cases import ndp_rivals
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """131,072 tokens, 8 kv heads of 128, bf16, 4 query heads each, 5 % of the pages."""

    tokens: int = 131072
    rounds: int = 9
    settle_s: float = 0.25


def run(result: Result, size: Size = Size(), threads: tuple[int, ...] = (1, 2)) -> None:
    """Metrics in GB/s of one layer's keys (attend: of K and V), for 1 and 2 threads."""
    k, query = drawn(size)
    before = torch.get_num_threads()
    with filled(size, k) as (pool, sequence):
        for count in threads:
            pool.set_threads(count)
            torch.set_num_threads(count)
            measure(result, sequence, k, query, size, count)
    torch.set_num_threads(before)


def drawn(size: Shape, seed: int = 11, *rows: int) -> tuple[Tensor, Tensor]:
    """Gaussian keys [tokens, kv_heads, head_dim] and queries [*rows, q_heads, head_dim] in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.tokens, size.kv_heads, size.head_dim)
    k = torch.randn(shape, generator=generator).bfloat16()
    heads = (*rows, size.kv_heads * size.group, size.head_dim)
    return k, torch.randn(heads, generator=generator).bfloat16()


@contextmanager
def filled(size: Shape, k: Tensor) -> Iterator[tuple[CXLPool, Sequence]]:
    """A pool whose layers all hold the keys k [tokens, kv_heads, head_dim], in mixed pages."""
    # Digests and sketches are up to 0.16 of the keys and values.
    capacity = int(size.layout.token_bytes * size.tokens * 2 * 1.18) + (256 << 20)
    with CXLPool.create(
        "anonymous:", layout=size.layout, capacity=capacity, checksum=False, threads=1
    ) as pool:
        yield pool, fill_interleaved(pool, size, k)


def fill_interleaved(pool: CXLPool, size: Shape, k: Tensor) -> Sequence:
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
    result: Result, sequence: Sequence, k: Tensor, query: Tensor, size: Size, count: int
) -> None:
    pages = size.tokens // size.page_tokens
    wanted = max(1, pages // 20)
    layer = size.layers // 2
    keys = k.permute(1, 0, 2).contiguous()  # torch's own best layout
    queries = query.view(size.kv_heads, size.group, size.head_dim)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)  # as bmm takes them
    words = keys.view(torch.int64)
    budget = Budget(pages=wanted, sinks=0, recent=0)

    def torch_select() -> Tensor:
        return ndp_rivals.keys_first(keys, turned, size.page_tokens, wanted)

    picked = sequence.select(layer, query, budget, method="exact")
    agreement = overlap(picked.pages, torch_select().numpy())
    result.measure(f"agreement_with_torch_{count}_threads", [agreement], "share of pages")
    # torch rounds scores to bf16, which makes ties and swaps at the border.
    result.checks[f"select_agrees_with_torch_{count}_threads"] = agreement > 0.95

    def sdpa() -> Tensor:
        return ndp_rivals.sdpa(queries[None], keys, keys)

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
    moved = {n: key_bytes * (2 if n in ("attend", "torch_sdpa") else 1) for n in samples}
    speed = result.speeds(samples, moved, f"{{}}_{count}_threads")
    result.ratios[f"exact_to_torch_{count}_threads"] = speed["exact"] / speed["torch"]
    result.ratios[f"digest_to_exact_{count}_threads"] = speed["digest"] / speed["exact"]
    result.ratios[f"exact_to_read_{count}_threads"] = speed["exact"] / speed["read"]
    result.ratios[f"attend_to_torch_sdpa_{count}_threads"] = speed["attend"] / speed["torch_sdpa"]


def overlap(pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]], other: object) -> float:
    """Share of pages that both lists name, over all heads."""
    others = np.asarray(other)
    same = sum(len(np.intersect1d(a, b)) for a, b in zip(pages, others, strict=True))
    return same / pages.size
