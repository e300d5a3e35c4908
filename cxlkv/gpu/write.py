"""Write-through: a prefill chunk's K and V become pages of the pool, made on the GPU.

Pieces, digests, sketches and checksums are made there, and go to the pool by DMA while the model
computes the next layer; the host touches metadata only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import PageIds, memory_of
from cxlkv.errors import BadArgumentError, ClosedError, OrderError, UnevenError
from cxlkv.gpu import streams
from cxlkv.gpu.copier import Copier, Pieces, merge, move
from cxlkv.gpu.driver import index_of
from cxlkv.gpu.pieces import DTYPES
from cxlkv.gpu.staging import Waitable
from cxlkv.kernels.encode import Encoded, encode
from cxlkv.machine.lifetime import Closing
from cxlkv.pages import NO_PAGE, Pages, layer_places, places_of
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch, Sequence

KINDS = ("digest", "sketch", "key", "value")
NO_CUTS = np.empty(0, np.int64)


@dataclass
class Sent:
    """A layer on its way. memory: what is read until `event`; by_host: copies from pinned memory
    into the pool, for the host to make after it."""

    memory: object
    event: Waitable
    by_host: Pieces | None = None

    @property
    def has_arrived(self) -> bool:
        return self.event.query()

    def arrive(self) -> None:
        """Wait for the copy, and make the host's copies."""
        self.event.synchronize()
        if self.by_host is not None:
            move(self.by_host)


@dataclass
class Chunk:
    """Pages of which some layers are still to come."""

    batch: Batch
    starts: npt.NDArray[np.int32]  # in pages
    pages: PageIds  # [parts, pages]
    rewind: int | None
    sums: torch.Tensor  # int32 [layers, pages, kv_heads, 4] on the host
    layer: int = 0  # the next one
    sent: deque[Sent] = field(default_factory=deque)


@dataclass
class State:
    """Holds what is open, apart from WriteThrough, so that it can be cleaned up without it."""

    pages: Pages
    chunk: Chunk | None = None

    def abandon(self) -> None:
        """Free the pages once no device writes to them any more."""
        chunk, self.chunk = self.chunk, None
        if chunk is None:
            return
        for sent in chunk.sent:
            sent.event.synchronize()
        given = chunk.pages[chunk.pages != NO_PAGE]
        if len(given):
            self.pages.free(given)


