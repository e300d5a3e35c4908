"""A worker looks whether its model still has the weights that it had when the engine started.

A running engine loads weights anew: reload_weights(), a trainer's updates, a wake-up. Keys name the
weights of the start: then nothing that was stored before may be hit, and nothing that is computed
may be stored under them. vLLM tells its connectors nothing of it. So a worker takes a fingerprint
of its parameters (milliseconds) whenever they may have changed:

    the scheduler asks        the engine's own prefix cache was reset
    a second without a step   weights are loaded between steps
    model.load_weights()      was called

Each message says of which weights its keys are. A worker that has others loads and saves nothing of
it, and reports what it has; from then on keys are of these.
"""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.common.parameters import fingerprint
from cxlkv.adapters.vllm.messages import Message

IDLE_S = 1.0
STALE_HANDLE = bytes(16)
"""No sequence goes on from it, so the engine computes the hit's tokens."""


class Saves(Protocol):
    """What is needed of either form's worker."""

    def hear(self, message: Message) -> None: ...
    def stop_saving(self, names: Iterable[str] | None = None) -> None: ...
    def tell_weights(self, state: bytes) -> None: ...


class LoadedWeights:
    """Of one worker. layers: some of its models, such as their attention."""

    def __init__(self, layers: Iterable[nn.Module], rank: int = 0):
        self._rank = rank
        self._models = models_with(layers)
        self._unseen: list[object] = list(_unseen(self._models))
        self._secret = ""
        self._start = self._now = self._fingerprint()
        self._loads = self._seen_loads = 0
        self._ended_s = time.monotonic()
        for model in self._models:
            self._count_loads(model)

    @property
    def state(self) -> bytes:
        """Empty as long as the weights are those of the start."""
        return b"" if self._now == self._start else self._now

    def hear(self, message: Message, worker: Saves) -> None:
        """Pass the step's message to the worker; of other weights' keys, load and save nothing."""
        is_idle = time.monotonic() - self._ended_s > IDLE_S
        has_changed = False
        if message.look or is_idle or self._loads != self._seen_loads:
            self._seen_loads = self._loads
            before, self._now = self._now, self._fingerprint()
            has_changed = self._now != before
        meant = message.weights[self._rank] if message.weights else b""
        self._ended_s = time.monotonic()
        if has_changed:
            worker.stop_saving()
        if message.look or has_changed or meant != self.state:
            worker.tell_weights(self.state)
        worker.hear(message if meant == self.state else unshared(message))

    def end_step(self) -> None:
        self._ended_s = time.monotonic()

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


def unshared(message: Message) -> Message:
    """The message without what is of its keys: nothing of its requests is loaded or saved."""
    started = [
        replace(
            start,
            handles=start.handles and [STALE_HANDLE] * len(start.handles),
            options=replace(start.options, save=False, priority=0),
        )
        for start in message.started
    ]
    return replace(message, started=started, left=[])


def models_with(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules that have these layers, each once. vLLM does not tell them: what has no
    part in its runner's model is looked for among all objects, which takes 0.3 s."""
    layers = list(layers)
    model = _model_of_caller()
    if model is not None and {id(one) for one in layers} <= {id(one) for one in model.modules()}:
        return [model]
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    parents = {id(child): one for one in modules for child in one.children()}
    found: dict[int, nn.Module] = {}
    for layer in layers:
        outer = layer
        while id(outer) in parents:
            outer = parents[id(outer)]
        found[id(outer)] = outer
    return list(found.values())


def _model_of_caller() -> nn.Module | None:
    """Of vLLM's model runner, which registers its caches with the connector."""
    frame = inspect.currentframe()
    while frame is not None:
        get_model = getattr(frame.f_locals.get("self"), "get_model", None)
        if get_model is not None:
            found = get_model()
            return found if isinstance(found, nn.Module) else None
        frame = frame.f_back
    return None


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
