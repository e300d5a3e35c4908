"""How pictures of benchmarks look: their colours, and axes without ornament."""

from __future__ import annotations

from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY, INK = "#1f5fa8", "#e07b28", "#3b8f4d", "#9a9a9a", "#333333"
COLORS = ("#a9c8e8", "#5f97cf", BLUE, "#123a66")  # of one kind of thing, small to large


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
