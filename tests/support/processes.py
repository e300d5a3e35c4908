"""Other processes of a test: Python programs that it talks to by lines, and that end with it."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]


class Killed(ABC):
    """What is killed when its block ends."""

    @abstractmethod
    def kill(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.kill()


class Child(Killed):
    """This Python with `words` behind it, in the checkout; killed when its block ends.

    before: words in front, such as unshare's. environment: variables that are set beside ours.
    """

    def __init__(self, *words: object, before: Sequence[str] = (), **environment: str):
        self.popen = subprocess.Popen(
            [*before, sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        assert self.popen.stdin
        assert self.popen.stdout
        assert self.popen.stderr
        self.pipes = self.popen.stdin, self.popen.stdout, self.popen.stderr
        self.pid = self.popen.pid

    def hear(self) -> str:
        """The next line that it prints; one that has ended instead says what went wrong."""
        line = self.pipes[1].readline()
        assert line, self.pipes[2].read()
        return line.rstrip("\n")

    def tell(self, line: str) -> None:
        self.pipes[0].write(f"{line}\n")
        self.pipes[0].flush()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def end(self, number: int | None = None, expected: int = 0) -> str:
        """Waits for its end, after a signal if one is given; returns what it has still printed."""
        if number is not None:
            self.popen.send_signal(number)
        said, why = self.popen.communicate(timeout=120)
        assert self.popen.returncode == expected, said + why
        return said

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.close()

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.close()


# Connections, which multiprocessing hands over as descriptors, become the three of a program.
MAIN = """
import atexit, os, runpy, sys
for number, pipe in enumerate(pipes):
    os.dup2(pipe.fileno(), number)
os.environ.clear()
os.environ.update(environment)
os.chdir(root)
sys.path.insert(0, root)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
sys.argv[1:] = words
runpy.run_module(module, run_name="__main__", alter_sys=True)
sys.stdout.flush()
atexit._run_exitfuncs()
"""


@cache
def server() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["cxlkv.adapters.transformers"])
    return made


class Prepared(Child):
    """A module that needs transformers: forked from a process that has imported it, which takes
    each process that begins anew four seconds of a CPU."""

    def __init__(self, module: str, *words: object, **environment: str):
        (stdin, told), (said, stdout), (wrong, stderr) = (os.pipe() for _ in range(3))
        given = [Connection(stdin, writable=False)]
        given += [Connection(number, readable=False) for number in (stdout, stderr)]
        own: dict[str, object] = {
            "module": module,
            "words": [*map(str, words)],
            "pipes": given,
            "root": str(ROOT),
        }
        own["environment"] = {**os.environ, **environment}
        self.process = server().Process(target=exec, args=(MAIN, own))
        self.process.start()
        for pipe in given:
            pipe.close()
        assert self.process.pid
        self.pid = self.process.pid
        self.pipes = os.fdopen(told, "w"), os.fdopen(said), os.fdopen(wrong)

    def end(self, number: int | None = None, expected: int = 0) -> str:
        if number is not None:
            os.kill(self.pid, number)
        self.pipes[0].close()
        said, why = (pipe.read() for pipe in self.pipes[1:])
        self.process.join(120)
        assert self.process.exitcode == expected, said + why
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.close()


def python(code: str, *arguments: object, expected: int = 0, before: Sequence[str] = ()) -> str:
    """What the program prints to its end."""
    with Child("-c", code, *arguments, before=before) as child:
        return child.end(expected=expected)


def kill_group(group: int, within_s: float = 60) -> None:
    """Kills the processes of a group; returns when all have ended, also those of a dead parent."""
    with ExitStack() as closing:
        ended = select.poll()
        left = set()
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(ProcessLookupError, FileNotFoundError):
                # Behind the command's name in brackets: state, parent, group.
                if int(status.read_text().rpartition(")")[2].split()[2]) == group:
                    process = os.pidfd_open(int(status.parent.name))
                    closing.callback(os.close, process)
                    ended.register(process, select.POLLIN)
                    left.add(process)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        while left:
            ready = ended.poll(1000 * within_s)
            assert ready, f"{len(left)} processes of group {group} do not end"
            for process, _ in ready:
                ended.unregister(process)
                left.remove(process)
