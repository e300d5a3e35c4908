"""Copies pages through pinned buffers where the GPU driver cannot register the pool.

The host copies chosen pages, and verifies them, into a buffer while the GPU's DMA empties others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from cxlkv.arrays import memory_of
from cxlkv.errors import BadArgumentError, ClosedError, MemoryShortError, UnsupportedError
from cxlkv.gpu import streams
from cxlkv.gpu.pieces import Piece, fetched_pieces
from cxlkv.layout import format_bytes, parse_bytes
from cxlkv.ndp.engine import Selection, with_axis
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch

BUFFER_BYTES = 16 << 20
BUFFERS = 3
"""One that is filled, one that is emptied, one that is ready: neither side waits for the other
over small differences."""
ALIGNMENT_BYTES = 256


class Waitable(Protocol):
    """What torch.cuda.Event offers of this module's needs."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass
class Buffer:
    """busy: by what its last contents were read, which may not be done; None: it is not."""

    memory: torch.Tensor
    busy: Waitable | None = None


class Ring:
    """Buffers in turn; take() waits until the device has read what was in the next one."""

    def __init__(self, memory: list[torch.Tensor]):
        self.buffers = [Buffer(area) for area in memory]
        self.waits = 0
        """How often a buffer was still busy when its turn came."""
        self._next = 0

    def take(self) -> Buffer:
        buffer = self.buffers[self._next]
        self._next = (self._next + 1) % len(self.buffers)
        if buffer.busy is not None:
            self.waits += not buffer.busy.query()
            buffer.busy.synchronize()
            buffer.busy = None
        return buffer


