"""`cxlkv lab encodings` on a small random model: what changes nothing costs nothing, fewer bits
cost more, a run goes on, and its result has its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cxlkv.bench.lab import encodings, encodings_report, rivals
from cxlkv.bench.lab.encodings import Coder, CodesPlan, Encoding, both
from cxlkv.bench.lab.stored import attention
from cxlkv.bench.lab.units import Arrays
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.kernels.rotate import rotate_reference
from cxlkv.ops.cli import app

from ..support.small_models import save_with_windows, save_with_words
from . import test_lab
from .test_lab import NUMBERS, drawn_texts

SHAPE = {**test_lab.SHAPE, "vocab_size": NUMBERS, "num_hidden_layers": 5, "head_dim": 32}
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
    Encoding("progressive 0", "int8", "int8", error=0.0),
    Encoding("progressive 0.3", "int8", "int8", error=0.3),
    Encoding("progressive 9", "int8", "int8", error=9.0),
)
PLAN = CodesPlan(texts=("one", "two"), prefix=200, steps=100, encodings=ENCODINGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32, whose tokens are numbers."""
    return save_with_words(tmp_path_factory.mktemp("lab"), SHAPE, map(str, range(NUMBERS)))


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "TEXTS", drawn_texts(end=""))


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
    assert cost["progressive 0"] == pytest.approx(cost["int8"], rel=5e-2)
    assert cost["progressive 0"] < cost["progressive 0.3"] < cost["progressive 9"]
    assert cost["progressive 9"] == pytest.approx(cost["int4"], rel=0.2)
    read = {row.encoding.name: row.read for row in found.rows}
    assert read["progressive 0"][0] == pytest.approx(8)
    assert read["progressive 9"][0] == pytest.approx(4, abs=0.1)
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
        "--forms",
        "int8*;fp8;progressive*",
    ]
    done = CliRunner().invoke(app, ["lab", "encodings", *given])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "lab-encodings.json").read_text())
    assert set(result["metrics"]) >= {"loss_full", "loss_int8", "divergence_int8_query_8"}
    assert "loss_int4" not in result["metrics"]
    assert len(result["metrics"]["divergence_fp8"]["samples"]) == 2
    assert (tmp_path / "lab-encodings.png").stat().st_size > 1000
    assert result["metrics"]["read_progressive_9"]["median"] == pytest.approx(4, abs=0.1)
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


WINDOW = 40


@pytest.fixture(scope="module")
def gemma(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_windows(model, tmp_path_factory.mktemp("windows"), SHAPE, WINDOW)


def test_layers_with_a_window_are_measured(gemma: Path, tmp_path: Path) -> None:
    """They were refused when the first text was read."""
    assert encodings.measure(tmp_path, gemma, PLAN, Console()) == []
    found = encodings_report.find(tmp_path, PLAN, gemma)
    cost = {row.encoding.name: row.divergence.mean() for row in found.rows}
    assert cost["kept by windows"] < 1e-6
    assert 1e-7 < cost["int8"] < cost["int4"] / 10
    assert cost["progressive 0"] == pytest.approx(cost["int8"], rel=5e-2)
    # The pages that a window cuts are read whole.
    assert cost["int8"] < cost["progressive 9"] < 1.3 * cost["int4"]


def test_each_way_to_attend_sees_as_far_as_a_window(seed: int) -> None:
    torch.manual_seed(seed)
    query, key, value = torch.randn(4, 90, 32), torch.randn(2, 90, 32), torch.randn(2, 90, 32)
    there = torch.arange(90)
    apart = there[:, None] - there
    keys, values = (each.repeat_interleave(2, 0) for each in (key, value))
    logits = (query @ keys.mT * 0.2).masked_fill((apart < 0) | (apart >= WINDOW), -torch.inf)
    wanted = logits.softmax(-1) @ values
    given = query[None], key[None], value[None]
    plain = encodings.causal(*given, 0.2, WINDOW)
    kept = encodings.by_age(query[None], given[1:], given[1:], 4, 0.2, WINDOW)
    read, _ = attention(query, key, value, 0.2, 0.0, 20, WINDOW)
    torch.testing.assert_close(plain[0].transpose(0, 1), wanted)
    torch.testing.assert_close(kept[0].transpose(0, 1), wanted)
    assert float((read - wanted).abs().max()) < 0.1  # codes of 8 bits


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "capped logits"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
    ],
)
def test_what_is_not_measured_is_refused_before_weights_are_read(
    more: dict[str, object], said: str, model: Path, tmp_path: Path
) -> None:
    for path in model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"a llama model has {said}"):
        encodings.measure(tmp_path / "out", tmp_path, PLAN, Console())
    assert not (tmp_path / "out").exists()


def test_one_text_has_no_bound(model: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, texts=("one",), encodings=ENCODINGS[1:2])
    encodings.measure(tmp_path, model, plan, Console())
    found = encodings_report.find(tmp_path, plan, model)
    table = encodings_report.table_of(found)
    assert "no bound" in [*table.columns[5].cells]
    assert not any("below" in name for name in encodings_report.result_of(found).metrics)
    encodings_report.draw(tmp_path / "one.png", found)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_is_within_half_a_step(bits: int, seed: int) -> None:
    keys = torch.randn(70, 64, generator=torch.Generator().manual_seed(seed))
    found = rivals.kivi_keys(keys, bits)
    assert (found[64:] == keys[64:]).all()  # no whole group
    for group in (slice(0, 32), slice(32, 64)):
        spread = keys[group].amax(0) - keys[group].amin(0)
        step = spread / ((1 << bits) - 1)
        room = 0.5 * step + 2.0**-10 * (spread + keys[group].abs().amax(0))
        assert ((found[group] - keys[group]).abs() <= room).all()
    whole = rivals.kivi_values(keys, bits)
    assert torch.equal(rivals.kivi_values(keys[69:], bits), whole[69:])
    assert (rivals.kivi_keys(torch.full((32, 64), 0.3), bits) - 0.3).abs().max() < 2.0**-11


def test_q4_0_has_its_largest_channel_to_float16(seed: int) -> None:
    rows = torch.randn(30, 64, generator=torch.Generator().manual_seed(seed))
    groups, made = (rivals.in_groups(each, 32) for each in (rows, rivals.q4_0(rows)))
    at = groups.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(made.gather(-1, at), groups.gather(-1, at), rtol=2.0**-10, atol=0)
    assert (made - groups).square().sum() < 0.01 * groups.square().sum()
    assert (rivals.q4_0(torch.zeros(1, 32)) == 0).all()


def test_a_rounded_query_is_off_by_half_a_step(seed: int) -> None:
    query = torch.randn(50, 64, generator=torch.Generator().manual_seed(seed))
    for bits, most in rivals.QUERY_MOST.items():
        off = rivals.rounded_query(query, bits) - query
        turned = rotate_reference(query).abs().amax(-1)
        assert (off.norm(dim=-1) <= 0.51 * 8 * turned / most + 1e-5).all()
    assert (rivals.rounded_query(torch.zeros(1, 64), 14) == 0).all()
