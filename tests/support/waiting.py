"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], what: str = "it did not come", within_s: float = 60) -> None:
    """Asks until it holds; AssertionError with `what` when that takes too long."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
