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

    def alloc(self, count: int) -> PageIds:
        """`count` page ids, uint32; neighbours where there are any. Raises PoolFullError."""
        if count < 0:
            raise BadArgumentError(f"{count} pages")
        return _core.pages_alloc(self._pool, count)

    def free(self, pages: PageIds) -> None:
        """Gives pages back; raises BadArgumentError for a page that this process does not hold."""
        _core.pages_free(self._pool, np.ascontiguousarray(pages, np.uint32))
