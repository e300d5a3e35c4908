"""A quota limits how many pages a tenant may have published; its own oldest ones make room.

    quota = Quota(tiers, pages=10_000)
    keys = prefix_keys(ids, page_tokens, salt)    # its secret salt
    with quota.match(keys) as hit: ...
    quota.publish(sequence, keys)
    quota.publish_prefix(sequence, ids, salt, states=states)    # a checkpoint's pages count, too
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

from cxlkv.arrays import Hashes, Names
from cxlkv.errors import BadArgumentError, QuotaError
from cxlkv.layout import format_bytes, parse_bytes
from cxlkv.machine import lifetime
from cxlkv.numbers import array_of, is_whole
from cxlkv.prefix import PageKeys, every_key, prefix_keys, root, whole_ids
from cxlkv.sequence import Hit, Sequence
from cxlkv.tiers import Tiers
from cxlkv.tiers.objects import object_pages

__all__ = ["Quota"]

SLACK = 64
"""One in so many pages of the quota is evicted beyond need, so that not each publish() evicts."""
NO_KEYS = np.empty((0, 16), np.uint8)


class _Kind:
    """Names of a tenant's pages of a kind, of which some may be gone since, and their limit."""

    def __init__(self, what: str, limit: int, multiple: int = 1, slack: int = 0):
        self.what, self.limit = what, limit
        self.multiple, self.slack = multiple, slack  # of what is evicted, and beyond need
        self.names: set[bytes] = set()

    def over(self, new: int) -> int:
        return len(self.names) + new - self.limit


