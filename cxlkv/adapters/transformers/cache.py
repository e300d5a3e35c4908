"""CXLCache keeps a model's keys and values in a pool, one sequence for each row of the batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NoReturn, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from cxlkv.adapters.common.gpu_chunks import GpuChunks
from cxlkv.adapters.common.gpu_writes import GpuWrites
from cxlkv.adapters.common.prefill import attend_to_new, attend_to_seen
from cxlkv.adapters.common.shapes import (
    ATTENTION_KINDS,
    INDEXED,
    STATE_KINDS,
    indexers_of,
    kinds_of,
)
from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.common.steps import LayerStep, Step
from cxlkv.adapters.transformers import budgets
from cxlkv.adapters.transformers.gpu_steps import GpuSteps
from cxlkv.adapters.transformers.gradients import without_gradients
from cxlkv.adapters.transformers.graph import UNCOUNTED, CompiledSteps
from cxlkv.adapters.transformers.latent import Absorbed
from cxlkv.adapters.transformers.layouts import check_layout, layout_of, states_of, text_config
from cxlkv.adapters.transformers.resets import give_back
from cxlkv.adapters.transformers.row_states import RowStates
from cxlkv.adapters.transformers.sparse_prefill import (
    attend_sparsely,
    check_mass,
    is_long,
    long_rows,
)
from cxlkv.adapters.transformers.states import Bytes, StateForm, StateLayer, state_layers
from cxlkv.adapters.transformers.steps import Call, real_tokens
from cxlkv.arrays import positive_float32, softcap_of
from cxlkv.errors import BadArgumentError, CXLKVError, GeometryError, UnsupportedError
from cxlkv.gpu.decode import LayerCounts
from cxlkv.layout import KVLayout
from cxlkv.machine.lifetime import OfThisProcess
from cxlkv.ndp.engine import Budget, Selection, least_error
from cxlkv.numbers import is_whole
from cxlkv.pool import CXLPool
from cxlkv.refusals import refuse_arguments, refuse_value
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

ANOTHER_PROMPT = (
    "generate() goes on with the text that is cached, so give it all of that text and what is new; "
    "for another prompt call cache.release() first, or make another CXLCache"
)


@dataclass
class Counters:
    """What the steps of one token did, in bytes, over all layers and sequences.

    bytes_scored: read to choose pages. bytes_read: keys and values of the pages attended to.
    live_bytes_peak: the most that keys and values took outside of the pool, as tensors, at any
    one time: the step's own tokens and, with attention="gpu", the blocks of pages that a device
    keeps for passes of several tokens.

    by_layer: with attention="gpu", hits and misses of the hot buffer by layer.

    prefill_blocks: of 128 queries by 128 keys of a query head, that sparse prefills attended to;
    prefill_blocks_causal: those that they would have attended to without prefill_mass.
    """

    steps: int = 0
    bytes_scored: int = 0
    bytes_read: int = 0
    live_bytes_peak: int = 0
    prefill_blocks: int = 0
    prefill_blocks_causal: int = 0
    by_layer: LayerCounts | None = None


Chosen = Callable[[Batch, int, Selection], None]
"""Hears what a layer has chosen, before it attends to that."""


Queried = Callable[[int, Tensor, npt.NDArray[np.int32]], None]
"""Hears a layer's queries [rows, q_heads, dim], behind the rotation, of sequence i those from
starts[i] on, before it attends."""


@dataclass(frozen=True)
class Announced:
    """What a layer is about to store: keys [batch, kv_heads, tokens, dim], values None in MLA."""

    index: int
    keys: Tensor
    values: Tensor | None


class Settings(TypedDict, total=False):
    """Settings of a CXLCache."""

    budget: budgets.Budgets
    attention: str
    index: str
    hot_pages: int | None
    method: str
    prefill_mass: float | None


class _Thread(threading.local):
    """The layer that this thread's model updated last, where its keys could not be marked."""

    layer: FarLayer | None = None


_thread = _Thread()


class FarLayer(OfThisProcess, CacheLayerMixin):
    """One attention layer of a CXLCache: holds a length, no tensors. index: in the pool, which has
    no others; place: in the model."""

    _instead = "its cache has K and V: hand_over() makes bytes of that"

    is_croppable = True

    def __init__(
        self, cache: CXLCache, index: int, window: int | None, place: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)  # the cache holds its layers
        self.index = index
        self.place = index if place is None else place
        self.window = window  # how many tokens a token sees, its own included; None: all
        self.is_sliding = window is not None
        self.seen = 0  # tokens so far, padding included
        self.rows: Tensor | None = None  # an indexer's new ones, until they are stored
        self.longest: int | None = None  # the model's window, of a layer that has none in the pool

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
        """The new keys and values as they are; nothing is stored before the attention function.

        It finds this layer by the mark `.far` on the keys. MLA's latents are expanded to other
        tensors first, so there this thread remembers the layer.
        """
        if self.cache.pool.layout.of_layer(self.index).values == "key_prefix":
            row = torch.cat((key_states, value_states), dim=3)
            self.cache.announce(Announced(self.index, row, None))
            _thread.layer = self
            return key_states, value_states
        self.cache.announce(Announced(self.index, key_states, value_states))
        key = key_states.view_as(key_states)
        key.far = self  # type: ignore[attr-defined]
        return key, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (UNCOUNTED if self.cache._captures else self.seen + query_length), 0

    def get_seq_length(self, *args: object) -> int:
        return UNCOUNTED if self.cache._captures else self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """get_max_length's name before transformers 5.16."""
        return -1


