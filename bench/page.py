"""`cxlkv bench report`: runs as one HTML page, its pictures in it, for light and dark screens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from cxlkv.bench import mlc, words
from cxlkv.bench.compare import THRESHOLD_PERCENT, Change, changes, refuse_unlike
from cxlkv.bench.measure import median_interval, warnings_of
from cxlkv.bench.mlc import Mlc
from cxlkv.bench.page_pictures import (
    Bars,
    Curves,
    Matrix,
    bars_of,
    curves_of,
    matrix_of,
    ratios_of,
)
from cxlkv.bench.result import MetricRead, ResultRead, lower_is_better, read
from cxlkv.emulation.link import marked
from cxlkv.errors import BadArgumentError
from cxlkv.machine.state import write_whole

TEMPLATE = Path(__file__).resolve().parent / "page.html.j2"
BYTES_MAX = 2 << 20
SAMPLES_DRAWN = (60, 0)  # of a figure; without them where the page would be too large
RATIOS_SUMMED_UP = 3
LATENCY, BANDWIDTH = "latency", "bandwidth"
LOADED = re.compile(r"loaded_(?:(\d)r(\d)w_)?(.+)_ns")
READS_ONLY = "reads only"


@dataclass(frozen=True)
class Part:
    """One case's figures: those of `all` are split by their names."""

    name: str
    about: str
    groups: Sequence[Bars]
    curves: Curves | None
    matrices: Sequence[Matrix]
    metrics: Mapping[str, MetricRead]
    ratios: Mapping[str, float]
    labels: Mapping[str, str | None]


@dataclass(frozen=True)
class Beside:
    """A figure of ours and what MLC says of the same; ratio: ours over theirs."""

    what: str
    ours: str
    theirs: str
    ratio: str


@dataclass
class Run:
    """summary: its most important figures in words, with their numbers. doubts: how many of its
    figures are noisy."""

    title: str
    result: ResultRead
    machine: Mapping[str, str]
    failed: Sequence[str]
    warning: str
    parts: Sequence[Part] = ()
    summary: Sequence[tuple[str, str]] = ()
    doubts: int = 0
    changes: Sequence[Change] = ()
    unlike: str = ""
    beside: Sequence[Beside] = ()

    def count(self, verdict: str) -> int:
        return sum(change.verdict == verdict for change in self.changes)


@dataclass(frozen=True)
class Other:
    """MLC's own tables."""

    mlc: Mlc
    curves: Curves | None
    matrices: Sequence[Matrix]


def write(paths: Sequence[Path], out: Path, mlc_file: Path | None = None) -> None:
    """Raises BadArgumentError for a file that is no result, or no output of MLC, where the page
    cannot go, and for one that would be larger than BYTES_MAX."""
    if not out.absolute().parent.is_dir():
        raise BadArgumentError(f"{out}: its folder does not exist")
    results = [(path, read(path)) for path in paths]
    other = None if mlc_file is None else mlc.read(mlc_file)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text())
    for samples in SAMPLES_DRAWN:
        page = template.render(
            runs=_runs(results, other, samples),
            other=_other(other),
            of_figure=words.of_figure,
            interval=median_interval,
        )
        if len(page.encode()) < BYTES_MAX:
            write_whole(out, page + "\n")
            return
    raise BadArgumentError(
        f"the page would have {len(page.encode()) >> 10} KiB, more than {BYTES_MAX >> 10}: give "
        "fewer runs to each page"
    )


def _runs(results: Sequence[tuple[Path, ResultRead]], other: Mlc | None, samples: int) -> list[Run]:
    firsts: dict[str, ResultRead] = {}
    found = []
    for path, result in results:
        found.append(_run(path, result, firsts.get(result.case), other, samples))
        firsts.setdefault(result.case, result)
    return found


def _run(
    path: Path, result: ResultRead, first: ResultRead | None, other: Mlc | None, samples: int
) -> Run:
    failed = [name for name, holds in result.checks.items() if not holds]
    if not result.checks:
        failed = ["nothing was checked"]
    title = f"{result.case} ({path.name})"
    run = Run(title, result, _machine(result), failed, _warning(result))
    if failed:
        return run
    split = _split(result)
    run.parts = [_part(name, *figures, other, samples) for name, figures in split.items()]
    run.summary = [line for name, figures in split.items() for line in _summary(name, *figures)]
    run.doubts = sum(
        bool(warnings_of(metric.samples))
        for metric in result.metrics.values()
        if lower_is_better(metric.unit) is not None
    )
    run.beside = [] if other is None else _beside(split, other)
    if first is not None:
        try:
            refuse_unlike(first, result)
            found = changes(first, result, THRESHOLD_PERCENT)
            run.changes = [change for change in found if change.factor == change.factor]
        except BadArgumentError as error:
            run.unlike = str(error)
    return run


def _warning(result: ResultRead) -> str:
    """What was said of the machine's load before the run; else by its load at the end, of which the
    run itself may be a part."""
    for note in result.notes:
        if note.startswith("warning: load"):
            return note.removeprefix("warning: ")
    load, cores = result.machine.get("load_average"), result.machine.get("cores_allowed")
    if isinstance(load, float) and isinstance(cores, int) and load > 1.5 * cores:
        return f"load average {load:.1f} on {cores} cores at the end: figures may be noisy"
    return ""


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


