"""docs/lmcache.md names what there is: tests, settings, metrics, kinds of failures, modules."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cxlkv.adapters.common.metrics import STATES
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.lmcache.metrics import COUNTS, KINDS, PREFIX
from cxlkv.adapters.lmcache.settings import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/lmcache.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def table(title: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading, without its head."""
    rows = re.search(rf"## {title}.*?\n\n\|.*?\n\|[-|]+\n(.*?)\n\n", PAGE + "\n\n", re.S)
    assert rows is not None, title
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].split("\n")]


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_named_tests_are_there(file: str, test: str) -> None:
    assert re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), re.M)


def test_each_complaint_has_one() -> None:
    assert [row[0] for row in table("What users complain about") if "tests/" not in row[1]] == []


def test_settings_are_those_that_are_read() -> None:
    rows = table("Settings")
    assert [row[0].strip("`") for row in rows] == [
        f"cxlkv.{one.name}" for one in fields(PoolSettings)
    ]
    shown = [row[1].strip("`") for row in rows]
    assert shown == [f'"{PoolSettings().where}"', "none", f'"{PoolSettings().salt}"']


def test_metrics_and_failures_are_those_that_are_counted() -> None:
    cells = " ".join(row[0] for row in table("What is measured"))
    named = re.findall(rf"`{PREFIX}(\w+)(?:\{{[\w, ]+\}})?`", cells)
    assert sorted(named) == sorted([*COUNTS, "failures", "pool_bytes"])
    kinds = [kind for row in table("When something") for kind in re.findall(r"`(\w+)`", row[2])]
    assert kinds == list(KINDS)
    assert all(f"`{state}`" in PAGE for state in STATES)


def test_the_tested_range_is_the_one_that_is_refused_beyond() -> None:
    assert str(VERSIONS) == "lmcache>=0.5,<0.6"
    assert "`lmcache` 0.5.6" in PAGE
    assert "LMCACHE_VERSION := 0.5.6" in (ROOT / "Makefile").read_text()


def test_all_modules_are_on_the_map() -> None:
    modules = {path.name for path in (ROOT / "cxlkv/adapters/lmcache").glob("*.py")}
    assert modules - {"__init__.py"} <= set(re.findall(r"\w+\.py", PAGE))