class WriteThrough(Closing):
    """Writes chunks of whole pages, one after the other: put() for every layer, then finish().

    One thread uses it at a time. Closing the pool, or dropping this object, abandons what is open.
    """

    def __init__(self, pool: CXLPool, copier: Copier | None = None):
        """copier: of a Mapping of this pool, by whose stream a GPU writes into it. None: through
        pinned memory, from which the host copies, where the pool cannot be registered or hosts
        share it."""
        if copier is not None and copier.mapping.pool is not pool:
            raise BadArgumentError("the copier is of another pool")
        if copier is not None and not copier.mapping.writable:
            raise BadArgumentError(
                "hosts share this pool, so no device may write to it: copier=None"
            )
        self.pool = pool
        self._copier = copier
        self._geometry = pool.pages.geometry
        self._parts = layer_places(pool.layout, self._geometry)
        self._stream: torch.cuda.Stream | None = None  # of copies to pinned memory
        self._state = State(pool.pages)
        self._closer = weakref.finalize(self, self._state.abandon)
        self._closer.atexit = False  # the process's pages are freed anyway
        pool.before_close(self._end)

    def put(
        self,
        to: Sequence | Batch,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None,
        starts: npt.ArrayLike | None = None,
        *,
        rewind: int | None = None,
        ahead: Sequences[int] | None = None,
    ) -> None:
        """Write a chunk's layer: k [rows, kv_heads, head_dim] and v on the device, any strides.

        Layers come in order, 0 first: it begins a chunk, and takes the pages of all layers. starts
        is as in Batch.append, with whole pages for every sequence, which ends at the end of a page;
        a single sequence needs none. put() queues its work and waits for nothing; what the current
        stream does next may overwrite k and v. rewind: as in append(). ahead, with layer 0: how
        many tokens the caller will append() to each sequence before finish().

        Raises PoolFullError, OrderError, UnevenError, BadArgumentError; then the chunk is what it
        was before.
        """
        self._check_open()
        rows = self._rows(k, v)
        chunk = self._state.chunk
        if layer != (chunk.layer if chunk else 0):
            raise OrderError(
                f"layer {layer}: the next one is {chunk.layer if chunk else 0}; a chunk ends with "
                "finish() or abandon()"
            )
        if chunk is None:
            chunk = self._begin(to, rows, starts, rewind, ahead)
        else:
            batch, offsets = self._starts(to, rows, starts)
            if batch is not chunk.batch or not np.array_equal(offsets, chunk.starts):
                raise BadArgumentError("the chunk's layers have the same sequences and starts")
        try:
            layout = self.pool.layout
            encoded = encode(
                k,
                v,
                page_tokens=layout.page_tokens,
                sketch=self.pool.sketch,
                encodings=(layout.k_encoding, layout.v_encoding),
            )
            self._drain(chunk)
            chunk.sent.append(self._send(chunk, layer, encoded))
        except BaseException:
            if layer == 0:  # nothing of the chunk is there yet
                self.abandon()
            raise
        chunk.layer += 1

    def finish(self, *, verify: bool = False) -> None:
        """Wait until all is in the pool, and make the pages the sequences' (Batch.attach).

        verify: compute their CRCs here again before. Raises OrderError when layers are missing, and
        what attach() raises; the chunk is open then, for abandon().
        """
        self._check_open()
        chunk = self._state.chunk
        layers = self.pool.layout.layers
        if chunk is None or chunk.layer < layers:
            there = chunk.layer if chunk else 0
            raise OrderError(f"{there} of {layers} layers were put: the chunk is not whole")
        self._drain(chunk, wait=True)
        sums = chunk.sums.numpy() if self.pool.checksum else None
        chunk.batch.attach(chunk.pages, chunk.starts, sums, rewind=chunk.rewind, verify=verify)
        self._state.chunk = None

    def abandon(self) -> None:
        """Free the pages of the open chunk, if there is one; sequences stay as they are."""
        self._state.abandon()

    close = abandon

    def _end(self) -> None:
        """End for good: the pool is closed."""
        self._closer()

    # ---- what is asked ----

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise ClosedError("the pool was closed")

    def _rows(self, k: torch.Tensor, v: torch.Tensor | None) -> int:
        layout = self.pool.layout
        dtype = DTYPES[layout.dtype]
        given = {"k": (k, layout.head_dim)}
        if (v is not None) != (layout.values == "own"):
            stored = "the pool stores them" if v is None else "a prefix of the keys is stored"
            raise BadArgumentError(f"v is {'None' if v is None else 'given'}: {stored}")
        if v is not None:
            given["v"] = (v, layout.value_head_dim)
        for name, (tensor, dim) in given.items():
            shape = (k.shape[0] if k.ndim else 0, layout.kv_heads, dim)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise BadArgumentError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, wanted {dtype} {shape}"
                )
            if self._copier is not None and not _same_device(tensor.device, self._copier.device):
                raise BadArgumentError(
                    f"{name} lies on {tensor.device}, the copier is for {self._copier.device}"
                )
        return shape[0]

    def _starts(
        self, to: Sequence | Batch, rows: int, starts: npt.ArrayLike | None
    ) -> tuple[Batch, npt.NDArray[np.int32]]:
        """The sequences, and their pages, from tokens."""
        if starts is None and not isinstance(to, Sequence):
            raise BadArgumentError("starts: a batch needs them")
        batch = to._own() if isinstance(to, Sequence) else to
        offsets = batch._starts([0, rows] if starts is None else starts)
        tokens = self.pool.layout.page_tokens
        if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
            raise BadArgumentError(f"starts {offsets.tolist()} for {rows} rows")
        if rows == 0:
            raise BadArgumentError("a chunk of no tokens")
        if (offsets % tokens).any():
            raise BadArgumentError(
                f"starts {offsets.tolist()}: every sequence fills pages of {tokens} tokens here; "
                "append() takes the rest"
            )
        return batch, offsets // tokens

    # ---- pages ----

    def _begin(
        self,
        to: Sequence | Batch,
        rows: int,
        starts: npt.ArrayLike | None,
        rewind: int | None,
        ahead: Sequences[int] | None,
    ) -> Chunk:
        layout = self.pool.layout
        batch, offsets = self._starts(to, rows, starts)
        if batch not in self.pool:
            raise BadArgumentError("the sequences are of another pool")
        ahead = [0] * len(batch.sequences) if ahead is None else ahead
        wanted = self._wanted(batch, offsets, rewind, ahead)
        pages, count = np.full(wanted.shape, NO_PAGE, np.uint32), int(wanted.sum())
        pages[wanted] = self.pool.pages.retry(lambda: self.pool.pages.alloc(count), count)
        shape = (layout.layers, int(offsets[-1]), layout.kv_heads, 4)
        writer = torch.device("cpu") if self._copier is None else self._copier.device
        sums = streams.pinned(*shape, dtype=torch.int32, device=writer)
        made = Chunk(batch, offsets, pages, rewind, sums)
        self._state.chunk = made
        return made

    def _wanted(
        self,
        batch: Batch,
        offsets: npt.NDArray[np.int32],
        rewind: int | None,
        ahead: Sequences[int],
    ) -> npt.NDArray[np.bool_]:
        """[parts, pages]: False for those that no token will see, behind their part's window."""
        layout = self.pool.layout
        windows = dict(zip([place.part for place in self._parts], layout.windows, strict=True))
        wanted = np.ones((self._geometry["part_count"], int(offsets[-1])), np.bool_)
        spans = zip(batch.sequences, ahead, offsets[:-1], offsets[1:], strict=True)
        for sequence, more, first, end in spans:
            before = len(sequence) + more
            if first == end:
                continue
            if sequence.tokens(0) != len(sequence):
                raise UnevenError("a sequence's layers have different lengths: append the rest")
            if before % layout.page_tokens:
                raise BadArgumentError(
                    f"a sequence has {before} tokens, no multiple of {layout.page_tokens}: append "
                    "up to there first"
                )
            length = before + int(end - first) * layout.page_tokens
            back = before if rewind is None else max(0, length - rewind)
            for part, window in windows.items():
                if window is not None and back >= window:
                    kept = (back - window + 1 - before) // layout.page_tokens
                    wanted[part, first : max(first, min(first + kept, end))] = False
        return wanted

    # ---- bytes ----

    def _targets(self, chunk: Chunk, layer: int) -> dict[str, npt.NDArray[np.int64]]:
        """The region's offsets of each page's pieces, by kind; negative: no page."""
        pages = chunk.pages[self._parts[layer][0]]
        there = pages != NO_PAGE
        found = places_of(self._geometry, self._parts[layer], np.where(there, pages, 0))
        return {
            kind: np.where(there, offsets, -1)
            for kind, offsets in zip(KINDS, found, strict=True)
            if offsets is not None
        }

    def _send(self, chunk: Chunk, layer: int, encoded: Encoded) -> Sent:
        made = (encoded.digests, encoded.sketches, encoded.keys, encoded.values)
        tensors = {kind: t for kind, t in zip(KINDS, made, strict=True) if t is not None}
        if self._copier is None:
            return self._send_to_host(chunk, layer, tensors, encoded.checksums)
        pieces = self._pieces(chunk, layer, tensors, self._copier.mapping.device_address)
        pieces = _with(pieces, encoded.checksums, chunk.sums[layer])
        sources, targets = (torch.from_numpy(at) for at in (pieces.sources, pieces.targets))
        done = self._copier.copy(sources, targets, pieces.sizes, "to_host")
        return Sent(encoded, done.event)

    def _pieces(
        self, chunk: Chunk, layer: int, tensors: dict[str, torch.Tensor], base: int
    ) -> Pieces:
        """A page's pieces of all heads lie side by side, here and in the region."""
        sources, targets, sizes = [], [], []
        for kind, offsets in self._targets(chunk, layer).items():
            tensor = tensors[kind]
            size = tensor.shape[1] * tensor.shape[2]
            there = np.flatnonzero(offsets >= 0)
            sources.append(memory_of(tensor, kind) + there * size)
            targets.append(base + offsets[there])
            sizes.append(np.full(len(there), size, np.int64))
        return Pieces(*(np.concatenate(row) for row in (sources, targets, sizes)))

    def _send_to_host(
        self,
        chunk: Chunk,
        layer: int,
        tensors: dict[str, torch.Tensor],
        checksums: torch.Tensor,
    ) -> Sent:
        """Into pinned memory; what arrive() does, copies it into the pool."""
        device = checksums.device
        base = self.pool.pages.memory()[0]
        if self._stream is None:
            self._stream = streams.new(device)
        self._stream.wait_stream(streams.current(device))
        given = {**tensors, "checksums": checksums}
        pinned = {
            name: streams.pinned(*tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in given.items()
        }
        with streams.use(self._stream):
            for name, tensor in given.items():
                pinned[name].copy_(tensor, non_blocking=True)
        event = streams.event(device)
        event.record(self._stream)
        sums = pinned.pop("checksums")
        pieces = _with(self._merged(chunk, layer, pinned, base), sums, chunk.sums[layer])
        return Sent((given, pinned, sums), event, pieces)

    def _merged(
        self, chunk: Chunk, layer: int, tensors: dict[str, torch.Tensor], base: int
    ) -> Pieces:
        return merge(self._pieces(chunk, layer, tensors, base), NO_CUTS)

    def _drain(self, chunk: Chunk, wait: bool = False) -> None:
        """Lets go of what has arrived, so that memory on the device does not grow with layers."""
        while chunk.sent and (wait or chunk.sent[0].has_arrived):
            chunk.sent[0].arrive()
            chunk.sent.popleft()


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.type != "cuda" or index_of(one) == index_of(other))


def _with(pieces: Pieces, source: torch.Tensor, target: torch.Tensor) -> Pieces:
    """Add a copy of a whole tensor, which is contiguous, as its target is."""
    one = (memory_of(source, "source"), memory_of(target, "target"), source.nbytes)
    return Pieces(*(np.append(row, value) for row, value in zip(pieces, one, strict=True)))
