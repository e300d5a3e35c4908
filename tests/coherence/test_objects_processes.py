"""Processes on one pool of objects, killed while they read, hold, reserve and put: nothing is ever
read wrong, and nothing of the dead stays behind.

The processes are real ones (tests/support/object_worker.py); they check all that they read. No
sleeps: the test reads what they report.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cxlkv import KVLayout, ObjectPool
from cxlkv.errors import PoolFullError
from cxlkv.objects import ABSENT, Reserved

from ..conftest import audit
from ..support.lengths import nightly
from ..support.object_worker import MOMENTS, NAMES, SIZE, named, verify
from ..support.processes import Child
from ..support.waiting import until


class Kind(NamedTuple):
    """A pool, and the hosts of those who work on and of those who are killed."""

    checksum: bool
    threads: int
    steady: tuple[int, ...] = (0, 0, 0)
    victims: int = 0
    slot: int | None = None

    @property
    def hosts(self) -> int:
        return max(*self.steady, self.victims) + 1


KINDS = {
    "checksum": Kind(True, 1),
    "plain, 2 threads": Kind(False, 2),
    "2 hosts": Kind(True, 1, (0, 1, 0), 1),
    "2 hosts, one dies": Kind(True, 2, (0, 0, 0), 1),
    "slots": Kind(True, 2, slot=16 << 10),
    "slots, 2 hosts": Kind(True, 1, (0, 1, 0), 1, 16 << 10),
}


class Process(Child):
    """One of object_worker.py's commands, and what it says."""

    def __init__(self, command: str, path: str, *numbers: int, host: int = 0) -> None:
        words = ("-m", "tests.support.object_worker", command, path, *numbers)
        super().__init__(*words, CXLKV_HOST=str(host))

    def seen_so_far(self) -> dict[str, int]:
        self.popen.send_signal(signal.SIGUSR1)
        said: dict[str, int] = json.loads(self.hear())["seen"]
        return said


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        with process:
            pass


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def path(kind: Kind, shm_path: Path) -> str:
    """A pool of some 30 large objects, fewer than there are names: full now and then. With hosts
    each has some extents, so there it has 9 extents of 16 objects.
    """
    ObjectPool.create(
        shm_path,
        layout=KVLayout.objects(SIZE, slot=kind.slot),
        capacity="6MiB" if kind.slot else "32MiB" if kind.hosts == 1 else "160MiB",
        checksum=kind.checksum,
        sharing="software" if kind.hosts > 1 else "host",
        hosts=kind.hosts if kind.hosts > 1 else None,
        host=0 if kind.hosts > 1 else None,
    ).close()
    return str(shm_path)


def opened(path: str, kind: Kind, host: int = 0) -> ObjectPool:
    return ObjectPool.open(path, threads=1, host=host if kind.hosts > 1 else None)


def found(pool: ObjectPool) -> list[int]:
    """The names that are there, with what belongs to them."""
    names = list(range(NAMES))
    out = [np.empty(SIZE, np.uint8) for _ in names]
    sizes = pool.get_batch_into(named(names), out).tolist()
    assert all(size > 0 or size == ABSENT for size in sizes), sizes
    there = [name for name in names if sizes[name] > 0]
    for name in there:
        verify(name, out[name][: sizes[name]])
    return there


def take_all(pools: list[ObjectPool]) -> list[Reserved]:
    """One page each in turn, until nobody gets another one."""
    taken: list[Reserved] = []
    left = list(pools)
    while left:
        for pool in list(left):
            try:
                taken.append(pool.reserve([pool.layout.page_tokens]))
            except PoolFullError:
                left.remove(pool)
    return taken


