"""Pictures of `cxlkv bench report`: bars, curves and matrices, as numbers for its template.

They are HTML and SVG in the page itself, in its colours: one drawing for light and dark, and for
every width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxlkv.bench import words
from cxlkv.bench.measure import median_interval
from cxlkv.bench.result import MetricRead
from cxlkv.emulation.link import marked

BARS_MAX = 60  # more of one unit than this would be a page of their own
LOG_FROM = 50  # times the smallest: else small ones would not be seen
WIDTH, HEIGHT = 360, 230  # of a curve; its letters are of a size for narrow screens
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 24, 40


@dataclass(frozen=True)
class Bar:
    """Places are percent of the width. ticks: an SVG path of the samples."""

    name: str
    words: str
    value: str
    begin: float
    end: float
    low: float | None = None
    high: float | None = None
    ticks: str = ""


@dataclass(frozen=True)
class Bars:
    """one: the place of 1, among ratios."""

    title: str
    about: str
    bars: Sequence[Bar]
    one: float | None = None


@dataclass(frozen=True)
class Line:
    name: str
    path: str
    points: Sequence[tuple[float, float]]
    is_other: bool  # another tool's


@dataclass(frozen=True)
class Curves:
    """x_ticks, y_ticks: (place, number)."""

    about: str
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Matrix:
    """rows: of each node of CPUs, for each node of memory a number and how dark it is, in
    percent."""

    title: str
    about: str
    nodes: Sequence[int]
    rows: Mapping[int, Sequence[tuple[str, int]]] = field(default_factory=dict)


def bars_of(
    part: str,
    unit: str,
    metrics: Mapping[str, MetricRead],
    samples: int,
    labels: Mapping[str, str | None],
) -> list[Bars]:
    """Some BARS_MAX in each; samples: how many of a figure are drawn; labels: of what is
    emulated."""
    every = list(metrics.items())
    found = []
    for first in range(0, len(every), BARS_MAX):
        some = dict(every[first : first + BARS_MAX])
        place = _scale_of(some)
        about = words.of_unit(unit) + (" The axis is logarithmic." if place.is_log else "")
        bars = [
            _bar(name, marked(words.of_figure(part, name, unit), labels[name]), one, place, samples)
            for name, one in some.items()
        ]
        found.append(Bars(unit or "counts", about, bars))
    return found


def _ends(metrics: Mapping[str, MetricRead]) -> tuple[float, float]:
    return min(m.low for m in metrics.values()), max(m.high for m in metrics.values())


class _Scale:
    """From the smallest to the largest number of an axis to percent of the width."""

    def __init__(self, low: float, high: float, is_log: bool):
        self.is_log = is_log
        self._low, self._high = (math.log(low), math.log(high)) if is_log else (low, high)

    @property
    def begin(self) -> float:
        """Where bars begin: at 0, or at the left."""
        return 0.0 if self.is_log else self(0.0)

    def __call__(self, value: float) -> float:
        at = math.log(value) if self.is_log else value
        span = self._high - self._low
        share = (at - self._low) / span if span else 1.0
        return round(100 * min(1.0, max(0.0, share)), 2)


def _bar(name: str, text: str, metric: MetricRead, place: _Scale, samples: int) -> Bar:
    ordered = sorted(metric.samples)
    step = -(-len(ordered) // samples) if samples else 0
    shown = ordered[::step] if step and len(ordered) > 1 else []
    low, high = map(place, median_interval(ordered)) if len(ordered) > 1 else (None, None)
    begin, end = sorted((place.begin, place(metric.median)))
    ticks = "".join(f"M{place(one):g} 2V14" for one in shown)
    return Bar(name, text, _number(metric.median), begin, end, low, high, ticks)


def _scale_of(metrics: Mapping[str, MetricRead]) -> _Scale:
    low, high = _ends(metrics)
    medians = [metric.median for metric in metrics.values()]
    if low > 0 and max(medians) > LOG_FROM * min(medians):
        return _Scale(low / 2, high, True)
    return _Scale(min(0.0, low), max(0.0, high), False)


def ratios_of(part: str, ratios: Mapping[str, float], labels: Mapping[str, str | None]) -> Bars:
    """From 1 on, to the left or to the right, on a logarithmic axis; where one is not above 0, on a
    plain one."""
    values = [*ratios.values(), 1.0]
    is_log = min(values) > 0
    margin = max(values) / 20 if not is_log else 1.0
    low, high = min(values), max(values)
    place = _Scale(low / 1.1, high * 1.1, True) if is_log else _Scale(low, high + margin, False)
    one = place(1.0)
    bars = []
    for name, value in ratios.items():
        begin, end = sorted((one, place(value)))
        text = marked(words.of_figure(part, name, "ratio"), labels[name])
        bars.append(Bar(name, text, f"{value:.3g}", begin, end))
    return Bars("ratios", words.of_unit("ratio"), bars, one)


def curves_of(
    ours: Mapping[str, Sequence[tuple[float, float]]],
    others: Mapping[str, Sequence[tuple[float, float]]],
) -> Curves | None:
    """Latency in ns over GB/s, by kind of traffic; None without a point."""
    every = [point for points in (*ours.values(), *others.values()) for point in points]
    if not every:
        return None
    x_most = _nice(max(x for x, _ in every))
    y_most = _nice(max(y for _, y in every))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / x_most
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point[1] / y_most
        return round(x, 1), round(y, 1)

    lines = []
    for is_other, families in ((False, ours), (True, others)):
        for name, points in families.items():
            places = [at(point) for point in points]
            path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
            lines.append(Line(name, path, places, is_other))
    quarters = [share / 4 for share in range(5)]
    return Curves(
        "How long a load takes (ns) while other threads move so many GB/s: the further down and to "
        "the right a curve stays, the better.",
        lines,
        [(at((share * x_most, 0))[0], _number(share * x_most)) for share in quarters],
        [(at((0, share * y_most))[1], _number(share * y_most)) for share in quarters],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _nice(most: float) -> float:
    """The next of 1, 2, 4, 6, 8 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= most * (1 - 1e-9))


def matrix_of(title: str, unit: str, cells: Mapping[tuple[int, int], float]) -> Matrix | None:
    """cells: by node of the CPUs and node of the memory."""
    if not cells:
        return None
    nears, nodes = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    most = max(cells.values()) or 1.0
    rows = {
        near: [
            (f"{cells[near, node]:.4g}", round(45 * cells[near, node] / most))
            if (near, node) in cells
            else ("", 0)
            for node in nodes
        ]
        for near in nears
    }
    about = f"In {unit}, by the node of the CPUs (rows) and of the memory (columns). "
    return Matrix(title, about + words.of_unit(unit).partition(": ")[2].capitalize(), nodes, rows)
