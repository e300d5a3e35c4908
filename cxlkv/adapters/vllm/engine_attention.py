"""A worker's side of attention in the engine: blocks are saved to the pool and loaded from it.

Saved is what the pool does not have: its pages are adopted as far as the keys match, the engine's
blocks behind them are appended layer by layer while the step runs, and published when it has ended.
So what a step computed from a hit that turns out to be damaged is never published.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.vllm.events import there
from cxlkv.adapters.vllm.loading import IDLE_S, BlockMemory, Load, Loader, Part, kind_of
from cxlkv.adapters.vllm.messages import (
    KEY_BYTES,
    Continued,
    Left,
    Message,
    Options,
    Report,
    Span,
    Started,
    unpacked,
)
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.adapters.vllm.traces import Trace
from cxlkv.errors import CXLKVError, PoolFullError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

log = logging.getLogger("cxlkv")


@dataclass
class _Held:
    """A request. valid: tokens whose K and V in the engine's blocks are right after this step, as
    far as is known here; saved: blocks of it that are in the pool.

    awaits: requests whose loads must have gone well in all ranks, and in other connectors, before
    what was computed from them is published; since: where the step began that computed from them.
    loaded: blocks of the engine that were filled from the pool. audited: the block that is to be
    compared with the pool's.
    """

    blocks: list[int]
    keys: bytes
    valid: int
    options: Options
    saved: int = 0
    scheduled: int = 0
    awaits: set[str] = field(default_factory=set)
    since: int = 0
    loaded: list[int] = field(default_factory=list)
    audited: int | None = None

    def complete(self, block_tokens: int) -> int:
        return min(len(self.keys) // KEY_BYTES, self.valid // block_tokens, len(self.blocks))


@dataclass
class _Writing:
    """Blocks that this step saves: of each request those from saved to `upto`."""

    upto: dict[str, int]
    batch: Batch
    blocks: np.ndarray[tuple[int], np.dtype[np.int32]]
    starts: np.ndarray[tuple[int], np.dtype[np.int32]]
    layers: int = 0  # that were appended


class EngineAttention:
    """Blocks of one engine process. layers: the engine's memory by the layer's name, in order.

    rank: of this shard, by which handles are told apart; ranks: how many there are. tiers: of the
    pool, closed with this; None: such that evict only. quota: of the same tiers.
    """

    def __init__(
        self,
        pool: CXLPool,
        layers: Mapping[str, BlockMemory],
        settings: Settings,
        *,
        block_tokens: int,
        rank: int = 0,
        ranks: int = 1,
        tiers: Tiers | None = None,
        quota: Quota | None = None,
    ):
        self.pool, self.tiers, self.settings = pool, tiers or Tiers(pool), settings
        self.requests = PoolRequests(pool, self.tiers, quota)
        self._memory = list(layers.values())
        self._layers = {name: index for index, name in enumerate(layers)}
        self.block_tokens, self._rank, self.has_peers = block_tokens, rank, ranks > 1
        self._held: dict[str, _Held] = {}
        self._loader = Loader(self._memory)
        self._now: Load | None = None  # that this step waits for
        self._new: list[Part] = []
        self._later: list[Part] = []
        self._beside: list[tuple[str, Load]] = []
        self._bad: set[int] = set()  # blocks that did not arrive, for the engine
        self._writing: _Writing | None = None
        self._report = Report()
        self._told = self.requests.failures()

    def reopened(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        """Go on in a new pool, between two steps: the one before was lost with what requests held.
        They go on, and what this pool lacks of them is saved."""
        self.pool, self.tiers = pool, tiers or Tiers(pool)
        self.requests.reopened(pool, self.tiers)
        self._writing = None
        for held in self._held.values():
            held.saved = 0

    # ---- what the scheduler says ----

    def hear(self, message: Message) -> None:
        """The step's message, before anything of the step runs."""
        for name in message.loaded:
            for held in self._held.values():
                held.awaits.discard(name)
        self.stop_saving(message.unshared)
        self.requests.withdraw(*message.withdrawn)
        for left in message.left:
            self._save_left(left)
        for name in message.ended:
            self._end(name)
        self._report.ended += message.ended
        for held in self._held.values():
            held.scheduled = 0
        now: list[Part] = []
        for start in message.started:
            self._start(start, now)
        for more in message.continued:
            self._go_on(more)
        self._new = now
        elsewhere = [start.request for start in message.started if start.elsewhere]
        self._report.elsewhere += elsewhere
        # With several ranks a load may fail in another one only.
        self._mark_awaiting([*elsewhere, *(part.request for part in now if self.has_peers)])
        self._writing = self._plan()

    def _start(self, start: Started, now: list[Part]) -> None:
        name = start.request
        self._end(name)
        held = _Held(
            list(start.blocks), start.keys, start.computed + start.scheduled, start.options
        )
        held.scheduled, held.since = start.scheduled, start.computed
        self._held[name] = held
        if start.handles is None:
            return
        held.audited = start.tokens // self.block_tokens if start.audit else None
        part = self._part(start, start.handles[self._rank])
        held.loaded = part.blocks
        (now if start.scheduled else self._later).append(part)

    def _part(self, start: Started, handle: bytes) -> Part:
        """The request's own sequence, to go on from, and another one to load from."""
        first, count = start.local // self.block_tokens, -(-start.tokens // self.block_tokens)
        part = Part(start.request, None, start.blocks[first:count], first, tail=start.tail)
        part.partial = start.tokens % self.block_tokens != 0
        if start.trace is not None:
            part.trace = Trace(start.trace, start.request, start.tokens - first * self.block_tokens)
        pages = count * self.block_tokens
        try:
            if self.requests.load(start.request, handle, pages, verify=False) != pages:
                return part
            part.sequence = self.requests.sequences[start.request].fork()
            self.requests.brought(start.brought_keys(self.block_tokens))
            if start.tail:  # its block will be another one when it is whole
                count -= 1
                self.requests.truncate(start.request, count * self.block_tokens)
            self._held[start.request].saved = count
        except CXLKVError as error:
            self.requests.fail("stale", error)
        return part

    def _go_on(self, more: Continued) -> None:
        held = self._held[more.request]
        held.blocks += more.blocks
        held.keys += more.keys
        if more.computed <= held.since and held.awaits:
            held.awaits.clear()  # the engine has gone back: what was damaged is computed again
        if more.computed <= held.valid:
            held.valid = more.computed + more.scheduled
            held.scheduled = more.scheduled
        held.since = more.computed if not held.awaits else held.since

    def _mark_awaiting(self, loading: list[str]) -> None:
        """Mark requests that await loads: how these end is not known here, and what is computed
        with them may be wrong."""
        for name in loading:
            mine = set(self._held[name].blocks)
            for held in self._held.values():
                if held.scheduled and not mine.isdisjoint(held.blocks):
                    held.awaits.add(name)

    def _end(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None and held.options.priority:  # before it lets go of its pages
            self._prioritize(held)
        self.requests.release(name)
        for other, load in self._beside:
            if other == name:
                load.give_up()

    def _prioritize(self, held: _Held) -> None:
        """Prioritize all pages of its text that the pool has, whichever engine stored them."""
        try:
            keys = unpacked(held.keys, self.block_tokens)
            self.requests.prioritize(keys, held.options.priority)
        except CXLKVError as error:
            self.requests.fail("save", error)

    # ---- loading ----

    def start_loads(self) -> None:
        """What the step needs; for a step that needs nothing, too late is early enough."""
        if self._new:
            self._now = Load(self.pool, self._new, self.settings.deadline_s)
            self._new = []
            self._loader.begin(self._now)
            self._now.wait(0)
        for part in self._later:
            load = Load(self.pool, [part], self.settings.deadline_s)
            self._beside.append((part.request, load))
            self._loader.begin(load)
        self._later = []

    def wait_for_layer(self, name: str) -> None:
        """Wait until this layer's hits are in the engine's blocks, right or given up."""
        if self._now is not None and name in self._layers:
            self._now.wait(self._layers[name] + 1)

    def finished(self) -> set[str]:
        """Requests whose load beside the steps has ended, well or not. A step that has nothing else
        to do waits for the next one, as Prefetch.rest() does."""
        if self._beside and not any(held.scheduled for held in self._held.values()):
            self._beside[0][1].rest(IDLE_S)
        ended = [(name, load) for name, load in self._beside if load.look()]
        self._beside = [one for one in self._beside if one not in ended]
        for _, load in ended:
            self._settle(load)
        return {name for name, _ in ended}

    def bad_blocks(self) -> set[int]:
        """Blocks of the engine that were to be loaded and were not, since the last call."""
        found, self._bad = self._bad, set()
        return found

    def _settle(self, load: Load) -> None:
        """Count what failed of a load that has ended, and forget what is damaged."""
        for part in load.parts:
            bad = part.bad_blocks()
            if part.trace is not None:
                self._end_trace(part, load)
            if not bad:
                self._report.loaded.append(part.request)
                continue
            self._bad.update(bad)
            self._report.failed.append(part.request)
            held = self._held.get(part.request)
            if load.is_late or part.error is not None:
                error = part.error or CXLKVError(
                    f"a load took longer than deadline_s={self.settings.deadline_s:g}"
                )
                self.requests.fail(kind_of(part.error, load.is_late), error)
            if held is None:
                continue
            good = part.first_page + part.good
            if kind_of(part.error, load.is_late) == "corrupt":
                last = part.tail if part.good == len(part.blocks) - 1 else b""
                self._forget(last or held.keys[good * KEY_BYTES :][:KEY_BYTES])
            self.requests.release(part.request)
            held.saved, held.audited = 0, None
            held.valid = min(held.valid, good * self.block_tokens)

    def _end_trace(self, part: Part, load: Load) -> None:
        assert part.trace is not None
        tokens = min(part.good * self.block_tokens, part.trace.tokens)
        attributes: dict[str, str | int] = {
            "cxlkv.tokens": tokens,
            "cxlkv.far_bytes": tokens * self.pool.layout.stored_token_bytes,
            "cxlkv.rank": self._rank,
        }
        if part.bad_blocks():
            attributes["cxlkv.failure"] = kind_of(part.error, load.is_late)
        part.trace.end(attributes)

    def _forget(self, key: bytes) -> None:
        try:
            self.requests.forget(unpacked(key, self.block_tokens))
        except CXLKVError as error:
            self.requests.fail("stale", error)

    # ---- saving ----

    def _plan(self) -> _Writing | None:
        """What this step completes, and the pool does not have."""
        upto: dict[str, int] = {}
        planned: set[bytes] = set()
        for name, held in self._held.items():
            if not held.scheduled or not held.options.save or held.awaits:
                continue
            complete = held.complete(self.block_tokens)
            if complete <= held.saved:
                continue
            try:
                self._adopt(name, held, complete)
            except CXLKVError as error:
                self.requests.fail("save", error)
                continue
            key = held.keys[held.saved * KEY_BYTES :][:KEY_BYTES]
            if complete > held.saved and key not in planned:  # else: found when that is published
                planned.add(key)
                upto[name] = complete
        try:
            return self._writing_of(upto) if upto else None
        except CXLKVError as error:
            self.requests.fail("save", error)
            return None

    def _adopt(self, name: str, held: _Held, complete: int) -> None:
        """Adopt what the pool has of the text already, whichever engine stored it."""
        if name in self.requests.sequences and complete - held.saved == 1:
            return  # a block that a decode step has completed: its text is new
        with self.pool.match(unpacked(held.keys, self.block_tokens)[:complete]) as hit:
            if hit.tokens > held.saved * self.block_tokens:
                self.requests.release(name)
                held.saved = 0
                got = self.requests.load(name, hit.handle, hit.tokens, verify=False)
                held.saved = got // self.block_tokens
        if name not in self.requests.sequences:
            self.requests.load(name, None, 0)

    def _writing_of(self, upto: dict[str, int]) -> _Writing:
        new = [self._held[name].blocks[self._held[name].saved : end] for name, end in upto.items()]
        blocks = np.concatenate([np.array(one, np.int32) for one in new])
        starts = np.cumsum([0, *(len(one) for one in new)], dtype=np.int32)
        batch = self.pool.batch([self.requests.sequences[name] for name in upto])
        return _Writing(upto, batch, blocks, starts)

    def save_layer(self, name: str) -> None:
        """This layer's K and V of the step are in the engine's blocks now."""
        layer = self._layers.get(name)
        writing = self._writing
        if writing is None or layer is None or layer != writing.layers:
            return
        own = self._memory[layer]
        try:
            writing.batch.append_blocks(
                layer, own.keys, own.values, writing.blocks, writing.starts, 0
            )
            writing.layers += 1
        except PoolFullError as error:
            self._writing = self._less(writing, error)
        except CXLKVError as error:
            self.requests.fail("save", error)
            self._abandon(writing)

    def _less(self, writing: _Writing, error: PoolFullError) -> _Writing | None:
        """The pool has no room for all; nothing was written. Those that fit go on."""
        self.requests.fail("full", error)
        own, kept = self._memory[0], {}
        for name, end in writing.upto.items():
            try:
                if len(writing.upto) == 1:
                    raise error
                alone = self._writing_of({name: end})
                alone.batch.append_blocks(0, own.keys, own.values, alone.blocks, alone.starts, 0)
                kept[name] = end
            except CXLKVError:
                self._drop(name)
        if not kept:
            return None
        rest = self._writing_of(kept)
        rest.layers = 1
        return rest

    def _drop(self, name: str) -> None:
        """Save no more of this request."""
        self.requests.release(name)
        self._held[name].saved = 0
        self._held[name].options = replace(self._held[name].options, save=False)

    def _abandon(self, writing: _Writing) -> None:
        """What was appended in this step goes; a later step finds what is published."""
        self._writing = None
        for name in writing.upto:
            self.requests.release(name)
            if name in self._held:
                self._held[name].saved = 0

    def end_step(self) -> None:
        """The step's K and V are there: publish what is right."""
        self.start_loads()  # nothing waited for them, but the engine says that they are due
        if self._now is not None:
            self._now.wait(len(self._memory))
            self._settle(self._now)
            self._now = None
            self._mark_invalid()
        writing, self._writing = self._writing, None
        if not self._audit():
            return
        if writing is None:
            return
        if writing.layers < len(self._memory):
            self._abandon(writing)
            return
        for name, end in writing.upto.items():
            self._publish(name, end)

    def _mark_invalid(self) -> None:
        """Blocks may be shared: all that was computed from a bad one is nonsense."""
        for held in self._held.values() if self._bad else ():
            place = next((i for i, block in enumerate(held.blocks) if block in self._bad), None)
            if place is not None:
                held.valid = min(held.valid, place * self.block_tokens)

    def _audit(self) -> bool:
        """Compares blocks that are computed by now. Whether no page of the pool is wrong; else the
        engine computes all again that it has from there, and nothing of what runs is saved."""
        right = True
        for held in self._held.values():
            block = held.audited
            if block is None or held.awaits or held.complete(self.block_tokens) <= block:
                continue
            held.audited, self._report.audited = None, self._report.audited + 1
            own, blocks = self.pool.sequence(), np.array([held.blocks[block]], np.int32)
            try:
                batch, starts = self.pool.batch([own]), np.array([0, 1], np.int32)
                for layer, of in enumerate(self._memory):
                    batch.append_blocks(layer, of.keys, of.values, blocks, starts)
                keys = unpacked(held.keys, self.block_tokens)[: block + 1]
                right = self.requests.audit(keys, own, 0) and right
            except CXLKVError as error:
                self.requests.fail("full" if isinstance(error, PoolFullError) else "save", error)
            finally:
                own.release()
        if not right:
            self.stop_saving()
            self._bad.update(block for held in self._held.values() for block in held.loaded)
            self._mark_invalid()
        return right

    def _publish(self, name: str, end: int) -> None:
        held = self._held[name]
        if name not in self.requests.sequences:
            return
        if held.valid < end * self.block_tokens:
            self.requests.release(name)
            held.saved = 0
            return
        try:
            self.requests.store(name, unpacked(held.keys, self.block_tokens)[:end])
        except CXLKVError as error:
            self.requests.fail("save", error)
            self._drop(name)
            return
        if self.requests.stored(name) < end * self.block_tokens:  # the quota refused it
            self._drop(name)
            return
        self._report.stored.append(Span(name, held.saved, end))
        held.saved = end

    def _save_left(self, left: Left) -> None:
        """Save what is left of a request that has ended: nothing has been written to its blocks
        since."""
        name, held = left.request, self._held.get(left.request)
        if held is None or not held.options.save or held.awaits:
            return
        if any(name == other for other, _ in self._beside):
            return  # it was still loading
        held.keys += left.keys
        there = left.tokens // self.block_tokens
        whole = min(there, held.complete(self.block_tokens))
        keys = held.keys[: whole * KEY_BYTES]
        if whole == there and left.tokens <= held.valid:
            keys += left.tail
        try:
            if self._save_at_end(name, held, whole, unpacked(keys, self.block_tokens)):
                self._report.tails[name] = left.tokens - whole * self.block_tokens
        except PoolFullError as error:
            self.requests.fail("full", error)
        except CXLKVError as error:
            self.requests.fail("save", error)

    def _save_at_end(self, name: str, held: _Held, whole: int, keys: PageKeys) -> bool:
        """keys: of `whole` blocks, and of the tail, if there is one; whether that is new."""
        if len(keys) > whole:
            names = self.pool.records.names(keys[whole:].packed.tobytes(), 1)
            if there(self.pool, names[:, 0, 0]).all():
                keys = keys[:whole]
        if held.saved < whole:
            self._adopt(name, held, whole)
        if len(keys) <= held.saved:
            return False
        if name not in self.requests.sequences:
            self.requests.load(name, None, 0)
        blocks = np.array(held.blocks[held.saved : len(keys)], np.int32)
        batch = self.pool.batch([self.requests.sequences[name]])
        starts = np.array([0, len(blocks)], np.int32)
        for layer, own in enumerate(self._memory):
            batch.append_blocks(layer, own.keys, own.values, blocks, starts, 0)
        self.requests.store(name, keys)
        if self.requests.stored(name) < len(keys) * self.block_tokens:
            return False
        if whole > held.saved:
            self._report.stored.append(Span(name, held.saved, whole))
        return len(keys) > whole

    def stop_saving(self, names: Iterable[str] | None = None) -> None:
        """Save no more of these requests, nor load them beside the steps. None: of all, as K and V
        are not those that their keys name."""
        some = set(self._held if names is None else names)
        for name in some & self._held.keys():
            self._drop(name)
            self._held[name].audited = None
        for other, load in self._beside:
            if other in some:
                load.give_up()

    # ---- for the scheduler ----

    def tell_weights(self, state: bytes) -> None:
        self._report.weights[self._rank] = state

    def report(self) -> Report:
        """What happened since the last call."""
        found, self._report = self._report, Report()
        counts = self.requests.failures()
        found.failures = counts - self._told
        self._told = counts
        return found

    def close(self) -> None:
        for _, load in self._beside:
            load.give_up()
        self._loader.close()
        for name in list(self.requests.sequences):
            self.requests.release(name)
        self.tiers.close()
        self.pool.close()
