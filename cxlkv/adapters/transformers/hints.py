"""Hints bring a layer's pages near while the layer before it is at work.

    with LocalTier(pool, "1GiB") as tier, Hints(model, cache, tier) as hints:
        model.generate(ids, past_key_values=cache)
        hints.stats()

With CXLCache(attention="gpu") a Decoder brings them into its hot buffer, and there is no tier.

The residual stream changes little from one layer to the next, so that the next layer's norm, query
projection and rotation, applied to this layer's input, give about the query that the next layer
will have (InfiniGen, arXiv 2406.19707). The next layer's own attention module computes it: it is
called with this layer's input, and what it hands to the attention function is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cxlkv.adapters.transformers.attention import DecoderLayer, asked_query
from cxlkv.adapters.transformers.cache import CXLCache
from cxlkv.errors import BadArgumentError, CXLKVError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.prefetch import Hinted

log = logging.getLogger("cxlkv")


def unhinted(model: torch.nn.Module, cache: CXLCache) -> str | None:
    """Why there are no hints for a model; None: there are."""
    layout = cache.pool.layout
    if layout.has_shapes:
        return "its layers are of unlike shapes"
    if layout.values != "own":
        return "its queries are of latents (MLA), which a guess would have to absorb"
    if any(window is not None for window in layout.windows):
        return "it has layers with windows, beside which other layers may be rotated otherwise"
    found = layers_of(model)
    if len(found) != layout.layers:
        return f"{type(model).__name__} has no list of {layout.layers} decoder layers"
    for number, layer in enumerate(found):
        own = getattr(layer, "self_attn", None)
        if not hasattr(layer, "input_layernorm") or getattr(own, "layer_idx", None) != number:
            return f"{type(layer).__name__} is not built as Llama's, of input_layernorm, self_attn"
    return None


def layers_of(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Layers of the decoder; none where there is no list of them."""
    decoder = getattr(model, "get_decoder", lambda: model)()
    layers = getattr(decoder, "layers", None)
    return tuple(layers) if isinstance(layers, torch.nn.ModuleList) else ()


class Hints(Closing):
    """Hints of one model to one cache, and a local tier of its pool, until close(); tier None where
    the cache attends by a GPU, which then takes them at once.

    why: the reason why there are none for this model, which then runs as without; None: there are.
    They are for steps of one token under a budget. wait=True: each is carried out before the model
    goes on, as tests and benchmarks want it; else a thread does so meanwhile, and leaves out those
    that it comes too late for.

    Decoding is three calls into the core a layer instead of one, for what was chosen must be known.
    An error of a hint is counted, and nothing else comes of it. Raises BadArgumentError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: CXLCache,
        tier: LocalTier | None = None,
        *,
        wait: bool = False,
    ):
        if (tier is None) != (cache.attention == "gpu"):
            raise BadArgumentError(
                'Hints(model, cache) is for attention="gpu", which has a hot buffer; other caches '
                "have a local tier: Hints(model, cache, tier)"
            )
        self.why = unhinted(model, cache)
        self._cache, self._tier, self._wait = cache, tier, wait
        self._prefetcher: Hinted | None = None
        self._own: Batch | None = None  # of the cache's sequences, for the thread
        self._failed = self._late = 0
        self._job: Future[None] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._layers = () if self.why else layers_of(model)
        self._thread = ThreadPoolExecutor(1, "cxlkv-hints")  # starts with its first hint
        lifetime.watch(self)
        if self.why:
            return
        for number, layer in enumerate(self._layers):
            hook = partial(self._entered, number)
            self._hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if tier is not None:
            cache.on_choice = self._chosen

    def stats(self) -> dict[str, float | str]:
        """Figures of the prefetcher (state, accuracy, promoted), and how many hints failed or came
        too late."""
        found = {} if self._prefetcher is None else self._prefetcher.stats()
        return {**found, "failed": self._failed, "late": self._late}

    def close(self) -> None:
        """Take the hooks out; a second time does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._cache.on_choice == self._chosen:
            self._cache.on_choice = None
        self._thread.shutdown(cancel_futures=True)

    def reset_after_fork(self) -> None:
        """The thread stayed with the parent: there are no more hints here."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._cache.on_choice = None
        self._thread = ThreadPoolExecutor(1)

    # ---- in the model's forward pass ----

    def _entered(
        self,
        number: int,
        layer: torch.nn.Module,
        args: tuple[object, ...],
        given: dict[str, object],
    ) -> None:
        """A layer begins: a hint for the next; in the last one what the first chose before."""
        states = args[0] if args else given.get("hidden_states")
        assert isinstance(states, Tensor)
        rows = len(self._cache.sequences)
        if given.get("past_key_values") is not self._cache or states.shape[:2] != (rows, 1):
            return
        target = (number + 1) % len(self._layers)
        budgets = self._cache.budgets_of_selects
        if not any(budget.chooses(target) for budget in budgets):
            return
        query = None
        if target:
            query = asked_query(cast(DecoderLayer, self._layers[target]), states, given)[:, :, 0]
            query = query.detach()
        if self._tier is not None:
            self._give(target, None if query is None else query.to("cpu"), budgets)
        elif query is not None and self._cache._gpu is not None:
            with self._counted():
                self._cache._gpu.hint(target, query)

    def _give(self, layer: int, query: Tensor | None, budgets: Sequence[Budget]) -> None:
        if self._job is not None and self._job.cancel():
            self._late += 1
        self._job = self._thread.submit(self._hint, layer, query, budgets)
        if self._wait:
            self._job.result()

    def _hint(self, layer: int, query: Tensor | None, budgets: Sequence[Budget]) -> None:
        sequences = self._cache.sequences
        with self._counted():
            assert self._tier is not None
            if self._own is None or self._own.sequences != sequences:
                self._own = self._cache.pool.batch(sequences)
            if self._prefetcher is None:
                self._prefetcher = Hinted(self._tier, self._own)
            starts = np.arange(len(sequences) + 1, dtype=np.int32)
            method = self._cache.method
            self._prefetcher.hint(layer, query, starts, budgets, method, batch=self._own)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """A failed hint slows a step, and must not end the thread."""
        try:
            yield
        except Exception as error:
            self._failed += 1
            if not isinstance(error, CXLKVError):
                log.exception("a hint failed")

    def _chosen(self, batch: Batch, layer: int, picked: Selection) -> None:
        if self._prefetcher is not None:
            self._prefetcher.batch = batch
            self._prefetcher.observe(layer, picked)
