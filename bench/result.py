"""Result files of benchmarks and demo: written in one shape, and read back, as they may be of
another program, cut off, or tampered with."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cxlkv import _core
from cxlkv.bench.measure import warnings_of
from cxlkv.emulation import link
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine import numa_mode
from cxlkv.machine.state import write_whole
from cxlkv.machine.topology import probe

TIMES = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}
"""How many of them a second has."""
FILE_BYTES_MAX = 64 << 20
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]*$")]
Label = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f]*$")]
Number = Annotated[float, Field(allow_inf_nan=False)]
LIBRARIES = ("numpy", "torch", "transformers", "triton")
HERE = ""
"""The label of a figure that this machine alone made, whatever stands for far memory elsewhere."""
LATE = "late_operations"
"""Share of this process's operations over CXLKV_EMULATE's link so far in which this machine
was the slower one."""


def lower_is_better(unit: str) -> bool | None:
    """True for times, False for rates; None where a unit does not tell."""
    if unit in TIMES or unit.startswith(tuple(f"{time}/" for time in TIMES)):
        return True
    return False if unit.endswith("/s") else None


def is_timed(unit: str) -> bool:
    """True for times and rates: a clock made the figure."""
    return re.split("[ /]", unit)[0] in TIMES or unit.endswith("/s")


def short(tokens: int) -> str:
    """In a metric's name: 131072 is "128k", 96 is "96"."""
    return f"{tokens >> 10}k" if tokens % 1024 == 0 else str(tokens)


def machine() -> dict[str, object]:
    """This machine and the libraries in use, as far as a figure may depend on them."""
    found = probe()
    return {
        "cpu": found.cpu.model,
        "architecture": found.cpu.architecture,
        "cores_allowed": len(found.cpu.cores_allowed),
        "isa": list(found.cpu.isa),
        "kernels": _core.isa(),
        "memory_bytes": found.memory.total_bytes,
        "numa_nodes": len(found.nodes),
        "huge_pages": found.huge_pages.transparent,
        "kernel": found.kernel,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES if name in sys.modules},
        "load_average": os.getloadavg()[0],
        "gpu": gpu(),
    }


def gpu() -> str | None:
    """The first GPU's name, where torch is in use and sees one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


def commit() -> str:
    """What CXLKV_COMMIT says, for a copy of a checkout; else the commit of the checkout that runs,
    "-dirty" if it was changed; else the version."""
    folder = Path(__file__).resolve().parent.parent
    given, version = os.environ.get("CXLKV_COMMIT"), f"cxlkv {_core.version()}"
    if given or not (folder / ".git").exists():
        return given or version
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # no git here, or no commit yet
        return version
    return done.stdout.strip()


@dataclass(frozen=True)
class Metric:
    """Samples of one quantity, as measured; low and high are the smallest and the largest."""

    samples: Sequence[float]
    unit: str

    def __post_init__(self) -> None:
        if not self.samples:
            raise BadArgumentError("a metric needs at least one sample")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def as_dict(self) -> dict[str, object]:
        """Six digits of each sample: no clock gives more."""
        samples = [rounded(s) for s in map(float, self.samples)]
        return {
            "median": statistics.median(samples),
            "low": min(samples),
            "high": max(samples),
            "unit": self.unit,
            "samples": samples,
        }


def rounded(value: float, digits: int = 6) -> float:
    """Counts stay as they are."""
    return value if value.is_integer() else float(f"{value:.{digits}g}")


def emulation(over_links: bool = True) -> str | None:
    """What stands for far memory in this process: a link, or another node (CXLKV_EMULATE)."""
    nodes = numa_mode.from_environment()
    found = [link.labels() if over_links else None, numa_mode.label(nodes) if nodes else None]
    return "; ".join(text for text in found if text) or None


def check_clock(what: str) -> None:
    """Raises UnsupportedError where `what` goes by this machine's clock, over a virtual link."""
    label = emulation()
    if label is not None and link.is_virtual(label):
        raise UnsupportedError(
            f"{what} goes by this machine's clock, and nothing waits for the emulated link ({label}"
            "). Leave out `, virtual`"
        )


