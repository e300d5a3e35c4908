"""The pool itself: the calls as the interface gives them, stats, check, describe, close."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, ObjectPool, _core
from cxlkv.errors import BadArgumentError, GeometryError, StaleError, UnsupportedError
from cxlkv.tiers import Tiers
from cxlkv.tiers.local import LocalTier

from .support.damaging import poke
from .support.texts import SMALL, grown, verify


@pytest.fixture
def path(shm_path: Path) -> str:
    return str(shm_path)


def test_the_interface_as_it_is_written(path: str) -> None:
    """Each call of the interface's listing, in its order and form."""
    torch = pytest.importorskip("torch")
    layout = KVLayout(
        layers=32,
        kv_heads=8,
        head_dim=128,
        page_tokens=16,
        dtype="bfloat16",
        shard=(0, 1, 0, 1),
        model_id="...",
    )
    pool = CXLPool.create(path, layout=layout, capacity="128MiB")
    seq = pool.sequence()
    k = v = torch.randn(40, 8, 128, dtype=torch.bfloat16)
    for layer in range(32):
        seq.append(layer, k, v)
    batch = pool.batch([seq, seq.fork()])
    starts = np.array([0, 2, 3], np.int32)
    for layer in range(32):
        batch.append(layer, k[:3], v[:3], starts)
    q = torch.randn(3, 32, 128, dtype=torch.bfloat16)
    budgets = Budget(pages=2, sinks=1, recent=2, union="kv_head", per="query")
    picked = batch.select(layer, q, starts, budgets, method="auto")
    assert picked.pages.dtype == np.int32
    assert picked.pages.shape == picked.scores.shape == (3, 8, 3)
    assert picked.counts.shape == (3, 8)
    assert picked.bytes_scored == (42 + 41) * 8 * 128 * 2
    assert picked.bytes_fetched == (2 * (32 + 10) + (32 + 9)) * 8 * 2 * 128 * 2
    k, v = batch.fetch(layer, picked, out=None)
    assert k.shape == v.shape == (3, 8, 3, 16, 128)
    out, lse = batch.attend(layer, q, starts, picked=None, scale=None, softcap=None)
    assert out.shape == (3, 32, 128)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (3, 32)
    assert lse.dtype == torch.float32
    child = seq.fork()
    seq.truncate(33)
    assert (len(child), len(seq)) == (42, 33)
    keys, tokens_per_key = [b"one", b"two"], 16
    assert pool.publish(seq, keys, tokens_per_key) == 2
    hit = pool.match(keys)
    seq2 = pool.adopt(hit.handle)
    assert hit.tokens == len(seq2) == len(hit.sequence()) == 32
    assert pool.publish_prefix(child, range(42), b"salt") == 0  # pages that have a key already
    assert pool.match_prefix(range(42), b"salt").tokens == 0
    assert len(pool.adopt(seq.handle)) == 33
    seq.release()
    assert pool.stats()["pages_published"] == 2
    assert pool.admin.check()["clean"]
    pool.close()
    with CXLPool.open(path, layout=layout) as again:
        assert again.match(keys).tokens == 32


def test_stats_count_bytes_and_pages(pool: CXLPool) -> None:
    total = pool.stats()["pages_total"]
    assert pool.stats() == {
        **dict.fromkeys(pool.stats(), 0),
        "pages_total": total,
        "pages_free": total,
        "processes": 1,
    }
    seq = grown(pool, range(10))
    row_bytes = 2 * 8 * 4
    stats = pool.stats()
    assert stats["appended_bytes"] == 2 * 2 * 10 * row_bytes
    assert stats["pages_held"] == 2
    assert stats["sequences"] == 1
    q = np.ones((2, 8), np.float32)
    picked = seq.select(0, q, top_k=1)
    assert pool.stats()["scored_bytes"] == picked.bytes_scored == 10 * row_bytes
    seq.fetch(0, picked)
    assert pool.stats()["fetched_bytes"] == 2 * 2 * 3 * 4 * 8 * 4
    seq.attend(0, q, picked)
    assert pool.stats()["attended_bytes"] == picked.bytes_fetched == 2 * 10 * row_bytes
    seq.release()
    assert pool.stats()["pages_free"] == total


def test_check_finds_what_was_changed(path: str) -> None:
    with CXLPool.create(path, layout=SMALL, capacity="4MiB") as pool:
        seq = pool.sequence()
        rows = np.full((8, 2, 8), 3, np.float32)
        for layer in range(2):
            seq.append(layer, rows, rows)
        clean = {"clean": True, "problem_count": 0, "problems": [], "repairs": []}
        assert pool.admin.check(deep=True) == clean
        data = Path(path).read_bytes()
        at = data.index(np.full(8, 3, np.float32).tobytes())
        poke(path, at, b"\xff")
        report = pool.admin.check(deep=True)
        assert not report["clean"]
        assert report["problem_count"] == len(report["problems"]) >= 1
        poke(path, at, data[at : at + 1])
        assert pool.admin.check(deep=True)["clean"]


