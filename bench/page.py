"""`cxlkv bench report`: runs as one HTML page, its pictures in it, for light and dark screens."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from cxlkv.bench.compare import THRESHOLD_PERCENT, Change, changes, refuse_unlike
from cxlkv.bench.measure import median_interval
from cxlkv.bench.result import MetricRead, ResultRead, read
from cxlkv.errors import BadArgumentError
from cxlkv.machine.state import write_whole

TEMPLATE = Path(__file__).resolve().parent / "page.html.j2"
SAMPLES_DRAWN = 200
BARS_MAX = 60  # more of one unit than this would be a page of their own
LATENCY = "latency"


@dataclass(frozen=True)
class Colors:
    ink: str
    grid: str
    bar: str
    dot: str


LIGHT = Colors(ink="#23272e", grid="#e2e5ea", bar="#5f97cf", dot="#123a66")
DARK = Colors(ink="#e3e6eb", grid="#333a44", bar="#3f77b3", dot="#b9d6f5")


@dataclass(frozen=True)
class Picture:
    """As data URIs, so that nothing is fetched."""

    about: str
    light: str
    dark: str


@dataclass(frozen=True)
class Part:
    """One case's figures: those of `all` are split by their names."""

    name: str
    pictures: Sequence[Picture]
    metrics: Mapping[str, MetricRead]
    ratios: Mapping[str, float]


@dataclass
class Run:
    title: str
    result: ResultRead
    machine: Mapping[str, str]
    failed: Sequence[str]
    parts: Sequence[Part] = ()
    changes: Sequence[Change] = ()
    unlike: str = ""


def write(paths: Sequence[Path], out: Path) -> None:
    """Raises BadArgumentError for a file that is no result, or where the page cannot go."""
    if not out.absolute().parent.is_dir():
        raise BadArgumentError(f"{out}: its folder does not exist")
    firsts: dict[str, ResultRead] = {}
    runs = []
    for path in paths:
        result = read(path)
        runs.append(_run(path, result, firsts.get(result.case)))
        firsts.setdefault(result.case, result)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text()).render(runs=runs, interval=median_interval)
    write_whole(out, page + "\n")


def _run(path: Path, result: ResultRead, first: ResultRead | None) -> Run:
    failed = [name for name, holds in result.checks.items() if not holds]
    if not result.checks:
        failed = ["nothing was checked"]
    run = Run(f"{result.case} ({path.name})", result, _machine(result), failed)
    if failed:
        return run
    run.parts = [_part(name, *figures) for name, figures in _split(result).items()]
    if first is not None:
        try:
            refuse_unlike(first, result)
            run.changes = [
                change
                for change in changes(first, result, THRESHOLD_PERCENT)
                if change.factor == change.factor
            ]
        except BadArgumentError as error:
            run.unlike = str(error)
    return run


def _machine(result: ResultRead) -> dict[str, str]:
    """The lines of a machine that people ask for first; then commit."""
    machine = result.machine
    rows = {name.replace("_", " "): _plain(value) for name, value in machine.items() if value}
    memory = machine.get("memory_bytes")
    if isinstance(memory, int):
        rows["memory"] = f"{memory / (1 << 30):.1f} GiB"
        del rows["memory bytes"]
    return {**rows, "commit": result.commit}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(one) for one in value) if isinstance(value, list) else str(value)


Figures = tuple[dict[str, MetricRead], dict[str, float]]


def _split(result: ResultRead) -> dict[str, Figures]:
    """By what stands before the slash, in `all`."""
    parts: dict[str, Figures] = {}
    for name, metric in result.metrics.items():
        part, _, short = name.rpartition("/")
        parts.setdefault(part or result.case, ({}, {}))[0][short] = metric
    for name, ratio in result.ratios.items():
        part, _, short = name.rpartition("/")
        parts.setdefault(part or result.case, ({}, {}))[1][short] = ratio
    return parts


