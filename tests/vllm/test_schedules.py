"""vLLM's schedulers, the asynchronous one too, with requests, aborts and preemptions at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from .engines import ENVIRONMENT

FULL, WINDOWS = [0, 0], [0, 20, 20]
HAPPENS = ("reset", "loaded tokens", "rows compared", "pages", "served", "aborted")
FLIES = ("aborted in flight", "ended in flight")


class Ask(Protocol):
    def __call__(self, seed: int, **case: object) -> dict[str, int]: ...


@pytest.fixture(scope="module")
def program(vllm_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("schedules"))
    yield made
    made.end()


class Program:
    """schedules.py, in a process of its own, since importing vLLM changes this one."""

    def __init__(self, folder: Path):
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.schedules"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, **case: object) -> dict[str, object]:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text()[-3000:]
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def end(self) -> None:
        self.process.communicate(timeout=60)
        self.log.close()


@pytest.fixture
def ask(program: Program, model: Path, pools_folder: Path) -> Ask:
    """Runs a case; what happened in it, by name."""

    def run(seed: int, **case: object) -> dict[str, int]:
        print(f"seed {seed}")
        folder = str(pools_folder / str(seed))
        said = program.ask(folder=folder, model=str(model), seed=seed, requests=40, **case)
        assert "error" not in said, said["error"]
        counts = said["counts"]
        assert isinstance(counts, dict)
        return counts

    return run


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("kinds", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_blocks_pages_and_tokens_are_right(
    ask: Ask, asynchronous: bool, load: str, kinds: list[int], damage: bool, shards: int | None
) -> None:
    """All that a step sees is compared with what it should be, what is in the pools in the end, and
    the tokens: also where pages of one were damaged, whose requests are computed again."""
    # Where a load has failed, vLLM 0.32 may wait for ever for blocks that a request behind holds.
    blocks = (44, 76) if not damage else (160, 400)
    case = {"kinds": kinds, "blocks": blocks[kinds != FULL], "damage": damage}
    found = Counter[str]()
    for seed in range(3):
        settings = {"load": load, "shards": shards}
        found.update(ask(seed, asynchronous=asynchronous, settings=settings, **case))
    assert found["pools"] == 3 * (shards or 1)
    assert found["AsyncScheduler" if asynchronous else "Scheduler"] == 3
    assert found["groups"] == (3 if kinds == FULL else 9)
    wanted = HAPPENS + FLIES * asynchronous + (("damaged",) if damage else ("preempted",))
    assert all(found[name] for name in wanted), found