class IndexedLayer(FarLayer):  # type: ignore[no-untyped-call]
    """A layer whose model chooses by an indexer what a token sees: it gets all latents, and all of
    the indexer's rows, which are the pool's next layer. attends: to what the last one chose."""

    def __init__(self, cache: CXLCache, index: int, place: int, attends: bool) -> None:
        super().__init__(cache, index, None, place)
        self.has_indexer = not attends

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The latents and the rotary channels of all tokens so far; nothing is stored yet."""
        super().update(key_states, value_states)
        new = torch.cat((key_states, value_states), dim=3)
        row = self.cache.with_earlier(self.seen, self.index, new)
        rank = key_states.shape[3]
        return row[..., :rank], row[..., rank:]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The indexer's rows of all tokens so far, [batch, tokens, channels]."""
        self.rows = indexer_key_states[:, None]
        return self.cache.with_earlier(self.seen, self.index + 1, self.rows)[:, 0]


class FarStateLayer(StateLayer, FarLayer):  # type: ignore[override, no-untyped-call]
    """A layer that attends and has a state as well, which stays here."""

    is_compileable = False

    def __init__(
        self,
        cache: CXLCache,
        index: int,
        window: int | None,
        place: int,
        number_of_states: int = 1,
    ) -> None:
        FarLayer.__init__(self, cache, index, window, place)
        StateLayer.__init__(self, number_of_states)


def layers_of(
    cache: CXLCache, config: PreTrainedConfig, windows: Sequence[int | None]
) -> Iterator[
    cache_utils.LinearAttentionCacheLayerMixin | CacheLayerMixin | cache_utils.DummyLayer
]:
    """A layer of the cache for each of the model's. windows: of those that store keys."""
    index, indexed = 0, indexers_of(config)
    for place, kind in enumerate(kinds_of(config)):
        count = getattr(config, "number_of_conv_states", 1)
        if kind not in ATTENTION_KINDS:
            plain: type[cache_utils.DummyLayer] = cache_utils.DummyLayer
            yield StateLayer(count) if kind in STATE_KINDS else plain()
            continue
        if kind in STATE_KINDS:
            yield FarStateLayer(cache, index, windows[index], place, count)
        elif kind == INDEXED:
            yield IndexedLayer(cache, index, place, attends=place not in indexed)
            index += place in indexed
        else:
            yield FarLayer(cache, index, windows[index], place)
        index += 1


def layer_of(module: torch.nn.Module, key: Tensor) -> FarLayer | None:
    """The layer whose update() the keys of an attention call went through, if any did."""
    marked = getattr(key, "far", None)
    if isinstance(marked, FarLayer):
        return marked
    layer, _thread.layer = _thread.layer, None
    known = layer is not None and layer.place == getattr(module, "layer_idx", None)
    return layer if known else None


