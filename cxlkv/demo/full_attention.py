"""What full attention leaves for a comparison: its keys and values, and a distribution."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cxlkv.sequence import Sequence


def keys_and_values(cache: DynamicCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of each layer of a cache with one row, [kv_heads, tokens, dim]."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys[0], layer.values[0]


def append_cache(sequence: Sequence, cache: DynamicCache, length: int | None = None) -> None:
    """Append the keys and values of the first `length` tokens of a cache, or of all."""
    for index, held in enumerate(keys_and_values(cache)):
        keys, values = (one[:, :length].transpose(0, 1).contiguous() for one in held)
        sequence.append(index, keys, values)


def divergence_from(full: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence from full attention's distribution, in nats [...].

    Both are log-probabilities, float32 [..., words].
    """
    # A word that full attention rules out adds nothing, but 0 times infinity is nan.
    parts = (full.exp() * (full - other)).masked_fill(full.isneginf(), 0.0)
    return parts.sum(-1).clamp_min(0.0)
