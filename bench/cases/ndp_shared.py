"""Attention of requests on one prefix, whose pages they share, against requests that share none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape
from cxlkv.bench.result import Result
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """16 requests on 4,000 tokens, which go on by 10 to 500 of their own; a row of each is
    attended to. One layer, 8 kv heads of 128 channels, bf16, 4 query heads each."""

    layers: int = 1
    tokens: int = 4000
    own: tuple[int, int] = (10, 500)
    requests: int = 16
    rounds: int = 15
    settle_s: float = 0.05


def run(result: Result, size: Size = Size(), threads: tuple[int, ...] = (1, 2)) -> None:
    """Metrics attend_shared and attend_unshared, in turn, with each number of threads; ratio
    shared_attend_speedup, of the most threads, of unshared over shared."""
    generator = torch.Generator().manual_seed(29)
    heads = size.kv_heads * size.group
    q = torch.randn((size.requests, heads, size.head_dim), generator=generator).bfloat16()
    starts = np.arange(size.requests + 1)
    tokens = (size.requests + 1) * (size.tokens + size.own[1])
    capacity = int(size.layout.token_bytes * tokens * 1.2) + (64 << 20)
    with CXLPool.create("anonymous:", layout=size.layout, capacity=capacity, threads=1) as pool:
        batches = prepare(pool, size, generator)
        for count in threads:
            pool.set_threads(count)
            outs = [torch.as_tensor(b.attend(0, q, starts)[0]).float() for b in batches.values()]
            difference = float((outs[0] - outs[1]).abs().max())
            result.checks[f"attend_shared_and_unshared_agree_{count}t"] = difference < 0.02
            samples = interleave(
                {name: partial(b.attend, 0, q, starts) for name, b in batches.items()},
                size.rounds,
                settle_s=size.settle_s,
            )
            result.times(samples, "ms", f"attend_{{}}_{count}t")
            result.ratios[f"shared_attend_speedup_{count}t"] = (
                result.metrics[f"attend_unshared_{count}t"].median
                / result.metrics[f"attend_shared_{count}t"].median
            )
    result.ratios["shared_attend_speedup"] = result.ratios[f"shared_attend_speedup_{threads[-1]}t"]


def prepare(pool: CXLPool, size: Size, generator: torch.Generator) -> dict[str, Batch]:
    """The same requests twice: forks of one sequence, and sequences with pages of their own."""

    def rows(tokens: int) -> torch.Tensor:
        shape = (tokens, size.kv_heads, size.head_dim)
        return torch.randn(shape, generator=generator).bfloat16()

    prefix = rows(size.tokens)
    text = pool.sequence()
    text.append(0, prefix, prefix)
    shared = [text.fork() for _ in range(size.requests)]
    unshared = [pool.sequence() for _ in shared]
    owns = np.linspace(*size.own, size.requests).astype(int)
    for fork, alone, own in zip(shared, unshared, owns.tolist(), strict=True):
        more = rows(own)
        alone.append(0, prefix, prefix)
        for sequence in (fork, alone):
            sequence.append(0, more, more)
    return {"shared": pool.batch(shared), "unshared": pool.batch(unshared)}
