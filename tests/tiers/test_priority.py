"""Priorities: a dictionary of what was said of which text, and what an eviction may take then.

Texts over a small alphabet share beginnings, so that one page has several priorities behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cxlkv import CXLPool
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.errors import BadArgumentError
from cxlkv.pages import NO_PAGE
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

from ..conftest import audit
from ..support.forking import in_child
from ..support.texts import SMALL, publish

PAGE = 4
NEVER = 1000  # the rank of what is held

Text = tuple[int, ...]  # a number for each page
texts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
said = st.one_of(st.just(0), st.sampled_from([1, 2, 100]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), texts, said),
        st.tuples(st.just("lower"), texts, said),
        st.tuples(st.just("match"), texts, st.just(0)),
        st.tuples(st.just("hold"), texts, st.just(0)),
        st.tuples(st.just("evict"), st.just(()), st.integers(1, 8)),
    ),
    min_size=5,
    max_size=60,
)


def ids_of(text: Text) -> list[int]:
    return np.repeat(np.array(text, np.int64), PAGE).tolist()


def keys_of(text: Text) -> PageKeys:
    return prefix_keys(ids_of(text), PAGE)


def pages_of(text: Text) -> set[Text]:
    return {text[:end] for end in range(1, len(text) + 1)}


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=SMALL, capacity="2350KiB", threads=1) as made:
        yield made


def found(pool: CXLPool, text: Text) -> int:
    with pool.match(keys_of(text)) as hit:
        return hit.tokens // PAGE


def rows_of(tiers: Tiers, text: Text) -> list[int]:
    """Row in tiers.published() of each of its pages that is there, from the first on."""
    names = tiers.pool.records.names(keys_of(text).packed.tobytes())[:, 0, 0]
    pages, _ = tiers.pool.records.find(np.ascontiguousarray(names))
    rows = tiers.published()[1].pages
    found: list[int] = np.searchsorted(rows, pages[pages != NO_PAGE]).tolist()
    return found


def priorities_of(tiers: Tiers, text: Text) -> list[int]:
    """Priorities of those of its pages that are there, as they were set."""
    given = tiers.published()[0]["priority"]
    return [int(given[row]) for row in rows_of(tiers, text)]


def evict(tiers: Tiers, count: int) -> None:
    """So many, of which a reclaim takes one beyond need."""
    assert tiers.reclaim(tiers.pool.stats()["pages_free"] + count - 1) == count


# ---- stories ----


def test_lower_ones_go_first_whatever_the_policy_thinks(pool: CXLPool) -> None:
    """1 is the oldest and asked for once, 2 and 3 are newer and hit often."""
    with Tiers(pool) as tiers:
        for number in (1, 2, 3):
            publish(pool, ids_of((number, number, number)))
        assert pool.admin.prioritize(keys_of((1, 1, 1)), 5) == 3
        for _ in range(9):
            assert found(pool, (2, 2, 2)) == found(pool, (3, 3, 3)) == 3
        evict(tiers, 6)
        assert found(pool, (1, 1, 1)) == 3


def test_a_page_stays_for_the_highest_priority_behind_it(pool: CXLPool) -> None:
    """0 <- 1 and 0 <- 2: the shared page has what either text says, and its own never falls."""
    with Tiers(pool, policy="lru") as tiers:
        for text in ((0, 1), (0, 2), (3, 3)):
            publish(pool, ids_of(text))
        pool.admin.prioritize(keys_of((0, 1)), 7)
        pool.admin.prioritize(keys_of((0, 2)), 2)
        assert priorities_of(tiers, (0, 1)) == [7, 7]
        assert priorities_of(tiers, (0, 2)) == [7, 2]
        pool.admin.prioritize(keys_of((0,)), 0, lowers=True)  # the end keeps it all the same
        evict(tiers, 3)
        assert [found(pool, text) for text in ((0, 1), (0, 2), (3, 3))] == [2, 1, 0]
        publish(pool, ids_of((0, 2)))
        assert priorities_of(tiers, (0, 2)) == [0, 0], "a page that comes back has none"


def test_half_of_the_pages_are_left_to_others(pool: CXLPool) -> None:
    """Beyond half, the oldest are ordinary: a caller that raises all its pages fills half."""
    with Tiers(pool, policy="lru") as tiers:
        for number in range(8):
            publish(pool, ids_of((number, number)))
            pool.admin.prioritize(keys_of((number, number)), 100 - number)
        publish(pool, ids_of((9,) * 6))
        assert sum(tiers.published()[1].ranks > 0) == 11
        evict(tiers, 5)
        assert [found(pool, (n, n)) for n in range(8)] == [0, 0, 1, 2, 2, 2, 2, 2]
        assert found(pool, (9,) * 6) == 6, "newer than those that count no more"


def test_no_other_numbers(pool: CXLPool) -> None:
    for wrong in (-1, 101):
        with pytest.raises(BadArgumentError, match=f"priority {wrong}: 0 to 100"):
            pool.admin.prioritize(keys_of((1,)), wrong)
    assert pool.admin.prioritize(keys_of((1,)), 100) == 0, "none is there"


def test_a_tenants_own_of_lower_priority_make_room(pool: CXLPool) -> None:
    with Tiers(pool) as tiers:
        requests = PoolRequests(pool, tiers, Quota(tiers, 4))
        for number in (1, 2, 3):
            requests.load(f"{number}", None, 0)
            rows = np.ones((2 * PAGE, SMALL.kv_heads, SMALL.head_dim), np.float32)
            for layer in range(SMALL.layers):
                requests.sequence(f"{number}").append(layer, rows, rows)
            requests.store(f"{number}", keys_of((number, number)))
            requests.release(f"{number}")
            if number == 1:
                assert requests.prioritize(keys_of((1, 1)), 1) == 2
        assert [found(pool, (n, n)) for n in (1, 2, 3)] == [2, 0, 2]


def test_what_one_process_says_another_heeds(tmp_path: Path) -> None:
    """The mark is in the host's state, like a pin."""
    path = tmp_path / "p"
    with CXLPool.create(path, layout=SMALL, capacity="2350KiB", threads=1) as pool:
        for number in (1, 2):
            publish(pool, ids_of((number, number)))

        def child() -> None:
            with CXLPool.open(path, threads=1) as other:
                assert other.admin.prioritize(keys_of((1, 1)), 1) == 2

        in_child(child)
        with Tiers(pool, policy="lru") as tiers:
            evict(tiers, 2)
        assert (found(pool, (1, 1)), found(pool, (2, 2))) == (2, 0)


