"""Engines that are forked from one process that has imported vLLM: tests/vllm/lives.py."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict, cast

from typing_extensions import Self

from tests.support import forked

from .engines import ENVIRONMENT, settings_of

Tokens = list[int]


class Done(TypedDict):
    """A request that has ended; took_s: since it was sent."""

    name: str
    tokens: Tokens
    cached: int
    took_s: float


class Life(forked.Forked):
    """An engine. Its requests' answers come as they end."""

    def __init__(self, link: socket.socket, log: Path):
        super().__init__(link, log)
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
        """Answers to so many requests, by name; the names are numbers."""
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

    def end(self) -> None:
        self.say(do="end")
        assert next(self.hear()) == {"ended": True}
        while not self.has_ended():
            pass
        self.kill()


class Nursery(forked.Nursery[Life]):
    """A nursery of the tiny model."""

    def __init__(self, model: Path, folder: Path):
        self._model = model
        command = [sys.executable, "-m", "tests.vllm.lives"]
        super().__init__(command, folder, Life, {**os.environ, **ENVIRONMENT})

    def life(self, extra: dict[str, object] | None = None, **settings: object) -> Life:
        """extra: its kv_connector_extra_config, None: no connector. ready() waits for it."""
        tiny = {"model": str(self._model), "max_num_seqs": 16}
        return self.begin(settings_of(extra, **{**tiny, **settings}))