def assert_settled(path: str, kind: Kind) -> None:
    """What is there is whole, nobody holds anything, and every page can be taken, once."""
    names = named(list(range(NAMES)))
    with ExitStack() as stack:
        pools = [stack.enter_context(opened(path, kind, host)) for host in range(kind.hosts)]
        for pool in pools:
            found(pool)  # a host that was dead hears now what the others forgot of its objects
        there = found(pools[0])
        total = pools[0].stats()["pages_total"]
        for pool in pools:
            audit(pool)
            stats = pool.stats()
            assert stats["processes"] == 1
            assert stats["pages_held"] == stats["pages_quarantined"] == stats["pages_retired"] == 0
            assert found(pool) == there
        assert pools[-1].forget(names) == len(there)
        taken = take_all(pools)
        views = [reserved.views[0] for reserved in taken]
        assert len(views) == total
        for i, view in enumerate(views):
            assert view is not None
            view[:8] = view[-8:] = i.to_bytes(8, "little")
        for i, view in enumerate(views):
            assert view is not None
            assert view[:8] == view[-8:] == i.to_bytes(8, "little"), "no two are the same page"
        for reserved in taken:
            reserved.release()
        for pool in pools:
            audit(pool)
            stats = pool.stats()
            assert stats["pages_free"] + stats["pages_elsewhere"] == total


EVENTS = ("new", "found", "ranges found", "published", "forgotten", "scrubbed", "full")


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("plain, 2 threads", 9),
        ("2 hosts", 4),
        ("slots", 9),
        ("slots, 2 hosts", 4),
        *(nightly(name, 600 if KINDS[name].hosts == 1 else 200) for name in KINDS),
    ],
    indirect=["kind"],
)
def test_killed_at_random(
    path: str,
    kind: Kind,
    processes: list[Process],
    kills: int,
    seed: int,
) -> None:
    """Two write and one reads while others are killed beside them."""
    threads, start = kind.threads, time.monotonic()
    with opened(path, kind) as watcher:
        steady = [
            Process("work", path, seed + i, threads, int(i == 2), host=host)
            for i, host in enumerate(kind.steady)
        ]
        processes += steady
        for process in steady:
            process.hear()
        killer = Process("victims", path, seed + 1000, threads, kills, host=kind.victims)
        processes.append(killer)
        killed = Counter(str(said["killed"]) for said in map(json.loads, killer.pipes[1]))
        killer.end()
        wanted = [what for what in EVENTS if (what, kind.hosts) != ("full", 2)]
        seen = Counter[str]()
        while not all(seen[what] for what in wanted):  # their mix is the scheduler's
            seen.clear()
            for process in steady:
                seen.update(process.seen_so_far())
        seen.clear()
        for process in steady:
            seen.update(json.loads(process.end(signal.SIGTERM).splitlines()[-1])["seen"])
        assert killed.total() == kills
        assert len(killed) == len(MOMENTS)
        print(f"{dict(killed)} in {time.monotonic() - start:.1f} s: {dict(seen)}")
        found(watcher)
        audit(watcher)
        stats = watcher.stats()
        print({name: stats[name] for name in ("reaped_processes", "rebuilds", "corrupt_pieces")})
        assert stats["corrupt_pieces"] == 0
        if kind.hosts == 1:  # each host counts its own
            # Who dies while it reaps another may leave that one uncounted, and a rebuild behind.
            assert kills - stats["rebuilds"] <= stats["reaped_processes"] <= kills
    assert_settled(path, kind)


@pytest.mark.parametrize("kind", ["checksum", "plain, 2 threads"], indirect=True)
def test_killed_within_a_put(path: str, kind: Kind, processes: list[Process], seed: int) -> None:
    """When its pages are taken, and mostly before they are published: until that was so twice."""
    count, halfway, number = 24, 0, 0
    names = named(list(range(count)))

    def has_begun(stats: dict[str, int]) -> bool:
        return max(stats["pages_held"], stats["pages_published"]) == count

    with opened(path, kind) as watcher:
        while halfway < 2:
            number += 1
            process = Process("put_once", path, seed + number, kind.threads, count)
            processes.append(process)
            process.hear()
            while not has_begun(watcher.stats()) and process.popen.poll() is None:
                pass
            process.end(signal.SIGKILL, -signal.SIGKILL)
            stats = watcher.stats()
            assert stats["pages_held"] == 0
            assert stats["pages_free"] + stats["pages_published"] == stats["pages_total"]
            there = found(watcher)
            assert stats["pages_published"] == len(there)
            halfway += len(there) < count
            assert watcher.forget(names) == len(there)
            audit(watcher)
    print(f"{halfway} of {number} were not done")
    assert_settled(path, kind)


