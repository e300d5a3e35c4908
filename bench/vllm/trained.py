"""vLLM with and without us on a trained model: several requests at once, each with a text of its
own. `bench vllm --model smollm2` goes by budget and method, `bench vllm-encodings` by encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from rich.console import Console

from cxlkv.bench.lab.texts import beginnings
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.vllm import running, tiers
from cxlkv.bench.vllm.running import CACHED, POOL_ATTENTION, Answer, Ways
from cxlkv.demo import smollm2
from cxlkv.errors import BadArgumentError

MODEL = "smollm2"
DISK = "/var/tmp"  # of the cold file


@dataclass(frozen=True)
class Size(running.Size):
    """decode: (tokens of each prompt, requests at once), every text as long as that."""

    decode: tuple[tuple[int, int], ...] = ((7000, 4), (2000, 16))
    tiered_tokens: int = 2000
    engine_space_gib: int = 2
    pool_bytes: int = 2 << 30


class Run(running.Run):
    """Its texts are given; in bf16 there are ties, which are counted."""

    judge = CACHED

    def decoded(
        self, what: str, prompts: Sequence[list[int]], answers: Mapping[str, Answer | None]
    ) -> None:
        super().decoded(what, prompts, answers)
        right = answers[CACHED]
        for way, answer in answers.items():
            if answer is None or right is None or self.ways[way][0] not in self.ring.talks:
                continue
            self.add(f"{what}_{way}".replace("decode", "first", 1), "s", answer.first_s)
            if way not in (CACHED, *self.chosen):  # what ties alone make of it
                self.add(f"{what}_{way}_same_tokens", "share", running.same_tokens(answer, right))


def prompts_of(folder: Path, size: running.Size) -> list[list[list[int]]]:
    """Texts for each case. They begin a token later than in the case before, so that none has a
    prefix of an earlier one."""
    return [
        beginnings(folder, tokens, requests, first=case)
        for case, (tokens, requests) in enumerate(size.decode)
    ]


# ---- by budget and method ----

TWO_STAGE, OFFLOADED, LMCACHE = "two_stage", "offloaded", "lmcache"
"""Ours, which chooses pages by sketches; vLLM with its own offloading, and with LMCache."""


class ByBudget(Run):
    ways: ClassVar[Ways] = {
        CACHED: (CACHED, None),
        POOL_ATTENTION: (POOL_ATTENTION, None),
        "pool_attention_100": (POOL_ATTENTION, {"budget": {"share": 1.0}}),
        "pool_attention_15": (POOL_ATTENTION, {"budget": True}),
        "pool_attention_5_exact": (POOL_ATTENTION, {"budget": {"share": 0.05}}),
        "pool_attention_5_two_stage": (TWO_STAGE, {"budget": {"share": 0.05}}),
        "pool_attention_5_kept": (TWO_STAGE, {"budget": {"share": 0.05, "refresh": 32}}),
        OFFLOADED: (OFFLOADED, None),
        LMCACHE: (LMCACHE, None),
    }
    chosen: ClassVar[Sequence[str]] = (
        "pool_attention_15",
        "pool_attention_5_exact",
        "pool_attention_5_two_stage",
        "pool_attention_5_kept",
    )
    sharing: ClassVar[Sequence[str]] = (TWO_STAGE,)
    must_be_right: ClassVar[Sequence[str]] = (CACHED, POOL_ATTENTION, TWO_STAGE)
    names: ClassVar[Sequence[str]] = (*must_be_right, OFFLOADED, LMCACHE)
    full: ClassVar[Size] = Size()
    quick: ClassVar[Size] = Size(
        decode=((500, 2), (100, 4)),
        tiered_tokens=500,
        decode_tokens=9,
        decode_rounds=2,
        pool_bytes=256 << 20,
        engine_space_gib=1,
    )

    @staticmethod
    def settings_of(name: str, place: Path, folder: Path, size: running.Size) -> dict[str, object]:
        """What vllm.LLM takes."""
        own = name in (CACHED, OFFLOADED)
        settings = running.of_trained(folder, size, enable_prefix_caching=own)
        if name in (POOL_ATTENTION, TWO_STAGE):
            method = "exact" if name == POOL_ATTENTION else name
            settings["kv_transfer_config"] = running.connector(
                place / "smollm2.pool", size, attention="pool", method=method
            )
        elif name == OFFLOADED:
            settings["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": size.pool_bytes},
            }
        elif name == LMCACHE:
            settings["kv_transfer_config"] = {
                "kv_connector": "LMCacheConnectorV1",
                "kv_role": "kv_both",
            }
        return settings


def command_of_budgets(options: Options, say: Say, python: str) -> Shown:
    """python: that of the engines. Raises BadArgumentError for another model, UnsupportedError
    where it is not installed."""
    if str(options.model) != MODEL:
        raise BadArgumentError(f"--model: {MODEL} is what goes with vllm, not {options.model}")
    result, size = SideBySide("vllm"), ByBudget.quick if options.quick else ByBudget.full
    folder = prepared(say)
    with (
        running.shared_folder(2 * size.pool_bytes, "a pool and what others keep need") as place,
        TemporaryDirectory(dir=DISK, prefix="cxlkv-bench-vllm-") as files,
    ):
        env = {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(size.engine_space_gib),
        }
        side_by_side(ByBudget(result, size, say), python, place, folder, env)
        tiers.run(result, python, place, Path(files), folder, size, size.tiered_tokens, say)
    return Shown(result, lines=result.who())


# ---- by encoding ----

CACHED_FP8, POOL_ATTENTION_FP8 = "cached_fp8", "pool_attention_fp8"
"""Engines with --kv-cache-dtype fp8: vLLM's own attention, and ours."""


