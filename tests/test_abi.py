"""A C core of another build is refused at import, before anything of it is used."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from cxlkv import _core
from cxlkv._core import abi
from cxlkv._native import lib


def test_the_numbers_agree() -> None:
    assert lib.CXLKV_ABI == lib.cxlkv_abi() == abi.ABI
    major, minor, patch = map(int, _core.version().split("."))
    assert major * 10000 + minor * 100 + patch == lib.CXLKV_BUILD


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
    """As after a pull without a build: an import that fails, not a crash later."""
    program = """
import sys, types
native = sys.modules["cxlkv._native"] = types.ModuleType("cxlkv._native")
native.ffi = native.lib = types.SimpleNamespace()
import cxlkv.pool
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: cxlkv._native was built for interface none" in done.stderr
