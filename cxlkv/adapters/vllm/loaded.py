"""A worker looks whether its model still has the weights that it had when the engine started.

vLLM tells its connectors nothing of weights that it loads anew (common/loaded.py). So a worker
takes a fingerprint of its parameters (milliseconds) whenever they may have changed:

    the scheduler asks        the engine's own prefix cache was reset
    a second without a step   weights are loaded between steps
    model.load_weights()      was called

Each message says of which weights its keys are. A worker that has others loads and saves nothing of
it, and reports what it has; from then on keys are of these.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from cxlkv.adapters.common import loaded
from cxlkv.adapters.common.loaded import Loaded, models_with
from cxlkv.adapters.vllm.messages import Message

STALE_HANDLE = bytes(16)
"""No sequence goes on from it, so the engine computes the hit's tokens."""


class Saves(Protocol):
    """What is needed of either form's worker."""

    def hear(self, message: Message) -> None: ...
    def stop_saving(self, names: Iterable[str] | None = None) -> None: ...
    def tell_weights(self, state: bytes) -> None: ...


class LoadedWeights:
    """The loaded weights of one worker. layers: some of its models, such as their attention."""

    def __init__(self, layers: Iterable[nn.Module], rank: int = 0):
        self._rank = rank
        self._loaded = Loaded(models_with(layers))  # the scheduler has the states of all ranks
        self._ended_s = time.monotonic()

    def hear(self, message: Message, workers: Sequence[Saves]) -> None:
        """Pass the step's message to those that this process has, one for each pool; of other
        weights' keys, load and save nothing."""
        is_idle = time.monotonic() - self._ended_s > loaded.IDLE_S
        look = message.look or is_idle or self._loaded.may_differ
        has_changed = look and self._loaded.look()
        meant = message.weights[self._rank] if message.weights else b""
        self._ended_s = time.monotonic()
        state = self._loaded.state
        for worker in workers:
            if has_changed:
                worker.stop_saving()
            if message.look or has_changed or meant != state:
                worker.tell_weights(state)
            worker.hear(message if meant == state else unshared(message))

    def end_step(self) -> None:
        self._ended_s = time.monotonic()


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