# ---- random operations against a dictionary ----


class Walk:
    """The pool, and what it should be. priorities: of each published page, by the text that it
    ends; used: when each was found last, or published; held: pages of hits that are not released.
    """

    def __init__(self, tiers: Tiers):
        self.tiers, self.pool = tiers, tiers.pool
        self.priorities: dict[Text, int] = {}
        self.used: dict[Text, int] = {}
        self.clock = 0
        self.held: set[Text] = set()
        self.hits: list[Hit] = []

    def use(self, pages: set[Text]) -> None:
        for page in sorted(pages, key=len):
            self.clock += 1
            self.used[page] = self.clock

    def publish(self, text: Text, priority: int) -> None:
        publish(self.pool, ids_of(text))
        new = pages_of(text) - self.priorities.keys()
        self.use(new)
        self.priorities |= dict.fromkeys(new, 0)
        assert self.pool.admin.prioritize(keys_of(text), priority) == len(text)
        for page in pages_of(text):
            self.priorities[page] = max(self.priorities[page], priority)

    def lower(self, text: Text, priority: int) -> None:
        there = pages_of(text) & self.priorities.keys()
        pages = self.pool.admin.prioritize(keys_of(text), priority, lowers=True)
        assert pages == len(there)
        self.priorities |= dict.fromkeys(there, priority)

    def match(self, text: Text, _: int) -> None:
        with self.pool.match(keys_of(text)) as hit:
            self.use(pages_of(text[: hit.tokens // PAGE]))

    def hold(self, text: Text, _: int) -> None:
        self.hits.append(self.pool.match(keys_of(text)))
        pages = pages_of(text[: self.hits[-1].tokens // PAGE])
        self.use(pages)
        self.held |= pages

    def evict(self, _: Text, number: int) -> None:
        counting, turns = self.counting(), self.turns()
        ranks = self.tiers.published()[1].ranks
        for page in self.priorities:
            assert ranks[rows_of(self.tiers, page)[-1]] == counting.get(page, 0)
        count = self.tiers.reclaim(self.pool.stats()["pages_free"] + number)
        may_go = sum(turn < NEVER for turn in turns.values())
        assert count == (0 if number > may_go else min(number + 1, may_go))
        gone = {page for page in turns if len(rows_of(self.tiers, page)) < len(page)}
        assert len(gone) == count
        for page in gone:
            del self.priorities[page], self.used[page]
        stay = min((turns[page] for page in self.priorities), default=NEVER)
        assert max((turns[page] for page in gone), default=0) <= stay

    def counting(self) -> dict[Text, int]:
        """While more than half of the pages are raised, the oldest that no other raised one
        continues is ordinary."""
        raised = {page: of for page, of in self.priorities.items() if of}
        while len(raised) > len(self.priorities) // 2:
            ends = [page for page in raised if not any(one[:-1] == page for one in raised)]
            del raised[min(ends, key=lambda page: self.used[page])]
        return raised

    def turns(self) -> dict[Text, int]:
        """Each page's highest rank in all that continues it: it stays as long."""
        ranks = self.counting() | dict.fromkeys(self.held, NEVER)
        turns = {page: ranks.get(page, 0) for page in self.priorities}
        for page in sorted(turns, key=len, reverse=True):
            if page[:-1] in turns:
                turns[page[:-1]] = max(turns[page[:-1]], turns[page])
        return turns

    def check(self) -> None:
        for page, priority in self.priorities.items():
            assert priorities_of(self.tiers, page)[len(page) - 1 :] == [priority]

    def end(self) -> None:
        for hit in self.hits:
            hit.release()
        audit(self.pool)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["lru", "adaptive"]), steps)
def test_none_goes_before_one_of_lower_priority(
    policy: str, steps: list[tuple[str, Text, int]]
) -> None:
    with (
        CXLPool.create("anonymous:", layout=SMALL, capacity="2350KiB", threads=1) as pool,
        Tiers(pool, policy=policy) as tiers,
    ):
        walk = Walk(tiers)
        acts = (walk.publish, walk.lower, walk.match, walk.hold, walk.evict)
        by_name = {act.__name__: act for act in acts}
        for what, text, number in steps:
            by_name[what](text, number)
            walk.check()
        walk.end()
