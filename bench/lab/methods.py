"""The tables and the picture of a run of methods: docs/methods.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.lab import peers
from cxlkv.bench.lab.costs import COSTS, Costs
from cxlkv.bench.lab.hits import SIZES
from cxlkv.bench.lab.methods_picture import draw
from cxlkv.bench.lab.report import Findings, Row
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.result import Result
from cxlkv.demo.forms import CONTROLS
from cxlkv.layout import KVLayout
from cxlkv.machine import sizes
from cxlkv.machine.state import write_whole
from cxlkv.ndp import choosers, scorers
from cxlkv.ndp.engine import METHODS

BYTES = (0.1, 0.2, 0.3, 0.5)
"""Shares of all K and V at which all methods are compared."""
DIVERGENCES = (0.05, 0.02)
DIVERGENCE_LEAST = 1e-6  # nats; its log is drawn


def that_choose(layout: KVLayout) -> KVLayout:
    """Only the layers without a window: the others choose nothing, and need nothing for it."""
    groups = [group for group in layout.groups if group.window is None]
    return KVLayout.of(groups, page_tokens=layout.page_tokens)


def kept_shares(found: Findings, layout: KVLayout) -> dict[str, float]:
    """Share of the bytes of K and V that a scorer or chooser keeps beside them."""
    shape = scorers.Shape(layout.page_tokens, layout.head_dim)
    page = layout.token_bytes // (layout.layers * layout.kv_heads) * layout.page_tokens
    methods = {row.form.method for row in found.rows} - {*METHODS, *CONTROLS, "full"}
    kept = {}
    for name in methods - {*peers.NAMES}:
        chooser = choosers.of(name)
        kept[name] = (
            choosers.kept_share(chooser, layout)
            if chooser
            else scorers.summary_bytes(scorers.of(name), shape) / page
        )
    return kept


def kept_bytes(found: Findings, layout: KVLayout, tokens: int) -> dict[str, float]:
    """Bytes a token, in all layers that choose, that each method keeps beside K and V; tokens: of
    a context, of which an index is made.
    """
    kept = {name: share * layout.token_bytes for name, share in kept_shares(found, layout).items()}
    records = [sizes.plan(layout, 1 << 30, sketch=sketch).geometry for sketch in (True, False)]
    with_sketches, without = (each["record_bytes"] / each["record_layers"] for each in records)
    a_layer = (with_sketches - without) / layout.page_tokens
    kept["two_stage"] = a_layer * layout.layers
    key = layout.token_bytes / (2 * layout.page_tokens)
    kept["digest"] = 2 * key
    kept |= dict.fromkeys(("exact", "attention"), 0.0)
    return kept | {name: peers.kept_bytes(name, layout, tokens) for name in peers.NAMES}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def curves(found: Findings) -> dict[str, list[Row]]:
    """The rows of each method, the fewest pages first."""
    rows = sorted(found.rows, key=lambda row: row.form.share)
    names = dict.fromkeys(row.form.method for row in found.rows if row.form.method != "full")
    return {name: [row for row in rows if row.form.method == name] for name in names}


def read_share(row: Row) -> float:
    """To choose and of what was chosen, of all K and V."""
    return row.scored + row.fetched


# ---- at equal pages ----


def at_share(found: Findings, share: float, costs: Costs) -> str:
    """All methods with so many pages."""
    heads = (
        *("method", "reads to choose", "in all", "loss (below)", "KL", "agrees", "tasks"),
        *("mass", "worst tenth", "error", "ms to choose", "ms a step"),
    )
    rows = [row for row in found.rows if row.form.method == "full" or row.form.share == share]
    return table(heads, [cells(row, found, costs) for row in rows])


def cells(row: Row, found: Findings, costs: Costs) -> list[str]:
    loss, name = bootstrap(row.loss), row.form.method
    choose = step = ""
    if name == "full":
        step = f"{1e3 * np.median(costs.full):.1f}"
    elif name in costs.choose:
        at = costs.shares.index(row.form.share)
        choose = f"{1e3 * np.median(costs.choose[name][at]):.1f}"
        step = f"{1e3 * costs.step(name, row.form.share):.1f}"
    return [
        "all pages" if name == "full" else f"`{name}`",
        "" if name == "full" else f"{100 * row.scored:.1f} %",
        f"{100 * read_share(row):.1f} %",
        f"{100 * loss.mean:+.2f} % ({loss.below(2)})",
        f"{row.divergence.mean():.4f}",
        f"{100 * row.agreed.mean():.1f} %",
        f"{row.right}/{found.solved}",
        f"{row.mass[0]:.3f}",
        f"{row.mass[1]:.3f}",
        f"{row.error[0]:.3f}",
        choose,
        step,
    ]


# ---- at equal bytes ----


def points(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(share of all bytes that is read, KL), the fewest bytes first."""
    return sorted(
        (read_share(row), max(float(row.divergence.mean()), DIVERGENCE_LEAST)) for row in rows
    )


