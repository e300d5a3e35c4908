"""The page allocator: pages without a sequence, metadata only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv import _core, reclaim
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout, layer_places
from cxlkv.reclaim import Reclaimer, T

PageIds = npt.NDArray[np.uint32]
NO_PAGE = 2**32 - 1  # in place of an id: none, behind a window
Offsets = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Of one layer of some pages: where the pieces of kv head 0 begin, in bytes from the region's
    start. Those of the other heads follow, a piece's bytes apart; None: the pool has none."""

    digests: Offsets
    sketches: Offsets | None
    keys: Offsets
    values: Offsets | None


def places_of(geometry: Mapping[str, int], layout: KVLayout, pages: PageIds, layer: int) -> Places:
    """Places by geometry alone: docs/memory-layout.md. The pages are of the layer's part."""
    if not 0 <= layer < layout.layers:
        raise BadArgumentError(f"layer {layer}: the pool has {layout.layers}")
    given: Offsets = np.asarray(pages, np.int64)
    if given.size and not 0 <= given.min() <= given.max() < geometry["page_count"]:
        raise BadArgumentError(
            f"pages {given.min()} to {given.max()}: the pool has {geometry['page_count']}"
        )
    _, row = layer_places(layout, geometry["record_layers"])[layer]
    extent, slot = np.divmod(given, geometry["slab_slots"])
    start = geometry["extents_offset"] + extent * geometry["extent_bytes"]
    start += geometry["layers_offset"] + row * geometry["layer_bytes"]

    def pieces(slab_offset: int, piece_bytes: int) -> Offsets:
        found: Offsets = start + slab_offset + slot * (layout.kv_heads * piece_bytes)
        return found

    def if_any(kind: str) -> Offsets | None:
        size = geometry[f"{kind}_piece_bytes"]
        offset = geometry["sketches_offset" if kind == "sketch" else "values_offset"]
        return pieces(offset, size) if size else None

    return Places(
        digests=pieces(0, geometry["digest_piece_bytes"]),
        sketches=if_any("sketch"),
        keys=pieces(geometry["keys_offset"], geometry["key_piece_bytes"]),
        values=if_any("value"),
    )


class Pages:
    """`pool.pages`: takes and gives back pages by id; batched, one lock a call."""

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool
        self.geometry = _core.pool_geometry(pool)
        self._total = self.geometry["page_count"]

    @cached_property
    def _layout(self) -> KVLayout:
        return _core.pool_layout(self._pool)[0]

    def places(self, pages: PageIds, layer: int) -> Places:
        """Where the pieces of one layer of these pages lie, for who writes them himself.

        The pages are of the layer's part: Batch.attach() says which those are.
        """
        return places_of(self.geometry, self._layout, pages, layer)

    def alloc(self, count: int) -> PageIds:
        """`count` page ids, uint32; neighbours where there are any. Raises PoolFullError."""
        if count < 0:
            raise BadArgumentError(f"{count} pages")
        pages = np.full(min(count, self._total + 1), NO_PAGE, np.uint32)
        try:
            _core.pages_alloc(self._pool, pages)
            return pages
        except BaseException:
            if len(pages) and pages[0] != NO_PAGE:  # interrupted: the caller never gets these
                _core.pages_free(self._pool, pages)
            raise

    def memory(self) -> tuple[int, int]:
        """Address and bytes of the region in this process."""
        return _core.pool_memory(self._pool)

    def register(self, reclaimer: Reclaimer) -> None:
        """Ask it from now on when the pool is full; as reclaim.register()."""
        reclaim.register(self._pool, reclaimer)

    def unregister(self, reclaimer: Reclaimer) -> None:
        """Ask it no more, if it is the pool's."""
        reclaim.unregister(self._pool, reclaimer)

    def retry(self, call: Callable[[], T], pages: int) -> T:
        """What `call` returns, which takes at most that many pages; as reclaim.retry()."""
        return reclaim.retry(call, self._pool, lambda: pages)

    def evictable(self) -> npt.NDArray[np.bool_]:
        """By page id: published, of this host, pinned by nobody and held by nobody (leases too)."""
        return _core.evictable(self._pool, self._total)

    def free(self, pages: PageIds) -> None:
        """Gives pages back, all or none.

        Raises BadArgumentError for a page that this process did not get from alloc().
        """
        _core.pages_free(self._pool, np.ascontiguousarray(pages, np.uint32))
