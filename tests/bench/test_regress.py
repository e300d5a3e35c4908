"""What `make regress` says of two builds' times, and that its calls can be made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cxlkv.bench import regress

from ..test_tidy import ROOT


def medians(*ratios: float) -> dict[str, list[dict[str, float]]]:
    """Times of a call with the new build that are so many times those with the base."""
    base = [{"call": 1e-6 * (1 + i)} for i in range(len(ratios))]
    new = [{"call": row["call"] * ratio} for row, ratio in zip(base, ratios, strict=True)]
    return {"base": base, "new": new}


def test_a_call_is_slower_when_its_whole_interval_is() -> None:
    mean, low, high = regress.interval([1.09, 1.10, 1.11])
    assert mean == pytest.approx(1.1, rel=1e-3)
    # By hand: logs 0.08618, 0.09531, 0.10436; their deviation 0.009090, t = 4.303, n = 3.
    assert [low, high] == pytest.approx([1.0754, 1.1251], abs=1e-3)


@pytest.mark.parametrize(
    ("ratios", "status"),
    [((1.2, 1.21, 1.19), 1), ((1.0, 1.01, 0.99), 0), ((0.8, 0.81, 0.79), 0), ((0.8, 1.6, 1.2), 0)],
)
def test_the_exit_status_says_so(
    ratios: tuple[float, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regress.report("0123456789abcdef", medians(*ratios)) == status
    assert ("SLOWER" in capsys.readouterr().out) == bool(status)


def test_every_call_can_be_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-disable", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider", f"--basetemp={tmp_path}", str(regress.CALLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
