"""Prefixes of requests that asked for it stay in the pool for a while after their end.

They are held as hits are, by leases, so nothing evicts them; those of an engine that dies end with
their leases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from cxlkv.adapters.vllm.pools import tokens_of
from cxlkv.errors import CXLKVError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit

SHARE = 0.5
"""Share of the pool, at most: the oldest ones go before their time, as others need pages, too."""


class _Kept(NamedTuple):
    until_s: float
    last: bytes  # the key of its last page; it depends on all keys before
    tokens: int
    hits: list[Hit]


class Keeping:
    """The prefixes that stay for one engine; pools are those of all ranks, as they are at each
    call. Methods are the scheduler's, in one thread."""

    def __init__(self, pools: Sequence[CXLPool], clock: Callable[[], float] = time.monotonic):
        self._pools, self._clock = pools, clock
        self._most = int(SHARE * min(tokens_of(pool) for pool in pools))
        self._kept: deque[_Kept] = deque()
        self._tokens = 0

    def keep(self, keys: PageKeys, ttl_s: float) -> int:
        """What the pools have of the prefix stays for so long, 0: no longer; returns how many
        tokens. What was kept of the same text before ends."""
        hits: list[Hit] = []
        with suppress(CXLKVError):  # what cannot be held is not: it may be found all the same
            for pool in self._pools if ttl_s else ():
                hits.append(pool.match(keys, lease_s=ttl_s))
        named = {row.tobytes() for row in keys.packed}
        for one in [one for one in self._kept if one.last in named]:
            self._kept.remove(one)
            self._end(one)
        tokens = max((hit.tokens for hit in hits), default=0)
        if not 0 < tokens <= self._most:
            _release(hits)
            return 0
        while self._tokens + tokens > self._most:
            self._end(self._kept.popleft())
        self._tokens += tokens
        last = keys[tokens // keys.page_tokens - 1]
        self._kept.append(_Kept(self._clock() + ttl_s, bytes(last), tokens, hits))
        return tokens

    def expire(self) -> None:
        """Those whose time is over."""
        now_s = self._clock()
        for one in [one for one in self._kept if one.until_s <= now_s]:
            self._kept.remove(one)
            self._end(one)

    def give_way(self) -> None:
        """The oldest one goes: a request lacks room, and none runs whose end would give it some."""
        if self._kept:
            self._end(self._kept.popleft())

    def close(self) -> None:
        while self._kept:
            self._end(self._kept.popleft())

    def _end(self, one: _Kept) -> None:
        self._tokens -= one.tokens
        _release(one.hits)


def _release(hits: Sequence[Hit]) -> None:
    for hit in hits:
        with suppress(CXLKVError):
            hit.release()
