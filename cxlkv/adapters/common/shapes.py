"""Derives a pool's layout from what a Hugging Face config says; needs neither torch nor weights.

A config here is any object with its words as attributes: transformers' own, or a config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cxlkv.adapters.common.rotary import rotary_of
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import KVLayout, LayerGroup, States, dtype_name

# They cache the latents of MLA and expand them with kv_b_proj, which
# adapters.transformers.latent takes apart.
LATENT_MODELS = (
    *("bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
    *("minicpm3", "mistral4", "youtu"),
)
INDEXED_MODELS = (
    *("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    "mistral_large4_text",
)
"""They have indexers, which choose for each token which others it sees."""
INDEXED = "indexed_attention"
STATE_KINDS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layers with a state: those called hybrid attend as well."""
ATTENTION_KINDS = ("full_attention", "sliding_attention", INDEXED, "hybrid", "hybrid_sliding")
PLAIN_KINDS = ("mlp", "moe", "reuse")
"""Layers that look at one token at a time, or attend to what another layer stores."""
MIMO = "mimo_v2_flash"


def layout_from(
    config: object, page_tokens: int, dtype: object, states: States | None = None
) -> KVLayout:
    """One layer group for each window and shape of rows. MLA models store one head of latent and
    rotary channels; its values are the latent ones. An indexer's rows are a layer of their own,
    behind the latents'. The rotary embedding is that of the models of which it is known.

    config: of the part that generates text. states: what its state layers keep, which no config
    says. Raises UnsupportedError, naming the layers, for others, encoders.
    """
    check_supported(config, states is not None)
    stored = dtype_name(dtype)
    layers, indexed = list[LayerGroup](), indexers_of(config)
    for place, (own, kind) in enumerate(zip(_of_layers(config), kinds_of(config), strict=False)):
        if kind in ATTENTION_KINDS:
            layers.append(_layer(own, place, kind, stored))
        if place in indexed:
            layers.append(_indexer(own, stored))
    groups = list(dict.fromkeys(layers))
    return KVLayout.of(
        [replace(group, layers=layers.count(group)) for group in groups],
        order=[groups.index(layer) for layer in layers],
        page_tokens=page_tokens,
        model_id=str(getattr(config, "_name_or_path", "") or ""),
        states=states,
    )


def _layer(config: object, place: int, kind: str, dtype: str) -> LayerGroup:
    """A group of one layer, by the layer's own config."""
    window = _window(config, kind)
    kv_heads, head_dim, value_head_dim, values = _row(config, place, window is not None)
    return LayerGroup(
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
        window=window,
        values=values,
        rotary=rotary_of(config, head_dim, window is not None) if values == "own" else None,
    )


def _indexer(config: object, dtype: str) -> LayerGroup:
    """What a layer's indexer stores: keys alone, of which one channel counts as the values."""
    return LayerGroup(
        layers=1,
        kv_heads=1,
        head_dim=_number(config, "index_head_dim"),
        value_head_dim=1,
        dtype=dtype,
        values="key_prefix",
    )


def indexers_of(config: object) -> set[int]:
    """The layers of the model that have an indexer; others take what the last one chose."""
    kinds = kinds_of(config)
    own: Sequence[str] = getattr(config, "indexer_types", None) or ["full"] * len(kinds)
    pairs = enumerate(zip(kinds, own, strict=False))
    return {place for place, (kind, indexer) in pairs if kind == INDEXED and indexer == "full"}


def _of_layers(config: object) -> Sequence[object]:
    """Each layer's own config; in most models they are all the same one."""
    own: Sequence[object] | None = getattr(config, "per_layer_config", None)
    return [config] * len(kinds_of(config)) if own is None else own


def kinds_of(config: object) -> tuple[str, ...]:
    """What each layer is, in transformers' words; those of older configs may all have a window.
    "reuse": it attends to keys and values of another one."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * _number(config, "num_hidden_layers")
    modes: Sequence[str | None] = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    pairs = zip(kinds, modes, strict=True)
    return tuple("reuse" if mode == "reuse" else kind for kind, mode in pairs)


def _window(config: object, kind: str) -> int | None:
    """How many tokens an attention layer sees, its own included; None: all.

    A window that is no shorter than the longest text of the model counts as none: such a layer
    may have a budget.
    """
    window: int | None = getattr(config, "sliding_window", None)
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if "sliding" not in kind or (window is not None and longest is not None and window >= longest):
        return None
    return window


def _row(config: object, place: int, windowed: bool) -> tuple[int, int, int, str]:
    """What a token stores in a layer: (kv_heads, head_dim, value_head_dim, values)."""
    rank: int | None = getattr(config, "kv_lora_rank", None)
    if rank:
        turned: Sequence[int] | None = getattr(config, "no_rope_layers", None)  # 0: it has none
        rope = _number(config, "qk_rope_head_dim") if turned is None or turned[place] else 0
        return 1, rank + rope, rank, "key_prefix"
    heads = _number(config, "num_attention_heads")
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or _number(config, "hidden_size") // heads
    if getattr(config, "model_type", "") == MIMO:  # its code says it, not its config
        return kv_heads * (2 if windowed else 1), head_dim, _number(config, "v_head_dim"), "own"
    return kv_heads, head_dim, head_dim, "own"


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
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared and getattr(config, "kv_sharing_modes", None) is None:
        raise UnsupportedError(
            f"{name}: {shared} layers share the keys of others, and this transformers does not "
            "say which: install a later release, such as 5.23"
        )
    latent = any(getattr(own, "kv_lora_rank", None) for own in _of_layers(config))
    kinds = kinds_of(config)
    if INDEXED in kinds and any(getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedError(f"{name}: layers with indexers that share latents are not built")
    if INDEXED in kinds and name not in INDEXED_MODELS:
        raise UnsupportedError(
            f"{name}: layer {kinds.index(INDEXED)} has {INDEXED}; indexers are built for "
            f"{', '.join(INDEXED_MODELS)} only"
        )
    if latent and name not in (*LATENT_MODELS, *INDEXED_MODELS):
        raise UnsupportedError(f"{name}: latent keys are built for {', '.join(LATENT_MODELS)} only")
    for index, kind in enumerate(kinds):
        if kind in STATE_KINDS and not with_states:
            raise UnsupportedError(
                f"{name}: layer {index} ({kind}) keeps a state, whose shape no config gives: "
                "cxlkv.adapters.transformers.layout_of(model) asks the model"
            )
        if kind not in (*ATTENTION_KINDS, *STATE_KINDS, *PLAIN_KINDS):
            raise UnsupportedError(
                f"{name}: layer {index} has {kind}; only full and sliding attention and states are "
                "built. Use a model whose layers all have one of them"
            )
    if kinds and not any(kind in ATTENTION_KINDS for kind in kinds):
        raise UnsupportedError(f"{name}: no layer attends, so there are no keys to pool")
