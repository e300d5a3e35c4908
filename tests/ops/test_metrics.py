"""Prometheus metrics: scraped over HTTP from the real command, and embedded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.ops.metrics import REQUEST_BYTES_MAX, PoolCollector, StatsCollector, registry
from cxlkv.stats import COUNTERS
from cxlkv.tiers import Tiers
from cxlkv.transport.listener import STRANGERS_MAX

from ..support.damaging import poke
from ..support.processes import Child
from ..support.waiting import until

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
WAIT_S = 60
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# Appends, scores, attends, audits; then says so and waits to be killed.
WORKER = """
import sys, numpy as np
from cxlkv import Budget, CXLPool

pool = CXLPool.open(sys.argv[1], threads=1)
pool.admin.audit = 1
seq = pool.sequence()
rng = np.random.default_rng(3)
for layer in range(2):
    rows = rng.standard_normal((80, 2, 8)).astype(np.float32)
    seq.append(layer, rows, rows)
picked = seq.select(0, rows[0], Budget(pages=4), method="digest")
seq.fetch(0, picked)
pool.match_prefix(list(range(40))).release()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(shm_path: Path) -> str:
    return str(shm_path)


def make(path: str) -> CXLPool:
    return CXLPool.create(path, layout=LAYOUT, capacity="3MiB", threads=1)


def parse(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} is there twice"
            samples[key] = float(sample.value)
    return samples


def of(samples: Samples, name: str, pool: str, **labels: str) -> float:
    return samples[f"cxlkv_{name}", tuple(sorted({"pool": pool, **labels}.items()))]


@contextlib.contextmanager
def exporting(*pools: str) -> Iterator[tuple[Child, str]]:
    """The real command on a free port, and its URL; it is ended as an operator would."""
    with Child("-m", "cxlkv.ops.cli", "metrics", "--listen", "127.0.0.1:0", *pools) as child:
        line = child.hear()
        found = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics)", line)
        assert found, line
        yield child, found[1]
        child.end(signal.SIGTERM)


@contextlib.contextmanager
def exporter(*pools: str) -> Iterator[str]:
    with exporting(*pools) as (_, url):
        yield url


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parse(answer.read().decode())


@contextlib.contextmanager
def worker(path: str) -> Iterator[Child]:
    with Child("-c", WORKER, path) as child:
        assert child.hear() == "ready"
        yield child


def use(pool: CXLPool) -> None:
    """A bit of everything that is counted."""
    sequence = pool.sequence()
    rows = np.ones((10, 2, 8), np.float32)
    for layer in range(2):
        sequence.append(layer, rows, rows)
    pool.publish_prefix(sequence, list(range(8)))
    pool.match_prefix(list(range(20))).release()
    picked = sequence.select(0, rows[0], Budget(pages=2))
    sequence.attend(0, rows[0], picked)
    sequence.fetch(0, picked)
    sequence.release()


def test_scraped_over_http_it_is_what_the_pool_says(path: str) -> None:
    with make(path) as pool, exporter(path) as url:
        use(pool)
        samples, stats = scrape(url), pool.stats()
        assert of(samples, "pool_up", path) == 1
        assert of(samples, "pool_bytes", path) == os.stat(path).st_size
        assert of(samples, "pool_processes", path) == stats["processes"] == 1
        assert of(samples, "pool_prefix_pages", path) == stats["pages_published"] == 2
        assert of(samples, "pool_pinned_pages", path) == stats["pages_pinned"]
        for state in ("free", "held", "quarantined", "retired"):
            assert of(samples, "pool_pages", path, state=state) == stats[f"pages_{state}"]
        assert of(samples, "pool_pages", path, state="published") == 2
        total = sum(value for (name, _), value in samples.items() if name == "cxlkv_pool_pages")
        assert total == stats["pages_total"]
        for name in ("appended", "scored", "fetched", "attended"):
            value = of(samples, f"{name}_bytes_total", path)
            assert value == stats[f"{name}_bytes"] > 0
        assert of(samples, "match_keys_asked_total", path) == 5
        assert of(samples, "match_keys_hit_total", path) == 2
        for name in COUNTERS:
            assert of(samples, f"{name}_total", path) == pool.admin.overview().totals[name]


def test_silent_clients_hold_nothing_for_long(path: str) -> None:
    """Nor do those that send half a request, or one without an end. Others are answered at once."""

    def held() -> tuple[int, int]:
        process = f"/proc/{child.pid}"
        return len(os.listdir(f"{process}/task")), len(os.listdir(f"{process}/fd"))

    def connect(says: bytes) -> socket.socket:
        client = clients.enter_context(socket.create_connection((url.hostname, url.port)))
        client.settimeout(WAIT_S)
        client.sendall(says)
        return client

    with exporting(path) as (child, address), contextlib.ExitStack() as clients:
        url = urllib.parse.urlsplit(address)
        before = held()
        first = connect(b"")
        for _ in range(2 * STRANGERS_MAX):
            connect(b"GET /metrics HT")
        until(lambda: max(held()) <= max(before) + 2 * STRANGERS_MAX)
        assert first.recv(1) == b"", "it was pushed out"
        assert of(scrape(address), "pool_up", path) == 0
        with contextlib.suppress(ConnectionError):
            assert connect(b"GET / " + b"x" * REQUEST_BYTES_MAX).recv(1) == b""
        assert connect(b"GET /metrics HTTP/1.0\n\n").recv(12) == b"HTTP/1.0 200"
        until(lambda: held() == before)  # all have had their time


