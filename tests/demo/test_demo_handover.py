"""The demo of a hand-over, made small: two processes, its checks, and that it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cxlkv.demo import handover
from cxlkv.demo import run as demo
from cxlkv.demo.measure import Asked, Plan
from cxlkv.errors import BadArgumentError, MemoryShortError, PeerError
from cxlkv.ops import cli

TOKENS = 2053  # five in the open tail


def seen(answer: int) -> handover.Seen:
    """One question; the process that goes on gives this answer, the one that reads gives 3."""
    own, other = (Asked([True], [number], [10.0]) for number in (3, answer))
    return handover.Seen(
        plan=Plan(tokens=TOKENS),
        token_bytes=1024,
        pages=128,
        tail_tokens=5,
        prefill_s=0.5,
        own=[own, own],
        handed_bytes=1600,
        hand_over_ms=[1.0, 2.0],
        take_over_ms=[3.0, 4.0],
        others=[other, other],
        pages_left=0,
    )


def test_two_processes_answer_the_same(tmp_path: Path) -> None:
    console, result = Console(record=True, width=140), tmp_path / "handover.json"
    assert handover.run(result, TOKENS, console)
    text = console.export_text()
    assert "Copied: the open tail of 5 tokens (5 KiB)" in text
    assert "B answered 64 of 64 right from 100 % of the pages" in text
    assert text.endswith("demo: PASS\n")
    found = json.loads(result.read_text())
    assert all(found["checks"].values())
    assert list(found["checks"]) == [
        "full_attention_right",
        "same_answers_at_100_percent",
        "same_answers_at_5_percent",
        "all_pages_given_back",
    ]
    metrics = {name: metric["median"] for name, metric in found["metrics"].items()}
    assert (metrics["kv_bytes"], metrics["tail_bytes"]) == (TOKENS * 1024, 5 * 1024)
    assert 12 * 129 < metrics["handed_bytes"] < 12 * 129 + 200
    assert found["ratios"]["both_times_to_prefill_time"] > 0


def test_other_answers_fail_and_leave_no_ratio() -> None:
    assert handover.result_of(seen(3)).as_dict()["ratios"] == {
        "both_times_to_prefill_time": 5.0 / 1e3 / 0.5
    }
    for wrong in (seen(4), replace(seen(3), pages_left=1)):
        result = handover.result_of(wrong)
        assert not result.passed
        assert result.as_dict()["ratios"] == {}


def test_what_the_other_process_dies_of_is_said(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.pool")
    with (
        pytest.raises(PeerError, match="that was to go on ended with status 1"),
        handover.other_process(missing, Plan(tokens=TOKENS)),
    ):
        pass


def test_without_room_for_a_file_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHARED_MEMORY", Path("/nonexistent"))
    with pytest.raises(MemoryShortError, match="has no room for the pool, and other memory no"):
        handover.run(tokens=TOKENS)


def test_it_goes_with_tokens_and_json_only() -> None:
    for words in (["--method", "exact"], ["--model", "m", "--text", "t"]):
        result = CliRunner().invoke(cli.app, ["demo", "--handover", *words])
        assert isinstance(result.exception, BadArgumentError)
        assert "--handover goes with" in str(result.exception)
