"""The device's index: what a method keeps of each page's keys, to choose pages without the host.

A page's summary is made on the device when the page is first named by a request, from keys that
the host has fetched and verified. Requests that share a page share its summary.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.errors import BadArgumentError, MemoryShortError, UnsupportedError
from cxlkv.gpu import streams
from cxlkv.gpu.hot import SlotCounts, check_room
from cxlkv.gpu.pieces import DTYPES
from cxlkv.kernels.encode import encode
from cxlkv.kernels.index import FORMS, Form, Scratch, choose, score
from cxlkv.kernels.rotate import prepare
from cxlkv.layout import KVLayout, layer_places
from cxlkv.ndp.engine import Budget, same_pages
from cxlkv.numbers import is_whole
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

AT_ONCE_BYTES = 32 << 20  # of keys and values that are fetched to be summarised
ROOM_SHARE = 4
"""index="auto" leaves the device so many times what summaries take, for the hot buffer and others'
tensors."""

Named = tuple[int, int, int]  # part, page and generation


class Marks(NamedTuple):
    """Memory for a choice on its way: the pages' scores, float32 [requests, kv_heads, pages_max],
    and what score() keeps of queries."""

    scores: torch.Tensor
    scratch: Scratch


class DeviceIndex:
    """Summaries by layer, uint8 [pages, kv_heads, bytes], and which of them a request's pages have.

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
        self._of_layer = layer_places(layout, pool.pages.geometry["record_layers"])
        parts = pool.pages.geometry["part_count"]
        self._layers = [
            [layer for layer, (of, _) in enumerate(self._of_layer) if of == part]
            for part in range(parts)
        ]
        dims = layout.head_dim + layout.value_head_dim
        page_bytes = layout.page_tokens * layout.kv_heads * dims * DTYPES[layout.dtype].itemsize
        self._at_once = max(1, AT_ONCE_BYTES // page_bytes)
        shape = (pages, layout.kv_heads, self.form.bytes)
        check_room(layout.layers * torch.Size(shape).numel(), device, "the index")
        self.summaries = [
            torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layout.layers)
        ]
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

    def refresh(self, request: int, sequence: Sequence) -> None:
        """Take in the pages that were completed since the last call. Raises MemoryShortError,
        CorruptError."""
        tokens = self._layout.page_tokens
        for part, layers in enumerate(self._layers):
            names = self._names[part][request]
            first = len(names)
            if len(sequence) // tokens <= first:
                continue
            found = sequence.places(layers[0], first)
            there = (found.keys >= 0) & (found.descriptors >= 0)
            rows = zip(found.pages.tolist(), found.generations.tolist(), there, strict=True)
            came = [(part, page, of) if has else None for page, of, has in rows]
            self._make(sequence, part, [(first + i, one) for i, one in enumerate(came) if one])
            names += came
            span = slice(first, len(names))
            numbers = [-1 if one is None else self._held[one][0] for one in came]
            self._host[part, request, span] = torch.tensor(numbers, dtype=torch.int32)
            self._slots[part, request, span].copy_(
                self._host[part, request, span], non_blocking=True
            )

    def _make(self, sequence: Sequence, part: int, came: list[tuple[int, Named]]) -> None:
        """Count this request as a holder of these pages; summarise pages that had no holder."""
        new = [(at, one) for at, one in came if one not in self._held]
        if len(new) > len(self._free[part]):
            raise MemoryShortError(
                f"the device's index has room for {len(self.summaries[0])} pages: make the "
                "decoder with more index_pages, or remove() a request"
            )
        slots = [self._free[part].pop() for _ in new]
        try:
            for begin in range(0, len(new), self._at_once):
                end = begin + self._at_once
                at = np.array([place for place, _ in new[begin:end]], np.int32)
                to = torch.tensor(slots[begin:end], device=self._device)
                for layer in self._layers[part]:
                    self.summaries[layer][to] = self._summarised(sequence, layer, at)
        except BaseException:
            self._free[part] += slots
            raise
        for slot, (_, one) in zip(slots, new, strict=True):
            self._held[one] = [slot, 0]
        for _, one in came:
            self._held[one][1] += 1

    def _summarised(
        self, sequence: Sequence, layer: int, pages: npt.NDArray[np.int32]
    ) -> torch.Tensor:
        """uint8 [pages, kv_heads, form.bytes]; fetch() verifies keys and values by their CRCs."""
        layout, form = self._layout, self.form
        picked = same_pages(pages, layout.kv_heads)
        shape = (1, layout.kv_heads, len(pages), layout.page_tokens)
        keys, values = (
            torch.empty((*shape, dim), dtype=DTYPES[layout.dtype])
            for dim in (layout.head_dim, layout.value_head_dim)
        )
        sequence.fetch(layer, picked, (keys, values))
        here = keys[0].to(self._device)
        if form.name == "mean_std":
            wide = here.float()
            made = torch.stack([wide.mean(2), wide.std(2, correction=0)], 2).bfloat16()
            flat = made.transpose(0, 1).flatten(2).contiguous().view(torch.uint8)
            return torch.nn.functional.pad(flat, (0, form.bytes - flat.shape[2]))
        rows = here.permute(1, 2, 0, 3).flatten(0, 1)
        sketch = form.name == "sketch"
        made_here = encode(rows, None, page_tokens=layout.page_tokens, sketch=sketch)
        return made_here.digests if made_here.sketches is None else made_here.sketches

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


def _stored(method: str, layout: KVLayout) -> torch.dtype:
    return torch.bfloat16 if method == "mean_std" else DTYPES[layout.dtype]


def _check_pages(pages: int | None, most: int) -> int:
    if pages is None:
        return most
    if not is_whole(pages, 1, most):
        raise BadArgumentError(f"index_pages={pages!r:.40}: 1 to {most}, requests x pages_max")
    return pages