def test_describe(pool: CXLPool) -> None:
    told = pool.describe()
    assert told["path"] == "anonymous:"
    assert told["layout"] == pool.layout
    assert told["checksum"] is True
    assert len(str(told["identity"])) == 32
    assert told["page_kind"] in ("hugetlb", "thp", "4KiB")
    geometry = told["geometry"]
    assert isinstance(geometry, dict)
    assert geometry["page_count"] == pool.stats()["pages_total"]


def test_what_a_pool_says_of_itself_is_read_from_memory_that_is_held() -> None:
    """Here glibc overwrites what is freed."""
    program = (
        "from cxlkv import CXLPool, KVLayout; from cxlkv.machine.sizes import plan;"
        "layout = KVLayout(layers=2, kv_heads=2, head_dim=32);"
        "pool = CXLPool.create('anonymous:', layout=layout, capacity='8MiB');"
        "told = pool.describe();"
        "assert told['geometry'] == plan(layout, 8 << 20).geometry, told;"
        "assert told['page_kind'] in ('hugetlb', 'thp', '4KiB'), told;"
        "assert 'a5' * 8 not in told['identity'], told"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=165"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_open_again_and_expected_layout(path: str) -> None:
    with CXLPool.create(path, layout=SMALL, capacity="4MiB", checksum=False) as pool:
        assert pool.path == path
        with CXLPool.open(path, layout=SMALL) as other:
            assert other.layout == SMALL
            assert other.checksum is False
            assert pool.stats()["processes"] == 2
        other_layout = KVLayout(layers=2, kv_heads=2, head_dim=9, page_tokens=4, dtype="float32")
        with pytest.raises(GeometryError):
            CXLPool.open(path, layout=other_layout)
        assert pool.stats()["processes"] == 1
    assert os.stat(path).st_mode & 0o777 == 0o600
    CXLPool.remove(path)
    assert not Path(path).exists()


def test_a_handle_crosses_pools_of_one_file(path: str) -> None:
    with (
        CXLPool.create(path, layout=SMALL, capacity="4MiB") as one,
        CXLPool.open(path) as two,
        CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB") as foreign,
    ):
        seq = grown(one, range(6))
        adopted = two.adopt(seq.handle)
        one.publish(seq, [b"k"], 4)
        assert two.match([b"k"]).tokens == 4
        seq.release()
        verify(adopted, range(6))
        with pytest.raises(StaleError, match="the handle is of another pool"):
            foreign.adopt(adopted.handle)
        with pytest.raises(BadArgumentError, match="another pool"):
            foreign.batch([adopted])
        with pytest.raises(BadArgumentError, match="another pool"):
            one.publish(adopted, [b"x"], 4)


def test_threads_are_counted_from_one(pool: CXLPool) -> None:
    for threads in (0, -1):
        with pytest.raises(BadArgumentError):
            pool.set_threads(threads)
    pool.set_threads(7)
    pool.set_threads(1)
    for what, value in ((0, 0), (99, 1)):  # past Python's own checks
        with pytest.raises(BadArgumentError, match=r"outside 1 to 1024|no setting"):
            _core.pool_set(pool._handle, what, value)


COPIES = (pickle.dumps, copy.copy, copy.deepcopy)


@pytest.mark.parametrize("copies", COPIES, ids=lambda call: call.__name__)
def test_what_is_of_this_process_is_neither_pickled_nor_copied(
    pool: CXLPool, copies: Callable[[object], object]
) -> None:
    sequence = grown(pool, range(9))
    keys = [b"a", b"b"]
    pool.publish(sequence, keys, 4)
    refused: dict[str, tuple[object, ...]] = {}
    refused["open"] = (pool, pool.admin, pool.pages, pool.hotness, pool.records)
    with pool.match(keys) as hit, Tiers(pool) as tiers, LocalTier(pool, "1MiB") as local:
        refused["adopt"] = (sequence, hit, pool.batch([sequence]))
        refused["another one"] = (tiers, local)
        for remedy, ones in refused.items():
            for one in ones:
                with pytest.raises(UnsupportedError, match=rf"copied: .*\b{remedy}"):
                    copies(one)


@pytest.mark.parametrize("copies", COPIES, ids=lambda call: call.__name__)
def test_leases_are_neither_pickled_nor_copied(copies: Callable[[object], object]) -> None:
    layout = KVLayout.objects(4096)
    with ObjectPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        pool.put("a", b"bytes")
        with pool.lease(["a"]) as lease, pool.reserve([10]) as reserved:
            for one in (lease, reserved):
                with pytest.raises(UnsupportedError, match="lease"):
                    copies(one)
        with pytest.raises(UnsupportedError, match="open it by its path"):
            copies(pool)
