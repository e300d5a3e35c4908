"""MLA attends over the stored latents, without expanding them to keys and values.

A key of head h is W_UK[h] c for the latent c, so that q.k = (W_UK[h]^T q).c, and the output is
W_UV[h] applied to the weighted sum of latents: the weight absorption of DeepSeek-V2 (arXiv
2405.04434, 2.1.2). What is left is attention with one kv head, whose values are the first channels
of its keys. The rotary channels go through as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cxlkv.errors import UnsupportedError


@dataclass(frozen=True)
class Absorbed:
    """W_UK [heads, nope_dim, rank] and W_UV [heads, value_dim, rank] of one layer; views."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: torch.nn.Module, rank: int) -> Absorbed:
        """Taken from a layer's kv_b_proj; raises UnsupportedError where that is no plain matrix."""
        projection = getattr(module, "kv_b_proj", None)
        # An adapter or a quantised layer computes something else than its weight says.
        if type(projection) is not torch.nn.Linear or projection.bias is not None:
            raise UnsupportedError(
                f"{type(module).__name__}.kv_b_proj is a {type(projection).__name__}; a plain "
                "Linear without bias is wanted: merge adapters, leave this matrix unquantised"
            )
        nope_dim = int(module.qk_nope_head_dim)
        value_dim = int(module.v_head_dim)
        weight = projection.weight.view(-1, nope_dim + value_dim, rank)
        return cls(weight[:, :nope_dim], weight[:, nope_dim:])

    def queries(self, query: Tensor) -> Tensor:
        """[batch, heads, tokens, nope + rope] as queries of latents, [.., rank + rope]."""
        nope_dim = self.keys.shape[1]
        latent = torch.einsum("bhtn,hnr->bhtr", query[..., :nope_dim], self.keys)
        return torch.cat([latent, query[..., nope_dim:]], dim=3)

    def outputs(self, latents: Tensor) -> Tensor:
        """Sums of latents [batch, tokens, heads, rank] as outputs [.., value_dim]."""
        return torch.einsum("bthr,hvr->bthv", latents, self.values)
