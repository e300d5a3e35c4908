"""A worker's side of attention in the engine: blocks are saved to the pool and loaded from it.

Saved is what the pool does not have: its pages are adopted as far as the keys match, the engine's
blocks behind them are appended layer by layer while the step runs, and published when it has ended.
So what a step computed from a hit that turns out to be damaged is never published.

Layers with a window are saved in the step that computes them, as the engine lets go of their blocks
behind it. Their pages are kept until they are published, so that every prefix is found again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace

import numpy as np

from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.vllm.events import there
from cxlkv.adapters.vllm.groups import BlockGroup, are_whole, page_tokens_of, unit_of
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
from cxlkv.adapters.vllm.states import Blocks, Checkpoint, StateMemory
from cxlkv.adapters.vllm.traces import Trace
from cxlkv.errors import CXLKVError, PoolFullError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

log = logging.getLogger("cxlkv")


Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass
class Held:
    """A request. blocks: by group; computed: where its step begins. valid: tokens whose K and V in
    the engine's blocks this worker knows to be right after this step; saved: its units that are in
    the pool.

    awaits: requests whose loads must have gone well in all ranks, and in other connectors, before
    what was computed from them is published; since: where the step began that computed from them.
    loaded: blocks of the engine that were filled from the pool. audited: the unit that is to be
    compared with the pool's.
    """

    blocks: list[list[int]]
    keys: bytes
    valid: int
    options: Options
    computed: int = 0
    saved: int = 0
    scheduled: int = 0
    awaits: set[str] = field(default_factory=set)
    since: int = 0
    loaded: list[int] = field(default_factory=list)
    audited: int | None = None

    def complete(self, groups: Sequences[BlockGroup], unit: int) -> int:
        """Units whose keys and blocks are there."""
        there = [
            len(of) * group.block_tokens for group, of in zip(groups, self.blocks, strict=True)
        ]
        return min(len(self.keys) // KEY_BYTES, min(self.valid, *there) // unit)

    def has(self, token: int, groups: Sequences[BlockGroup]) -> bool:
        """Whether the engine has all groups' blocks with K and V from there on."""
        return all(
            group.state or group.first_block(self.computed) * group.block_tokens <= token
            for group in groups
        )

    def live(self, groups: Sequences[BlockGroup]) -> dict[tuple[int, int], int]:
        """Blocks that the engine has not let go of, by group: where their tokens begin."""
        return {
            (number, block): (first + place) * group.block_tokens
            for number, (group, of) in enumerate(zip(groups, self.blocks, strict=True))
            for first in [group.first_block(self.computed)]
            for place, block in enumerate(of[first:])
        }


@dataclass
class _Writing:
    """Units that this step saves: of each request those from saved to `upto`. blocks, starts: by
    group. rewind: as in append(), so that pages are kept up to where the engine has their blocks.
    """

    upto: dict[str, int]
    batch: Batch
    blocks: list[Ints]
    starts: list[Ints]
    rewind: int
    layers: int = 0  # that were appended

    def append(self, layer: int, own: BlockMemory) -> None:
        where = (self.blocks[own.group], self.starts[own.group], self.rewind)
        own.append(self.batch, layer, *where)
        self.layers = layer + 1


@dataclass(frozen=True)
class Share:
    """What of all texts a worker keeps. rank: of this worker; number: of its pool, by which handles
    are told apart. has_peers: others have the rest of the same texts. saves: else another rank
    does, which has the same."""

    rank: int = 0
    number: int = 0
    has_peers: bool = False
    saves: bool = True


ALONE = Share()


