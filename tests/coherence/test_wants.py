"""A host without room says so, and the others' tiers evict what nobody reads: whole extents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.arrays import PageIds
from cxlkv.errors import BadArgumentError, ClosedError, PoolFullError
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers

from ..support.waiting import until
from .test_hosts import PAGE_TOKENS, TOKENS, Hosts, found, publish, text, write
from .test_hosts import hosts as hosts
from .test_hosts_failing import Remote

LEASE_S = 0.5
EXTENTS, SLOTS = 13, 16  # of the pool that hosts share
PAGES = TOKENS // PAGE_TOKENS  # of a text


@pytest.fixture
def owner(hosts: Hosts) -> CXLPool:
    return hosts.open(0, LEASE_S)


@pytest.fixture
def tiers(owner: CXLPool) -> Iterator[Tiers]:
    with Tiers(owner) as made:
        yield made


def fill(pool: CXLPool, count: int = EXTENTS) -> list[int]:
    """With texts, until it has all of so many extents; the seeds of those that are found."""
    seed = 0
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


def test_extents_of_lower_priority_go_first(hosts: Hosts, owner: CXLPool, tiers: Tiers) -> None:
    """The oldest texts, which would go first, are raised: what was asked for next does."""
    seeds = fill(owner)
    for seed in seeds[: len(seeds) // 2]:
        owner.admin.prioritize(prefix_keys(text(seed), PAGE_TOKENS), 3)
    other = hosts.open(1, LEASE_S)
    other.pages.want_room(1)
    until(lambda: len(owner.pages.wanted()) > 0)
    rows, _ = tiers.published()
    place = rows["page"] // owner.pages.geometry["slab_slots"]
    order = {e: max(rows[["priority", "used"]][place == e].tolist()) for e in np.unique(place)}
    going = np.unique(owner.pages.wanted() // owner.pages.geometry["slab_slots"])
    assert set(going) == set(sorted(order, key=lambda e: order[e])[: len(going)])
    assert {order[e][0] for e in going} == {0}
    assert {priority for priority, _ in order.values()} == {0, 3}
    assert other.admin.prioritize(prefix_keys(text(seeds[-1]), PAGE_TOKENS), 9) == 0, "not its own"


def test_what_is_held_or_pinned_stays(hosts: Hosts, owner: CXLPool, tiers: Tiers) -> None:
    seeds = fill(owner)
    held = [owner.match_prefix(text(seed)) for seed in seeds]
    other = hosts.open(1, LEASE_S)
    other.pages.want_room(1)
    until(lambda: owner.admin.hosts()[1].state == "live")
    assert len(owner.pages.wanted()) == 0
    assert tiers.give() == 0
    for hit in held:
        hit.release()
    other.pages.want_room(1)
    until(lambda: len(owner.pages.wanted()) > 0)
    other.pages.want_room(0)
    until(lambda: len(owner.pages.wanted()) == 0)
    other.pages.want_room(1)
    until(lambda: len(owner.pages.wanted()) > 0)
    until(lambda: len(owner.pages.wanted()) == 0)  # after two leases


class Taking:
    """Takes pages for a test, and frees them in the end."""

    def __init__(self) -> None:
        self._taken: list[tuple[CXLPool, PageIds]] = []

    def pages(self, pool: CXLPool, count: int) -> None:
        self._taken.append((pool, pool.pages.alloc(count)))

    def extents(self, pool: CXLPool, count: int) -> None:
        """All that it has, and so many in all."""
        own = next(host.extents for host in pool.admin.hosts() if host.is_self)
        self.pages(pool, pool.stats()["pages_free"] + (count - own) * SLOTS)

    def free(self) -> None:
        for pool, pages in self._taken:
            with suppress(ClosedError):
                pool.pages.free(pages)


@pytest.fixture
def taking(hosts: Hosts) -> Iterator[Taking]:
    del hosts  # which looks, after this, whether anything is held
    made = Taking()
    yield made
    made.free()


def test_a_share_is_of_who_uses_the_pool(
    hosts: Hosts, owner: CXLPool, tiers: Tiers, taking: Taking
) -> None:
    """A mere reader has none. The owner gives what it has beyond its share, and no more; its
    own share then stays, whoever else wants one."""
    fill(owner)
    other, onlooker = hosts.open(1, LEASE_S), hosts.open(2, LEASE_S)
    share = EXTENTS // 2
    while extents(owner, 1) < share:
        other.pages.want_room(EXTENTS * SLOTS, within_share=True)
        until(lambda: owner.pages.owes_room() or other.pages.takeable() > 0)
        before = owner.stats()["pages_published"]
        tiers.give()
        assert before - owner.stats()["pages_published"] <= (EXTENTS - share + 1) * SLOTS
        until(lambda: other.pages.takeable() > 0)
        taking.pages(other, other.stats()["pages_free"] + other.pages.takeable())
    assert extents(owner, 0) + extents(owner, 1) == EXTENTS
    other.pages.want_room(1, within_share=True)
    onlooker.pages.want_room(1, within_share=True)
    until(owner.pages.owes_room, "now three have a share")
    while extents(owner, 0) > EXTENTS // 3:
        onlooker.pages.want_room(EXTENTS * SLOTS, within_share=True)
        tiers.give()
    assert extents(owner, 0) == EXTENTS // 3
    with pytest.raises(BadArgumentError, match="-1 pages"):
        other.pages.want_room(-1)


def test_more_than_a_share_comes_from_who_has_most(
    hosts: Hosts, owner: CXLPool, tiers: Tiers, taking: Taking
) -> None:
    """Published pages of a host that has no more than its share are evicted for nobody, while
    another has more, or what is wanted is within a share."""
    other = hosts.open(1, LEASE_S)
    taking.extents(other, EXTENTS // 2 + 1)
    fill(owner, EXTENTS // 2)
    other.pages.want_room(1, within_share=True)
    assert not owner.pages.owes_room()
    third = hosts.open(2, LEASE_S)
    third.pages.want_room(1, within_share=True)
    until(other.pages.owes_room)
    third.pages.want_room(0)
    other.pages.want_room(1)
    until(owner.pages.owes_room)
    tiers.give()
    until(lambda: other.pages.takeable() > 0)
    taking.pages(other, 1)


def test_what_nobody_wants_is_had_by_all(hosts: Hosts, owner: CXLPool, taking: Taking) -> None:
    """Up to its share a host takes what there is. Beyond it leaves what another wants that has
    fewer, and takes the rest."""
    other = hosts.open(1, LEASE_S)
    taking.extents(owner, 6)
    taking.extents(other, 4)
    assert owner.pages.takeable() == other.pages.takeable() == 3 * SLOTS
    other.pages.want_room(1, within_share=True)
    until(lambda: owner.pages.takeable() == SLOTS)
    taking.pages(owner, SLOTS)
    with pytest.raises(PoolFullError):
        owner.pages.alloc(1)
    taking.pages(other, 2 * SLOTS)
    with pytest.raises(PoolFullError):
        other.pages.alloc(1)


def test_who_is_dead_wants_nothing_and_has_no_share(
    hosts: Hosts, owner: CXLPool, taking: Taking
) -> None:
    taking.extents(owner, 6)
    third = hosts.open(2, LEASE_S)
    taking.extents(third, 4)
    with ExitStack() as stack:
        other = Remote(stack, hosts.path, 1, LEASE_S)
        other.ask(f"len(pool.pages.alloc({3 * SLOTS}))")
        other.ask(f"pool.pages.want_room({9 * SLOTS}, within_share=True)")
        until(owner.pages.owes_room)
        other.kill()
    until(lambda: not owner.pages.owes_room())
    for pool in (owner, third):
        until(lambda: pool.admin.hosts()[1].state == "silent")  # noqa: B023
    third.pages.want_room(1, within_share=True)  # which is half of 10 extents, now
    until(owner.pages.owes_room)


def test_one_extent_stays_with_each(
    hosts: Hosts, owner: CXLPool, tiers: Tiers, taking: Taking
) -> None:
    """With fewer extents than hosts one has none, and nobody gives up its only one for it."""
    others = [hosts.open(number, LEASE_S) for number in (1, 2)]
    taking.extents(others[0], EXTENTS - 1)
    publish(owner, 1)
    assert extents(owner, 0) == 1
    others[1].pages.want_room(EXTENTS * SLOTS)
    until(others[0].pages.owes_room)
    assert not owner.pages.owes_room()
    assert tiers.give() == 0
    assert found(owner, 1) == TOKENS
