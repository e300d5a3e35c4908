"""Prefixes come from below the pool before their requests start: requests wait, steps do not.

One thread brings them in the order in which requests asked, and holds each prefix until the
scheduler has matched its request. It looks up the cold tier beforehand, and asks a remote pool once
for each request, unless that has stopped answering. Held prefixes may fill a share of the pool
only, so that requests far back in a long queue take no room from those in front.

A request that has just ended still has its pages at the workers, until they hear of it in the next
step. A prefix that finds no room comes once more when they have let go of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from cxlkv.adapters.common.metrics import Failures
from cxlkv.adapters.vllm.pools import tokens_of
from cxlkv.errors import CXLKVError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers

log = logging.getLogger("cxlkv")

SHARE = 0.25
"""Share of the smallest pool for what has come and is not matched yet. One request may have
more."""
TRIES_MAX = 3
"""Tries of a prefix that found no free pages: others may take them again."""


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
    lacked_room: bool = False
    tries: int = 1
    is_done: bool = False
    is_given_up: bool = False


class Prefetch(Closing):
    """Over all ranks' tiers. Methods are the scheduler's, in one thread.

    deadline_s: after so long a request goes on with what is there. lease_s: of what was brought
    back. has_capacity: whether the pools have room for so many tokens now; asked for a prefix that
    found none, where its request could not be computed without that room either.
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
        self._futile: dict[str, _Wanted] = {}  # of requests for which not all could come
        self._leaving: set[str] = set()  # that have ended, and still have pages at the workers
        self.has_capacity: Callable[[int], bool] = lambda tokens: False
        self._most = int(SHARE * min(tokens_of(one.pool) for one in tiers))
        self._queue = SimpleQueue[_Wanted | None]()
        self._changed = (
            threading.Condition()
        )  # what a _Wanted holds, and which requests are leaving
        self._thread = threading.Thread(target=self._run, name="cxlkv-prefetch", daemon=True)
        lifetime.watch(self)
        self._thread.start()

    def begin(self, request: str, keys: PageKeys, tokens: int) -> bool:
        """Whether more than `tokens` of the prefix will be there later. The request waits then, and
        asks is_going(); it is not begun yet where others have the room."""
        before = self._futile.get(request)
        if request in self._wanted or (before is not None and not self._comes_now(before)):
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
        if before is not None:
            wanted.tries = before.tries + 1
        self._wanted[request] = wanted
        self._queue.put(wanted)
        return True

    def _comes_now(self, before: _Wanted) -> bool:
        lacked = before.lacked_room and before.tries < TRIES_MAX
        return lacked and self.has_capacity(before.tokens - before.there)

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

    def rest(self, most_s: float) -> bool:
        """Waits until some prefix is there, as the step has nothing to do; False: none is coming.

        Steps that do nothing follow each other without a pause in an engine that has no process of
        its own. They give the interpreter's lock back and take it again so often that the thread
        which brings the prefix hardly gets it.
        """
        with self._changed:
            if self._wanted:
                there = lambda: any(one.is_done for one in self._wanted.values())  # noqa: E731
                self._changed.wait_for(there, most_s)
            return bool(self._wanted)

    def leaves(self, request: str) -> None:
        """The request has ended, or was preempted; the workers are still to hear of it."""
        with self._changed:
            self._leaving.add(request)

    def has_left(self, requests: Collection[str]) -> None:
        """All workers have let go of their pages."""
        with self._changed:
            self._leaving.difference_update(requests)
            self._changed.notify_all()

    def let_go(self) -> None:
        """Let go of what is held for requests that are not matched yet: one in front of them lacks
        pages. They begin anew when they are asked for."""
        for wanted in self._wanted.values():
            self._give_up(wanted)
        self._wanted.clear()

    def matched(self, request: str, keys: PageKeys, tokens: int) -> bool:
        """The request has a match of so many tokens, which holds what came for it; whether it is to
        wait for more."""
        self.end(request)
        return self.begin(request, keys, tokens)

    def end(self, request: str, for_good: bool = False) -> None:
        """The request waits no longer. for_good: it has ended."""
        self._count_remote()
        wanted = self._wanted.pop(request, None)
        if for_good:
            self._futile.pop(request, None)
            self._there.pop(request, None)
        if wanted is None:
            return
        if wanted.error is not None:
            self._failures.add("match", wanted.error)
        come = self._give_up(wanted)
        restored, there = min(come, wanted.reach), wanted.there
        if come > there and not for_good:
            self._there[request] = min(there, self._there.get(request, there))
        self.tokens["restored_tokens"] += max(0, restored - there)
        self.tokens["pulled_tokens"] += max(0, come - max(restored, there))
        if come < wanted.tokens and not for_good:
            self._futile[request] = wanted

    def _give_up(self, wanted: _Wanted) -> int:
        """Releases what has come for it, and will; how many tokens these are."""
        with self._changed:
            wanted.is_given_up = True
            self._changed.notify_all()
        return self._release(wanted)

    def _release(self, wanted: _Wanted) -> int:
        with self._changed:
            hits, wanted.hits = wanted.hits, []
        come = min((hit.tokens for hit in hits), default=0)
        for hit in hits:
            hit.release()
        return come

    def brought(self, request: str, tokens: int) -> int:
        """How many of so many tokens of its prefix came from below the pool."""
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
            with self._changed:
                wanted.is_done = True
                self._changed.notify_all()

    def _bring(self, wanted: _Wanted) -> None:
        """Bring a prefix, once more where it lacked pages and requests were leaving."""
        with self._changed:
            leaving = set(self._leaving)
        self._hold(wanted)
        if not wanted.lacked_room or not leaving:
            return
        with self._changed:
            gone = lambda: wanted.is_given_up or leaving.isdisjoint(self._leaving)  # noqa: E731
            self._changed.wait_for(gone, wanted.until_s - time.monotonic())
        self._release(wanted)
        self._hold(wanted)

    def _hold(self, wanted: _Wanted) -> None:
        before = self._refusals()
        try:
            self._match(wanted)
        finally:
            wanted.lacked_room = self._refusals() > before

    def _refusals(self) -> int:
        """How often the tiers refused for want of free pages."""
        remotes = [one.remote for one in self.tiers if one.remote is not None]
        far = sum(one.stats()["refused"] for one in remotes)
        return far + sum(one.moved_pages("refused") for one in self.tiers)

    def _match(self, wanted: _Wanted) -> None:
        for tiers in self.tiers:
            if wanted.is_given_up:
                return
            try:
                hit = tiers.match(wanted.keys, lease_s=self._lease_s)
            except CXLKVError as error:
                wanted.error = error
                return
            with self._changed:
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
        self._changed, self._queue = threading.Condition(), SimpleQueue()
        self._wanted, self._leaving = {}, set()
