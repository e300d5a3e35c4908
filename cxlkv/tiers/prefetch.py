"""Prefetchers guess which units a layer will choose next, and promote them.

Call `prefetcher.observe(layer, selection)` after each select. Each guess is compared with what the
layer then chose; a prefetcher that is wrong too often stops copying, and tries again later.

LastStep guesses from what it observed. Hinted is told, too, what a layer's next query will be like:
an engine that has the next layer's query projection applies it to this layer's input (InfiniGen,
arXiv 2406.19707).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Units
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import BudgetLike, Selection, budget_of
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
        if not self._is_awake():
            return 0
        self._compare(layer, selection)
        if self.state == "resting":
            return 0
        target, units = self.guess(layer, selection)
        return 0 if target is None else self._bring(target, units)

    def _is_awake(self) -> bool:
        """Counts down a rest; at its end guesses are tried."""
        if self.state == "resting":
            self._rest -= 1
            if self._rest:
                return False
            self._enter("shadow")
        return True

    def _bring(self, layer: int, units: Units) -> int:
        """Remember a guess, and copy its units, in their order, while there are free slots."""
        self._guesses[layer] = units
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


class Hinted(Prefetcher):
    """A layer chooses what a guess of its query does, and what it chose in the step before.

    For each layer of a step: hint() while the layer before it is at work, and observe() behind the
    select. Both take one batch. Another thread may call hint() with its own batch of the same
    sequences; the thread that decodes then does not wait for it.

    Each layer has its part of the tier's slots, so the last ones find room as the first ones do. In
    it what was guessed or chosen last stays longest (LRU). Together with this one, LocalTier.step()
    is not needed.
    """

    def __init__(self, tier: LocalTier, batch: Batch):
        super().__init__(tier, batch)
        self._last: dict[int, Units] = {}  # by layer, what it chose
        self._kept: dict[int, Units] = {}  # by layer, what may be near, the latest first

    def hint(
        self,
        layer: int,
        q: object | None,
        starts: npt.ArrayLike,
        budgets: BudgetLike | Sequence[BudgetLike],
        method: str = "auto",
        scale: float | None = None,
        *,
        batch: Batch | None = None,
    ) -> int:
        """A layer's next queries will be about q [rows, q_heads, head_dim]; returns how many units
        were promoted. The other arguments are as of Batch.select.

        q None: there is no guess but what the layer chose last. The layer has not got the step's
        rows yet, so that its newest tokens stand for theirs. batch: where to select instead.
        """
        if self.state == "resting":
            return 0
        guess, last = np.empty(0, np.int64), self._last.get(layer, np.empty(0, np.int64))
        if q is not None:
            guess = self._chosen(batch or self.batch, layer, q, starts, budgets, method, scale)
        units = _by_trust(guess, last)[: self._slots()]
        self._make_room(layer, units)
        return self._bring(layer, units)

    def observe(self, layer: int, selection: Selection) -> int:
        """A layer has chosen; copies nothing."""
        if self._is_awake():
            self._compare(layer, selection)
            self._last[layer] = units_of(self.batch, layer, selection)
        return 0

    def guess(self, layer: int, selection: Selection) -> tuple[int | None, Units]:
        return None, np.empty(0, np.int64)  # guesses are made by hint()

    def _chosen(
        self,
        batch: Batch,
        layer: int,
        q: object,
        starts: npt.ArrayLike,
        budgets: BudgetLike | Sequence[BudgetLike],
        method: str,
        scale: float | None,
    ) -> Units:
        several = budgets if isinstance(budgets, Sequence) else (budgets,)
        # What decode keeps of its choices is of the true queries alone.
        fresh = [replace(budget_of(one), refresh=1) for one in several]
        rows = np.diff(np.asarray(starts))
        held = np.array([sequence.tokens(layer) for sequence in batch.sequences])
        if rows.shape != held.shape:
            raise BadArgumentError(
                f"starts are of {len(rows)} sequences, the batch has {len(held)}"
            )
        if (held < rows).any():
            return np.empty(0, np.int64)
        return units_of(batch, layer, batch.select(layer, q, starts, fresh, method, scale))

    def _slots(self) -> int:
        """Slots of one layer."""
        return int(self.tier.stats()["slots_total"]) // self.batch._layout.layers

    def _make_room(self, layer: int, units: Units) -> None:
        if self.state != "on":
            return
        before = self._kept.get(layer, units)
        latest = np.concatenate([units, before[~np.isin(before, units, assume_unique=True)]])
        self._kept[layer], gone = np.split(latest, [self._slots()])
        if len(gone):
            self.tier.demote(gone)


def _by_trust(guess: Units, last: Units) -> Units:
    """Both, without doubles: first what is in both, then what was guessed."""
    again = np.isin(guess, last, assume_unique=True)
    return np.concatenate([
        guess[again], guess[~again], np.setdiff1d(last, guess, assume_unique=True)
    ])  # fmt: skip
