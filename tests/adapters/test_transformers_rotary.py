"""What layout_of() says of rotary embeddings is what transformers' models do to their keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cxlkv import CXLPool
from cxlkv.adapters.common.rotary import HALVES, NEIGHBOURS, rotary_of
from cxlkv.adapters.transformers import CXLCache, FarLayer, LastQueries, layout_of
from cxlkv.adapters.transformers.steps import Call
from cxlkv.errors import BadArgumentError

Floats = npt.NDArray[np.float32]
TOKENS = 40
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16.0},
}


def made(kind: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(1)
    words = SIZES | (EXPERTS if "mo" in kind or "mix" in kind else {}) | more
    config = AutoConfig.for_model(kind, **words)
    make: Callable[[object], PreTrainedModel] = AutoModelForCausalLM.from_config
    model = make(config)
    model.train(False)
    return model


class Recorder:
    """Records each layer's keys before and after the rotation, float32 [kv_heads, tokens, dim]."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[tuple[Floats, Floats]] = []
        turn = module.apply_rotary_pos_emb

        def recorded(q: torch.Tensor, k: torch.Tensor, *rest: object, **more: object) -> object:
            before = k.detach().clone()
            turned = turn(q, k, *rest, **more)
            self.keys.append((before[0].numpy(), turned[1][0].detach().numpy()))
            return turned

        monkeypatch.setattr(module, "apply_rotary_pos_emb", recorded)


def turned_keys(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Floats, Floats]]:
    recorder = Recorder(sys.modules[type(model).__module__], monkeypatch)
    with torch.inference_mode():
        model(torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(2)))
    assert len(recorder.keys) == model.config.num_hidden_layers
    return iter(recorder.keys)


def check(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, positions = layout_of(model), np.arange(TOKENS)
    for layer, (before, after) in enumerate(turned_keys(model, monkeypatch)):
        rotary = layout.rotary_of(layer)
        assert rotary is not None
        # YaRN's factor is on all channels alike.
        factor = np.linalg.norm(after) / np.linalg.norm(before)
        assert np.allclose(rotary.rotate(before, positions) * factor, after, atol=2e-5)
        assert np.allclose(rotary.unrotate(after, positions), before * factor, atol=2e-5)


@pytest.mark.parametrize("kind", [*HALVES, *NEIGHBOURS])
def test_layout_of_describes_what_a_model_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
    check(made(kind, **(more if kind == "gemma3_text" else {})), monkeypatch)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_scaled_as_transformers_scales_them(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(made("llama", rope_parameters=SCALINGS[scaling]), monkeypatch)


def test_nothing_is_said_of_what_is_not_known() -> None:
    llama = made("llama").config
    assert rotary_of(llama, 16) is not None
    for words in (
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn"},
    ):
        llama.rope_parameters = words
        assert rotary_of(llama, 16) is None
    assert rotary_of(AutoConfig.for_model("smollm3"), 16) is None  # some layers turn no keys
    assert rotary_of(object(), 16) is None


def test_a_config_of_transformers_4_says_the_same() -> None:
    config = SimpleNamespace(model_type="llama", rope_theta=5e5, max_position_embeddings=4096)
    config.rope_scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    llama = made("llama", rope_parameters=LLAMA3).config
    assert rotary_of(config, 16) == rotary_of(llama, 16)


class Asked:
    """Records the queries that attention gets in each layer, [batch, tokens, q_heads, dim]."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: dict[int, list[Floats]] = {}
        forward = CXLCache.forward

        def heard(cache: CXLCache, layer: FarLayer, call: Call) -> torch.Tensor:
            rows = call.query.transpose(1, 2).float().numpy()
            self.queries.setdefault(layer.index, []).append(rows)
            return forward(cache, layer, call)

        monkeypatch.setattr(CXLCache, "forward", heard)

    def last(self, row: int, tokens: int, rows: int) -> Floats:
        """[layers, rows, q_heads, dim]: of the last `tokens`, which are not padding."""
        every = [np.concatenate(of, axis=1)[row] for of in self.queries.values()]
        return np.stack([of[len(of) - tokens :][-rows:] for of in every])


def test_last_queries_are_those_that_attention_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows differ in length, in a prefill, in pieces, and in steps."""
    model, lengths = made("llama"), (30, 11)
    model.set_attn_implementation("cxlkv")
    ids = torch.randint(3, 64, (2, 34), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, : 30 - 11] = 0
    asked = Asked(monkeypatch)
    with CXLPool.create("anonymous:", layout=layout_of(model), capacity="4MiB") as pool:
        cache = CXLCache(pool, model)
        with LastQueries(cache, rows=13) as last, torch.inference_mode():
            for first, end in ((0, 30), (30, 33), (33, 34)):
                positions = mask.cumsum(-1)[:, first:end].sub(1).clamp_min(0)
                model(
                    ids[:, first:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions,
                    past_key_values=cache,
                )
            with pytest.raises(BadArgumentError, match="leave that one first"):
                LastQueries(cache).__enter__()
        for row, tokens in enumerate(lengths):
            found = last.of(row)
            assert found.shape == (2, 13, 4, 16)
            assert np.array_equal(found, asked.last(row, tokens + 4, 13))
        with pytest.raises(BadArgumentError, match="no queries of row 2"):
            last.of(2)
        assert cache.on_query is None


def test_a_method_learns_from_them() -> None:
    pytest.importorskip("numba", reason="numba compiles scorers")
    model = made("llama", hidden_size=64)
    model.set_attn_implementation("cxlkv")
    ids = torch.randint(3, 64, (1, 80), generator=torch.Generator().manual_seed(5))
    with CXLPool.create("anonymous:", layout=layout_of(model), capacity="4MiB") as pool:
        cache = CXLCache(pool, model)
        with LastQueries(cache) as last, torch.inference_mode():
            model(ids, past_key_values=cache)
        plain = pool.calibrate("low_rank", cache.sequences[0])
        weighed = pool.calibrate("low_rank", cache.sequences[0], last.of(0))
        assert plain.shape == weighed.shape
        assert not np.allclose(plain, weighed)
        decoding = CXLCache(
            pool, model, budget=0.5, method="low_rank", sequences=[cache.sequences[0].fork()]
        )
        with torch.inference_mode():
            model(ids[:, :1], past_key_values=decoding)
        assert decoding.counters.bytes_scored
