"""The near-data engine's part of a decode step: append, select, attend, and follow hints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.ndp import choosers
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch, Sequence


@dataclass
class DecodeStats:
    """Counts of a decoder. hint_*: pages that layers with a hint chose for their own query, and how
    many of them the hint had named."""

    steps: int = 0
    selects: int = 0
    hints: int = 0
    bytes_scored: int = 0
    hint_wanted: int = 0
    hint_found: int = 0

    @property
    def hint_hit_rate(self) -> float:
        return self.hint_found / self.hint_wanted if self.hint_wanted else 0.0


@dataclass(frozen=True)
class Step:
    """One step, as the engine sees it: counts[i] tokens of active[i], ascending, which are the
    first of its `rows`.

    lengths [active]: tokens before it. recent_from, int32 [active]: the device has the pages from
    there on. budgets: one for each; a list for all rows of a request. rewind: as in Batch.append().
    """

    pool: CXLPool
    active: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rows: int
    sequences: list[Sequence]
    lengths: npt.NDArray[np.int64]
    recent_from: npt.NDArray[np.int32]
    budgets: list[Budget]
    rewind: int | None = None

    def only(self, places: list[int]) -> Step:
        """The part of some requests, by their places in `active`."""
        return replace(
            self,
            active=self.active[places],
            counts=self.counts[places],
            sequences=[self.sequences[place] for place in places],
            lengths=self.lengths[places],
            recent_from=self.recent_from[places],
            budgets=[self.budgets[place] for place in places],
        )

    @cached_property
    def batch(self) -> Batch:
        return self.pool.batch(self.sequences)

    @cached_property
    def starts(self) -> npt.NDArray[np.int32]:
        return np.concatenate(([0], self.counts.cumsum())).astype(np.int32)

    @cached_property
    def _at(self) -> torch.Tensor:
        """Where the rows are among those of all places."""
        row = np.arange(self.rows)
        places = self.active[:, None] * self.rows + row
        return torch.from_numpy(places[row < self.counts[:, None]])

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Append a layer's rows, all or nothing, unless they are there."""
        if self.sequences[0].tokens(layer) == self.lengths[0]:
            self.batch.append(layer, k, v, self.starts, self.rewind)

    def rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[requests, rows, ...] as [rows of active requests, ...]: in place where these are all,
        else a copy."""
        flat = rows.flatten(0, 1)
        return flat if self.starts[-1] == len(flat) else flat[self._at]

    def put_rows(self, rows: torch.Tensor, found: object) -> None:
        """Copy rows of active requests back into [requests, rows, ...], contiguous."""
        assert isinstance(found, torch.Tensor)
        rows.flatten(0, 1)[self._at] = found.to(rows.dtype)


class Selector:
    """Chooses pages for a step's queries, one list for all rows of a request."""

    def __init__(self, method: str, scale: float, softcap: float | None):
        choosers.refuse(method, "a GPU")
        self._method, self._scale, self._softcap = method, scale, softcap
        self._hinted: dict[int, Selection] = {}  # by layer, what the step's hints named
        self.stats = DecodeStats()

    def begin(self) -> None:
        """A step's hints end with it."""
        self._hinted.clear()

    def choose(
        self, step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> Selection:
        """Append the rows and choose pages; those that the device has are left out: -1."""
        step.append(layer, k, v)
        return self._far(step, self._select(step, layer, q))

    def follow_hint(self, step: Step, layer: int, q: torch.Tensor) -> Selection | None:
        """The pages that a guess of the layer's query chooses. The layer does not have the step's
        rows yet, so the tokens before them stand for the queries' own; None: there are too few."""
        lengths = np.array([sequence.tokens(layer) for sequence in step.sequences])
        if (lengths < step.counts).any():
            return None
        self.stats.hints += 1
        self._hinted[layer] = self._far(step, self._select(step, layer, q))
        return self._hinted[layer]

    def compare(self, layer: int, picked: Selection) -> None:
        """Count which of the chosen pages the layer's hint had named, if it had one."""
        hinted = self._hinted.pop(layer, None)
        if hinted is None:
            return
        for named, wanted in zip(_lists(hinted), _lists(picked), strict=True):
            wanted = wanted[wanted >= 0]
            self.stats.hint_wanted += len(wanted)
            self.stats.hint_found += int(np.isin(wanted, named).sum())

    def attend(
        self, step: Step, layer: int, q: torch.Tensor, picked: Selection
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the chosen pages near the data; returns (out, lse)."""
        out, lse = step.batch.attend(layer, q, step.starts, picked, self._scale, self._softcap)
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        return out, lse

    def _select(self, step: Step, layer: int, q: torch.Tensor) -> Selection:
        budgets = step.budgets
        budgets = budgets[:1] if budgets.count(budgets[0]) == len(budgets) else budgets
        picked = step.batch.select(layer, q, step.starts, budgets, self._method, self._scale)
        self.stats.selects += 1
        self.stats.bytes_scored += picked.bytes_scored
        return picked.plain("attention on the device")

    def _far(self, step: Step, picked: Selection) -> Selection:
        near = picked.pages >= step.recent_from[:, None, None]
        return replace(picked, pages=np.where(near, np.int32(-1), picked.pages))


def _lists(picked: Selection) -> npt.NDArray[np.int32]:
    """[requests * kv_heads, k]"""
    return picked.pages.reshape(-1, picked.pages.shape[2])
