"""Our figures beside LMCache's own, in the registry that its /metrics endpoint shows.

LMCache has no door for plugins' figures; its own are prometheus counters with four labels, and so
are these.
"""

from __future__ import annotations

import threading
import time
from functools import cache

from lmcache.observability import PrometheusLogger
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from prometheus_client import Counter, Gauge

from cxlkv.adapters.lmcache.counting import COUNTS, KINDS, PREFIX, STATES, Counting
from cxlkv.errors import CXLKVError
from cxlkv.pool import CXLPool

LOOK_EVERY_S = 1.0


class Shown(Counting):
    """Counts that are shown; every counter is there from the start, as 0."""

    def __init__(self, metadata: LMCacheMetadata, config: LMCacheEngineConfig):
        super().__init__()
        # LMCache's own are made first: they set where figures of several processes are kept.
        labels = PrometheusLogger.GetOrCreate(metadata, config=config).labels
        self._labels = {name: str(value) for name, value in labels.items()}
        self._shown = counters(tuple(labels))
        self._gauge = gauge(tuple(labels))
        self._look_lock = threading.Lock()
        self._next_s = 0.0
        for name in COUNTS:
            self._shown[name].labels(**self._labels)
        for kind in KINDS:
            self._shown["failures"].labels(**self._labels, kind=kind)

    def add(self, **more: int) -> None:
        super().add(**more)
        for name, count in more.items():
            self._shown[name].labels(**self._labels).inc(count)

    def failed(self, kind: str, detail: object = "", count: int = 1) -> None:
        super().failed(kind, detail, count)
        self._shown["failures"].labels(**self._labels, kind=kind).inc(count)

    def look(self, pool: CXLPool) -> None:
        """At the pool, once a second at most; what came after the last look waits for the next."""
        with self._look_lock:
            if time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + LOOK_EVERY_S
        try:
            pages = pool.stats()
        except CXLKVError:
            return
        size = int(pool.layout.object_bytes or 0)
        for state in STATES:
            shown = self._gauge.labels(**self._labels, pool=str(pool.path), state=state)
            shown.set(pages[f"pages_{state}"] * size)


@cache
def counters(labels: tuple[str, ...]) -> dict[str, Counter]:
    """Of this process; several plugins in it share them."""
    made = {name: Counter(PREFIX + name, text, labels) for name, text in COUNTS.items()}
    text = "What went wrong with the pool and was a miss, or not stored, by kind"
    return {**made, "failures": Counter(PREFIX + "failures", text, (*labels, "kind"))}


@cache
def gauge(labels: tuple[str, ...]) -> Gauge:
    meaning = "; ".join(f"{state}: {text}" for state, text in STATES.items())
    return Gauge(
        f"{PREFIX}pool_bytes",
        f"Room of a pool by state, in bytes: {meaning}",
        (*labels, "pool", "state"),
        multiprocess_mode="livemostrecent",
    )
