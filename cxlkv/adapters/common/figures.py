"""A collector shows a store's figures in the registry behind the engine's /metrics.

Engines have no door for figures of what stores for them, so these are prometheus counters of the
process, by the engine's labels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import cache

from prometheus_client import Counter, Gauge

from cxlkv.adapters.common.metrics import Counting
from cxlkv.errors import CXLKVError
from cxlkv.pool import Pool

STATES = {
    "free": "for new objects",
    "held": "read or written by a process",
    "published_only": "objects that nobody reads now",
}
"""Of a pool's memory."""

LOOK_EVERY_S = 1.0
"""What came after the last look waits for the next."""


class Shown(Counting):
    """Counts that are shown; every counter is there from the start, as 0.

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
        self._labels = dict(labels)
        self._look_lock = threading.Lock()
        self._next_s: dict[str, float] = {}  # by the pool's path
        names = tuple(labels)
        self._shown = {name: counter(prefix + name, text, names) for name, text in counts.items()}
        text = "What went wrong with the pool and was a miss, or not stored, by kind"
        self._failures = counter(f"{prefix}failures", text, (*names, "kind"))
        self._gauge = gauge(f"{prefix}pool_bytes", (*names, "pool", "state"))
        for one in self._shown.values():
            one.labels(**self._labels)
        for kind in kinds:
            self._failures.labels(**self._labels, kind=kind)

    def add(self, **more: int) -> None:
        super().add(**more)
        for name, count in more.items():
            self._shown[name].labels(**self._labels).inc(count)

    def failed(self, kind: str, detail: object = "", count: int = 1) -> None:
        super().failed(kind, detail, count)
        self._failures.labels(**self._labels, kind=kind).inc(count)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._look_lock = threading.Lock()

    def look(self, pool: Pool) -> None:
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
        for state in STATES:
            shown = self._gauge.labels(**self._labels, pool=path, state=state)
            shown.set(pages[f"pages_{state}"] * size)


@cache
def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
    """Of this process; several stores in it share one."""
    return Counter(name, text, labels)


@cache
def gauge(name: str, labels: tuple[str, ...]) -> Gauge:
    meaning = "; ".join(f"{state}: {text}" for state, text in STATES.items())
    text = f"Room of a pool by state, in bytes: {meaning}"
    return Gauge(name, text, labels, multiprocess_mode="livemostrecent")
