"""Draws what the GPU suite found, from its result files alone, into the folder of a run.

    python -m tests.gpu_suite.results FOLDER

gather: bandwidth against the size of a piece; attend: time against context; decode: the parts of a
step, full fetch and selected side by side.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from cxlkv.bench.result import read
from cxlkv.bench.style import BLUE, COLORS, GREEN, GREY, INK, ORANGE, canvas, numbered, plain

Medians = Mapping[str, float]

METHODS = {
    "kernel": ("kernel copy", BLUE, "o-"),
    "batch": ("cudaMemcpyBatchAsync", ORANGE, "s-"),
    "loop": ("cudaMemcpyAsync in a loop", GREY, "^-"),
    "dispatcher": ("dispatcher", GREEN, "D--"),
}
PARTS = {
    "query": ("queries to the host", GREY),
    "scan": ("scan near the data", ORANGE),
    "fetch": ("fetch", BLUE),
    "attention": ("attention", GREEN),
    "merge": ("merge", INK),
}
"""Of a decode step, in the order in which they come."""


def medians(path: Path) -> Medians:
    """The median of each metric of a result file."""
    return {name: metric.median for name, metric in read(path).metrics.items()}


def context_tokens(name: str) -> int:
    """ "128k": 131072."""
    return int(name[:-1]) * 1024 if name.endswith("k") else int(name)


def gather(found: Medians, path: Path) -> None:
    """A panel for each count of pieces: GB/s against bytes of a piece, and the link's line."""
    points: dict[int, dict[str, dict[int, float]]] = {}
    for name, us in found.items():
        match = re.fullmatch(r"(\w+?)_(\d+)_x(\d+)", name)
        if match and match[1] in METHODS:
            piece, count = int(match[2]), int(match[3])
            points.setdefault(count, {}).setdefault(match[1], {})[piece] = piece * count / us / 1e3
    counts = sorted(points)
    figure, panels = canvas(3.9 * len(counts) + 0.6, 4.4, 1, len(counts))
    figure.suptitle("pieces out of host memory: bandwidth by size", color=INK)
    for axes, count in zip(panels, counts, strict=True):
        for method, (label, color, line) in METHODS.items():
            curve = sorted(points[count].get(method, {}).items())
            x, y = [piece for piece, _ in curve], [speed for _, speed in curve]
            axes.plot(x, y, line, color=color, label=label, markersize=4)
        axes.axhline(found["h2d"] / 1e9, color=INK, linewidth=1, label="one large copy")
        axes.set_xscale("log", base=2)
        numbered(axes.xaxis, size)
        axes.set_ylim(bottom=0)
        plain(axes, "bytes of a piece", title=f"{count} pieces")
    panels[0].set_ylabel("GB/s", color=INK)
    panels[-1].legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.savefig(path, dpi=130)


def attend(found: Medians, path: Path) -> None:
    """A panel for each number of lists: us against context, our shares and torch's best form."""
    lists = sorted({int(m[1]) for name in found if (m := re.search(r"_\d+k?_x(\d+)$", name))})
    figure, panels = canvas(5.2 * len(lists) + 0.6, 4.4, 1, len(lists))
    figure.suptitle("decode attention on the GPU, K and V in its memory", color=INK)
    for axes, count in zip(panels, lists, strict=True):
        curves: dict[str, dict[int, float]] = {}
        for name, us in found.items():
            match = re.fullmatch(rf"(attend_[\d.]+|sdpa_\w+?)_(\d+k?)_x{count}", name)
            if match:
                label = match[1] if match[1].startswith("attend") else "sdpa"
                tokens = context_tokens(match[2])
                best = curves.setdefault(label, {})
                best[tokens] = min(us, best.get(tokens, us))
        shares = sorted((n for n in curves if n != "sdpa"), key=lambda n: float(n[7:]))
        for label, color in zip(shares, COLORS[1:] * len(shares), strict=False):
            draw_time(axes, curves[label], "o-", color, f"{label[7:]} % of the pages")
        draw_time(axes, curves.get("sdpa", {}), "s--", ORANGE, "torch, all tokens")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        numbered(axes.yaxis, "{:g}".format)
        axes.yaxis.set_minor_formatter(NullFormatter())
        numbered(axes.xaxis, size)
        plain(axes, "tokens of context", title=f"{count} sequence{'s' if count > 1 else ''}")
    panels[0].set_ylabel("us", color=INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.savefig(path, dpi=130)


def draw_time(axes: Axes, curve: Mapping[int, float], line: str, color: str, label: str) -> None:
    x = sorted(curve)
    axes.plot(x, [curve[tokens] for tokens in x], line, color=color, label=label, markersize=4)


def decode(found: Medians, path: Path) -> None:
    """Left the time of a layer's step against context, full fetch and selected; right the share of
    each part, where they come one after the other: full fetch hatched, selected plain."""
    names = {m[1] for name in found if (m := re.fullmatch(r"(?:full|selected)_(\d+k?)", name))}
    contexts = sorted(names, key=context_tokens)
    figure, (times, parts) = canvas(11.8, 4.4, 1, 2)
    for how, color, line in (("full", ORANGE, "s--"), ("selected", BLUE, "o-")):
        curve = {context_tokens(c): found.get(f"{how}_{c}", 0.0) / 1e3 for c in contexts}
        curve = {tokens: ms for tokens, ms in curve.items() if ms}
        draw_time(times, curve, line, color, "full fetch" if how == "full" else how)
    times.set_xscale("log", base=2)
    times.set_yscale("log")
    numbered(times.xaxis, size)
    numbered(times.yaxis, "{:g}".format)
    times.legend(frameon=False, fontsize=8, labelcolor=INK)
    for place, context in enumerate(contexts):
        draw_parts(parts, found, f"full_{context}", place - 0.2, "///")
        draw_parts(parts, found, f"selected_{context}", place + 0.2, "")
    for label, color in PARTS.values():
        parts.bar(0, 0, color=color, label=label)
    parts.bar(0, 0, color="white", edgecolor=INK, hatch="///", label="full fetch")
    parts.set_xticks(range(len(contexts)), contexts)
    parts.set_ylim(0, 100)
    handles, labels = parts.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    plain(times, "tokens of context", "ms a layer", "a decode step")
    plain(parts, "tokens of context", "% of the parts' time", "which part dominates where")
    figure.savefig(path, dpi=130)


def draw_parts(axes: Axes, found: Medians, name: str, place: float, hatch: str) -> None:
    """A bar of the parts' shares; they may have run at one time, so they are of their own sum."""
    times = {part: found.get(f"{name}_{part}", 0.0) for part in PARTS}
    whole = sum(times.values())
    bottom = 0.0
    for part, us in times.items() if whole else ():
        share = 100 * us / whole
        color = PARTS[part][1]
        axes.bar(place, share, 0.36, bottom, color=color, hatch=hatch, edgecolor="white")
        bottom += share


def size(value: float) -> str:
    """4096: "4k"."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


DRAW: dict[str, Callable[[Medians, Path], None]] = {
    "gather": gather,
    "attend": attend,
    "decode": decode,
}


def draw_all(folder: Path) -> list[Path]:
    """A picture for each result file that is there and has figures."""
    made = []
    for name, draw in DRAW.items():
        result = folder / f"{name}.json"
        found = medians(result) if result.exists() else {}
        if found:
            draw(found, folder / f"{name}.png")
            made.append(folder / f"{name}.png")
    return made


def main(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        raise SystemExit(__doc__)
    for picture in draw_all(Path(words[0])):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
