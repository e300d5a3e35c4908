"""Engines of other weights, config or longest length: what they find in one folder of pools.

A running one that loads weights or an adapter (LoRA) anew, and fresh ones beside it; an image that
is built anew with other weights of equal size and time; an edited config.json; another
--max-model-len.
"""

from __future__ import annotations

import json
import os
import shutil
from itertools import product
from pathlib import Path

import pytest

from .conftest import MakeEngine
from .engines import LAYERS, Engine
from .test_prefixes import CACHED, folder_in, prompts
from .tiny_models import SHAPE, saved

NOTHING = [0, 0, 0, 0]


def other_weights(folder: Path) -> Path:
    """Weights of the tiny model's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return saved(LlamaForCausalLM(LlamaConfig.from_dict(SHAPE)), folder)


RANK = 4


def lora(folder: Path, seed: int) -> Path:
    """An adapter whose files always have the same sizes and times; with it tokens are others."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors, width = {}, int(str(SHAPE["hidden_size"]))
    for layer, (name, size) in product(range(LAYERS), {"q": width, "k": 64, "v": 64}.items()):
        key = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
        tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, width) * 0.12
        tensors[f"{key}.lora_B.weight"] = torch.randn(size, RANK) * 0.12
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "bias": "none"}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        os.utime(file, ns=(10**18, 10**18))
    return folder


Served = tuple[list[list[int]], list[int]]


def serve(engine: Engine, seed: int = 1, adapter: dict[str, object] | None = None) -> Served:
    """(tokens, how many of each prompt were cached)."""
    found = engine.generate(prompts(seed), adapter=adapter)
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
    right, right_of_other = (serve(one)[0] for one in stock)
    second = serve(stock[0], 2)[0]
    for one in stock:
        one.end()
    assert right != right_of_other
    ours = make_engine(settings, processes=processes)
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


# ---- adapters ----

ADAPTING: dict[str, object] = {"enable_lora": True, "max_lora_rank": 2 * RANK, "max_loras": 1}


def started(make_engine: MakeEngine, extra: dict[str, object], processes: bool = False) -> Engine:
    made = make_engine(extra, processes=processes, environment=None, **ADAPTING)
    return made


def of_adapter(folder: Path, *, anew: bool = False) -> dict[str, object]:
    return {"lora_name": "one", "lora_int_id": 1, "lora_path": str(folder), "load_inplace": anew}


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Tokens of a stock engine with the adapters of seeds 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("stock")
    given: dict[str, object] = {"model": str(model), **ADAPTING}
    stock, found = Engine(folder / "log", None, processes=False, environment=None, **given), []
    try:
        for seed in range(3):
            adapter = of_adapter(lora(folder / "adapter", seed), anew=True)
            found.append(serve(stock, adapter=adapter)[0])
            stock.forget()
        stock.end()
    finally:
        stock.kill()
    assert found[0] != found[1] != found[2]
    return found


@pytest.mark.parametrize("attention", ["engine", "pool"])
def test_an_adapter_that_a_running_engine_loads_in_place(
    make_engine: MakeEngine, tmp_path: Path, attention: str, right: list[list[list[int]]]
) -> None:
    """Under its name and path, of equal size and time. vLLM's own cache is reset behind it. Then it
    is loaded beside requests, and its files change without being loaded."""
    _, extra = folder_in(tmp_path)
    settings, folder = {**extra, "attention": attention}, lora(tmp_path / "adapter", 0)
    one, anew = of_adapter(folder), of_adapter(folder, anew=True)
    ours = started(make_engine, settings)
    assert serve(ours, adapter=one) == (right[0], NOTHING)
    ours.forget()
    assert serve(ours, adapter=one) == (right[0], CACHED)
    ours.forget()
    assert serve(ours)[1] == NOTHING, "without the adapter"
    ours.forget()
    lora(folder, 1)
    assert serve(ours, adapter=anew) == (right[1], NOTHING)
    ours.forget()
    assert serve(ours, adapter=anew) == (right[1], CACHED)
    ours.end()

    fresh = started(make_engine, settings, processes=attention == "pool")
    assert serve(fresh, adapter=one) == (right[1], CACHED)
    fresh.forget()
    lora(folder, 0)
    assert "loaded" in fresh.ask(do="adapter", adapter=anew)
    lora(folder, 2)
    assert serve(fresh, adapter=one)[0] == right[0], "the engine has what it loaded"
    fresh.forget()
    assert serve(fresh, adapter=anew) == (right[2], NOTHING)
    fresh.end()
    lora(folder, 0)
    last = started(make_engine, settings)
    assert serve(last, adapter=one) == (right[0], CACHED)
    last.end()


def test_an_adapter_is_loaded_in_place_and_the_prefix_cache_stays(
    make_engine: MakeEngine, tmp_path: Path, right: list[list[list[int]]]
) -> None:
    """vLLM's own blocks are of the old one then; the pool's pages are not."""
    _, settings = folder_in(tmp_path)
    folder = lora(tmp_path / "adapter", 0)
    ours = started(make_engine, settings)
    serve(ours, adapter=of_adapter(folder))
    lora(folder, 1)
    assert serve(ours, adapter=of_adapter(folder, anew=True))[1] == CACHED
    ours.forget()
    assert serve(ours, adapter=of_adapter(folder)) == (right[1], NOTHING)
    ours.end()
