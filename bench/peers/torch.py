"""torch's exact choice of pages: bmm, the best of each page, topk, with its product both ways."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .serving import Keys, Scanner, Wanted, serve, warmed


def keys_first(keys: Tensor, query: Tensor, page_tokens: int, count: int) -> Tensor:
    """Score keys [kv_heads, tokens, dim] by query [kv_heads, n, dim]: the best pages."""
    heads, tokens, _ = keys.shape
    scores = torch.bmm(keys, query.transpose(1, 2))
    return scores.view(heads, tokens // page_tokens, -1).amax(-1).topk(count, dim=-1).indices


def queries_first(keys: Tensor, query: Tensor, page_tokens: int, count: int) -> Tensor:
    """The same with the product turned round, which suits other shapes and numbers of threads."""
    heads, tokens, _ = keys.shape
    scores = torch.bmm(query, keys.transpose(1, 2))
    by_page = scores.view(heads, -1, tokens // page_tokens, page_tokens)
    return by_page.amax((1, 3)).topk(count, dim=-1).indices


class Torch(Scanner):
    version = torch.__version__
    forms: ClassVar = {"keys_first": ("scan",), "queries_first": ("scan",)}

    def open_keys(self, given: Keys) -> None:
        self.given = given
        torch.set_num_threads(given.threads)
        self.keys = torch.from_numpy(given.stored_keys().view(np.int16)).view(torch.bfloat16)
        self.queries = torch.from_numpy(given.queries().view(np.int16)).view(torch.bfloat16)

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[list[float], int]:
        way = keys_first if form == "keys_first" else queries_first

        def scan() -> Tensor:
            return way(self.keys, self.queries, self.given.page_tokens, self.given.pages)

        seconds = warmed(scan)
        self.given.give(scan().numpy())
        return seconds, self.given.bytes

    def close(self) -> None:
        del self.keys, self.queries


def main() -> int:
    return serve(Torch)
