"""Where the processes of this machine keep what they share about a pool: for tests that look."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def state_folder(user: int | None = None) -> Path:
    """The one of the files of a user; of this one, if none is named."""
    return SHARED_MEMORY / f"cxlkv.{os.geteuid() if user is None else user}"


def host_states(identity: object = "*", suffix: str = ".host") -> list[Path]:
    """Of the pool with this identity, or all of this user's; suffix ".worker": slots of workers."""
    return sorted(state_folder().glob(f"{identity}-*{suffix}"))
