"""One rank's store keeps an object cache for each of SGLang's host pools.

SGLang tells a backend its host pools one by one: that of K and V first, those beside it (of an
indexer, of sliding windows, of states) next, and says when that was all. Objects of other sizes lie
in other pools, which hold the same number of pages, so that capacity is of all of them together.
A state is of many pages: where it is larger than all of one, states have half of the bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.common import pools
from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.keys import unshared
from cxlkv.adapters.common.metrics import Counting
from cxlkv.adapters.common.object_cache import Given, ObjectCache
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.sglang import names
from cxlkv.adapters.sglang.host import HostMemory, Memory
from cxlkv.adapters.sglang.names import Config, Shards, Words
from cxlkv.arrays import Mask, leading
from cxlkv.errors import BadArgumentError, CXLKVError
from cxlkv.layout import KVLayout, parse_bytes
from cxlkv.machine.lifetime import Closing
from cxlkv.machine.regions import ALL, parse_place
from cxlkv.objects import ObjectPool
from cxlkv.prefix import PageKeys

MAIN = "kv"
"""The host pool of K and V; SGLang's PoolName.KV."""
Call = Callable[[ObjectCache, PageKeys], Mask]
Indices = torch.Tensor | None
Before = Sequence[str] | None
"""SGLang's keys of a text's pages before those of a call; None: it does not say."""

MOVES_MAX = 1024
"""Moves that wait for a reader: older ones are dropped."""


class Rank(NamedTuple):
    """One of the engine's ranks: what SGLang says of it and of the model, what a user wrote.

    context_tokens: of the longest request, 0 for unknown. is_unknown: nothing says which weights
    the engine has by now.
    """

    config: Config
    engine: Words
    settings: PoolSettings
    zero_copy: bool = True
    context_tokens: int = 0
    is_unknown: bool = False


class Part(NamedTuple):
    """A host pool, and which part of its pages this rank has."""

    memory: HostMemory
    shards: Shards

    def names(self, keys: Sequence[str]) -> list[str]:
        """Names of the objects of these pages, page after page."""
        return [f"{key}.{number}" for key in keys for number in self.shards.numbers]

    def pages(self, objects: Mask) -> Mask:
        """Which pages have all their objects in the mask."""
        found: Mask = np.logical_and.reduce(objects.reshape(-1, self.memory.parts), axis=1)
        return found


class Move(NamedTuple):
    """Pages of K and V that one call copied."""

    pages: int
    bytes_per_s: float


class Hits(NamedTuple):
    """pages: how many of the first pages each host pool can restore; lengths: how many all of them
    together can, in order, none if 0."""

    pages: dict[str, int]
    lengths: list[int]


