"""A pool that was lost and is open again is used as soon as there is memory for that."""

from __future__ import annotations

import subprocess
import sys

from ..support.processes import ROOT


def test_a_worker_that_cannot_go_on_in_it_tries_again(vllm_is_there: None) -> None:
    """In either form: once after each look, counted each time, said once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.reopened"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
    )
    waits = [f"{turn} False {{'save': {1 + turn // 2}}}" for turn in range(3)]
    right = [f"{turn} True {{'save': 2}}" for turn in (3, 4)]
    assert done.stdout.splitlines() == [*waits, *right] * 2, done.stdout + done.stderr[-2000:]
    assert done.stderr.count("cannot be used yet") == 2
