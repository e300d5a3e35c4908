"""The table and the picture of a run of methods: docs/methods.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from cxlkv.adapters.transformers import layout_of
from cxlkv.bench.lab import costs
from cxlkv.bench.lab.costs import COSTS, SHARE, Seconds
from cxlkv.bench.lab.report import Findings, Row
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.style import INK, canvas, plain
from cxlkv.demo.forms import CONTROLS
from cxlkv.layout import KVLayout
from cxlkv.machine.state import write_whole
from cxlkv.ndp import scorers
from cxlkv.ndp.engine import METHODS


def kept_shares(found: Findings, layout: KVLayout) -> dict[str, float]:
    """Of the bytes of K and V, those that a scorer keeps beside them."""
    shape = scorers.Shape(layout.page_tokens, layout.head_dim)
    page = layout.token_bytes // (layout.layers * layout.kv_heads) * layout.page_tokens
    methods = {row.form.method for row in found.rows} - {*METHODS, *CONTROLS, "full"}
    return {name: scorers.summary_bytes(scorers.of(name), shape) / page for name in methods}


def markdown(found: Findings, seconds: Mapping[str, Seconds], kept: Mapping[str, float]) -> str:
    """A table: a row for each method and share."""
    heads = (
        *("method", "pages", "loss", "below", "KL", "agrees", "tasks", "mass", "worst", "error"),
        *("read to choose", "kept", "ms to choose", "ms to summarise"),
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found.rows:
        lines.append("| " + " | ".join(cells(row, found, seconds, kept)) + " |")
    return "\n".join(lines)


def cells(
    row: Row, found: Findings, seconds: Mapping[str, Seconds], kept: Mapping[str, float]
) -> list[str]:
    loss, name = bootstrap(row.loss), row.form.method
    timed = seconds.get(name)
    return [
        name,
        f"{100 * row.form.share:g} %",
        f"{100 * loss.mean:+.2f} %",
        f"{100 * loss.high:+.2f} %",
        f"{row.divergence.mean():.4f}",
        f"{100 * row.agreed.mean():.1f} %",
        f"{row.right}/{found.solved}",
        f"{row.mass[0]:.3f}",
        f"{row.mass[1]:.3f}",
        f"{row.error[0]:.3f}",
        f"{100 * row.scored:.2f} %",
        f"{100 * kept[name]:.1f} %" if name in kept else "",
        f"{1e3 * np.median(timed[1:]):.2f}" if timed is not None else "",
        f"{1e3 * (timed[0] - np.median(timed[1:])):.0f}"
        if timed is not None and name in kept
        else "",
    ]


def draw(path: Path, found: Findings, seconds: Mapping[str, Seconds]) -> None:
    """Loss over full attention's, by bytes that are read and by the time that choosing takes."""
    figure, (by_bytes, by_time) = canvas(11, 4.6, 1, 2)
    methods = dict.fromkeys(row.form.method for row in found.rows if row.form.method != "full")
    for at, method in enumerate(methods):
        rows = sorted(
            (row for row in found.rows if row.form.method == method), key=lambda row: row.form.share
        )
        losses = [100 * bootstrap(row.loss).mean for row in rows]
        control = method in CONTROLS
        color, marker = INK if control else f"C{at % 10}", "o" if at < 10 else "s"
        line = ":" if control else "-" if method in METHODS else "--"
        read = [100 * (row.scored + row.fetched) for row in rows]
        by_bytes.plot(read, losses, line, label=method, markersize=3, color=color, marker=marker)
        if method in seconds:
            spent = 1e3 * float(np.median(seconds[method][1:]))
            by_time.plot(
                [spent], losses[:1], line, label=method, markersize=6, color=color, marker=marker
            )
            by_time.annotate(method, (spent, losses[0]), fontsize=7, color=INK)
    for axes in (by_bytes, by_time):
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=1)
    plain(
        by_bytes,
        "bytes read a step, % of all keys and values",
        title="loss over full attention's, %",
    )
    plain(by_time, f"ms to choose {100 * SHARE:g} % of the pages", title="at the smallest budget")
    by_bytes.legend(frameon=False, labelcolor=INK, fontsize=7, ncol=2)
    figure.savefig(path, dpi=130)


def write(folder: Path, found: Findings, config: PretrainedConfig) -> None:
    """methods.md and methods.png into the folder of a run."""
    seconds = costs.read(folder / COSTS)
    kept = kept_shares(found, layout_of(config))
    write_whole(folder / "methods.md", markdown(found, seconds, kept) + "\n")
    draw(folder / "methods.png", found, seconds)
