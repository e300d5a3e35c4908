"""The user's folders: as the XDG variables say, else below home; without a home a clear error."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlkv.machine.state import cache_folder, state_folder

FOLDERS = [
    (state_folder, "XDG_STATE_HOME", ".local/state"),
    (cache_folder, "XDG_CACHE_HOME", ".cache"),
]


@pytest.mark.parametrize(("folder", "variable", "below_home"), FOLDERS)
def test_the_variable_then_home(
    monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path], variable: str, below_home: str
) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv(variable, "/else/where")
    assert folder() == Path("/else/where/cxlkv")
    for ignored in ("", "relative/is/ignored"):
        monkeypatch.setenv(variable, ignored)
        assert folder() == Path("/somebody", below_home, "cxlkv")


@pytest.mark.parametrize(("folder", "variable", "below_home"), FOLDERS)
def test_without_home(
    monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path], variable: str, below_home: str
) -> None:
    home = pwd.getpwuid(0).pw_dir
    monkeypatch.delenv("HOME")
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.getpwnam("root"))
    assert folder() == Path(home, below_home, "cxlkv")

    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(FileNotFoundError, match=f"no home folder: set HOME or {variable}"):
        folder()
