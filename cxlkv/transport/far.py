"""Finds the bytes of a far pool's records, and packs them as the core packs its own.

docs/reference/memory-layout.md has both forms. The far pool is never trusted: a record gets a
header here only if the page's own header is of the wanted generation and names the table that came
with it; Records.write() then holds every piece against the table before anything can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from cxlkv.arrays import Bytes, Codes, Names, Offsets
from cxlkv.errors import UnsupportedError
from cxlkv.layout import CODE_BITS, DTYPE_BYTES, LAYERS_MAX, KVLayout
from cxlkv.pages import (
    CORRUPT,
    PACKED_HEADER,
    PACKED_MAGIC,
    PACKED_VERSION,
    RECORD_HEADER,
    RECORD_MAGIC,
    STALE,
    crc32c,
    layer_places,
    names_of,
)
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as PoolSequence

HEADER_BYTES = RECORD_HEADER.itemsize  # of either form
CRC_OFFSET = HEADER_BYTES - 4
SCALE_BYTES = 4
KINDS = ("digest", "sketch", "key", "value")
RECORD_BYTES_MAX = 1 << 30  # that are served
HEADS_MAX = 1 << 16  # of all layers
PAGE_TOKENS_MAX = 1024
STATE_PAGES_MAX = 1 << 16
_LAYER_OFFSETS = (None, "sketches_offset", "keys_offset", "values_offset")
_GEOMETRY = """extents_offset extent_bytes checksums_offset layers_offset layer_bytes
    sketches_offset keys_offset values_offset checksum_bytes digest_piece_bytes sketch_piece_bytes
    key_piece_bytes value_piece_bytes slab_slots page_count region_bytes""".split()
_Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]

PagesOfPart = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]


class Pieces(NamedTuple):
    """Runs of bytes to copy, each array int64 [n]: where they lie in the far memory, where in the
    link's buffer, how many."""

    far: Offsets
    near: Offsets
    size: Offsets

    def cuts(self, pieces_max: int, bytes_max: int) -> list[int]:
        """Where runs begin that are contiguous in the far memory, of so many pieces and bytes at
        most; and the end."""
        cuts, run_bytes = [0], 0
        adjacent = np.zeros(len(self.far), np.bool_)
        adjacent[1:] = self.far[:-1] + self.size[:-1] == self.far[1:]
        for index, (joins, size) in enumerate(
            zip(adjacent.tolist(), self.size.tolist(), strict=True)
        ):
            full = index - cuts[-1] == pieces_max or run_bytes + size > bytes_max
            if index and (full or not joins):
                cuts.append(index)
                run_bytes = 0
            run_bytes += size
        return [*cuts, len(self.far)]

    def halved(self, bytes_max: int) -> Pieces:
        """The same bytes in pieces that are no longer than this."""
        if not (self.size > bytes_max).any():
            return self
        counts = -(-self.size // bytes_max)
        which = np.repeat(np.arange(len(self.far)), counts)
        at = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * bytes_max
        size = np.minimum(self.size[which] - at, bytes_max)
        return Pieces(self.far[which] + at, self.near[which] + at, size)


class Shape(BaseModel):
    """What a server says of its pool: enough to find every byte of a page.

    piece_bytes, strides: of digest, sketch, K, V of one kv head; 0: there are none. part_layers:
    how many layers the pages of each part have. state_pages: of a state checkpoint, whose part is
    the last; 0: there are none. All pieces lie in the region, and a record's bytes
    are those of its pieces, so that nothing is allocated or read by one wrong number.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    record_bytes: int = Field(ge=1, le=RECORD_BYTES_MAX)
    layout_crc: int = Field(ge=0, lt=1 << 32)
    page_tokens: int = Field(ge=1, le=PAGE_TOKENS_MAX)
    kv_heads: int = Field(ge=1, le=HEADS_MAX)
    piece_bytes: list[_Bytes] = Field(min_length=4, max_length=4)
    part_layers: list[PositiveInt] = Field(min_length=1, max_length=LAYERS_MAX + 1)
    state_pages: int = Field(default=0, ge=0, le=STATE_PAGES_MAX)
    geometry: dict[str, _Bytes] = Field(min_length=len(_GEOMETRY), max_length=len(_GEOMETRY))

    @model_validator(mode="after")
    def _check(self) -> Shape:
        missing = [name for name in _GEOMETRY if name not in self.geometry]
        if missing:
            raise ValueError(f"the geometry lacks {', '.join(missing)}")
        if sum(self.part_layers) * self.kv_heads > HEADS_MAX:
            raise ValueError("more heads than are served")
        layers, of = max(self.part_layers), self.geometry
        table = layers * self.kv_heads * 4 * len(KINDS)
        used = self.payload_offset + self.layer_bytes * layers
        sizes = list(zip(self.piece_bytes, self.strides(), strict=True))
        if (
            of["checksum_bytes"] != table + -table % HEADER_BYTES
            or self.record_bytes != used + -used % HEADER_BYTES
            or any(size > stride or (stride and not size) for size, stride in sizes)
        ):
            raise ValueError("pieces do not fit the record")
        if not self._is_inside(layers):
            raise ValueError("pages do not fit the region")
        return self

    def _is_inside(self, layers: int) -> bool:
        """Each place in a page's slab lies before the next one, and slabs in the region."""
        of = self.geometry
        slots, heads = of["slab_slots"], self.kv_heads
        starts = [0, *(of[name] for name in _LAYER_OFFSETS if name), of["layer_bytes"]]
        slabs = [slots * heads * stride for stride in self.strides()]
        ends = [start + size for start, size in zip(starts[:-1], slabs, strict=True)]
        extents = -(-of["page_count"] // max(slots, 1))
        return bool(
            slots >= 1
            and of["page_count"] < 1 << 31
            and all(end <= start for end, start in zip(ends, starts[1:], strict=True))
            and slots * HEADER_BYTES <= of["checksums_offset"]
            and of["checksums_offset"] + slots * of["checksum_bytes"] <= of["layers_offset"]
            and of["layers_offset"] + layers * of["layer_bytes"] <= of["extent_bytes"]
            and of["extents_offset"] + extents * of["extent_bytes"] <= of["region_bytes"]
        )

    def strides(self) -> list[int]:
        return [self.geometry[f"{kind}_piece_bytes"] for kind in KINDS]

    @property
    def payload_offset(self) -> int:
        return HEADER_BYTES + self.geometry["checksum_bytes"]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a packed record."""
        return sum(self.piece_bytes) * self.kv_heads


def shape_of(pool: CXLPool) -> Shape:
    """Raises UnsupportedError for pools that cannot be read from afar."""
    layout = pool.layout
    if layout.object_bytes is not None:
        raise UnsupportedError("a pool of objects is not served: it has no sequences to match")
    if layout.has_shapes:
        raise UnsupportedError(
            "a pool of layers of unlike shapes is not served yet: read it on its own host, or let "
            "a cold tier carry its pages"
        )
    if not pool.checksum:
        raise UnsupportedError(
            "a pool without checksums is not served: nobody could tell, afar, whether its bytes "
            "are right. Make it with checksum=True"
        )
    geometry = pool.pages.geometry
    record_bytes, layout_crc = pool.records.shape
    if record_bytes > RECORD_BYTES_MAX or layout.layers * layout.kv_heads > HEADS_MAX:
        raise UnsupportedError(
            f"pages of {record_bytes} bytes, {layout.layers} layers of {layout.kv_heads} heads: up "
            f"to {RECORD_BYTES_MAX} bytes and {HEADS_MAX} heads of all layers are served"
        )
    places = layer_places(layout, geometry)
    rows = [0] * geometry["part_count"]
    for part, row, *_ in places:
        rows[part] = max(rows[part], row + 1)
    if layout.states is not None:
        rows.append(geometry["record_layers"])
    return Shape(
        record_bytes=record_bytes,
        layout_crc=layout_crc,
        page_tokens=layout.page_tokens,
        kv_heads=layout.kv_heads,
        piece_bytes=_piece_bytes(layout, geometry),
        part_layers=rows,
        state_pages=pool.records.state_pages,
        geometry={name: geometry[name] for name in _GEOMETRY},
    )


def _piece_bytes(layout: KVLayout, geometry: dict[str, int]) -> list[int]:
    """Bytes of pieces without what fills them up to a line; a sketch is whole lines. A digest of
    encoded keys is bytes, and where these are codes its scale lies behind them."""
    encoded = layout.k_encoding != "none"
    more = SCALE_BYTES if layout.k_encoding in CODE_BITS else 0
    keys = layout.piece_bytes(layout.head_dim, layout.k_encoding, more)
    values = layout.piece_bytes(layout.value_head_dim, layout.v_encoding)
    return [
        2 * layout.head_dim * (1 if encoded else DTYPE_BYTES[layout.dtype]),
        geometry["sketch_piece_bytes"],
        keys,
        values * (geometry["value_piece_bytes"] > 0),
    ]


class FarPool:
    """Makes lists of pieces for pages of a pool of this shape, and records of what they bring."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self._heads = _heads_template(shape)
        self._payloads = [_payload_template(shape, rows) for rows in shape.part_layers]
        self._absent = np.array([size == 0 for size in shape.piece_bytes])

    def heads(self, pages: npt.NDArray[np.uint32]) -> Pieces:
        """The header and the checksum table of each page, to its row of the buffer."""
        return self._pieces(self._heads, pages, np.arange(len(pages)))

    def payload(
        self, part: int, pages: npt.NDArray[np.uint32], rows: npt.NDArray[np.int64]
    ) -> Pieces:
        """All other bytes of pages of one part, to these rows of the buffer."""
        return self._pieces(self._payloads[part], pages, rows)

    def _pieces(
        self, template: Offsets, pages: npt.NDArray[np.uint32], rows: npt.NDArray[np.int64]
    ) -> Pieces:
        geometry = self.shape.geometry
        order = np.argsort(pages, kind="stable")
        extent, slot = np.divmod(pages[order].astype(np.int64), geometry["slab_slots"])
        start = geometry["extents_offset"] + extent * geometry["extent_bytes"]
        offset, per_slot, near, size = (column[:, None] for column in template)
        far = start + offset + slot * per_slot  # neighbouring slots one after the other
        at = rows[order] * self.shape.record_bytes + near
        return Pieces(far.ravel(), at.ravel(), np.broadcast_to(size, far.shape).ravel())

    def seal(
        self,
        records: Bytes,
        pages: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
    ) -> Codes:
        """Packed headers in place of those that came, where they are right; else the codes say why
        (stale, corrupt), and the record begins with zeros."""
        codes = np.zeros(len(pages), np.int32)
        for row, record in enumerate(records):
            header = record[:HEADER_BYTES].view(RECORD_HEADER)[0]
            table = record[HEADER_BYTES : self.shape.payload_offset]
            if not self._is_whole(record[:HEADER_BYTES], header, table):
                codes[row] = CORRUPT
            elif header["page"] != pages[row] or header["generation"] != generations[row]:
                codes[row] = STALE
            record[:HEADER_BYTES] = 0 if codes[row] else self._packed(header, table)
        return codes

    def _is_whole(self, line: Bytes, header: np.void, table: Bytes) -> bool:
        return bool(
            header["magic"] == RECORD_MAGIC
            and header["crc"] == crc32c(line[:CRC_OFFSET])
            and header["part"] < len(self.shape.part_layers)
            and 1 <= header["tokens"] <= self.shape.page_tokens
            and header["table_crc"] == crc32c(table)
        )

    def _packed(self, header: np.void, table: Bytes) -> Bytes:
        entries = table.view(np.uint32)
        used = self.shape.part_layers[header["part"]] * self.shape.kv_heads * len(KINDS)
        entries[:used].reshape(-1, len(KINDS))[:, self._absent] = 0
        entries[used:] = 0
        packed = np.zeros(1, PACKED_HEADER)
        packed["magic"], packed["version"] = PACKED_MAGIC, PACKED_VERSION
        packed["bytes"], packed["layout_crc"] = self.shape.record_bytes, self.shape.layout_crc
        for name in ("hash", "tokens", "ordinal", "part"):
            packed[name] = header[name]
        packed["table_crc"] = crc32c(table)
        line = packed.view(np.uint8)
        packed["crc"] = crc32c(line[:CRC_OFFSET])
        return line

    def clear_rest(self, record: Bytes, part: int) -> None:
        """Layers that the part does not have, and what fills the record up to a line."""
        used = self.shape.payload_offset + self.shape.part_layers[part] * self.shape.layer_bytes
        record[used:] = 0


def part_of(record: Bytes) -> int:
    return int(record[:HEADER_BYTES].view(PACKED_HEADER)["part"][0])


def parents_of(records: Bytes, seen: dict[tuple[int, int], Bytes]) -> Names:
    """The name of the record before each in its chain, where it is among them or was seen; else
    zeros. seen: names by part and ordinal, which grows."""
    headers = np.ascontiguousarray(records[:, :HEADER_BYTES]).view(PACKED_HEADER)[:, 0]
    names = names_of(records)
    places = [(int(header["part"]), int(header["ordinal"])) for header in headers]
    seen.update(zip(places, names, strict=True))
    nothing = np.zeros(16, np.uint8)
    parents = [seen.get((part, ordinal - 1), nothing) for part, ordinal in places]
    return np.array(parents, np.uint8).reshape(-1, 16)


def pages_of_parts(pool: CXLPool, sequence: PoolSequence) -> list[PagesOfPart]:
    """Pages of a sequence and their generations, by part; without those behind its window. The last
    part, where a model has states, is a hit's checkpoint, its first page last."""
    first: dict[int, int] = {}
    of_layer = layer_places(pool.layout, pool.pages.geometry)
    for layer, place in enumerate(of_layer):
        first.setdefault(place.part, layer)
    found = []
    for part in sorted(first):
        places = sequence.places(first[part])
        there = places.keys >= 0
        found.append((places.pages[there], places.generations[there]))
    if pool.layout.states is not None:
        pages, generations = sequence.state_places()
        found.append((pages[::-1], generations[::-1]))
    return found


def in_order(parts: Sequence[int]) -> Offsets:
    """Places of pages in the order of their tokens, so that what comes of them is a prefix. There
    are so many of each part, one part after the other, all ending at the same token; the last page
    of the last part comes last."""
    ends = [np.arange(count) - count for count in parts]
    return np.argsort(np.concatenate(ends), kind="stable")


def _heads_template(shape: Shape) -> Offsets:
    """Columns: offset in the extent, more for each slot, offset in the record, bytes."""
    table = shape.geometry["checksum_bytes"]
    return np.array(
        [
            (0, HEADER_BYTES, 0, HEADER_BYTES),
            (shape.geometry["checksums_offset"], table, HEADER_BYTES, table),
        ],
        np.int64,
    ).T


def _payload_template(shape: Shape, layers: int) -> Offsets:
    geometry, rows = shape.geometry, []
    near = shape.payload_offset
    for layer in range(layers):
        for kind, (size, stride) in enumerate(zip(shape.piece_bytes, shape.strides(), strict=True)):
            name = _LAYER_OFFSETS[kind]
            far = geometry["layers_offset"] + layer * geometry["layer_bytes"]
            far += geometry[name] if name else 0
            per_slot = shape.kv_heads * stride
            if size == stride:  # the pieces of all heads are one run
                rows.append((far, per_slot, near, per_slot))
            else:
                rows += [
                    (far + head * stride, per_slot, near + head * size, size)
                    for head in range(shape.kv_heads)
                ]
            near += shape.kv_heads * size
    return np.array([row for row in rows if row[3]], np.int64).T
