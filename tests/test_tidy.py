"""What no other tool checks: imports go down the layers, files say what they are for, and more.

Only text is read here, so that it runs in a second and needs nothing installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Low to high. A module imports from the groups before its own, and from its own. Where a folder's
# modules have a layer each, its own name stands for its __init__.py.
LAYERS = (
    {
        "errors",
        "layout",
        "numbers",
        "_core.abi",
        "refusals",
        "machine.lifetime",
        "machine.state",
    },
    {"arrays"},
    {"_core"},
    {"machine.locking", "machine.sysfs", "machine.huge_pages"},
    {"machine.prefault"},
    {
        "machine.certificate",
        "machine.devices",
        "machine.nodes",
        "machine.placement",
        "machine.regions",
        "machine.topology",
    },
    {"machine.numa_mode", "machine.suggestions"},
    {"machine.coherence"},
    {"machine.sizes"},
    {"prefix", "stats", "machine", "machine.costs", "machine.hosts", "ops.gc"},
    {"ndp"},
    {"ndp.audit", "_io_hooks"},
    {"sequence", "pages", "config"},
    {"pool", "objects"},
    {
        *("emulation", "transport", "ops.metrics", "tiers.cold", "tiers.cold_file"),
        *("tiers.cold_mooncake", "tiers.cold_server", "tiers.cold_shared", "tiers.cold_store"),
        *("tiers.compress", "tiers.local", "tiers.states"),
        *("tiers.objects", "tiers.policy", "tiers.prefetch", "tiers.remote", "tiers.reuse"),
    },
    {"tiers", "tiers.tiers", "gpu"},
    {"tiers.quota"},
    {"adapters"},
    {
        *("bench", "demo", "ops", "ops.advise", "ops.bench", "ops.cli", "ops.console", "ops.demo"),
        *("ops.doctor", "ops.doctor_engine", "ops.doctor_findings", "ops.doctor_imports"),
        *(
            "ops.doctor_machine",
            "ops.doctor_trial",
            "ops.info",
            "ops.lab",
            "ops.models",
            "ops.pool",
            "ops.services",
            "ops.size",
            "ops.top",
            "ops.tune",
        ),
    },
)
RANK = {name: rank for rank, group in enumerate(LAYERS) for name in group}
TOP = len(LAYERS) - 1
SPLIT = ("machine", "ops", "tiers")  # folders whose modules have a layer each

# Low to high as well: whatever its layer, a module imports from no folder above its own. The
# front, cxlkv/*.py, has two floors: the binding needs the lower one.
FOLDERS = (
    {"errors", "numbers", "layout", "arrays", "refusals"},
    {"_core"},
    {"machine"},
    {
        *("_io_hooks", "config", "pages", "prefix", "stats", "sequence", "objects"),
        *("pool", "ndp"),
    },
    {"emulation", "transport"},
    {"tiers", "gpu"},
    {"adapters"},
    {"bench", "demo"},
    {"ops"},
)
FLOOR = {name: floor for floor, group in enumerate(FOLDERS) for name in group}

# Modules with a rule of their own instead of a rank: what each may import.
KERNELS_MAY_IMPORT = {"errors", "layout", "arrays", "kernels"}  # tensors and page ids, never a pool
NATIVE_USERS = {"_native": "_core", "_measure": "bench"}  # a binding for each

# The binding, and the handles that it takes, are the front's and the NDP backends'; machine/ is
# below the front. Who else has them still: the list may only shrink. Benchmarks time the core.
CORE_USERS = {"cxlkv", "cxlkv/machine", "cxlkv/pool", "cxlkv/sequence", "ndp"}
CORE_USERS_ELSEWHERE = {
    *("cxlkv/gpu/mailbox.py", "cxlkv/ops/gc.py", "cxlkv/ops/info.py", "cxlkv/ops/pool.py"),
    *("cxlkv/tiers/local.py", "emulation/link.py"),
}
HANDLE_READERS_ELSEWHERE = {"cxlkv/ops/services.py", "cxlkv/tiers/local.py", "emulation/link.py"}

SHIPPED = ("kernels", "ndp", "emulation", "bench")  # top-level folders that ship inside cxlkv
PUBLIC_NAMES_MAX = 60
LINE_LENGTH_MAX = 100
FUNCTION_LINES_MAX = 70

# Low-level cache maintenance goes through one seam: a flush in the wrong place still passes
# every test on coherent hardware.
FLUSH = re.compile(
    r"_mm_(clflush|clwb|[sm]fence)|__builtin_ia32_(clflush|clwb|[sm]fence)"
    r"|asm.*(clflush|clwb|dc c|dsb)"
)
FLUSH_ALLOWED = re.compile(r"native/src/(kernels/\w+|base/flush)\.[ch]")

# How a page of docs/ names something of ours: in an import, or with its module in front.
IMPORTED = re.compile(r"from (cxlkv[\w.]*) import (\w+(?:, *\w+)*)")
NAMED_IN_FULL = re.compile(r"`(cxlkv(?:\.[a-z_]+)+)\.([A-Za-z]\w+)")

# Folders that only the machine of one developer has.
MACHINE_PATH = re.compile(r"(?<![\w.>)])/(work|root|opt|home)/")
TEXT_SUFFIXES = {".py", ".pyi", ".c", ".h", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh"}


@cache
def files(*suffixes: str) -> list[Path]:
    """The project's files with these suffixes, linked folders once, nothing that was built."""
    folders = ("cxlkv", *SHIPPED, "native", "tests", "docs", "examples", ".ci")
    found = {path.resolve() for name in folders for path in (ROOT / name).rglob("*")}
    found |= {path for path in ROOT.glob("*") if path.name != ".git"}  # a file in a worktree
    return sorted(p for p in found if p.is_file() and (p.suffix in suffixes or not suffixes))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str | None:
    """Which module of the layers a shipped file belongs to: "pool", "machine.sysfs", "ndp"; None
    elsewhere."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "cxlkv":
        return layered(list(parts[1:]))
    return layered(list(parts)) if parts[0] in SHIPPED else None


def layered(parts: list[str]) -> str:
    """The module of the layers that stands for `cxlkv.<parts>`: its own, or its folder."""
    parts = [part for part in parts if part != "__init__"] or parts
    name = ".".join(parts[:2])
    return name if name in RANK or parts[0] in SPLIT else parts[0]


def package_of(path: Path) -> list[str]:
    """The package that a relative import in this file starts from."""
    parts = path.relative_to(ROOT).parent.parts
    return list(parts if parts[0] == "cxlkv" else ("cxlkv", *parts))


@cache
def known_modules() -> set[str | None]:
    return {*RANK, "kernels", *NATIVE_USERS, *map(module_of, files(".py"))}


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """Each module of ours that a file imports anywhere in it: "pool" for `cxlkv.pool.x`.

    Imports inside functions and under TYPE_CHECKING count. The package itself, as in
    `import cxlkv` or `from cxlkv import CXLPool`, is "": it brings in everything.
    """
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package_of(path)[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "cxlkv":
                yield module_named(parts)


def module_named(parts: list[str]) -> str:
    """The module that `cxlkv.<parts>` is, or is in; "" for the package itself."""
    while parts:
        found = layered(parts)
        if found in known_modules():
            return found
        parts = parts[:-1]
    return ""


def layer_faults(path: Path, tree: ast.AST) -> list[str]:
    module = module_of(path)
    if module is None or module in ("__init__", "__main__"):
        return []  # the package's front door may show every layer
    faults = []
    if module not in RANK and module != "kernels":
        faults.append(f"{module} has no place in LAYERS: say which layer it is")
    elif floor_of(module) == len(FOLDERS) and module != "kernels":
        faults.append(f"{module} has no place in FOLDERS: say what its folder may import")
    rank = RANK.get(module, 0)
    for other in imported(path, tree):
        if other in NATIVE_USERS:
            allowed = module == NATIVE_USERS[other]
        elif module == "kernels":
            allowed = other in KERNELS_MAY_IMPORT
        elif other == "kernels":
            allowed = rank > RANK["arrays"]
        else:
            allowed = RANK.get(other, TOP) <= rank and floor_of(other) <= floor_of(module)
        if not allowed:
            faults.append(f"{module} may not import {other or 'the package cxlkv itself'}")
    return faults


def floor_of(module: str) -> int:
    """Where the module's folder stands in FOLDERS; the package itself is a matter of ranks."""
    return FLOOR.get(module.partition(".")[0], len(FOLDERS)) if module else 0


