"""The pool as LMCache's plugin sees it: full, damaged, closed, too small; misses, never errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, object_keys
from cxlkv.adapters.common.metrics import Counting
from cxlkv.adapters.lmcache.chunks import Chunks
from cxlkv.adapters.lmcache.metrics import COUNTS, KINDS
from cxlkv.errors import BusyError
from cxlkv.objects import ABSENT
from cxlkv.prefix import PageKeys

BYTES = 64 << 10


@pytest.fixture
def chunks(tmp_path: Path) -> Iterator[Chunks]:
    path = tmp_path / "a.pool"
    pool = CXLPool.create(path, layout=KVLayout.objects(BYTES), capacity="8MiB", threads=1)
    made = Chunks(pool, Counting(COUNTS, KINDS))
    yield made
    if pool.path is not None and made.counting.failures["pool"] == 0:
        assert pool.stats()["pages_held"] == 0
        assert pool.check(deep=True)["clean"]
    made.close()


def keys(*names: str) -> PageKeys:
    return object_keys(names)


def value(seed: int, size: int = BYTES) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def put(chunks: Chunks, *names: str) -> list[bool]:
    return chunks.put(keys(*names), [[value(len(name))] for name in names])


def test_what_was_put_is_leased_where_it_lies(chunks: Chunks) -> None:
    assert put(chunks, "a", "bb") == [True, True]
    assert put(chunks, "a", "ccc") == [False, True]
    lease = chunks.lease(keys("bb", "none", "a"))
    assert lease is not None
    assert lease.sizes.tolist() == [BYTES, ABSENT, BYTES]
    assert np.array_equal(np.asarray(lease.views[0]), value(2))
    lease.release()
    assert not chunks.counting.failures.total()


def test_present_counts_from_the_first_on(chunks: Chunks) -> None:
    put(chunks, "a", "bb", "dddd")
    assert chunks.present(keys("a", "bb", "ccc", "dddd")) == 2
    assert chunks.present(keys("ccc")) == 0
    assert chunks.present(keys()) == 0


def test_what_is_damaged_is_forgotten_and_can_be_put_again(chunks: Chunks) -> None:
    path = chunks.pool.path
    put(chunks, "a", "bb")
    lease = chunks.lease(keys("a"))
    assert lease is not None
    address = int(lease.addresses[0])
    lease.release()
    with CXLPool.open(str(path), threads=1) as other:
        found = other.lease(keys("a", "bb"))
        assert found.views[1] is not None
        found.release()
        write_at(address, 0)  # by this process, whose look at it is over
    fresh = Chunks(CXLPool.open(str(path), threads=1), Counting(COUNTS, KINDS))
    leased = fresh.lease(keys("a", "bb"))
    assert leased is not None
    assert [view is None for view in leased.views] == [True, False]
    leased.release()
    assert fresh.counting.failures["corrupt"] == 1
    assert put(fresh, "a") == [True]
    fresh.close()


def write_at(address: int, offset: int) -> None:
    """A byte of the pool's memory, as whoever got its address could."""
    one = ctypes.c_ubyte.from_address(address + offset)
    one.value ^= 1


def test_what_changed_after_it_was_published_is_found_by_verify(chunks: Chunks) -> None:
    put(chunks, "a", "bb")
    lease = chunks.lease(keys("a"))
    assert lease is not None
    chunks.verify(keys("a"))
    assert chunks.counting.failures["changed"] == 0
    write_at(int(lease.addresses[0]), 100)
    chunks.verify(keys("a"))
    chunks.verify(keys("bb"))
    assert chunks.counting.failures["changed"] == 1
    assert chunks.present(keys("a")) == 0
    lease.release()


def test_a_reservation_is_published_in_place(chunks: Chunks) -> None:
    reserved = chunks.reserve([BYTES, 100])
    assert reserved is not None
    view = reserved.views[1]
    assert view is not None
    view[:] = value(3, 100).data
    assert chunks.present(keys("a")) == 0
    assert chunks.publish(reserved, 1, keys("a"))
    assert not chunks.publish(reserved, 0, keys("a"))
    reserved.release()
    out = np.zeros(100, np.uint8)
    assert chunks.pool.get_batch_into(keys("a"), [out]).tolist() == [100]
    assert np.array_equal(out, value(3, 100))


def test_a_full_pool_evicts_what_nobody_holds(chunks: Chunks) -> None:
    total = chunks.pool.stats()["pages_total"]
    names = [str(i) for i in range(2 * total)]
    for name in names:
        assert put(chunks, name) == [True]
    assert chunks.present(keys(names[-1])) == 1
    assert chunks.pool.stats()["pages_total"] == total
    assert chunks.counting.failures["full"] == 0


def test_a_pool_full_of_what_is_held_refuses(chunks: Chunks) -> None:
    total = chunks.pool.stats()["pages_total"]
    reserved = chunks.reserve([1] * (total - 2))
    assert reserved is not None
    assert chunks.reserve([1] * 3) is None
    assert put(chunks, "a", "bb", "ccc") == [True, True, False]  # the first ones
    assert chunks.counting.failures["full"] == 1
    lease = chunks.lease(keys("a", "bb"))
    assert put(chunks, "dddd") == [False]
    assert lease is not None
    lease.release()
    assert chunks.reserve([1], evict=False) is None
    assert put(chunks, "dddd") == [True]
    reserved.release()


def test_wrong_sizes_are_refused(chunks: Chunks) -> None:
    assert chunks.reserve([BYTES + 1]) is None
    assert chunks.put(keys("a"), [[value(1, BYTES), b"x"]]) == [False]
    assert chunks.counting.failures["large"] == 2


def test_removed_while_it_is_read(chunks: Chunks) -> None:
    put(chunks, "a")
    lease = chunks.lease(keys("a"))
    assert lease is not None
    assert chunks.forget(keys("a")) == 1
    assert chunks.forget(keys("a")) == 0
    assert put(chunks, "a") == [True]
    assert np.array_equal(np.asarray(lease.views[0]), value(1))
    lease.release()


def test_a_pool_that_is_gone_is_a_miss(chunks: Chunks, caplog: pytest.LogCaptureFixture) -> None:
    put(chunks, "a")
    held = chunks.reserve([1])
    assert held is not None
    with pytest.raises(BusyError):
        chunks.close()
    held.release()
    chunks.close()
    assert chunks.present(keys("a")) == 0
    assert chunks.lease(keys("a")) is None
    assert chunks.reserve([1]) is None
    assert put(chunks, "a", "bb") == [False, False]
    assert chunks.forget(keys("a")) == 0
    chunks.verify(keys("a"))
    assert chunks.counting.failures["pool"] == 6
    assert len(caplog.records) == 1
    assert "closed" in caplog.text
