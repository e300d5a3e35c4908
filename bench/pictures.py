"""Pictures of `cxlkv bench`: bytes against time for ndp, bytes against what is kept for recall,
hits against size for replay, maps of shapes and steps over context length for decode, and latency
under load for the report."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean as mean
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

from cxlkv.bench.result import Result, short
from cxlkv.bench.style import BLUE, COLORS, GREEN, GREY, INK, ORANGE, canvas, numbered, plain

if TYPE_CHECKING:  # torch is not needed to draw
    from cxlkv.bench.quality import Weighed
    from cxlkv.bench.replay.case import Curves

OURS = {
    "exact": ["exact"],
    "two stages, 5 %": ["two_stage"],
    "digest, 5 %": ["digest"],
    "1 query a kv head": ["one_query"],
    "16 queries a kv head": ["queries16"],
    "attend": ["attend"],
}
THEIRS = {
    "torch bmm, amax, topk": ["torch_keys_first", "torch_queries_first"],
    "torch sdpa": ["torch_sdpa"],
    "faiss": ["faiss_by_query", "faiss_by_head"],
}
"""Dots of the roofline: a label, and the forms of which the fastest is drawn."""
MIB = 1 << 20
NEAR = 1.15  # so much apart two labels are still one on the other


def roofline(result: Result, path: Path, threads: Sequence[int] = (1, 2)) -> None:
    """A panel for each number of threads: every form's bytes and time, and the streaming read."""
    figure, panels = canvas(5.4 * len(threads), 5.0, 1, len(threads), shared="xy")
    figure.suptitle("bytes that a form reads, and its time", color=INK, fontsize=13)
    for axes, count in zip(panels, threads, strict=True):
        draw_roofline(axes, result, count)
        plain(axes, "MiB read", title=f"{count} thread{'s' if count > 1 else ''}")
    panels[0].set_ylabel("ms", color=INK)
    figure.savefig(path, dpi=150)


def draw_roofline(axes: Axes, result: Result, count: int) -> None:
    """A dot for each form; above the line of the streaming read a form is slower than that."""
    draw_dots(axes, result, OURS, count, BLUE, "left")
    draw_dots(axes, result, THEIRS, count, ORANGE, "right")
    axes.plot([], [], "o", color=BLUE, label="cxlkv")
    axes.plot([], [], "o", color=ORANGE, label="torch, faiss")
    keys = result.metrics["key_bytes"].median
    # Of the faster of two ways to read the keys once.
    read_ms = min(result.metrics[f"{n}_{count}t"].median for n in ("stream_sum", "stream_max"))
    ends = [keys / 16, keys * 3]
    label = f"streaming read, {keys / read_ms / 1e6:.1f} GB/s"
    axes.plot(
        [end / MIB for end in ends],
        [read_ms * end / keys for end in ends],
        color=INK,
        linewidth=1,
        label=label,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        numbered(axis, "{:.4g}".format)
    axes.set_xlim(keys / MIB / 20, keys / MIB * 5)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)


def draw_dots(
    axes: Axes, result: Result, forms: Mapping[str, Sequence[str]], count: int, color: str, to: str
) -> None:
    dots = []
    for label, names in forms.items():
        timed = [name for name in names if f"{name}_{count}t" in result.metrics]
        if not timed:
            continue  # no faiss
        y, fastest = min((result.metrics[f"{name}_{count}t"].median, name) for name in timed)
        read = result.metrics.get(f"{fastest}_bytes", result.metrics["key_bytes"])
        dots.append((y, read.median / MIB, label))
    below, height = 0.0, 0
    for y, x, label in sorted(dots):
        # Of dots that nearly meet, the label of the higher one goes above the other's.
        height = height + 11 if y < NEAR * below else -3
        below = y
        axes.plot([x], [y], "o", color=color)
        axes.annotate(
            label,
            (x, y),
            (6 if to == "left" else -6, height),
            textcoords="offset points",
            horizontalalignment=to,
            fontsize=8,
            color=color,
        )


def recall(found: Mapping[str, Sequence[Weighed]], path: Path) -> None:
    """A panel for each source: share of bytes read, and above it pages (full) and mass (dashed)."""
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, panels = canvas(4.6 * columns, 3.9 * rows + 0.6, rows, columns, shared="xy")
    figure.suptitle("what is kept of the exact choice, by bytes read to choose", color=INK)
    for axes, (source, weighed) in zip(panels, found.items(), strict=False):
        draw_recall(axes, weighed)
        plain(axes, "share of the keys' bytes", title=source.replace("_", " "))
        axes.xaxis.set_tick_params(labelbottom=True)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("share of the exact choice", color=INK)
    panels[0].legend(frameon=False, loc="center right", fontsize=8, labelcolor=INK)
    figure.savefig(path, dpi=150)


