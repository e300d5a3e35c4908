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
    """Prefault the whole pool, or until is_over() is true."""
    size, offset = _core.pool_memory(pool)[1], 0
    while offset < size and not is_over():
        offset = _core.pool_prefault(pool, offset, STEP_BYTES)


def begin(pool: _core.Handle) -> Callable[[], None]:
    """Prefault in a thread; call the returned function, which stops it, before closing the pool."""
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
