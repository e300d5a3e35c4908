"""Several hosts on one pool, killed at random: nothing published is lost, no page is either.

On one machine each host number has a host state of its own, so processes can be different hosts
(tests/support/pool_worker.py); they check every token that they read. No sleeps: the test reads
what they report. What caches that are not coherent do is in test_protocol_incoherent.c.
"""

from __future__ import annotations

import select
import signal
import struct
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from cxlkv import CXLPool
from cxlkv.prefix import prefix_keys
from tests.support.stopping import stop

from ..conftest import audit, pages_accounted
from ..support.damaging import poke
from ..support.lengths import nightly
from ..support.storm import EVENTS, Process, run
from ..support.texts import verify
from ..support.walks import FAMILIES, FAMILY_TOKENS, PAGE_TOKENS, keys_of, token_ids
from .test_hosts import make
from .test_hosts_failing import LOCK_LINE, NAME_LINE, line_offset

HOSTS = 5
WATCHERS = (3, 4)  # hosts of the test itself


def drain(processes: list[Process], wait_s: float | None = None) -> None:
    """Reads what the processes print: one whose pipe is full stops, and keeps its pages."""
    ready, _, _ = select.select([p.file for p in processes if not p.ended], [], [], wait_s)
    for process in [process for process in processes if process.file in ready]:
        process.read()
        if process.ended:
            process.end()


@pytest.fixture
def pool_path(shm_path: Path) -> str:
    """272 pages in 17 extents: they move all the time."""
    make(str(shm_path), hosts=HOSTS, host=WATCHERS[0]).close()
    return str(shm_path)


def assert_accounted(stats: dict[str, int]) -> None:
    assert pages_accounted(stats) == stats["pages_total"], stats
    assert stats["pages_quarantined"] == stats["pages_retired"] == 0, stats


def assert_all_comes_back(path: str, seeds: list[int]) -> None:
    """Every host once more: what is published is forgotten, and then all pages are free."""
    keys = [keys_of(seed) for seed in [*range(1, FAMILIES + 1), *seeds]]
    with ExitStack() as stack:
        pools = [stack.enter_context(CXLPool.open(path, host=i, threads=1)) for i in range(HOSTS)]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for pool in pools:
                for own in keys:
                    pool.forget(own)
                audit(pool)
            stats = [pool.stats() for pool in pools]
            if all(s["pages_free"] + s["pages_elsewhere"] == s["pages_total"] for s in stats):
                break
        owned = sum(s["pages_total"] - s["pages_elsewhere"] for s in stats)
        assert all(s["pages_free"] + s["pages_elsewhere"] == s["pages_total"] for s in stats), stats
        assert owned <= stats[0]["pages_total"]


# ---- a storm ----


@pytest.mark.parametrize("operations", [3_000, nightly(100_000)])
def test_three_hosts_with_two_killed(
    pool_path: str, tmp_path: Path, seed: int, operations: int
) -> None:
    path, box = pool_path, tmp_path
    start = time.monotonic()
    with CXLPool.open(path, host=WATCHERS[0], threads=1) as watcher:
        seen, rounds = Counter[str](), 0
        while rounds == 0 or not all(seen[what] for what in EVENTS):  # their mix is the scheduler's
            # Two share a host: one of them is killed, and the only one of another host.
            own = seed + 1000 * rounds
            seen += run(path, box, own, operations, hosts=(0, 1, 1, 2), killed={1, 3})
            rounds += 1
        audit(watcher)
    print(f"{seen['operations']} operations in {time.monotonic() - start:.1f} s: {dict(seen)}")
    assert seen["operations"] >= rounds * operations
    for host in range(3):
        with CXLPool.open(path, host=host, threads=1) as pool:
            audit(pool)
            stats = pool.stats()
            assert_accounted(stats)
            assert stats["pages_held"] == stats["pages_withdrawn"] == 0, stats
    assert_all_comes_back(path, [])


# ---- what was published outlives its publisher ----


def assert_readable(watchers: list[CXLPool], seeds: list[int]) -> None:
    for watcher in watchers:
        for seed in seeds:
            with watcher.match_prefix(token_ids(seed)) as hit:
                assert hit.tokens == FAMILY_TOKENS, f"{hit.tokens} tokens of {seed} are found"
                verify(hit.sequence(), token_ids(seed))


PATIENCE = 60


