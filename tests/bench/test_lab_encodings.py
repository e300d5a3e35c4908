"""`cxlkv lab encodings` on a small random model: what changes nothing costs nothing, fewer bits
cost more, a run goes on, and its result has its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from cxlkv.bench.lab import encodings, encodings_report
from cxlkv.bench.lab.encodings import Coder, CodesPlan, Encoding, both
from cxlkv.bench.lab.planes import Planes
from cxlkv.bench.lab.texts import Text
from cxlkv.bench.lab.units import Arrays
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError
from cxlkv.ops.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = 300
SHAPE = {
    "vocab_size": NUMBERS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
ENCODINGS = (
    Encoding("kept by windows", "none", "none", newest="none"),
    both("int8"),
    both("int8", query_bits=8),
    both("int4"),
    both("int4", dense=1),
    Encoding("int4, newest int8", "int4", "int4", newest="int8"),
    Encoding("kivi2", "kivi2 k", "kivi2 v", newest="none"),
    both("fp8"),
    both("fp8 nearest"),
    Encoding("progressive 0", "int8", "int8", planes=Planes(0.0)),
    Encoding("progressive 0.3", "int8", "int8", planes=Planes(0.3)),
    Encoding("progressive 9", "int8", "int8", planes=Planes(9.0)),
)
PLAN = CodesPlan(texts=("one", "two"), prefix=200, steps=100, encodings=ENCODINGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32, whose tokens are numbers."""
    folder = tmp_path_factory.mktemp("lab")
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).save_pretrained(folder)
    words = {str(number): number for number in range(NUMBERS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(seed: int) -> Callable[[], str]:
        numbers = np.random.default_rng(seed).integers(0, NUMBERS, 2000)
        return lambda: " ".join(map(str, numbers))

    made = tuple(Text(name, "prose", "drawn", read(at)) for at, name in enumerate(("one", "two")))
    monkeypatch.setattr(encodings, "TEXTS", made)


def test_fewer_bits_cost_more_and_windows_that_keep_all_cost_nothing(
    model: Path, tmp_path: Path
) -> None:
    assert encodings.measure(tmp_path, model, PLAN, Console()) == []
    found = encodings_report.find(tmp_path, PLAN, model)
    cost = {row.encoding.name: row.divergence.mean() for row in found.rows}
    assert cost["kept by windows"] < 1e-6
    assert 1e-6 < cost["int8"] < cost["int8, query 8"] < cost["int4"] / 10
    assert cost["int4, newest int8"] < cost["int4"]
    assert cost["int4, dense 1"] < cost["int4"] < cost["kivi2"]
    assert cost["fp8 nearest"] < cost["fp8"]
    bits = {row.encoding.name: row.bits for row in found.rows}
    assert bits["int4"] == 4.5
    assert bits["int4, dense 1"] == pytest.approx(0.6 * 4.5 + 0.4 * 16)
    assert bits["kivi2"] == 3
    assert cost["progressive 0"] == pytest.approx(cost["int8"], rel=1e-2)
    assert cost["progressive 0"] < cost["progressive 0.3"] < cost["progressive 9"]
    assert cost["progressive 9"] == pytest.approx(cost["int4"], rel=0.2)
    read = {row.encoding.name: row.read for row in found.rows}
    assert (read["progressive 0"][0] == 8).all()
    assert (read["progressive 9"][1] == 4).all()
    assert 4 < read["progressive 0.3"][0].mean() < 8
    assert all(row.error.max() < 0.3 for row in found.rows if row.encoding.name[-3:] == "0.3")


def test_a_run_goes_on_where_it_was_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, encodings=ENCODINGS[1:2])
    read, seen = encodings.read, list[int]()

    def killed(coder: Coder, *given: object) -> Arrays:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(1)
        return read(coder, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(encodings, "read", killed)
    with pytest.raises(KeyboardInterrupt):
        encodings.measure(tmp_path, model, plan, Console())
    part = encodings_report.find(tmp_path, plan, model)
    assert part.texts == ["one"]
    assert "1 of 2 texts: one" in part.notes
    monkeypatch.setattr(encodings, "read", read)
    assert encodings.measure(tmp_path, model, plan, Console()) == []
    whole = encodings_report.find(tmp_path, plan, model)
    assert whole.texts == ["one", "two"]
    assert whole.rows[0].loss[0] == part.rows[0].loss[0]
    with pytest.raises(BadArgumentError, match="another plan"):
        encodings.measure(tmp_path, model, replace(plan, steps=50), Console())


def test_the_command_writes_result_and_picture(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodesPlan, "quick", lambda: PLAN)
    given = [
        "--quick",
        "--model",
        str(model),
        "--out",
        str(tmp_path),
        "--encodings",
        "int8*;fp8;progressive*",
    ]
    done = CliRunner().invoke(app, ["lab", "encodings", *given])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "lab-encodings.json").read_text())
    assert set(result["metrics"]) >= {"loss_full", "loss_int8", "divergence_int8_query_8"}
    assert "loss_int4" not in result["metrics"]
    assert len(result["metrics"]["divergence_fp8"]["samples"]) == 2
    assert (tmp_path / "lab-encodings.png").stat().st_size > 1000
    assert result["metrics"]["keys_read_progressive_9"]["median"] == 4
    wrong = CliRunner().invoke(app, ["lab", "encodings", *given[:-1], "int9"])
    assert wrong.exit_code != 0


def test_every_encoding_of_the_plan_can_be_measured(model: Path) -> None:
    coder, tokens = Coder(inputs.read_model(model)), torch.arange(250) % NUMBERS
    full = coder.chances(tokens, 20)
    for encoding in CodesPlan().encodings:
        with coder.under(encoding):
            found = coder.chances(tokens, 20)
        assert torch.isfinite(found).all(), encoding.name
        assert not torch.equal(found, full), encoding.name
    assert torch.equal(coder.chances(tokens, 20), full)
