"""A C core of another build is refused at import, before anything of it is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import cxlkv
from cxlkv._core import abi
from cxlkv._native import lib

NOT_PYTHON = shutil.ignore_patterns("*.so", "kernels", "emulation", "bench", "__pycache__")


def test_the_numbers_agree() -> None:
    assert lib.CXLKV_ABI == lib.cxlkv_abi() == abi.ABI


@pytest.mark.parametrize(
    ("core", "found"),
    [
        (SimpleNamespace(), "none"),
        (SimpleNamespace(CXLKV_ABI=abi.ABI + 1, cxlkv_abi=lambda: abi.ABI + 1), abi.ABI + 1),
        (SimpleNamespace(CXLKV_ABI=abi.ABI, cxlkv_abi=lambda: 77), f"{abi.ABI} and 77"),
    ],
)
def test_another_number(core: object, found: object) -> None:
    wanted = rf"interface {found}, these Python files want {abi.ABI}: .* make setup"
    with pytest.raises(ImportError, match=wanted):
        abi.check(core)


def test_the_package_does_not_load_with_another_core() -> None:
    """After a pull without a build the import fails, instead of a crash later."""
    program = """
import sys, types
native = sys.modules["cxlkv._native"] = types.ModuleType("cxlkv._native")
native.ffi = native.lib = types.SimpleNamespace()
import cxlkv.pool
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: cxlkv._native was built for interface none" in done.stderr


def test_sources_in_the_current_folder_hide_what_is_installed(tmp_path: Path) -> None:
    """A checkout that was not built has no core, and the message names both ways out."""
    shutil.copytree(Path(cxlkv.__file__).parent, tmp_path / "cxlkv", ignore=NOT_PYTHON)
    command = [sys.executable, "-S", "-c", "import cxlkv; cxlkv.CXLPool"]
    packages = str(Path(numpy.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert f"ImportError: {tmp_path}/cxlkv is source code without its C core." in done.stderr
    assert "run Python from another folder; in a checkout, build it: make setup" in done.stderr
