"""Textbook caches of single pages, and Belady's optimum: what policies are judged against.

Each takes the pages that were asked for, one after the other, and a capacity; returns for each
whether it was there. Of use to an engine are only those of a prompt that have all before them:
leading() counts these.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

NEVER = 1 << 62


def leading(lengths: Iterable[int], there: Sequence[bool]) -> int:
    """For prompts of so many pages each: pages that are there with all before them."""
    start = hits = 0
    for length in lengths:
        hits += sum(takewhile(bool, there[start : start + length]))
        start += length
    return hits


def belady(asked: Sequence[int], capacity: int) -> list[bool]:
    """The most that any cache can hit (Belady 1966), one that need not keep what it was asked for:
    of all pages here and the one that came, that goes which is asked for last."""
    next_at, last = [NEVER] * len(asked), dict[int, int]()
    for i in range(len(asked) - 1, -1, -1):
        next_at[i] = last.get(asked[i], NEVER)
        last[asked[i]] = i
    here: dict[int, int] = {}
    latest: list[tuple[int, int]] = []  # entries that are no longer true stay until they come up
    hits: list[bool] = []
    for page, after in zip(asked, next_at, strict=True):
        hits.append(page in here)
        if after == NEVER:
            here.pop(page, None)
            continue
        if page not in here and len(here) >= capacity:
            while here.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if -latest[0][0] < after:
                continue
            del here[heapq.heappop(latest)[1]]
        here[page] = after
        heapq.heappush(latest, (-after, page))
    return hits


def lru(asked: Sequence[int], capacity: int) -> list[bool]:
    here: OrderedDict[int, None] = OrderedDict()
    hits: list[bool] = []
    for page in asked:
        hits.append(page in here)
        if hits[-1]:
            here.move_to_end(page)
            continue
        if len(here) >= capacity:
            here.popitem(last=False)
        here[page] = None
    return hits


def lfu(asked: Sequence[int], capacity: int) -> list[bool]:
    """Least often used since it came; of those, the one used longest ago."""
    here: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    hits: list[bool] = []
    for now, page in enumerate(asked):
        hits.append(page in here)
        if page not in here and len(here) >= capacity:
            while here.get(order[0][2]) != order[0][:2]:
                heapq.heappop(order)
            del here[heapq.heappop(order)[2]]
        here[page] = (here[page][0] + 1 if page in here else 1, now)
        heapq.heappush(order, (*here[page], page))
    return hits


def sieve(asked: Sequence[int], capacity: int) -> list[bool]:
    """SIEVE (Zhang et al., NSDI'24): a hand goes from old to new, and takes the first page that was
    not visited since it came by."""
    # A ring through None, which lies behind the oldest page and before the newest.
    older: dict[int | None, int | None] = {None: None}
    newer: dict[int | None, int | None] = {None: None}
    visited: set[int | None] = set()
    hand: int | None = None
    hits: list[bool] = []
    for page in asked:
        hits.append(page in older)
        if hits[-1]:
            visited.add(page)
            continue
        if len(older) > capacity:
            while hand is None or hand in visited:
                visited.discard(hand)
                hand = newer[hand]
            before, behind = newer.pop(hand), older.pop(hand)
            older[before], newer[behind], hand = behind, before, before
        newest = older[None]
        older[page], newer[page] = newest, None
        older[None], newer[newest] = page, page
    return hits


def s3fifo(asked: Sequence[int], capacity: int) -> list[bool]:
    """S3-FIFO (Yang et al., SOSP'23): a tenth for pages that came once, the rest for the others."""
    small: OrderedDict[int, int] = OrderedDict()
    main: OrderedDict[int, int] = OrderedDict()
    ghosts: OrderedDict[int, None] = OrderedDict()
    small_count = max(1, capacity // 10)
    main_count = capacity - small_count

    def leave_main() -> None:
        while True:
            page, visits = main.popitem(last=False)
            if not visits:
                return
            main[page] = visits - 1

    def leave_small() -> None:
        while small:
            page, visits = small.popitem(last=False)
            if visits <= 1:
                ghosts[page] = None
                if len(ghosts) > main_count:
                    ghosts.popitem(last=False)
                return
            main[page] = 0
            if len(main) > main_count:
                leave_main()

    hits: list[bool] = []
    for page in asked:
        queue = small if page in small else main
        hits.append(page in queue)
        if hits[-1]:
            queue[page] = min(queue[page] + 1, 3)
            continue
        while len(small) + len(main) >= capacity:
            leave_small() if len(small) >= small_count else leave_main()
        if page in ghosts:
            del ghosts[page]
            main[page] = 0
        else:
            small[page] = 0
    return hits


CACHES: dict[str, Callable[[Sequence[int], int], list[bool]]] = {
    "lru": lru,
    "lfu": lfu,
    "sieve": sieve,
    "s3fifo": s3fifo,
}
