"""Every `cxlkv ...` that a message, a help or a page of the docs names is a command that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from cxlkv.bench.registry import CASES, RENAMED
from cxlkv.ops.cli import app, spelled_out

ROOT = Path(__file__).resolve().parents[2]
# Ends a command line: what follows is the shell's or a sentence's.
END = re.compile(r"[`'\"|;<>()#\n]|&&|\\n|\. |, |: | \\$")
NAMED = re.compile(r"(?<![\w/.=-])cxlkv +(?=[a-z-])")
HISTORY = ROOT / "docs/decisions"  # they name what there was


class Hint(NamedTuple):
    where: str
    words: tuple[str, ...]


@cache
def options_of(path: tuple[str, ...]) -> tuple[dict[str, object], set[str]]:
    """The subcommands and the options of a command by its words."""
    command = get_command(app)
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
                if case and re.fullmatch(r"[a-z][a-z-]*", case[0]):
                    known = {*CASES, *RENAMED, "run", "list", "compare", "report"}
                    if case[0] not in known:
                        return f"no bench case {case[0]}"
    return ""


def commands_in(text: str, certain: bool) -> Iterator[tuple[str, ...]]:
    """certain: all of the text is a command line, or quoted as one; else it must begin with a word
    that is a command, as a sentence may have our name as its subject."""
    first = {*options_of(())[0], "--version"}
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
    """Of a Python file: docstrings, which are helps, and messages."""
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
            yield Hint(f"{path.relative_to(ROOT)}:{node.lineno}", words)


def in_c(path: Path) -> Iterator[Hint]:
    text = re.sub(r'"\s*"', "", path.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        for words in commands_in(line, False):
            yield Hint(f"{path.relative_to(ROOT)}:{number}", words)
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
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pool lst", "cxlkv pool has no lst"),
        ("pool create /x --capcity 3", "cxlkv pool create has no --capcity"),
        ("litmus", "cxlkv has no litmus"),
        ("bench latncy", "no bench case latncy"),
        ("bench latency --quick", ""),
        ("pool create /dev/shm/my.pool --model M --tokens 1M", ""),
        ("bench CASE", ""),
        ("--version", ""),
    ],
)
def test_what_is_no_command_is_seen(line: str, said: str) -> None:
    assert fault(tuple(line.split())) == said
