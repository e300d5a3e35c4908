"""Runs of vLLM with attention in the pool beside stock runs; each prints what it saw, as JSON.

python -m tests.vllm.pool_attention_runs RUN FOLDER     the run "models" comes first in a folder
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from .engines import BLOCK_TOKENS, ENVIRONMENT, ON_DEVICE, VOCABULARY_SIZE, settings_of
from .forked import Tokens
from .tiny_models import SHAPE, saved, tiny

os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="WARNING")

Found = dict[str, object]


def models(folder: Path) -> Found:
    """One with all layers alike, and one with layers that see a window, and capped logits."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    tiny("Llama", folder / "llama")
    capped: Found = {"num_hidden_layers": 4, "sliding_window": 64, "attn_logit_softcapping": 5.0}
    torch.manual_seed(0)
    windowed = Gemma2ForCausalLM(Gemma2Config.from_dict({**SHAPE, **capped}))
    saved(windowed, folder / "gemma2")
    return {"told": {}}


class Run:
    """An engine in this process; extra: the connector's settings, None: stock. on_device: of all
    runs with a connector, which are as on a GPU."""

    on_device: ClassVar[Found | None] = None

    def __init__(
        self,
        folder: Path,
        extra: Found | None = None,
        model: str = "llama",
        settings: Found | None = None,
    ):
        from vllm import LLM

        if extra is not None:
            pool = {"attention": "pool", "where": str(folder / "a.pool"), "capacity": "64MiB"}
            extra = {**pool, **(self.on_device or {}), **extra}
        own: Found = {"model": str(folder / model), "max_num_seqs": 8, "disable_log_stats": False}
        if extra is not None and self.on_device is not None:
            own.update(ON_DEVICE)
        given = settings_of(extra, **{**own, **(settings or {})})
        self.llm = LLM(**given)
        core = self.llm.llm_engine.engine_core.engine_core
        self.blocks = core.scheduler.kv_cache_manager.block_pool
        self.blocks_used = 0
        take = self.blocks.get_new_blocks

        def counted(count: int) -> object:
            taken = take(count)
            used = self.blocks.num_gpu_blocks - 1 - self.blocks.get_num_free_blocks()
            self.blocks_used = max(self.blocks_used, used)
            return taken

        self.blocks.get_new_blocks = counted

    def generate(
        self, prompts: list[Tokens], max_tokens: int = 24, options: object = ()
    ) -> tuple[list[Tokens], list[int]]:
        """Tokens, and how many of each prompt were found. options: the request's own."""
        from vllm import SamplingParams, TokensPrompt

        own = {"kv_transfer_params": {"cxlkv": options}} if options != () else None
        params = SamplingParams(
            detokenize=False,
            ignore_eos=True,
            temperature=0,
            max_tokens=max_tokens,
            extra_args=own,
        )
        given = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        done = self.llm.generate(given, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done], [
            one.num_cached_tokens for one in done
        ]

    def counted(self, name: str) -> int:
        return sum(one.value for one in self.llm.get_metrics() if one.name == f"vllm:{name}")

    def state(self) -> Found:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        attention = get_kv_transfer_group().worker
        return {
            "failures": dict(attention.requests.failures()),
            "clean": attention.pool.admin.check(deep=True)["clean"],
            "held": attention.pool.stats()["pages_held"],
        }

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[Tokens]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(0, VOCABULARY_SIZE, n).tolist() for n in lengths]


def same(folder: Path, model: str, **settings: object) -> Found:
    """Chunked prefill and decode of several requests, and again from the pool."""
    texts = prompts((300, 40, 700, 17))
    chunks: Found = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, **settings}
    stock = Run(folder, None, model, chunks)
    wanted, _ = stock.generate(texts)
    stock.end()
    run = Run(folder, {}, model, chunks)
    first, none = run.generate(texts)
    second, cached = run.generate(texts)
    return {"equal": [first == wanted, second == wanted], "cached": [none, cached], **run.state()}


def encoded(folder: Path) -> Found:
    """Codes in the pool under an engine that computes in full: every step attends to what is kept,
    so that tokens are the same from the pool, and of each request for itself."""
    from cxlkv import CXLPool

    texts = prompts((300, 40, 700, 17))
    chunks: Found = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    run = Run(folder, {"encoding": "int8,int4"}, settings=chunks)
    first, none = run.generate(texts)
    second, cached = run.generate(texts)
    alone = [run.generate([text])[0][0] for text in texts]
    with CXLPool.open(folder / "a.pool", threads=1) as kept:
        told = {"encoding": kept.layout.encoding}
    found: Found = {"equal": [second == first, alone == first], "cached": [none, cached]}
    return {**found, **run.state(), "kept": told}


