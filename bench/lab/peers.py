"""Other projects' ways to find what matters to a query, as rows of `cxlkv lab run --methods all`.

Each has an index over the whole pages of a context, which its forks share. Tokens that a fork has
read since are looked at one by one, or by the mean of a page, as the index would.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cxlkv.demo.forms import Outside, Ranks
from cxlkv.errors import UnsupportedError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.sequence import Sequence as Tokens

BUILT = Path("build/peers")
NAMES = ("faiss", "ucm")
FLOAT_BYTES = 4
PROBED = 8
"""A query reads one in this many lists of faiss's inverted file."""
FOUND_A_PAGE = 4
"""So many tokens are asked for, for each page that is wanted."""
UNSEEN = -1e30
"""The rank of a page of which no token was found; a newer one is before an older."""
Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]


def load(name: str, layout: KVLayout) -> Callable[[Tokens], Outside]:
    """What makes an index of a context. Raises UnsupportedError where it is not installed."""
    if name == "faiss":
        module = _faiss()
        return lambda context: Faiss(module, context, layout)
    backend = _ucm()
    return lambda context: UCM(backend, context, layout)


def why_not(name: str) -> str:
    """Why a peer cannot be measured here; empty if it can."""
    try:
        _faiss() if name == "faiss" else _ucm()
    except UnsupportedError as error:
        return str(error)
    return ""


def kept_bytes(name: str, layout: KVLayout, tokens: int) -> float:
    """Beside keys and values, of a token in all layers and kv heads."""
    key = FLOAT_BYTES * layout.head_dim
    if name == "ucm":
        return layout.layers * layout.kv_heads * key / layout.page_tokens
    ids = 8
    return layout.layers * layout.kv_heads * (key * (1 + lists_of(tokens) / tokens) + ids)


def own_keys(sequence: Tokens, layer: int, first: int, layout: KVLayout) -> Floats:
    """Keys of the pages from `first` on, float32 [kv_heads, pages, page_tokens, dim]."""
    last = sequence.page_count(layer)
    keys, _ = sequence.fetch(layer, same_pages(range(first, last), layout.kv_heads))
    return np.asarray(keys).reshape(layout.kv_heads, -1, *keys.shape[-2:]).astype(np.float32)


# ---- faiss ----


class InvertedFile(Protocol):
    """What is used of faiss.IndexIVFFlat."""

    quantizer: InvertedFile
    nprobe: int
    invlists: Lists

    def train(self, x: Floats) -> None: ...
    def add(self, x: Floats) -> None: ...
    def search(self, x: Floats, k: int) -> tuple[Floats, Whole]: ...
    def search_preassigned(
        self,
        x: Floats,
        k: int,
        Iq: Whole,
        Dq: Floats,
    ) -> tuple[Floats, Whole]: ...


class Lists(Protocol):
    def list_size(self, number: int) -> int: ...


def _faiss() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its swig bindings
            module = importlib.import_module("faiss")
    except ImportError as error:
        raise UnsupportedError(f"faiss: {error}: pip install faiss-cpu") from error
    return module


def lists_of(tokens: int) -> int:
    """Number of lists by faiss's own guide: four times the square root."""
    return max(1, round(4 * math.sqrt(tokens)))


