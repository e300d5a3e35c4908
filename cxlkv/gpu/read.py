"""Pages of sequences come from a registered pool into memory of a device, and are verified there.

One copy brings K and V of many pages of a layer; kernels compute their CRCs behind it. The host
touches metadata only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import memory_of
from cxlkv.errors import ClosedError, StaleError, UnsupportedError
from cxlkv.gpu import streams
from cxlkv.gpu.copier import Copied, Copier
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.pieces import pieces_of
from cxlkv.kernels.checks import Shape, check_pieces, prepare
from cxlkv.kernels.sources import CHECKSUM_BYTES, PageRows, Sources, page_sources
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.pages import checksums_at, layer_places
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

Addresses = npt.NDArray[np.int64]
Span = tuple[Tokens, int, int]  # of a sequence the pages [first, end)


class PageList(NamedTuple):
    """Pages in the layers of a part. pieces: int64 [2, n], device addresses of K and V of the
    part's first layer, 0: none (behind a window). rows: the same on the device, [n, 1]. found:
    int64 [n] there: not 0 where something was wrong."""

    part: int
    pieces: Addresses
    rows: PageRows
    found: torch.Tensor


class PageReader(Closing):
    """One thread reads at a time, inside of using(). Closing the pool waits for it.

    Raises UnsupportedError for pools with encodings or layers of unlike shapes, and what Mapping
    raises, which pins the pool's memory.
    """

    def __init__(self, pool: CXLPool, device: torch.device):
        layout = pool.layout
        if layout.has_shapes or any(piece.code is not None for piece in pieces_of(layout)):
            raise UnsupportedError("a device reads rows of layers of one shape")
        self._pieces = pieces_of(layout)[: 2 if layout.values == "own" else 1]
        if any(piece.bytes % 16 for piece in self._pieces):
            raise UnsupportedError("a device reads pieces of a multiple of 16 bytes")
        self.pool = pool
        self._heads, self._geometry = layout.kv_heads, pool.pages.geometry
        self._places = [place[:2] for place in layer_places(layout, self._geometry)]
        strides = (self._geometry["key_piece_bytes"], self._geometry["value_piece_bytes"])
        self._strides = (strides[0], strides[1] or strides[0])
        sizes = [piece.bytes for piece in self._pieces]
        self._shape = Shape(sizes[0], sizes[-1], 0, 1)
        self._busy, self._is_lost = threading.RLock(), False
        lifetime.watch(self)
        self.bytes = 0  # that were read
        self._mapping = Mapping(pool, device)
        self._copier = Copier(self._mapping)
        prepare(self._shape, device)
        pool.before_close(self._lose)  # before the device's use of its memory ends

    @property
    def stream(self) -> torch.cuda.Stream:
        """Of its copies."""
        return self._copier.stream

    def reset_after_fork(self) -> None:
        self._busy, self._is_lost = threading.RLock(), True

    def _lose(self) -> None:
        with self._busy:
            self._is_lost = True

    @contextmanager
    def using(self) -> Iterator[None]:
        """Raises ClosedError when the pool is closed, which waits until this and its copies end."""
        with self._busy:
            if self._is_lost:
                raise ClosedError("the pool was closed")
            try:
                yield
            finally:
                self._copier.stream.synchronize()

    def part(self, layer: int) -> int:
        return self._places[layer][0]

    def pages(self, layer: int, spans: Sequence[Span]) -> PageList:
        """Complete pages, one behind the other, for all layers of this one's part."""
        device, base = self._copier.device, self._mapping.device_address
        part = self._places[layer][0]
        first_layer = self._places.index((part, 0))
        columns = []
        for sequence, first, end in spans:
            found = sequence.places(first_layer, first)
            if len(found.pages) < end - first:
                raise StaleError(f"pages {first} to {end} of a sequence that has fewer complete")
            there = (found.keys >= 0) & (found.descriptors >= 0)
            sums = checksums_at(self._geometry, np.where(there, found.pages, 0))
            at = [found.keys, found.values, found.descriptors, found.generations, sums]
            columns.append(np.where(there, np.stack(at).astype(np.int64), 0)[:, : end - first])
        table = np.concatenate(columns, 1)
        there = table[2] > 0
        table[[0, 1, 2, 4]] += np.where(there, base, 0)
        table[4] *= self.pool.checksum
        rows = PageRows(*streams.sent(torch.from_numpy(table), device)[:, :, None].unbind())
        nothing = torch.zeros(table.shape[1], dtype=torch.int64, device=device)
        return PageList(part, table[: len(self._pieces)], rows, nothing)

    def copy(
        self,
        listed: PageList,
        layer: int,
        some: slice[int, int],
        out: Sequence[torch.Tensor],
        after: torch.cuda.Event,
    ) -> Copied:
        """Copy these of the pages; out: K and V [pages, kv_heads, page_tokens, dim], contiguous,
        written behind an event."""
        offset = self._places[layer][1] * self._geometry["layer_bytes"]
        sources, targets, sizes = list[Addresses](), list[Addresses](), list[Addresses]()
        kinds = zip(listed.pieces[:, some], out, self._pieces, self._strides, strict=False)
        for at, to, piece, stride in kinds:
            heads = offset + stride * np.arange(self._heads, dtype=np.int64)
            sources.append(np.where(at[:, None] == 0, 0, at[:, None] + heads).ravel())
            numbers = np.arange(sources[-1].size, dtype=np.int64)
            targets.append(memory_of(to, "out") + piece.bytes * numbers)
            sizes.append(np.full(numbers.size, piece.bytes, np.int64))
        source_at, target_at, lengths = map(np.concatenate, (sources, targets, sizes))
        copied = self._copier.copy(
            torch.from_numpy(source_at), torch.from_numpy(target_at), lengths, after=after
        )
        self.bytes += int(lengths[source_at != 0].sum())
        return copied

    def check(
        self, listed: PageList, layer: int, some: slice[int, int], out: Sequence[torch.Tensor]
    ) -> None:
        """Verify what copy() brought, on the current stream, which waits for it; pages that are
        not there become zeros."""
        rows = PageRows(*(column[some] for column in listed.rows))
        shape = (len(rows.keys), self._heads, 1)
        pages = torch.zeros(shape, dtype=torch.int32, device=rows.keys.device)
        all_of = torch.ones(shape, dtype=torch.int8, device=rows.keys.device)
        sources, row = Sources.empty(shape, rows.keys.device), self._places[layer][1]
        page_sources(
            *(pages, all_of, rows, sources),
            layer_offset=row * self._geometry["layer_bytes"],
            checksums_offset=row * self._heads * CHECKSUM_BYTES,
            piece_bytes=self._strides,
        )
        keys, values = ([_addresses(one, shape) for one in out] + [None])[:2]
        assert keys is not None
        check_pieces(sources, (keys, values), pages, listed.found[some], self._shape, layer)
        if (listed.pieces[0, some] == 0).any():
            for one in out:
                one[rows.keys[:, 0] == 0] = 0

    def close(self) -> None:
        """Let go of the pool's memory, which the last reader unpins."""
        with self._busy:
            self._is_lost = True
        self._mapping.close()


def _addresses(pieces: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Of contiguous pieces, by page and head."""
    step, first = pieces[0, 0].numel() * pieces.element_size(), memory_of(pieces, "out")
    end = first + step * shape[0] * shape[1]
    return torch.arange(first, end, step, dtype=torch.int64, device=pieces.device).view(shape)
