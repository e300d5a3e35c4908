"""A small engine with paged blocks, for tests of what a vLLM connector does in its scheduler and
workers: K and V of a block are numbers made from the text up to its end, so that any block tells
whether it is right. It schedules as vLLM does, with tables of blocks for several groups of layers,
and lets go of blocks behind windows; it has no model, so nothing is attended to."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cxlkv import CXLPool, KVLayout
from cxlkv.adapters.common.keys import space_of
from cxlkv.adapters.common.pools import open_tiers, quota_of
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.adapters.vllm import groups
from cxlkv.adapters.vllm.engine_attention import EngineAttention, Share
from cxlkv.adapters.vllm.groups import BlockGroup, are_whole, unit_of
from cxlkv.adapters.vllm.loaded import LoadedWeights
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.messages import Message, Report
from cxlkv.adapters.vllm.remote import open_remote
from cxlkv.adapters.vllm.scheduler import Scheduled, Scheduling, Step
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.adapters.vllm.states import StateLayer, StateMemory
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

TOKENS = 4  # of a block
LAYERS = 3
HEADS = 4  # of the whole model, as far as a test cares
SPACE = bytes(range(16))
STATE_BYTES = 1000  # of a layer
Row = npt.NDArray[np.uint8]
NULL = 0  # the block in the place of those that the engine has let go of


@dataclass(frozen=True)
class Grouping:
    """Groups of the engine, the kv heads of their layers in a rank, and of each layer its group,
    those with K and V and those with states apart. on_device: its blocks are as on one; reads: one
    that has the pool registered."""

    groups: tuple[BlockGroup, ...] = (BlockGroup(TOKENS),)
    heads: tuple[int, ...] = (2,)
    of_layer: tuple[int, ...] = (0,) * LAYERS
    states: tuple[int, ...] = ()
    on_device: bool = False
    reads: bool = False

    def memory(self, blocks: int) -> StateMemory | None:
        """Layers with states in so many blocks; None: there are no such layers."""
        layers = [
            StateLayer(f"states.{layer}", group, np.zeros((blocks, STATE_BYTES), np.uint8))
            for layer, group in enumerate(self.states)
        ]
        return StateMemory(layers) if layers else None


def text(seed: int, tokens: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 97, tokens)]


def layout_of(rank: int, grouping: Grouping = Grouping()) -> KVLayout:
    """Layout of one of two ranks, as the small engine writes it."""
    layers = [
        (number, SimpleNamespace(num_kv_heads=grouping.heads[number], head_size=8))
        for number in grouping.of_layer
    ]
    memory = grouping.memory(1)
    states = memory.states if memory is not None else None
    return groups.layout_of(layers, grouping.groups, "float32", (rank, 2, 0, 1), states)


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
    blocks: list[list[int]] = field(default_factory=list)  # by group
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

    def block(
        self, index: int, layer: int, heads: range, size: int = TOKENS
    ) -> npt.NDArray[np.float32]:
        """[K or V, kv_heads, tokens, dim]: what a right block `index` of this text holds, in blocks
        of `size` tokens; the last one may be short."""
        some = tuple(self._hashed()[index * size : (index + 1) * size])
        pairs = range(heads.start // 2, heads.stop // 2)
        return np.concatenate([rows_of(some, layer, pair) for pair in pairs], axis=1)

    def state(self, tokens: int, layer: int, rank: int) -> npt.NDArray[np.uint8]:
        """A layer's right state behind so many tokens."""
        named = self._hashed()[tokens - 1] + bytes([layer, rank])
        return np.frombuffer(hashlib.shake_128(named).digest(STATE_BYTES), np.uint8)

    def _hashed(self) -> list[bytes]:
        for at in range(len(self._texts), self.num_tokens):
            before = self._texts[-1] if at else self.salt + self.weights
            own = f"{self.all_token_ids[at]} {self.images.get(at)!r}"
            self._texts.append(hashlib.sha256(before + own.encode()).digest())
        return self._texts


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


