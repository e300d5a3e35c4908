"""Objects end: a `with` statement closes them, and a forked child drops what is its parent's.

That is threads, locks, sockets and files. The threads are not there in the child, and a lock that
one of them held stays locked for ever. A socket is the same one in both: a child that shuts it
down, or speaks on it, does so for its parent, and one that only keeps it open hides from the peer
that the parent has died. So whatever has one of these says how it begins anew in a child, in one
place: reset_after_fork().
"""

from __future__ import annotations

import ctypes
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, SupportsIndex
from weakref import WeakMethod, WeakSet

from cxlkv.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("cxlkv")


class OfThisProcess:
    """Is memory, pages or threads of this process: neither pickled nor copied."""

    _instead: ClassVar[str] = "make another one where it is wanted"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise UnsupportedError(f"{kind}: cannot be pickled or copied: {self._instead}")


class Closing(OfThisProcess, ABC):
    """Has a close(); a second one does nothing."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Forked(Protocol):
    """Has threads, locks, sockets or files of this process."""

    def reset_after_fork(self) -> None:
        """Makes locks anew in a child, before anything else runs there, forgets threads, closes the
        child's copies of sockets and files, and talks to no other process. It may not wait for a
        lock."""


class BeforeClose:
    """Calls to make before memory is unmapped: a device, or a server, may have it on loan.

    The last one registered is made first, and each once; after an interrupt in it, the next run()
    makes it again. A method stands for as long as its object lives, so that what was closed is not
    kept: an object that is not ended yet is kept by its thread, or ends itself when it is dropped.
    A forked child has none: what its parent lent ends with the parent.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Callable[[], object] | None]] = []
        watch(self)

    def __call__(self, call: Callable[[], object]) -> None:
        """Registers a call."""
        weak = isinstance(call, MethodType)
        self._calls.append(WeakMethod(call, self._forget) if weak else lambda: call)

    def run(self) -> None:
        while last := self._calls[-1:]:
            call = last[0]()
            try:
                if call is not None:
                    call()
            except Exception:
                self._forget(last[0])
                raise
            self._forget(last[0])

    def _forget(self, call: Callable[[], Callable[[], object] | None]) -> None:
        with suppress(ValueError):  # another thread closes, too
            self._calls.remove(call)

    def reset_after_fork(self) -> None:
        self._calls.clear()


_watched: WeakSet[Forked] = WeakSet()


def watch(one: Forked) -> None:
    """Have each forked child reset it first, from now on and while it lives, in any order.

    To be called before the first thread begins or the first socket is made.
    """
    _watched.add(one)


def keep_for_ever(*left: object) -> None:
    """What a forked child has of others' libraries and may not destroy: the end of a queue pair or
    of a store's client would reach the one that the parent uses."""
    for one in left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _after_fork() -> None:
    for one in list(_watched):
        try:
            one.reset_after_fork()
        except Exception:  # the others need theirs all the same
            log.exception("a forked child could not reset a %s", type(one).__name__)


os.register_at_fork(after_in_child=_after_fork)
