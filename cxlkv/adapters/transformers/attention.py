"""The attention and mask functions that transformers calls under the name "cxlkv"."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from cxlkv.adapters.common.shapes import INDEXED
from cxlkv.adapters.transformers.cache import ANOTHER_PROMPT, FarLayer, IndexedLayer, layer_of
from cxlkv.adapters.transformers.steps import Call
from cxlkv.errors import BadArgumentError, UnsupportedError

NAME = "cxlkv"
BUILT = (
    f"attention {NAME!r} is causal, over all tokens or the last ones: packed sequences, "
    "bidirectional parts and custom masks are not built yet"
)


class _Query(Exception):
    """Ends an attention module's call: its query is all that is wanted."""

    def __init__(self, query: Tensor):
        super().__init__()
        self.query = query


class _Asking(threading.local):
    query_only = False


_asking = _Asking()


def register() -> None:
    """Make "cxlkv" known to `set_attn_implementation`; a second time does nothing more."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: [batch, tokens, q_heads, value_dim], and no weights.

    `set_attn_implementation` names it to all parts of a model, so also to those that read an image
    or a sound at once, in both directions, and have no cache: they attend by transformers' own
    "sdpa". Raises BadArgumentError for a causal layer without a CXLCache, UnsupportedError for
    dropout, position biases, both directions with a cache, and a window other than the pool's.
    """
    if _asking.query_only:
        raise _Query(query)
    layer = layer_of(module, key)
    told = kwargs.get("is_causal")  # else the module says it, else it is so: as in sdpa
    if not (getattr(module, "is_causal", True) if told is None else told):
        if layer is not None:
            raise UnsupportedError(f"{type(module).__name__} attends in both directions; {BUILT}")
        kwargs.update(dropout=dropout, scaling=scaling, softcap=softcap)
        given = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*given, **kwargs)  # type: ignore[arg-type]
    if layer is None:
        raise BadArgumentError(
            f"attention {NAME!r} works on a CXLCache, and {type(module).__name__} was called "
            "without one: pass past_key_values=CXLCache(pool, model). generate() makes passes of "
            "its own without it for guidance_scale and assistant_early_exit: use attention 'sdpa' "
            "for these. Where a part of the model has no cache, leave it out: "
            f"model.set_attn_implementation({{'text_config': {NAME!r}}})"
        )
    if dropout:
        raise UnsupportedError(f"attention {NAME!r} has no dropout: call model.eval() first")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("attention with position biases is not built yet")
    _check_window(layer, sliding_window, 0 if layer.cache.reuses(module) else query.shape[2])
    scale = float(query.shape[3] ** -0.5) if scaling is None else scaling
    told = kwargs.get("position_ids")
    positions = told if isinstance(told, Tensor) else None
    mask, seen = attention_mask, None
    if mask is not None and mask.dtype == torch.bool and mask.ndim == 4:
        if isinstance(layer, IndexedLayer):
            seen = mask & _chosen(kwargs["indices"], mask.shape[3])
            mask = mask[:, 0, -1]  # the last token sees all but padding
        elif mask.shape[1:3] == (1, 1):
            mask = mask[:, 0, 0]
    if seen is None and isinstance(layer, IndexedLayer):
        raise UnsupportedError(BUILT)
    call = Call(module, query, key, value, mask, scale, softcap, s_aux, positions, seen)
    return layer.cache.forward(layer, call).contiguous(), None


def _chosen(indices: object, tokens: int) -> Tensor:
    """bool [batch, 1, new tokens, tokens so far] of an indexer's choice [batch, new tokens, n]."""
    assert isinstance(indices, Tensor)
    chosen = indices.new_zeros((*indices.shape[:2], tokens), dtype=torch.bool)
    return chosen.scatter(-1, indices.long(), True)[:, None]


class DecoderLayer(Protocol):
    """A decoder layer that is built as Llama's is."""

    input_layernorm: torch.nn.Module
    self_attn: torch.nn.Module


def asked_query(layer: DecoderLayer, states: Tensor, given: dict[str, object]) -> Tensor:
    """The query [batch, q_heads, tokens, dim] that a decoder layer would have for these hidden
    states [batch, tokens, channels]. given: what the model gives its layers, positions among them.
    """
    rest = {name: value for name, value in given.items() if name != "hidden_states"}
    rest |= {"past_key_values": None, "attention_mask": None}
    normed = layer.input_layernorm(states)
    _asking.query_only = True
    try:
        layer.self_attn(hidden_states=normed, **rest)
    except _Query as found:
        return found.query
    finally:
        _asking.query_only = False
    raise UnsupportedError(
        f"{type(layer).__name__} attends otherwise: call set_attn_implementation({NAME!r})"
    )


def _check_window(layer: FarLayer, window: int | None, new_tokens: int) -> None:
    """Raises UnsupportedError when the model's layer sees other tokens than the pool's."""
    hides_nothing = layer.window is None and (window is None or layer.seen + new_tokens <= window)
    if layer.window is None:
        layer.longest = window
    if hides_nothing or layer.window == window:
        return
    raise UnsupportedError(
        f"layer {layer.index} attends with sliding windows of {window} tokens, the pool is laid "
        f"out for {layer.window}: use the model that layout_of() saw; a window as long as the "
        "model's longest text counts as none and must not be passed"
    )


def padding_mask(
    *,
    q_length: int,
    attention_mask: Tensor | None = None,
    mask_function: object = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: object,
) -> Tensor | None:
    """transformers' mask function: the padding mask as it is, [batch, tokens so far] or None;
    bool [batch, 1, 1, tokens so far] where layers reuse keys, whose models cut it.

    Causality and windows are the attention function's own, which compares the window with the
    pool's; UnsupportedError for any other pattern. BadArgumentError for an empty prompt. Of a part
    that attends in both directions the mask is that of "sdpa", as its attention is.
    """
    if "allow_is_bidirectional_skip" in kwargs:  # create_bidirectional_mask() and its like only
        return sdpa_mask(
            q_length=q_length,
            attention_mask=attention_mask,
            mask_function=mask_function,  # type: ignore[arg-type]
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            **kwargs,  # type: ignore[arg-type]
        )
    if q_length == 0 and kwargs.get("kv_length"):
        raise BadArgumentError(f"a prompt shorter than what the cache holds: {ANOTHER_PROMPT}")
    if q_length == 0:
        raise BadArgumentError(
            "an empty prompt: give at least one token, such as tokenizer.bos_token_id"
        )
    # What is laid over a window cannot be seen in its function, only in what it may not skip.
    plain = mask_function is causal_mask_function or local_size is not None
    config = kwargs.get("config")
    if (
        mask_function is causal_mask_function
        and not use_vmap
        and INDEXED in _told(config, "layer_types")
    ):
        return sdpa_mask(
            q_length=q_length,
            attention_mask=attention_mask,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            **kwargs,  # type: ignore[arg-type]
        )
    if not plain or use_vmap or not allow_is_causal_skip:
        raise UnsupportedError(BUILT)
    if attention_mask is not None and "reuse" in _told(config, "kv_sharing_modes"):
        return attention_mask.bool()[:, None, None]
    return attention_mask


def _told(config: object, name: str) -> Sequence[str | None]:
    told: Sequence[str | None] = getattr(config, name, None) or ()
    return told
