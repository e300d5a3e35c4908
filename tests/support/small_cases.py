"""What the tests of benchmark cases share: a small size, and what every result must be."""

from __future__ import annotations

import math

from cxlkv.bench.cases import coherence
from cxlkv.bench.result import Result

COHERING = coherence.Size(
    record_bytes=(4096,),
    table_bytes=(64,),
    memory_bytes=1 << 20,
    sample_bytes=1 << 16,
    rounds=2,
    calls=40,
    call_rounds=1,
    pool_bytes=8 << 20,
    pool_rounds=1,
)


def check_result(result: Result) -> None:
    assert result.passed, result.checks
    ratios = result.as_dict()["ratios"]
    assert isinstance(ratios, dict)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values())
    assert result.metrics
