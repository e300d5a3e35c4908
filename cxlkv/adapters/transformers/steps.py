"""One forward pass's state: its new tokens, its padding, and how a layer attends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.errors import BadArgumentError


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


@dataclass(frozen=True)
class Call:
    """transformers' call of the attention function for one layer.

    query [batch, q_heads, tokens, dim], key and value [batch, kv_heads, tokens, dim]: the new
    tokens only; in MLA these are expanded. mask: bool [batch, tokens so far], False for padding.
    positions: of the new tokens in their texts, where the model tells them, [1 or batch, tokens].
    seen: of a model that chooses itself, what each new token sees, bool [batch, 1, tokens, tokens
    so far]; key and value are then of all of these.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    positions: Tensor | None
    seen: Tensor | None = None


def real_tokens(
    mask: Tensor | None,
    batch: int,
    before: int,
    tokens: int,
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Tensor | None]:
    """How many of the `tokens` new ones are real, int64 [batch], and their places (see Step.real).

    mask: bool [batch, before + tokens] or None. Raises BadArgumentError for holes, for padding on
    the right, and for a mask that hides or shows other tokens than `lengths` [batch] has.
    """
    all_new = np.full(batch, tokens, np.int64)
    if mask is None:
        if (lengths != before).any():
            raise BadArgumentError("the batch is padded: pass its attention_mask in every step")
        return all_new, None
    if mask.ndim != 2 or tuple(mask.shape) != (batch, before + tokens):
        raise BadArgumentError(
            f"the attention mask has shape {tuple(mask.shape)}, wanted [{batch}, "
            f"{before + tokens}]: a mask of 4 dimensions, or of other tokens, is not supported"
        )
    mask = mask.to("cpu", torch.bool)
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise BadArgumentError(
            "the attention mask has padding on the right, or holes: pad on the left "
            "(tokenizer.padding_side = 'left'), so that a row's real tokens stand in one run"
        )
    counts: npt.NDArray[np.int64] = mask.sum(1).numpy()
    new = np.minimum(counts, tokens)
    if (counts - new != lengths).any():
        raise BadArgumentError(
            f"the attention mask shows {(counts - new).tolist()} cached tokens, the cache holds "
            f"{lengths.tolist()}: a mask cannot change for tokens that are cached"
        )
    if (new == tokens).all():
        return all_new, None
    return new, mask[:, before:].flatten().nonzero().flatten()
