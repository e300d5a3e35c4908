"""Prefetchers guess which units a layer will choose next, and promote them.

Call `prefetcher.observe(layer, selection)` after each select. Each guess is compared with what the
layer then chose; a prefetcher that is wrong too often stops copying, and tries again later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from cxlkv.arrays import Units
from cxlkv.ndp.engine import Selection
from cxlkv.sequence import Batch
from cxlkv.tiers.local import LocalTier, units_of

FLOOR = 0.5
"""Below this accuracy more is copied in vain than is used."""
MEMORY = 32
"""Guesses that the accuracy is a mean of, about: older ones fade."""
TRIAL = 16
"""Guesses before the accuracy counts: after a start, and before moving again."""
REST = 16 * TRIAL
"""Selects to sit out when it was too low; so a useless prefetcher guesses 1 time in 17."""


class Prefetcher(ABC):
    """What all have in common: guess, compare, switch off, try again.

    state is "on" (guesses and moves), "resting" (does nothing for REST selects) or "shadow"
    (guesses for TRIAL selects without moving, then is on or rests again). It fills free slots only:
    LocalTier.step makes room when units were refused. batch may be set anew, such as to a fork's:
    what was learned stays.
    """

    def __init__(self, tier: LocalTier, batch: Batch):
        self.tier = tier
        self.batch = batch
        self.state = "on"
        self.promoted = 0
        self._guesses: dict[int, Units] = {}  # by layer
        self._used = self._guessed = 0.0  # fading sums
        self._compared = 0  # guesses since the state changed
        self._rest = 0

    @property
    def accuracy(self) -> float:
        """Share of the units guessed that the layer's next selection named; 1 before any."""
        return self._used / self._guessed if self._guessed else 1.0

    def stats(self) -> dict[str, float | str]:
        """state, accuracy and the units promoted."""
        return {"state": self.state, "accuracy": self.accuracy, "promoted": self.promoted}

    def observe(self, layer: int, selection: Selection) -> int:
        """A layer has chosen; returns how many units were promoted for what comes next."""
        if self.state == "resting":
            self._rest -= 1
            if self._rest:
                return 0
            self._enter("shadow")
        self._compare(layer, selection)
        if self.state == "resting":
            return 0
        target, units = self.guess(layer, selection)
        if target is None:
            return 0
        self._guesses[target] = units
        if self.state != "on" or len(units) == 0:
            return 0
        moved = len(self.tier.promote(units).promoted)
        self.promoted += moved
        return moved

    @abstractmethod
    def guess(self, layer: int, selection: Selection) -> tuple[int | None, Units]:
        """The layer that the guess is for, None: there is none, and the units that it will read."""

    def _compare(self, layer: int, selection: Selection) -> None:
        guessed = self._guesses.pop(layer, None)
        if guessed is None or len(guessed) == 0:
            return
        chosen = units_of(self.batch, layer, selection)
        used = np.count_nonzero(np.isin(guessed, chosen, assume_unique=True))
        fades = 1 - 1 / MEMORY
        self._used = self._used * fades + used
        self._guessed = self._guessed * fades + len(guessed)
        self._compared += 1
        if self._compared < TRIAL:
            return
        if self.accuracy < FLOOR:
            self._enter("resting")
            self._rest = REST
        elif self.state == "shadow":
            self._enter("on")

    def _enter(self, state: str) -> None:
        if state == "shadow":
            self._used = self._guessed = 0.0  # what was long ago says nothing about today
            self._guesses.clear()
        self.state = state
        self._compared = 0


class LastStep(Prefetcher):
    """A layer chooses what it chose in the step before (temporal stability)."""

    def guess(self, layer: int, selection: Selection) -> tuple[int | None, Units]:
        return layer, units_of(self.batch, layer, selection)


class LayerAhead(Prefetcher):
    """The next layer chooses the pages that this one chose."""

    def guess(self, layer: int, selection: Selection) -> tuple[int | None, Units]:
        ahead = layer + 1
        if ahead >= self.batch._layout.layers:
            return None, np.empty(0, np.int64)
        return ahead, units_of(self.batch, ahead, selection)
