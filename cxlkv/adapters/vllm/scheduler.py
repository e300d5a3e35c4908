"""The scheduler's side: how much of a prompt the pools hold, and what the workers need for it.

A hit counts as far as every rank's pool has it. It is held, with a lease, from the match until the
request ends or is preempted, so that nothing takes its pages before the workers have adopted them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cxlkv.adapters.common.audits import WITHDRAWN, Audits, is_withdrawn
from cxlkv.adapters.common.keys import block_keys, xor
from cxlkv.adapters.common.metrics import Failures
from cxlkv.adapters.vllm.events import Events, Removed, Stored, there
from cxlkv.adapters.vllm.keeping import Keeping
from cxlkv.adapters.vllm.loading import IDLE_S
from cxlkv.adapters.vllm.lora import Adapter, Adapters
from cxlkv.adapters.vllm.messages import (
    FAR,
    KEY_BYTES,
    Continued,
    Left,
    Message,
    Options,
    Report,
    Started,
    offered,
    unpacked,
)
from cxlkv.adapters.vllm.prefetch import Prefetch
from cxlkv.adapters.vllm.settings import Settings, read_options
from cxlkv.adapters.vllm.tails import Tails, Words
from cxlkv.adapters.vllm.texts import EngineRequest, hashes_of
from cxlkv.adapters.vllm.weights import Weights
from cxlkv.arrays import Hashes, leading
from cxlkv.errors import BadArgumentError, CXLKVError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers
from cxlkv.tiers.cold_store import ColdStore

log = logging.getLogger("cxlkv")

LEASE_S = 60.0


@dataclass
class Scheduled:
    """One request in one step; blocks: by group, all of them if it is new or resumed, else the new
    ones."""

    request: str
    blocks: Sequence[Sequence[int]]
    computed: int
    scheduled: int


@dataclass
class Step:
    """What the engine has decided for a step."""

    fresh: list[Scheduled] = field(default_factory=list)  # new, or resumed after a preemption
    going: list[Scheduled] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  # finished, aborted, preempted
    states: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # that vLLM offers


@dataclass
class _Match:
    """A hit, as long as it is held. `local` tokens the engine had itself. tail: the key of its last
    block, where that is not a whole one. audit: it is given without its last block."""

    hits: list[Hit]
    handles: list[bytes]
    tokens: int
    local: int
    tail: bytes = b""
    audit: bool = False


@dataclass
class _Chain:
    """Keys to look for. The last one may be a tail's; `end`: of the text's tokens that all name."""

    keys: PageKeys
    end: int
    tail: bytes = b""


@dataclass
class _Told:
    """What the workers know of a request."""

    blocks: list[int]  # by group
    keys: int


class Scheduling:
    """One for each engine; pools are those of all `ranks`, by number; None: each rank has one.

    space: the namespace of its keys. block_tokens: of a unit, whole blocks of all groups;
    hash_tokens: how many tokens the engine's hashes are apart, a divisor of it. is_whole: the
    engine has all blocks of a text, and a step may wait for hits; else requests do (groups.py).
    loads, saves: as the engine's role says. events: whether anybody wants to know what was stored.
    tiers: of the pools, by rank, where they have a cold tier or a remote one; closed with this.
    words: what the engine hashes beside token ids, for keys of tails; None: no tails.
    """

    def __init__(
        self,
        pools: Sequence[CXLPool],
        space: bytes,
        settings: Settings,
        *,
        ranks: int | None = None,
        block_tokens: int,
        hash_tokens: int | None = None,
        is_whole: bool = True,
        loads: bool = True,
        saves: bool = True,
        events: bool = False,
        tiers: Sequence[Tiers] = (),
        words: Words | None = None,
    ):
        self.pools, self.space, self.settings = list(pools), space, settings
        self._weights = Weights(space, len(self.pools) if ranks is None else ranks)
        self._adapters = Adapters()
        self.block_tokens = block_tokens
        self._every = block_tokens // (hash_tokens or block_tokens)
        self._requests: dict[str, EngineRequest] = {}
        self._options: dict[str, Options] = {}
        self._spaces: dict[str, bytes] = {}
        self._matches: dict[str, _Match] = {}
        self._told: dict[str, _Told] = {}
        self._asked: set[str] = set()  # since the last step, and told how much of them is there
        self._starts: dict[str, Started] = {}  # allocated since the last step
        self._again: set[str] = set()  # what the workers know of them is not true any more
        self._failed: set[str] = set()  # requests that do not try again: a slow pool stays slow
        self._local: dict[str, int] = {}  # tokens that the engine had itself, at the last match
        self._elsewhere: dict[str, list[int]] = {}  # blocks that another connector loads
        self._unshared: list[str] = []  # requests of which no more is saved
        self._loaded: list[str] = []
        self._broken: list[str] = []
        self._left: list[Left] = []  # by those that ended since the last step
        self._loads, self._saves = loads, saves
        self._tails: Tails | None = None
        in_engine = settings.attention == "engine"
        # A hit that attention reads where it lies is there at once.
        self._loads_beside = in_engine and (settings.load == "async" or not is_whole)
        if words is not None and settings.tails and in_engine and is_whole:
            self._tails = Tails(block_tokens, words)
        self.failures = Failures()
        self._audits = Audits(settings.audit_hits)
        self._audited: dict[str, bool] = {}  # by request with a hit
        self._withdrawn: list[bytes] = []  # namespaces, for the workers
        self._keeping = Keeping(self.pools)
        self._prefetch: Prefetch | None = None
        if tiers:
            self._prefetch = Prefetch(tiers, self.failures, settings.deadline_s, LEASE_S)
        self.events: Events | None = None
        if events:
            cold = [one.cold for one in tiers]
            self.events = Events(self.pools, self.failures, block_tokens, self._every, cold=cold)
        self._check_withdrawn([one.cold for one in tiers])
        self._weights.are_mixed = False  # the engine's own prefix cache is empty yet

    def reopened(self, rank: int, pool: CXLPool, tiers: Tiers | None) -> None:
        """This rank's pool was lost, and what was held there with it; it is open again."""
        self.pools[rank] = pool
        if self.events is not None:
            self.events.reopened(rank, pool, None if tiers is None else tiers.cold)
        if self._prefetch is not None and tiers is not None:
            self._prefetch.reopened(rank, tiers)

    # ---- a request comes ----

    def expect(self, request: EngineRequest) -> None:
        """The request has joined the queue: what it needs of the tiers below may come while it
        waits."""
        if self._prefetch is None or not self._reads(request):
            return
        if self._weights.awaited or self._options_of(request).tier == FAR:
            return
        blocks = (request.num_tokens - 1) // self.block_tokens
        self._spaces[request.request_id] = self._space_of(request)
        keys = unpacked(self._keys(request, 0, blocks), self.block_tokens)
        found = self._find(_Chain(keys, blocks * self.block_tokens), 0)
        tokens = 0 if found is None else found.tokens
        self._prefetch.begin(request.request_id, keys, tokens)
        for hit in found.hits if found is not None else ():
            hit.release()

    def _reads(self, request: EngineRequest) -> bool:
        """Whether it may take tokens from the pools: one that wants the logprobs of its prompt, or
        is pooled, has all of them computed. The engine makes such a one wait for nothing."""
        return self._loads and not request.skip_reading_prefix_cache

    def match(self, request: EngineRequest, local: int) -> tuple[int | None, bool]:
        """(tokens that the pools have beyond the engine's own `local`, whether they are loaded
        beside the steps). None: the request is to wait, and to be asked for again. May be asked
        again at any time until the request gets blocks.

        The last token is always left to the engine, and without tails with it its block.
        """
        name = request.request_id
        self._forget_match(name)
        self._check_withdrawn()
        if self._told.pop(name, None) is not None:  # the engine has nothing of it any more
            self._again.add(name)
        if self._weights.awaited and not request.skip_reading_prefix_cache:
            return None, False
        self._requests[name], self._local[name] = request, local
        self._options[name] = self._options_of(request)
        self._spaces[name] = self._space_of(request)
        adapter = _adapter_of(request)
        is_right = adapter is None or self._adapters.may_save(adapter, local)
        is_right = is_right and not (local and self._weights.are_mixed)
        is_right = is_right and not self._weights.awaited  # one that did not wait for them
        if not is_right:
            self._options[name] = replace(self._options[name], save=False)
        self._asked.add(name)
        if self.events is not None:
            self.events.begin(request, self._spaces[name])
        most = request.num_tokens - 1
        if self._tails is None:
            most -= most % self.block_tokens
        if most <= local or not self._reads(request) or name in self._failed:
            return 0, False
        deep = self._prefetch if self._options[name].tier != FAR else None
        if deep is not None and deep.is_going(name):
            self._asked.discard(name)
            return None, False
        keys = unpacked(self._keys(request, 0, -(-most // self.block_tokens)), self.block_tokens)
        found = self._find(self._chain(request, keys), local)
        tokens = local if found is None else found.tokens
        if deep is not None and deep.matched(name, keys, tokens):
            for hit in found.hits if found is not None else ():
                hit.release()
            self._asked.discard(name)
            return None, False
        if found is None:
            return 0, False
        found.tokens = min(found.tokens, most)
        if is_right:  # else what it computes is not what its keys say
            found = self._shortened(name, keys, found)
        self._matches[name] = found
        if self.events is not None:
            self.events.found(name, found.tokens // self.block_tokens)
        return found.tokens - local, self._loads_beside

    def _shortened(self, name: str, keys: PageKeys, found: _Match) -> _Match:
        """The hit, or where it is to be audited one that lacks the last whole block. It is found
        anew: layers with windows may have given back what a cut would see."""
        blocks = found.tokens // self.block_tokens - 1
        if blocks * self.block_tokens <= found.local:
            return found
        if name not in self._audited:
            self._audited[name] = self._audits.is_due()
        if not self._audited[name]:
            return found
        chain = _Chain(keys[:blocks], blocks * self.block_tokens)
        shorter = self._find(chain, found.local)
        if shorter is None:
            return found
        is_whole = shorter.tokens == chain.end
        for hit in (found if is_whole else shorter).hits:
            hit.release()
        return replace(shorter, audit=True) if is_whole else found

    def _check_withdrawn(self, colds: Sequence[ColdStore | None] = ()) -> None:
        """Whether any engine has withdrawn this one's namespace. colds: below the pools, by rank;
        what is withdrawn while the engine runs is in the pools."""
        with suppress(CXLKVError):  # pools that cannot be asked have no hit, which is counted
            for rank, pool in enumerate(self.pools):
                if is_withdrawn(pool, self.space, colds[rank] if colds else None):
                    self._give_up()
                    return

    def plan_by(self, has_capacity: Callable[[int], bool]) -> None:
        """Requests begin when the pools have room for them, of so many tokens."""
        if self._prefetch is not None:
            self._prefetch.has_capacity = has_capacity

    @property
    def come_tokens(self) -> Counter[str]:
        """Tokens that came for requests, so far: "restored_tokens" from the cold tier,
        "pulled_tokens" from a remote pool."""
        return Counter() if self._prefetch is None else self._prefetch.tokens

    def _space_of(self, request: EngineRequest) -> bytes:
        """The engine's hashes know an adapter (LoRA) by its name; what its weights are is ours to
        say, as a pool outlives the engine. By xor, so that the spaces of two engines that share
        shards differ for each adapter as they do without (vllm/remote.py)."""
        adapter = _adapter_of(request)
        if adapter is None:
            return self.space
        own, has_changed = self._adapters.space_of(adapter)
        if has_changed:
            self._stop_saving(adapter, besides=request)
        return xor(self.space, own)

    def _stop_saving(self, adapter: Adapter, besides: EngineRequest | None = None) -> None:
        """Stop saving for requests that began with what the adapter was before."""
        for name, other in self._requests.items():
            own = _adapter_of(other)
            if own is None or own.lora_int_id != adapter.lora_int_id or other is besides:
                continue
            self._unshared.append(name)
            self._options[name] = replace(self._options[name], save=False)
            if name in self._starts:
                self._starts[name].options = self._options[name]

    def _look_at_adapters(self, step: Step) -> None:
        """The engine loads adapters in the step, and their files may have changed since the match:
        of those that begin, and of those that go on with load_inplace."""
        if not self._adapters:
            return
        begin = {one.request for one in step.fresh}
        used: dict[int, Adapter] = {}
        for name in [*begin, *(one.request for one in step.going)]:
            adapter = _adapter_of(self._requests[name]) if name in self._requests else None
            if adapter is not None and (name in begin or self._adapters.is_loading(adapter)):
                used[adapter.lora_int_id] = adapter
        for adapter in used.values():
            self.adapter_loaded(adapter)

    def adapter_loaded(self, adapter: Adapter) -> None:
        """The engine was asked to, beside its requests too; it does so if it lacks it."""
        if self._adapters.space_of(adapter)[1]:
            self._stop_saving(adapter)

    def adapter_removed(self, number: int) -> None:
        self._adapters.removed(number)

    def _options_of(self, request: EngineRequest) -> Options:
        try:
            found = read_options(request.kv_transfer_params, self.settings)
        except BadArgumentError as error:
            self.failures.add("bad_options", error)
            found = Options(self.settings.budget)
        return found if self._saves else replace(found, save=False)

    def _chain(self, request: EngineRequest, keys: PageKeys) -> _Chain:
        """Keys of its whole blocks, and behind those that all pools have the longest tail of it
        that they have, too."""
        tokens = self.block_tokens
        chain = _Chain(keys, len(keys) * tokens)
        if self._tails is None:
            return chain
        with suppress(CXLKVError):  # pools that cannot be asked have no hit, which is counted
            here = self._here(keys.packed)
            whole = leading(here)
            before = keys[whole - 1] if whole else self._spaces[request.request_id]
            tails = self._tails.keys(request, before, whole * tokens, request.num_tokens)
            lengths = np.flatnonzero(self._here(tails)) + 1
            if len(lengths):
                longest = int(lengths[-1])
                tail = tails[longest - 1 : longest]
                packed = np.concatenate([keys.packed[:whole], tail])
                made = PageKeys(packed, tokens)
                chain = _Chain(made, whole * tokens + longest, tail.tobytes())
        return chain

    def _here(self, keys: Hashes) -> npt.NDArray[np.bool_]:
        """Which pages of one block all ranks' pools have."""
        found = np.ones(len(keys), np.bool_)
        for pool in self.pools:
            found &= there(pool, pool.records.names(keys.tobytes(), 1)[:, 0, 0])
        return found

    def _find(self, chain: _Chain, local: int) -> _Match | None:
        hits: list[Hit] = []
        try:
            keys = chain.keys
            while len({hit.tokens for hit in hits}) != 1:  # a window need not see a shorter one
                for hit in hits:
                    hit.release()
                hits.clear()
                for pool in self.pools:
                    hits.append(pool.match(keys, lease_s=LEASE_S))
                    keys = keys[: hits[-1].tokens // self.block_tokens]
                if not keys or hits[-1].tokens <= local:
                    break
            else:
                tokens, handles = hits[0].tokens, [hit.handle for hit in hits]
                if tokens < len(chain.keys) * self.block_tokens:
                    return _Match(hits, handles, tokens, local)
                return _Match(hits, handles, chain.end, local, chain.tail)
        except CXLKVError as error:
            self.failures.add("match", error)
        for hit in hits:
            hit.release()
        return None

    def allocated(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], external: int
    ) -> None:
        """The request has blocks, by group, `external` tokens of which are to be loaded."""
        name = request.request_id
        found = self._matches.get(name)
        if external <= 0 or found is None:
            if name not in self._told and name not in self._starts:
                self._forget_match(name)
            return
        self._starts[name] = Started(
            name,
            [list(of) for of in blocks],
            handles=found.handles,
            tokens=found.local + external,
            brought=self._brought(name, found.local + external),
            local=found.local,
            tail=found.tail,
            audit=found.audit,
            trace=dict(getattr(request, "trace_headers", None) or {}) or None,
            computed=found.local + external,
            options=self._options[name],
        )

    def _brought(self, name: str, tokens: int) -> int:
        return 0 if self._prefetch is None else self._prefetch.brought(name, tokens)

    # ---- a step ----

    def message(self, step: Step) -> Message:
        """What the workers must know of this step."""
        self._keeping.expire()
        self._look_at_adapters(step)
        # A request that was not admitted is asked for again, and keeps no pages from running ones.
        for name in self._matches.keys() - self._starts.keys() - self._told.keys():
            self._forget_match(name)
        message = Message(
            ended=sorted(step.ended | self._again),
            loaded=self._loaded,
            left=self._left,
            unshared=self._unshared,
            broken=self._broken,
            weights=self._weights.told,
            look=bool(self._weights.awaited),
            withdrawn=self._withdrawn,
        )
        self._withdrawn, self._broken = [], []
        self._again, self._loaded, self._left, self._unshared = set(), [], [], []
        for name in step.ended:
            self._leaves(name)
            self._told.pop(name, None)
            if name not in self._starts:
                self._forget_match(name)
        scheduled = {one.request: one for one in step.fresh}
        for name, start in list(self._starts.items()):
            if name not in self._requests:  # aborted between allocation and step
                continue
            now = scheduled.pop(name, None)
            message.started.append(self._start(start, now))
        self._starts.clear()
        for one in scheduled.values():
            if one.request in self._told:
                there = self._told[one.request].blocks
                new = [of[count:] for of, count in zip(one.blocks, there, strict=True)]
                message.continued.append(self._go_on(one, new))
            else:
                options = self._options.get(one.request, Options())
                message.started.append(self._start(Started(one.request, [], options=options), one))
        message.continued += [self._go_on(one, one.blocks) for one in step.going]
        for name in step.states.keys() & self._told.keys():
            if found := offered(step.states[name], self.block_tokens):
                message.states[name] = found
        if not (message.started or message.continued or message.ended or message.left):
            self._rest()
        self._asked.clear()
        return message

    def _rest(self) -> None:
        """The step has nothing to do. Where none runs, nothing that is held for later ones may keep
        the next one waiting."""
        if self._asked and not self._told:
            self._keeping.give_way()
            if self._prefetch is not None:
                self._prefetch.let_go()
        if (self._prefetch is None or not self._prefetch.rest(IDLE_S)) and not self._told:
            time.sleep(IDLE_S)  # for room, of which nothing tells; workers wait for their loads

    def _leaves(self, name: str) -> None:
        if self._prefetch is not None and name in self._told:
            self._prefetch.leaves(name)

    def _start(self, start: Started, now: Scheduled | None) -> Started:
        if now is not None:
            start.blocks = [list(of) for of in now.blocks]
            start.computed, start.scheduled = now.computed, now.scheduled
        if start.handles is None and start.computed > self._local.get(start.request, 0):
            start.elsewhere = True
            self._elsewhere[start.request] = [block for of in start.blocks for block in of]
        start.keys = self._keys(self._requests[start.request], 0)
        counts = [len(of) for of in start.blocks]
        self._told[start.request] = _Told(counts, len(start.keys) // KEY_BYTES)
        return start

    def _go_on(self, one: Scheduled, blocks: Sequence[Sequence[int]]) -> Continued:
        told = self._told[one.request]
        keys = self._keys(self._requests[one.request], told.keys)
        for group, of in enumerate(blocks):
            told.blocks[group] += len(of)
        told.keys += len(keys) // KEY_BYTES
        new = [list(of) for of in blocks]
        return Continued(one.request, new, keys, one.computed, one.scheduled)

    def _keys(self, request: EngineRequest, first: int, last: int | None = None) -> bytes:
        hashes = hashes_of(request, self._every, first, last)
        space = self._spaces.get(request.request_id, self.space)
        return block_keys(hashes, self.block_tokens, space).packed.tobytes()

    # ---- a request goes ----

    def ended(self, request: EngineRequest) -> None:
        """Finished or aborted; the workers hear of it with the next step."""
        name = request.request_id
        self._leaves(name)
        self._forget_match(name)
        options = self._options.pop(name, None)
        if options is not None and options.save and self.settings.attention == "engine":
            self._leave(request)
        if options is not None and options.ttl_s is not None:
            keys = unpacked(self._keys(request, 0), self.block_tokens)
            self._keeping.keep(keys, options.ttl_s)
        for kept in (self._spaces, self._starts, self._local, self._elsewhere, self._audited):
            kept.pop(name, None)
        self._failed.discard(name)
        if self._prefetch is not None:
            self._prefetch.end(name, for_good=True)
        self._requests.pop(name, None)
        if self.events is not None:
            self.events.end(name)

    def _leave(self, request: EngineRequest) -> None:
        """The workers save what is left of it. Its last token has no K and V."""
        name, tokens = request.request_id, self.block_tokens
        told = self._told.get(name)
        if told is None or name in self._again:
            return
        end = min(request.num_tokens - 1, request.num_computed_tokens)
        whole = end // tokens
        keys, tail = self._keys(request, told.keys, max(told.keys, whole)), b""
        if self._tails is not None:
            before = self._keys(request, whole - 1, whole) if whole else self._spaces[name]
            tails = self._tails.keys(request, before, whole * tokens, end)
            if len(tails):
                tail, end = tails[-1].tobytes(), whole * tokens + len(tails)
        self._left.append(Left(name, end, keys, tail))

    def _forget_match(self, name: str) -> None:
        found = self._matches.pop(name, None)
        for hit in found.hits if found is not None else ():
            hit.release()

    # ---- what the workers did ----

    def heard(self, reports: Sequence[Report], bad: Collection[int] = ()) -> None:
        """Reports of all ranks about one step. bad: blocks of the engine that were to be loaded in
        it, by whomever, and were not: their requests go back."""
        counts = Counter(name for report in reports for name in set(report.loaded))
        for name in {name for report in reports for name in report.elsewhere}:
            if set(self._elsewhere.pop(name, ())).isdisjoint(bad):
                counts[name] = len(reports)
        self._loaded += [name for name, count in counts.items() if count == len(reports)]
        if any(report.failures["audit"] for report in reports):
            self._withdraw()  # before the weights, which may have changed since
        if self._weights.hear(reports):
            self._change_weights()
        if self._prefetch is not None:
            self._prefetch.has_left({name for report in reports for name in report.ended})
        for report in reports:
            self._broken += report.broken
            self.failures.update(report.failures)
            self._failed.update(name for name in report.failed if name in self._requests)
        if self.events is not None:
            self.events.heard(reports)

    def changes(self) -> list[Stored | Removed]:
        """What there is to tell routers since the last call."""
        return [] if self.events is None else self.events.changes()

    def _change_weights(self) -> None:
        """Workers save no more of what runs; what comes has other keys."""
        self.space = self._weights.space
        log.warning(
            "cxlkv: the engine's weights have changed: pages are found by others from now on"
        )
        self._keeping.close()  # no request finds those pages any more
        if self.events is not None:
            self.events.reset()

    def _withdraw(self) -> None:
        """An audit found a page that is not what its key says. The workers mark the namespace, and
        save no more of the requests that run: these may have been computed from such pages."""
        self._withdrawn.append(self.space)
        self._give_up()

    def _give_up(self) -> None:
        """The namespace is withdrawn. The engine's own prefix cache may have blocks from it: until
        it is reset, nothing is saved of requests that use it."""
        log.warning(WITHDRAWN)
        self._unshared += list(self._requests)
        self.reset()
        self._weights.are_mixed = True

    def forgotten(self) -> None:
        """The engine has reset its own prefix cache, and routers have dropped all that they knew of
        it. Weights may have changed, which the workers are asked before anything is matched."""
        self._weights.ask()
        self._adapters.forgotten()
        if self.events is not None:
            self.events.forgotten()

    def reset(self) -> None:
        """The model has changed, or so the engine says: nothing that was stored is found any more.

        Other engines have other keys from now on, as nobody knows which weights are alike.
        """
        self._weights.reset()
        self.space = self._weights.space
        self._keeping.close()  # no request finds those pages any more
        if self.events is not None:
            self.events.reset()

    def close(self) -> None:
        for name in list(self._matches):
            self._forget_match(name)
        self._keeping.close()
        if self._prefetch is not None:
            self._prefetch.close()
        for pool in self.pools:
            pool.close()


def _adapter_of(request: EngineRequest) -> Adapter | None:
    return getattr(request, "lora_request", None)
