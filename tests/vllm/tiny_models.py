"""Tiny models with random weights, one of each kind that docs/engines/vllm-models.md names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .engines import LAYERS, VOCABULARY_SIZE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHAPE: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Without YaRN, vLLM's CPU turns keys of latents by their place in a step.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 1024},
    **{"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
# vLLM's attention over latents on a CPU takes these two sizes alone.
LATENT: dict[str, object] = {
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    **{"num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": None, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **EXPERTS},
    "rope_parameters": YARN,
}
WINDOWS = {
    **{"num_hidden_layers": 4, "max_position_embeddings": 2048, "sliding_window": 64},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MIXED: dict[str, object] = {
    **{"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
LINEAR: dict[str, object] = {
    **{"head_dim": 128, "num_key_value_heads": 4},  # so that blocks are no longer than 160 tokens
    **{**MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
MAMBA: dict[str, object] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1},
    "mamba_expand": 2,
}
# Of transformers: the prefix of its classes, and what differs from SHAPE.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {}),
    "Mistral": ("Mistral", {"sliding_window": 64}),
    "BLOOM": ("Bloom", {"n_layer": LAYERS, "n_head": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 4, **EXPERTS}),
    "Gemma-3": ("Gemma3", WINDOWS),
    # Layers of two sizes of heads, the last two of which have no K and V of their own.
    "Gemma-4": (
        "Gemma4",
        {
            **{**WINDOWS, "num_hidden_layers": 6, "num_kv_shared_layers": 2},
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            **{"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY_SIZE},
        },
    ),
    "gpt-oss": ("GptOss", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama-4": (
        "Llama4",
        {
            **{"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 64},
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
            "intermediate_size_mlp": 256,
        },
    ),
    "DeepSeek-V2": ("DeepseekV2", LATENT),
    "DeepSeek-V3": ("DeepseekV3", {**LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc"}),
    "Qwen3-Next": (
        "Qwen3Next",
        {
            **{"num_experts": 4, **EXPERTS, **LINEAR},
            **{"shared_expert_intermediate_size": 64, "full_attention_interval": 2},
        },
    ),
    "Qwen3.5": ("Qwen3_5", LINEAR),
    "Falcon-H1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 256}),
    "Nemotron-H": (
        "NemotronH",
        {
            **{"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2},
            **{"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 1},
        },
    ),
    "Granite-4": (
        "GraniteMoeHybrid",
        {**MAMBA, **MIXED, "num_local_experts": 4, "shared_intermediate_size": 64},
    ),
    "LFM2": (
        "Lfm2",
        {
            **{"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
            # Of the checkpoints; transformers has other names for them.
            **{"conv_dim": 128, "block_dim": 128, "block_ff_dim": 256, "block_use_swiglu": True},
        },
    ),
}

LINEAR_STEPS: dict[str, object] = {"dtype": "bfloat16", "max_num_batched_tokens": 320}
# vLLM's scan on CPUs keeps no state within a step (IndexError), so that one ends at each block.
SCAN_STEPS: dict[str, object] = {"max_num_batched_tokens": 64}
# Of kinds with states: tokens of a block, and what else an engine on a CPU is started with.
HYBRIDS: dict[str, tuple[int, dict[str, object]]] = {
    "Qwen3-Next": (160, LINEAR_STEPS),
    "Qwen3.5": (160, LINEAR_STEPS),
    "Falcon-H1": (64, SCAN_STEPS),
    "Nemotron-H": (64, SCAN_STEPS),
    "Granite-4": (64, SCAN_STEPS),
    "LFM2": (32, {"max_num_batched_tokens": 128}),
}
TORCHVISION = Path(sys.prefix).parent / "torchvision"
"""torchvision beside the environment, whose torch is another one than it was compiled for."""

OPERATORS: list[torch.library.Library] = []  # torch forgets operators with their library


def lacks(kind: str) -> str:
    """The package for want of which it cannot be tried here; "": it can."""
    found = kind != "Qwen3.5" or TORCHVISION.exists() or importlib.util.find_spec("torchvision")
    return "" if found else "torchvision"


def add_torchvision() -> None:
    """vLLM imports it for Qwen3.5, and calls none of it for texts: its operators may be names."""
    if not TORCHVISION.exists():
        return
    import torch

    OPERATORS.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        form = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        OPERATORS[0].define(form)  # type: ignore[no-untyped-call]
    sys.path.append(str(TORCHVISION))
    importlib.import_module("torchvision")


def saved(made: PreTrainedModel, folder: Path) -> Path:
    """Random weights, and not small ones: logits would hardly depend on keys and values."""
    import torch

    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.12)
    made.save_pretrained(folder)
    return folder


def tiny(kind: str, folder: Path, **more: object) -> Path:
    import torch
    import transformers

    name, differs = KINDS[kind]
    torch.manual_seed(0)
    text = "Text" if name in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5") else ""
    config_class = getattr(transformers, f"{name}{text}Config")
    config = config_class.from_dict({**SHAPE, **differs, **more})
    return saved(getattr(transformers, f"{name}ForCausalLM")(config), folder)
