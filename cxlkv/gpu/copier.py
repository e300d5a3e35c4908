"""The copier moves bytes between a mapped pool and a GPU, by a kernel or by DMA, the faster one.

Small scattered pieces go by a kernel that reads host memory, large ones and all to the host by the
GPU's DMA engines; docs/explanation/gpu.md has the rule and where its constants come from.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import Pointers, Sizes
from cxlkv.errors import BadArgumentError
from cxlkv.gpu import streams
from cxlkv.gpu.driver import Driver, index_of
from cxlkv.gpu.mapping import Mapping
from cxlkv.ndp import tuning
from cxlkv.ndp.tuning import GpuCopyConstants

Direction = Literal["to_device", "to_host"]
Way = Literal["kernel", "dma"]
WORD_BYTES = 16  # that the kernel copies at once, where sizes allow it


@dataclass(frozen=True)
class Copied:
    """Copies that are queued on a stream; on the CPU they are already done."""

    way: Way
    event: torch.cuda.Event

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make what is queued from now on, on the current stream or this one, wait for them. The
        host does not wait."""
        self.event.wait(stream)

    def synchronize(self) -> None:
        """Block the host until they are done."""
        self.event.synchronize()


class Pieces(NamedTuple):
    """Copies of bytes, by address; the three arrays are of one length."""

    sources: Pointers
    targets: Pointers
    sizes: Sizes


class Copier:
    """Queues copies on a stream of its own. One thread uses it at a time."""

    def __init__(self, mapping: Mapping, constants: GpuCopyConstants | None = None):
        """constants: those that `cxlkv tune --gpu` found for this GPU, or the published ones."""
        self.mapping = mapping
        self.device = mapping.device
        self.constants = constants or tuned(self.device)
        self.stream = streams.new(self.device)

    def copy(
        self,
        source_at: torch.Tensor,
        target_at: torch.Tensor,
        sizes: int | npt.ArrayLike,
        direction: Direction = "to_device",
        *,
        after: torch.cuda.Event | None = None,
    ) -> Copied:
        """Copy n pieces; source_at, target_at: int64 addresses [n], 0 in either: none. sizes: bytes
        of each, or one number for all. No two targets overlap.

        Tables on the CPU: the faster way. Tables on the device: always the kernel, which may be
        captured in a CUDA graph; sizes is one number then, and all addresses are multiples of its
        largest power of two up to 16. The copies begin after all that the current stream has now,
        or after an event; they are done before what follows wait() of the result. The memory of
        both sides must stay until then.

        Raises BadArgumentError; GpuError when the driver refuses.
        """
        if direction not in ("to_device", "to_host"):
            raise BadArgumentError(f"direction {direction!r}: 'to_device' or 'to_host'")
        if source_at.device.type == "cuda" or target_at.device.type == "cuda":
            return self._from_device_tables(source_at, target_at, sizes, direction, after)
        pieces = pieces_of(source_at, target_at, sizes)
        self._check_targets(pieces)
        merged = merge(pieces, self.mapping.cuts)
        way = choose(pieces, merged, direction, self.constants)
        if way == "dma" or self.device.type == "cpu":
            return self._dma(way, merged, after)
        if torch.cuda.is_current_stream_capturing():
            raise BadArgumentError("in a CUDA graph the kernel's tables lie on the device")
        tables = torch.empty((2, len(pieces.sizes)), dtype=torch.int64, pin_memory=True)
        tables.numpy()[:] = pieces.sources, pieces.targets
        return self._kernel(tables, None, int(pieces.sizes[0]), after)

    def _check_targets(self, pieces: Pieces) -> None:
        if self.mapping.writable:
            return
        inside = pieces.targets - self.mapping.device_address
        if ((inside >= 0) & (inside < self.mapping.size)).any():
            raise BadArgumentError("hosts share this pool: a device may only read its memory")

    def _from_device_tables(
        self,
        source_at: torch.Tensor,
        target_at: torch.Tensor,
        sizes: int | npt.ArrayLike,
        direction: Direction,
        after: torch.cuda.Event | None,
    ) -> Copied:
        if source_at.device != target_at.device or self.device.type != "cuda":
            raise BadArgumentError(
                f"tables on {source_at.device} and {target_at.device}, the copier is for "
                f"{self.device}: both on that device, or both on the CPU"
            )
        if direction == "to_host":
            raise BadArgumentError("copies to the host go by DMA: give the tables on the CPU")
        if not isinstance(sizes, int):
            raise BadArgumentError("tables on the device: one size for all pieces")
        return self._kernel(source_at, target_at, sizes, after)

    def _begin(self, after: torch.cuda.Event | None) -> torch.cuda.Stream:
        if after is None:
            self.stream.wait_stream(streams.current(self.device))
        else:
            self.stream.wait_event(after)
        return self.stream

    def _end(self, way: Way, stream: torch.cuda.Stream) -> Copied:
        event = streams.event(self.device)
        event.record(stream)
        return Copied(way, event)

    def _kernel(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        size: int,
        after: torch.cuda.Event | None,
    ) -> Copied:
        """Tables of sources and targets on the device, or pinned and both in one."""
        from cxlkv.kernels.copies import copy_fragments  # Triton, which takes seconds to load

        stream = self._begin(after)
        with streams.use(stream):
            if second is None:
                first, second = first.to(self.device, non_blocking=True).unbind(0)
            else:
                first.record_stream(stream)
                second.record_stream(stream)
            copy_fragments(first, second, size, programs=self.constants.kernel_sms)
        return self._end("kernel", stream)

    def _dma(self, way: Way, pieces: Pieces, after: torch.cuda.Event | None) -> Copied:
        stream = self._begin(after)
        if self.device.type == "cpu":
            with streams.use(stream):
                move(pieces)
            return self._end(way, stream)
        assert self.mapping.driver is not None
        batched = not streams.captures(self.device)
        device = index_of(self.device)
        submit(self.mapping.driver, device, pieces, stream.cuda_stream, batched)
        return self._end(way, stream)


