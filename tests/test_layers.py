"""The layers of the C core: a folder uses those below it, a file what does not use it in turn.

Who uses whom is read from the text: which functions and variables a file defines for others, and
whose names occur in it. So a prototype that somebody writes by hand is no way round.
"""

from __future__ import annotations

import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.test_tidy import ROOT, files, name_of, without_c_comments

# From below. A folder may use itself and what stands before it.
FOLDERS = (
    "base kernels region coherence format pages host sharing pool sequence prefix tiers ndp worker objects admin"
).split()
SOURCES = ROOT / "native/src"
HOOKS = SOURCES / "hooks.c"  # where folders above answer host/hooks.h
HOOKS_MAX = 12

DEFINED = re.compile(
    r"^(?!static|INLINE|typedef|extern|_Static|else|return|if)[A-Za-z_][\w \t*]*?[ *]\**(\w+)"
    r"(?:\([^;{}]*\)\s*\{|\[?\]?[^;(){}=\n]*=[^=])",
    re.MULTILINE,
)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def folder_of(path: Path) -> str:
    return path.relative_to(SOURCES).parts[0]


@cache
def text_of(path: Path) -> str:
    """Without comments, strings and the lines of the preprocessor, but for what it includes."""
    text = without_c_comments(path.read_text())
    kept = [line for line in text.splitlines() if not line.startswith("#")]
    return STRING.sub('""', "\n".join(kept))


@cache
def definitions() -> dict[str, Path]:
    """Where each function or variable is that other files may use."""
    found: dict[str, Path] = {}
    for path in files(".c"):
        if path.is_relative_to(SOURCES) and path != HOOKS:
            found |= dict.fromkeys(DEFINED.findall(text_of(path)), path)
    return found


def used_by(path: Path) -> set[tuple[str, Path]]:
    """Names and where they are defined, of what a file uses or includes of others."""
    words = set(re.findall(r"(?<![.\w>])([A-Za-z_]\w*)\(", text_of(path)))
    used = {(name, definitions()[name]) for name in words & definitions().keys()}
    for name in re.findall(r'^#include "(\w+/\w+\.h)"', path.read_text(), re.MULTILINE):
        if (SOURCES / name).is_file():
            used.add((name, SOURCES / name))
    return {(name, where) for name, where in used if where != path}


def upward() -> set[str]:
    found = set()
    for path in files(".c", ".h"):
        if not path.is_relative_to(SOURCES) or path == HOOKS:
            continue
        rank = FOLDERS.index(folder_of(path))
        for name, where in used_by(path):
            if FOLDERS.index(folder_of(where)) > rank:
                found.add(f"{name_of(path)[len('native/src/') :]} uses {name}")
    return found


def calls() -> dict[str, set[str]]:
    """Which files' functions a file calls. Headers do not count: they are read by all."""
    sources = [path for path in files(".c") if path.is_relative_to(SOURCES) and path != HOOKS]
    return {
        name_of(path): {name_of(where) for _, where in used_by(path) if where.suffix == ".c"}
        for path in sources
    }


def test_no_files_call_each_other_round() -> None:
    try:
        TopologicalSorter(calls()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' uses '.join(reversed(error.args[1]))}") from error


def test_the_core_uses_no_folder_above_its_own() -> None:
    assert upward() == set(), "a file uses what lies in a folder above its own"


def test_the_folders_are_those_of_the_layers() -> None:
    assert {path.name for path in SOURCES.iterdir()} == {*FOLDERS, HOOKS.name}


def test_the_measuring_loops_use_the_lowest_folders_only() -> None:
    """They are an extension of their own, which has no part of a pool."""
    for path in files(".c", ".h"):
        if path.is_relative_to(ROOT / "native/measure"):
            own = re.findall(r"^static [^=;]*?(\w+)\(", text_of(path), re.MULTILINE)
            for name, where in used_by(path):
                if name not in own:
                    assert folder_of(where) in ("base", "coherence"), f"{path.name} uses {name}"


def test_hooks_are_few() -> None:
    """A hook is an arrow upward that the test above does not see."""
    answered = re.findall(r"^    \.(\w+) = \w+,$", HOOKS.read_text(), re.MULTILINE)
    declared = re.findall(r"\(\*(\w+)\)\(", (SOURCES / "host/hooks.h").read_text())
    assert answered == declared
    assert len(answered) <= HOOKS_MAX
