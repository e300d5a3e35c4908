"""The Python face of the incoherent memory: seeds pass, a flush left out is found and replayed."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from tests.native import incoherent
from tests.native.incoherent import Limits, run

from ..support.lengths import nightly


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    for tool in ("cmake", "cc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing, and builds the emulation")
    return incoherent.build(incoherent.CHECKOUT / "build/incoherent")


def lines_of(trace: str) -> set[int]:
    """The lines that a trace says it is of."""
    named = trace.splitlines()[0].partition(", of lines ")[2]
    found = re.findall(r"(\d+)(?: to (\d+))? [a-z]", named)
    return {n for first, last in found for n in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("model", incoherent.MODELS)
@pytest.mark.parametrize("name", incoherent.PROGRAMS)
def test_some_hundred_seeds_pass(programs: dict[str, Path], name: str, model: str) -> None:
    seeds = 25 if name == "hosts" else 250  # of hosts, a seed is as many runs as there are steps
    found = run(programs[name], 1, seeds, model)
    assert (found.failed_seed, found.what, found.trace) == (None, "", "")
    assert found.counters["seeds"] == seeds
    assert found.counters["steps"] > 100_000
    assert found.counters["left out"] == 0


def test_counters_are_all_that_the_program_counts_and_add_up(programs: dict[str, Path]) -> None:
    first, second = (run(programs["visibility"], seed, 100, "x86").counters for seed in (1, 101))
    both = run(programs["visibility"], 1, 200, "x86").counters
    names = "seeds steps accepted refused reused".split()
    assert set(both) == {*names, "read in place", "still pinned", "left out"}
    assert both == {name: first[name] + second[name] for name in both}


def test_a_flush_left_out_fails_with_its_seed_and_its_trace(programs: dict[str, Path]) -> None:
    program = programs["visibility"]
    found = run(program, 1, 300, "x86", "FLUSH_PUBLISH_HEADER")
    assert found.failed_seed is not None
    assert found.what.startswith("stale or torn (record ")
    head, *rows = found.trace.splitlines()
    assert f"seed {found.failed_seed}, x86, left out: publish_header" in head
    left_out = [row for row in rows if row.endswith("at publish_header")]
    assert left_out
    assert all(" left out " in row for row in left_out)
    again = run(program, found.failed_seed, 1, "x86", "FLUSH_PUBLISH_HEADER")
    assert again == replace(found, counters={})


@pytest.mark.parametrize("site", ["FLUSH_PUBLISH_FENCE", "FLUSH_PIN_FENCE"])
def test_a_fence_left_out_is_in_the_trace(programs: dict[str, Path], site: str) -> None:
    found = run(programs["visibility"], 1, 4000, "x86", site)
    assert re.search(f"no fence +at {site[6:].lower()}$", found.trace, re.M)


def test_a_trace_is_of_the_lines_that_failed(programs: dict[str, Path]) -> None:
    found = run(programs["protocol"], 1, 300, "x86", "FLUSH_TAKE")
    wanted = lines_of(found.trace)
    assert wanted
    rows = [row for row in found.trace.splitlines()[1:] if " member " not in row]
    assert {int(line) for line in re.findall(r" line (\d+)\.", "\n".join(rows))} <= wanted
    assert rows[-1] == f"failed: {found.what}"
    # A fence stands next to something that its actor did to these lines.
    by_actor: dict[str, list[bool]] = {}
    for row in rows:
        if actor := re.search(r"actor (\d+)", row):
            by_actor.setdefault(actor[1], []).append(" fence " in row)
    assert any(True in fences for fences in by_actor.values())
    for fences in by_actor.values():
        three = zip(fences, fences[1:], fences[2:], strict=False)
        assert not any(all(neighbours) for neighbours in three)


def test_words_of_a_line_are_one_row_and_what_was_left_out_is_there(
    programs: dict[str, Path],
) -> None:
    """Also where it was another line than those that the failed check is about."""
    limits = Limits(hosts=2, disturbances=0, rounds=1)
    found = run(programs["protocol"], 1, 300, "x86", "FLUSH_CLAIM", limits)
    more = {int(count) for count in re.findall(r"\(and (\d+) more\)", found.trace)}
    assert max(more) == 7
    found = run(programs["protocol"], 1, 300, "x86", "FLUSH_OWNER_LOOK")
    left_out = re.findall(r" left out +line (\d+)\.0 = 0 at owner_look$", found.trace, re.M)
    assert left_out
    assert lines_of(found.trace).isdisjoint(map(int, left_out))


@pytest.mark.nightly
def test_the_lowest_seed_is_named_whoever_finds_one_first(programs: dict[str, Path]) -> None:
    """Chunks run at the same time, and a later one may end earlier."""
    program = programs["protocol"]
    found = run(program, 1, 3000, "arm64", "FLUSH_GIVE")
    assert found.failed_seed is not None
    assert found.failed_seed > incoherent.CHUNK_SEEDS, "take a site that is found later"
    before = run(program, 1, found.failed_seed - 1, "arm64", "FLUSH_GIVE")
    assert before.failed_seed is None
    assert before.counters["left out"] > 0


@pytest.mark.parametrize(
    ("site", "limit", "most"), [("FLUSH_SLOT", "rounds", 9), nightly("FLUSH_TAKE", "hosts", 2)]
)
def test_a_smaller_run_fails_by_the_same_check(
    programs: dict[str, Path], site: str, limit: str, most: int
) -> None:
    found = run(programs["protocol"], 1, 300, "x86", site)
    least = incoherent.smaller(found)
    assert least.what.partition(" (")[0] == found.what.partition(" (")[0]
    assert vars(least.limits)[limit] is not None
    assert vars(least.limits)[limit] <= most
    hosts = least.limits.hosts
    assert hosts is not None
    assert set(re.findall(r" host (\d+) ", least.trace)) == set(map(str, range(hosts)))
    assert "killed" not in least.trace
    assert len(least.trace) < len(found.trace) / 2
    assert least.failed_seed is not None
    again = run(least.program, least.failed_seed, 1, "x86", site, least.limits)
    assert again == least


def test_limits_that_change_nothing_are_not_named(programs: dict[str, Path]) -> None:
    found = run(programs["visibility"], 1, 300, "x86", "FLUSH_PUBLISH_HEADER")
    least = incoherent.smaller(found)
    assert least.limits.disturbances is None
    assert (least.limits.hosts, least.limits.rounds) != (None, None)


def test_names_that_are_not_there_are_errors_that_list_what_is(programs: dict[str, Path]) -> None:
    with pytest.raises(
        BadArgumentError, match="'storm'; there are visibility, rpc, hosts, protocol"
    ):
        incoherent.build(incoherent.CHECKOUT / "build/incoherent", ["storm"])
    with pytest.raises(BadArgumentError, match=r"'FLUSH_IT'.* FLUSH_NONE, FLUSH_PUBLISH_HEADER"):
        run(programs["rpc"], 1, 1, "x86", "FLUSH_IT")
    with pytest.raises(BadArgumentError, match="'riscv'; there are x86, arm64"):
        run(programs["rpc"], 1, 1, "riscv")
    with pytest.raises(BadArgumentError, match="0 seeds"):
        run(programs["rpc"], 1, 0, "x86")
    with pytest.raises(BadArgumentError, match="at most 1 hosts: 2"):
        run(programs["rpc"], 1, 1, "x86", limits=Limits(hosts=1))


def test_without_the_sources_or_cmake_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="cmake is missing"):
        incoherent.build(tmp_path)
    monkeypatch.setattr(incoherent, "CHECKOUT", tmp_path)
    with pytest.raises(UnsupportedError, match="in a checkout of cxlkv"):
        incoherent.build(tmp_path)


def script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_a_program_that_ends_without_a_seed_is_an_error(tmp_path: Path) -> None:
    ends = "exit code 3 and named no seed, between 5 and 8, x86:\nno"
    with pytest.raises(CXLKVError, match=ends):
        run(script(tmp_path, "echo no >&2; exit 3"), 5, 4, "x86")
    with pytest.raises(CXLKVError, match="ended by SIGABRT"):
        run(script(tmp_path, "kill -ABRT $$"), 5, 4, "x86")


def test_a_failure_that_does_not_come_again_is_an_error(tmp_path: Path) -> None:
    fails = 'echo "failed: x" >&2; echo "seed 5, x86 failed" >&2; exit 1'
    program = script(tmp_path, f'[ "$CXLKV_TRACE" = 0 ] || exit 0; {fails}')
    with pytest.raises(CXLKVError, match=r"seed 5 .* does not do the same again: x, then nothing"):
        run(program, 5, 1, "x86")


def test_what_the_environment_says_does_not_reach_the_programs(
    programs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(programs["visibility"], 1, 100, "x86")
    monkeypatch.setenv("CXLKV_LEFT_OUT", "1")
    monkeypatch.setenv("CXLKV_ROUNDS", "1")
    assert run(programs["visibility"], 1, 100, "x86") == expected


def test_the_command_prints_a_small_trace_and_how_to_see_it_again(
    programs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "protocol --seeds 300 --model x86 --leave-out FLUSH_TAKE"
    assert incoherent.main(words.split()) == 1
    first, smallest, _, head, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"protocol, x86: seed \d+ failed: .* \(\d+, \d+\)", first)
    assert len(rows) <= incoherent.TAIL_ROWS + 4
    assert any(row.endswith("at take") for row in rows)
    again = smallest.partition(": ")[2]
    assert incoherent.main([*again.split(), "--trace"]) == 1
    replayed = capsys.readouterr().out.splitlines()
    assert replayed[3] == head
    assert len(replayed) > incoherent.TAIL_ROWS + 10
    assert replayed[-10:] == rows[-10:]


def test_the_command_says_what_passed_and_what_was_never_met(
    programs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert incoherent.main("visibility --seeds 100 --leave-out FLUSH_RPC_LOOK".split()) == 0
    x86, never, arm64, _ = capsys.readouterr().out.splitlines()
    assert x86.startswith("visibility, x86: no seed failed: seeds 100, ")
    assert never == "FLUSH_RPC_LOOK was never met: it is in another program's part"
    assert arm64.startswith("visibility, arm64: no seed failed: ")
    assert incoherent.main(["rpc", "--seed", "7", "--model", "x86", "--trace"]) == 0
    assert "no seed failed: seeds 1, " in capsys.readouterr().out
    assert incoherent.main(["rpc", "--leave-out", "FLUSH_IT"]) == 1
    assert (
        "error: no site of native/src/base/flush.h is called 'FLUSH_IT'" in capsys.readouterr().err
    )
    assert incoherent.main(["storm"]) == 1
    assert "error: no program is called 'storm'" in capsys.readouterr().err
