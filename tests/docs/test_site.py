"""The documentation as a site: what makes it, what looks through it, and that it can be made."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / "build/docs/env/bin/mkdocs"


def module_of_the_site(name: str) -> ModuleType:
    """docs/site is no package: MkDocs loads its hooks by their paths."""
    spec = spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


crawl = module_of_the_site("crawl")
links = module_of_the_site("links")
reference = module_of_the_site("reference")


def test_links_fit_the_site() -> None:
    at = {
        ("docs/how-to/a.md", ""): links.Found("how-to/a.md", "Doing A"),
        ("docs/how-to/a.md", "x"): links.Found("how-to/a.md#x", "Doing A"),
        ("README.md", "install"): links.Found("start/install.md#install"),
        ("docs/images/a.png", ""): links.Found("images/a.png"),
    }
    text = """\
[a.md](../how-to/a.md), [that](../how-to/a.md#x), [install](../../README.md#install)
[`tests/test_a.py`](../../tests/test_a.py), [a test](../../tests/test_a.py)
![picture](../images/a.png) [elsewhere](https://example.org/) [here](#there)
```
[a.md](../how-to/a.md)
```
"""
    at[("docs/engines/b.md", "there")] = links.Found("engines/b.md#there")
    found = links.relinked(text, "docs/engines/b.md", "engines/b.md", lambda *of: at.get(of))
    assert (
        found
        == """\
[Doing A](../how-to/a.md), [that](../how-to/a.md#x), [install](../start/install.md#install)
`tests/test_a.py`, a test (`tests/test_a.py`)
![picture](../images/a.png) [elsewhere](https://example.org/) [here](#there)
```
[a.md](../how-to/a.md)
```
"""
    )


def test_the_readme_makes_pages() -> None:
    text = (
        "# It\n\nwhat\n\n## Install\n\n```\n## no heading\n```\n\n### By hand\n\n## Last\n\nend\n"
    )
    pages = links.readme_pages(text, {"a.md": "rest", "b.md": ["Install"]})
    assert pages == {
        "a.md": "# It\n\nwhat\n\n## Last\n\nend\n",
        "b.md": "## Install\n\n```\n## no heading\n```\n\n### By hand\n\n",
    }
    assert links.readme_anchors(pages) == {
        "it": "a.md",
        "last": "a.md",
        "install": "b.md",
        "by-hand": "b.md",
    }
    with pytest.raises(ValueError, match="no section 'Setup'"):
        links.readme_pages(text, {"a.md": "rest", "b.md": ["Setup"]})


def test_the_crawl_finds_what_is_dead(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="in/a.html#top">a</a> <a href="gone.html">b</a> <a href="in/a.html#no">c</a>'
        '<a href="https://example.org/">d</a> <script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "in/a.html").write_text(
        '<h1 id="top"></h1><a href="..">up</a><a href="b.html"></a>'
    )
    (tmp_path / "in/b.html").write_text('<a href="c.html"></a><img src="c.png">')
    (tmp_path / "in/c.html").write_text('<a href="?q=1#">search</a>')
    pages = crawl.read(tmp_path)
    assert crawl.faults(tmp_path, pages) == [
        "in/b.html: c.png is not there",
        "index.html: gone.html is not there",
        "index.html: loads https://example.org/x.js from elsewhere",
        "index.html: in/a.html#no: the page has no such anchor",
    ]
    assert crawl.too_far(pages) == ["in/c.html: more than 2 clicks from index.html"]


def test_the_reference_is_made_of_the_code() -> None:
    """Making it fails for a key, an error or a variable that nothing explains."""
    pages = reference.pages()
    assert "`cxlkv pool create`" in pages["reference/commands.md"]
    assert "<code>lease_<wbr>s</code>" in pages["reference/settings.md"]
    metrics = re.sub("<wbr>", "", pages["reference/metrics.md"])
    for name in ("cxlkv_pool_up", "vllm:cxlkv_hit_tokens_total", "sglang:cxlkv_pool_bytes"):
        assert f"<code>{name}</code>" in metrics
    assert "::: cxlkv.CXLPool" in pages["reference/api/pool.md"]
    told = reference.meanings("One. a: x; b, c: y z. Of a: no.", ["a", "b", "c"])
    assert told == {"a": "x", "b": "y z. Of a: no", "c": "y z. Of a: no"}


@pytest.mark.nightly
def test_the_site_is_whole(tmp_path: Path) -> None:
    if not MKDOCS.is_file():
        pytest.skip("no build/docs/env: `make docs` makes it")
    built = subprocess.run(
        [MKDOCS, "build", "--site-dir", tmp_path],
        cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": str(MKDOCS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert crawl.main(tmp_path) == 0
    named = re.findall(r"\]\(([^)]+)\)", (tmp_path / "llms.txt").read_text())
    assert len(named) == len(set(named)) > 50
    assert [name for name in named if not (tmp_path / name).is_file()] == []
