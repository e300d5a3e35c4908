"""Brings a pool's memory into place before it is used, in steps that can be stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cxlkv import _core
from cxlkv.layout import format_bytes
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
