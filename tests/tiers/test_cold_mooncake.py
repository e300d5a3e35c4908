"""The remote tier against a true Mooncake master on loopback, and what it has in common with the
cold file, whoever has that open: the same records or misses, whoever dies. `make test-remote` has
Mooncake."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import memmove, string_at
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.bench.peers.mooncake import LOOPBACK, free_port, start_master
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    ColdError,
    GeometryError,
    UnsupportedError,
)
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers, cold_mooncake
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import BLOCK_BYTES, RecordShape
from cxlkv.tiers.cold_mooncake import MooncakeTier
from cxlkv.tiers.cold_shared import SharedColdTier
from cxlkv.tiers.cold_store import ColdStore

from ..support.processes import Child
from ..support.waiting import until
from ..test_records import grown, names_of_keys, read_all
from .test_cold import SHAPE, SLOT, load, names, records
from .test_state_tiers import LAYOUTS, STATES, check, publish

LEND = "64MiB"
LIMIT_S = 15.0  # of anything with a dead master: a deadline of 5 s, and what is set up anew

# Lends memory until it is killed.
LENDER = """
import sys
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.cold_mooncake import MooncakeTier
from cxlkv.tiers.cold_shared import SharedColdTier
with MooncakeTier(sys.argv[1], shape=RecordShape(1000, 7), lend="64MiB"):
    print("lends", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="session")
def mooncake() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed here: `make test-remote` has it in its environment")
    os.environ["MC_TCP_BIND_ADDRESS"] = LOOPBACK


class Raises:
    """A client whose calls raise, once it is set up."""

    def setup(self, *options: str | int) -> int:
        return 0

    register_buffer = setup

    def close(self) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        raise RuntimeError("a fault of its own")


