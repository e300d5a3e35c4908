"""Makes the model that the engines run: a small Llama of random weights, the same for one seed.

    PYTHON -m cxlkv.bench.vllm.model FOLDER '{"layers": 8, ...}'

Run in the engine's environment, which has torch and transformers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

STD = 0.12
"""Deviation of weights: large enough that each token's K and V can be seen in the logits."""


@dataclass(frozen=True)
class Model:
    """A model of Llama's architecture; max_tokens: length of the longest text."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 4096
    max_tokens: int = 33 << 10
    seed: int = 1


def make(folder: str, model: Model) -> None:
    """Writes it in float32, as a folder that vLLM and transformers load."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(model.seed)
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_tokens,
        initializer_range=STD,
        tie_word_embeddings=False,
        # Token ids that stand for nothing: requests are of random ids, and never end early.
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Model(**json.loads(sys.argv[2])))
