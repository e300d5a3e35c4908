"""Memory that is brought into place ahead of its use: all of it, nothing changed, and stoppable."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import ClosedError
from cxlkv.machine import prefault as prefaulting
from cxlkv.machine.topology import gives_huge_pages, probe

from ..support.waiting import until

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, page_tokens=16, dtype="float32")
SIZE = 48 << 20


def resident(pool: CXLPool) -> int:
    """Bytes of the region that are mapped with memory behind them, in this process."""
    address, size = _core.pool_memory(pool._handle)
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin = int(first.split("-")[0], 16)
            inside = address <= begin < address + size
        elif inside and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture(params=["file", "anonymous"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "pool") if request.param == "file" else "anonymous:"


def test_all_of_it_is_there_then_and_nothing_has_changed(where: str) -> None:
    with CXLPool.create(where, layout=LAYOUT, capacity=SIZE) as pool:
        pool.is_prefaulted = True  # nothing of it comes by itself
        size = _core.pool_memory(pool._handle)[1]
        rows = np.random.default_rng(1).standard_normal((64, 2, 64)).astype(np.float32)
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, rows, -rows)
        before = [np.array(one) for one in sequence.fetch(1)]
        assert resident(pool) < size / 2
        pool.admin.prefault()
        assert resident(pool) >= size
        for one, other in zip(before, sequence.fetch(1), strict=True):
            assert np.array_equal(one, other)
        assert pool.admin.check(deep=True)["clean"]


def test_in_the_background_until_the_pool_is_closed(where: str) -> None:
    pool = CXLPool.create(where, layout=LAYOUT, capacity=SIZE)
    pool.admin.prefault(background=True)
    pool.close()
    with pytest.raises(ClosedError):
        pool.admin.prefault()


def test_what_fails_in_the_background_is_said(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(address: int, size: int) -> None:
        raise OSError("smaps cannot be read")

    caplog.set_level("INFO", "cxlkv")
    monkeypatch.setattr(prefaulting, "mapped", fail)
    with CXLPool.create(where, layout=LAYOUT, capacity=SIZE) as pool:
        background = prefaulting.Background(pool._handle)
        until(lambda: "when it is used first: smaps cannot be read" in caplog.text)
        background.end()


def test_it_can_be_stopped_between_two_steps(tmp_path: Path) -> None:
    with CXLPool.create(tmp_path / "pool", layout=LAYOUT, capacity=SIZE) as pool:
        asked = iter([False, True])
        prefaulting.run(pool._handle, is_over=lambda: next(asked))
        assert prefaulting.STEP_BYTES <= resident(pool) < SIZE


def test_offsets_of_nowhere_and_a_file_that_was_cut(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pool"
    with CXLPool.create(path, layout=LAYOUT, capacity=SIZE) as pool:
        size = _core.pool_memory(pool._handle)[1]
        for offset, many in (
            (size, 1),
            (size - 1, 2**64 - 1),
            (2**64 - 1, 2**64 - 1),
            (0, 2**64 - 1),
        ):
            assert _core.pool_prefault(pool._handle, offset, many, True) == size
        assert _core.pool_prefault(pool._handle, 0, 0, True) == 0
        os.truncate(path, SIZE // 2)
        with pytest.raises(OSError, match="cannot be brought into memory"):
            pool.admin.prefault()


BIG = 160 << 20


def makes_huge_pages() -> bool:
    return gives_huge_pages(probe())


@pytest.mark.skipif(not makes_huge_pages(), reason="this kernel makes no huge pages of a pool")
def test_what_is_used_lies_in_huge_pages_and_what_comes_next() -> None:
    """Also what was used before they were made; of the rest of the pool nothing is there."""
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity=BIG) as pool:
        sequence, rows = pool.sequence(), np.zeros((1024, 2, 64), np.float32)
        for _ in range(20):
            for layer in range(2):
                sequence.append(layer, rows, rows)
        begin, end = prefaulting._used(pool._handle)
        assert begin > 40 << 20
        until(lambda: pool.admin.huge_bytes() >= end + BIG // 10)
        assert pool.admin.huge_bytes() < end + BIG / 6
        assert pool.admin.check(deep=True)["clean"]
        (thread,) = (one for one in threading.enumerate() if one.name == "cxlkv-huge-pages")
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["small", "never", "prefaulted", "unused"])
def test_no_thread_makes_huge_pages_where_they_are_not_wanted(how: str) -> None:
    """Of a pool that has them already, is small, or has no sequence of this process."""
    huge = {"never": "never", "prefaulted": "try"}.get(how)
    capacity = SIZE // 4 if how == "small" else SIZE
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity=capacity, huge=huge) as pool:
        if how != "unused":
            pool.sequence()
        assert "cxlkv-huge-pages" not in {one.name for one in threading.enumerate()}


def test_the_thread_keeps_no_pool_that_nobody_has() -> None:
    pool = CXLPool.create("anonymous:", layout=LAYOUT, capacity=SIZE)
    pool.sequence()
    (thread,) = (one for one in threading.enumerate() if one.name == "cxlkv-huge-pages")
    kept = weakref.ref(pool._handle)
    del pool
    gc.collect()
    until(lambda: kept() is None)
    thread.join(10)
    assert not thread.is_alive()
