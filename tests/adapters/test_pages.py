"""Pages of engines' adapters name what there is: tests, settings, metrics, failures, modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cxlkv.adapters.common import metrics as of_objects
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.common.versions import Versions
from cxlkv.adapters.lmcache import metrics as lmcache
from cxlkv.adapters.lmcache.settings import VERSIONS as LMCACHE
from cxlkv.adapters.sglang import metrics as sglang
from cxlkv.adapters.sglang.settings import VERSIONS as SGLANG
from cxlkv.adapters.vllm import counting as vllm
from cxlkv.adapters.vllm.plugin import VERSIONS as VLLM
from cxlkv.adapters.vllm.settings import Settings, read_options, read_settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """tested: the version that the page and Makefile name."""

    file: str
    versions: Versions
    tested: str
    metrics: str
    counts: Mapping[str, str]
    kinds: set[str]
    room: str
    states: Mapping[str, str]

    @property
    def engine(self) -> str:
        return self.versions.engine.lower()

    @property
    def text(self) -> str:
        return (ROOT / "docs/engines" / self.file).read_text()

    def table(self, title: str) -> list[list[str]]:
        return table(self.text, title)


def table(text: str, title: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading, without its head."""
    rows = re.search(rf"## {title}.*?\n\n\|.*?\n\|[-|]+\n(.*?)\n\n", text + "\n\n", re.S)
    assert rows is not None, title
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].split("\n")]


PAGES = [
    Page(
        *("vllm.md", VLLM, "0.32.0", "vllm:cxlkv_", vllm.COUNTS),
        *(set(vllm.KINDS), "pool_tokens", vllm.STATES),
    ),
    Page(
        *("sglang.md", SGLANG, "0.5.23", sglang.PREFIX, sglang.COUNTS),
        *(set(sglang.KINDS), "pool_bytes", of_objects.STATES),
    ),
    Page(
        *("lmcache.md", LMCACHE, "0.5.6", lmcache.PREFIX, lmcache.COUNTS),
        *(set(lmcache.KINDS), "pool_bytes", of_objects.STATES),
    ),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.engine)
NAMED = {
    found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.text)
}


@pytest.mark.parametrize(("file", "test"), sorted(NAMED))
def test_named_tests_are_there(file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^ *def {test}\(" if test else r"^ *def test_", text, re.M)


@pytest.mark.parametrize("page", [PAGES[0], PAGES[2]], ids=lambda page: page.engine)
def test_each_complaint_has_one(page: Page) -> None:
    rows = page.table("What users complain about")
    assert len(rows) > 5
    assert [row[0] for row in rows if "tests/" not in row[1]] == []


def test_settings_are_those_that_are_read() -> None:
    """Those of all engines have a table of their own, and vLLM's page has one of its others."""
    shared = table((ROOT / "docs/reference/configuration.md").read_text(), "Settings of all")
    rows = [*shared, *PAGES[0].table("Settings")]
    names = [row[0].strip("`") for row in rows]
    assert len(shared) == len(PoolSettings.model_fields)
    assert sorted(names) == sorted(Settings.model_fields)
    for name, shown in zip(names, (row[1] for row in rows), strict=True):
        value = getattr(Settings(), name)
        if isinstance(value, str):
            assert shown == f'`"{value}"`', name
        elif isinstance(value, bool):
            assert shown == f"`{str(value).lower()}`", name
        elif value not in (None, ()):
            assert shown == f"`{value:g}`", name


def test_what_is_shown_can_be_written() -> None:
    read_settings({"attention": "pool", "budget": {"pages": 64, "sinks": 1, "recent": 4}})
    found = read_options({"cxlkv": {"budget": {"pages": 8}, "save": False}}, Settings())
    assert found.selected
    assert not found.save


@each_page
def test_metrics_and_failures_are_those_that_are_counted(page: Page) -> None:
    named = re.findall(rf"`(?:{page.metrics}|_)(\w+)(?:\{{[\w, ]+\}})?`", page.text)
    of_all = {*of_objects.MOVES, "link_bytes", "pool_bytes", "pool_hosts", "failures"}
    assert {*page.counts, *of_all, page.room} == set(named) - {"hits"}, "of vLLM's own metrics"
    kinds = {
        kind for row in page.table("When something") for kind in re.findall(r"`(\w+)`", row[2])
    }
    assert kinds == page.kinds
    assert all(f"`{state}`" in page.text for state in page.states)


@each_page
def test_the_tested_version_is_the_one_that_the_tests_install(page: Page) -> None:
    page.versions.check(page.tested)
    assert page.tested in page.text
    assert f"{page.engine.upper()}_VERSION := {page.tested}" in (ROOT / "Makefile").read_text()