class CXLCache(OfThisProcess, Cache):
    """Keys and values of a model in a CXLPool, one sequence for each row of the batch.

    budget: which pages a step of one token attends to, a share of them (0.05) or a Budget; None:
    all. Or one of these for each row, where generate() may repeat a row for beams and samples; a
    row keeps its own when rows move, and `cache.budget = ...` changes it between steps. Layers with
    a window attend to all of it.
    attention: "pool": where the data lies; "gpu": on the model's device, where a Decoder chooses
    and keeps hot pages in steps of a token of each row; its index, and hot_pages of a head, by
    default twice what the budget chooses, are for it. For all other passes what the pool has of
    earlier tokens comes to the device in blocks (gpu_chunks.py). method: as in Batch.select.
    prefill_mass: the share of the attention, above 0 and up to 1, that a prefill of 2,048 tokens or
    more keeps by attending to blocks of keys (sparse_prefill.py), which changes its results; None:
    all of it, as in layers with windows, softcap, sinks or latents. sequences: to start from
    instead of from nothing (pool.adopt, pool.match, Sequence.fork); the cache then owns them; where
    their lengths differ, the attention mask must show the shorter ones padded on the left. states:
    of a model with layers that have any, those behind the sequences, as hit.read_states() gives.

    A filled cache goes on with its text: generate() takes all of it, and what is new. For another
    text call release() first; one that is longer than the cached one is not told from it. A pass
    with its whole text, longer than the cached one, begins anew: assisted decoding makes such.

    Gradients of a pass on an empty cache are right, unless the pool is encoded. A backward pass
    through any other one raises UnsupportedError: the pool keeps no graph of what made its keys.

    Raises GeometryError when the pool is laid out for another model, UnsupportedError as
    layout_of. In a forward pass: BadArgumentError for right padding, custom masks and a text that
    begins anew, PoolFullError when the pool has no room; crop(length before) undoes a pass that
    failed.
    """

    _instead = "hand_over() makes bytes of it, take_over() a cache there; fork() copies it here"

    rewind_tokens = 128
    """How many tokens crop() can surely take back where layers have windows, as drafts are: these
    keep so much more than their window. Pages of a long prompt before that are never taken."""

    def __init__(
        self,
        pool: CXLPool,
        model: object,
        budget: budgets.Budgets = None,
        *,
        attention: str = "pool",
        index: str = "host",
        hot_pages: int | None = None,
        method: str = "auto",
        prefill_mass: float | None = None,
        sequences: Sequence[Tokens] = (),
        states: Sequence[Bytes | None] = (),
        **removed: NoReturn,
    ) -> None:
        refuse_arguments("CXLCache", removed)
        if attention not in ("pool", "gpu"):
            refuse_value("CXLCache", "attention", attention)
            raise BadArgumentError(f"attention={attention!r}: one of pool, gpu")
        if attention != "gpu" and (index, hot_pages) != ("host", None):
            raise BadArgumentError('index= and hot_pages= go with attention="gpu"')
        check_layout(pool.layout, layout_of(model))
        give_back(model, CXLCache)
        self._config = text_config(model)
        kinds = enumerate(kinds_of(self._config))
        self._reusing = {place for place, kind in kinds if kind == "reuse"}
        if attention == "gpu":
            self._check_gpu(pool.layout)
        layers = [*layers_of(self, self._config, pool.layout.windows)]
        super().__init__(layers=layers)
        self._far_layers = [one for one in layers if isinstance(one, FarLayer)]
        indexed = (one for one in self._far_layers if isinstance(one, IndexedLayer))
        self._indexed = {one.index for one in indexed if one.has_indexer}
        if self._indexed and prefill_mass is not None:
            self._refuse_choosing("prefill_mass")
        self._states = self._states_of(model)
        self.pool = pool
        self.attention = attention
        self.index, self.hot_pages = index, hot_pages
        self._gpu: GpuSteps | None = None
        self._chunks: GpuChunks | None = None
        self._writes: GpuWrites | None = None
        if attention == "gpu":
            kind = type(self)
            if kind.choose is not CXLCache.choose or kind.attend is not CXLCache.attend:
                raise UnsupportedError(
                    'attention="gpu" calls no choose() or attend() of a subclass'
                )
            self._gpu = GpuSteps(pool, method, index, hot_pages)
            self._chunks = GpuChunks(pool)
            self._writes = GpuWrites(pool)
        self.method = method
        self.prefill_mass = check_mass(prefill_mass)
        self.counters = Counters()
        self.on_choice: Chosen | None = None
        self.on_query: Queried | None = None
        groups = pool.layout.groups
        self._dtype = getattr(torch, groups[0].dtype)
        self._layer_bytes = max(group.token_bytes // group.layers for group in groups)
        self._step: Step | None = None
        self._pending: Announced | None = None
        self._before_pass = (0, np.empty(0, np.int64))  # tokens seen, and of each row
        self._holds_traced = False  # keys and values that gradients were to lead to
        self._captures = False  # whether this pass is only captured: nothing of it counts
        if self._states is not None and any(len(one) for one in sequences):
            self._states.load(_checked_states(sequences, states))
        self._start_from(sequences, max((len(s) for s in sequences), default=0))
        self.budget = budget

    def _refuse_choosing(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._config.model_type} chooses by its own indexers what a token sees, and {what} "
            "would choose once more: leave it out"
        )

    def _check_gpu(self, layout: KVLayout) -> None:
        """Raises UnsupportedError for what a Decoder does not serve."""
        why = "layers of unlike shapes" if layout.has_shapes else ""
        if self._reusing:
            why = "layers that attend to the keys of others"
        if why:
            raise UnsupportedError(
                f"{self._config.model_type} has {why}, which attention='gpu' does not serve yet: "
                'use attention="pool"'
            )

    def _states_of(self, model: object) -> RowStates | None:
        """Those of the model's layers that have any. Raises UnsupportedError."""
        form = states_of(model)
        if form is None:
            return None
        found = getattr(model, "device", None)
        device = found if isinstance(found, torch.device) else torch.device("cpu")
        dtype = getattr(model, "dtype", None)
        self._config = copy(self._config)
        self._config.dtype = dtype  # fork() makes the same of it
        layers = state_layers(self.layers)
        return RowStates(form, layers, len(self._far_layers), device, self._config.model_type)

    def _start_from(self, sequences: Sequence[Tokens], seen: int) -> None:
        self.sequences = tuple(sequences)
        if self._gpu is not None:
            self._gpu.changed()
        if self._writes is not None:
            self._writes.abandon()
        self._batch = self.pool.batch(self.sequences) if self.sequences else None
        self._lengths = np.array([len(s) for s in self.sequences], np.int64)
        self._step = None
        self._pending = None
        self._holds_traced = self._holds_traced and seen > 0
        for layer in self._far_layers:
            layer.seen = seen
            layer.is_initialized = bool(self.sequences)

    @property
    def budget(self) -> Budget | tuple[Budget | None, ...] | None:
        """One for all rows, or the rows' own as they stand now."""
        return self._budget

    @budget.setter
    def budget(self, budget: budgets.Budgets) -> None:
        self._given = budgets.checked(budget)
        if self._indexed and budgets.for_select(self._given):
            self._refuse_choosing("a budget")
        self._keep_budget(self._given)
        if self.sequences:
            self._spread_budget(len(self.sequences))

    @property
    def budgets_of_selects(self) -> tuple[Budget, ...]:
        """What a step's selects are given: one for all rows, or one for each; empty: no budget."""
        return tuple(self._of_selects)

    def _spread_budget(self, rows: int) -> None:
        if isinstance(self._budget, tuple):
            self._keep_budget(budgets.for_rows(self._budget, rows))

    def _keep_budget(self, budget: Budget | tuple[Budget | None, ...] | None) -> None:
        self._budget, self._of_selects = budget, budgets.for_select(budget)

    # ---- the forward pass, layer by layer ----

    def reuses(self, module: torch.nn.Module) -> bool:
        """Whether an attention module attends to what another one has stored in this pass."""
        return bool(self._reusing) and getattr(module, "layer_idx", None) in self._reusing

    def announce(self, new: Announced) -> None:
        """A layer has new tokens: the attention function must take them before the next layer.

        Raises GeometryError when they are not of the shape that the pool stores.
        """
        if self._pending is not None:
            self._pending = None
            raise BadArgumentError(
                "a CXLCache holds no tensors that another attention function could read: call "
                "model.set_attn_implementation('cxlkv') first"
            )
        _check_shape(self.pool.layout.of_layer(new.index), new)
        self._pending = new

    def forward(self, layer: FarLayer, call: Call) -> Tensor:
        """Append one layer's new tokens and attend: [batch, tokens, q_heads, value_dim]."""
        writes, states = self._writes, self._states
        if states is not None:
            states.check("attention", layer.index)
        try:
            out = self._forward(layer, call)
            if writes is not None and writes.is_open and layer is self._far_layers[-1]:
                writes.finish()
        except BaseException:
            if writes is not None and writes.is_open:  # nothing of the pass is to be seen
                writes.abandon()
                seen, self._lengths = self._before_pass
                for other in self._far_layers:
                    other.seen = seen
            raise
        if states is not None:
            states.enter("attention", layer.index)
        return out

    def _forward(self, layer: FarLayer, call: Call) -> Tensor:
        new, self._pending = self._pending, None
        reuses = self.reuses(call.module)
        if reuses:
            new = Announced(layer.index, call.key, call.value)
        if new is None or new.index != layer.index:
            raise BadArgumentError("a layer attends once to what it gave to its CXLCache")
        if self._step is None or (layer.index == 0 and not self._captures and not reuses):
            self._step = self._begin(
                call.mask, call.query.shape[0], call.query.shape[2], call.positions
            )
        step = self._step.last(call.query.shape[2])
        is_cut = step is not self._step
        if self.on_query is not None and not reuses:
            self.on_query(layer.index, step.rows(call.query), step.starts)
        scale, softcap = positive_float32(call.scale, "scaling"), softcap_of(call.softcap) or None
        part = LayerStep(layer.index, step, scale, softcap, layer.window, call.sinks, reuses)
        at_once = self._decodes_at_once and step.tokens == 1 and not step.first
        at_once = at_once and not reuses and call.seen is None
        a_token_each = step.tokens == 1 and not step.first and step.real is None
        by_gpu = self._gpu is not None and a_token_each
        if self._gpu is not None and not by_gpu:
            self._gpu.changed()
        if not at_once and not by_gpu and not reuses:
            self._append(layer, step, new)
        is_traced = torch.is_grad_enabled() and (self._holds_traced or _is_traced(call))
        self._holds_traced = self._holds_traced or is_traced
        if call.seen is not None:
            out = self._attend_to_seen(part, call, call.seen)
            return without_gradients(out, call.query) if is_traced and not step.first else out
        sparse = self.prefill_mass is not None and new.values is not None and not is_cut
        if sparse and self.prefill_mass is not None and long_rows(part).any():
            out = self._prefill_sparsely(part, call, self.prefill_mass)
            return without_gradients(out, call.query) if is_traced else out
        if self._attends_to_new(step):
            return attend_to_new(part, call.query, call.key, call.value)
        absorbed = None
        query = call.query
        if new.values is None:
            rank = self.pool.layout.of_layer(layer.index).value_head_dim
            absorbed = Absorbed.of(call.module, rank)
            query = absorbed.queries(query)
        if self._chunks is not None and not by_gpu:
            out = self._attend_by_gpu(self._chunks, part, query, new)
        else:
            rows = step.rows(query)
            if by_gpu:
                found = self._decode_by_gpu(layer, part, rows, new)
            elif at_once:
                found = self._decode_at_once(layer, part, rows, new)
            else:
                decodes = step.tokens == 1 and not is_cut
                found = (self._decode if decodes else self._attend_in_pool)(part, rows)
            out = step.unrows(found)
        out = out if absorbed is None else absorbed.outputs(out)
        return without_gradients(out, call.query) if is_traced else out

    def _begin(
        self, mask: Tensor | None, batch: int, tokens: int, positions: Tensor | None = None
    ) -> Step:
        if not self.sequences:
            self._spread_budget(batch)
            self._start_from([self.pool.sequence() for _ in range(batch)], 0)
        if self._gpu is not None and len({one.seen for one in self._far_layers}) > 1:
            raise BadArgumentError("a pass failed on its way: crop(length before) undoes it")
        if batch != len(self.sequences):
            raise BadArgumentError(
                f"a batch of {batch} rows, the cache holds {len(self.sequences)} sequences: "
                f"{ANOTHER_PROMPT}"
            )
        ends = self._ends(positions)
        whole = ends is not None and (ends <= tokens)[self._lengths > 0].all()
        if whole and (self._lengths < tokens).all() and self._states is None:
            self.restart()  # it has its whole text, cached tokens too
        elif ends is not None:
            self._check_goes_on(ends, tokens)
        before = self._far_layers[0].seen
        new, real = real_tokens(mask, batch, before, tokens, self._lengths)
        starts = np.zeros(batch + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        return Step(batch, tokens, before == 0, starts, new, self._lengths + new, real)

    def _ends(self, positions: Tensor | None) -> npt.NDArray[np.int64] | None:
        """How long each row's text is with a pass of these positions [1 or batch, tokens]; None:
        nothing is cached, or the model does not tell."""
        if positions is None or positions.ndim != 2 or not self._lengths.any():
            return None
        if len(positions) not in (1, len(self._lengths)):
            return None
        ends: npt.NDArray[np.int64] = positions[:, -1].cpu().numpy().astype(np.int64) + 1
        return np.broadcast_to(ends, self._lengths.shape)

    def _check_goes_on(self, ends: npt.NDArray[np.int64], tokens: int) -> None:
        """Raises BadArgumentError when new tokens begin or end where cached ones are: generate()
        drops as many tokens of a prompt as are cached, whatever they are."""
        again = (ends < self._lengths + tokens) & (self._lengths > 0)
        if again.any():
            row = int(np.argmax(again))
            raise BadArgumentError(
                f"the cache holds {self._lengths[row]} tokens, and the prompt ends at token "
                f"{ends[row]}, of which the pass brings {tokens}: {ANOTHER_PROMPT}"
            )

    def _attends_to_new(self, step: Step) -> bool:
        """Whether the step attends to its own tensors: where they are as the pool keeps them, so
        that outputs do not depend on the steps that a text came in."""
        return step.first and not self.pool.layout.is_encoded

    def with_earlier(self, seen: int, index: int, new: Tensor) -> Tensor:
        """A pool layer's rows of `seen` earlier tokens, zeros where padding is, and the new ones:
        [batch, 1, tokens, channels]."""
        if not seen:
            return new
        if len(new) != len(self.sequences):
            self._begin(None, len(new), new.shape[2])  # says what is wrong
        whole = new.new_zeros((len(new), 1, seen + new.shape[2], new.shape[3]))
        whole[:, :, seen:] = new
        for row, sequence in enumerate(self.sequences):
            length = sequence.tokens(index)
            whole[row, :, seen - length : seen] = self._stored(index, row, length)[0]
        return whole

    def _attend_to_seen(self, part: LayerStep, call: Call, seen: Tensor) -> Tensor:
        """Attention of a model that has chosen itself: [batch, tokens, q_heads, value_dim]."""
        if part.step.tokens == 1 and not part.step.first:
            self.counters.steps += part.index == 0
            self.counters.bytes_read += self._visible_bytes(part)
            if part.index in self._indexed:
                self.counters.bytes_scored += self._visible_bytes(part, part.index + 1)
        return attend_to_seen(part, call.query, call.key, call.value, seen)

    def _new_rows(self, step: Step, new: Announced) -> tuple[Tensor, Tensor | None]:
        """Keys and values [rows, kv_heads, dim] on the CPU, as the pool stores them."""
        values = None if new.values is None else _at_home(step.rows(new.values), self._dtype)
        return _at_home(step.rows(new.keys), self._dtype), values

    def _append(self, layer: FarLayer, step: Step, new: Announced) -> None:
        assert self._batch is not None
        # What the pool attends to must lie there.
        rewind = max(self.rewind_tokens, 0 if self._attends_to_new(step) else step.tokens)
        if layer.index == 0 and self._may_be_written_by_gpu(step):
            assert self._writes is not None
            self._before_pass = (layer.seen, self._lengths)
            self._writes.begin(step, self.sequences, self._batch, rewind, new.keys)
        if self._writes is not None and self._writes.is_open:
            values = None if new.values is None else step.rows(new.values)
            self._writes.put(layer.index, step.rows(new.keys), values)
        else:
            self._batch.append(layer.index, *self._new_rows(step, new), step.starts, rewind)
        self._count_appended(layer, step)
        if layer.rows is not None:
            rows = _at_home(step.rows(layer.rows), self._dtype)
            self._batch.append(layer.index + 1, rows, None, step.starts, rewind)
            layer.rows = None

    def _may_be_written_by_gpu(self, step: Step) -> bool:
        """True where no layer reads the step's tokens in the pool before the step ends."""
        read = self.prefill_mass is not None and not self._attends_to_new(step)
        read = read and bool(is_long(step).any())
        return self._writes is not None and step.tokens > 1 and not read

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a layer, which begins its part in a pass by asking for it."""
        if self._states is not None and state_idx == 0:
            self._states.check("states", layer_idx)
            self._states.enter("states", layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **given: object
    ) -> Tensor:
        if self._states is not None:
            self._states.check_pass(layer_idx, conv_states.shape[0], conv_states.shape[-1])
        return super().update_conv_state(conv_states, layer_idx, state_idx, **given)

    def _count_appended(self, layer: FarLayer, step: Step) -> None:
        if layer.index == 0:
            self._lengths = step.lengths
        layer.seen += step.tokens
        layer.is_initialized = True

    @property
    def _decodes_at_once(self) -> bool:
        """Whether a step is one call into the core: attention is in the pool, no subclass chooses
        or attends in its own way, and on_choice is not set."""
        kind = type(self)
        if self.on_choice is not None:
            return False
        plain = kind.choose is CXLCache.choose and kind.attend is CXLCache.attend
        return plain and self.attention == "pool"

    def _decode_at_once(
        self, layer: FarLayer, part: LayerStep, queries: Tensor, new: Announced
    ) -> Tensor:
        """_append() and _decode() in one call."""
        assert self._batch is not None
        index, step = part.index, part.step
        wanted = () if part.window is not None else self._of_selects
        if not any(budget.chooses(index) or budget.error for budget in wanted):
            wanted = ()
        try:
            found = self._batch.decode(
                index,
                _at_home(queries),
                *self._new_rows(step, new),
                step.starts,
                wanted or None,
                self.method,
                part.scale,
                part.softcap,
                rewind=max(self.rewind_tokens, step.tokens),
            )
        except CXLKVError as error:
            if error.appended:
                self._count_appended(layer, step)
            raise
        self._count_appended(layer, step)
        self.counters.steps += index == 0
        self.counters.bytes_scored += found.bytes_scored
        read = found.bytes_read if wanted else self._visible_bytes(part)
        self.counters.bytes_read += read
        self._note_live(0)
        out, lse = found.out, found.lse
        assert isinstance(out, Tensor)
        assert isinstance(lse, Tensor)
        out = out if part.sinks is None else beside_sinks(out, lse, part.sinks)
        return out.to(queries.device)

    def _decode_by_gpu(
        self, layer: FarLayer, part: LayerStep, queries: Tensor, new: Announced
    ) -> Tensor:
        """One token for each sequence, which the pool has when the last layer has attended."""
        assert self._gpu is not None
        step = part.step
        self._refuse_on_choice()
        values = None if new.values is None else step.rows(new.values)
        rows = (queries, step.rows(new.keys), values)
        if self._captures:
            return self._gpu.attend(part, rows)
        try:
            rewind = self._rewind(step)
            out = self._gpu.layer(part, self.sequences, self._of_selects, rows, rewind)
        except BaseException:  # the decoder takes back all of the step
            self._gpu.changed()
            for other in self._far_layers[: part.index]:
                other.seen -= step.tokens
            self._lengths = step.lengths - step.new
            raise
        self._count_appended(layer, step)
        if part.index == self.pool.layout.layers - 1:
            self._count_gpu_step(self._gpu)
        return out

    def _refuse_on_choice(self) -> None:
        if self.on_choice is not None:
            raise UnsupportedError(
                'attention="gpu" tells no on_choice what it chooses: attention="pool" does'
            )

    def _attend_by_gpu(
        self, chunks: GpuChunks, part: LayerStep, query: Tensor, new: Announced
    ) -> Tensor:
        """Attention of any pass; the pool has its tokens if it is of one each: [batch, tokens,
        q_heads, value_dim]."""
        step, layout = part.step, self.pool.layout
        picked, own = None, None
        if step.tokens == 1:
            self._refuse_on_choice()
            picked = self._chosen(part, step.rows(query))
        else:
            values = new.keys[..., : layout.value_head_dim] if new.values is None else new.values
            own = (new.keys, values)
        out = chunks.attend(part, self.sequences, query, own, picked)
        self._note_live(chunks.bytes, int(step.new.sum()))
        return out

    def _rewind(self, step: Step) -> int:
        return max(self.rewind_tokens, step.tokens)

    def _count_gpu_step(self, gpu: GpuSteps) -> None:
        scored, pieces = gpu.read()
        self.counters.by_layer = gpu.counts
        heads = self.pool.layout.kv_heads * self.pool.layout.layers
        page_bytes = self.pool.layout.stored_token_bytes * self.pool.layout.page_tokens
        self.counters.steps += 1
        self.counters.bytes_scored += scored
        self.counters.bytes_read += pieces * page_bytes // heads

    def compile(self, model: object, batch_sizes: Sequence[int] = (1,)) -> CompiledSteps:
        """Until the result is closed, replay a CUDA graph of the whole model where a pass has one
        more token of each row, and so many rows; attention="gpu". All other passes run eagerly.

        Raises UnsupportedError for models whose steps the host takes part in: with experts, or
        rotary embeddings that depend on the length; BadArgumentError, GeometryError.
        """
        return CompiledSteps(self, model, batch_sizes)

    def _next_step(self, batch: int, mask: Tensor | None, positions: Tensor) -> Step | str:
        """The next pass, of one token of each row; or the reason why a graph cannot run it."""
        step, gpu = self._begin(mask, batch, 1, positions), self._gpu
        assert gpu is not None
        if step.real is not None:
            return "a row without a token"
        seen = self._far_layers[0].seen
        if any(one.longest is not None and seen >= one.longest for one in self._far_layers):
            return "beyond a window that the pool does not have"
        return step if gpu.fits(self.sequences, self._of_selects) else "a decoder is to be made"

    def _whole_step(self, step: Step, work: Callable[[], object], undone: bool = False) -> None:
        """Take a _next_step() of all layers, which work() has the device do; undone: as in
        GpuSteps.whole()."""
        assert self._gpu is not None
        self._step, self._captures = step, undone
        try:
            budgets, rewind = self._of_selects, self._rewind(step)
            self._gpu.whole(self.sequences, budgets, rewind, work, undone=undone)
        except BaseException:
            self._gpu.changed()
            self._pending = None
            raise
        finally:
            self._captures = False
        if undone:
            return
        for layer in self._far_layers:
            self._count_appended(layer, step)
        self._count_gpu_step(self._gpu)

    def _prefill_sparsely(self, part: LayerStep, call: Call, mass: float) -> Tensor:
        """[batch, tokens, q_heads, value_dim], sequence by sequence; short ones attend to all."""
        step, query = part.step, call.query
        out = query.new_zeros((step.batch, step.tokens, query.shape[1], call.value.shape[3]))
        is_long = long_rows(part)
        for row, count in enumerate(step.new.tolist()):
            if not count:
                continue
            real = (row, slice(None), slice(step.tokens - count, None))
            given = (call.key[real], call.value[real])
            text = given if self._attends_to_new(step) else self._text(part, row)
            keys, values = (one.to(query) for one in text)
            own = mass if is_long[row] else 1.0
            found = attend_sparsely(query[real], keys, values, part.scale, own)
            out[row, step.tokens - count :] = found.out.transpose(0, 1)
            self.counters.prefill_blocks += found.attended
            self.counters.prefill_blocks_causal += found.causal
        return out

    def _text(self, part: LayerStep, row: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a sequence's layer, copied: [kv_heads, tokens, dim]."""
        return self._stored(part.index, row, int(part.step.lengths[row]))

    def _stored(self, index: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        layout = self.pool.layout.of_layer(index)
        shape = (layout.kv_heads, -(-length // layout.page_tokens), layout.page_tokens)
        keys = torch.empty((*shape, layout.head_dim), dtype=self._dtype)
        values = torch.empty((*shape, layout.value_head_dim), dtype=self._dtype)
        self.sequences[row].fetch(index, out=(keys, values))
        return keys.flatten(1, 2)[:, :length], values.flatten(1, 2)[:, :length]

    def _decode(self, part: LayerStep, queries: Tensor) -> Tensor:
        """One token for each sequence: queries [rows, q_heads, dim] -> [rows, q_heads, dim]."""
        picked = self._chosen(part, queries)
        self._note_live(0)
        return self._attend_in_pool(part, queries, picked)

    def _chosen(self, part: LayerStep, queries: Tensor) -> Selection | None:
        """What a step of one token attends to, counted; None: all that it sees."""
        picked = None if part.window is not None else self.choose(part, queries)
        self.counters.steps += part.index == 0 and not part.reuses
        if picked is None:
            self.counters.bytes_read += self._visible_bytes(part)
        else:
            if self.on_choice is not None and self._batch is not None:
                self.on_choice(self._batch, part.index, picked)
            self.counters.bytes_scored += picked.bytes_scored
            self.counters.bytes_read += picked.bytes_fetched
        return picked

    def _visible_bytes(self, part: LayerStep, index: int | None = None) -> int:
        """Bytes in the pool of one layer's keys and values that the last tokens of all sequences
        see; index: of another of the pool's layers."""
        tokens = int((part.step.lengths - part.oldest_seen()).sum())
        index = part.index if index is None else index
        return tokens * self.pool.layout.of_layer(index).stored_layer_bytes

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        """The pages that queries [rows, q_heads, dim] of one token each attend to; None: all."""
        wanted = self._of_selects
        if not any(budget.chooses(part.index) for budget in wanted):
            return None
        assert self._batch is not None
        rows, starts = _at_home(queries), part.step.starts
        return self._batch.select(part.index, rows, starts, wanted, self.method, part.scale)

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        """Attention in the pool, [rows, q_heads, value_dim]; queries lie on the CPU."""
        error = least_error(self._of_selects)
        out, lse = batch.attend(
            part.index, queries, part.step.starts, picked, part.scale, part.softcap, error
        )
        assert isinstance(out, Tensor)
        assert isinstance(lse, Tensor)
        return out if part.sinks is None else beside_sinks(out, lse, part.sinks)

    def _attend_in_pool(
        self, part: LayerStep, queries: Tensor, picked: Selection | None = None
    ) -> Tensor:
        assert self._batch is not None
        return self.attend(self._batch, part, _at_home(queries), picked).to(queries.device)

    def _note_live(self, fetched_bytes: int, tokens: int | None = None) -> None:
        """Raise the peak: pages as tensors, beside the keys and values of the pass's own tokens, by
        default one of each sequence."""
        tokens = len(self.sequences) if tokens is None else tokens
        live_bytes = tokens * self._layer_bytes + fetched_bytes
        self.counters.live_bytes_peak = max(self.counters.live_bytes_peak, live_bytes)

    # ---- what generate() and people do with a cache ----

    def fork(self) -> CXLCache:
        """A cache that goes on from here on its own; shares all pages. Budget as this one's."""
        child = type(self)(
            self.pool,
            self._config,
            attention=self.attention,
            index=self.index,
            hot_pages=self.hot_pages,
            method=self.method,
            prefill_mass=self.prefill_mass,
        )
        if self._states is not None and child._states is not None:
            child._states.follow(self._states)
        child._start_from([s.fork() for s in self.sequences], self.get_seq_length())
        child.budget = self.budget
        child.rewind_tokens = self.rewind_tokens
        return child

    def __deepcopy__(self, memo: dict[int, object]) -> CXLCache:
        return self.fork()

    def leave_device(self) -> None:
        """Free what the model's device has for attention="gpu"; a next pass brings it anew."""
        if self._gpu is not None:
            self._gpu.close()
        if self._chunks is not None:
            self._chunks.close()
        if self._writes is not None:
            self._writes.close()

    def release(self) -> None:
        """Give all pages back; the cache is empty then and may be used anew."""
        self.leave_device()
        for sequence in self.sequences:
            sequence.release()
        if self._states is not None:
            self._states.clear()
        self._start_from((), 0)
        self._keep_budget(self._given)

    def restart(self) -> None:
        """Empty all rows, which stay: the whole text is read anew."""
        rows = [self.pool.sequence() for _ in self.sequences]
        for sequence in self.sequences:
            sequence.release()
        if self._states is not None:
            self._states.clear()
        self._start_from(rows, 0)

    def reset(self) -> None:
        """release(), under the name that transformers uses."""
        self.release()

    def checkpoint(self) -> None:
        """Copy the states of now, so that crop() can come back here; without states nothing.

        Raises BadArgumentError where a pass failed half way.
        """
        if self._states is not None and self._states.has_any:
            self._states.keep(self.get_seq_length())

    def states(self, row: int) -> Bytes:
        """A row's states, uint8 [pool.layout.states.bytes], for publish_prefix() and for another
        cache's states=. Raises BadArgumentError for models without, where a pass failed, and for a
        row that is not there."""
        if self._states is None:
            raise BadArgumentError(f"{self._config.model_type} has no layers with states")
        if not is_whole(row, 0, len(self.sequences) - 1) or not self._states.has_any:
            raise BadArgumentError(
                f"row {row!r:.40}: the cache has {len(self.sequences)} with states"
            )
        return self._states.row(row)

    @property
    def state_form(self) -> StateForm:
        """Of a model with states."""
        assert self._states is not None
        return self._states.form

    @property
    def takes_pieces(self) -> bool:
        """Whether passes of several tokens may follow others."""
        return self._states is None or not self._states.feeds_one_at_a_time

    def activate_past_recording(self) -> None:
        """transformers says so before it drafts tokens. Raises UnsupportedError."""
        if self._states is not None:
            self._states.record()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; a positive number is the length to keep.

        Negative is transformers' form from 5.16 on, positive the one before. BadArgumentError, and
        nothing changed, where layers with windows gave back what the next token would see: see
        rewind_tokens. The last step can always be taken back. Layers with states come back to where
        checkpoint() was called, and nowhere else.
        """
        if self._gpu is not None:
            self._gpu.changed()
        seen = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else max(0, seen + tokens_to_remove)
        layers = self._far_layers  # of these a pass may have failed on its way
        uneven = any(layer.seen != seen or layer.rows is not None for layer in layers)
        for layer in layers:
            layer.rows = None
        states, removed = self._states, max(0, seen - keep)
        uneven = uneven or (states is not None and not states.is_even)
        if states is not None:
            states.check_crop(min(keep, seen), removed or uneven)
        if keep >= seen and not uneven:
            if states is not None:
                states.crop(seen, 0)
            return
        lengths = [max(0, keep - (seen - int(length))) for length in self._lengths]
        sequences: Sequence[Tokens] = self.sequences
        if any(self.is_sliding) and not uneven:
            sequences = _truncated_forks(sequences, lengths)
        else:
            for sequence, length in zip(sequences, lengths, strict=True):
                sequence.truncate(length)
        if states is not None:
            states.crop(keep, removed)
        self._start_from(sequences, keep)

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
        if isinstance(self._budget, tuple):
            self._keep_budget(tuple(self._budget[row] for row in rows))
        if self._states is not None:
            self._states.pick(rows)
        self._start_from(picked, seen)


def _check_shape(layout: KVLayout, new: Announced) -> None:
    value_dim = layout.value_head_dim if new.values is None else new.values.shape[3]
    got = (new.keys.shape[1], new.keys.shape[3], value_dim)
    if got == (layout.kv_heads, layout.head_dim, layout.value_head_dim):
        return
    remedy = "use the model that layout_of() saw"
    if new.values is None:
        remedy = "transformers must cache latents before it expands them, as 5.23 does"
    raise GeometryError(
        f"layer {new.index} gives keys of {got[0]} heads of {got[1]} channels, the pool stores "
        f"{layout.kv_heads} of {layout.head_dim} (values of {layout.value_head_dim}): {remedy}"
    )


def _checked_states(
    sequences: Sequence[Tokens], states: Sequence[Bytes | None]
) -> list[Bytes | None]:
    """The states to go on from, None for empty sequences. Raises BadArgumentError."""
    lacking = [one is None and len(row) > 0 for row, one in zip(sequences, states, strict=False)]
    if len(states) != len(sequences) or any(lacking):
        raise BadArgumentError(
            f"{len(sequences)} sequences with {len(states)} states: a model whose layers have "
            "states goes on from both, as hit.read_states() gives them: CXLCache(.., states=[..])"
        )
    return [one if len(row) else None for row, one in zip(sequences, states, strict=True)]


def _truncated_forks(sequences: Sequence[Tokens], lengths: list[int]) -> list[Tokens]:
    """Each sequence cut to its length, instead of `sequences`: all of them or none."""
    forks = [sequence.fork() for sequence in sequences]
    try:
        for fork, length in zip(forks, lengths, strict=True):
            fork.truncate(length)
    except CXLKVError:
        for fork in forks:
            fork.release()
        raise
    for sequence in sequences:
        sequence.release()
    return forks


def _is_traced(call: Call) -> bool:
    return any(one.requires_grad for one in (call.query, call.key, call.value))


def _at_home(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring a tensor to the CPU, where the pool is, and to `dtype`; the tensor itself when it is so
    already."""
    return tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype)
