"""Reading result files back: they may be of another program, cut off, or tampered with."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cxlkv.errors import BadArgumentError

FILE_BYTES_MAX = 64 << 20
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]*$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MetricRead(_Strict):
    median: Number
    low: Number
    high: Number
    unit: Annotated[str, Field(max_length=40)]
    samples: Annotated[list[Number], Field(min_length=1)]

    @model_validator(mode="after")
    def _sums_up_its_samples(self) -> MetricRead:
        wanted = (statistics.median(self.samples), min(self.samples), max(self.samples))
        for name, is_, was in zip(
            ("median", "low", "high"), (self.median, self.low, self.high), wanted, strict=True
        ):
            if not math.isclose(is_, was, rel_tol=1e-9, abs_tol=1e-12):
                raise ValueError(f"its {name} is {is_:g}, but {was:g} of its samples")
        return self


class ResultRead(_Strict):
    """What Result.as_dict() has written; docs/benchmarks.md tells what is what."""

    case: Name
    machine: dict[str, object]
    commit: Annotated[str, Field(max_length=200)]
    emulated: Annotated[str, Field(max_length=200)] | None
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
