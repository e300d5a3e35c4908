"""vLLM's servers, and the proxy before two of them, as processes of a test."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from ..support.processes import ROOT, kill_group
from ..support.waiting import until
from .engines import BLOCK_TOKENS, ENVIRONMENT, VOCABULARY_SIZE
from .forked import Tokens

PROXY = ROOT / "examples/prefill_decode.py"
PROMPT_TOKENS, NEW_TOKENS = 600, 24
CACHED = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def texts(seed: int, count: int) -> list[Tokens]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(1, VOCABULARY_SIZE, PROMPT_TOKENS).tolist() for _ in range(count)]


def asked(prompt: Tokens, new: int, **more: object) -> dict[str, object]:
    fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "prompt": prompt, "max_tokens": new, **more}


class Server:
    """vLLM's server, or the proxy: a process with a port, in a group of its own."""

    def __init__(self, log: Path, port: int, *words: object):
        self.port, self.log = port, log
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=environment,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.get("/health") is not None
        except OSError:
            return False

    @contextmanager
    def answer(self, path: str, asked: object = None) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as link:
            kind = {"Content-Type": "application/json"}
            link.request("POST" if asked else "GET", path, json.dumps(asked), kind)
            with link.getresponse() as found:
                assert found.status == 200, found.read()
                yield found

    def get(self, path: str) -> str:
        with self.answer(path) as found:
            return found.read().decode()

    def figure(self, name: str) -> float:
        """A figure of /metrics."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.split()[-1]) for line in lines)

    def complete(self, prompt: Tokens) -> tuple[Tokens, float, float]:
        """Tokens, seconds to the first one, and to the last one."""
        found, at_s, began = list[int](), list[float](), time.monotonic()
        with self.answer("/v1/completions", asked(prompt, NEW_TOKENS, stream=True)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    ids = json.loads(line[6:])["choices"][0]["token_ids"] or []
                    found += ids
                    at_s += [time.monotonic() - began] * len(ids)
        return found, at_s[0], at_s[-1]

    def whole(self, prompt: Tokens, new: int) -> Tokens:
        """The answer in one piece."""
        with self.answer("/v1/completions", asked(prompt, new)) as answer:
            found: Tokens = json.loads(answer.read())["choices"][0]["token_ids"]
        return found

    def kill(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()


class Servers:
    def __init__(self, model: Path, folder: Path, stack: ExitStack):
        self._model, self.folder, self.stack = model, folder, stack

    def engine(
        self, name: str, role: str = "", extra: dict[str, object] | None = None, *more: object
    ) -> Server:
        """extra: its kv_connector_extra_config; more: further words of its command."""
        told = {"kv_connector": "CXLConnector", "kv_role": role, "kv_connector_extra_config": extra}
        port = free_port()
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        words += ["--port", port, "--served-model-name", "tiny", "--dtype", "float32"]
        words += ["--enforce-eager", "--max-model-len", 1024, "--max-num-seqs", 8]
        words += ["--block-size", BLOCK_TOKENS, *more]
        words += ["--kv-transfer-config", json.dumps(told)] if role else []
        return self._begin(name, port, *words)

    def proxy(self, prefill: Server, decode: Server) -> Server:
        port = free_port()
        urls = ["--prefill", prefill.url, "--decode", decode.url]
        made = self._begin(f"proxy{port}", port, "-u", PROXY, *urls, "--port", port)
        until(lambda: "Running on" in made.log.read_text())
        return made

    def _begin(self, name: str, port: int, *words: object) -> Server:
        made = Server(self.folder / f"{name}.log", port, *words)
        self.stack.callback(made.kill)
        return made


def served_while_killed(proxy: Server, by: Server, prompt: Tokens, new: int) -> Tokens:
    """The answer of a request in whose middle `by` is killed."""
    found: list[Tokens] = []
    asking = threading.Thread(target=lambda: found.append(proxy.whole(prompt, new)))
    begun = "vllm:generation_tokens_total"  # it stays, however long a look takes
    before = by.figure(begun)
    asking.start()
    until(lambda: by.figure(begun) > before)
    by.kill()
    asking.join()
    return found[0]