class InMemory(Raises):
    """A store that is a dictionary of this process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.kept) for key in keys]

    def batch_put_from(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]:
        self.kept |= {key: string_at(*one) for key, *one in zip(keys, at, sizes, strict=True)}
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]:
        found = [self.kept.get(key) for key in keys]
        for content, address in zip(found, at, strict=True):
            memmove(address, content or b"", len(content or b""))
        return [cold_mooncake.NOT_FOUND if one is None else len(one) for one in found]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0 if self.kept.pop(key, None) else cold_mooncake.NOT_FOUND for key in keys]


def test_a_call_that_raises_is_as_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cold_mooncake, "_client", lambda where: Raises())
    with MooncakeTier("mooncake://127.0.0.1:1?local=127.0.0.1", shape=SHAPE) as tier:
        assert not tier.contains(names(1)).any()
        assert tier.stats()["errors"] == 1
    assert "RuntimeError: a fault of its own" in caplog.text


@contextmanager
def master() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = start_master(port, client_ttl=2)
    try:
        yield f"mooncake://{LOOPBACK}:{port}", process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@contextmanager
def lender(where: str) -> Iterator[Child]:
    with Child("-c", LENDER, where) as child:
        assert "lends" in child.hear()
        yield child


@pytest.fixture(scope="module")
def store_at(mooncake: None) -> Iterator[str]:
    with master() as (where, _):
        yield where


@pytest.fixture(scope="module")
def remote(store_at: str) -> Iterator[MooncakeTier]:
    with MooncakeTier(store_at, shape=SHAPE, lend=LEND) as tier:
        yield tier


@pytest.fixture(params=["file", "owner", "peer", "mooncake"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ColdStore]:
    path, room = tmp_path / "a", BLOCK_BYTES + 64 * SLOT
    if request.param == "file":
        with ColdTier(path, shape=SHAPE, capacity=room) as tier:
            yield tier
    elif request.param in ("owner", "peer"):
        with (
            SharedColdTier(path, shape=SHAPE, capacity=room) as owner,
            SharedColdTier(path, shape=SHAPE, capacity=room) as peer,
        ):
            assert (owner.is_owner, peer.is_owner) == (True, False)
            yield owner if request.param == "owner" else peer
    else:
        found: MooncakeTier = request.getfixturevalue("remote")
        found.drop(names(*range(64)))
        yield found


# ---- what the file does, too ----


def test_wrong_arguments_are_named(cold: ColdStore) -> None:
    with pytest.raises(BadArgumentError, match="names of shape"):
        cold.contains(np.zeros((2, 15), np.uint8))
    with pytest.raises(BadArgumentError, match="records of shape"):
        cold.store(names(1), np.zeros((1, 999), np.uint8))
    with pytest.raises(BadArgumentError, match="out of shape"):
        cold.load(names(1, 2), np.zeros((1, 1000), np.uint8))
    assert cold.store(names(), np.zeros((0, 1000), np.uint8)).size == 0
    assert cold.load(names(), np.zeros((0, 1000), np.uint8)).size == 0


NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(["store", "load", "drop"]), NUMBERS), max_size=12)


@given(steps=STEPS)
@settings(max_examples=40)
def test_like_a_dictionary(cold: ColdStore, steps: list[tuple[str, list[int]]]) -> None:
    cold.drop(names(*range(12)))
    there: set[int] = set()
    for what, numbers in steps:
        if what == "store":
            there |= set(numbers)
            assert cold.store(names(*numbers), records(*numbers)).all()
        elif what == "load":
            assert load(cold, *numbers) == [n in there for n in numbers]
        else:
            gone = cold.drop(names(*numbers))
            assert {n for n, was in zip(numbers, gone, strict=True) if was} == there & set(numbers)
            there -= set(numbers)
        assert cold.contains(names(*range(12))).tolist() == [n in there for n in range(12)]


# ---- a pool's pages ----


def test_what_went_comes_back_to_another_pool(store_at: str, rng: np.random.Generator) -> None:
    """Another machine has the same layout, the same text, and nothing but the store in common."""
    layout = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype="float16")
    ids = list(range(320))
    with (
        CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as first,
        CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as other,
        Tiers(first, cold=store_at, cold_capacity=LEND) as tiers,
    ):
        sequence = grown(first, rng, len(ids))
        first.publish_prefix(sequence, ids)
        taken = read_all(first, names_of_keys(first, prefix_keys(ids, 16)))
        sequence.release()
        assert tiers.reclaim(first.stats()["pages_total"]) == 20
        assert tiers.stats()["demoted_pages"] == tiers.stats()["cold_stored"] == 20
        with Tiers(other, cold=store_at) as others, others.match_prefix(ids) as hit:
            assert hit.tokens == 320
            got = read_all(other, names_of_keys(other, prefix_keys(ids, 16)))
            np.testing.assert_array_equal(got, taken)
            assert others.stats()["cold_corrupt"] == 0


@pytest.mark.parametrize("store", ["in memory", "mooncake"])
def test_checkpoints_come_back_to_another_pool_with_their_pages(
    store: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Of ends of pages and of tails; where the store has lost a page of one, the one before it."""
    if store == "in memory":
        shared = InMemory()
        monkeypatch.setattr(cold_mooncake, "_client", lambda where: shared)
        where = "mooncake://127.0.0.1:1?local=127.0.0.1"
    else:
        where = request.getfixturevalue("store_at")
    layout, ids = LAYOUTS["full"], rng.integers(0, 1000, 60)
    kept = {end: rng.integers(0, 256, STATES.bytes).astype(np.uint8) for end in (16, 27, 48, 60)}
    with (
        CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as first,
        CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as other,
        Tiers(first, cold=where, cold_capacity=LEND) as tiers,
    ):
        for end, states in kept.items():
            publish(first, ids[:end], states)
        tiers.reclaim(first.stats()["pages_total"])
        assert tiers.stats()["cold_stored"] == tiers.stats()["evicted_pages"]
        with Tiers(other, cold=where) as others:
            assert others.reach(prefix_keys(ids, 8)) == 48
            for end, states in kept.items():
                check(other, others, ids[:end], states)
                others.reclaim(other.stats()["pages_total"])
            records = other.records
            tail = prefix_keys(ids, 8, tail=True)[-1]
            gone = records.state_names(tail, records.state_pages)[0, -1:]
            assert others.cold is not None
            assert others.cold.drop(gone).all()
            with others.match_prefix(ids) as hit:
                assert hit.tokens == 48
                np.testing.assert_array_equal(hit.read_states(), kept[48])
            assert others.stats()["cold_corrupt"] == 0


