"""Looks through a site that was built: `python3 docs/site/crawl.py FOLDER`.

What a link or an image names must be in the folder, its anchor in the page, nothing may come from
elsewhere, and each page must be two clicks from the first one at most.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

CLICKS_MAX = 2
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
FIRST = "index.html"
ALONE = {"404.html"}  # what a server shows for a page that is not there


@dataclass
class Page(HTMLParser):
    """links: what a reader can follow; loads: what a browser fetches by itself."""

    text: str
    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loads.add(given[LOADED[tag]])


def main(folder: Path) -> int:
    pages = read(folder)
    found = [*faults(folder, pages), *too_far(pages)]
    print("\n".join(found), end="\n" * bool(found))
    links = sum(len(page.links) for page in pages.values())
    print(f"{folder}: {len(pages)} pages, {links} links, {len(found)} faults")
    return 1 if found or not pages else 0


def read(folder: Path) -> dict[str, Page]:
    return {
        path.relative_to(folder).as_posix(): Page(path.read_text())
        for path in sorted(folder.rglob("*.html"))
    }


def faults(folder: Path, pages: Mapping[str, Page]) -> list[str]:
    """Links to what is not there, and what is loaded from elsewhere, a line each."""
    found = []
    for name, page in pages.items():
        if name in ALONE:
            continue
        for link in sorted(page.links | page.loads):
            if is_elsewhere(link):
                if link in page.loads:
                    found.append(f"{name}: loads {link} from elsewhere")
                continue
            target, anchor = resolved(name, link)
            if not (folder / target).is_file():
                found.append(f"{name}: {link} is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{name}: {link}: the page has no such anchor")
    return found


def too_far(pages: Mapping[str, Page]) -> list[str]:
    """Pages that take more clicks from the first one."""
    reached, last = {FIRST}, {FIRST}
    for _ in range(CLICKS_MAX):
        last = {resolved(name, link)[0] for name in last for link in pages[name].links} & set(pages)
        last -= reached
        reached |= last
    far = sorted(set(pages) - reached - ALONE)
    return [f"{name}: more than {CLICKS_MAX} clicks from {FIRST}" for name in far]


def is_elsewhere(link: str) -> bool:
    return "://" in link or link.startswith(("//", "mailto:", "data:", "javascript:"))


def resolved(page: str, link: str) -> tuple[str, str]:
    """The file in the site, and the anchor in it, that a link of a page names."""
    path, _, anchor = link.partition("#")
    path = unquote(path.partition("?")[0])
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    is_folder = target == "." or path.endswith("/")
    return (posixpath.join(target, FIRST) if is_folder else target), unquote(anchor)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
