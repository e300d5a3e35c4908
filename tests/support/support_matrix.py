"""What cxlkv runs with, as the project's files say: pins, version checks, and what the CI runs.

    python -m tests.support.support_matrix

writes the tables of docs/reference/support.md; tests/test_packaging.py holds the page to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from cxlkv.adapters.common.versions import Versions
from cxlkv.adapters.lmcache.settings import VERSIONS as LMCACHE
from cxlkv.adapters.sglang.settings import VERSIONS as SGLANG
from cxlkv.adapters.vllm.plugin import VERSIONS as VLLM

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/support.md"
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
PINS = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "lmcache": LMCACHE}
LIBRARIES = {"torch": "`[torch]`", "triton": "`[gpu]`", "transformers": "`[transformers]`"}
# By the name in the C source, where "Linux N.M" stands beside it.
KERNEL = {
    "MAP_SYNC": "pools in files on fsdax",
    "MADV_POPULATE_READ": "`pool.admin.prefault()`",
    "MADV_POPULATE_WRITE": "local copies that are in place before they are used",
    "MADV_COLLAPSE": "huge pages whatever the kernel's setting for shared memory is",
    "MPOL_WEIGHTED_INTERLEAVE": "interleaving over nodes by their weights",
}


def one(pattern: str, text: str) -> str:
    found = re.findall(pattern, text, re.MULTILINE)
    assert len(found) >= 1, pattern
    return str(found[0])


def jobs(workflow: str) -> dict[str, object]:
    parsed = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())
    return dict(parsed["jobs"])


def runners(job: str) -> list[str]:
    text = str(jobs("test.yml")[job])
    return [name for name in ("ubuntu-24.04", "ubuntu-24.04-arm") if f"'{name}'" in text]


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    yield from (lines[0], "|" + "---|" * len(rows[0]), *lines[1:], "")


def engine_rows() -> Iterator[tuple[str, ...]]:
    yield "engine", "versions it starts with", "tested with", "by"
    for name, versions in ENGINES.items():
        tested = one(rf"^{name.upper()}_VERSION := (\S+)", MAKEFILE)
        yield versions.engine, bounds(versions), tested, f"`make test-{name}`, nightly"
    mooncake = one(r"^MOONCAKE := \S+==(\S+)", MAKEFILE)
    yield "Mooncake's store, as a cold tier", "", mooncake, "`make test-remote`, nightly"


def bounds(versions: Versions) -> str:
    return f"`{versions!s}`"


def library_rows() -> Iterator[tuple[str, ...]]:
    yield "library", "extra", "from", "tested with"
    for name, extra in LIBRARIES.items():
        yield name, extra, one(rf'"{name}>=([\d.]+)"', PROJECT), PINS[name]


def python_rows() -> Iterator[tuple[str, ...]]:
    full = one(r"python-version: \"([\d.]+)\"", (ROOT / ".github/workflows/test.yml").read_text())
    versions = re.findall(r"Python :: (3\.\d+)", PROJECT)
    in_ci = one(r"python-version: \|\n((?: +3\.\d+\n)+)", str(workflow_text())).split()
    assert sorted(in_ci) == sorted(versions)
    yield "CPython", "what runs in it"
    for version in versions:
        runs = "the wheel: `make wheel-test`"
        yield version, f"all tests; {runs}" if version == full else runs


def workflow_text() -> str:
    return (ROOT / ".github/workflows/test.yml").read_text()


def cpu_rows() -> Iterator[tuple[str, ...]]:
    yield "CPU", "wheel", "tests in the public CI"
    wheels = one(r"^RELEASE_CPUS := (.*)", MAKEFILE).split()
    for cpu, runner in zip(wheels, runners("test"), strict=True):
        glibc = one(r"-target \$\$cpu-linux-gnu\.([\d.]+)", MAKEFILE)
        yield cpu, f"glibc {glibc} or later", f"C and Python, on {runner}"


def kernel_rows() -> Iterator[tuple[str, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for source in sorted((ROOT / "native/src").rglob("*.c")):
        for name, release in re.findall(
            r"#(?:ifndef|define) (\w+).*/\* Linux ([\d.]+)", source.read_text()
        ):
            found[name] = tuple(map(int, release.split(".")))
    assert found.keys() == KERNEL.keys()
    yield "Linux", "from this version on"
    for name in sorted(found, key=lambda each: (found[each], each)):
        yield ".".join(map(str, found[name])), KERNEL[name]


def rendered() -> str:
    """The tables, in the order of the page."""
    parts = (engine_rows(), library_rows(), python_rows(), cpu_rows(), kernel_rows())
    return "\n".join(line for rows in parts for line in table(*rows))


def page(text: str) -> str:
    """docs/reference/support.md with the tables between its two markers."""
    before, begin, rest = text.partition("<!-- matrix: begin -->\n")
    _, end, after = rest.partition("<!-- matrix: end -->")
    assert begin
    assert end
    return f"{before}{begin}{rendered()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
