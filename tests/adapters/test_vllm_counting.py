"""What the vLLM connector counts, without vLLM: right after joining ranks and steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.common.metrics import HOST_STATES
from cxlkv.adapters.vllm import counting
from cxlkv.adapters.vllm.counting import Counting, Figures, Looking, joined, line
from cxlkv.adapters.vllm.messages import Report, Span
from cxlkv.emulation.link import emulate
from cxlkv.tiers import Tiers
from cxlkv.transport import Server

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
    counted.heard([whole, Report()])  # the second rank is not so far yet
    counted.heard([])
    assert counting.is_empty(counted.take(NONE))
    counted.heard([Report(), Report(loaded=["a"], stored=[Span("a", 5, 6), Span("b", 0, 3)])])
    assert counted.take(NONE)["counts"] == {"loaded_tokens": 96, "saved_tokens": 3 * 32}
    counted.heard([Report(stored=[Span("a", 0, 6)]), Report(stored=[Span("a", 0, 6)])])  # anew
    counted.heard([Report(stored=[Span("a", 0, 6)], tails={"a": 7}), Report()])
    assert counted.take(NONE)["counts"] == {"saved_tokens": 6 * 32}
    counted.heard([Report(), Report(tails={"a": 7})])
    assert counted.take(NONE)["counts"] == {"saved_tokens": 7}


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
        "links": {"cold read": 7},
        "pools": {"/a": {"tokens": {"free": 1, "held": 2, "published": 3}}},
    }
    newest = {"/a": {"tokens": {"free": 0, "held": 3}}, "/b": {"tokens": {"free": 6}}}
    other: Figures = {
        "counts": {"asked_tokens": 5, "hit_tokens": 4},
        "failures": {"corrupt": 1, "full": 2},
        "links": {"cold read": 3, "remote read": 2},
        "pools": newest,
    }
    both = joined(one, other)
    assert both["counts"] == {"asked_tokens": 15, "hit_tokens": 4, "audited_recall": 0.5}
    assert both["failures"] == {"corrupt": 2, "full": 2}
    assert both["links"] == {"cold read": 10, "remote read": 2}
    assert both["pools"] == newest
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
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool, Tiers(pool) as tiers:
        pool.admin.audit = 1.0
        append(pool, 64)  # before: an engine that opened it earlier in this process
        looking = Looking(tiers, clock=lambda: now_s)
        first = looking.take()
        assert first is not None
        assert not first["counts"]
        path = pool.admin.overview().path
        total, size = pool.stats()["pages_total"], pool.records.shape[0]
        assert first["pools"][path] == {
            "tokens": {"free": 16 * total, "held": 0, "published": 0},
            "bytes": {"free": size * total, "held": 0, "published": 0},
            "hosts": {},
        }
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
        assert found["pools"][path]["tokens"]["held"] == 16
        assert found["pools"][path]["bytes"]["held"] == size
        now_s = 4.0
        again = looking.take()
        assert again is not None
        assert not again["counts"]
        now_s = 6.0
        kept.release()
    assert looking.take() is None  # closed: nothing to say, and no error


def seen(looking: Looking) -> Figures:
    looking._next_s = 0.0
    found = looking.take()
    assert found is not None
    return found


def test_what_tiers_move_is_counted(tmp_path: Path) -> None:
    """By two processes' tiers, of which one has the file: each byte of it counts once."""
    with (
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool,
        Tiers(pool, local="1MiB", cold=tmp_path / "a.cold", cold_capacity="1MiB") as tiers,
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as beside,
        Tiers(beside, cold=tmp_path / "a.cold", cold_capacity="1MiB") as asking,
    ):
        looking, other = Looking(tiers, lambda: 0.0), Looking(asking, lambda: 0.0)
        path = pool.admin.overview().path
        first = seen(looking)["pools"][path]
        assert first["tokens"]["cold"] == first["bytes"]["cold"] == first["bytes"]["local"] == 0
        publish(pool, 32)
        assert tiers.reclaim(pool.stats()["pages_total"]) == 2
        tiers.match_prefix(range(32)).release()
        found, stats = seen(looking), tiers.stats()
        size = 2 * pool.records.shape[0]
        assert found["counts"]["demoted_bytes"] == found["counts"]["promoted_bytes"] == size
        moved = {"cold read": stats["cold_bytes_read"], "cold written": stats["cold_bytes_written"]}
        assert found["links"] == moved
        slots = stats["cold_slots_stored"] * stats["cold_slot_bytes"]
        assert min(*moved.values(), slots) >= size
        now = found["pools"][path]
        assert [now[unit]["published"] for unit in ("tokens", "bytes")] == [32, size]
        assert [now[unit]["cold"] for unit in ("tokens", "bytes")] == [32, slots]
        asking.match_prefix(range(32)).release()
        by_other, by_owner = seen(other), seen(looking)
        assert by_other["counts"]["promoted_bytes"] == size
        assert by_other["links"] == {}
        assert by_owner["links"] == {"cold read": moved["cold read"]}
        assert line(found).startswith("pool ")
        tiers.close()
        assert seen(looking)["links"] == {}, "tiers that were closed are no fault"