def tuned(device: torch.device) -> GpuCopyConstants:
    """Return the constants measured on this GPU, or else the published ones."""
    found = tuning.current().gpu
    if found is None or device.type != "cuda":
        return GpuCopyConstants()
    return found if found.device == torch.cuda.get_device_name(device) else GpuCopyConstants()


def pieces_of(
    source_at: torch.Tensor, target_at: torch.Tensor, sizes: int | npt.ArrayLike
) -> Pieces:
    """What there is to copy, checked, without entries that are 0."""
    for name, table in (("source_at", source_at), ("target_at", target_at)):
        if table.dtype != torch.int64 or table.shape != source_at.shape:
            raise BadArgumentError(
                f"{name} is {table.dtype} {tuple(table.shape)}: int64 addresses, as many targets "
                f"as sources ({tuple(source_at.shape)})"
            )
    sources, targets = source_at.numpy().ravel(), target_at.numpy().ravel()
    given = np.asarray(sizes)
    if given.dtype.kind not in "iu" or given.size not in (1, len(sources)):
        raise BadArgumentError(f"sizes: one number of bytes, or {len(sources)} of them")
    lengths = given.astype(np.int64).ravel()
    if lengths.size and lengths.min() < 1:
        raise BadArgumentError("sizes: pieces have 1 byte or more")
    lengths = np.broadcast_to(lengths, sources.shape)
    if sources.all() and targets.all():
        return Pieces(sources, targets, lengths)
    there = (sources != 0) & (targets != 0)
    return Pieces(sources[there], targets[there], lengths[there])


def merge(pieces: Pieces, cuts: Pointers) -> Pieces:
    """Merge pieces that are adjacent on both sides, as DMA pays for each; not across `cuts`."""
    sources, targets, sizes = pieces
    if len(sizes) < 2:
        return pieces
    begins = np.ones(len(sizes), np.bool_)
    begins[1:] = (sources[1:] != sources[:-1] + sizes[:-1]) | (
        targets[1:] != targets[:-1] + sizes[:-1]
    )
    if cuts.size:
        begins |= np.isin(sources, cuts) | np.isin(targets, cuts)
    if begins.all():
        return pieces
    first = np.flatnonzero(begins)
    return Pieces(sources[first], targets[first], np.add.reduceat(sizes, first))


def choose(
    pieces: Pieces, merged: Pieces, direction: Direction, constants: GpuCopyConstants
) -> Way:
    """Choose the kernel for many small, aligned pieces of one size into the device, else DMA."""
    count = len(merged.sizes)
    if direction == "to_host" or count == 0 or count < constants.kernel_pieces_from:
        return "dma"
    if int(merged.sizes.sum()) >= count * constants.kernel_piece_bytes_below:
        return "dma"
    if (pieces.sizes != pieces.sizes[0]).any():
        return "dma"
    # The kernel's words are as large as the size allows; it faults at addresses between them.
    word = math.gcd(int(pieces.sizes[0]), WORD_BYTES)
    bits = np.bitwise_or.reduce(pieces.sources) | np.bitwise_or.reduce(pieces.targets)
    return "dma" if bits % word else "kernel"


def move(pieces: Pieces) -> None:
    """Copy them here."""
    for source, target, size in zip(*(row.tolist() for row in pieces), strict=True):
        ctypes.memmove(target, source, size)


def submit(driver: Driver, device: int, pieces: Pieces, stream: int, batched: bool) -> None:
    """Queue them as DMA, in one call where the driver can and may."""
    if not len(pieces.sizes):
        return
    with driver.current(device):
        queue = driver.copy_batch if batched and driver.has_batched_copies else driver.copy
        queue(pieces.targets, pieces.sources, pieces.sizes, stream)
