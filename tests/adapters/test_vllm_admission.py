"""What a scheduler plans by, where hosts share its pool: it waits for others, and they for it."""

from __future__ import annotations

import time

from cxlkv import CXLPool
from cxlkv.adapters.vllm.admission import Admission
from cxlkv.tiers import Tiers

from ..coherence.test_hosts import PAGE_TOKENS, TOKENS, Hosts, publish
from ..coherence.test_hosts import hosts as hosts
from ..coherence.test_wants import EXTENTS, SLOTS, Taking, extents, fill
from ..coherence.test_wants import taking as taking
from ..support.waiting import until

LEASE_S = 0.5
SHARE_TOKENS = EXTENTS // 2 * SLOTS * PAGE_TOKENS


def opened(hosts: Hosts) -> tuple[CXLPool, CXLPool]:
    return hosts.open(0, LEASE_S), hosts.open(1, LEASE_S)


def begins(room: Admission, tokens: int) -> bool:
    """In a step of its own."""
    room.begin()
    return not room.waits and room.fits("a request", 0, tokens)


def test_who_owes_room_begins_no_request_until_it_is_given(hosts: Hosts, taking: Taking) -> None:
    """It waits for what runs there, and a lease more; what cannot be given then ends no service."""
    owner, other = opened(hosts)
    room, others_room = Admission([owner], LEASE_S), Admission([other], LEASE_S)
    taking.extents(owner, EXTENTS)
    room.begin()
    assert room.fits("one that runs", 0, 0)
    room.take("one that runs")
    assert not begins(others_room, TOKENS)
    until(owner.pages.owes_room)

    def waits() -> bool:
        """In a step; the other one says in its own that it lacks room."""
        assert not begins(others_room, TOKENS)
        room.begin()
        return room.waits

    end_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < end_s:
        assert waits()
    room.give_back("one that runs")
    assert waits()
    until(lambda: not waits())
    assert owner.pages.owes_room(), "as before"
    assert room.fits("another one", 0, 0)
    room.take("another one")
    room.begin()
    assert room.waits


def test_room_is_what_is_free_and_comes_back(hosts: Hosts) -> None:
    """In a step: less what it gives, with what ends in it."""
    owner, _ = opened(hosts)
    room = Admission([owner], LEASE_S)
    room.begin()
    assert room.has(room.tokens)
    assert room.fits("a request", 0, PAGE_TOKENS)
    room.take("a request")
    assert not room.has(room.tokens)
    room.give_back("a request")
    assert room.has(room.tokens)


def test_a_request_of_more_than_a_share_gets_it(hosts: Hosts, taking: Taking) -> None:
    """While others run beside it, no more than the share is asked for."""
    owner, other = opened(hosts)
    taking.extents(other, EXTENTS // 2 + 1)
    fill(owner, EXTENTS // 2)
    room = Admission([other], LEASE_S)
    room.begin()
    room.fits("one that runs", 0, 0)
    room.take("one that runs")
    assert not begins(room, PAGE_TOKENS)
    assert not owner.pages.owes_room()
    room.give_back("one that runs")
    with Tiers(owner) as tiers:

        def came() -> bool:
            tiers.give()
            return begins(room, 4 * SLOTS * PAGE_TOKENS)

        until(came)
    taking.pages(other, 4 * SLOTS)
    assert extents(other, 1) >= EXTENTS // 2 + 5


def test_what_a_host_left_behind_is_room(hosts: Hosts, taking: Taking) -> None:
    owner, other = opened(hosts)
    publish(owner, 1)
    taking.extents(owner, EXTENTS - 1)
    room = Admission([other], LEASE_S)
    assert not begins(room, SHARE_TOKENS)
    owner.close()
    assert begins(room, SHARE_TOKENS)