def fp8(folder: Path) -> Found:
    """An engine that attends to fp8: the pool keeps the same numbers, so the tokens are the same,
    and others than those of an engine in full."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found = same(folder, "llama", kv_cache_dtype="fp8")
    return {**found, "kept": {"encoding": get_kv_transfer_group().worker.pool.layout.encoding}}


def fp8_bytes(folder: Path) -> Found:
    """What vLLM writes to a block for numbers, and what a pool keeps of them, byte for byte: all
    bfloat16, all float16, random float32 of all sizes."""
    del folder
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from cxlkv import CXLPool, KVLayout

    dim, tokens, chance = 64, 1 << 10, np.random.default_rng(1)
    halves = torch.from_numpy(np.arange(tokens * dim, dtype=np.uint16))
    words = chance.integers(0, 1 << 32, tokens * dim, np.uint32)
    near = (words & 0x807FFFFF) | (0x70 + words % 0x1B) << 23  # 2^-15 to 2^11
    words = np.where(chance.random(len(words)) < 0.5, near, words).astype(np.uint32)
    equal = []
    for name, numbers in (
        ("bfloat16", halves.view(torch.bfloat16)),
        ("float16", halves.view(torch.float16)),
        ("float32", torch.from_numpy(words.view(np.float32))),
    ):
        rows = numbers.reshape(tokens, 1, dim)
        # Of float32 too: "vec" keeps values row after row.
        isa = _get_attn_isa(torch.float32, BLOCK_TOKENS, dim, "fp8")
        blocks = torch.zeros((2, tokens // BLOCK_TOKENS, 1, BLOCK_TOKENS, dim), dtype=torch.uint8)
        slots = torch.arange(tokens, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(
            rows, rows, blocks[0], blocks[1], slots, isa, kv_cache_dtype="fp8"
        )
        layout = KVLayout(layers=1, kv_heads=1, head_dim=dim, dtype=name, page_tokens=32)
        layout = layout.encoded("fp8_e4m3")
        with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
            sequence = pool.sequence()
            sequence.append(0, rows, rows)
            kept = torch.zeros_like(blocks)
            places = np.arange(tokens // BLOCK_TOKENS, dtype=np.int32)
            ends = [0, len(places)]
            pool.batch([sequence]).fetch_blocks(0, kept[0], kept[1], places, ends, [0])
            equal.append(bool((kept[1] == blocks[1]).all()))
    return {"equal": equal, "clean": True}


def as_on_a_gpu(folder: Path, run: Callable[[Path], Found], **own: object) -> Found:
    """A run with the worker of gpu_worker.py. own: settings."""
    Run.on_device = own
    found = run(folder)
    from .gpu_worker import Steps

    return {**found, "steps": Steps.made}


def chosen_on_cuda(folder: Path) -> Found:
    """What vLLM's CUDA platform makes of CUSTOM, by its own code, but for its library in C, which
    is not in a build for CPU."""
    del folder
    from types import ModuleType, SimpleNamespace
    from unittest.mock import patch

    import torch
    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from cxlkv.adapters.vllm import attention_backend, plugin

    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import CudaPlatformBase

    class Cuda(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    platforms._current_platform = Cuda()
    plugin.register()
    asked = AttentionSelectorConfig(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        has_sliding_window=True,
        use_kv_connector=True,
    )
    found: Found = {}
    for form in ("pool", "engine"):
        transfer = SimpleNamespace(
            kv_connector="CXLConnector", kv_connector_extra_config={"attention": form}
        )
        config = SimpleNamespace(kv_transfer_config=transfer)
        with patch.object(
            attention_backend, "get_current_vllm_config_or_none", lambda of=config: of
        ):
            try:
                found[form] = Cuda.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked)
            except ValueError as error:
                found[form] = str(error)
    return {"told": found}


def preempted(folder: Path) -> Found:
    """More than the pool holds at once."""
    texts = prompts((200,) * 6)
    stock = Run(folder)
    wanted, _ = stock.generate(texts, 150)
    stock.end()
    run = Run(folder, {"capacity": "3MiB"}, settings={"max_model_len": 512})
    found, _ = run.generate(texts, 150)
    return {"equal": found == wanted, "preemptions": run.counted("num_preemptions"), **run.state()}


def space(folder: Path) -> Found:
    """The engine's own blocks have room for N tokens: one request of 4 N, and four of N at once."""
    tokens = 256
    one, four = prompts((4 * tokens - 20,)), prompts((tokens - 20,) * 4, 2)
    stock = Run(folder)
    wanted = stock.generate(one, 20)[0], stock.generate(four, 20)[0]
    stock.end()
    run = Run(folder, {}, settings={"num_gpu_blocks_override": tokens // BLOCK_TOKENS + 1})
    long, _ = run.generate(one, 20)
    of_one, run.blocks_used = run.blocks_used, 0
    several, _ = run.generate(four, 20)
    return {
        "equal": [long == wanted[0], several == wanted[1]],
        "blocks": run.blocks.num_gpu_blocks - 1,
        "used": [of_one, run.blocks_used],
        **run.state(),
    }


def budgets(folder: Path) -> Found:
    """10 % of the pages; all of them, chosen; and a request that wants no choice."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    texts = prompts((900, 900))
    stock = Run(folder)
    wanted, _ = stock.generate(texts, 40)
    stock.end()
    run = Run(folder, {"budget": {"share": 0.1}, "audit": 0.25})
    out, _ = run.generate(texts, 40, {"budget": None})
    chosen, _ = run.generate(texts, 40, {"budget": {"share": 1.0}})
    run.generate(texts, 40)
    numbers = get_kv_transfer_group().worker.pool.admin.overview().totals
    return {
        "equal": [out == wanted, chosen == wanted],
        "audits": numbers["audited_selects"],
        "recall": numbers.recall,
        "mass": numbers.mass,
        **run.state(),
    }


def speculated(folder: Path) -> Found:
    own, tail = prompts((30, 100), 3)
    texts = [own * 8, tail + own * 2 + own[:10]]
    stock = Run(folder)
    wanted, _ = stock.generate(texts, 60)
    stock.end()
    words: Found = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    words["prompt_lookup_min"] = 1
    run = Run(folder, {}, settings={"speculative_config": words})
    first, _ = run.generate(texts, 60)
    second, cached = run.generate(texts, 60)
    drafts = [run.counted(f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")]
    equal = [first == wanted, second == wanted]
    return {"equal": equal, "cached": cached, "drafts": drafts, **run.state()}


def stored(folder: Path) -> Found:
    """What `damaged` finds in the pool."""
    run = Run(folder, {})
    run.generate(prompts((300, 200)))
    return run.state()


def damaged(folder: Path) -> Found:
    """Another process: one page of a prompt's prefix has other bytes than were written."""
    texts = prompts((300, 200))
    stock = Run(folder)
    wanted, _ = stock.generate(texts)
    stock.end()
    run = Run(folder, {})
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    pool = get_kv_transfer_group().worker.pool
    page = pool.hotness.published()[0]["page"][7]
    place = int(pool.pages.places(np.array([page], np.uint32), 1).keys[0])
    with open(pool.path, "r+b") as file:
        file.seek(place + 9)
        file.write(b"\x55\x55")
    first, cached = run.generate(texts)
    second, again = run.generate(texts)
    equal = [first == wanted, second == wanted]
    return {"equal": equal, "cached": [cached, again], **run.state()}


def refused(folder: Path) -> Found:
    """What the engine says when it cannot start."""
    told = {}
    cases: dict[str, tuple[Found, Found]] = {
        "small": ({"capacity": "3MiB"}, {}),
        "fp8_e5m2": ({}, {"kv_cache_dtype": "fp8_e5m2"}),
        "engine": ({"attention": "engine"}, {"kv_cache_dtype": "fp8_e5m2"}),
        "both": ({"encoding": "int8"}, {"kv_cache_dtype": "fp8"}),
    }
    for name, (extra, settings) in cases.items():
        try:
            Run(folder, extra, settings=settings)
        except Exception as error:
            told[name] = str(error)
    return {"told": told}


RUNS = {
    "models": models,
    "same": lambda folder: same(folder, "llama"),
    "windows": lambda folder: same(folder, "gemma2"),
    "encoded": encoded,
    "fp8": fp8,
    "fp8_bytes": fp8_bytes,
    "gpu": lambda folder: as_on_a_gpu(folder, lambda of: same(of, "llama")),
    "gpu_windows": lambda folder: as_on_a_gpu(folder, lambda of: same(of, "gemma2")),
    "gpu_index": lambda folder: as_on_a_gpu(
        folder, lambda of: same(of, "llama"), index="device", budget={"share": 1.0}
    ),
    "gpu_encoded": lambda folder: as_on_a_gpu(folder, encoded),
    "gpu_speculated": lambda folder: as_on_a_gpu(folder, speculated),
    "gpu_damaged": lambda folder: as_on_a_gpu(folder, damaged),
    "chosen_on_cuda": chosen_on_cuda,
    "gpu_preempted": lambda folder: as_on_a_gpu(folder, preempted),
    "gpu_space": lambda folder: as_on_a_gpu(folder, space),
    "gpu_budgets": lambda folder: as_on_a_gpu(folder, budgets, index="host"),
    "preempted": preempted,
    "space": space,
    "budgets": budgets,
    "speculated": speculated,
    "stored": stored,
    "damaged": damaged,
    "refused": refused,
}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr
    print(json.dumps(RUNS[sys.argv[1]](Path(sys.argv[2]))), file=answers, flush=True)
