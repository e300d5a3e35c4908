"""Whether models in memory still have the weights that they had at the start.

A running engine loads weights anew: a reload, a trainer's updates, a wake-up. Keys name the weights
of the start: then nothing that was stored before may be hit, and nothing that is computed may be
stored under them. Engines tell their caches nothing of it, so an adapter compares fingerprints.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from typing import cast

from torch import Tensor, nn

from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.common.parameters import fingerprint

IDLE_S = 1.0
"""Weights are loaded between steps: after so long a rest an adapter looks."""


class Loaded:
    """The weights of an engine's models, as this rank has them.

    are_alone: whether they decide all that this rank computes. Where other ranks do, too, their
    weights may change while this rank's do not: each load_weights() counts as other weights then.
    """

    def __init__(self, models: Iterable[nn.Module], are_alone: bool = True):
        self._models, self._are_alone = list(models), are_alone
        self._unseen: list[object] = list(_unseen(self._models))
        self._secret = ""
        self._start = self._now = self._fingerprint()
        self._loads = self._seen_loads = 0
        for model in self._models:
            self._count_loads(model)

    @property
    def state(self) -> bytes:
        """The state at the last look; empty as long as the weights are those of the start."""
        return b"" if self._now == self._start else self._now

    @property
    def may_differ(self) -> bool:
        """Whether model.load_weights() was called since the last look."""
        return self._loads != self._seen_loads

    def look(self) -> bool:
        """Whether the weights have changed since the last look. It reads them: milliseconds."""
        loads = self._loads
        if not self._are_alone and self.may_differ:
            self._secret = os.urandom(16).hex()
        before, self._now = self._now, self._fingerprint()
        self._seen_loads = loads
        return self._now != before

    def _fingerprint(self) -> bytes:
        unseen = list(_unseen(self._models))
        known = [id(one) for one in self._unseen]  # they are held, so that no id is used again
        if [id(one) for one in unseen] != known:
            self._unseen, self._secret = unseen, os.urandom(16).hex()
        seen = [fingerprint(_tensors(model)).hex() for model in self._models]
        return namespace({"seen": seen, "unseen": self._secret})

    def _count_loads(self, model: nn.Module) -> None:
        load = getattr(model, "load_weights", None)
        if load is None:
            return

        def load_weights(*args: object, **kwargs: object) -> object:
            self._loads += 1
            return load(*args, **kwargs)

        model.load_weights = load_weights  # type: ignore[assignment]


def models_with(
    layers: Iterable[nn.Module], known: Iterable[nn.Module] | None = None
) -> list[nn.Module]:
    """The outermost modules that have these layers, each once: engines do not tell them. known: all
    of this process."""
    known = modules() if known is None else known
    parents = {id(child): one for one in known for child in one.children()}
    found: dict[int, nn.Module] = {}
    for layer in layers:
        outer = layer
        while id(outer) in parents:
            outer = parents[id(outer)]
        found[id(outer)] = outer
    return list(found.values())


def models_of(*packages: str) -> list[nn.Module]:
    """The outermost modules of this process that have layers of these packages' classes."""
    known = modules()
    layers = (one for one in known if type(one).__module__.partition(".")[0] in packages)
    return models_with(layers, known)


def modules() -> list[nn.Module]:
    found = [one for one in objects() if issubclass(type(one), nn.Module)]  # and no proxies of them
    return cast("list[nn.Module]", found)


def objects() -> list[object]:
    """All of this process that have references, those that an engine has frozen as well."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _unseen(models: Iterable[nn.Module]) -> Iterator[object]:
    """Functions that stand for weights which a kernel keeps in a form of its own, as in vLLM's CPU
    backend. They are made anew with the weights."""
    for model in models:
        for module in model.modules():
            if any(one is not None and not one.numel() for one in module._parameters.values()):
                yield from (value for value in vars(module).values() if callable(value))
