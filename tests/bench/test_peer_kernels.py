"""What encodings are held against computes what it should; what is missing is named, and why."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from cxlkv.bench.cases import encodings
from cxlkv.bench.cases.decode_layers import Decoding
from cxlkv.bench.peers import kernels
from cxlkv.bench.peers.kernels import Given, MissingError
from cxlkv.bench.peers.running import ENVIRONMENTS
from cxlkv.bench.result import Result

SHAPE = Decoding(head_dim=64, kv_heads=2, group=3, tokens=200, layers=2, sequences=2)


@pytest.fixture
def given(rng: np.random.Generator) -> Given:
    def noise(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).bfloat16()

    rows = SHAPE.tokens, SHAPE.kv_heads, SHAPE.head_dim
    return Given(SHAPE, noise(*rows), noise(*rows), noise(6, SHAPE.head_dim))


def test_what_is_wanted_is_a_loop_over_heads_and_tokens(given: Given) -> None:
    head, query, token = 1, 2, 137
    rows = given.queries[3 * head + query].float(), given.keys[:, head].float()
    assert given.scores[head, query, token] == pytest.approx(
        float(rows[0] @ rows[1][token]), rel=1e-5
    )
    weights = torch.softmax(rows[1] @ rows[0] / 8, 0)
    wanted = (weights[:, None] * given.values[:, head].float()).sum(0)
    np.testing.assert_allclose(given.attended[head, query], wanted.numpy(), atol=1e-5)


def test_numkong_scores_as_arithmetic_does(given: Given) -> None:
    module = pytest.importorskip("numkong")
    forms = dict(kernels.numkong_forms(given, module))
    assert set(forms) == {"score_numkong_int8", "score_numkong_int8_packed"}
    for rival in forms.values():
        assert rival.walk(given) > 0
        assert rival.error(given.scores) < 0.02
        assert rival.error(given.scores[:, ::-1]) > 1


def test_ggml_scores_and_attends_as_arithmetic_does(given: Given) -> None:
    try:
        ggml = kernels.Ggml(ENVIRONMENTS)
    except MissingError as error:
        pytest.skip(str(error))
    for name, rival in kernels.ggml_forms(given, ggml):
        kind, form = name.split("_", 1)
        wanted = given.scores if kind == "score" else given.attended
        assert rival.walk(given) > 0
        assert rival.error(wanted) < {"q4_0": 0.3, "q8_0": 0.05, "f16": 0.05}[form], name
        assert rival.error(wanted[:, ::-1]) > encodings.RIVAL_ERROR_MOST, name


def test_a_run_without_rivals_says_why(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    found = dict(kernels.forms(given, tmp_path))
    assert found == {
        "numkong": "not installed: pip install numkong",
        "ggml": f"no ggml in {tmp_path / 'llama'}: make build/peers/llama",
    }
    assert encodings.tables(Result("encodings")) == []
