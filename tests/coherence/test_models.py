"""The models of the coherence protocol: `make models` runs all, this a small one and a mutant."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "docs/models/check.py"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="spin or gcc is not here (Debian: apt-get install spin gcc)",
)

# Two processes that add to a number in two steps. TIMID has no effect, so it is never caught.
COUNTER = """\
/* Two that count.
 * variant only:
 * caught ATOMIC: only
 * caught TIMID: only
 */
byte count, finished;
#ifdef MUTANT_ATOMIC
#define TOGETHER(steps) steps
#else
#define TOGETHER(steps) atomic { steps }
#endif
#ifdef MUTANT_TIMID
#endif
active [2] proctype adds() {
    byte seen;
    TOGETHER(seen = count; count = seen + 1);
    finished++;
    finished == 2;
    assert(count == 2)
}
"""


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), *arguments], capture_output=True, text=True, timeout=120
    )


@needs_spin
def test_a_model_passes_and_its_mutant_is_caught() -> None:
    plain = check("lock.pml", "two", "CHECK_BEFORE")
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert "passes" in plain.stdout
    mutant = check("publish.pml", "recheck", "ACQUIRE_PAYLOAD")
    assert mutant.returncode == 0, mutant.stdout + mutant.stderr
    assert "assertion violated (one==(first/2))" in mutant.stdout
    # A pin that goes before what is read in place was read.
    mutant = check("publish.pml", "pins", "UNPIN_BEGIN_FENCE")
    assert mutant.returncode == 0, mutant.stdout + mutant.stderr
    assert "assertion violated (((header==one)" in mutant.stdout


@needs_spin
def test_a_mutant_that_nothing_catches_is_a_failure(tmp_path: Path) -> None:
    model = tmp_path / "counter.pml"
    model.write_text(COUNTER)
    assert check(str(model), "only", "ATOMIC").returncode == 0
    done = check(str(model))
    assert done.returncode == 1
    assert "3 searches, 1 not as said counter-only-TIMID" in done.stdout
    # The plain model fails, too.
    model.write_text(COUNTER.replace("count == 2)", "count == 3)"))
    assert "WRONG: assertion violated" in check(str(model)).stdout


@needs_spin
def test_a_site_without_an_expectation_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "counter.pml"
    model.write_text(COUNTER.replace(" * caught TIMID: only\n", ""))
    done = check(str(model))
    assert done.returncode == 2
    assert "not said what to expect of TIMID" in done.stderr


def test_without_spin_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK)], capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode == 3
    assert "skipped: spin and gcc not here" in done.stdout
