"""The suite of adapters that store whole blocks for an engine: what each must do, whatever happens.

An engine's tests give a Driver; blocks are its own, made from a number, so that they can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool

from .damaging import change_byte

Block = npt.NDArray[np.uint8]


class Driver(Protocol):
    """An adapter in the hands of its engine."""

    room: int  # blocks that the pool has room for, about
    folder: Path  # with the pool's file

    def store(self, blocks: Sequence[int]) -> bool:
        """Give these to the adapter; whether it says that all are stored."""

    def load(self, blocks: Sequence[int]) -> list[bool]:
        """Which came, each byte as it was given; a block that came wrong is an AssertionError."""

    def leading(self, blocks: Sequence[int]) -> int:
        """How many from the first on the adapter says that it has."""

    def bytes_of(self, block: int) -> bytes:
        """Some bytes of a block that are in no other, as they lie in the pool."""

    def again(self) -> None:
        """Another process takes over: the adapter is closed, and made again."""

    def failures(self) -> int:
        """What was counted so far."""

    def close(self) -> None: ...


def check(folder: Path) -> dict[str, int]:
    """Nothing is wrong in the pool, and nothing is held; its counts."""
    (path,) = folder.glob("*.pool")
    with CXLPool.open(path, threads=1) as pool:
        report = pool.check(deep=True)
        assert report["clean"], report["problems"]
        stats = pool.stats()
        assert stats["pages_held"] == 0
        return stats


class StoreSuite:
    """Inherited by an engine's tests, which have a fixture `driver`."""

    def test_what_was_stored_comes_back(self, driver: Driver) -> None:
        assert driver.leading([1, 2, 3]) == 0
        assert driver.load([1]) == [False]
        assert driver.store([1, 2, 3])
        assert driver.leading([1, 2, 3, 4, 5]) == 3
        assert driver.leading([4, 1]) == 0
        assert driver.load([3, 1, 2]) == [True, True, True]
        assert driver.failures() == 0

    def test_storing_again_changes_nothing(self, driver: Driver) -> None:
        assert driver.store([1, 2])
        before = _published(driver)
        assert driver.store([2, 1])
        assert _published(driver) == before
        assert driver.load([1, 2]) == [True, True]

    def test_another_process_finds_it(self, driver: Driver) -> None:
        assert driver.store(range(10))
        driver.again()
        assert driver.leading(range(12)) == 10
        assert all(driver.load(range(10)))

    def test_a_full_pool_makes_room(self, driver: Driver) -> None:
        many = range(driver.room + 64)
        for begin in range(0, len(many), 32):
            assert driver.store(many[begin : begin + 32])
            assert all(driver.load(many[begin : begin + 32])), "what was stored last is there"
        assert driver.failures() == 0
        driver.close()
        assert driver.room * 0.8 < check(driver.folder)["pages_published"] <= driver.room

    def test_damage_is_a_miss_and_is_healed(self, driver: Driver) -> None:
        assert driver.store([1, 2, 3])
        (path,) = driver.folder.glob("*.pool")
        driver.again()
        change_byte(path, path.read_bytes().index(driver.bytes_of(2)))
        assert driver.load([1, 2, 3]) == [True, False, True]
        assert driver.failures() == 1
        assert driver.leading([1, 2, 3]) == 1
        assert driver.store([1, 2, 3])
        assert driver.load([1, 2, 3]) == [True, True, True]

    def test_the_end_leaves_nothing_behind(self, driver: Driver) -> None:
        assert driver.store(range(5))
        assert all(driver.load(range(5)))
        driver.close()
        assert check(driver.folder)["processes"] == 1


def _published(driver: Driver) -> int:
    (path,) = driver.folder.glob("*.pool")
    with CXLPool.open(path, threads=1) as pool:
        return pool.stats()["pages_published"]
