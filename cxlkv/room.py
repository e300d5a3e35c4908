"""When a pool is full, its tiers make room for the call that appends."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MethodType
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakMethod

from cxlkv import _core
from cxlkv.errors import BusyError, PoolFullError

T = TypeVar("T")
MakeRoom = Callable[[int], bool]
"""Tries to have so many free pages; returns whether there are some more now, or enough."""

TRIES = 8
"""Others may take the room that was made, so often."""

# By pool, while it lives, and while that of which it is a method does. A forked child has none: its
# parent's file is not its own.
_makers: WeakKeyDictionary[_core.Handle, Callable[[], MakeRoom | None]] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_makers.clear)


def _maker(pool: _core.Handle) -> MakeRoom | None:
    found = _makers.get(pool)
    return found() if found is not None else None


def serve(pool: _core.Handle, make: MakeRoom) -> None:
    """From now on `make` is asked before PoolFullError is raised; a method while its object lives.
    Raises BusyError when somebody is asked already."""
    if _maker(pool) is not None:
        raise BusyError(
            "this process has tiers of the pool already: use these, or close them first"
        )
    _makers[pool] = WeakMethod(make) if isinstance(make, MethodType) else lambda: make


def stop(pool: _core.Handle, make: MakeRoom) -> None:
    """It is not asked any more, if it is the one that is."""
    if _maker(pool) == make:
        _makers.pop(pool, None)


def make(pool: _core.Handle, pages: int) -> bool:
    """Whether it is worth to try again."""
    maker = _maker(pool)
    return maker is not None and maker(pages)


def made_for(call: Callable[[], T], pool: _core.Handle, pages: Callable[[], int]) -> T:
    """What `call` returns, which takes that many pages at most: again while room can be made."""
    for _ in range(TRIES - 1):
        try:
            return call()
        except PoolFullError:
            if not make(pool, pages()):
                raise
    return call()
