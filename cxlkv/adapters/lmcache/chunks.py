"""The object cache of LMCache: a failure of the pool is a counted miss, never an exception.

Tiers are open, so that a full pool evicts what nobody holds before it refuses.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np

from cxlkv import forking
from cxlkv.adapters.common.metrics import Counting
from cxlkv.errors import BadArgumentError, CXLKVError, PoolFullError
from cxlkv.objects import DAMAGED, Lease, Reserved
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.tiers import Tiers

_FAULTS = (CXLKVError, OSError)


class Chunks:
    """Objects by keys. Any thread may call."""

    def __init__(self, pool: CXLPool, counting: Counting):
        self.pool, self.counting = pool, counting
        self.object_bytes = int(pool.layout.object_bytes or 0)
        self._tiers = Tiers(pool)
        self._file = self._stat()
        self._scratch: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._scratch_lock = threading.Lock()
        forking.watch(self)

    def reset_after_fork(self) -> None:
        self._scratch_lock = threading.Lock()

    def _stat(self) -> os.stat_result | None:
        try:
            return os.stat(str(self.pool.path))
        except OSError:  # it was removed, and its memory lasts
            return None

    def is_whole(self) -> bool:
        """Whether the pool's file is as long as it was: else who reads or writes in place would die
        by a signal. The pool itself needs no such check."""
        now, then = self._stat(), self._file
        if now is None or then is None or not os.path.samestat(now, then):
            return True
        if now.st_size >= then.st_size:
            return True
        self.counting.failed("pool", f"{self.pool.path} was cut short under us: remove it")
        return False

    def present(self, keys: PageKeys) -> int:
        """How many of the keys, from the first on, have an object that looks whole."""
        try:
            sizes = self.pool.object_sizes(keys)
        except _FAULTS as error:
            self.counting.failed("pool", error)
            return 0
        gaps = np.flatnonzero(sizes < 0)
        if len(gaps) and sizes[gaps[0]] == DAMAGED:
            self.damaged(keys[gaps[0] : gaps[0] + 1], "its description cannot be read")
        return int(gaps[0]) if len(gaps) else len(keys)

    def lease(self, keys: PageKeys) -> Lease | None:
        """Hold those that are there and right; None when the pool cannot be asked. What is damaged
        is forgotten."""
        if not self.is_whole():
            return None
        try:
            found = self.pool.lease(keys)
        except _FAULTS as error:
            self.counting.failed("pool", error)
            return None
        for index in np.flatnonzero(found.sizes == DAMAGED).tolist():
            self.damaged(keys[index : index + 1], "its CRC is wrong")
        return found

    def damaged(self, key: PageKeys, why: str) -> None:
        self.counting.failed("corrupt", why)
        self.forget(key)

    def reserve(self, sizes: Sequence[int], evict: bool = True) -> Reserved | None:
        """Room to be written and published, for all or for none."""
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
            self.counting.failed("pool", error)
            return None

    def publish(self, reserved: Reserved, place: int, key: PageKeys) -> bool:
        """Whether the object is new."""
        try:
            return bool(reserved.publish(key, [place])[0])
        except _FAULTS as error:
            self.counting.failed("pool", error)
            return False

    def put(self, keys: PageKeys, buffers: Sequence[Sequence[object]]) -> list[bool]:
        """Copies of all of them; which are new. Of a full pool those get room that come first."""
        new: list[bool] = []
        try:
            new = self.pool.put_batch(keys, buffers).tolist()
        except PoolFullError as error:
            new = self._put_first(keys, buffers)
            self.counting.failed("full", error, len(keys) - len(new))
        except BadArgumentError as error:
            self.counting.failed("large", error)
        except _FAULTS as error:
            self.counting.failed("pool", error)
        return new + [False] * (len(keys) - len(new))

    def _put_first(self, keys: PageKeys, buffers: Sequence[Sequence[object]]) -> list[bool]:
        """One after the other, until one finds no room: none makes room by one before it."""
        new: list[bool] = []
        with ExitStack() as held, suppress(*_FAULTS):
            for index in range(len(keys)):
                one = slice(index, index + 1)
                new += self.pool.put_batch(keys[one], buffers[one]).tolist()
                held.enter_context(self.pool.lease(keys[one]))
        return new

    def forget(self, keys: PageKeys) -> int:
        """How many were there. Who reads one keeps it until it gives it back."""
        try:
            return self.pool.forget(keys)
        except _FAULTS as error:
            self.counting.failed("pool", error)
            return 0

    def verify(self, key: PageKeys) -> None:
        """Read an object once more, whole: one that has changed is forgotten."""
        with self._scratch_lock:
            if self._scratch is None:
                self._scratch = np.empty(self.object_bytes, np.uint8)
            try:
                size = int(self.pool.get_batch_into(key, [self._scratch])[0])
            except _FAULTS as error:
                self.counting.failed("pool", error)
                return
        if size == DAMAGED:
            self.counting.failed("changed")
            self.forget(key)

    def close(self) -> None:
        """Raises BusyError while objects are held."""
        self._tiers.close()
        self.pool.close()
