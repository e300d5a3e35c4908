"""Which weights the keys of an object cache are of, in an engine that may load others.

    of the start              the keys are those of all engines
    others, and no flush      no keys: what the engine's own cache has may be of either, so nothing
                              is found or stored
    flushed since             keys of these weights; with those of the start, those of the start

Whoever holds one looks before the engine loads or stores something, in the thread that also loads
weights, and tells when the engine has dropped all that it had computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from cxlkv.adapters.common import loaded
from cxlkv.adapters.common.loaded import Loaded, models_of
from cxlkv.machine import lifetime

log = logging.getLogger("cxlkv")


class KeyedWeights:
    """The state of the weights of these packages' models in this process, for keys. are_alone: as
    in Loaded. can_read: whether their memory is there; engines that sleep take it away, and reading
    it ends the process."""

    def __init__(
        self,
        packages: Sequence[str],
        are_alone: bool,
        can_read: Callable[[], bool] = lambda: True,
    ):
        self._loaded = Loaded(models_of(*packages), are_alone)
        self._can_read = can_read
        self._are_mixed = False
        self._lock = threading.Lock()  # a call returns when the look under way has ended
        self._looked_s = time.monotonic()
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def state(self) -> bytes | None:
        """Part of keys, empty for the weights of the start; None: nothing may be found or stored.
        Any thread may ask."""
        return None if self._are_mixed or self._loaded.may_differ else self._loaded.state

    def look(self) -> None:
        """Look at the weights. Never raises, nor does flushed()."""
        with self._lock:
            is_idle = time.monotonic() - self._looked_s > loaded.IDLE_S
            self._looked_s = time.monotonic()
            if (is_idle or self._loaded.may_differ) and self._have_changed() is not False:
                self._are_mixed = True

    def flushed(self) -> None:
        """The engine has dropped all that it had computed."""
        with self._lock:
            self._are_mixed = self._have_changed() is None

    def _have_changed(self) -> bool | None:
        """Since the last time; None: they cannot be read."""
        try:
            return self._loaded.look() if self._can_read() else None
        except Exception as error:  # an engine's thread must not end for it
            log.warning("cxlkv: nothing is shared, as weights cannot be read: %s", error)
            return None
