"""What requests leave is saved only where their blocks are still theirs."""

from __future__ import annotations

import subprocess
import sys

from ..support.processes import ROOT


def test_blocks_that_were_written_to_again_are_not_saved(vllm_is_there: None) -> None:
    """vLLM zeroes new blocks of some models, copies some, and takes states on to new ones, before
    it tells workers of a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.left"],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
    )
    kept = "copied from, kept, of other tokens now"
    found = done.stdout.split("\n")[:2]
    assert found == [kept, f"copied to, {kept}"], done.stdout + done.stderr[-2000:]
