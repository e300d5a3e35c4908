"""Tiers: stories with few pages, a model of what is where, faults, and two processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cxlkv import CXLPool, KVLayout, Sequence, _core
from cxlkv.errors import BadArgumentError, BusyError, ClosedError, DiskFullError, PoolFullError
from cxlkv.layout import LayerGroup
from cxlkv.machine.costs import Costs, Prefill, Tier
from cxlkv.prefix import PageKeys, key_hashes, prefix_keys
from cxlkv.tiers import Tiers
from cxlkv.tiers.cold_shared import SharedColdTier

from ..conftest import MakePool, audit
from ..support.forking import in_child
from ..support.lengths import nightly
from ..support.processes import Child
from ..support.texts import SMALL, grown, numbers, publish, verify

PAGE = 4


def text(number: int, pages: int) -> list[int]:
    """Token ids of a text of its own."""
    return [1000 * number + i for i in range(pages * PAGE)]


def publish_many(pool: CXLPool, count: int) -> None:
    """Texts of 4 pages."""
    for number in range(1, count + 1):
        publish(pool, text(number, 4))


def found(tiers: Tiers, ids: list[int]) -> int:
    """Pages that match() finds; their bytes are checked."""
    with tiers.match(prefix_keys(ids, PAGE)) as hit, _released(hit.sequence()) as sequence:
        verify(sequence, ids[: hit.tokens])
        return hit.tokens // PAGE


@contextmanager
def _released(sequence: Sequence) -> Iterator[Sequence]:
    yield sequence
    sequence.release()


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=SMALL, capacity="2350KiB", threads=1) as made:
        yield made
        audit(made)


@pytest.fixture
def cold_path(tmp_path: Path) -> Path:
    return tmp_path / "pool.cold"


@pytest.fixture
def tiers(pool: CXLPool, cold_path: Path) -> Iterator[Tiers]:
    with Tiers(pool, cold=cold_path, cold_capacity="2MiB") as made:
        yield made


def total(pool: CXLPool) -> int:
    return pool.stats()["pages_total"]


# ---- stories ----


def test_a_full_pool_lets_the_oldest_text_go(pool: CXLPool) -> None:
    texts = [text(number, 4) for number in range(1, total(pool) // 4 + 2)]
    for ids in texts[:-1]:
        publish(pool, ids)
    with pytest.raises(PoolFullError):
        publish(pool, texts[-1])
    with Tiers(pool, policy="lru") as tiers:
        publish(pool, texts[-1])
        assert found(tiers, texts[-1]) == 4
        assert found(tiers, texts[0]) < 4, "its last pages made room"
        assert tiers.stats()["evicted_pages"] > 0
        assert tiers.stats()["dropped_pages"] == 0, "there is no cold tier to be refused by"


def test_a_full_pool_makes_room_for_the_tail_of_a_handle(pool: CXLPool) -> None:
    ids = [*text(1, 1), 7, 8]
    sequence = grown(pool, ids)
    publish(pool, text(2, 4))
    rest = pool.pages.alloc(pool.stats()["pages_free"])
    with pytest.raises(PoolFullError):
        _ = sequence.handle
    with Tiers(pool), _released(pool.adopt(sequence.handle)) as adopted:
        verify(adopted, ids)
    sequence.release()
    pool.pages.free(rest)


def test_tails_go_and_come_back(pool: CXLPool, tiers: Tiers) -> None:
    ids = [*text(1, 3), 7, 8]
    publish(pool, ids, tail=True)
    assert tiers.reclaim(total(pool)) == 4
    with pool.match_prefix(ids) as hit:
        assert hit.tokens == 0
    with tiers.match_prefix([*ids, 9]) as hit, _released(hit.sequence()) as sequence:
        verify(sequence, ids)


def two_groups() -> CXLPool:
    """Pages of two parts: one layer without a window, one with."""

    def group(window: int | None) -> LayerGroup:
        return LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32", window=window)

    layout = KVLayout.of([group(None), group(6)], [0, 1], page_tokens=PAGE)
    return CXLPool.create("anonymous:", layout=layout, capacity="3MiB", threads=1)


def test_layer_groups_go_and_come_back(tmp_path: Path) -> None:
    with two_groups() as pool:
        ids = text(3, 6)
        with Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB") as tiers:
            publish(pool, ids)
            before = pool.stats()["pages_published_only"]
            assert tiers.reclaim(total(pool)) == before
            with tiers.match(prefix_keys(ids, PAGE)) as hit:
                assert hit.tokens == len(ids)
                sequence = hit.sequence()
                k, _ = sequence.fetch(0)
                got = np.asarray(k).transpose(1, 2, 0, 3).reshape(-1, 2, 8)
                np.testing.assert_array_equal(got, numbers(ids, 0, 0))
                sequence.release()
        audit(pool)


def test_records_name_the_page_before(
    pool: CXLPool, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxlkv.tiers.tiers.BATCH_BYTES", 1)  # a page each
    ids = text(1, 4)
    names = pool.records.names(key_hashes(prefix_keys(ids, PAGE)), 1)[:, 0, 0]
    publish(pool, ids)
    tiers.reclaim(total(pool))
    assert isinstance(tiers.cold, SharedColdTier)
    assert tiers.cold.file is not None
    got, parents = tiers.cold.file.names()
    assert got.tolist() == names[::-1].tolist(), "leaves go first"
    assert parents.tolist() == [*names[2::-1].tolist(), [0] * 16]
    assert found(tiers, ids) == 4


@pytest.mark.parametrize("full", [0, 2])
def test_a_tail_that_came_back_hangs_where_it_did(tmp_path: Path, full: int) -> None:
    """Its first part on the page before it, the others on the first."""
    ids = [*text(1, full), 7, 8]
    with two_groups() as pool, Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB") as tiers:
        keys = prefix_keys(ids, PAGE, tail=True)
        names = pool.records.names(key_hashes(keys), 1)[:, 0]

        def check_parents() -> None:
            pages, _ = pool.records.find(np.ascontiguousarray(names[-2:, 0]))
            tail, _ = pool.records.find(np.ascontiguousarray(names[-1]))
            rows, _ = pool.hotness.published()
            above = rows["parent"][np.searchsorted(rows["page"], tail)].tolist()
            assert above == [int(pages[0]) if full else _core.NO_PAGE, int(tail[0])]

        publish(pool, ids, tail=True)
        check_parents()
        tiers.reclaim(total(pool))
        with tiers.match_prefix(ids) as hit:
            assert hit.tokens == len(ids)
            check_parents()
        audit(pool)


def test_held_pinned_and_leased_pages_stay(pool: CXLPool) -> None:
    held, pinned, leased, other = (text(number, 4) for number in range(1, 5))
    with Tiers(pool) as tiers:
        for ids in (held, pinned, leased, other):
            publish(pool, ids)
        kept = pool.match(prefix_keys(held, PAGE)).sequence()
        assert pool.admin.pin(prefix_keys(pinned, PAGE)) == 4
        lease = pool.match(prefix_keys(leased, PAGE))
        assert tiers.reclaim(total(pool)) == 0, "all or nothing"
        assert tiers.reclaim(total(pool) - 12) == 4
        assert [found(tiers, ids) for ids in (held, pinned, leased, other)] == [4, 4, 4, 0]
        kept.release()
        lease.release()
        pool.admin.unpin(prefix_keys(pinned, PAGE))
        assert tiers.reclaim(total(pool)) == 12


def test_full_of_what_is_held_is_an_error(pool: CXLPool, tiers: Tiers) -> None:
    sequence = grown(pool, text(1, total(pool)))
    with pytest.raises(PoolFullError):
        grown(pool, text(2, 1))
    verify(sequence, text(1, total(pool)))
    sequence.release()


def test_back_pressure_when_there_is_no_room_to_bring_to(pool: CXLPool, tiers: Tiers) -> None:
    ids = text(1, 4)
    publish(pool, ids)
    tiers.reclaim(total(pool))
    sequence = grown(pool, text(2, total(pool) - 2))
    assert found(tiers, ids) == 0
    assert tiers.stats()["refused_pages"] == 4
    sequence.release()
    assert found(tiers, ids) == 4


def test_watermarks(pool: CXLPool) -> None:
    """Nothing below 2 % missing; then 5 % are made free."""
    with Tiers(pool, policy="lru") as tiers:
        publish_many(pool, total(pool) // 4)
        free = pool.stats()["pages_free"]
        assert free == total(pool) % 4
        assert tiers.step()["evicted_pages"] == (int(0.05 * total(pool)) - free if free < 1 else 0)
        assert tiers.step() == {"evicted_pages": 0, "promoted_bytes": 0}


def test_rate_limit_holds_a_step_back(pool: CXLPool) -> None:
    with Tiers(pool, bytes_per_s=1.0) as tiers:
        publish_many(pool, total(pool) // 4)
        assert tiers.step()["evicted_pages"] == 0


def test_what_is_computed_faster_is_not_read(pool: CXLPool, cold_path: Path) -> None:
    slow = Tier(bytes_per_s=1e3, latency_s=1.0)
    fast = Tier(bytes_per_s=1e9, latency_s=1e-6)
    costs = Costs(
        local=fast, far=fast, cold=slow, prefill=Prefill(tokens_per_s=1e6, context_half=1e6)
    )
    ids = text(1, 4)
    with Tiers(pool, cold=cold_path, cold_capacity="2MiB", costs=costs) as tiers:
        publish(pool, ids)
        tiers.reclaim(total(pool))
        assert found(tiers, ids) == 0
        assert tiers.stats()["not_worth_pages"] == 4


def test_the_cost_policy_keeps_what_is_deep(pool: CXLPool) -> None:
    """Deeper pages attend to more: 8 short texts go before the end of a long one."""
    fast = Tier(bytes_per_s=1e12, latency_s=0.0)
    costs = Costs(local=fast, far=fast, prefill=Prefill(tokens_per_s=1e3, context_half=4.0))
    with Tiers(pool, policy="cost", costs=costs) as tiers:
        publish(pool, text(1, 16))
        for number in range(2, 10):
            publish(pool, text(number, 2))
        tiers.reclaim(pool.stats()["pages_free"] + 8)
        assert found(tiers, text(1, 16)) == 16


def test_a_prefix_makes_no_room_for_itself(pool: CXLPool, cold_path: Path) -> None:
    """Two pages of an old text behind a gap are in a full pool: they are the first that would go
    when the others come back, as nobody holds them.
    """
    ids = text(1, 4)
    keys = prefix_keys(ids, PAGE)
    with Tiers(pool, cold=cold_path, cold_capacity="2MiB", policy="lru") as tiers:
        publish(pool, ids)
        tiers.reclaim(total(pool))
        assert found(tiers, ids) == 4
        assert pool.forget(keys[:1]) == pool.forget(keys[3:]) == 1
        for number in range(pool.stats()["pages_free"] - 1):
            publish(pool, text(2 + number, 1))
        assert found(tiers, ids) == 4


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_whatever_order_pages_were_lost_in(
    pool: CXLPool, cold_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Texts with gaps, the pool full, and nothing known of which page follows which."""
    texts = [text(number, 4) for number in range(1, total(pool) // 4 + 9)]
    with Tiers(pool, cold=cold_path, cold_capacity="2MiB", policy=policy) as tiers:
        for ids in texts:
            publish(pool, ids)
        tiers.reclaim(total(pool))
        for ids in texts:
            assert found(tiers, ids) == 4
            keys = prefix_keys(ids, PAGE)
            for place in np.flatnonzero(rng.random(4) < 0.5).tolist():
                pool.forget(keys[place : place + 1])
        for place in rng.permutation(len(texts)).tolist():
            assert found(tiers, texts[place]) == 4


# ---- faults ----


def test_a_damaged_record_is_a_miss(pool: CXLPool, tiers: Tiers, cold_path: Path) -> None:
    ids = text(1, 4)
    publish(pool, ids)
    tiers.reclaim(total(pool))
    assert isinstance(tiers.cold, SharedColdTier)
    size = os.path.getsize(cold_path)
    bytes_of = bytearray(cold_path.read_bytes())
    for at in range(8192, size, 512):
        bytes_of[at] ^= 0x40
    with cold_path.open("r+b") as file:
        file.write(bytes_of)
    assert found(tiers, ids) == 0
    assert tiers.stats()["cold_corrupt"] > 0


def test_a_disk_that_is_full_is_told_at_once(pool: CXLPool, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(DiskFullError):
        Tiers(pool, cold=tmp_path / "c", cold_capacity=free.f_bavail * free.f_frsize * 4)
    with Tiers(pool):  # and nothing is left behind
        pass


def test_the_cold_file_may_be_removed_in_use(pool: CXLPool, tiers: Tiers, cold_path: Path) -> None:
    ids = text(1, 4)
    publish(pool, ids)
    tiers.reclaim(total(pool))
    cold_path.unlink()
    assert found(tiers, ids) == 4


def test_one_for_each_pool_and_process(pool: CXLPool, tmp_path: Path) -> None:
    with Tiers(pool) as tiers:
        with pytest.raises(BusyError, match="close them first"):
            Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB")
        publish_many(pool, total(pool) // 4 + 1)
    with Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB"):
        tiers.close()  # once more: the others go on
        publish(pool, text(1000, 4))


def test_bad_arguments_are_named(pool: CXLPool) -> None:
    with pytest.raises(BadArgumentError, match="go together"):
        Tiers(pool, cold="somewhere")
    with pytest.raises(BadArgumentError, match="policy 'best'"):
        Tiers(pool, policy="best")
    with pytest.raises(BadArgumentError, match="prefill speed"):
        Tiers(pool, policy="cost")
    with pytest.raises(BadArgumentError, match="bytes_per_s"):
        Tiers(pool, bytes_per_s=0)


def test_the_mover_runs_until_closed(pool: CXLPool) -> None:
    tiers = Tiers(pool)
    tiers.start(every_s=0.001)
    publish_many(pool, 3 * total(pool) // 4 - 1)
    tiers.close()
    tiers.close()
    assert tiers.stats()["evicted_pages"] > 0
    room = pool.stats()["pages_free"]
    with pytest.raises(PoolFullError):
        grown(pool, text(1000, room + 1))


def test_the_mover_goes_on_after_any_error(pool: CXLPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tiers(pool) as tiers:
        left, again = [MemoryError("no memory"), RuntimeError("no thread")], threading.Event()

        def step() -> None:
            if left:
                raise left.pop()
            again.set()

        monkeypatch.setattr(tiers, "step", step)
        tiers.start(every_s=0.001)
        assert again.wait(60)
        assert tiers.stats()["failed_steps"] == 2


def test_the_mover_ends_with_the_pool(make_pool: MakePool) -> None:
    """pool.close() closes tiers that were started, too."""
    pool = make_pool()
    Tiers(pool).start(every_s=0.001)
    (mover,) = [thread for thread in threading.enumerate() if thread.name == "cxlkv-mover"]
    pool.close()
    mover.join(60)
    assert not mover.is_alive()


def test_a_forked_child_is_told_that_the_pool_is_full(pool: CXLPool, tiers: Tiers) -> None:
    publish_many(pool, total(pool) // 4)

    def child() -> None:
        with pytest.raises(PoolFullError):
            grown(pool, text(1000, total(pool) - 1))

    in_child(child)
    publish(pool, text(2000, 4))
    assert tiers.stats()["evicted_pages"] > 0


def test_a_child_is_told_that_tiers_are_its_parents(pool: CXLPool, tmp_path: Path) -> None:
    """At once, though a thread of the parent moves pages when it forks; its own tiers are apart."""
    with Tiers(pool, local="64KiB", cold=tmp_path / "cold", cold_capacity="2MiB") as tiers:
        tiers.start(every_s=0.001)
        publish(pool, text(1, 4))
        locked, forked = threading.Event(), threading.Event()

        def move() -> None:
            with tiers._lock:
                locked.set()
                forked.wait(60)

        def use() -> None:
            assert pool.match(prefix_keys(text(1, 4), PAGE)).tokens == 4 * PAGE
            keys = prefix_keys(text(1, 4), PAGE)
            for call in (
                tiers.step,
                tiers.start,
                lambda: tiers.reclaim(1),
                lambda: tiers.match(keys),
                lambda: tiers.match_prefix(text(1, 4)),
                tiers.stats,
            ):
                with pytest.raises(ClosedError):
                    call()
            with Tiers(pool, local="64KiB", cold=tmp_path / "own", cold_capacity="2MiB") as own:
                tiers.close()
                tiers.close()
                own.step()
                assert own.local is not None
                assert own.local.stats()["slots_total"] > 0
                assert found(own, text(1, 4)) == 4

        mover = threading.Thread(target=move)
        mover.start()
        assert locked.wait(60)
        try:
            in_child(use)
        finally:
            forked.set()
            mover.join()
        assert found(tiers, text(1, 4)) == 4
        tiers.step()


# Ten of these make fewer texts than the file has room for, however late the kills come.
DIE_WHILE_MOVING = """
import signal
import sys
from tests.tiers.test_tiers import publish, text, found
from cxlkv import CXLPool
from cxlkv.tiers import Tiers
pool = CXLPool.open(sys.argv[1], threads=1)
tiers = Tiers(pool, cold=sys.argv[2], cold_capacity="4MiB", policy="lru")
for number in range(int(sys.argv[3]), int(sys.argv[3]) + 25):
    publish(pool, text(number, 4))
    print(number, flush=True)
    found(tiers, text(max(1, number - 20), 4))
signal.pause()
"""


@pytest.mark.parametrize("kills", [4, nightly(10)])
def test_killed_in_the_middle_of_moves_nothing_published_is_lost(
    tmp_path: Path, shm_path: Path, kills: int
) -> None:
    """What was published is in the pool or in the file, and right."""
    path, cold = str(shm_path), tmp_path / "c"
    CXLPool.create(path, layout=SMALL, capacity="2350KiB", threads=1).close()
    last = 0
    for kill in range(kills):
        with Child("-c", DIE_WHILE_MOVING, path, cold, last + 1) as child:
            for _ in range(7 + kill):
                last = int(child.hear())
            rest = child.end(signal.SIGKILL, -signal.SIGKILL).split()
        last = int(rest[-1]) if rest else last
        with CXLPool.open(path, threads=1) as pool:
            with Tiers(pool, cold=cold, cold_capacity="4MiB", policy="lru") as tiers:
                for number in range(1, last + 1):
                    assert found(tiers, text(number, 4)) == 4, f"text {number} of {last}"
                assert isinstance(tiers.cold, SharedColdTier)
                assert tiers.cold.check(deep=True) == []
            audit(pool)


# ---- a model ----

TEXTS = 48


class TiersModel(RuleBasedStateMachine):
    """Texts over one pool with tiers against a dictionary: what was published is found, whole as
    long as nothing was dropped, and right; page counts add up after each step."""

    @initialize(cold=st.booleans(), policy=st.sampled_from(["adaptive", "lru"]))
    def begin(self, cold: bool, policy: str) -> None:
        self.path = Path(f"/tmp/cxlkv-test-{os.getpid()}.cold")
        self.path.unlink(missing_ok=True)
        self.pool = CXLPool.create("anonymous:", layout=SMALL, capacity="2350KiB", threads=1)
        self.cold = cold
        self.tiers = Tiers(
            self.pool,
            local="64KiB",
            policy=policy,
            cold=self.path if cold else None,
            cold_capacity="1MiB" if cold else None,
        )
        self.published: dict[int, int] = {}
        self.held: dict[int, Sequence] = {}

    def keys(self, number: int) -> PageKeys:
        return prefix_keys(text(number, 4), PAGE)

    @rule(number=st.integers(1, TEXTS))
    def publish(self, number: int) -> None:
        publish(self.pool, text(number, 4))
        self.published[number] = 4

    @rule(number=st.integers(1, TEXTS))
    def match(self, number: int) -> None:
        pages = found(self.tiers, text(number, 4))
        if self.cold or number not in self.published:
            assert pages == self.published.get(number, 0)

    @rule(number=st.integers(1, 3))
    def hold(self, number: int) -> None:
        with self.tiers.match(self.keys(number)) as hit:
            if number not in self.held:
                self.held[number] = hit.sequence()

    @rule(number=st.integers(1, 3))
    def release(self, number: int) -> None:
        if number in self.held:
            self.held.pop(number).release()

    @rule(pages=st.integers(1, 140))
    def make_room(self, pages: int) -> None:
        before = self.pool.stats()["pages_free"]
        freed = self.tiers.reclaim(pages)
        assert self.pool.stats()["pages_free"] == before + freed
        assert freed == 0 or before + freed >= pages

    @rule(number=st.integers(1, TEXTS))
    def read_often(self, number: int) -> None:
        """So that units get copies."""
        with self.tiers.match(self.keys(number)) as hit:
            sequence = hit.sequence()
            for _ in range(3 if hit else 0):
                picked = sequence.select(0, np.ones((2, 8), np.float32), top_k=2)
                sequence.fetch(0, picked)
            sequence.release()
        self.tiers.step()

    @precondition(lambda self: getattr(self, "cold", False))
    @rule()
    def reopen(self) -> None:
        self.tiers.close()
        self.tiers = Tiers(self.pool, cold=self.path, cold_capacity="1MiB")

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "tiers"):
            return
        stats = self.tiers.stats()
        held = stats["far_pages_held"] + stats["far_pages_published_only"]
        assert stats["far_pages_free"] + held == stats["far_pages_total"]
        if self.cold:
            parts = ("free", "stored", "reserved")
            assert sum(stats[f"cold_slots_{p}"] for p in parts) == stats["cold_slots_total"]
            assert stats["dropped_pages"] == 0

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            for number, sequence in self.held.items():
                verify(sequence, text(number, 4)[: len(sequence)])
                sequence.release()
            self.tiers.close()
            audit(self.pool)
            self.pool.close()
            self.path.unlink(missing_ok=True)


TestTiersModel = TiersModel.TestCase
TestTiersModel.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