def python_functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and line count of each function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def c_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """First line and line count of each function: it begins in column 0 and ends there."""
    first, opened = None, False
    for index, line in enumerate(lines):
        if line[:1].isalpha() and "(" in line and not line.startswith("typedef"):
            first, opened = index, False
        if first is None:
            continue
        if not opened and line.endswith(";"):
            first = None  # a prototype
        elif line.endswith("{"):
            opened = True
        elif opened and line.startswith("}"):
            yield lines[first], index - first + 1
            first = None


def without_c_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def python_faults(path: Path) -> list[str]:
    text, tree = path.read_text(), parsed(path)
    docstring = [] if ast.get_docstring(tree) else ["say in the first line what the file is for"]
    return [*layer_faults(path, tree), *docstring, *too_long(text, python_functions(tree))]


def c_faults(path: Path) -> list[str]:
    text = path.read_text()
    faults = too_long(text, c_functions(text.splitlines()))
    if not text.startswith(("/*", "//")):
        faults.append("say in the first line what the file is for")
    if name_of(path).startswith("native/") and not FLUSH_ALLOWED.fullmatch(name_of(path)):
        found = [match[0] for match in FLUSH.finditer(without_c_comments(text))]
        faults += [f"{one}: flush in base/flush.c and kernels/*.c only" for one in found]
    return faults


