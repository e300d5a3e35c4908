"""Where keys and queries to judge a selection of pages by come from: trained models, or made up.

`demo`, `text` and `folder` run a trained model over a context and take what its cache holds and
what its last tokens ask; `gaussian` and `clustered` draw numbers, and say little about real ones.
Every source gives one `Taken` for each layer:

    for taken in text(tokens=16_384, queries=64):
        seen = taken.keys[: int(taken.positions[0]) + 1]  # what the first query attends to
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cxlkv.adapters.transformers.layouts import layout_of, text_config
from cxlkv.bench.models.corpus import held_out_text
from cxlkv.demo.facts import load_model
from cxlkv.demo.task import FACT_KEYS, make_context
from cxlkv.demo.text.inputs import quiet, read_config, read_model, read_text, read_tokens
from cxlkv.errors import BadArgumentError, UnsupportedError

TEXT_MODEL = Path(__file__).parent / "models" / "text"
ATTENTION = "cxlkv_recorded"
CHUNK_TOKENS = 1024
"""Tokens of a forward pass: a mask of [1024, 65536] is the largest thing in memory."""


@dataclass(frozen=True)
class Taken:
    """One layer: what is in its cache behind a context, and what the last tokens ask of it.

    keys [tokens, kv_heads, head_dim], rotated as a cache holds them; values [tokens, kv_heads,
    value_dim]; queries [n, q_heads, head_dim] of the tokens at `positions`, int64 [n]. Query i
    sees the keys 0 to positions[i], its own included: softmax(scale * query . key). All float32,
    or what a folder's model computes in.
    """

    source: str
    layer: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    scale: float


def demo(
    tokens: int = 16_384, queries: int = 64, layers: Sequence[int] | None = None, seed: int = 101
) -> list[Taken]:
    """The demo's model: facts scattered evenly in filler that means nothing, and questions.

    The last `queries` tokens are the questions. It was trained for 16,384 tokens.
    """
    context = make_context(seed, tokens - queries, FACT_KEYS, queries)
    ids = torch.cat([torch.from_numpy(context.tokens), torch.from_numpy(context.questions)])
    return take("demo", load_model(), ids, queries, layers)


def text(
    tokens: int = 16_384, queries: int = 64, layers: Sequence[int] | None = None, first: int = 0
) -> list[Taken]:
    """The byte-level model in bench/models/text, on Python sources that it was not trained on.

    `first` says at which byte of these the context begins. 16,384 bytes take a quarter of a minute
    of one core, 65,536 take four minutes and 1.4 GB; its README says how good the model is.
    """
    with quiet():
        model = load(TEXT_MODEL)
    ids = _cut(torch.tensor(list(held_out_text())), tokens, first)
    return take("text", model, ids, queries, layers)


def load(folder: Path) -> LlamaForCausalLM:
    """The model in a folder, its rounded weights widened to float32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return model


def folder(
    path: Path,
    tokens: int = 16_384,
    queries: int = 64,
    layers: Sequence[int] | None = None,
    text: Path | None = None,
) -> list[Taken]:
    """A causal language model as save_pretrained() leaves it, its tokenizer included.

    It reads a text file, or the same text as `text`: `tokens` of it, or as many as the model takes
    and the file has. BadArgumentError or UnsupportedError for what is no such model, or none whose
    keys a pool can hold.
    """
    config = read_config(path)  # which says in one line what is wrong with the folder
    model = read_model(path)
    taken = getattr(text_config(config), "max_position_embeddings", None) or tokens
    written = read_text(text, tokens) if text else held_out_text().decode(errors="replace")
    ids = read_tokens(path, written, int(text_config(model).vocab_size))
    count = min(tokens, taken, len(ids) if text else tokens)
    return take(path.resolve().name, model, _cut(ids, count), queries, layers)


def gaussian(
    tokens: int = 16_384, queries: int = 64, kv_heads: int = 2, group: int = 4, head_dim: int = 64
) -> list[Taken]:
    """Independent normal keys and queries; the scores' standard deviation is 2. One layer."""
    random = torch.Generator().manual_seed(1)
    keys = torch.randn((tokens, kv_heads, head_dim), generator=random)
    asked = 2 * torch.randn((queries, kv_heads * group, head_dim), generator=random)
    return [_made_up("gaussian", keys, asked, random)]


