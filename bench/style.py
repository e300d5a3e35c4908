"""How pictures look: their colours, panels that need no display, and axes without ornament."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from cxlkv.bench.result import emulation

BLUE, ORANGE, GREEN, GREY, INK = "#1f5fa8", "#e07b28", "#3b8f4d", "#9a9a9a", "#333333"
COLORS = ("#a9c8e8", "#5f97cf", BLUE, "#123a66")  # of one kind of thing, small to large
DOTTED = (0, (1, 2))


def canvas(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    shared: Literal["", "x", "xy"] = "",
    heights: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row, and below them what is emulated. shared: the axes that
    they have in common; heights: of the rows, to each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if label := emulation():
        figure.supxlabel(f"emulated: {label}", color=INK, fontsize=9)
    FigureCanvasAgg(figure)  # draws without a display
    panels = figure.subplots(
        rows,
        columns,
        sharex="x" in shared,
        sharey="y" in shared,
        squeeze=False,
        height_ratios=heights,
    )
    return figure, list(panels.flatten())


def plain(
    axes: Axes,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    grid: Literal["both", "x", "y"] = "both",
) -> None:
    """No frame, a light grid, and these words, where there are any."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for text, put in ((xlabel, axes.set_xlabel), (ylabel, axes.set_ylabel)):
        if text:
            put(text, color=INK)
    axes.set_title(title, color=INK, fontsize=11)


def numbered(axis: Axis, text: Callable[[float], str]) -> None:
    """Numbers of an axis in this form."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def over_shares(axes: Axes, shares: Sequence[float], margin: float, of: str) -> None:
    """A logarithmic axis of shares of pages, each in percent."""
    axes.set_xscale("log")
    axes.set_xlim(shares[0] / margin, shares[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(shares))
    axes.xaxis.set_minor_locator(NullLocator())
    numbered(axes.xaxis, lambda share: f"{100 * share:g} %")
    axes.set_xlabel(f"share of pages that {of} attends to", color=INK)