def test_counters_never_fall(path: str) -> None:
    """A worker is killed, then all leave, then the next one comes."""
    make(path).close()
    counters = [f"{name}_total" for name in COUNTERS]
    counters += [
        f"select_{name}_ratio_{part}" for name in ("recall", "mass") for part in ("count", "sum")
    ]
    with exporter(path) as url:
        last = scrape(url)

        def grown() -> Samples:
            nonlocal last
            now = scrape(url)
            for name in counters:
                assert of(now, name, path) >= of(last, name, path), name
            last = now
            return now

        with worker(path):
            working = grown()
            assert of(working, "pool_processes", path) == 1
            assert of(working, "pool_sequences", path) == 1
            assert of(working, "audited_selects_total", path) == 1
            assert 0 < of(working, "select_recall_ratio_sum", path) < 1
            assert 0 < of(working, "select_mass_ratio_sum", path) < 1
            appended = of(working, "appended_bytes_total", path)
            assert appended == 2 * 2 * 80 * 2 * 8 * 4
        killed = grown()
        assert of(killed, "pool_processes", path) == 0
        assert of(killed, "appended_bytes_total", path) == appended
        with CXLPool.open(path):
            assert of(grown(), "reaped_processes_total", path) == 1
        idle = grown()
        assert of(idle, "pool_up", path) == 1
        assert of(idle, "appended_bytes_total", path) == appended
        with worker(path):
            assert of(grown(), "appended_bytes_total", path) == 2 * appended


def test_a_pool_that_is_gone_or_damaged_is_down_and_the_rest_is_served(path: str) -> None:
    other, absent = f"{path}.other", f"{path}.absent"
    make(other).close()
    try:
        with exporter(path, other, absent) as url:
            assert of(scrape(url), "pool_up", path) == 0
            make(path).close()
            assert of(scrape(url), "pool_up", path) == 1
            poke(path, 20, b"????")
            samples = scrape(url)
            assert [of(samples, "pool_up", name) for name in (path, other, absent)] == [0, 1, 0]
            assert ("cxlkv_pool_bytes", (("pool", path),)) not in samples
            Path(path).unlink()
            Path(path).write_text("no pool")
            assert of(scrape(url), "pool_up", path) == 0
            Path(path).unlink()
            make(path).close()
            assert of(scrape(url), "pool_up", path) == 1
    finally:
        Path(other).unlink()


def test_embedded(path: str) -> None:
    """Open pools, anonymous ones and paths in one registry of the caller's own program."""
    with (
        make(path) as pool,
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="3MiB", threads=1) as hidden,
    ):
        use(hidden)
        made = registry([pool, hidden, Path(f"{path}.absent")])
        samples = parse(generate_latest(made).decode())
        name = f"anonymous:{hidden.describe()['identity']}"
        assert of(samples, "pool_up", path) == of(samples, "pool_up", name) == 1
        assert of(samples, "pool_up", f"{path}.absent") == 0
        assert of(samples, "appended_bytes_total", path) == 0
        assert of(samples, "appended_bytes_total", name) == hidden.stats()["appended_bytes"]
        hidden.close()
        assert of(parse(generate_latest(made).decode()), "pool_up", name) == 0


def test_registering_reads_no_pool_and_names_are_taken_once(path: str) -> None:
    made = CollectorRegistry(auto_describe=True)
    made.register(PoolCollector(path))
    with pytest.raises(ValueError, match="Duplicated"):
        made.register(PoolCollector(f"{path}.other"))


def test_names_have_their_units_and_few_labels(path: str) -> None:
    with make(path):
        text = generate_latest(registry([path])).decode()
    assert text.count("# HELP") == text.count("# TYPE")
    for name, labels in parse(text):
        assert {label for label, _ in labels} <= {"pool", "state"}
        assert re.fullmatch(r"cxlkv_[a-z_]+", name)
        if "bytes" in name:
            assert name.endswith(("_bytes", "_bytes_total"))


def test_what_an_object_counts_is_exported(pool: CXLPool) -> None:
    tiers = Tiers(pool)
    made = CollectorRegistry()
    made.register(StatsCollector("tiers", tiers.stats))
    total = pool.stats()["pages_total"]
    assert made.get_sample_value("cxlkv_tiers_far_pages_total") == total
    assert made.get_sample_value("cxlkv_tiers_failed_steps") == 0
    pool.close()
    assert list(made.collect()) == []
    tiers.close()
