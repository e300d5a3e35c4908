"""One forward pass's state: its new tokens, its padding, and how a layer attends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One forward pass, as all of its layers see it: `tokens` new ones for each of `batch` rows.

    Row b of the batch is sequence b. Padding is on the left and never reaches the pool:
    real is int64 [rows], the places of real tokens in [batch * tokens], None when all are;
    starts int32 [batch + 1] and new [batch] say how many each sequence gets, lengths int64 [batch]
    what it has afterwards. first: the cache was empty before.
    """

    batch: int
    tokens: int
    first: bool
    starts: npt.NDArray[np.int32]
    new: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    real: Tensor | None

    def last(self, tokens: int) -> Step:
        """The same pass for a layer that is asked of its last tokens only."""
        if tokens == self.tokens:
            return self
        new = np.minimum(self.new, tokens)
        real = None
        if (new < tokens).any():
            counts = torch.from_numpy(new)[:, None]
            real = (torch.arange(tokens) >= tokens - counts).flatten().nonzero().flatten()
        starts = np.zeros_like(self.starts)
        np.cumsum(new, out=starts[1:])
        return replace(self, tokens=tokens, starts=starts, new=new, real=real)

    def rows(self, states: Tensor) -> Tensor:
        """[batch, heads, tokens, dim] as rows [rows, heads, dim]; a view wherever it can be."""
        one = self.tokens == 1
        flat = states[:, :, 0] if one else states.transpose(1, 2).flatten(0, 1)
        return flat if self.real is None else flat[self.real.to(flat.device)]

    def unrows(self, rows: Tensor) -> Tensor:
        """[rows, heads, dim] as [batch, tokens, heads, dim]; zeros where padding is."""
        if self.real is not None:
            full = rows.new_zeros((self.batch * self.tokens, *rows.shape[1:]))
            full[self.real.to(rows.device)] = rows
            rows = full
        return rows.view(self.batch, self.tokens, *rows.shape[1:])


@dataclass(frozen=True)
class LayerStep:
    """One layer's part in a step: its index, and the parameters of its attention.

    window: how many tokens a token sees, its own included; None: all. sinks: [q_heads], learned
    logits of a key without a value. reuses: the keys are another layer's.
    """

    index: int
    step: Step
    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    reuses: bool = False

    def oldest_seen(self) -> npt.NDArray[np.int64]:
        """The first token that each sequence's last one sees, int64 [batch]."""
        if self.window is None:
            return np.zeros_like(self.step.lengths)
        return np.maximum(self.step.lengths - self.window, 0)
