"""Brings a pool's memory into place before it is used, in steps that can be stopped."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from cxlkv import _core
from cxlkv.layout import format_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.huge_pages import huge_bytes, mapped

log = logging.getLogger("cxlkv")

LATER = "the pool's memory comes into place when it is used first: %s"
STEP_BYTES = 16 << 20
"""Bytes to touch in one call. For 5 to 40 ms no thread of this process can map or unmap memory."""


def run(pool: _core.Handle, huge: bool = True, is_over: Callable[[], bool] = lambda: False) -> None:
    """Prefault the whole pool, or until is_over() is true; by huge pages where there are such."""
    size, offset = _core.pool_memory(pool)[1], 0
    while offset < size and not is_over():
        offset = _core.pool_prefault(pool, offset, STEP_BYTES, huge)


LEAST_BYTES, AHEAD_LEAST_BYTES, AHEAD_MOST_BYTES = 32 << 20, 8 << 20, 1 << 30
LOOK_S, REST_S = 0.005, 0.2
HUGE_ONLY, HUGE_STEP_BYTES = 2, 4 << 20


class AsUsed:
    """A thread that makes huge pages of what a pool will use next, an eighth of it, 1 GiB at most.
    What has been used before it came there follows when no more is.

    It begins with start(), does nothing where the kernel makes no huge pages, and ends with the
    pool, or with end(), which comes before its close(). A forked child has none.
    """

    def __init__(self, pool: _core.Handle):
        self._pool, self._size = weakref.ref(pool), _core.pool_memory(pool)[1]
        self._ahead = min(max(AHEAD_LEAST_BYTES, self._size // 8), AHEAD_MOST_BYTES)
        self._offset, self._left = 0, list[range]()  # where it is; what is behind it without
        self._thread: threading.Thread | None = None
        self._end = SimpleQueue[None]()  # of an Event, an interrupt can leave the lock taken
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._end, self._thread = SimpleQueue[None](), None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="cxlkv-huge-pages", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            log.info("no huge pages are made ahead of use: %s", error)

    def _run(self) -> None:
        rest_s = 0.0
        try:
            while not self._is_over(rest_s):
                pool = self._pool()  # kept for no longer than a step
                if pool is None or (self._offset >= self._size and not self._left):
                    return
                rest_s = 0.0 if self._step(pool) else min(max(2 * rest_s, LOOK_S), REST_S)
                del pool
        except Exception as error:  # a pool that is damaged, say
            log.info("no more huge pages are made ahead of use: %s", error)

    def _is_over(self, within_s: float) -> bool:
        with suppress(Empty):
            self._end.get(timeout=within_s)
            return True
        return False

    def _step(self, pool: _core.Handle) -> bool:
        """False: there is nothing to do now."""
        begin, end = _used(pool)
        if self._offset < begin:
            self._left.append(range(self._offset, begin))
            self._offset = begin
        if self._offset < min(end + self._ahead, self._size):
            self._offset = _core.pool_prefault(pool, self._offset, HUGE_STEP_BYTES, HUGE_ONLY)
        elif self._left:
            one = self._left.pop()
            made = _core.pool_prefault(pool, one.start, HUGE_STEP_BYTES, HUGE_ONLY)
            self._left += [range(made, one.stop)] if made < one.stop else []
        else:
            return False
        return True

    def end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end.put(None)
            thread.join()


def _used(pool: _core.Handle) -> tuple[int, int]:
    """Where the extent begins that pages are taken from, and where the used ones end."""
    geometry, stats = _core.pool_geometry(pool), _core.pool_stats(pool)
    whole, part = divmod(stats["pages_total"] - stats["pages_free"], geometry["slab_slots"])
    first, each = geometry["extents_offset"], geometry["extent_bytes"]
    return first + whole * each, first + (whole + (part > 0)) * each


class Background(threading.Thread):
    """Prefaults until all is there, or until end(), which comes before the pool's close()."""

    def __init__(self, pool: _core.Handle, huge: bool = True):
        super().__init__(name="cxlkv-prefault", daemon=True)
        self._pool, self._huge = pool, huge
        self._over = False  # no Event: an interrupt in its set() can leave its lock taken
        try:
            self.start()
        except RuntimeError as error:
            log.info(LATER, error)

    def run(self) -> None:
        try:
            run(self._pool, self._huge, lambda: self._over)
            if not self._over:
                address, size = _core.pool_memory(self._pool)
                found = format_bytes(huge_bytes(mapped(address, size)))
                log.info("huge pages hold %s of the pool's %s", found, format_bytes(size))
        except Exception as error:  # a pool that is closed, /proc that cannot be read
            log.info(LATER, error)

    def end(self) -> None:
        self._over = True
        if self.ident is not None:
            self.join()
