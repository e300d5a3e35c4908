"""vLLM with a cold file below a small pool: time to the first token from the file, from the pool,
and computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from cxlkv.bench.lab.texts import beginnings
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.vllm import running
from cxlkv.bench.vllm.running import FIRST_TOKENS, Answer

NAME = "tiers"
BYTES_A_TOKEN = 30 * 3 * 64 * 2 * 2  # of K and V, all layers, in bf16
OVER = 4  # times the pool: what all texts have
MOST = 0.3  # of computing, to the first token of a hit in the file


class Run(running.Run):
    """One engine, whose pool holds a quarter of the texts: they go round, the longest unread one
    makes room, so that each is in the file when it comes again."""

    must_be_right: ClassVar[Sequence[str]] = (NAME,)
    judge = NAME

    def ask_for(self, name: str, prompt: list[int], cached: int) -> Answer | None:
        answer = self.ask(NAME, [prompt], FIRST_TOKENS, cached=cached)
        if answer is not None:
            self.add(name, "s", answer.first_s)
        return answer

    def rounds(self, prompts: Sequence[list[int]], files: Path) -> None:
        there = self.there(prompts[0])
        right: list[Answer | None] = []
        for place, prompt in enumerate(prompts):
            self.progress(f"tiers: computing text {place + 1} of {len(prompts)}")
            right.append(self.ask_for("first_computed", prompt, 0))
        for turn in range(self.size.decode_rounds):
            self.progress(f"tiers: from the file and from the pool, round {turn + 1}")
            for prompt, computed in zip(prompts, right, strict=True):
                forget_pages(files)
                for name in ("first_from_file", "first_from_pool"):
                    answer = self.ask_for(name, prompt, there)
                    if answer is not None and computed is not None:
                        self.must_equal(NAME, [prompt], answer, computed, name)


def forget_pages(files: Path) -> None:
    """What the kernel has of the files in memory, so that they are read from the disk."""
    for path in files.glob("*.cold"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settings_of(
    place: Path, files: Path, folder: Path, size: running.Size, texts: int, tokens: int
) -> dict[str, object]:
    """What vllm.LLM takes."""
    small = replace(size, pool_bytes=texts * tokens * BYTES_A_TOKEN // OVER)
    own = {
        "cold": f"{files}/",
        "cold_capacity": 2 * texts * tokens * BYTES_A_TOKEN,
        "policy": "lru",
    }
    pool = running.connector(place / "tiers.pool", small, **own)
    return running.of_trained(folder, size, kv_transfer_config=pool)


def run(
    result: SideBySide,
    python: str,
    place: Path,
    files: Path,
    folder: Path,
    size: running.Size,
    tokens: int,
    progress: Callable[[str], None],
) -> None:
    """Adds its figures to the result's. files: a folder on a disk."""
    prompts = beginnings(folder, tokens, 16, first=len(size.decode))
    given = settings_of(place, files, folder, size, len(prompts), tokens)
    program = running.engine(NAME, python, given, running.environment(place, size))
    one = Run(result, replace(size, bounds={}), progress)
    with one.running([program], place):
        one.rounds(prompts, files)
    one.finish()
    found = result.metrics
    if "first_from_file" in found:
        for name in ("first_from_file", "first_from_pool"):
            ratio = found[name].median / found["first_computed"].median
            result.ratios[f"{name}_to_computed"] = ratio
        kept = "kept" if result.ratios["first_from_file_to_computed"] <= MOST else "NOT kept"
        result.notes.append(
            f"{len(prompts)} texts of {tokens} tokens, a pool for a quarter of them, the file read "
            f"from its disk: first_from_file_to_computed: at most {MOST:g} wanted: {kept}"
        )
