"""A pool's pages as arrays, read without the C core: for programs beside the memory that only scan.

Such a program maps the pool's file or device read-only, is handed the bytes of sequence.handle,
and scans with cxlkv.ndp.portable; the program that owns the sequence goes on in C. It holds no
pages of its own: it may read a handle's pages as long as their owner keeps the sequence, and
still_there() says afterwards whether that was so. It verifies no CRC. docs/memory-layout.md has
the format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv.errors import (
    BadArgumentError,
    NotAPoolError,
    StaleError,
    TruncatedError,
    UnsupportedError,
    VersionError,
)
from cxlkv.layout import DTYPES, VALUES, KVLayout, LayerGroup, layer_places
from cxlkv.ndp.portable import Pieces, Stored, sketch_elements

FORMAT_VERSION = 6
FEATURES_KNOWN = 0  # of the incompatible ones; who only reads may lack the others
HANDLE_VERSION = 2
HANDLE_APPROXIMATE = 1 << 63  # in its tokens
SHARING_SOFTWARE = 2
WIDE = """region_bytes hosts_offset host_block_bytes descriptors_offset descriptors_bytes
    extents_offset extent_bytes checksums_offset layers_offset layer_bytes sketches_offset
    keys_offset values_offset checksum_bytes digest_piece_bytes sketch_piece_bytes key_piece_bytes
    value_piece_bytes record_bytes""".split()
NARROW = "page_count extent_count slab_slots record_layers part_count reserved".split()
GROUP = "layers kv_heads head_dim value_head_dim dtype kind values window".split()
SUPERBLOCK = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("line_bytes", "<u4"),
        ("identity", "V16"),
        ("page_tokens", "<u4"),
        ("checksum", "<u4"),
        ("sharing", "<u4"),
        ("durable", "<u4"),
        ("shard", "<u4", 4),
        ("model_id", "S256"),
        ("geometry", [*((name, "<u8") for name in WIDE), *((name, "<u4") for name in NARROW)]),
        ("group_count", "<u4"),
        ("sketch", "<u4"),
        ("groups", [(name, "<u4") for name in GROUP], 16),
        ("group_of", "u1", 1024),
        ("hosts", "<u4"),
        ("log_records", "<u4"),
        ("crc_before", "<u4"),
        ("build", "<u4"),
        ("features", [(name, "<u8") for name in ("compatible", "readers", "incompatible")]),
    ]
)
DESCRIPTOR = np.dtype(
    [("version", "<u8"), ("hash", "<u8", 2), ("tokens", "<u4"), ("page", "<u4"), ("rest", "V32")]
)
HANDLE = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u4"),
        ("identity", "V16"),
        ("tokens", "<u8"),
        ("page_count", "<u4"),
        ("page_tokens", "<u4"),
    ]
)
ENTRY = np.dtype([("generation", "<u8"), ("page", "<u4")])


@dataclass(frozen=True)
class Chain:
    """The pages of one part of a handle: entries from page `first` on."""

    tokens: int
    first: int
    generations: npt.NDArray[np.uint64]
    pages: npt.NDArray[np.int64]


class MappedPool:
    """A pool's memory, mapped read-only."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises NotAPoolError, VersionError, TruncatedError, UnsupportedError."""
        self._bytes = np.memmap(path, np.uint8, "r")
        if len(self._bytes) < SUPERBLOCK.itemsize:
            raise NotAPoolError(f"{path}: too short for a pool")
        block = self._bytes[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]
        if block["magic"] != b"CXLKVPOL":
            raise NotAPoolError(f"{path} is no pool")
        if block["version"] != FORMAT_VERSION:
            raise VersionError(f"{path} has format {block['version']}, not {FORMAT_VERSION}")
        unknown = int(block["features"]["incompatible"]) & ~FEATURES_KNOWN
        if unknown:
            bit = (unknown & -unknown).bit_length() - 1
            raise VersionError(
                f"{path} has feature {bit} of the incompatible ones: made by a newer"
            )
        if block["sharing"] == SHARING_SOFTWARE:
            raise UnsupportedError(
                f"{path}: hosts whose caches do not see each other share this pool, and a plain "
                "reader may see what was there before: use the C core on the owner's host"
            )
        self.identity = bytes(block["identity"])
        self._geometry = {name: int(block["geometry"][name]) for name in (*WIDE, *NARROW)}
        if self._geometry["region_bytes"] > len(self._bytes):
            raise TruncatedError(f"{path} has {len(self._bytes)} bytes, fewer than it says")
        self.layout = _layout(block)
        self._places = layer_places(self.layout, self._geometry["record_layers"])

    def layer(self, handle: bytes, layer: int) -> Stored:
        """One layer of the sequence that a handle names; raises StaleError, BadArgumentError.

        The handle's open tail is in a page of its own, so that all tokens lie in the pool.
        """
        if not 0 <= layer < self.layout.layers:
            raise BadArgumentError(f"layer {layer}: the pool has {self.layout.layers}")
        part, row = self._places[layer]
        chain = self._chain(handle, part)
        self._check(chain)
        whole = self._bytes[: len(self._bytes) // 4 * 4]
        single = self.layout.dtype == "float32"
        keys = self._pieces(chain, row, "key", "keys_offset", self.layout.head_dim)
        values = keys
        if self.layout.values == "own":
            values = self._pieces(chain, row, "value", "values_offset", self.layout.value_head_dim)
        return Stored(
            memory=whole.view(np.float32) if single else whole.view(np.uint16),
            layout=self.layout,
            tokens=chain.tokens,
            keys=keys,
            values=values,
            digests=self._pieces(chain, row, "digest", None, self.layout.head_dim),
            sketches=self._sketches(chain, row),
            window=self.layout.windows[layer],
        )

    def still_there(self, handle: bytes) -> None:
        """Raises StaleError when pages of the handle were freed: what was read may be another's."""
        for part in range(self._geometry["part_count"]):
            self._check(self._chain(handle, part))

    def _sketches(self, chain: Chain, row: int) -> Pieces | None:
        if self._geometry["sketch_piece_bytes"] == 0:
            return None
        block = sketch_elements(self.layout)
        return self._pieces(chain, row, "sketch", "sketches_offset", block)

    def _pieces(self, chain: Chain, row: int, kind: str, offset: str | None, dim: int) -> Pieces:
        g = self._geometry
        element = 4 if self.layout.dtype == "float32" else 2
        piece = g[f"{kind}_piece_bytes"]
        extent, slot = np.divmod(chain.pages, g["slab_slots"])
        at = g["extents_offset"] + extent * g["extent_bytes"] + g["layers_offset"]
        at += row * g["layer_bytes"] + (g[offset] if offset else 0)
        at += slot * self.layout.kv_heads * piece
        behind = np.full(chain.first, -1, np.int64)
        return Pieces(np.concatenate([behind, at // element]), (piece // element, dim))

    def _chain(self, handle: bytes, part: int) -> Chain:
        """Raises BadArgumentError for bytes that are no handle of this pool."""
        parts = self._geometry["part_count"]
        whole = HANDLE.itemsize + 4 * parts
        if len(handle) < whole or handle[:4] != b"CKVH":
            raise BadArgumentError("these bytes are no handle")
        head = np.frombuffer(handle, HANDLE, 1)[0]
        if head["version"] != HANDLE_VERSION:
            raise VersionError(f"a handle of version {head['version']}, not {HANDLE_VERSION}")
        if bytes(head["identity"]) != self.identity:
            raise StaleError("the handle is of another pool")
        count, tokens = int(head["page_count"]), int(head["tokens"]) & ~HANDLE_APPROXIMATE
        firsts = np.frombuffer(handle, "<u4", parts, HANDLE.itemsize).astype(np.int64)
        if (firsts > count).any() or count != -(-tokens // self.layout.page_tokens):
            raise BadArgumentError("a damaged handle")
        lengths = count - firsts
        if len(handle) != whole + int(lengths.sum()) * ENTRY.itemsize + 4:
            raise BadArgumentError("a damaged handle")
        at = whole + int(lengths[:part].sum()) * ENTRY.itemsize
        entries = np.frombuffer(handle, ENTRY, int(lengths[part]), at)
        pages = entries["page"].astype(np.int64)
        if (pages >= self._geometry["page_count"]).any():
            raise BadArgumentError("a damaged handle: it names pages that the pool does not have")
        return Chain(tokens, int(firsts[part]), entries["generation"].copy(), pages)

    def _check(self, chain: Chain) -> None:
        """That every page has the generation that the handle names, and is not free."""
        g = self._geometry
        extent, slot = np.divmod(chain.pages, g["slab_slots"])
        at = g["descriptors_offset"] + extent * g["descriptors_bytes"]
        lines = self._bytes[: len(self._bytes) // 64 * 64].view(DESCRIPTOR)
        found = lines[at // DESCRIPTOR.itemsize + slot]
        right = (found["version"] >> 8 == chain.generations) & (found["page"] == chain.pages)
        right &= (found["version"] & 0xFF) != 0
        if not right.all():
            page = int(chain.pages[np.argmin(right)])
            raise StaleError(f"page {page} was freed since the handle was made: ask for a new one")


def _layout(block: np.void) -> KVLayout:
    groups = [
        LayerGroup(
            layers=int(row["layers"]),
            kv_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]),
            value_head_dim=int(row["value_head_dim"]),
            dtype=DTYPES[row["dtype"]],
            window=int(row["window"]) or None,
            values=VALUES[row["values"]],
        )
        for row in block["groups"][: block["group_count"]]
    ]
    layers = sum(group.layers for group in groups)
    shard = tuple(int(x) for x in block["shard"])
    return KVLayout.of(
        groups,
        [int(group) for group in block["group_of"][:layers]],
        page_tokens=int(block["page_tokens"]),
        shard=(shard[0], shard[1], shard[2], shard[3]),
        model_id=block["model_id"].decode(),
    )
