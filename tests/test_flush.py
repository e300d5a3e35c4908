"""The flushed address is the argument: read off the compiled code, as coherent hardware hides it.

A well-known flush library encodes CLWB by hand, with another register than it means.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("gcc", "objdump")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code"),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)), reason="needs gcc and objdump (Debian: binutils)"
    ),
]
FLUSHES = {"write_back_clwb": "clwb", "drop_clflushopt": "clflushopt", "drop_clflush": "clflush"}


def functions(folder: Path, *options: str) -> dict[str, list[str]]:
    """Instructions of each function of flush.c."""
    compiled = folder / "flush.o"
    includes = [f"-I{ROOT}/native/include", f"-I{ROOT}/native/src"]
    source = str(ROOT / "native/src/base/flush.c")
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", *options, *includes, "-c", source]
    subprocess.run([*command, "-o", str(compiled)], check=True)
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(compiled)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if name := re.match(r"[0-9a-f]+ <([\w.]+)>:", line):
            found[name[1]] = current = []
        elif instruction := re.match(r"\s+[0-9a-f]+:\s+(.+)", line):
            current.append(instruction[1].strip())
    return found


@pytest.mark.parametrize(("function", "instruction"), FLUSHES.items())
def test_a_flush_takes_each_line_from_its_argument_on(
    tmp_path: Path, function: str, instruction: str
) -> None:
    """Not inlined, the first argument comes in rdi, is flushed, and grows by a line to the end."""
    code = functions(tmp_path, "-O2", "-fno-inline")[function]
    flushed = [line for line in code if re.match(r"(clwb|clflush)", line)]
    assert [line.split() for line in flushed] == [[instruction, "(%rdi)"]]
    uses = {tuple(line.split()) for line in code if line.endswith(",%rdi")}
    assert uses == {("add", "$0x40,%rdi"), ("cmp", "%rsi,%rdi")}


def test_only_these_functions_flush_and_all_fences_are_there(tmp_path: Path) -> None:
    found = functions(tmp_path, "-O2", "-fno-inline")
    flushing = {
        name for name, code in found.items() if any(re.match(r"clwb|clflush", c) for c in code)
    }
    assert flushing == set(FLUSHES)
    assert "sfence" in found["flush_fence_stores"]
    assert "mfence" in found["flush_fence_all"]
    for name, instruction in (("stream_16", "movnt"), ("stream_32", "vmovnt")):
        assert any(line.startswith(instruction) for line in found[name])
        assert any(f"<{name}>" in line for line in found["flush_copy_in"])