Figures = tuple[dict[str, MetricRead], dict[str, float], dict[str, str | None]]
"""Of a part; and what each figure says is emulated."""


def _split(result: ResultRead) -> dict[str, Figures]:
    """By what stands before the slash, in `all`."""
    parts: dict[str, Figures] = {}
    for name in (*result.metrics, *result.ratios):
        part, _, short = name.rpartition("/")
        metrics, ratios, labels = parts.setdefault(part or result.case, ({}, {}, {}))
        if name in result.metrics:
            metrics[short] = result.metrics[name]
        if name in result.ratios:
            ratios[short] = result.ratios[name]
        labels[short] = result.label_of(name)
    return parts


def _part(
    name: str,
    metrics: dict[str, MetricRead],
    ratios: dict[str, float],
    labels: dict[str, str | None],
    other: Mlc | None,
    samples: int,
) -> Part:
    units: dict[str, dict[str, MetricRead]] = {}
    for figure, metric in metrics.items():
        units.setdefault(metric.unit, {})[figure] = metric
    groups = []
    for unit, some in units.items():
        groups += bars_of(name, unit, some, samples, labels)
    if ratios:
        groups.append(ratios_of(name, ratios, labels))
    curves = None
    if name == LATENCY and (ours := _curves(metrics)):
        theirs = {} if other is None else other.curves
        curves = curves_of(ours, {f"MLC, {kind}": points for kind, points in theirs.items()})
    about, matrices = words.of_part(name), _matrices(metrics)
    return Part(name, about, groups, curves, matrices, metrics, ratios, labels)


def _curves(metrics: dict[str, MetricRead]) -> dict[str, list[tuple[float, float]]]:
    """(GB/s, ns) of the loaded latencies by kind of traffic, each from the idle one in the largest
    region on."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, metric in metrics.items():
        speed = metrics.get(f"{name[:-3]}_speed")
        if speed is not None and (loaded := LOADED.fullmatch(name)):
            kind = f"{loaded[1]}:{loaded[2]} reads and writes" if loaded[1] else READS_ONLY
            found.setdefault(kind, []).append((speed.median, metric.median))
    idle = [metric.median for name, metric in metrics.items() if name.startswith("idle_")]
    return {
        kind: sorted([(0.0, of), *points]) for kind, points in found.items() for of in idle[-1:]
    }


def _matrices(metrics: dict[str, MetricRead]) -> list[Matrix]:
    """Of figures of every node's memory from every node's CPUs."""
    cells: dict[str, dict[tuple[int, int], float]] = {}
    for name, metric in metrics.items():
        if found := re.fullmatch(r"(?:read_)?node(\d+)_from_node(\d+)(?:_ns)?", name):
            cells.setdefault(metric.unit, {})[int(found[2]), int(found[1])] = metric.median
    made = [matrix_of("Nodes", unit, some) for unit, some in cells.items()]
    return [one for one in made if one is not None]


def _summary(
    part: str,
    metrics: dict[str, MetricRead],
    ratios: dict[str, float],
    labels: dict[str, str | None],
) -> list[tuple[str, str]]:
    found = []
    for pattern in words.HEADLINES.get(part, ()):
        if fits := [name for name in metrics if re.fullmatch(pattern, name)]:
            metric = metrics[fits[-1]]
            text = marked(words.of_figure(part, fits[-1], metric.unit), labels[fits[-1]])
            found.append((text, f"{metric.median:.4g} {metric.unit}"))
    if not found:
        some = list(ratios.items())[:RATIOS_SUMMED_UP]
        found = [
            (f"{part}: {marked(words.of_figure(part, n, 'ratio'), labels[n])}", f"{r:.3g} times")
            for n, r in some
        ]
    return found


# ---- beside Intel's MLC ----


def _other(found: Mlc | None) -> Other | None:
    if found is None:
        return None
    matrices = [
        matrix_of("Idle latency between nodes", "ns", found.latency),
        matrix_of("Read bandwidth between nodes", "GB/s", found.bandwidth),
    ]
    kept = [one for one in matrices if one is not None]
    return Other(found, curves_of({}, found.curves), kept)


def _beside(split: Mapping[str, Figures], other: Mlc) -> list[Beside]:
    """What both have measured, each by its own loops: loads, and streams of all threads."""
    latency, bandwidth = (split.get(name, ({}, {}, {}))[0] for name in (LATENCY, BANDWIDTH))
    curve = other.curves.get(READS_ONLY)
    full = curve[-1][1] if curve else None
    pairs = (
        ("idle latency", latency, r"idle_.+_ns", other.idle(), "ns"),
        (
            "latency under full load",
            latency,
            r"loaded_full_ns",
            full,
            "ns",
        ),
        ("reads", bandwidth, r"read_\d+t", other.peak.get("ALL Reads"), "GB/s"),
        (
            "two reads to a write",
            bandwidth,
            r"mixed_\d+t",
            other.peak.get("2:1 Reads-Writes"),
            "GB/s",
        ),
    )
    found = []
    for what, metrics, pattern, theirs, unit in pairs:
        fits = [metric.median for name, metric in metrics.items() if re.fullmatch(pattern, name)]
        if fits and theirs:
            ours, other_ones = (f"{value:.4g} {unit}" for value in (fits[-1], theirs))
            found.append(Beside(what, ours, other_ones, f"{fits[-1] / theirs:.3g}"))
    return found
