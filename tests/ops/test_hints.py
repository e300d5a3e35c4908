"""Every `cxlkv ...` that a message, a help or a page of the docs names is a command that exists,
and takes what stands behind it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from cxlkv.bench.registry import CASES
from cxlkv.ops.cli import app, spelled_out

ROOT = Path(__file__).resolve().parents[2]
# Ends a command line: what follows is the shell's or a sentence's.
END = re.compile(r"[`'\"|;<>()#\n]| &|\\n|\. |, |: | \\$")
NAMED = re.compile(r"(?<![\w/.=-])cxlkv +(?=[a-z-])")
HISTORY = ROOT / "docs/decisions"  # they name what there was


# What stands for something: MODEL, N, and what a format string or an alert puts in.
PLACEHOLDER = re.compile(r"[A-Z_]+|%[a-z]+")
COMMAND = get_command(app)  # typer makes it anew each time, of all commands


class Hint(NamedTuple):
    """certain: quoted as a command line, so that no words of a sentence follow."""

    where: str
    words: tuple[str, ...]
    certain: bool = True


@cache
def options_of(path: tuple[str, ...]) -> tuple[dict[str, object], set[str]]:
    """The subcommands and the options of a command by its words."""
    command = COMMAND
    for word in path:
        command = command.commands[word]  # type: ignore[attr-defined]
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return getattr(command, "commands", {}), names | {"--help"}


def fault(words: tuple[str, ...]) -> str:
    """What does not exist in this command; empty: nothing."""
    path: list[str] = []
    commands, options = options_of(())
    for word in spelled_out(words):
        if word.startswith("--"):
            if word.partition("=")[0] not in options:
                return f"{' '.join(['cxlkv', *path])} has no {word}"
        elif commands:
            if not re.fullmatch(r"[a-z-]+", word):  # a placeholder: COMMAND, CASE, {list,top}
                return ""
            if word not in commands:
                return f"{' '.join(['cxlkv', *path])} has no {word}"
            path.append(word)
            commands, options = options_of(tuple(path))
            if path == ["bench", "run"]:
                case = words[words.index("bench") + 1 :][:1]
                case = case if case != ("run",) else words[words.index("run") + 1 :][:1]
                if case and re.fullmatch(r"[a-z][a-z/-]*", case[0]):
                    known = {*CASES, "run", "compare", "report"}
                    if case[0] not in known:
                        return f"no bench case {case[0]}"
    return ""


def misuse(words: tuple[str, ...]) -> str:
    """What the command's own parser says, where a value is given; empty: it takes that. A command
    that is only named, with an option perhaps, lacks its arguments."""
    path, command, rest = list[str](), COMMAND, spelled_out(words)
    while rest and rest[0] in (commands := getattr(command, "commands", {})):
        path.append(rest[0])
        command = commands[rest.pop(0)]
    if all(word.startswith("-") for word in rest) or hasattr(command, "commands"):
        return ""
    try:
        command.make_context(" ".join(path), ["1" if PLACEHOLDER.fullmatch(w) else w for w in rest])
    except Exception as error:  # click's, of which typer has its own copy
        if not hasattr(error, "format_message"):
            raise
        return f"cxlkv {' '.join(path)}: {error.format_message()}"
    return ""


def commands_in(text: str, certain: bool) -> Iterator[tuple[str, ...]]:
    """certain: all of the text is a command line, or quoted as one; else it must begin with a word
    that is a command, as a sentence may have our name as its subject."""
    first = {*options_of(())[0], "--version"}
    if certain:
        text = re.sub(r"'[^']*'", "X", text)
    for found in NAMED.finditer(text):
        line = END.split(text[found.end() :], maxsplit=1)[0]
        words = tuple(line.replace("[", " ").replace("]", " ").rstrip(".,:").split())
        if words and (certain or words[0] in first):
            yield words


def in_page(path: Path) -> Iterator[Hint]:
    """Code spans, and the lines of code blocks that are a shell's."""
    block = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        line = re.sub(r'\{\{.*?\}\}|"\$\w+"', "X", line)
        if line.lstrip().startswith("```"):
            block = "" if block else line.lstrip()
            continue
        if block:
            if re.match(r"\s*(\$ |\w+=\S+ )*(\.venv/bin/|\S*bin/)?cxlkv ", line):
                for words in commands_in(re.sub(r"\S*bin/cxlkv", "cxlkv", line), True):
                    yield Hint(where, words)
            continue
        for span in re.findall(r"`([^`]+)`", line):
            for words in commands_in(span, True):
                yield Hint(where, words)