def too_long(text: str, functions: Iterable[tuple[str, int]]) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    found = [f"line {number} is too long" for number, line in lines if len(line) > LINE_LENGTH_MAX]
    return found + [
        f"{name} has more than {FUNCTION_LINES_MAX} lines"
        for name, count in functions
        if count > FUNCTION_LINES_MAX
    ]


def test_files_are_tidy() -> None:
    faults = [(name_of(path), fault) for path in files(".py") for fault in python_faults(path)]
    faults += [(name_of(path), fault) for path in files(".c", ".h") for fault in c_faults(path)]
    assert faults == []


def imports_the_core(tree: ast.AST) -> bool:
    return any(
        "_core" in (node.module or "").split(".") or "_core" in {each.name for each in node.names}
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    )


def reads_a_handle(tree: ast.AST) -> bool:
    """True if it reads the handle of another object than itself."""
    return any(
        node.attr == "_handle"
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    )


def test_only_the_front_has_the_core_and_its_handles() -> None:
    trees = {
        name_of(path): parsed(path)
        for path in files(".py")
        if name_of(path).startswith(("cxlkv/", "ndp/", "emulation/"))
        and not name_of(path).startswith("cxlkv/_core/")
        and name_of(path.parent) not in CORE_USERS
    }
    assert {name for name, tree in trees.items() if imports_the_core(tree)} == CORE_USERS_ELSEWHERE
    readers = {name for name, tree in trees.items() if reads_a_handle(tree)}
    assert readers == HANDLE_READERS_ELSEWHERE


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = [
        f"{name_of(path)}:{number}"
        for path in files()
        if path.suffix in TEXT_SUFFIXES or not path.suffix
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_the_architecture_names_files_that_exist() -> None:
    pages = [ROOT / f"docs/explanation/{name}.md" for name in ("architecture", "one-host")]
    text = "".join(page.read_text() for page in pages)
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+)`", text))
    assert len(named) > 20, "one-host.md walks through the files by name"
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_table_of_promises_names_tests_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|c))`", (ROOT / "docs/project/testing.md").read_text()))
    there = [name_of(path) for path in files(".py", ".c")]
    assert [
        name for name in named if not any(f"/{one}".endswith(f"/{name}") for one in there)
    ] == []


