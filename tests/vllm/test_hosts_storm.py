"""Two engines, two hosts, one pool: killed at any moment, by the dozen; requests are sent again.

No token is wrong, no request is lost, no page stays held, and a request at an engine that lives
takes no longer than undisturbed, but for a lease and two seconds. CXLKV_KILLS sets how many kills
there are: 3, and 30 in `make nightly`.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from cxlkv import CXLPool

from .engines import VOCABULARY_SIZE
from .forked import Done, Life, Tokens
from .test_hosts import FORMS, LEASE_S, WATCHER, Bench
from .test_hosts import bench as bench
from .test_hosts import nursery as nursery

KILLS = int(os.environ.get("CXLKV_KILLS", "3"))
REQUESTS = 2000 * KILLS // 30
AT_ONCE = 6  # at each engine
UNDISTURBED = 150  # requests before the first kill
LATER_S = 2.0
PATIENCE_S = 60.0


def prompts(seed: int, count: int = 240) -> list[Tokens]:
    """Most begin as others do, and the pool holds some of them only."""
    numbers = np.random.default_rng(seed)
    families = numbers.integers(0, VOCABULARY_SIZE, (12, 400)).tolist()
    found = []
    for _ in range(count):
        begins = families[numbers.integers(len(families))][: numbers.integers(400)]
        own = numbers.integers(0, VOCABULARY_SIZE, numbers.integers(1, 120)).tolist()
        found.append(begins + own)
    return found


@dataclass
class Host:
    """An engine's number, its life, and what it was asked: by name, with the prompt's number."""

    number: int
    life: Life
    starts: bool = True
    going: dict[str, int] = field(default_factory=dict)
    dies_after: int = 1 << 30  # requests from now on
    has_answered: bool = False  # in this life
    dies_at_s: float = math.inf  # some milliseconds later, in the middle of what it does then


class Storm:
    """Keeps both engines busy; checks each answer."""

    def __init__(self, bench: Bench, texts: list[Tokens], wanted: list[Tokens], random: Random):
        self.one_by_one = bench.attention == "pool"
        self._bench, self._texts, self._wanted, self._random = bench, texts, wanted, random
        self.hosts = [Host(number, self._begin(number)) for number in range(2)]
        self._names = iter(range(1 << 30))
        self._again: list[int] = []  # prompts of killed engines
        self.kills = self.sent_again = self.cached = 0
        self.took_s: list[float] = []

    def _begin(self, number: int) -> Life:
        return self._bench.begin(number, capacity="12MiB")

    def run(self, until: Callable[[], bool], watcher: CXLPool | None = None) -> None:
        """Until it holds and all has been answered. watcher: with it engines are killed."""
        while True:
            for host in self.hosts:
                if not host.starts and (not until() or self._again):
                    self._fill(host)
            if until() and not self._again and not any(host.going for host in self.hosts):
                return
            now_s = time.monotonic()
            wait_s = min(PATIENCE_S, *(max(0, host.dies_at_s - now_s) for host in self.hosts))
            ready, _, _ = select.select([host.life for host in self.hosts], [], [], wait_s)
            late = [host for host in self.hosts if host.dies_at_s <= time.monotonic()]
            assert ready or late, [(host.starts, len(host.going)) for host in self.hosts]
            for host in self.hosts:
                if host in late and watcher is not None:
                    self._kill(host, watcher)
                elif host.life in ready:
                    self._hear(host)

    def _fill(self, host: Host) -> None:
        while len(host.going) < AT_ONCE:
            number = self._again.pop() if self._again else self._random.randrange(len(self._texts))
            name = str(next(self._names))
            host.going[name] = number
            host.life.add(name, self._texts[number])

    def _hear(self, host: Host) -> None:
        if host.starts:
            host.life.ready()
            host.starts = False
            return
        for said in host.life.heard():
            self._check(host, said)

    def _check(self, host: Host, done: Done) -> None:
        assert done["tokens"] == self._wanted[host.going.pop(done["name"])], done
        self.took_s.append(done["took_s"])
        self.cached += done["cached"]
        host.dies_after -= 1
        host.has_answered = True
        if host.dies_after <= 0 and host.dies_at_s == math.inf and self._may_die(host):
            host.dies_at_s = time.monotonic() + self._random.uniform(0, 0.1)

    def end(self) -> None:
        for host in self.hosts:
            (host.life.ready() if host.starts else host.life).end()

    def plan_kill(self, host: Host) -> None:
        """After some more of its requests, in whatever it does then."""
        host.dies_after = self._random.randrange(1, 2 * REQUESTS // KILLS)

    def _may_die(self, host: Host) -> bool:
        """Where the survivor has no room of its own, its requests wait for the dead one."""
        return not self.one_by_one or self.hosts[1 - host.number].has_answered

    def _kill(self, host: Host, watcher: CXLPool) -> None:
        host.life.kill()
        host.dies_at_s = math.inf
        self.kills += 1
        self._again += host.going.values()
        self.sent_again += len(host.going)
        if self._random.random() < 0.3:  # its pages are others', before it is back
            watcher.admin.fence(host.number, confirmed_off=True)
        host.life, host.starts, host.going = self._begin(host.number), True, {}
        host.has_answered = False
        self.plan_kill(host)


def p99(took_s: list[float]) -> float:
    return float(np.quantile(took_s, 0.99))


@pytest.mark.timeout(60 + 40 * KILLS)
@FORMS
def test_engines_that_are_killed_at_any_moment(
    bench: Bench, seed: int, attention: str, record_property: Callable[[str, object], None]
) -> None:
    texts = prompts(seed)
    wanted = bench.wanted(texts)
    storm = Storm(bench, texts, wanted, Random(seed))
    storm.run(lambda: len(storm.took_s) >= UNDISTURBED)
    quiet_s, calm, cached = p99(storm.took_s), len(storm.took_s), storm.cached
    assert cached > 0
    storm.took_s.clear()
    began = time.monotonic()
    with bench.open(WATCHER) as watcher:
        for host in storm.hosts:
            storm.plan_kill(host)
        enough = lambda: storm.kills >= KILLS and len(storm.took_s) >= REQUESTS  # noqa: E731
        storm.run(enough, watcher)
    storm.end()
    bench.check_all()
    count, late_s = len(storm.took_s), p99(storm.took_s)
    record_property(
        "show",
        f"attention in the {attention}: {storm.kills} kills, {count} requests in "
        f"{time.monotonic() - began:.0f} s, {storm.sent_again} sent again, {storm.cached - cached} "
        f"tokens hit; p99 {late_s:.2f} s ({quiet_s:.2f} s of {calm} undisturbed, longest "
        f"{max(storm.took_s):.2f} s), seed {seed}",
    )
    assert late_s <= quiet_s + LEASE_S + LATER_S