def parts(first: int, end: int, size: int = TOKENS) -> list[tuple[int, int]]:
    """Blocks that have tokens of [first, end): which, and up to which of its own tokens."""
    return [
        (index, min(size, end - index * size)) for index in range(first // size, -(-end // size))
    ]


class MakeWorker(Protocol):
    def __call__(
        self,
        pool: CXLPool,
        layers: Mapping[str, BlockMemory],
        settings: Settings,
        *,
        groups: Sequence[BlockGroup],
        share: Share,
        tiers: Tiers | None,
        quota: Quota | None,
    ) -> EngineAttention: ...


class Rank:
    """A worker: its blocks, and the connector's part in it."""

    def __init__(
        self,
        pool: CXLPool,
        settings: Settings,
        blocks: int,
        rank: int,
        ranks: int,
        grouping: Grouping,
        copies: int,
    ):
        self.rank, self.grouping = rank, grouping
        self.loaded: LoadedWeights | None = None  # that watches its weights
        heads = [pool.layout.of_layer(layer).kv_heads for layer in range(pool.layout.layers)]
        place = rank // copies
        self.heads = [range(place * own, (place + 1) * own) for own in heads]
        shapes = [
            (blocks + 1, 2, own, self.group(layer).block_tokens, 8)
            for layer, own in enumerate(heads)
        ]
        tiers = open_tiers(pool, settings, 1 / ranks)
        self.states = grouping.memory(blocks + 1)
        make: MakeWorker = partial(EngineAttention, states=self.states)
        self._named: dict[str, BlockMemory] = {}
        if grouping.on_device:
            make = self._on_device(shapes)
        else:
            self.memory = [np.full(shape, np.nan, np.float32) for shape in shapes]
            self._named |= {
                f"layers.{layer}": BlockMemory(own[:, 0], own[:, 1], grouping.of_layer[layer])
                for layer, own in enumerate(self.memory)
            }
        self.worker = make(
            pool,
            self._named,
            settings,
            groups=grouping.groups,
            share=Share(rank, place, ranks > 1, rank % copies == 0),
            tiers=tiers,
            quota=quota_of(tiers, settings, 1 / ranks),
        )
        if grouping.reads:
            self._let_read(pool)

    def _let_read(self, pool: CXLPool) -> None:
        import torch

        from cxlkv.adapters.vllm.device_attention import DeviceAttention
        from cxlkv.gpu.read import PageReader

        assert isinstance(self.worker, DeviceAttention)
        self.worker._reader = PageReader(pool, torch.device("cpu"))

    def _on_device(self, shapes: Sequence[tuple[int, ...]]) -> MakeWorker:
        """Blocks as on a device, K beside V in each row; its memory is the host's."""
        import torch

        from cxlkv.adapters.vllm.device_attention import DeviceAttention
        from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link
        from cxlkv.adapters.vllm.device_states import DeviceStates

        link = Link(torch.device("cpu"))
        self.memory = []
        for layer, (blocks, _, heads, tokens, dim) in enumerate(shapes):
            last = layer % 2  # heads lie before tokens, or behind them
            order = (blocks, tokens, heads) if last else (blocks, heads, tokens)
            cache = np.full((*order, 2, dim), np.nan, np.float32)
            rows = cache.swapaxes(1, 2) if last else cache
            self.memory.append(np.moveaxis(rows, 3, 1))
            named = torch.from_numpy(cache).view(*order, 2 * dim)
            memory = named.transpose(1, 2) if last else named
            group = self.grouping.of_layer[layer]
            self._named[f"layers.{layer}"] = DeviceMemory(memory, dim, tokens, group, link)
        if self.states is not None:
            self.states = DeviceStates(self.states.layers, (), link)
        return partial(DeviceAttention, link=link, step_tokens=1 << 14, states=self.states)

    def wait_for_saves(self) -> None:
        """Of steps on a device, which wait for none."""
        saver = getattr(self.worker, "_saver", None)
        if saver is not None:
            saver.wait()

    @property
    def saving(self) -> PoolRequests:
        """By which the worker saves."""
        saver = getattr(self.worker, "_saver", None)
        return self.worker.requests if saver is None else saver._requests

    def group(self, layer: int) -> BlockGroup:
        return self.grouping.groups[self.grouping.of_layer[layer]]

    def wrong(self, request: Request, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Layers, and blocks of tokens [first, end) in them, that are not right; but those that the
        engine has let go of."""
        for layer in range(len(self.memory)):
            for index, count in parts(first, end, self.group(layer).block_tokens):
                if request.blocks[self.grouping.of_layer[layer]][index] != NULL and (
                    not self.is_right_in(request, index, layer, count)
                ):
                    yield layer, index

    def is_right_in(self, request: Request, index: int, layer: int, tokens: int = TOKENS) -> bool:
        block, size = request.blocks[self.grouping.of_layer[layer]][index], len(self.memory[layer])
        assert 0 < block < size
        own = self.memory[layer][block][:, :, :tokens]
        size = self.group(layer).block_tokens
        right = request.block(index, layer, self.heads[layer], size)
        return np.array_equal(own, right[:, :, :tokens])

    def state_rows(self, request: Request, tokens: int) -> Iterator[tuple[int, Row]]:
        """Of each layer with states the row that has the one behind so many tokens."""
        for number, layer in enumerate(self.states.layers if self.states else ()):
            size = self.grouping.groups[layer.group].block_tokens
            block = request.blocks[layer.group][-(-tokens // size) - 1]
            assert block != NULL
            yield number, np.asarray(layer.rows[block])

    def has_states(self, request: Request, tokens: int) -> bool:
        return not tokens or all(
            np.array_equal(row, request.state(tokens, number, self.rank))
            for number, row in self.state_rows(request, tokens)
        )

    def forget(self, group: int, blocks: Sequence[int]) -> None:
        """They may be anything from now on."""
        for one in self.states.layers if self.states else ():
            if one.group == group:
                one.rows[list(blocks)] = 0xFF
        for layer, own in enumerate(self.memory):
            if self.grouping.of_layer[layer] == group:
                own[list(blocks)] = np.nan


def copies(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(of) for of in blocks]


class Engine:
    """One engine on pools that it shares with others; so many `copies` of its ranks have one."""

    def __init__(
        self,
        paths: list[str],
        settings: Settings | None = None,
        blocks: int = 64,
        shares: bool = False,
        space: bytes = SPACE,
        words: Mapping[str, object] | None = None,
        grouping: Grouping | None = None,
        copies: int = 1,
    ):
        self.grouping = grouping or Grouping()
        self.groups, unit = self.grouping.groups, unit_of(self.grouping.groups)
        self.words = words or {}
        space = space if words is None else space_of(words, "")
        self.settings = settings or Settings()
        self.ranks = [
            Rank(
                CXLPool.open(path, threads=1),
                self.settings,
                blocks,
                rank,
                len(paths) * copies,
                self.grouping,
                copies,
            )
            for rank, path in enumerate(path for path in paths for _ in range(copies))
        ]
        opened, tiers = [CXLPool.open(path, threads=1) for path in paths], []
        if self.settings.cold is not None or self.settings.remote:
            tiers = [self._tiers(pool, 1 / len(paths)) for pool in opened]
        self.scheduling = Scheduling(
            opened,
            space,
            self.settings,
            ranks=len(self.ranks),
            block_tokens=unit,
            hash_tokens=TOKENS,
            is_whole=are_whole(self.groups),
            events=True,
            tiers=tiers,
            words=words_of,
        )
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.blocks = blocks
        self.free = list(range(1, blocks + 1))
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
        self.unnamed: set[int] = set()  # layers that it does not name to the workers
        self.defers = False  # a step ends when all was asked of it, as where vLLM speculates
        self.fails = False  # in the next steps, when all is computed
        self.aborts: set[str] = set()  # while the next step runs
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
        for blocks in request.blocks:
            self._let_go(blocks)
        request.blocks = []

    def _let_go(self, blocks: Sequence[int]) -> list[int]:
        some = [block for block in blocks if block != NULL]
        self.users.subtract(some)
        gone = [block for block in some if not self.users[block]]
        self.free += gone
        return gone

    def _advance(self, request: Request, computed: int) -> None:
        """Lets go of blocks that the next token does not see. They are overwritten at once."""
        for number, (group, blocks) in enumerate(zip(self.groups, request.blocks, strict=False)):
            first = min(group.first_block(computed), len(blocks))
            gone = self._let_go(blocks[:first])
            blocks[:first] = [NULL] * first
            for rank in self.ranks:
                rank.forget(number, gone)

    def _share(self, request: Request) -> int:
        """Tokens of whole blocks that another request has, or gets in this step."""
        hashes = request.block_hashes[: (request.num_tokens - 1) // TOKENS]
        for other in self.requests.values() if self.shares else ():
            same = [a == b for a, b in zip(hashes, other.block_hashes, strict=False)]
            count = same.index(False) if False in same else len(same)
            if count and len((other.blocks or [[]])[0]) >= count and not other.is_loading:
                request.blocks = [other.blocks[0][:count]]
                self.users.update(request.blocks[0])
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
        self._offer(step)
        message = self.scheduling.message(step)
        self._run(step, message)
        for one in [*step.fresh, *step.going]:
            own = self.requests.get(one.request)
            if samples and own is not None and own.computed == own.num_tokens:
                own.all_token_ids.append(own.num_tokens * 7 % 97)
        # Where requests share blocks that are still to come, one counts on them for a step.
        assert self.shares or not self.wrong()

    def _grow(self, request: Request, chunk: int) -> list[list[int]]:
        upto = min(request.num_tokens, request.computed + chunk)
        request.blocks = request.blocks or [[] for _ in self.groups]
        self._advance(request, request.computed)
        added = list[list[int]]()
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            size = group.block_tokens
            blocks += [NULL] * (group.first_block(request.computed) - len(blocks))
            gap = -(-upto // size) - 1 - len(blocks) if group.state else 0
            added.append([NULL] * gap)
            blocks += added[-1]
            count = -(-upto // size) - len(blocks)
            new = [self.free.pop(0) for _ in range(max(0, count))]
            self.users.update(new)
            blocks += new
            added[-1] = added[-1] + new
        return added

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
            if later and tokens:
                request.is_loading = True
                return
        else:
            self._grow(request, chunk)
        count = min(chunk, request.num_tokens - request.computed)
        step.fresh.append(
            Scheduled(request.request_id, copies(request.blocks), request.computed, count)
        )
        self.waiting.remove(request)

    def _admit_elsewhere(self, request: Request, step: Step, chunk: int) -> None:
        """Beside another connector, whose hit the engine takes: it is loaded before the step."""
        request.computed = self.elsewhere[request.request_id]
        self._grow(request, chunk)
        self.scheduling.allocated(request, request.blocks, 0)
        count = min(chunk, request.num_tokens - request.computed)
        new = Scheduled(request.request_id, copies(request.blocks), request.computed, count)
        step.fresh.append(new)
        self.waiting.remove(request)

    def _load_elsewhere(self, step: Step) -> set[int]:
        """Blocks that did not arrive."""
        bad: set[int] = set()
        for one in step.fresh:
            tokens = self.elsewhere.pop(one.request, 0)
            for rank, layer in product(self.ranks, range(len(self.ranks[0].memory))):
                blocks, size = (
                    one.blocks[self.grouping.of_layer[layer]],
                    rank.group(layer).block_tokens,
                )
                for index in range(tokens // size):
                    right = self.requests[one.request].block(index, layer, rank.heads[layer], size)
                    rank.memory[layer][blocks[index]] = right + self.fails_elsewhere
                    bad |= {blocks[index]} if self.fails_elsewhere else set()
        return bad

    def _run(self, step: Step, message: Message) -> None:
        """What the workers do with a step, then what the scheduler makes of it."""
        for rank in self.ranks:
            if rank.loaded is None:  # its weights are those of the start
                rank.worker.hear(message)
                if message.look:
                    rank.worker.tell_weights(b"")
            else:
                rank.loaded.hear(message, [rank.worker])
            rank.worker.start_loads()
        bad = self._load_elsewhere(step)
        computing, unit = [*step.fresh, *step.going], unit_of(self.groups)
        for one in computing:
            self._compute_states(self.requests[one.request], one)
        for layer in range(len(self.ranks[0].memory)):
            if layer == self.lost_in:
                self._lose()
            for one in computing:  # K and V are written before the layer is waited for
                self._compute(self.requests[one.request], layer, one)
            for rank in self.ranks if layer not in self.unnamed else ():
                rank.worker.wait_for_layer(f"layers.{layer}")
            for rank in self.ranks if layer not in self.unnamed else ():
                rank.worker.save_layer(f"layers.{layer}")
        if not self.defers:
            self._end_step()
        done = [rank.worker.finished() for rank in self.ranks]
        bad = bad.union(*(rank.worker.bad_blocks() for rank in self.ranks))
        lost = set[str]().union(*(rank.worker.lost() for rank in self.ranks))
        assert not (bad if len(self.groups) > 1 else lost and are_whole(self.groups))
        reports = [rank.worker.report() for rank in self.ranks]
        if self.defers:
            self._end_step()
        for rank, report in zip(self.ranks, reports, strict=True):
            self.told_blocks += sum(one.last - one.first for one in report.stored)
            self.wrongly_stored += [
                (one.request, index)
                for one in report.stored
                if one.request in self.requests  # else its blocks may be others' now
                for index in range(one.first, one.last)
                if any(rank.wrong(self.requests[one.request], index * unit, (index + 1) * unit))
            ]
        self._learn(step, done, bad, lost, reports)

    def _end_step(self) -> None:
        for rank in self.ranks:
            if self.fails:
                rank.worker.drop_step()
            rank.worker.end_step()
            rank.wait_for_saves()

    def _compute(self, request: Request, layer: int, one: Scheduled) -> None:
        """Right where all before is right, in all ranks, as it is with attention; else nonsense."""
        own = self.ranks[0].group
        there = all(
            rank.is_right_in(request, index, below, count)
            for rank in self.ranks
            for below in range(layer)
            for index, count in parts(
                own(below).first_token(one.computed), one.computed, own(below).block_tokens
            )
        )
        size = own(layer).block_tokens
        for index, count in parts(one.computed, one.computed + one.scheduled, size):
            first = max(0, one.computed - index * size)
            for rank in self.ranks:
                right = request.block(index, layer, rank.heads[layer], size)[:, :, first:count]
                to = rank.memory[layer][request.blocks[self.grouping.of_layer[layer]][index]]
                to[:, :, first:count] = (
                    right if there and not self._is_older(request) else right + 1
                )

    def _compute_states(self, request: Request, one: Scheduled) -> None:
        """In place, or from one block to the next. Right where those before are, in all ranks."""
        end = one.computed + one.scheduled
        right = all(rank.has_states(request, one.computed) for rank in self.ranks)
        for rank in self.ranks:
            for number, row in rank.state_rows(request, end):
                row[:] = request.state(end, number, rank.rank)
                row[:] += not right or self._is_older(request)

    def _offer(self, step: Step) -> None:
        """Say which states are in blocks when the step has ended, as vLLM does of block ends."""
        for one in [*step.fresh, *step.going]:
            blocks, end = self.requests[one.request].blocks, one.computed + one.scheduled
            step.states[one.request] = [
                (number, blocks[number][end // group.block_tokens - 1], end)
                for number, group in enumerate(self.groups)
                if group.state and end % group.block_tokens == 0
            ]

    def _is_older(self, request: Request) -> bool:
        """Whether it runs on with weights that are not those of its keys."""
        return request.weights != self.weights

    def _learn(
        self,
        step: Step,
        done: list[set[str]],
        bad: set[int],
        lost: set[str],
        reports: list[Report],
    ) -> None:
        for one in [*step.fresh, *step.going]:
            self.requests[one.request].computed = one.computed + one.scheduled
        for name in self.aborts:
            self.end(name)
        self.aborts = set()
        self.scheduling.heard(reports, bad)
        self.recomputed += bool(bad or lost)
        for name in lost & self.requests.keys():
            self.requests[name].computed = 0
        computed = {one.request: one.computed for one in [*step.fresh, *step.going]}
        again: set[int] = set()  # blocks that a request computes again
        for name, request in self.requests.items():
            blocks = request.blocks[0] if bad and request.blocks else []
            wrong = [i for i, block in enumerate(blocks) if block in bad]
            if wrong and blocks[wrong[0]] in again:
                request.computed = computed[name]  # the other one mends what they share
            elif wrong:
                request.computed = min(request.computed, wrong[0] * TOKENS)
                again.update(blocks)
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
            for _, index in rank.wrong(request, 0, request.computed)
        ] + [
            (request.request_id, -1)
            for rank in self.ranks
            for request in self.requests.values()
            if not request.is_loading and not self._is_older(request)
            if not rank.has_states(request, request.computed)
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
