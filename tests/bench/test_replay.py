"""Replays: the simulation's accounts, real bytes beside them, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from cxlkv.bench.replay import case, traces
from cxlkv.bench.replay.simulation import Simulation
from cxlkv.bench.replay.simulation import replay as simulate
from cxlkv.bench.result import Result
from cxlkv.tiers.policy import policy_named

from ..support.command import run
from .real_bytes import replay as replay_bytes

SMALL = traces.agents(2, 800)


def test_the_simulation_by_hand() -> None:
    """Four pages: 7, 8, 9 stay, 9 is the leaf that goes for 5 and 6."""
    simulation = Simulation(4, policy_named("lru"), 3)
    assert simulation.request([7, 8, 9]) == 0
    assert simulation.request([7, 8]) == 2
    assert simulation.request([5, 6]) == 0
    assert simulation.request([7, 8, 9]) == 2
    assert simulation.seen.asked == 10
    assert simulation.seen.hits == 4


def test_everything_fits() -> None:
    """Then only the first time is a miss."""
    seen = simulate(SMALL, traces.distinct(SMALL), policy_named("adaptive"))
    assert seen.hits == seen.asked - traces.distinct(SMALL)
    assert seen.evicted == 0


def test_real_bytes_hit_what_the_simulation_hits() -> None:
    """The pool's index, tiers and policy against the simulation of the same policy: about the same,
    as the pool makes room when it is full, and the simulation a request later."""
    found = replay_bytes(SMALL, 600, policy="lru")
    simulated = simulate(SMALL, found.far, policy_named("lru"))
    assert found.wrong == found.unpublished == 0
    assert found.problems == []
    assert abs(found.hits - simulated.hits) < 0.03 * found.asked
    assert found.stats["evicted_pages"] > 0


def test_cold_pages_come_back_with_their_bytes() -> None:
    everything = traces.distinct(SMALL)
    found = replay_bytes(SMALL, 600, local=100, cold=everything)
    assert found.wrong == 0
    assert found.problems == []
    assert found.hits == found.asked - everything, "nothing is lost: only first times are misses"
    assert found.cold_hits > 0
    assert found.local_hits > 0
    assert found.stats["dropped_pages"] == 0


def test_table_and_checks() -> None:
    result = Result("replay")
    curves = case.run(result, SMALL, shares=(0.1, 0.5))
    assert result.checks["optimum_at_10_is_the_most"]
    console = Console(width=120, record=True)
    console.print(case.table(curves))
    text = console.export_text()
    for word in ("adaptive", "textbook sieve", "optimum"):
        assert word in text


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no picture")
    file = tmp_path / "trace.jsonl"
    requests = traces.agents(3, 300)
    lines = [json.dumps({"timestamp": 1e3 * r.time_s, "hash_ids": list(r.pages)}) for r in requests]
    file.write_text("\n".join(lines))
    results, picture = tmp_path / "result.json", tmp_path / "picture.png"
    words = ["bench", "replay", "--trace", file]
    assert run(capsys, *words, "--json", results, "--picture", picture).code == 0
    assert picture.stat().st_size > 1000
    written = json.loads(results.read_text())
    assert 0 < written["ratios"]["lru_to_optimum_at_10"] <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay"], "needs --trace"),
        (["tails", "--trace", "loops"], "tails needs a trace of a file"),
        (["replay", "--trace", "nowhere.jsonl"], "cannot be read as a trace"),
        (
            ["memory", "--trace", "loops"],
            "--trace goes with replay, tails, checkpoints; not with memory",
        ),
    ],
)
def test_bad_words(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, "bench", *arguments)
    assert ended.code == 1
    assert said in " ".join(ended.err.split())