def clustered(
    tokens: int = 16_384, queries: int = 64, kv_heads: int = 2, group: int = 4, head_dim: int = 64
) -> list[Taken]:
    """Runs of keys near one of 64 centres, some 64 tokens long; each query is near a centre.

    This is what a selection of pages likes best. One layer.
    """
    random = torch.Generator().manual_seed(1)
    centres = torch.randn((64, kv_heads, head_dim), generator=random)
    changes = torch.rand(tokens, generator=random) < 1 / 64
    topics = torch.randint(64, (tokens,), generator=random)[changes.cumsum(0)]
    keys = centres[topics] + 0.5 * torch.randn((tokens, kv_heads, head_dim), generator=random)
    asked = torch.randint(64, (queries, kv_heads, group), generator=random)
    near = centres[asked, torch.arange(kv_heads)[:, None]].flatten(1, 2)
    near = near + 0.5 * torch.randn(near.shape, generator=random)
    return [_made_up("clustered", keys, near, random)]


def _made_up(source: str, keys: Tensor, queries: Tensor, random: torch.Generator) -> Taken:
    tokens, _, head_dim = keys.shape
    values = torch.randn(keys.shape, generator=random)
    positions = torch.arange(tokens - len(queries), tokens)
    return Taken(source, 0, keys, values, queries, positions, head_dim**-0.5)


def _cut(ids: Tensor, tokens: int, first: int = 0) -> Tensor:
    if len(ids) < first + tokens:
        raise BadArgumentError(f"{first + tokens} tokens of held-out text: there are {len(ids)}")
    return ids[first : first + tokens]


def take(
    source: str,
    model: PreTrainedModel,
    ids: Tensor,
    queries: int,
    layers: Sequence[int] | None = None,
) -> list[Taken]:
    """Run `model` over ids [tokens]; what `layers` hold, and what the last `queries` tokens ask.

    layers: all without a window if None. UnsupportedError for layers with one, and for attention
    that is more than softmax(scale * query . key), as the scores would not be the model's.
    """
    layout = layout_of(model)
    if layout.values == "key_prefix":
        raise UnsupportedError(f"{source}: the cache of MLA holds latents, not keys")
    windows = layout.windows
    if layers is None:
        layers = [index for index, window in enumerate(windows) if window is None]
    for index in layers:
        if not 0 <= index < len(windows):
            raise BadArgumentError(f"{source} has {len(windows)} layers, not a layer {index}")
        if windows[index] is not None:
            raise UnsupportedError(f"{source}: layer {index} sees {windows[index]} tokens only")
    if not 1 <= queries <= len(ids):
        raise BadArgumentError(f"{queries} queries of {len(ids)} tokens: from 1 to all of them")
    recorder = Recorder(first=len(ids) - queries, layers=frozenset(layers))
    cache = DynamicCache()  # without a config it keeps all tokens, also behind a window
    _run(model, ids, cache, recorder)
    positions = torch.arange(recorder.first, len(ids))
    taken = []
    for index in layers:
        held = cache.layers[index]
        assert isinstance(held, DynamicLayer)
        assert held.keys is not None
        assert held.values is not None
        keys, values = held.keys[0].transpose(0, 1), held.values[0].transpose(0, 1)
        asked = torch.cat(recorder.queries[index])
        taken.append(Taken(source, index, keys, values, asked, positions, recorder.scales[index]))
    return taken


@dataclass
class Recorder:
    """Keeps the queries of some layers, from the token `first` on, while a model runs."""

    first: int
    layers: frozenset[int]
    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    """Queries by layer, in order: [tokens, q_heads, head_dim]."""
    scales: dict[int, float] = field(default_factory=dict)

    def keep(self, layer: int, query: Tensor, tokens: int, scale: float) -> None:
        """query [1, q_heads, new, head_dim] of the last of `tokens` tokens."""
        before = tokens - query.shape[2]
        if layer in self.layers and tokens > self.first:
            rows = query[0, :, max(0, self.first - before) :].transpose(0, 1).clone()
            self.queries.setdefault(layer, []).append(rows)
            self.scales[layer] = scale


_recorder: ContextVar[Recorder] = ContextVar("recorder")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """transformers' own attention over the cache's keys, with the queries kept aside."""
    if any(more.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise UnsupportedError(
            f"{type(module).__name__}: scores with a softcap, sinks or position biases are not "
            "those of queries and keys alone"
        )
    scale = float(query.shape[3] ** -0.5) if scaling is None else scaling
    index = getattr(module, "layer_idx", None)
    assert isinstance(index, int), "every attention layer with a cache has its index"
    _recorder.get().keep(index, query, key.shape[2], scale)
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
    return out, None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@torch.inference_mode()
def _run(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, recorder: Recorder) -> None:
    """By chunks, so that no tensor of [tokens x tokens] is made; without the model's head."""
    body = model.base_model
    with _recorded(model, recorder):
        for first in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[None, first : first + CHUNK_TOKENS]
            body(chunk, past_key_values=cache, use_cache=True)


@contextmanager
def _recorded(model: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    """The model attends through `attention`, which keeps queries in `recorder`."""
    before = model.config._attn_implementation
    model.train(False)
    model.set_attn_implementation(ATTENTION)
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
        model.set_attn_implementation(before)
