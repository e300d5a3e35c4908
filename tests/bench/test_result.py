"""Result files have one shape, and a failed check leaves no ratios in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cxlkv.bench import result
from cxlkv.bench.result import Result, read, thinned
from cxlkv.errors import BadArgumentError


def made() -> Result:
    result = Result("story", checks={"true": True}, ratios={"a_to_b": 2.0}, notes=["a note"])
    metric = result.measure("time", [3, 1, 2, 10], "us")
    assert metric.median == 2.5
    return result


def test_a_file_has_the_shape_that_bars_and_tables_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    made().write(path)
    assert list(tmp_path.iterdir()) == [path]
    found = json.loads(path.read_text())
    assert list(found) == [
        *("case", "machine", "commit", "emulated", "checks", "metrics", "ratios", "notes")
    ]
    assert found["metrics"]["time"] == {
        "median": 2.5,
        "low": 1.0,
        "high": 10.0,
        "unit": "us",
        "samples": [3.0, 1.0, 2.0, 10.0],
    }
    assert found["ratios"] == {"a_to_b": 2.0}
    assert found["emulated"] is None
    assert found["machine"]["cores_allowed"] >= 1


@pytest.mark.parametrize("checks", [{}, {"true": True, "false": False}])
def test_a_failed_check_drops_the_ratios(checks: dict[str, bool]) -> None:
    result = made()
    result.checks = checks
    assert not result.passed
    assert result.as_dict()["ratios"] == {}


def test_a_metric_without_samples_and_a_figure_that_is_none_are_refused(tmp_path: Path) -> None:
    result = made()
    with pytest.raises(BadArgumentError, match="at least one sample"):
        result.measure("empty", [], "us")
    result.measure("nan", [float("nan")], "us")
    with pytest.raises(ValueError, match="Out of range float"):
        result.write(tmp_path / "result.json")
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_gits_or_else_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert result.commit()

    def refuse(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert result.commit().startswith("cxlkv ")


def test_a_result_says_which_node_stands_for_far_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cxlkv.machine.numa_mode.label", lambda nodes: f"far {nodes}")
    assert Result("x").emulated is None
    monkeypatch.setenv("CXLKV_EMULATE", "numa:1,2")
    assert Result("x").emulated == "far (1, 2)"


def test_a_thin_file_says_the_same_in_fewer_bytes(tmp_path: Path) -> None:
    """A thin file keeps medians, ends, ratios and labels to four digits."""
    whole = Result("story", checks={"right": True}, ratios={"a_to_b": 1 / 3}, notes=["a note"])
    whole.measure("times", [100 + i % 37 / 7 for i in range(2000)], "us", label="a link, waiting")
    whole.measure("losses", [1.2345678], "nats")
    whole.measure("bytes", [1 << 40], "bytes")
    whole.write(tmp_path / "whole.json")
    old = read(tmp_path / "whole.json")
    (tmp_path / "thin.json").write_text(thinned(old))
    new = read(tmp_path / "thin.json")
    assert (tmp_path / "thin.json").stat().st_size < (tmp_path / "whole.json").stat().st_size / 5
    assert (new.case, new.checks, new.notes, new.links) == (
        *(old.case, old.checks, old.notes, old.links),
    )
    assert new.ratios == {"a_to_b": 0.3333}
    times, was = new.metrics["times"], old.metrics["times"]
    assert len(times.samples) == result.SAMPLES_KEPT
    for name in ("median", "low", "high"):
        assert getattr(times, name) == pytest.approx(getattr(was, name), rel=1e-3)
    assert new.metrics["losses"].samples == [1.2346]
    assert new.metrics["bytes"].median == 1 << 40
    (tmp_path / "again.json").write_text(thinned(new))
    assert read(tmp_path / "again.json") == new
