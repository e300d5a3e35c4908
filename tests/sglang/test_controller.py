"""CXLHiCache under SGLang's own cache controller: its threads hash, ask, load and store."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cxlkv import ObjectPool
from cxlkv.adapters.sglang.metrics import KINDS as KINDS_OF_FAILURES
from cxlkv.arrays import Bytes, leading

from ..support.damaging import damage_object
from .hicache import Engine, page_bytes

# isort: split
from prometheus_client import REGISTRY

KINDS = [
    ("mha", "page_first"),
    ("mha", "layer_first"),
    ("mha", "page_first_direct"),
    ("mha", "page_head"),
    ("mla", "page_first"),
    ("mla", "layer_first"),
    ("mla", "page_first_direct"),
    ("dsa", "page_first"),
]


def text(engine: Engine, pages: int, seed: int = 0) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * engine.page_tokens)
    return [int(one) for one in tokens]


def payloads(engine: Engine, pages: int, seed: int = 0) -> dict[str, list[Bytes]]:
    """Pages for each of the engine's host pools."""
    chance = np.random.default_rng(seed)
    return {
        name: [chance.integers(0, 256, page_bytes(host), np.uint8) for _ in range(pages)]
        for name, host in engine.hosts.items()
    }


def same(found: dict[str, list[Bytes]], wanted: dict[str, list[Bytes]], pages: int) -> None:
    assert set(found) == set(wanted)
    for name, some in found.items():
        assert len(some) == pages
        for one, right in zip(some, wanted[name], strict=False):
            assert np.array_equal(one, right), name


def finds(engine: Engine, ids: list[int], pages: dict[str, list[Bytes]]) -> None:
    """All of a text."""
    tokens, found = engine.fetch(ids)
    assert tokens == len(ids)
    same(found, pages, 6)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_restarted_engine_loads_what_was_stored(
    tmp_path: Path, kind: str, layout: str, zero_copy: bool
) -> None:
    first = Engine(f"{tmp_path}/", kind, layout, zero_copy=zero_copy, capacity="64MiB")
    ids, pages = text(first, 6), payloads(first, 6)
    assert first.fetch(ids) == (0, {name: [] for name in first.hosts})
    assert first.save(ids, pages) == len(ids)
    first.close()
    second = Engine(f"{tmp_path}/", kind, layout, zero_copy=zero_copy, capacity="64MiB")
    tokens, found = second.fetch(ids + text(second, 2, seed=1))
    assert tokens == len(ids)
    same(found, pages, 6)
    tokens, found = second.fetch(ids[: 3 * second.page_tokens] + text(second, 2, seed=1))
    assert tokens == 3 * second.page_tokens
    same(found, pages, 3)
    second.close()


@pytest.mark.parametrize("passed", [True, False])
def test_of_long_texts_the_beginnings_stay(folder: str, passed: bool) -> None:
    """Each is stored in two batches; SGLang passes what is before, or has asked for the text."""
    engine = Engine(folder, policy="lru")
    page = payloads(engine, 1)["kv"]
    texts = [text(engine, 160, seed) for seed in range(4)]
    for ids in texts:
        if not passed:
            assert engine.fetch(ids)[0] == 0
        assert engine.save(ids, {"kv": page * 160}, [] if passed else None) == len(ids)
    cache = engine.backend.store.cache()
    there = [engine.backend.store.present("kv", engine.hashes(ids)) for ids in texts]
    assert sum(one.sum() for one in there) > cache.pool.stats()["pages_total"] - 8
    assert all(leading(one) == one.sum() for one in there)
    engine.close()


def test_of_a_damaged_page_the_text_before_it_is_loaded(folder: str) -> None:
    """Its rest is computed, stored again, and right then."""
    engine = Engine(folder)
    ids, pages = text(engine, 6), payloads(engine, 6)
    assert engine.save(ids, pages) == len(ids)
    cache = engine.backend.store.cache()
    with ObjectPool.open(str(cache.pool.path)) as pool:
        damage_object(pool, cache.keys([f"{engine.hashes(ids)[3]}.0"]))
    tokens, found = engine.fetch(ids)
    assert tokens == 3 * engine.page_tokens
    same(found, pages, 3)
    assert engine.backend.counting.failures["corrupt"] == 1
    assert engine.save(ids, pages) == len(ids)
    finds(engine, ids, pages)
    engine.close()


def test_a_full_pool_ends_no_thread(folder: str) -> None:
    engine = Engine(folder)
    ids, pages = text(engine, 6), payloads(engine, 6)
    pool = engine.backend.store.cache().pool
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    assert engine.save(ids, pages) == 0
    assert engine.fetch(ids)[0] == 0
    assert engine.backend.counting.failures["full"] == 6
    pool.pages.free(taken)
    assert engine.save(ids, pages) == len(ids)
    finds(engine, ids, pages)
    engine.close()


def test_a_pool_that_is_gone_ends_no_thread(tmp_path: Path) -> None:
    """Its file was cut short: the memory under it is gone. The next engine has a pool again."""
    first = Engine(f"{tmp_path}/")
    ids, pages = text(first, 6), payloads(first, 6)
    assert first.save(ids, pages) == len(ids)
    path = Path(str(first.backend.store.cache().pool.path))
    os.truncate(path, 4096)
    for _ in range(2):
        tokens, found = first.fetch(ids)
        same(found, pages, tokens // first.page_tokens)
        first.save(ids, pages)
    assert first.backend.counting.failures["pool"] > 0
    first.close()
    path.unlink()
    second = Engine(f"{tmp_path}/")
    assert second.save(ids, pages) == len(ids)
    assert second.fetch(ids)[0] == len(ids)
    second.close()


def test_what_sglang_shows_of_it(folder: str) -> None:
    """Its own histograms get pages and speeds; ours are counters beside them."""
    engine = Engine(folder, model="shown", metrics=True)
    ids = text(engine, 6)
    assert engine.save(ids, payloads(engine, 6)) == len(ids)
    assert engine.fetch(ids)[0] == len(ids)
    found = engine.backend.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([6], [6])
    assert min(found.backup_bandwidth + found.prefetch_bandwidth) > 0
    assert engine.backend.get_stats().backup_pgs == []
    labels = {"model_name": "shown", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    sizes = 6 * page_bytes(engine.host)
    for name, wanted in (
        ("stored_pages_total", 6),
        ("stored_bytes_total", sizes),
        ("loaded_pages_total", 6),
        ("loaded_bytes_total", sizes),
        ("hit_pages_total", 6),
    ):
        assert REGISTRY.get_sample_value(f"sglang:cxlkv_{name}", labels) == wanted, name
    for kind in KINDS_OF_FAILURES:
        shown = {**labels, "kind": kind}
        assert REGISTRY.get_sample_value("sglang:cxlkv_failures_total", shown) == 0
    place = {**labels, "pool": str(engine.backend.store.cache().pool.path)}
    room = {**place, "state": "free"}
    assert (REGISTRY.get_sample_value("sglang:cxlkv_pool_bytes", room) or 0) > 0
    engine.close()
