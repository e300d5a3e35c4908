"""What the vLLM connector counts, without vLLM: right after joining ranks and steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.vllm import counting
from cxlkv.adapters.vllm.counting import Counting, Figures, Looking, joined, line
from cxlkv.adapters.vllm.messages import Report, Span
from cxlkv.tiers import Tiers

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype="float32")
NONE: Counter[str] = Counter()


def test_a_request_counts_once_when_it_is_admitted() -> None:
    """Asked for in each step until there is room, preempted, matched again: one request."""
    counted = Counting(block_tokens=32)
    for hit in (64, 96, 96):
        counted.matched("a", 100, hit)
    counted.matched("b", 50, 0)  # is never admitted
    assert counting.is_empty(counted.take(NONE))
    counted.admitted("a", 1000)
    counted.admitted("a", 1000)
    counted.matched("a", 100, 32)
    counted.admitted("a", 1000)
    assert counted.take(NONE)["counts"] == {"asked_tokens": 100, "hit_tokens": 96}
    assert counting.is_empty(counted.take(NONE))
    counted.ended("a")
    counted.ended("b")
    counted.take(NONE)
    counted.admitted("b", 1000)
    assert counting.is_empty(counted.take(NONE))
    counted.matched("a", 10, 0)  # the name comes again
    counted.admitted("a", 1000)
    assert counted.take(NONE)["counts"] == {"asked_tokens": 10}


def test_a_hit_that_another_connector_loads_is_none() -> None:
    counted = Counting(block_tokens=32)
    counted.matched("a", 100, 96)
    counted.admitted("a", 0)
    assert counted.take(NONE)["counts"] == {"asked_tokens": 100}


def test_tokens_of_several_ranks_count_once_and_only_what_all_have() -> None:
    counted = Counting(block_tokens=32)
    counted.matched("a", 200, 96)
    counted.admitted("a", 1000)
    counted.take(NONE)
    whole = Report(loaded=["a"], stored=[Span("a", 3, 6), Span("b", 0, 2)])
    counted.heard([whole, Report(loaded=["a"], stored=[Span("a", 3, 5)])])
    assert counted.take(NONE)["counts"] == {"loaded_tokens": 96, "saved_tokens": 2 * 32}
    counted.heard([whole, Report()])  # the second rank's load has failed
    counted.heard([])
    assert counting.is_empty(counted.take(NONE))
    counted.heard([whole])
    assert counted.take(NONE)["counts"] == {"loaded_tokens": 96, "saved_tokens": 5 * 32}


def test_the_step_that_ends_a_request_reports_after_it_has_ended() -> None:
    counted = Counting(block_tokens=32)
    counted.matched("a", 100, 64)
    counted.admitted("a", 1000)
    counted.ended("a")
    counted.heard([Report(loaded=["a"])])
    assert counted.take(NONE)["counts"]["loaded_tokens"] == 64
    counted.heard([Report(loaded=["a"])])
    assert counting.is_empty(counted.take(NONE))
    counted.matched("a", 10, 0)
    counted.ended("a")
    counted.matched("a", 20, 0)  # the name comes again in the same step
    counted.take(NONE)
    counted.admitted("a", 1000)
    assert counted.take(NONE)["counts"] == {"asked_tokens": 20}


def test_failures_are_told_once() -> None:
    counted, failures = Counting(block_tokens=32), Counter(corrupt=2)
    assert counted.take(failures)["failures"] == {"corrupt": 2}
    assert counting.is_empty(counted.take(failures))
    failures["late"] += 1
    assert counted.take(failures)["failures"] == {"late": 1}


def test_joining_loses_nothing_and_survives_json() -> None:
    one: Figures = {
        "counts": {"asked_tokens": 10, "audited_recall": 0.5},
        "failures": {"corrupt": 1},
        "pools": {"/a": {"free": 1, "held": 2, "published": 3}},
    }
    other: Figures = {
        "counts": {"asked_tokens": 5, "hit_tokens": 4},
        "failures": {"corrupt": 1, "full": 2},
        "pools": {"/a": {"free": 0, "held": 3, "published": 3}, "/b": {"free": 6}},
    }
    both = joined(one, other)
    assert both["counts"] == {"asked_tokens": 15, "hit_tokens": 4, "audited_recall": 0.5}
    assert both["failures"] == {"corrupt": 2, "full": 2}
    assert both["pools"] == {"/a": {"free": 0, "held": 3, "published": 3}, "/b": {"free": 6}}
    assert joined(counting.nothing(), both) == both == joined(both, counting.nothing())
    assert json.loads(json.dumps(both)) == both
    assert one["counts"]["asked_tokens"] == 10  # the parts stay what they were


def append(pool: CXLPool, tokens: int) -> None:
    made = np.random.default_rng(1).standard_normal((tokens, 2, 32)).astype(np.float32)
    sequence = pool.sequence()
    for layer in range(LAYOUT.layers):
        sequence.append(layer, made, made)
    sequence.select(0, made[0], Budget(pages=1))
    sequence.release()


def test_the_pool_is_looked_at_now_and_then_and_no_byte_is_lost() -> None:
    now_s = 0.0
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool:
        pool.admin.audit = 1.0
        append(pool, 64)  # before: an engine that opened it earlier in this process
        looking = Looking(pool, clock=lambda: now_s)
        first = looking.take()
        assert first is not None
        assert not first["counts"]
        path = pool.admin.overview().path
        total = sum(first["pools"][path].values())
        assert first["pools"][path] == {"free": total, "held": 0, "published": 0}
        append(pool, 64)
        assert looking.take() is None  # too early
        now_s = 2.0
        kept = pool.sequence()
        rows = np.ones((16, 2, 32), np.float32)
        kept.append(0, rows, rows)
        found = looking.take()
        assert found is not None
        assert found["counts"]["appended_bytes"] == 2 * 2 * 64 * 2 * 32 * 4 + 2 * 16 * 2 * 32 * 4
        assert found["counts"]["audited_selects"] == 1
        assert found["counts"]["audited_recall"] == pytest.approx(1, abs=1e-6)
        assert 0 < found["counts"]["audited_mass"] <= 1
        assert found["pools"][path]["held"] == 16
        now_s = 4.0
        again = looking.take()
        assert again is not None
        assert not again["counts"]
        now_s = 6.0
        kept.release()
    assert looking.take() is None  # closed: nothing to say, and no error


def test_what_tiers_move_is_counted(tmp_path: Path) -> None:
    with (
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool,
        Tiers(pool, cold=tmp_path / "a.cold", cold_capacity="1MiB") as tiers,
    ):
        looking, path = Looking(pool, clock=lambda: 0.0, tiers=tiers), pool.admin.overview().path
        looking._next_s = 0.0
        first = looking.take()
        assert first is not None
        assert first["pools"][path]["cold"] == 0
        rows = np.ones((32, 2, 32), np.float32)
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, rows, rows)
        pool.publish_prefix(sequence, range(32))
        sequence.release()
        assert tiers.reclaim(pool.stats()["pages_total"]) == 2
        tiers.match_prefix(range(32)).release()
        looking._next_s = 0.0
        found = looking.take()
        assert found is not None
        size = 2 * pool.records.shape[0]
        assert found["counts"]["demoted_bytes"] == found["counts"]["promoted_bytes"] == size
        assert found["pools"][path] == {**found["pools"][path], "published": 32, "cold": 32}
        assert line(found).startswith("pool ")
        tiers.close()
        looking._next_s = 0.0
        assert looking.take() is not None, "tiers that were closed are no fault"


def test_a_slow_look_is_seldom() -> None:
    """A pool with very many pages: a hundredth of the time at most."""
    times = iter([0.0, 0.0, 0.5, 49.0, 51.0, 51.0])
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool:
        looking = Looking(pool, clock=lambda: next(times))
        assert looking.take() is not None  # took half a second
        assert looking.take() is None
        assert looking.take() is not None


def test_the_line_says_what_there_is_to_say() -> None:
    assert line(counting.nothing()) == "0 failures"
    figures: Figures = {
        "counts": {
            "asked_tokens": 41984,
            "hit_tokens": 29809,
            "audited_selects": 32,
            "audited_recall": 31.36,
            "audited_mass": 31.0,
        },
        "failures": {},
        "pools": {
            "/a": {"free": 20368, "held": 400, "published": 12000},
            "/b": {"free": 32768, "held": 0, "published": 0},
        },
    }
    assert line(figures) == (
        "hit rate 71 % of 41,984 prompt tokens, pool 38 % full (12,400 of 32,768 tokens held), "
        "recall 0.98, mass 0.97 (32 audits), 0 failures"
    )
    figures = {"counts": {}, "failures": {"late": 1, "corrupt": 2}, "pools": {"/a": {}}}
    figures["pools"]["/a"] = {"free": 0, "held": 0, "published": 0}
    assert line(figures) == ("pool 100 % full (0 of 0 tokens held), 3 failures (2 corrupt, 1 late)")
    figures = {"counts": {"asked_tokens": 9}, "failures": {"full": 1}, "pools": {}}
    assert line(figures) == "hit rate 0 % of 9 prompt tokens, 1 failure (1 full)"
