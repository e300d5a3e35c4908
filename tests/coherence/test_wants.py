"""A host without room says so, and the others' tiers evict what nobody reads: whole extents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.errors import PoolFullError
from cxlkv.tiers import Tiers

from ..support.waiting import until
from .test_hosts import PAGE_TOKENS, TOKENS, Hosts, found, publish, text, write
from .test_hosts import hosts as hosts

LEASE_S = 0.5
PAGES = TOKENS // PAGE_TOKENS  # of a text


@pytest.fixture
def owner(hosts: Hosts) -> CXLPool:
    return hosts.open(0, LEASE_S)


@pytest.fixture
def tiers(owner: CXLPool) -> Iterator[Tiers]:
    with Tiers(owner) as made:
        yield made


def fill(pool: CXLPool) -> list[int]:
    """With texts, until it has all pages; the seeds of those that are found."""
    count, seed = pool.pages.geometry["extent_count"], 0
    while pool.stats()["pages_free"] >= PAGES or extents(pool, 0) < count:
        seed += 1
        publish(pool, seed)
    return [one for one in range(1, seed + 1) if found(pool, one) == TOKENS]


def extents(pool: CXLPool, host: int) -> int:
    return pool.admin.hosts()[host].extents


def test_what_was_asked_for_longest_ago_makes_room(
    hosts: Hosts, owner: CXLPool, tiers: Tiers
) -> None:
    seeds = fill(owner)
    other = hosts.open(1, LEASE_S)
    slots = owner.pages.geometry["slab_slots"]
    assert tiers.give() == 0, "nobody wants any"
    with Tiers(other), pytest.raises(PoolFullError):
        write(other, 1000)  # which says so
    until(lambda: len(owner.pages.wanted()) > 0)
    _, published = tiers.published()
    used = [published.used[published.pages // slots == e].max() for e in range(extents(owner, 0))]
    going = np.unique(owner.pages.wanted() // slots)
    assert set(going) == set(np.argsort(used)[: len(going)])
    before = extents(owner, 0)
    evicted = tiers.give()
    assert PAGES <= evicted <= 3 * slots
    until(lambda: extents(owner, 0) < before)
    publish(other, 1000)
    assert found(owner, 1000) == TOKENS
    kept = [seed for seed in seeds if found(owner, seed) == TOKENS]
    assert len(seeds) > len(kept) >= len(seeds) - evicted


def test_what_is_held_or_pinned_stays(hosts: Hosts, owner: CXLPool, tiers: Tiers) -> None:
    seeds = fill(owner)
    held = [owner.match_prefix(text(seed)) for seed in seeds]
    other = hosts.open(1, LEASE_S)
    other.want_room(1)
    until(lambda: owner.admin.hosts()[1].state == "live")
    assert len(owner.pages.wanted()) == 0
    assert tiers.give() == 0
    for hit in held:
        hit.release()
    other.want_room(1)
    until(lambda: len(owner.pages.wanted()) > 0)
    other.want_room(0)
    until(lambda: len(owner.pages.wanted()) == 0)
    other.want_room(1)
    until(lambda: len(owner.pages.wanted()) > 0)
    until(lambda: len(owner.pages.wanted()) == 0)  # after two leases
