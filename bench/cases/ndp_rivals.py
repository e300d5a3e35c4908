"""What near-data selection is measured against: torch's and faiss's fastest forms."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.arrays import Floats, PageIndices, Tokens

TOP = 256


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


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of query [1, kv_heads, group, dim]: the group is the length of the query."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, keys[None], values[None])


class Index(Protocol):
    """What we use of an index of faiss."""

    def search(self, x: Floats, k: int) -> tuple[Floats, Tokens]: ...


@dataclass(frozen=True)
class Faiss:
    """A scalar quantizer to bf16 for each kv head, which keeps the keys as they are."""

    module: ModuleType
    indexes: list[Index]

    @classmethod
    def of(cls, keys: Tensor) -> Faiss | None:
        """None where faiss is not installed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of its swig bindings
                module = importlib.import_module("faiss")
        except ModuleNotFoundError:
            return None
        indexes: list[Index] = []
        for head in keys:
            kind = module.ScalarQuantizer.QT_bf16
            index = module.IndexScalarQuantizer(head.shape[1], kind, module.METRIC_INNER_PRODUCT)
            index.add(head.float().numpy())
            indexes.append(index)
        return cls(module, indexes)

    def search(self, head: int, query: Floats) -> tuple[Floats, Tokens]:
        """The best tokens of one head for each query, and their scores: [n, TOP] each."""
        return self.indexes[head].search(query, TOP)

    def pages(self, query: Tensor, page_tokens: int) -> list[PageIndices]:
        """For each head the pages of the best tokens for any of its queries, the best first."""
        found = []
        for head, asked in enumerate(query.float().numpy()):
            scores, tokens = self.search(head, asked)
            order = np.argsort(-scores, axis=None, kind="stable")
            every = (tokens.ravel()[order] // page_tokens).astype(np.int32)
            _, first = np.unique(every, return_index=True)
            found.append(every[np.sort(first)])
        return found


@contextmanager
def faiss_forms(
    faiss: Faiss | None, query: Tensor, threads: int
) -> Iterator[dict[str, Callable[[], object]]]:
    """faiss shares the queries of one search out over its threads; or heads go to threads of ours,
    which it leaves to run, as it does not hold the interpreter's lock. Empty without faiss."""
    if faiss is None:
        yield {}
        return
    asked = [rows.contiguous().numpy() for rows in query.float()]
    heads = range(len(asked))
    module = faiss.module

    def by_query() -> None:
        module.omp_set_num_threads(threads)
        for head in heads:
            faiss.search(head, asked[head])

    with ThreadPoolExecutor(threads, initializer=module.omp_set_num_threads, initargs=(1,)) as team:

        def by_head() -> None:
            module.omp_set_num_threads(1)
            list(team.map(lambda head: faiss.search(head, asked[head]), heads))

        yield {"faiss_by_query": by_query, "faiss_by_head": by_head}


def agreement(pages: PageIndices, others: Iterable[npt.ArrayLike]) -> float:
    """The share of their best pages that we chose, over all heads; where they give more than we
    chose, the best of them."""
    shares = [
        np.isin(np.asarray(theirs)[: len(ours)], ours).mean()
        for ours, theirs in zip(pages, others, strict=True)
    ]
    return float(np.mean(shares))
