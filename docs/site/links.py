"""Links of Markdown files of the repository, made to fit the site; sections of the README."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

REST = "rest"
"""In the place of a page's sections: those that no other page has, and what is above the first."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"^(\w+:|#|/)")


class Found(NamedTuple):
    """Where the site has a file of the repository, with the anchor if there is one."""

    uri: str
    title: str = ""


Find = Callable[[str, str], Found | None]
"""What the site has for a file of the repository, and an anchor in it."""


def anchor_of(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """The lines, each with whether it is text: not in a block of code."""
    fenced = False
    for line in text.splitlines(keepends=True):
        is_fence = line.lstrip().startswith("```")
        yield line, not fenced and not is_fence
        fenced ^= is_fence


def relinked(text: str, file: str, page: str, find: Find) -> str:
    """The text of `file`, a path in the repository, for the page `page` of the site.

    A link to a file that the site lacks becomes the name of the file.
    """

    def fitted(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if OUTSIDE.match(target):
            if not target.startswith("#"):
                return match[0]
            path, anchor = file, target[1:]
        else:
            name, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(file), name))
        found = find(path, anchor)
        if found is None:
            return f"`{path}`" if path.endswith(label.strip("`/")) else f"{label} (`{path}`)"
        if not image and found.title and path.endswith(label.strip("`")):
            label = found.title  # of a page, not the name of its file
        uri, _, there = found.uri.partition("#")
        near = posixpath.relpath(uri, posixpath.dirname(page) or ".") if uri != page else ""
        return f"{image}[{label}]({near}{'#' + there if there else ''})"

    return "".join(
        LINK.sub(fitted, line) if is_text else line for line, is_text in outside_code(text)
    )


def sections(text: str) -> dict[str, str]:
    """Each second-level heading with what is below it; what is above the first is ""."""
    found, heading = {"": ""}, ""
    for line, is_text in outside_code(text):
        if is_text and line.startswith("## "):
            heading = line[3:].strip()
            found[heading] = ""
        found[heading] += line
    return found


def readme_pages(text: str, wanted: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """Pages of the README's sections: their names by page, or REST.

    Raises ValueError for a section that the README lacks.
    """
    there = sections(text)
    named = [name for names in wanted.values() if names != REST for name in names]
    if missing := [name for name in named if name not in there]:
        raise ValueError(
            f"README.md has no section {missing[0]!r}; mkdocs.yml (extra, readme) names it. It has "
            f"{', '.join(repr(name) for name in there if name)}"
        )
    rest = [name for name in there if name not in named]
    return {
        page: "".join(there[name] for name in (rest if names == REST else names))
        for page, names in wanted.items()
    }


def readme_anchors(pages: Mapping[str, str]) -> dict[str, str]:
    """Which page has each heading of the README, by its anchor."""
    return {
        anchor_of(line.lstrip("#")): page
        for page, text in pages.items()
        for line, is_text in outside_code(text)
        if is_text and re.match(r"#+ ", line)
    }
