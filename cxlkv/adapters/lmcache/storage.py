"""CXLStorage, the storage plugin that LMCache calls, puts, finds, pins and reads chunks.

Puts are done by a thread of their own, as each sums the bytes: LMCache's call returns at once, and
exists_in_put_tasks() says what is still to come. Everything else answers when it is done.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from lmcache import __version__ as lmcache_version
from lmcache import torch_dev
from lmcache.logging import init_logger
from lmcache.observability import PrometheusLogger
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey, get_size_bytes
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend import is_cuda_worker
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StoragePluginInterface,
)
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from cxlkv.adapters.common import pools
from cxlkv.adapters.common.identity import warn_unshared
from cxlkv.adapters.common.keyed_weights import KeyedWeights
from cxlkv.adapters.common.keys import space_of, unshared
from cxlkv.adapters.common.metrics import Shown, log
from cxlkv.adapters.common.object_cache import ObjectCache
from cxlkv.adapters.lmcache import form, names
from cxlkv.adapters.lmcache.encoded import Forms, buffers_of, row_forms, stored_bytes
from cxlkv.adapters.lmcache.form import Form
from cxlkv.adapters.lmcache.memory import PoolAllocator, PoolObject, form_of
from cxlkv.adapters.lmcache.metrics import COUNTS, KINDS, PREFIX
from cxlkv.adapters.lmcache.settings import (
    MEMORY,
    VERSIONS,
    check_memory,
    check_served,
    read_settings,
)
from cxlkv.arrays import Bytes, leading
from cxlkv.errors import BadArgumentError, BusyError, CXLKVError, UnsupportedError
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine import lifetime
from cxlkv.objects import ObjectPool
from cxlkv.prefix import PageKeys

PAGE_BYTES = 4096
TOKENS_DIM = 2  # of the shapes that LMCacheMetadata gives
LAYERWISE_LOOKUP = "fake_lookup_id"
"""What LMCache calls a lookup of one layer, of which it takes all chunks or fails."""


class CXLStorage(StoragePluginInterface, AllocatorBackendInterface):
    """What LMCache's own classes say of each method holds; here only what is not said there."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: AbstractEventLoop | None = None,
    ):
        """Raises what LMCache then says in its log, and goes on without us: UnsupportedError,
        BadArgumentError, GeometryError, and what ObjectPool.create raises."""
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None:
            raise BadArgumentError("cxlkv: LMCache gives its plugins a config and metadata")
        if not log.handlers:
            init_logger(log.name)
        VERSIONS.check(lmcache_version)
        check_served(config)
        self.settings = read_settings(config.extra_config or {})
        self._rows, self._has_rows = row_forms(metadata, self.settings.encoding), True
        if local_cpu_backend is None and metadata.role != "scheduler":
            check_memory(config.storage_plugins, self.settings.encoding)
        PinMonitor.GetOrCreate(config)
        usual = MemoryFormat.KV_T2D if config.use_layerwise else MemoryFormat.KV_2LTD
        self._fmt = MemoryFormat.KV_MLA_FMT if metadata.use_mla else usual
        settings = self.settings
        self._words = names.words_of(
            metadata, config, lmcache_version, settings.encoding, settings.identity
        )
        space = space_of(self._words, settings.salt)
        if self._words["weights"] is None:
            warn_unshared(str(self._words["model"]), "extra_config (cxlkv.identity)")
            space = unshared(space)
        # LMCache's own are made first: they set where figures of several processes are kept.
        labels = PrometheusLogger.GetOrCreate(metadata, config=config).labels
        shown = {name: str(value) for name, value in labels.items()}
        self.counting = Shown(PREFIX, shown, COUNTS, KINDS)
        self.cache = ObjectCache(
            partial(self._open, metadata, config),
            space,
            self.counting,
            settings=self.settings,
            processes=metadata.world_size,
        )
        # LMCache hears of no reset of the engine's own cache: once changed, nothing is shared.
        self._weights = KeyedWeights(["vllm", "sglang"], metadata.world_size == 1)
        self.allocator = self.initialize_allocator(config, metadata)
        self._putting: dict[CacheEngineKey, bool] = {}  # whether it is still wanted
        self._put_lock = threading.Lock()
        self._puts = ThreadPoolExecutor(1, "cxlkv-lmcache")
        self._puts.submit(lambda: None)  # its thread begins now: a put asks the system for none
        self._closed = False
        lifetime.watch(self)

    def reset_after_fork(self) -> None:
        """A child finds it closed: what LMCache put there on the way is its parent's."""
        self._put_lock, self._closed = threading.Lock(), True
        self._puts = ThreadPoolExecutor(1, "cxlkv-lmcache")

    def __str__(self) -> str:
        return "CXLStorage"

    # ---- the pool ----

    @property
    def pool(self) -> ObjectPool:
        return self.cache.pool

    def _open(self, metadata: LMCacheMetadata, config: LMCacheEngineConfig) -> ObjectPool:
        shapes = metadata.get_shapes(config.chunk_size)
        chunk = get_size_bytes(shapes, metadata.get_dtypes())
        size = -(-chunk // metadata.kv_shape[0]) if config.use_layerwise else chunk
        forms = self._forms()
        if forms and config.use_layerwise:
            size = forms[0].stored_bytes(size)
        elif forms:
            dtypes = tuple(one.dtype for one in forms)
            size = stored_bytes(Form("", dtypes, tuple(map(tuple, shapes))), forms)
        wanted = size + form.bytes_of(len(shapes))
        layout = KVLayout.objects(-(-wanted // PAGE_BYTES) * PAGE_BYTES)
        path = pools.path_for(
            self.settings.where, names.file_name(self._words), str(self._words["model"])
        )
        mine = self.settings
        # What is written or read in place, and encoded rows, lie in one slot.
        slots = not self._forms() and MEMORY not in (config.storage_plugins or ())
        pool, made = pools.make_or_open(
            ObjectPool, path, layout, mine.capacity, shared=mine, slots=slots
        )
        objects = pool.stats()["pages_total"] // -(-wanted // pool.layout.page_tokens)
        chunks = objects // metadata.kv_shape[0] if config.use_layerwise else objects
        found = "made" if made else "found"
        stays = "" if made else "; its capacity stays what it was made with"
        size = f"{chunks} chunks of a rank, {chunks * config.chunk_size} tokens"
        log.info(
            "cxlkv: %s %s, for %s (%s)%s", found, path, size, format_bytes(chunks * chunk), stays
        )
        try:
            self._mapping = self._register(pool)
        except CXLKVError:
            pool.close()
            raise
        pools.bring_in(pool, mine.huge)  # else the first chunks that are stored pay for it
        return pool

    def _register(self, pool: ObjectPool) -> object:
        """LMCache's kernels read chunks from the GPU, which must know the pool's memory for it."""
        if not is_cuda_worker(self.metadata) or self._copies(pool):
            return None
        from cxlkv.gpu.mapping import Mapping

        return Mapping(pool, torch.device(self.dst_device))

    def _keys(self, keys: Sequence[CacheEngineKey]) -> PageKeys:
        return self.cache.keys([names.name_of(key) for key in keys])

    def _forms(self) -> Forms:
        """Forms that chunks are stored in. LMCache may learn of other groups after the start; where
        one of them has no rows, nothing fits."""
        try:
            self._rows, self._has_rows = row_forms(self.metadata, self.settings.encoding), True
        except UnsupportedError as error:
            if self._has_rows:
                self.counting.failed("unsupported", error)
            self._has_rows = False
        return self._rows

    def _fits(self, found: Form) -> bool:
        """Whether LMCache would have made it so: else a reader of another shape would get it."""
        assert self.metadata is not None
        dtypes = tuple(str(one).removeprefix("torch.") for one in self.metadata.get_dtypes())
        self._forms()
        if not self._has_rows:
            return False
        if found.fmt != self._fmt.name or found.dtypes != dtypes:
            return False
        if not self.config.use_layerwise:
            tokens = (*found.shapes[0], *(0,) * TOKENS_DIM)[TOKENS_DIM]
            shapes = self.metadata.get_shapes(tokens)
            return found.shapes == tuple(tuple(shape) for shape in shapes)
        whole = torch.Size(self.metadata.get_shapes(1)[0]).numel() // self.metadata.kv_shape[0]
        return bool(torch.Size(found.shapes[0]).numel() % whole == 0)

    def _copies(self, pool: ObjectPool | None = None) -> bool:
        """Whether all chunks are copied on their way: they are encoded, or may lie in several
        slots."""
        return bool(self._forms()) or (pool or self.pool).layout.object_limit is not None

    def _is_off(self, objects: int) -> bool:
        """Whether nothing may be found or stored: it is closed, or the weights have changed."""
        if not self._closed and self._weights.state is None:
            self.counting.failed("weights", count=objects)
            return True
        return self._closed

    # ---- memory to be written ----

    def initialize_allocator(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata
    ) -> PoolAllocator:
        return PoolAllocator(self.cache, self._fits, self._verify_soon, self._forms)

    def get_memory_allocator(self) -> PoolAllocator:
        return self.allocator

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """What is copied comes from LMCache's own memory."""
        return self.local_cpu_backend if self.local_cpu_backend and self._copies() else self

    def allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """busy_loop waits for a second at most, for LMCache to give something back."""
        found = self.batched_allocate(shapes, dtypes, 1, fmt, eviction, busy_loop)
        return found[0] if found else None

    def batched_allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        batch_size: int,
        fmt: MemoryFormat | None = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Allocate several objects; busy_loop as in allocate()."""
        if self._closed:
            return None
        if self._copies():
            self.counting.failed("unsupported", "memory of the pool for chunks that are copied")
            return None
        return self.allocator.batched_allocate(
            shapes, dtypes, batch_size, fmt or self._fmt, evict=eviction, wait=busy_loop
        )

    def calculate_chunk_budget(self) -> int:
        return int(self.pool.pages.geometry["page_count"])

    # ---- put ----

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self._put_lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: object = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future[None]] | None:
        """One future for all. on_complete_callback: for each key that is new in the pool then."""
        self._weights.look()  # in the thread of the engine's steps: when it sleeps, nothing reads
        with self._put_lock:
            if self._is_off(len(keys)):
                return None
            chosen: list[tuple[CacheEngineKey, MemoryObj]] = []
            for key, one in zip(keys, objs, strict=True):
                if key not in self._putting:
                    self._putting[key] = True
                    one.ref_count_up()
                    chosen.append((key, one))
            if not chosen:
                return None
            return [self._puts.submit(self._put, chosen, on_complete_callback)]

    def drain(self) -> None:
        """Wait until all that was given before is in the pool, or failed."""
        if not self._closed:
            self._puts.submit(lambda: None).result()

    def _put(
        self,
        chosen: list[tuple[CacheEngineKey, MemoryObj]],
        told: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        new: list[bool] = []
        try:
            if is_cuda_worker(self.metadata):
                torch_dev.synchronize(
                    self.dst_device
                )  # what the GPU writes may be on its way still
            new = self._stored(chosen)
            self._prioritize([key for key, _ in chosen])
        except Exception as error:  # LMCache asks nobody for the future: it would be silent
            self.counting.failed("pool", f"{type(error).__name__}: {error}")
        with self._put_lock:
            unwanted = [key for key, _ in chosen if not self._putting.pop(key)]
        if unwanted:
            self.cache.forget(self._keys(unwanted))
        for _, one in chosen:
            one.ref_count_down()
        for (key, _), is_new in zip(chosen, new, strict=False):
            if is_new and told is not None:
                try:
                    told(key)
                except Exception as error:  # as LMCache promises its callers
                    log.warning("cxlkv: on_complete_callback of %s: %s", key, error)
        self.cache.inspect()

    def _stored(self, chosen: list[tuple[CacheEngineKey, MemoryObj]]) -> list[bool]:
        """Publish in place what lies in the pool, and copies of what does not; which are new."""
        packed = self._keys([key for key, _ in chosen])
        new = [False] * len(chosen)
        if not self.cache.is_whole():
            return new
        others: dict[int, torch.Tensor] = {}
        for index, (_, one) in enumerate(chosen):
            if isinstance(one, PoolObject) and one.key is None and one.parent() is self.allocator:
                new[index] = one.seal(packed[index : index + 1])
            elif (memory := self._memory_of(one)) is not None:
                others[index] = memory
        stored = self._copied(packed, [one for _, one in chosen], others, new)
        self._chain([key for key, _ in chosen], packed)
        sizes = [size for size, is_new in zip(stored, new, strict=True) if is_new]
        self.counting.add(stored_objects=len(sizes), stored_bytes=sum(sizes))
        return new

    def _chain(self, keys: Sequence[CacheEngineKey], packed: PageKeys) -> None:
        """Tells the pool that these chunks follow each other in a text. By layers LMCache stores
        and reads the first one of all chunks, then the next: with the last one each chunk's layers
        follow those of the chunk before."""
        last = keys[-1] if keys else None
        if not isinstance(last, LayerCacheEngineKey):
            self.cache.chain(self.cache.text(packed))
        elif self.metadata and last.layer_id == self.metadata.kv_shape[0] - 1:
            layers = self.metadata.kv_shape[0]
            whole = [one for key in keys for one in key.split_layers(layers)]
            self.cache.chain(self._keys(whole))

    def _copied(
        self,
        packed: PageKeys,
        given: list[MemoryObj],
        others: dict[int, torch.Tensor],
        new: list[bool],
    ) -> list[int]:
        """Stores the payloads of `others`, by their places; which are new is in `new` then. Returns
        the bytes in the pool of each that was given."""
        forms = self._forms()
        stored = [one.get_size() for one in given]
        if not others:
            return stored
        found = {place: form_of(given[place]) for place in others}
        for place, one in found.items() if forms else ():
            stored[place] = stored_bytes(one, forms)
        feet = [
            np.frombuffer(form.encode(one, stored[place]), np.uint8) for place, one in found.items()
        ]
        buffers = buffers_of(list(others.values()), list(found.values()), feet, forms)
        before = self.cache.text(packed)[: -len(packed)]
        are_new = self.cache.put(PageKeys(packed.packed[list(others)], 1), buffers, before)
        for place, is_new in zip(others, are_new.tolist(), strict=False):
            new[place] = is_new
        self.counting.add(copied_objects=int(are_new.sum()))
        return stored

    def _memory_of(self, one: MemoryObj) -> torch.Tensor | None:
        """What is to be copied of an object that lies elsewhere; None when that is not served."""
        raw = one.raw_tensor if isinstance(one, TensorMemoryObj) else None
        size = one.get_size()
        is_plain = raw is not None and raw.is_cpu and raw.is_contiguous()
        if raw is None or not is_plain or raw.nbytes < size or not self._fits(form_of(one)):
            self.counting.failed("unsupported", f"{type(one).__name__} of {size} bytes")
            return None
        memory: torch.Tensor = raw.reshape(-1).view(torch.uint8)[:size]
        return memory

    def _prioritize(self, keys: Sequence[CacheEngineKey]) -> None:
        """Objects that a request has stored or read, as it has asked."""
        said: dict[int, list[CacheEngineKey]] = {}
        try:
            for key in keys:
                said.setdefault(names.priority_of(key), []).append(key)
        except BadArgumentError as error:
            self.counting.failed("bad_options", error)
            return
        for priority, some in said.items():
            if priority:
                self.cache.prioritize(self._keys(some), priority)

    # ---- find ----

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Whether all layers of a chunk are there, asked of its first one. LMCache asks for no
        other before it stores or reads the chunk, and the pool evicts each by itself."""
        first = isinstance(key, LayerCacheEngineKey) and key.layer_id == 0
        if first and not pin and self.metadata is not None:
            keys = key.split_layers(self.metadata.kv_shape[0])
            return self.batched_contains(keys) == len(keys)
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        if self.config.use_layerwise:
            self._weights.look()  # its retrieval by layers ends at an error where nothing is left
        if not keys or self._is_off(len(keys)):
            return 0
        packed = self._keys(keys)
        there = leading(self.cache.present(packed))
        # Of a chunk's layers LMCache takes pins off only if all are there.
        layers = isinstance(keys[0], LayerCacheEngineKey)
        if not pin or not there or (layers and there < len(keys)):
            return there
        pinned = self.allocator.pin(keys[:there], packed[:there])
        for key in keys[:pinned] if layers and pinned < len(keys) else ():
            self.allocator.unpin(key)
        return pinned

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Pins nothing: the objects that LMCache reads next hold themselves."""
        self._weights.look()
        return await asyncio.to_thread(self.batched_contains, keys)

    # ---- read ----

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        self._weights.look()
        read = self._read(keys)
        near = self.local_cpu_backend
        if near is None or not near.use_hot or self._copies():
            return read
        return [one and self._brought_near(one, near) for one in read]

    def _read(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Each with a reference: in place, or copied to LMCache's own memory."""
        if self._is_off(len(keys)):
            return [None] * len(keys)
        packed = self._keys(keys)
        read = self.allocator.read(keys, packed)
        self._chain(keys, packed)
        self._prioritize(keys)
        hits = [one.meta.phy_size for one in read if one is not None]
        self.counting.add(asked_objects=len(keys), hit_objects=len(hits), read_bytes=sum(hits))
        brought = self._brought(keys, read) if self._copies() else list(read)
        self.cache.inspect()
        return brought

    def _brought(
        self, keys: Sequence[CacheEngineKey], read: Sequence[PoolObject | None]
    ) -> list[MemoryObj | None]:
        """Copies of what was read, in LMCache's own memory; it is held until it is copied."""
        found: list[MemoryObj | None] = [None] * len(keys)
        feet: dict[int, Bytes] = {}
        near = self.local_cpu_backend
        for place, one in enumerate(read):
            made = (
                one
                and near
                and near.allocate(
                    one.get_shapes(), one.get_dtypes(), one.meta.fmt, eviction=True, busy_loop=False
                )
            )
            if one and made:
                found[place] = made
                feet[place] = np.empty(form.bytes_of(len(one.get_shapes())), np.uint8)
            elif one:
                self.counting.failed("memory", f"{one.get_size()} bytes")
        made_of = [one for one in found if one is not None]
        buffers = buffers_of(
            [one.raw_tensor for one in made_of],
            [form_of(one) for one in made_of],
            list(feet.values()),
            self._forms(),
        )
        good = self.cache.load(self._keys([keys[place] for place in feet]), buffers)
        for place, is_good in zip(feet, good.tolist(), strict=True):
            made, one = found[place], read[place]
            assert one
            described = form.encode(form_of(one), one.meta.phy_size)
            if made is not None and not (is_good and feet[place].tobytes() == described):
                made.ref_count_down()
                found[place] = None
        for one in read:
            if one is not None:
                one.ref_count_down()
        self.counting.add(copied_objects=int(good.sum()))
        return found

    def _brought_near(self, one: MemoryObj, near: LocalCPUBackend) -> MemoryObj | None:
        """A copy in LMCache's own memory, where it keeps what it has read: else its hot cache would
        hold the pool's memory for as long as it likes. In place when there is no room; None when
        the pool was lost meanwhile."""
        made = near.allocate(
            one.get_shapes(), one.get_dtypes(), one.meta.fmt, eviction=True, busy_loop=False
        )
        if made is None:
            return one
        made.raw_tensor[: one.get_size()].copy_(one.raw_tensor)
        kept = self.cache.keeps()
        one.ref_count_down()
        if not kept:
            made.ref_count_down()
            return None
        self.counting.add(copied_objects=1)
        return made

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: object = None
    ) -> list[MemoryObj]:
        """Objects that are there, from the first on. Of one layer all, or LookupError: LMCache
        would leave the others' places in the engine as they are."""
        found = await asyncio.to_thread(self._read, keys)
        hits = found.index(None) if None in found else len(found)
        one_layer = lookup_id == LAYERWISE_LOOKUP and isinstance(keys[0], LayerCacheEngineKey)
        if one_layer and hits < len(keys):
            hits = 0
        for one in found[hits:]:
            if one is not None:
                one.ref_count_down()
        if one_layer and hits < len(keys):
            raise LookupError(f"cxlkv: {keys[0]} and its like: a chunk's layer is gone or damaged")
        return [one for one in found[:hits] if one is not None]

    # ---- keep and remove ----

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        return self.allocator.unpin(key)

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Remove objects; a reader keeps an object's memory until it gives it back. force=False:
        not what is pinned here."""
        with self._put_lock:
            pending = [key for key in keys if key in self._putting]
            self._putting.update(dict.fromkeys(pending, False))
        chosen = [key for key in keys if force or key not in self.allocator.pinned]
        if self._closed or not chosen:
            return len(pending)
        self.allocator.unpin_all(chosen)
        return min(len(keys), self.cache.forget(self._keys(chosen)) + len(pending))

    def touch_cache(self) -> None:
        """The pool counts uses by itself."""

    # ---- the end ----

    def _verify_soon(self, key: PageKeys) -> None:
        with suppress(RuntimeError):  # it is closed
            self._puts.submit(self.cache.verify, key)

    def close(self) -> None:
        """Ends what is being put. Objects that LMCache has still keep the pool's memory in place,
        until the process ends."""
        with self._put_lock:
            ended, self._closed = self._closed, True
        if ended:
            return
        self._puts.shutdown()
        self.allocator.unpin_everything()
        try:
            self.cache.close()
        except BusyError:
            log.warning("cxlkv: LMCache has %d objects of the pool still", self.allocator.out)
        except (CXLKVError, OSError) as error:
            log.warning("cxlkv: the pool was not closed: %s", error)
