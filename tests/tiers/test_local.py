"""The local tier: copies change nothing but where bytes are read; what goes there, and when.

A unit is page * record_layers + row of the layer; the pools of the stories have one sequence, whose
pages are 0, 1, 2 ..., and one layer, so that a page's id is its unit.
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cxlkv import Batch, Budget, CXLPool, KVLayout, LayerGroup, Sequence
from cxlkv.errors import BadArgumentError, BusyError, ClosedError, CorruptError
from cxlkv.ndp.engine import Selection
from cxlkv.tiers.local import LocalTier, choose, units_of

from ..conftest import MakePool
from ..support.forking import in_child
from ..support.lengths import matrix
from ..support.threads import run_all
from ..test_records import grown

STARTS = np.array([0, 1], np.int32)


def selection(pages: list[int], heads: int = 1) -> Selection:
    """The same pages for every head, of the one row of a sequence."""
    chosen = np.array(pages, np.int32)
    lists = np.ascontiguousarray(np.broadcast_to(chosen, (1, heads, len(chosen))))
    counts = np.full((1, heads), len(chosen), np.int32)
    return Selection(lists, np.zeros(lists.shape, np.float32), counts, 0, 0, "query", STARTS)


def stats_add_up(tier: LocalTier) -> dict[str, float]:
    stats = tier.stats()
    parts = stats["slots_free"] + stats["slots_held"] + stats["slots_reserved"]
    assert parts == stats["slots_total"], stats
    return stats


def resident(tier: LocalTier) -> set[int]:
    units, _, near = tier.hotness()
    return set(units[near].tolist())


# ---- the same bytes ----

LATENT = LayerGroup(layers=2, kv_heads=1, head_dim=24, value_head_dim=16, values="key_prefix")
WINDOWS = [
    LayerGroup(layers=2, kv_heads=2, head_dim=16, dtype="float32", window=window)
    for window in (None, 20)
]
LAYOUTS = {
    **{
        dtype: KVLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=4, dtype=dtype)
        for dtype in ("bfloat16", "float16", "float32")
    },
    "odd": KVLayout(
        layers=3, kv_heads=3, head_dim=10, value_head_dim=6, page_tokens=5, dtype="float16"
    ),
    "latent": KVLayout.of([LATENT], page_tokens=4),
    "windows": KVLayout.of(WINDOWS, [0, 1, 0, 1], page_tokens=4),
    "encoded": KVLayout(
        layers=2, kv_heads=2, head_dim=24, page_tokens=20, k_encoding="int8", v_encoding="int4"
    ),
    "encoded keys": KVLayout(
        layers=2, kv_heads=2, head_dim=24, page_tokens=4, k_encoding="int4", dtype="float32"
    ),
    "fp8": KVLayout(layers=2, kv_heads=2, head_dim=24, page_tokens=20).encoded("fp8_e4m3"),
    "planes": KVLayout(layers=2, kv_heads=2, head_dim=24, page_tokens=20).encoded("progressive"),
}


def outputs(batch: Batch, q: object, picked: list[Selection]) -> list[npt.NDArray[np.uint8]]:
    """All that fetch and attend give of the chosen pages, and attend of all, as bytes."""
    made: list[object] = []
    for layer, chosen in enumerate(picked):
        made += batch.fetch(layer, chosen)
        made += batch.attend(layer, q, STARTS, chosen)
        made += batch.attend(layer, q, STARTS)
    return [np.ascontiguousarray(a).view(np.uint8) for a in made]


@matrix(name=LAYOUTS, checksum=[True, False], threads=[1, 2])
def test_fetch_and_attend_give_the_same_bits(
    name: str, checksum: bool, threads: int, rng: np.random.Generator
) -> None:
    layout = LAYOUTS[name]
    with CXLPool.create(
        "anonymous:", layout=layout, capacity="8MiB", checksum=checksum, threads=threads
    ) as pool:
        batch = pool.batch([grown(pool, rng, 83)])
        q = rng.standard_normal((1, 2 * layout.kv_heads, layout.head_dim), np.float32)
        picked = [batch.select(layer, q, STARTS, Budget(pages=4)) for layer in range(layout.layers)]
        far = outputs(batch, q, picked)
        scores = [p.scores for p in picked]
        with LocalTier(pool, "1MiB") as tier:
            units = [units_of(batch, layer, p) for layer, p in enumerate(picked)]
            assert min(map(len, units)) > 0
            moved = tier.promote(np.concatenate(units))
            assert not moved.refused
            assert resident(tier) == set(np.concatenate(units).tolist())
            for some in (units[0][::2], units[-1]):  # all are near, then some, then fewer
                near = outputs(batch, q, picked)
                assert all(np.array_equal(a, b) for a, b in zip(far, near, strict=True))
                assert tier.demote(some) == len(some)
            again = outputs(batch, q, picked)
            assert all(np.array_equal(a, b) for a, b in zip(far, again, strict=True))
            stats = stats_add_up(tier)
            assert stats["reads_local"] > 0 < stats["reads_far"]
            for layer, before in enumerate(scores):
                got = batch.select(layer, q, STARTS, Budget(pages=4))
                np.testing.assert_array_equal(got.scores, before)
        after = outputs(batch, q, picked)
        assert all(np.array_equal(a, b) for a, b in zip(far, after, strict=True))


def test_copies_are_what_is_read(make_pool: MakePool, rng: np.random.Generator) -> None:
    """A page that is damaged after its promotion is read right until it is demoted."""
    pool = make_pool(kv_heads=1, checksum=True)
    sequence = grown(pool, rng, 16)
    batch, picked = pool.batch([sequence]), selection([0, 1])
    wanted = np.asarray(batch.fetch(0, picked)[0]).copy()
    with LocalTier(pool, "64KiB") as tier:
        units = units_of(batch, 0, picked)
        assert len(tier.promote(units).promoted) == 2
        flip(wanted)
        np.testing.assert_array_equal(np.asarray(batch.fetch(0, picked)[0]), wanted)
        tier.demote(units)
        with pytest.raises(CorruptError):
            batch.fetch(0, picked)
        assert tier.promote(units).refused == {"damaged": 1}
        flip(wanted)


def flip(piece: npt.NDArray[np.float32]) -> None:
    """A bit of the first page's keys, found by their bytes in this process's mapping."""
    with open("/proc/self/maps") as maps:
        rows = [line.split(maxsplit=5) for line in maps if "cxlkv-pool" in line]
    first, end = (int(x, 16) for x in rows[0][0].split("-"))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
    key = np.frombuffer(piece[0, 0, 0].tobytes()[1:], np.uint8)  # all but the byte that flips
    found = memory.tobytes().find(key.tobytes())
    assert found > 0
    memory[found - 1] ^= 4


def test_what_cannot_be_promoted_says_why(make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool(kv_heads=1)
    sequence = grown(pool, rng, 16)
    batch = pool.batch([sequence])
    with LocalTier(pool, 2 * 256) as tier:
        assert stats_add_up(tier)["slots_total"] == 2
        units = units_of(batch, 0, selection([0, 1, 2, 3]))
        generations = np.full(4, 99, np.uint64)
        assert tier.promote(units, generations).refused == {"changed": 4}
        last = units[-1] + 1  # behind the sequence: free
        moved = tier.promote([*units.tolist(), int(last), -1, 10**12, int(units[0])])
        assert moved.refused == {"no_room": 2, "not_sealed": 1, "unknown": 2, "there": 1}
        assert moved.promoted.tolist() == units[:2].tolist()
        assert moved.copied_bytes == 2 * 256
        with pytest.raises(BadArgumentError, match="generations"):
            tier.promote(units, generations[:1])
        with pytest.raises(BusyError, match="has a local tier"):
            LocalTier(pool, 512)
    with pytest.raises(ClosedError, match="no local tier"):
        tier.stats()
    with pytest.raises(BadArgumentError, match="a layer of a page has 256"):
        LocalTier(pool, 255)


def test_units_of_a_selection(rng: np.random.Generator) -> None:
    """Padding, the open tail and what lies behind the window have none."""
    with CXLPool.create("anonymous:", layout=LAYOUTS["windows"], capacity="8MiB") as pool:
        batch = pool.batch([grown(pool, rng, 82)])
        for layer in range(4):  # a step later the window's pages are given back
            row = np.zeros((1, 2, 16), np.float32)
            batch.append(layer, row, row, STARTS)
        rows = pool.pages.geometry["record_layers"]
        ids = batch.sequences[0].pages
        whole = units_of(batch, 2, selection([-1, 0, 3, 20], 2))  # the second layer of its group
        assert whole.tolist() == sorted(int(ids[page]) * rows + 1 for page in (0, 3))
        assert len(units_of(batch, 1, selection([0, 3], 2))) == 0
        assert len(units_of(batch, 1, selection([19], 2))) == 1
        with pytest.raises(BadArgumentError, match="layer 4"):
            units_of(batch, 4, selection([0], 2))


def test_a_reused_page_is_not_read_from_its_old_copy(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    pool = make_pool(kv_heads=1)
    with LocalTier(pool, "64KiB") as tier:
        for _ in range(3):
            sequence = grown(pool, rng, 16)
            batch, picked = pool.batch([sequence]), selection([0, 1, 2, 3])
            far = np.asarray(batch.fetch(0, picked)[0]).copy()
            assert tier.promote(units_of(batch, 0, picked)).refused == {}
            np.testing.assert_array_equal(np.asarray(batch.fetch(0, picked)[0]), far)
            sequence.release()
        assert len(resident(tier)) == 0  # the last sequence is gone, too
        assert stats_add_up(tier)["dropped"] == 12


def test_a_child_starts_without_a_tier(make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool(kv_heads=1)
    batch, picked = pool.batch([grown(pool, rng, 16)]), selection([0, 1])
    tier = LocalTier(pool, "64KiB")
    tier.promote(units_of(batch, 0, picked))
    wanted = np.asarray(batch.fetch(0, picked)[0]).copy()

    def child() -> None:
        with pytest.raises(ClosedError, match="A child starts without"):
            tier.stats()
        np.testing.assert_array_equal(np.asarray(batch.fetch(0, picked)[0]), wanted)
        own = LocalTier(pool, "64KiB")
        assert len(own.promote(units_of(batch, 0, picked)).promoted) == 2
        np.testing.assert_array_equal(np.asarray(batch.fetch(0, picked)[0]), wanted)
        pool.close()

    in_child(child)
    np.testing.assert_array_equal(np.asarray(batch.fetch(0, picked)[0]), wanted)
    assert stats_add_up(tier)["slots_held"] == 2


def test_threads_move_what_others_read(make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool(layers=2, threads=2)
    sequence = grown(pool, rng, 64)
    q = rng.standard_normal((1, 4, 8), np.float32)
    picked = [selection([0, 3, 5, 9, 12], 2)] * 2
    wanted = outputs(pool.batch([sequence]), q, picked)
    every = np.concatenate([units_of(pool.batch([sequence]), layer, picked[0]) for layer in (0, 1)])
    done: list[bool] = []
    tier = LocalTier(pool, 6 * 512)

    def read() -> None:
        own = pool.batch([sequence])
        try:
            for number in count():  # at least so often, and until enough was moved meanwhile
                if number >= 150 and tier.stats()["promoted"] > 10:
                    return
                got = outputs(own, q, picked)
                assert all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True))
        finally:
            done.append(True)

    def move(seed: int) -> None:
        own = np.random.default_rng(seed)
        while len(done) < 2:
            tier.promote(own.choice(every, 3))
            tier.demote(own.choice(every, 2))
            if seed:
                tier.hotness()
            stats_add_up(tier)

    run_all([read, read, partial(move, 0), partial(move, 1)])
    assert tier.stats()["promoted"] > 10


# ---- a model: what is where, against a dictionary ----

PAGES, SLOTS = 12, 5


class NearMachine(RuleBasedStateMachine):
    """Sequences of 3 pages come and go; their units are promoted, demoted and read."""

    def __init__(self) -> None:
        super().__init__()
        layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
        self.pool = CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1)
        self.tier = LocalTier(self.pool, SLOTS * 256)
        self.live: list[tuple[Sequence, npt.NDArray[np.float32]]] = []
        self.near: dict[int, bool] = {}  # unit to whether its page is still that page
        self.reads = {"reads_local": 0, "reads_far": 0}
        self.made = 0

    def teardown(self) -> None:
        self.pool.close()

    def alive(self) -> set[int]:
        return {int(page) for sequence, _ in self.live for page in sequence.pages}

    @precondition(lambda self: len(self.live) < 4)
    @rule()
    def write(self) -> None:
        self.made += 1
        rows = np.arange(96, dtype=np.float32).reshape(12, 1, 8) + 1000 * self.made
        sequence = self.pool.sequence()
        sequence.append(0, rows, -rows)
        self.live.append((sequence, rows))

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 3))
    def release(self, at: int) -> None:
        sequence, _ = self.live.pop(at % len(self.live))
        for page in sequence.pages.tolist():
            if page in self.near:
                self.near[page] = False
        sequence.release()

    @rule(units=st.lists(st.integers(-1, PAGES + 2), min_size=1, max_size=6))
    def promote(self, units: list[int]) -> None:
        looks = len(units) > SLOTS - len(self.near) or any(u in self.near for u in units)
        if looks:
            self.drop_stale()
        alive, wanted = self.alive(), []
        for unit in units:
            if unit in alive and unit not in self.near and len(self.near) < SLOTS:
                self.near[unit] = True
                wanted.append(unit)
        assert self.tier.promote(units).promoted.tolist() == wanted

    @rule(units=st.lists(st.integers(-1, PAGES + 2), max_size=4))
    def demote(self, units: list[int]) -> None:
        there = set(units) & set(self.near)
        assert self.tier.demote(units) == len(there)
        for unit in there:
            del self.near[unit]

    @rule()
    def look(self) -> None:
        self.drop_stale()
        assert resident(self.tier) == set(self.near)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 3), pages=st.sets(st.integers(0, 2), min_size=1))
    def read(self, at: int, pages: set[int]) -> None:
        sequence, rows = self.live[at % len(self.live)]
        chosen = sorted(pages)
        k, v = self.pool.batch([sequence]).fetch(0, selection(chosen))
        wanted = rows.reshape(3, 4, 8)[chosen]
        np.testing.assert_array_equal(np.asarray(k)[0, 0], wanted)
        np.testing.assert_array_equal(np.asarray(v)[0, 0], -wanted)
        for page in sequence.pages[chosen].tolist():
            self.reads["reads_local" if self.near.get(page) else "reads_far"] += 1

    @rule(limit=st.none() | st.integers(0, 3))
    def step(self, limit: int | None) -> None:
        self.drop_stale()
        moved = self.tier.step(None if limit is None else limit * 256)
        assert limit is None or len(moved.promoted) <= limit
        for unit in moved.demoted.tolist():
            del self.near[unit]
        for unit in moved.promoted.tolist():
            assert unit in self.alive()
            assert unit not in self.near
            self.near[unit] = True

    def drop_stale(self) -> None:
        self.near = {unit: True for unit, fresh in self.near.items() if fresh}

    @invariant()
    def adds_up(self) -> None:
        stats = stats_add_up(self.tier)
        assert stats["slots_held"] == len(self.near)
        assert {name: stats[name] for name in self.reads} == self.reads


TestNearMachine = NearMachine.TestCase
TestNearMachine.settings = settings(max_examples=60, stateful_step_count=40)


# ---- what goes where ----


def choice(
    counts: dict[int, int], near: set[int], *, spare: int = 0, most: int = 99, heads: int = 1,
    bounces: dict[int, int] | None = None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """choose() of units by id: (out, into)."""
    ids = np.array(list(counts))
    out, into = choose(
        np.array(list(counts.values()), np.float64),
        np.isin(ids, list(near)),
        np.array([(bounces or {}).get(i, 0) for i in ids.tolist()], np.uint8),
        spare=spare,
        most=most,
        heads=heads,
    )
    return ids[out].tolist(), ids[into].tolist()


THREE = {1: 50, 2: 4, 3: 11}
SIX = {1: 90, 2: 80, 3: 70, 4: 1, 5: 2, 6: 3}


@pytest.mark.parametrize(
    ("counts", "near", "given", "out", "into"),
    [
        pytest.param({1: 9, 2: 30, 3: 20, 4: 8}, [], {"spare": 2}, [], [2, 3], id="the hottest"),
        pytest.param({1: 1, 2: 2}, [], {"spare": 2}, [], [2], id="once is not worth a copy"),
        pytest.param(
            {1: 8, 2: 9}, [], {"spare": 2, "heads": 8}, [], [2], id="a copy reads all heads"
        ),
        # 3 is ahead of the coldest by 7 > 1 + sqrt(15), and 4 waits; by 4 < 1 + sqrt(12).
        pytest.param({**THREE, 4: 9}, [1, 2], {}, [2], [3], id="one that is clearly hotter"),
        pytest.param({**THREE, 3: 8}, [1, 2], {}, [], [], id="one that is hardly hotter"),
        pytest.param(THREE, [1, 2], {"bounces": {3: 1}}, [], [], id="who was taken out lately"),
        pytest.param(
            {**THREE, 3: 25}, [1, 2], {"bounces": {3: 1}}, [2], [3], id="must be ever hotter"
        ),
        pytest.param(SIX, [4, 5, 6], {"most": 2}, [4, 5], [1, 2], id="a limit: the hottest first"),
        pytest.param(SIX, [4, 5, 6], {"most": 0}, [], [], id="a limit of none"),
        pytest.param(SIX, [1, 4, 5, 6], {"spare": -2, "most": 0}, [4, 5], [], id="room is wanted"),
        pytest.param(
            SIX, [1, 4, 5, 6], {"spare": -2, "most": 1}, [4, 5, 6], [2], id="room and one more"
        ),
    ],
)
def test_what_is_chosen(
    counts: dict[int, int],
    near: list[int],
    given: dict[str, object],
    out: list[int],
    into: list[int],
) -> None:
    assert choice(counts, set(near), **given) == (out, into)  # type: ignore[arg-type]


def test_step_keeps_what_is_read(make_pool: MakePool, rng: np.random.Generator) -> None:
    """The story of four slots: [0, 1, 2, 3] are read and come; then others are, more often."""
    pool = make_pool(kv_heads=1)
    batch = pool.batch([grown(pool, rng, 32)])
    ids = batch.sequences[0].pages.astype(np.int64)
    assert ids.tolist() == list(range(8))
    with LocalTier(pool, 4 * 256) as tier:

        def read(pages: list[int], times: int) -> None:
            for _ in range(times):
                batch.fetch(0, selection(pages))

        read([0, 1, 2, 3], 1)
        assert tier.step().promoted.tolist() == []  # once is not worth a copy
        read([0, 1, 2, 3], 2)
        assert sorted(tier.step().promoted.tolist()) == [0, 1, 2, 3]
        read([4, 5, 6, 7], 3)  # as hot as those that are there: nobody moves
        assert tier.step().promoted.tolist() == []
        read([4, 5], 7)
        moved = tier.step(limit_bytes=256)
        assert len(moved.promoted) == 1 == len(moved.demoted)
        assert moved.copied_bytes == 256
        moved = tier.step()
        assert resident(tier) > {4, 5}
        stats = stats_add_up(tier)
        assert stats["slots_held"] == 4
        assert stats["reads_far"] == 4 * 3 + 4 * 3 + 2 * 7


def test_who_went_out_comes_back_only_when_much_hotter(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """[0, 1, 2, 3] are read 3 times each; 0 goes for 4 and does not return, as a newcomer would."""
    pool = make_pool(kv_heads=1)
    batch = pool.batch([grown(pool, rng, 32)])
    with LocalTier(pool, 4 * 256) as tier:

        def read(page: int, times: int) -> tuple[list[int], list[int]]:
            for _ in range(times):
                batch.fetch(0, selection([page]))
            moved = tier.step()
            return moved.demoted.tolist(), moved.promoted.tolist()

        for page in range(4):
            assert read(page, 3) == ([], [page])
        assert read(4, 12) == ([0], [4])
        assert read(0, 6) == ([], [])  # 9 to 3: enough for one that is new
        assert read(0, 5) == ([1], [0])  # 14 to 3


def test_step_makes_room_for_those_that_were_refused(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """All 64 slots are taken: a refused unit finds 4 free after the next step, not before."""
    pool = make_pool(kv_heads=1, capacity="8MiB")
    batch = pool.batch([grown(pool, rng, 4 * 80)])
    with LocalTier(pool, 64 * 256) as tier:
        units = units_of(batch, 0, selection(list(range(80))))
        assert len(tier.promote(units[:64]).promoted) == 64
        assert len(tier.step().demoted) == 0
        assert tier.promote(units[64:66]).refused == {"no_room": 2}
        assert len(tier.step().demoted) == 4
        assert len(tier.promote(units[64:66]).promoted) == 2
        assert len(tier.step().demoted) == 0
        assert len(tier.promote(units[66:68]).promoted) == 2  # full again, and nobody was refused
        assert len(tier.step().demoted) == 0


def test_heat_halves_as_more_is_read(make_pool: MakePool, rng: np.random.Generator) -> None:
    """One slot and head: all counts are halved after each ten readings."""
    pool = make_pool(kv_heads=1)
    batch = pool.batch([grown(pool, rng, 16)])
    with LocalTier(pool, 256) as tier:
        for _ in range(8):
            batch.fetch(0, selection([0]))
        assert tier.hotness()[1].tolist() == [8]
        for _ in range(2):
            batch.fetch(0, selection([1]))
        units, counts, _ = tier.hotness()
        assert dict(zip(units.tolist(), counts.tolist(), strict=True)) == {0: 4, 1: 1}
        assert tier.stats()["epoch"] == 1
        for _ in range(20):
            batch.fetch(0, selection([2]))
        assert dict(zip(*(a.tolist() for a in tier.hotness()[:2]), strict=True))[0] == 1
