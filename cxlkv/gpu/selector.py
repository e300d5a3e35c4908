"""The near-data engine's part of a decode step: append, select, attend, and choose ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.ndp.engine import BudgetLike, Selection, budget_of
from cxlkv.sequence import Batch


@dataclass
class DecodeStats:
    """Counts of a decoder. ahead_*: pages that the exact selection of an audited call chose, and
    how many of them had been chosen ahead of it, from the query of the layer before."""

    steps: int = 0
    selects: int = 0
    selects_ahead: int = 0
    bytes_scored: int = 0
    ahead_wanted: int = 0
    ahead_found: int = 0

    @property
    def ahead_hit_rate(self) -> float:
        return self.ahead_found / self.ahead_wanted if self.ahead_wanted else 0.0


@dataclass(frozen=True)
class Step:
    """One step of all requests, as the engine sees it: `rows` tokens for each of `active`.

    lengths [active]: tokens before it. recent_from, int32 [active]: the device has the pages from
    there on.
    """

    active: npt.NDArray[np.int64]
    batch: Batch
    rows: int
    starts: npt.NDArray[np.int32]
    lengths: list[int]
    recent_from: npt.NDArray[np.int32]

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
    """Chooses pages for a step's queries, one list for all rows of a request.

    ahead: the pages of a layer may have been chosen from the query of the layer before; every
    audit_every-th such choice is compared with the exact one, which is then taken.
    """

    def __init__(
        self,
        budget: BudgetLike,
        method: str,
        scale: float,
        softcap: float | None,
        audit_every: int,
    ):
        self._budget = replace(budget_of(budget), per="sequence")
        self._method, self._scale, self._softcap = method, scale, softcap
        self._audit_every = audit_every
        self._ahead: dict[int, Selection] = {}
        self.stats = DecodeStats()

    def forget(self) -> None:
        """Drop all choices that were made ahead."""
        self._ahead.clear()

    def choose(
        self, step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> Selection:
        """Append the rows and choose pages; those that the device has are left out: -1."""
        step.batch.append(layer, k, v, step.starts)
        ahead = self._ahead.pop(layer, None)
        if ahead is None:
            return self._far(step, self._select(step, layer, q))
        audited = self.stats.selects_ahead % self._audit_every == 0
        self.stats.selects_ahead += 1
        ahead = self._with_newest(step, layer, ahead)
        if not audited:
            return self._far(step, ahead)
        exact = self._select(step, layer, q)
        self._compare(self._far(step, ahead), self._far(step, exact))
        return self._far(step, exact)

    def choose_ahead(self, step: Step, layer: int, q: torch.Tensor) -> None:
        """For the layer's next choose(), from another query: the layer does not have the step's
        rows yet, so the tokens before them stand for the queries' own."""
        if min(sequence.tokens(layer) for sequence in step.batch.sequences) >= step.rows:
            self._ahead[layer] = self._select(step, layer, q)

    def attend(
        self, step: Step, layer: int, q: torch.Tensor, picked: Selection
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the chosen pages near the data; returns (out, lse)."""
        out, lse = step.batch.attend(layer, q, step.starts, picked, self._scale, self._softcap)
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        return out, lse

    def _select(self, step: Step, layer: int, q: torch.Tensor) -> Selection:
        picked = step.batch.select(layer, q, step.starts, self._budget, self._method, self._scale)
        self.stats.selects += 1
        self.stats.bytes_scored += picked.bytes_scored
        return picked

    def _far(self, step: Step, picked: Selection) -> Selection:
        near = picked.pages >= step.recent_from[:, None, None]
        return replace(picked, pages=np.where(near, np.int32(-1), picked.pages))

    def _with_newest(self, step: Step, layer: int, ahead: Selection) -> Selection:
        """Pages that the step's own rows began come on top: each row sees at least itself."""
        sequences = step.batch.sequences
        page_tokens = sequences[0]._layout.page_tokens
        tokens = np.array([sequence.tokens(layer) for sequence in sequences])[:, None, None]
        newest = tokens - 1 - page_tokens * np.arange(-(-step.rows // page_tokens))[::-1]
        began = newest // page_tokens > (tokens - step.rows - 1) // page_tokens
        began &= newest // page_tokens < step.recent_from[:, None, None]
        if not began.any():
            return ahead
        pages = np.where(began, newest // page_tokens, -1).astype(np.int32)
        shape = (*ahead.pages.shape[:2], pages.shape[2])
        return replace(ahead, pages=np.concatenate([ahead.pages, np.broadcast_to(pages, shape)], 2))

    def _compare(self, ahead: Selection, exact: Selection) -> None:
        for chosen, wanted in zip(
            ahead.pages.reshape(-1, ahead.pages.shape[2]),
            exact.pages.reshape(-1, exact.pages.shape[2]),
            strict=True,
        ):
            wanted = wanted[wanted >= 0]
            self.stats.ahead_wanted += len(wanted)
            self.stats.ahead_found += int(np.isin(wanted, chosen).sum())
