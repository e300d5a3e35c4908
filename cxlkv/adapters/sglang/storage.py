"""SGLang's HiCacheStorage over a pool of objects: pages straight from the host's memory, and back.

A page of a rank is one object, its buffers (K and V, or one of each layer) joined: one copy, by the
pool's threads, and one call for all pages of a batch. Whatever fails is a miss that is counted, and
said once in the log: the engine computes then, and never ends for our sake.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from cxlkv import _core
from cxlkv.adapters.places import make_or_open, path_for
from cxlkv.adapters.sglang.host import HostMemory, Memory
from cxlkv.adapters.sglang.names import Config, Names, suffixes_of, words_of
from cxlkv.adapters.sglang.settings import check_version, read_settings
from cxlkv.config import format_bytes
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    PoolFullError,
    UnsupportedError,
)
from cxlkv.layout import KVLayout
from cxlkv.objects import DAMAGED, Sizes
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.tiers import Tiers

log = logging.getLogger("cxlkv")

Answer = TypeVar("Answer")


class CXLHiCache(HiCacheStorage):
    """Made by SGLang's StorageBackendFactory, "dynamic"; one for each rank.

    The pool is made, or found, when the engine's host memory is known (register_mem_pool_host).
    failures: counts since the start, by kind: "full", "corrupt", "error".
    """

    def __init__(self, storage_config: Config, kwargs: Mapping[str, object]):
        check_version(version("sglang"))
        self.config = storage_config
        self.settings = read_settings(storage_config.extra_config)
        self.failures: Counter[str] = Counter()
        self.pool: CXLPool | None = None
        self._writes = not storage_config.is_mla_model or storage_config.tp_rank == (
            storage_config.dcp_rank
        )
        self._moved: dict[str, list[tuple[int, float]]] = {"get": [], "set": []}  # pages, seconds

    # ---- the engine's memory, and the pool ----

    def register_mem_pool_host(self, mem_pool_host: Memory) -> None:
        """Its pages say how large an object is: now there is a pool for them."""
        self.mem_pool_host = mem_pool_host
        self._host = host = HostMemory(mem_pool_host, self.config)
        self._parts = len(suffixes_of(self.config))
        words = words_of(self.config, host.words(), self.settings.salt)
        # Pages as they lie in memory, and as flat tensors of the other calls: other bytes.
        suffixes = suffixes_of(self.config)
        self._pages = Names({**words, "form": "page"}, suffixes)
        self._flat = Names({**words, "form": "flat"}, suffixes[:1])
        self.page_bytes = host.page_bytes
        self.object_bytes = host.page_bytes // self._parts
        name = f"sglang-{self._pages.space.hex()}.pool"
        layout = KVLayout.objects(host.page_bytes)
        path = path_for(self.settings.where, name)
        self.pool, made = make_or_open(path, layout, self.settings.capacity)
        self._tiers = Tiers(self.pool)
        self.pool.prefault(background=True)
        pages = self.pool.stats()["pages_total"] // self._parts
        log.warning(
            "cxlkv: %s %s: room for %d pages of %s, %d tokens of one rank; it stays when the "
            "engine ends",
            "made" if made else "found",
            path,
            pages,
            format_bytes(host.page_bytes),
            pages * host.page_tokens,
        )

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: object) -> None:
        if str(host_pool_name) == "kv":  # SGLang names all of them, that of K and V again
            return
        raise UnsupportedError(
            f"cxlkv: the host pool {host_pool_name}: models with several kinds of caches (state "
            "layers, sliding windows, indexers) are not served yet. Leave "
            "--hicache-storage-backend away for this model"
        )

    def close(self) -> None:
        if self.pool is not None:
            self._tiers.close()
            self.pool.close()
            self.pool = None

    # ---- pages between the pool and the engine's host memory, without another copy ----

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """How many pages from the first on are there, whole, in the form that SGLang asks for."""
        is_flat = not (self.config.extra_config or {}).get("interface_v1")
        names = self._flat if is_flat else self._pages
        return self._answer(lambda: self._leading(keys, names), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        def get() -> list[bool]:
            sizes = self._open().get_batch_into(
                names := self._pages.keys(keys), self._host.buffers(host_indices, len(keys))
            )
            self._mend(names, sizes)
            right = (sizes == self.object_bytes).reshape(len(keys), self._parts)
            found: list[bool] = right.all(axis=1).tolist()
            return found

        return self._timed("get", get, [False] * len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        if not self._writes:
            return [True] * len(keys)  # another rank has equal pages, and stores them

        def put() -> list[bool]:
            self._open().put_batch(
                self._pages.keys(keys), self._host.buffers(host_indices, len(keys))
            )
            return [True] * len(keys)

        return self._timed("set", put, [False] * len(keys))

    # ---- the same of flat tensors, which the engine copies itself ----

    def exists(self, key: str) -> bool:
        return self._answer(lambda: self._leading([key], self._flat) == 1, False)

    def get(
        self, key: str, target_location: object = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: object = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        given = self._host.flat_pages(target_locations, len(keys))

        def get() -> list[torch.Tensor | None]:
            names = self._flat.keys(keys)
            sizes = self._open().get_batch_into(names, given)
            self._mend(names, sizes)
            whole = (sizes == self.page_bytes).tolist()
            return [page if right else None for page, right in zip(given, whole, strict=True)]

        return self._timed("get", get, [None] * len(keys))

    def set(
        self,
        key: str,
        value: object = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[object] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        if not self._writes:
            return True

        def put() -> bool:
            pages = [_contiguous(value, self.page_bytes) for value in values or ()]
            self._open().put_batch(self._flat.keys(keys), pages)
            return True

        return self._timed("set", put, False, len(keys))

    # ---- for the engine's other questions ----

    def clear(self) -> None:
        """Forget all objects of the pool, other engines' too: those that are read stay for them."""

        def clear() -> None:
            pool = self._open()
            rows, _ = pool.hotness.published()
            _core.forget_pages(pool._handle, rows["page"].copy(), rows["generation"].copy(), True)

        self._answer(clear, None)

    def get_stats(self) -> object:
        """SGLang's StorageMetrics since the last call, where it asked for them; else None."""
        if not getattr(self.config, "enable_storage_metrics", False):
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        found = StorageMetrics()
        gigabytes = self.page_bytes / 1e9
        for kind, pages, speeds in (
            ("get", found.prefetch_pgs, found.prefetch_bandwidth),
            ("set", found.backup_pgs, found.backup_bandwidth),
        ):
            moved, self._moved[kind] = self._moved[kind], []
            pages.extend(count for count, _ in moved)
            speeds.extend(count * gigabytes / seconds for count, seconds in moved)
        return found

    # ---- parts ----

    def _open(self) -> CXLPool:
        if self.pool is None:
            raise BadArgumentError("register_mem_pool_host() comes before all else, close() last")
        return self.pool

    def _leading(self, hashes: list[str], names: Names) -> int:
        wanted = self.object_bytes if names is self._pages else self.page_bytes
        sizes = self._open().object_sizes(names.keys(hashes))
        whole = (sizes == wanted).reshape(len(hashes), len(names.suffixes)).all(axis=1)
        return len(hashes) if whole.all() else int(np.argmin(whole))

    def _mend(self, names: PageKeys, sizes: Sizes) -> None:
        """What is damaged is forgotten, so that it is stored anew."""
        damaged = PageKeys(names.packed[sizes == DAMAGED], 1)
        if len(damaged):
            self._open().forget(damaged)
            self._fail("corrupt", CorruptError(f"{len(damaged)} pages in the pool are damaged"))

    def _timed(
        self, kind: str, call: Callable[[], Answer], miss: Answer, pages: int | None = None
    ) -> Answer:
        began = time.perf_counter()
        found = self._answer(call, miss)
        count = pages or (len(found) if isinstance(found, list) else 0)
        if getattr(self.config, "enable_storage_metrics", False):
            self._moved[kind].append((count, time.perf_counter() - began))
        return found

    def _answer(self, call: Callable[[], Answer], miss: Answer) -> Answer:
        try:
            return call()
        except PoolFullError as error:
            self._fail("full", error)
        except CXLKVError as error:
            self._fail("error", error)
        return miss

    def _fail(self, kind: str, error: CXLKVError) -> None:
        if not self.failures[kind]:
            log.warning("cxlkv: %s; the engine goes on without; further ones are counted", error)
        self.failures[kind] += 1


def _contiguous(value: object, page_bytes: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.nbytes != page_bytes:
        raise BadArgumentError(f"a tensor of {page_bytes} bytes is wanted, one page")
    return value.contiguous()
