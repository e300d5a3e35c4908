"""Selection in two stages on keys of trained models: answers, and speed. `cxlkv bench recall` has
the pages and the attention mass that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench import sources
from cxlkv.bench.cases import ndp_rivals
from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape, filled
from cxlkv.bench.quality import mean
from cxlkv.bench.result import Result
from cxlkv.bench.sources import Taken
from cxlkv.demo.facts import Examiner, Plan, load_model, pool_for
from cxlkv.ndp.engine import Budget, Selection


@dataclass(frozen=True)
class Size:
    """The demo at 65,536 tokens; 8 texts of 16,384 bytes, which together are 131,072 keys."""

    share: float = 0.05
    demo_tokens: int = 65_536
    questions: int = 128
    text_tokens: int = 16_384
    texts: int = 8
    queries: int = 8
    rounds: int = 9
    settle_s: float = 0.25


def run(result: Result, size: Size, threads: Sequence[int]) -> None:
    """Ratios two_stage_answers, text_speedup and text_large_bytes_share."""
    answer(result, size)
    texts = [
        sources.text(size.text_tokens + size.queries, size.queries, first=size.text_tokens * i)
        for i in range(size.texts)
    ]
    keys, queries = side_by_side(texts, size.text_tokens)
    time_texts(result, size, keys, queries, texts[0][0].scale, threads)
    result.ratios["text_speedup"] = result.ratios[f"text_speedup_{threads[-1]}t"]


def answer(result: Result, size: Size) -> None:
    """Questions to the demo's model, answered from the same budget by both methods."""
    plan = replace(Plan.of(size.demo_tokens), questions=size.questions)
    model = load_model()
    with pool_for(layout_of(model), plan) as pool:
        examiner = Examiner(model, pool, plan)
        examiner.prefill()
        budget = examiner.budget(size.share)
        asked = {method: examiner.ask(budget, method) for method in ("exact", "two_stage")}
        examiner.release()
    for method, found in asked.items():
        name = f"demo_right_{method}"
        result.measure(name, [found.right_share], f"share of {len(found.right)} answers")
        result.measure(f"demo_scored_{method}", [found.bytes_scored], "bytes a question")
    wanted = asked["exact"].right_share
    result.checks["exact_selection_answers"] = wanted > 0.5
    if wanted:
        result.ratios["two_stage_answers"] = asked["two_stage"].right_share / wanted


def side_by_side(texts: Sequence[Sequence[Taken]], tokens: int) -> tuple[Tensor, Tensor]:
    """The texts one behind the other, the heads of all layers as those of one: keys [tokens,
    kv_heads, dim] and the last text's queries [n, q_heads, dim]."""
    keys = [torch.cat([layer.keys[:tokens] for layer in text], dim=1) for text in texts]
    queries = torch.cat([layer.queries for layer in texts[-1]], dim=1)
    return torch.cat(keys).bfloat16(), queries.bfloat16()


def time_texts(
    result: Result, size: Size, keys: Tensor, queries: Tensor, scale: float, threads: Sequence[int]
) -> None:
    """Ratios text_speedup_Nt, exact over two_stage, for the mean of several queries."""
    tokens, heads, dim = keys.shape
    group = queries.shape[1] // heads
    shape = Shape(tokens=tokens, layers=1, kv_heads=heads, head_dim=dim, group=group)
    budget = Budget(pages=max(1, int(size.share * (tokens // shape.page_tokens))))
    with filled(shape, keys) as (pool, sequence):

        def select(method: str) -> list[Selection]:
            return [sequence.select(0, q, budget, method=method, scale=scale) for q in queries]

        pairs = list(zip(select("exact"), select("two_stage"), strict=True))
        agreements = [ndp_rivals.agreement(exact.pages, staged.pages) for exact, staged in pairs]
        shares = [staged.bytes_scored / exact.bytes_scored for exact, staged in pairs]
        result.measure("text_large_agreement", agreements, "share of pages")
        result.checks["text_large_agrees"] = mean(agreements) > 0.9
        result.measure("text_large_bytes", shares, "share of keys, by query")
        result.ratios["text_large_bytes_share"] = mean(shares)
        for count in threads:
            pool.set_threads(count)
            samples = interleave(
                {"exact": lambda: select("exact"), "two_stage": lambda: select("two_stage")},
                size.rounds,
                settle_s=size.settle_s,
            )
            each = {name: [s / len(queries) for s in took] for name, took in samples.items()}
            median = result.times(each, "ms a query", f"text_large_{{}}_{count}t")
            result.ratios[f"text_speedup_{count}t"] = median["exact"] / median["two_stage"]
    result.notes.append(
        f"text_speedup, text_large_*: keys of {size.texts} texts of {size.text_tokens} bytes, one "
        f"behind the other, {tokens} tokens, the kv heads of all layers as the {heads} of one, "
        f"head_dim {dim}"
    )
