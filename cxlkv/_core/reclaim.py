"""Tiers of a full pool reclaim pages for the call that wants more."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MethodType
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakMethod

from cxlkv._core.base import Handle
from cxlkv.errors import BusyError, PoolFullError

T = TypeVar("T")
Reclaimer = Callable[[int], bool]
"""Tries to have so many free pages; returns whether there are some more now, or enough."""

TRIES = 8
"""Attempts of a call: others may take the pages that were reclaimed for it."""

# By pool, for as long as the pool lives and the object whose method it is. A forked child has none:
# the cold file is its parent's.
_reclaimers: WeakKeyDictionary[Handle, Callable[[], Reclaimer | None]] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_reclaimers.clear)


def _reclaimer_of(pool: Handle) -> Reclaimer | None:
    found = _reclaimers.get(pool)
    return found() if found is not None else None


def register(pool: Handle, reclaimer: Reclaimer) -> None:
    """Ask `reclaimer` from now on before PoolFullError is raised; a method while its object lives.

    Raises BusyError when the pool has one already."""
    if _reclaimer_of(pool) is not None:
        raise BusyError(
            "this process has tiers of the pool already: use these, or close them first"
        )
    weak = WeakMethod(reclaimer) if isinstance(reclaimer, MethodType) else lambda: reclaimer
    _reclaimers[pool] = weak


def unregister(pool: Handle, reclaimer: Reclaimer) -> None:
    """Ask it no more, if it is the pool's."""
    if _reclaimer_of(pool) == reclaimer:
        _reclaimers.pop(pool, None)


def retry(call: Callable[[], T], pool: Handle, pages: Callable[[], int]) -> T:
    """What `call` returns, which takes at most that many pages; a full pool's tiers reclaim them
    first. Raises PoolFullError when they cannot."""
    try:
        return call()
    except PoolFullError as error:
        return again(error, call, pool, pages)


def again(error: PoolFullError, call: Callable[[], T], pool: Handle, pages: Callable[[], int]) -> T:
    """retry() for a caller that has made the first call itself, and got this error."""
    for _ in range(TRIES - 1):
        reclaimer = _reclaimer_of(pool)
        if reclaimer is None or not reclaimer(pages()):
            break
        try:
            return call()
        except PoolFullError as later:
            error = later
    try:
        raise error
    finally:
        del error  # its traceback has this frame: a cycle would keep what the caller lets go of
