"""Replays: the simulation's accounts, real bytes with a kill in between, and the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cxlkv import CXLPool
from cxlkv.bench.replay import case, traces
from cxlkv.bench.replay.simulation import Simulation
from cxlkv.bench.replay.simulation import replay as simulate
from cxlkv.bench.replay.tiers import Where, parse_size
from cxlkv.bench.replay.tiers import replay as replay_bytes
from cxlkv.bench.replay.traces import Request
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, PoolExistsError
from cxlkv.tiers.policy import policy_named

from ..support import texts
from ..support.command import run

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
    where = Where(far=600, policy="lru")
    counts, stats, problems = replay_bytes(SMALL, where)
    simulated = simulate(SMALL, where.far, policy_named("lru"))
    assert counts.wrong == counts.unpublished == 0
    assert problems == []
    assert abs(counts.hits - simulated.hits) < 0.03 * counts.asked
    assert stats["evicted_pages"] > 0


def test_cold_pages_come_back_with_their_bytes() -> None:
    everything = traces.distinct(SMALL)
    where = Where(far=600, local=100, cold=everything, policy="adaptive")
    counts, stats, problems = replay_bytes(SMALL, where)
    assert counts.wrong == 0
    assert problems == []
    assert counts.hits == counts.asked - everything, "nothing is lost: only first times are misses"
    assert counts.cold_hits > 0
    assert counts.local_hits > 0
    assert stats["dropped_pages"] == 0


GO = """
import sys
from pathlib import Path
from cxlkv.bench.replay import traces
from cxlkv.bench.replay.tiers import Where, replay
def progress(done):
    print(done, flush=True)
    sys.stdin.readline()
replay(traces.agents(2, 1000), Where(far=900, cold=20000, path=Path(sys.argv[1])), progress)
"""


def test_killed_and_resumed(shm_path: Path) -> None:
    """Killed after 512 requests and somewhat: the next run goes on at 512, with all its bytes."""
    requests = traces.agents(2, 1000)
    child = subprocess.Popen(
        [sys.executable, "-c", GO, str(shm_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "256\n"
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "512\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    where = Where(far=900, cold=20000, path=shm_path)
    counts, _, problems = replay_bytes(requests, where)
    assert (counts.resumed, counts.requests, counts.wrong) == (1, 1000, 0)
    assert problems == []
    asked = sum(len(request.pages) for request in requests)
    assert counts.asked == asked
    assert counts.hits == asked - traces.distinct(requests), "nothing published was lost"


def test_sizes() -> None:
    assert parse_size("10%", 5000) == 500
    assert parse_size("0.5 %", 1000) == 5
    assert parse_size("123", 5000) == 123
    assert parse_size("4MiB", 5000) == 1024
    for wrong in ("", "ten", "-1", "nan", "5 bananas", "1e40"):
        with pytest.raises(BadArgumentError, match="size"):
            parse_size(wrong, 100)


def test_a_pool_that_is_too_small_is_named() -> None:
    with pytest.raises(BadArgumentError, match="at least twice that"):
        replay_bytes([Request(0.0, range(50))], Where(far=60))


def test_table_and_checks() -> None:
    result = Result("replay")
    curves = case.run(result, SMALL, shares=(0.1, 0.5))
    assert result.checks["optimum_at_10_is_the_most"]
    console = Console(width=120, record=True)
    console.print(case.table(curves))
    text = console.export_text()
    for word in ("adaptive", "textbook sieve", "optimum"):
        assert word in text


def test_files_of_others_stay(shm_path: Path) -> None:
    requests, where = SMALL[:5], Where(far=900, path=shm_path)
    beside = Path(f"{shm_path}.cold")
    beside.write_text("somebody's")
    try:
        with pytest.raises(BadArgumentError, match="is no replay's"):
            replay_bytes(requests, where)
        assert beside.read_text() == "somebody's"
    finally:
        beside.unlink()
    with CXLPool.create(shm_path, layout=texts.SMALL, capacity="8MiB", threads=1) as pool:
        pages = texts.publish(pool, range(40))
    with pytest.raises(PoolExistsError):
        replay_bytes(requests, where)
    with CXLPool.open(shm_path) as pool:
        assert pool.stats()["pages_published"] == pages


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no picture")
    file = tmp_path / "trace.jsonl"
    requests = traces.agents(3, 300)
    lines = [json.dumps({"timestamp": 1e3 * r.time_s, "hash_ids": list(r.pages)}) for r in requests]
    file.write_text("\n".join(lines))
    results, picture = tmp_path / "result.json", tmp_path / "picture.png"
    words = ["bench", "replay", "--trace", file, "--policy", "lru"]
    assert run(capsys, *words, "--json", results, "--picture", picture).code == 0
    assert picture.stat().st_size > 1000
    written = json.loads(results.read_text())
    assert 0 < written["ratios"]["lru_to_optimum_at_10"] <= 1
    ended = run(capsys, *words, "--far", "50%", "--cold", "100%", "--minutes", 1)
    assert (ended.code, "cold_hits" in ended.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay"], "needs --trace"),
        (["tails", "--trace", "loops"], "tails needs a trace of a file"),
        (["replay", "--trace", "nowhere.jsonl"], "cannot be read as a trace"),
        (["replay", "--trace", "loops", "--policy", "best"], "policy 'best': one of"),
        (["replay", "--trace", "loops", "--cold", "5%"], "go with --far"),
        (["replay", "--trace", "loops", "--far", "much"], "size 'much'"),
        (["replay", "--trace", "loops", "--minutes", "0"], "no request of loops"),
        (["memory", "--trace", "loops"], "--trace goes with replay, tails; not with memory"),
    ],
)
def test_bad_words(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, "bench", *arguments)
    assert ended.code == 1
    assert said in " ".join(ended.err.split())
