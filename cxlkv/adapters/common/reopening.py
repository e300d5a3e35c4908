"""Opens a pool anew whose host was declared off, or whose number another machine has taken.

Every call of such a pool raises FencedError or HostError until all processes of this host have
closed it. An engine goes on meanwhile, and computes: a thread closes the pool, also while calls
are under way, and opens it as soon as that is possible; the engine takes it between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from cxlkv.errors import ClosedError, CXLKVError, FencedError, HostError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.pool import Pool

Kind = TypeVar("Kind", bound=Pool)

log = logging.getLogger("cxlkv")

LOOKS_A_LEASE = 4


class Reopening(Closing, Generic[Kind]):
    """Looks after `pool`. Where one host only uses it there is nothing to do, and no thread.

    again: opens it as it was opened first. every_s: between two looks, and between two attempts.
    look: what else is to be done at each look. close() closes what was opened and not used; the
    pool at hand is its user's.
    """

    def __init__(
        self,
        pool: Kind,
        again: Callable[[], Kind],
        every_s: float,
        look: Callable[[], object] = lambda: None,
    ):
        self._pool, self._again, self._every_s, self._look = pool, again, every_s, look
        self._opened: Kind | None = None
        self._unused: Kind | None = None  # that its user could not go on in, until the next look
        self._changed = threading.Condition()
        self._ended = False
        self._said = ""
        self._thread: threading.Thread | None = None
        lifetime.watch(self)
        if pool._sharing()[0] != "host":
            self._thread = threading.Thread(target=self._run, name="cxlkv-reopening", daemon=True)
            self._thread.start()

    def reset_after_fork(self) -> None:
        self._changed, self._thread = threading.Condition(), None

    def take(self) -> Kind | None:
        """The pool that was opened since the last call. The one before is closed then, and what
        was held of it is gone."""
        if self._opened is None:
            return None
        with self._changed:
            opened, self._opened = self._opened, None
        return opened

    def use(self, go_on: Callable[[Kind], object]) -> Exception | None:
        """Go on in the pool that was opened since the last call. Where that fails, the call after
        the next look tries again; returns why. Meanwhile the engine computes."""
        pool = self.take()
        if pool is None:
            return None
        try:
            go_on(pool)
        except (CXLKVError, MemoryError, OSError) as error:
            self._say(f"{pool.path} is open again, and cannot be used yet: {error}")
            with self._changed:
                self._unused = pool
            return error
        return None

    def close(self) -> None:
        """Waits for an attempt that is under way, a lease or two."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        left = self.take() or self._unused
        if left is not None:
            left.close()

    def _run(self) -> None:
        """Reopen lost pools. Nothing ends it but close(), and a pool that its user has closed:
        without it a lost pool would stay lost."""
        while self._goes_on():
            with suppress(Exception):
                self._look()
            try:
                self._pool.admin.hosts()  # this raises, too, where no other call is made
                self._offer()
            except (FencedError, HostError) as error:
                if self._leave(error):
                    self._return()
            except ClosedError:  # by its user
                return
            except Exception:  # its calls say so
                continue

    def _goes_on(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: self._ended, self._every_s)

    def _leave(self, error: CXLKVError) -> bool:
        try:
            self._pool.close()
        except Exception:  # the next look tries again
            self._say(f"{self._pool.path}: {error}. It stays open while memory of it is in use")
            return False
        log.warning("cxlkv: %s: %s; the engine computes until it is", self._pool.path, error)
        return True

    def _offer(self) -> None:
        """take() has the pool once more whose use has failed, unless it was lost meanwhile."""
        with self._changed:
            if self._unused is self._pool:
                self._opened = self._pool
            self._unused = None

    def _return(self) -> None:
        while self._goes_on():
            try:
                pool = self._again()
            except Exception as error:  # no memory, no descriptor: the next attempt may have it
                self._say(f"{self._pool.path} cannot be opened again yet: {error}")
                continue
            with suppress(CXLKVError):
                log.warning("cxlkv: %s is open again, as host %d", pool.path, _number(pool))
            with self._changed:
                self._opened = self._pool = pool
            return

    def _say(self, text: str) -> None:
        """Once, while it stays the same."""
        if text != self._said:
            log.warning("cxlkv: %s", text)
        self._said = text


def _number(pool: Pool) -> int:
    return next(host.number for host in pool.admin.hosts() if host.is_self)
