"""Derives the layout that a transformers model needs, and refuses models that fit none."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from cxlkv.adapters.common import identity
from cxlkv.adapters.common.shapes import layout_from
from cxlkv.adapters.transformers.states import StateForm, form_of
from cxlkv.errors import BadArgumentError, GeometryError
from cxlkv.layout import KVLayout


def layout_of(
    model: object, page_tokens: int = 16, dtype: object = None, encoding: str = "none"
) -> KVLayout:
    """The layout of a pool for a transformers model or its config.

    dtype: of the stored keys and values, the model's own if None. encoding: what they are kept as,
    "int8", or of keys and of values, "int8,int4". One layer group for each window and shape.
    MLA models store one head of latent and rotary channels; its values are the latent ones. Layers
    with a state make layout.states; those that attend to another one's keys are not in it. Raises
    UnsupportedError, naming the layers, for what is none of these: encoders, states that
    transformers keeps elsewhere.
    """
    config, form = text_config(model), states_of(model)
    if dtype is None:
        dtype = getattr(model, "dtype", None) or torch.float32
    states = None if form is None else form.states
    return layout_from(config, page_tokens, dtype, states).encoded(encoding)


def states_of(model: object) -> StateForm | None:
    """The states of a model or its config; None: no layer has any."""
    dtype = getattr(model, "dtype", None)
    return form_of(text_config(model), dtype if isinstance(dtype, torch.dtype) else torch.float32)


def text_config(model: object) -> PreTrainedConfig:
    """The config of the part that generates text."""
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise BadArgumentError(f"{type(model).__name__} is no transformers model or config")
    return config.get_text_config(decoder=True)


def config_words(model: object) -> dict[str, object]:
    """What the config says of the model's keys and values: identity.ALLOWED is left out."""
    return identity.config_words(text_config(model).to_dict())


def check_layout(pool: KVLayout, model: KVLayout) -> None:
    """Raises GeometryError when the pool is laid out for another model."""
    for name in ("layers", "kv_heads", "head_dim", "value_head_dim", "values", "windows"):
        stored, wanted = _of_layers(pool, name), _of_layers(model, name)
        if stored != wanted:
            raise GeometryError(
                f"the pool is laid out for {name}={stored}, the model has {wanted}: "
                "create it with layout=layout_of(model)"
            )
    if pool.states != model.states:
        raise GeometryError(
            f"the pool is laid out for {pool.states or 'no states'}, the model has "
            f"{model.states or 'none'}: create it with layout=layout_of(model)"
        )


def _of_layers(layout: KVLayout, name: str) -> object:
    """What all layers have, or each where they differ."""
    own = tuple(getattr(layout.of_layer(layer), name) for layer in range(layout.layers))
    return own[0] if len({*own}) == 1 else own
