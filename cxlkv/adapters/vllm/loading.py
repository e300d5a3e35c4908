"""A thread loads hits from the pool into the engine's blocks, layer by layer.

A load never writes after it was given back: a request that gives up on one (`give_up`) gets its
blocks when the thread has left them, at most one layer's copy later.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cxlkv.adapters.vllm.traces import Trace
from cxlkv.arrays import Array
from cxlkv.errors import CorruptError, CXLKVError
from cxlkv.machine import lifetime
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch, Sequence

if TYPE_CHECKING:
    import torch

IDLE_S = 0.005
"""A step that has nothing to do but to wait for a thread waits so long at most: what comes to the
engine meanwhile waits as long."""

log = logging.getLogger("cxlkv")


@dataclass
class BlockMemory:
    """The engine's own memory of one layer: [block_count, kv_heads, block_tokens, dim] each. group:
    whose table names its blocks. tokens: of such a block; ratio: of keys it takes so many. at_once:
    blocks that are loaded at most in one go."""

    keys: Array
    values: Array | None
    group: int = 0
    tokens: int = field(init=False)
    ratio: int = field(default=1, init=False)
    at_once: int = field(default=sys.maxsize, init=False)

    def __post_init__(self) -> None:
        self.tokens = self.keys.shape[2]

    def append(
        self,
        batch: Batch,
        layer: int,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        rewind: int | None = None,
    ) -> None:
        """Append these blocks as Batch.append_blocks() does."""
        batch.append_blocks(layer, self.keys, self.values, blocks, starts, rewind)

    def fetch(
        self,
        batch: Batch,
        layer: int,
        blocks: npt.ArrayLike,
        starts: npt.ArrayLike,
        first: npt.ArrayLike,
    ) -> None:
        """Fetch these blocks as Batch.fetch_blocks() does."""
        batch.fetch_blocks(layer, self.keys, self.values, blocks, starts, first)

    def shares(self, count: int) -> list[BlockMemory]:
        """Those of equal shares of the heads."""
        heads = self.keys.shape[1] // count
        parts = [slice(number * heads, (number + 1) * heads) for number in range(count)]
        return [
            BlockMemory(
                self.keys[:, part],
                None if self.values is None else self.values[:, part],
                self.group,
            )
            for part in parts
        ]


class Checkpoint(Protocol):
    """States behind the tokens of a load (states.py); last: where their last unit begins."""

    last: int

    def load(self) -> None: ...
    def release(self) -> None: ...


@dataclass
class Part:
    """What of a request is loaded: tokens [begin, end) of its text. Of each group, `blocks` are the
    engine's blocks for these tokens that a window still reaches, and `first` is the place in the
    text of the first one.

    sequence: of this load alone, as the request's own may be written to meanwhile. good: tokens of
    the text up to which all groups' blocks are right; final when the load has ended. partial: the
    step that waits for it writes to the last block, too. tail: that one's key, where it is not the
    text's whole block. checkpoint: of its layers with states.
    """

    request: str
    sequence: Sequence | None
    blocks: list[list[int]]
    first: list[int]
    begin: int
    end: int
    good: int = 0
    error: CXLKVError | None = None
    partial: bool = False
    tail: bytes = b""
    trace: Trace | None = None
    checkpoint: Checkpoint | None = None

    def bring_states(self) -> None:
        """Behind the layers, where all of these are right."""
        if self.checkpoint is None or self.has_failed:
            return
        try:
            self.checkpoint.load()
        except CXLKVError as error:
            self.fail(self.checkpoint.last, error)

    def release(self) -> None:
        """What only this load holds."""
        for held in (self.sequence, self.checkpoint):
            if held is not None:
                held.release()

    def whole(self, group: int, block_tokens: int) -> int:
        """How many of a group's good blocks come layer by layer."""
        good = self.good // block_tokens - self.first[group]
        return max(0, min(good, len(self.blocks[group]) - self.partial))

    def fail(self, good: int, error: CXLKVError | None = None) -> None:
        self.good, self.error = max(self.begin, min(self.good, good)), error or self.error

    @property
    def has_failed(self) -> bool:
        return self.good < self.end


class Link(Protocol):
    """Streams of a device by which memory that is not the host's is loaded (device_blocks.py)."""

    def mark(self) -> torch.cuda.Event: ...
    def begin_loads(self, behind: torch.cuda.Event) -> None: ...
    def end_loads(self) -> None: ...


def pieces(counts: Sequences[int], most: int) -> Iterator[list[tuple[int, range]]]:
    """So many blocks of each part, cut: at most `most` blocks, as (part, its blocks) each."""
    piece, room = list[tuple[int, range]](), most
    for part, count in enumerate(counts):
        begin = 0
        while begin < count:
            end = min(count, begin + room)
            piece.append((part, range(begin, end)))
            begin, room = end, room - (end - begin)
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


