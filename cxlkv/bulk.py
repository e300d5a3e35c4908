"""Who hears of a pool's bulk operations: an emulated link, which charges them. Else nobody.

What moves many bytes between this process and the pool says so when it is done: how many, which
way, how long it took. That costs one look at a number while nobody listens.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from cxlkv import _core
from cxlkv.errors import ClosedError

Kind = Literal["append", "attach", "select", "fetch", "attend", "promote", "demote", "restore"]
WRITES = ("append", "restore")
"""The kinds that write to the pool; all others read it."""


class Listener(Protocol):
    """Hears of each operation after it; what it takes, the operation takes longer."""

    label: str

    def heard(self, kind: Kind, size_bytes: int, began_s: float) -> None:
        """began_s: by time.perf_counter()."""


class Timed(NamedTuple):
    """An operation that somebody will hear of. near_reads: of the near tier, before it."""

    listener: Listener
    pool: _core.Handle
    began_s: float
    near_reads: int

    def near_pieces(self) -> int:
        """Pieces that were read from the near tier's copies since then, so not from the pool."""
        return max(0, _near_reads(self.pool) - self.near_reads)

    def end(self, kind: Kind, size_bytes: int) -> None:
        if size_bytes > 0:
            self.listener.heard(kind, size_bytes, self.began_s)


_listeners: WeakKeyDictionary[_core.Handle, Listener] = WeakKeyDictionary()
_begun = 0  # listeners so far: while it is 0 nobody is looked up


def listen(pool: _core.Handle, listener: Listener | None) -> Listener | None:
    """From now on this one hears of the pool's operations, None: nobody. Returns who did before."""
    global _begun
    before = _listeners.pop(pool, None)
    if listener is not None:
        _listeners[pool] = listener
        _begun += 1
    return before


def begin(pool: _core.Handle) -> Timed | None:
    """Before an operation; None: nobody wants to hear of it."""
    if not _begun:
        return None
    listener = _listeners.get(pool)
    if listener is None:
        return None
    return Timed(listener, pool, time.perf_counter(), _near_reads(pool))


def label(pool: _core.Handle) -> str | None:
    """What the pool's memory is said to be, "PROFILE, mode"; None: what it is."""
    listener = _listeners.get(pool)
    return None if listener is None else listener.label


def labels() -> str | None:
    """The same of all pools of this process, for what is measured now."""
    found = sorted({listener.label for listener in _listeners.values()})
    return "; ".join(found) or None


def _near_reads(pool: _core.Handle) -> int:
    try:
        return _core.near_stats(pool)["reads_near"]
    except ClosedError:  # there is no near tier
        return 0
