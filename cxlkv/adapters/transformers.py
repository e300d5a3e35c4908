"""Hugging Face transformers: a Cache that keeps keys and values in a CXLPool.

    pool = CXLPool.create("anonymous:", layout=layout_of(model), capacity="2GiB")
    cache = CXLCache(pool, model, budget=Budget(share=0.05))  # budget=None: full attention
    model.set_attn_implementation("cxlkv")
    model.generate(ids, past_key_values=cache)

A forward pass through one layer: the model calls `FarLayer.update` with the new keys and values,
which marks them with the layer and returns them; then our attention function, which finds the layer
by that mark, appends them to the pool and attends there. Prefill attends in full; a step of one
token for each sequence selects pages under the budget and attends to these only. Three calls into
the core a layer at most, whatever the number of sequences.

Importing this module registers "cxlkv" as an attention implementation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

NAME = "cxlkv"


def register() -> None:
    """Make "cxlkv" known to `set_attn_implementation`; a second time does nothing more."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def layout_of(model: object, page_tokens: int = 16, dtype: object = None) -> KVLayout:
    """The layout of a pool for a transformers model or its config.

    dtype: of the stored keys and values, the model's own if None. Raises UnsupportedError, naming
    the layers, for attention other than full: sliding windows, state layers, shared keys.
    """
    config = _text_config(model)
    _check_full_attention(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if dtype is None:
        dtype = getattr(model, "dtype", None) or torch.float32
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        page_tokens=page_tokens,
        dtype=dtype,
        model_id=str(getattr(config, "_name_or_path", "") or ""),
    )


def _text_config(model: object) -> PreTrainedConfig:
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise BadArgumentError(f"{type(model).__name__} is no transformers model or config")
    return config.get_text_config(decoder=True)


def _check_full_attention(config: PreTrainedConfig) -> None:
    """Raises UnsupportedError when a layer does not see all tokens before it, or keeps no KV."""
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{config.model_type}: encoder-decoder models are not built yet")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{config.model_type}: shared or latent keys are not built yet")
    window = getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None)
    short = window is not None and (longest is None or window < longest)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if short else "full_attention"] * config.num_hidden_layers
    for index, kind in enumerate(types):
        if kind == "full_attention" or (kind == "sliding_attention" and not short):
            continue
        detail = f" of {window} tokens" if kind == "sliding_attention" else ""
        raise UnsupportedError(
            f"{config.model_type}: layer {index} has {kind}{detail}; only full attention is built. "
            "Use a model whose layers all see the whole context"
        )


@dataclass
class Counters:
    """What the steps of one token did, in bytes, over all layers and sequences.

    bytes_scored: read to choose pages. bytes_read: keys and values of the pages attended to.
    live_bytes_peak: the most that keys and values took outside of the pool, as tensors, at any
    one time: the step's own tokens and, with near=False, the pages fetched.
    """

    steps: int = 0
    bytes_scored: int = 0
    bytes_read: int = 0
    live_bytes_peak: int = 0


@dataclass(frozen=True)
class Step:
    """One forward pass, as all of its layers see it: `tokens` new ones for each of `batch` rows.

    Row b of the batch is sequence b. Padding is on the left and never reaches the pool:
    real is int64 [rows], the places of real tokens in [batch * tokens], None when all are;
    starts int32 [batch + 1] and new [batch] say how many each sequence gets, lengths int64 [batch]
    what it has afterwards. first: the cache was empty before.
    """

    batch: int
    tokens: int
    first: bool
    starts: npt.NDArray[np.int32]
    new: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    real: Tensor | None

    def rows(self, states: Tensor) -> Tensor:
        """[batch, heads, tokens, dim] as rows [rows, heads, dim]; a view wherever it can be."""
        one = self.tokens == 1
        flat = states[:, :, 0] if one else states.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat[self.real.to(flat.device)]

    def unrows(self, rows: Tensor) -> Tensor:
        """[rows, heads, dim] as [batch, tokens, heads, dim]; zeros where padding is."""
        if self.real is not None:
            full = rows.new_zeros((self.batch * self.tokens, *rows.shape[1:]))
            full[self.real.to(rows.device)] = rows
            rows = full
        return rows.view(self.batch, self.tokens, *rows.shape[1:])


