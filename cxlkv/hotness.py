"""Counts how often each page is used, and which heads keep choosing the same pages."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.pages import PageIds

COUNTER_WIDTH = 16
COUNT_MAX = (1 << COUNTER_WIDTH) - 1
HELD = _core.PUBLISHED_HELD
PINNED = _core.PUBLISHED_PINNED
NO_PAGE = _core.NO_PAGE
choose_pages = _core.choose  # which published pages an eviction takes

Counts = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]


class HotList(NamedTuple):
    """What a source found hot, in the shape of a hot list of CXL 3.2 (`Hotness.records`).

    entries: uint64, (unit << counter_width) | count; units of `Hotness` are pages of the pool.
    epoch: in which they were read.
    """

    entries: npt.NDArray[np.uint64]
    epoch: int
    counter_width: int = COUNTER_WIDTH

    @property
    def units(self) -> npt.NDArray[np.uint64]:
        return self.entries >> np.uint64(self.counter_width)

    @property
    def counts(self) -> npt.NDArray[np.uint64]:
        return self.entries & np.uint64((1 << self.counter_width) - 1)


class HotnessSource(Protocol):
    """Whatever can say which units are hot: `Hotness`; DAMON or a CHMU's PMU could be others."""

    @property
    def name(self) -> str: ...

    def records(self, threshold: int = 1) -> HotList: ...


class Published(NamedTuple):
    """Pages that match() finds, as eviction policies read them (`Hotness.published`).

    rows: a structured array, by page, with the fields page, generation, hash (two words: the key in
    the index), used, born, hits, parent (page, or NO_PAGE), part, hotness, flags (HELD: in use).
    clock: pages that were found or published so far, one by one; used and born are its low 32 bits
    when the page was found last, or published, and when it was published.
    """

    rows: npt.NDArray[np.void]
    clock: int

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Which pages some process holds, or another host has pinned."""
        flags: Counts = self.rows["flags"]
        held: npt.NDArray[np.bool_] = (flags & HELD) != 0
        return held


class Hotness:
    """`pool.hotness`: how often each page was used, by all processes of this host.

    A use: a select chose the page for a head; a fetch or attend read it for a head, or read all
    pages (once for each); a hit holds it. Uses are counted where they are made, so that nothing
    needs to sample accesses as a CHMU does. A count is halved with every epoch in which the page is
    not used and stops at 65535. An epoch ends when each page could have been used four times.
    Counts are advice: two threads that use one page at one time may count one use.
    """

    name = "uses"

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool
        self._total = _core.pool_geometry(pool)["page_count"]
        self._enabled = True

    @property
    def enabled(self) -> bool:
        """Whether this process's uses are counted; they are at first. Others are not affected."""
        return self._enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        _core.hotness_enable(self._pool, on)
        self._enabled = on

    @property
    def epoch(self) -> int:
        """The epoch now, from 0."""
        return _core.hotness_read(self._pool, 0, 0)[2]

    def advance(self) -> int:
        """Begin an epoch: all counts are halved. Returns its number."""
        return _core.hotness_advance(self._pool)

    def counts(self) -> Counts:
        """By page of the pool, as they are in this epoch; free pages have 0."""
        return _core.hotness_read(self._pool, 0, self._total)[0]

    def epochs(self) -> Counts:
        """By page, the epoch in which it was used last; 0 for pages without a use, too."""
        return _core.hotness_read(self._pool, 0, self._total)[1]

    def hottest(self, count: int, among: PageIds | None = None) -> PageIds:
        """The `count` pages with most uses, most first; of equal ones the lower id.

        among: choose from these pages only, each at most once; else from all of the pool.
        """
        return self._best(count, among, np.uint32(COUNT_MAX) - self.counts())

    def coldest(self, count: int, among: PageIds | None = None) -> PageIds:
        """The `count` pages with fewest uses, fewest first; of equal ones the lower id.

        Free pages are coldest of all: name the pages that matter by `among`.
        """
        return self._best(count, among, self.counts())

    def _best(self, count: int, among: PageIds | None, ranks: Counts) -> PageIds:
        if count < 0:
            raise BadArgumentError(f"{count} pages")
        pages = np.arange(self._total, dtype=np.uint32)
        if among is not None:
            pages = np.asarray(among, np.uint32)
            if pages.size and int(pages.max()) >= self._total:
                raise BadArgumentError(f"page {pages.max()}: the pool has {self._total}")
        # No two keys are equal, so that which pages are best does not depend on the partition.
        keys = ranks[pages].astype(np.uint64) << np.uint64(32) | pages
        if count < len(keys):
            keys = np.partition(keys, count)[:count]
        keys.sort()
        return keys.astype(np.uint32)  # the low bits: pages

    def records(self, threshold: int = 1) -> HotList:
        """Pages with at least so many uses, as a hotness monitoring unit in epoch mode lists them.

        Source of the shape: CXL 3.2, section 8.2.8 (CHMU), and Linux's proposed
        Documentation/trace/cxl-hmu.rst: an entry is (unit_index << counter_width) | count, where a
        unit is a range of the device's memory. Here units are pages, in their order.
        """
        if threshold < 1:
            raise BadArgumentError(f"a threshold of {threshold} uses: at least 1")
        counts, _, epoch = _core.hotness_read(self._pool, 0, self._total)
        units = np.flatnonzero(counts >= threshold).astype(np.uint64)
        return HotList(units << np.uint64(COUNTER_WIDTH) | counts[units], epoch)

    def published(self) -> Published:
        """The pages of this host that match() finds, in the order of their ids."""
        return Published(*_core.pool_published(self._pool))


