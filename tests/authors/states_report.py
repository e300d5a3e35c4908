"""Runs all checks of methods with a state of the sequence: the result file, and two tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cxlkv.bench.lab.methods import table
from cxlkv.bench.result import Result
from tests.authors.checkouts import COMMITS, Checkouts
from tests.authors.choices import (
    STATE_CHECKS,
    ChoicesCompared,
    Promise,
    StateCheck,
    compare_choices,
    promise,
)
from tests.authors.report import MODEL, RANDOM, Plan, samples

WHAT = {"within": "share of sums", "tokens": "a head", "errors": "of outputs, median"}
"""Columns of a promise."""


@dataclass
class StateFindings:
    """By check and kind of sample; promises by kind."""

    found: dict[tuple[str, str], list[ChoicesCompared]] = field(default_factory=dict)
    promises: dict[str, list[Promise]] = field(default_factory=dict)


def run_states(folder: Checkouts, plan: Plan, model: Path | None) -> StateFindings:
    findings = StateFindings()
    for kind, asked in samples(plan, model):
        for check in STATE_CHECKS:
            one = compare_choices(check, folder, asked)
            findings.found.setdefault((check.name, kind), []).append(one)
        findings.promises.setdefault(kind, []).append(promise(folder, asked))
    return findings


def states_result(findings: StateFindings) -> Result:
    """Samples are of one layer and query. A check holds where a method that is the same as theirs
    chooses the same tokens, and comes to the same output."""
    result = Result("methods-authors-states")
    result.notes += [
        f"{name} {COMMITS[name]}" for name in sorted({check.repository for check in STATE_CHECKS})
    ]
    for check in STATE_CHECKS:
        for kind in (MODEL, RANDOM):
            every = findings.found.get((check.name, kind))
            if every:
                measure_choices(result, check, f"{check.name}_{kind}", every)
    for kind, promises in findings.promises.items():
        for whose, side in (("ours", 0), ("theirs", 1)):
            name = f"promise_{kind}"
            for what, unit in WHAT.items():
                numbers = [float(getattr(one, what)[side]) for one in promises]
                result.measure(f"{name}_{what}_{whose}", numbers, unit)
        sizes = [float(one.sizes) for one in promises]
        result.measure(f"promise_{kind}_sizes_apart", sizes, "tokens, largest")
        result.checks[f"promise_{kind}_sizes_are_alike"] = max(sizes) <= 1
    return result


def measure_choices(
    result: Result, check: StateCheck, name: str, every: list[ChoicesCompared]
) -> None:
    same = [float(one.same.mean()) for one in every]
    apart = [float(one.apart.max()) for one in every]
    result.measure(f"{name}_same", same, "share of our tokens")
    result.measure(f"{name}_weights", [one.weights for one in every], "relative, largest")
    result.measure(f"{name}_apart", apart, "of outputs, largest")
    for whose, side in (("ours", 0), ("theirs", 1)):
        result.measure(f"{name}_tokens_{whose}", [one.tokens[side] for one in every], "a head")
        errors = [float(np.median(one.errors[side])) for one in every]
        result.measure(f"{name}_error_{whose}", errors, "of outputs, median of heads")
    if check.least is not None:
        alike = min(same) >= check.least and max(apart) <= check.most
        result.checks[f"{name}_is_alike"] = alike


def states_markdown(findings: StateFindings) -> str:
    heads = (
        *("method", "theirs", "same", "weights", "tokens", "error: ours", "theirs", "apart"),
        *("random: same", "error: ours", "theirs"),
    )
    rows, promised = [], []
    for check in STATE_CHECKS:
        names = f"{check.repository} {COMMITS[check.repository][:8]}, `{check.function}`"
        cells = [check.name, names]
        for kind in (MODEL, RANDOM):
            cells += state_row(findings.found.get((check.name, kind)), kind)
        rows.append(cells)
    for kind, promises in findings.promises.items():
        sides = [np.mean([getattr(one, what) for one in promises], axis=0) for what in WHAT]
        within, tokens, errors = (side.tolist() for side in sides)
        cells = [kind, *(f"{100 * one:.1f} %" for one in within)]
        cells += [*(f"{one:.0f}" for one in tokens), *(f"{one:.4f}" for one in errors)]
        cells.append(str(max(one.sizes for one in promises)))
        promised.append(cells)
    of_promises = "promise|within: ours|theirs|tokens|theirs|error|theirs|sizes".split("|")
    return f"{table(heads, rows)}\n\n{table(of_promises, promised)}"


def state_row(every: list[ChoicesCompared] | None, kind: str) -> list[str]:
    """Medians of errors over samples and query heads, of all else means, or the largest."""
    if not every:
        return [""] * (6 if kind == MODEL else 3)
    same = f"{100 * np.mean([one.same.mean() for one in every]):.1f} %"
    errors = [
        f"{np.median(np.concatenate([one.errors[side] for one in every])):.4f}" for side in (0, 1)
    ]
    if kind == RANDOM:
        return [same, *errors]
    tokens = np.mean([one.tokens for one in every], axis=0)
    return [
        same,
        f"{max(one.weights for one in every):.1e}",
        f"{tokens[0]:.0f}, {tokens[1]:.0f}",
        *errors,
        f"{max(one.apart.max() for one in every):.1e}",
    ]
