"""Audits of hits: an engine computes the last block of every n-th hit again, and compares what it
gets with the block in the pool.

No checksum finds a page that is whole but was made by another model, adapter or text than its key
says. Where an audit finds one, the other pages of its namespace may be wrong, too. A page under a
key of its own marks the namespace as withdrawn, for every engine of the pool.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cxlkv.adapters.common.keys import namespace
from cxlkv.arrays import Floats, Names
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.numbers import is_whole
from cxlkv.pages import NO_PAGE, PRIORITY_MAX
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Sequence
from cxlkv.tiers.cold_store import ColdStore

NOISE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.08}
"""The most by which keys or values may differ when an engine computes them twice, as a share of a
token's length: three times what SmolLM2 shows in its worst layer (docs/decisions/0041)."""
STATE_NOISE = 0.08
"""The same of a state, in every dtype: models that bound a step's time in their scans only show
0.004 in float32, others 0.02 in bfloat16 (docs/decisions/0041)."""
ROUNDING = {"none": 0.0, "int8": 0.03, "progressive": 0.03, "fp8_e4m3": 0.06, "int4": 0.3}
"""What an encoding adds to that, as both sides are encoded."""

WITHDRAWN = (
    "cxlkv: an audit found a page that was not made as its key says. No engine of the pool finds "
    "pages of this namespace any more, and this engine shares no pages until it is started again. "
    "The key leaves out something that changes keys and values: please report what you run. To "
    "share pages again, start the engines with another salt"
)


class Audits:
    """Chooses hits. every: one of so many; 0: none."""

    def __init__(self, every: int = 0) -> None:
        if not is_whole(every):
            raise BadArgumentError(f"audit_hits={every!r:.40}: a whole number, 0 or more")
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
            off = offset(a, b)
            if off > _bound(layout.of_layer(layer), name):
                return f"{name} of layer {layer} are off by {off:.2g} of their length"
    return ""


def offset(a: Floats, b: Floats) -> float:
    """The difference of the median row [rows, ...] as a share of its length. Numbers that have
    overflowed in both are left out."""
    finite, other = np.isfinite(b), np.isfinite(a)
    a, b = np.where(other, a, 0), np.where(finite, b, 0)
    lengths = np.maximum(np.linalg.norm(b, axis=1), 1e-9)
    off: Floats = np.linalg.norm(a - b, axis=1) / lengths
    return float(np.median(np.where((finite == other).all(1), off, np.float32(np.inf))))


def _rows(
    pool: CXLPool, sequence: Sequence, layer: int, first: int, count: int
) -> tuple[Floats, Floats]:
    """Keys and values of each token, [tokens, heads * dim]."""
    heads = pool.layout.of_layer(layer).kv_heads
    pages = same_pages(range(first, first + count), heads)
    found = pool.batch([sequence]).fetch(layer, pages)  # [1, heads, pages, tokens, dim] each
    tokens = count * pool.layout.page_tokens
    k, v = (np.moveaxis(np.asarray(of, np.float32)[0], 0, 2).reshape(tokens, -1) for of in found)
    return k, v


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
    """Marks a namespace: engines that see the mark find nothing that is stored in it. Raises
    CXLKVError."""
    layout, mark = pool.layout, _mark(space, pool.layout.page_tokens)
    sequence = pool.sequence()
    try:
        for layer in range(layout.layers):
            own = layout.of_layer(layer)
            keys, values = (
                np.zeros((layout.page_tokens, own.kv_heads, dim), own.dtype)
                for dim in (own.head_dim, own.value_head_dim)
            )
            sequence.append(layer, keys, values if own.values == "own" else None)
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
    """Names of the mark's pages."""
    packed = _mark(space, pool.layout.page_tokens).packed
    return pool.records.names(packed.tobytes(), 1).reshape(-1, packed.shape[1])
