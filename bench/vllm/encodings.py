"""`cxlkv bench vllm-encodings`: how fast vLLM decodes a trained model in each encoding: stock in
bf16 and fp8, and pools in bf16, fp8, int8 and int4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.vllm import running, smollm2
from cxlkv.bench.vllm.running import CACHED, POOL_ATTENTION, Answer, Ways
from cxlkv.demo import smollm2 as model

CACHED_FP8, POOL_ATTENTION_FP8 = "cached_fp8", "pool_attention_fp8"
"""Engines with --kv-cache-dtype fp8: vLLM's own attention, and ours."""
NAMES = (
    CACHED,
    CACHED_FP8,
    POOL_ATTENTION,
    POOL_ATTENTION_FP8,
    "pool_attention_int8",
    "pool_attention_int4",
)
CHOSEN = (CACHED_FP8, POOL_ATTENTION_FP8, "pool_attention_int8", "pool_attention_int4")
"""Whose tokens may be others than stock's."""


@dataclass(frozen=True)
class Size(running.Size):
    """decode: (tokens of each prompt, requests at once), every text as long as that."""

    decode: tuple[tuple[int, int], ...] = ((2000, 4),)
    decode_tokens: int = 33
    pool_bytes: int = 384 << 20


QUICK = Size(decode=((100, 2),), decode_tokens=9, decode_rounds=2, pool_bytes=128 << 20)


class Run(running.Run):
    """Its texts are given; in bf16 there are ties, which are counted: of a pool in bf16 beside
    stock, and of one in fp8 beside stock in fp8."""

    ways: ClassVar[Ways] = {name: (name, None) for name in NAMES}
    chosen: ClassVar[Sequence[str]] = CHOSEN
    must_be_right: ClassVar[Sequence[str]] = NAMES
    judge = CACHED

    def decoded(
        self, what: str, prompts: Sequence[list[int]], answers: Mapping[str, Answer | None]
    ) -> None:
        super().decoded(what, prompts, answers)
        ours, stock = answers[POOL_ATTENTION_FP8], answers[CACHED_FP8]
        if ours is not None and stock is not None:
            self.judge = CACHED_FP8
            self.must_equal(
                POOL_ATTENTION_FP8, prompts, ours, stock, f"{what}, {POOL_ATTENTION_FP8}"
            )
            self.judge = CACHED
            same = running.same_tokens(ours, stock)
            self.add(f"{what}_{POOL_ATTENTION_FP8}_tokens_of_{CACHED_FP8}", "share", same)
        ours, stock = answers[POOL_ATTENTION], answers[CACHED]
        if ours is not None and stock is not None:
            self.add(
                f"{what}_{POOL_ATTENTION}_same_tokens", "share", running.same_tokens(ours, stock)
            )


def settings_of(name: str, place: Path, folder: Path, size: Size) -> dict[str, object]:
    """What vllm.LLM takes."""
    settings = running.of_trained(
        folder,
        size,
        enable_prefix_caching=not name.startswith(POOL_ATTENTION),
        kv_cache_dtype="fp8" if name.endswith("fp8") else "auto",
    )
    if name.startswith(POOL_ATTENTION):
        kept = name.removeprefix(POOL_ATTENTION).lstrip("_")
        encoding = {"encoding": kept} if kept.startswith("int") else {}
        pool = place / f"{name}.pool"
        settings["kv_transfer_config"] = running.connector(
            pool, size, attention="pool", method="exact", **encoding
        )
    return settings


def command(options: Options, say: Say) -> Shown:
    """Raises UnsupportedError where there is no environment with vLLM, or not the model."""
    python = running.python_of_engines()
    result, size = SideBySide("vllm-encodings"), QUICK if options.quick else Size()
    say("preparing the model and its texts")
    folder = model.prepare(Console(quiet=True))
    texts = smollm2.prompts_of(folder, size)
    with running.shared_folder(5 * size.pool_bytes, "the pools need") as place:
        env = running.environment(place, size)
        programs = [
            running.engine(name, python, settings_of(name, place, folder, size), env)
            for name in NAMES
        ]
        running.run_cases(Run(result, size, say), programs, place, texts)
    return Shown(result, lines=result.who())
