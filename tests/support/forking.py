"""Forked children of a test: what one does under a time limit, and one that lives beside it."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT_S = 60.0
SHOW = signal.SIGUSR2
"""A child that hangs is sent it, and says where it does."""
SHOW_S = 2.0


def in_child(act: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Runs it in a forked child, and raises AssertionError with what the child raised, or, when it
    hangs, with the stacks of its threads."""
    with child_beside(act, limit_s):
        pass


@contextmanager
def child_beside(act: Callable[[], object], limit_s: float = LIMIT_S) -> Iterator[None]:
    """A forked child that does it when the block has ended; as in_child()."""
    with tempfile.TemporaryFile("w+") as said:
        faulthandler.register(SHOW, file=said)  # before the fork: it may hang in that
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the parent closes its end
            _run(act, said.fileno())
        os.close(read_end)
        try:
            yield
        finally:
            os.close(write_end)
            status = _wait(child, limit_s)
            faulthandler.unregister(SHOW)
        said.seek(0)
        text = said.read()
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"the child ended with {code}:\n{text}"


def _run(act: Callable[[], object], said: int) -> None:
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        os.write(said, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _wait(child: int, limit_s: float) -> int:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    os.kill(child, SHOW)
    time.sleep(SHOW_S)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@contextmanager
def living_child() -> Iterator[int]:
    """A forked child that does nothing, until the block ends; its pid."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        yield child
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