def divergence_at(curve: Sequence[tuple[float, float]], share: float) -> float | None:
    """KL at so many bytes, between its budgets, on straight lines of the logs; None outside."""
    if not curve or not curve[0][0] <= share <= curve[-1][0]:
        return None
    read, divergence = np.log(np.array(curve)).T
    return float(np.exp(np.interp(math.log(share), read, divergence)))


def bytes_to(curve: Sequence[tuple[float, float]], divergence: float) -> tuple[str, float]:
    """The share of all bytes that is read to hold a KL: ("", share), on straight lines of the logs;
    ("<", the smallest budget's) where that is good enough; (">", the largest one's) where none
    is."""
    if curve[0][1] <= divergence:
        return "<", curve[0][0]
    for (left, high), (right, low) in pairwise(curve):
        if low <= divergence:
            part = math.log(high / divergence) / math.log(high / low)
            return "", left * (right / left) ** part
    return ">", curve[-1][0]


def at_bytes(found: Findings) -> str:
    """A table of all methods: KL at equal bytes, interpolated between their budgets."""
    heads = ["method", *(f"KL at {100 * share:g} %" for share in BYTES)]
    heads += [f"KL {divergence:g}: MB a step" for divergence in DIVERGENCES]
    lines = []
    for name, rows in curves(found).items():
        curve = points(rows)
        line = [f"`{name}`"]
        for share in BYTES:
            divergence = divergence_at(curve, share)
            line.append("" if divergence is None else f"{divergence:.4f}")
        for wanted in DIVERGENCES:
            sign, share = bytes_to(curve, wanted)
            line.append(
                f"{sign} {share * found.step_bytes / 1e6:.2f} ({100 * share:.0f} %)".strip()
            )
        lines.append(line)
    return table(heads, lines)


# ---- a GPU's hot buffer ----


def hits_of(found: Findings) -> str:
    """Share of the chosen pages that the hot buffer has, by its slots over the pages chosen."""
    lines = [
        [
            f"`{row.form.method}`",
            f"{100 * row.form.share:g} %",
            *(f"{h:.3f}" for h in row.hits.mean(1)),
        ]
        for row in found.rows
        if row.form.method not in ("full", *CONTROLS)
    ]
    return table(["method", "pages", *(f"{size:g} x" for size in SIZES)], lines)


# ---- costs ----


