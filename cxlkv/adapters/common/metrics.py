"""Counts of an engine's store, one log line for each kind of failure, and their metrics.

Engines have no door for figures of what stores for them, so these are prometheus metrics of the
process behind the engine's /metrics, by the engine's labels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cxlkv.errors import BadArgumentError, ClosedError, CXLKVError, FencedError, HostError
from cxlkv.machine import lifetime
from cxlkv.pool import Pool
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

if TYPE_CHECKING:
    import prometheus_client

log = logging.getLogger("cxlkv")

STATES = {
    "free": "for new objects",
    "held": "read or written by a process",
    "published_only": "objects that nobody reads now",
}
"""States of the memory of a pool of objects."""
COLD = "cold"
"""Beside STATES, of objects or tokens: what the cold tier has, wherever else it is."""
IN_COLD = {COLD: "in the cold tier, wherever else"}
HOST_STATES = ("live", "unseen", "silent", "fenced", "off", "left", "damaged")
"""States of a host that has joined, as Host.state names them."""
MOVES = {
    "demoted_bytes": "Bytes of pages that made room and went to the cold tier",
    "dropped_bytes": "Bytes of pages that were to go to the cold tier, which did not take them",
    "promoted_bytes": "Bytes of pages that came back from the cold tier",
}
LINKS = ("far read", "far written", "cold read", "cold written", "remote read")
"""Tiers and directions of Tiers.link_bytes()."""

QUOTA = {
    "quota": "what this process may have published, where there is a quota",
    "quota_used": "of that, what it has",
}
"""Beside STATES, of all processes' pages."""

LOOK_EVERY_S = 1.0
"""What came after the last look waits for the next."""


LOST = (FencedError, HostError, ClosedError)
"""What calls of a pool raise whose host was declared off, until it is opened anew (reopening)."""


class Failures(Counter[str]):
    """Counts since the start, by kind; "host" where the pool was lost."""

    def add(self, kind: str, error: Exception) -> None:
        """Count it; the first of its kind is a line in the log."""
        kind = "host" if isinstance(error, LOST) else kind
        if not self[kind]:
            log.warning("%s; the engine computes instead; further ones are counted", error)
        self[kind] += 1


class Counting:
    """counts: names of what add() counts; kinds: of failures, each with what it means and what
    mends it. Any thread may count."""

    def __init__(self, counts: Iterable[str], kinds: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._kinds = kinds
        self.counts: Counter[str] = Counter(dict.fromkeys(counts, 0))
        self.failures: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)

    def failed(self, kind: str, detail: object = "", count: int = 1) -> None:
        """The first of each kind is a line in the log."""
        with self._lock:
            is_first = self.failures[kind] == 0
            self.failures[kind] += count
        if is_first:
            said = f": {detail}" if str(detail) else ""
            log.warning("cxlkv: %s%s (said once; counted as %s)", self._kinds[kind], said, kind)

    def inspect(self, tiers: Tiers, quota: Quota | None = None) -> None:
        """Called after each use of the pool. Shown publishes how full it is, and what its tiers
        move."""