def test_objects_go_and_come_back(store_at: str, rng: np.random.Generator) -> None:
    """By name; one that was put again with other bytes is the newer one."""
    layout = KVLayout.objects("64KiB")
    kept = {f"object {i}": rng.bytes(int(rng.integers(1, 64 << 10))) for i in range(120)}
    with (
        ObjectPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool,
        Tiers(pool, cold=store_at, cold_capacity="32MiB") as tiers,
    ):
        for name, content in kept.items():
            assert pool.put(name, content)
        assert pool.stats()["pages_total"] < len(kept), "some had to go"
        again = "object 0"
        assert tiers.forget([again]) == 1
        kept[again] = b"newer"
        assert pool.put(again, kept[again])
        tiers.reclaim(pool.stats()["pages_total"])
        assert (pool.object_sizes(list(kept)) < 0).all()
        for name, content in kept.items():
            assert tiers.restore([name]).all(), name
            out = np.zeros(len(content), np.uint8)
            assert pool.get_into(name, out) == len(content)
            assert out.tobytes() == content


def test_layouts_do_not_meet(remote: MooncakeTier, store_at: str) -> None:
    remote.store(names(40), records(40))
    with MooncakeTier(store_at, shape=RecordShape(1000, 8)) as other:
        assert other.contains(names(40)).tolist() == [False]


def test_an_open_store_is_the_callers(tmp_path: Path, pool: CXLPool) -> None:
    shape = RecordShape.of(pool)
    with ColdTier(tmp_path / "a", shape=shape, capacity="2MiB") as mine:
        Tiers(pool, cold=mine).close()
        assert mine.stats()["records"] == 0
        with pytest.raises(BadArgumentError, match="go with the path"):
            Tiers(pool, cold=mine, cold_capacity="2MiB")
    with (
        ColdTier(tmp_path / "b", shape=SHAPE, capacity="2MiB") as other,
        pytest.raises(GeometryError, match=r"another pool layout: .*a layout"),
    ):
        Tiers(pool, cold=other)


# ---- damage ----


def test_what_was_changed_there_is_a_miss_and_goes(remote: MooncakeTier, seed: int) -> None:
    """Flipped, cut, or another's: it is found out, and stored anew."""
    rng, key = random.Random(seed), remote._keys(names(20))[0]
    remote.drop(names(20, 21))
    assert remote.store(names(20, 21), records(20, 21)).all()
    whole: bytes = remote._client.get(key)  # type: ignore[attr-defined]
    other: bytes = remote._client.get(remote._keys(names(21))[0])  # type: ignore[attr-defined]
    used = SHAPE.bytes + 40
    changed = [whole[:-1], whole + b"\0", b"", other]
    for _ in range(40):
        at = rng.randrange(used)
        changed.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    for wrong in changed:
        remote._client.batch_remove([key], True)
        before = remote.stats()["corrupt"]
        if wrong:
            assert remote._client.put(key, wrong) == 0  # type: ignore[attr-defined]
        assert load(remote, 20, 21) == [False, True]
        assert remote.stats()["corrupt"] == before + bool(wrong)
        assert remote.contains(names(20)).tolist() == [False]
        assert remote.store(names(20), records(20)).all()
        assert load(remote, 20) == [True]


# ---- who dies ----


