"""Near-data selection and attention against streaming reads, torch and faiss, on the same keys.

All forms of a number of threads take turns in one process. Times are in ms, bytes are those that a
form reads; a ratio without a number of threads in its name is of the most threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cxlkv.bench.cases import ndp_models, ndp_rivals, ndp_shared
from cxlkv.bench.cases.ndp_rivals import agreement
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, filled
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

ROWS = 4  # of queries together, each with `group` heads: 16 queries a kv head


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """131,072 tokens, 8 kv heads of 128, bf16, 4 query heads each, in a pool of 8 layers."""

    tokens: int = 131072
    rounds: int = 9
    settle_s: float = 0.25
    pages: int = 256
    share: float = 0.05
    models: ndp_models.Size = field(default_factory=ndp_models.Size)
    shared: ndp_shared.Size = field(default_factory=ndp_shared.Size)


def run(result: Result, size: Size = Size(), threads: tuple[int, ...] = (1, 2)) -> None:
    """The ratios of the module's text; those of trained models are in ndp_models."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(11)
    k = torch.randn((size.tokens, size.kv_heads, size.head_dim), generator=generator).bfloat16()
    heads = (ROWS, size.kv_heads * size.group, size.head_dim)
    queries = torch.randn(heads, generator=generator).bfloat16()
    try:
        with filled(size, k) as (pool, sequence):
            stage = Stage(size, pool, sequence, k, queries)
            for count in threads:
                measure(result, stage, count)
        torch.set_num_threads(max(threads))
        ndp_models.run(result, size.models, threads)
        ndp_shared.run(result, size.shared, threads)
    finally:
        torch.set_num_threads(before)
    for name in ("exact_to_torch", "exact_to_faiss", "queries16_cost", "two_stage_speedup",
                 "attend_to_stream", "attend_to_torch"):  # fmt: skip
        if f"{name}_{threads[-1]}t" in result.ratios:
            result.ratios[name] = result.ratios[f"{name}_{threads[-1]}t"]


