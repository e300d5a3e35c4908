"""No Python files import each other in a circle: one of them can be read, tested and moved alone.

Imports at module level count, and those inside functions, which only put a circle off. Those for
type checkers do not: nothing runs by them. The packages that a file lies in are loaded before it,
and are no part of what it asks for.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_tidy import ROOT, SHIPPED, files, name_of, package_of, parsed


def module_name(path: Path) -> str:
    """The dotted name that a file is imported by, wherever it lies in the checkout."""
    parts = [*path.relative_to(ROOT).with_suffix("").parts]
    parts = parts if parts[0] == "cxlkv" else ["cxlkv", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_time_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from run_time_imports(ast.Module(node.orelse, []))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            yield from run_time_imports(node)


def imported_files(path: Path, tree: ast.AST, known: Container[str]) -> set[str]:
    """Names in `known` of the files that this one imports at run time."""
    names: set[str] = set()
    for node in run_time_imports(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        start = package_of(path)[: -(node.level - 1) or None] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        inner = {f"{base}.{alias.name}" for alias in node.names}
        names |= {name if name in known else base for name in inner}
    return {name for name in names if name in known} - {module_name(path)}


def test_no_python_files_import_each_other_round() -> None:
    shipped = ("cxlkv", *SHIPPED)
    paths = {module_name(p): p for p in files(".py") if name_of(p).split("/")[0] in shipped}
    graph = {name: imported_files(path, parsed(path), paths) for name, path in paths.items()}
    assert len(graph["cxlkv.pool.pool"]) > 5, "imports are not seen"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' imports '.join(reversed(error.args[1]))}") from error


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from cxlkv.pool import CXLPool", {"cxlkv.pool"}),
        ("from cxlkv import pool, errors", {"cxlkv.pool", "cxlkv.errors"}),
        ("def f():\n    import cxlkv.pool", {"cxlkv.pool"}),
        ("from .ndp import simd", {"cxlkv.ndp.simd"}),
        (
            "if TYPE_CHECKING:\n    from . import pool\nelse:\n    from . import errors",
            {"cxlkv.errors"},
        ),
        ("import cxlkv.prefix, numpy", set()),
    ],
)
def test_run_time_imports_are_seen(source: str, found: set[str]) -> None:
    known = {"cxlkv.pool", "cxlkv.errors", "cxlkv.ndp", "cxlkv.ndp.simd", "cxlkv.prefix"}
    assert imported_files(ROOT / "cxlkv/prefix.py", ast.parse(source), known) == found
