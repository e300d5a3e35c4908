"""The page of a run of the lab: one HTML file with its pictures in it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes

from cxlkv.bench.lab.report import Findings, Row, cells, failed_checks
from cxlkv.bench.lab.statistics import bootstrap
from cxlkv.bench.lab.texts import TEXTS
from cxlkv.bench.lab.units import METHODS, Arrays
from cxlkv.bench.result import Result
from cxlkv.bench.style import BLUE, GREEN, GREY, INK, ORANGE, canvas, plain
from cxlkv.demo.forms import Form
from cxlkv.machine.state import write_whole

TEMPLATE = Path(__file__).parent / "page.html.j2"
LOOKS = {
    "exact": (BLUE, "-"),
    "two_stage": (GREEN, "-"),
    "digest": (ORANGE, "-"),
    "oracle": (INK, ":"),
    "newest": (GREY, "--"),
    "random": (GREY, ":"),
}
HEADS_SHARE = 0.05
HEADS = (
    ("form", "method, and its share of the pages"),
    ("loss", "over full attention's, mean of the texts"),
    ("below", "upper bound of that, 95 % confidence"),
    ("KL", "divergence from full attention, nats a token"),
    ("agrees", "most likely token is full attention's"),
    ("copies", "loss over full attention's on a passage's second occurrence"),
    ("below", "upper bound of that"),
    ("right", "of the items that full attention solves"),
    ("p", "McNemar's exact test against full attention, on all items"),
    ("mass", "attention kept, mean"),
    ("worst", "the same in the worst tenth of (layer, head)"),
    ("error", "of the output, relative, at the queries of full attention"),
    ("recall", "of the pages that hold the most attention, the forced ones left out"),
    ("scored", "bytes read to choose, of all keys and values"),
    ("fetched", "bytes of the chosen pages"),
)


def write(path: Path, found: Findings, result: Result, units: Mapping[str, Arrays]) -> None:
    """Write the page, whole or not at all, and its first picture beside it."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sources = {text.name: text for text in TEXTS}
    losses = picture(9, 4.2, lambda panels: draw_losses(panels, found))
    page = environment.from_string(TEMPLATE.read_text()).render(
        found=found,
        machine=result.as_dict()["machine"],
        commit=result.as_dict()["commit"],
        failed=failed_checks(result),
        heads=HEADS,
        rows=[(row, cells(row, found)) for row in found.rows],
        texts=[(sources[name], found.loss_full[at]) for at, name in enumerate(found.plan.texts)],
        losses=as_uri(losses),
        heat=as_uri(picture(9, 3.6, lambda panels: draw_heads(panels, found, units), columns=3)),
        by_text=by_text(found),
    )
    write_whole(path, page + "\n")
    path.with_suffix(".png").write_bytes(losses)


def picture(
    width: float, height: float, draw: Callable[[list[Axes]], None], columns: int = 2
) -> bytes:
    """As a PNG file."""
    figure, panels = canvas(width, height, 1, columns)
    draw(panels)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def as_uri(png: bytes) -> str:
    """So that nothing is fetched."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


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


def by_text(found: Findings) -> list[tuple[str, list[str]]]:
    """The loss over full attention's of exact selections, text by text."""
    rows: list[Row] = [row for row in found.rows if row.form.method in ("full", "exact")]
    return [(row.form.name, [f"{100 * value:+.1f} %" for value in row.loss]) for row in rows]
