"""Models that draft: their keys and values lie in the pool beside the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .forked import Life, Nursery, Tokens
from .test_prefixes import folder_in
from .test_windows import CACHED, CHUNK, prompts, served
from .tiny_models import SHAPE, saved, tiny

RIGHT = "vllm:spec_decode_num_accepted_tokens"


def with_mtp(folder: Path) -> Path:
    """A model whose drafts are right in a part of the cases: mostly its last token decides the next
    one, which its layer for drafts knows, and attends besides."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.Qwen2Config.from_dict({**SHAPE, "tie_word_embeddings": False})
    saved(transformers.Qwen2ForCausalLM(config), folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.1
    layer, drafts, size = "model.layers.0.", "model.mtp_layers.0.", config.hidden_size
    weights |= {
        name.replace(layer, drafts): weight.clone()
        for name, weight in weights.items()
        if name.startswith(layer)
    }
    hidden = torch.zeros(size, size)
    weights[f"{drafts}input_proj.weight"] = torch.cat([hidden, torch.eye(size) * 0.12], 1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{drafts}{name}.weight"] = torch.ones(size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def alone(life: Life) -> tuple[list[Tokens], list[int]]:
    """served() of each prompt by itself: how many drafts there are depends on who is beside it."""
    each = [served(life, [prompt]) for prompt in prompts(1)]
    return [one[0][0] for one in each], [one[1][0] for one in each]


def right_drafts(life: Life) -> object:
    return life.ask(do="metrics")[RIGHT]


@pytest.mark.parametrize("form", ["engine", "pool"])
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_a_hit_brings_what_the_drafter_has_of_it(
    method: str, form: str, nursery: Nursery, pools_folder: Path
) -> None:
    """So that as many drafts are right as without one. Engines that draft otherwise, or not, have
    a pool of their own in the same folder."""
    folder, extra = folder_in(pools_folder)
    extra["attention"] = form
    drafter: dict[str, object] = {"method": method, "num_speculative_tokens": 1}
    if method == "mtp":
        model = with_mtp(pools_folder / "model")
    else:
        model = tiny("Llama", pools_folder / "model")
        drafter |= {"model": str(model), "num_speculative_tokens": 3}
    settings = {**CHUNK, "model": str(model), "disable_log_stats": False}
    stock = nursery.life(None, **settings, speculative_config=drafter).ready()
    wanted, right = alone(stock)[0], right_drafts(stock)
    stock.end()
    assert right

    if (method, form) == ("draft_model", "pool"):
        refused = nursery.life(extra, **settings, speculative_config=drafter)
        said = next(refused.hear())
        refused.kill()
        assert "no speculation of 3 tokens by 'draft_model'" in str(said["error"])
        assert 'leave out "attention"' in str(said["error"])
        return
    for cached in ([0, 0, 0], CACHED):
        life = nursery.life(extra, **settings, speculative_config=drafter).ready()
        assert alone(life) == (wanted, cached)
        assert right_drafts(life) == right
        life.end()
    plain = nursery.life(extra, **settings).ready()
    assert alone(plain) == (wanted, [0, 0, 0])
    plain.end()
    assert len(list(folder.iterdir())) == 2
