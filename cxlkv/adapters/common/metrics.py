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

from cxlkv import _lifetime
from cxlkv.errors import ClosedError, CXLKVError, FencedError, HostError
from cxlkv.pool import Pool

if TYPE_CHECKING:
    import prometheus_client

log = logging.getLogger("cxlkv")

STATES = {
    "free": "for new objects",
    "held": "read or written by a process",
    "published_only": "objects that nobody reads now",
}
"""Of the memory of a pool of objects."""

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
        _lifetime.watch(self)

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

    def inspect(self, pool: Pool) -> None:
        """The pool has been used: for who shows how full it is."""


class Metrics:
    """Counters and a gauge by an engine's labels, of which `values` are one process's or rank's.

    counter, gauge: of prometheus_client, or what an engine has in their place. counts: what is
    counted, states: of a pool's room, both with what they mean; unit: of the room.
    """

    def __init__(
        self,
        counter: type[prometheus_client.Counter],
        gauge: type[prometheus_client.Gauge],
        prefix: str,
        labels: Sequence[str],
        counts: Mapping[str, str],
        states: Mapping[str, str],
        unit: str,
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
        room = "; ".join(f"{state}: {meaning}" for state, meaning in states.items())
        self._pools = gauge(
            name=f"{prefix}pool_{unit}",
            documentation=f"Room of a pool by state, in {unit}: {room}",
            labelnames=[*labels, "pool", "state"],
            multiprocess_mode="livemostrecent",
        )

    def begin(self, values: Sequence[object], kinds: Iterable[str]) -> None:
        """Every counter is there from the start, as 0."""
        self.add(values, dict.fromkeys(self._counts, 0), dict.fromkeys(kinds, 0))

    def add(
        self,
        values: Sequence[object],
        counts: Mapping[str, float],
        failures: Mapping[str, int] | None = None,
    ) -> None:
        for name, count in counts.items():
            self._counts[name].labels(*values).inc(count)
        for kind, count in (failures or {}).items():
            self._failures.labels(*values, kind).inc(count)

    def fill(self, values: Sequence[object], pool: str, states: Mapping[str, int]) -> None:
        for state, size in states.items():
            self._pools.labels(*values, pool, state).set(size)


_shared: dict[str, Metrics] = {}
"""Of this process, by prefix; several stores in it share one."""


class Shown(Counting):
    """Counts that are metrics, too.

    prefix: of their names. labels: of this rank. counts, kinds: as Counting, each with its meaning.
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
        if prefix not in _shared:
            from prometheus_client import Counter, Gauge

            _shared[prefix] = Metrics(Counter, Gauge, prefix, [*labels], counts, STATES, "bytes")
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

    def inspect(self, pool: Pool) -> None:
        path = str(pool.path)
        with self._look_lock:
            if time.monotonic() < self._next_s.get(path, 0):
                return
            self._next_s[path] = time.monotonic() + LOOK_EVERY_S
        try:
            pages = pool.stats()
        except CXLKVError:
            return
        size = int(pool.layout.object_bytes or 0)
        states = {state: pages[f"pages_{state}"] * size for state in STATES}
        self._metrics.fill(self._labels, path, states)
