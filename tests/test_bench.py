"""Each microbenchmark once, small: it runs, its checks hold, and no ratio is missing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from cxlkv.bench.cases import allocating, calling, copying
from cxlkv.bench.report import Result

torch = pytest.importorskip("torch", reason="these benchmarks compare with torch")
from cxlkv.bench.cases import grouping, selecting  # noqa: E402

SMALL: dict[str, Callable[[Result], None]] = {
    "calling": lambda result: calling.run(result, layers=2, counts=(1, 3)),
    "allocating": lambda result: allocating.run(
        result, allocating.Size(layers=2, tokens=128, forks=2, repeat=1, rounds=1)
    ),
    "copying": lambda result: copying.run(result, copying.Size(layers=2, tokens=2048, rounds=1)),
    "selecting": lambda result: selecting.run(
        result, selecting.Size(tokens=16384, layers=1, rounds=1, settle_s=0)
    ),
    "grouping": lambda result: grouping.run(
        result, grouping.Size(prompt=2048, decode=20, heads=8, rounds=1, settle_s=0)
    ),
}


@pytest.mark.parametrize("case", SMALL)
def test_a_case_runs_small(case: str) -> None:
    result = Result(case)
    SMALL[case](result)
    assert result.passed, result.checks
    ratios = result.as_dict()["ratios"]
    assert isinstance(ratios, dict)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values())
    assert result.metrics


@pytest.mark.parametrize(("model", "full_of"), [("gemma3_12b", (8, 48)), ("gpt_oss_20b", (12, 24))])
def test_windows_hold_what_their_layers_see(model: str, full_of: tuple[int, int]) -> None:
    """Layers that see all hold all; the others their window, what a crop takes back, and edges."""
    size = grouping.Size(prompt=4096, decode=40)
    windowed, window, full, every = grouping.MODELS[model]
    result = Result("grouping")
    held = grouping.pages_held(result, model, size, (windowed, window, full, every))
    pages = (size.prompt + size.decode) // 16
    low = full * pages + windowed * (window // 16)
    assert low <= held <= low + windowed * (128 // 16 + 2)
    assert (full, windowed + full) == full_of
    order = grouping.alternating(windowed, full, every)
    assert (order.count(0), order.count(1)) == (windowed, full)
