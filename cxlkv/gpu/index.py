"""The device's index: what a method keeps of each page's keys, to choose pages without the host.

A page gets its summary when a request first names it: the newest ones from their keys in the ring,
where it holds rows; others are copied from the pool, if that keeps what the method wants in this
form, and their CRCs are checked; else the host fetches and verifies keys. Requests that share a
page share its summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import memory_of
from cxlkv.errors import BadArgumentError, CorruptError, MemoryShortError, UnsupportedError
from cxlkv.gpu import streams
from cxlkv.gpu.hot import SlotCounts, check_room
from cxlkv.gpu.pieces import DTYPES
from cxlkv.gpu.recent import Recent
from cxlkv.kernels.copies import copy_fragments
from cxlkv.kernels.crc32c import checksums
from cxlkv.kernels.encode import encode, sketch_bytes
from cxlkv.kernels.index import FORMS, Form, Scratch, choose, score
from cxlkv.kernels.rotate import prepare
from cxlkv.kernels.sources import CHECKSUM_BYTES
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget, same_pages
from cxlkv.numbers import is_whole
from cxlkv.pages import checksums_at, layer_places, places_of
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

AT_ONCE_BYTES = 32 << 20  # that are on their way to become summaries
ROOM_SHARE = 4
"""index="auto" leaves the device so many times what summaries take, for the hot buffer and others'
tensors."""

Named = tuple[int, int, int]  # part, page and generation


class New(NamedTuple):
    """A page without a summary: the slot for that, its id, and its place in a request."""

    slot: int
    page: int
    request: int
    place: int


class Stored(NamedTuple):
    """What a pool keeps of a page of a head: its place among the checksums, and its bytes."""

    kind: int
    bytes: int


class Marks(NamedTuple):
    """Memory for a choice on its way: the pages' scores, float32 [requests, kv_heads, pages_max],
    and what score() keeps of queries."""

    scores: torch.Tensor
    scratch: Scratch


class DeviceIndex:
    """Summaries, uint8 [layers, pages, kv_heads, bytes], and which of them a request's pages have.

    method: one of FORMS. pages: how many have a summary at a time, in each part of the layers; by
    default all that requests may have.
    Raises UnsupportedError, MemoryShortError, BadArgumentError.
    """

    def __init__(
        self,
        pool: CXLPool,
        device: torch.device,
        method: str,
        *,
        requests: int,
        rows: int,
        q_heads: int,
        pages_max: int,
        pages: int | None,
        scale: float,
    ):
        pages = _check_pages(pages, requests * pages_max)
        layout = pool.layout
        self.form = Form(method, layout.page_tokens, layout.head_dim, _stored(method, layout))
        self._layout, self._device, self._scale = layout, device, scale
        self._of_layer = layer_places(layout, pool.pages.geometry)
        parts = pool.pages.geometry["part_count"]
        self._layers = [
            [layer for layer, one in enumerate(self._of_layer) if one.part == part]
            for part in range(parts)
        ]
        self._geometry, self._has_checksums = pool.pages.geometry, pool.checksum
        self._stored = _kept(method, pool)
        self.base_address = 0
        """Of the region's first byte, for the device."""
        shape = (layout.layers, pages, layout.kv_heads, self.form.bytes)
        check_room(torch.Size(shape).numel(), device, "the index")
        self.summaries = torch.zeros(shape, dtype=torch.uint8, device=device)
        table = (parts, requests, pages_max)
        self._host = streams.pinned(*table, dtype=torch.int32, device=device)
        self._slots = torch.full(table, -1, dtype=torch.int32, device=device)
        self._held: dict[Named, list[int]] = {}  # slot, and requests that name it
        self._free = [list(range(pages - 1, -1, -1)) for _ in range(parts)]
        self._names: list[list[list[Named | None]]] = [
            [[] for _ in range(requests)] for _ in range(parts)
        ]
        self._marks = ((requests, layout.kv_heads, pages_max), requests * rows * q_heads)
        if method == "sketch":
            prepare(layout.head_dim, device)

    def marks(self) -> Marks:
        """For all choices of a stream, one after the other."""
        shape, rows = self._marks
        scores = torch.zeros(shape, device=self._device)
        return Marks(scores, Scratch.of(self.form, rows, self._device))

    # ---- between steps ----

    def refresh(self, sequences: dict[int, Sequence], recent: Recent) -> None:
        """Take in the pages that were completed since the last call, of requests by number. Raises
        MemoryShortError, CorruptError."""
        tokens = self._layout.page_tokens
        for part, layers in enumerate(self._layers):
            came: dict[int, list[Named | None]] = {}
            new: dict[Named, tuple[int, int]] = {}
            for request, sequence in sequences.items():
                first = len(self._names[part][request])
                if len(sequence) // tokens <= first:
                    continue
                found = sequence.places(layers[0], first)
                there = (found.keys >= 0) & (found.descriptors >= 0)
                rows = zip(found.pages.tolist(), found.generations.tolist(), there, strict=True)
                names = [(part, page, of) if has else None for page, of, has in rows]
                for place, one in enumerate(names, first):
                    if one is not None and one not in self._held:
                        new.setdefault(one, (request, place))
                came[request] = names
            if new:
                self._make(part, new, sequences, recent)
            for request, names in came.items():
                self._name(part, request, names)

    def _name(self, part: int, request: int, came: list[Named | None]) -> None:
        """Count a request as a holder of its next pages."""
        names = self._names[part][request]
        span = slice(len(names), len(names) + len(came))
        names += came
        for one in came:
            if one is not None:
                self._held[one][1] += 1
        numbers = [-1 if one is None else self._held[one][0] for one in came]
        self._host[part, request, span] = torch.tensor(numbers, dtype=torch.int32)
        self._slots[part, request, span].copy_(self._host[part, request, span], non_blocking=True)

    def _make(
        self,
        part: int,
        new: dict[Named, tuple[int, int]],
        sequences: dict[int, Sequence],
        recent: Recent,
    ) -> None:
        """Summarise pages that had no holder."""
        free = self._free[part]
        if len(new) > len(free):
            raise MemoryShortError(
                f"the device's index has room for {self.summaries.shape[1]} pages: make the "
                "decoder with more index_pages, or remove() a request"
            )
        slots = [free.pop() for _ in new]
        pages = [New(slot, one[1], *at) for slot, (one, at) in zip(slots, new.items(), strict=True)]
        in_ring = self._in_ring(part, sequences, recent)
        newest = [one for one in pages if one.place in in_ring.get(one.request, ())]
        older = [one for one in pages if one.place not in in_ring.get(one.request, ())]
        try:
            self._summarise_ring(part, newest, recent)
            if self._stored is not None:
                self._copy_stored(part, older)
            else:
                self._summarise_fetched(part, older, sequences)
        except BaseException:
            free += slots
            raise
        self._held |= {one: [slot, 0] for slot, one in zip(slots, new, strict=True)}

    def _in_ring(
        self, part: int, sequences: dict[int, Sequence], recent: Recent
    ) -> dict[int, set[int]]:
        """Places of the pages whose keys are rows in the ring, by request."""
        if self._layout.k_encoding != "none":
            return {}
        layer = self._layers[part][0]
        return {i: set(recent.newest(one, layer).tolist()) for i, one in sequences.items()}

    def _summarise_ring(self, part: int, pages: list[New], recent: Recent) -> None:
        """From their keys there, of all layers at once."""
        layers = self._index(self._layers[part])[:, None]
        for some in _chunks(pages, layers.numel() * recent.keys[0, 0, :, 0].nbytes):
            requests = self._index([one.request for one in some])
            slots = self._index([one.place % recent.slots for one in some])
            keys = recent.keys[layers, requests, :, slots]  # [layers, pages, heads, tokens, dim]
            made = self._summarised(keys.flatten(0, 1)).view(*keys.shape[:3], self.form.bytes)
            self.summaries[layers, self._index([one.slot for one in some])] = made

    def _copy_stored(self, part: int, pages: list[New]) -> None:
        """Copy what the pool keeps of pages, all layers at once, and check its CRCs."""
        assert self._stored is not None
        layers, heads, form = self._layers[part], self._layout.kv_heads, self.form
        rows = np.arange(len(layers))[:, None]
        for some in _chunks(pages, len(layers) * heads * form.bytes):
            ids = np.array([one.page for one in some], np.uint32)
            found = places_of(self._geometry, self._of_layer[layers[0]], ids)
            first = found.digests if self._stored.kind == 0 else found.sketches
            assert first is not None
            shape = (len(layers), len(some), heads)
            came = self._gathered(first + rows * self._geometry["layer_bytes"], form.bytes, shape)
            came[..., self._stored.bytes :] = 0
            if self._has_checksums:
                at = checksums_at(self._geometry, ids) + rows * (heads * CHECKSUM_BYTES)
                sums = self._gathered(at, CHECKSUM_BYTES, shape).view(torch.int32)
                self._check_stored(came, sums[..., self._stored.kind], some, layers)
            self.summaries[self._index(layers)[:, None], self._index([x.slot for x in some])] = came

    def _gathered(
        self, offsets: npt.NDArray[np.int64], piece_bytes: int, shape: tuple[int, int, int]
    ) -> torch.Tensor:
        """uint8 [layers, pages, kv_heads, piece_bytes], from where their first heads lie."""
        came = torch.empty((*shape, piece_bytes), dtype=torch.uint8, device=self._device)
        size = shape[2] * piece_bytes
        to = memory_of(came, "came") + np.arange(offsets.size).reshape(offsets.shape) * size
        tables = torch.from_numpy(np.stack([offsets + self.base_address, to])).to(self._device)
        copy_fragments(tables[0], tables[1], size)
        return came

    def _check_stored(
        self, came: torch.Tensor, sums: torch.Tensor, pages: list[New], layers: list[int]
    ) -> None:
        assert self._stored is not None
        made = checksums([came], [self._stored.bytes])[..., 0]
        wrong = torch.nonzero(made != sums).tolist()
        if wrong:
            layer, page, head = wrong[0]
            raise CorruptError(
                f"page {pages[page].page}, layer {layers[layer]}, kv head {head}: the CRC of its "
                f"{self.form.name} is wrong, the bytes were changed. Release the sequence and "
                "recompute it; `cxlkv pool check --deep` lists what else is hurt"
            )

    def _summarise_fetched(
        self, part: int, pages: list[New], sequences: dict[int, Sequence]
    ) -> None:
        """From keys that fetch() verifies by their CRCs, with the values."""
        layout = self._layout
        dims = (layout.head_dim, layout.value_head_dim)
        token_bytes = layout.kv_heads * sum(dims) * DTYPES[layout.dtype].itemsize
        for request, sequence in sequences.items():
            own = [one for one in pages if one.request == request]
            for some in _chunks(own, layout.page_tokens * token_bytes):
                places = np.array([one.place for one in some], np.int32)
                slots = self._index([one.slot for one in some])
                shape = (1, layout.kv_heads, len(some), layout.page_tokens)
                rows = [torch.empty((*shape, dim), dtype=DTYPES[layout.dtype]) for dim in dims]
                for layer in self._layers[part]:
                    picked = same_pages(places, layout.kv_heads)
                    sequence.fetch(layer, picked, (rows[0], rows[1]))
                    here = rows[0][0].to(self._device).transpose(0, 1)
                    self.summaries[layer][slots] = self._summarised(here)

    def _summarised(self, keys: torch.Tensor) -> torch.Tensor:
        """uint8 [pages, kv_heads, form.bytes] of keys [pages, kv_heads, page_tokens, dim]."""
        form = self.form
        if form.name == "mean_std":
            wide = keys.float()
            made = torch.stack([wide.mean(2), wide.std(2, correction=0)], 2).bfloat16()
            flat = made.flatten(2).view(torch.uint8)
            return torch.nn.functional.pad(flat, (0, form.bytes - flat.shape[2]))
        rows = keys.transpose(1, 2).flatten(0, 1)
        sketch = form.name == "sketch"
        made_here = encode(rows, None, page_tokens=form.page_tokens, sketch=sketch)
        return made_here.digests if made_here.sketches is None else made_here.sketches

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)

    def forget(self, request: int, from_page: int = 0) -> None:
        """Drop a request's pages from `from_page` on."""
        self._slots[:, request, from_page:] = -1
        for part, requests in enumerate(self._names):
            names = requests[request]
            for one in names[from_page:]:
                if one is None:
                    continue
                held = self._held[one]
                held[1] -= 1
                if not held[1]:
                    del self._held[one]
                    self._free[part].append(held[0])
            del names[from_page:]

    # ---- in a step ----

    def choose(
        self,
        layer: int,
        q: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        sinks: int,
        wanted: torch.Tensor,
        marks: Marks,
        out: torch.Tensor,
    ) -> None:
        """Choose a layer's pages into out, int32 [requests, kv_heads, k]; see kernels.index."""
        slots = self._slots[self._of_layer[layer][0]]
        score(
            *(self.form, self.summaries[layer], slots, q, positions, marks.scores),
            scale=self._scale,
            scratch=marks.scratch,
        )
        choose(marks.scores, first, last, sinks, wanted, out)

    def bytes_of(self, request: int) -> int:
        """Bytes of summaries that a step reads for a request."""
        heads = self._layout.kv_heads * self.form.bytes
        return sum(
            len(layers) * heads * sum(one is not None for one in names[request])
            for layers, names in zip(self._layers, self._names, strict=True)
        )


