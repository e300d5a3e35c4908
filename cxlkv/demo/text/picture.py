"""The picture of the demo on a text: perplexity above, agreement below, by share of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from cxlkv.bench.style import BLUE, DOTTED, GREY, INK, canvas, numbered, over_shares, plain
from cxlkv.demo.text.measure import Track
from cxlkv.demo.text.report import Found, number

LOG_FROM = 10
"""Perplexities are drawn on a logarithmic axis when the largest is so many times full's."""
NAME_LENGTH_MAX = 40


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
    over_shares(below, [row.share for row in found.rows], 1.25, "a token")
    figure.savefig(path, dpi=150)


def draw_perplexity(axes: Axes, found: Found) -> None:
    """Lines of perplexity, logarithmic where random pages are far off."""
    full = found.full.perplexity
    highest = max(track.perplexity for _, track in random_tracks(found))
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
    """The line of the selected pages, over that of random ones."""
    blind = random_tracks(found)
    shares, values = [share for share, _ in blind], [value(track) for _, track in blind]
    axes.plot(shares, values, "s--", color=GREY, label="as many random pages", linewidth=2)
    shares = [row.share for row in found.rows]
    values = [value(row.selected) for row in found.rows]
    axes.plot(shares, values, "o-", color=BLUE, label="selected pages", linewidth=2)


def random_tracks(found: Found) -> list[tuple[float, Track]]:
    """By share; of all pages there is but one draw."""
    return [(row.share, row.random or row.selected) for row in found.rows]


def cut(name: str) -> str:
    """The name, or its beginning."""
    return name if len(name) <= NAME_LENGTH_MAX else name[: NAME_LENGTH_MAX - 3] + "..."
