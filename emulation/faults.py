"""Faults on purpose, for tests: memory that fails, hosts that die or hang.

Each helper does the true thing to a true file or process; nothing is pretended.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cxlkv.errors import BadArgumentError


def poison(path: str | os.PathLike[str], offset: int) -> int:
    """From the machine's page that begins at or behind `offset` on, loads from a pool's file raise
    SIGBUS, as from poisoned memory: the file ends there. Returns its old length."""
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    before = os.stat(path).st_size
    if not 0 <= first < before:
        raise BadArgumentError(f"offset {offset}: no page of {path}, of {before} bytes, is there")
    os.truncate(path, first)
    return before


def truncated(path: str | os.PathLike[str], part: float) -> int:
    """Cut a file to this part of its length, not below 4 KiB; returns its old length."""
    if not 0 <= part < 1:
        raise BadArgumentError(f"part={part}: 0 to less than 1")
    before = os.stat(path).st_size
    os.truncate(path, max(4096, int(before * part)))
    return before


@contextmanager
def dead_device(path: str | os.PathLike[str]) -> Iterator[None]:
    """All of a pool's file is gone under those who have it mapped, and nobody can open it; until
    the block ends, when there is a file of zeros."""
    place, before = Path(path), os.stat(path).st_size
    away = place.with_name(f".{place.name}.dead")
    os.truncate(place, 0)
    place.rename(away)
    try:
        yield
    finally:
        away.rename(place)
        os.truncate(place, before)


AT_POINT = "CXLKV_FAULT "


def at_point(name: str) -> None:
    """Called by a program under test: says that it is there, and waits to be killed or let go."""
    print(f"{AT_POINT}{name}", flush=True)
    input()


def reached(process: subprocess.Popen[str], name: str, timeout_s: float = 60.0) -> None:
    """Wait until a child, with pipes to its stdin and stdout, is at a point.

    Raises TimeoutError, or EOFError when it ended before that.
    """
    assert process.stdout is not None
    wanted, found = f"{AT_POINT}{name}\n".encode(), b""
    while not found.endswith(wanted):  # the child waits there, so nothing comes behind it
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {process.pid} is not at {name!r} after {timeout_s:g} s")
        some = os.read(process.stdout.fileno(), 4096)
        if not some:
            raise EOFError(f"process {process.pid} ended before it was at {name!r}")
        found += some


def let_go(process: subprocess.Popen[str]) -> None:
    """From the point where it waits."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def kill_at(process: subprocess.Popen[str], name: str, timeout_s: float = 60.0) -> None:
    """Host death: SIGKILL when the child is at this point; it is gone when this returns."""
    reached(process, name, timeout_s)
    process.kill()
    process.wait(timeout_s)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A host that hangs: SIGSTOP, and SIGCONT when the block ends. It stands still inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_until_still(pid)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _wait_until_still(pid: int) -> None:
    """A signal to a process of several threads arrives a little later than kill() returns."""
    while True:
        try:
            states = {
                task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{pid}/task").iterdir()
            }
        except FileNotFoundError:  # a thread, or the process, ended meanwhile
            if not Path(f"/proc/{pid}").exists():
                raise ProcessLookupError(f"process {pid} is gone") from None
            continue
        if states <= {"T", "t", "Z"}:
            return
        os.sched_yield()
