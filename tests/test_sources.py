"""Keys and queries for judging selections: they are the model's own, and the same each time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM

from cxlkv.bench import sources
from cxlkv.bench.models import train_text
from cxlkv.bench.models.corpus import held_out_text, standard_library
from cxlkv.bench.sources import Taken, take
from cxlkv.demo.run import load_model
from cxlkv.errors import BadArgumentError, UnsupportedError

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(5))


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=16, initializer_range=0.3)).eval()


def attended(taken: Taken) -> Tensor:
    """softmax(scale * query . key) value, spelled out: [n, q_heads * value_dim]."""
    group = taken.queries.shape[1] // taken.keys.shape[1]
    rows = []
    for query, position in zip(taken.queries, taken.positions.tolist(), strict=True):
        keys = taken.keys[: position + 1].repeat_interleave(group, dim=1)
        values = taken.values[: position + 1].repeat_interleave(group, dim=1)
        weights = torch.softmax(taken.scale * torch.einsum("hd,thd->ht", query, keys), dim=1)
        rows.append(torch.einsum("ht,thd->hd", weights, values).flatten())
    return torch.stack(rows)


def attention_outputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """For each layer what the model's own attention gives in one pass: [tokens, ...]."""
    found: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
        for layer in model.base_model.layers
    ]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model.base_model(ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("chunk_tokens", [32, 512], ids=["chunks", "whole"])
def test_queries_and_keys_give_the_models_own_attention(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """The last 40 tokens: with chunks of 32 they begin in the middle of one."""
    monkeypatch.setattr(sources, "CHUNK_TOKENS", chunk_tokens)
    model = small_llama()
    outputs = attention_outputs(model, IDS)
    before = model.config._attn_implementation
    found = take("small", model, IDS, queries=40)
    assert [taken.layer for taken in found] == [0, 1]
    for taken, output in zip(found, outputs, strict=True):
        assert taken.keys.shape == taken.values.shape == (150, 2, 16)
        assert taken.queries.shape == (40, 4, 16)
        assert taken.positions.tolist() == list(range(110, 150))
        assert output.std() > 0.01
        torch.testing.assert_close(attended(taken), output[-40:], rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == before


def test_the_demos_questions_look_at_their_facts() -> None:
    """In the demo's model a question's heaviest key is mostly that of its fact."""
    (taken,) = sources.demo(tokens=1024, queries=32, layers=[1])
    assert taken.keys.shape == (1024, 2, 32)
    assert taken.queries.shape == (32, 4, 32)
    outputs = attention_outputs(load_model(), demo_ids(1024, 32))
    torch.testing.assert_close(attended(taken), outputs[1][-32:], rtol=1e-3, atol=1e-3)


def demo_ids(tokens: int, questions: int) -> Tensor:
    from cxlkv.demo.task import FACT_KEYS, make_context

    context = make_context(101, tokens - questions, FACT_KEYS, questions)
    return torch.cat([torch.from_numpy(context.tokens), torch.from_numpy(context.questions)])
