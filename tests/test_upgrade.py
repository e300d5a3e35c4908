"""Pools as each release left them: opened, or refused with the remedy, upgraded, and read.

What an upgrade leaves behind when it is stopped is tests/native/format/test_upgrade.c's.
"""

from __future__ import annotations

import lzma
import re
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxlkv import _core
from cxlkv._core import FORMAT_VERSION
from cxlkv.errors import BusyError, CorruptError, NotAPoolError, VersionError
from cxlkv.ops.cli import app
from cxlkv.pool import Pool
from cxlkv.stats import inspect
from cxlkv.tiers.cold_file import VERSIONS

from .support import golden_pools
from .support.damaging import poke
from .support.golden_pools import FOLDER, NAMES, members, unpacked, where

BEFORE = 5
FEATURES_OFFSET, CRC_OFFSET = 2056, 2108  # docs/reference/memory-layout.md
WORDS = ("compatible", "readers", "incompatible")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


def opened(path: Path, host: int | None = None) -> Pool:
    return Pool.open(where(path), host=host, lease_s=0.2, threads=1)


def contents(path: Path) -> list[bytes]:
    return [part.read_bytes() for part in members(path)]


def rewrite(path: Path, at: int, data: bytes) -> None:
    """With a right CRC."""
    block = bytearray(path.read_bytes()[:4096])
    block[at : at + len(data)] = data
    block[CRC_OFFSET : CRC_OFFSET + 4] = struct.pack("<I", _core.crc32c(bytes(block[:CRC_OFFSET])))
    with path.open("r+b") as file:
        file.write(block)


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_of_this_version(name: str, folder: Path) -> None:
    """A change of the format that forgets its version fails here."""
    with unpacked(name, FORMAT_VERSION, folder) as path:
        before = contents(path)
        assert Pool.upgrade(where(path)) == FORMAT_VERSION
        assert contents(path) == before
        golden_pools.check(name, lambda host: opened(path, host))


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_of_the_version_before(name: str, folder: Path) -> None:
    with unpacked(name, BEFORE, folder) as path:
        before = contents(path)
        host = 0 if name == "shared" else None
        remedy = "version 5, this build reads 6. `cxlkv pool upgrade"
        with pytest.raises(VersionError, match=remedy):
            opened(path, host)
        assert remedy in inspect(where(path)).detail
        assert contents(path) == before  # refused before the first store
        said = CliRunner().invoke(app, ["pool", "upgrade", where(path)])
        assert (said.exit_code, "5 is now 6" in said.output) == (0, True)
        golden_pools.check(name, lambda host: opened(path, host))
        said = CliRunner().invoke(app, ["pool", "upgrade", where(path)])
        assert "has format version 6" in said.output


def test_a_pool_that_hosts_still_use_is_left_alone(folder: Path) -> None:
    """A host that runs, or died, on another machine is told by its name line alone."""
    with unpacked("shared", BEFORE, folder) as path:
        with path.open("r+b") as file:
            file.seek(4096)
            name = file.read(28)
            nonce, epoch, status, host = struct.unpack_from("<QIII", name)
            assert (status, host) == (2, 0)
            live = struct.pack("<QIIIQ", nonce, epoch + 1, 1, host, 0)
            file.seek(4096)
            file.write((live + struct.pack("<I", _core.crc32c(live))) * 2)
        before = contents(path)
        with pytest.raises(BusyError, match=r"host 0 uses it, or died so"):
            Pool.upgrade(path)
        assert contents(path) == before


def test_what_is_no_pool_is_left_alone(folder: Path) -> None:
    path = folder / "letters"
    path.write_bytes(b"letters" * 1000)
    with pytest.raises(NotAPoolError):
        Pool.upgrade(path)
    with unpacked("prefixes", BEFORE, folder) as path:
        poke(path, 100, b"?")
        with pytest.raises(CorruptError):
            Pool.upgrade(path)


@pytest.mark.parametrize("word", WORDS)
def test_features_of_a_newer_build(word: str, folder: Path) -> None:
    """Unknown ones: let pass, only looked at, or refused, with the bit and a way out named."""
    with unpacked("prefixes", FORMAT_VERSION, folder) as path:
        rewrite(path, 2052, struct.pack("<I", 10203))  # its build
        rewrite(path, FEATURES_OFFSET + 8 * WORDS.index(word), struct.pack("<Q", 5 << 40))
        before = contents(path)
        if word == "compatible":
            with opened(path) as pool:
                described = pool.describe()["format"]
                assert isinstance(described, dict)
                assert (described["build"], described[word]) == ("1.2.3", [40, 42])
                assert pool.admin.check(deep=True)["clean"]
            return
        name = {"readers": "read-only compatible", "incompatible": "incompatible"}[word]
        wanted = rf"feature 40 of the {name} ones.* a newer cxlkv, 1\.2\.3 or later"
        for refused in (lambda: opened(path), lambda: Pool.upgrade(path)):
            with pytest.raises(VersionError, match=wanted):
                refused()
        if word == "readers":
            assert inspect(where(path)).pages_total > 0
        else:
            assert re.search(wanted, inspect(where(path)).detail)
        assert contents(path) == before
        Pool.remove(path)


@pytest.mark.parametrize("version", VERSIONS.values())
def test_a_cold_file_of_each_version(version: int, tmp_path: Path) -> None:
    path = tmp_path / "a.cold"
    path.write_bytes(lzma.decompress((FOLDER / f"cold-{version}.xz").read_bytes()))
    golden_pools.check_cold(path, version)


def test_hosts_tell_their_build(folder: Path) -> None:
    with unpacked("shared", FORMAT_VERSION, folder) as path, opened(path, 0) as pool:
        told = [row.build for row in pool.admin.hosts()]
        assert told[0] == _core.version()
        assert re.fullmatch(r"\d+\.\d+\.\d+", told[1]), "of the release that made it"
    with unpacked("shared", BEFORE, folder) as path:
        Pool.upgrade(path)
        with opened(path, 0) as pool:
            assert [row.build for row in pool.admin.hosts()] == [_core.version(), ""]
