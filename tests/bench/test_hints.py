"""The case hints on small models: what a way finds where that is known, and what the link moves."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="this benchmark runs a model")
pytest.importorskip("transformers", reason="this benchmark runs a model of transformers")
from torch import Tensor  # noqa: E402

from cxlkv.bench.cases import hints  # noqa: E402
from cxlkv.bench.registry import CASES  # noqa: E402
from cxlkv.bench.result import Result  # noqa: E402
from cxlkv.demo import smollm2  # noqa: E402

from ..adapters.test_transformers_models import make  # noqa: E402
from ..support.small_models import LAYERS, VOCABULARY_SIZE  # noqa: E402
from .test_cases import PNG, check_result  # noqa: E402

SIZE = hints.Size(prefix=640, steps=6, shares=(0.2, 0.5), tiers=(1.0,))


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [
        torch.randint(1, VOCABULARY_SIZE, (SIZE.prefix + SIZE.steps,), generator=random)
        for _ in range(2)
    ]


def measured(texts: list[Tensor], *, is_still: bool) -> Result:
    """is_still: layers add nothing to their input, so that every layer sees the same."""
    model = make("llama")
    if is_still:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
    result = Result("hints")
    hints.measure(result, SIZE, model, texts)
    check_result(result)
    return result


def test_where_layers_add_nothing_hints_are_right(texts: list[Tensor]) -> None:
    result = measured(texts, is_still=True)
    for share in ("20", "50"):
        for way, layers in (("hint", LAYERS - 1), ("late", LAYERS - 1), ("two_before", LAYERS - 2)):
            assert result.metrics[f"found_{way}_{share}"].samples == [1.0] * layers
        assert result.metrics[f"found_both_{share}"].samples == [1.0] * (LAYERS - 1)
        assert max(result.metrics[f"found_ahead_{share}"].samples) < 1
    # Only the first layer has no hint, and what a last page completes is not there yet.
    of_link = {name for name in result.metrics if name.startswith(("in_step_", "ahead_"))}
    assert {name for name in result.metrics if result.label_of(name)} == of_link
    within = result.metrics["in_step_hints_100"].median
    assert within < 0.6 * result.metrics["in_step_none"].median


def test_what_is_found_and_moved_adds_up(texts: list[Tensor], tmp_path: Path) -> None:
    result = measured(texts, is_still=False)
    for share in ("20", "50"):
        found = {way: result.metrics[f"found_{way}_{share}"].samples for way in hints.WAYS}
        assert all(0 <= one <= 1 for samples in found.values() for one in samples)
        assert all(
            b >= max(h, s)
            for b, h, s in zip(found["both"], found["hint"], found["last"][1:], strict=True)
        )
        assert found["chance"] == pytest.approx([float(share) / 100] * LAYERS, abs=0.06)
    tables = CASES["hints"].tables(result)
    assert [table.row_count for table in tables] == [2 * len(hints.WAYS), 4]
    hints.draw(result, tmp_path / "hints.png")
    assert (tmp_path / "hints.png").read_bytes().startswith(PNG)


@pytest.mark.nightly
@pytest.mark.skipif(smollm2.model_file() is None, reason=f"no model: {smollm2.INSTALL}")
def test_of_the_trained_model_hints_find_most() -> None:
    result = Result("hints")
    hints.run(result, hints.QUICK)
    check_result(result)
    medians = {way: result.metrics[f"found_{way}_5"].median for way in hints.WAYS}
    assert medians["chance"] < medians["ahead"] < 0.2
    assert medians["hint"] > 0.5
    assert medians["both"] > medians["hint"]
