"""What transformers calls for a layer, and which of a batch's tokens are real."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.errors import BadArgumentError


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
