"""Who makes room when a pool is full: what a pool's tiers promise to those who append."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from cxlkv import _core

MakeRoom = Callable[[int], bool]
"""Tries to have so many free pages; returns whether there are some more now, or enough."""

TRIES = 8
"""Others may take the room that was made, so often."""

# By pool, while it lives.
_makers: WeakKeyDictionary[_core.Handle, MakeRoom] = WeakKeyDictionary()


def serve(pool: _core.Handle, make: MakeRoom | None) -> None:
    """From now on `make` is asked before PoolFullError is raised; None: nobody is."""
    if make is None:
        _makers.pop(pool, None)
    else:
        _makers[pool] = make


def make(pool: _core.Handle, pages: int) -> bool:
    """Whether it is worth to try again."""
    maker = _makers.get(pool)
    return maker is not None and maker(pages)
