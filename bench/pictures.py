"""Pictures of `cxlkv bench`: bytes against time for ndp, bytes against what is kept for recall,
hits against size for replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from cxlkv.bench.quality import Weighed, mean
from cxlkv.bench.replay.case import Curves
from cxlkv.bench.result import Result
from cxlkv.bench.style import BLUE, COLORS, GREEN, GREY, INK, ORANGE, canvas, numbered, plain

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
