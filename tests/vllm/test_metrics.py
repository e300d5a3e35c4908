"""With vLLM: what its own /metrics, LLM.get_metrics() and its log say of hits, bytes and fill."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)

SERVE = Path(__file__).parent / "serve.py"
BLOCK = 32
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 4


class Ask(Protocol):
    def __call__(self, **asked: object) -> dict[str, object]: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=512,
        max_position_embeddings=2048,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@contextmanager
def engine(
    model: Path, log: Path, processes: bool = False, ranks: int = 1, **more: object
) -> Iterator[Ask]:
    """ask(do=..., ...) of an engine in a process of its own, which writes its log to `log`."""
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        "block_size": BLOCK,
        "disable_log_stats": False,
        "tensor_parallel_size": ranks,
        "kv_transfer_config": {
            "kv_connector": "CXLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": more,
        },
    }
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
    }
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(SERVE), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def answer() -> dict[str, object]:
            line = answers.readline()
            assert line, log.read_text()[-4000:]
            found = json.loads(line)
            assert isinstance(found, dict)
            return found

        def ask(**asked: object) -> dict[str, object]:
            requests.write(json.dumps(asked) + "\n")
            requests.flush()
            return answer()

        assert answer() == {"ready": True}
        yield ask
        ask(do="end")


def prompt(seed: int, tokens: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 512, tokens)]


def metrics(ask: Ask, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """When they are what is waited for: the pool is looked at once a second while steps are made,
    so the engine is kept busy with a prompt that is no block long and counts nothing else."""
    for _ in range(200):
        found = {name: float(str(value)) for name, value in ask(do="metrics").items()}
        if ready(found):
            return found
        ask(do="generate", prompts=[[1, 2, 3]], max_tokens=8, more={})
    raise AssertionError(f"the metrics never became right: {found}")


@pytest.mark.parametrize(
    ("processes", "ranks"),
    [(False, 1), (True, 1), (True, 2)],
    ids=["one process", "scheduler and worker", "two ranks"],
)
def test_hits_of_a_second_request_show(
    model: Path, tmp_path: Path, processes: bool, ranks: int
) -> None:
    """Counters that stay 0 are what users complain about. Ranks share tokens, and add up bytes."""
    log = tmp_path / "engine.log"
    with engine(model, log, processes, ranks, where=f"{tmp_path}/", capacity="32MiB") as ask:
        before = metrics(ask, lambda found: "vllm:cxlkv_pool_tokens free" in found)
        assert before["vllm:cxlkv_hit_tokens"] == 0
        assert before["vllm:cxlkv_failures corrupt"] == 0
        text = prompt(1, 10 * BLOCK + 7)
        ask(do="generate", prompts=[text], max_tokens=1, more={})
        ask(do="reset")
        again = ask(do="generate", prompts=[text], max_tokens=1, more={})
        assert again["cached"] == [10 * BLOCK]

        def moved(found: dict[str, float]) -> bool:
            return found["vllm:cxlkv_fetched_bytes"] >= 10 * BLOCK * TOKEN_BYTES

        found = metrics(ask, moved)
        assert found["vllm:cxlkv_saved_tokens"] == 10 * BLOCK
        assert found["vllm:cxlkv_loaded_tokens"] == 10 * BLOCK
        assert found["vllm:cxlkv_hit_tokens"] == 10 * BLOCK
        assert found["vllm:external_prefix_cache_hits"] == 10 * BLOCK  # the engine's own count
        asked = found["vllm:cxlkv_asked_tokens"]
        assert asked == found["vllm:external_prefix_cache_queries"]
        assert found["vllm:cxlkv_appended_bytes"] == 10 * BLOCK * TOKEN_BYTES
        assert found["vllm:cxlkv_fetched_bytes"] == 10 * BLOCK * TOKEN_BYTES
        fill = {
            state: found[f"vllm:cxlkv_pool_tokens {state}"]
            for state in ("free", "held", "published")
        }
        assert fill["held"] + fill["published"] == 10 * BLOCK
        assert sum(found[name] for name in found if "failures" in name) == 0
    said = log.read_text()
    assert f"cxlkv: made {tmp_path}/cxlkv-vllm-" in said
    assert said.count("cxlkv: made") == 1
    assert "tokens held), 0 failures" in said
    assert "KV Transfer metrics: cxlkv=hit rate 49 % of 654 prompt tokens" in said


def test_audits_of_attention_in_the_pool_show(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    more = {"attention": "pool", "budget": {"share": 0.5}, "audit": 1.0}
    with engine(model, log, where=f"{tmp_path}/", capacity="32MiB", **more) as ask:
        text = prompt(2, 10 * BLOCK + 7)
        for _ in range(2):
            ask(do="generate", prompts=[text], max_tokens=8, more={})
        found = metrics(ask, lambda found: found["vllm:cxlkv_audited_selects"] >= 2 * 7 * LAYERS)
        selects = found["vllm:cxlkv_audited_selects"]
        assert 0.9 * selects < found["vllm:cxlkv_audited_recall"] <= selects
        assert 0 < found["vllm:cxlkv_audited_mass"] <= selects
        assert found["vllm:cxlkv_scored_bytes"] > 0
        assert found["vllm:cxlkv_hit_tokens"] == 10 * BLOCK
        assert found["vllm:cxlkv_loaded_tokens"] == 0  # adopted where it lies, not copied
        assert sum(found[name] for name in found if "failures" in name) == 0
    assert re.search(
        r"recall [01]\.\d\d, mass [01]\.\d\d \(\d+ audits\), 0 failures", log.read_text()
    )