@dataclass(frozen=True)
class LayerStep:
    """One layer's part in a step: its index, and the parameters of its attention."""

    index: int
    step: Step
    scale: float
    softcap: float | None


class FarLayer(CacheLayerMixin):
    """One layer of a CXLCache: holds a length, no tensors."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: CXLCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)  # the cache holds its layers
        self.index = index
        self.seen = 0  # tokens so far, padding included

    @property
    def cache(self) -> CXLCache:
        cache = self._cache()
        assert cache is not None, "the model holds the cache while it runs"
        return cache

    @property
    def batch_size(self) -> int:
        return len(self.cache.sequences) or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The new keys (marked with this layer, as `.far`) and values; nothing is stored yet."""
        self.cache.announce(self.index)
        key = key_states.view_as(key_states)
        key.far = self  # type: ignore[attr-defined]
        return key, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self, *args: object) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """get_max_length's name before transformers 5.16."""
        return -1


class CXLCache(Cache):
    """Keys and values of a model in a CXLPool, one sequence for each row of the batch.

    budget: which pages a step of one token attends to; None: all. near: attend where the data
    lies; False fetches the selected pages as tensors on the model's device and attends there,
    which is the form for a GPU. method: as in Batch.select. sequences: to start from instead of
    from nothing (pool.adopt, pool.match, Sequence.fork); the cache then owns them; where their
    lengths differ, the attention mask must show the shorter ones padded on the left.

    Raises GeometryError when the pool is laid out for another model, UnsupportedError as
    layout_of. In a forward pass: BadArgumentError for right padding and custom masks,
    PoolFullError when the pool has no room; crop(length before) undoes a pass that failed.
    """

    def __init__(
        self,
        pool: CXLPool,
        model: object,
        budget: Budget | None = None,
        *,
        near: bool = True,
        method: str = "auto",
        sequences: Sequence[Tokens] = (),
    ) -> None:
        _check_layout(pool.layout, layout_of(model))
        layers = [FarLayer(self, index) for index in range(pool.layout.layers)]
        super().__init__(layers=[*layers])
        self._far_layers = layers
        self.pool = pool
        self.budget = budget
        self.near = near
        self.method = method
        self.counters = Counters()
        self._config = _text_config(model)
        self._dtype = getattr(torch, pool.layout.dtype)
        self._step: Step | None = None
        self._pending: int | None = None
        self._start_from(sequences, max((len(s) for s in sequences), default=0))

    def _start_from(self, sequences: Sequence[Tokens], seen: int) -> None:
        self.sequences = tuple(sequences)
        self._batch = self.pool.batch(self.sequences) if self.sequences else None
        self._lengths = np.array([len(s) for s in self.sequences], np.int64)
        self._step = None
        self._pending = None
        for layer in self._far_layers:
            layer.seen = seen
            layer.is_initialized = bool(self.sequences)

    # ---- the forward pass, layer by layer ----

    def announce(self, index: int) -> None:
        """Layer `index` has new tokens: the attention function must take them before the next."""
        if self._pending is not None:
            self._pending = None
            raise BadArgumentError(
                "a CXLCache holds no tensors that another attention function could read: call "
                f"model.set_attn_implementation({NAME!r}) first"
            )
        self._pending = index

    def forward(
        self,
        layer: FarLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Append one layer's new tokens and attend: [batch, tokens, q_heads, value_dim].

        query [batch, q_heads, tokens, dim], key and value [batch, kv_heads, tokens, dim].
        mask: bool [batch, tokens so far], False for padding on the left.
        """
        self._pending = None
        if layer.index == 0 or self._step is None:
            self._step = self._begin(mask, query.shape[0], query.shape[2])
        part = LayerStep(layer.index, self._step, scale, softcap)
        self._append(layer, part.step, key, value)
        if part.step.first and softcap is None:
            return _causal_attention(part.step, query, key, value, scale)
        rows = part.step.rows(query)
        if part.step.tokens == 1:
            out = self._decode(part, rows)
        else:
            out = self._attend_near(part, rows, None)
        return part.step.unrows(out)

    def _begin(self, mask: Tensor | None, batch: int, tokens: int) -> Step:
        if not self.sequences:
            self._start_from([self.pool.sequence() for _ in range(batch)], 0)
        if batch != len(self.sequences):
            raise BadArgumentError(
                f"a batch of {batch} rows, the cache holds {len(self.sequences)} sequences"
            )
        before = self._far_layers[0].seen
        new, real = _real_tokens(mask, batch, before, tokens, self._lengths)
        starts = np.zeros(batch + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        return Step(batch, tokens, before == 0, starts, new, self._lengths + new, real)

    def _append(self, layer: FarLayer, step: Step, key: Tensor, value: Tensor) -> None:
        assert self._batch is not None
        keys = _at_home(step.rows(key), self._dtype)
        values = _at_home(step.rows(value), self._dtype)
        self._batch.append(layer.index, keys, values, step.starts)
        if layer.index == 0:
            self._lengths = step.lengths
        layer.seen += step.tokens
        layer.is_initialized = True

    def _decode(self, part: LayerStep, queries: Tensor) -> Tensor:
        """One token for each sequence: queries [rows, q_heads, dim] -> [rows, q_heads, dim]."""
        picked = self.choose(part, queries)
        self.counters.steps += part.index == 0
        if picked is None:
            self.counters.bytes_read += self._bytes_of_all(part.step)
        else:
            self.counters.bytes_scored += picked.bytes_scored
            self.counters.bytes_read += picked.bytes_fetched
        if not self.near:
            return self._attend_here(part, queries, picked or self._all_pages(part.step))
        self._note_live(0)
        return self._attend_near(part, queries, picked)

    def _bytes_of_all(self, step: Step) -> int:
        """Bytes of one layer's keys and values of all sequences."""
        layout = self.pool.layout
        return int(step.lengths.sum()) * layout.token_bytes // layout.layers

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        """The pages that queries [rows, q_heads, dim] of one token each attend to; None: all."""
        if self.budget is None:
            return None
        assert self._batch is not None
        return self._batch.select(
            part.index,
            _at_home(queries),
            part.step.starts,
            self.budget,
            self.method,
            part.scale,
        )

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        """Attention near the data, [rows, q_heads, value_dim]; queries lie on the CPU."""
        out, _ = batch.attend(
            part.index, queries, part.step.starts, picked, part.scale, part.softcap
        )
        assert isinstance(out, Tensor)
        return out

    def _attend_near(self, part: LayerStep, queries: Tensor, picked: Selection | None) -> Tensor:
        assert self._batch is not None
        return self.attend(self._batch, part, _at_home(queries), picked).to(queries.device)

    def _attend_here(self, part: LayerStep, queries: Tensor, picked: Selection) -> Tensor:
        """Fetch the chosen pages as tensors and attend to them on the device of `queries`."""
        assert self._batch is not None
        layout, step = self.pool.layout, part.step
        shape = (*picked.pages.shape, layout.page_tokens)
        keys = torch.empty((*shape, layout.head_dim), dtype=self._dtype)
        values = torch.empty((*shape, layout.value_head_dim), dtype=self._dtype)
        self._batch.fetch(part.index, picked, out=(keys, values))
        self._note_live(_bytes_of(keys) + _bytes_of(values))
        pages, lengths = torch.from_numpy(picked.pages), torch.from_numpy(step.lengths)
        if step.real is not None:  # one token a sequence: a row's place is its sequence
            lengths = lengths[step.real]
            if picked.per == "sequence":
                keys, values, pages = keys[step.real], values[step.real], pages[step.real]
        at = pages[..., None] * layout.page_tokens + torch.arange(layout.page_tokens)
        seen = (pages >= 0)[..., None] & (at < lengths[:, None, None, None])
        device = queries.device
        return _attend_to_pages(part, queries, keys.to(device), values.to(device), seen.to(device))

    def _all_pages(self, step: Step) -> Selection:
        """A selection of every page of every sequence: [batch, kv_heads, the most pages]."""
        layout = self.pool.layout
        counts = -(-step.lengths // layout.page_tokens)
        pages = np.arange(int(counts.max(initial=0)), dtype=np.int32)
        pages = np.where(pages < counts[:, None], pages, np.int32(-1))
        heads = layout.kv_heads
        return Selection(
            pages=np.ascontiguousarray(np.repeat(pages[:, None], heads, axis=1)),
            scores=np.empty((len(counts), heads, 0), np.float32),
            counts=np.repeat(counts[:, None], heads, axis=1).astype(np.int32),
            bytes_scored=0,
            bytes_fetched=self._bytes_of_all(step),
            per="sequence",
            starts=step.starts,
        )

    def _note_live(self, fetched_bytes: int) -> None:
        """Raise the peak: pages as tensors, beside the keys and values of the step's own tokens."""
        own_bytes = len(self.sequences) * self.pool.layout.token_bytes // self.pool.layout.layers
        live_bytes = own_bytes + fetched_bytes
        self.counters.live_bytes_peak = max(self.counters.live_bytes_peak, live_bytes)

    # ---- what generate() and people do with a cache ----

    def fork(self) -> CXLCache:
        """A cache that goes on from here on its own; shares all pages. Budget as this one's."""
        child = type(self)(self.pool, self._config, self.budget, near=self.near, method=self.method)
        child._start_from([s.fork() for s in self.sequences], self.get_seq_length())
        return child

    def __deepcopy__(self, memo: dict[int, object]) -> CXLCache:
        return self.fork()

    def release(self) -> None:
        """Give all pages back; the cache is empty then and may be used anew."""
        for sequence in self.sequences:
            sequence.release()
        self._start_from((), 0)

    def reset(self) -> None:
        """release(), under the name that transformers uses."""
        self.release()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; a positive number is the length to keep.

        Negative is transformers' form from 5.16 on, positive the one before.
        """
        seen = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else max(0, seen + tokens_to_remove)
        if keep >= seen and all(layer.seen == seen for layer in self._far_layers):
            return
        for sequence, length in zip(self.sequences, self._lengths, strict=True):
            sequence.truncate(max(0, keep - (seen - int(length))))
        self._start_from(self.sequences, keep)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row beam_idx[i]; beams share their pages until they part."""
        self._pick_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` names, or where a bool tensor is True."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._pick_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, the repetitions side by side."""
        self._pick_rows([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def _pick_rows(self, rows: list[int]) -> None:
        if not self.sequences:
            return
        seen = self.get_seq_length()
        rows = [row % len(self.sequences) for row in rows]
        last = {row: at for at, row in enumerate(rows)}
        picked = [
            self.sequences[row] if last[row] == at else self.sequences[row].fork()
            for at, row in enumerate(rows)
        ]
        for row, sequence in enumerate(self.sequences):
            if row not in last:
                sequence.release()
        self._start_from(picked, seen)


def _check_layout(pool: KVLayout, model: KVLayout) -> None:
    for name in ("layers", "kv_heads", "head_dim", "value_head_dim"):
        stored, wanted = getattr(pool, name), getattr(model, name)
        if stored != wanted:
            raise GeometryError(
                f"the pool is laid out for {name}={stored}, the model has {wanted}: "
                "create it with layout=layout_of(model)"
            )


def _real_tokens(
    mask: Tensor | None,
    batch: int,
    before: int,
    tokens: int,
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Tensor | None]:
    """How many of the `tokens` new ones are real, int64 [batch], and their places (see Step.real).

    mask: bool [batch, before + tokens] or None. Raises BadArgumentError for holes, for padding on
    the right, and for a mask that hides or shows other tokens than `lengths` [batch] has.
    """
    all_new = np.full(batch, tokens, np.int64)
    if mask is None:
        if (lengths != before).any():
            raise BadArgumentError("the batch is padded: pass its attention_mask in every step")
        return all_new, None
    if mask.ndim != 2 or tuple(mask.shape) != (batch, before + tokens):
        raise BadArgumentError(
            f"the attention mask has shape {tuple(mask.shape)}, wanted [{batch}, "
            f"{before + tokens}]: a mask of 4 dimensions, or of other tokens, is not supported"
        )
    mask = mask.to("cpu", torch.bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise BadArgumentError(
            "the attention mask has padding on the right, or holes: pad on the left "
            "(tokenizer.padding_side = 'left'), so that a row's real tokens stand in one run"
        )
    counts: npt.NDArray[np.int64] = mask.sum(1).numpy()
    new = np.minimum(counts, tokens)
    if (counts - new != lengths).any():
        raise BadArgumentError(
            f"the attention mask shows {(counts - new).tolist()} cached tokens, the cache holds "
            f"{lengths.tolist()}: a mask cannot change for tokens that are cached"
        )
    if (new == tokens).all():
        return all_new, None
    return new, mask[:, before:].flatten().nonzero().flatten()


def _causal_attention(
    step: Step, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Prefill of an empty cache, from the given tensors: [batch, tokens, q_heads, value_dim]."""
    if step.real is None:
        return _causal(query, key, value, scale).transpose(1, 2)
    out = query.new_zeros((step.batch, step.tokens, query.shape[1], value.shape[3]))
    for row, count in enumerate(step.new.tolist()):
        if count:  # each row without its padding: no mask of tokens x tokens is ever made
            one = (slice(row, row + 1), slice(None), slice(step.tokens - count, None))
            out[row, step.tokens - count :] = _causal(query[one], key[one], value[one], scale)[
                0
            ].transpose(0, 1)
    return out


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=query.shape[2] > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_to_pages(
    part: LayerStep, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor
) -> Tensor:
    """queries [rows, q_heads, dim] over pages [rows, kv_heads, k, page_tokens, dim], one device.

    seen: bool [rows, kv_heads, k, page_tokens]. Returns [rows, q_heads, value_dim].
    """
    rows, kv_heads = keys.shape[:2]
    grouped = queries.reshape(rows, kv_heads, -1, queries.shape[2])
    flat_keys = keys.flatten(2, 3).to(queries.dtype)
    logits = (grouped @ flat_keys.mT).float() * part.scale
    if part.softcap is not None:
        logits = part.softcap * torch.tanh(logits / part.softcap)
    logits = logits.masked_fill(~seen.flatten(2)[:, :, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1).to(queries.dtype)
    out = weights @ values.flatten(2, 3).to(queries.dtype)
    return out.reshape(rows, queries.shape[1], values.shape[-1])


def _at_home(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """On the CPU, where the pool is, and in `dtype`; the tensor itself when it is so already."""
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: [batch, tokens, q_heads, value_dim], and no weights.

    Raises BadArgumentError without a CXLCache, UnsupportedError for dropout and attention sinks.
    """
    layer = getattr(key, "far", None)
    if not isinstance(layer, FarLayer):
        raise BadArgumentError(
            f"attention {NAME!r} works on a CXLCache: pass past_key_values=CXLCache(pool, model)"
        )
    if dropout:
        raise UnsupportedError(f"attention {NAME!r} has no dropout: call model.eval() first")
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedError("attention with learned sinks or position biases is not built yet")
    scale = float(query.shape[3] ** -0.5) if scaling is None else scaling
    out = layer.cache.forward(layer, query, key, value, attention_mask, scale, softcap)
    return out.contiguous(), None


def padding_mask(
    *,
    kv_length: int,
    attention_mask: Tensor | None = None,
    mask_function: object = causal_mask_function,
    local_size: int | None = None,
    **kwargs: object,
) -> Tensor | None:
    """transformers' mask function: the padding mask as it is, [batch, kv_length] or None.

    Causality is the attention function's own; UnsupportedError for any other pattern.
    """
    windowed = local_size is not None and kv_length > local_size
    if windowed or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedError(
            f"attention {NAME!r} is causal over all tokens: sliding windows, packed sequences and "
            "custom masks are not built yet"
        )
    return attention_mask


register()
