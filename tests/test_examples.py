"""The files of examples/ run as a user runs them, twice where they leave a pool, and say what they
promise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.errors import UnsupportedError

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SOURCES = sorted(FOLDER.glob("*.py"))
FILES = [path for path in sorted(FOLDER.iterdir()) if path.name != "README.md"]
LINES_MAX = 60

# What the last run says: its figures are what the example is for.
SAID = {
    "quickstart.py": r"they found \[3(, 3)*\]\.\nRead: 1\d MB instead of 134.* is 0\.\d % off",
    "object_store.py": r"finds 64 of 65 names\n.*all are 7\n.*first is 9\nforgot 64 blocks",
    "tiers.py": r"are 1\d,\d+ of their 24,576 tokens\nwith the file 24,576 are found",
    "hosts.py": r"host 1 found 8,192 of 8,192 .*\n.* 77 of 512 pages.*\n.* in order: True",
    "remote_pool.py": r"first time: 4,096 tokens.*\n.*second time: 4,096.*\npulled: 256 pages",
    "gpu_decoder.py": r"4 requests of 4,096 tokens.*\n[\d.]+ ms a step",
    "emulate_device.py": r"all pages: .* MB\n.*15 %.* MB\n.*5 % of them: .* MB",
    "transformers_generate.py": r"(.* K and V a token: .*Lantern Seven.*\n){3}",
    "transformers_chat.py": r"(.*(Lantern Seven|Vasari).*\n.* 2,\d{3} found.*\n(.*\n)?){2}",
    "prefill_elsewhere.py": r"handed over: \d,\d{3} bytes\ntaken over in .*\n.*Ingrid Vasari",
    "vllm_prefixes.py": r"(.*\n.*(Lantern Seven|Vasari).*\n  2,304 of 2,3\d\d tokens found.*\n){2}",
    "vllm_sparse.py": r"(.*(all pages|15 %|5 %): .*Lantern Seven.*\n.*ms each\n){3}",
}
ELSEWHERE = {"prefill_decode.py": "it serves: tests/vllm/test_prefill_decode.py runs it"}


def runs(path: Path) -> object:
    """The path with its marks: those that load a model take long."""
    marks = [pytest.mark.timeout(1800)]
    if "from_pretrained" in path.read_text():
        marks.append(pytest.mark.nightly)
    return pytest.param(path, marks=marks, id=path.name)


def lacking(path: Path) -> str | None:
    """What the example imports, and is not there."""
    tree = ast.parse(path.read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    ]
    for module in modules:
        if module is not None and find_spec(module.split(".")[0]) is None:
            return f"{module.split('.')[0]} is not installed here"
    if "cxlkv.demo" in modules:
        from cxlkv.demo import smollm2

        try:
            smollm2.prepare()
        except UnsupportedError as missing:
            return str(missing)
    return None


@pytest.fixture
def left() -> Iterator[list[str]]:
    """Pools that a run has left, to be removed at the end unless they were there before."""
    before = {str(path) for path in Path("/dev/shm").glob("*.pool")}
    found: list[str] = []
    yield found
    for name in {*found} - before:
        if Path(name).exists():
            CXLPool.remove(name)


@pytest.mark.parametrize("path", [*map(runs, SOURCES)])
def test_an_example_runs_again_on_what_it_left(path: Path, tmp_path: Path, left: list[str]) -> None:
    if path.name in ELSEWHERE:
        pytest.skip(ELSEWHERE[path.name])
    if lack := lacking(path):
        pytest.skip(lack)
    left += re.findall(r"\"(/dev/shm/[\w.-]+\.pool)\"", path.read_text())
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Several threads of torch wait for each other, for seconds on a machine with other work.
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, path],
            cwd=tmp_path,
            env={**threads, **os.environ, **own},
            capture_output=True,
            text=True,
        )
        said = done.stdout + done.stderr
        left += re.findall(r"made (/dev/shm/[\w.-]+\.pool)", said)
        assert done.returncode == 0, said[-3000:]
        if not any(Path(name).exists() for name in left):
            break
    assert re.search(SAID[path.name], done.stdout), said[-3000:]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_an_example_is_what_a_user_would_copy(path: Path) -> None:
    tree = ast.parse(path.read_text())
    words = ast.get_docstring(tree) or ""
    assert f"\n    python examples/{path.name}" in words
    assert "\nNeeds: " in words
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = {name for name in used if re.match(r"_[a-z]", name)}
    assert private == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_in_the_table(path: Path) -> None:
    assert path.suffix == ".ipynb" or len(path.read_text().splitlines()) <= LINES_MAX
    assert f"| [{path.name}]({path.name}) |" in (FOLDER / "README.md").read_text()
