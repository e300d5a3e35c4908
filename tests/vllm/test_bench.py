"""`cxlkv bench --quick` with true engines: every answer right; no figure is judged here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cxlkv.bench.cli import perform
from cxlkv.bench.peers.running import SideBySide
from cxlkv.bench.registry import Options
from cxlkv.bench.result import read as read_result
from cxlkv.bench.vllm import case, prefill_decode, running
from cxlkv.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vLLM is not installed here: `make test-vllm` has an environment of its own",
)


@pytest.mark.timeout(600)
def test_engines_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(running.PYTHON_VARIABLE, sys.executable)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(running, "SHARED", str(place))
    result = perform("vllm", case.command, Options(json=tmp_path / "vllm.json", quick=True))
    assert isinstance(result, SideBySide)
    assert result.missing == {}
    shown = capsys.readouterr().out
    assert "first token, round 2 of 2" in shown
    assert "decode_1k_1, round 2 of 2" in shown
    written = read_result(tmp_path / "vllm.json")
    assert written.passed
    assert len(written.metrics["ttft_engine_attention_hit"].samples) == running.QUICK.rounds
    assert "ttft_pool_attention_hit_to_stock" in written.ratios
    assert list(place.iterdir()) == []


@pytest.mark.timeout(600)
def test_engines_with_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(running.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(running, "SHARED", str(tmp_path))
    options = Options(json=tmp_path / "vllm.json", quick=True, model=Path("smollm2"))
    try:
        result = perform("vllm", case.command, options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert isinstance(result, SideBySide)
    assert set(result.missing) <= {"offloaded", "lmcache"}
    written = read_result(tmp_path / "vllm.json")
    assert written.passed
    assert written.metrics["decode_100_4_pool_attention_5_two_stage"].median > 0
    assert "decode_500_2_pool_attention_100_to_stock" in written.ratios


@pytest.mark.timeout(600)
def test_prefill_in_one_engine_and_decode_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(running.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setattr(running, "SHARED", str(tmp_path))
    options = Options(json=tmp_path / "prefill-decode.json", quick=True)
    try:
        result = perform("prefill-decode", prefill_decode.command, options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert isinstance(result, SideBySide)
    assert result.missing == {}
    assert result.passed
    assert "both_500_pulled_to_alone" in read_result(tmp_path / "prefill-decode.json").ratios
