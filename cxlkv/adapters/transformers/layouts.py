"""Derives the layout that a transformers model needs, and refuses models that fit none."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.layout import KVLayout, LayerGroup, dtype_name

# They cache the latents of MLA and expand them with kv_b_proj, which `latent` takes apart.
LATENT_MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "youtu")


def layout_of(model: object, page_tokens: int = 16, dtype: object = None) -> KVLayout:
    """The layout of a pool for a transformers model or its config.

    dtype: of the stored keys and values, the model's own if None. One layer group for each window.
    MLA models store one head of latent and rotary channels; its values are the latent ones. Raises
    UnsupportedError, naming the layers, for what is neither: state layers, shared keys, encoders.
    """
    config = text_config(model)
    _check_supported(config)
    if dtype is None:
        dtype = getattr(model, "dtype", None) or torch.float32
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
            values="key_prefix" if value_head_dim != head_dim else "own",
        )
        for window in kinds
    ]
    return KVLayout.of(
        groups,
        order=[kinds.index(window) for window in windows],
        page_tokens=page_tokens,
        model_id=str(getattr(config, "_name_or_path", "") or ""),
    )


def text_config(model: object) -> PreTrainedConfig:
    """The config of the part that generates text."""
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise BadArgumentError(f"{type(model).__name__} is no transformers model or config")
    return config.get_text_config(decoder=True)


def config_words(model: object) -> dict[str, object]:
    """What the config says of the model's results: not where it lies, nor who saved it."""
    return {
        name: value
        for name, value in text_config(model).to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }


def windows_of(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """For each layer: how many tokens it sees, its own included; None: all.

    A window that is no shorter than the longest text of the model counts as none: such a layer
    may have a budget.
    """
    window: int | None = getattr(config, "sliding_window", None)
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if window is not None and longest is not None and window >= longest:
        window = None
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_layout(pool: KVLayout, model: KVLayout) -> None:
    """Raises GeometryError when the pool is laid out for another model."""
    for name in ("layers", "kv_heads", "head_dim", "value_head_dim", "values", "windows"):
        stored, wanted = getattr(pool, name), getattr(model, name)
        if stored != wanted:
            raise GeometryError(
                f"the pool is laid out for {name}={stored}, the model has {wanted}: "
                "create it with layout=layout_of(model)"
            )


def _row(config: PreTrainedConfig) -> tuple[int, int, int]:
    """What a token stores in a layer: (kv_heads, head_dim, value_head_dim)."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return 1, rank + config.qk_rope_head_dim, rank
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, head_dim, head_dim


def _check_supported(config: PreTrainedConfig) -> None:
    """Raises UnsupportedError for layers that are neither attention, windowed or not, nor MLA."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{name}: encoder-decoder models are not built yet")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{name}: {config.num_kv_shared_layers} layers share the keys of others; that is not "
            "built yet"
        )
    if getattr(config, "kv_lora_rank", None) and name not in LATENT_MODELS:
        raise UnsupportedError(f"{name}: latent keys are built for {', '.join(LATENT_MODELS)} only")
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{name}: layer {index} has {kind}; only full and sliding attention are built. "
                "Use a model whose layers all have one of them"
            )