class Load:
    """Parts that are loaded together: those that a step waits for, or those of one request. link:
    by which they are; it is behind all that the engine has queued by now."""

    def __init__(
        self, pool: CXLPool, parts: list[Part], deadline_s: float, link: Link | None = None
    ):
        self._pool = pool
        self._link, self._behind = link, None if link is None else link.mark()
        self.parts = parts
        self._until = time.monotonic() + deadline_s
        self._changed = threading.Condition()
        # Layers that are loaded, or have failed; -1: the partial blocks, which come first, are not.
        self._layers = -1 if any(part.partial for part in parts) else 0
        self._given_up = False
        self.has_ended = False
        self.is_late = False
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        """The parent's thread loads it, into the parent's blocks; here it has failed."""
        self._changed = threading.Condition()
        if self.has_ended:
            return
        self.has_ended = self._given_up = True
        for part in self.parts:
            part.fail(0)
            with suppress(CXLKVError):
                part.release()

    def run(self, memory: Sequences[BlockMemory]) -> None:
        """Load in the thread, one layer after the other, until all are there or it is given up."""
        try:
            try:
                self._bring_all(memory)
            finally:
                if self._link is not None:
                    self._link.end_loads()
        except BaseException:  # a device has failed, say: the load must end, and count as failed
            self._given_up = True
            raise
        finally:
            with self._changed:
                if self._given_up or self._layers < len(memory):
                    for part in self.parts:
                        part.fail(0)
                self.has_ended = True
                self._changed.notify_all()
            for part in self.parts:
                part.release()

    def _bring_all(self, memory: Sequences[BlockMemory]) -> None:
        if self._link is not None and self._behind is not None:
            self._link.begin_loads(self._behind)
        for part in self.parts:
            part.good = part.end if part.sequence is not None else part.begin
        self._bring_partial(memory)
        for layer, own in enumerate(memory):
            if self._given_up:
                break
            self._bring(layer, own)
            with self._changed:
                self._layers = layer + 1
                self._changed.notify_all()
        for part in self.parts if not self._given_up else ():
            part.bring_states()

    def _bring_partial(self, memory: Sequences[BlockMemory]) -> None:
        """Last blocks that the step writes to, in all layers: it does so before it waits for the
        layer, and the copy of the whole block would take that away again."""
        for part in (one for one in self.parts if one.partial and one.sequence is not None):
            assert part.sequence is not None
            batch = self._pool.batch([part.sequence])
            try:
                for layer, own in enumerate(memory):
                    if self._given_up:
                        return
                    tokens = own.tokens
                    first = [(part.end - tokens) // self._pool.layout.page_tokens]
                    last = part.blocks[own.group][-1:]
                    own.fetch(batch, layer, last, [0, 1], first)
            except CXLKVError as error:
                part.fail(part.end - tokens, error)
        with self._changed:
            self._layers = 0
            self._changed.notify_all()

    def _bring(self, layer: int, own: BlockMemory) -> None:
        """What cannot be read ends its part there; the parts before it stay right."""
        parts = [part for part in self.parts if part.sequence is not None]
        counts = [part.whole(own.group, own.tokens) for part in parts]
        for piece in pieces(counts, own.at_once):
            if self._given_up:
                return
            self._bring_piece(layer, own, [(parts[place], some) for place, some in piece])

    def _bring_piece(self, layer: int, own: BlockMemory, piece: list[tuple[Part, range]]) -> None:
        """piece: of parts some of their blocks, by their place there."""
        group, tokens = own.group, own.tokens
        starts = np.cumsum([0, *(len(some) for _, some in piece)], dtype=np.int32)
        blocks = np.concatenate(
            [np.array(p.blocks[group][some.start : some.stop], np.int32) for p, some in piece]
        )
        first = np.array([part.first[group] + some.start for part, some in piece], np.int32)
        pages = first * (tokens // self._pool.layout.page_tokens)
        try:
            batch = self._pool.batch([p.sequence for p, _ in piece if p.sequence is not None])
            own.fetch(batch, layer, blocks, starts, pages)
        except CXLKVError as error:
            good = getattr(error, "good", None)
            for index, (part, some) in enumerate(piece):
                kept = 0 if good is None else int(good[index])
                if kept < len(some):
                    part.fail((int(first[index]) + kept) * tokens, error)

    def wait(self, layers: int) -> None:
        """Wait until so many layers are there, or it has ended; gives up at the deadline."""
        with self._changed:
            left_s = self._until - time.monotonic()
            there = lambda: self.has_ended or self._layers >= layers  # noqa: E731
            if self._changed.wait_for(there, max(0.0, left_s)):
                return
            self._given_up = self.is_late = True
            self._changed.wait_for(lambda: self.has_ended)

    def rest(self, most_s: float) -> None:
        """Wait until it has ended, but for most_s at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended, most_s)

    def give_up(self) -> None:
        """Nobody wants it any more; has_ended says when its blocks are free."""
        self._given_up = True

    def look(self) -> bool:
        """Whether it has ended; gives up at the deadline, never waits."""
        if not self.has_ended and time.monotonic() > self._until and not self._given_up:
            self._given_up = self.is_late = True
        return self.has_ended


class Loader:
    """The thread. Loads come in order."""

    def __init__(self, memory: Sequences[BlockMemory]):
        self._memory = memory
        self._waiting: deque[Load] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        self._changed, self._thread = threading.Condition(), None
        self._waiting.clear()

    def begin(self, load: Load) -> None:
        with self._changed:
            try:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="cxlkv-loads", daemon=True)
                    thread.start()
                    self._thread = thread
            except RuntimeError as error:  # no thread to be had now; the next load tries again
                log.warning("a load failed; the engine computes instead: %s", error)
                load.give_up()
                load.run(())
                return
            self._waiting.append(load)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                load = self._waiting.popleft()
            try:
                load.run(self._memory)
            except Exception:  # without the thread all later loads would be waited for in vain
                log.exception("a load failed; the engine computes instead")

    def close(self) -> None:
        """Ends the thread after its current layer; loads that did not begin are given up."""
        with self._changed:
            self._ended = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for load in left:
            load.give_up()
            load.run(())
        if self._thread is not None:
            self._thread.join()


def kind_of(error: CXLKVError | None, late: bool) -> str:
    """The word under which a load that failed is counted."""
    if late:
        return "late"
    return "corrupt" if isinstance(error, CorruptError) else "stale"
