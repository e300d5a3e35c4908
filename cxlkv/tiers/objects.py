"""Tiers bring objects back that were evicted to the cold file.

Pages of a chain are of use only with those before them; an object is of use by itself. So an object
that cannot be brought back does not keep others from coming. And the name of a page stands for the
same bytes for ever, while an object that was forgotten may be put again with others: what goes to
the file replaces what is there, unless it is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from itertools import islice
from threading import RLock

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Mask, Names, PageIds
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.objects import Keys, ObjectPool, hashes_of
from cxlkv.pages import NO_PAGE
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.tiers.cold_store import ColdStore
from cxlkv.tiers.policy import Published

HEADER_BYTES = 64
"""Bytes of a record's header: key, size, and the CRC of its checksums
(docs/reference/memory-layout.md)."""
SAVED_MAX = 1 << 17


ORDINAL_AT = slice(36, 40)
"""Of a record's header."""


def object_pages(layout: KVLayout) -> int:
    """The most slots of an object."""
    return -(-(layout.object_bytes or 1) // layout.page_tokens)


def whole_objects(rows: npt.NDArray[np.void], published: Published, chosen: PageIds) -> PageIds:
    """The rows of all slots of the objects of which some are chosen, first slots at first: an
    object of which a slot is gone is found no more. All names of a key end in the same 8 bytes."""
    objects = rows["hash"][:, 1]
    whole = np.isin(objects, objects[chosen]) & ~published.kept
    whole[chosen] = True
    found = np.flatnonzero(whole).astype(np.uint32)
    return found[np.argsort(rows["part"][found], kind="stable")]


class ObjectMoves(ABC):
    """Moves objects for Tiers, which has the lock, the counts and the moves."""

    pool: CXLPool
    cold: ColdStore | None
    _lock: RLock
    _counts: Counter[str]
    _batch: int
    _coming: PageIds
    _saved: dict[bytes, bytes]  # by name: the header of its record, as it is in the file

    def restore(self, keys: Keys) -> Mask:
        """Bring back those of the objects that are only in the cold tier, as far as there is room.

        bool [n]: which of all are in the pool now, where get_batch_into(), get_ranges() and lease()
        of the pool find them, until others need the room. The first ones get room first, and
        objects of this call make none for each other. What chain() said of one ended when it went.
        One that is damaged in the file is absent. Raises BadArgumentError for a pool of K and V,
        whose match() does this.
        """
        names = self._object_names(keys)
        if self.pool.layout.object_limit is not None:
            return self._restore_slots(hashes_of(keys), names)
        pages, _ = self.pool.records.find(names)
        here: Mask = pages != NO_PAGE
        if self.cold is None or here.all():
            return here
        wanted = names[self.cold.contains(names) & ~here]
        wanted = wanted[np.sort(np.unique(wanted, axis=0, return_index=True)[1])]
        if len(wanted):
            with self._lock:
                self._coming = pages[here]
                try:
                    self._restore(wanted)
                finally:
                    self._coming = np.empty(0, np.uint32)
        return self.pool.records.here(names)

    def contains(self, keys: Keys) -> Mask:
        """bool [n]: which objects are in the pool or, as far as its headers say, in the cold tier;
        no use of them. Raises BadArgumentError for a pool of K and V."""
        names = self._object_names(keys)
        there = self.pool.records.here(names)
        return there if self.cold is None else there | self.cold.contains(names)

    def forget(self, keys: Keys) -> int:
        """pool.forget(), and from the cold tier, too, from where restore() would bring back what
        was forgotten in the pool alone. How many there were in either. Raises BadArgumentError for
        a pool of K and V."""
        names = np.unique(self._object_names(keys), axis=0)
        with self._lock:  # none of them is on its way from one to the other
            there = self.pool.records.here(names)
            self.pool.forget(keys)
            if self.cold is not None:
                there |= self.cold.drop(names)
                if self.pool.layout.object_limit is not None:
                    places = object_pages(self.pool.layout)
                    rest = self.pool.records.names(hashes_of(keys), places)[:, 1:]
                    self.cold.drop(np.unique(rest.reshape(-1, 16), axis=0))
        return int(there.sum())

    # ---- objects in several slots ----

    def _restore_slots(self, hashes: bytes, names: Names) -> Mask:
        """The same, object by object, each whole or not at all."""
        assert isinstance(self.pool, ObjectPool)
        keys = PageKeys(np.frombuffer(hashes, np.uint8).reshape(-1, 16), 1)
        here: Mask = self.pool.object_sizes(keys) >= 0
        if self.cold is None or here.all():
            return here
        wanted = np.flatnonzero(self.cold.contains(names) & ~here)
        with self._lock:
            self._coming = self._pages_of(hashes, np.flatnonzero(here))
            try:
                for index in wanted.tolist():
                    key = hashes[16 * index : 16 * index + 16]
                    self._restore_object(key)
                    self._coming = np.append(self._coming, self._pages_of(key, np.zeros(1, int)))
            finally:
                self._coming = np.empty(0, np.uint32)
        return self.pool.object_sizes(keys) >= 0

    def _pages_of(self, hashes: bytes, indices: npt.NDArray[np.int64]) -> PageIds:
        """The pages that the pool has of these keys."""
        some = b"".join(hashes[16 * index : 16 * index + 16] for index in indices.tolist())
        names = self.pool.records.names(some, object_pages(self.pool.layout))
        pages, _ = self.pool.records.find(names.reshape(-1, 16))
        found: PageIds = pages[pages != NO_PAGE]
        return found

    def _restore_object(self, key: bytes) -> None:
        """The first page comes last: a match finds nothing of the object before that."""
        assert self.cold is not None
        first, records = self.pool.records.names(key)[0, 0], self._records(1)
        if not self.cold.load(first, records).all():
            return
        ordinal = int(records[0, ORDINAL_AT].view(np.uint32)[0])  # the object's bytes
        count = max(1, -(-ordinal // self.pool.layout.page_tokens))
        names = np.ascontiguousarray(self.pool.records.names(key, count).reshape(-1, 16)[::-1])
        parents = np.concatenate([np.zeros((1, 16), np.uint8), names[:-1]])
        missing = ~self.pool.records.here(names)
        if not self.cold.contains(names[missing]).all() or not self._has_room(int(missing.sum())):
            self._counts["refused_pages"] += int(missing.sum())
            return
        for begin in range(0, int(missing.sum()), self._batch):
            some = np.flatnonzero(missing)[begin : begin + self._batch]
            records = self._records(len(some))
            right = self.cold.load(names[some], records)
            right = self._write(records, parents[some]) if right.all() else right
            if not right.all():  # of what has come nothing is found, and it goes first
                pages, generations = self.pool.records.find(names[:-1])
                there = pages != NO_PAGE
                self.pool.records.forget(pages[there], generations[there], True)
                return
            self._note(names[some], records)
            self._counts["promoted_pages"] += len(some)

    # ---- moves ----

    def _restore(self, names: Names) -> None:
        assert self.cold is not None
        for first in range(0, len(names), self._batch):
            some = names[first : first + self._batch]
            # Before the records come: those that make room go through the same buffer.
            if not self._has_room(len(some)):
                self._counts["refused_pages"] += len(names) - first
                return
            records = self._records(len(some))
            whole = np.flatnonzero(self.cold.load(some, records))
            records[: len(whole)] = records[whole]
            right = self._write(records[: len(whole)], np.zeros((len(whole), 16), np.uint8))
            self._note(some[whole][right], records[: len(whole)][right])
            self._counts["promoted_pages"] += int(right.sum())
            pages, _ = self.pool.records.find(some)
            self._coming = np.append(self._coming, pages[pages != NO_PAGE])

    def _replacing(self, names: Names, records: Names) -> Mask:
        """Which of these are to be stored; older ones of their names are dropped first."""
        assert self.cold is not None
        same = [
            self._saved.get(name.tobytes()) == record.tobytes()
            for name, record in zip(names, records[:, :HEADER_BYTES], strict=True)
        ]
        there = self.cold.contains(names, sure=True)
        old = there & ~np.array(same, np.bool_)
        if old.any():
            self.cold.drop(names[old])
        return old | ~there

    def _note(self, names: Names, records: Names) -> None:
        """Note that the cold tier has exactly these."""
        assert self.cold is not None
        for name, record in zip(names, records[:, :HEADER_BYTES], strict=True):
            self._saved[name.tobytes()] = record.tobytes()
        for name in list(islice(self._saved, max(0, len(self._saved) - SAVED_MAX))):
            del self._saved[name]  # the oldest: should it go again, it is written again

    # ---- names ----

    def _object_names(self, keys: Keys) -> Names:
        if self.pool.layout.object_bytes is None:
            raise BadArgumentError(
                "restore(), contains() and forget() are of pools of objects: match() brings K and "
                "V back"
            )
        return self.pool.records.names(hashes_of(keys)).reshape(-1, 16)

    # ---- of Tiers ----

    @abstractmethod
    def _has_room(self, pages: int) -> bool: ...

    @abstractmethod
    def _records(self, count: int) -> Names: ...

    @abstractmethod
    def _write(self, records: Names, parents: Names) -> Mask: ...
