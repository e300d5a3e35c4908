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

from cxlkv.arrays import leading

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

    They stay on the device that they are fed on, until somebody asks for them.
    """

    def __init__(self, rows: Sequence[Row] = (), tokens: int = 0) -> None:
        """rows: with so much padding before each that all have `tokens`."""
        found = np.full((2, len(rows), tokens), UNSEEN)
        for index, row in enumerate(rows):
            found[:, index, tokens - len(row.ids) :] = row
        self._buffer = torch.from_numpy(found)  # int64 [2, rows, tokens or more]
        self._tokens = tokens

    def add(self, before: int, ids: Tensor, positions: Tensor) -> None:
        """The tokens behind the first `before`, int64 [rows, tokens] each."""
        self.resize(before, len(ids))
        self._buffer = self._buffer.to(ids.device)
        self.resize(before + ids.shape[1], len(ids))
        self._buffer[0, :, before : self._tokens] = ids
        self._buffer[1, :, before : self._tokens] = positions

    def resize(self, tokens: int, rows: int) -> None:
        """Forget all from `tokens` on; where there are fewer, the rest was not seen."""
        kept, buffer = min(tokens, self._tokens), self._buffer
        if kept < tokens:
            if buffer.shape[1] != rows or buffer.shape[2] < tokens:
                self._buffer = buffer.new_full((2, rows, max(tokens, 2 * kept)), UNSEEN)
                if kept:
                    self._buffer[:, :, :kept] = buffer[:, :, :kept]
            self._buffer[:, :, kept:tokens] = UNSEEN
        self._tokens = tokens

    def pick(self, rows: Sequence[int]) -> None:
        """Row i goes on from what was row rows[i]."""
        if self._tokens:
            self._buffer = self._buffer[:, list(rows)]

    def row(self, index: int, first: int) -> Row:
        """The tokens of a row behind the first ones, which are its padding."""
        if not self._tokens:
            return Row(np.empty(0, np.int64), np.empty(0, np.int64))
        return Row(*self._buffer[:, index, first : self._tokens].cpu().numpy())
