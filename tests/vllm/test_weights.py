"""Engines of other weights, config or longest length: what they find in one folder of pools.

A running one that loads weights anew, and fresh ones beside it; an image that is built anew with
other weights of equal size and time; an edited config.json; another --max-model-len.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from .conftest import SHAPE, MakeEngine, saved
from .engines import Engine
from .test_prefixes import CACHED, folder_in, prompts

NOTHING = [0, 0, 0, 0]


def other_weights(folder: Path) -> Path:
    """Of the tiny model's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return saved(LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)), folder)


def serve(engine: Engine, seed: int = 1) -> tuple[list[list[int]], list[int]]:
    found = engine.generate(prompts(seed))
    return found["tokens"], found["cached"]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_weights_that_a_running_engine_loads_anew(
    make_engine: MakeEngine, model: Path, tmp_path: Path, attention: str, processes: bool
) -> None:
    """vLLM's own cache is reset behind it, as vLLM's users do. Pages of the start are found by a
    fresh engine, and those of the weights behind it by nobody else."""
    _, extra = folder_in(tmp_path)
    other = other_weights(tmp_path / "other")
    settings = {**extra, "attention": attention}
    stock = [make_engine(model=str(one)) for one in (model, other)]
    assert [one.ready() for one in stock] == [None, None]
    right, right_of_other = (serve(one)[0] for one in stock)
    second = serve(stock[0], 2)[0]
    for one in stock:
        one.end()
    assert right != right_of_other
    ours = make_engine(settings, processes=processes)
    assert ours.ready() is None
    assert serve(ours) == (right, NOTHING)
    assert "reloaded" in ours.ask(do="reload", weights=str(other))
    ours.forget()
    assert serve(ours) == (right_of_other, NOTHING)
    ours.forget()
    assert serve(ours) == (right_of_other, CACHED)
    serve(ours, 2)
    assert "weights have changed" in ours.log()
    ours.end()
    fresh = make_engine(settings)
    assert fresh.ready() is None
    assert serve(fresh) == (right, CACHED)
    assert serve(fresh, 2) == (second, NOTHING)
    fresh.end()


def test_what_is_another_model_finds_nothing(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    _, extra = folder_in(tmp_path)
    folder, other = tmp_path / "model", other_weights(tmp_path / "other")
    shutil.copytree(model, folder)

    def serve_once(longest: int = 1024) -> tuple[list[list[int]], list[int]]:
        engine = make_engine(
            extra, model=str(folder), max_model_len=longest, max_num_batched_tokens=longest
        )
        assert engine.ready() is None
        found = serve(engine)
        engine.end()
        return found

    first, cached = serve_once()
    assert cached == NOTHING
    assert serve_once(2048) == (first, CACHED)
    weights = folder / "model.safetensors"
    times = weights.stat().st_mtime_ns
    shutil.copyfile(other / weights.name, weights)
    os.utime(weights, ns=(times, times))
    second, cached = serve_once()
    assert (cached, second == first) == (NOTHING, False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.3}))
    third, cached = serve_once()
    assert (cached, third == second) == (NOTHING, False)
    assert serve_once() == (third, CACHED)
