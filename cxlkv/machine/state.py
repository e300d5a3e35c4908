"""Writes files for later runs: measurements and certificates of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """$XDG_STATE_HOME/cxlkv, or ~/.local/state/cxlkv where that is not an absolute path."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "cxlkv"


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically, replacing an older one. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
