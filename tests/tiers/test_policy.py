"""Policies: stories with literal ids, the choice in C against an obvious one, and the textbook."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv import _core
from cxlkv.bench.replay import caches, traces
from cxlkv.bench.replay.simulation import replay
from cxlkv.errors import BadArgumentError
from cxlkv.tiers.policy import DEFAULT, NONE, POLICIES, Policy, Published, choose, policy_named

from ..support.lengths import nightly


def published(
    used: list[int],
    *,
    clock: int = 100,
    born: list[int] | None = None,
    hits: list[int] | None = None,
    parents: list[int] | None = None,
    kept: tuple[int, ...] = (),
    saved_s: list[float] | None = None,
) -> Published:
    """Pages 0, 1, ... in the pool, each a chain of its own unless parents says otherwise."""
    count = len(used)

    def words(given: list[int] | None, default: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array([default] * count if given is None else given, np.uint32)

    return Published(
        clock=clock,
        pages=np.arange(count, dtype=np.uint32),
        names=np.arange(1000, 1000 + count, dtype=np.uint64),
        used=words(used, 0),
        born=words(born, 0),
        hits=words(hits, 0),
        parents=words(parents, NONE),
        kept=np.isin(np.arange(count), kept),
        saved_s=None if saved_s is None else np.array(saved_s, np.float32),
    )


def chosen(policy: Policy, pages: Published, wanted: int) -> list[int]:
    return [int(row) for row in choose(policy, pages, wanted)]


# ---- stories ----


@pytest.mark.parametrize(
    ("name", "pages", "gone"),
    [
        pytest.param("lru", published([50, 10, 30, 20]), [1, 3], id="used longest ago"),
        # The clock is at 5 after a wrap: page 1 was used 3 ago, page 0 long before the wrap.
        pytest.param(
            "lru", published([0xFFFFFF00, 2, 0xFFFFFFF0], clock=5), [0, 2, 1], id="time may wrap"
        ),
        # 0 <- 1 <- 2 and 0 <- 3: page 0 is the oldest and goes last.
        pytest.param(
            "lru",
            published([1, 9, 9, 5], parents=[NONE, 0, 1, 0]),
            [3, 2, 1, 0],
            id="after those that continue it",
        ),
        pytest.param(
            "cost", published([90, 90, 90], saved_s=[0.5, 0.1, 0.4]), [1, 2], id="saves least time"
        ),
    ],
)
def test_the_one_goes_that(name: str, pages: Published, gone: list[int]) -> None:
    assert chosen(policy_named(name), pages, len(gone)) == gone


def test_what_is_kept_keeps_the_pages_before_it() -> None:
    """0 <- 1 <- 2, and page 1 is pinned: only what continues it may go."""
    pages = published([1, 2, 3], parents=[NONE, 0, 1], kept=(1,))
    assert chosen(policy_named("lru"), pages, 1) == [2]
    assert chosen(policy_named("lru"), pages, 2) == [], "all or nothing"


@pytest.mark.parametrize("name", POLICIES)
def test_all_or_nothing(name: str) -> None:
    pages = published([1, 2, 3], kept=(0,))
    assert sorted(chosen(policy_named(name), pages, 2)) == [1, 2]
    assert chosen(policy_named(name), pages, 3) == []
    assert chosen(policy_named(name), pages, 4) == []
    assert chosen(policy_named(name), pages, 0) == []
    assert chosen(policy_named(name), published([]), 1) == []


def come_back_after(policy: Policy, gap: int, rounds: int) -> int:
    """Pages 0 to 39 are found every `gap`, pages 40 to 79 never: returns the clock."""
    clock, hits = 0, 0
    for _ in range(rounds):
        clock, hits = clock + gap, hits + 1
        used = [clock] * 40 + [clock - 1] * 40
        born = [0] * 40 + [clock - 1] * 40
        pages = published(used, clock=clock, born=born, hits=[hits] * 40 + [0] * 40)
        assert len(choose(policy, pages, 10)) == 10
    return clock


def test_adaptive_keeps_what_comes_back() -> None:
    policy = policy_named("adaptive")
    clock = come_back_after(policy, 2000, 20)
    used = [clock - 1000] * 40 + [clock - 1] * 40
    born = [0] * 40 + [clock - 1] * 40
    pages = published(used, clock=clock, born=born, hits=[20] * 40 + [0] * 40)
    assert min(chosen(policy, pages, 40)) >= 40, "the newcomers went, though they are newer"


def test_unknown_policy_is_named() -> None:
    with pytest.raises(BadArgumentError, match="policy 'fifo': one of adaptive, cost, lru"):
        policy_named("fifo")


# ---- the choice in C ----


def obvious_choice(
    priorities: list[int],
    scores: list[int],
    ages: list[int],
    parents: list[int],
    blocked: list[bool],
    wanted: int,
) -> list[int]:
    here, taken = set(range(len(scores))), list[int]()
    while len(taken) < wanted:
        leaves = here - {parents[page] for page in here} - {p for p in here if blocked[p]}
        if not leaves:
            break
        order = {page: (priorities[page], scores[page], -ages[page], page) for page in leaves}
        taken.append(min(leaves, key=lambda page: order[page]))
        here.discard(taken[-1])
    return taken


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_choice_in_c_is_the_obvious_one(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 24))
    few = st.integers(0, 4)
    lists = [data.draw(st.lists(few, min_size=count, max_size=count)) for _ in range(3)]
    priorities, scores, ages = lists
    blocked = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    wanted = data.draw(st.integers(0, count + 2))
    parent = st.one_of(st.just(NONE), st.integers(0, count + 3))  # cycles and strangers, too
    parents = data.draw(st.lists(parent, min_size=count, max_size=count))
    got = _core.choose(
        np.array(priorities, np.uint8),
        np.array(scores, np.float32),
        np.array(ages, np.uint32),
        np.array(parents, np.uint32),
        np.array(blocked, np.bool_),
        wanted,
    )
    assert got.tolist() == obvious_choice(priorities, scores, ages, parents, blocked, wanted)


def test_choice_refuses_what_is_no_number_and_arrays_that_do_not_fit() -> None:
    level, one = np.zeros(1, np.uint8), np.zeros(1, np.uint32)
    kept = np.zeros(1, np.bool_)
    with pytest.raises(BadArgumentError, match="score of page 0 is not a number"):
        _core.choose(level, np.array([np.nan], np.float32), one, one, kept, 1)
    with pytest.raises(BadArgumentError, match="arrays of one length"):
        _core.choose(level, np.zeros(2, np.float32), one, one, kept, 1)


# ---- against the textbook ----

SEED = 3


def compare(family: str, requests: list[traces.Request], share: float, at_least: float) -> None:
    asked = [page for request in requests for page in request.pages]
    capacity = int(share * traces.distinct(requests))
    lengths = [len(request.pages) for request in requests]
    best = sum(caches.belady(asked, capacity))
    rivals = {
        name: caches.leading(lengths, cache(asked, capacity))
        for name, cache in caches.CACHES.items()
    }
    hits = replay(requests, capacity, policy_named(DEFAULT)).hits
    print(f"seed {SEED}, {family}, {share}: {hits}, {rivals}, at best {best}")
    assert at_least * max(rivals.values()) <= hits <= best


@pytest.mark.parametrize(
    ("share", "accesses", "at_least"),
    [  # while it learns, and then
        (0.05, [4000], 0.95),
        nightly(0.25, [4000], 0.95),
        *(nightly(share, [], 0.98) for share in (0.01, 0.05, 0.1, 0.25)),
    ],
)
@pytest.mark.parametrize("family", traces.FAMILIES)
def test_the_default_is_not_worse(
    family: str, share: float, accesses: list[int], at_least: float
) -> None:
    compare(family, traces.FAMILIES[family](SEED, *accesses), share, at_least)


def test_a_loop_larger_than_the_cache_keeps_a_part_of_it() -> None:
    """Where LRU, LFU, SIEVE and S3-FIFO hit nothing."""
    requests = traces.loops(SEED, 6000)
    hits = replay(requests, 1800, policy_named(DEFAULT)).hits
    asked = [page for request in requests for page in request.pages]
    assert hits > 0.9 * sum(caches.belady(asked, 1800))
    assert sum(caches.lru(asked, 1800)) == 0


@pytest.mark.parametrize("family", traces.FAMILIES)
def test_lru_is_that_of_the_textbook(family: str) -> None:
    """In batches and leaves first, so not to the last hit; never much worse."""
    requests = traces.FAMILIES[family](SEED, 4000)
    asked = [page for request in requests for page in request.pages]
    lengths = [len(request.pages) for request in requests]
    capacity = traces.distinct(requests) // 10
    hits = replay(requests, capacity, policy_named("lru")).hits
    there = caches.leading(lengths, caches.CACHES["lru"](asked, capacity))
    print(f"{family}: {hits}, textbook {there}")
    assert hits >= 0.95 * there
