"""The emulated link: exact on the virtual clock, fair between streams, charged to what a pool does.

No test measures time: that is `cxlkv bench link`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Tiers, _io_hooks
from cxlkv.bench.result import Result
from cxlkv.emulation.link import Link, _links, emulate, link_of, parse
from cxlkv.emulation.profiles import OURS, Profile, named, read
from cxlkv.emulation.sharing import Stream, simulate
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.tiers.local import LocalTier

from ..test_records import grown

ASTERA = named("astera-a1000")[1]
PIECE_BYTES = 4 * 8 * 4 * 2  # K and V of a page and head: 4 tokens of 8 channels in float32
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")


def rows(tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((tokens, 2, 8)).astype(np.float32)


# ---- streams on the virtual clock ----


@pytest.mark.parametrize("name", read(OURS))
def test_one_stream_meets_the_profile_exactly(name: str) -> None:
    profile = named(name)[1]
    for write in (False, True):
        (line,) = simulate(profile, [Stream(64, write=write)])
        assert line.latency_s == [profile.latency_ns / 1e9]
        size, times = 1 << 30, 3
        (bulk_one,) = simulate(profile, [Stream(size, times, write=write)])
        rate = 1e9 * profile.gb_per_s(float(write))
        expected = times * (profile.latency_ns * 1e-9 + size / rate)
        assert bulk_one.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", read(OURS))
def test_the_loaded_curve_comes_out_at_the_published_points(name: str) -> None:
    profile = named(name)[1]
    for load, latency in profile.loaded:
        devices = 16
        background = Stream(10**9, at_most_gb_per_s=load)
        probe = Stream(64, 50, begins_s=1e-4)
        _, probed = simulate(profile, [background, probe], devices)
        assert [1e9 * found for found in probed.latency_s] == pytest.approx([latency] * 50)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_streams_share_the_limit_and_use_it(count: int) -> None:
    """Latencies are small beside such operations: what is missing is theirs."""
    found = simulate(ASTERA, [Stream(1 << 28, 4) for _ in range(count)])
    assert sum(one.gb_per_s for one in found) == pytest.approx(48, rel=1e-3)
    assert max(one.gb_per_s for one in found) == pytest.approx(48 / count, rel=1e-3)


def test_never_more_than_the_limit_whatever_the_sizes(rng: np.random.Generator) -> None:
    """Short operations do not overtake at the expense of nobody."""
    streams = [
        Stream(int(size), int(times), begins_s=float(at))
        for size, times, at in zip(
            2.0 ** rng.uniform(6, 24, 12), rng.integers(1, 30, 12), rng.uniform(0, 1e-3, 12),
            strict=True,
        )
    ]  # fmt: skip
    found = simulate(ASTERA, streams)
    total = sum(one.stream.operation_bytes * len(one.ended_s) for one in found)
    assert all(len(one.ended_s) == one.stream.operations for one in found)
    begins, ends = min(s.begins_s for s in streams), max(one.ended_s[-1] for one in found)
    assert total <= 48e9 * (1 + 1e-9) * (ends - begins)
    for one in found:
        for latency, began, ended in zip(one.latency_s, one.began_s, one.ended_s, strict=True):
            alone = latency + one.stream.operation_bytes / 48e9
            assert ended - began >= alone * (1 - 1e-9)


def test_reads_beside_writes_get_the_mixed_figure() -> None:
    reads = [Stream(1 << 28, 2)] * 2
    found = simulate(ASTERA, [*reads, Stream(1 << 28, 2, write=True)])
    assert [one.gb_per_s for one in found] == pytest.approx([18, 18, 18], rel=1e-3)


def test_devices_and_the_switch_have_limits_of_their_own() -> None:
    profile = Profile.model_validate(
        {
            "what": "three devices behind a switch",
            "source": "this test",
            "standing": "assumed",
            "latency_ns": 1,
            "read_gb_per_s": 100,
            "per_device_gb_per_s": 10,
            "per_switch_gb_per_s": 25,
        }
    )
    size = 10**9

    def shares(*devices: int, at_most: float | None = None) -> list[float]:
        streams = [Stream(size, device=device, at_most_gb_per_s=at_most) for device in devices]
        found = simulate(profile, streams, devices=3)
        return [size / one.ended_s[0] / 1e9 for one in found]

    assert shares(0) == pytest.approx([10])
    assert shares(0, 0) == pytest.approx([5, 5])
    assert shares(0, 0, 1) == pytest.approx([5, 5, 10])
    assert shares(0, 1, 2) == pytest.approx([25 / 3] * 3)
    assert shares(-1) == pytest.approx([25])
    assert shares(0, 1, at_most=4) == pytest.approx([4, 4])
    for device in (-2, 3):
        with pytest.raises(BadArgumentError, match=f"device {device}: 0 to 2"):
            shares(device)


def test_the_same_streams_give_the_same_times(rng: np.random.Generator) -> None:
    streams = [Stream(int(size), 5, write=bool(size % 2)) for size in rng.integers(64, 1 << 20, 9)]
    first, second = simulate(ASTERA, streams), simulate(ASTERA, streams)
    assert [one.ended_s for one in first] == [one.ended_s for one in second]


@pytest.mark.parametrize(
    "wrong", [{"operation_bytes": 0}, {"operations": 0}, {"at_most_gb_per_s": 0}, {"begins_s": -1}]
)
def test_bad_streams(wrong: dict[str, int]) -> None:
    with pytest.raises(BadArgumentError):
        Stream(**{"operation_bytes": 64, **wrong})  # type: ignore[arg-type]


# ---- what a pool's operations are charged ----


def test_each_operation_is_charged_its_bytes(pool: CXLPool) -> None:
    sequence = pool.sequence()
    with emulate(pool, "astera-a1000", mode="virtual") as link:
        for layer in range(2):
            sequence.append(layer, rows(10), rows(10))  # two pages, and a tail of two tokens
        assert link.operations["append"] == 2
        geometry = pool.describe()["geometry"]
        assert isinstance(geometry, dict)
        sizes = (geometry[f"{kind}_piece_bytes"] for kind in ("digest", "sketch", "key", "value"))
        assert link.bytes["append"] == 2 * 2 * 2 * sum(sizes)
        sequence.append(0, rows(1), rows(1))  # stays in the tail, in local memory
        assert link.operations["append"] == 2
        sequence.append(1, rows(1), rows(1))
        picked = sequence.select(0, rows(1)[0], Budget(pages=3), method="exact")
        assert link.bytes["select"] == picked.bytes_scored
        sequence.fetch(0, picked)
        assert link.bytes["fetch"] == 2 * 2 * PIECE_BYTES  # the third is the open tail
        sequence.fetch(0)
        sequence.attend(0, rows(1)[0], picked)
        sequence.attend(0, rows(1)[0])
        assert link.bytes["fetch"] == link.bytes["attend"] == 2 * 2 * 2 * PIECE_BYTES
        writes = link.bytes["append"]
        reads = sum(link.bytes.values()) - writes
        expected = sum(link.operations.values()) * 250e-9 + reads / 48e9 + writes / 47e9
        assert link.seconds == pytest.approx(expected, rel=1e-12)
        assert link.waited_s == 0
    before = link.seconds
    sequence.fetch(0)
    assert link.seconds == before  # the link is no longer charged


def test_near_copies_are_not_charged_and_promotions_are(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    sequence = grown(pool, rng, 16)
    with LocalTier(pool, "64KiB") as tier, emulate(pool, "pond-pool", mode="virtual") as link:
        page = int(sequence.pages[1])
        assert len(tier.promote([2 * page]).promoted) == 1  # layer 0
        assert link.bytes["promote"] == 2 * PIECE_BYTES
        tier.promote([2 * page])  # is there
        assert link.operations["promote"] == 1
        for layer in range(2):
            sequence.fetch(layer, sequence.select(layer, rows(1)[0], Budget(share=1.0)))
        assert link.bytes["fetch"] == (3 + 4) * 2 * PIECE_BYTES


def test_cold_moves_are_charged(tmp_path: Path, rng: np.random.Generator) -> None:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="3MiB", threads=1) as pool:
        with Tiers(pool, cold=tmp_path / "cold", cold_capacity="16MiB") as tiers:
            sequence = grown(pool, rng, 16)
            pool.publish_prefix(sequence, list(range(16)))
            sequence.release()
            with emulate(pool, "pond-pool", mode="virtual") as link:
                tiers.reclaim(pool.stats()["pages_total"])
                tiers.match_prefix(list(range(16))).release()
            assert tiers.cold is not None
            record_bytes = tiers.cold.shape.bytes
        assert link.bytes["demote"] == link.bytes["restore"] == 4 * record_bytes


def test_a_window_is_charged_what_is_seen(rng: np.random.Generator) -> None:
    from cxlkv import LayerGroup

    group = LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32", window=8)
    layout = KVLayout.of([group], page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = grown(pool, rng, 40)
        with emulate(pool, ASTERA, mode="virtual") as link:
            sequence.attend(0, rows(1)[0])
        assert 2 * 2 * PIECE_BYTES <= link.bytes["attend"] <= 3 * 2 * PIECE_BYTES


def test_waiting_takes_what_the_model_says_and_results_stay_the_same(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    """No time is measured against another: an operation is never over before the model's time."""
    sequence = grown(pool, rng, 64)
    plain = [np.asarray(array) for array in sequence.fetch(0)]
    with emulate(pool, "astera-a1000", slow=1e4) as link:
        began = time.perf_counter()
        found = sequence.fetch(0)
        took = time.perf_counter() - began
    assert took >= link.alone_s(16 * 2 * PIECE_BYTES) > 2.5e-3
    assert link.late_operations == 0
    assert link.waited_s > 0
    assert all(np.array_equal(a, b) for a, b in zip(plain, found, strict=True))


