"""What we override of vLLM's interfaces is still there, and takes what vLLM gives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("interface.py")


def test_we_take_what_the_engine_gives() -> None:
    """In a process of its own, since importing vLLM changes this one."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=250
    )
    assert done.stdout.split() == ["compared"], done.stdout + done.stderr[-2000:]
