"""A small engine with paged blocks, for tests of what a vLLM connector does in its scheduler and
workers: K and V of a block are numbers made from the text up to its end, so that any block tells
whether it is right. It schedules as vLLM does; it has no model, so nothing is attended to."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.common.pools import open_tiers, quota_of
from cxlkv.adapters.vllm.engine_attention import EngineAttention
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.messages import Message, Report
from cxlkv.adapters.vllm.remote import open_remote
from cxlkv.adapters.vllm.scheduler import Scheduled, Scheduling, Step
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.tiers import Tiers

TOKENS = 4  # of a block
LAYERS = 3
HEADS = 4  # of the whole model, as far as a test cares
SPACE = bytes(range(16))


def text(seed: int, tokens: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 97, tokens)]


def layout_of(rank: int) -> KVLayout:
    """Layout of one of two ranks, as the small engine writes it."""
    return KVLayout(
        layers=LAYERS,
        kv_heads=2,
        head_dim=8,
        page_tokens=TOKENS,
        dtype="float32",
        shard=(rank, 2, 0, 1),
    )


def make_pool(path: str, layout: KVLayout, capacity: str = "8MiB") -> None:
    CXLPool.create(path, layout=layout, capacity=capacity, threads=1, sketch=False).close()


@dataclass
class Adapter:
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: Mapping[str, object] | None = None
    lora_request: Adapter | None = None
    trace_headers: Mapping[str, str] | None = None
    salt: bytes = b""
    weights: bytes = b""  # of the engine when it came: of these its keys are
    images: Mapping[int, bytes] = field(default_factory=dict)  # by the token where it is
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    is_loading: bool = False
    skip_reading_prefix_cache: bool = False
    _texts: list[bytes] = field(default_factory=list)  # hashes of the text up to each token

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def block_hashes(self) -> list[bytes]:
        found, before = [], b""
        for end in range(TOKENS, self.num_tokens + 1, TOKENS):
            ids = np.array(self.all_token_ids[end - TOKENS : end], np.int64).tobytes()
            before = hashlib.sha256(before + words_of(self, end - TOKENS, end) + ids).digest()
            found.append(before)
        return found

    def block(self, index: int, layer: int, heads: range) -> npt.NDArray[np.float32]:
        """[K or V, kv_heads, tokens, dim]: what is right for block `index` of this text, as far as
        that goes."""
        for at in range(len(self._texts), self.num_tokens):
            before = self._texts[-1] if at else self.salt + self.weights
            own = f"{self.all_token_ids[at]} {self.images.get(at)!r}"
            self._texts.append(hashlib.sha256(before + own.encode()).digest())
        some = tuple(self._texts[index * TOKENS : (index + 1) * TOKENS])
        pairs = range(heads.start // 2, heads.stop // 2)
        return np.concatenate([rows_of(some, layer, pair) for pair in pairs], axis=1)


@cache
def rows_of(texts: tuple[bytes, ...], layer: int, pair: int) -> npt.NDArray[np.float32]:
    """Rows of two heads for tokens that are each named by the text up to its end."""
    numbers = [hashlib.shake_128(text + bytes([layer, pair])).digest(64) for text in texts]
    rows = np.frombuffer(b"".join(numbers), np.uint16).reshape(-1, 2, 2, 8)
    return np.ascontiguousarray(np.moveaxis(rows, 0, 2), np.float32)


def words_of(request: object, first: int, end: int) -> bytes:
    """What is hashed of its tokens beside their ids: a salt, and images where they are."""
    assert isinstance(request, Request)
    seen = [b"%d" % (at - first) + one for at, one in request.images.items() if first <= at < end]
    return b"".join([request.salt if first == 0 else b"", *seen])


def parts(first: int, end: int) -> list[tuple[int, int]]:
    """Blocks that have tokens of [first, end): which, and up to which of its own tokens."""
    return [
        (index, min(TOKENS, end - index * TOKENS))
        for index in range(first // TOKENS, -(-end // TOKENS))
    ]


class Rank:
    """A worker: its blocks, and the connector's part in it."""

    def __init__(self, pool: CXLPool, settings: Settings, blocks: int, rank: int, ranks: int):
        layers, heads = pool.layout.layers, pool.layout.kv_heads
        self.rank, self.heads = rank, range(rank * heads, (rank + 1) * heads)
        self.loaded: LoadedWeights | None = None  # that watches its weights
        self.memory = np.full((layers, blocks, 2, heads, TOKENS, 8), np.nan, np.float32)
        named = {
            f"layers.{layer}": BlockMemory(own[:, 0], own[:, 1])
            for layer, own in enumerate(self.memory)
        }
        tiers = open_tiers(pool, settings, 1 / ranks)
        self.worker = EngineAttention(
            pool,
            named,
            settings,
            block_tokens=TOKENS,
            rank=rank,
            ranks=ranks,
            tiers=tiers,
            quota=quota_of(tiers, settings, 1 / ranks),
        )

    def is_right(self, request: Request, index: int, tokens: int = TOKENS) -> bool:
        """True if the block's first `tokens` are right."""
        return all(
            self.is_right_in(request, index, layer, tokens) for layer in range(len(self.memory))
        )

    def is_right_in(self, request: Request, index: int, layer: int, tokens: int = TOKENS) -> bool:
        own = self.memory[layer][request.blocks[index]][:, :, :tokens]
        return np.array_equal(own, request.block(index, layer, self.heads)[:, :, :tokens])


