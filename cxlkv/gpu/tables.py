"""Tables of addresses tell the device where each page of each request lies, part by part.

Layers of a part share their pages, and lie layer_bytes apart in them: one row of addresses, that of
the part's first layer, serves them all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.gpu import streams
from cxlkv.kernels.sources import CHECKSUM_BYTES, PageRows
from cxlkv.pages import checksums_at, layer_places
from cxlkv.pool import CXLPool
from cxlkv.sequence import PagePlaces, Sequence

NO_TAG = -1


class Place(NamedTuple):
    """Of a layer: its part, and bytes from the part's first layer to it, and of checksums."""

    part: int
    offset: int
    checksums_offset: int


class PageTables:
    """rows[part], tags[part] (int64 [requests, pages_max]): on the device.

    A tag names a page and its generation: what was copied under one tag is right as long as the
    page still has it. base_address: of the region's first byte, for the device.
    """

    def __init__(
        self,
        pool: CXLPool,
        requests: int,
        pages_max: int,
        base_address: int,
        device: torch.device,
    ):
        geometry = pool.pages.geometry
        self._of_layer = [place[:2] for place in layer_places(pool.layout, geometry)]
        self._geometry, self._heads = geometry, pool.layout.kv_heads
        self._has_checksums = pool.checksum
        self.piece_bytes = (
            geometry["key_piece_bytes"],
            geometry["value_piece_bytes"] or geometry["key_piece_bytes"],
        )
        parts = geometry["part_count"]
        self._first_layer = [self._of_layer.index((part, 0)) for part in range(parts)]
        self._base = base_address
        self._pages_max = pages_max
        shape = (parts, requests, pages_max)
        # What copies to the device are made from: what is written anew is copied again.
        self._host = {
            name: streams.pinned(*shape, dtype=torch.int64, device=device)
            for name in (*PageRows._fields, "tags")
        }
        self._device = {
            name: torch.full(shape, NO_TAG if name == "tags" else 0, device=device)
            for name in self._host
        }
        self._count = np.zeros((parts, requests), np.int64)
        self.rows = [
            PageRows(*(self._device[name][part] for name in PageRows._fields))
            for part in range(parts)
        ]
        self.tags = [self._device["tags"][part] for part in range(parts)]

    def place(self, layer: int) -> Place:
        part, row = self._of_layer[layer]
        return Place(part, row * self._geometry["layer_bytes"], row * self._heads * CHECKSUM_BYTES)

    def refresh(self, request: int, sequence: Sequence) -> None:
        """Add the pages completed since the last call, without waiting for the copies."""
        for part, layer in enumerate(self._first_layer):
            first = int(self._count[part, request])
            if len(sequence) // sequence._layout.page_tokens <= first:
                continue
            found = sequence.places(layer, first)
            count = first + len(found.pages)
            if count > self._pages_max:
                raise BadArgumentError(
                    f"request {request} has {count} pages, there is room for pages_max="
                    f"{self._pages_max}"
                )
            self._set(part, request, first, found)
            self._count[part, request] = count

    def _set(self, part: int, request: int, first: int, found: PagePlaces) -> None:
        there = (found.keys >= 0) & (found.descriptors >= 0)
        generations = found.generations.astype(np.int64)
        columns: dict[str, npt.NDArray[np.int64]] = {
            "keys": np.where(there, found.keys + self._base, 0),
            "values": np.where(there, found.values + self._base, 0),
            "descriptors": np.where(there, found.descriptors + self._base, 0),
            "generations": np.where(there, generations, 0),
            "checksums": np.where(there & self._has_checksums, self._checksums_at(found), 0),
            "tags": np.where(there, (generations & 0x7FFFFFFF) << 32 | found.pages, NO_TAG),
        }
        span = slice(first, first + len(found.pages))
        for name, column in columns.items():
            self._host[name][part, request, span] = torch.from_numpy(column)
            self._device[name][part, request, span].copy_(
                self._host[name][part, request, span], non_blocking=True
            )

    def _checksums_at(self, found: PagePlaces) -> npt.NDArray[np.int64]:
        return checksums_at(self._geometry, found.pages) + self._base

    def forget(self, request: int, from_page: int = 0) -> None:
        """Drop the pages from `from_page` on."""
        for name, array in self._device.items():
            array[:, request, from_page:] = NO_TAG if name == "tags" else 0
        self._count[:, request] = np.minimum(self._count[:, request], from_page)
