"""A trace against every policy at several sizes, beside textbook caches and Belady's optimum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.replay import caches
from cxlkv.bench.replay.simulation import replay as simulate
from cxlkv.bench.replay.traces import FAMILIES, Request, distinct, read
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError
from cxlkv.tiers.policy import DEFAULT, POLICIES, policy_named

SHARES = (0.01, 0.05, 0.10, 0.25)
MORE_SHARES = (0.005, 0.02, 0.15)
"""For the picture."""


@dataclass
class Curves:
    """Hits as a share of all pages asked for, by name and by size (share of the distinct pages)."""

    asked: int
    pages: int
    optimum: dict[float, float] = field(default_factory=dict)
    policies: dict[str, dict[float, float]] = field(default_factory=dict)
    textbook: dict[str, dict[float, float]] = field(default_factory=dict)


def run(
    result: Result,
    requests: Sequence[Request],
    policies: Sequence[str] = tuple(POLICIES),
    shares: Sequence[float] = SHARES,
    progress: Say = lambda name: None,
) -> Curves:
    """Metrics NAME_at_PERCENT: the share of the pages asked for that were leading hits; ratios
    NAME_to_optimum_at_PERCENT. The default's are checked against the best textbook cache."""
    asked = [page for request in requests for page in request.pages]
    lengths = [len(request.pages) for request in requests]
    curves = Curves(len(asked), distinct(requests))
    for share in shares:
        capacity = max(1, int(share * curves.pages))
        progress(f"optimum: {100 * share:g} %")
        best = sum(caches.belady(asked, capacity))
        curves.optimum[share] = best / len(asked)
        for name, cache in caches.CACHES.items():
            hits = caches.leading(lengths, cache(asked, capacity))
            curves.textbook.setdefault(name, {})[share] = hits / len(asked)
        for name in policies:
            progress(f"{name}: {100 * share:g} %")
            began = time.monotonic()
            hits = simulate(requests, capacity, policy_named(name)).hits
            curves.policies.setdefault(name, {})[share] = hits / len(asked)
            spent = time.monotonic() - began
            result.measure(f"{name}_s_at_{percent(share)}", [spent], "s")
    report(result, curves)
    return curves


def command(options: Options, say: Say) -> Shown:
    """The trace against policies."""
    requests = requests_of(options)
    result = Result("replay")
    result.notes.append(f"trace: {Path(options.trace or '').name}, {len(requests)} requests")
    shares = sorted({*SHARES, *(MORE_SHARES if options.picture else ())})
    curves = run(result, requests, shares=shares, progress=say)

    def draw(path: Path) -> None:
        from cxlkv.bench import pictures

        pictures.replayed(curves, path)

    return Shown(result, [table(curves)], draw=draw)


def requests_of(options: Options) -> list[Request]:
    """Raises BadArgumentError for a trace without requests, and where none is named."""
    if options.trace is None:
        raise BadArgumentError("this case needs --trace: a file, or the name of a family")
    family = FAMILIES.get(options.trace)
    return read(Path(options.trace)) if family is None else family(1)


def percent(share: float) -> str:
    return f"{100 * share:g}".replace(".", "_")


def report(result: Result, curves: Curves) -> None:
    for share, best in curves.optimum.items():
        at = percent(share)
        result.measure(f"optimum_at_{at}", [best], "share of the pages asked for")
        for kind, of in (("", curves.policies), ("textbook_", curves.textbook)):
            for name, by_share in of.items():
                result.measure(f"{kind}{name}_at_{at}", [by_share[share]], "share")
                if best:
                    ratio = by_share[share] / best
                    result.ratios[f"{kind}{name}_to_optimum_at_{at}"] = ratio
        rivals = max(by_share[share] for by_share in curves.textbook.values())
        if DEFAULT in curves.policies:
            ours = curves.policies[DEFAULT][share]
            result.checks[f"default_at_{at}_at_least_0_98_of_the_best"] = ours >= 0.98 * rivals
        most = max(by_share[share] for by_share in curves.policies.values())
        result.checks[f"optimum_at_{at}_is_the_most"] = most <= best
    result.notes += [
        f"{curves.asked} pages asked for, {curves.pages} distinct; sizes are shares of these",
        "hits are pages of a prompt that are there with all before them; the optimum (Belady, with "
        "bypass) and the textbook caches go page by page, the policies leave leaves first",
        "a trace has no attention and no costs: mass goes by finds, cost by what a page's depth "
        "makes of its computing time in a model of 8B parameters (it saves seconds, not hits)",
    ]


def table(curves: Curves) -> Table:
    """Share of the optimum, a line for each way."""
    made = Table(title="hits as a share of the best possible")
    made.add_column("size, of the distinct pages", no_wrap=True)
    for share in sorted(curves.optimum):
        made.add_column(f"{100 * share:g} %", justify="right")
    made.add_row("optimum, of all pages", *(f"{curves.optimum[s]:.3f}" for s in curves.optimum))
    made.add_section()
    for kind, of in (("", curves.policies), ("textbook ", curves.textbook)):
        for name, by_share in of.items():
            cells = (by_share[s] / max(curves.optimum[s], 1e-12) for s in sorted(curves.optimum))
            made.add_row(kind + name, *(f"{cell:.3f}" for cell in cells))
        made.add_section()
    return made
