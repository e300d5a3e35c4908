"""vLLM's recorded decisions, played with our scheduler's and worker's sides; imports no vLLM.

In place of K and V it has numbers made of their block's hash, so that any block tells whether it is
right. It treats the pools as connector.py does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool
from cxlkv.adapters.common.keys import block_keys, space_of
from cxlkv.adapters.common.pools import open_tiers
from cxlkv.adapters.common.reopening import LOOKS_A_LEASE, Reopening
from cxlkv.adapters.vllm import pools
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.messages import Message
from cxlkv.adapters.vllm.scheduler import Scheduled, Scheduling, Step
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.errors import CXLKVError
from cxlkv.machine.hosts import Host
from cxlkv.prefix import PageKeys
from tests.qemu.guest.recording import (
    Allocated,
    Emptied,
    Ended,
    Event,
    Matched,
    Recording,
    Stepped,
)

Block = npt.NDArray[np.float32]
LOAD, SAVE = "load", "save"


@dataclass
class Request:
    """What the scheduler's side reads of vLLM's own."""

    request_id: str
    hashes: list[bytes]  # of all blocks that its text will have
    block_tokens: int
    kv_transfer_params: Mapping[str, object]
    num_tokens: int = 0
    num_computed_tokens: int = 0
    all_token_ids: Sequence[int] = ()
    skip_reading_prefix_cache: bool = False

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes[: self.num_tokens // self.block_tokens]


class Engine:
    """On the pool that the settings name, one rank.

    between: called with LOAD in a step with hits, when they are adopted and nothing is fetched yet;
    with SAVE in another step with new requests, when its first layer is saved and not its second.
    """

    def __init__(
        self,
        recording: Recording,
        settings: Settings,
        between: Callable[[str], None] = lambda kind: None,
    ):
        self.recording, self.settings, self.between = recording, settings, between
        self._size = recording.block_tokens
        layout = recording.layout
        words: dict[str, object] = {"engine": recording.engine, "layout": str(layout)}
        path = pools.pool_path(settings.where, words, pools.Ranks(), 0)
        again = partial(
            pools.make_or_open,
            *(path, layout, settings.capacity, pools.Ranks(), 0),
            shared=settings,
        )
        # [layer, block, head, K and then V of its tokens, channel], as vLLM's backend for CPUs.
        shape = (layout.kv_heads, 2 * self._size, layout.head_dim)
        self._memory = np.empty((layout.layers, recording.engine_blocks, *shape), np.float32)
        pool = again()
        self.worker = EngineAttention(
            pool,
            {
                str(layer): BlockMemory(own[:, :, : self._size], own[:, :, self._size :])
                for layer, own in enumerate(self._memory)
            },
            settings,
            groups=[BlockGroup(self._size)],
            tiers=open_tiers(pool, settings),
        )
        opened = pools.open_all([path], settings)
        space = space_of(words, settings.salt)
        self.scheduling = Scheduling(opened, space, settings, block_tokens=self._size)
        every_s = settings.lease_s / LOOKS_A_LEASE
        self._workers = Reopening(pool, again, every_s, self._give)
        find = partial(pools.open_one, path, settings)
        self._schedulers = Reopening(opened[0], find, every_s)
        self._requests: dict[str, Request] = {}
        self._blocks: dict[str, list[int]] = {}
        self._tenant, self._finds_all, self._saves = "", False, True
        self._found: Counter[str] = Counter()  # tokens that the pool had of each request

    def _give(self) -> None:
        self.worker.tiers.give()

    @property
    def pool(self) -> CXLPool:
        """The scheduler's: it has no tiers."""
        return self.scheduling.pools[0]

    @property
    def host(self) -> Host:
        return next(host for host in self.pool.admin.hosts() if host.is_self)

    @property
    def failures(self) -> Counter[str]:
        return self.scheduling.failures

    # ---- runs ----

    def serve(self, tenant: str) -> None:
        """All requests, with an empty cache of its own, whatever of the tenant's texts is in the
        pool: computed as the recorded engine did, which found nothing, and saved."""
        self._finds_all, self._saves = False, True
        self._run(self.recording.served, tenant)

    def find(self, tenant: str, *, saves: bool = False) -> int:
        """All requests; returns how many tokens came from the pool, as many of each as recorded.
        Without saves it takes no room, for which others' texts might have to go."""
        self._finds_all, self._saves = True, saves
        self._run(self.recording.found, tenant)
        return self._found.total()

    def _run(self, events: Sequence[Event], tenant: str) -> None:
        self._tenant = tenant
        self._found.clear()
        self._memory.fill(np.nan)
        try:
            for event in events:
                self._play(event)
        finally:
            for name in list(self._requests):
                self._end(name)
            self._step(Step(ended=set(self._blocks)), [])
            self._blocks.clear()

    def _play(self, event: Event) -> None:
        if isinstance(event, Matched):
            self._match(event)
        elif isinstance(event, Allocated):
            self._allocate(event)
        elif isinstance(event, Stepped):
            self._step(event.step(), event.tokens)
        elif isinstance(event, Ended):
            self._end(event.request)
        else:
            assert isinstance(event, Emptied)
            self._memory.fill(np.nan)

    # ---- the scheduler's side ----

    def _match(self, event: Matched) -> None:
        name = event.request
        if name not in self._requests:
            options = {"cxlkv": {"save": self._saves}}
            self._requests[name] = Request(name, self._text(name), self._size, options)
        request = self._requests[name]
        request.num_tokens = event.tokens
        self.take_reopened()
        found, _ = self.scheduling.match(request, event.local)
        assert found is not None, "nothing is below the pool"
        if self._finds_all:
            assert found == event.found, f"{name}: {found} tokens, not {event.found}"
        self._found[name] = found

    def _allocate(self, event: Allocated) -> None:
        request = self._requests[event.request]
        self.scheduling.allocated(request, [event.blocks], event.external)

    def _end(self, name: str) -> None:
        self.scheduling.ended(self._requests.pop(name))

    def _step(self, step: Step, tokens: Sequence[int]) -> None:
        rows = [*step.fresh, *step.going]
        for one, count in zip(rows, tokens, strict=True):
            self._requests[one.request].num_tokens = count
        self.take_reopened()
        message = self.scheduling.message(step)
        for name in step.ended:
            self._blocks.pop(name, None)
        for one in step.fresh:
            self._blocks[one.request] = list(one.blocks[0])
        for one in step.going:
            self._blocks[one.request] += one.blocks[0] if one.blocks else []
        wrong, bad = self._work(step, message)
        for name, index in wrong.items():
            assert self._blocks[name][index] in bad, f"{name}: block {index} is wrong"
        if bad:
            self._step(*self._repeated(rows, bad))

    def take_reopened(self) -> bool:
        """Pools that were lost and are there again; whether both are now, the scheduler's and the
        worker's."""
        pool = self._schedulers.take()
        if pool is not None:
            self.scheduling.reopened(0, pool, None)
        pool = self._workers.take()
        if pool is not None:
            with suppress(CXLKVError):  # of a pool that was closed
                self.worker.tiers.close()
            self.worker.reopened(pool, open_tiers(pool, self.settings))
        try:
            return all(one.stats() for one in (self.pool, self.worker.pool))
        except CXLKVError:
            return False

    # ---- the worker's side ----

    def _work(self, step: Step, message: Message) -> tuple[dict[str, int], set[int]]:
        """What a worker does in a step. Returns the block, by number, from which on what a request
        begins with is not right; and the engine's blocks that could not be loaded, as told."""
        wrong: dict[str, int] = {}
        loads = any(start.handles for start in message.started)
        self.worker.hear(message)
        if loads:
            self.between(LOAD)
        self.worker.start_loads()
        for layer in range(len(self._memory)):
            self.worker.wait_for_layer(str(layer))
            for one in step.going:
                self._compute(one, layer, False)
            for one in step.fresh:  # which may begin with blocks that those before it complete now
                self._look(one, layer, wrong)
                self._compute(one, layer, one.request in wrong)
            self.worker.save_layer(str(layer))
            if layer == 0 and step.fresh and not loads:
                self.between(SAVE)
        self.worker.end_step()
        self.worker.finished()
        bad = self.worker.bad_blocks()
        self.scheduling.heard([self.worker.report()])
        return wrong, bad

    def _look(self, one: Scheduled, layer: int, wrong: dict[str, int]) -> None:
        """At what a request begins with, from the pool or the engine's own cache: every byte."""
        blocks, text = self._blocks[one.request], self._requests[one.request].hashes
        for index in range(wrong.get(one.request, one.computed // self._size)):
            found, right = self._memory[layer][blocks[index]], self._right(text[index], layer)
            if found.tobytes() != right.tobytes():
                wrong[one.request] = index
                return

    def _compute(self, one: Scheduled, layer: int, wrongly: bool) -> None:
        """The blocks that become complete: of nonsense comes nonsense."""
        blocks, text = self._blocks[one.request], self._requests[one.request].hashes
        end = (one.computed + one.scheduled) // self._size
        for index in range(one.computed // self._size, end):
            self._memory[layer][blocks[index]] = self._right(text[index], layer) + wrongly

    def _repeated(self, rows: Sequence[Scheduled], bad: set[int]) -> tuple[Step, list[int]]:
        """What could not be loaded is computed, and all behind it."""
        step, tokens = Step(), []
        for one in rows:
            blocks = self._blocks[one.request]
            first = next((at for at, block in enumerate(blocks) if block in bad), None)
            if first is not None:
                begin = first * self._size
                count = one.computed + one.scheduled - begin
                step.going.append(Scheduled(one.request, [], begin, count))
                tokens.append(self._requests[one.request].num_tokens)
        return step, tokens

    def _right(self, name: bytes, layer: int) -> Block:
        """K and V of a block, as they must be."""
        seed = np.frombuffer(name, np.uint64)
        numbers = np.random.default_rng([layer, *seed.tolist()])
        return numbers.standard_normal(self._memory.shape[2:], np.float32)

    # ---- texts ----

    def _text(self, name: str) -> list[bytes]:
        """The recorded hashes; other tenants have other texts, told apart in the same way."""
        hashes = self.recording.texts[name]
        return [hashlib.sha256(self._tenant.encode() + one).digest() for one in hashes]

    def keys(self, tenant: str) -> list[PageKeys]:
        """Keys of all texts of a tenant."""
        self._tenant = tenant
        texts = map(self._text, self.recording.texts)
        return [block_keys(text, self._size, self.scheduling.space) for text in texts]

    def missing(self, tenant: str) -> int:
        """Tokens of whole blocks that the pool does not have."""
        count = 0
        for keys in self.keys(tenant):
            with self.pool.match(keys) as hit:
                count += len(keys) * self._size - hit.tokens
        return count

    def forget(self, tenant: str) -> None:
        for keys in self.keys(tenant):
            self.pool.forget(keys)

    def close(self) -> None:
        for part in (self._workers, self._schedulers, self.scheduling, self.worker):
            part.close()
