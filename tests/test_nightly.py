"""The nightly parts: a change calls for the right ones, and a run goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import pytest

from tests import nightly
from tests.nightly import Part, Row
from tests.qemu.drivers import SCENARIOS

COMMANDS = {
    "right": "echo fine",
    "wrong": "echo broken; exit 3",
    "none": "echo skipped: no x; exit 77",
}


class RunParts(Protocol):
    def __call__(self, *words: str) -> int: ...


@pytest.fixture
def run_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunParts:
    """Runs the program with these parts, its files in tmp_path, the tree in a known state."""
    monkeypatch.setattr(nightly, "FOLDER", tmp_path)
    monkeypatch.setattr(nightly, "tree_state", lambda: "c0ffee")
    monkeypatch.setattr(
        nightly, "PARTS", {name: Part(line, 1, (name,)) for name, line in COMMANDS.items()}
    )

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["nightly.py", *words])
        return nightly.main()

    return run


def results(folder: Path) -> dict[str, str]:
    parts = json.loads((folder / "state.json").read_text())["parts"]
    return {name: Row(**row).result for name, row in parts.items()}


def test_paths_that_call_for_a_part_are_there() -> None:
    for part in nightly.PARTS.values():
        assert part.minutes <= nightly.PART_MINUTES_MAX
        for path in part.covers:
            there = nightly.CHECKOUT / path
            assert there.exists() or list(there.parent.glob(f"{there.name}*")), path


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("docs/README.md", ["docs"]),
        ("docs/models/lock.pml", ["docs", "models"]),
        ("native/src/kernels/avx2.c", ["tsan", "arm64", "matrices", "storms"]),
        (
            "native/src/coherence/rpc.c",
            ["tsan", "arm64", "matrices", "storms", "seeds", "mutants"],
        ),
        ("cxlkv/adapters/vllm/plugin.py", ["matrices", "storms", "vllm"]),
        ("cxlkv/adapters/vllm/scheduler.py", ["matrices", "storms", "drivers-engines", "vllm"]),
        ("tests/qemu/guest/engines.py", ["storms", "drivers", "drivers-engines"]),
        ("cxlkv/adapters/common/settings.py", ["matrices", "storms", "vllm", "sglang", "lmcache"]),
        ("kernels/merge.py", ["triton"]),
        ("examples/prefill_decode.py", []),
        ("pyproject.toml", ["wheel"]),
    ],
)
def test_a_change_calls_for_the_parts_of_its_folder(path: str, parts: list[str]) -> None:
    assert nightly.called_for([path]) == parts


def test_each_scenario_of_the_guests_is_in_one_part() -> None:
    commands = [part.command for name, part in nightly.PARTS.items() if name.startswith("drivers")]
    named = [word for command in commands for word in command.partition(" -m ")[2].split()[1:]]
    assert sorted(named) == sorted(SCENARIOS)


def test_a_run_goes_on_where_it_stopped(
    run_parts: RunParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_parts() == 1
    assert results(tmp_path) == {"right": "passed", "wrong": "failed", "none": "skipped"}
    printed = capsys.readouterr().out
    assert "skipped: no x" in printed
    assert "wrong: failed in 0:00 exit status 3\nbroken" in printed
    nightly.PARTS["wrong"] = Part("true", 1, ())
    assert run_parts("right", "wrong") == 0
    assert "right: echo fine" not in capsys.readouterr().out  # it has passed
    assert run_parts("--again", "right") == 0
    assert "right: echo fine" in capsys.readouterr().out


def test_a_part_does_not_hear_what_make_nightly_was_told(
    run_parts: RunParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGS", "right")
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=right")
    monkeypatch.setitem(nightly.PARTS, "right", Part('echo "<$ARGS$MAKEFLAGS>"', 1, ("right",)))
    assert run_parts("right") == 0
    assert "<>" in (tmp_path / "right.log").read_text()


def test_parts_of_another_commit_count_for_nothing(
    run_parts: RunParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_parts("right") == 0
    monkeypatch.setattr(nightly, "tree_state", lambda: "decade")
    assert nightly.recorded() == {}
    assert run_parts("none") == 0
    assert results(tmp_path) == {"none": "skipped"}


def test_a_part_without_time_is_named_with_the_command_that_runs_it(
    run_parts: RunParts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_parts("--minutes", "0.5", "right") == 0
    assert "make nightly ARGS='right'" in capsys.readouterr().out.splitlines()[-1]
    assert run_parts("right") == 0
    assert nightly.recorded()["right"].result == "passed"


def test_a_part_that_takes_too_long_is_stopped(
    run_parts: RunParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "PART_MINUTES_MAX", 0.2 / 60)
    nightly.PARTS["right"] = Part("sleep 30", 0.001, ())
    assert run_parts("right") == 1
    assert nightly.recorded()["right"].why.startswith("stopped after")


def test_what_cannot_be_had_skips_the_part(
    run_parts: RunParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None)
    nightly.PARTS["right"] = Part("exit 1", 1, (), tools=(("spin", "spin"),))
    nightly.PARTS["wrong"] = Part("exit 1", 1, (), prepare="echo no network; exit 1")
    assert run_parts("right", "wrong") == 0
    rows = nightly.recorded()
    assert rows["right"].why == "not here: spin (Debian: spin)"
    assert rows["wrong"].why == "echo no network; exit 1: no network"
