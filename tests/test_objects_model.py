"""The store door against a dictionary: two handles of one pool, all its calls, in any order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cxlkv import Buffers, KVLayout, ObjectPool
from cxlkv.arrays import Bytes
from cxlkv.errors import BadArgumentError, BusyError, PoolFullError, ReleasedError
from cxlkv.objects import ABSENT, Lease, Reserved

from .conftest import audit
from .support.lengths import matrix

SIZE = 300 << 10  # without checksums two threads share it
NAMES = [f"n{i}" for i in range(10)]
FEW = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6)
SIZES = st.sampled_from([1, 63, 64, 65, 4096, 20_001, 100_000, SIZE - 1, SIZE])
HANDLES = st.integers(0, 1)


class Item:
    """What lies in a page: equal to nothing but itself, and nobody else's bytes."""

    def __init__(self, number: int, size: int) -> None:
        self.bytes = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        self.published = False


class Held(NamedTuple):
    """A lease or a reservation of a handle; None: was absent, or is given back."""

    handle: int
    lease: Lease | Reserved
    items: list[Item | None]


def cut(data: bytes | Bytes, places: list[int]) -> list[bytes | Bytes]:
    """In several buffers, empty ones among them."""
    ends = sorted([0, *(min(place, len(data)) for place in places), len(data)])
    return [data[begin:end] for begin, end in pairwise(ends)]


