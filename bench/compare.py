"""`cxlkv bench compare OLD NEW`: what changed between two runs, and whether that is sure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from cxlkv.bench.measure import SAMPLES_TO_JUDGE, change_interval
from cxlkv.bench.result import MetricRead, ResultRead, lower_is_better
from cxlkv.emulation.link import marked
from cxlkv.errors import BadArgumentError

THRESHOLD_PERCENT = 10.0
WORSE_EXIT = 3
# A difference in these says nothing of the machine.
MOVING = ("load_average",)


@dataclass(frozen=True)
class Change:
    """new / old; low and high, where it lies with 95 % confidence, or None of a single number."""

    name: str
    unit: str
    old: float
    new: float
    factor: float
    low: float | None
    high: float | None
    verdict: str
    """Empty, "better", "worse", "changed" (where neither way is better), or "noise"."""
    emulated: str | None = None

    @property
    def percent(self) -> str:
        return _percent(self.factor)


def refuse_unlike(old: ResultRead, new: ResultRead) -> None:
    """Raises BadArgumentError where a comparison would mean nothing."""
    if old.case != new.case:
        raise BadArgumentError(f"these are of two cases, {old.case} and {new.case}")
    _refuse_unlike_links("run", "one", old.emulated, new.emulated)
    for name in ({*old.metrics} & {*new.metrics}) | ({*old.ratios} & {*new.ratios}):
        _refuse_unlike_links(f"run's {name}", "one's", old.label_of(name), new.label_of(name))
    for name, result in (("old", old), ("new", new)):
        if not result.passed:
            failed = [check for check, holds in result.checks.items() if not holds]
            raise BadArgumentError(
                f"the {name} run's figures mean nothing: "
                + (f"its check {failed[0]} failed" if failed else "it has no checks")
            )


def _refuse_unlike_links(what: str, other: str, old: str | None, new: str | None) -> None:
    if old != new:
        was, is_ = (label or "not emulated" for label in (old, new))
        raise BadArgumentError(
            f"the old {what} is {was}, the new {other} {is_}: compare like with like"
        )


def differences(old: ResultRead, new: ResultRead) -> list[str]:
    """In what the machines differ: warnings, as a new library or kernel is often the question."""
    keys = [key for key in {**old.machine, **new.machine} if key not in MOVING]
    return [
        f"{key}: {old.machine.get(key)} before, {new.machine.get(key)} now"
        for key in keys
        if old.machine.get(key) != new.machine.get(key)
    ]


def is_one_commit(old: ResultRead, new: ResultRead) -> bool:
    """Whether nothing but noise can tell the runs apart: unchanged code, on one machine."""
    is_clean = not new.commit.endswith("-dirty")
    return is_clean and old.commit == new.commit and not differences(old, new)


def changes(old: ResultRead, new: ResultRead, threshold_percent: float) -> list[Change]:
    """Changes of each metric and ratio that both have."""
    found = [
        _of_metric(name, old.metrics[name], metric, threshold_percent)
        for name, metric in new.metrics.items()
        if name in old.metrics
    ]
    for name, ratio in new.ratios.items():
        if name in old.ratios:
            found.append(_of_ratio(name, old.ratios[name], ratio, threshold_percent))
    if is_one_commit(old, new):
        found = [replace(one, verdict=one.verdict and "noise") for one in found]
    return [replace(change, emulated=new.label_of(change.name)) for change in found]


def _of_metric(name: str, old: MetricRead, new: MetricRead, threshold_percent: float) -> Change:
    if old.unit != new.unit:
        raise BadArgumentError(f"{name} was in {old.unit}, now in {new.unit}")
    if min(old.low, new.low) <= 0:  # no factor is to be had of that
        changed = "" if old.median == new.median else "changed"
        return Change(name, new.unit, old.median, new.median, float("nan"), None, None, changed)
    factor, low, high = new.median / old.median, None, None
    sure = False
    if min(len(old.samples), len(new.samples)) >= SAMPLES_TO_JUDGE:
        low, high = change_interval(old.samples, new.samples)
        sure = low > 1 or high < 1
    elif len(old.samples) == len(new.samples) == 1:
        sure = True  # a count, or what was summed up elsewhere: there is nothing but the number
    verdict = _verdict(factor, lower_is_better(new.unit), threshold_percent) if sure else ""
    return Change(name, new.unit, old.median, new.median, factor, low, high, verdict)


def _of_ratio(name: str, old: float, new: float, threshold_percent: float) -> Change:
    """A ratio also changes where only its base does: what got worse is told by the metrics."""
    factor = new / old if old > 0 and new > 0 else float("nan")
    verdict = _verdict(factor, None, threshold_percent)
    return Change(name, "ratio", old, new, factor, None, None, verdict)


def _verdict(factor: float, lower: bool | None, threshold_percent: float) -> str:
    by = threshold_percent / 100
    if not (factor > 1 + by or factor < 1 / (1 + by)):
        return ""
    if lower is None:
        return "changed"
    return "better" if (factor < 1) == lower else "worse"


def table(found: list[Change]) -> Table:
    made = Table(title="old to new")
    for column in ("figure", "old", "new", "unit", "change", "95 % sure", "verdict"):
        made.add_column(
            column,
            justify="left" if column in ("figure", "unit", "verdict") else "right",
            no_wrap=column != "figure",
            overflow="fold",
        )
    labels = {change.emulated for change in found}
    if len(labels) > 1:
        made.add_column("emulated", overflow="fold")
    else:
        made.title = marked("old to new", *labels)
    colors = {"better": "green", "worse": "red", "changed": "yellow", "noise": "dim", "": ""}
    for change in found:
        interval = ""
        if change.low is not None and change.high is not None:
            interval = f"{_percent(change.low)} to {_percent(change.high)}"
        made.add_row(
            Text(change.name),
            f"{change.old:.4g}",
            f"{change.new:.4g}",
            Text(change.unit),
            change.percent,
            interval,
            Text(change.verdict, style=colors[change.verdict]),
            *([Text(change.emulated or "")] if len(labels) > 1 else []),
        )
    return made


def _percent(factor: float) -> str:
    return "" if factor != factor else f"{100 * (factor - 1):+.1f} %"
