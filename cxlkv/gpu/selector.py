"""The near-data engine's part of a decode step: append, select, attend, and follow hints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.ndp import choosers
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch


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
    """One step of all requests, as the engine sees it: `rows` tokens for each of `active`.

    lengths [active]: tokens before it. recent_from, int32 [active]: the device has the pages from
    there on. budgets: one for all, or one for each; a list for all rows of a request. rewind: as in
    Batch.append().
    """

    active: npt.NDArray[np.int64]
    batch: Batch
    rows: int
    starts: npt.NDArray[np.int32]
    lengths: list[int]
    recent_from: npt.NDArray[np.int32]
    budgets: tuple[Budget, ...]
    rewind: int | None = None

    def rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[requests, rows, ...] as [rows of active requests, ...]: in place where all are active,
        else a copy."""
        if len(self.active) == len(rows):
            return rows.flatten(0, 1)
        return rows[torch.from_numpy(self.active)].flatten(0, 1)

    def put_rows(self, rows: torch.Tensor, found: object) -> None:
        """Copy rows of active requests back into [requests, rows, ...]."""
        assert isinstance(found, torch.Tensor)
        shape = (len(self.active), self.rows, *found.shape[1:])
        rows[torch.from_numpy(self.active)] = found.to(rows.dtype).reshape(shape)


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
        step.batch.append(layer, k, v, step.starts, step.rewind)
        return self._far(step, self._select(step, layer, q))

    def follow_hint(self, step: Step, layer: int, q: torch.Tensor) -> Selection | None:
        """The pages that a guess of the layer's query chooses. The layer does not have the step's
        rows yet, so the tokens before them stand for the queries' own; None: there are too few."""
        if min(sequence.tokens(layer) for sequence in step.batch.sequences) < step.rows:
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
        picked = step.batch.select(layer, q, step.starts, step.budgets, self._method, self._scale)
        self.stats.selects += 1
        self.stats.bytes_scored += picked.bytes_scored
        return picked.plain("attention on the device")

    def _far(self, step: Step, picked: Selection) -> Selection:
        near = picked.pages >= step.recent_from[:, None, None]
        return replace(picked, pages=np.where(near, np.int32(-1), picked.pages))


def _lists(picked: Selection) -> npt.NDArray[np.int32]:
    """[requests * kv_heads, k]"""
    return picked.pages.reshape(-1, picked.pages.shape[2])
