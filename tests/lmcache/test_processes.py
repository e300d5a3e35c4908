"""Processes of LMCache that share a pool: ranks that start at once, and start again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("rank.py")


def test_ranks_that_start_at_once_make_one_pool(where: Path) -> None:
    """And their next ones find what they stored: the hashes of chunks are the same there."""
    assert run(where) == ["0 96 True 1"] * 2
    assert run(where) == ["96 96 True 1"] * 2


def begun(where: Path, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(where), str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(where: Path) -> list[str]:
    started = [begun(where, rank) for rank in range(2)]
    ended = [one.communicate(timeout=250) for one in started]
    assert [one.returncode for one in started] == [0, 0], ended
    return [said.strip() for said, _ in ended]
