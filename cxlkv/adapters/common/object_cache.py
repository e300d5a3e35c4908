"""An object cache keeps an engine's blocks in a pool: what a pool may do never raises here.

It is a miss, or not stored, and counted. Tiers are open, so that a full pool evicts what nobody
holds before it refuses, and room is given to other hosts of the pool that have none. A pool that
this host has lost, as it was declared off, is opened anew by a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv.adapters.common.keys import namespace, xor
from cxlkv.adapters.common.metrics import LOST, Counting
from cxlkv.adapters.common.pools import open_tiers, quota_of
from cxlkv.adapters.common.reopening import LOOKS_A_LEASE, Reopening
from cxlkv.adapters.common.settings import UNSHARED, PoolSettings
from cxlkv.arrays import Mask, Sizes
from cxlkv.errors import BadArgumentError, CXLKVError, PoolFullError, QuotaError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.objects import (
    ABSENT,
    DAMAGED,
    Buffers,
    Lease,
    ObjectPool,
    Reserved,
    object_keys,
    sums_of,
)
from cxlkv.prefix import PageKeys
from cxlkv.tiers.quota import Quota

ORDER_MAX = 1 << 17
"""Keys of which it is known what came before them, at least the latest half of so many."""

T = TypeVar("T")
Given = Buffers | Sequence[object]

_FAULTS = (CXLKVError, OSError)


class ObjectCache(Closing):
    """Objects by keys. Any thread may call, until close(): then everything is a miss.

    opening: opens the pool, now and whenever this host has lost it. Meanwhile everything is a miss,
    and nothing is stored. Leases and reservations keep the lost pool open: a thread of this object
    calls let_go(), which releases those that no caller waits for. settings, share: as in
    pools.open_tiers(); objects in the cold tier count as present, and are read back before use.
    processes: how many of the engine's use this pool, which share out its quota.

    space: 16 bytes, everything beside an object's name that makes its bytes. object_bytes: of each
    object, where all have one size, and one of another size is a miss; the pool's may be larger.
    None: objects have any size up to the pool's. counting: has the kinds "corrupt", "full",
    "quota", "host" and "pool"; "mismatch" with object_bytes, "large" and "changed" without.

    Raises what `opening` and open_tiers() raise.
    """

    def __init__(
        self,
        opening: Callable[[], ObjectPool],
        space: bytes,
        counting: Counting,
        object_bytes: int | None = None,
        *,
        settings: PoolSettings = UNSHARED,
        share: float = 1.0,
        processes: int = 1,
    ):
        self.counting = counting
        self.let_go: Callable[[], object] = lambda: None
        self._opening, self._settings = opening, settings
        self._share, self._processes = share, processes
        self.quota: Quota | None = None
        self._space, self._has_one_size = space, object_bytes is not None
        self._scratch: npt.NDArray[np.uint8] | None = None
        self._scratch_lock = threading.Lock()
        # By key, which one the engine named before it: as it asks for a text before it stores it.
        self._before: dict[bytes, bytes] = {}
        self._earlier = self._before
        lifetime.watch(self)
        self._begin()
        self.object_bytes = object_bytes or self.pool.layout.object_bytes or 0
        every_s = settings.lease_s / LOOKS_A_LEASE
        self._reopening = Reopening(self.pool, self._begin_again, every_s, self._look)

    def reset_after_fork(self) -> None:
        self._scratch_lock = threading.Lock()

    # ---- the pool ----

    def _begin(self) -> None:
        pool = self._opening()
        try:
            self._tiers = open_tiers(pool, self._settings, self._share)
            if self.quota is not None:
                self.quota.reopened(self._tiers)
            else:
                share = self._share / self._processes
                self.quota = quota_of(self._tiers, self._settings, share)
        except Exception:
            pool.close()
            raise
        self.pool, self._file = pool, stat_of(pool)

    def _begin_again(self) -> ObjectPool:
        """Open the pool anew in a thread, after the one before was closed: calls that are under way
        are misses."""
        self._tiers.close()
        self._begin()
        return self.pool

    def _look(self) -> None:
        """Four times a lease."""
        try:
            self._tiers.give()
        except LOST:
            self.let_go()

    def keys(self, names: Sequence[str], weights: bytes = b"") -> PageKeys:
        """weights: a state of KeyedWeights; none for those of the engine's start."""
        space = xor(self._space, namespace({"weights": weights.hex()})) if weights else self._space
        return object_keys(names, salt=space)

    def is_whole(self) -> bool:
        """Whether the pool's file is as long as it was: else who reads or writes in place would die
        by a signal. The pool itself needs no such check."""
        now, then = stat_of(self.pool), self._file
        if now is None or then is None or not os.path.samestat(now, then):
            return True
        if now.st_size >= then.st_size:
            return True
        self.counting.failed("pool", f"{self.pool.path} was cut short under us: remove it")
        return False

    def keeps(self) -> bool:
        """Whether what was leased or reserved is still this host's. Where it was declared off,
        others write there, and reading it in place may give anything."""
        if self._settings.sharing == "host":
            return True
        try:
            self.pool.get_batch_into([], [])  # of none, but verified like any
        except _FAULTS as error:
            self._failed(error)
            return False
        return True

    def inspect(self) -> None:
        """The pool has been used: its figures may be shown."""
        self.counting.inspect(self._tiers, self.quota)

    # ---- find ----

    def present(self, keys: PageKeys) -> Mask:
        """bool [n]: which of them are there, whole as far as one can see without reading. They are
        taken to follow each other in a text."""
        self._note_order(keys)
        right = self._right(keys, self._sizes(lambda: self.pool.object_sizes(keys), len(keys)))
        if self._tiers.cold is None or right.all():
            return right
        return right | self._asked(lambda: self._tiers.contains(keys), right)

    def _note_order(self, keys: PageKeys) -> None:
        if len(self._before) > ORDER_MAX // 2:
            self._earlier, self._before = self._before, {}
        rows = _rows(keys)
        self._before.update(zip(rows[1:], rows, strict=False))

    def text(self, keys: PageKeys, before: PageKeys | None = None) -> PageKeys:
        """These keys of a text, behind the one before them: the last of `before`, or the one that
        the engine named before the first when it asked."""
        first = _rows(keys[:1])
        row = self._before.get(first[0]) or self._earlier.get(first[0]) if first else None
        if before is None or not len(before):
            before = PageKeys(np.frombuffer(row or b"", np.uint8).reshape(-1, 16), 1)
        return PageKeys(np.concatenate([before.packed[-1:], keys.packed]), keys.page_tokens)

    def chain(self, text: PageKeys) -> None:
        """Tell the pool of a text's objects that are there by now."""
        if len(text) > 1:
            self._asked(lambda: self.pool.chain(text), 0)

    def _restore(self, keys: PageKeys) -> None:
        """Reads objects back from the cold tier, while there is room."""

        def restore() -> None:
            with nullcontext() if self.quota is None else self.quota.bringing(keys):
                self._tiers.restore(keys)

        if self._tiers.cold is not None:
            self._asked(restore, None)

    def _asked(self, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns; `otherwise` when it fails."""
        try:
            return call()
        except _FAULTS as error:
            self._failed(error)
            return otherwise

    def _failed(self, error: Exception) -> None:
        """A pool of one host is not lost: it was closed."""
        lost = isinstance(error, LOST) and self._settings.sharing != "host"
        kind = "quota" if isinstance(error, QuotaError) else "pool"
        self.counting.failed("host" if lost else kind, error)

    def _sizes(self, call: Callable[[], Sizes], count: int) -> Sizes:
        """What `call` says; that all are absent when it fails."""
        return self._asked(call, np.full(count, ABSENT, np.int64))

    def _right(self, keys: PageKeys, sizes: Sizes) -> Mask:
        """Which sizes are as wanted; the others are forgotten, so that they can be stored again."""
        there = sizes >= 0
        right: Mask = there & (sizes == self.object_bytes) if self._has_one_size else there
        for kind, wrong in (("corrupt", sizes == DAMAGED), ("mismatch", there & ~right)):
            places = np.flatnonzero(wrong)
            if len(places):
                self.counting.failed(kind, f"in {self.pool.path}", len(places))
                self.forget(PageKeys(keys.packed[places], keys.page_tokens))
        return right

    def forget(self, keys: PageKeys) -> int:
        """Forget objects; returns how many were there. A reader keeps one until it gives it
        back."""
        return self._asked(lambda: self._tiers.forget(keys), 0)

    def prioritize(self, keys: PageKeys, priority: int) -> int:
        """Evict these after all of lower priority; returns how many this host has."""
        return self._asked(lambda: self.pool.admin.prioritize(keys, priority), 0)

    def clear(self) -> None:
        """Take all objects out of the pool and its cold file, whoever has stored them; readers keep
        what they read. Those in a remote store stay.

        Raises CXLKVError.
        """
        pool, tiers = self.pool, self._tiers
        rows, _ = pool.hotness.published()
        pages, generations = rows["page"].copy(), rows["generation"].copy()
        pool.records.forget(pages, generations, False)
        if tiers.cold is not None:
            tiers.cold.clear()

    def ends(self, keys: PageKeys, sizes: Sizes, size_max: int) -> list[memoryview]:
        """The last bytes of objects of these sizes, up to size_max of each; none of one that cannot
        be read."""
        counts = np.minimum(np.maximum(sizes, 0), size_max)
        starts = np.cumsum(counts) - counts
        out = np.zeros(int(counts.sum()), np.uint8)
        ranges = np.stack([np.arange(len(keys)), np.maximum(sizes, 0) - counts, counts, starts], 1)
        read = self._sizes(lambda: self.pool.get_ranges(keys, ranges, out), len(keys))
        places = zip(starts.tolist(), np.maximum(read, 0).tolist(), strict=True)
        return [out[start : start + count].data for start, count in places]

    # ---- copies ----

    def load(self, keys: PageKeys, buffers: Given) -> Mask:
        """Copy them into memory, of each as many bytes as an object has; bool [n]: which are right.

        The memory of the others has zeros or what was there.
        """

        def get() -> Sizes:
            try:
                return self.pool.get_batch_into(keys, buffers)
            except BadArgumentError:  # one of another size, perhaps: nothing was copied
                found = self.pool.object_sizes(keys)
                if not ((found > 0) & (found != self.object_bytes)).any():
                    raise
                self._right(keys, found)
                return self.pool.get_batch_into(keys, buffers)

        self._restore(keys)
        return self._right(keys, self._sizes(get, len(keys)))

    def put(self, keys: PageKeys, buffers: Given, before: PageKeys | None = None) -> Mask:
        """Store copies. bool [m]: of those that are in the pool then, from the first on, which are
        new. In a full pool, or of a quota, those get room that come first; before: objects that
        make none, nor do those before them in their texts."""
        with nullcontext() if before is None or not len(before) else self._held(before):
            return self._put(keys, buffers)

    def _held(self, keys: PageKeys) -> AbstractContextManager[object]:
        return self._asked(lambda: self.pool.lease(keys), None) or nullcontext()

    def _put(self, keys: PageKeys, buffers: Given) -> Mask:
        new: list[bool] = []
        try:
            with self._room_for(keys, buffers):
                return self.pool.put_batch(keys, buffers)
        except (PoolFullError, QuotaError) as error:
            new = self._put_first(keys, buffers)
            kind = "full" if isinstance(error, PoolFullError) else "quota"
            self.counting.failed(kind, error, len(keys) - len(new))
        except BadArgumentError as error:
            self.counting.failed("pool" if self._has_one_size else "large", error)
        except _FAULTS as error:
            self._failed(error)
        return np.array(new, np.bool_)

    def _put_first(self, keys: PageKeys, buffers: Given) -> list[bool]:
        """One after the other, until one finds no room: none makes room by one before it."""
        new: list[bool] = []
        with ExitStack() as held, suppress(*_FAULTS):
            for index in range(len(keys)):
                one = keys[index : index + 1]
                memory = one_of(buffers, index)
                with self._room_for(one, memory):
                    new += self.pool.put_batch(one, memory).tolist()
                held.enter_context(self.pool.lease(one))
        return new

    def _room_for(
        self, keys: PageKeys, buffers: Given | None = None
    ) -> AbstractContextManager[None]:
        """Reserve the tenant's quota while these keys are published; buffers: None for objects of
        one slot. Raises QuotaError."""
        if self.quota is None:
            return nullcontext()
        sizes: npt.ArrayLike = self.object_bytes if buffers is not None else 1
        if isinstance(buffers, Buffers) and not self._has_one_size:
            sizes = sums_of(buffers.stored_bytes(), buffers.starts)
        return self.quota.room_for(keys, -(-np.asarray(sizes) // self.pool.layout.page_tokens))

    # ---- in place ----

    def lease(self, keys: PageKeys) -> Lease | None:
        """Hold those that are there and right; None when the pool cannot be asked. What is damaged
        is forgotten."""
        if not self.is_whole():
            return None
        self._restore(keys)
        found = self._asked(lambda: self.pool.lease(keys), None)
        if found is not None:
            self._right(keys, found.sizes)
        return found

    def reserve(self, sizes: Sequence[int], evict: bool = True) -> Reserved | None:
        """Memory to be written and published, for all or for none."""
        if max(sizes) > self.object_bytes:
            self.counting.failed("large", f"{max(sizes)} bytes, pages of {self.object_bytes}")
            return None
        if not self.is_whole():
            return None
        try:
            if not evict and self.pool.stats()["pages_free"] < len(sizes):
                return None
            return self.pool.reserve(list(sizes))
        except PoolFullError:
            return None
        except _FAULTS as error:
            self._failed(error)
            return None

    def publish(self, reserved: Reserved, place: int, key: PageKeys) -> bool:
        """Whether the object is new; what is reserved counts for a quota from here on."""

        def publish() -> bool:
            with self._room_for(key):
                return bool(reserved.publish(key, [place])[0])

        return self._asked(publish, False)

    def verify(self, key: PageKeys) -> None:
        """Read an object once more, whole: one that has changed is forgotten."""
        with self._scratch_lock:
            if self._scratch is None:
                self._scratch = np.empty(self.object_bytes, np.uint8)
            scratch = self._scratch
            sizes = self._sizes(lambda: self.pool.get_batch_into(key, [scratch]), 1)
        if sizes[0] == DAMAGED:
            self.counting.failed("changed")
            self.forget(key)

    def close(self) -> None:
        """Raises BusyError while objects are held."""
        self._reopening.take()  # that is `pool`
        self._reopening.close()
        self._tiers.close()
        self.pool.close()


def stat_of(pool: ObjectPool) -> os.stat_result | None:
    try:
        return os.stat(str(pool.path))
    except OSError:  # it was removed, and its memory lasts
        return None


def _rows(keys: PageKeys) -> list[bytes]:
    joined = keys.packed.tobytes()
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def one_of(buffers: Given, index: int) -> Given:
    """The memory of one of the objects."""
    if not isinstance(buffers, Buffers):
        return buffers[index : index + 1]
    starts = buffers.starts
    first, last = (index, index + 1) if starts is None else np.asarray(starts)[index : index + 2]
    some = slice(int(first), int(last))
    return buffers._replace(
        addresses=np.asarray(buffers.addresses)[some],
        sizes=np.asarray(buffers.sizes)[some],
        starts=[0, int(last - first)],
    )
