"""Small random models with recurrent or convolution states beside attention."""

from __future__ import annotations

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from .small_models import SHAPE

_GATED: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MAMBA2: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_ZAMBA: dict[str, object] = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
}
_LATENT: dict[str, object] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CONV = ["conv", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-next": ("Qwen3Next", {**_GATED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3.5": ("Qwen3_5", _GATED),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_GATED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "jamba": (
        "Jamba",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "falcon-h1": ("FalconH1", {**_MAMBA2, "num_hidden_layers": 3, "mamba_d_ssm": 128}),
    "granite-4": (
        "GraniteMoeHybrid",
        {
            **_MAMBA2,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "lfm2": (
        "Lfm2",
        {"num_hidden_layers": 4, "layer_types": _CONV, "conv_L_cache": 3, "block_ff_dim": 96},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {**_EXPERTS, "num_hidden_layers": 4, "layer_types": _CONV, "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": [*_CONV[:3], "sliding_attention"],
            "sliding_window": 12,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            **_EXPERTS,
            "layers_block_type": [
                *("linear_attention", "full_attention", "mlp"),
                *("linear_attention", "full_attention", "moe"),
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "zamba": ("Zamba", {**_ZAMBA, "mamba_d_state": 8, "mamba_dt_rank": 8, "n_mamba_heads": 2}),
    "zamba2": (
        "Zamba2",
        {
            **_ZAMBA,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**_GATED, "linear_num_key_heads": 4}),
    "kimi-linear": (
        "KimiLinear",
        {
            **_GATED,
            **_EXPERTS,
            **_LATENT,
            "q_lora_rank": None,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "bailing-hybrid": ("BailingHybrid", {**_GATED, **_EXPERTS, **_LATENT, "q_lora_rank": 24}),
    "zaya": ("Zaya", {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 1}),
}
WHOLE_TEXTS = ("jamba", "zamba")
"""Models that transformers lets read several tokens at the beginning of a text only."""


def make(name: str, seed: int = 7, **more: object) -> PreTrainedModel:
    """A random model; every matrix is different from its initial value, ones of norms too."""
    kind, differs = MODELS[name]
    suffix = "Text" if kind.startswith("Qwen3_5") else ""
    config = getattr(transformers, f"{kind}{suffix}Config").from_dict({**SHAPE, **differs, **more})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def dynamic(model: PreTrainedModel) -> DynamicCache:
    """The library's own cache, with layers as the model's."""
    return DynamicCache(config=model.config)
