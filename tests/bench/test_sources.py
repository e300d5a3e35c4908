"""Keys and queries for judging selections: they are the model's own, and the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from cxlkv.bench import sources
from cxlkv.bench.models.corpus import held_out_text
from cxlkv.bench.sources import Taken, take
from cxlkv.demo.facts import load_model
from cxlkv.demo.task import FACT_KEYS, VALUES, make_context
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(5))


def made(kind: type[PreTrainedConfig], **more: object) -> PreTrainedModel:
    """A small random model."""
    torch.manual_seed(7)
    config = kind.from_dict({**SHAPE, **more})
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


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
    """For each layer what the model's own eager attention gives in one pass: [tokens, ...]."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
        for name, module in model.named_modules()
        if name.endswith(".o_proj")
    ]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model.base_model(ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("chunk_tokens", [32, 512], ids=["chunks", "whole"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_queries_and_keys_give_the_models_own_attention(
    monkeypatch: pytest.MonkeyPatch, kind: type[PreTrainedConfig], chunk_tokens: int
) -> None:
    """With chunks of 32 the last 40 tokens begin in the middle of one."""
    monkeypatch.setattr(sources, "CHUNK_TOKENS", chunk_tokens)
    model = made(kind)
    outputs = attention_outputs(model, IDS)
    found = take("small", model, IDS, queries=40)
    assert [taken.layer for taken in found] == [0, 1]
    for taken, output in zip(found, outputs, strict=True):
        assert taken.keys.shape == taken.values.shape == (150, 2, 16)
        assert taken.queries.shape == (40, 4, 16)
        assert taken.positions.tolist() == list(range(110, 150))
        assert output.std() > 0.01
        torch.testing.assert_close(attended(taken), output[-40:], rtol=1e-4, atol=1e-5)


def test_the_model_attends_as_before_when_it_was_taken_from() -> None:
    model = made(LlamaConfig)
    before = model.config._attn_implementation
    with pytest.raises(IndexError):
        take("small", model, IDS + 256, queries=1)
    assert model.config._attn_implementation == before


def test_the_demo_asks_its_questions_last() -> None:
    """Shapes are the demo's, attention is its model's, and that answers from the same tokens."""
    (taken,) = sources.demo(tokens=2048, queries=32, layers=[1])
    assert (taken.source, taken.layer) == ("demo", 1)
    assert taken.keys.shape == (2048, 2, 32)
    context = make_context(101, 2048 - 32, FACT_KEYS, 32)
    ids = torch.cat([torch.from_numpy(context.tokens), torch.from_numpy(context.questions)])
    model = load_model()
    outputs = attention_outputs(model, ids)
    torch.testing.assert_close(attended(taken), outputs[1][-32:], rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        answers = model(ids[None]).logits[0, -32:, :VALUES].argmax(-1)
    assert (answers == torch.from_numpy(context.answers)).float().mean() > 0.9


def test_the_text_is_one_that_the_model_was_not_trained_on() -> None:
    found = sources.text(tokens=1024, queries=16)
    assert [taken.layer for taken in found] == [0, 1, 2, 3]
    assert all(taken.keys.shape == (1024, 2, 64) for taken in found)
    assert all(taken.queries.shape == (16, 8, 64) for taken in found)
    (again,) = sources.text(tokens=1024, queries=16, layers=[3])
    assert torch.equal(again.keys, found[3].keys)
    assert torch.equal(again.queries, found[3].queries)
    (later,) = sources.text(tokens=1024, queries=16, layers=[3], first=5000)
    assert not torch.equal(later.keys, found[3].keys)
    with pytest.raises(BadArgumentError, match="held-out text: there are"):
        sources.text(tokens=100_000_000)


def test_the_model_looks_up_values_that_were_given_before() -> None:
    """Some 1,900 bytes before, in text that it was not trained on; one digit in ten is chance."""
    model, text = sources.load(sources.TEXT_MODEL), held_out_text()
    right = []
    for at in range(8):
        own, value = text[4000 * at : 4000 * at + 2000], f"{104729 * (at + 1):06d}"[-6:]
        made = b"%slimit_of_rows = %s\n%sassert limit_of_rows == %s" % (
            own[:100], value.encode(), own[100:], value.encode(),
        )  # fmt: skip
        ids = torch.tensor(list(made))[None]
        with torch.inference_mode():
            best = model(ids, use_cache=False).logits[0, -7:-1].argmax(-1)
        right.append((best == ids[0, -6:]).float().mean())
    assert sum(right) / len(right) > 0.3
    assert (sources.TEXT_MODEL / "model.safetensors").stat().st_size <= 4_000_000


def test_a_folder_is_read_with_its_own_tokenizer(tmp_path: Path) -> None:
    """Its tokenizer gives a token for each byte, in an order of its own."""
    made(LlamaConfig).save_pretrained(tmp_path / "mine")
    alphabet = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(tmp_path / "mine")
    (taken,) = sources.folder(tmp_path / "mine", tokens=300, queries=8, layers=[1])
    assert taken.source == "mine"
    assert taken.keys.shape == (300, 2, 16)
    assert taken.positions.tolist() == list(range(292, 300))
    (tmp_path / "text.txt").write_text("letters " * 30)
    text = tmp_path / "text.txt"
    (taken,) = sources.folder(tmp_path / "mine", tokens=300, queries=8, layers=[1], text=text)
    assert len(taken.keys) == 240
    with pytest.raises(BadArgumentError, match="there is no folder"):
        sources.folder(tmp_path / "other")


@pytest.mark.parametrize("source", [sources.gaussian, sources.clustered])
def test_made_up_keys_say_so_and_are_the_same_each_time(source: object) -> None:
    assert callable(source)
    (taken,), (again,) = source(tokens=512, queries=8), source(tokens=512, queries=8)
    assert taken.source in ("gaussian", "clustered")
    assert taken.keys.shape == taken.values.shape == (512, 2, 64)
    assert taken.queries.shape == (8, 8, 64)
    assert taken.positions.tolist() == list(range(504, 512))
    assert torch.equal(taken.keys, again.keys)
    assert torch.equal(taken.queries, again.queries)


def test_clustered_keys_lie_together_and_gaussian_ones_do_not() -> None:
    """How alike neighbours are, which is what pages live by."""

    def likeness(taken: Taken) -> float:
        keys = torch.nn.functional.normalize(taken.keys, dim=-1)
        return float((keys[1:] * keys[:-1]).sum(-1).mean())

    assert likeness(sources.clustered(tokens=4096)[0]) > 0.7
    assert abs(likeness(sources.gaussian(tokens=4096)[0])) < 0.01


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("model", "layers", "error", "message"),
    [
        (made(LlamaConfig), [2], BadArgumentError, "2 layers, not a layer 2"),
        (made(MistralConfig, sliding_window=64), [0], UnsupportedError, "sees 64 tokens only"),
        (made(Gemma2Config, sliding_window=64), None, UnsupportedError, "softcap"),
        (made(GptOssConfig, num_local_experts=2), None, UnsupportedError, "sinks"),
        (made(DeepseekV3Config, **LATENT, first_k_dense_replace=2), None, UnsupportedError, "MLA"),
    ],
)
def test_what_would_not_be_the_models_scores_is_refused(
    model: PreTrainedModel, layers: list[int] | None, error: type[CXLKVError], message: str
) -> None:
    with pytest.raises(error, match=message):
        take("small", model, IDS, queries=4, layers=layers)


@pytest.mark.parametrize("queries", [0, 151])
def test_as_many_queries_as_tokens_at_most(queries: int) -> None:
    model = made(LlamaConfig)
    with pytest.raises(BadArgumentError, match="queries of 150 tokens"):
        take("small", model, IDS, queries)
    assert isinstance(model, LlamaForCausalLM)
