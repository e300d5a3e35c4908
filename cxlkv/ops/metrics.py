"""Exports Prometheus metrics of pools: a collector, a registry to embed, and a server.

A pool is read from outside at every scrape (cxlkv.stats.inspect), or from inside when open here.
Its counters outlive the processes that counted: they never fall while the pool's file is the same.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from socketserver import BaseServer
from typing import cast

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cxlkv import pool as pools
from cxlkv.errors import CXLKVError, PeerError
from cxlkv.stats import COUNTERS, PAGE_STATES, Overview, Process, inspect
from cxlkv.transport.listener import Listener, listen
from cxlkv.transport.wire import GREET_S, MESSAGE_S, Deadline, Wire

__all__ = ["PoolCollector", "StatsCollector", "registry"]

ENDS = {signal.SIGINT, signal.SIGTERM}
REQUEST_BYTES_MAX = 16 << 10

Pool = pools.Pool | str | os.PathLike[str]

SHARES = {
    "recall": "the exact method's pages that were chosen",
    "mass": "the attention that the chosen pages hold",
}


class PoolCollector(Collector):
    """Metrics of some pools, each open here or named by its path; label pool is the path.

    A pool that is gone, damaged or closed has cxlkv_pool_up 0 and no other metric. An anonymous
    pool is called "anonymous:IDENTITY".
    """

    def __init__(self, *pools: Pool):
        self._sources = [_source(pool) for pool in pools]

    def describe(self) -> Iterator[Metric]:
        """Names only: registering reads no pool."""
        yield from _families([])

    def collect(self) -> Iterator[Metric]:
        yield from _families([(name, _read(source)) for name, source in self._sources])


class StatsCollector(Collector):
    """What an object of this process counts, as gauges: StatsCollector("tiers", tiers.stats) has
    cxlkv_tiers_cold_packed_bytes_saved. Register it beside a PoolCollector; once it is closed it
    has none."""

    def __init__(self, name: str, stats: Callable[[], Mapping[str, float]]):
        self._name, self._stats = name, stats

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        try:
            found = self._stats()
        except CXLKVError:
            return
        for key, value in found.items():
            text = f"{key.replace('_', ' ')}, as stats() of {self._name} counts"
            yield GaugeMetricFamily(f"cxlkv_{self._name}_{key}", text, value=value)


def registry(pools: Iterable[Pool]) -> CollectorRegistry:
    """A registry of its own with these pools, for prometheus_client's exporters to embed."""
    made = CollectorRegistry()
    made.register(PoolCollector(*pools))
    return made


def begin(paths: Iterable[str], port: int, address: str) -> Exporter:
    """Serve /metrics in threads; port 0 takes a free one, the line that is printed names it.

    SIGINT and SIGTERM wait from now on for until_stopped(), in all threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # before the listener's thread begins
    try:
        exporter = Exporter(listen(address, port), registry(paths))
        exporter.start()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    host = f"[{address}]" if ":" in address else address
    print(f"serving http://{host}:{exporter.address[1]}/metrics", flush=True)
    return exporter


def until_stopped(exporter: Exporter) -> None:
    """Wait for SIGINT or SIGTERM, then end the exporter."""
    signal.sigwait(ENDS)
    exporter.close()


class Exporter(Listener["_Scrape"]):
    """Answers scrapers: each is a stranger, so that one which says or reads nothing makes room."""

    def __init__(self, listening: socket.socket, registry: CollectorRegistry):
        super().__init__(listening)
        self._registry = registry

    def _session(self, sock: socket.socket) -> _Scrape:
        return _Scrape(sock)

    def _serve(self, session: _Scrape) -> None:
        session.answer(self._registry)


class _Scrape(Wire):
    """A connection for one request."""

    def answer(self, registry: CollectorRegistry) -> None:
        """Raises PeerError for a request that is too long, or takes too long."""
        deadline, head = Deadline(GREET_S), bytearray()
        while not head.endswith((b"\r\n\r\n", b"\n\n")):
            if len(head) == REQUEST_BYTES_MAX:
                raise PeerError(f"a request of more than {REQUEST_BYTES_MAX} bytes")
            head += self._receive(1, deadline)
        _Answer(registry, head, self._socket)


class _Answer(MetricsHandler):
    """To a request that was read already."""

    timeout = MESSAGE_S

    def __init__(self, registry: CollectorRegistry, head: bytearray, client: socket.socket):
        self.registry, self._head = registry, head
        super().__init__(client, client.getpeername(), cast("BaseServer", None))

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = BytesIO(self._head)


def _source(pool: Pool) -> tuple[str, Callable[[], Overview]]:
    if isinstance(pool, pools.Pool):
        return pool.admin.overview().path, pool.admin.overview
    path = os.fspath(pool)
    return path, lambda: inspect(path)


def _read(source: Callable[[], Overview]) -> Overview | None:
    try:
        overview = source()
    except (CXLKVError, OSError):
        return None
    return overview if overview.state in ("live", "idle") else None


def _families(read: list[tuple[str, Overview | None]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("cxlkv_pool_up", "1 if the pool can be read", labels=["pool"])
    for name, overview in read:
        up.add_metric([name], overview is not None)
    yield up
    there = [(name, overview) for name, overview in read if overview is not None]
    yield from _gauges(there)
    for counter, text in COUNTERS.items():
        family = CounterMetricFamily(f"cxlkv_{counter}", text, labels=["pool"])
        for name, overview in there:
            family.add_metric([name], overview.totals[counter])
        yield family
    for measure, text in SHARES.items():
        summary = SummaryMetricFamily(
            f"cxlkv_select_{measure}_ratio", f"Of audited selects: share of {text}", labels=["pool"]
        )
        for name, overview in there:
            total = getattr(overview.totals, f"{measure}_sum")
            summary.add_metric([name], overview.totals["audited_selects"], total)
        yield summary


GAUGES: dict[str, tuple[str, Callable[[Overview], int]]] = {
    "bytes": ("Size of the pool's region", lambda pool: pool.bytes),
    "prefix_pages": ("Pages that match() finds, held or not", lambda pool: pool.prefix_pages),
    "pinned_pages": ("Of those, pinned against eviction", lambda pool: pool.pinned_pages),
    "processes": ("Live processes that have the pool open", lambda pool: len(_live(pool))),
    "sequences": (
        "Sequences and hits of these processes",
        lambda pool: sum(process.sequences for process in _live(pool)),
    ),
}


def _live(pool: Overview) -> list[Process]:
    return [process for process in pool.processes if process.alive]


def _gauges(there: list[tuple[str, Overview]]) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "cxlkv_pool_pages", "Pages by state; published: held by nobody", labels=["pool", "state"]
    )
    for name, overview in there:
        for state in PAGE_STATES:
            pages.add_metric([name, state], overview.pages[state])
    yield pages
    for gauge, (text, value) in GAUGES.items():
        family = GaugeMetricFamily(f"cxlkv_pool_{gauge}", text, labels=["pool"])
        for name, overview in there:
            family.add_metric([name], value(overview))
        yield family