def publish(pool: CXLPool, tokens: int) -> None:
    rows = np.ones((tokens, 2, 32), np.float32)
    sequence = pool.sequence()
    for layer in range(2):
        sequence.append(layer, rows, rows)
    pool.publish_prefix(sequence, range(tokens))
    sequence.release()


def test_what_comes_over_links_is_counted(tmp_path: Path) -> None:
    """A far pool counts what its link read, an emulated link what was charged to it."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of the tests")
    secret.chmod(0o600)
    with (
        CXLPool.create(tmp_path / "there.pool", layout=LAYOUT, capacity="4MiB") as there,
        Server(there, ("127.0.0.1", 0), secret.read_bytes()) as server,
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool,
        emulate(pool, "astera-a1000", mode="virtual") as link,
    ):
        address = f"tcp://127.0.0.1:{server.address[1]}"
        publish(there, 32)
        with Tiers(pool, remote=address, remote_secret=secret) as tiers:
            looking = Looking(tiers, lambda: 0.0)
            with tiers.match_prefix(range(40)) as hit:
                assert hit.tokens == 32
                hit.sequence().attend(0, np.ones((2, 32), np.float32))
            found, stats = seen(looking), tiers.stats()
            came = 2 * pool.records.shape[0]
            assert stats["remote_bytes"] == came
            assert 0.9 * came < found["links"]["remote read"] == stats["remote_link_bytes"] <= came
            written = link.bytes["append"] + link.bytes["restore"]
            assert found["links"].get("far written", 0) == written
            assert found["links"]["far read"] == link.bytes.total() - written > 0
            assert seen(looking)["links"] == {}


def test_hosts_show_by_state() -> None:
    how = {"layout": LAYOUT, "capacity": "8MiB", "sharing": "software", "hosts": 3}
    with (
        CXLPool.create("anonymous:", host=0, **how) as pool,  # type: ignore[arg-type]
        Tiers(pool) as tiers,
    ):
        (found,) = seen(Looking(tiers, lambda: 0.0))["pools"].values()
        assert found["hosts"] == {**dict.fromkeys(HOST_STATES, 0), "live": 1}


def test_a_slow_look_is_seldom() -> None:
    """A pool with very many pages: a hundredth of the time at most."""
    times = iter([0.0, 0.0, 0.5, 49.0, 51.0, 51.0])
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB") as pool, Tiers(pool) as tiers:
        looking = Looking(tiers, clock=lambda: next(times))
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
        "links": {},
        "pools": {
            "/a": {"tokens": {"free": 20368, "held": 400, "published": 12000}},
            "/b": {"tokens": {"free": 32768, "held": 0, "published": 0}},
        },
    }
    assert line(figures) == (
        "hit rate 71 % of 41,984 prompt tokens, pool 38 % full (12,400 of 32,768 tokens held), "
        "recall 0.98, mass 0.97 (32 audits), 0 failures"
    )
    figures = {**counting.nothing(), "failures": {"late": 1, "corrupt": 2}}
    figures["pools"]["/a"] = {"tokens": {"free": 0, "held": 0, "published": 0}}
    assert line(figures) == ("pool 100 % full (0 of 0 tokens held), 3 failures (2 corrupt, 1 late)")
    figures = {**counting.nothing(), "counts": {"asked_tokens": 9}, "failures": {"full": 1}}
    assert line(figures) == "hit rate 0 % of 9 prompt tokens, 1 failure (1 full)"
