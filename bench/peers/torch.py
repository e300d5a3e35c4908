"""torch's exact choice of pages: bmm, the best of each page, topk, with its product both ways."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from .serving import Keys, Scanner, Wanted, serve, warmed


class Torch(Scanner):
    version = torch.__version__
    forms: ClassVar = {"keys_first": ("scan",), "queries_first": ("scan",)}

    def open_keys(self, given: Keys) -> None:
        self.given = given
        torch.set_num_threads(given.threads)
        self.keys = torch.from_numpy(given.stored_keys().view(np.int16)).view(torch.bfloat16)
        self.queries = torch.from_numpy(given.queries().view(np.int16)).view(torch.bfloat16)

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[list[float], int]:
        scan = self._keys_first if form == "keys_first" else self._queries_first
        seconds = warmed(scan)
        self.given.give(scan().numpy())
        return seconds, self.given.bytes

    def _keys_first(self) -> torch.Tensor:
        given = self.given
        scores = torch.bmm(self.keys, self.queries.transpose(1, 2))
        by_page = scores.view(given.kv_heads, given.tokens // given.page_tokens, -1)
        return by_page.amax(-1).topk(given.pages, dim=-1).indices

    def _queries_first(self) -> torch.Tensor:
        given = self.given
        scores = torch.bmm(self.queries, self.keys.transpose(1, 2))
        by_page = scores.view(given.kv_heads, given.group, -1, given.page_tokens)
        return by_page.amax((1, 3)).topk(given.pages, dim=-1).indices

    def close(self) -> None:
        del self.keys, self.queries


def main() -> int:
    return serve(Torch)