class EngineAttention:
    """Blocks of one engine process. layers: the engine's memory by the layer's name, in order;
    groups: whose tables name its blocks.

    tiers: of the pool, closed with this; None: such that evict only. quota: of the same tiers.
    states: the engine's memory of layers that have these. overlaps: the engine schedules a step
    before it has heard of the one before.
    """

    def __init__(
        self,
        pool: CXLPool,
        layers: Mapping[str, BlockMemory],
        settings: Settings,
        *,
        groups: Sequences[BlockGroup],
        share: Share = ALONE,
        tiers: Tiers | None = None,
        quota: Quota | None = None,
        states: StateMemory | None = None,
        overlaps: bool = False,
    ):
        self.pool, self.tiers, self.settings = pool, tiers or Tiers(pool), settings
        self._states = states
        self._offered: dict[str, list[tuple[int, dict[int, int]]]] = {}  # of them, in this step
        self.requests = PoolRequests(pool, self.tiers, quota)
        self._memory = list(layers.values())
        self._layers = {name: index for index, name in enumerate(layers)}
        self.groups, self.unit, self._page_tokens = groups, unit_of(groups), page_tokens_of(groups)
        self._goes_back = are_whole(groups) and not overlaps
        self._share, self.has_peers = share, share.has_peers
        self._held: dict[str, Held] = {}
        self._loader = Loader(self._memory)
        self._now: Load | None = None  # that this step waits for
        self._new: list[Part] = []
        self._later: list[Part] = []
        self._beside: list[tuple[str, Load]] = []
        self._bad: set[int] = set()  # blocks that did not arrive, for the engine
        self._lost: set[str] = set()  # requests whose hit did not arrive, likewise
        self._writing: list[_Writing] = []
        self._report = Report()
        self._told = self.requests.failures()

    def reopened(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        """Go on in a new pool, between two steps: the one before was lost with what requests held.
        They go on, and what this pool lacks of them is saved."""
        self.pool, self.tiers = pool, tiers or Tiers(pool)
        self.requests.reopened(pool, self.tiers)
        self._writing = []
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
        self._writing, self._offered = self._plan(), message.states

    def _start(self, start: Started, now: list[Part]) -> None:
        name = start.request
        self._end(name)
        blocks = [list(of) for of in start.blocks] or [[] for _ in self.groups]
        options = replace(start.options, save=start.options.save and self._share.saves)
        held = Held(blocks, start.keys, start.computed + start.scheduled, options)
        held.computed = held.since = start.computed
        held.scheduled = start.scheduled
        self._held[name] = held
        if start.handles is None:
            return
        held.audited = start.tokens // self.unit if start.audit else None
        part = self._part(start, start.handles[self._share.number])
        held.loaded = [block for of in part.blocks for block in of]
        (now if start.scheduled else self._later).append(part)

    def _part(self, start: Started, handle: bytes) -> Part:
        """The request's own sequence, to go on from, and another one to load from."""
        whole, end = start.tokens // self.unit, -(-start.tokens // self.unit) * self.unit
        first, blocks = list[int](), list[list[int]]()
        for group, of in zip(self.groups, start.blocks, strict=True):
            size = group.block_tokens
            first.append(max(start.local // size, group.first_block(start.tokens)))
            blocks.append(of[first[-1] : end // size])
        begin = start.local // self.unit * self.unit
        part = Part(start.request, None, blocks, first, begin, end, begin, tail=start.tail)
        part.partial = start.tokens != end
        if start.trace is not None:
            part.trace = Trace(start.trace, start.request, start.tokens - begin)
        try:
            if self.requests.load(start.request, handle, end, verify=False) != end:
                return part
            if self._states is not None:
                keys = unpacked(start.keys, self.unit)[:whole]
                part.checkpoint = Checkpoint.of(self.pool, keys, self._states, blocks)
            part.sequence = self.requests.sequences[start.request].fork()
            self.requests.brought(start.brought_keys(self.unit))
            if start.tail:  # its block will be another one when it is whole
                self.requests.truncate(start.request, whole * self.unit)
            self._held[start.request].saved = whole
        except CXLKVError as error:
            self.requests.fail("stale", error)
        return part

    def _go_on(self, more: Continued) -> None:
        held = self._held[more.request]
        for of, new in zip(held.blocks, more.blocks, strict=False):  # none: no new ones
            of += new
        held.computed = more.computed
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
            mine = self._held[name].live(self.groups).keys()
            for held in self._held.values():
                if held.scheduled and not mine.isdisjoint(held.live(self.groups)):
                    held.awaits.add(name)

    def _end(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None and held.options.priority:  # before it lets go of its pages
            self._prioritize(held)
        self.requests.release(name)
        for other, load in self._beside:
            if other == name:
                load.give_up()

    def _prioritize(self, held: Held) -> None:
        """Prioritize all pages of its text that the pool has, whichever engine stored them."""
        try:
            keys = unpacked(held.keys, self.unit)
            self.requests.prioritize(keys, held.options.priority)
        except CXLKVError as error:
            self.requests.fail("save", error)

    # ---- loading ----

    def start_loads(self) -> None:
        """What the step needs; for a step that needs nothing, too late is early enough."""
        if self._new:
            self._now = self._load(self._new)
            self._new = []
            self._loader.begin(self._now)
            self._now.wait(0)
        for part in self._later:
            load = self._load([part])
            self._beside.append((part.request, load))
            self._loader.begin(load)
        self._later = []

    def _load(self, parts: list[Part]) -> Load:
        return Load(self.pool, parts, self.settings.deadline_s)

    def wait_for_layer(self, name: str) -> None:
        """Wait until this layer's hits are in the engine's blocks, right or given up."""
        if self._now is not None and name in self._layers:
            self._now.wait(self._layers[name] + 1)

    def rest(self) -> None:
        """Wait until nothing is on its way to or from the engine's blocks."""
        for load in (self._now, *(load for _, load in self._beside)):
            if load is not None:
                load.wait(len(self._memory) + 1)  # until it has ended

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
        """Blocks of the engine that were to be loaded and were not, since the last call. The engine
        computes on from the first of them, which it can where it has all blocks before. Where vLLM
        speculates it asks before it ends the step."""
        self._settle_now()
        found, self._bad = self._bad, set()
        return found

    def lost(self) -> set[str]:
        """Where it cannot: of the requests that finished() names, those whose load has failed,
        since the last call. The engine computes them from their first token."""
        found, self._lost = self._lost, set()
        return found

    def _settle(self, load: Load) -> None:
        """Count what failed of a load that has ended, and forget what is damaged."""
        for part in load.parts:
            if part.trace is not None:
                self._end_trace(part, load)
            if not part.has_failed:
                self._report.loaded.append(part.request)
                continue
            self._note_bad(part)
            self._report.failed.append(part.request)
            held = self._held.get(part.request)
            if load.is_late or part.error is not None:
                error = part.error or CXLKVError(
                    f"a load took longer than deadline_s={self.settings.deadline_s:g}"
                )
                self.requests.fail(kind_of(part.error, load.is_late), error)
            if held is None:
                continue
            good = part.good // self.unit
            if kind_of(part.error, load.is_late) == "corrupt":
                last = part.tail if part.end - part.good <= self.unit else b""
                self._forget(last or held.keys[good * KEY_BYTES :][:KEY_BYTES])
            self.requests.release(part.request)
            held.saved, held.audited = 0, None
            held.valid = min(held.valid, good * self.unit)

    def _note_bad(self, part: Part) -> None:
        if not are_whole(self.groups):
            self._lost.add(part.request)
            return
        good = part.good // self.unit - part.first[0]
        self._bad.update(part.blocks[0][good:])

    def _end_trace(self, part: Part, load: Load) -> None:
        assert part.trace is not None
        tokens = min(part.good - part.begin, part.trace.tokens)
        attributes: dict[str, str | int] = {
            "cxlkv.tokens": tokens,
            "cxlkv.far_bytes": tokens * self.pool.layout.stored_token_bytes,
            "cxlkv.rank": self._share.rank,
        }
        if part.has_failed:
            attributes["cxlkv.failure"] = kind_of(part.error, load.is_late)
        part.trace.end(attributes)

    def _forget(self, key: bytes) -> None:
        try:
            self.requests.forget(unpacked(key, self.unit))
        except CXLKVError as error:
            self.requests.fail("stale", error)

    # ---- saving ----

    def _plan(self) -> list[_Writing]:
        """What this step completes, and the pool does not have."""
        upto: dict[str, int] = {}
        planned: set[bytes] = set()
        for name, held in self._held.items():
            if not held.scheduled or not held.options.save or held.awaits:
                continue
            complete = held.complete(self.groups, self.unit)
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
            return self._writings(upto)
        except CXLKVError as error:
            self.requests.fail("save", error)
            return []

    def _adopt(self, name: str, held: Held, complete: int) -> None:
        """Adopt what the pool has of the text already, whichever engine stored it."""
        if name in self.requests.sequences and complete - held.saved == 1:
            return  # a block that a decode step has completed: its text is new
        with self.pool.match(unpacked(held.keys, self.unit)[:complete]) as hit:
            if hit.tokens > held.saved * self.unit:
                self.requests.release(name)
                held.saved = 0
                got = self.requests.load(name, hit.handle, hit.tokens, verify=False)
                held.saved = got // self.unit
        if name not in self.requests.sequences:
            self.requests.load(name, None, 0)

    def _writings(self, upto: Mapping[str, int]) -> list[_Writing]:
        return [self._writing_of(some, rewind) for some, rewind in self._together(upto)]

    def _together(self, upto: Mapping[str, int]) -> list[tuple[dict[str, int], int]]:
        """Those whose blocks the engine has from `saved` on are written together; with what is to
        be rewound."""
        together, found = dict[str, int](), list[tuple[dict[str, int], int]]()
        for name, end in upto.items():
            seen = self._seen_from(self._held[name])
            if seen is None:
                together[name] = end
            elif seen <= end * self.unit:  # else nothing of it can be found by itself
                found.append(({name: end}, end * self.unit - seen))
        if together:
            units = max(end - self._held[name].saved for name, end in together.items())
            found.append((together, units * self.unit))
        return found

    def _seen_from(self, held: Held) -> int | None:
        """A token that sees no block that the engine has let go of before it was saved, as it does
        with those that another connector has loaded. None: it has all from `saved` on."""
        found = None
        for group in self.groups:
            first = group.first_block(held.computed) * group.block_tokens
            window = group.pool_window(self._page_tokens)
            if window is not None and first > held.saved * self.unit:
                found = max(found or 0, first + window - 1)
        return found

    def _writing_of(self, upto: dict[str, int], rewind: int) -> _Writing:
        blocks, starts = list[Ints](), list[Ints]()
        for number, group in enumerate(self.groups):
            ratio = self.unit // group.block_tokens
            new = [
                held.blocks[number][held.saved * ratio : end * ratio]
                for held, end in ((self._held[name], end) for name, end in upto.items())
            ]
            blocks.append(np.concatenate([np.array(one, np.int32) for one in new]))
            starts.append(np.cumsum([0, *(len(one) for one in new)], dtype=np.int32))
        batch = self.pool.batch([self.requests.sequences[name] for name in upto])
        return _Writing(upto, batch, blocks, starts, rewind)

    def save_layer(self, name: str) -> None:
        """This layer's K and V of the step are in the engine's blocks now."""
        layer = self._layers.get(name)
        going = list[_Writing]()
        for writing in self._writing:
            if layer is None or layer != writing.layers:
                going.append(writing)
                continue
            try:
                writing.append(layer, self._memory[layer])
                going.append(writing)
            except PoolFullError as error:
                going += self._less(writing, error)
            except CXLKVError as error:
                self.requests.fail("save", error)
                self._abandon(writing)
        self._writing = going

    def _less(self, writing: _Writing, error: PoolFullError) -> list[_Writing]:
        """The pool has no room for all; nothing was written. Those that fit go on."""
        self.requests.fail("full", error)
        kept = list[_Writing]()
        for name, end in writing.upto.items():
            try:
                if len(writing.upto) == 1:
                    raise error
                alone = self._writing_of({name: end}, writing.rewind)
                alone.append(0, self._memory[0])
                kept.append(alone)
            except CXLKVError:
                self._drop(name)
        if not kept:
            return []
        rest = self._writing_of({k: v for one in kept for k, v in one.upto.items()}, writing.rewind)
        rest.layers = 1
        return [rest]

    def _drop(self, name: str) -> None:
        """Save no more of this request."""
        self.requests.release(name)
        self._held[name].saved = 0
        self._held[name].options = replace(self._held[name].options, save=False)

    def _abandon(self, writing: _Writing) -> None:
        """What was appended in this step goes; a later step finds what is published."""
        for name in writing.upto:
            self.requests.release(name)
            if name in self._held:
                self._held[name].saved = 0

    def end_step(self) -> None:
        """The step's K and V are there: publish what is right."""
        self.start_loads()  # nothing waited for them, but the engine says that they are due
        self._settle_now()
        for name in self._layers:  # those that the engine has not named; some models name none
            self.save_layer(name)
        written, self._writing = self._writing, []
        if not self._audit():
            return
        for writing in written:
            if writing.layers < len(self._memory):
                self._abandon(writing)
                continue
            for name, end in writing.upto.items():
                self._publish(name, end)
        self._save_states()

    def drop_step(self) -> None:
        """The step has failed: save nothing of it."""
        for writing in self._writing:
            self._abandon(writing)
        self._writing, self._offered = [], {}

    def _settle_now(self) -> None:
        """What the step waited for is there, or is not."""
        if self._now is not None:
            self._now.wait(len(self._memory))
            self._settle(self._now)
            self._now = None
            self._mark_invalid()

    def _mark_invalid(self) -> None:
        """Blocks may be shared: all that was computed from a bad one is nonsense."""
        for held in self._held.values() if self._bad else ():
            live = held.live(self.groups).items()
            for (_, block), begin in live:
                if block in self._bad:
                    held.valid = min(held.valid, begin)

    def _audit(self) -> bool:
        """Compares blocks that are computed by now. Whether no page of the pool is wrong; else the
        engine computes all again that it has from there, and nothing of what runs is saved."""
        right = True
        for held in self._held.values():
            unit = held.audited
            if unit is None or held.awaits or held.complete(self.groups, self.unit) <= unit:
                continue
            held.audited = None
            if not held.has(unit * self.unit, self.groups):
                continue
            self._report.audited += 1
            own = self.pool.sequence()
            try:
                batch = self.pool.batch([own])
                for layer, of in enumerate(self._memory):
                    ratio = self.unit // self.groups[of.group].block_tokens
                    blocks = held.blocks[of.group][unit * ratio : (unit + 1) * ratio]
                    of.append(batch, layer, blocks, [0, ratio])
                keys = unpacked(held.keys, self.unit)[: unit + 1]
                right = self.requests.audit(keys, own, 0) and right
            except CXLKVError as error:
                self.requests.fail("full" if isinstance(error, PoolFullError) else "save", error)
            finally:
                own.release()
        if not right:
            self.stop_saving()
            if self._goes_back:  # else the engine could not go back to there
                self._bad.update(block for held in self._held.values() for block in held.loaded)
            self._mark_invalid()
        return right

    def _publish(self, name: str, end: int) -> None:
        held = self._held[name]
        if name not in self.requests.sequences:
            return
        if held.valid < end * self.unit:
            self.requests.release(name)
            held.saved = 0
            return
        try:
            self.requests.store(name, unpacked(held.keys, self.unit)[:end])
        except CXLKVError as error:
            self.requests.fail("save", error)
            self._drop(name)
            return
        if self.requests.stored(name) < end * self.unit:  # the quota refused it
            self._drop(name)
            return
        self._report.stored.append(Span(name, held.saved, end))
        held.saved = end

    def _save_states(self) -> None:
        """Save those that the engine keeps, behind pages that are saved."""
        states = self._states
        if states is None:
            return
        for name, found in self._offered.items():
            held = self._held.get(name)
            if held is None or not held.options.save or held.awaits:
                continue
            for tokens, blocks in found:
                is_right = tokens <= min(held.valid, held.saved * self.unit)
                if is_right and blocks.keys() == states.groups:
                    keys = unpacked(held.keys, self.unit)[: tokens // self.unit]
                    self._save_checkpoint(states, name, keys, blocks)

    def _save_checkpoint(
        self, states: StateMemory, name: str, keys: PageKeys, blocks: Blocks
    ) -> None:
        try:
            with self.pool.match(keys) as hit:
                if hit.tokens < len(keys) * self.unit:
                    self._store_states(states, name, keys, blocks)
        except CXLKVError as error:
            self.requests.fail("full" if isinstance(error, PoolFullError) else "save", error)

    def _store_states(self, states: StateMemory, name: str, keys: PageKeys, blocks: Blocks) -> None:
        if name in self.requests.sequences:
            self.requests.store_states(name, keys, states.gather(blocks))

    def _save_left(self, left: Left) -> None:
        """Save what is left of a request that has ended: nothing has been written to its blocks
        since."""
        name, held = left.request, self._held.get(left.request)
        if held is None or not self._may_leave(name, held):
            return
        whole, keys = self._complete_keys(held, left)
        try:
            if self._save_at_end(name, held, whole, unpacked(keys, self.unit)):
                self._report.tails[name] = left.tokens - whole * self.unit
        except PoolFullError as error:
            self.requests.fail("full", error)
        except CXLKVError as error:
            self.requests.fail("save", error)

    def _may_leave(self, name: str, held: Held) -> bool:
        is_loading = any(name == other for other, _ in self._beside)
        return held.options.save and not held.awaits and not is_loading

    def _complete_keys(self, held: Held, left: Left) -> tuple[int, bytes]:
        """How many whole units a request leaves, and the keys of these and of its tail."""
        held.keys += left.keys
        there = left.tokens // self.unit
        whole = min(there, held.complete(self.groups, self.unit))
        has_tail = whole == there and left.tokens <= held.valid
        return whole, held.keys[: whole * KEY_BYTES] + (left.tail if has_tail else b"")

    def _save_at_end(self, name: str, held: Held, whole: int, keys: PageKeys) -> bool:
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
        for writing in self._writings({name: len(keys)}):
            for layer, own in enumerate(self._memory):
                writing.append(layer, own)
        if len(self.requests.sequences[name]) < len(keys) * self.unit:
            return False
        self.requests.store(name, keys)
        if self.requests.stored(name) < len(keys) * self.unit:
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
        self._report.weights[self._share.rank] = state

    def report(self) -> Report:
        """What happened since the last call."""
        found, self._report = self._report, Report()
        counts = self.requests.failures()
        found.failures.update(counts - self._told)
        self._told, found.saves = counts, self._share.saves
        return found

    def device_counts(self) -> dict[str, int]:
        """Bytes that a device has read itself."""
        return {}

    def close(self) -> None:
        for _, load in self._beside:
            load.give_up()
        self._loader.close()
        for name in list(self.requests.sequences):
            self.requests.release(name)
        self.tiers.close()
        self.pool.close()