class Labelled:
    """A run's figures, and how each was made."""

    emulated: str | None
    links: dict[str, str]

    def label_of(self, name: str) -> str | None:
        """What stood for far memory in a figure, "PROFILE, mode"; None: nothing did."""
        return self.links.get(name, self.emulated) or None

    def labels(self) -> list[str]:
        """Labels of all figures."""
        return sorted({label for label in (self.emulated, *self.links.values()) if label})


@dataclass
class Result(Labelled):
    """One run of one case; what `--json FILE` writes.

    checks: what must hold for the figures to mean anything; when one does not, no ratio is
    written. A ratio's name gives numerator and denominator. emulated: "PROFILE, mode" of the far
    memory that CXLKV_EMULATE or an open pool emulates, or None; links: the same for figures that
    have another. over_links: False where no operation of a pool is timed.
    """

    case: str
    checks: dict[str, bool] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    over_links: InitVar[bool] = True
    emulated: str | None = field(init=False)
    links: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self, over_links: bool) -> None:
        self._over_links = over_links
        self.emulated = emulation(over_links)
        found = link.of_environment() if over_links else None
        self._link = found if found and found.mode == "wait" else None

    @property
    def passed(self) -> bool:
        """Whether every check holds; False when nothing was checked."""
        return bool(self.checks) and all(self.checks.values())

    def measure(
        self, name: str, samples: Sequence[float], unit: str, label: str | None = None
    ) -> Metric:
        """Add a metric; returns it. label: of the link whose time it is, or HERE; None: of what
        stands for far memory now. Raises as check_clock() for a time or a rate without a label."""
        if label is None and is_timed(unit) and self._over_links:
            check_clock(name)
        self.put_label(name, label)
        self.metrics[name] = Metric([float(sample) for sample in samples], unit)
        self._count_late()
        return self.metrics[name]

    def ratio(self, name: str, value: float, label: str | None = None) -> None:
        """Add a ratio, with a label as measure() does."""
        self.put_label(name, label)
        self.ratios[name] = value

    def put_label(self, name: str, label: str | None) -> None:
        if label is None:
            label = emulation(self._over_links) or self.emulated or HERE
        self.links.pop(name, None)
        if label != (self.emulated or HERE):
            self.links[name] = label

    def _count_late(self) -> None:
        """Keeps LATE the last metric, up to date, as soon as anything went over the link."""
        late, count = self._link.counts() if self._link else (0, 0)
        if count:
            self.metrics.pop(LATE, None)
            self.metrics[LATE] = Metric([late / count], "share of operations")

    def late_text(self) -> str:
        """How often this machine was slower than the link that CXLKV_EMULATE names; "" without."""
        if self._link is None:
            return ""
        if LATE not in self.metrics:
            return "no operation of this process was charged to the emulated link"
        share = self.metrics[LATE].median
        return (
            f"this machine was slower than the emulated link in {100 * share:.3g} % of the "
            "operations: these took as long as they do here"
        )

    def times(
        self,
        samples: Mapping[str, Sequence[float]],
        unit: str,
        name: str = "{}",
        label: str | None = None,
    ) -> dict[str, float]:
        """Add seconds as metrics in `unit`, like "us" or "ms a query"; `name` has {} for the key.
        Returns the medians by key."""
        scale = TIMES[unit.replace("/", " ").split()[0]]
        return {
            key: self.measure(name.format(key), [scale * s for s in seconds], unit, label).median
            for key, seconds in samples.items()
        }

    def speeds(
        self,
        samples: Mapping[str, Sequence[float]],
        moved_bytes: Mapping[str, float] | float,
        name: str = "{}",
        unit: str = "GB/s",
    ) -> dict[str, float]:
        """The same, as rates of what is moved in so many seconds: GB/s, MB/s or bytes/s."""
        scale = {"GB/s": 1e9, "MB/s": 1e6, "bytes/s": 1}[unit]
        medians = {}
        for key, seconds in samples.items():
            moved = moved_bytes[key] if isinstance(moved_bytes, Mapping) else moved_bytes
            rates = [moved / s / scale for s in seconds]
            medians[key] = self.measure(name.format(key), rates, unit).median
        return medians

    def as_dict(self) -> dict[str, object]:
        return {
            "case": self.case,
            "machine": machine(),
            "commit": commit(),
            "emulated": self.emulated,
            **({"links": dict(self.links)} if self.links else {}),
            "checks": dict(self.checks),
            "metrics": {name: metric.as_dict() for name, metric in self.metrics.items()},
            "ratios": {n: rounded(float(r)) for n, r in self.ratios.items()} if self.passed else {},
            "notes": list(self.notes),
        }

    def doubts(self) -> list[str]:
        """What makes times and rates doubtful, a line for each: see measure.warnings_of()."""
        return [
            f"{name}: {warning}"
            for name, metric in self.metrics.items()
            if lower_is_better(metric.unit) is not None
            for warning in warnings_of(metric.samples)
        ]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_whole(path, as_text(self.as_dict()))


