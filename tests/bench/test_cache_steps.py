"""Steps of a small random model by cache: full attention loses nothing, fewer bits lose more, and
transformers' own caches are measured by the same code, or a note says why they are not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cxlkv.bench.peers import cache_steps
from cxlkv.bench.peers.cache_steps import InPools, Points
from cxlkv.bench.peers.caches import Given, Steps, cache_of
from cxlkv.bench.result import Result
from cxlkv.demo import smollm2

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
POINTS = Points(texts=2, behind=40, steps=12, timed_behind=50, timed_steps=2, rounds=2)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)).save_pretrained(folder)
    texts = np.random.default_rng(2).integers(0, 200, (2, 80)).tolist()
    return Given(str(folder), texts, 40, 12, 50, 2, threads=1)


def test_quality_is_that_of_one_pass_over_the_text(given: Given) -> None:
    steps = Steps(given, cache_of)
    found = steps.quality("dynamic", 1)
    assert max(found["divergences"]) < 1e-6
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    ids = torch.tensor(given.texts[1][:53])
    with torch.inference_mode():
        chances = torch.log_softmax(model(ids[None]).logits[0], -1)
    wanted = [-float(chances[at, ids[at + 1]]) for at in range(40, 52)]
    assert found["losses"] == pytest.approx(wanted, abs=1e-4)
    assert found["full"] == pytest.approx(wanted, abs=1e-4)
    assert found["agreed"] == [1.0] * 12
    fewer = steps.quality("fp8", 1)
    assert np.mean(fewer["divergences"]) > 1e-6
    assert fewer["losses"] != pytest.approx(wanted, abs=1e-4)


def test_steps_go_on_where_they_ended(given: Given) -> None:
    steps = Steps(given, cache_of)
    for length in (52, 54):
        assert len(steps.seconds("dynamic")) == 2
        assert steps.timed["dynamic"][0].get_seq_length() == length


def test_fewer_bits_of_a_pool_lose_more(given: Given) -> None:
    with ExitStack() as stack:
        ours = InPools(given, stack)
        lost = {form: np.mean(ours.quality(form, 0)["divergences"]) for form in cache_steps.OURS}
        assert lost["pool"] < 1e-6 < lost["pool_int8"]
        assert 10 * lost["pool_int8"] < lost["pool_int8_int4"] < lost["pool_int4"]
        assert len(ours.seconds("pool_int4")) == 2


def test_a_run_without_the_peer_says_why(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "prepare", lambda console: Path(given.model))
    monkeypatch.setattr(cache_steps, "beginnings", lambda folder, length, count: given.texts)
    result = Result("encodings")
    cache_steps.run(result, POINTS, tmp_path)
    (note,) = result.notes
    assert note.startswith("transformers' caches: not measured, no environment in")
    assert result.passed
    assert len(result.metrics["divergence_pool_int8"].samples) == 2
    assert len(result.metrics["step_dynamic"].samples) == 2
    assert set(result.ratios) == {f"step_{name}_to_dynamic" for name in cache_steps.OURS}
    (table,) = cache_steps.tables(result)
    assert table.row_count == 5
