"""Llamas with random weights, and keys and values that are noise like theirs: for steps of which
the time counts, not the words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from cxlkv.demo.full_attention import keys_and_values

WEIGHT_DEVIATION = 0.05
"""With Llama's usual 0.02, attention is nearly even and hardly moves the next word, so that wrong
keys and values could not be told from right ones. With this some 1,600 of 65,536 tokens count."""
SEED = 24


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama with as many kv heads as query heads."""

    layers: int
    hidden: int
    heads: int
    words: int

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=1 << 17,
            initializer_range=WEIGHT_DEVIATION,
        )


SHAPES = {
    "llama-8m": Shape(layers=4, hidden=256, heads=4, words=8192),
    "llama-160m": Shape(layers=12, hidden=768, heads=12, words=32000),  # of JackFram/llama-160m
}
"""By name: how many weights they have."""


def random_llama(name: str) -> LlamaForCausalLM:
    """In bfloat16, ready to be asked; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(SHAPES[name].config)
    model.bfloat16()
    model.train(False)
    return model


def random_words(name: str, count: int) -> Tensor:
    """int64 [count]."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(SHAPES[name].words, (count,), generator=generator)


def noise_like(read: DynamicCache, tokens: int) -> DynamicCache:
    """Normal, for so many tokens of one row, with the deviation of a layer's keys and values.

    read: what a model made of some random words. A layer's values are its keys' noise, the last
    token's first: as good as other noise, and sooner made.
    """
    generator = torch.Generator().manual_seed(SEED)
    made = DynamicCache()
    for index, (keys, values) in enumerate(keys_and_values(read)):
        heads, _, dim = keys.shape
        noise = torch.randn(1, heads, tokens, dim, generator=generator)
        scaled = [
            (one * like.float().std()).to(like.dtype)
            for one, like in ((noise, keys), (noise.flip(2), values))
        ]
        made.update(scaled[0], scaled[1], index)
    return made
