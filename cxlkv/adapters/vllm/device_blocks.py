"""The engine's blocks on a device, copied to and from host memory beside its own work.

    save    gather blocks on the device, behind the step that computed them; then DMA
    load    DMA; then scatter into the blocks, behind all steps that were begun before

Three streams of our own do this, so a step waits for no copy. What the engine queues next may
write to blocks that were just saved: fence() makes it wait for the gathers, which read memory of
the device only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.errors import CXLKVError
from cxlkv.gpu import streams
from cxlkv.gpu.read import PageList, PageReader
from cxlkv.sequence import Batch

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
BUFFERS = 2  # of loads: the host fills one while the device empties another
LOAD_BYTES = 64 << 20  # of one, and of the device's memory for it: it has little beside vLLM's


@dataclass
class Staged:
    """Blocks of a layer in host memory, [blocks, heads, tokens, dim] each, once `done` has
    passed."""

    keys: torch.Tensor
    values: torch.Tensor | None
    done: torch.cuda.Event

    def append(
        self, batch: Batch, layer: int, some: npt.ArrayLike, starts: npt.ArrayLike, rewind: int
    ) -> None:
        """Append these of the blocks, once they are there."""
        self.done.synchronize()
        batch.append_blocks(layer, self.keys, self.values, some, starts, rewind)


class Link:
    """Streams and host memory of one worker. One thread saves; another one loads."""

    def __init__(self, device: torch.device):
        self.device = device
        self._gathers, self._saves, self._loads = (streams.new(device) for _ in range(3))
        self._gathered = streams.event(device)
        self._buffers = [_Buffer(device) for _ in range(BUFFERS)]
        self._turn = 0

    # ---- saves ----

    def begin_gathers(self) -> None:
        """What is gathered from now on is behind all that the engine has queued."""
        self._gathers.wait_stream(streams.current(self.device))

    def numbers(self, memory: DeviceMemory, blocks: npt.ArrayLike) -> torch.Tensor:
        """Blocks, as gather() takes them for any layer with kernels like these."""
        with streams.use(self._gathers):
            return memory.kernel_blocks(blocks)

    def gather(self, memory: DeviceMemory, ids: torch.Tensor, out: torch.Tensor) -> Staged:
        """Copy these blocks to host memory: `out`, uint8, pinned, of memory.bytes_of() bytes."""
        with streams.use(self._gathers):
            made = [memory.gathered(part, ids) for part in memory.parts]
        found, done = self._take_out(made, out)
        parts = [part.view(memory.dtype) for part in found]
        return Staged(parts[0], parts[1] if len(parts) > 1 else None, done)

    def gather_states(
        self, gathered: Callable[[], torch.Tensor], out: torch.Tensor
    ) -> torch.cuda.Event:
        """The same of what this gathers on the device, uint8. Returns when `out` has it."""
        with streams.use(self._gathers):
            made = gathered()
        return self._take_out([made], out)[1]

    def _take_out(
        self, made: Sequences[torch.Tensor], out: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """To host memory, behind the gathers."""
        ready, done = streams.event(self.device), streams.event(self.device, sleeps=True)
        ready.record(self._gathers)
        self._gathered = ready
        self._saves.wait_event(ready)
        parts, place = list[torch.Tensor](), 0
        with streams.use(self._saves):
            for one in made:
                here = out[place : place + one.nbytes].view(one.dtype).view(one.shape)
                here.copy_(one, non_blocking=True)
                streams.lend(one, self._saves)
                parts.append(here)
                place += one.nbytes
            done.record(self._saves)
        return parts, done

    def fence(self) -> None:
        """What the engine queues next may write to blocks that are saved."""
        streams.current(self.device).wait_event(self._gathered)

    # ---- loads ----

    def mark(self) -> torch.cuda.Event:
        """What the engine has queued until now, which may still read blocks that were given to
        others."""
        made = streams.event(self.device)
        made.record(streams.current(self.device))
        return made

    def begin_loads(self, behind: torch.cuda.Event) -> None:
        self._loads.wait_event(behind)

    def fill(self, memory: DeviceMemory, blocks: npt.ArrayLike, shapes: Shapes) -> Filling:
        """Host memory for these blocks, which go there when it is sent."""
        self._turn = (self._turn + 1) % BUFFERS
        return Filling(self._loads, self._buffers[self._turn], memory, blocks, shapes)

    def send_states(
        self,
        size: int,
        read: Callable[[npt.NDArray[np.uint8]], object],
        spread: Callable[[torch.Tensor], None],
    ) -> None:
        """read: fills host memory of so many bytes, or raises; spread: copies it to the device."""
        self._turn = (self._turn + 1) % BUFFERS
        buffer = self._buffers[self._turn]
        here = buffer.take(size)
        read(here.numpy())
        with streams.use(self._loads):
            spread(here)
            buffer.free.record(self._loads)

    def room(self, size: int) -> Room:
        """Memory of the device for what is loaded; raises torch.OutOfMemoryError."""
        with streams.use(self._loads):
            made = Room(torch.empty(size, dtype=torch.uint8, device=self.device))
            made.free.record(self._loads)
        return made

    def load_numbers(self, memory: DeviceMemory, blocks: npt.ArrayLike) -> torch.Tensor:
        """As numbers(), for read()."""
        with streams.use(self._loads):
            return memory.kernel_blocks(blocks)

    def read(
        self, reading: Reading, memory: DeviceMemory, layer: int, some: slice[int, int], room: Room
    ) -> None:
        """These of the blocks come from the pool's pages, by way of memory of the device."""
        reader, listed = reading.reader, reading.pages
        each = memory.tokens // reader.pool.layout.page_tokens
        count, pages = some.stop - some.start, slice(some.start * each, some.stop * each)
        out, place = list[torch.Tensor](), 0
        for own in memory.parts:
            shape = (count * each, own.shape[1], memory.tokens // each, own.shape[3])
            size = prod(shape) * memory.dtype.itemsize
            out.append(room.memory[place : place + size].view(own.dtype).view(shape))
            place += size
        copied = reader.copy(listed, layer, pages, out, room.free)
        with streams.use(self._loads):
            self._loads.wait_event(copied.event)
            reader.check(listed, layer, pages, out)
            ids = reading.numbers[some.start * memory.ratio : some.stop * memory.ratio]
            for found, own in zip(out, memory.parts, strict=True):
                whole = found.view(count, each, *found.shape[1:]).transpose(1, 2)
                memory.scatter(own, ids, whole.reshape(count, own.shape[1], memory.tokens, -1))
            room.free.record(self._loads)
        streams.lend(room.memory, reader.stream)

    def end_loads(self) -> None:
        """Wait until all is in the engine's blocks."""
        done = streams.event(self.device, sleeps=True)
        done.record(self._loads)
        done.synchronize()


Shapes = Sequences[tuple[int, ...]]


class Room:
    """free: when the device has read it."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.free = memory, streams.event(memory.device)


@dataclass(frozen=True)
class Reading:
    """Pages that go to blocks of layers; numbers: of kernels' blocks, on the device."""

    reader: PageReader
    pages: PageList
    numbers: torch.Tensor


class _Buffer:
    """Pinned memory that grows; `free` is when the device has read it."""

    def __init__(self, device: torch.device):
        self._device, self._memory = device, streams.pinned(0, dtype=torch.uint8, device=device)
        self.free = streams.event(device, sleeps=True)

    def take(self, size: int) -> torch.Tensor:
        self.free.synchronize()
        if self._memory.numel() < size:
            self._memory = streams.pinned(size, dtype=torch.uint8, device=self._device)
        return self._memory[:size]


class Filling:
    """parts: host memory of K and V, to be filled, then sent."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        buffer: _Buffer,
        memory: DeviceMemory,
        blocks: npt.ArrayLike,
        shapes: Shapes,
    ):
        self._stream, self._buffer, self._memory = stream, buffer, memory
        self._blocks, self.parts = np.asarray(blocks), list[torch.Tensor]()
        sizes = [prod(shape) * memory.dtype.itemsize for shape in shapes]
        here, place = buffer.take(sum(sizes)), 0
        for shape, size in zip(shapes, sizes, strict=True):
            self.parts.append(here[place : place + size].view(memory.dtype).view(shape))
            place += size

    def send(self, some: npt.NDArray[np.bool_] | None = None) -> None:
        """Into the engine's blocks; some: which of them, None: all."""
        chosen = self._blocks if some is None else self._blocks[some]
        if len(chosen):
            with streams.use(self._stream):
                ids = self._memory.kernel_blocks(chosen)
                for part, own in zip(self.parts, self._memory.parts, strict=True):
                    here = part if some is None else part[torch.from_numpy(some)]
                    there = here.view(own.dtype).to(own.device, non_blocking=some is None)
                    self._memory.scatter(own, ids, there)
            self._buffer.free.record(self._stream)


class DeviceMemory(BlockMemory):
    """One layer's blocks on a device. cache: the engine's [blocks, heads, tokens, channels], in
    any order in memory; the first dim channels are K, what is behind them V. block_tokens: of the
    engine's tables, which may name several blocks of its kernels at once, side by side."""

    def __init__(self, cache: torch.Tensor, dim: int, block_tokens: int, group: int, link: Link):
        self._cache, self._dim, self._link = cache, dim, link
        values = cache[..., dim:] if cache.shape[3] > dim else None
        super().__init__(cache[..., :dim], values, group)
        self.tokens, self.ratio = block_tokens, block_tokens // cache.shape[2]
        self.dtype = cache.dtype
        raw = cache.view(RAW[cache.element_size()])  # torch moves no numbers of 8 bits
        self.parts = [raw[..., :dim]] + ([] if values is None else [raw[..., dim:]])
        self.at_once = max(1, LOAD_BYTES // self.bytes_of(1))

    def shares(self, count: int) -> list[BlockMemory]:
        heads = self._cache.shape[1] // count
        return [
            DeviceMemory(
                self._cache[:, number * heads : (number + 1) * heads],
                *(self._dim, self.tokens, self.group, self._link),
            )
            for number in range(count)
        ]

    def kernel_blocks(self, blocks: npt.ArrayLike) -> torch.Tensor:
        """Numbers of the kernels' blocks, on the device."""
        ids = np.asarray(blocks, np.int64)[:, None] * self.ratio + np.arange(self.ratio)
        return streams.sent(torch.from_numpy(ids.ravel()), self._cache.device)

    def shapes(self, blocks: int) -> list[tuple[int, ...]]:
        """Of K, and of V, in host memory."""
        heads = self._cache.shape[1]
        return [(blocks, heads, self.tokens, part.shape[3]) for part in self.parts]

    def bytes_of(self, blocks: int) -> int:
        return sum(prod(shape) for shape in self.shapes(blocks)) * self.dtype.itemsize

    def gathered(self, part: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[blocks, heads, tokens, dim] of these kernels' blocks, contiguous."""
        found = torch.empty((len(ids), *part.shape[1:]), dtype=part.dtype, device=part.device)
        torch.index_select(part, 0, ids, out=found)
        if self.ratio == 1:
            return found
        whole = found.view(-1, self.ratio, *found.shape[1:]).transpose(1, 2)
        return whole.reshape(whole.shape[0], whole.shape[1], self.tokens, -1)

    def scatter(self, part: torch.Tensor, ids: torch.Tensor, found: torch.Tensor) -> None:
        if self.ratio > 1:
            shape = (len(found), found.shape[1], self.ratio, -1, found.shape[3])
            found = found.view(shape).transpose(1, 2).flatten(0, 1)
        part.index_put_((ids,), found)

    # ---- with the host waiting ----

    def append(
        self,
        batch: Batch,
        layer: int,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        rewind: int | None = None,
    ) -> None:
        count = len(np.asarray(blocks))
        size = self.bytes_of(count)
        here = streams.pinned(size, dtype=torch.uint8, device=self._link.device)
        self._link.begin_gathers()
        staged = self._link.gather(self, self._link.numbers(self, blocks), here)
        staged.done.synchronize()
        batch.append_blocks(layer, staged.keys, staged.values, range(count), starts, rewind)

    def fetch(
        self,
        batch: Batch,
        layer: int,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        first: npt.ArrayLike,
    ) -> None:
        """Into host memory, then into blocks behind begin_loads(); end_loads() waits for it. What
        is damaged stays as it was."""
        count, offsets = len(np.asarray(blocks)), np.asarray(starts)
        filling = self._link.fill(self, blocks, self.shapes(count))
        keys, values = (*filling.parts, None)[:2]
        try:
            batch.fetch_blocks(layer, keys, values, range(count), starts, first)
        except CXLKVError as error:
            good = np.asarray(getattr(error, "good", np.zeros(len(offsets) - 1, np.int64)))
            place = np.arange(count) - np.repeat(offsets[:-1], np.diff(offsets))
            filling.send(place < np.repeat(good, np.diff(offsets)))
            raise
        filling.send()
