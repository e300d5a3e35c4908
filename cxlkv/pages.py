"""Pages without a sequence: the allocator itself, metadata only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import BadArgumentError

PageIds = npt.NDArray[np.uint32]


class Pages:
    """`pool.pages`: takes and gives back pages by id; batched, one lock a call."""

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool
        self._total = _core.pool_geometry(pool)["page_count"]

    def alloc(self, count: int) -> PageIds:
        """`count` page ids, uint32; neighbours where there are any. Raises PoolFullError."""
        if count < 0:
            raise BadArgumentError(f"{count} pages")
        return _core.pages_alloc(self._pool, min(count, self._total + 1))

    def evictable(self) -> npt.NDArray[np.bool_]:
        """By page id: published, of this host, pinned by nobody and held by nobody (leases too)."""
        return _core.evictable(self._pool, self._total)

    def free(self, pages: PageIds) -> None:
        """Gives pages back, all or none.

        Raises BadArgumentError for a page that this process did not get from alloc().
        """
        _core.pages_free(self._pool, np.ascontiguousarray(pages, np.uint32))