class Quota:
    """Counts the pages that match() finds and that this tenant published, or brought back from
    cold, through it; of a pool of objects, each object's slots. Any thread may use it; one at a
    time publishes.

    The count is of this process: a tenant with several has a Quota in each, which share out what it
    may have. A page with equal keys counts for the tenant that published it first.

    state_pages: how many of the pages may be of state checkpoints, of a pool with states; older
    checkpoints of the tenant make room for new ones, and no other pages do. None: all.
    """

    def __init__(self, tiers: Tiers, pages: int, *, state_pages: int | None = None):
        if not is_whole(pages, 1):
            raise BadArgumentError(f"a quota of {pages!r} pages: a whole number, at least 1")
        self.tiers, self.pages = tiers, pages
        self._records = tiers.pool.records
        self._page_tokens = tiers.pool.layout.page_tokens
        self.state_pages = pages if state_pages is None else self._checked(state_pages)
        self._lock = threading.Lock()
        self._all = _Kind("pages", pages, slack=pages // SLACK)
        self._states = _Kind(
            "pages of checkpoints", self.state_pages, max(1, self._records.state_pages)
        )
        self._evicted = self._refused = 0
        lifetime.watch(self)

    def _checked(self, state_pages: int) -> int:
        least = self._records.state_pages
        if not least:
            raise BadArgumentError("a quota of states: the pool's layout has none: leave it out")
        if not is_whole(state_pages, least, self.pages):
            raise BadArgumentError(
                f"state_pages={state_pages!r:.40} of a quota of {self.pages} pages: a whole number "
                f"up to that, and at least {least}, which a checkpoint takes"
            )
        return state_pages

    @classmethod
    def of(cls, tiers: Tiers, size: str | int, *, states: str | int | None = None) -> Quota:
        """size, and of that states: in bytes of the pool's memory, which a page takes whole."""
        geometry = tiers.pool.pages.geometry
        page_bytes = geometry["extent_bytes"] // geometry["slab_slots"]
        if parse_bytes(size) < page_bytes:
            raise BadArgumentError(
                f"a quota of {format_bytes(parse_bytes(size))}: a page has "
                f"{format_bytes(page_bytes)}; at least that for each process"
            )
        of_states = None if states is None else parse_bytes(states) // page_bytes
        return cls(tiers, parse_bytes(size) // page_bytes, state_pages=of_states)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def reopened(self, tiers: Tiers) -> None:
        """Go on with these: the pool before was closed, and what of it is still there counts."""
        with self._lock:
            self.tiers, self._records = tiers, tiers.pool.records

    def publish(
        self, seq: Sequence, keys: PageKeys, states: npt.NDArray[np.uint8] | None = None
    ) -> int:
        """pool.publish(), for which the tenant's own least recently used pages make room, to cold
        where there is that.

        Raises QuotaError, and publishes nothing, when the tenant would have more than its quota:
        the text alone is longer, or too many of its other pages are held, pinned or leased.
        """
        keys = keys[: len(seq) // keys.page_tokens]
        checkpoint = self._state_names(keys.packed[-1:] if states is not None else NO_KEYS)
        with self._room(self._names(keys), checkpoint):
            return self.tiers.pool.publish(
                seq, keys, keys.page_tokens, strict=keys.strict, states=states
            )

    def publish_prefix(
        self,
        seq: Sequence,
        token_ids: npt.ArrayLike,
        salt: bytes = b"",
        *,
        tail: bool = False,
        states: npt.NDArray[np.uint8] | None = None,
    ) -> int:
        """pool.publish_prefix(), as publish(): tails and checkpoints count, too."""
        ids = whole_ids(token_ids)
        keys = prefix_keys(ids, self._page_tokens, salt, tail=tail or states is not None)
        checkpoint = self._state_names(keys.packed[-1:] if states is not None else NO_KEYS)
        with self._room(self._names(keys), checkpoint):
            return self.tiers.pool.publish_prefix(seq, ids, salt, tail=tail, states=states)

    def match(self, keys: PageKeys, *, lease_s: float = 60.0) -> Hit:
        """tiers.match(). Pages that it brings back count; the tenant's others make room for them,
        but for held, pinned and leased ones."""
        with self.bringing(keys):
            return self.tiers.match(keys, lease_s=lease_s, strict=keys.strict)

    def match_prefix(
        self, token_ids: npt.ArrayLike, salt: bytes = b"", *, lease_s: float = 60.0
    ) -> Hit:
        """tiers.match_prefix(), as match()."""
        ids, tiers = whole_ids(token_ids), self.tiers
        if tiers.cold is None and tiers.remote is None:
            return tiers.match_prefix(ids, salt, lease_s=lease_s)
        keys = every_key(ids, self._page_tokens, root(salt))
        with self._bringing(self._names(PageKeys(keys, self._page_tokens)), keys):
            return tiers.match_prefix(ids, salt, lease_s=lease_s)

    @contextmanager
    def room_for(self, keys: PageKeys, slots: npt.ArrayLike = 1) -> Iterator[None]:
        """A block in which the caller publishes these pages or objects. slots: how many each object
        takes, in a pool where they may have several. Raises QuotaError, as publish() does."""
        names, taken = self._names(keys), array_of(slots, "slots")
        if taken.dtype.kind not in "iu" or taken.ndim > 1 or (taken < 0).any():
            raise BadArgumentError(f"slots={slots!r:.60}: whole numbers, of all or of each object")
        objects = self.tiers.pool.layout.object_limit is not None
        each = np.broadcast_to(taken.astype(np.int64), len(keys)) if objects else None
        with self._room(names, slots=each):
            yield

    @contextmanager
    def _room(
        self,
        names: Names,
        states: Names = NO_KEYS,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[None]:
        """room_for() by names, those of a checkpoint apart."""
        with self._lock:
            here = self._records.here(names)
            new, new_states = names[~here], states[~self._records.here(states)]
            count = len(new) + len(new_states)
            if slots is not None:
                count = int(slots[~here.reshape(len(slots), -1)[:, 0]].sum())
            kept = np.concatenate([names, states])
            self._make_room(self._states, len(new_states), kept)
            self._make_room(self._all, count, kept)
            try:
                yield
            finally:  # what the caller has published before it failed counts, too
                self._add(new, new_states)

    @contextmanager
    def bringing(self, keys: PageKeys) -> Iterator[None]:
        """A block in which the caller brings these back. They count; the tenant's others make room
        for them, but for held, pinned and leased ones."""
        with self._bringing(self._names(keys), keys.packed):
            yield

    @contextmanager
    def _bringing(self, names: Names, keys: Hashes) -> Iterator[None]:
        """bringing() by names, and by the keys behind which checkpoints may lie: one is brought
        back where its first page was not there before."""
        keys = keys if self._records.state_pages else NO_KEYS
        with self._lock:
            gone, absent = names[~self._records.here(names)], keys[~self._have_states(keys)]
            try:
                yield
            finally:
                self._count(gone, names, self._state_names(absent[self._have_states(absent)]))

    def brought(self, keys: PageKeys) -> None:
        """These were brought back for the tenant by another process: they count here."""
        names = self._names(keys)
        with self._lock:
            self._count(names, names)

    def used(self) -> int:
        """Pages of the tenant that match() finds now."""
        with self._lock:
            self._forget_gone(self._all)
            return len(self._all.names)

    def stats(self) -> dict[str, int]:
        """Pages: of the quota, used, and those that were evicted and refused for it so far; of a
        pool with states, how many of these may be of checkpoints, and are."""
        used = self.used()
        with self._lock:
            counted = {"evicted_pages": self._evicted, "refused_pages": self._refused}
            if self._records.state_pages:
                self._forget_gone(self._states)
                of_states = len(self._states.names)
                counted.update(state_pages=self.state_pages, used_state_pages=of_states)
        return {"pages": self.pages, "used_pages": used, **counted}

    # ---- under the lock ----

    def _names(self, keys: PageKeys) -> Names:
        layout = self.tiers.pool.layout
        of = object_pages(layout) * layout.page_tokens if layout.object_limit else keys.page_tokens
        places = -(-of // self._page_tokens)
        names: Names = self._records.names(keys.packed.tobytes(), places).reshape(-1, 16)
        return names

    def _state_names(self, keys: Hashes) -> Names:
        """Of all pages of checkpoints under these keys."""
        names = self._records.state_names(keys.tobytes(), self._records.state_pages)
        return names.reshape(-1, 16)

    def _have_states(self, keys: Hashes) -> npt.NDArray[np.bool_]:
        """Which keys have the first page of a checkpoint."""
        return self._records.here(self._records.state_names(keys.tobytes(), 1).reshape(-1, 16))

    def _count(self, names: Names, kept: Names, states: Names = NO_KEYS) -> None:
        self._add(names, states)
        for kind in (self._states, self._all):
            self._evict(kind, kind.over(0), kept)

    def _add(self, names: Names, states: Names = NO_KEYS) -> None:
        of_states = {row.tobytes() for row in states[self._records.here(states)]}
        self._states.names |= of_states
        self._all.names |= of_states
        self._all.names.update(row.tobytes() for row in names[self._records.here(names)])

    @staticmethod
    def _joined(names: set[bytes]) -> Names:
        return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)

    def _forget_gone(self, kind: _Kind) -> None:
        names = self._joined(kind.names)
        kind.names.difference_update(row.tobytes() for row in names[~self._records.here(names)])

    def _make_room(self, kind: _Kind, new: int, kept: Names) -> None:
        if new <= kind.limit:
            self._evict(kind, kind.over(new), kept)
        if new and kind.over(new) > 0:
            self._refused += new
            raise QuotaError(
                f"{new} {kind.what} more would be {len(kind.names) + new} of a tenant that may "
                f"have {kind.limit} published; too few of its others may go. Release what it "
                "holds, publish less, or raise its quota"
            )

    def _evict(self, kind: _Kind, count: int, kept: Names) -> None:
        """Evict so many of the tenant's pages, and some more, if they may go; none of `kept`."""
        if count <= 0:
            return
        before = len(kind.names)
        self._forget_gone(kind)
        count -= before - len(kind.names)
        if count > 0:
            may_go = self._joined(kind.names - {row.tobytes() for row in kept})
            count = -(-count // kind.multiple) * kind.multiple + kind.slack
            self._evicted += self.tiers.evict_among(may_go, count)
            self._forget_gone(kind)
