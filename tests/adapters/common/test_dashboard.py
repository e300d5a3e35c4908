"""docs/dashboard.json shows every metric that the engines' endpoints have of ours, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, Counter, Gauge

from cxlkv.adapters.common.metrics import Metrics, Shown
from cxlkv.adapters.lmcache import metrics as lmcache
from cxlkv.adapters.sglang import metrics as sglang
from cxlkv.adapters.vllm import counting as vllm

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "docs/dashboard.json"


def exported(prefix: str) -> set[str]:
    """Names on the endpoint of this process."""
    found = [family for family in REGISTRY.collect() if family.name.startswith(prefix)]
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in found}


@pytest.fixture(scope="module", autouse=True)
def endpoints() -> None:
    Metrics(Counter, Gauge, vllm.PREFIX, ["engine"], vllm.COUNTS, vllm.CAPACITIES)
    for engine in (sglang, lmcache):
        Shown(engine.PREFIX, {"rank": "0"}, engine.COUNTS, engine.KINDS)


@pytest.mark.parametrize("prefix", [vllm.PREFIX, sglang.PREFIX, lmcache.PREFIX])
def test_it_shows_what_is_exported(prefix: str) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = "\n".join(one["expr"] for panel in panels for one in panel.get("targets", ()))
    assert set(re.findall(rf"{prefix}\w+", asked)) == exported(prefix) != set()


def test_every_panel_is_whole() -> None:
    """Grafana takes a panel without a target, or on top of another one, without a word."""
    found = json.loads(DASHBOARD.read_text())
    panels = [one for one in found["panels"] if one["type"] != "row"]
    assert all(one["targets"] and one["title"] for one in panels)
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in found["panels"]]
    assert len(set(places)) == len(places)
    names = {one["name"] for one in found["templating"]["list"]}
    text = json.dumps(panels).replace("$__rate_interval", "")
    assert set(re.findall(r"\$\{?(\w+)", text)) == names


def test_the_docs_name_each_metric() -> None:
    for page, prefix in (("vllm", vllm.PREFIX), ("lmcache", lmcache.PREFIX)):
        text = (ROOT / f"docs/engines/{page}.md").read_text()
        for name in exported(prefix):
            assert f"`{name.removesuffix('_total')}" in text, name
    text = (ROOT / "docs/engines/sglang.md").read_text()
    for name in exported(sglang.PREFIX):
        assert f"_{name.removeprefix(sglang.PREFIX).removesuffix('_total')}`" in text, name
