"""The scheduler's view of a pool: which requests may start, and which wait for pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from cxlkv.errors import CXLKVError, MemoryShortError
from cxlkv.machine.coherence import LEASE_S
from cxlkv.pool import CXLPool


class Admission:
    """Pages of one step, over all shards' pools: the fullest one says. A page is counted once for
    all groups of layers, and for each of so many `copies` of a request: ranks that share a pool.

    No step is under way while the next one is planned, so what the pools hold is what the steps
    before took. Pages that are only published count as free: an append evicts them. Another
    process that shares a pool may still take pages first; a worker finds that out, and its request
    is computed again. A pool that cannot be asked has no room: requests wait for it.

    While this host owes others room (`waits`), no request begins here, or is looked up: some page
    of every extent would be held for ever. In a lease after the last one that runs, all is given
    that can be; then those that wait begin together, whatever is still owed. A request beside which
    none runs here may want more than this host's share.
    """

    def __init__(self, pools: Sequence[CXLPool], lease_s: float = LEASE_S, copies: int = 1):
        self._pools, self._lease_s = pools, lease_s
        self._parts = [pool.pages.geometry["part_count"] * copies for pool in pools]
        self._page_tokens = pools[0].layout.page_tokens
        self._given = 0  # pages promised since the step began, less those that come back in it
        self._left: int | None = None  # pages that were there for them; None: to be looked up
        self._asked: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self.waits = False
        self._idle_since_s: float | None = None  # while room is owed
        self._wants = self._wanted = False  # in this step, and in the one before

    @property
    def tokens(self) -> int:
        """Tokens that one request may have in the smallest pool, if no other holds any."""
        totals = [pool.stats()["pages_total"] for pool in self._pools]
        pages = min(total // parts for total, parts in zip(totals, self._parts, strict=True))
        return pages * self._page_tokens

    def check(self, tokens: int) -> None:
        """Raises MemoryShortError when a request of so many tokens can never be served."""
        if self.tokens < tokens:
            raise MemoryShortError(
                f"the pool holds {self.tokens} tokens, and max_model_len is {tokens}: no request "
                "of that length could ever run. Give the pool more capacity, or the engine a "
                "smaller max_model_len"
            )

    def begin(self) -> None:
        """A step is planned from now on."""
        self._given, self._left = 0, None
        self._asked.clear()
        if self._wanted and not self._wants:
            self._want(0)
        self._wanted, self._wants = self._wants, False
        owes = any(_owes_room(pool) for pool in self._pools)
        if not owes or self._held:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
        self.waits = owes and not self._has_given()

    def _has_given(self) -> bool:
        since_s = self._idle_since_s
        return since_s is not None and time.monotonic() - since_s > self._lease_s

    def fits(self, request: str, have: int, wanted: int) -> bool:
        """Whether a request that has `have` tokens in the pools can have `wanted`."""
        pages = self._asked[request] = self._pages(wanted) - self._pages(have)
        if request not in self._held:
            self._left = None  # its hit is held by now, and no longer free
        missing = pages + self._given - self._free() if pages > 0 else 0
        if missing > 0:
            self._wants = True
            self._want(missing)
        return missing <= 0

    def has(self, tokens: int) -> bool:
        """Whether there is room in this step for so many more, whoever has them then."""
        return self._pages(tokens) + self._given <= self._free()

    def _want(self, pages: int) -> None:
        """Asks the other hosts to evict pages that no process reads."""
        for pool, parts in zip(self._pools, self._parts, strict=True):
            with suppress(CXLKVError):
                pool.pages.want_room(pages * parts, within_share=bool(self._held))

    def take(self, request: str) -> None:
        """The request was planned as it was asked for."""
        pages = self._asked.pop(request, 0)
        self._given += pages
        self._held[request] = self._held.get(request, 0) + pages

    def give_back(self, request: str) -> None:
        """The request was preempted, or has ended: the workers hear of it before the step's tokens
        come.

        Pages of its hit do not count: others may hold them, too.
        """
        self._given -= self._held.pop(request, 0)
        self._asked.pop(request, None)

    def _free(self) -> int:
        if self._left is None:
            free = [_free(pool) for pool in self._pools]
            self._left = min(n // parts for n, parts in zip(free, self._parts, strict=True))
        return self._left

    def _pages(self, tokens: int) -> int:
        return tokens // self._page_tokens


def _owes_room(pool: CXLPool) -> bool:
    with suppress(CXLKVError):
        return pool.pages.owes_room()
    return False


def _free(pool: CXLPool) -> int:
    """Free pages, those that an append would evict, and of a pool that hosts share those of extents
    that may be taken; 0 of a pool that was lost."""
    try:
        stats = pool.stats()
        free = stats["pages_free"] + int(np.count_nonzero(pool.pages.evictable()))
        if stats["pages_elsewhere"]:
            free += pool.pages.takeable()
    except CXLKVError:
        return 0
    return free