def test_threads_that_wait_share_the_link() -> None:
    """Together they take at least the time of all their bytes on the link."""
    link, size, threads = link_of(ASTERA, slow=1000), 1 << 19, 3
    barrier = threading.Barrier(threads)

    def go() -> None:
        barrier.wait()
        link.heard("fetch", size, time.perf_counter())

    workers = [threading.Thread(target=go) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rate = 1e9 * link.profile.gb_per_s(0)
    assert time.perf_counter() - began >= threads * size / rate
    assert not link._moving


def test_a_slow_host_is_told() -> None:
    link = link_of(ASTERA)
    link.heard("fetch", 1 << 20, time.perf_counter() - 10)
    assert (link.late_operations, link.waited_s > 1) == (1, False)


# ---- how it is asked for, and where it is said ----


def test_it_is_said_by_pool_and_results(pool: CXLPool) -> None:
    assert Result("x").emulated is None
    assert "emulated" not in pool.describe()
    early = Result("early")
    with emulate(pool, "astera-a1000", mode="virtual"):
        assert pool.describe()["emulated"] == "astera-a1000, virtual"
        assert Result("x").emulated == "astera-a1000, virtual"
        early.measure("bytes", [1], "bytes")
        with pytest.raises(UnsupportedError, match="a goes by this machine's clock, and nothing"):
            early.measure("a", [1], "s")
        early.measure("a", [1], "s", "astera-a1000, virtual")  # of that clock, as it says
        early.ratio("b", 1.0)
        with emulate(pool, "pond-pool", slow=4):
            assert pool.describe()["emulated"] == "pond-pool slowed 4 times, wait"
        assert _io_hooks.label(pool._handle) == "astera-a1000, virtual"
    early.measure("here", [1], "s")
    found = early.as_dict()
    assert found["emulated"] is None
    assert found["links"] == dict.fromkeys(("bytes", "a", "b"), "astera-a1000, virtual")
    assert "emulated" not in pool.describe()


def test_two_pools_on_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
    make = partial(CXLPool.create, "anonymous:", layout=layout, capacity="4MiB")
    monkeypatch.setenv("CXLKV_EMULATE", "astera-a1000, virtual")
    with make() as one, make() as two:
        assert one.describe()["emulated"] == "astera-a1000, virtual"
        assert _links.of[one._handle] is _links.of[two._handle]


def test_bad_arguments() -> None:
    for text, message in (
        ("astera-a1000, slow", "mode 'slow': one of wait, virtual"),
        ("", "which profile"),
        (",wait", "which profile"),
    ):
        with pytest.raises(BadArgumentError, match=message):
            parse(text)
    with pytest.raises(BadArgumentError, match="devices=0"):
        link_of("astera-a1000", devices=0)


PROGRAM = """
import os
from cxlkv import CXLPool, KVLayout
layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
    print(pool.describe().get("emulated"), flush=True)
    if os.fork() == 0:
        print(pool.describe().get("emulated"), flush=True)
        os._exit(0)
    os.wait()
"""


def under(emulated: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CXLKV_EMULATE": emulated}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("astera-a1000", "astera-a1000, wait"),
        ("astera-a1000,virtual", "astera-a1000, virtual"),
        ("numa:1", "None"),
        ("", "None"),
    ],
)
def test_from_the_environment(value: str, said: str) -> None:
    done = under(value, "-c", PROGRAM)
    if "numa" not in value:
        assert done.stdout.split("\n") == [said, said, ""], done.stderr


def test_a_wrong_environment_is_named() -> None:
    done = under("astra", "-c", PROGRAM)
    assert done.returncode == 1
    assert "CXLKV_EMULATE=astra: no profile 'astra'" in done.stderr
    done = under("pond-pool", "-m", "cxlkv.ops.cli", "info")
    assert "Emulated (CXLKV_EMULATE): pond-pool, wait" in done.stdout


def test_what_a_fork_leaves_behind_is_not_waited_for() -> None:
    link = Link("x", ASTERA)
    with link._lock:  # as a thread of the parent may hold it
        link.reset_after_fork()
        link.heard("fetch", 64, time.perf_counter())
