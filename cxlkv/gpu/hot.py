"""The hot buffer: slots in GPU memory that keep a request's steady pages between decode steps.

Each layer and kv head of a request has its own slots; `kernels/slots.py` says which page is where.
What a step does with it, all on the device:

    held = hot.residents(layer, tags)         attend to these while the selection is under way
    found = hot.assign(layer, pages, tags)    after that: slots change hands here
    copy from the sources to found.miss_targets, attend, merge
    hot.invalidate(layer, found, failed)      where bytes did not arrive

Slots of pages that were evicted are written by the copy, so it must come after what reads them: on
one stream, or ordered by events. Nothing here waits for the device but `counters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import memory_of
from cxlkv.errors import BadArgumentError, MemoryShortError, UnsupportedError
from cxlkv.gpu.pieces import Piece, piece_of, pieces_of
from cxlkv.kernels import slots as kernel
from cxlkv.kernels.slots import SLOTS_MAX, Assigned, Slots
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine.regions import check_memory
from cxlkv.numbers import is_whole

ALIGNMENT_BYTES = 16
"""Pieces begin at multiples of this: kernels read words of 16 bytes."""

SlotCounts = int | Sequence[int] | Sequence[Sequence[int]]


class Residents(NamedTuple):
    """What the slots of a layer hold, each tensor [requests, kv_heads, slots of the layer]."""

    pages: torch.Tensor  # int32, -1 where a slot is free
    keys_at: torch.Tensor  # int64; always the same tensor, also where a slot is free
    values_at: torch.Tensor | None


class Counters(NamedTuple):
    """Since the hot buffer was made, of pages without hints'. errors: page numbers that cannot
    be."""

    hits: int
    misses: int
    errors: int


class HotBuffer:
    """Slots for `requests` requests at a time, each of the layers and kv heads given.

    slots: pages that a head keeps, as one number, one for each layer, or for each layer one for
    each head; not fewer than a selection has pages. pages_max: pages that a request may have.
    head_dim, value_head_dim: channels of K and V; value_head_dim None: values are a prefix of the
    keys. A piece in a slot is [page_tokens, channels], or codes where keys or values have one of
    `encodings`, contiguous, at a multiple of 16 bytes.

    All memory is taken here. Raises MemoryShortError, and then has taken none; BadArgumentError.
    """

    def __init__(
        self,
        *,
        requests: int,
        layers: int,
        kv_heads: int,
        slots: SlotCounts,
        pages_max: int,
        page_tokens: int,
        head_dim: int,
        value_head_dim: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        encodings: tuple[str, str] = ("none", "none"),
    ) -> None:
        sizes = {
            "requests": requests,
            "layers": layers,
            "kv_heads": kv_heads,
            "pages_max": pages_max,
            "page_tokens": page_tokens,
            "head_dim": head_dim,
            "value_head_dim": 1 if value_head_dim is None else value_head_dim,
        }
        for name, size in sizes.items():
            if not 1 <= size < 2**31:
                raise BadArgumentError(f"{name} is {size}: it must be a whole number above 0")
        self.requests, self.layers, self.kv_heads = requests, layers, kv_heads
        self.pages_max, self.page_tokens = pages_max, page_tokens
        self.dtype, self.device = dtype, torch.device(device)
        dims = (head_dim,) if value_head_dim is None else (head_dim, value_head_dim)
        self._pieces = [
            piece_of(page_tokens, dim, dtype, encodings[i], values=i == 1)
            for i, dim in enumerate(dims)
        ]
        self.limits = slots_of_heads(slots, layers, kv_heads)
        self.bytes = self._bytes_wanted()
        check_room(self.bytes, self.device)
        state = self._take()
        if state is None:
            raise MemoryShortError(_short_text(self.bytes, self.device))
        self._slot_bytes, self._pages_of_slots, self._counters, self._state = state
        self._of_hints = [
            replace(slots, hits=hits, misses=misses, errors=errors)
            for slots, (hits, misses, errors) in zip(self._state, self._counters[1], strict=True)
        ]

    def assign(
        self,
        layer: int,
        pages: torch.Tensor,
        tags: torch.Tensor,
        out: Assigned | None = None,
        *,
        is_hint: bool = False,
    ) -> Assigned:
        """Gives each page of a selection a slot; where `missed`, its bytes are still to come.

        pages: int32 [requests, kv_heads, k], -1 padded. tags: int64 [requests, pages_max], the
        identity of each page's bytes now. out: from `outputs`, for CUDA graphs. is_hint: counted
        apart. See slots.assign.
        """
        return kernel.assign(self._layer(layer, is_hint), pages, tags, out)

    def outputs(self, k: int) -> Assigned:
        """Memory for what `assign` returns for k pages a head; one for all layers is enough when
        each is used up before the next."""
        least = min(map(min, self.limits))
        if not 1 <= k <= least:
            raise BadArgumentError(
                f"k is {k}: a head has {least} slots, so from 1 to {least} pages"
            )
        values = len(self._pieces) == 2
        return kernel.new_assigned(
            self.requests, self.kv_heads, k, values=values, device=self.device
        )

    def residents(
        self, layer: int, tags: torch.Tensor, out: torch.Tensor | None = None
    ) -> Residents:
        """All that a layer holds and that is still what its tags say. out: memory for the pages,
        int32 [requests, kv_heads, slots of the layer]."""
        state = self._layer(layer)
        pages = kernel.residents(state, tags, out)
        return Residents(pages, state.slot_keys_at, state.slot_values_at)

    def invalidate(
        self, layer: int, assigned: Assigned, failed: torch.Tensor | None = None
    ) -> None:
        """Drop misses whose bytes did not arrive, before the next `assign` counts them as hits.

        failed: on the device, of a shape that expands to [requests, kv_heads, k]: those that are
        not 0; None: all. See slots.invalidate.
        """
        kernel.invalidate(self._layer(layer), assigned, failed)

    def forget(self, request: int) -> None:
        """The request has ended: its slots are free, in all layers."""
        if not 0 <= request < self.requests:
            raise BadArgumentError(f"request {request}: there are {self.requests}, from 0 on")
        self._pages_of_slots[request].fill_(-1)

    def counters(self) -> Counters:
        """Counters of all requests and layers. Waits for the device."""
        return Counters(*self._counters[0].sum((0, 2)).tolist())

    def by_layer(self) -> npt.NDArray[np.int64]:
        """The same [2, 3, layers]: of pages, and of those that hints named."""
        return self._counters.sum(3).transpose(1, 2).cpu().numpy()

    def pieces(self, layer: int, request: int, head: int) -> tuple[torch.Tensor, ...]:
        """Keys and, where they are stored, values of a head's slots: [slots, page_tokens, dim], or
        uint8 [slots, piece_bytes] of codes."""
        limits = self.limits[layer]
        first, last = sum(limits[:head]), sum(limits[: head + 1])
        return tuple(
            part[request, first:last, : piece.bytes]
            .view(piece.dtype)
            .view(limits[head], *piece.shape)
            for part, piece in zip(self._slot_bytes[layer], self._pieces, strict=True)
        )

    def _layer(self, layer: int, is_hint: bool = False) -> Slots:
        if not 0 <= layer < self.layers:
            raise BadArgumentError(f"layer {layer}: there are {self.layers}, from 0 on")
        return self._of_hints[layer] if is_hint else self._state[layer]

    def _bytes_wanted(self) -> int:
        slot_bytes = sum(map(_stride_bytes, self._pieces))
        pieces = self.requests * sum(map(sum, self.limits)) * slot_bytes
        tables = sum(
            kernel.slots_bytes(
                self.requests,
                self.kv_heads,
                max(row),
                self.pages_max,
                values=len(self._pieces) == 2,
            )
            for row in self.limits
        )
        return pieces + tables + 6 * self.layers * self.requests * 8

    def _take(
        self,
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor, list[Slots]] | None:
        """All memory, or None where the device has too little: nothing of it is kept then."""
        try:
            tables = self.kv_heads * sum(map(max, self.limits))
            pages_of_slots = torch.full(
                (self.requests, tables), -1, dtype=torch.int32, device=self.device
            )
            counters = torch.zeros(
                (2, self.layers, 3, self.requests), dtype=torch.int64, device=self.device
            )
            slot_bytes = [self._take_pieces(row) for row in self.limits]
            state, first = [], 0
            for layer, (row, parts) in enumerate(zip(self.limits, slot_bytes, strict=True)):
                last = first + self.kv_heads * max(row)
                addresses = [self._addresses(part, row) for part in parts]
                state.append(
                    kernel.new_slots(
                        row,
                        self.pages_max,
                        addresses[0],
                        addresses[1] if len(addresses) == 2 else None,
                        page_of_slot=pages_of_slots[:, first:last].view(
                            self.requests, self.kv_heads, max(row)
                        ),
                        counters=counters[0, layer],
                    )
                )
                first = last
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                return None
            raise
        return slot_bytes, pages_of_slots, counters, state

    def _take_pieces(self, limits: Sequence[int]) -> list[torch.Tensor]:
        """Memory for the pieces of one layer, keys and values: uint8 [requests, slots of all heads,
        bytes of a piece]."""
        return [
            torch.empty(
                (self.requests, sum(limits), _stride_bytes(piece)),
                dtype=torch.uint8,
                device=self.device,
            )
            for piece in self._pieces
        ]

    def _addresses(self, part: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
        """int64 [requests, kv_heads, max(limits)]: where the slots of a layer are, 0 beyond."""
        numbers = torch.arange(self.requests * sum(limits), device=self.device)
        at = (memory_of(part, "part") + numbers * part.stride(1)).view(self.requests, sum(limits))
        table = torch.zeros(
            (self.requests, self.kv_heads, max(limits)), dtype=torch.int64, device=self.device
        )
        first = 0
        for head, limit in enumerate(limits):
            table[:, head, :limit] = at[:, first : first + limit]
            first += limit
        return table


def slot_bytes(layout: KVLayout) -> int:
    """A slot's, of one head."""
    return sum(map(_stride_bytes, pieces_of(layout)[: 1 + (layout.values == "own")]))


