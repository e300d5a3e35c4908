"""`cxlkv tune`: what it finds is used by "auto" and nobody else; what things cost is kept, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cxlkv import CXLPool, KVLayout
from cxlkv.bench import rates
from cxlkv.bench import tuning as measuring
from cxlkv.bench.report import Result
from cxlkv.cli import app
from cxlkv.costs import Costs, Tier
from cxlkv.ndp import tuning
from cxlkv.ndp.tuning import PAGES_MIN, Tuning


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tuning.current.cache_clear()
    yield
    tuning.current.cache_clear()


def test_without_a_file_the_defaults() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.current() == Tuning(PAGES_MIN)


def test_auto_follows_the_file_and_two_stage_does_not() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=16)
    keys = np.random.default_rng(1).standard_normal((1100 * 16, 1, 32)).astype(np.float16)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=16, dtype="float16")
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, keys)

        def staged(method: str) -> bool:
            stages = sequence.select(0, keys[0], top_k=20, method=method).stages
            return stages is not None and stages.lists > 0

        assert staged("auto")
        assert staged("two_stage")
        tuning.write(Tuning(2000, tuning.this_machine()), tuning.default_path())
        tuning.current.cache_clear()
        assert not staged("auto")
        assert staged("two_stage")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("{}", "two_stage_pages"),
        ('{"two_stage_pages": 5, "machine": ""}', "two_stage_pages is 5"),
        ('{"two_stage_pages": 4096, "machine": "another"}', "of another machine"),
        ("[]", "list indices"),
        ('{"two_stage_pages": 4096, "machine": "", "costs": []}', "costs are a table"),
        ('{"two_stage_pages": 4096, "machine": "", "costs": {"warp": 9}}', "'warp'"),
        ('{"two_stage_pages": 4096, "machine": "", "costs": {"far": 9}}', "far is 9"),
        (
            '{"two_stage_pages": 4096, "machine": "",'
            ' "costs": {"far": {"bytes_per_s": NaN, "where": ""}}}',
            "bytes_per_s is nan",
        ),
        (
            '{"two_stage_pages": 4096, "machine": "", "costs": {"far": {"where": ""}}}',
            "bytes_per_s",
        ),
        (
            '{"two_stage_pages": 4096, "machine": "", "costs": {"prefill": {"tokens_per_s": 9}}}',
            "prefill",
        ),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match=rf"{why}.*cxlkv tune"):
        assert tuning.read(path) == Tuning()


@pytest.mark.parametrize(
    ("faster", "pages"),
    [
        ({1024: True, 2048: True, 4096: True}, 1024),
        ({1024: False, 2048: True, 4096: True}, 2048),
        ({1024: True, 2048: False, 4096: True}, 4096),
        ({1024: True, 4096: False}, measuring.NEVER),
    ],
)
def test_where_sketches_begin_to_pay(faster: dict[int, bool], pages: int) -> None:
    assert measuring.two_stage_from(faster) == pages


def test_a_small_run() -> None:
    result = Result("tune")
    size = measuring.Size(pages=(1024, 1280), kv_heads=1, head_dim=32, rounds=1)
    found = measuring.run(result, size, threads=1)
    assert found.machine == tuning.this_machine()
    assert found.two_stage_pages in (1024, 1280, measuring.NEVER)
    assert set(result.metrics) >= {"exact_1024_pages", "two_stage_1280_pages"}


def test_costs_are_kept() -> None:
    costs = Costs(
        near=Tier(bytes_per_s=2e10),
        far=Tier(bytes_per_s=1e10, latency_s=1e-6, write_bytes_per_s=5e9, where="/dev/dax0.0"),
        score_bytes_per_s=3e10,
        attend_bytes_per_s=2e10,
    )
    kept = Tuning(2000, tuning.this_machine(), costs)
    tuning.write(kept, tuning.default_path())
    assert tuning.current() == kept


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=1))
    monkeypatch.setattr(measuring.run, "__defaults__", (measuring.Size((1024,), 1, 32, 1, 1), None))
    done = CliRunner().invoke(app, ["tune", "--threads", "1", "--cold", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "two_stage_pages" in done.output
    assert "cold_read" in done.output
    kept = tuning.read(tuning.default_path())
    assert kept.machine == tuning.this_machine()
    assert kept.costs is not None
    assert kept.costs.tiers == ("near", "far", "cold")
