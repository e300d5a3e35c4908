"""Our figures are where LMCache's own are, with its labels, from the start."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from cxlkv.adapters.common.metrics import STATES
from cxlkv.adapters.lmcache.metrics import COUNTS, KINDS, PREFIX

from .conftest import MakeEngine, MakeStorage
from .engines import CHUNK, OBJECT_BYTES, text
from .objects import got, lent, put


def shown(name: str, **labels: str) -> float:
    """-1: it is not there."""
    mine = {"model_name": "m", "worker_id": "0", "role": "worker", "served_model_name": ""}
    found = REGISTRY.get_sample_value(f"{PREFIX}{name}", {**mine, **labels})
    return -1 if found is None else found


def test_every_counter_is_there_and_counts(make_storage: MakeStorage) -> None:
    before = {name: max(0, shown(f"{name}_total")) for name in COUNTS}
    storage = make_storage()
    assert all(shown(f"{name}_total") == before[name] for name in COUNTS)
    assert all(shown("failures_total", kind=kind) >= 0 for kind in KINDS)
    put(storage, 1, 2)
    got(storage, 1)
    got(storage, 3)
    now = {name: int(shown(f"{name}_total") - before[name]) for name in COUNTS}
    assert now == {
        "asked_objects": 2,
        "hit_objects": 1,
        "read_bytes": OBJECT_BYTES,
        "stored_objects": 2,
        "stored_bytes": 2 * OBJECT_BYTES,
        "copied_objects": 0,
    }
    corrupt = shown("failures_total", kind="corrupt")
    storage.counting.failed("corrupt", count=3)
    assert shown("failures_total", kind="corrupt") == corrupt + 3


def test_the_pool_is_shown_once_a_second(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make_storage()
    put(storage, 1)
    monkeypatch.setattr("cxlkv.adapters.common.metrics.LOOK_EVERY_S", 0.0)
    storage.counting._next_s.clear()
    one = lent(storage, 1)
    size, pages = storage.cache.object_bytes, storage.pool.stats()["pages_total"]
    path = str(storage.pool.path)
    states = {state: shown("pool_bytes", pool=path, state=state) for state in STATES}
    assert states == {"free": (pages - 1) * size, "held": size, "published_only": 0}
    one.ref_count_down()
    got(storage, 9)
    assert shown("pool_bytes", pool=path, state="held") == 0
    assert shown("pool_bytes", pool=path, state="published_only") == size
    storage.close()
    storage.cache.inspect()  # a closed pool is no error


def test_hits_show_on_lmcaches_endpoint(make_engine: MakeEngine) -> None:
    first = make_engine()
    first.store(text(1, 2 * CHUNK))
    assert first.retrieve(text(1, 2 * CHUNK)) == 2 * CHUNK
    page = generate_latest(REGISTRY).decode()
    assert "lmcache:cxlkv_hit_objects_total{" in page
    assert shown("hit_objects_total") >= 2
    assert "lmcache:num_retrieve_requests" in page


def test_a_quota_is_kept_and_shown(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxlkv.adapters.common.metrics.LOOK_EVERY_S", 0.0)
    storage = make_storage(extra_config={"cxlkv.quota": 4 * OBJECT_BYTES})
    quota, path = storage.cache.quota, str(storage.pool.path)
    assert quota is not None
    for seed in range(9):
        put(storage, seed)
    there = [seed for seed in range(9) if got(storage, seed) is not None]
    assert there == [*range(9 - quota.pages, 9)]
    sizes = [quota.pages * storage.cache.object_bytes] * 2
    found = [shown("pool_bytes", pool=path, state=one) for one in ("quota", "quota_used")]
    assert found == sizes
