"""A pool whose number another machine takes: it is closed, opened anew, and nothing is held."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.adapters.common.reopening import Reopening
from cxlkv.errors import ClosedError, CXLKVError, HostError, MemoryShortError

from ...support.states import states_of
from ...support.waiting import until

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
LEASE_S, NEVER_S = 0.3, 3600.0
EVERY_S = 0.01


class Machines:
    """Hosts of one pool. Whose keeper never beats loses its number to the next that takes it."""

    def __init__(self, path: Path, stack: ExitStack):
        self.path, self._stack = path, stack
        self.made: list[CXLPool] = []
        first = CXLPool.create(
            path,
            layout=LAYOUT,
            capacity="8MiB",
            sharing="software",
            hosts=3,
            host=0,
            lease_s=NEVER_S,
            threads=1,
        )
        self.pool: CXLPool = stack.enter_context(first)

    def open(self, host: int) -> CXLPool:
        pool = CXLPool.open(self.path, host=host, lease_s=LEASE_S, threads=1)
        self.made.append(self._stack.enter_context(pool))
        return pool

    def take_number(self) -> CXLPool:
        """Another machine becomes host 0."""
        for state in states_of(self.path):
            state.unlink()
        return self.open(0)

    def look_after(self, again: Callable[[], CXLPool]) -> Reopening[CXLPool]:
        return self._stack.enter_context(Reopening(self.pool, again, EVERY_S))


@pytest.fixture
def machines(shm_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(shm_path, stack)


def why(pool: CXLPool) -> type[Exception] | None:
    try:
        pool.stats()
    except CXLKVError as error:
        return type(error)
    return None


def test_it_is_opened_as_soon_as_that_works(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile each call of the one that is held raises, and its sequences are given back."""
    caplog.set_level(logging.WARNING, "cxlkv")
    held = machines.pool.sequence()
    may_open = threading.Event()
    attempts = []

    def again() -> CXLPool:
        attempts.append(why(machines.pool))
        if not may_open.is_set():
            raise HostError("two hosts with one number")
        return machines.open(1)

    machines.take_number()
    reopening = machines.look_after(again)
    until(lambda: len(attempts) > 3)
    assert set(attempts) == {ClosedError}
    assert reopening.take() is None
    held.release()
    may_open.set()
    until(lambda: reopening._opened is not None)
    pool = reopening.take()
    assert pool is not None
    assert [host.is_self for host in pool.admin.hosts()] == [False, True, False]
    assert reopening.take() is None
    said = [record.getMessage() for record in caplog.records]
    assert ["another machine has become host 0" in text for text in said] == [True, False, False]
    assert "cannot be opened again yet: two hosts" in said[1]
    assert "is open again, as host 1" in said[2]


def test_nothing_ends_what_looks_after_it(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory, no thread, a fault of ours: the pool is opened again all the same."""
    look, failures = _core.pool_hosts, iter([MemoryError(), RuntimeError("no thread")])
    attempts = iter([MemoryError(), OSError("no descriptor"), ValueError("a fault")])

    def hosts_of(handle: _core.Handle) -> list[dict[str, int]]:
        for error in failures:
            raise error
        return look(handle)

    def again() -> CXLPool:
        for error in attempts:
            raise error
        return machines.open(1)

    def fail() -> None:
        raise KeyError("a fault of what is looked at")

    monkeypatch.setattr(_core, "pool_hosts", hosts_of)
    machines.take_number()
    with Reopening(machines.pool, again, EVERY_S, fail) as reopening:
        until(lambda: reopening._opened is not None)
        assert reopening.take() is machines.made[1]


@pytest.mark.parametrize("error", [MemoryShortError("too little"), OSError(24, "too many files")])
def test_a_use_that_fails_is_tried_again_after_a_look(
    machines: Machines, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level(logging.WARNING, "cxlkv")
    used, failing = list[CXLPool](), [True]

    def go_on(pool: CXLPool) -> None:
        used.append(pool)
        if failing:
            raise error

    def uses(count: int) -> bool:
        assert reopening.use(go_on) in (None, error)
        return len(used) >= count

    machines.take_number()
    reopening = machines.look_after(lambda: machines.open(1))
    until(lambda: uses(3))
    failing.clear()
    until(lambda: uses(4))
    assert used == machines.made[1:] * 4
    reopening._offer()
    assert reopening.take() is None
    said = [one.getMessage() for one in caplog.records]
    assert sum("cannot be used yet" in text and str(error) in text for text in said) == 1


def test_a_use_that_has_failed_is_no_use_of_a_pool_that_is_lost(machines: Machines) -> None:
    """What comes next is the pool that is opened after it."""
    machines.take_number()
    reopening = machines.look_after(lambda: machines.open(len(machines.made)))
    until(lambda: reopening._opened is not None)

    def fail(pool: CXLPool) -> None:
        reopening._pool = machines.made[0]  # as its thread has it, when it is open again
        raise MemoryShortError("too little")

    assert reopening.use(fail) is not None
    reopening._offer()
    assert reopening.take() is None


def test_it_is_lost_again_and_again(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was opened and not taken yet."""
    look, lost = _core.pool_hosts, {id(machines.pool._handle)}

    def hosts_of(handle: _core.Handle) -> list[dict[str, int]]:
        if id(handle) in lost:
            raise HostError("another machine has become host 0")
        return look(handle)

    monkeypatch.setattr(_core, "pool_hosts", hosts_of)
    made, reopening = machines.made, machines.look_after(lambda: machines.open(1))
    for count in (1, 2, 3):
        until(lambda: len(made) == count)  # noqa: B023 it is called before the next round
        lost.add(id(made[-1]._handle))
    until(lambda: len(made) == 4)
    assert [why(pool) for pool in made] == [ClosedError] * 3 + [None]
    until(lambda: reopening._opened is made[3])
    assert reopening.take() is made[3]


def test_what_was_opened_and_not_taken_is_closed(machines: Machines) -> None:
    machines.take_number()
    reopening = machines.look_after(lambda: machines.open(1))
    until(lambda: len(machines.made) == 2)
    reopening.close()
    assert why(machines.made[1]) is ClosedError


def test_what_could_not_be_used_is_closed(machines: Machines) -> None:
    def fail(pool: CXLPool) -> None:
        raise MemoryShortError("too little")

    machines.take_number()
    reopening = Reopening(machines.pool, lambda: machines.open(1), EVERY_S)
    until(lambda: reopening.use(fail) is not None)
    reopening.close()
    assert why(machines.made[1]) is ClosedError


def test_a_pool_of_one_host_has_no_thread() -> None:
    before = threading.active_count()
    with (
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool,
        Reopening(pool, lambda: pool, EVERY_S) as reopening,
    ):
        assert reopening.take() is None
        assert threading.active_count() == before
