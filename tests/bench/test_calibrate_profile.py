"""A profile of this machine's own memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv.bench import loops
from cxlkv.bench.calibrate import profile as measuring
from cxlkv.bench.calibrate.profile import Size, curve
from cxlkv.bench.cases import link
from cxlkv.bench.loops import Stream
from cxlkv.bench.result import Result
from cxlkv.emulation.profiles import named
from cxlkv.errors import BadArgumentError

from ..support.command import run


def test_the_command_writes_a_profile_that_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    small = Size(bytes=1 << 20, pace_ns=(4000, 1000), sample_s=0.002, rounds=2)
    monkeypatch.setattr(measuring, "SIZE", small)
    ended = run(capsys, "tune", "--profile", "here", "--json", tmp_path / "r.json")
    assert (ended.code, "written: here in" in ended.out) == (0, True)
    profile = named("here")[1]
    assert profile.standing == "measured"
    assert profile.latency_ns > 0
    assert profile.read_gb_per_s > 0
    ended = run(capsys, "tune", "--profile", "pond-pool")
    assert (ended.code, "one of the project's profiles" in ended.err) == (1, True)
    assert run(capsys, "tune", "--profile", "x", "--gpu").code == 1
    with pytest.raises(BadArgumentError, match=r"no profile 'x'.*here"):
        named("x")


def test_a_chase_that_went_wrong_makes_no_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    small = Size(bytes=1 << 20, pace_ns=(), sample_s=0, rounds=1)
    monkeypatch.setattr(measuring, "SIZE", small)
    taken = loops.memory_run

    def wrong(running: list[Stream], seconds: float) -> list[loops.Streamed]:
        return [did._replace(sum=did.sum + 1) for did in taken(running, seconds)]

    monkeypatch.setattr(loops, "memory_run", wrong)
    assert run(capsys, "tune", "--profile", "here").code == 1
    with pytest.raises(BadArgumentError, match="no profile 'here'"):
        named("here")


def test_noise_is_left_out_of_a_curve() -> None:
    samples = [[(5.0, 120.0), (5.2, 118.0), (5.1, 140.0)], [(2.0, 90.0)], [(9.0, 119.0)]]
    assert curve(100.0, samples, 8.0) == ((5.1, 120.0),)
    assert curve(80.0, samples, 20.0) == ((2.0, 90.0), (5.1, 120.0))
    assert curve(80.0, [], 20.0) == ()


def test_the_link_says_that_it_is_emulated_and_draws(tmp_path: Path) -> None:
    result = Result("link")
    link.run(result, link.Size(tokens=64, rounds=1, latency_calls=2))
    assert result.checks["virtual_exact"]
    figures = {*result.metrics, *result.ratios}  # each of the two links has its own
    assert all((result.label_of(n) or "").startswith("astera-a1000 slowed ") for n in figures)
    names = {f"{name}_to_profile" for name in ("fetch", "attend", "append", "latency")}
    assert set(result.ratios) == names
    link.draw(result, tmp_path / "link.png")
    assert (tmp_path / "link.png").stat().st_size > 10_000