def costs_of(found: Findings, costs: Costs, kept: Mapping[str, float]) -> str:
    """What each method keeps, and takes."""
    shares = [f"{100 * share:g} %" for share in costs.shares]
    heads = [
        *("method", "keeps, B a token", "makes it in, µs a token"),
        *(f"ms a step: {share}" for share in shares),
        *(f"with the model: {share}" for share in shares),
    ]
    rest, lines = float(np.median(costs.rest)), []
    whole = 1e3 * float(np.median(costs.full))
    lines.append(
        ["all pages", "0", "", *[f"{whole:.1f}"] * len(shares)]
        + [f"{whole + 1e3 * rest:.0f}"] * len(shares)
    )
    for name in costs.choose:
        is_of_pool = name in METHODS
        made = "" if is_of_pool else f"{1e6 * costs.first[name] / costs.tokens:.0f}"
        steps = [costs.step(name, share) for share in costs.shares]
        line = [f"`{name}`", f"{kept[name]:.0f}" if name in kept else "", made]
        line += [f"{1e3 * step:.1f}" for step in steps]
        lines.append(line + [f"{1e3 * (step + rest):.0f}" for step in steps])
    return table(heads, lines)


def markdown(
    found: Findings,
    costs: Costs,
    kept: Mapping[str, float],
    layout: KVLayout,
    failed: Sequence[str] = (),
) -> str:
    """All tables, with what their words mean; failed: checks that do not hold."""
    lines = [*found.notes, ""]
    lines += [f"**Failed checks: {', '.join(failed)}. These figures do not count.**"] * any(failed)
    lines += [
        f"All keys and values: {found.step_bytes / 1e6:.1f} MB a step, of {layout.layers} layers, "
        f"{layout.token_bytes} B a token.",
    ]
    for share in costs.shares:
        lines += ["", f"### {100 * share:g} % of the pages", "", at_share(found, share, costs)]
    lines += [
        "",
        "Loss over full attention's: mean, and what it is below with 95 % confidence over the "
        "texts. KL in nats a token. Tasks: of the items that full attention solves. Mass: "
        "attention that the chosen pages hold; worst tenth: of the heads of all layers. Error: of "
        "the output, over the length of full attention's. ms to choose, and a step's (to choose "
        "and to attend): one sequence, all layers, medians.",
        "",
        "### At equal bytes",
        "",
        at_bytes(found),
        "",
        "Bytes are read to choose and of the chosen pages, of all K and V. Between a method's "
        "budgets KL is on a straight line of the logs; <, >: less than the smallest budget, more "
        "than the largest.",
        "",
        "### A GPU's hot buffer",
        "",
        hits_of(found),
        "",
        "Share of the chosen pages, but for the newest, that a hot buffer of so many times the "
        "chosen pages has; from the queries of these steps, the first of which fill it.",
        "",
        "### Costs",
        "",
        costs_of(found, costs, kept),
        "",
        f"Behind {costs.tokens:,} tokens. A step: to choose and to attend, all layers. With the "
        "model: and what a step of the model takes beside attention. What is kept of a page or "
        "context is made by the first select after an append; an append takes "
        f"{1e6 * costs.append / costs.tokens:.0f} µs a token, digests and sketches of all pools "
        "included.",
    ]
    return "\n".join(lines)


def measure_times(folder: Path, result: Result) -> None:
    """Metrics choose_METHOD_N_percent and attend_METHOD_N_percent of a run's folder, and
    attend_full: ms of a step, all layers."""
    costs = Costs.read(folder / COSTS)
    result.measure("attend_full", (1e3 * costs.full).tolist(), "ms")
    for what, times in (("choose", costs.choose), ("attend", costs.attend)):
        for name, by_share in times.items():
            for share, samples in zip(costs.shares, by_share, strict=True):
                metric = f"{what}_{name}_{100 * share:g}_percent"
                result.measure(metric, (1e3 * samples).tolist(), "ms")


def write(
    folder: Path, found: Findings, config: PretrainedConfig, failed: Sequence[str] = ()
) -> None:
    """methods.md and methods.png into the folder of a run."""
    costs, layout = Costs.read(folder / COSTS), that_choose(layout_of(config))
    kept = kept_bytes(found, layout, costs.tokens)
    write_whole(folder / "methods.md", markdown(found, costs, kept, layout, failed) + "\n")
    draw(folder / "methods.png", curves(found), costs)
