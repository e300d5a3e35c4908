"""What a store counts, says once, and shows in the registry of its engine's process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from cxlkv import KVLayout, ObjectPool, object_keys
from cxlkv.adapters.common.metrics import Counting, Shown

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

    def bytes_of(pool: ObjectPool, state: str) -> float | None:
        return shown("pool_bytes", rank="0", pool=str(pool.path), state=state)

    for pool in pools:
        counting.inspect(pool)
        assert bytes_of(pool, "free") == pool.stats()["pages_total"] * size
        pool.put_batch(object_keys(["one"]), [np.zeros(size, np.uint8)])
        counting.inspect(pool)
        assert bytes_of(pool, "published_only") == 0, "the next look comes later"
    monkeypatch.setattr("cxlkv.adapters.common.metrics.LOOK_EVERY_S", 0.0)
    counting._next_s.clear()
    with pools[0].lease(object_keys(["one"])):
        counting.inspect(pools[0])
        assert bytes_of(pools[0], "held") == size
    counting.inspect(pools[0])
    assert [bytes_of(pools[0], state) for state in ("held", "published_only")] == [0, size]
    for pool in pools:
        pool.close()
    counting.inspect(pools[0])  # of a closed one nothing is said
