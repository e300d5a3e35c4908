"""docs/engines/vllm-models.md says of each model what vLLM does when it is started with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .forked import Nursery
from .models_page import PAGE, WITHOUT_KERNELS, Kind, table
from .tiny_models import KINDS, lacks, tiny


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_served_as_the_page_says(
    kind: str, nursery: Nursery, pools_folder: Path
) -> None:
    """python -m tests.vllm.models_page writes the page."""
    if lacks(kind):
        pytest.skip(f"{kind} wants {lacks(kind)}, which is not installed here")
    row = Kind(nursery, kind, pools_folder).row()
    assert row in table(PAGE.read_text())


def test_the_page_has_these_models_alone() -> None:
    named = [row.split(" | ")[0].removeprefix("| ") for row in table(PAGE.read_text())]
    assert named == [*KINDS, *WITHOUT_KERNELS]


def test_size_counts_the_pages_that_the_engine_makes(nursery: Nursery, pools_folder: Path) -> None:
    model = tiny("Llama", pools_folder / "model")
    asked = [sys.executable, "-m", "cxlkv.ops.cli", "size", model, "--capacity", "32MiB", "--json"]
    told = json.loads(subprocess.check_output([*map(str, asked)], text=True))
    life = nursery.life(
        {"where": f"{pools_folder}/", "capacity": "32MiB"},
        model=str(model),
        block_size=None,
        dtype="float32",
    ).ready()
    (pool,) = pools_folder.glob("*.pool")
    asked = [sys.executable, "-m", "cxlkv.ops.cli", "pool", "inspect", pool, "--json"]
    made = json.loads(subprocess.check_output([*map(str, asked)], text=True))
    assert made["tokens"] == told["prefixes_of_vllm"]["tokens"] != told["tokens"]
    life.end()
