"""Engines for the tests: processes that serve a tiny random model, with a pool or without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict, cast

from tests.support.processes import ROOT, kill_group

VOCABULARY_SIZE = 512
LAYERS = 3
BLOCK_TOKENS = 32
ON_DEVICE: dict[str, object] = {
    **{"worker_cls": "tests.vllm.gpu_worker.Worker", "async_scheduling": False},
}
"""Of engines with attention in the pool: as on a GPU."""
FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "engine": ("engine", {}),
    "pool": ("pool", {"async_scheduling": False}),
    "device": ("pool", ON_DEVICE),
}
"""Where attention is, and what else an engine is started with."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TRITON_INTERPRET": "0",  # torch is many times faster
}


class Generated(TypedDict):
    tokens: list[list[int]]
    cached: list[int]
    ended: list[str]  # why


class Storm(TypedDict):
    aborted: int
    done: dict[str, list[int]]


def settings_of(extra: dict[str, object] | None = None, **settings: object) -> dict[str, object]:
    """What vllm.LLM takes for the tiny model. extra: its kv_connector_extra_config, None: no
    connector."""
    given: dict[str, object] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "block_size": BLOCK_TOKENS,
        **settings,
    }
    if extra is not None:
        given["kv_transfer_config"] = {
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    return given


class Engine:
    """vLLM in a process of its own; extra: its kv_connector_extra_config, None: no connector."""

    def __init__(
        self,
        log: Path,
        extra: dict[str, object] | None = None,
        *,
        processes: bool = False,
        environment: dict[str, str] | None = None,
        **settings: object,
    ):
        given = settings_of(extra, **settings)
        self._log, self._is_ready = log, False
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.serve", json.dumps(given)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
                    **(environment or {}),
                },
            )

    def ready(self) -> str | None:
        """None, or what the engine raised when it started. Its first question waits for it, too."""
        answer, self._is_ready = self._read(), True
        error = answer.get("error")
        return None if error is None else str(error)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        adapter: dict[str, object] | None = None,
        **more: object,
    ) -> Generated:
        asked = {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "adapter": adapter or {},
            "more": more,
        }
        return cast(Generated, self.ask(do="generate", **asked))

    def storm(self, prompts: list[list[int]], max_tokens: int, share: float, seed: int) -> Storm:
        """All at once, and each step aborts `share` of those that run."""
        found = self.ask(do="storm", prompts=prompts, max_tokens=max_tokens, share=share, seed=seed)
        return cast(Storm, found)

    def forget(self, *, connector: bool = False) -> None:
        """The engine's own prefixes; the pool's stay, unless the connector is reset, too."""
        assert self.ask(do="reset", connector=connector) == {"reset": True}

    def end(self) -> None:
        if self.process.poll() is None:
            self.ask(do="end")
            self.process.communicate(timeout=60)

    def kill(self) -> None:
        """With all its processes, as a machine's out-of-memory killer or a power cut does."""
        kill_group(self.process.pid)
        self.process.communicate(timeout=60)

    def say(self, **asked: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def ask(self, **asked: object) -> dict[str, object]:
        if not self._is_ready:
            assert self.ready() is None
        self.say(**asked)
        return self._read()

    def _read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended: {self.log()[-3000:]}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def log(self) -> str:
        return self._log.read_text()
