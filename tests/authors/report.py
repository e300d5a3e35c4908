"""Runs all checks on all samples: the result file, and a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from cxlkv.bench import sources
from cxlkv.bench.lab.methods import table
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.result import Result
from cxlkv.demo.text import inputs
from tests.authors.asked import Asked
from tests.authors.checkouts import COMMITS, Checkouts
from tests.authors.checks import CHECKS, Check, Compared, compare

MODEL, RANDOM = "model", "random"


@dataclass(frozen=True)
class Plan:
    """texts and layers of a model, and of random keys with 128 channels as many; queries of each,
    of tokens behind the first `tokens`, which are what they ask."""

    texts: Sequence[str] = ("handbook", "dialogue")
    layers: Sequence[int] = (3, 14, 26)
    tokens: int = 4096
    queries: Sequence[int] = (7, 60)
    behind: int = 64


def samples(plan: Plan, model: Path | None) -> Iterator[tuple[str, Asked]]:
    """The questions for each kind of keys, MODEL and RANDOM; RANDOM alone without a model."""
    for taken in taken_of(plan, model) if model else ():
        for query in plan.queries:
            yield MODEL, asked_of(taken, plan.tokens, query)
    made = sources.clustered(plan.tokens, len(plan.queries), head_dim=128)[0]
    for query in range(len(plan.queries)):
        yield RANDOM, asked_of(made, plan.tokens, query)


def taken_of(plan: Plan, folder: Path) -> Iterator[sources.Taken]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), inputs.read_model(folder)
    for parameter in model.parameters():  # a bfloat16 query has channels of equal size
        parameter.data = parameter.data.float()
    for text in TEXTS:
        if text.name in plan.texts:
            words = text.read()[: 8 * plan.tokens]
            ids = torch.tensor(tokenizer(words)["input_ids"][: plan.tokens + plan.behind])
            yield from sources.take(text.name, model, ids, plan.behind, plan.layers)


def asked_of(taken: sources.Taken, tokens: int, query: int) -> Asked:
    """Keys and values as a pool of bfloat16 has them, so that no side rounds them."""
    keys, values = (
        both[:tokens].bfloat16().float().transpose(0, 1).contiguous()
        for both in (taken.keys, taken.values)
    )
    heads, dim = keys.shape[0], keys.shape[2]
    return Asked(keys, values, taken.queries[query].float().reshape(heads, -1, dim), taken.scale)


Found = dict[tuple[str, str], list[Compared]]
"""By check and kind of sample."""


def run(folder: Checkouts, plan: Plan, model: Path | None) -> Found:
    found: Found = {}
    for kind, asked in samples(plan, model):
        for check in CHECKS:
            found.setdefault((check.name, kind), []).append(compare(check, folder, asked))
    return found


def means(every: Sequence[Compared], name: str, budget: int | None = None) -> list[float]:
    """A mean a sample."""
    if budget is None:
        return [float(np.nanmean(getattr(one, name))) for one in every]
    return [float(np.mean(getattr(one, name)[budget])) for one in every]


def result_of(found: Found) -> Result:
    """Samples are of one layer and query, means over its heads. A check holds where a method that
    is the same as theirs orders pages as theirs does."""
    result = Result("methods-authors")
    result.notes += [f"{name} {commit}" for name, commit in COMMITS.items()]
    for check in CHECKS:
        for kind in (MODEL, RANDOM):
            if every := found.get((check.name, kind)):
                measure(result, every, check, f"{check.name}_{kind}")
    return result


def measure(result: Result, every: Sequence[Compared], check: Check, name: str) -> None:
    correlation = means(every, "correlation")
    result.measure(f"{name}_correlation", correlation, "of ranks")
    if check.least:
        result.checks[f"{name}_is_alike"] = min(correlation) >= check.least
    if check.least and check.union == "query_head":
        unit = "standard deviations of theirs"
        result.measure(f"{name}_difference", means(every, "difference"), unit)
    for at, budget in enumerate(check.labels):
        result.measure(f"{name}_same_{budget}", means(every, "same", at), "share of the list")
        for whose, side in (("ours", 0), ("theirs", 1)):
            held = [one.mass[at][side] for one in every]
            result.measure(f"{name}_mass_{budget}_{whose}", held, "share of attention")


def markdown(found: Found) -> str:
    heads = (
        *("method", "lists", "theirs", "correlation", "same 5 %", "15 %", "held 5 %: ours"),
        *("theirs", "random: correlation", "same 5 %", "15 %"),
    )
    rows = []
    for check in CHECKS:
        names = f"{check.repository} {COMMITS[check.repository][:8]}, `{check.function}`"
        kind = check.union.replace("_", " ")
        size = "token" if check.page_tokens == 1 else "page"
        cells = [f"`{check.method}`", f"{kind}, {size}s", names]
        for source in (MODEL, RANDOM):
            cells += row(found.get((check.name, source)), check, source)
        rows.append(cells)
    return table(heads, rows)


def row(every: Sequence[Compared] | None, check: Check, kind: str) -> list[str]:
    if not every:
        return [""] * (5 if kind == MODEL else 3)
    cells = [f"{np.mean(means(every, 'correlation')):.4f}"]
    budgets = range(len(check.labels))
    cells += [f"{100 * np.mean(means(every, 'same', at)):.1f} %" for at in budgets]
    cells += [""] * (2 - len(budgets))
    if kind == MODEL:
        cells += [f"{np.mean([one.mass[0][side] for one in every]):.3f}" for side in (0, 1)]
    return cells
