"""vLLM with and without us on a trained model: several requests at once, each with a text of its
own."""

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
TWO_STAGE, OFFLOADED, LMCACHE = "two_stage", "offloaded", "lmcache"
"""Ours, which chooses pages by sketches; vLLM with its own offloading, and with LMCache."""
OURS = (CACHED, POOL_ATTENTION, TWO_STAGE)
"""Who must be right. Of the others it is said why they are missing."""
NAMES = (*OURS, OFFLOADED, LMCACHE)

WAYS: Ways = {
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
CHOSEN = (
    "pool_attention_15",
    "pool_attention_5_exact",
    "pool_attention_5_two_stage",
    "pool_attention_5_kept",
)
DISK = "/var/tmp"  # of the cold file


@dataclass(frozen=True)
class Size(running.Size):
    """decode: (tokens of each prompt, requests at once), every text as long as that."""

    decode: tuple[tuple[int, int], ...] = ((7000, 4), (2000, 16))
    tiered_tokens: int = 2000
    engine_space_gib: int = 2
    pool_bytes: int = 2 << 30


QUICK = Size(
    decode=((500, 2), (100, 4)),
    tiered_tokens=500,
    decode_tokens=9,
    decode_rounds=2,
    pool_bytes=256 << 20,
    engine_space_gib=1,
)


class Run(running.Run):
    """Its texts are given; in bf16 there are ties, which are counted."""

    ways: ClassVar[Ways] = WAYS
    chosen: ClassVar[Sequence[str]] = CHOSEN
    sharing: ClassVar[Sequence[str]] = (TWO_STAGE,)
    must_be_right: ClassVar[Sequence[str]] = OURS
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
    """Of each case. Texts begin a token later than in the case before, so that nobody has a prefix
    of an earlier one."""
    return [
        beginnings(folder, tokens, requests, first=case)
        for case, (tokens, requests) in enumerate(size.decode)
    ]


def settings_of(name: str, place: Path, folder: Path, size: Size) -> dict[str, object]:
    """What vllm.LLM takes."""
    settings = running.of_trained(folder, size, enable_prefix_caching=name in (CACHED, OFFLOADED))
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


def command(options: Options, say: Say, python: str) -> Shown:
    """python: that of the engines. Raises BadArgumentError for another model, UnsupportedError
    where it is not installed."""
    if str(options.model) != MODEL:
        raise BadArgumentError(f"--model: {MODEL} is what goes with vllm, not {options.model}")
    result, size = SideBySide("vllm"), QUICK if options.quick else Size()
    say("preparing the model and its texts")
    folder = smollm2.prepare(Console(quiet=True))
    cases = prompts_of(folder, size)
    with (
        running.shared_folder(2 * size.pool_bytes, "a pool and what others keep need") as place,
        TemporaryDirectory(dir=DISK, prefix="cxlkv-bench-vllm-") as files,
    ):
        env = {
            **running.environment(place, size),
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(size.engine_space_gib),
        }
        programs = [
            running.engine(name, python, settings_of(name, place, folder, size), env)
            for name in NAMES
        ]
        running.run_cases(Run(result, size, say), programs, place, cases)
        tiers.run(result, python, place, Path(files), folder, size, size.tiered_tokens, say)
    return Shown(result, lines=result.who())