class Store(RuleBasedStateMachine):
    """A name has what was put or published first, until it is forgotten; a view has what it had."""

    folder: Path
    checksum: bool
    threads: int

    @initialize()
    def begin(self) -> None:
        self.path = self.folder / f"pool{id(self)}"
        self.path.unlink(missing_ok=True)
        ObjectPool.create(
            self.path,
            layout=KVLayout.objects(SIZE),
            capacity="4500KiB",
            checksum=self.checksum,
            threads=1,
        ).close()
        self.pools = [self.opened(), self.opened()]
        self.total = self.pools[0].stats()["pages_total"]
        self.made = 0
        self.names: dict[str, Item] = {}
        self.pinned: set[str] = set()
        self.held: list[Held] = []
        self.scrubbed: list[Item] = []

    def opened(self) -> ObjectPool:
        return ObjectPool.open(self.path, threads=self.threads)

    def items(self, sizes: list[int]) -> list[Item]:
        self.made += len(sizes)
        return [Item(self.made - i, size) for i, size in enumerate(sizes)]

    def held_items(self) -> set[Item]:
        return {item for held in self.held for item in held.items if item}

    def free(self) -> int:
        return self.total - len(self.held_items().union(self.names.values()))

    def add(self, names: list[str], items: list[Item]) -> list[bool]:
        """Which of these are new, one by one."""
        new = []
        for name, item in zip(names, items, strict=True):
            new.append(name not in self.names and not item.published)
            if new[-1]:
                self.names[name] = item
                item.published = True
        return new

    # ---- copies ----

    @rule(
        handle=HANDLES,
        names=FEW,
        sizes=st.lists(SIZES, min_size=6, max_size=6),
        cuts=st.lists(st.integers(0, SIZE), max_size=3),
        by_address=st.booleans(),
    )
    def put(
        self, handle: int, names: list[str], sizes: list[int], cuts: list[int], by_address: bool
    ) -> None:
        items = self.items(sizes[: len(names)])
        parts = [cut(item.bytes, cuts) for item in items]
        given: Buffers | list[list[bytes | Bytes]] = parts
        if by_address:
            memory = [np.frombuffer(part, np.uint8) for object_ in parts for part in object_]
            given = Buffers(
                [one.ctypes.data for one in memory],
                [one.size for one in memory],
                np.arange(len(names) + 1) * (len(cuts) + 1),
            )
        pool = self.pools[handle]
        if len(set(names) - set(self.names)) > self.free():
            with pytest.raises(PoolFullError):
                pool.put_batch(names, given)
        else:
            assert pool.put_batch(names, given).tolist() == self.add(names, items)

    def wanted_sizes(self, names: list[str]) -> list[int]:
        return [len(self.names[n].bytes) if n in self.names else ABSENT for n in names]

    @rule(
        handle=HANDLES,
        names=FEW,
        cuts=st.lists(st.integers(0, SIZE), max_size=2),
        more=st.integers(0, 70),
        short=st.sampled_from([False, False, False, True]),
    )
    def get(self, handle: int, names: list[str], cuts: list[int], more: int, short: bool) -> None:
        sizes = self.wanted_sizes(names)
        room = [max(size - (short and i == len(sizes) - 1), 0) for i, size in enumerate(sizes)]
        out = [np.full(size + more * (not short), 7, np.uint8) for size in room]
        parts = [cut(memory, cuts) for memory in out]
        if short and sizes and sizes[-1] > 0:
            with pytest.raises(BadArgumentError, match="Nothing was copied"):
                self.pools[handle].get_batch_into(names, parts)
            assert all((memory == 7).all() for memory in out)
            return
        assert self.pools[handle].get_batch_into(names, parts).tolist() == sizes
        for name, size, memory in zip(names, sizes, out, strict=True):
            end = max(size, 0)
            assert memory[:end].tobytes() == (self.names[name].bytes if end else b"")
            assert (memory[end:] == 7).all()

    @rule(
        handle=HANDLES,
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5),
        shares=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1), st.floats(0, 1)), max_size=6),
    )
    def ranges(self, handle: int, names: list[str], shares: list[tuple[int, float, float]]) -> None:
        sizes, rows, wanted, at = self.wanted_sizes(names), [], [], 0
        for number, share, length in shares:
            which = number % len(names)
            size = sizes[which] if sizes[which] > 0 else 500
            offset = int(share * size)
            count = int(length * (size - offset))
            data = self.names[names[which]].bytes if sizes[which] > 0 else b""
            rows.append([which, offset, count, at])
            wanted.append((at, data[offset : offset + count], count if data else ABSENT))
            at += count
        out = np.full(at, 7, np.uint8)
        found = self.pools[handle].get_ranges(names, rows, out)
        assert found.tolist() == [count for _, _, count in wanted]
        for begin, data, _ in wanted:
            assert out[begin : begin + len(data)].tobytes() == data

    @rule(handle=HANDLES, names=FEW)
    def sizes(self, handle: int, names: list[str]) -> None:
        assert self.pools[handle].object_sizes(names).tolist() == self.wanted_sizes(names)

    # ---- where they lie ----

    @rule(handle=HANDLES, names=FEW)
    def lease(self, handle: int, names: list[str]) -> None:
        lease = self.pools[handle].lease(names)
        assert lease.sizes.tolist() == self.wanted_sizes(names)
        self.held.append(Held(handle, lease, [self.names.get(name) for name in names]))

    @rule(handle=HANDLES, sizes=st.lists(SIZES, max_size=4))
    def reserve(self, handle: int, sizes: list[int]) -> None:
        if len(sizes) > self.free():
            with pytest.raises(PoolFullError):
                self.pools[handle].reserve(sizes)
            return
        reserved, items = self.pools[handle].reserve(sizes), self.items(sizes)
        for view, item in zip(reserved.views, items, strict=True):
            assert view is not None
            view[:] = item.bytes
        self.held.append(Held(handle, reserved, [*items]))

    @precondition(lambda self: any(isinstance(held.lease, Reserved) for held in self.held))
    @rule(
        data=st.data(),
        named=st.lists(
            st.tuples(st.integers(0, 4), st.sampled_from(NAMES)), min_size=1, max_size=4
        ),
    )
    def publish(self, data: st.DataObject, named: list[tuple[int, str]]) -> None:
        """Some places, in any order and more than once; all or none when one was given back."""
        candidates = [held for held in self.held if isinstance(held.lease, Reserved) and held.items]
        if not candidates:
            return
        held = data.draw(st.sampled_from(candidates), "of which")
        reserved = held.lease
        assert isinstance(reserved, Reserved)
        places = [place % len(held.items) for place, _ in named]
        names = [name for _, name in named]
        items = [held.items[place] for place in places]
        there = [item for item in items if item]
        if len(there) < len(items):
            with pytest.raises(ReleasedError, match="was given back"):
                reserved.publish(names, places)
            return
        first = [places.index(place) == i for i, place in enumerate(places)]
        wanted = []  # a place has one chance in a call
        for name, item, is_first in zip(names, there, first, strict=True):
            wanted += self.add([name], [item]) if is_first else [False]
        assert reserved.publish(names, places).tolist() == wanted

    @precondition(lambda self: self.held)
    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: st.DataObject, whole: bool) -> None:
        held = data.draw(st.sampled_from(self.held), "which")
        if whole or not held.items:
            held.lease.release()
            self.held.remove(held)
        else:
            place = data.draw(st.integers(0, len(held.items) - 1), "place")
            held.lease.release_one(place)
            held.items[place] = None

    # ---- away with it ----

    @rule(handle=HANDLES, names=FEW)
    def forget(self, handle: int, names: list[str]) -> None:
        known = set(names) & self.names.keys()
        assert self.pools[handle].forget(names) == len(known)
        self.pinned -= known
        for name in known:
            del self.names[name]

    @rule(handle=HANDLES, names=FEW)
    def scrub(self, handle: int, names: list[str]) -> None:
        known = set(names) & self.names.keys()
        items = [self.names.pop(name) for name in known]
        held = len(self.held_items().intersection(items))
        assert self.pools[handle].admin.scrub(names) == (len(items) - held, held, 0)
        self.pinned -= known
        self.scrubbed += items

    @rule(handle=HANDLES, names=st.lists(st.sampled_from(NAMES), unique=True), pin=st.booleans())
    def pin(self, handle: int, names: list[str], pin: bool) -> None:
        known = set(names) & self.names.keys()
        pool = self.pools[handle]
        assert (pool.admin.pin(names) if pin else pool.admin.unpin(names)) == len(known)
        self.pinned = self.pinned | known if pin else self.pinned - known

    @rule(handle=HANDLES)
    def close(self, handle: int) -> None:
        """And open again; the other handle keeps the pins."""
        lent = [held for held in self.held if held.handle == handle and any(held.items)]
        if lent:
            with pytest.raises(BusyError, match="held by leases"):
                self.pools[handle].close()
            return
        self.held = [held for held in self.held if held.handle != handle]
        self.pools[handle].close()
        self.pools[handle] = self.opened()

    @rule()
    def close_both(self) -> None:
        if any(any(held.items) for held in self.held):
            return
        self.held.clear()
        for pool in self.pools:
            pool.close()
        self.pools = [self.opened(), self.opened()]
        self.pinned.clear()

    # ---- what holds at all times ----

    @invariant()
    def names_and_views_have_their_bytes(self) -> None:
        names = list(self.names)
        for pool in self.pools:
            out = [np.empty(len(self.names[name].bytes), np.uint8) for name in names]
            assert pool.get_batch_into(names, out).tolist() == self.wanted_sizes(names)
            for name, memory in zip(names, out, strict=True):
                assert memory.tobytes() == self.names[name].bytes
            assert (pool.object_sizes([n for n in NAMES if n not in names]) == ABSENT).all()
        for _, lease, items in self.held:
            for view, item in zip(lease.views, items, strict=True):
                assert (view is None) == (item is None)
                assert view is None or item is None or view == item.bytes

    @invariant()
    def pages_add_up(self) -> None:
        held = self.held_items()
        for pool in self.pools:
            stats = pool.stats()
            assert stats["pages_held"] == len(held)
            assert stats["pages_published"] == len(self.names)
            assert stats["pages_published_only"] == len(set(self.names.values()) - held)
            assert stats["pages_pinned"] == len(self.pinned)
            assert stats["pages_free"] == self.free()
            assert stats["corrupt_pieces"] == stats["rebuilds"] == 0

    @invariant()
    def nothing_is_left_of_what_was_scrubbed(self) -> None:
        gone = [item for item in self.scrubbed if item not in self.held_items()]
        data = self.path.read_bytes() if gone else b""
        for item in gone:
            self.scrubbed.remove(item)
            assert len(item.bytes) < 60 or item.bytes[:60] not in data
            assert len(item.bytes) < 60 or item.bytes[-60:] not in data

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for held in self.held:
            held.lease.release()
        self.held.clear()
        try:
            for pool in self.pools:
                audit(pool)
                assert pool.stats()["pages_held"] == 0
            self.nothing_is_left_of_what_was_scrubbed()
        finally:
            for pool in self.pools:
                pool.close()
            self.path.unlink()


@pytest.mark.timeout(600)  # a failure is made small, which takes minutes
@matrix(threads=[1, 2], checksum=[True, False])
def test_any_calls_agree_with_a_dictionary(tmp_path: Path, checksum: bool, threads: int) -> None:
    Store.folder, Store.checksum, Store.threads = tmp_path, checksum, threads
    run_state_machine_as_test(
        Store, settings=settings(max_examples=30, stateful_step_count=50, deadline=None)
    )