class Engine:
    """One engine on pools that it shares with others."""

    def __init__(
        self,
        paths: list[str],
        settings: Settings | None = None,
        blocks: int = 64,
        shares: bool = False,
        space: bytes = SPACE,
        words: Mapping[str, object] | None = None,
    ):
        self.words = words or {}
        space = space if words is None else space_of(words, "")
        self.settings = settings or Settings()
        self.ranks = [
            Rank(CXLPool.open(path, threads=1), self.settings, blocks, rank, len(paths))
            for rank, path in enumerate(paths)
        ]
        opened, tiers = [CXLPool.open(path, threads=1) for path in paths], []
        if self.settings.cold is not None or self.settings.remote:
            tiers = [self._tiers(pool, 1 / len(paths)) for pool in opened]
        self.scheduling = Scheduling(
            opened,
            space,
            self.settings,
            block_tokens=TOKENS,
            events=True,
            tiers=tiers,
            words=words_of,
        )
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.free = list(range(blocks))
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}  # tokens that came from the pool
        self.recomputed = 0  # steps in which a load failed
        self.wrongly_stored: list[tuple[str, int]] = []
        self.told_blocks = 0  # that ranks said they have stored
        self.shares = shares  # requests of one text share blocks, as with the engine's own cache
        self.users: Counter[int] = Counter()  # of a block
        self.weights = b""  # of which K and V are that are computed from now on
        self.lost_in: int | None = None  # the layer of the next step in which the pools are lost
        self.elsewhere: dict[str, int] = {}  # tokens of a request that another connector loads
        self.fails_elsewhere = False
        self._paths = paths
        self.links = ExitStack()  # ends with the engine
        self._arrived: dict[str, int] = {}  # how many ranks' loads of a request have ended
        self._held_back: dict[str, Request] = {}  # ended while they were loading

    def _tiers(self, pool: CXLPool, share: float) -> Tiers:
        remote = open_remote(pool, self.settings, self.words, HEADS)
        return open_tiers(pool, self.settings, share, moves=False, remote=remote)

    def _lose(self) -> None:
        """Lose it like `Reopening`, at any time: calls raise from now on."""
        self.lost_in = None
        for pool in (*self.scheduling.pools, *(rank.worker.pool for rank in self.ranks)):
            pool.close()

    def find(self, *, scheduler: bool) -> None:
        """The pools are there again, for the scheduler or for the workers."""
        for rank, path in zip(self.ranks, self._paths, strict=True):
            pool = CXLPool.open(path, threads=1)
            if scheduler:
                self.scheduling.pools[rank.rank] = pool
            else:
                rank.worker.reopened(pool)

    def add(self, name: str, ids: list[int], **params: object) -> Request:
        return self.join(Request(name, list(ids), {"cxlkv": params} if params else None))

    def run_to_end(self, name: str, ids: list[int]) -> int:
        """A request from its beginning to its end; how many of its tokens were there."""
        self.add(name, ids)
        self.settle()
        self.step()
        self.end(name)
        self.step()
        return self.cached[name]

    def join(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        request.weights = self.weights
        self.waiting.append(request)
        self.scheduling.expect(request)
        return request

    def serve(
        self, name: str, ids: list[int], *, samples: bool = True, **params: object
    ) -> Request:
        """Adds it, and takes a step."""
        request = self.add(name, ids, **params)
        self.step(samples=samples)
        return request

    def end(self, name: str) -> None:
        """Finished or aborted."""
        request = self.requests.pop(name)
        self.scheduling.ended(request)
        self.ended.add(name)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.is_loading:
            self._held_back[name] = request
        else:
            self._give_back(request)

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self._give_back(request)
        request.computed = 0
        self.ended.add(name)
        self.waiting.insert(0, request)

    def _give_back(self, request: Request) -> None:
        self.users.subtract(request.blocks)
        self.free += [block for block in request.blocks if not self.users[block]]
        request.blocks = []

    def _share(self, request: Request) -> int:
        """Tokens of whole blocks that another request has, or gets in this step."""
        hashes = request.block_hashes[: (request.num_tokens - 1) // TOKENS]
        for other in self.requests.values() if self.shares else ():
            same = [a == b for a, b in zip(hashes, other.block_hashes, strict=False)]
            count = same.index(False) if False in same else len(same)
            if count and len(other.blocks) >= count and not other.is_loading:
                request.blocks = other.blocks[:count]
                self.users.update(request.blocks)
                return count * TOKENS
        return 0

    def step(self, *, chunk: int = 1 << 20, samples: bool = True) -> None:
        """Everything that can run computes up to `chunk` tokens and then samples one."""
        step = Step(ended=self.ended)
        self.ended = set()
        running = [r for r in self.requests.values() if r not in self.waiting]
        for request in running:
            if not request.is_loading:
                new = self._grow(request, chunk)
                count = min(chunk, request.num_tokens - request.computed)
                step.going.append(Scheduled(request.request_id, new, request.computed, count))
        for request in list(self.waiting):
            self._admit(request, step, chunk)
        message = self.scheduling.message(step)
        self._run(step, message)
        for one in [*step.fresh, *step.going]:
            request = self.requests[one.request]
            if samples and not request.is_loading and request.computed == request.num_tokens:
                request.all_token_ids.append(request.num_tokens * 7 % 97)
        # Where requests share blocks that are still to come, one counts on them for a step.
        assert self.shares or not self.wrong()

    def _grow(self, request: Request, chunk: int) -> list[int]:
        upto = min(request.num_tokens, request.computed + chunk)
        count = -(-upto // TOKENS) - len(request.blocks)
        new = [self.free.pop(0) for _ in range(max(0, count))]
        self.users.update(new)
        request.blocks += new
        return new

    def _admit(self, request: Request, step: Step, chunk: int) -> None:
        if request.is_loading:
            return
        if request.computed == 0:
            local = self._share(request)
            tokens, later = self.scheduling.match(request, local)
            if tokens is None:
                self._give_back(request)  # what it shares; it asks again
                return
            if request.request_id in self.elsewhere:
                self._admit_elsewhere(request, step, chunk)
                return
            self.cached[request.request_id] = tokens
            request.computed = local + tokens
            self._grow(request, 0 if later else chunk)
            self.scheduling.allocated(request, request.blocks, tokens)
            if later:
                request.is_loading = True
                return
        else:
            self._grow(request, chunk)
        count = min(chunk, request.num_tokens - request.computed)
        step.fresh.append(
            Scheduled(request.request_id, list(request.blocks), request.computed, count)
        )
        self.waiting.remove(request)

    def _admit_elsewhere(self, request: Request, step: Step, chunk: int) -> None:
        """Beside another connector, whose hit the engine takes: it is loaded before the step."""
        request.computed = self.elsewhere[request.request_id]
        self._grow(request, chunk)
        self.scheduling.allocated(request, request.blocks, 0)
        count = min(chunk, request.num_tokens - request.computed)
        new = Scheduled(request.request_id, list(request.blocks), request.computed, count)
        step.fresh.append(new)
        self.waiting.remove(request)

    def _load_elsewhere(self, step: Step) -> set[int]:
        """Blocks that did not arrive."""
        bad: set[int] = set()
        for one in step.fresh:
            for index in range(self.elsewhere.pop(one.request, 0) // TOKENS):
                for rank, layer in product(self.ranks, range(len(self.ranks[0].memory))):
                    right = self.requests[one.request].block(index, layer, rank.heads)
                    rank.memory[layer][one.blocks[index]] = right + self.fails_elsewhere
                if self.fails_elsewhere:
                    bad.add(one.blocks[index])
        return bad

    def _run(self, step: Step, message: Message) -> None:
        """What the workers do with a step, then what the scheduler makes of it."""
        for rank in self.ranks:
            if rank.loaded is None:  # its weights are those of the start
                rank.worker.hear(message)
                if message.look:
                    rank.worker.tell_weights(b"")
            else:
                rank.loaded.hear(message, rank.worker)
            rank.worker.start_loads()
        bad = self._load_elsewhere(step)
        computing = [*step.fresh, *step.going]
        for layer in range(len(self.ranks[0].memory)):
            if layer == self.lost_in:
                self._lose()
            for one in computing:  # K and V are written before the layer is waited for
                self._compute(self.requests[one.request], layer, one)
            for rank in self.ranks:
                rank.worker.wait_for_layer(f"layers.{layer}")
            for rank in self.ranks:
                rank.worker.save_layer(f"layers.{layer}")
        for rank in self.ranks:
            rank.worker.end_step()
        done = [rank.worker.finished() for rank in self.ranks]
        bad = bad.union(*(rank.worker.bad_blocks() for rank in self.ranks))
        reports = [rank.worker.report() for rank in self.ranks]
        for rank, report in zip(self.ranks, reports, strict=True):
            self.told_blocks += sum(one.last - one.first for one in report.stored)
            self.wrongly_stored += [
                (one.request, index)
                for one in report.stored
                if one.request in self.requests  # else its blocks may be others' now
                for index in range(one.first, one.last)
                if not rank.is_right(self.requests[one.request], index)
            ]
        self._learn(step, done, bad, reports)

    def _compute(self, request: Request, layer: int, one: Scheduled) -> None:
        """Right where all before is right, in all ranks, as it is with attention; else nonsense."""
        there = all(
            rank.is_right_in(request, index, below, count)
            for rank in self.ranks
            for index, count in parts(0, one.computed)
            for below in range(layer)
        )
        for index, count in parts(one.computed, one.computed + one.scheduled):
            first = max(0, one.computed - index * TOKENS)
            for rank in self.ranks:
                right = request.block(index, layer, rank.heads)[:, :, first:count]
                to = rank.memory[layer][request.blocks[index]]
                to[:, :, first:count] = (
                    right if there and not self._is_older(request) else right + 1
                )

    def _is_older(self, request: Request) -> bool:
        """Whether it runs on with weights that are not those of its keys."""
        return request.weights != self.weights

    def _learn(
        self, step: Step, done: list[set[str]], bad: set[int], reports: list[Report]
    ) -> None:
        self.scheduling.heard(reports, bad)
        for one in [*step.fresh, *step.going]:
            self.requests[one.request].computed = one.computed + one.scheduled
        self.recomputed += bool(bad)
        computed = {one.request: one.computed for one in [*step.fresh, *step.going]}
        again: set[int] = set()  # blocks that a request computes again
        for name, request in self.requests.items():
            wrong = [i for i, block in enumerate(request.blocks) if block in bad]
            if wrong and request.blocks[wrong[0]] in again:
                request.computed = computed[name]  # the other one mends what they share
            elif wrong:
                request.computed = min(request.computed, wrong[0] * TOKENS)
                again.update(request.blocks)
        self._finish(done)

    def _finish(self, done: list[set[str]]) -> None:
        for names in done:
            for name in names:
                self._arrived[name] = self._arrived.get(name, 0) + 1
        for name, count in list(self._arrived.items()):
            if count < len(self.ranks):
                continue
            del self._arrived[name]
            if name in self._held_back:
                self._give_back(self._held_back.pop(name))
                continue
            request = self.requests[name]
            request.is_loading = False
            if request.computed == 0:
                self._give_back(request)

    def settle(self, deadline_s: float = 20) -> None:
        """Steps until nothing is loading, and nobody waits."""
        until = time.monotonic() + deadline_s
        while (
            self._held_back
            or self.waiting
            or any(request.is_loading for request in self.requests.values())
        ):
            assert time.monotonic() < until, "a load does not end"
            self.step()  # one that has nothing to do waits for the loader, by itself

    def wrong(self) -> list[tuple[str, int]]:
        """Blocks that count as computed, and are not what they should be."""
        return [
            (request.request_id, index)
            for rank in self.ranks
            for request in self.requests.values()
            if not request.is_loading and not self._is_older(request)
            for index, count in parts(0, request.computed)
            if not rank.is_right(request, index, count)
        ]

    def close(self) -> None:
        for name in list(self.requests):
            self.end(name)
        self.settle()
        self.step()
        self.links.close()
        for rank in self.ranks:
            rank.worker.close()
        self.scheduling.close()
