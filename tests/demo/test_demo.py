"""The demo, made small: its checks, its picture, its result file, and that it can fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForTokenClassification
from typer.testing import CliRunner

from cxlkv import Budget, CXLPool
from cxlkv.adapters.transformers import layout_of
from cxlkv.demo import run as demo
from cxlkv.demo.forms import best_pages
from cxlkv.demo.measure import Asked, Examiner, Plan, Row
from cxlkv.errors import BadArgumentError
from cxlkv.ops import cli

SMALL = Plan(tokens=2048, facts=128, seeds=(101,), questions=16, together=8, shares=(0.05, 0.2, 1))
PNG = b"\x89PNG\r\n\x1a\n"


def untrained() -> LlamaForTokenClassification:
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(demo.MODEL)
    model = LlamaForTokenClassification(config)  # type: ignore[no-untyped-call]
    model.float()  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def rows(selected: float = 1.0, random: float = 0.1) -> list[Row]:
    """What 5 % and all of the pages gave, of 100 questions."""

    def asked(share: float) -> Asked:
        right = [at < 100 * share for at in range(100)]
        return Asked(right, [int(r) for r in right], [10.0, 12.0], 100.0, 50.0)

    return [
        Row(0.05, 7, asked(selected), asked(random), 0.5, 0.05),
        Row(1.0, 129, asked(1.0), asked(1.0), 1.0, 1.0),
    ]


def test_a_small_demo_passes_and_leaves_its_files(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    picture, result = tmp_path / "demo.png", tmp_path / "demo.json"
    assert demo.run(result, picture, SMALL, console)
    text = console.export_text()
    assert text.endswith("demo: PASS\n")
    assert "The KV cache lies in " in text
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 20_000
    found = json.loads(result.read_text())
    assert all(found["checks"].values())
    assert len(found["checks"]) == 4
    metrics = {name: metric["median"] for name, metric in found["metrics"].items()}
    assert metrics["pages_at_5_percent"] == 6
    assert metrics["pages_at_100_percent"] == 129
    assert metrics["kv_bytes"] == 2049 * 1024
    # The context is read once for eight questions, and each one's own token for it; to choose, its
    # keys at most.
    assert metrics["bytes_fetched_at_100_percent"] == 2048 * 1024 / 8 + 1024
    assert metrics["bytes_scored_at_5_percent"] <= 2048 * 512 / 8 + 512
    # Five full pages and the new token's, which has one token, of each layer and head.
    assert metrics["bytes_fetched_at_5_percent"] == (5 * 16 + 1) * 1024
    assert metrics["mass_at_100_percent"] == pytest.approx(1)
    assert metrics["random_mass_at_5_percent"] < metrics["mass_at_5_percent"] < 1
    assert found["ratios"]["right_at_5_percent_to_full"] >= 0.95
    assert len(found["metrics"]["token_time_at_20_percent"]["samples"]) == 2
    assert not (demo.SHARED_MEMORY / f"cxlkv-demo-{os.getpid()}.pool").exists()


def test_an_untrained_model_fails_with_exit_code_1_and_no_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "load_model", untrained)
    monkeypatch.setattr(Plan, "of", lambda tokens, method: SMALL)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["demo", "--tiny", "--json", "demo.json"])
    assert result.exit_code == 1
    assert result.output.endswith("demo: FAIL\n")
    assert (tmp_path / "cxlkv-demo.png").read_bytes().startswith(PNG)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert not found["checks"]["full_attention_right"]
    assert found["checks"]["all_pages_equal"]  # a matter of arithmetic, not of training
    assert found["ratios"] == {}


def test_a_longer_context_is_asked_by_sketches_and_held_to_full_attention(tmp_path: Path) -> None:
    """Just long enough for sketches to be read: 1,024 pages that are not forced."""
    plan = replace(Plan.of(16_640, "two_stage"), questions=16, shares=(0.05, 1.0))
    console, result = Console(record=True, width=140), tmp_path / "demo.json"
    assert demo.run(result, None, plan, console)
    text = console.export_text()
    assert "pages are chosen by method 'two_stage'" in text
    assert "was trained for 16,384 tokens" in text
    found = json.loads(result.read_text())
    assert "full_attention_right" not in found["checks"]
    scored = found["ratios"]["bytes_scored_at_5_percent_to_kv_bytes"]
    assert 0.05 < scored < 0.15, "of keys and values, half of which are keys"
    assert len(found["metrics"]["token_time_at_5_percent"]["samples"]) == 16


def test_plans_of_other_lengths() -> None:
    assert Plan.of(None, None) == Plan()
    assert Plan.of(2048, "digest") == Plan(tokens=2048, method="digest")
    long = Plan.of(65_536, None)
    assert (long.seeds, long.questions, long.together) == ((101,), 128, 1)
    for tokens, method, what in ((100, None, "100 tokens"), (None, "best", "method 'best'")):
        with pytest.raises(BadArgumentError, match=what):
            Plan.of(tokens, method)


def test_without_room_in_shared_memory_the_pool_is_anonymous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SHARED_MEMORY", tmp_path / "absent")
    with demo.demo_pool(layout_of(demo.load_model()), SMALL) as (pool, place):
        assert pool.path is None
        assert place.startswith("anonymous memory")


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        ("five_percent_keeps_95", {"selected": 0.94}),
        ("random_keeps_under_30", {"random": 0.31}),
    ],
)
def test_each_promise_can_be_broken(broken: str, changes: dict[str, float]) -> None:
    good = rows()
    full = good[-1].selected
    assert demo.result_of(SMALL, full, good, 1000).passed
    checks = demo.result_of(SMALL, full, rows(**changes), 1000).checks
    assert [name for name, holds in checks.items() if not holds] == [broken]


def test_full_attention_and_all_pages_are_held_to_the_answers() -> None:
    found = rows()
    other = Asked([True] * 94 + [False] * 6, [1] * 100, [1.0], 0.0, 0.0)
    checks = demo.result_of(SMALL, other, found, 1000).checks
    assert not checks["full_attention_right"]
    assert checks["all_pages_equal"]
    other.answers[3] = 9
    assert not demo.result_of(SMALL, other, found, 1000).checks["all_pages_equal"]
    assert not demo.result_of(SMALL, other, found[:1], 1000).checks["all_pages_equal"]


def test_random_pages_count_as_the_budget_does_and_hold_the_forced_ones() -> None:
    rank = np.random.default_rng(1).random((50, 2, 101))
    counts = np.full(50, 101)
    for share, count in ((0.001, 3), (0.05, 6), (1.0, 101)):
        pages = best_pages(rank.copy(), counts, [Budget(share=share)] * 50, 0)
        assert pages.shape == (50, 2, count)
        assert (np.diff(pages, axis=-1) > 0).all()
        assert (pages[..., 0] == 0).all()
        assert (pages[..., -2:] == [99, 100]).all()
    drawn = best_pages(rank, counts, [Budget(share=0.05)] * 50, 0)[..., 1:-2]
    assert len(np.unique(drawn)) > 80


def test_questions_do_not_change_the_contexts_in_the_pool() -> None:
    model = demo.load_model()
    with CXLPool.create("anonymous:", layout=layout_of(model), capacity="16MiB") as pool:
        examiner = Examiner(model, pool, SMALL)
        examiner.prefill()
        held = pool.stats()["pages_held"]
        first = examiner.row(0.05)
        again = examiner.row(0.05)
        assert (first.selected.answers, first.mass) == (again.selected.answers, again.mass)
        assert first.random.answers == again.random.answers
        assert pool.stats()["pages_held"] == held
        examiner.release()
        assert pool.stats()["pages_held"] == 0
        assert pool.admin.check(deep=True)["clean"]