class Placed(NamedTuple):
    """Where a decoder chooses pages, "host" or "device", and how. reason: why the host does, where
    "auto" was asked for."""

    where: str
    method: str
    reason: str | None = None

    def on_device(self, pages: int | None) -> tuple[str, int | None] | None:
        """What Resident takes."""
        return (self.method, pages) if self.where == "device" else None


def place_index(
    index: str,
    method: str,
    budget: Budget,
    hot_pages: SlotCounts,
    pages: int | None,
    layout: KVLayout,
    pages_most: int,
    device: torch.device,
) -> Placed:
    """Choose where the index lies, and check the user's arguments. pages: how many the user wants
    summaries of; pages_most: how many all requests may have. Raises BadArgumentError,
    UnsupportedError."""
    if index not in ("host", "device", "auto"):
        raise BadArgumentError(f'index={index!r:.40}: "host", "device" or "auto"')
    if index == "host":
        if pages is not None:
            raise BadArgumentError('index_pages goes with index="device"')
        return Placed(index, method)
    own = "sketch" if method == "auto" else method
    reason = None
    if hot_pages == 0:
        reason = 'index="device" keeps chosen pages in a hot buffer: hot_pages='
        if index == "device":
            raise BadArgumentError(reason)
    elif (unknown := unserved(budget)) is not None:
        reason = unknown
    elif own not in FORMS:
        reason = (
            f'method {method!r} reads keys, which lie in the pool: index="host" has it. '
            f'index="device" has {", ".join(FORMS)}'
        )
    if index == "device" and reason is not None:
        raise UnsupportedError(reason)
    if index == "auto" and reason is None:
        form = Form(own, layout.page_tokens, layout.head_dim, _stored(own, layout))
        summaries = layout.layers * layout.kv_heads * form.bytes * (pages or pages_most)
        with suppress(UnsupportedError):  # no such device: said when its memory is taken
            try:
                check_room(summaries * ROOM_SHARE, device, "the index")
            except MemoryShortError as error:
                reason = str(error)
    return Placed("device", own) if reason is None else Placed("host", method, reason)


