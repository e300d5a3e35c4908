"""Objects of one size in a pool, as an engine's store needs them: nothing here raises for what a
pool may do. It is a miss, or not stored, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.adapters.common.metrics import Counting
from cxlkv.closing import Closing
from cxlkv.errors import BadArgumentError, CXLKVError, PoolFullError
from cxlkv.objects import ABSENT, DAMAGED, Buffers, Sizes, object_keys
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.tiers import Tiers

COUNTS = {
    "asked_pages": "Pages that the engine asked for, whether they are there",
    "hit_pages": "Of them, those that were there, from the first on",
    "loaded_pages": "Pages copied from the pool to the engine",
    "loaded_bytes": "Bytes copied from the pool to the engine",
    "stored_pages": "Pages that are new in the pool",
    "stored_bytes": "Bytes that are new in the pool",
}
"""What is counted, by name, with what it means; side pools' pages, too."""

KINDS = {
    "corrupt": "a page in the pool is damaged: it is computed again, and stored again",
    "mismatch": "a page in the pool has another size than the engine's: it is computed again, and "
    "stored again",
    "full": "the pool has no room, and nothing in it can go, so pages are not stored: give a "
    "larger capacity",
    "error": "the pool could not be used, so this was a miss, or was not stored",
}
"""Failures, each with what it means."""

Flags = npt.NDArray[np.bool_]
Given = Buffers | Sequence[object]


class ObjectCache(Closing):
    """Names are the engine's; space, 16 bytes, is all else that makes the bytes what they are.
    object_bytes: of each of them; the pool's may be larger.

    Tiers are open, so that a full pool evicts before it refuses. Any thread may call, until
    close(): then everything is a miss.
    """

    def __init__(self, pool: CXLPool, space: bytes, object_bytes: int, counting: Counting):
        self.pool, self._space, self._counting = pool, space, counting
        self.object_bytes = object_bytes
        self._tiers = Tiers(pool)

    def keys(self, names: Sequence[str]) -> PageKeys:
        return object_keys(names, salt=self._space)

    def present(self, names: Sequence[str]) -> Flags:
        """bool [n]: which of them are there, whole as far as one can see without reading."""
        keys = self.keys(names)
        sizes = self._asked(lambda: self.pool.object_sizes(keys), len(keys))
        self._forget_wrong(keys, sizes)
        found: Flags = sizes == self.object_bytes
        return found

    def load(self, names: Sequence[str], buffers: Given) -> Flags:
        """Copy them into memory, of each as many bytes as an object has; bool [n]: which are right.

        The memory of the others has zeros or what was there.
        """
        keys = self.keys(names)

        def get() -> Sizes:
            try:
                return self.pool.get_batch_into(keys, buffers)
            except BadArgumentError:  # one of another size, perhaps: nothing was copied
                found = self.pool.object_sizes(keys)
                if not ((found > 0) & (found != self.object_bytes)).any():
                    raise
                self._forget_wrong(keys, found)
                return self.pool.get_batch_into(keys, buffers)

        sizes = self._asked(get, len(keys))
        self._forget_wrong(keys, sizes)
        good: Flags = sizes == self.object_bytes
        count = int(good.sum())
        self._counting.add(loaded_pages=count, loaded_bytes=count * self.object_bytes)
        return good

    def store(self, names: Sequence[str], buffers: Given) -> Flags:
        """bool [n]: which are in the pool then, those that were there among them.

        Of a pool that has no room for all, those from the first on, as many as half of them, or a
        quarter, and so on.
        """
        keys, count = self.keys(names), len(names)
        there = np.zeros(count, np.bool_)
        while count:
            try:
                new = self.pool.put_batch(keys[:count], first_of(buffers, count))
            except PoolFullError as error:
                if count == len(names):
                    self._counting.failed("full", error)
                count //= 2
                continue
            except (CXLKVError, OSError) as error:
                self._counting.failed("error", error)
                break
            there[:count] = True
            added = int(new.sum())
            self._counting.add(stored_pages=added, stored_bytes=added * self.object_bytes)
            break
        return there

    def clear(self) -> None:
        """Take all objects of the pool out, whoever has stored them; readers keep what they read.

        Raises CXLKVError.
        """
        rows, _ = self.pool.hotness.published()
        pages, generations = rows["page"].copy(), rows["generation"].copy()
        _core.forget_pages(self.pool._handle, pages, generations, False)

    def close(self) -> None:
        self._tiers.close()
        self.pool.close()

    def _asked(self, call: Callable[[], Sizes], count: int) -> Sizes:
        """What `call` says; that all are absent when it fails."""
        try:
            return call()
        except (CXLKVError, OSError) as error:
            self._counting.failed("error", error)
            return np.full(count, ABSENT, np.int64)

    def _forget_wrong(self, keys: PageKeys, sizes: Sizes) -> None:
        """So that they can be stored again."""
        for kind, wrong in (
            ("corrupt", sizes == DAMAGED),
            ("mismatch", (sizes >= 0) & (sizes != self.object_bytes)),
        ):
            places = np.flatnonzero(wrong)
            if not len(places):
                continue
            self._counting.failed(kind, f"in {self.pool.path}", len(places))
            try:
                self.pool.forget(PageKeys(keys.packed[places], keys.page_tokens))
            except (CXLKVError, OSError) as error:
                self._counting.failed("error", error)


def first_of(buffers: Given, count: int) -> Given:
    """The memory of the first `count` objects."""
    if not isinstance(buffers, Buffers):
        return buffers[:count]
    starts = None if buffers.starts is None else np.asarray(buffers.starts)[: count + 1]
    end = count if starts is None else int(starts[-1])
    return Buffers(np.asarray(buffers.addresses)[:end], np.asarray(buffers.sizes)[:end], starts)
