"""llama.cpp beside attention in a pool: a fake that steps, fails or is not there; and the true one
where it is installed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cxlkv.bench import sources
from cxlkv.bench.cli import perform
from cxlkv.bench.peers import llama_steps as llama
from cxlkv.bench.peers.running import ENVIRONMENTS, SideBySide
from cxlkv.bench.peers.talking import ContenderError, Program, program_of
from cxlkv.bench.registry import Options, Say, Shown
from cxlkv.bench.result import read as read_result
from cxlkv.demo import smollm2

SMALL = replace(llama.QUICK, behind=(40, 90), steps=3, settle_s=0, limit_s=60)
CHECKOUT = Path(__file__).resolve().parents[2]

# A step of it takes 1 ms and 10 us a token of context.
FAKE = """\
import json, sys
fault = sys.argv[1]
print(json.dumps({"version": "9", "forms": {}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "open":
        assert len(asked["ids"]) == asked["behind"][-1] + asked["steps"]
        answer = {"weights": "llama Q4_1"}
    else:
        seconds = [1e-3 + 1e-5 * asked["behind"]] * 3
        answer = {"seconds": seconds, "losses": [2.5]}
        if fault == "no time":
            answer["seconds"] = [-1.0]
        if fault == "an error" and asked["behind"] == 90:
            answer = {"error": "RuntimeError: llama_decode gave 1"}
    print(json.dumps(answer), flush=True)
"""


def run(folder: Path, fault: str) -> SideBySide:
    path = folder / "peer.py"
    path.write_text(FAKE)
    program = Program("llama", (sys.executable, str(path), fault), dict(os.environ))
    (drawn,) = sources.gaussian(tokens=93, queries=3, kv_heads=3, group=3, head_dim=64)
    keys, values, queries = (t.bfloat16() for t in (drawn.keys, drawn.values, drawn.queries))
    taken = [
        replace(drawn, layer=layer, keys=keys, values=values, queries=queries) for layer in (0, 1)
    ]
    result = SideBySide("llama")
    llama.run(result, program, SMALL, taken, range(93), Path("m.gguf"), folder)
    return result


def test_steps_of_a_peer_and_of_the_pool(tmp_path: Path) -> None:
    result = run(tmp_path, "none")
    assert result.missing == {}
    assert result.checks == {f"pool_is_torch_behind_{n}": True for n in SMALL.behind}
    found = result.metrics
    assert found["llama_q8_0_ms_behind_90"].samples == pytest.approx([1.9] * SMALL.rounds)
    assert found["llama_f16_ms_per_1000"].median == pytest.approx(10)
    assert found["llama_q4_0_loss_behind_40"].samples == [2.5]
    for form in llama.OURS:
        assert found[f"pool_{form}_ms_behind_40"].median > 0
    slope = found["pool_full_ms_per_1000"].median
    ratio = result.ratios.get("per_1000_pool_full_to_llama_f16")
    assert ratio == (pytest.approx(10 / slope) if slope > 0 else None)
    assert "llama: weights: llama Q4_1" in result.notes


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("no time", "seconds.0: Input should be greater"), ("an error", "llama_decode gave 1")],
)
def test_a_peer_that_fails_is_in_no_figure(tmp_path: Path, fault: str, reason: str) -> None:
    result = run(tmp_path, fault)
    assert reason in result.missing["llama"]
    assert result.passed
    assert not any(name.startswith("llama") for name in result.metrics)
    assert "pool_full_ms_behind_90" in result.metrics
    assert result.ratios == {}


def installed() -> str:
    """Why the true one cannot run here; empty if it can."""
    if smollm2.model_file() is None:
        return f"no model: {smollm2.INSTALL}"
    try:
        program_of(llama.PEER, CHECKOUT / ENVIRONMENTS)
    except ContenderError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(installed()), reason=installed())
def test_llama_cpp_steps(tmp_path: Path) -> None:
    options = Options(json=tmp_path / "llama.json", quick=True)

    def command(given: Options, say: Say) -> Shown:
        return llama.command(given, say, CHECKOUT / ENVIRONMENTS)

    result = perform("llama", command, options)
    assert isinstance(result, SideBySide)
    assert result.missing == {}
    written = read_result(tmp_path / "llama.json")
    assert any("Q4_1" in note for note in written.notes)
    losses = [m.median for name, m in written.metrics.items() if "loss" in name]
    assert len(losses) == len(llama.TYPES) * len(llama.QUICK.behind)
    assert max(losses) < 6, "it knows more than nothing of 49,152 tokens: 10.8 nats"


@pytest.mark.skipif(smollm2.model_file() is None, reason=f"no model: {smollm2.INSTALL}")
def test_without_llama_cpp_what_to_install_is_said(tmp_path: Path) -> None:
    shown = llama.command(Options(), lambda text: None, tmp_path, SMALL)
    assert isinstance(shown.result, SideBySide)
    assert "make build/peers/llama" in shown.result.missing["llama"]
    assert "pool_full_ms_behind_90" in shown.result.metrics
