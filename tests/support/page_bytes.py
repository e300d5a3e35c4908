"""What a pool has of a sequence's complete pages, to the byte."""

from __future__ import annotations

import numpy as np

from cxlkv import CXLPool
from cxlkv.arrays import Bytes
from cxlkv.layout import CODE_BITS
from cxlkv.pages import checksums_at, layer_places, places_of
from cxlkv.sequence import Sequence

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def page_bytes(pool: CXLPool, sequence: Sequence) -> dict[tuple[int, str], Bytes]:
    """By layer and kind: [pages, kv_heads, bytes] of digests, keys and values, without what fills
    up their lines, and sums [pages, kv_heads, bytes] of those. No sketches: instruction sets differ
    in their last bits."""
    layout, geometry = pool.layout, pool.pages.geometry
    sizes = {
        "digest": 2
        * layout.head_dim
        * (ELEMENT_BYTES[layout.dtype] if layout.k_encoding == "none" else 1),
        "key": layout.piece_bytes(
            layout.head_dim, layout.k_encoding, 4 if layout.k_encoding in CODE_BITS else 0
        ),
        "value": layout.piece_bytes(layout.value_head_dim, layout.v_encoding),
    }
    view = pool._region_view()
    memory: Bytes = np.frombuffer(view, np.uint8)
    found: dict[tuple[int, str], Bytes] = {}
    heads = np.arange(layout.kv_heads)[:, None]
    for layer, place in enumerate(layer_places(layout, geometry)):
        given = sequence.places(layer)
        pages = given.pages[given.keys >= 0]
        at = places_of(geometry, place, pages)
        kinds = {"digest": at.digests, "key": at.keys, "value": at.values}
        for kind, offsets in kinds.items():
            if offsets is None:
                continue
            starts = offsets[:, None, None] + heads * geometry[f"{kind}_piece_bytes"]
            found[layer, kind] = memory[starts + np.arange(sizes[kind])]
        tables = checksums_at(geometry, pages) + place.row * layout.kv_heads * 16
        own = [entry for entry in range(16) if entry // 4 != 1]
        found[layer, "sums"] = memory[tables[:, None, None] + heads * 16 + np.array(own)]
    return found


def check_same_bytes(one: tuple[CXLPool, Sequence], other: tuple[CXLPool, Sequence]) -> None:
    left, right = page_bytes(*one), page_bytes(*other)
    assert left.keys() == right.keys()
    for name, found in left.items():
        np.testing.assert_array_equal(found, right[name], err_msg=f"layer, kind: {name}")
