"""Audits of hits: of every n-th one an engine computes the last block again, and what it gets is
compared with the block that the hit had.

No checksum finds a page that is whole and was made otherwise than its key says: by another model,
adapter or text. Where one is found, nothing of its namespace is to be believed. A page under a key
of its own says so to every engine of the pool, and stays longer than what it is about.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cxlkv.adapters.common.keys import namespace
from cxlkv.arrays import Names
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.pages import NO_PAGE, PRIORITY_MAX
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Sequence
from cxlkv.tiers.cold_store import ColdStore

if TYPE_CHECKING:
    from torch import Tensor

NOISE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.08}
"""What an engine computes twice, in other steps or batches, differs by less, as a share of a
token's length: three times what SmolLM2 shows in its worst layer (docs/engines/vllm.md)."""
ROUNDING = {"none": 0.0, "int8": 0.03, "progressive": 0.03, "fp8_e4m3": 0.06, "int4": 0.3}
"""And by so much more where both are encoded."""

WITHDRAWN = (
    "cxlkv: an audit found a page that was not made as its key says: nothing that was stored in "
    "this namespace is found any more, by any engine of the pool, and this one shares no pages "
    "until it starts anew. Something that makes keys and values is not in the key: report what "
    "you run. For pages of your own, start engines with another salt"
)


class Audits:
    """Chooses hits. every: one of so many; 0: none."""

    def __init__(self, every: int = 0) -> None:
        self._every, self._hits = every, 0

    def is_due(self) -> bool:
        """Asked once for each hit."""
        self._hits += 1
        return self._every > 0 and self._hits % self._every == 0


def difference(
    pool: CXLPool, found: Sequence, own: Sequence, first: int, place: int, count: int
) -> str:
    """What differs between pages [first, first + count) of what was found and pages from `place` on
    of what was computed for the same tokens; empty where it is no more than noise.

    By the median of a layer's tokens, so that one token of a mixture of experts that takes another
    expert is no difference. Raises CXLKVError for pages that cannot be read.
    """
    layout = pool.layout
    for layer in range(layout.layers):
        try:
            theirs = _rows(pool, found, layer, first, count)
            mine = _rows(pool, own, layer, place, count)
        except BadArgumentError:  # a window has given them back
            continue
        for name, a, b in zip(("keys", "values"), theirs, mine, strict=True):
            off = float(_off(a, b).median())
            if off > _bound(layout, name):
                return f"{name} of layer {layer} are off by {off:.2g} of their length"
    return ""


def _off(a: Tensor, b: Tensor) -> Tensor:
    """Of each token, the difference as a share of its length; of numbers that are none in both,
    as of an overflow, nothing is known."""
    finite, other = b.isfinite(), a.isfinite()
    a, b = a.where(other, 0), b.where(finite, 0)
    off: Tensor = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-9)
    return off.where((finite == other).all(1), float("inf"))


def _rows(
    pool: CXLPool, sequence: Sequence, layer: int, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of each token, float32 [tokens, heads * dim]."""
    import torch  # numpy has no bfloat16; a scheduler that audits nothing does without

    layout = pool.layout
    shape, dtype = (1, layout.kv_heads, count, layout.page_tokens), getattr(torch, layout.dtype)
    out = tuple(
        torch.zeros(*shape, n, dtype=dtype) for n in (layout.head_dim, layout.value_head_dim)
    )
    pages = same_pages(range(first, first + count), layout.kv_heads)
    pool.batch([sequence]).fetch(layer, pages, out=(out[0], out[1]))
    rows = [of[0].permute(1, 2, 0, 3).flatten(2).flatten(0, 1).float() for of in out]
    return rows[0], rows[1]


def _bound(layout: KVLayout, what: str) -> float:
    encoding = layout.k_encoding if what == "keys" else layout.v_encoding
    return NOISE[layout.dtype] + ROUNDING[encoding]


# ---- namespaces that are withdrawn ----


@lru_cache(maxsize=64)
def _mark(space: bytes, page_tokens: int) -> PageKeys:
    packed = np.frombuffer(namespace({"withdrawn": space.hex()}), np.uint8).reshape(1, -1)
    return PageKeys(packed, page_tokens)


def is_withdrawn(pool: CXLPool, space: bytes, cold: ColdStore | None = None) -> bool:
    """Whether an engine has withdrawn it; cold: a store below the pool, to look there, too. Raises
    CXLKVError."""
    names = _names(pool, space)
    if pool.records.here(names).any():
        return True
    return cold is not None and bool(cold.contains(names).any())


def withdraw(pool: CXLPool, space: bytes, cold: ColdStore | None = None) -> None:
    """Says that nobody is to find what is stored in this namespace. Raises CXLKVError."""
    import torch

    layout, mark = pool.layout, _mark(space, pool.layout.page_tokens)
    dtype = getattr(torch, layout.dtype)
    keys, values = (
        torch.zeros(layout.page_tokens, layout.kv_heads, dim, dtype=dtype)
        for dim in (layout.head_dim, layout.value_head_dim)
    )
    sequence = pool.sequence()
    try:
        for layer in range(layout.layers):
            sequence.append(layer, keys, values if layout.values == "own" else None)
        pool.publish(sequence, mark, layout.page_tokens)
        pool.admin.prioritize(mark, PRIORITY_MAX)
    finally:
        sequence.release()
    if cold is not None:
        names, records = _names(pool, space), pool.records
        pages, generations = records.find(names)
        there = pages != NO_PAGE
        found = np.zeros((int(there.sum()), records.shape[0]), np.uint8)
        right = records.read(pages[there], generations[there], found) == 0
        cold.store(names[there][right], found[right])


def _names(pool: CXLPool, space: bytes) -> Names:
    """Of the mark's pages."""
    packed = _mark(space, pool.layout.page_tokens).packed
    return pool.records.names(packed.tobytes(), 1).reshape(-1, packed.shape[1])
