"""A real Prometheus scrapes a pool under load: it answers every query of the dashboard and of the
alert rules, and no alert fires on a healthy pool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml

from cxlkv import Budget, CXLPool
from tests.support.processes import Child
from tests.support.texts import DIM, HEADS, SMALL, grown
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD, ALERTS = ROOT / "docs/dashboard.json", ROOT / "docs/alerts.yml"
ALERTS_TEST = ROOT / "tests/ops/alerts_test.yml"
RANGE = "5s"  # of every rate here: some scrapes
SCRAPES = 4
MADE_UP = {"CxlkvHostSilent", "CxlkvEngineFailures", "CxlkvWrongPage"}
"""Alerts that fire for the figures of tests.support.engine_metrics."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"
)


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [one["expr"] for panel in panels for one in panel.get("targets", ())]
    return [
        each.replace("$__rate_interval", RANGE).replace("$prefill_tokens_per_s", "1000")
        for each in found
    ]


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {
        rule["alert"]: re.sub(r"\[\w+\]( offset \w+)?", f"[{RANGE}]", rule["expr"])
        for rule in group["rules"]
    }


def relabeling() -> dict[str, object]:
    """What the docs say is to be added for a Prometheus before 3."""
    page = (ROOT / "docs/how-to/operations.md").read_text()
    (found,) = re.findall(r"```yaml\n(metric_relabel_configs:.*?)```", page, re.DOTALL)
    return dict(yaml.safe_load(found))


class Prometheus:
    """A server of its own that scrapes these addresses each second."""

    def __init__(self, folder: Path, ports: list[int], stack: ExitStack):
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {
                    "job_name": "cxlkv",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
                    **relabeling(),
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        words = [f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
        self._log = folder / "log"
        log = stack.enter_context(self._log.open("wb"))
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", *words],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(self._is_ready, "prometheus did not start")

    def _is_ready(self) -> bool:
        """It listens before it answers: 503 until its storage is open."""
        if self.address() is None:
            return False
        try:
            with urllib.request.urlopen(f"http://{self.address()}/-/ready"):
                return True
        except urllib.error.HTTPError as answer:
            if answer.code != 503:
                raise
            return False

    def address(self) -> str | None:
        found = re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', self._log.read_text())
        return found and found[1]

    def ask(self, expression: str) -> list[dict[str, object]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self.address()}/api/v1/query?{query}") as answer:
            found: list[dict[str, object]] = json.load(answer)["data"]["result"]
        return found


def use(pool: CXLPool) -> None:
    """What a client does, a bit of everything that is counted."""
    ids = range(20)
    sequence = grown(pool, ids)
    pool.publish_prefix(sequence, [*ids])
    pool.match_prefix([*ids]).release()
    chosen = sequence.select(0, np.ones((HEADS, DIM), np.float32), Budget(share=1.0))
    sequence.attend(0, np.ones((HEADS, DIM), np.float32), chosen)
    sequence.fetch(0, chosen)
    sequence.release()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen SCRAPES of a pool in use and of the adapters' metrics."""
    folder = tmp_path_factory.mktemp("prometheus")
    path = folder / "pool"
    with ExitStack() as stack:
        pool = stack.enter_context(CXLPool.create(path, layout=SMALL, capacity="3MiB"))
        pool.admin.audit = 1.0
        exporter = stack.enter_context(
            Child("-m", "cxlkv.ops.cli", "metrics", "--listen", "127.0.0.1:0", path)
        )
        found = re.search(r":(\d+)/metrics", exporter.hear())
        assert found
        engine = stack.enter_context(Child("-m", "tests.support.engine_metrics"))
        server = Prometheus(folder, [int(found[1]), int(engine.hear())], stack)

        def has_seen() -> bool:
            use(pool)
            names = ("cxlkv_pool_up", "vllm:cxlkv_hit_tokens_total")
            counts = [server.ask(f"count_over_time({name}[1m]) >= {SCRAPES}") for name in names]
            return all(counts)

        until(has_seen, "prometheus did not scrape")
        yield server


@needs_prometheus
@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_is_answered(scraped: Prometheus, expression: str) -> None:
    assert scraped.ask(expression)


@needs_prometheus
@pytest.mark.parametrize("alert", rules())
def test_an_alert_has_data_and_is_quiet(scraped: Prometheus, alert: str) -> None:
    """What it compares is there, and it fires for what is made up to be wrong, only."""
    expression = rules()[alert]
    compared = re.split(r" (?:==|[<>]) ", expression)[0]
    assert scraped.ask(compared), compared
    assert bool(scraped.ask(expression)) is (alert in MADE_UP)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_the_rules_fire_when_they_should() -> None:
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS_TEST)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_has_a_test_and_a_line_in_the_docs() -> None:
    tested = yaml.safe_load(ALERTS_TEST.read_text())["tests"]
    seen = {one["alertname"] for each in tested for one in each["alert_rule_test"]}
    assert seen == set(rules())
    page = (ROOT / "docs/how-to/operations.md").read_text()
    assert all(f"`{name}`" in page for name in rules())
