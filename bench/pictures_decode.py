"""Pictures of `cxlkv bench decode`: maps of shapes, and milliseconds a step over context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import isnan, nan
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

from cxlkv.bench.decode_figures import Cells, Lines, columns_of, contexts_of, lines_of, maps_of
from cxlkv.bench.result import Result, short
from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, numbered, plain

GOALS = {
    "exact_to_bound": 0.8,
    "attend_to_bound": 0.8,
    "two_stage_to_exact": 1.5,
    "auto_to_best": 0.9,
}
"""What is wanted of each kind of ratio: the colours part there."""
COLOURS = LinearSegmentedColormap.from_list("below and above", [ORANGE, "white", BLUE])
DARK = 0.8  # of COLOURS: what lies behind that takes white figures
LINES = {
    "all": ("all pages", BLUE, "-"),
    "auto_15": ("15 % of the pages", BLUE, "--"),
    "auto_5": ("5 % of the pages", BLUE, ":"),
    "dynamic": ("DynamicCache, sdpa", ORANGE, "-"),
    "dynamic_masked": ("the same, with a mask", ORANGE, "--"),
    "sdpa": ("torch sdpa", ORANGE, "-"),
    "flex": ("torch flex attention", ORANGE, "--"),
    "all_clock": ("all pages, by the device's clock", GREEN, "-"),
    "auto_5_clock": ("5 %, by the device's clock", GREEN, ":"),
    "floor": ("what memory and arithmetic take", GREY, "-"),
}
"""A form's name, colour and style in pictures over context length."""
MARKERS = {"-": "o", "--": "s", ":": "^"}
"""By style: lines beside each other, or points without a line, are told by these."""


def heat_maps(result: Result, ratios: Sequence[str], path: Path) -> None:
    """A row of panels for each map, one for each kind of ratio; the text in a cell is the ratio."""
    maps = maps_of(result, ratios)
    heights = [len(rows) for rows in maps.values()]
    height = 0.3 * sum(heights) + 0.8 * len(maps) + 0.6
    figure, panels = canvas(4.6 * len(ratios), height, len(maps), len(ratios), heights=heights)
    words = (
        "blue: what is wanted, or more; orange: less",
        "d: channels of a head, g: query heads a kv head, p: tokens a page, x: sequences",
    )
    figure.suptitle("\n".join(words), color=INK, fontsize=12)
    at = iter(panels)
    for of, rows in maps.items():
        for ratio in ratios:
            axes = next(at)
            draw_map(axes, rows, ratio)
            axes.set_title(f"{ratio.replace('_', ' ')}: {of}", color=INK, fontsize=11)
    figure.savefig(path, dpi=150)


def draw_map(axes: Axes, rows: Cells, ratio: str) -> None:
    """White where a value is as wanted; empty where there is none."""
    columns = columns_of(rows)
    grid = [[row.get(column, {}).get(ratio, nan) for column in columns] for row in rows.values()]
    norm = TwoSlopeNorm(GOALS[ratio], 0.4 * GOALS[ratio], 1.4 * GOALS[ratio])
    axes.imshow(grid, COLOURS, norm, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(colors=INK, length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    for y, x in product(range(len(rows)), range(len(columns))):
        if not isnan(grid[y][x]):
            colour = "white" if norm(grid[y][x]) > DARK else INK
            axes.text(x, y, f"{grid[y][x]:.2f}", ha="center", va="center", fontsize=7, color=colour)


def over_contexts(result: Result, title: str, path: Path) -> None:
    """A panel for each model, device and number of requests: milliseconds a step, by form. Devices
    that were measured at one length only share a panel behind these."""
    found = lines_of(result, tuple(LINES))
    devices = {
        of_and_requests: lines
        for of_and_requests, lines in found.items()
        if "-over-" in of_and_requests[0] and len(contexts_of(lines)) == 1
    }
    alone = {name: lines for name, lines in found.items() if name not in devices}
    count = len(alone) + bool(devices)
    columns = min(4 if count > 6 else 3, count)
    rows = -(-count // columns)
    figure, panels = canvas(4.2 * columns, 3.2 * rows + 1.1, rows, columns)
    figure.suptitle(f"{title}: milliseconds over context length", color=INK, fontsize=13)
    for axes, ((of, requests), lines) in zip(panels, alone.items(), strict=False):
        draw_lines(axes, lines)
        words = f"{requests} request{'s' if requests > 1 else ''}"
        plain(axes, "tokens", title=f"{of.replace('-over-', ' over ')}, {words}")
    for axes in panels[: len(alone) : columns]:
        axes.set_ylabel("ms a step", color=INK)
    if devices:
        draw_devices(panels[len(alone)], {of: lines for (of, _), lines in devices.items()})
    for axes in panels[count:]:
        axes.set_visible(False)
    drawn = [axes.get_legend_handles_labels() for axes in reversed(panels)]
    handles = {
        label: one for lines, labels in drawn for one, label in zip(lines, labels, strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=150)


def draw_lines(axes: Axes, lines: Lines) -> None:
    for form, (label, color, style) in LINES.items():
        if form in lines:
            at = sorted(lines[form].items())
            x, y = zip(*at, strict=True)
            (line,) = axes.plot(x, y, style, color=color, linewidth=1.2, label=label)
            line.set(marker=MARKERS[style], markersize=3.5)
    contexts = contexts_of(lines)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [short(tokens) for tokens in contexts])
    axes.minorticks_off()
    numbered(axes.yaxis, "{:g}".format)


def draw_devices(axes: Axes, by_device: Mapping[str, Lines]) -> None:
    """A row for each device, at one length; named MODEL-over-DEVICE."""
    names = [of.split("-over-")[1] for of in by_device]
    for form, (label, color, style) in LINES.items():
        points = [
            (next(iter(lines[form].values())), row)
            for row, lines in enumerate(by_device.values())
            if form in lines
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, MARKERS[style], color=color, markersize=4, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    of, lines = next(iter(by_device.items()))
    length = short(contexts_of(lines)[0])
    plain(axes, "ms a step", title=f"{of.split('-over-')[0]}, {length} tokens, over links")
