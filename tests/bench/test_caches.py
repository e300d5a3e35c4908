"""Textbook caches: small cases by hand, and that nothing beats Belady."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv.bench.replay import caches


@pytest.mark.parametrize(
    ("cache", "asked", "capacity", "hits"),
    [
        ("lru", [1, 2, 1, 3, 2, 1], 2, {2}),
        ("lfu", [1, 2, 1, 3, 1, 2], 2, {2, 4}),  # 1 was used twice when 3 comes: 2 goes
        # 1 is visited when 4 comes: the hand passes it and takes 2, then 3 for 5.
        ("sieve", [1, 2, 3, 1, 4, 5, 1, 2], 3, {3, 6}),
        # Small has 1 place: 1 was found twice and moves to main; what came once goes.
        ("s3fifo", [1, 1, 1, *range(2, 13), 1, 2], 10, {1, 2, 14}),
    ],
)
def test_caches_by_hand(cache: str, asked: list[int], capacity: int, hits: set[int]) -> None:
    there = caches.CACHES[cache](asked, capacity)
    assert {index for index, hit in enumerate(there) if hit} == hits


def test_leading_counts_what_has_all_before_it() -> None:
    assert caches.leading([3, 2], [True, False, True, True, True]) == 3


def most_hits(asked: list[int], capacity: int) -> int:
    """By trying everything: what is kept after each request is any part of what is at hand."""
    states = {frozenset[int](): 0}
    for page in asked:
        after: dict[frozenset[int], int] = {}
        for here, hits in states.items():
            found = hits + (page in here)
            at_hand = here | {page}
            for size in range(min(capacity, len(at_hand)) + 1):
                for kept in combinations(sorted(at_hand), size):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, -1), found)
        states = after
    return max(states.values())


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_belady_is_the_most(asked: list[int], capacity: int) -> None:
    assert sum(caches.belady(asked, capacity)) == most_hits(asked, capacity)


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_no_cache_beats_belady(asked: list[int], capacity: int) -> None:
    best = sum(caches.belady(asked, capacity))
    for name, cache in caches.CACHES.items():
        there = cache(asked, capacity)
        assert len(there) == len(asked)
        assert sum(there) <= best, name