def unserved(budget: Budget) -> str | None:
    """The reason why the device cannot choose by a budget; None: it can."""
    if budget.mass is not None or budget.union != "kv_head" or budget.refresh != 1:
        return 'budgets with mass=, union="layer" or refresh= need index="host"'
    return None


def _kept(method: str, pool: CXLPool) -> Stored | None:
    """What the pool keeps for a method in its form; digests of encoded keys have 8 bits."""
    layout = pool.layout
    if method == "digest" and layout.k_encoding == "none":
        return Stored(0, 2 * layout.head_dim * DTYPES[layout.dtype].itemsize)
    if method == "sketch" and pool.sketch:
        return Stored(1, sketch_bytes(layout.page_tokens, layout.head_dim))
    return None


def _chunks(pages: list[New], page_bytes: int) -> Iterator[list[New]]:
    """As many at once as AT_ONCE_BYTES allow."""
    count = max(1, AT_ONCE_BYTES // page_bytes)
    return (pages[begin : begin + count] for begin in range(0, len(pages), count))


def _stored(method: str, layout: KVLayout) -> torch.dtype:
    return torch.bfloat16 if method == "mean_std" else DTYPES[layout.dtype]


def _check_pages(pages: int | None, most: int) -> int:
    if pages is None:
        return most
    if not is_whole(pages, 1, most):
        raise BadArgumentError(f"index_pages={pages!r:.40}: 1 to {most}, requests x pages_max")
    return pages
