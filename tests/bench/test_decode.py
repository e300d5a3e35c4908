"""The parts of `cxlkv bench decode`, small: they agree with torch before they are timed, tell a
wrong form, draw, and say what they did not measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="these benchmarks compare with torch")
pytest.importorskip("transformers", reason="these benchmarks run a model of transformers")
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from cxlkv.bench import pictures  # noqa: E402
from cxlkv.bench.cases import (  # noqa: E402
    decode_attention,
    decode_shapes,
    decode_steps,
    ndp_rivals,
)
from cxlkv.bench.models import random_llama  # noqa: E402
from cxlkv.bench.registry import CASES, Options  # noqa: E402
from cxlkv.bench.result import Result, short  # noqa: E402
from cxlkv.demo import smollm2  # noqa: E402
from cxlkv.demo.full_attention import keys_and_values  # noqa: E402
from cxlkv.errors import UnsupportedError  # noqa: E402
from cxlkv.sequence import Sequence  # noqa: E402

from .test_cases import PNG, UNIT, check_result  # noqa: E402

SHAPES = decode_shapes.Size(
    head_dims=(64,),
    groups=(1, 5),
    other_dtypes=("float16", "float32"),
    other_groups=(3,),
    tokens=1024,
    kv_heads=2,
    page_tokens=(16,),
    contexts=(512, 16384),
    sequences=(1, 2),
    keys_most_bytes=12 << 20,
    rounds=1,
    walk_bytes=1 << 20,
    region_bytes=UNIT,
)
ATTENTION = decode_attention.Size(
    models=("135m",),
    contexts=(1024, 2048),
    requests=(1, 2),
    link_model="135m",
    link_contexts=(2048,),
    rounds=1,
    link_rounds=1,
    walk_bytes=1 << 20,
    region_bytes=UNIT,
)
STEPS = decode_steps.Points((64, 160), (1, 3), steps=2, rounds=1)


def test_shapes_fill_their_maps(tmp_path: Path) -> None:
    result = Result("decode/shapes")
    decode_shapes.run(result, SHAPES)
    check_result(result)
    cells = {
        *(f"heads_bfloat16-d64_g{group}" for group in (1, 5)),
        *(f"dtypes_{dtype}-d64_g3" for dtype in ("float16", "float32")),
        *("contexts_p16-x1_512", "contexts_p16-x1_16k", "contexts_p16-x2_512"),
    }
    for name in ("exact_to_bound", "attend_to_bound", "auto_to_best"):
        assert {one for one in result.ratios if one.startswith(name)} > {
            f"{name}_{cell}" for cell in cells
        }
    staged = {one for one in result.ratios if one.startswith("two_stage_to_exact_contexts")}
    assert staged == {"two_stage_to_exact_contexts_p16-x1_16k"}  # where sketches are read
    assert "contexts_p16-x2_16k left out, too large" in "\n".join(result.notes)
    (shown,) = CASES["decode/shapes"].tables(result)
    sums = {"least", "median", "small_least", "small_median"}
    assert {*shown.columns[0].cells} == cells | sums
    assert 0 <= result.metrics["auto_within_tenth"].median <= 1
    decode_shapes.draw(result, tmp_path / "shapes.png")
    assert (tmp_path / "shapes.png").read_bytes().startswith(PNG)


def test_shapes_write_no_ratio_when_forms_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's choice shifted by a page."""
    chosen = ndp_rivals.keys_first
    monkeypatch.setattr(ndp_rivals, "keys_first", lambda *given: chosen(*given) + 1)
    result = Result("decode/shapes")
    decode_shapes.run(result, replace(SHAPES, other_dtypes=(), contexts=()))
    assert CASES["decode/shapes"].tables(result) == []
    assert {name for name, holds in result.checks.items() if not holds} == {
        f"exact_agrees_with_torch_heads_bfloat16-d64_g{group}" for group in (1, 5)
    }
    assert result.as_dict()["ratios"] == {}


