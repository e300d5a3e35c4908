"""The pictures of a run of the lab: what pages cost, and the attention that they keep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from cxlkv.bench.lab.report import Findings, Row
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.lab.units import METHODS, Arrays
from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, plain
from cxlkv.demo.forms import Form

LOOKS = {
    "exact": (BLUE, "-"),
    "two_stage": (GREEN, "-"),
    "digest": (ORANGE, "-"),
    "oracle": (INK, ":"),
    "newest": (GREY, "--"),
    "random": (GREY, ":"),
}
HEADS_SHARE = 0.05


def draw(folder: Path, found: Findings, units: Mapping[str, Arrays]) -> None:
    """lab.png and lab-heads.png."""
    figure, panels = canvas(9, 4.2, 1, 2)
    draw_losses(panels, found)
    figure.savefig(folder / "lab.png", dpi=130)
    figure, panels = canvas(9, 3.6, 1, 3)
    draw_heads(panels, found, units)
    figure.savefig(folder / "lab-heads.png", dpi=130)


def draw_losses(panels: list[Axes], found: Findings) -> None:
    """Loss and copies over full attention's, with bounds, by the pages read."""
    for axes, figure, title in (
        (panels[0], "loss", "loss over full attention's, %"),
        (panels[1], "copy", "copies: loss over full attention's, %"),
    ):
        ticks: set[float] = set()
        for method in dict.fromkeys((*METHODS, *(row.form.method for row in found.rows[1:]))):
            rows = [row for row in plain_rows(found) if row.form.method == method]
            rows.sort(key=lambda row: row.form.share)
            if not rows:
                continue
            color, line = LOOKS.get(method, (f"C{len(axes.lines) % 10}", "--"))
            bounds = [bootstrap(getattr(row, figure)) for row in rows]
            shares = [100 * row.form.share for row in rows]
            ticks |= set(shares)
            axes.plot(
                shares, [100 * b.mean for b in bounds], line, color=color, marker="o",
                markersize=3, label=method,
            )  # fmt: skip
            if method in ("exact", "two_stage", "digest") and len(found.plan.texts) > 1:
                low, high = ([100 * b[i] for b in bounds] for i in (1, 2))
                axes.fill_between(shares, low, high, color=color, alpha=0.12, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(sorted(ticks), [f"{share:g}" for share in sorted(ticks)])
        axes.minorticks_off()
        plain(axes, "pages, % of all", title=title)
        axes.set_yscale("symlog", linthresh=1)
        axes.axhline(0, color=INK, linewidth=0.8)
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_heads(panels: list[Axes], found: Findings, units: Mapping[str, Arrays]) -> None:
    """The attention kept, layer by head, for three methods with as few pages as are shown."""
    texts = [units[f"text-{name}"] for name in found.plan.texts]
    for axes, method in zip(panels, ("exact", "digest", "oracle"), strict=True):
        forms = [
            (at, row.form)
            for at, row in enumerate(found.rows)
            if row.form.method == method and is_plain(row.form)
        ]
        if not forms:
            axes.set_axis_off()
            continue
        at, form = min(forms, key=lambda one: abs(one[1].share - HEADS_SHARE))
        mass = np.concatenate([unit["mass"][:, at] for unit in texts]).mean(axis=0)
        axes.imshow(mass, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        plain(axes, "head", title=f"{form.name}: {mass.mean():.2f}")
        axes.grid(visible=False)
    windows = texts[0].get("windows", np.zeros(0)).any()
    panels[0].set_ylabel("layer without a window" if windows else "layer", color=INK)
    shown = [image for axes in panels for image in axes.images]
    if shown:
        panels[0].figure.colorbar(shown[-1], ax=panels[-1], label="attention kept")


def plain_rows(found: Findings) -> list[Row]:
    return [row for row in found.rows if is_plain(row.form)]


def is_plain(form: Form) -> bool:
    """All its layers have the same budget, and each step looks at all pages."""
    return not form.first_layers and form.refresh == 1