@dataclass(frozen=True)
class Staged:
    """Pages on the device: keys and values [lists, kv_heads, k, page_tokens, dim] as fetch() gives
    them, there for what a stream does after wait(). Values that are the first channels of the keys
    are a view of these. Of get(decoded=False): uint8 [lists, kv_heads, k, piece_bytes] of what is
    encoded, which kernels.attend takes by the addresses of tables()."""

    keys: torch.Tensor
    values: torch.Tensor
    event: torch.cuda.Event

    def wait(self) -> None:
        """Make what is queued on the current stream from now on wait for the copies."""
        streams.current(self.keys.device).wait_event(self.event)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys_at, values_at): int64 [lists, kv_heads, k], where each piece is on the device."""
        return _pieces_at(self.keys), _pieces_at(self.values)


class Staging:
    """Pinned buffers and a stream for one device. One thread uses it at a time.

    On the CPU, pages go through the same ring, without events.
    """

    def __init__(
        self,
        pool: CXLPool,
        device: torch.device | str = "cuda",
        *,
        buffer: str | int = BUFFER_BYTES,
        buffers: int = BUFFERS,
    ):
        """buffer: bytes of each of them, pinned at once; a page of all heads must fit.

        Raises UnsupportedError without CUDA, MemoryShortError when so much cannot be pinned.
        """
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"pages are staged for 'cpu' or 'cuda', not for {self.device}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(f"{self.device}: no CUDA device, or a torch without CUDA")
        if buffers < 1:
            raise BadArgumentError(f"{buffers} buffers: 1 or more")
        self.buffer_bytes = parse_bytes(buffer)
        self._layout = pool.layout
        self._stream = streams.new(self.device)
        self._ring: Ring | None = Ring([self._pinned() for _ in range(buffers)])

    def _pinned(self) -> torch.Tensor:
        try:
            return streams.pinned(self.buffer_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise MemoryShortError(
                f"{format_bytes(self.buffer_bytes)} of pinned memory cannot be had: {error}. Ask "
                "for smaller buffers"
            ) from error

    @property
    def waits(self) -> int:
        """Number of times that the host waited because every buffer was still in flight."""
        return self._open().waits

    def get(
        self,
        batch: Batch,
        layer: int,
        picked: Selection,
        out: Sequence[torch.Tensor] | None = None,
        *,
        decoded: bool = True,
    ) -> Staged:
        """Copy chosen pages, open tails too, to the device; each is verified against its CRC.

        What does not fit into one buffer goes in several, page after page of all lists. out: keys
        and values on the device, keys alone where these have the values, written after what the
        current stream has now; else they are made.
        decoded=False: what has an encoding stays as the pool keeps it, and so many fewer bytes
        cross the link. Raises what Batch.fetch raises, before anything of that buffer is sent.
        """
        ring = self._open()
        rows = with_axis(picked)
        lists, heads, k = rows.pages.shape
        pieces = fetched_pieces(self._layout, decoded)
        targets = self._targets((lists, heads, k), pieces, out)
        step = self._columns(lists * heads, pieces)
        for first in range(0, k, step):
            part = replace(
                rows,
                pages=np.ascontiguousarray(rows.pages[:, :, first : first + step]),
                scores=np.ascontiguousarray(rows.scores[:, :, first : first + step]),
            )
            buffer = ring.take()
            staged = self._fetch(buffer.memory, batch, layer, part, pieces)
            end = first + part.pages.shape[2]
            buffer.busy = self._send([to[:, :, first:end] for to in targets], staged)
        keys = targets[0]
        values = targets[1] if len(targets) > 1 else keys[..., : self._layout.value_head_dim]
        return Staged(keys, values, self._event())

    def _open(self) -> Ring:
        if self._ring is None:
            raise ClosedError("the staging is closed")
        return self._ring

    def _columns(self, rows: int, pieces: tuple[Piece, Piece]) -> int:
        """Pages of each list that fit into a buffer together."""
        page_bytes = rows * sum(piece.bytes for piece in pieces)
        fitting = (self.buffer_bytes - 2 * ALIGNMENT_BYTES) // max(page_bytes, 1)
        if fitting < 1:
            raise BadArgumentError(
                f"a page of each of {rows} lists and heads has {format_bytes(page_bytes)}, a "
                f"buffer {format_bytes(self.buffer_bytes)}: make Staging with larger ones, or ask "
                "for fewer lists at once"
            )
        return fitting

    def _targets(
        self,
        lists: tuple[int, int, int],
        pieces: tuple[Piece, Piece],
        out: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        """The outputs for keys and values; for keys only, where the values are in them."""
        own = pieces if self._layout.shape.values == "own" else pieces[:1]
        if out is not None:
            if not len(own) <= len(out) <= 2:
                raise BadArgumentError(f"out is {len(out)} tensors: keys and values are wanted")
            for name, array, piece in zip(("keys", "values"), out, pieces, strict=False):
                right = array.dtype == piece.dtype and array.device.type == self.device.type
                wanted = (*lists, *piece.shape)
                if not right or tuple(array.shape) != wanted:
                    raise BadArgumentError(
                        f"out {name}: {array.dtype} {tuple(array.shape)} on {array.device}, wanted "
                        f"{piece.dtype} {wanted} on {self.device}"
                    )
            self._stream.wait_stream(streams.current(self.device))
            for array in out:
                streams.lend(array, self._stream)
            return out
        # Made on the stream that writes them, so that nothing has to be waited for; the current
        # stream reads them, so their memory is not given away before it has.
        with streams.use(self._stream):
            made = [
                torch.empty((*lists, *piece.shape), dtype=piece.dtype, device=self.device)
                for piece in own
            ]
        for array in made:
            streams.lend(array, streams.current(self.device))
        return made

    def _fetch(
        self,
        memory: torch.Tensor,
        batch: Batch,
        layer: int,
        part: Selection,
        pieces: tuple[Piece, Piece],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages in the buffer: keys, then values."""
        views, at = [], 0
        for piece in pieces:
            size = int(np.prod(part.pages.shape)) * piece.bytes
            shape = (*part.pages.shape, *piece.shape)
            views.append(memory[at : at + size].view(piece.dtype).view(shape))
            at += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        decoded = all(piece.code is None for piece in pieces)
        batch.fetch(layer, part, (views[0], views[1]), decoded=decoded)
        return views[0], views[1]

    def _send(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> torch.cuda.Event:
        with streams.use(self._stream):
            for target, source in zip(targets, sources, strict=False):
                target.copy_(source, non_blocking=True)
        return self._event()

    def _event(self) -> torch.cuda.Event:
        event = streams.event(self.device)
        event.record(self._stream)
        return event

    def close(self) -> None:
        """Wait for copies in flight and free the buffers; a second call does nothing."""
        if self._ring is not None:
            for buffer in self._ring.buffers:
                if buffer.busy is not None:
                    buffer.busy.synchronize()
            self._ring = None


def _pieces_at(pages: torch.Tensor) -> torch.Tensor:
    """Addresses by the first three axes."""
    at = torch.full((), memory_of(pages, "pages"), dtype=torch.int64, device=pages.device)
    for count, stride in zip(pages.shape[:3], pages.stride()[:3], strict=True):
        steps = torch.arange(count, dtype=torch.int64, device=pages.device)
        at = at[..., None] + steps * (stride * pages.element_size())
    return at
