"""The picture of the demo on a text: perplexity above, agreement below, by share of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from cxlkv.bench.style import (
    BLUE,
    DOTTED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    canvas,
    numbered,
    over_shares,
    plain,
)
from cxlkv.demo.text.measure import Track
from cxlkv.demo.text.report import Found, number

LOG_FROM = 10
"""Perplexities are drawn on a logarithmic axis when the largest is so many times full's."""
NAME_LENGTH_MAX = 40
COLORS = (BLUE, GREEN, ORANGE, INK)


def draw(path: Path, model: str, text: str, found: Found) -> None:
    """Write the picture; its format is that of the path's suffix. Names are shown, cut if long."""
    figure, (above, below) = canvas(7.2, 6.6, 2, shared="x")
    figure.suptitle(
        f"{cut(model)} on {cut(text)}\n"
        f"{found.plan.steps} tokens predicted, each behind {found.plan.context:,} or more",
        color=INK,
        fontsize=11,
    )
    draw_perplexity(above, found)
    draw_agreement(below, found)
    plain(above, ylabel="perplexity", grid="y")
    plain(below, ylabel="same best token as full attention, %", grid="y")
    over_shares(below, sorted({row.form.share for row in found.rows}), 1.25, "a token")
    figure.savefig(path, dpi=150)


def draw_perplexity(axes: Axes, found: Found) -> None:
    """Lines of perplexity, logarithmic where random pages are far off."""
    full = found.full.perplexity
    highest = max(row.track.perplexity for row in found.rows)
    if highest > LOG_FROM * full:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        numbered(axes.yaxis, "{:,.10g}".format)
    draw_lines(axes, found, lambda track: track.perplexity)
    label = f"full attention: {number(full)}"
    axes.axhline(full, color=INK, linewidth=1, linestyle=DOTTED, label=label)
    # Outside, as there is no corner that some model's lines do not pass.
    axes.legend(
        frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, labelcolor=INK
    )


def draw_agreement(axes: Axes, found: Found) -> None:
    """Lines of the share of tokens at which the most likely one is full attention's."""
    draw_lines(axes, found, lambda track: 100 * track.agreement(found.full))
    axes.set_ylim(top=102)


def draw_lines(axes: Axes, found: Found, value: Callable[[Track], float]) -> None:
    """A line for each method over the budgets, all pages at its end."""
    whole = found.every
    colors = {"random": GREY, **dict(zip(found.plan.methods, COLORS, strict=False))}
    for method, color in colors.items():
        rows = [*(row for row in found.rows if row.form.method == method), whole]
        axes.plot(
            [row.form.share for row in rows],
            [value(row.track) for row in rows],
            "s--" if method == "random" else "o-",
            color=color,
            label="as many random pages" if method == "random" else method,
            linewidth=2,
            markersize=4,
        )


def cut(name: str) -> str:
    """The name, or its beginning."""
    return name if len(name) <= NAME_LENGTH_MAX else name[: NAME_LENGTH_MAX - 3] + "..."
