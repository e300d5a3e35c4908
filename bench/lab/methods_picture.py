"""The picture of a run of methods: quality by bytes, and by tokens a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cxlkv.bench.lab import peers
from cxlkv.bench.lab.costs import Costs
from cxlkv.bench.lab.report import Row
from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, plain
from cxlkv.demo.forms import CONTROLS

CORE = {"exact": BLUE, "two_stage": GREEN, "digest": ORANGE}
SHADES = ("#8c6bb1", "#41a6b0", "#c0607a", "#8a8a3a", "#5b7bb4", "#b07d4a", "#6d9c5a", "#a0508c")
APART = 0.036
"""Between two names, of the height of a panel."""


def draw(path: Path, curves: Mapping[str, Sequence[Row]], costs: Costs) -> None:
    """KL by the bytes that a step reads, and by tokens a second of choosing and attending."""
    figure, (by_bytes, by_time) = canvas(12, 5.6, 1, 2)
    ends: dict[str, tuple[float, float]] = {}
    fast: dict[str, tuple[float, float]] = {}
    for at, (name, rows) in enumerate(curves.items()):
        divergences = [float(row.divergence.mean()) for row in rows]
        read = [100 * (row.scored + row.fetched) for row in rows]
        look = look_of(name, at)
        look.plot(by_bytes, read, divergences)
        ends[name] = read[-1], divergences[-1]
        if name in costs.choose:
            rates = [1 / costs.step(name, row.form.share) for row in rows]
            look.plot(by_time, rates, divergences)
            fast[name] = max(zip(rates, divergences, strict=True))
    by_time.axvline(1 / float(np.median(costs.full)), color=INK, linewidth=0.8)
    for axes in (by_bytes, by_time):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    plain(by_bytes, "bytes read a step, to choose and of the chosen pages, % of all K and V",
          ylabel="KL from full attention, nats a token", title="by bytes")  # fmt: skip
    plain(by_time, f"tokens/s of choosing and attending, all layers, {costs.tokens:,} tokens",
          title="by time; the line is attention to all pages")  # fmt: skip
    colors = {name: look_of(name, at).color for at, name in enumerate(curves)}
    label(by_bytes, ends, colors)
    label(by_time, fast, colors)
    figure.savefig(path, dpi=130)


class Look(NamedTuple):
    color: str
    line: str = "-"
    width: float = 1.0
    marker: float = 2.5

    def plot(self, axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
        axes.plot(
            x, y, self.line, color=self.color, linewidth=self.width, marker="o",
            markersize=self.marker, zorder=2 + self.width,
        )  # fmt: skip


def look_of(name: str, at: int) -> Look:
    """How a method's line is drawn: the core's are prominent, controls grey, peers dashed."""
    if name in CORE:
        return Look(CORE[name], width=2.4, marker=5)
    if name in CONTROLS:
        return Look(GREY, ":", 1.4, 3)
    return Look(SHADES[at % len(SHADES)], "--" if name in peers.NAMES else "-")


def label(axes: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Names in the margin, in the order of the lines' ends, each with a thread to its own."""
    if not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    places = {name: float(to_axes.transform(end)[1]) for name, end in ends.items()}
    order = sorted(places, key=lambda name: places[name])
    heights = spread([places[name] for name in order], APART)
    for name, height in zip(order, heights, strict=True):
        axes.annotate(
            name,
            xy=ends[name],
            xytext=(1.02, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=colors[name],
            fontweight="bold" if name in CORE else "normal",
            arrowprops={"arrowstyle": "-", "color": colors[name], "linewidth": 0.4, "alpha": 0.5},
            annotation_clip=False,
        )


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Ascending heights, moved so that neighbours are `apart` at least, up and down alike, and all
    are between 0 and 1, where there is room."""
    groups: list[tuple[float, int]] = []  # (middle, how many)
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1:
            (low, few), (high, more) = groups[-2:]
            if high - (more - 1) * apart / 2 - (low + (few - 1) * apart / 2) >= apart:
                break
            groups[-2:] = [((low * few + high * more) / (few + more), few + more)]
    found = [
        middle + apart * (n - (count - 1) / 2) for middle, count in groups for n in range(count)
    ]
    last = len(found) - 1
    found = [min(height, 1 - apart * (last - at)) for at, height in enumerate(found)]
    return [max(height, apart * at) for at, height in enumerate(found)]
