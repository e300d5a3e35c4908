"""The side of a peer: it reads requests, one line of JSON each, and answers each with a line.

    {"op": "open", "objects": {...}}                                      {"ok": true}
    {"op": "run", "case": "put", "form": "batch", "wanted": [[...]]}      {"seconds": ...,
                                                                            "bytes": ...}
    {"op": "close"}                                                       {"ok": true}

The first line comes without a request: {"version": ..., "forms": {form: [case, ...]}}. What goes
wrong is {"error": ...}. Only the standard library and numpy are imported here, as every environment
has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Wanted = Sequence[Sequence[int]]
Call = TypeVar("Call")

UNIT_BYTES = 64 << 10
"""K and V of one layer of a page of 16 tokens: 8 kv heads of 128 channels, bf16."""

ALLOWED = os.sched_getaffinity(0)


@dataclass(frozen=True)
class Objects:
    """`count` objects in the file `payload`, one behind the other, and a file `out` with a quarter
    more room. An object is a page: its layers one behind the other, UNIT_BYTES each. `folder` is
    for files of the peer's own."""

    payload: str
    out: str
    folder: str
    object_bytes: int
    count: int
    call_objects: int
    threads: int

    @property
    def layers(self) -> int:
        return self.object_bytes // UNIT_BYTES

    @property
    def bytes(self) -> int:
        return self.count * self.object_bytes

    def order(self) -> npt.NDArray[np.int64]:
        """In which objects are read."""
        return np.random.default_rng(7).permutation(self.count)

    def calls(self, order: npt.NDArray[np.int64] | None = None) -> list[list[int]]:
        """The objects of each call."""
        every = np.arange(self.count) if order is None else order
        step = self.call_objects
        return [every[at : at + step].tolist() for at in range(0, self.count, step)]


class Peer(ABC):
    """A peer. forms: the ways in which it does something, and which cases each can do."""

    version: str
    forms: ClassVar[dict[str, tuple[str, ...]]]

    @abstractmethod
    def answer(self, asked: dict[str, object]) -> dict[str, object]:
        """To one request."""


class Store(Peer):
    """It keeps objects."""

    @abstractmethod
    def open_objects(self, given: Objects) -> None:
        """Makes ready; nothing of it is measured."""

    @abstractmethod
    def run(self, case: str, form: str, wanted: Wanted) -> tuple[float, int]:
        """Seconds that it took, and the bytes.

        first: the first put of all, in memory that nobody has touched: it is done at opening, and
        the objects stay until there is another put.
        put: all objects are stored; what is there from before goes first, unmeasured.
        get: all are read to their places in `out`.
        lease: all are held and given back; what is held is copied to `out`, unmeasured.
        ranges: of each layer the units of the pages wanted[layer], to `out` in this order.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives back what opening took."""

    def answer(self, asked: dict[str, object]) -> dict[str, object]:
        if asked["op"] == "run":
            wanted = cast("Wanted", asked["wanted"])
            seconds, size_bytes = self.run(str(asked["case"]), str(asked["form"]), wanted)
            return {"seconds": seconds, "bytes": size_bytes}
        if asked["op"] == "close":
            self.close()
        else:
            given = Objects(**cast("dict[str, object]", asked["objects"]))  # type: ignore[arg-type]
            confine(given.threads)
            self.open_objects(given)
        return {"ok": True}


def must(held: bool, text: str) -> None:
    """Raise RuntimeError with this text unless another project's call succeeded."""
    if not held:
        raise RuntimeError(text[:200])


def mapped(path: str, writable: bool = False) -> Bytes:
    """The file's bytes, each page touched."""
    found = np.memmap(path, np.uint8, "r+" if writable else "r")
    touched = found[::4096].copy()
    if writable:
        found[::4096] = touched
    return found


def confine(threads: int) -> None:
    """Leaves this process that many CPUs. Stores have threads that nobody asked for: only so do all
    peers have as much of the machine."""
    cpus = sorted(ALLOWED)[:threads]
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.sched_setaffinity(int(task), cpus)


class Team:
    """The threads that a form may use; one is the caller's own."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def each(self, function: Callable[[Call], None], calls: list[Call]) -> float:
        """Seconds of function(call) for all calls, which are lists as the function takes them."""
        began = time.perf_counter()
        if self._pool is None:
            for call in calls:
                function(call)
        else:
            for future in [self._pool.submit(function, call) for call in calls]:
                future.result()
        return time.perf_counter() - began

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def serve(make: Callable[[], Peer]) -> int:
    """Answers requests until there are no more; returns the exit code."""
    # Libraries print what they like: only this function writes to what is standard output now.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        peer = make()
    except Exception as error:
        say(failure(error))
        return 1
    say({"version": peer.version, "forms": peer.forms})
    for line in sys.stdin:
        try:
            say(peer.answer(json.loads(line)))
        except Exception as error:
            say(failure(error))
    return 0


def failure(error: Exception) -> dict[str, object]:
    return {"error": f"{type(error).__name__}: {error}"}
