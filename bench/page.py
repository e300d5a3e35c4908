"""`cxlkv bench report`: runs as one HTML page, a table for each, for light and dark screens."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from cxlkv.bench import pictures
from cxlkv.bench.compare import THRESHOLD_PERCENT, Change, changes, refuse_unlike
from cxlkv.bench.measure import median_interval, warnings_of
from cxlkv.bench.result import ResultRead, lower_is_better, read
from cxlkv.emulation.link import marked
from cxlkv.errors import BadArgumentError
from cxlkv.machine.state import write_whole

TEMPLATE = Path(__file__).resolve().parent / "page.html.j2"
BYTES_MAX = 2 << 20
SUMMED_UP = 3  # figures of a run, on top of the page
LOADED = re.compile(r"(?:.+/)?loaded_(?:(\d)r(\d)w_)?(.+)_ns")
Points = list[tuple[float, float]]
"""Points of a curve: GB/s and ns."""


@dataclass(frozen=True)
class Row:
    """A figure. share: of the largest of its unit, in percent, for its bar."""

    name: str
    median: float
    unit: str
    share: float
    sure: str = ""
    between: str = ""
    samples: int = 1
    emulated: str = ""
    change: Change | None = None


@dataclass
class Run:
    """doubts: how many of its figures are noisy; curves: a PNG of the latency under load, as
    text."""

    title: str
    result: ResultRead
    machine: Mapping[str, str]
    failed: Sequence[str]
    warning: str
    rows: Sequence[Row] = ()
    doubts: int = 0
    unlike: str = ""
    is_compared: bool = False
    curves: str = ""

    @property
    def summary(self) -> list[tuple[str, str]]:
        """The first ratios, or what comes first."""
        first = [row for row in self.rows if row.unit == "ratio"] or list(self.rows)
        return [
            (marked(row.name, row.emulated or None), f"{row.median:.4g} {row.unit}")
            for row in first[:SUMMED_UP]
        ]

    def count(self, verdict: str) -> int:
        return sum(row.change is not None and row.change.verdict == verdict for row in self.rows)


def write(paths: Sequence[Path], out: Path) -> None:
    """Raises BadArgumentError for a file that is no result, where the page cannot go, and for one
    that would be larger than BYTES_MAX."""
    if not out.absolute().parent.is_dir():
        raise BadArgumentError(f"{out}: its folder does not exist")
    results = [(path, read(path)) for path in paths]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    firsts: dict[str, ResultRead] = {}
    runs = []
    for path, result in results:
        runs.append(_run(path, result, firsts.get(result.case)))
        firsts.setdefault(result.case, result)
    page = environment.from_string(TEMPLATE.read_text()).render(runs=runs)
    if len(page.encode()) >= BYTES_MAX:
        raise BadArgumentError(
            f"the page would have {len(page.encode()) >> 10} KiB, more than {BYTES_MAX >> 10}: "
            "give fewer runs to each page"
        )
    write_whole(out, page + "\n")


def _run(path: Path, result: ResultRead, first: ResultRead | None) -> Run:
    failed = [name for name, holds in result.checks.items() if not holds]
    if not result.checks:
        failed = ["nothing was checked"]
    title = f"{result.case} ({path.name})"
    run = Run(title, result, _machine(result), failed, _warning(result))
    if failed:
        return run
    found: dict[str, Change] = {}
    if first is not None:
        try:
            refuse_unlike(first, result)
            found = {one.name: one for one in changes(first, result, THRESHOLD_PERCENT)}
            run.is_compared = bool(found)
        except BadArgumentError as error:
            run.unlike = str(error)
    run.rows = list(_rows(result, found))
    run.doubts = sum(
        bool(warnings_of(metric.samples))
        for metric in result.metrics.values()
        if lower_is_better(metric.unit) is not None
    )
    if curves := _curves(result):
        run.curves = base64.b64encode(pictures.loaded_latency(curves)).decode()
    return run


def _rows(result: ResultRead, found: Mapping[str, Change]) -> Iterator[Row]:
    largest: dict[str, float] = {"ratio": max(map(abs, result.ratios.values()), default=0)}
    for metric in result.metrics.values():
        largest[metric.unit] = max(largest.get(metric.unit, 0), abs(metric.median))

    def share(value: float, unit: str) -> float:
        return round(100 * abs(value) / largest[unit], 1) if largest[unit] else 0.0

    for name, one in result.metrics.items():
        sure = between = ""
        if len(one.samples) > 1:
            sure = "{:.4g} to {:.4g}".format(*median_interval(one.samples))
            between = f"{one.low:.4g} to {one.high:.4g}"
        figures = (one.median, one.unit, share(one.median, one.unit), sure, between)
        label = result.label_of(name) or ""
        yield Row(name, *figures, len(one.samples), label, found.get(name))
    for name, ratio in result.ratios.items():
        label, change = result.label_of(name) or "", found.get(name)
        yield Row(name, ratio, "ratio", share(ratio, "ratio"), emulated=label, change=change)


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
    """What the run was made on, then its commit."""
    rows = {name.replace("_", " "): _plain(v) for name, v in result.machine.items() if v}
    return {**rows, "commit": result.commit}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(one) for one in value) if isinstance(value, list) else str(value)


def _curves(result: ResultRead) -> dict[str, Points]:
    """(GB/s, ns) of the loaded latencies by kind of traffic, each from the idle one in the largest
    region on."""
    found: dict[str, Points] = {}
    for name, metric in result.metrics.items():
        speed = result.metrics.get(f"{name[:-3]}_speed")
        if speed is not None and (loaded := LOADED.fullmatch(name)):
            kind = f"{loaded[1]}:{loaded[2]} reads and writes" if loaded[1] else "reads only"
            found.setdefault(kind, []).append((speed.median, metric.median))
    idle = [m.median for n, m in result.metrics.items() if re.fullmatch(r"(?:.+/)?idle_.+_ns", n)]
    return {kind: sorted([(0.0, idle[-1]), *points]) for kind, points in found.items() if idle}
