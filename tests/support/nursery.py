"""Engines as hosts of one pool: forked from a process that has imported theirs, which takes long.

Each has a /dev/shm of its own, so that it is a machine of its own, and finds its number by itself.
An engine gets calls as lines of JSON over a socket; each answer is a line, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cxlkv import ObjectPool

from .forked import Forked, fork_engines

Settings = Mapping[str, object]

_NEW_MOUNTS, _PRIVATE = 0x20000, 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC


class Served(Protocol):
    """An engine in its process. Texts have numbers, from which all that is in them follows."""

    def save(self, text: int) -> int:
        """How many of its pages are new in the pool."""

    def load(self, text: int) -> tuple[int, bool]:
        """How many of its pages, from the first on, were found; whether all of them are right."""

    def mark(self, where: str, call: Callable[[], object]) -> None:
        """Call it in the middle of the next "save" or "load", when some pages of it are done."""

    @property
    def pool(self) -> ObjectPool: ...

    def failures(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


# ---- in the process of the engines ----


def serve(begin: Callable[[Settings], Served]) -> None:
    """An engine for each line on stdin."""

    def alone(link: socket.socket, settings: Settings) -> None:
        own_memory()
        live(begin(settings), link)

    fork_engines(alone)


def own_memory() -> None:
    """Raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(_NEW_MOUNTS),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=64m"),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def live(engine: Served, link: socket.socket) -> None:
    with link.makefile("rw") as lines:
        print(json.dumps({"ready": True}), file=lines, flush=True)
        for line in lines:
            asked = json.loads(line)
            if asked["do"] == "end":
                engine.close()
                return
            print(json.dumps(answer(engine, asked)), file=lines, flush=True)


def answer(engine: Served, asked: dict[str, object]) -> object:
    match asked["do"]:
        case "save":
            return engine.save(int(str(asked["text"])))
        case "load":
            return engine.load(int(str(asked["text"])))
        case "mark":
            number = int(str(asked["number"]))
            engine.mark(str(asked["where"]), lambda: signal_here(number))
            return True
        case "failures":
            return {kind: count for kind, count in engine.failures().items() if count}
        case "check":
            return engine.pool.admin.check(deep=True)["problems"]
        case "host":
            return next(host.number for host in engine.pool.admin.hosts() if host.is_self)
        case other:
            assert other == "pages", other
            return engine.pool.stats()["pages_total"]


def signal_here(number: int) -> None:
    """To this thread: while another one takes it, this one would go on for a moment."""
    signal.pthread_kill(threading.get_ident(), number)


# ---- in the test ----


class Engine(Forked):
    """One of them, as the test has it."""

    def __init__(self, link: socket.socket, log: Path):
        super().__init__(link, log)
        self._lines = link.makefile("rw")
        assert self.hear() == {"ready": True}

    def say(self, do: str, **words: object) -> None:
        print(json.dumps({"do": do, **words}), file=self._lines, flush=True)

    def hear(self) -> object:
        line = self._lines.readline()
        assert line, f"it has ended: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def ask(self, do: str, **words: object) -> object:
        self.say(do, **words)
        return self.hear()

    def save(self, texts: Sequence[int]) -> list[object]:
        return [self.ask("save", text=text) for text in texts]

    def load(self, texts: Sequence[int]) -> list[object]:
        return [self.ask("load", text=text) for text in texts]

    def end(self) -> None:
        self.say("end")
        assert self.has_ended(), self.log.read_text()[-3000:]
        self.kill()
