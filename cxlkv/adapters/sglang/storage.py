"""CXLHiCache, the storage backend that SGLang calls, hands every call on to `store`.

Its methods are called by the engine's threads for prefetch and backup, and by its scheduler. What
they raised would end a prefetch, a backup or the engine; so they raise only before it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args

from cxlkv.adapters.common.identity import warn_unshared
from cxlkv.adapters.common.metrics import Counting, Shown, log
from cxlkv.adapters.sglang import names
from cxlkv.adapters.sglang.host import Memory
from cxlkv.adapters.sglang.metrics import COUNTS, KINDS, PREFIX
from cxlkv.adapters.sglang.settings import EXTRA, check_version, is_zero_copy, read_settings
from cxlkv.adapters.sglang.store import MAIN, Rank, Store
from cxlkv.adapters.sglang.weights import HeardWeights, updaters
from cxlkv.arrays import Mask

if TYPE_CHECKING:
    from sglang.srt.observability.metrics_collector import StorageMetrics

LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")


class CXLHiCache(HiCacheStorage):
    """What SGLang's own class says of each method holds; here only what is not said there."""

    mem_pool_host: Memory

    def __init__(self, storage_config: HiCacheStorageConfig, _: object = None):
        """Raises UnsupportedError for another SGLang, BadArgumentError for mistakes in settings."""
        release, extra = version("sglang"), storage_config.extra_config
        check_version(release)
        server = _server_args()
        settings = read_settings(extra)
        engine = names.engine_words(storage_config, server, release, settings.identity)
        if not names.are_identified(engine):
            warn_unshared(str(engine["model"]), EXTRA)
        is_late = bool(updaters()) and not settings.identity
        if is_late:
            log.warning(
                "cxlkv: attached to a server that runs, which may have loaded other weights since "
                "its start: pages are shared with no other engine. Attach it at the start, or "
                "write a name of these weights as identity in %s",
                EXTRA,
            )
        rank = Rank(
            storage_config,
            engine,
            settings,
            is_zero_copy(extra),
            int(getattr(server, "context_length", None) or 0),
            is_late,
        )
        self.counting = Counting(COUNTS, KINDS)
        if storage_config.enable_storage_metrics:
            labels = {name: str(getattr(storage_config, name, 0)) for name in LABELS}
            self.counting = Shown(PREFIX, labels, COUNTS, KINDS)
        self._weights = HeardWeights(storage_config)
        self.store = Store(rank, self.counting, self._weights)

    # ---- the host pools ----

    def register_mem_pool_host(self, mem_pool_host: Memory) -> None:
        self.mem_pool_host = mem_pool_host
        self._weights.hear(mem_pool_host)
        self.store.add(MAIN, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Memory, host_pool_name: str) -> None:
        self.store.add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        self.store.make()

    # ---- pages in place ----

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self.store.leading(keys)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        found: list[bool] = self.store.load(MAIN, keys, host_indices, before(extra_info)).tolist()
        return found

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        found: list[bool] = self.store.store(MAIN, keys, host_indices, before(extra_info)).tolist()
        return found

    # ---- several host pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        sides: dict[str, int | None] = {}
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                sides[str(transfer.name)] = None
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                sides[str(transfer.name)] = max(1, len(transfer.keys or []))
        hits = self.store.hits(keys, sides)
        pages = {name: count for name, count in hits.pages.items() if count}
        return PoolTransferResult(max(hits.lengths, default=0), pages, hits.lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return each(self.store.load, transfers, extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return each(self.store.store, transfers, extra_info)

    # ---- copies of pages: without "interface_v1" ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        targets = target_locations
        if targets is None:
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        good = self.store.load_copies(keys, targets)
        return [page if right else None for page, right in zip(targets, good, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        return values is not None and bool(self.store.store_copies(keys, values).all())

    # ---- the rest ----

    def clear(self) -> None:
        """Clear the pages of all ranks, tenants and engines of this model."""
        self.store.clear()

    def get_stats(self) -> StorageMetrics | None:
        """What was copied since the last call: pages, and GB/s of each call."""
        if not isinstance(self.counting, Shown):
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loads, stores = self.store.take_moves()
        return StorageMetrics(
            [one.pages for one in loads],
            [one.pages for one in stores],
            [one.bytes_per_s / 1e9 for one in loads],
            [one.bytes_per_s / 1e9 for one in stores],
        )

    def close(self) -> None:
        self._weights.end()
        self.store.close()


def before(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """Keys of what comes before a call's pages in their text, as far as SGLang passes them."""
    return extra_info.prefix_keys if extra_info is not None else None


def each(
    act: Callable[[str, list[str], torch.Tensor | None, list[str] | None], Mask],
    transfers: list[PoolTransfer],
    extra_info: HiCacheStorageExtraInfo | None,
) -> dict[str, list[bool]]:
    """What load() or store() makes of each host pool's pages."""
    said = before(extra_info)
    return {
        one.name: act(str(one.name), one.keys or [], one.host_indices, said).tolist()
        for one in transfers
    }


def _server_args() -> object | None:
    """SGLang's arguments; None outside of its server."""
    try:
        found: object = get_server_args()
    except ValueError:
        return None
    return found
