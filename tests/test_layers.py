"""The layers of the C core: a folder uses those below it, a file what does not use it in turn.

The build keeps a folder from the headers of those above it (native/CMakeLists.txt), which is tried
here. It does not see calls that need no header of ours: of the public interface, and of files
within a folder. Those are read from the text.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_tidy import ROOT, files, name_of, without_c_comments

SOURCES = ROOT / "native/src"
BUILD = (ROOT / "native/CMakeLists.txt").read_text()
FOLDERS: list[str] = re.findall(r"^set\(folders ([^)]*)\)", BUILD, re.MULTILINE)[0].split()
"""From below. A folder may use itself and what stands before it."""
HOOKS = SOURCES / "hooks/hooks.c"  # where folders above answer host/hooks.h
HOOKS_MAX = 4

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
    """Without comments, strings and the lines of the preprocessor."""
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


def calls() -> dict[str, set[str]]:
    """Which files' functions a file calls."""
    found = {}
    for path in files(".c"):
        if path.is_relative_to(SOURCES) and path != HOOKS:
            words = set(re.findall(r"(?<![.\w>])([A-Za-z_]\w*)\(", text_of(path)))
            used = {definitions()[name] for name in words & definitions().keys()} - {path}
            found[name_of(path)] = {name_of(where) for where in used}
    return found


def test_a_header_has_the_functions_of_one_file() -> None:
    """But for instruction sets, a file each, which have the same functions."""
    declared = re.compile(r"^[a-z][^=;{}]*?\b(\w+)\([^{}]*?\);", re.MULTILINE)
    several = {}
    for path in files(".h"):
        if path.is_relative_to(SOURCES) and folder_of(path) != "kernels":
            names = definitions().keys() & set(declared.findall(text_of(path)))
            defined = {name_of(definitions()[name]) for name in names}
            if len(defined) > 1:
                several[path.relative_to(SOURCES).as_posix()] = defined
    assert several.keys() == {"base/crc32c.h"}, several


def test_no_files_call_each_other_round() -> None:
    try:
        TopologicalSorter(calls()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' uses '.join(reversed(error.args[1]))}") from error


def test_the_core_calls_no_folder_above_its_own() -> None:
    def rank(name: str) -> int:
        return FOLDERS.index(folder_of(ROOT / name))

    upward = {
        f"{caller} calls {called}"
        for caller, all_called in calls().items()
        for called in all_called
        if rank(called) > rank(caller)
    }
    assert upward == set()


def test_the_folders_are_those_of_the_layers() -> None:
    assert {path.name for path in SOURCES.iterdir()} == {*FOLDERS}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How a file of each folder is compiled, by the folder."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake here")
    build = tmp_path_factory.mktemp("layers")
    configure = ["cmake", f"-S{ROOT / 'native'}", f"-B{build}"]
    subprocess.run([*configure, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"], check=True)
    found = {}
    for each in json.loads((build / "compile_commands.json").read_text()):
        path, command = Path(each["file"]), each["command"].split()
        if path.is_relative_to(ROOT / "native"):  # tests have folders of the same names
            found[path.parent.name] = [*command[: command.index("-o")], "-fsyntax-only", "-xc", "-"]
    return found


@pytest.mark.parametrize(
    ("folder", "header", "sees"),
    [
        ("base", "region/types.h", False),
        ("format", "base/types.h", True),
        ("format", "pages/borrow.h", False),
        ("host", "pool/host_state.h", False),
        ("sharing", "host/locks.h", True),
        ("tiers", "ndp/types.h", False),
        ("measure", "coherence/rpc.h", True),
        ("measure", "kernels/kernels.h", False),
    ],
)
def test_a_folder_sees_those_below_it_only(
    commands: dict[str, list[str]], folder: str, header: str, sees: bool
) -> None:
    program = f'#include "{header}"\nint unused;\n'
    command = commands[folder]
    done = subprocess.run(command, input=program, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode == 0) is sees, done.stderr
    assert sees or f"{header}: No such file" in done.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
def test_no_include_goes_round_the_walls(tmp_path: Path) -> None:
    (tmp_path / "src/base").mkdir(parents=True)
    source = tmp_path / "src/base/error.c"
    script = ROOT / "native/includes.cmake"
    for line, code in ('#include "base/error.h"', 0), ('#include "../pool/pool.h"', 1):
        source.write_text(line + "\n")
        command = ["cmake", f"-DFOLDER={tmp_path}", "-P", str(script)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "include a header as folder/name.h" in done.stderr


POOL_FIELDS_MAX = 40
PLACE = r"pool->((?:\w+\.)?\w+)"
WRITTEN = re.compile(
    rf"{PLACE}(\[[^]]*\])?(?:\.\w+)* *(?:=(?!=)|\+\+|--|[-+|&]=)|(?:\+\+|--){PLACE}\b(?!->)"
    rf"|atomic_(?:store|exchange|fetch_[a-z]+)(?:_explicit|_n)?\(&{PLACE}\b(\[)?(?!->)"
)


def pool_fields() -> tuple[int, dict[str, tuple[set[str], bool]]]:
    """How many fields struct cxlkv_pool has. By "name", or "group.name": who writes it, and
    whether it points into the host state."""
    text = (SOURCES / "format/types.h").read_text()
    body = text.partition("struct cxlkv_pool {\n")[2].partition("\n};")[0]
    count = 0
    group: dict[str, tuple[set[str], bool]] = {}
    found: dict[str, tuple[set[str], bool]] = {}
    for line in body.splitlines():
        names, _, comment = line.partition("/*")
        if "struct {" in names:
            group = {}
        elif end := re.match(r"    \} (\w+);", line):
            count += 1
            found |= {f"{end[1]}.{name}": what for name, what in group.items()}
        elif ";" in names and not names.lstrip().startswith("*"):
            folders = set(comment.partition(":")[0].replace(" ", "").split(","))
            assert folders <= {*FOLDERS}, line
            within = line.startswith("        ")
            declared = re.findall(r"(\w+)(?=[,;])", re.sub(r"\[\w+\]", "", names))
            count += 0 if within else len(declared)
            what = folders, "the host state's" in comment
            (group if within else found).update(dict.fromkeys(declared, what))
    return count, found


def test_a_field_of_a_pool_is_written_by_the_folders_that_its_comment_names() -> None:
    count, fields = pool_fields()
    assert count <= POOL_FIELDS_MAX
    elsewhere, used = [], set()
    for path in files(".c", ".h"):
        if path.is_relative_to(SOURCES):
            for first, element, second, third, bracket in WRITTEN.findall(text_of(path)):
                place = first or second or third
                name = place if place in fields else place.partition(".")[0]
                folders, in_host_state = fields[name]
                used.add(name)
                indexed = bool(element or bracket)
                if folder_of(path) not in folders and not (in_host_state and indexed):
                    elsewhere.append(f"{name_of(path)} writes {place}")
    assert elsewhere == []
    assert len(used) > POOL_FIELDS_MAX / 2  # the expression finds them


def test_hooks_are_few() -> None:
    """A hook is an arrow upward that the test above does not see."""
    answered = re.findall(r"^    \.(\w+) = \w+,$", HOOKS.read_text(), re.MULTILINE)
    table = (SOURCES / "host/hooks.h").read_text().partition("} pool_hooks;")[0]
    declared = re.findall(r"\(\*(\w+)\)\(", table)
    assert answered == declared
    assert len(answered) <= HOOKS_MAX
