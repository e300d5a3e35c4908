"""Engines that are forked from one process that has imported vLLM: tests/vllm/lives.py."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypedDict, cast

from typing_extensions import Self

from tests.support.processes import ROOT, kill_group

from .engines import settings_of

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
Tokens = list[int]


class Done(TypedDict):
    """A request that has ended; took_s: since it was sent."""

    name: str
    tokens: Tokens
    cached: int
    took_s: float


class Life:
    """An engine. Its requests' answers come as they end."""

    def __init__(self, link: socket.socket, log: Path):
        self.link, self.log = link, log
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, _, _ = struct.unpack("3i", peer)
        self._left = b""

    def fileno(self) -> int:
        return self.link.fileno()

    def ready(self) -> Self:
        assert next(self.hear()) == {"ready": True}
        return self

    def say(self, **asked: object) -> None:
        self.link.sendall(json.dumps(asked).encode() + b"\n")

    def add(self, name: str, prompt: Tokens, max_tokens: int = 8) -> None:
        now_s = time.monotonic()
        self.say(do="add", name=name, prompt=prompt, max_tokens=max_tokens, at_s=now_s)

    def ask(self, **asked: object) -> dict[str, object]:
        """While no request runs."""
        self.say(**asked)
        return next(self.hear())

    def forget(self) -> None:
        """The engine's own prefixes; the pool's stay."""
        assert self.ask(do="reset") == {"reset": True}

    def generate(self, prompts: Sequence[Tokens], max_tokens: int = 8) -> list[Done]:
        for number, prompt in enumerate(prompts):
            self.add(str(number), prompt, max_tokens)
        return self.answers(len(prompts))

    def answers(self, count: int) -> list[Done]:
        """Of so many requests, by name; the names are numbers."""
        heard = self.hear()
        found = [cast(Done, next(heard)) for _ in range(count)]
        return sorted(found, key=lambda one: int(one["name"]))

    def hear(self) -> Iterator[dict[str, object]]:
        """What it says, until it has ended."""
        while True:
            while b"\n" in self._left:
                line, self._left = self._left.split(b"\n", 1)
                yield cast("dict[str, object]", json.loads(line))
            data = self.link.recv(1 << 20)
            if not data:
                assert not self.pid, f"the engine has ended: {self.log.read_text()[-3000:]}"
                return
            self._left += data

    def heard(self) -> list[Done]:
        """Requests that have ended since the last call; waits if there are none."""
        found = [next(self.hear())]
        found += [json.loads(line) for line in self._left.split(b"\n")[:-1]]
        self._left = self._left[self._left.rfind(b"\n") + 1 :]
        return cast("list[Done]", found)

    def has_ended(self) -> bool:
        """Waits until it says something, or has ended."""
        return not self.link.recv(1, socket.MSG_PEEK)

    def kill(self) -> None:
        if self.pid:
            kill_group(self.pid)
            self.pid = 0
        self.link.close()

    def end(self) -> None:
        self.say(do="end")
        assert next(self.hear()) == {"ended": True}
        while not self.has_ended():
            pass
        self.kill()


class Nursery:
    """Begins lives, and ends those that are left."""

    def __init__(self, model: Path, folder: Path):
        self._model, self._folder = model, folder
        self._lives: list[Life] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "lives"))
        self._listening.listen()
        environment = {**os.environ, **ENVIRONMENT}
        environment.pop("TRITON_INTERPRET", None)  # torch is many times faster without it
        with (folder / "nursery.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.lives"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def begin(self, extra: dict[str, object] | None = None, **settings: object) -> Life:
        """extra: its kv_connector_extra_config, None: no connector. ready() waits for it."""
        tiny = {"model": str(self._model), "max_num_seqs": 16}
        given = settings_of(extra, **{**tiny, **settings})
        log = self._folder / f"life{len(self._lives)}.log"
        wanted = {"socket": str(self._folder / "lives"), "log": str(log), "settings": given}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        link, _ = self._listening.accept()
        self._lives.append(Life(link, log))
        return self._lives[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for life in self._lives:
            life.kill()
        self._process.kill()
        self._process.communicate()
        self._listening.close()
