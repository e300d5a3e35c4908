"""Brings a pool's memory into place before it is used, in steps that can be stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cxlkv import _core
from cxlkv.errors import CXLKVError

log = logging.getLogger("cxlkv")

STEP_BYTES = 16 << 20
"""At once: the kernel lets nobody map or unmap memory of this process for that long, 5 to 40 ms."""


def run(pool: _core.Handle, is_over: Callable[[], bool] = lambda: False) -> None:
    """All of it, or until is_over()."""
    size, offset = _core.pool_memory(pool)[1], 0
    while offset < size and not is_over():
        offset = _core.pool_prefault(pool, offset, STEP_BYTES)


def begin(pool: _core.Handle) -> Callable[[], None]:
    """The same in a thread; returns what ends it, to be called before the pool is closed."""
    over = False  # no Event: an interrupt in its set() can leave its lock taken

    def work() -> None:
        try:
            run(pool, lambda: over)
        except CXLKVError as error:
            log.info("the pool's memory comes into place when it is used first: %s", error)

    thread = threading.Thread(target=work, name="cxlkv-prefault", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.info("the pool's memory comes into place when it is used first: %s", error)
        return lambda: None

    def end() -> None:
        nonlocal over
        over = True
        thread.join()

    return end