def in_strings(path: Path) -> Iterator[Hint]:
    """Strings of a Python file: docstrings, which are helps, and messages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts: list[ast.expr] = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "X"
            for part in parts
            if not isinstance(part, ast.Constant) or isinstance(part.value, str)
        )
        for span in re.findall(r"`([^`]+)`", text):
            for words in commands_in(" ".join(span.split()), True):
                yield Hint(f"{path.relative_to(ROOT)}:{node.lineno}", words)
        for words in commands_in(" ".join(text.split()), False):
            yield Hint(f"{path.relative_to(ROOT)}:{node.lineno}", words, certain=False)


def in_c(path: Path) -> Iterator[Hint]:
    text = re.sub(r'"\s*"', "", path.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        for words in commands_in(line, False):
            yield Hint(f"{path.relative_to(ROOT)}:{number}", words, certain=False)
        for span in re.findall(r"`([^`]+)`", line):
            for words in commands_in(span, True):
                yield Hint(f"{path.relative_to(ROOT)}:{number}", words)


@cache
def hints() -> list[Hint]:
    folders = ("cxlkv", "bench", "ndp", "emulation", "kernels", "examples")
    found: dict[Hint, None] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_relative_to(ROOT / "cxlkv/bench/"):
                found.update(dict.fromkeys(in_strings(path.resolve())))
    for pattern in ("native/**/*.c", "native/**/*.h"):
        for path in sorted(ROOT.glob(pattern)):
            found.update(dict.fromkeys(in_c(path)))
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for path in (ROOT / "README.md", ROOT / "docs/alerts.yml", *pages):
        if not path.is_relative_to(HISTORY):
            found.update(dict.fromkeys(in_page(path)))
    return list(found)


def test_there_are_hints_of_every_kind() -> None:
    kinds = {hint.where.partition("/")[0].partition(":")[0] for hint in hints()}
    assert {"cxlkv", "native", "docs", "README.md", "bench"} <= kinds
    assert len(hints()) > 150


def test_every_command_that_is_named_exists() -> None:
    wrong = [f"{hint.where}: {fault(hint.words)}" for hint in hints() if fault(hint.words)]
    assert wrong == []


def test_every_command_takes_what_stands_behind_it() -> None:
    certain = [hint for hint in hints() if hint.certain and not fault(hint.words)]
    wrong = [f"{hint.where}: {said}" for hint in certain if (said := misuse(hint.words))]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pool fence N --confirmed-off", "cxlkv pool fence: Missing argument 'DEAD'."),
        ("pool fence PATH N --confirmed-off", ""),
        ("pool fence --confirmed-off", ""),
        ("pool check", ""),
        ("pool create --model M --capacity 1GiB", "cxlkv pool create: Missing argument 'path'."),
        ("pool check a b", "cxlkv pool check: Got unexpected extra argument(s) (b)"),
        ("bench memory --rounds many", "cxlkv bench run: Invalid value for '--rounds': "),
    ],
)
def test_what_a_command_does_not_take_is_seen(line: str, said: str) -> None:
    assert misuse(tuple(line.split())).startswith(said)
    assert bool(misuse(tuple(line.split()))) == bool(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pool lst", "cxlkv pool has no lst"),
        ("pool create /x --capcity 3", "cxlkv pool create has no --capcity"),
        ("litmus", "cxlkv has no litmus"),
        ("bench latncy", "no bench case latncy"),
        ("bench memory --quick", ""),
        ("pool create /dev/shm/my.pool --model M --capacity 1GiB", ""),
        ("bench CASE", ""),
        ("--version", ""),
    ],
)
def test_what_is_no_command_is_seen(line: str, said: str) -> None:
    assert fault(tuple(line.split())) == said