class ByEncoding(Run):
    """A pool in bf16 is held against stock, one in fp8 against stock in fp8."""

    names: ClassVar[Sequence[str]] = (
        *(CACHED, CACHED_FP8, POOL_ATTENTION, POOL_ATTENTION_FP8),
        *("pool_attention_int8", "pool_attention_int4"),
    )
    ways: ClassVar[Ways] = {name: (name, None) for name in names}
    chosen: ClassVar[Sequence[str]] = (
        *(CACHED_FP8, POOL_ATTENTION_FP8),
        *("pool_attention_int8", "pool_attention_int4"),
    )
    must_be_right: ClassVar[Sequence[str]] = names
    full: ClassVar[Size] = Size(
        decode=((2000, 4),), decode_tokens=33, pool_bytes=384 << 20, engine_space_gib=1
    )
    quick: ClassVar[Size] = Size(
        decode=((100, 2),),
        decode_tokens=9,
        decode_rounds=2,
        pool_bytes=128 << 20,
        engine_space_gib=1,
    )

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

    @staticmethod
    def settings_of(name: str, place: Path, folder: Path, size: running.Size) -> dict[str, object]:
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
            settings["kv_transfer_config"] = running.connector(
                place / f"{name}.pool", size, attention="pool", method="exact", **encoding
            )
        return settings


def command(options: Options, say: Say) -> Shown:
    """`bench vllm-encodings`. Raises UnsupportedError where there is no environment with vLLM, or
    not the model."""
    python = running.python_of_engines()
    size = ByEncoding.quick if options.quick else ByEncoding.full
    result, folder = SideBySide("vllm-encodings"), prepared(say)
    with running.shared_folder(5 * size.pool_bytes, "the pools need") as place:
        side_by_side(ByEncoding(result, size, say), python, place, folder)
    return Shown(result, lines=result.who())


# ---- of both ----


def prepared(say: Say) -> Path:
    """The model's folder. Raises UnsupportedError where it is not installed."""
    say("preparing the model and its texts")
    return smollm2.prepare(Console(quiet=True))


def side_by_side(
    one: ByBudget | ByEncoding,
    python: str,
    place: Path,
    folder: Path,
    more: Mapping[str, str] | None = None,
) -> None:
    """more: what engines see of the environment beside what all see."""
    env = {**running.environment(place, one.size), **(more or {})}
    programs = [
        running.engine(name, python, one.settings_of(name, place, folder, one.size), env)
        for name in one.names
    ]
    running.run_cases(one, programs, place, prompts_of(folder, one.size))