def test_what_was_forgotten_of_a_dead_host_is_found_by_nobody(tmp_path: Path) -> None:
    """Else somebody reads old bytes under a name that has others since: a host that is there, one
    that comes when the log has been written over, and the dead one itself when it comes back."""
    path = tmp_path / "hosts"
    layout = KVLayout.objects(1 << 16)
    names = ["replaced", "forgotten", "kept"]
    put_and_die = """if True:
        import os, signal, sys
        from cxlkv import ObjectPool
        pool = ObjectPool.open(sys.argv[1], host=1)
        assert pool.put_batch(["replaced", "forgotten", "kept"], [b"old", b"old", b"kept"]).all()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with ExitStack() as stack:
        pool = stack.enter_context(
            ObjectPool.create(
                path, layout=layout, capacity="32MiB", sharing="software", hosts=4, host=0
            )
        )
        there = stack.enter_context(ObjectPool.open(path, host=2))
        done = subprocess.run([sys.executable, "-c", put_and_die, path], check=False)
        assert done.returncode == -signal.SIGKILL
        assert there.object_sizes(names).tolist() == [3, 3, 4]
        assert pool.forget(["replaced", "forgotten"]) == 2
        assert pool.put("replaced", b"newer")
        assert pool.object_sizes(names).tolist() == [5, ABSENT, 4]
        assert there.object_sizes(names).tolist() == [5, ABSENT, 4]
        for number in range(1000):  # a log of 32 MiB has 512 records, and each of these two
            assert pool.put(str(number), b"x")
            assert pool.forget([str(number)]) == 1
        with ObjectPool.open(path, host=3) as newcomer:
            assert newcomer.object_sizes(names).tolist() == [5, ABSENT, 4]
        pool.close()  # its wishes stand in its log
        with ObjectPool.open(path, host=3) as newcomer:
            assert newcomer.object_sizes(names).tolist() == [5, ABSENT, 4]
        with ObjectPool.open(path, host=1, lease_s=0.05) as back:
            assert back.object_sizes(names).tolist() == [5, ABSENT, 4]
            assert back.put("forgotten", b"once more")
            assert there.object_sizes(names).tolist() == [5, 9, 4]
        assert there.object_sizes(names).tolist() == [5, 9, 4]
        assert there.stats()["lost_forgets"] == 0
    ObjectPool.remove(path)


STOPPED = """
import signal, sys, threading
import numpy as np
from cxlkv import ObjectPool
from cxlkv.errors import FencedError
from tests.support.touching import at_touch

def stop():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

pool = ObjectPool.open(sys.argv[1], host=1, lease_s=1.0, threads=1)
given = [np.full(pool.layout.object_bytes, 7, np.uint8) for _ in range(3)]
at_touch(given[1].ctypes.data, given[1].nbytes, stop)
print("it begins", flush=True)
try:
    print(pool.put_batch(["a", "b", "c"], given))
except FencedError:
    print("it is off")
"""


def test_what_a_host_was_putting_when_it_was_declared_off_is_not_published(tmp_path: Path) -> None:
    """Stopped in the middle of a copy: it finds out before it publishes, as the pages are others'
    by then. No look of its keeper has to come first."""
    path, layout = tmp_path / "a.pool", KVLayout.objects("64KiB")
    made = ObjectPool.create(
        path,
        layout=layout,
        capacity="16MiB",
        sharing="software",
        hosts=2,
        host=0,
        lease_s=1.0,
        threads=1,
    )
    with made as pool, Child("-c", STOPPED, path) as other:
        assert other.hear() == "it begins"
        until(lambda: pool.admin.hosts()[1].state == "silent")
        pool.admin.fence(1, confirmed_off=True)
        taken = pool.pages.alloc(pool.stats()["pages_total"])
        other.popen.send_signal(signal.SIGCONT)
        assert other.end() == "it is off\n"
        assert (pool.object_sizes(["a", "b", "c"]) == ABSENT).all()
        pool.pages.free(taken)
        audit(pool)
