"""Tiers join a pool, copies of hot pages above it, and a file for evicted ones below it.

    local  copies of hot units in this process's memory      LocalTier; fetch and attend read them
    far    the pool: every page that match() finds           CXLPool
    cold   records of pages that had to go                   ColdStore: a file, or a remote store
    remote what another machine's pool has; only read        RemoteTier

A move has two phases. Prepare reads the bytes, verifies them and finds a place, and may refuse;
complete makes the page visible in the new place, or undoes. A page leaves the old place only after
that: a process that dies in between leaves it in both places, or a page that nobody holds, which
is free again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Mask, Names, PageIds, leading
from cxlkv.errors import BadArgumentError, ClosedError, PoolFullError
from cxlkv.layout import KVLayout
from cxlkv.machine import lifetime
from cxlkv.machine.costs import Costs, kv_bytes
from cxlkv.machine.lifetime import Closing
from cxlkv.numbers import is_real, is_whole, seconds
from cxlkv.pages import (
    CORRUPT,
    HELD,
    LOST,
    NO_PAGE,
    PARENT_LOST,
    PINNED,
    PLACES_MAX,
    PRESENT,
    choose_pages,
)
from cxlkv.pool import CXLPool, Pool
from cxlkv.prefix import (
    PageKeys,
    every_key,
    key_hashes,
    prefix_keys,
    root,
    tail_keys,
    whole_ids,
)
from cxlkv.refusals import refuse_arguments, refusing
from cxlkv.sequence import Hit
from cxlkv.tiers.cold_file import RecordShape
from cxlkv.tiers.cold_store import ColdStore, open_cold
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.objects import ObjectMoves, whole_objects
from cxlkv.tiers.policy import DEFAULT, NONE, Lru, Published, choose, policy_named
from cxlkv.tiers.states import StateMoves, page_ends

if TYPE_CHECKING:
    from cxlkv.tiers.remote import RemoteTier

LOW_SHARE, HIGH_SHARE = 0.02, 0.05
"""Watermarks of free pages: below the first step() evicts until the second is free."""
BATCH_BYTES = 64 << 20
"""Bytes of records on their way at once."""

log = logging.getLogger("cxlkv")


@refusing
class Tiers(ObjectMoves, StateMoves, Closing):
    """Decides which page is in which tier. One for each pool and process; any thread may call it.

    local: bytes for copies, or None. cold: a file for records that had to go, of cold_capacity (see
    ColdTier for fsync, compress and what it raises), which processes of this machine share; or
    "mooncake://HOST:PORT", a store of several machines (MooncakeTier), which is lent cold_capacity;
    or an open ColdStore, which its maker closes. policy: which published pages go
    (cxlkv.tiers.policy). costs: what reading and computing cost here, so that nothing is read that
    would be computed faster; needed by the policy "cost". bytes_per_s: at most so much is moved by
    step(). remote: where match() looks for what the pool and the cold tier lack: "tcp://HOST:PORT"
    of a pool that another machine serves, or several, of its tensor-parallel ranks (open_remote),
    by the secret in the file remote_secret; or a RemoteTier, which is closed with these.

    A pool of objects has no local tier and no costs; restore() brings back what went to its file.

    While it is open, an append to a full pool makes room first; PoolFullError means then that
    everything else is held, pinned or leased. A child of os.fork() has none: it makes its own, or
    is told PoolFullError as before; what it inherits is closed. Closed tiers move nothing and raise
    ClosedError. Raises BadArgumentError, BusyError when this process has tiers of the pool, what
    LocalTier and ColdTier raise.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        local: str | int | None = None,
        cold: str | os.PathLike[str] | ColdStore | None = None,
        cold_capacity: str | int | None = None,
        fsync: str = "batch",
        compress: str | None = None,
        policy: str = DEFAULT,
        costs: Costs | None = None,
        bytes_per_s: float | None = None,
        remote: str | Sequence[str] | RemoteTier | None = None,
        remote_secret: str | os.PathLike[str] | None = None,
        **removed: NoReturn,
    ):
        refuse_arguments("Tiers", removed)
        if cold is None and cold_capacity is not None:
            raise BadArgumentError("cold= and cold_capacity= go together")
        if compress is not None and cold is None:
            raise BadArgumentError("compress= goes with cold=")
        if policy == "cost" and (costs is None or costs.prefill is None):
            raise BadArgumentError("policy='cost' needs costs= with a prefill speed")
        if pool.layout.object_bytes is not None and (local is not None or costs is not None):
            raise BadArgumentError(
                "local= and costs= are of K and V, which are read in place or computed again: this "
                "pool stores objects"
            )
        if bytes_per_s is not None and not (is_real(bytes_per_s) and bytes_per_s > 0):
            raise BadArgumentError(f"bytes_per_s={bytes_per_s!r}: a number above 0")
        _check_remote(pool, remote, remote_secret)
        self.pool = cast(CXLPool, pool)  # one of objects has no match(), nor have its tiers
        self.costs = costs
        self._policy = policy_named(policy)
        self._weighs = policy == "cost"
        self._lock = threading.RLock()  # one move at a time
        self._counts: Counter[str] = Counter()
        self._limit = _RateLimit(bytes_per_s)
        self._total = pool.stats()["pages_total"]
        self._shape = RecordShape.of(pool)
        self._batch = max(1, BATCH_BYTES // self._shape.bytes)
        self._buffer: Names | None = None
        self._coming = np.empty(0, np.uint32)  # of a prefix that is being brought back: they stay
        self._saved = {}
        self.cold: ColdStore | None = None
        self._own_cold: ColdStore | None = None  # which is closed with the tiers
        self.local: LocalTier | None = None
        self.remote: RemoteTier | None = None
        self._own_pool: Pool | None = None  # which is closed with these
        self._mover: threading.Thread | None = None
        # No Event: an interrupt (Ctrl-C) in its set() can leave its lock taken, for ever.
        self._wake = SimpleQueue[None]()
        self._ended = False
        lifetime.watch(self)
        try:
            if cold is not None:
                self.cold = open_cold(cold, self._shape, cold_capacity, fsync, compress)
                self._own_cold = self.cold if self.cold is not cold else None
            self.local = LocalTier(pool, local) if local is not None else None
            self.remote = _opened(self.pool, remote, remote_secret)
            pool.pages.register(self._reclaimed)
        except BaseException:
            pool.pages.unregister(self._reclaimed)
            if self.local is not None:
                self.local.close()
            if self.cold is not None and self.cold is not cold:
                self.cold.close()
            raise

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, object],
        *,
        layout: KVLayout | None = None,
        costs: Costs | None = None,
    ) -> Tiers:
        """The pool that a YAML file, or a mapping of the same keys, describes, as in
        CXLPool.from_config(), and its tiers, whose mover runs. Both are closed together.

        Raises what CXLPool.from_config() and Tiers raise.
        """
        from cxlkv.config import read_config  # pydantic and yaml, which few programs need

        wanted, stored = read_config(config, layout)
        given = {name: getattr(wanted, name) for name in wanted.of_tiers()}
        pool = CXLPool._configured(wanted, stored)
        try:
            tiers = cls(pool, costs=costs, **given)
            tiers.start()
        except BaseException:
            pool.close()
            raise
        tiers._own_pool = pool
        return tiers

    # ---- reading ----

    def match(self, keys: Iterable[bytes], *, lease_s: float = 60.0, strict: bool = True) -> Hit:
        """Bring the part of the prefix that is only in the cold tier back, and of PageKeys what
        only the remote pool has, then pool.match().

        Pages come as far as there is room and their bytes are right; of the cold tier as far as
        reading them is not slower than computing them.
        """
        if self.cold is not None or self.remote is not None:
            self._check()
        given = keys if isinstance(keys, PageKeys) else list(keys)
        hit = self._match(given, lease_s, strict)
        if self.remote is None or not isinstance(given, PageKeys):
            return hit
        return self.remote.extend(given, hit, lease_s=lease_s)

    def _match(self, given: PageKeys | list[bytes], lease_s: float, strict: bool) -> Hit:
        """In the pool and the cold tier."""
        hit = self.pool.match(given, lease_s=lease_s, strict=strict)
        if self.cold is None or not len(given):
            return hit
        pages = None  # whose keys these are
        if isinstance(given, PageKeys) and given.page_tokens == self.pool.layout.page_tokens:
            pages = given
        first = hit.tokens // self.pool.layout.page_tokens if pages is not None else 0
        if first == len(given):
            return hit
        if self.pool.layout.states is not None:
            came = isinstance(given, PageKeys) and self._bring_checkpoint(
                page_ends(given), hit.tokens, self._key_pages(given)
            )
        else:
            came = self._bring(key_hashes(given, strict), first, hit.tokens) > 0
        if not came:
            return hit
        with hit:  # until the next one holds what this one does
            return self.pool.match(given, lease_s=lease_s, strict=strict)

    def _key_pages(self, keys: PageKeys) -> int:
        """Pages that each of these keys names."""
        return keys.page_tokens // self.pool.layout.page_tokens

    def match_prefix(
        self, token_ids: npt.ArrayLike, salt: bytes = b"", *, lease_s: float = 60.0
    ) -> Hit:
        """match() for what pool.publish_prefix() published, tails too; of those that only the
        remote pool has, tails with a state checkpoint."""
        if self.cold is not None or self.remote is not None:
            self._check()
        ids, page_tokens = whole_ids(token_ids), self.pool.layout.page_tokens
        hit = self._match_prefix(ids, salt, lease_s)
        if self.remote is not None and self.pool.layout.states is not None:
            return self.remote.extend_prefix(ids, salt, hit, lease_s=lease_s)
        if self.remote is None or len(ids) - hit.tokens < page_tokens:
            return hit
        with hit, self.match(prefix_keys(ids, page_tokens, salt), lease_s=lease_s):
            return self._match_prefix(ids, salt, lease_s)

    def _match_prefix(self, ids: npt.NDArray[np.int64], salt: bytes, lease_s: float) -> Hit:
        """In the pool and the cold tier."""
        page_tokens = self.pool.layout.page_tokens
        hit = self.pool.match_prefix(ids, salt, lease_s=lease_s)
        if self.cold is None or hit.tokens == len(ids):
            return hit
        if self.pool.layout.states is not None:
            keys = every_key(ids, page_tokens, root(salt))
            if not self._bring_checkpoint(keys, hit.tokens):
                return hit
            with hit:
                return self.pool.match_prefix(ids, salt, lease_s=lease_s)
        hashes = key_hashes(prefix_keys(ids, page_tokens, salt))
        full, first = len(ids) // page_tokens, hit.tokens // page_tokens
        if first < full and self._bring(hashes, first, hit.tokens):
            with hit:
                hit = self.pool.match_prefix(ids, salt, lease_s=lease_s)
        # What is held now makes no room for the tail.
        if hit.tokens // page_tokens < full or not self._bring_tail(ids, hashes, salt):
            return hit
        with hit:
            return self.pool.match_prefix(ids, salt, lease_s=lease_s)

    def reach(self, keys: PageKeys) -> int:
        """How many tokens match() would find if all of the prefix came back that the cold tier has,
        as far as its headers say; no use of it, and nothing is moved."""
        self._check()
        if self.cold is None or not len(keys):
            with self.pool.match(keys) as hit:
                return hit.tokens
        if self.pool.layout.states is not None:
            checkpoints = self._checkpoints(self._key_pages(keys))
            whole = checkpoints.last_whole(page_ends(keys), 0)
            return whole.end if whole is not None else 0
        pages, there = self._where(self._names(key_hashes(keys, keys.strict)))
        return leading_keys(pages, there) * keys.page_tokens

    def _bring(self, hashes: bytes, first: int, tokens: int) -> int:
        """Brings back the pages of keys from `first` on; returns of how many keys."""
        names = self._names(hashes)[first:]
        pages, there = self._where(names)
        here = pages != NO_PAGE
        count = leading_keys(pages, there)
        missing = there & ~here
        missing[count:] = False
        if not missing.any() or not self._pays(tokens, int(missing[:, :, 0].sum())):
            return 0
        flat = names.reshape(-1, 16)
        wanted = np.flatnonzero(missing)
        before = self._before(names, hashes, first).reshape(-1, 16)[wanted]
        beside = pages[:count][here[:count]]
        return count if self._promote(flat[wanted], before, beside) else 0

    def _bring_tail(self, ids: npt.NDArray[np.int64], hashes: bytes, salt: bytes) -> int:
        """The longest tail that agrees, if the cold tier has one."""
        rest = ids[len(hashes) // 16 * self.pool.layout.page_tokens :]
        if not len(rest):
            return 0
        before = hashes[-16:] if hashes else root(salt)
        keys = tail_keys(rest, before)
        names = self.pool.records.names(keys.tobytes(), 1)[:, 0]
        pages, there = self._where(names[:, None])
        here = pages != NO_PAGE
        whole = np.flatnonzero((here | there)[:, 0].all(axis=1))
        if not len(whole) or here[whole[-1]].all():
            return 0
        longest = names[whole[-1]]
        parents = np.repeat(longest[:1], len(longest), axis=0)
        parents[0] = self.pool.records.names(hashes[-16:], 1)[0, 0, 0] if hashes else 0
        beside = pages[whole[-1]][here[whole[-1]]]
        return self._promote(np.ascontiguousarray(longest), parents, beside)

    def _names(self, hashes: bytes) -> Names:
        """[keys, places, parts, 16]: as many places as some key has pages."""
        places = 1
        while True:
            names = self.pool.records.names(hashes, places)
            pages, there = self._where(names[:, -1:])
            if not ((pages != NO_PAGE) | there).any() or places >= PLACES_MAX:
                return names
            places *= 2

    def _where(self, names: Names) -> tuple[PageIds, npt.NDArray[np.bool_]]:
        """The page in the pool of each name, or NO_PAGE; and whether its record is in the cold
        tier."""
        assert self.cold is not None
        flat = np.ascontiguousarray(names).reshape(-1, 16)
        pages, _ = self.pool.records.find(flat)
        there = self.cold.contains(flat)
        shape = names.shape[:-1]
        return pages.reshape(shape), there.reshape(shape)

    def _before(self, names: Names, hashes: bytes, first: int) -> Names:
        """Parents: of part 0 the page before it, of the others part 0's of the same place."""
        before = np.repeat(names[:, :, :1], names.shape[2], axis=2)
        chain = np.ascontiguousarray(names[:, 0, 0])
        last = np.zeros(16, np.uint8)
        if first:
            last = self.pool.records.names(hashes[16 * first - 16 : 16 * first], 1)[0, 0, 0]
        before[1:, 0, 0], before[0, 0, 0] = chain[:-1], last
        before[:, 1:, 0] = names[:, :-1, 0]
        return before

    def _pays(self, tokens: int, pages: int) -> bool:
        """Is reading so many pages behind `tokens` faster than computing them?"""
        if self.costs is None or self.costs.prefill is None or "cold" not in self.costs.tiers:
            return True
        more = pages * self.pool.layout.page_tokens
        read_s = float(self.costs.read_seconds(self.pool.layout, more, "cold"))
        pays = read_s < float(self.costs.recompute_seconds(tokens, tokens + more))
        if not pays:
            with self._lock:
                self._counts["not_worth_pages"] += pages
        return pays

    def _promote(self, names: Names, parents: Names, beside: PageIds) -> int:
        """Records of these names from cold to far, in order; returns how many are found now.

        beside: pages of the same prefix, which nobody may hold: they make no room for these.
        """
        with self._lock:
            self._coming = beside
            try:
                brought = self._promote_batches(names, parents)
            finally:
                self._coming = np.empty(0, np.uint32)
            self._counts["promoted_pages"] += brought
        return brought

    def _promote_batches(self, names: Names, parents: Names) -> int:
        assert self.cold is not None
        brought = 0
        for first in range(0, len(names), self._batch):
            some, before = names[first : first + self._batch], parents[first:]
            # Before the records come: those that make room go through the same buffer.
            if not self._has_room(len(some)):
                self._counts["refused_pages"] += len(some)
                break
            records = self._records(len(some))
            found = self.cold.load(some, records)
            count = leading(found)
            right = self._write(records[:count], before[:count])
            done = leading(right)
            brought += done
            if done < len(some):
                break
            pages, _ = self.pool.records.find(some)
            self._coming = np.append(self._coming, pages)
        return brought

    def _write(self, records: Names, parents: Names) -> Mask:
        """Which of the records are in the pool then."""
        transfer = self.pool.records.begin()
        try:
            codes = self.pool.records.write(records, np.ascontiguousarray(parents))
        except PoolFullError:  # others took it
            self._counts["refused_pages"] += len(records)
            return np.zeros(len(records), np.bool_)
        if transfer:
            transfer.end("restore", int((codes == 0).sum()) * self._shape.bytes)
        right: Mask = (codes == 0) | (codes == PRESENT)
        return right

    # ---- reclaiming ----

    def reclaim(self, pages: int) -> int:
        """Evict until `pages` are free; returns how many were freed, 0 when that cannot be done."""
        self._check()
        if not is_whole(pages):
            raise BadArgumentError(f"{pages!r} pages: a whole number, 0 or more")
        with self._lock:
            short = pages - self._free()
            if short <= 0:
                return 0
            slack = max(1, self._total // 100)
            return self._evict(short + slack) or self._evict(short)

    def _reclaimed(self, pages: int) -> bool:
        if self._ended:  # an append that began before close() is told that the pool is full
            return False
        if self.reclaim(pages) > 0 or self._free() >= pages:
            return True
        self.pool.pages.want_room(pages - self._free())
        return False

    def _has_room(self, pages: int) -> bool:
        """Extents that are nobody's become this host's before anything of it is evicted."""
        if self._free() >= pages:
            return True
        try:
            self.pool.pages.free(self.pool.pages.alloc(pages))
        except PoolFullError:
            return self._reclaimed(pages)
        return True

    def give(self) -> int:
        """Evict what stands in the way of other hosts of a shared pool that this one owes room;
        returns how many pages are free now. The core hands over extents that are empty."""
        self._check()
        with self._lock:
            wanted = self.pool.pages.wanted()
            if not len(wanted):
                return 0
            rows, published = self.published()
            chosen = np.flatnonzero(np.isin(published.pages, wanted))
            return self._let_go(rows, published, chosen.astype(np.uint32))

    def _free(self) -> int:
        return self.pool.stats()["pages_free"]

    def _evict(self, count: int) -> int:
        """Evict so many pages, chosen by the policy, to cold or away; all or nothing."""
        rows, published = self.published()
        return self._let_go(rows, published, choose(self._policy, published, count))

    def evict_among(self, names: Names, count: int) -> int:
        """Evicts up to `count` pages of these names [n, 16] and of no others, those of lowest
        priority first, of equal ones the least recently used; to cold or away. How many: those that
        are held, pinned or leased stay, and what they continue."""
        self._check()
        if not is_whole(count):
            raise BadArgumentError(f"{count!r} pages: a whole number, 0 or more")
        with self._lock:
            rows, published = self.published()
            pages, _ = self.pool.records.find(names)
            published = replace(published, kept=published.kept | ~np.isin(published.pages, pages))
            ranks, scores = published.ranks, Lru().scores(published)
            count = min(count, len(published))
            given = (ranks, scores, published.ages, published.parents, published.kept)
            chosen = choose_pages(*given, count)
            return self._let_go(rows, published, chosen)

    def _let_go(self, rows: npt.NDArray[np.void], published: Published, chosen: PageIds) -> int:
        """The chosen rows' pages to cold, or away; returns how many are free."""
        if self.pool.layout.object_limit is not None:
            chosen = whole_objects(rows, published, chosen)
        above = published.parents[chosen]
        parents = np.zeros((len(chosen), 16), np.uint8)
        known = above < len(rows)
        parents[known] = names_of(rows[above[known]])
        freed = 0
        for first in range(0, len(chosen), self._batch):
            some = slice(first, first + self._batch)
            freed += self._demote(rows[chosen[some]], parents[some])
        self._counts["evicted_pages"] += freed
        return freed

    def published(self) -> tuple[npt.NDArray[np.void], Published]:
        """The pool's published pages, as the core and as policies have them."""
        rows, clock = self.pool.hotness.published()
        names = rows["hash"][:, 0] ^ rows["hash"][:, 1]
        place = np.full(self._total + 1, NONE, np.uint32)
        place[rows["page"]] = np.arange(len(rows), dtype=np.uint32)
        parents = place[np.minimum(rows["parent"], self._total)]
        if self.cold is None:  # else what is before it may be there, and comes back
            parents[(rows["flags"] & LOST) != 0] = PARENT_LOST
        made = Published(
            clock=clock,
            pages=rows["page"].copy(),
            names=names,
            used=rows["used"].copy(),
            born=rows["born"].copy(),
            hits=rows["hits"].copy(),
            parents=parents,
            kept=((rows["flags"] & (HELD | PINNED)) != 0) | np.isin(rows["page"], self._coming),
            saved_s=self._saved_s(parents) if self._weighs else None,
            priorities=rows["priority"].astype(np.uint8),
        )
        return rows, made

    def _saved_s(self, parents: PageIds) -> npt.NDArray[np.float32]:
        """What a hit of each page saves; depths by following parents, each round twice as far."""
        assert self.costs is not None
        depths, up = (parents != NONE).astype(np.int64), parents.copy()
        for _ in range(32):
            known = np.flatnonzero(up != NONE)
            if not len(known):
                break
            above = up[known]
            depths[known] += depths[above]
            up[known] = up[above]
        layout = self.pool.layout
        tokens = layout.page_tokens
        size = float(kv_bytes(layout, tokens))
        value = self.costs.value(tokens, depths * tokens, size, "far")
        return np.maximum(value, 0).astype(np.float32)

    def _demote(self, rows: npt.NDArray[np.void], parents: Names) -> int:
        """Published pages from far to cold, as far as it takes them; returns how many are free."""
        pages, generations = rows["page"].copy(), rows["generation"].copy()
        if self.cold is not None:
            self._store(names_of(rows), parents, pages, generations)
        codes = self.pool.records.forget(pages, generations, True)
        return int((codes == 0).sum())

    def _store(
        self, names: Names, parents: Names, pages: PageIds, generations: npt.NDArray[np.uint64]
    ) -> None:
        """Into the cold tier; a page whose bytes are wrong goes nowhere."""
        assert self.cold is not None
        objects = self.pool.layout.object_bytes is not None
        # Of a name the bytes are known, unless it is an object's.
        there = self.cold.contains(names, sure=True) if not objects else np.zeros(len(names), bool)
        wanted = np.flatnonzero(~there)
        if not len(wanted) or (self.cold.why_off and not objects):
            self._counts["dropped_pages"] += len(wanted)
            return
        records = self._records(len(wanted))
        transfer = self.pool.records.begin()
        codes = self.pool.records.read(pages[wanted], generations[wanted], records)
        right = codes == 0
        if transfer:
            transfer.end("demote", int(right.sum()) * self._shape.bytes)
        self._counts["corrupt_pages"] += int((codes == CORRUPT).sum())
        missed = len(wanted) - int(right.sum())
        if objects:
            right[right] = self._replacing(names[right], records[right])
        stored = self.cold.store(names[wanted][right], records[right], parents[wanted][right])
        if objects:
            self._note(names[right][stored], records[right][stored])
        self._counts["demoted_pages"] += int(stored.sum())
        self._counts["dropped_pages"] += missed + int((~stored).sum())

    def _records(self, count: int) -> Names:
        if self._buffer is None:
            self._buffer = np.empty((self._batch, self._shape.bytes), np.uint8)
        return self._buffer[:count]

    # ---- the mover ----

    def step(self) -> dict[str, int]:
        """One round of the mover: room for what comes, and copies of hot units. What it moved."""
        self._check()
        limit = self._limit.allowed()
        evicted = moved_bytes = 0
        with self._lock:
            free = self._free()
            if free < LOW_SHARE * self._total:
                wanted = int(HIGH_SHARE * self._total) - free
                if limit is not None:
                    wanted = min(wanted, limit // self._shape.bytes)
                evicted = self._evict(wanted) if wanted > 0 else 0
        if self.local is not None:
            moved_bytes = self.local.step(limit).copied_bytes
        self._limit.spend(evicted * self._shape.bytes + moved_bytes)
        return {"evicted_pages": evicted, "promoted_bytes": moved_bytes}

    def start(self, every_s: float = 0.1) -> None:
        """Step in a thread of its own, until close(); the pool's close() calls it."""
        every_s = seconds("every_s", every_s)
        self._check()
        with self._lock:
            if self._mover is None:
                mover = threading.Thread(
                    target=self._run, args=(every_s,), name="cxlkv-mover", daemon=True
                )
                self.pool.before_close(self._end)
                mover.start()
                self._mover = mover

    def _run(self, every_s: float) -> None:
        while True:
            with suppress(Empty):
                self._wake.get(timeout=every_s)
            if self._ended:
                return
            try:
                self.step()
            except Exception as error:  # short of memory, too: the next step may have it
                if self._ended:
                    return
                self._counts["failed_steps"] += 1
                if self._counts["failed_steps"] == 1:
                    log.warning("a step of the mover failed: %s", error)

    # ---- what is where ----

    @property
    def brought_pages(self) -> int:
        """Pages that came from cold, so far."""
        return self.moved_pages("promoted")

    def moved_pages(self, what: str) -> int:
        """Pages moved so far: "promoted", "demoted", "dropped", "evicted" and so on, as stats() has
        them."""
        return self._counts[f"{what}_pages"]

    def link_bytes(self) -> dict[tuple[str, str], int]:
        """What this process has moved so far, by tier and direction ("read", "written"): of the far
        pool over an emulated link, of the cold file if it has that open, of remote pools."""
        moved = {"far": self.pool.records.moved_bytes()}
        if self.cold is not None:
            moved["cold"] = self.cold.moved_bytes()
        if self.remote is not None:
            moved["remote"] = self.remote.link_bytes, 0
        return {
            (tier, way): size
            for tier, both in moved.items()
            for way, size in zip(("read", "written"), both, strict=True)
        }

    def stats(self) -> dict[str, float]:
        """Pages by tier and what was moved; local_*, cold_* and remote_* as these tiers count."""
        pool = self.pool.stats()
        names = "promoted demoted dropped evicted refused corrupt not_worth"
        found: dict[str, float] = {
            f"{name}_pages": self._counts[f"{name}_pages"] for name in names.split()
        }
        found["failed_steps"] = self._counts["failed_steps"]
        for name in ("total", "free", "held", "published", "published_only"):
            found[f"far_pages_{name}"] = pool[f"pages_{name}"]
        for tier, of in (("local", self.local), ("cold", self.cold), ("remote", self.remote)):
            if of is not None:
                found |= {f"{tier}_{name}": value for name, value in of.stats().items()}
        return found

    def close(self) -> None:
        """End the mover and the tiers beside the pool; that stays open, unless it came with
        from_config(). A second time does nothing."""
        self._end()
        own, self._own_pool = self._own_pool, None
        if own is not None:
            own.close()

    def _end(self) -> None:
        self._ended = True
        self._wake.put(None)
        if self._mover is not None:
            self._mover.join()
        self.pool.pages.unregister(self._reclaimed)
        if self.remote is not None:
            self.remote.close()
        with self._lock:
            if self.local is not None:
                self.local.close()
            if self._own_cold is not None:
                self._own_cold.close()

    def reset_after_fork(self) -> None:
        """Its mover, its file and its local tier are the parent's."""
        self._lock, self._wake = threading.RLock(), SimpleQueue()
        self._mover, self._ended = None, True

    def _check(self) -> None:
        if self._ended:
            raise ClosedError(
                "these tiers were closed, or are another process's: a child of os.fork() makes its "
                "own, with a cold file of its own"
            )


def _check_remote(pool: Pool, remote: object, secret: object) -> None:
    if isinstance(remote, (str, list, tuple)) != (secret is not None):
        raise BadArgumentError("remote= and remote_secret= go together: the file with the secret")
    if remote is not None and pool.layout.object_bytes is not None:
        raise BadArgumentError("remote= is of K and V: pools of objects are not served to others")


def _opened(
    pool: CXLPool,
    remote: str | Sequence[str] | RemoteTier | None,
    secret: str | os.PathLike[str] | None,
) -> RemoteTier | None:
    if secret is None or not isinstance(remote, (str, list, tuple)):
        return cast("RemoteTier | None", remote)
    from cxlkv.tiers.remote import open_remote  # pydantic, which few programs need

    return open_remote(pool, [remote] if isinstance(remote, str) else remote, secret)


def leading_keys(pages: PageIds, there: Mask) -> int:
    """How many keys, from the first on, have all their pages in the pool or in the cold tier;
    [keys, places, parts]. A part with a window has gaps by right."""
    gaps = np.flatnonzero(~((pages != NO_PAGE) | there)[:, 0].any(axis=1))
    return int(gaps[0]) if len(gaps) else len(pages)


def names_of(rows: npt.NDArray[np.void]) -> Names:
    """[count, 16]: the names of published pages."""
    words = np.ascontiguousarray(rows["hash"])
    return words.view(np.uint8).reshape(-1, 16)


class _RateLimit:
    """Limits bytes a second, of which a second's worth may come at once."""

    def __init__(self, bytes_per_s: float | None):
        self._rate = bytes_per_s
        self._credit = bytes_per_s or 0.0
        self._at = time.monotonic()

    def allowed(self) -> int | None:
        """Bytes that may be moved now; None: any number."""
        if self._rate is None:
            return None
        now = time.monotonic()
        self._credit = min(self._rate, self._credit + self._rate * (now - self._at))
        self._at = now
        return max(0, int(self._credit))

    def spend(self, moved_bytes: int) -> None:
        self._credit -= moved_bytes