def wait_until(processes: list[Process], of: list[Process], texts: list[int]) -> None:
    """Until each of some has begun so many texts; or another one has begun PATIENCE more meanwhile:
    who has no extent gets one only when a neighbour has one without a page, which may take long."""
    begun = [len(process.seeds) for process in processes]
    while any(len(p.seeds) < count or not p.stats for p, count in zip(of, texts, strict=True)):
        drain(processes)
        more = [len(p.seeds) - mark for p, mark in zip(processes, begun, strict=True)]
        if max(more) > PATIENCE and all(process.stats for process in of):
            return


@pytest.mark.parametrize("rounds", [4, nightly(150)])
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 1, 1)])
def test_kills_of_hosts_lose_nothing_published(
    pool_path: str, tmp_path: Path, hosts: tuple[int, ...], rounds: int, seed: int
) -> None:
    """In each round one is killed, wherever it is; a new one takes its place when the others have
    read all that it had published."""
    path, box, random = pool_path, tmp_path, Random(seed)
    processes = [Process("publisher", path, box, seed + i, host=h) for i, h in enumerate(hosts)]
    seeds, start = list[int](), time.monotonic()
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        watchers = [stack.enter_context(CXLPool.open(path, host=h, threads=1)) for h in WATCHERS]
        for number in range(rounds):
            place = random.randrange(len(hosts))
            victim, wanted = processes[place], random.randrange(1, 12)
            wait_until(processes, [victim], [wanted])
            for _ in range(random.randrange(100_000)):
                pass
            victim.end(signal.SIGKILL, -signal.SIGKILL)
            assert_accounted(victim.stats)
            assert_readable(watchers, victim.published)
            seeds += victim.seeds
            for own in victim.published:
                watchers[number % 2].forget(prefix_keys(token_ids(own), PAGE_TOKENS))
            for watcher in watchers:
                assert_accounted(watcher.stats())
            own = seed + len(hosts) + number
            heir = Process("publisher", path, box, own, host=victim.host)
            stack.callback(heir.kill)
            processes[place] = heir
        for process in processes:
            while not process.stats and not process.ended:
                process.read()
            process.end(signal.SIGTERM)
            assert_accounted(process.stats)
            seeds += process.seeds
        for watcher in watchers:
            audit(watcher)
    print(f"{rounds} kills, {len(seeds)} texts in {time.monotonic() - start:.1f} s")
    assert len(seeds) >= rounds
    assert_all_comes_back(path, seeds)


# ---- silence ----


def put_in_front(pool: CXLPool, path: str, host: int) -> None:
    """Stop a host in the queue for the lock: the next that needs the lock fences it."""
    _, epoch = struct.unpack("<QI", poke(path, line_offset(pool, host, NAME_LINE), b"", 12))
    poke(path, line_offset(pool, host, LOCK_LINE), struct.pack("<Q", epoch << 40 | 1))


@pytest.mark.parametrize("rounds", [6, nightly(300)])
def test_hosts_that_stop_at_random(pool_path: str, tmp_path: Path, rounds: int, seed: int) -> None:
    """In each round a host is stopped for up to three leases while the others work on, and mostly
    it is fenced: it goes on with all that it had, its own pages and those that it reads."""
    path, box, random, lease_s = pool_path, tmp_path, Random(seed), 0.2
    with ExitStack() as stack:
        processes = [
            Process("publisher", path, box, seed + host, host=host, lease_s=lease_s)
            for host in range(3)
        ]
        for process in processes:
            stack.callback(process.kill)
        watcher = stack.enter_context(CXLPool.open(path, host=WATCHERS[0], threads=1))
        while not all(process.stats for process in processes):
            drain(processes)
        for _ in range(rounds):
            host, stopped = random.choice(list(enumerate(processes)))
            stop(stopped.popen)
            if random.random() < 0.7:
                put_in_front(watcher, path, host)
            until = time.monotonic() + random.uniform(0, 3) * lease_s
            while (left_s := until - time.monotonic()) > 0:
                drain(processes, left_s)
            stopped.popen.send_signal(signal.SIGCONT)
        for process in processes:
            process.popen.send_signal(signal.SIGTERM)
        for process in processes:
            process.end()
        seen = sum((process.seen for process in processes), Counter[str]())
    print(dict(seen))
    assert_all_comes_back(path, [own for process in processes for own in process.seeds])
