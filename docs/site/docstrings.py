"""Docstrings for the site: a parameter that is explained begins a line of a list.

They are plain prose, in which `name: ` at the beginning of a sentence explains a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import griffe
from reference import escaped


class Docstrings(griffe.Extension):
    """Named in mkdocs.yml."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        names = [str(one.name) for one in cls.parameters]
        rewrite(cls, [*names, *(name for name in cls.members if name[0] != "_")])
        for member in cls.members.values():
            if isinstance(member, griffe.Attribute):
                rewrite(member, ())

    def on_function_instance(self, *, func: griffe.Function, **_: object) -> None:
        rewrite(func, [str(one.name).lstrip("*") for one in func.parameters])


def rewrite(item: griffe.Object, names: Iterable[str]) -> None:
    if item.docstring is not None:
        item.docstring.value = listed(item.docstring.value, [n for n in names if n != "self"])


def listed(text: str, names: Iterable[str]) -> str:
    """The text with each explanation of these names in a line of a list."""
    either = "|".join(map(re.escape, names))
    if not either:
        return escaped(text)
    name = rf"(?:{either})(?:=\S+)?"
    begin = re.compile(rf"(?:^|(?<=[.;] ))({name}(?:, {name})*): ")
    return "\n\n".join(
        paragraph if paragraph.startswith((" ", ">>>")) else of_paragraph(paragraph, begin)
        for paragraph in text.split("\n\n")
    )


def of_paragraph(paragraph: str, begin: re.Pattern[str]) -> str:
    text = " ".join(paragraph.split())
    starts = [*begin.finditer(text)]
    if not starts:
        return escaped(paragraph)
    lines = [escaped(text[: starts[0].start()].strip()), ""] if starts[0].start() else []
    errors: list[str] = []
    ends = [*(one.start() for one in starts[1:]), len(text)]
    for one, end in zip(starts, ends, strict=True):
        said, _, raised = text[one.end() : end].partition(" Raises ")
        lines.append(f"- **`{one[1]}`**: {escaped(said.strip(' ;'))}")
        errors += [f"Raises {raised.strip()}"] * bool(raised)
    return "\n".join([*lines, "", *map(escaped, errors)])