def draw_recall(axes: Axes, weighed: Sequence[Weighed]) -> None:
    """A colour for each budget; digest alone stands apart, as a diamond of its own."""
    shares = sorted({row.share for row in weighed})
    for share, color in zip(shares, COLORS * len(shares), strict=False):
        rows = [row for row in weighed if row.share == share]
        lines = [row for row in rows if row.way.method != "digest"]
        x = [mean(row.bytes_share) for row in lines]
        label = f"{100 * share:g} % of the pages"
        axes.plot(x, [mean(r.recall) for r in lines], "o-", color=color, label=label, markersize=4)
        axes.plot(x, [mean(r.mass_to_exact) for r in lines], "s--", color=color, markersize=3)
        digest = [row for row in rows if row.way.method == "digest"]
        at = [mean(row.bytes_share) for row in digest]
        axes.plot(at, [mean(r.recall) for r in digest], "D", color=color, markersize=6)
        axes.plot(at, [mean(r.mass_to_exact) for r in digest], "D", color=color, fillstyle="none")
    axes.plot([], [], "o-", color=GREY, label="pages: two stages, exact", markersize=4)
    axes.plot([], [], "s--", color=GREY, label="attention mass", markersize=3)
    axes.plot([], [], "D", color=GREY, label="digest alone: pages")
    axes.plot([], [], "D", color=GREY, label="digest alone: mass", fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.08, 1.15)
    numbered(axes.xaxis, "{:.3g}".format)
    axes.set_ylim(0, 1.09)  # some keep more mass than the exact choice, which is of best keys


def replayed(curves: Curves, path: Path) -> None:
    """Hits against the size of the cache: policies, the textbook's dashed, the optimum above."""
    figure, (axes,) = canvas(7.2, 4.6)
    sizes = sorted(curves.optimum)
    x = [100 * size for size in sizes]
    axes.plot(x, [curves.optimum[s] for s in sizes], color=INK, label="optimum (Belady)")
    colors = (BLUE, ORANGE, GREEN, *COLORS)
    for (name, shares), color in zip(curves.policies.items(), colors, strict=False):
        axes.plot(x, [shares[s] for s in sizes], "o-", color=color, markersize=4, label=name)
    for (name, shares), line in zip(curves.textbook.items(), (":", "--", "-.", ":"), strict=False):
        label = f"textbook {name}"
        axes.plot(x, [shares[s] for s in sizes], line, color=GREY, linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_xticks(x, [f"{value:g} %" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    plain(axes, "size of the cache, of the distinct pages", "hits, of the pages asked for")
    figure.savefig(path, dpi=150)


def loaded_latency(curves: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """A PNG of ns over GB/s by kind of traffic; on light and dark grounds alike."""
    figure, (axes,) = canvas(6.4, 3.8)
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE, GREEN), strict=False):
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label=name)
    plain(axes, "GB/s", "ns")
    axes.set_ylim(bottom=0)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.legend(frameon=False, fontsize=8, labelcolor=GREY)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, transparent=True)
    return drawn.getvalue()


# ---- decode ----

Cells = dict[str, dict[str, dict[str, float]]]
"""Cells of a map: by row, column and kind of ratio."""
Lines = dict[str, dict[int, float]]
"""Milliseconds a step: by form and tokens."""
POINT = re.compile(r"(?P<form>\w+)_(?P<of>[^_]+)_(?P<requests>\d+)x(?P<tokens>\d+k?)")


def maps_of(result: Result, ratios: Sequence[str]) -> dict[str, Cells]:
    """RATIO_MAP_ROW_COLUMN: by map."""
    maps: dict[str, Cells] = {}
    for name, value in result.ratios.items():
        for ratio in ratios:
            match name.removeprefix(f"{ratio}_").split("_"):
                case [of, row, column]:
                    cells = maps.setdefault(of, {}).setdefault(row, {})
                    cells.setdefault(column, {})[ratio] = value
    return maps


def columns_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(column for row in cells.values() for column in row))


def lines_of(result: Result, forms: Sequence[str]) -> dict[tuple[str, int], Lines]:
    """Group the metrics named FORM_OF_REQUESTSxTOKENS by what they measure and by requests."""
    found: dict[tuple[str, int], Lines] = {}
    for name, metric in result.metrics.items():
        match = POINT.fullmatch(name)
        if match and match["form"] in forms:
            lines = found.setdefault((match["of"], int(match["requests"])), {})
            lines.setdefault(match["form"], {})[tokens_of(match["tokens"])] = metric.median
    return found


def tokens_of(text: str) -> int:
    """What short() made this of."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def contexts_of(lines: Lines) -> list[int]:
    return sorted({tokens for line in lines.values() for tokens in line})


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
        "blue: the target is met; orange: it is missed",
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