def _part(name: str, metrics: dict[str, MetricRead], ratios: dict[str, float]) -> Part:
    pictures = []
    curve = _curve(metrics) if name == LATENCY else []
    if curve:
        about = "latency against the load of other threads"
        pictures.append(_picture(about, 3.4, partial(_draw_curve, curve)))
    units: dict[str, dict[str, Sequence[float]]] = {}
    for figure, metric in metrics.items():
        units.setdefault(metric.unit, {})[figure] = metric.samples
    if ratios:
        units["ratio"] = {ratio: [value] for ratio, value in ratios.items()}
    for unit, figures in units.items():
        every = list(figures.items())
        for first in range(0, len(every), BARS_MAX):
            some = dict(every[first : first + BARS_MAX])
            draw = partial(_draw_bars, some, unit)
            pictures.append(_picture(f"{name}, {unit}", 0.7 + 0.27 * len(some), draw))
    return Part(name, pictures, metrics, ratios)


def _curve(metrics: dict[str, MetricRead]) -> list[tuple[float, float]]:
    """(GB/s, ns) of the loaded latencies, and of the idle one in the largest region."""
    found = [
        (metrics[f"{name[:-3]}_speed"].median, metric.median)
        for name, metric in metrics.items()
        if name.startswith("loaded_") and name.endswith("_ns") and f"{name[:-3]}_speed" in metrics
    ]
    idle = [metric.median for name, metric in metrics.items() if name.startswith("idle_")]
    return sorted([*found, (0.0, idle[-1])]) if found and idle else []


def _picture(about: str, height: float, draw: Callable[[Axes, Colors], None]) -> Picture:
    drawn = []
    for colors in (LIGHT, DARK):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        FigureCanvasSVG(figure)  # draws without a display
        axes = figure.subplots()
        figure.patch.set_alpha(0)  # the page's own ground, light or dark, is behind
        axes.patch.set_alpha(0)
        draw(axes, colors)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(colors.grid)
        axes.tick_params(colors=colors.ink, labelsize=8.5, length=0)
        drawn.append(_as_uri(figure))
    return Picture(about, *drawn)


def _draw_curve(curve: list[tuple[float, float]], axes: Axes, colors: Colors) -> None:
    x, y = zip(*curve, strict=True)
    axes.plot(x, y, "o-", color=colors.bar)
    axes.set_ylim(0, 1.15 * max(y))
    axes.set_xlabel("GB/s that other threads read meanwhile", color=colors.ink)
    axes.set_ylabel("ns a load", color=colors.ink)
    axes.grid(color=colors.grid)


def _draw_bars(bars: Mapping[str, Sequence[float]], unit: str, axes: Axes, colors: Colors) -> None:
    """From the top down; on a logarithmic axis where small ones would not be seen."""
    medians = []
    for place, samples in enumerate(bars.values()):
        ordered = sorted(samples)
        middle = ordered[len(ordered) // 2]
        medians.append(middle)
        axes.barh(place, middle, height=0.62, color=colors.bar)
        some = ordered[:: -(-len(ordered) // SAMPLES_DRAWN)]
        if len(some) > 1:
            axes.plot(some, [place] * len(some), ".", color=colors.dot, markersize=3, alpha=0.6)
            low, high = median_interval(ordered)
            axes.plot([low, high], [place, place], color=colors.dot, linewidth=1.2)
        axes.annotate(
            f"{middle:.3g}",
            (max(middle, ordered[-1]), place),
            (5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
            color=colors.ink,
        )
    axes.set_yticks(range(len(bars)), [_shown(name) for name in bars], color=colors.ink)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.12)
    if min(medians) > 0 and max(medians) > 50 * min(medians):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xlabel(_shown(unit), color=colors.ink, fontsize=9)
    axes.grid(color=colors.grid, axis="x")


def _shown(name: str) -> str:
    """Matplotlib takes what is between dollars for a formula."""
    return name.replace("$", r"\$")


def _as_uri(figure: Figure) -> str:
    file = io.BytesIO()
    # The same file each time: no date in it, and ids that are not drawn by chance.
    with matplotlib.rc_context({"svg.hashsalt": "cxlkv", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
