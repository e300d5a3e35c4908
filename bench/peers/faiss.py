"""faiss: a scalar quantizer to bf16 for each kv head, which keeps the keys as they are."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .serving import Keys, Scanner, Wanted, serve, warmed

Scores = npt.NDArray[np.float32]
Found = list[tuple[Scores, npt.NDArray[np.int64]]]


def widened(values: npt.NDArray[np.uint16]) -> Scores:
    """bf16 as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def best_pages(
    scores: Scores, tokens: npt.NDArray[np.int64], page_tokens: int
) -> npt.NDArray[np.int32]:
    """The pages of the best tokens of one head for any of its queries, the best first."""
    order = np.argsort(-scores, axis=None, kind="stable")
    every = (tokens.ravel()[order] // page_tokens).astype(np.int32)
    _, first = np.unique(every, return_index=True)
    return every[np.sort(first)]


class Faiss(Scanner):
    """It finds tokens: the best `pages` of each query. by_query: it shares the queries of a search
    out over its threads; by_head: heads go to threads of ours."""

    forms: ClassVar = {"by_query": ("scan",), "by_head": ("scan",)}

    def __init__(self) -> None:
        self.module = importlib.import_module("faiss")
        self.version = str(self.module.__version__)

    def open_keys(self, given: Keys) -> None:
        self.given, module = given, self.module
        self.queries = widened(given.queries())
        self.indexes = []
        for head in given.stored_keys():
            kind = module.ScalarQuantizer.QT_bf16
            index = module.IndexScalarQuantizer(given.head_dim, kind, module.METRIC_INNER_PRODUCT)
            index.add(widened(head))
            self.indexes.append(index)
        self.team = ThreadPoolExecutor(
            given.threads, initializer=module.omp_set_num_threads, initargs=(1,)
        )

    def run(self, case: str, form: str, wanted: Wanted) -> tuple[list[float], int]:
        heads = range(self.given.kv_heads)

        def search(head: int) -> tuple[Scores, npt.NDArray[np.int64]]:
            scores, tokens = self.indexes[head].search(self.queries[head], self.given.pages)
            return scores, tokens

        def scan() -> Found:
            if form == "by_head":
                return list(self.team.map(search, heads))
            return [search(head) for head in heads]

        self.module.omp_set_num_threads(1 if form == "by_head" else self.given.threads)
        seconds = warmed(scan)
        self.given.give(self._pages(scan()))
        return seconds, self.given.bytes

    def _pages(self, found: Found) -> npt.NDArray[np.int32]:
        """Of each head the pages of the best tokens for any of its queries; -1: too few of them."""
        pages = np.full((self.given.kv_heads, self.given.pages), -1, np.int32)
        for row, (scores, tokens) in zip(pages, found, strict=True):
            best = best_pages(scores, tokens, self.given.page_tokens)[: len(row)]
            row[: len(best)] = best
        return pages

    def close(self) -> None:
        self.team.shutdown()
        self.indexes.clear()


def main() -> int:
    return serve(Faiss)