class Stage:
    """One layer of the filled pool, and the same keys as torch likes them best."""

    def __init__(
        self, size: Size, pool: CXLPool, sequence: Sequence, k: Tensor, queries: Tensor
    ) -> None:
        self.size, self.pool, self.sequence = size, pool, sequence
        self.layer = size.layers // 2
        self.page_count = size.tokens // size.page_tokens
        self.budget = Budget(pages=min(size.pages, self.page_count // 4), sinks=0, recent=0)
        wanted = max(1, int(size.share * self.page_count))
        self.small = Budget(pages=wanted, sinks=0, recent=0)
        self.queries = queries  # [rows, q_heads, head_dim]
        self.query = queries[-1]
        self.one_query = self.query[:: size.group].contiguous()
        self.keys = k.permute(1, 0, 2).contiguous()  # [kv_heads, tokens, head_dim]
        self.values = self.keys.clone()  # memory of its own, as in the pool
        self.words = self.keys.view(torch.int64)
        self.key_bytes = self.keys.numel() * self.keys.element_size()
        self.faiss = ndp_rivals.Faiss.of(self.keys)

    def select(self, budget: Budget, method: str, query: Tensor | None = None) -> Selection:
        given = self.query if query is None else query
        return self.sequence.select(self.layer, given, budget, method=method)

    def together(self) -> Selection:
        """16 queries a kv head in one scan: rows of one sequence, a list for all of them."""
        budget = Budget(pages=self.budget.pages, sinks=0, recent=0, per="sequence")
        return self.select(budget, "exact", self.queries)

    def by_head(self, query: Tensor) -> Tensor:
        """[..., q_heads, head_dim] as [kv_heads, queries, head_dim]."""
        rows = query.reshape(-1, self.size.kv_heads, query.shape[-2] // self.size.kv_heads,
                             self.size.head_dim)  # fmt: skip
        return rows.transpose(0, 1).flatten(1, 2).contiguous()

    def torch_pages(self, query: Tensor, count: int) -> Tensor:
        """The pages that torch chooses: [kv_heads, count]."""
        return ndp_rivals.keys_first(self.keys, self.by_head(query), self.size.page_tokens, count)


def measure(result: Result, stage: Stage, count: int) -> None:
    """Checks, times and ratios with `count` threads."""
    stage.pool.set_threads(count)
    torch.set_num_threads(count)
    check(result, stage, count)
    functions = forms(stage)
    with ndp_rivals.faiss_forms(stage.faiss, stage.by_head(stage.query), count) as more:
        functions |= more
        samples = interleave(functions, stage.size.rounds, settle_s=stage.size.settle_s)
    if not more:
        result.notes.append(f"exact_to_faiss_{count}t: not measured, pip install faiss-cpu")
    result.times(samples, "ms", f"{{}}_{count}t")
    result.measure("key_bytes", [stage.key_bytes], "bytes")
    for name, size_bytes in other_bytes(stage).items():
        result.measure(f"{name}_bytes", [size_bytes], "bytes")
    ratios(result, stage, count)


def forms(stage: Stage) -> dict[str, Callable[[], object]]:
    """What is timed, by name; faiss's forms are left out."""
    size, keys, query = stage.size, stage.keys, stage.by_head(stage.query)
    pages = stage.budget.pages or 1
    attended = stage.query.view(1, size.kv_heads, size.group, size.head_dim)
    return {
        "stream_sum": lambda: stage.words.sum(),
        "exact": lambda: stage.select(stage.budget, "exact"),
        "stream_max": lambda: stage.words.max(),
        "torch_keys_first": lambda: ndp_rivals.keys_first(keys, query, size.page_tokens, pages),
        "torch_queries_first": lambda: ndp_rivals.queries_first(
            keys, query, size.page_tokens, pages
        ),
        "exact_5_percent": lambda: stage.select(stage.small, "exact"),
        "two_stage": lambda: stage.select(stage.small, "two_stage"),
        "digest": lambda: stage.select(stage.small, "digest"),
        "one_query": lambda: stage.select(stage.budget, "exact", stage.one_query),
        "queries16": stage.together,
        "attend": lambda: stage.sequence.attend(stage.layer, stage.query),
        # A query head a row instead (enable_gqa) copies the keys for each: many times slower.
        "torch_sdpa": lambda: ndp_rivals.sdpa(attended, keys, stage.values),
    }


def other_bytes(stage: Stage) -> dict[str, int]:
    """Bytes read by the forms that do not read the keys once."""
    staged = {m: stage.select(stage.small, m).bytes_scored for m in ("two_stage", "digest")}
    return {**staged, **dict.fromkeys(("attend", "torch_sdpa"), 2 * stage.key_bytes)}


def check(result: Result, stage: Stage, count: int) -> None:
    """Every form gives the same pages or the same output; torch's bf16 scores make some ties."""
    pages = stage.budget.pages or 1
    small = stage.small.pages or 1
    exact, few = stage.select(stage.budget, "exact"), stage.select(stage.small, "exact")
    staged = stage.select(stage.small, "two_stage")
    one = stage.select(stage.budget, "exact", stage.one_query)
    chosen = stage.torch_pages(stage.query, pages)
    agreements = {
        "exact_and_torch": agreement(exact.pages, chosen.numpy()),
        "exact_5_percent_and_torch": agreement(
            few.pages, stage.torch_pages(stage.query, small).numpy()
        ),
        "one_query_and_torch": agreement(
            one.pages, stage.torch_pages(stage.one_query, pages).numpy()
        ),
        "queries16_and_torch": agreement(
            stage.together().pages, stage.torch_pages(stage.queries, pages).numpy()
        ),
        "two_stage_and_exact": agreement(staged.pages, few.pages),
    }
    if stage.faiss is not None:
        found = stage.faiss.pages(stage.by_head(stage.query), stage.size.page_tokens)
        agreements["exact_and_faiss"] = agreement(exact.pages, found)
    for name, share in agreements.items():
        result.measure(f"agreement_of_{name}_{count}t", [share], "share of pages")
        least = 0.93 if name.startswith("two_stage") else 0.95
        result.checks[f"{name}_agree_{count}t"] = share > least
    result.checks[f"two_stage_reads_sketches_{count}t"] = bool(staged.stages and
                                                               staged.stages.lists)  # fmt: skip
    size = stage.size
    attended = stage.query.view(1, size.kv_heads, size.group, size.head_dim)
    wanted = ndp_rivals.sdpa(attended, stage.keys, stage.values).view_as(stage.query)
    out, _ = stage.sequence.attend(stage.layer, stage.query)
    difference = float(np.abs(np.asarray(torch.as_tensor(out).float() - wanted.float())).max())
    result.checks[f"attend_and_torch_agree_{count}t"] = difference < 0.02


def ratios(result: Result, stage: Stage, count: int) -> None:
    """Ratios of medians; a stage with several forms counts with its fastest."""

    def fastest(*names: str) -> float:
        return min(result.metrics[f"{name}_{count}t"].median for name in names)

    stream = fastest("stream_sum", "stream_max")
    exact = fastest("exact")
    found = {
        "exact_to_stream": stream / exact,
        "exact_to_torch": fastest("torch_keys_first", "torch_queries_first") / exact,
        "queries16_cost": fastest("queries16") / fastest("one_query"),
        "two_stage_speedup": fastest("exact_5_percent") / fastest("two_stage"),
        "attend_to_stream": 2 * stream / fastest("attend"),
        "attend_to_torch": fastest("torch_sdpa") / fastest("attend"),
    }
    if stage.faiss is not None:
        found["exact_to_faiss"] = fastest("faiss_by_query", "faiss_by_head") / exact
    result.ratios |= {f"{name}_{count}t": value for name, value in found.items()}
    share = result.metrics["two_stage_bytes"].median / stage.key_bytes
    result.ratios["two_stage_bytes_share"] = share


def draw(result: Result, path: Path) -> None:
    from cxlkv.bench.pictures import roofline

    roofline(result, path)
