"""Modules and methods by their names up to 0.2: the same ones, and a warning that says where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

import cxlkv
import cxlkv.stats
from cxlkv import CXLPool
from cxlkv._moved import MOVED, MovedToAdmin


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No old name is known before the test and after it."""

    def forget() -> None:
        for name in MOVED:
            if sys.modules.pop(name, None) is not None:
                folder, _, last = name.rpartition(".")
                delattr(sys.modules[folder], last)

    forget()
    yield
    forget()


@pytest.mark.parametrize("old", sorted(MOVED))
def test_the_old_name_gives_the_same_module(old: str) -> None:
    new = import_module(MOVED[old])
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=f"^{old} is {MOVED[old]} now; ") as warned:
        assert import_module(old) is new
    assert len(warned) == 1
    assert import_module(old) is new  # without another warning, which would be an error here
    assert new.__spec__ is spec


def test_the_warning_names_the_line_that_imports() -> None:
    with pytest.warns(DeprecationWarning, match="cxlkv.ops.metrics") as warned:
        exec(compile("from cxlkv import metrics", "a_users_file.py", "exec"), {})
    assert warned[0].filename == "a_users_file.py"


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"cxlkv\.warm"):
        import_module("cxlkv.warm")


def test_the_old_command_runs() -> None:
    command = [sys.executable, "-W", "always", "-m", "cxlkv.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "cxlkv.cli is cxlkv.ops.cli now" in done.stderr
    assert "pool" in done.stdout


def test_what_operators_do_is_found_by_its_old_name(pool: CXLPool) -> None:
    for name in MovedToAdmin.NAMES:
        with pytest.warns(DeprecationWarning, match=rf"pool\.{name} is pool\.admin\.{name} now"):
            assert getattr(pool, name) is not None
    with pytest.warns(DeprecationWarning, match="audit") as warned:
        pool.audit = 0.5  # type: ignore[attr-defined]
    assert warned[0].filename == __file__
    assert pool.admin.audit == 0.5
    with pytest.raises(AttributeError, match="'CXLPool' object has no attribute 'put'"):
        pool.put("a", b"b")  # type: ignore[attr-defined]


def test_a_pool_has_few_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {n for n in dir(kind) if n[0] != "_" and callable(getattr(kind, n))} - {"NAMES"}

    assert len(methods(CXLPool)) <= 20, sorted(methods(CXLPool))
    assert len(methods(cxlkv.ObjectPool)) <= 20, sorted(methods(cxlkv.ObjectPool))


def test_a_pool_is_inspected_by_its_old_name_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"cxlkv\.stats\.look is inspect now") as warned:
        assert cxlkv.stats.look is cxlkv.stats.inspect
    assert warned[0].filename == __file__