def test_attention_in_memory_and_over_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """flex attention is compiled by a test of its own; here its place is sdpa's."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(decode_attention, "compiled_flex", lambda result: sdpa)
    result = Result("decode/attention")
    decode_attention.run(result, ATTENTION)
    check_result(result)
    assert result.emulated is None  # what is over a link is named so, and says so
    assert all(bool(result.label_of(name)) == ("-over-" in name) for name in result.metrics)
    median = {name: metric.median for name, metric in result.metrics.items()}
    for form in ("all", "exact_15", "two_stage_5", "auto_5", "sdpa", "flex", "floor"):
        assert median[f"{form}_135m_2x2k"] > 0
    assert 0.5 < median["read_exact_5_135m_1x2k"] < median["read_exact_15_135m_1x2k"] < 1
    slow = "135m-over-skhynix-niagara2_1x2k"
    assert median[f"auto_5_clock_{slow}"] < median[f"all_clock_{slow}"]
    assert median[f"all_{slow}"] >= 0.9 * median[f"all_clock_{slow}"]
    assert {f"auto_5_to_torch_135m_{n}x{c}" for n in (1, 2) for c in ("1k", "2k")} < {
        *result.ratios
    }
    (shown,) = CASES["decode/attention"].tables(result)
    assert shown.row_count == 4 + 2 * 10  # devices, by two clocks
    decode_attention.draw(result, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)


def test_attention_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(torch, "compile", lambda *given, **more: broken)
    result = Result("decode/attention")
    assert decode_attention.compiled_flex(result) is None
    assert result.notes == ["flex: not measured, it cannot be compiled here: no C++ compiler"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch's compiler
def test_flex_attention_agrees() -> None:
    result = Result("decode/attention")
    decode_attention.run(result, ATTENTION)
    check_result(result)
    assert result.checks["flex_agrees_135m_2x2k"]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(24)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # else all words are as likely
    )
    return LlamaForCausalLM(config)


def tiny_reader() -> decode_steps.Reader:
    model, tokens = tiny(), torch.arange(170) * 7 % 97
    return decode_steps.Reader("tiny", model, tokens, decode_steps.read(model, tokens[:160]))


def test_steps_of_a_tiny_model(tmp_path: Path) -> None:
    result, reader = Result("decode/steps"), tiny_reader()
    decode_steps.measure(result, STEPS, reader)
    check_result(result)
    for form in ("dynamic", "dynamic_masked", "all", "auto_15", "auto_5"):
        assert {f"{form}_tiny_3x160", f"{form}_slope_tiny_1"} < {*result.metrics}
    assert result.metrics["divergence_all_tiny_1x160"].median < 1e-4
    (shown,) = CASES["decode/steps"].tables(result)
    points = {"tiny_1x64", "tiny_1x160", "tiny_3x64", "tiny_3x160"}
    assert {*shown.columns[0].cells} == points | {"slope_tiny_1", "slope_tiny_3"}
    devices = ("astera-a1000", "skhynix-niagara2")
    size = decode_steps.Size(trained=STEPS, devices=devices, link_rounds=1)
    decode_steps.emulated(result, size, reader)
    assert result.emulated is None  # what is over a link is named so, and says so
    assert all(bool(result.label_of(name)) == ("-over-" in name) for name in result.metrics)
    median = {name: metric.median for name, metric in result.metrics.items()}
    slow, fast = (f"tiny-over-{device}_1x160" for device in reversed(devices))
    for form in ("all", "auto_15", "auto_5"):
        assert 0 < median[f"{form}_clock_{fast}"] < median[f"{form}_clock_{slow}"]
        assert median[f"{form}_{slow}"] > median[f"{form}_clock_{slow}"]
    assert 0 <= median[f"late_{slow}"] <= 1
    assert median[f"auto_5_clock_{slow}"] <= median[f"all_clock_{slow}"]
    decode_steps.draw(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(PNG)


def test_steps_tell_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is given the values of a text read backwards; of random weights, too."""

    def backwards(sequence: Sequence, cache: DynamicCache, length: int) -> None:
        for index, (keys, values) in enumerate(keys_and_values(cache)):
            rows = (one[:, :length].transpose(0, 1) for one in (keys, values))
            k, v = (one.contiguous() for one in rows)
            sequence.append(index, k, v.flip(0))

    monkeypatch.setattr(decode_steps, "append_cache", backwards)
    result = Result("decode/steps")
    points = decode_steps.Points((160,), (1,), steps=2, rounds=1)
    for reader in (tiny_reader(), decode_steps.untrained("llama-8m", points)):
        decode_steps.measure(result, points, reader)
        assert not result.checks[f"all_agrees_{reader.name}_1x160"]
        assert result.checks[f"dynamic_masked_agrees_{reader.name}_1x160"]


def test_steps_of_random_weights() -> None:
    """Noise has the deviation of what the model makes."""
    points = decode_steps.Points((64, 160), (1, 2), steps=2, rounds=1)
    reader = decode_steps.untrained("llama-8m", points)
    made = decode_steps.read(reader.model, reader.tokens)
    for one, other in zip(keys_and_values(made), keys_and_values(reader.held), strict=True):
        for taken, noise in zip(one, other, strict=True):
            assert noise.shape[1] == 160
            assert float(noise.float().std() / taken.float().std()) == pytest.approx(1, abs=0.05)
    result = Result("decode/steps")
    decode_steps.measure(result, points, reader)
    check_result(result)
    found = {name for name in result.metrics if name.startswith("all_")}
    at = [*(f"{count}x{tokens}" for count in (1, 2) for tokens in (64, 160))]
    assert found == {f"all_llama-8m_{n}" for n in at} | {f"all_slope_llama-8m_{n}" for n in (1, 2)}


def test_random_weights_are_as_many_as_their_name_says() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(random_llama.SHAPES["llama-160m"].config)
    assert 155e6 < model.num_parameters() < 165e6


def test_a_part_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(console: object) -> None:
        raise UnsupportedError("the model is not installed")

    monkeypatch.setattr(smollm2, "prepare", missing)
    for part in (decode_shapes, decode_attention):
        monkeypatch.setattr(part, "run", lambda result, *size: result.checks.update(ran=True))
    result = CASES["decode"].run(Options(quick=True), lambda step: None).result
    assert result.notes == ["decode/steps: not measured, the model is not installed"]
    assert result.passed
    with pytest.raises(UnsupportedError, match="the model is not installed"):
        CASES["decode/steps"].run(Options(quick=True), lambda step: None)


@pytest.mark.nightly
@pytest.mark.skipif(smollm2.model_file() is None, reason=f"no model: {smollm2.INSTALL}")
def test_steps_of_the_trained_model() -> None:
    result = Result("decode/steps")
    decode_steps.run(result, decode_steps.QUICK)
    check_result(result)


@pytest.mark.parametrize("tokens", [96, 1024, 7000, 131072])
def test_lengths_are_read_as_they_are_written(tokens: int) -> None:
    assert pictures.tokens_of(short(tokens)) == tokens
