"""Puts kv heads of other ranks' records side by side, or takes some of them out.

Each rank of tensor parallelism has a pool of its share of the kv heads, one after the other. All
that a record has of a head is its own: pieces, and their CRCs, which stay what they were when the
head was written. So Records.write() verifies what was joined here as it verifies what came whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cxlkv.arrays import Bytes, Mask, Names, RecordBytes
from cxlkv.errors import BadArgumentError, GeometryError
from cxlkv.layout import KVLayout
from cxlkv.pages import PACKED_HEADER, crc32c, names_of
from cxlkv.transport.far import CRC_OFFSET, HEADER_BYTES, KINDS, Shape

ENTRY_BYTES = 4 * len(KINDS)  # of a head, in a record's table of CRCs


@dataclass(frozen=True)
class Heads:
    """So many kv heads of a far record, from `first` on, are those from `at` on of one here."""

    first: int
    count: int
    at: int


def heads_between(far: KVLayout, here: KVLayout) -> Heads:
    """Which heads of a far rank's are this rank's; count 0: none."""
    theirs, ours = far.shard[0] * far.kv_heads, here.shard[0] * here.kv_heads
    first = max(theirs, ours)
    end = min(theirs + far.kv_heads, ours + here.kv_heads)
    return Heads(first - theirs, max(0, end - first), first - ours)


def layout_among(layout: KVLayout, rank: int, ranks: int) -> KVLayout:
    """The layout that this one would be for another number of tensor-parallel ranks.

    Raises BadArgumentError where the heads cannot be dealt out, or the layers are dealt out, too.
    """
    _, size, _, stages = layout.shard
    heads = layout.kv_heads * size
    if heads % ranks or stages > 1:
        why = "layers are dealt out, too" if stages > 1 else f"{heads} kv heads"
        raise BadArgumentError(f"pages of {size} ranks cannot be had of {ranks}: {why}")
    groups = [replace(group, kv_heads=heads // ranks) for group in layout.groups]
    return KVLayout.of(
        groups,
        layout.order,
        page_tokens=layout.page_tokens,
        shard=(rank, ranks, 0, 1),
        model_id=layout.model_id,
        states=layout.states,
    )


def check_heads(here: Shape, far: Shape, heads: Heads) -> None:
    """Raises GeometryError where a far pool does not have these heads of pages like those here."""
    like = ("piece_bytes", "part_layers", "page_tokens")
    if any(getattr(far, name) != getattr(here, name) for name in like):
        raise GeometryError("the far pool's pieces are of another size: it stores something else")
    end = heads.first + heads.count
    if end > far.kv_heads:
        raise GeometryError(f"the far pool has {far.kv_heads} heads, {end} were expected")


def put_heads(
    out: RecordBytes, here: Shape, records: RecordBytes, far: Shape, heads: Heads
) -> None:
    """Copies them, with their CRCs, from far records into records here; after check_heads()."""
    there = slice(heads.first, heads.first + heads.count)
    for mine, theirs in zip(_by_head(out, here), _by_head(records, far), strict=True):
        mine[:, :, heads.at : heads.at + heads.count] = theirs[:, :, there]


def _by_head(records: RecordBytes, shape: Shape) -> Iterator[Bytes]:
    """Views [record, layer, head, bytes] of the table of CRCs, and of each kind of piece."""
    count, layers, heads = len(records), max(shape.part_layers), shape.kv_heads
    table = records[:, HEADER_BYTES : HEADER_BYTES + layers * heads * ENTRY_BYTES]
    yield table.reshape(count, layers, heads, ENTRY_BYTES)
    end = shape.payload_offset + layers * shape.layer_bytes
    payload = records[:, shape.payload_offset : end].reshape(count, layers, shape.layer_bytes)
    at = 0
    for size in shape.piece_bytes:
        yield payload[:, :, at : at + heads * size].reshape(count, layers, heads, size)
        at += heads * size


def put_headers(out: RecordBytes, here: Shape, lines: Bytes, delta: bytes) -> None:
    """Heads the records by far ones' header lines, once their tables of CRCs are whole; names
    change by `delta` (xor)."""
    lines = lines.copy()
    headers = lines.view(PACKED_HEADER)[:, 0]
    headers["bytes"], headers["layout_crc"] = here.record_bytes, here.layout_crc
    headers["hash"] ^= np.frombuffer(delta, np.uint64)
    for header, line, record in zip(headers, lines, out, strict=True):
        header["table_crc"] = crc32c(record[HEADER_BYTES : here.payload_offset])
        header["crc"] = crc32c(line[:CRC_OFFSET])
        record[:HEADER_BYTES] = line


def renamed(names: Names, delta: bytes) -> Names:
    """The names that pages have where all differ by `delta` (xor)."""
    changed: Names = names ^ np.frombuffer(delta, np.uint8)
    return changed


def same_names(records: Bytes, others: Bytes) -> Mask:
    """Which records are of the pages that the others are of; both by their header lines."""
    same: Mask = (names_of(records) == names_of(others)).all(axis=1)
    return same
