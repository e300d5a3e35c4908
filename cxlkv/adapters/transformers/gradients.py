"""Outputs of attention over a pool refuse a backward pass, whose gradients would be silently wrong.

The pool has copies of keys and values, without the graph that made them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cxlkv.errors import UnsupportedError

REFUSED = (
    "a backward pass through keys and values that lie in a pool, which keeps no graph of what made "
    "them: run the model under torch.no_grad() where no gradients are wanted; to train, give it "
    "the whole text in one pass with an empty CXLCache, or use attention 'sdpa'"
)


class _Stored(torch.autograd.Function):
    """Hands on the first of its tensors; the others are what it depends on."""

    @staticmethod
    def forward(context: object, out: Tensor, *others: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> None:
        raise UnsupportedError(REFUSED)


def without_gradients(out: Tensor, *others: Tensor) -> Tensor:
    """The same output, no copy, through which no backward pass leads; while grad is enabled."""
    end = out.new_zeros((), requires_grad=True)  # where what the pool has was traced, and this not
    made = _Stored.apply(out, end, *others)  # type: ignore[no-untyped-call]
    assert isinstance(made, Tensor)
    return made
