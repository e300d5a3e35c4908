"""A pool that several hosts share: what one publishes, others find, read, hand on and forget.

Each host number has a host state of its own, so several pools of this process are several hosts.
Those that die or stop are in test_hosts_failing.py. Waiting is polling with a deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, Sequence
from cxlkv.errors import BadArgumentError, BusyError, ClosedError, PoolFullError, StaleError
from cxlkv.layout import LayerGroup
from cxlkv.prefix import content_keys, prefix_keys

from ..conftest import audit
from ..support.forking import child_beside, in_child
from ..support.sharing import shared
from ..support.texts import SMALL, append, grown, verify
from ..support.waiting import until

PAGE_TOKENS = SMALL.page_tokens
CAPACITY_BYTES = (2 << 20) + (500 << 10)  # 272 pages in 17 extents
TOKENS = 5 * PAGE_TOKENS
HOSTS = 4
LEASE_S = 2.0


class Hosts:
    """One pool, opened here as several hosts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stack = ExitStack()
        self.pools: list[CXLPool] = []
        self.damaged = False

    def open(self, host: int | str | None, lease_s: float = LEASE_S) -> CXLPool:
        opened = CXLPool.open(self.path, host=host, lease_s=lease_s, threads=1)
        self.pools.append(self.stack.enter_context(opened))
        return opened

    def audit(self) -> None:
        """All that were not closed; a test that leaves damage says so."""
        for pool in self.pools:
            with suppress(ClosedError):
                if not self.damaged:
                    audit(pool)


@pytest.fixture
def hosts(shm_path: Path) -> Iterator[Hosts]:
    """In the end nothing is wrong, as each of them sees it."""
    path = str(shm_path)
    make(path).close()
    made = Hosts(path)
    try:
        yield made
        made.audit()
    finally:
        made.stack.close()
        until(partial(is_removed, path), "somebody has it open")


def is_removed(path: str) -> bool:
    """Not while a thread of a process that was killed is on its way out."""
    with suppress(BusyError):
        CXLPool.remove(path)
        return True
    return False


def make(
    path: str,
    *,
    capacity: int = CAPACITY_BYTES,
    checksum: bool = True,
    sharing: str = "software",
    durable: str = "process",
    hosts: int | None = HOSTS,
    host: int | None = 0,
    lease_s: float = LEASE_S,
) -> CXLPool:
    return CXLPool.create(
        path,
        layout=SMALL,
        capacity=capacity,
        checksum=checksum,
        sharing=sharing,
        durable=durable,
        hosts=hosts,
        host=host,
        lease_s=lease_s,
        threads=1,
    )


def write(pool: CXLPool, seed: int, tokens: int = TOKENS) -> Sequence:
    return grown(pool, text(seed, tokens))


def text(seed: int, tokens: int = TOKENS) -> range:
    return range(seed * 1000, seed * 1000 + tokens)


def publish(pool: CXLPool, seed: int) -> None:
    sequence = write(pool, seed)
    assert pool.publish_prefix(sequence, text(seed)) == TOKENS // PAGE_TOKENS
    sequence.release()


def forget(pool: CXLPool, seed: int) -> int:
    return pool.forget(prefix_keys(text(seed), PAGE_TOKENS))


