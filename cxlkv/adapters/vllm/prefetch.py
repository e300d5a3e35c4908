"""Prefixes come from below the pool before their requests start: requests wait, steps do not.

One thread brings them in the order in which requests asked, and holds each prefix until the
scheduler has matched its request. It looks up the cold tier beforehand, and asks a remote pool once
for each request, unless that has stopped answering. Held prefixes may fill a share of the pool
only, so that requests far back in a long queue take no room from those in front.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from cxlkv import _lifetime
from cxlkv._lifetime import Closing
from cxlkv.adapters.common.metrics import Failures
from cxlkv.adapters.vllm.pools import tokens_of
from cxlkv.errors import CXLKVError
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers

log = logging.getLogger("cxlkv")

SHARE = 0.25
"""Of the smallest pool: room for what has come and is not matched yet. One request may have
more."""


@dataclass
class _Wanted:
    """A request's prefix that is to come back; it has come when all its hits are there."""

    keys: PageKeys
    there: int  # tokens of it that were in the pools
    reach: int  # that are there or in the cold tiers
    tokens: int  # that may come
    until_s: float
    hits: list[Hit] = field(default_factory=list)
    error: CXLKVError | None = None
    is_done: bool = False
    is_given_up: bool = False


class Prefetch(Closing):
    """Over all ranks' tiers. Methods are the scheduler's, in one thread.

    deadline_s: after so long a request goes on with what is there. lease_s: of what was brought
    back.
    """

    def __init__(
        self, tiers: Sequence[Tiers], failures: Failures, deadline_s: float, lease_s: float
    ):
        self.tiers, self._failures = list(tiers), failures
        self._deadline_s, self._lease_s = deadline_s, lease_s
        self.tokens: Counter[str] = Counter()  # of requests' prefixes that came, so far
        self._remote_errors = 0  # that were counted
        self._wanted: dict[str, _Wanted] = {}
        self._there: dict[str, int] = {}  # tokens of a request's prefix that nothing had to bring
        self._futile: set[str] = set()  # requests for which not all could come
        self._most = int(SHARE * min(tokens_of(one.pool) for one in tiers))
        self._queue = SimpleQueue[_Wanted | None]()
        self._lock = threading.Lock()  # of what a _Wanted holds
        self._thread = threading.Thread(target=self._run, name="cxlkv-prefetch", daemon=True)
        _lifetime.watch(self)
        self._thread.start()

    def begin(self, request: str, keys: PageKeys, tokens: int) -> bool:
        """Whether more than `tokens` of the prefix will be there later. The request waits then, and
        asks is_going(); it is not begun yet where others have the room."""
        if request in self._wanted or request in self._futile:
            return request in self._wanted
        try:
            reach = min(tiers.reach(keys) for tiers in self.tiers)
        except CXLKVError as error:
            self._failures.add("match", error)
            return False
        may_come = len(keys) * keys.page_tokens if self._has_remote() else reach
        if may_come <= tokens:
            return False
        taken = sum(one.tokens for one in self._wanted.values())
        if taken and taken + may_come > self._most:
            return True
        until_s = time.monotonic() + self._deadline_s
        some = keys[: may_come // keys.page_tokens]
        wanted = _Wanted(some, tokens, reach, may_come, until_s)
        self._wanted[request] = wanted
        self._queue.put(wanted)
        return True

    def _has_remote(self) -> bool:
        return all(one.remote is not None and one.remote.is_on for one in self.tiers)

    def is_going(self, request: str) -> bool:
        """Whether the request is to wait. If not, what has come is held until end()."""
        wanted = self._wanted.get(request)
        if wanted is None or wanted.is_done:
            return False
        if time.monotonic() < wanted.until_s:
            return True
        said = f"what is below the pool took longer than deadline_s={self._deadline_s:g}"
        self._failures.add("late", CXLKVError(said))
        return False

    def matched(self, request: str, keys: PageKeys, tokens: int) -> bool:
        """The request has a match of so many tokens, which holds what came for it; whether it is to
        wait for more."""
        self.end(request)
        return self.begin(request, keys, tokens)

    def end(self, request: str, for_good: bool = False) -> None:
        """It waits no longer. for_good: it has ended."""
        self._count_remote()
        wanted = self._wanted.pop(request, None)
        if for_good:
            self._futile.discard(request)
            self._there.pop(request, None)
        if wanted is None:
            return
        with self._lock:
            wanted.is_given_up = True
            hits, wanted.hits = wanted.hits, []
        if wanted.error is not None:
            self._failures.add("match", wanted.error)
        come = min((hit.tokens for hit in hits), default=0)
        restored, there = min(come, wanted.reach), wanted.there
        if come > there and not for_good:
            self._there[request] = min(there, self._there.get(request, there))
        self.tokens["restored_tokens"] += max(0, restored - there)
        self.tokens["pulled_tokens"] += max(0, come - max(restored, there))
        if come < wanted.tokens and not for_good:
            self._futile.add(request)
        for hit in hits:
            hit.release()

    def brought(self, request: str, tokens: int) -> int:
        """Of so many tokens of its prefix, how many came from below the pool."""
        return max(0, tokens - self._there.get(request, tokens))

    def _count_remote(self) -> None:
        """Failures of remote tiers; each is said there."""
        errors = sum(one.remote.stats()["errors"] for one in self.tiers if one.remote is not None)
        if errors > self._remote_errors:
            self._failures["remote"] += errors - self._remote_errors
        self._remote_errors = errors

    def reopened(self, rank: int, tiers: Tiers) -> None:
        """This rank's pool was lost; its tiers go."""
        before, self.tiers[rank] = self.tiers[rank], tiers
        with suppress(CXLKVError):  # of a pool that was closed
            before.close()

    def _run(self) -> None:
        while (wanted := self._queue.get()) is not None:
            wanted.until_s = max(wanted.until_s, time.monotonic() + self._deadline_s)
            try:
                self._bring(wanted)
            except Exception:  # without the thread all later requests would wait in vain
                log.exception("a prefix was not brought; the engine computes instead")
            wanted.is_done = True

    def _bring(self, wanted: _Wanted) -> None:
        for tiers in self.tiers:
            if wanted.is_given_up:
                return
            try:
                hit = tiers.match(wanted.keys, lease_s=self._lease_s)
            except CXLKVError as error:
                wanted.error = error
                return
            with self._lock:
                if not wanted.is_given_up:
                    wanted.hits.append(hit)
                    continue
            hit.release()

    def close(self) -> None:
        for request in list(self._wanted):
            self.end(request, for_good=True)
        self._queue.put(None)
        self._thread.join()
        for tiers in self.tiers:
            tiers.close()

    def reset_after_fork(self) -> None:
        """The thread stays with the parent; a child has no requests that wait."""
        self._lock, self._queue = threading.Lock(), SimpleQueue()
        self._wanted = {}
