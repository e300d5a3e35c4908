"""What a serving engine asks of us, request by request, and the one place that answers it.

    held = adapter.match(keys)              the scheduler: how much of a prompt is there already?
    adapter.load(request, held.handle)      a worker: go on from it
    adapter.store(request, keys)            publish what became complete
    adapter.select(request, layer, q, b)    pages to attend to
    adapter.release(request)                done, aborted or preempted: nothing stays but prefixes

Keys name pages, each for all text before its end: `prefix.PageKeys`. They must also name all that
makes K and V what they are (model, dtype, rope, shard: `identity`), so that a mismatch is a miss. A
handle is bytes, so match() and load() may be in different processes. Whatever is wrong with stored
pages is a miss that is counted in failures(): an engine computes then.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from cxlkv.errors import BadArgumentError, CorruptError, CXLKVError, StaleError
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit, Sequence
from cxlkv.tiers import Tiers

log = logging.getLogger("cxlkv")

EVENTS_MAX = 1 << 16
"""Events that nobody takes: older ones are dropped, and counted."""


@dataclass(frozen=True)
class Event:
    """Pages of these keys can be found now ("stored"), or were taken out ("removed")."""

    kind: Literal["stored", "removed"]
    keys: PageKeys


class EngineAdapter(Protocol):
    """The contract; tests/adapters.py has the suite that every adapter passes."""

    def match(self, keys: PageKeys) -> Hit:
        """The longest published prefix, held until its release(); tokens may be 0."""

    def load(self, request: str, handle: bytes | None, tokens: int) -> int:
        """Begin a request with `tokens` of a hit's, none without a handle; returns how many it has.

        0 where the pages are gone or damaged: failures() counts it, and the engine computes.
        Raises BadArgumentError for a request that is there already.
        """

    def store(self, request: str, keys: PageKeys) -> int:
        """Publish the request's complete pages; returns how many are new. Keys from page 0 on."""

    def select(self, request: str, layer: int, q: object, budget: Budget) -> Selection:
        """Choose pages for the last rows' queries, as Sequence.select."""

    def release(self, request: str) -> None:
        """Give the request's pages back; of one that is not there nothing."""

    def events(self) -> list[Event]:
        """What was stored and removed since the last call."""

    def failures(self) -> Counter[str]:
        """Counts since the start: "stale", "corrupt", "full", "lost_events"."""


class PoolRequests:
    """Requests of one engine process, each a Sequence of a pool: what EngineAdapter asks for.

    tiers: makes room in a full pool by evicting published pages, and looks into the cold tier.
    """

    def __init__(self, pool: CXLPool, tiers: Tiers | None = None):
        self.pool, self.tiers = pool, tiers
        self.sequences: dict[str, Sequence] = {}
        self._stored: dict[str, int] = {}  # pages of a request that were published, or came so
        self._events: list[Event] = []
        self._failures: Counter[str] = Counter()

    def match(self, keys: PageKeys) -> Hit:
        return (self.tiers or self.pool).match(keys)

    def load(self, request: str, handle: bytes | None, tokens: int) -> int:
        if request in self.sequences:
            raise BadArgumentError(f"request {request} is there already: release() it first")
        sequence = self._adopted(handle, tokens) if handle is not None and tokens else None
        if sequence is None:
            sequence = self.pool.sequence()
        self.sequences[request] = sequence
        self._stored[request] = len(sequence) // self.pool.layout.page_tokens
        return len(sequence)

    def _adopted(self, handle: bytes, tokens: int) -> Sequence | None:
        """The hit's sequence, every piece of it verified; None when it is gone or damaged."""
        sequence = None
        try:
            sequence = self.pool.adopt(handle)
            sequence.truncate(tokens)
            self._verify(sequence)
        except (StaleError, CorruptError) as error:
            self.fail("corrupt" if isinstance(error, CorruptError) else "stale", error)
            if sequence is not None:
                sequence.release()
            return None
        return sequence

    def _verify(self, sequence: Sequence) -> None:
        """Raises CorruptError. What this process has found right before is not read again."""
        layout, tokens = self.pool.layout, len(sequence)
        batch, starts = self.pool.batch([sequence]), np.zeros(2, np.int32)
        for layer, window in enumerate(layout.windows):
            first = 0 if window is None else max(0, tokens - window) // layout.page_tokens
            pages = np.arange(first, tokens // layout.page_tokens, dtype=np.int32)
            rows = np.ascontiguousarray(np.broadcast_to(pages, (1, layout.kv_heads, len(pages))))
            counts = np.full((1, layout.kv_heads), len(pages), np.int32)
            none = np.empty((1, layout.kv_heads, 0), np.float32)
            batch.verify(layer, Selection(rows, none, counts, 0, 0, "sequence", starts))

    def store(self, request: str, keys: PageKeys) -> int:
        sequence = self.sequences[request]
        tokens = self.pool.layout.page_tokens
        there, before = min(len(sequence) // tokens, len(keys)), self._stored[request]
        if there <= before:
            return 0
        new = self.pool.publish(sequence, keys[:there], tokens)
        self._stored[request] = there
        self._note(Event("stored", keys[before:there]))
        return new

    def select(self, request: str, layer: int, q: object, budget: Budget) -> Selection:
        return self.sequences[request].select(layer, q, budget)

    def truncate(self, request: str, tokens: int) -> None:
        """The request has only `tokens` tokens: what was computed after them is not its text."""
        self.sequences[request].truncate(tokens)

    def release(self, request: str) -> None:
        sequence = self.sequences.pop(request, None)
        self._stored.pop(request, None)
        if sequence is not None:
            sequence.release()

    def forget(self, keys: PageKeys) -> int:
        """Take published pages out of the index, damaged ones above all."""
        count = self.pool.forget(keys)
        self._note(Event("removed", keys))
        return count

    def events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def failures(self) -> Counter[str]:
        return self._failures.copy()

    def fail(self, kind: str, error: CXLKVError) -> None:
        """Count it, and say it once in the log."""
        if not self._failures[kind]:
            log.warning("%s; the engine computes instead; further ones are counted", error)
        self._failures[kind] += 1

    def _note(self, event: Event) -> None:
        if len(self._events) == EVENTS_MAX:
            del self._events[0]
            self._failures["lost_events"] += 1
        self._events.append(event)
