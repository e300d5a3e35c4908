"""Hooks of MkDocs (mkdocs.yml): pages from the README and the code, and links that fit the site.

Files of docs/ are read on a Git server as well, so their links lead to files of the repository. In
the site a link to the README leads to the page with that section, a link to a Markdown file outside
docs/ to its copy, and in place of a link to any other file stands the name of the file.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import links
import reference
from links import Found
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation, Section
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COPIED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributions.md",
    "SECURITY.md": "project/security.md",
    "bench/results/": "results/",
    "examples/": "examples/",
}
"""Files outside docs/ that the site has, each with its place there."""
OF_HISTORY = ("decisions/", "project/changelog")  # a search finds other pages first
CODE = re.compile(r"<code>([^\s<]{1,16}|--?[\w-]{1,24})</code>")
TAG = re.compile(r"<[^>]+>")

_texts: dict[str, str] = {}  # of pages that were made, by page
_files: dict[str, str] = {}  # of the repository, that pages were made from, by page
_pages_of_readme: dict[str, str] = {}  # by anchor
_parts: dict[str, list[Page]] = {}  # of the navigation, by title
_read: dict[str, str] = {}  # Markdown of all pages, for llms-full.txt


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes texts, and puts pages in the place of FOLDER/*.md in the navigation."""
    readme = (ROOT / "README.md").read_text()
    try:
        start = links.readme_pages(readme, config.extra["readme"])
        _texts.update(reference.pages())
    except ValueError as error:
        raise PluginError(str(error)) from error
    _pages_of_readme.update(links.readme_anchors(start))
    _texts.update({page: titled(page, text) for page, text in start.items()})
    _files.update(dict.fromkeys(start, "README.md"))
    _texts["decisions/index.md"] = decisions()
    _texts["results/index.md"] = results()
    for file, page in copies():
        if page.endswith(".md"):
            _texts[page] = (ROOT / file).read_text()
            _files[page] = file
    there = {path.relative_to(config.docs_dir).as_posix() for path in DOCS.rglob("*.md")}
    config.nav = expanded(config.nav, sorted(there | set(_texts)))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in _texts.items():
        files.append(File.generated(config, page, content=text))
    for file, page in copies():
        if page not in _texts:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    file = _files.get(uri, f"docs/{uri}")

    def find(path: str, anchor: str) -> Found | None:
        after = f"#{anchor}" if anchor else ""
        if path == "README.md":
            return Found(_pages_of_readme.get(anchor, next(iter(config.extra["readme"]))) + after)
        at = in_site(path)
        for name in (at, f"{at}/README.md", f"{at}/index.md"):
            if at is not None and files.get_file_from_path(name) is not None:
                return Found(name + after, title_of(name))
        is_history = file == "CHANGELOG.md"  # it names pages that were there
        return None if at is None or is_history else Found(f"{at}{after}")

    if uri.startswith(OF_HISTORY):
        page.meta.setdefault("search", {})["boost"] = 0.3
    _read[uri] = links.relinked(text, file, uri, find)
    return _read[uri]


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Short names of code and options are not broken between lines."""
    if page.file.src_uri.startswith("reference/api/"):
        _read[page.file.src_uri] = re.sub(r"\n\s*\n+", "\n\n", unescape(TAG.sub("", html)))
    return CODE.sub(r'<code class="whole">\1</code>', html)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    _parts.update({part.title: list(pages_of(part)) for part in nav.items})
    return nav


def pages_of(part: Section | Page) -> Iterator[Page]:
    if part.is_page:
        yield part
    for one in part.children or ():
        yield from pages_of(one)


def on_post_build(config: MkDocsConfig) -> None:
    """llms.txt names all pages, as they are in the navigation, and llms-full.txt has them."""
    names, texts = [f"# {config.site_name}\n\n> {config.site_description}"], []
    for part, pages in _parts.items():
        names.append(f"\n## {part}\n")
        for page in pages:
            names.append(f"- [{page.title}]({page.file.dest_uri})")
            texts.append(f"<!-- {page.file.dest_uri} -->\n\n{_read[page.file.src_uri].strip()}\n")
    folder = Path(config.site_dir)
    (folder / "llms.txt").write_text("\n".join(names) + "\n")
    (folder / "llms-full.txt").write_text("\n".join(texts))


def titled(page: str, text: str) -> str:
    """With a heading: the section's own if there is one, or the page's name above several."""
    if text.startswith("# "):
        return text
    if len(links.sections(text)) == 2:
        return text[1:]
    return f"# {posixpath.splitext(posixpath.basename(page))[0].capitalize()}\n\n{text}"


def in_site(path: str) -> str | None:
    """Where the site has a file of the repository; None if it has it not."""
    copied = dict(copies())
    if path in copied:
        return copied[path]
    return posixpath.relpath(path, "docs") if path == "docs" or path.startswith("docs/") else None


def copies() -> Iterator[tuple[str, str]]:
    """Files outside docs/ that the site has, each with its place in it."""
    for name, place in COPIED.items():
        if not name.endswith("/"):
            yield name, place
            continue
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield (
                    path.relative_to(ROOT).as_posix(),
                    place + path.relative_to(ROOT / name).as_posix(),
                )


def title_of(page: str) -> str:
    """The first heading of a page; its name if it is none."""
    text = _read.get(page) or _texts.get(page)
    if text is None:
        text = (DOCS / page).read_text() if page.endswith(".md") else ""
    heading = next((line for line in text.splitlines() if line.startswith("# ")), "")
    return heading[2:].strip()


Nav = list["str | dict[str, str | Nav]"]


def expanded(nav: Nav, there: list[str]) -> Nav:
    """The navigation with pages in the place of FOLDER/*.md; a part without pages is left out."""
    listed = set(leaves(nav))
    taken = {page for page in there if page in listed}

    def of(entry: str | dict[str, str | Nav]) -> Iterator[str | dict[str, str | Nav]]:
        if isinstance(entry, dict):
            for title, inside in entry.items():
                if isinstance(inside, str) and "*" not in inside:
                    yield entry
                elif found := [one for each in as_list(inside) for one in of(each)]:
                    yield {title: found}
        elif "*" not in entry:
            yield entry
        else:
            new = [page for page in there if page not in taken and fnmatch_here(page, entry)]
            taken.update(new)
            yield from new

    return [one for entry in nav for one in of(entry)]


def as_list(inside: str | Nav) -> Nav:
    return [inside] if isinstance(inside, str) else inside


def fnmatch_here(page: str, pattern: str) -> bool:
    return posixpath.dirname(page) == posixpath.dirname(pattern) and fnmatch(page, pattern)


def leaves(nav: Nav) -> Iterator[str]:
    for entry in nav:
        inside = list(entry.values()) if isinstance(entry, dict) else [entry]
        for one in inside:
            if isinstance(one, str):
                yield one
            else:
                yield from leaves(one)


def decisions() -> str:
    """A page that lists them."""
    found = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    rows = "".join(f"- [{title_of(f'decisions/{path.name}')}]({path.name})\n" for path in found)
    return f"# Decisions\n\nWhy it is so: context, what was decided, and what follows.\n\n{rows}"


def results() -> str:
    """A page that lists the files of measured figures."""
    rows = []
    for path in sorted((DOCS / "results").glob("*.json")):
        found = json.loads(path.read_text())
        machine = found.get("machine", {})
        cells = (
            f"[{path.name}]({path.name})",
            f"`cxlkv bench {found['case']}`" if "case" in found else "",
            f"{machine.get('cpu', '')}, {machine.get('cores_allowed', '?')} CPUs",
            f"`{str(found.get('commit'))[:9]}`",
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return (
        "# Results\n\nEach file has raw samples, checks, the machine and the commit. "
        "[What is measured](../reference/benchmarks.md).\n\n"
        f"| file | made by | machine | commit |\n|---|---|---|---|\n{''.join(rows)}"
    )
