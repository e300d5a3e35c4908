"""What the tests of the transformers adapter share: prompts for small random models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

VOCABULARY_SIZE = 64


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [rows, the longest], padded on the left."""
    random = torch.Generator().manual_seed(3)
    longest = max(lengths)
    ids = torch.randint(1, VOCABULARY_SIZE, (len(lengths), longest), generator=random)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


class Generates(Protocol):
    """What transformers' own annotations do not say of generate(): it takes a model."""

    def generate(self, inputs: Tensor, **settings: object) -> Tensor: ...


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)