SAMPLES_KEPT = 41


def thinned(result: ResultRead) -> str:
    """The file without what docs/results has no use for: times and rates have four digits, other
    numbers five, a metric SAMPLES_KEPT samples at most (its quantiles, so that median, low and high
    stay), and what follows from the samples is left out."""
    metrics = {}
    for name, metric in result.metrics.items():
        kept = metric.samples
        if len(kept) > SAMPLES_KEPT:
            kept = np.quantile(kept, np.linspace(0, 1, SAMPLES_KEPT)).tolist()
        digits = 4 if is_timed(metric.unit) else 5
        samples = [int(s) if s.is_integer() else rounded(s, digits) for s in kept]
        metrics[name] = {"unit": metric.unit, "samples": samples}
    whole = result.model_dump(exclude={"metrics"} if result.links else {"metrics", "links"})
    ratios = {name: rounded(ratio, 4) for name, ratio in result.ratios.items()}
    return as_text({**whole, "ratios": ratios, "metrics": metrics}, is_thin=True)


def as_text(result: dict[str, object], is_thin: bool = False) -> str:
    """A result file: a line for each metric, however many samples it has."""
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    space, indent = ("", 0) if is_thin else (" ", 1)
    encoder = json.JSONEncoder(separators=(f",{space}", f":{space}"), allow_nan=False)
    lines = [f"{2 * space}{json.dumps(n)}:{space}{encoder.encode(m)}" for n, m in metrics.items()]
    rest = json.dumps({**result, "metrics": None}, indent=indent, allow_nan=False)
    shown = "{\n" + ",\n".join(lines) + f"\n{space}}}" if lines else "{}"
    return rest.replace('"metrics": null', f'"metrics": {shown}') + "\n"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MetricRead(_Strict):
    """The three sums may be missing: thinned() leaves them out."""

    median: Number = math.nan
    low: Number = math.nan
    high: Number = math.nan
    unit: Annotated[str, Field(max_length=40)]
    samples: Annotated[list[Number], Field(min_length=1)]

    @model_validator(mode="after")
    def _sums_up_its_samples(self) -> MetricRead:
        for name, sum_up in (("median", statistics.median), ("low", min), ("high", max)):
            found, wanted = getattr(self, name), float(sum_up(self.samples))
            if name not in self.model_fields_set:
                object.__setattr__(self, name, wanted)
            elif not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12):
                raise ValueError(f"its {name} is {found:g}, but {wanted:g} of its samples")
        return self


class ResultRead(_Strict, Labelled):
    """What Result.as_dict() has written; docs/reference/benchmarks.md tells what is what."""

    case: Name
    machine: dict[str, object]
    commit: Annotated[str, Field(max_length=200)]
    emulated: Label | None
    links: dict[Name, Label] = {}
    checks: dict[Name, bool]
    metrics: dict[Name, MetricRead]
    ratios: dict[Name, Number]
    notes: list[Annotated[str, Field(max_length=10000)]]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(self.checks.values())

    @model_validator(mode="after")
    def _has_no_ratio_when_a_check_failed(self) -> ResultRead:
        if self.ratios and not self.passed:
            raise ValueError("it has ratios, but not all of its checks hold")
        return self


def read(path: Path) -> ResultRead:
    """Raises BadArgumentError for what is no result file, and says where it is wrong."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadArgumentError(f"{path}: more than {FILE_BYTES_MAX >> 20} MiB, no result file")
        text = path.read_bytes()
    except OSError as error:
        raise BadArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return ResultRead.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise BadArgumentError(
            f"{path}: not a whole, unchanged result file of `cxlkv bench --json`: "
            f"{where + ': ' if where else ''}{first['msg']}"
        ) from error


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        write_whole(path, thinned(read(path)))
