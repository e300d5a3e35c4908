"""What a store counts, says once, and shows in the registry of its engine's process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from cxlkv import KVLayout, ObjectPool, object_keys
from cxlkv.adapters.common.metrics import Counting, Shown
from cxlkv.tiers import Tiers

COUNTS = {"moved": "Moved objects", "bytes": "Their bytes"}
KINDS = {"full": "no room: give more", "error": "it failed"}


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"test:{name}", labels)


def test_every_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting(COUNTS, KINDS)
    for kind in KINDS:
        counting.failed(kind, "why")
        counting.failed(kind, "a second time", 2)
    assert counting.failures == dict.fromkeys(KINDS, 3)
    assert caplog.messages == [
        "cxlkv: no room: give more: why (said once; counted as full)",
        "cxlkv: it failed: why (said once; counted as error)",
    ]
    counting.add(moved=2)
    assert counting.counts == {"moved": 2, "bytes": 0}


def test_counts_are_shown_by_rank_from_the_start() -> None:
    ranks = [Shown("test:", {"rank": str(rank)}, COUNTS, KINDS) for rank in range(2)]
    assert [shown("moved_total", rank="0"), shown("bytes_total", rank="1")] == [0, 0]
    assert shown("failures_total", rank="0", kind="full") == 0
    ranks[0].add(moved=2, bytes=10)
    ranks[1].failed("full", count=3)
    assert [shown("moved_total", rank="0"), shown("bytes_total", rank="0")] == [2, 10]
    assert shown("moved_total", rank="1") == 0
    assert shown("failures_total", rank="1", kind="full") == 3
    assert [rank.counts["moved"] for rank in ranks] == [2, 0]


def test_pools_are_looked_at_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a store's: in bytes by state."""
    counting, size = Shown("test:", {"rank": "0"}, COUNTS, KINDS), 64 << 10
    layout = KVLayout.objects(size)
    pools = [
        ObjectPool.create(tmp_path / name, layout=layout, capacity="8MiB", threads=1)
        for name in ("a.pool", "b.pool")
    ]
    tiers = [Tiers(pool) for pool in pools]

    def bytes_of(one: Tiers, state: str) -> float | None:
        return shown("pool_bytes", rank="0", pool=str(one.pool.path), state=state)

    for pool, one in zip(pools, tiers, strict=True):
        counting.inspect(one)
        assert bytes_of(one, "free") == pool.stats()["pages_total"] * size
        pool.put_batch(object_keys(["one"]), [np.zeros(size, np.uint8)])
        counting.inspect(one)
        assert bytes_of(one, "published_only") == 0, "the next look comes later"
    monkeypatch.setattr("cxlkv.adapters.common.metrics.LOOK_EVERY_S", 0.0)
    counting._next_s.clear()
    with pools[0].lease(object_keys(["one"])):
        counting.inspect(tiers[0])
        assert bytes_of(tiers[0], "held") == size
    counting.inspect(tiers[0])
    assert [bytes_of(tiers[0], state) for state in ("held", "published_only")] == [0, size]
    for pool, one in zip(pools, tiers, strict=True):
        pool.close()
        one.close()
    counting.inspect(tiers[0])  # of a closed one nothing is said


def test_what_the_file_takes_and_gives_back_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by tiers that are opened anew, as the pool is when it was lost."""
    monkeypatch.setattr("cxlkv.adapters.common.metrics.LOOK_EVERY_S", 0.0)
    counting, size = Shown("cold:", {"rank": "0"}, COUNTS, KINDS), 64 << 10
    layout, keys = KVLayout.objects(size), object_keys(["one", "two"])

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"cold:{name}", {"rank": "0", **labels})

    with ObjectPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as pool:
        pool.put_batch(keys, [np.full(size, one, np.uint8) for one in range(2)])
        read = written = promoted = demoted = 0.0
        for _ in range(2):
            with Tiers(pool, cold=tmp_path / "a.cold", cold_capacity="1MiB") as tiers:
                tiers.reclaim(pool.stats()["pages_total"])
                assert tiers.restore(keys).all()
                counting.inspect(tiers)
                stats = tiers.stats()
            read += stats["cold_bytes_read"]
            written += stats["cold_bytes_written"]
            promoted += stats["promoted_pages"] * pool.records.shape[0]
            demoted += stats["demoted_pages"] * pool.records.shape[0]
            assert value("link_bytes_total", tier="cold", direction="read") == read > 0
            assert value("link_bytes_total", tier="cold", direction="written") == written > 0
            assert value("promoted_bytes_total") == promoted > 0
            assert value("demoted_bytes_total") == demoted > 0
        slots = stats["cold_slots_stored"] * stats["cold_slot_bytes"]
        assert value("pool_bytes", pool=str(pool.path), state="cold") == slots > 0
    assert value("link_bytes_total", tier="remote", direction="read") == 0