def public_names(path: Path) -> set[str]:
    """What the module's `__all__` has."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def documented_names() -> set[tuple[Path, str]]:
    """(module, name) of what README.md and docs/ import or name in full."""
    paths = (ROOT / "README.md", *(ROOT / "docs").glob("[!d]*/*.md"))
    pages = "\n".join(path.read_text() for path in paths)
    named = [(m[1], n) for m in IMPORTED.finditer(pages) for n in m[2].replace(" ", "").split(",")]
    found = set()
    for module, name in (*named, *NAMED_IN_FULL.findall(pages)):
        at = ROOT.joinpath(*module.split("."))
        if not (at / f"{name}.py").is_file() and not (at / name).is_dir():
            found.add((at.with_suffix(".py") if not at.is_dir() else at / "__init__.py", name))
    return found


def test_what_the_docs_name_is_public_and_little_else() -> None:
    documented = documented_names()
    assert len(documented) > 20
    assert [(p.name, n) for p, n in documented if n not in public_names(p)] == []
    public = {name for path in files(".py") for name in public_names(path)}
    assert len(public) <= PUBLIC_NAMES_MAX, sorted(public)


def test_the_links_lead_to_the_shipped_folders() -> None:
    for name in SHIPPED:
        assert (ROOT / "cxlkv" / name).resolve() == ROOT.resolve() / name


@pytest.mark.parametrize(
    ("name", "source", "faults"),
    [
        ("cxlkv/prefix.py", "from cxlkv import _core, errors", 0),
        ("cxlkv/prefix.py", "from cxlkv.machine.coherence import publish", 0),
        ("cxlkv/prefix.py", "from cxlkv.pool import CXLPool", 1),
        ("cxlkv/prefix.py", "from cxlkv import pool", 1),
        ("cxlkv/prefix.py", "import cxlkv.pool as p", 1),
        ("cxlkv/prefix.py", "from .pool import CXLPool", 1),
        ("cxlkv/prefix.py", "from . import pool, errors", 1),
        ("cxlkv/prefix.py", "if TYPE_CHECKING:\n    from cxlkv.sequence import Sequence", 1),
        ("cxlkv/prefix.py", "def f():\n    import cxlkv.pool", 1),
        ("cxlkv/prefix.py", "import cxlkv", 1),
        ("cxlkv/prefix.py", "from cxlkv import CXLPool", 1),
        ("cxlkv/prefix.py", "from cxlkv._native import lib", 1),
        ("cxlkv/_core/base.py", "from cxlkv._native import lib", 0),
        ("cxlkv/_core/base.py", "from cxlkv._measure import lib", 1),
        ("bench/loops.py", "from cxlkv._measure import lib", 0),
        ("cxlkv/ops/cli.py", "from cxlkv import CXLPool, pool", 0),
        ("cxlkv/errors.py", "from cxlkv.kernels import gather", 1),
        ("cxlkv/adapters/vllm.py", "from ..pool import CXLPool", 0),
        ("cxlkv/adapters/vllm.py", "from ..ops.cli import app", 1),
        ("cxlkv/novelty.py", "", 1),
        ("cxlkv/machine/novelty.py", "", 1),
        ("cxlkv/machine/nodes.py", "from . import sysfs", 0),
        ("cxlkv/machine/sysfs.py", "from cxlkv.machine import nodes", 1),
        ("cxlkv/machine/sysfs.py", "from cxlkv import machine", 1),
        ("cxlkv/_core/__init__.py", "from cxlkv.machine.state import state_folder", 1),
        ("cxlkv/_core/abi.py", "from cxlkv._native import lib", 1),
        ("cxlkv/sequence/batch.py", "from cxlkv.ndp import audit, simd", 0),
        ("cxlkv/sequence/batch.py", "from cxlkv.tiers.cold import ColdTier", 1),
        ("cxlkv/tiers/cold.py", "from cxlkv.tiers.tiers import Tiers", 1),
        ("cxlkv/tiers/quota.py", "from cxlkv.tiers import Tiers", 0),
        ("cxlkv/tiers/tiers.py", "from cxlkv.ops.gc import collect", 1),
        ("kernels/gather.py", "from cxlkv.layout import KVLayout\nfrom . import merge", 0),
        ("kernels/gather.py", "from cxlkv._core import isa", 1),
        ("ndp/engine.py", "from ..kernels.gather import gather\nfrom .simd import scan", 0),
        ("ndp/engine.py", "from ..sequence import Sequence", 1),
        ("ndp/engine.py", "from . import audit", 1),
        ("emulation/link.py", "from cxlkv.pool import CXLPool", 0),
        ("cxlkv/objects.py", "from cxlkv.emulation import link", 1),
        ("cxlkv/sequence/batch.py", "def f():\n    from cxlkv.emulation.link import Link", 1),
    ],
)
def test_the_layer_rule_sees_every_way_to_import(name: str, source: str, faults: int) -> None:
    found = layer_faults(ROOT / name, ast.parse(source))
    assert len(found) == faults, found


def test_the_length_rule_finds_c_functions() -> None:
    source = """\
int prototype(int a,
              int b);
struct row {
    int a;
};
static int
    odd;
int one(void) { return 1; }
static int two(int a,
               int b) {
    if (a) {
        return b;
    }
    return 0;
}
"""
    assert list(c_functions(source.splitlines())) == [("static int two(int a,", 7)]
