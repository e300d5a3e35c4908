"""Folders and files of this user for later runs: measurements, certificates, converted models."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def state_folder() -> Path:
    """$XDG_STATE_HOME/cxlkv, or ~/.local/state/cxlkv where that is not an absolute path.

    Raises FileNotFoundError for a user who has no home folder either.
    """
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/cxlkv, or ~/.cache/cxlkv; otherwise as state_folder()."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path:
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named) / "cxlkv"
    try:
        return Path.home() / below_home / "cxlkv"
    except RuntimeError:
        message = f"this user has no home folder: set HOME or {variable}"
        raise FileNotFoundError(errno.ENOENT, message) from None


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically, replacing an older one. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
