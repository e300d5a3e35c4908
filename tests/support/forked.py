"""Engines that are forked from one process, the nursery, which has imported what takes long."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .processes import ROOT, Killed, kill_group


def fork_engines(live: Callable[[socket.socket, dict[str, object]], None]) -> None:
    """In the nursery's process: fork an engine for each line on stdin, which lives until live()
    returns. It gets its socket and its settings."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # an engine that ends leaves nothing
    for line in sys.stdin:
        wanted = json.loads(line)
        if not os.fork():
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(log, number)
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(wanted["socket"])
                live(link, wanted["settings"])
            os._exit(0)


class Forked:
    """An engine, as the test has it: a socket to it, the file that it logs to, its group."""

    def __init__(self, link: socket.socket, log: Path):
        self.link, self.log = link, log
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, _, _ = struct.unpack("3i", peer)

    def has_ended(self) -> bool:
        """Waits until it says something, or has ended."""
        try:
            return not self.link.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:  # it was killed before it read what it was sent
            return True

    def kill(self) -> None:
        if self.pid:
            kill_group(self.pid)
            self.pid = 0
        self.link.close()


Kind = TypeVar("Kind", bound=Forked)


class Nursery(Killed, Generic[Kind]):
    """command: of a program that forks an engine for each line of JSON, which names a socket to
    connect to, a log and settings. Ends the engines that are left."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        kind: Callable[[socket.socket, Path], Kind],
        environment: Mapping[str, str] | None = None,
    ):
        self._folder, self._kind = folder, kind
        self._engines: list[Kind] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "engines"))
        self._listening.listen()
        with (folder / "nursery.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def begin(self, settings: Mapping[str, object]) -> Kind:
        log = self._folder / f"engine{len(self._engines)}.log"
        wanted = {"socket": str(self._folder / "engines"), "log": str(log), "settings": settings}
        assert self._process.stdin is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        link, _ = self._listening.accept()
        self._engines.append(self._kind(link, log))
        return self._engines[-1]

    def kill(self) -> None:
        for engine in self._engines:
            engine.kill()
        self._process.kill()
        self._process.communicate()
        self._listening.close()
