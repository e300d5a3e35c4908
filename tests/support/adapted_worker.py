"""A small model with adapters, and a process that reads a text with them.

    python -m tests.support.adapted_worker '{"path": .., "use": ["y", null], "ids": [[..]]}'

prints what each adapter of `use` (null: none) found and made.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cxlkv import CXLPool
from cxlkv.adapters.transformers import CXLRequests

from .small_models import Generates, built

PAGE = 8


def base(seed: int = 7, **more: object) -> LlamaForCausalLM:
    return built(LlamaConfig, LlamaForCausalLM, seed, **more)


def lora(**more: object) -> LoraConfig:
    """Random ones, that say much."""
    config = LoraConfig(
        init_lora_weights=False, target_modules=["k_proj", "v_proj"], r=4, lora_alpha=16
    )
    return replace(config, **more)  # type: ignore[arg-type]


def adapted(name: str) -> PeftModel:
    model = base()
    torch.manual_seed(3)
    made = get_peft_model(model, lora(), adapter_name=name)
    assert isinstance(made, PeftModel)
    made.train(False)
    return made


def read(requests: CXLRequests, model: torch.nn.Module, ids: Tensor) -> tuple[int, Tensor]:
    """How many tokens are found, and what comes of it."""
    with requests.begin(ids) as cache:
        found = cache.get_seq_length()
        settings = {"max_new_tokens": 12, "do_sample": False}
        return found, cast(Generates, model).generate(ids, past_key_values=cache, **settings)


def main() -> None:
    told = json.loads(sys.argv[1])
    model, answers = adapted("x"), []
    model.add_adapter("y", lora())
    with CXLPool.open(told["path"], threads=1) as pool:
        requests = CXLRequests(pool, model)
        for name in told["use"]:
            if name is None:
                with model.disable_adapter():
                    found, ids = read(requests, model, torch.tensor(told["ids"]))
            else:
                model.set_adapter(name)
                found, ids = read(requests, model, torch.tensor(told["ids"]))
            answers.append({"hit": found, "ids": ids.tolist()})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
