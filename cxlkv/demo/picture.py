"""The demo's picture: answers and attention kept above, bytes read below, by share of pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from cxlkv.bench.style import (
    BLUE,
    COLORS,
    DOTTED,
    GREY,
    INK,
    ORANGE,
    canvas,
    numbered,
    over_shares,
    plain,
)
from cxlkv.demo.measure import Asked, Row

MIB = 1 << 20


def draw(path: Path, title: str, rows: Sequence[Row], full: Asked, kv_bytes: int) -> None:
    """Write the picture; its format is that of the path's suffix."""
    figure, (above, below) = canvas(8.4, 7.2, 2, shared="x", heights=(3, 2))
    figure.suptitle(title, color=INK, fontsize=13)
    draw_answers(above, rows, full)
    draw_bytes(below, rows, kv_bytes)
    plain(above, ylabel="percent", grid="y")
    plain(below, ylabel="MiB a question", grid="y")
    over_shares(below, [row.share for row in rows], 1.45, "a question")
    figure.savefig(path, dpi=150)


def draw_answers(axes: Axes, rows: Sequence[Row], full: Asked) -> None:
    """Lines of answers right and of attention mass kept, in percent; random pages in grey."""
    shares = [row.share for row in rows]
    axes.axhline(100 * full.right_share, color=INK, linewidth=1, linestyle=DOTTED)
    axes.text(
        shares[0] / 1.38, 100 * full.right_share + 1.5, "full attention", color=INK, fontsize=9
    )
    lines: tuple[tuple[str, list[float], str, str], ...] = (
        ("answers right", [r.selected.right_share for r in rows], BLUE, "o-"),
        ("attention mass kept", [r.mass for r in rows], ORANGE, "s-"),
        ("answers right, random pages", [r.random.right_share for r in rows], GREY, "o-"),
        ("attention mass kept, random pages", [r.random_mass for r in rows], GREY, "s--"),
    )
    for label, values, color, style in lines:
        axes.plot(shares, [100 * v for v in values], style, color=color, label=label, linewidth=2)
    axes.set_ylim(0, 109)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.72), labelcolor=INK)


def draw_bytes(axes: Axes, rows: Sequence[Row], kv_bytes: int) -> None:
    """Bars of bytes scored and fetched for a question, in MiB, beside all keys and values."""
    lefts = [row.share / 1.19 for row in rows]
    middles = [row.share for row in rows]
    rights = [row.share * 1.19 for row in rows]
    scored = [row.selected.bytes_scored / MIB for row in rows]
    fetched = [row.selected.bytes_read / MIB for row in rows]
    widths = [m - left for left, m in zip(lefts, middles, strict=True)]
    axes.bar(lefts, scored, widths, align="edge", color=COLORS[0], label="scored, in place")
    widths = [r - m for m, r in zip(middles, rights, strict=True)]
    axes.bar(middles, fetched, widths, align="edge", color=BLUE, label="fetched")
    for at, value in zip(middles, fetched, strict=True):
        axes.text(at * 1.09, value * 1.15, f"{value:.2g}", ha="center", fontsize=8, color=BLUE)
    axes.axhline(kv_bytes / MIB, color=INK, linewidth=1, linestyle=DOTTED)
    axes.text(
        lefts[0], kv_bytes / MIB * 1.2, f"all keys and values: {kv_bytes / MIB:.3g} MiB",
        color=INK, fontsize=9,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(min(fetched) / 2, kv_bytes / MIB * 3.5)
    numbered(axes.yaxis, "{:g}".format)
    axes.legend(
        frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2, labelcolor=INK
    )
