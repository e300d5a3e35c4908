"""Processes of LMCache that share a pool: ranks that start at once, start again, and are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .conftest import MakeEngine
from .engines import CHUNK, text

PROGRAM = Path(__file__).with_name("rank.py")


def test_ranks_that_start_at_once_make_one_pool(where: Path) -> None:
    """And their next ones find what they stored: the hashes of chunks are the same there."""
    assert run(where) == ["0 96 True 1"] * 2
    assert run(where) == ["96 96 True 1"] * 2


def begun(where: Path, rank: int, *how: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(where), str(rank), *how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(where: Path) -> list[str]:
    started = [begun(where, rank) for rank in range(2)]
    ended = [one.communicate(timeout=250) for one in started]
    assert [one.returncode for one in started] == [0, 0], ended
    return [said.strip() for said, _ in ended]


def test_killed_while_it_stores(make_engine: MakeEngine, where: Path) -> None:
    """Wherever it was: what it had stored is there and right, and nothing of the pool is lost."""
    with begun(where, 1, "on") as killed:
        assert killed.stdout is not None
        said = [killed.stdout.readline() for _ in range(12)]
        killed.kill()
        rest = killed.stdout.read().split()
        assert killed.stderr is not None
        killed.stderr.read()
    count = len(said) + len(rest)
    assert [int(line) for line in said] == list(range(12))
    engine = make_engine(worker=1, workers=2)
    for seed in range(count - 8, count):
        was = engine.fill(seed)
        engine.clear()
        assert engine.retrieve(text(seed, 6 * CHUNK)) == 6 * CHUNK
        engine.check(was, text(seed, 6 * CHUNK), 6 * CHUNK)
    engine.retrieve(text(count, 6 * CHUNK))  # it may have begun with that one
    assert engine.storage.counting.failures.total() == 0