def write_soon(pool: CXLPool, seed: int, tokens: int = TOKENS) -> Sequence:
    """What others can spare they say with their beats: until then the pool is full."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return write(pool, seed, tokens)
        except PoolFullError:
            assert time.monotonic() < deadline, "nobody gave an extent"
            os.sched_yield()


def found(pool: CXLPool, seed: int) -> int:
    """How many tokens of the text are found; what is found is read and compared."""
    with pool.match_prefix(text(seed)) as hit:
        verify(hit.sequence(), text(seed, hit.tokens))
        return hit.tokens


# ---- finding, forgetting ----


def test_others_find_what_was_published_at_once(hosts: Hosts) -> None:
    pools = [hosts.open(host) for host in range(3)]
    for seed in range(1, 31):
        publish(pools[seed % 3], seed)
        for pool in pools:
            assert found(pool, seed) == TOKENS
    assert not any(pool.stats()["pages_borrowed"] for pool in pools)


def test_a_text_that_moves_from_host_to_host_is_found(hosts: Hosts) -> None:
    """Logs are read host by host: that it was published anew comes before that it was forgotten."""
    first, second = hosts.open(1), hosts.open(0)
    reader = hosts.open(2, 3600.0)  # follows when it matches, and not in between
    for _ in range(5):
        publish(first, 7)
        assert found(reader, 7) == TOKENS
        assert forget(first, 7) == TOKENS // PAGE_TOKENS
        publish(second, 7)
        assert found(reader, 7) == TOKENS
        assert forget(second, 7) == TOKENS // PAGE_TOKENS
        assert found(reader, 7) == 0


def test_tails_are_found_by_others(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    sequence = write(owner, 1)
    cut = TOKENS - 1
    assert owner.publish_prefix(sequence, text(1)[:cut], tail=True) == TOKENS // PAGE_TOKENS
    sequence.release()
    assert found(other, 1) == found(owner, 1) == cut
    assert other.stats()["pages_borrowed"] == 0
    with other.match_prefix(text(1)) as hit:
        taken = hit.sequence()  # full pages are read in place, the tail was copied
    assert other.stats()["pages_borrowed"] == TOKENS // PAGE_TOKENS - 1
    tail = prefix_keys(text(1)[:cut], PAGE_TOKENS, tail=True)[-1:]
    assert owner.forget(tail) == 1
    assert owner.stats()["pages_withdrawn"] == 0, "nobody reads it"
    verify(taken, text(1, cut))
    taken.release()
    assert found(other, 1) == TOKENS - PAGE_TOKENS
    shorter = write(other, 1, TOKENS - 2)
    assert other.publish_prefix(shorter, text(1)[: TOKENS - 2], tail=True) == 1
    shorter.release()
    assert found(owner, 1) == TOKENS - 2


def test_a_tail_that_another_host_forgot(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1, 3600.0)  # follows when it matches
    for _ in range(3):
        sequence = write(owner, 1, TOKENS - 1)
        owner.publish_prefix(sequence, text(1)[: TOKENS - 1], tail=True)
        sequence.release()
        assert found(other, 1) == TOKENS - 1
        assert owner.forget(prefix_keys(text(1)[: TOKENS - 1], PAGE_TOKENS, tail=True)) == 5
        publish(owner, 2)  # takes the pages
        assert found(other, 1) == 0
        forget(owner, 2)


def test_pins_are_of_one_host_and_of_its_own_pages(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    assert found(other, 1) == TOKENS
    keys = prefix_keys(text(1), PAGE_TOKENS)
    assert other.admin.pin(keys) == 0
    assert not other.pages.evictable().any()
    assert owner.pages.evictable().sum() == len(keys)
    assert owner.admin.pin(keys) == len(keys)
    assert not owner.pages.evictable().any()
    assert (owner.stats()["pages_pinned"], other.stats()["pages_pinned"]) == (len(keys), 0)
    assert forget(other, 1) == len(keys), "who forgets it by name wins over a pin"
    until(lambda: owner.stats()["pages_published"] == 0, "the owner's keeper does it")
    assert owner.stats()["pages_pinned"] == 0


def test_content_is_found_on_other_hosts_when_asked_for(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    sequence = write(owner, 1)
    keys = content_keys(text(1), PAGE_TOKENS)
    assert owner.publish(sequence, keys, PAGE_TOKENS, strict=False) == len(keys)
    assert found(other, 1) == 0
    with other.match(keys, strict=False) as hit:
        assert (hit.tokens, hit.strict) == (TOKENS, False)
        taken = other.adopt(hit.handle)
    with pytest.raises(BadArgumentError, match="behind other text"):
        other.publish_prefix(taken, text(1))


def test_forgotten_by_another_host(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    free = owner.stats()["pages_free"] + owner.stats()["pages_elsewhere"]
    publish(owner, 1)
    assert forget(other, 1) == TOKENS // PAGE_TOKENS
    assert found(other, 1) == 0
    until(lambda: owner.stats()["pages_published"] == 0, "the owner's keeper does it")
    assert found(owner, 1) == 0
    stats = owner.stats()
    assert stats["pages_free"] + stats["pages_elsewhere"] == free


def test_a_hit_keeps_its_pages_from_being_written_again(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    pages = TOKENS // PAGE_TOKENS
    with other.match_prefix(text(1)) as hit:
        sequence = hit.sequence()
        assert other.stats()["pages_borrowed"] == pages
        assert forget(owner, 1) == pages
        assert owner.stats()["pages_withdrawn"] == pages
        assert owner.admin.check(deep=True)["clean"]
        fill_up(owner)
        verify(sequence, text(1))
        sequence.release()
    assert other.stats()["pages_borrowed"] == 0
    until(lambda: owner.stats()["pages_withdrawn"] == 0, "let go, and still withdrawn")


def fill_up(pool: CXLPool) -> list[Sequence]:
    """Takes every page that there is."""
    taken: list[Sequence] = []
    while True:
        try:
            taken.append(write(pool, 1000 + len(taken)))
        except PoolFullError:
            return taken


# ---- handing over ----


def test_a_handle_of_unpublished_pages(hosts: Hosts) -> None:
    """From A to B, and on from B to C when A has let go."""
    a, b, c = (hosts.open(host) for host in range(3))
    first = write(a, 1, TOKENS + 2)  # with a tail
    second = b.adopt(first.handle)
    verify(second, text(1, TOKENS + 2))
    first.release()
    full = fill_up(a)
    verify(second, text(1, TOKENS + 2))
    for sequence in full:
        sequence.release()
    write_soon(b, 2)
    third = c.adopt(second.handle)
    second.release()
    verify(third, text(1, TOKENS + 2))
    append(third, text(1, TOKENS + 6)[TOKENS + 2 :])
    verify(third, text(1, TOKENS + 6))
    third.release()
    until(lambda: a.stats()["pages_withdrawn"] == 0, "all have let go")


def test_a_handle_that_comes_too_late(hosts: Hosts) -> None:
    a, b = hosts.open(0), hosts.open(1)
    sequence = write(a, 1)
    handle = sequence.handle
    sequence.release()
    with pytest.raises(StaleError, match="freed"):
        b.adopt(handle)
    assert b.stats()["pages_borrowed"] == 0


def test_a_fork_has_what_its_parent_borrowed(hosts: Hosts) -> None:
    owner, other = hosts.open(0), hosts.open(1)
    publish(owner, 1)
    hit = other.match_prefix(text(1))
    sequence = hit.sequence()
    in_child(partial(verify, sequence, text(1)))
    with child_beside(partial(verify, sequence, text(1))):  # when the block has ended
        sequence.release()
        hit.release()
        assert forget(owner, 1) == TOKENS // PAGE_TOKENS
        fill = fill_up(owner)
        assert owner.stats()["pages_withdrawn"] == TOKENS // PAGE_TOKENS, "the child reads them"
    until(lambda: other.stats()["pages_borrowed"] == 0, "the child is reaped")
    until(lambda: owner.stats()["pages_withdrawn"] == 0, "and its pins with it")
    del fill


# ---- extents ----


def test_empty_extents_move_to_who_needs_them(hosts: Hosts) -> None:
    a, b = hosts.open(0), hosts.open(1)
    total = a.stats()["pages_total"]
    for sequence in fill_up(a):
        sequence.release()
    assert a.stats()["pages_elsewhere"] == 0, "all are one host's"
    taken = [write_soon(b, seed) for seed in range(1, total // 2 * PAGE_TOKENS // TOKENS)]
    for seed, sequence in enumerate(taken, 1):
        verify(sequence, text(seed))


def test_full_everywhere_is_said_quickly(hosts: Hosts) -> None:
    a, b = hosts.open(0, 20), hosts.open(1, 20)
    kept = fill_up(a)
    start = time.monotonic()
    with pytest.raises(PoolFullError, match="the pool is full"):
        write(b, 1)
    assert time.monotonic() - start < 2, "nobody offers: a lease is 20 s, a quarter of it 5 s"
    del kept


def test_more_than_is_left_is_an_error_and_no_hang(hosts: Hosts) -> None:
    a, b = hosts.open(0), hosts.open(1)
    kept = write(a, 1, 200 * PAGE_TOKENS)
    with pytest.raises(PoolFullError, match="100 pages wanted"):
        write(b, 2, 100 * PAGE_TOKENS)
    verify(kept, text(1, 200 * PAGE_TOKENS))


def test_what_a_host_leaves_behind(hosts: Hosts) -> None:
    """Others take its extents; what it had published is found as before, and can be forgotten."""
    a, b = hosts.open(0), hosts.open(1)
    seeds = range(1, 41)
    for seed in seeds:
        publish(a, seed)
    before = b.match_prefix(text(1))
    a.close()
    kept = fill_up(b)
    assert b.stats()["pages_elsewhere"] == 0
    audit(b)
    verify(before.sequence(), text(1))
    before.release()
    c = hosts.open(2)
    for seed in seeds:
        assert found(b, seed) == found(c, seed) == TOKENS
    for seed in seeds:
        assert forget(b, seed) == TOKENS // PAGE_TOKENS
    for sequence in kept:
        sequence.release()
    audit(b)
    assert b.stats()["pages_free"] == b.stats()["pages_total"]
    write_soon(c, 50).release()  # nothing of b's is pinned by b: an extent changes hands once more
    until(lambda: c.stats()["pages_withdrawn"] == 0, "b's own pins")


def test_a_window_across_hosts(hosts: Hosts) -> None:
    """In a part with a window, a hit borrows what the next token sees, and nothing before it."""
    full = LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32")
    layout = KVLayout.of([replace(full, window=8), full], page_tokens=4)
    path = hosts.path + ".windows"
    with shared(path, layout) as first, CXLPool.open(path, host=1, threads=1) as second:
        rows = np.arange(32 * 16, dtype=np.float32).reshape(32, 2, 8)
        sequence = first.sequence()
        for layer in range(2):
            sequence.append(layer, rows + layer, rows - layer, rewind=32)
        assert first.publish_prefix(sequence, range(32)) == 16
        with second.match_prefix(range(32)) as hit:
            assert hit.tokens == 32
            assert second.stats()["pages_borrowed"] == 8 + 2
            keys = np.asarray(hit.sequence().fetch(1)[0])
            assert np.array_equal(keys.transpose(1, 2, 0, 3).reshape(32, 2, 8), rows + 1)
        assert second.stats()["pages_borrowed"] == 0
    CXLPool.remove(path)
