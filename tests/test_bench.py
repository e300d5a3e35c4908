"""Each microbenchmark once, small: it runs, its checks hold, and no ratio is missing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from cxlkv import _core, errors
from cxlkv.bench.cases import allocating, calling, cohering, copying
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
    "portable": lambda result: _portable(result),
    "grouping": lambda result: grouping.run(
        result, grouping.Size(prompt=2048, decode=20, heads=8, rounds=1, settle_s=0)
    ),
    "coherence": lambda result: cohering.run(
        result,
        cohering.Size(
            record_bytes=(4096,),
            table_bytes=(64,),
            memory_bytes=1 << 20,
            sample_bytes=1 << 16,
            rounds=2,
            calls=40,
            call_rounds=1,
            pool_bytes=8 << 20,
            pool_rounds=1,
        ),
    ),
}


def _portable(result: Result) -> None:
    pytest.importorskip("numba", reason="numba is not installed: pip install 'cxlkv[numba]'")
    from cxlkv.bench.cases import portable

    portable.run(result, selecting.Size(tokens=16384, layers=1, rounds=1, settle_s=0))


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


def test_the_cost_of_coherence_is_of_calls_that_do_what_they_say() -> None:
    """What is published is in the memory; each operation's name is the core's number for it."""
    memory, source = cohering.at_page(64 << 10), cohering.at_page(4096)
    target = cohering.at_page(4096)
    memory[:] = 0
    source[:] = 7
    with pytest.raises(errors.StaleError, match="record 0 is not there"):
        _core.coherence_time_s("acquire", memory, target, 0, 1)
    for operation in ("store", "stream", "write_back", "invalidate", "evict"):
        before = int(memory.sum())
        assert _core.coherence_time_s(operation, memory, source, 3, 1) > 0
        assert int(memory.sum()) == before + 7 * 4096
        memory[:] = 0
    for operation in ("read", "read_invalidated", "read_evicted"):
        _core.coherence_time_s("store", memory, source, 0, 1)
        target[:] = 0
        _core.coherence_time_s(operation, memory, target, 0, 1)
        assert bool((target == 7).all())
    _core.coherence_time_s("publish", memory, source, 0, 15, checksum=True)
    for operation in ("acquire", "acquire_unpinned"):
        target[:] = 0
        _core.coherence_time_s(operation, memory, target, 0, 7, batch=2, checksum=True)
        assert bool((target == 7).all())
    assert _core.coherence_time_s("unpin", memory, target, 0, 7, batch=2) > 0
    memory[15 * 64 + 14 * (4096 + 64) + 64 + 100] ^= 1  # of the last payload
    with pytest.raises(errors.StaleError, match="record 14 is not there"):
        _core.coherence_time_s("acquire", memory, target, 14, 1, checksum=True)
    with pytest.raises(errors.BadArgumentError):
        _core.coherence_time_s("publish", memory, source[:100], 0, 1)
    with pytest.raises(errors.BadArgumentError):
        _core.coherence_calls_ns("fast", 4097, 1)
    with pytest.raises(errors.BadArgumentError):
        _core.coherence_visible_ns("fast", 100, 1)