class Faiss:
    """IndexIVFFlat, inner product, for each layer and kv head: tokens of the lists whose centroids
    are nearest to the query. A page has its best token's score for any query head."""

    def __init__(self, module: ModuleType, context: Tokens, layout: KVLayout) -> None:
        self.module = module
        self.context = context
        self.layout = layout
        self.whole = len(context) // layout.page_tokens
        self.indexes: dict[int, list[tuple[InvertedFile, Whole]]] = {}
        module.omp_set_num_threads(1)

    def index(self, keys: Floats) -> tuple[InvertedFile, Whole]:
        """Index of keys [tokens, dim], and the length of its lists."""
        count, dim = lists_of(len(keys)), keys.shape[1]
        metric = self.module.METRIC_INNER_PRODUCT
        made = self.module.IndexIVFFlat(self.module.IndexFlatIP(dim), dim, count, metric)
        made.cp.min_points_per_centroid = 1  # else it warns of every context
        made.train(keys)
        made.add(keys)
        made.nprobe = -(-count // PROBED)
        sizes = [made.invlists.list_size(number) for number in range(count)]
        return made, np.array(sizes, np.int64)

    def of_layer(self, layer: int) -> list[tuple[InvertedFile, Whole]]:
        if layer not in self.indexes:
            keys, _ = self.context.fetch(layer)
            heads = np.asarray(keys)[:, : self.whole].astype(np.float32)
            self.indexes[layer] = [self.index(one.reshape(-1, one.shape[-1])) for one in heads]
        return self.indexes[layer]

    def rank(
        self, layer: int, sequences: Sequence[Tokens], queries: Tensor, wanted: int
    ) -> tuple[Ranks, int]:
        heads, page_tokens = self.layout.kv_heads, self.layout.page_tokens
        asked = queries.float().numpy().reshape(len(sequences), heads, -1, queries.shape[-1])
        pages = max(one.page_count(layer) for one in sequences)
        ranks = np.broadcast_to(UNSEEN + 1e20 * np.arange(pages), (len(sequences), heads, pages))
        ranks, read = ranks.copy(), 0
        most = min(self.whole * page_tokens, FOUND_A_PAGE * wanted)
        for head, (index, sizes) in enumerate(self.of_layer(layer)):
            rows = np.ascontiguousarray(asked[:, head].reshape(-1, queries.shape[-1]))
            near, lists = index.quantizer.search(rows, index.nprobe)
            scores, tokens = index.search_preassigned(rows, most, lists, near)
            at = np.repeat(np.arange(len(sequences)), asked.shape[2])[:, None]
            is_found = tokens >= 0
            at = np.broadcast_to(at, tokens.shape)[is_found]
            np.maximum.at(ranks[:, head], (at, tokens[is_found] // page_tokens), scores[is_found])
            for probed in lists.reshape(len(sequences), -1):
                read += int(sizes[np.unique(probed)].sum()) + len(sizes)
        read *= FLOAT_BYTES * queries.shape[-1]
        for row, sequence in enumerate(sequences):
            own = own_keys(sequence, layer, self.whole, self.layout)
            scores = np.einsum("hptd,hgd->hpgt", own, asked[row])
            ranks[row, :, self.whole : self.whole + own.shape[1]] = scores.max((2, 3))
            read += own[..., 0].size * key_bytes(self.layout)
        return ranks, read

    def release(self) -> None:
        self.indexes.clear()


def key_bytes(layout: KVLayout) -> int:
    """Bytes of one key in the pool."""
    return layout.token_bytes // (layout.layers * layout.kv_heads * 2)


# ---- UCM ----


class Backend(Protocol):
    """What is used of UCM's RetrievalWorkerBackend."""

    def submit(self, query: Floats, topk: int, indexes: npt.NDArray[np.int32]) -> int: ...
    def wait(self, request: int) -> None: ...
    def get_result(self, request: int) -> Mapping[str, Floats]: ...


def _ucm() -> ModuleType:
    path = BUILT / "ucm" / "retrieval_backend.so"
    spec = importlib.util.spec_from_file_location("retrieval_backend", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise UnsupportedError(f"ucm: no {path}: make build/peers/ucm UCM=CHECKOUT")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedError(f"ucm: {error}") from error
    return module


class UCM:
    """The retrieval of UCM's ESA, by its own C++: the mean key of each block, of all kv heads one
    after the other, times the mean of the query heads of each kv head. A list for the layer, which
    all kv heads share; asked anew in each step."""

    def __init__(self, module: ModuleType, context: Tokens, layout: KVLayout) -> None:
        self.context = context
        self.layout = layout
        self.whole = len(context) // layout.page_tokens
        self.more = 4096
        """Places for means of pages that were read since, of all rows of a call."""
        width = layout.kv_heads * layout.head_dim
        self.means = np.zeros((layout.layers * self.whole + self.more, width), np.float32)
        cores = sorted(os.sched_getaffinity(0))
        core = cores[os.getpid() % len(cores)]  # of several processes not all the same
        self.backend: Backend | None = module.RetrievalWorkerBackend(self.means, {0: [core]})
        self.made: set[int] = set()

    def means_of(self, keys: Floats) -> Floats:
        """Means of keys [kv_heads, pages, page_tokens, dim]: [pages, kv_heads * dim]."""
        found: Floats = keys.mean(2).transpose(1, 0, 2).reshape(keys.shape[1], -1)
        return found

    def summarise(self, layer: int) -> None:
        if layer in self.made:
            return
        keys, _ = self.context.fetch(layer)
        found = self.means_of(np.asarray(keys)[:, : self.whole].astype(np.float32))
        self.means[layer * self.whole : (layer + 1) * self.whole] = found
        self.made.add(layer)

    def rank(
        self, layer: int, sequences: Sequence[Tokens], queries: Tensor, wanted: int
    ) -> tuple[Ranks, int]:
        assert self.backend is not None
        self.summarise(layer)
        heads, rows = self.layout.kv_heads, len(sequences)
        asked = queries.float().reshape(rows, heads, -1, queries.shape[-1]).mean(2).numpy()
        own = [seq.tokens(layer) // self.layout.page_tokens - self.whole for seq in sequences]
        first, each = self.layout.layers * self.whole, max(*own, 0)
        places = np.full((rows, self.whole + each), -1, np.int32)
        places[:, : self.whole] = layer * self.whole + np.arange(self.whole)
        for row, (sequence, count) in enumerate(zip(sequences, own, strict=True)):
            if count:
                at = first + row * each
                keys = own_keys(sequence, layer, self.whole, self.layout)[:, :count]
                self.means[at : at + count] = self.means_of(keys)
                places[row, self.whole : self.whole + count] = at + np.arange(count)
        most = min(wanted, self.whole + max(min(own), 0))  # it gives all rows as many as the first
        request = self.backend.submit(asked.reshape(rows, -1), most, places)
        self.backend.wait(request)
        result = self.backend.get_result(request)
        pages = max(seq.page_count(layer) for seq in sequences)
        ranks = np.broadcast_to(UNSEEN + 1e20 * np.arange(pages), (rows, heads, pages)).copy()
        for row, (found, scores) in enumerate(
            zip(result["indices"].astype(np.int64), result["scores"], strict=True)
        ):
            since = found >= first
            at = np.where(since, found - first - row * each + self.whole, found % self.whole)
            ranks[row][:, at] = scores
        read = int((places >= 0).sum()) * self.means.shape[1] * FLOAT_BYTES
        return ranks, read

    def release(self) -> None:
        self.backend = None  # ends its thread
