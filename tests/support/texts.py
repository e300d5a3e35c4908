"""Texts: sequences of which each token's keys and values follow from its id, so that whoever gets
one, by handle or by match, can tell whether it is right."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from cxlkv import CXLPool, KVLayout, Sequence
from cxlkv.arrays import Floats

HEADS, DIM = 2, 8
SMALL = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=4, dtype="float32")
"""Layout of the fixture `pool`, and of most pools that a test makes itself."""
Ids = Sequences[int]


def numbers(ids: Ids, layer: int, kind: int) -> Floats:
    """[tokens, HEADS, DIM]: halves from -4.5 to 3.5, never 0; K is kind 0, V kind 1."""
    place = np.arange(HEADS * DIM, dtype=np.uint64) + np.uint64(1000 * layer + 100 * kind)
    word = np.array(ids, np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    word = (word + place * np.uint64(0x94D049BB133111EB)) >> np.uint64(7)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    mixed = ((word >> np.uint64(40)) % np.uint64(9)).astype(np.float32) - np.float32(4.5)
    return mixed.reshape(-1, HEADS, DIM)


def append(sequence: Sequence, ids: Ids) -> None:
    for layer in range(sequence._layout.layers):
        sequence.append(layer, numbers(ids, layer, 0), numbers(ids, layer, 1))


def grown(pool: CXLPool, ids: Ids) -> Sequence:
    sequence = pool.sequence()
    append(sequence, ids)
    return sequence


def publish(pool: CXLPool, ids: Ids, *, tail: bool = False) -> int:
    """Publish the text and release the sequence; returns how many pages are new."""
    sequence = grown(pool, ids)
    pages = pool.publish_prefix(sequence, ids, tail=tail)
    sequence.release()
    return pages


def rows(sequence: Sequence, layer: int, kind: int) -> Floats:
    """What a layer's keys or values are, [tokens, heads, dim]."""
    pages = np.asarray(sequence.fetch(layer)[kind])
    tokens = pages.transpose(1, 2, 0, 3).reshape(-1, pages.shape[0], pages.shape[3])
    return tokens[: sequence.tokens(layer)]


def verify(sequence: Sequence, ids: Ids) -> None:
    """That it holds these tokens and no others."""
    assert len(sequence) == len(ids), f"{len(sequence)} tokens, wanted {ids}"
    for layer in range(sequence._layout.layers):
        for kind in (0, 1):
            right = np.array_equal(rows(sequence, layer, kind), numbers(ids, layer, kind))
            assert right, f"layer {layer}, kind {kind} of {ids}: pages {sequence.pages}"