def _stride_bytes(piece: Piece) -> int:
    return -(-piece.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slots_of_heads(slots: SlotCounts, layers: int, kv_heads: int) -> list[list[int]]:
    """The slots of each head, by layer."""
    by_layer = _spread(slots, layers)
    found = [_spread(row, kv_heads) for row in by_layer]
    if len(found) != layers or any(len(row) != kv_heads for row in found):
        raise BadArgumentError(
            f"slots={slots!r}: one number, one for each of {layers} layers, or for each layer one "
            f"for each of {kv_heads} heads"
        )
    if not all(is_whole(count, 1, SLOTS_MAX) for row in found for count in row):
        raise BadArgumentError(f"slots={slots!r}: a head has from 1 to {SLOTS_MAX} slots")
    return found


def _spread(given: object, count: int) -> list[int]:
    """The numbers of a list; so many times one that is given alone."""
    return list(given) if isinstance(given, Iterable) else [cast(int, given)] * count


def check_room(wanted_bytes: int, device: torch.device, what: str = "the hot buffer") -> None:
    """Raises MemoryShortError when the device has less free; UnsupportedError without such one."""
    if device.type == "cpu":
        check_memory(wanted_bytes)
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnsupportedError(
            f"{what} on {device}: this machine and this build of torch have cpu"
            f"{' and cuda' if torch.cuda.is_available() else ' only'}"
        )
    if wanted_bytes > _free_bytes(device):
        raise MemoryShortError(_short_text(wanted_bytes, device, what))


def _free_bytes(device: torch.device) -> int:
    """What the driver has, and what torch keeps of memory that was freed."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + kept_bytes


def _short_text(wanted_bytes: int, device: torch.device, what: str = "the hot buffer") -> str:
    free = "it is not to be had"
    if device.type == "cuda":
        free = f"{device} has {format_bytes(_free_bytes(device))} free"
    return f"{what} wants {format_bytes(wanted_bytes)}, {free}. Take fewer slots, pages or requests"
