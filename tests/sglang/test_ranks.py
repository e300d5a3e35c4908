"""Tensor-parallel ranks, a process each, that agree on every hit over gloo, as SGLang has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import imports  # noqa: F401  (it says why these tests are skipped where SGLang is not)

PROGRAM = Path(__file__).with_name("rank.py")
RANKS = 2


def run(folder: str, kind: str) -> list[dict[str, object]]:
    """What each rank says."""
    words = [str(RANKS), f"{folder}meeting"]
    commands = [
        [sys.executable, str(PROGRAM), folder, kind, str(rank), *words] for rank in range(RANKS)
    ]
    ranks = [
        subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in commands
    ]
    ended = [rank.communicate(timeout=500) for rank in ranks]
    for rank, (_, error) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, error[-3000:]
    return [json.loads(said.splitlines()[-1]) for said, _ in ended]


@pytest.mark.timeout(600)  # each process imports SGLang
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_share_a_pool_and_agree_on_each_hit(folder: str, kind: str) -> None:
    ranks = run(folder, kind)
    assert len(list(Path(folder).glob("*.pool"))) == 1
    assert ranks[0]["saved"] == 6
    assert ranks[1]["saved"] == (6 if kind == "mha" else 0), "of MLA the first rank stores"
    for said in ranks:
        assert said["published"] == (12 if kind == "mha" else 6)
        assert (said["fetched"], said["fetched right"]) == (6, True)
        assert (said["after"], said["after right"]) == (4, True)
        assert said["failures"] == 0
