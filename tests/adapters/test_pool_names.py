"""Files of engines' pools say whose model they are; an older engine's pool keeps its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlkv.adapters.common.pools import path_for
from cxlkv.ops.top import model_name
from cxlkv.stats import Overview

HASH = "0123456789abcdef"


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/models/team/my model (v2)/", "my-model-v2"),
        ("../..", "model"),
        ("x" * 300, "x" * 60),
    ],
)
def test_the_name_of_a_file_says_the_model(tmp_path: Path, model: str, named: str) -> None:
    for engine, rest in (("vllm", "-0of1"), ("sglang", ""), ("lmcache", "")):
        file = f"cxlkv-{engine}-{HASH}{rest}.pool"
        path = path_for(f"{tmp_path}/", file, model)
        assert path == f"{tmp_path}/cxlkv-{engine}-{named}-{HASH}{rest}.pool"
        assert model_name(Overview(path, "idle")) == named


def test_a_pool_that_is_there_keeps_its_name(tmp_path: Path) -> None:
    """An engine up to 0.2 had no model in the name: its prefixes are found again."""
    file = f"cxlkv-vllm-{HASH}-0of1.pool"
    (tmp_path / file).touch()
    assert path_for(f"{tmp_path}/", file, "Qwen/Qwen3-8B") == f"{tmp_path}/{file}"
    assert path_for(f"{tmp_path}/my.pool", file, "Qwen/Qwen3-8B") == f"{tmp_path}/my.pool"


@pytest.mark.parametrize(
    ("stored", "shown"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("/models/team/mine", "mine"), ("./mine/", "mine")],
)
def test_what_a_layout_names(stored: str, shown: str) -> None:
    assert model_name(Overview("/dev/shm/a.pool", "idle", model_id=stored)) == shown