def test_a_machine_that_dies_is_told_in_time(mooncake: None) -> None:
    """Its records are misses, the error is counted; what others lend is used again."""
    with master() as (where, _), MooncakeTier(where, shape=SHAPE) as tier:
        with lender(where) as process:
            assert tier.store(names(1, 2), records(1, 2)).all()
            assert load(tier, 1, 2) == [True, True]
            process.kill()
            began = time.monotonic()
            assert load(tier, 1, 2) == [False, False]
            assert time.monotonic() - began < LIMIT_S
            assert tier.stats()["errors"] == 1
            assert "Is its master up" in tier.why_off
            assert tier.store(names(3), records(3)).tolist() == [False]
        with lender(where):
            until(lambda: bool(tier.store(names(3), records(3)).all()), "nothing is stored again")
            assert load(tier, 1, 2, 3) == [False, False, True]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_master_that_dies_or_hangs_costs_a_deadline(mooncake: None, how: signal.Signals) -> None:
    with (
        master() as (where, process),
        MooncakeTier(f"{where}?timeout_s=1", shape=SHAPE, lend=LEND) as tier,
    ):
        assert tier.store(names(1, 2), records(1, 2)).all()
        process.send_signal(how)
        began = time.monotonic()
        assert load(tier, 1, 2) == [False, False]
        assert tier.contains(names(1)).tolist() == [False]
        assert tier.store(names(3), records(3)).tolist() == [False]
        assert time.monotonic() - began < LIMIT_S
        assert tier.stats()["errors"] == 1
        assert tier.stats()["off"] == 1
        if how == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)

            until(
                lambda: bool(tier.store(names(1), records(1)).all()),
                "a master that goes on is not asked again",
            )
            assert load(tier, 1) == [True]


def test_an_engine_computes_when_the_master_is_gone(
    mooncake: None, rng: np.random.Generator
) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype="float16")
    ids = list(range(320))
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        with master() as (where, process):
            tiers = Tiers(pool, cold=f"{where}?timeout_s=1", cold_capacity=LEND)
            sequence = grown(pool, rng, len(ids))
            pool.publish_prefix(sequence, ids)
            sequence.release()
            tiers.reclaim(pool.stats()["pages_total"])
            process.kill()
            process.wait()
            began = time.monotonic()
            with tiers.match_prefix(ids) as hit:
                assert hit.tokens == 0
            assert time.monotonic() - began < LIMIT_S
        sequence = grown(pool, rng, len(ids))  # what it computes is found as ever
        pool.publish_prefix(sequence, ids)
        sequence.release()
        with tiers.match_prefix(ids) as hit:
            assert hit.tokens == 320
        assert tiers.stats()["cold_errors"] >= 1
        tiers.close()


def test_no_master_is_an_error_in_time(mooncake: None) -> None:
    began = time.monotonic()
    with pytest.raises(ColdError, match="no Mooncake store can be had there"):
        MooncakeTier(f"mooncake://{LOOPBACK}:{free_port()}", shape=SHAPE)
    assert time.monotonic() - began < 40


def test_a_store_without_memory_refuses(mooncake: None) -> None:
    with master() as (where, _), MooncakeTier(where, shape=SHAPE) as tier:
        assert tier.store(names(1), records(1)).tolist() == [False]
        assert tier.stats()["refused"] == 1
        assert tier.stats()["errors"] == 0


def test_a_closed_tier_says_so(store_at: str) -> None:
    tier = MooncakeTier(store_at, shape=SHAPE)
    tier.close()
    tier.close()
    with pytest.raises(ClosedError, match="was closed"):
        tier.contains(names(1))


# ---- without Mooncake, too ----


def test_without_mooncake_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UnsupportedError, match="pip install mooncake-transfer-engine"):
        MooncakeTier("mooncake://127.0.0.1:1", shape=SHAPE)


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("mooncake://host", "HOST:PORT is wanted"),
        ("mooncake://host:many", "HOST:PORT is wanted"),
        ("mooncake://host:1/path", "HOST:PORT is wanted"),
        ("mooncake://host:1?speed=9", "not speed"),
        ("mooncake://host:1?speed", "HOST:PORT is wanted"),
        ("mooncake://host:1?timeout_s=0", "more than 0"),
        ("mooncake://host:1?timeout_s=x", "more than 0"),
    ],
)
def test_wrong_places_are_named(where: str, match: str) -> None:
    with pytest.raises(BadArgumentError, match=match):
        MooncakeTier(where, shape=SHAPE)


def test_what_does_not_go_together_is_named(pool: CXLPool) -> None:
    with pytest.raises(BadArgumentError, match="goes with a file"):
        Tiers(pool, cold="mooncake://host:1", compress="zstd")