class Store(Closing):
    """Any thread may call. Raises at the start only: what goes wrong later is a miss, and counted.
    After close() everything is a miss. weights: that the engine has."""

    def __init__(self, rank: Rank, counting: Counting, weights: KeyedWeights):
        self._rank, self._counting, self._weights = rank, counting, weights
        self._parts: dict[str, Part] = {}
        self._caches: dict[str, ObjectCache] = {}
        self._pages = 0  # that each pool holds, but for states, once they are made
        self._loads: deque[Move] = deque(maxlen=MOVES_MAX)
        self._stores: deque[Move] = deque(maxlen=MOVES_MAX)

    # ---- the start ----

    def add(self, name: str, pool: Memory) -> None:
        """Raises UnsupportedError for a host pool that cannot be stored, or not with this encoding,
        and after make() what it raises."""
        if name in self._parts:
            return
        config = self._rank.config
        encoding = self._rank.settings.encoding
        memory = HostMemory(pool, name, config, self._rank.zero_copy, encoding)
        self._parts[name] = Part(memory, Shards(config, memory.kinds, memory.parts))
        if self._pages:
            self._make(name, self._pages * self._bytes_of_page()[name])

    def make(self) -> None:
        """Make or open the pools of all that was added. Raises GeometryError for a pool of another
        kind at a path that was named, BadArgumentError where one path is named for several, and
        what ObjectPool.create and open raise."""
        try:
            self._make_all()
        except Exception:
            self.close()
            raise

    def _make_all(self) -> None:
        sizes = self._bytes_of_page()
        capacity, stages = self._rank.settings.capacity, self._rank.config.pp_size
        if capacity != ALL:
            place = parse_place(self._path(MAIN)).path
            free = pools.share_bytes(str(place)) if capacity is None else parse_bytes(capacity)
            pages = free // stages // sum(sizes.values())
            for name, size in sizes.items():
                self._make(name, pages * size if len(sizes) > 1 else free // stages)
        elif len(sizes) * stages == 1:
            self._make(MAIN, ALL)
        else:
            raise BadArgumentError(
                f'cxlkv: capacity "all" of a device, which holds one pool, and this model needs '
                f"{len(sizes) * stages}: make a file system on it, and give a folder as where"
            )
        self._pages = self.cache().pool.stats()["pages_total"]

    def _bytes_of_page(self) -> dict[str, int]:
        """Bytes that each host pool has in the capacity for a page of text."""
        sizes = {name: part.memory.object_bytes for name, part in self._parts.items()}
        states = {name for name in sizes if self._parts[name].memory.is_state}
        pages = sum(size for name, size in sizes.items() if name not in states)
        return {name: min(size, pages) if name in states else size for name, size in sizes.items()}

    def _path(self, name: str) -> str:
        memory, shards = self._parts[name]
        file = names.file_name(self._rank.engine, memory.words(), shards)
        model = str(self._rank.engine.get("model", ""))
        return pools.path_for(self._rank.settings.where, file, model)

    def _make(self, name: str, capacity: str | int) -> None:
        memory, shards = self._parts[name]
        layout, path = KVLayout.objects(memory.object_bytes), self._path(name)
        if name != MAIN and path == self._path(MAIN):
            raise BadArgumentError(
                f"cxlkv: {path} is one pool, and this model needs one for each of its host pools "
                f"({', '.join(self._parts)}): give a folder as where"
            )
        mine = self._rank.settings

        def opened() -> ObjectPool:
            slots = mine.encoding == "none"  # encoded rows lie in one
            pool, made = pools.make_or_open(
                ObjectPool, path, layout, capacity, shared=mine, slots=slots
            )
            if name == MAIN:
                self._say(pool, made)
            pools.bring_in(pool, mine.huge)  # else the first pages that are stored pay for it
            return pool

        space = names.space_of(self._rank.engine, memory.words(), shards, mine.salt)
        space = unshared(space) if self._rank.is_unknown else space
        self._caches[name] = ObjectCache(
            opened,
            space,
            self._counting,
            memory.object_bytes,
            settings=mine,
            share=self._share(name),
            processes=shards.sharing_ranks,
        )

    def _share(self, name: str) -> float:
        """This pool's share of cold_capacity and quota."""
        sizes = self._bytes_of_page()
        return sizes[name] / sum(sizes.values()) / self._rank.config.pp_size

    def _say(self, pool: ObjectPool, made: bool) -> None:
        """Log the pool, once for an engine."""
        memory, shards = self._parts[MAIN]
        pages = pool.stats()["pages_total"] // shards.sharing_ranks
        config = self._rank.config
        ranks = (config.tp_rank, config.attn_cp_rank, config.dp_rank, config.pp_rank)
        found = pools.measure(
            pool.admin.overview(), made, pages * memory.page_tokens, int(any(ranks)), config.pp_size
        )
        pools.say(found, self._rank.context_tokens)

    # ---- while the engine runs ----

    def present(self, name: str, keys: Sequence[str]) -> Mask:
        """bool [n]: which pages of the host pool of this name are there."""
        return self._asked(name, keys, ObjectCache.present)

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages of K and V are there, from the first on."""
        count = leading(self.present(MAIN, keys))
        self._counting.add(asked_pages=len(keys), hit_pages=count)
        return count

    def hits(self, keys: Sequence[str], sides: Mapping[str, int | None]) -> Hits:
        """Hits among a text's pages; sides: host pools that must have their part, and of how many
        of the last pages, None: of all."""
        pages = leading(self.present(MAIN, keys))
        whole = np.ones(pages + 1, np.bool_)
        found = {MAIN: pages}
        for name, trailing in sides.items():
            one = restorable(self.present(name, keys[:pages]), trailing)
            found[name] = int(np.flatnonzero(one)[-1])
            whole &= one
        lengths = np.flatnonzero(whole)[1:].tolist()
        self._counting.add(asked_pages=len(keys), hit_pages=max(lengths, default=0))
        return Hits(found, lengths)

    def load(self, name: str, keys: Sequence[str], indices: Indices, before: Before = None) -> Mask:
        """Copy pages, which follow each other in a text, into the host pool of this name; bool [n]:
        which are right."""
        return self._loaded(name, keys, lambda: self._buffers(name, keys, indices), before)

    def store(
        self, name: str, keys: Sequence[str], indices: Indices, before: Before = None
    ) -> Mask:
        """bool [n]: which pages of the host pool of this name are stored then."""
        return self._stored(name, keys, lambda: self._buffers(name, keys, indices), before)

    def load_copies(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> Mask:
        """load() of K and V, to memory that SGLang copies pages from."""
        return self._loaded(MAIN, keys, lambda: targets, None)

    def store_copies(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> Mask:
        """store() of K and V, from memory that SGLang has copied pages to."""
        return self._stored(MAIN, keys, lambda: [page.contiguous() for page in pages], None)

    def clear(self) -> None:
        """Take all pages of this model out, of all its ranks and tenants."""
        for cache in list(self._caches.values()):
            try:
                cache.clear()
            except (CXLKVError, OSError) as error:
                self._counting.failed("pool", error)

    def take_moves(self) -> tuple[list[Move], list[Move]]:
        """Loads and stores of K and V since the last call."""
        return taken(self._loads), taken(self._stores)

    def close(self) -> None:
        caches, self._caches = self._caches, {}
        for cache in caches.values():
            cache.close()

    def cache(self, name: str = MAIN) -> ObjectCache:
        """The cache of the pages of the host pool of this name."""
        if name not in self._caches:
            raise BadArgumentError(f"nobody stores pages of the host pool {name}")
        return self._caches[name]

    def _buffers(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> Given:
        return self._parts[name].memory.buffers(len(keys), indices)

    def _text(self, name: str, objects: PageKeys, before: Before) -> PageKeys:
        """The objects of pages, and the one before them."""
        cache = self.cache(name)
        last = self._parts[name].names((before or [])[-1:])
        return cache.text(objects, cache.keys(last, self._weights.state or b""))

    def _loaded(
        self, name: str, keys: Sequence[str], memory: Callable[[], Given], before: Before
    ) -> Mask:
        def load(cache: ObjectCache, objects: PageKeys) -> Mask:
            good = cache.load(objects, memory())
            cache.chain(self._text(name, objects, before))
            self._count("loaded", good, cache)
            return good

        return self._moved(name, keys, load, self._loads)

    def _stored(
        self, name: str, keys: Sequence[str], memory: Callable[[], Given], before: Before
    ) -> Mask:
        def put(cache: ObjectCache, objects: PageKeys) -> Mask:
            text = self._text(name, objects, before)
            new = cache.put(objects, memory(), text[: len(text) - len(objects)])
            cache.chain(text)
            self._count("stored", new, cache)
            there: Mask = np.arange(len(objects)) < len(new)
            return there

        return self._moved(name, keys, put, self._stores)

    def _count(self, what: str, objects: Mask, cache: ObjectCache) -> None:
        count = int(objects.sum())
        self._counting.add(**{f"{what}_pages": count, f"{what}_bytes": count * cache.object_bytes})

    def _moved(self, name: str, keys: Sequence[str], copy: Call, moves: deque[Move]) -> Mask:
        begin_s = time.perf_counter()
        good = self._asked(name, keys, copy)
        count = int(good.sum())
        if name == MAIN and count:
            took_s = max(time.perf_counter() - begin_s, 1e-9)
            memory = self._parts[name].memory
            moves.append(Move(count, count * memory.parts * memory.object_bytes / took_s))
        if name in self._caches:
            self._caches[name].inspect()
        return good

    def _asked(self, name: str, keys: Sequence[str], call: Call) -> Mask:
        """What the call says of the objects of these pages; that none is there when it fails for
        any reason."""
        try:
            cache, part, weights = self.cache(name), self._parts[name], self._weights.state
            if weights is not None:
                return part.pages(call(cache, cache.keys(part.names(keys), weights)))
            self._counting.failed("weights", count=len(keys))
            return np.zeros(len(keys), np.bool_)
        except Exception as error:  # SGLang's own, too: its threads must not end
            self._counting.failed("pool", f"{type(error).__name__}: {error}")
            return np.zeros(len(keys), np.bool_)


def restorable(there: Mask, trailing: int | None = None) -> Mask:
    """bool [n + 1]: whether a host pool can restore the first i of n pages.

    It needs all of them, or, as of a sliding window or a state, only the `trailing` last ones of
    the i. No pages can always be restored.
    """
    missing: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(~there)])
    ends = np.arange(len(missing))
    begins = np.zeros_like(ends) if trailing is None else np.maximum(ends - trailing, 0)
    found: Mask = missing[ends] == missing[begins]
    return found


def taken(moves: deque[Move]) -> list[Move]:
    """All of them, which are out of it then; other threads may go on to append."""
    return [moves.popleft() for _ in range(len(moves))]