class Moves:
    """What one process's tiers have moved. Never raises for a tier that is off or closed."""

    def __init__(self, tiers: Tiers):
        self.tiers = tiers
        self._moves, self._links = Counter[str](), Counter[str]()  # that were told
        self._record_bytes, _ = tiers.pool.records.shape

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by MOVES, and by LINKS, that are new since the last call."""
        moves, links = Counter[str](), Counter[str]()
        for name in MOVES:
            moves[name] = self.tiers.moved_pages(name.removesuffix("_bytes")) * self._record_bytes
        for (tier, direction), size in self.tiers.link_bytes().items():
            links[f"{tier} {direction}"] = size
        new = dict(moves - self._moves), dict(links - self._links)
        self._moves |= moves
        self._links |= links
        return new

    def cold(self) -> tuple[int, int]:
        """Records that the cold tier has, and bytes of its file that they take; 0 of a remote one,
        which does not say."""
        try:
            found = self.tiers.cold.stats() if self.tiers.cold is not None else {}
        except CXLKVError:
            found = {}
        slots = found.get("slots_stored", 0) * found.get("slot_bytes", 0)
        return found.get("records", 0), slots


def hosts(pool: Pool) -> dict[str, int]:
    """How many hosts of a shared pool there are, by HOST_STATES; empty for a pool of one host.
    Raises CXLKVError."""
    try:
        found = Counter(host.state for host in pool.admin.hosts())
    except BadArgumentError:
        return {}
    return {state: found[state] for state in HOST_STATES}


class Metrics:
    """Counters and gauges by an engine's labels, of which `values` are one process's or rank's.

    counter, gauge: of prometheus_client, or what an engine has in their place. counts: what is
    counted, with what it means; capacities: states of a pool's capacity, likewise, by its unit.
    """

    def __init__(
        self,
        counter: type[prometheus_client.Counter],
        gauge: type[prometheus_client.Gauge],
        prefix: str,
        labels: Sequence[str],
        counts: Mapping[str, str],
        capacities: Mapping[str, Mapping[str, str]],
    ):
        self._counts = {
            name: counter(name=prefix + name, documentation=meaning, labelnames=[*labels])
            for name, meaning in counts.items()
        }
        self._failures = counter(
            name=f"{prefix}failures",
            documentation="What went wrong with the pool and was a miss, or not stored, by kind",
            labelnames=[*labels, "kind"],
        )
        self._links = counter(
            name=f"{prefix}link_bytes",
            documentation="Bytes that moved between this engine and a tier, by direction: far: the "
            "pool over an emulated link; cold: its file; remote: pools of other machines",
            labelnames=[*labels, "tier", "direction"],
        )
        meanings = {"hosts": "Hosts of a shared pool by state"}
        for unit, states in capacities.items():
            said = "; ".join(f"{state}: {meaning}" for state, meaning in states.items())
            meanings[unit] = f"Capacity of a pool by state, in {unit}: {said}"
        self._pools = {
            of: gauge(
                name=f"{prefix}pool_{of}",
                documentation=meaning,
                labelnames=[*labels, "pool", "state"],
                multiprocess_mode="livemostrecent",
            )
            for of, meaning in meanings.items()
        }

    def begin(self, values: Sequence[object], kinds: Iterable[str]) -> None:
        """Every counter is there from the start, as 0."""
        nothing = dict.fromkeys(self._counts, 0)
        self.add(values, nothing, dict.fromkeys(kinds, 0), dict.fromkeys(LINKS, 0))

    def add(
        self,
        values: Sequence[object],
        counts: Mapping[str, float],
        failures: Mapping[str, int] | None = None,
        links: Mapping[str, int] | None = None,
    ) -> None:
        for name, count in counts.items():
            self._counts[name].labels(*values).inc(count)
        for kind, count in (failures or {}).items():
            self._failures.labels(*values, kind).inc(count)
        for link, size in (links or {}).items():
            self._links.labels(*values, *link.split()).inc(size)

    def fill(
        self, values: Sequence[object], pool: str, found: Mapping[str, Mapping[str, int]]
    ) -> None:
        """found: by unit of the capacity, or "hosts", and state."""
        for of, states in found.items():
            for state, size in states.items():
                self._pools[of].labels(*values, pool, state).set(size)


_shared: dict[str, Metrics] = {}
"""This process's metrics by prefix; several stores share one."""


class Shown(Counting):
    """Counts that are metrics, too.

    prefix: of their names. labels: of this rank. counts, kinds: as Counting, each with its meaning;
    MOVES are counted, too.
    """

    def __init__(
        self,
        prefix: str,
        labels: Mapping[str, str],
        counts: Mapping[str, str],
        kinds: Mapping[str, str],
    ):
        super().__init__(counts, kinds)
        self._labels = tuple(labels.values())
        self._look_lock = threading.Lock()
        self._next_s: dict[str, float] = {}  # by the pool's path
        self._moves: dict[str, Moves] = {}  # by the pool's path
        if prefix not in _shared:
            from prometheus_client import Counter, Gauge

            shown, capacities = {**counts, **MOVES}, {"bytes": {**STATES, **IN_COLD, **QUOTA}}
            _shared[prefix] = Metrics(Counter, Gauge, prefix, [*labels], shown, capacities)
        self._metrics = _shared[prefix]
        self._metrics.begin(self._labels, kinds)

    def add(self, **more: int) -> None:
        super().add(**more)
        self._metrics.add(self._labels, more)

    def failed(self, kind: str, detail: object = "", count: int = 1) -> None:
        super().failed(kind, detail, count)
        self._metrics.add(self._labels, {}, {kind: count})

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._look_lock = threading.Lock()

    def inspect(self, tiers: Tiers, quota: Quota | None = None) -> None:
        path = str(tiers.pool.path)
        with self._look_lock:
            if time.monotonic() < self._next_s.get(path, 0):
                return
            self._next_s[path] = time.monotonic() + LOOK_EVERY_S
            if path not in self._moves or self._moves[path].tiers is not tiers:
                self._moves[path] = Moves(tiers)
            moves = self._moves[path]
            counts, links = moves.take()
        self._metrics.add(self._labels, counts, links=links)
        try:
            counted, there = tiers.pool.stats(), hosts(tiers.pool)
            pages = {state: counted[f"pages_{state}"] for state in STATES}
            if quota is not None:
                pages.update(quota=quota.pages, quota_used=quota.used())
        except CXLKVError:
            return
        size = tiers.pool.layout.page_tokens
        states = {state: count * size for state, count in pages.items()}
        if tiers.cold is not None:
            states[COLD] = moves.cold()[1]
        self._metrics.fill(self._labels, path, {"bytes": states, "hosts": there})