class Chosen(Protocol):
    """A selection: cxlkv.ndp.engine.Selection is one."""

    @property
    def pages(self) -> npt.NDArray[np.int32]: ...


class Stability:
    """How many of its pages each kv head chooses again at the next step, of one sequence.

    The idea is FlexiCache's (arXiv 2511.00868): heads differ in that, and those that keep choosing
    the same pages need few of them near. Forced pages (sinks, recent ones) count as chosen.
    """

    def __init__(self, layers: int, kv_heads: int, weight: float = 0.125) -> None:
        """weight: of a step's share in the average; the others' falls by as much each step."""
        if layers < 1 or kv_heads < 1:
            raise BadArgumentError(f"{layers} layers of {kv_heads} heads: at least 1 of each")
        if not 0 < weight <= 1:
            raise BadArgumentError(f"weight={weight}: outside (0, 1]")
        self._weight = weight
        self._last: list[npt.NDArray[np.int32] | None] = [None] * layers
        self._shares = np.full((layers, kv_heads), np.nan)

    def see(self, layer: int, chosen: Chosen) -> None:
        """A layer's next selection: pages [kv_heads, k], or [lists, kv_heads, k], a step each."""
        if not 0 <= layer < len(self._last):
            raise BadArgumentError(f"layer {layer}: there are {len(self._last)}")
        pages = chosen.pages[None] if chosen.pages.ndim == 2 else chosen.pages
        if pages.ndim != 3 or pages.shape[1] != self._shares.shape[1]:
            raise BadArgumentError(
                f"pages of shape {chosen.pages.shape}, wanted [.., {self._shares.shape[1]}, k]"
            )
        for step in pages:
            before = self._last[layer]
            if before is not None:
                self._add(self._shares[layer], _kept(before, step))
            self._last[layer] = step.copy()

    def _add(self, average: Floats, share: Floats) -> None:
        known = ~np.isnan(share)
        first = known & np.isnan(average)
        average[first] = share[first]
        again = known & ~first
        average[again] += self._weight * (share[again] - average[again])

    @property
    def shares(self) -> Floats:
        """[layers, kv_heads]: average share chosen again; NaN before a head's second step."""
        return self._shares.copy()

    def stable_heads(self, floor: float) -> npt.NDArray[np.bool_]:
        """[layers, kv_heads]: which heads choose at least this share of their pages again."""
        return self._shares >= floor  # False for NaN


def _kept(before: npt.NDArray[np.int32], now: npt.NDArray[np.int32]) -> Floats:
    """By head, the share of `now` that is in `before`; NaN where nothing was chosen now."""
    width = 2 + max(int(before.max(initial=-1)), int(now.max(initial=-1)))
    was = np.zeros((len(now), width), np.bool_)
    np.put_along_axis(was, before, True, axis=1)
    was[:, -1] = False  # where -1, the padding, went
    same = np.take_along_axis(was, now, axis=1).sum(1)
    count = (now >= 0).sum(1)
    share: Floats = np.divide(same, count, out=np.full(len(now), np.nan), where=count > 0)
    return share
