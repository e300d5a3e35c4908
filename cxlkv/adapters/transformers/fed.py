"""Fed remembers which tokens a model fed to a cache's rows, and at which positions.

Only what was seen so may be published under the keys of a text: a pass may feed other ids than its
caller thinks, embeddings, or the same tokens at other positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UNSEEN = -1
"""Id or position of a token that was not seen."""

Ints = npt.NDArray[np.int64]


class Row(NamedTuple):
    """A text as it was fed, int64 [tokens] each."""

    ids: Ints
    positions: Ints

    @property
    def placed(self) -> int:
        """How many tokens, from the first on, stand at their positions."""
        return leading(self.positions == np.arange(len(self.positions)))

    def agreed(self, text: Sequence[int]) -> int:
        """How many of these have the ids of this text, too."""
        count = min(self.placed, len(text))
        return leading(self.ids[:count] == np.asarray(text[:count], np.int64))


class Fed:
    """Ids and positions of a cache's rows, padding included.

    Parts stay on the device that they were fed on, until somebody asks for them.
    """

    def __init__(self, rows: Sequence[Row] = (), tokens: int = 0) -> None:
        """rows: with so much padding before each that all have `tokens`."""
        found = np.full((2, len(rows), tokens), UNSEEN)
        for index, row in enumerate(rows):
            found[:, index, tokens - len(row.ids) :] = row
        self._parts = [torch.from_numpy(found)] if tokens else []  # int64 [2, rows, tokens]

    def add(self, before: int, ids: Tensor, positions: Tensor) -> None:
        """The tokens behind the first `before`, int64 [rows, tokens] each."""
        self.resize(before, len(ids))
        self._parts.append(torch.stack([ids, positions.to(ids.device).expand(ids.shape)]))

    def resize(self, tokens: int, rows: int) -> None:
        """Forget all from `tokens` on; where there are fewer, the rest was not seen."""
        lacking = tokens - sum(part.shape[2] for part in self._parts)
        if lacking > 0:
            self._parts.append(torch.full((2, rows, lacking), UNSEEN))
        elif lacking:
            kept = self._joined()[:, :, :tokens]
            self._parts = [kept] if tokens else []

    def pick(self, rows: Sequence[int]) -> None:
        """Row i goes on from what was row rows[i]."""
        if self._parts:
            self._parts = [self._joined()[:, list(rows)]]

    def row(self, index: int, first: int) -> Row:
        """Of the tokens behind the first ones of a row, which are its padding."""
        if not self._parts:
            return Row(np.empty(0, np.int64), np.empty(0, np.int64))
        return Row(*self._joined()[:, index, first:].cpu().numpy())

    def _joined(self) -> Tensor:
        if len(self._parts) > 1:
            home = self._parts[-1].device
            self._parts = [torch.cat([part.to(home) for part in self._parts], dim=2)]
        return self._parts[0]


def leading(right: npt.NDArray[np.bool_]) -> int:
    """How many are, from the first one on."""
    return len(right) if right.all() else int(np.argmin(right))
