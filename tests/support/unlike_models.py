"""Small random models whose layers differ in what they store of a token."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from .small_models import SHAPE

_KINDS = [*["sliding_attention"] * 2, "full_attention"] * 2
_GEMMA: dict[str, object] = {
    "num_hidden_layers": 6,
    "layer_types": _KINDS,
    "sliding_window": 12,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
}
_SHARED: dict[str, object] = {"num_kv_shared_layers": 3}
_LATENT: dict[str, object] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_head_dim": 16,
    "index_n_heads": 16,  # few leave a token without a score, as ties are
    "index_topk": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("Gemma4Text Gemma4", _GEMMA),
    "gemma4-k-is-v": (
        "Gemma4Text Gemma4",
        {**_GEMMA, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-shared": (
        "Gemma4Text Gemma4",
        {**_GEMMA, **_SHARED, "hidden_size_per_layer_input": 8},
    ),
    "gemma3n": (
        "Gemma3nText Gemma3n",
        {
            "num_hidden_layers": 6,
            "layer_types": _KINDS,
            "sliding_window": 12,
            **_SHARED,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "mimo-v2-flash": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "sliding_window": 12,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedText Gemma4Unified",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 4,
        },
    ),
    "deepseek-v3.2": ("DeepseekV32", _LATENT),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {**_LATENT, "indexer_types": ["full", "shared", "full"]},
    ),
    "axk2": ("AXK2", _LATENT),
    "hy-v4": ("HYV4", {**_LATENT, "indexer_types": ["full", "shared", "full"]}),
    "dots3-note": (
        "Dots3NoteText Dots3Note",
        {
            **_LATENT,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": 12,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_kv_lora_rank": 24,
            "swa_q_lora_rank": 24,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 8,
        },
    ),
}
SHARED = ("gemma4-shared", "gemma3n", "gemma4-unified")
"""Models whose last layers attend to the keys of others."""
INDEXED = ("deepseek-v3.2", "glm-moe-dsa", "axk2", "hy-v4", "dots3-note")


IMAGES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("Gemma4", {"text_config": {**SHAPE, **_GEMMA}, "image_token_id": 63}),
    "step3.7": (
        "Step3p7",
        {
            "text_config": {
                **SHAPE,
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 12,
                "num_sliding_attention_heads": 8,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "share_expert_dim": 32,
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": 10000.0}
                    for kind in ("full_attention", "sliding_attention")
                },
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "image_token_id": 63,
        },
    ),
    "mistral-large-4": (
        "MistralLarge4",
        {
            "text_config": {**SHAPE, **_LATENT, "num_hidden_layers": 4},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 16,
                "patch_size": 8,
            },
            "image_token_id": 63,
        },
    ),
}
"""Models that read images, too; only their text is asked for."""


def make_with_images(name: str, seed: int = 7) -> PreTrainedModel:
    kind, given = IMAGES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**given)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def make(name: str, seed: int = 7, **more: object) -> PreTrainedModel:
    """A random model."""
    names, differs = MODELS[name]
    config, *rest = names.split()
    made = getattr(transformers, f"{config}Config").from_dict({**SHAPE, **differs, **more})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{rest[0] if rest else config}ForCausalLM")(made)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model
