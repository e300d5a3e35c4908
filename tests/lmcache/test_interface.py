"""What we override of LMCache's interfaces is still there, and takes what LMCache gives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("interface.py")


def test_we_take_what_lmcache_gives() -> None:
    """In a process of its own, as LMCache is not there where this is not skipped."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=250
    )
    assert done.stdout.split() == ["compared"], done.stdout + done.stderr[-2000:]
