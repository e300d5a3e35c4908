"""A model of a few layers, whose weights a test loads anew as engines do."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Parameters, and layers whose weights a kernel may take away, as in vLLM's CPU backend."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        nn.init.zeros_(self.embedding.weight)
        self.attention = nn.Module()
        self.linear = nn.Linear(32, 32, bias=False)

    def load_weights(self, weights: torch.Tensor) -> None:
        self.embedding.weight.data.copy_(weights)

    def load(self, number: float) -> None:
        """By load_weights()."""
        self.load_weights(torch.full((64, 32), number))

    def write(self, number: float) -> None:
        """Write like a trainer that notifies nobody."""
        self.embedding.weight.data.fill_(number)

    def pack(self) -> None:
        packed = self.linear.weight.detach().clone()
        self.linear.__dict__["kernel"] = lambda x: x @ packed.T
        self.linear.weight = nn.Parameter(torch.empty(0))


def model_of(package: str) -> Model:
    """Whose attention is a class of this package, as an engine's is."""
    model = Model()
    model.attention = type("Attention", (nn.Module,), {"__module__": f"{package}.layers"})()
    return model
