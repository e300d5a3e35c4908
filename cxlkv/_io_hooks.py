"""Tells a subscriber of each transfer between this process and a pool: an emulated link, if any.

What moves many bytes says so when it is done: which way, how many. While nobody has subscribed that
costs one look at a name. What CXLKV_EMULATE asks for is loaded by name, as a plugin is: the
front imports no subscriber.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.arrays import Tokens
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Selection

Kind = Literal["append", "attach", "select", "fetch", "attend", "promote", "demote", "restore"]


class Transfer(Protocol):
    """A transfer that has begun. One of these ends it; what that takes, the call takes longer."""

    def end(self, kind: Kind, size_bytes: int) -> None: ...

    def end_append(self, layout: KVLayout, layer: int, tokens: Tokens, added: Tokens) -> None:
        """tokens of each sequence are there now, `added` of them are new."""

    def end_attach(self, layout: KVLayout, pages: npt.NDArray[np.uint32]) -> None:
        """pages: [parts, n], of which every byte was read."""

    def end_read(
        self,
        kind: Kind,
        layout: KVLayout,
        layer: int,
        tokens: Tokens,
        picked: Selection | None,
        most_bytes: int | None = None,
    ) -> None:
        """K and V of the chosen pages were read, or of all; most_bytes: no more than that."""


class Subscriber(Protocol):
    def begin(self, pool: _core.Handle) -> Transfer | None:
        """None: nobody is to hear of this pool's transfers."""

    def label(self, pool: _core.Handle) -> str | None:
        """What the pool's memory is said to be, "PROFILE, mode"; None: what it is."""

    def read_rate(self, pool: _core.Handle) -> float:
        """GB/s at which it is read; 0: as this machine reads it."""

    def moved_bytes(self, pool: _core.Handle) -> tuple[int, int]:
        """Bytes of the pool that this process has read and written over an emulated link."""


subscriber: Subscriber | None = None


def begin(pool: _core.Handle) -> Transfer | None:
    """Begin a transfer; None: it has no subscriber."""
    return subscriber.begin(pool) if subscriber else None


def label(pool: _core.Handle) -> str | None:
    return subscriber.label(pool) if subscriber else None


def read_rate(pool: _core.Handle) -> float:
    return subscriber.read_rate(pool) if subscriber else 0.0


def moved_bytes(pool: _core.Handle) -> tuple[int, int]:
    return subscriber.moved_bytes(pool) if subscriber else (0, 0)


class Plugin(Protocol):
    """cxlkv.emulation.link, as the front knows it."""

    def begin_from_environment(self, pool: _core.Handle) -> None:
        """Charge the pool's transfers to the link that CXLKV_EMULATE names, from now on.

        Raises BadArgumentError.
        """


def plugin() -> Plugin:
    """Needs pydantic and yaml, which few programs have a use for."""
    return cast(Plugin, import_module("cxlkv.emulation.link"))
