"""A quota limits how many pages a tenant may have published; its own oldest ones make room.

    quota = Quota(tiers, pages=10_000)
    keys = prefix_keys(ids, page_tokens, salt)    # its secret salt
    with quota.match(keys) as hit: ...
    quota.publish(sequence, keys)
    with quota.room_for(names): objects.put_batch(names, buffers)    # names: object_keys()

One for each tenant and process. What keeps tenants from finding each other's pages is the salt of
their keys (cxlkv.prefix); docs/how-to/tenants.md says what neither can do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Names
from cxlkv.errors import BadArgumentError, QuotaError
from cxlkv.layout import format_bytes, parse_bytes
from cxlkv.machine import lifetime
from cxlkv.numbers import array_of, is_whole
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit, Sequence
from cxlkv.tiers import Tiers
from cxlkv.tiers.objects import object_pages

__all__ = ["Quota"]

SLACK = 64
"""One in so many pages of the quota is evicted beyond need, so that not each publish() evicts."""


class Quota:
    """Counts the pages that match() finds and that this tenant published, or brought back from
    cold, through it; of a pool of objects, each object's slots. Any thread may use it; one at a
    time publishes.

    The count is of this process: a tenant with several has a Quota in each, which share out what it
    may have. A page with equal keys counts for the tenant that published it first.
    """

    def __init__(self, tiers: Tiers, pages: int):
        if not is_whole(pages, 1):
            raise BadArgumentError(f"a quota of {pages!r} pages: a whole number, at least 1")
        self.tiers, self.pages = tiers, pages
        self._records = tiers.pool.records
        self._page_tokens = tiers.pool.layout.page_tokens
        self._lock = threading.Lock()
        self._own: set[bytes] = set()  # names; some may be gone since
        self._evicted = self._refused = 0
        lifetime.watch(self)

    @classmethod
    def of(cls, tiers: Tiers, size: str | int) -> Quota:
        """size: in bytes of the pool's memory, which a page takes whole."""
        geometry = tiers.pool.pages.geometry
        page_bytes = geometry["extent_bytes"] // geometry["slab_slots"]
        if parse_bytes(size) < page_bytes:
            raise BadArgumentError(
                f"a quota of {format_bytes(parse_bytes(size))}: a page has "
                f"{format_bytes(page_bytes)}; at least that for each process"
            )
        return cls(tiers, parse_bytes(size) // page_bytes)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def reopened(self, tiers: Tiers) -> None:
        """Go on with these: the pool before was closed, and what of it is still there counts."""
        with self._lock:
            self.tiers, self._records = tiers, tiers.pool.records

    def publish(self, seq: Sequence, keys: PageKeys) -> int:
        """pool.publish(), for which the tenant's own least recently used pages make room, to cold
        where there is that.

        Raises QuotaError, and publishes nothing, when the tenant would have more than its quota:
        the text alone is longer, or too many of its other pages are held, pinned or leased.
        """
        keys = keys[: len(seq) // keys.page_tokens]
        with self.room_for(keys):
            return self.tiers.pool.publish(seq, keys, keys.page_tokens, strict=keys.strict)

    def match(self, keys: PageKeys, *, lease_s: float = 60.0) -> Hit:
        """tiers.match(). Pages that it brings back count; the tenant's others make room for them,
        but for held, pinned and leased ones."""
        with self.bringing(keys):
            return self.tiers.match(keys, lease_s=lease_s, strict=keys.strict)

    @contextmanager
    def room_for(self, keys: PageKeys, slots: npt.ArrayLike = 1) -> Iterator[None]:
        """A block in which the caller publishes these pages or objects. slots: how many each object
        takes, in a pool where they may have several. Raises QuotaError, as publish() does."""
        names, taken = self._names(keys), array_of(slots, "slots")
        if taken.dtype.kind not in "iu" or taken.ndim > 1 or (taken < 0).any():
            raise BadArgumentError(f"slots={slots!r:.60}: whole numbers, of all or of each object")
        with self._lock:
            here = self._records.here(names)
            new = names[~here]
            count = len(new)
            if self.tiers.pool.layout.object_limit is not None:
                absent = ~here.reshape(len(keys), -1)[:, 0]
                count = int(np.broadcast_to(taken, len(keys))[absent].sum())
            self._make_room(count, names)
            try:
                yield
            finally:  # what the caller has published before it failed counts, too
                self._add(new)

    @contextmanager
    def bringing(self, keys: PageKeys) -> Iterator[None]:
        """A block in which the caller brings these back. They count; the tenant's others make room
        for them, but for held, pinned and leased ones."""
        names = self._names(keys)
        with self._lock:
            gone = names[~self._records.here(names)]
            try:
                yield
            finally:
                self._count(gone, names)

    def brought(self, keys: PageKeys) -> None:
        """These were brought back for the tenant by another process: they count here."""
        names = self._names(keys)
        with self._lock:
            self._count(names, names)

    def used(self) -> int:
        """Pages of the tenant that match() finds now."""
        with self._lock:
            self._forget_gone()
            return len(self._own)

    def stats(self) -> dict[str, int]:
        """Pages: of the quota, used, and those that were evicted and refused for it so far."""
        used = self.used()
        with self._lock:
            counted = {"evicted_pages": self._evicted, "refused_pages": self._refused}
        return {"pages": self.pages, "used_pages": used, **counted}

    # ---- under the lock ----

    def _names(self, keys: PageKeys) -> Names:
        layout = self.tiers.pool.layout
        of = object_pages(layout) * layout.page_tokens if layout.object_limit else keys.page_tokens
        places = -(-of // self._page_tokens)
        names: Names = self._records.names(keys.packed.tobytes(), places).reshape(-1, 16)
        return names

    def _count(self, names: Names, kept: Names) -> None:
        self._add(names)
        self._evict(len(self._own) - self.pages, kept)

    def _add(self, names: Names) -> None:
        self._own.update(row.tobytes() for row in names[self._records.here(names)])

    @staticmethod
    def _joined(names: set[bytes]) -> Names:
        return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)

    def _forget_gone(self) -> None:
        names = self._joined(self._own)
        self._own.difference_update(row.tobytes() for row in names[~self._records.here(names)])

    def _make_room(self, new: int, kept: Names) -> None:
        over = len(self._own) + new - self.pages
        if new <= self.pages:
            self._evict(over, kept)
            over = len(self._own) + new - self.pages
        if over > 0:
            self._refused += new
            raise QuotaError(
                f"{new} pages more would be {len(self._own) + new} of a tenant that may have "
                f"{self.pages} published; too few of its others may go. Release what it holds, "
                "publish less, or raise its quota"
            )

    def _evict(self, count: int, kept: Names) -> None:
        """Evict so many of the tenant's pages, and some more, if they may go; none of `kept`."""
        if count <= 0:
            return
        before = len(self._own)
        self._forget_gone()
        count -= before - len(self._own)
        if count > 0:
            may_go = self._joined(self._own - {row.tobytes() for row in kept})
            self._evicted += self.tiers.evict_among(may_go, count + self.pages // SLACK)
            self._forget_gone()
