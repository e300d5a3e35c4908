"""Derives a pool's layout from what a Hugging Face config says; needs neither torch nor weights.

A config here is any object with its words as attributes: transformers' own, or a config.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from cxlkv.adapters.common.rotary import rotary_of
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import KVLayout, LayerGroup, States, dtype_name

# They cache the latents of MLA and expand them with kv_b_proj, which
# adapters.transformers.latent takes apart.
LATENT_MODELS = (
    *("bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
    *("minicpm3", "mistral4", "youtu"),
)
STATE_KINDS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layers with a state: those called hybrid attend as well."""
ATTENTION_KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
PLAIN_KINDS = ("mlp", "moe")
"""Layers that look at one token at a time."""


def layout_from(
    config: object, page_tokens: int, dtype: object, states: States | None = None
) -> KVLayout:
    """One layer group for each window. MLA models store one head of latent and rotary channels;
    its values are the latent ones. The rotary embedding is that of the models of which it is
    known.

    config: of the part that generates text. states: what its state layers keep, which no config
    says. Raises UnsupportedError, naming the layers, for others, shared keys, encoders.
    """
    check_supported(config, states is not None)
    windows = windows_of(config)
    kinds = list(dict.fromkeys(windows))
    kv_heads, head_dim, value_head_dim = _row(config)
    groups = [
        LayerGroup(
            layers=windows.count(window),
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype_name(dtype),
            window=window,
            values="own" if value_head_dim == head_dim else "key_prefix",
            rotary=rotary_of(config, head_dim, window is not None)
            if value_head_dim == head_dim
            else None,
        )
        for window in kinds
    ]
    return KVLayout.of(
        groups,
        order=[kinds.index(window) for window in windows],
        page_tokens=page_tokens,
        model_id=str(getattr(config, "_name_or_path", "") or ""),
        states=states,
    )


def kinds_of(config: object) -> tuple[str, ...]:
    """What each layer is, in transformers' words; those of older configs may all have a window."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * _number(config, "num_hidden_layers")
    return tuple(kinds)


def windows_of(config: object) -> tuple[int | None, ...]:
    """How many tokens each attention layer sees, its own included; None: all.

    A window that is no shorter than the longest text of the model counts as none: such a layer
    may have a budget.
    """
    window: int | None = getattr(config, "sliding_window", None)
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if window is not None and longest is not None and window >= longest:
        window = None
    kinds = [kind for kind in kinds_of(config) if kind in ATTENTION_KINDS]
    return tuple(window if "sliding" in kind else None for kind in kinds)


def _row(config: object) -> tuple[int, int, int]:
    """What a token stores in a layer: (kv_heads, head_dim, value_head_dim)."""
    rank: int | None = getattr(config, "kv_lora_rank", None)
    if rank:
        return 1, rank + _number(config, "qk_rope_head_dim"), rank
    heads = _number(config, "num_attention_heads")
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    return kv_heads, head_dim, head_dim


def _number(config: object, name: str) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadArgumentError(f"the config has no number {name}: it is no causal model's")
    return value


def check_supported(config: object, with_states: bool) -> None:
    """Raises UnsupportedError for layers that are neither attention, windowed or not, nor MLA, nor
    states where these can be served."""
    name = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name}: encoder-decoder models are not built yet")
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{name}: {shared} layers share the keys of others; that is not built yet"
        )
    if getattr(config, "kv_lora_rank", None) and name not in LATENT_MODELS:
        raise UnsupportedError(f"{name}: latent keys are built for {', '.join(LATENT_MODELS)} only")
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    for index, kind in enumerate(kinds):
        if kind in STATE_KINDS and not with_states:
            raise UnsupportedError(
                f"{name}: layer {index} has {kind}, a state, of whose shape a config says nothing: "
                "cxlkv.adapters.transformers.layout_of(model) asks the model"
            )
        if kind not in (*ATTENTION_KINDS, *STATE_KINDS, *PLAIN_KINDS):
            raise UnsupportedError(
                f"{name}: layer {index} has {kind}; only full and sliding attention and states are "
                "built. Use a model whose layers all have one of them"
            )
    if kinds and not any(kind in ATTENTION_KINDS for kind in kinds):
        raise UnsupportedError(f"{name}: no layer attends, so there are no keys to pool")
