"""Pages of a pool, by id or name: pool.pages takes them, pool.hotness counts uses, pool.records
moves them out and in.

A name is what the index has of a page, 16 bytes; a record is a page with all that belongs to it, as
it lies outside of the pool (docs/reference/memory-layout.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cxlkv import _core, _io_hooks
from cxlkv._core import reclaim
from cxlkv._core.reclaim import Reclaimer, T
from cxlkv.arrays import Codes, Counts, Generations, Names, Offsets, PageIds, RecordBytes
from cxlkv.errors import BadArgumentError
from cxlkv.machine.lifetime import OfThisProcess
from cxlkv.numbers import is_whole

NO_PAGE = _core.NO_PAGE  # in place of an id: none, behind a window
PLACES_MAX = _core.PLACES_MAX

COUNTER_WIDTH = 16
COUNT_MAX = (1 << COUNTER_WIDTH) - 1
HELD, PINNED, LOST = _core.PUBLISHED_HELD, _core.PUBLISHED_PINNED, _core.PUBLISHED_LOST
choose_pages = _core.choose  # which published pages an eviction takes
PARENT_LOST = _core.PARENT_LOST
PRIORITY_MAX = _core.PRIORITY_MAX  # of a published page, from 0

CORRUPT, STALE, PRESENT = _core.E_CORRUPT, _core.E_STALE, _core.RECORD_PRESENT
"""Codes of single records: wrong bytes; the page is another by now; the name is there already."""
RECORD_HEADER, RECORD_MAGIC = _core.RECORD_HEADER, _core.RECORD_MAGIC
PACKED_HEADER, PACKED_MAGIC = _core.PACKED_HEADER, _core.PACKED_MAGIC
PACKED_VERSION = _core.PACKED_VERSION
"""The line at the front of a page's record in a pool, and of a record outside of one."""
crc32c, names_of, layout_crc = _core.crc32c, _core.names_of, _core.layout_crc
layer_places = _core.layer_places


class Places(NamedTuple):
    """Where the pieces of kv head 0 begin, for one layer of some pages, in bytes from the region's
    start. Those of the other heads follow, a piece's bytes apart; None: the pool has none.
    """

    digests: Offsets
    sketches: Offsets | None
    keys: Offsets
    values: Offsets | None


def places_of(geometry: Mapping[str, int], place: _core.LayerPlace, pages: PageIds) -> Places:
    """Places by geometry alone, of pages of the part of a layer, one of layer_places():
    docs/reference/memory-layout.md."""
    given: Offsets = np.asarray(pages, np.int64)
    if given.size and not 0 <= given.min() <= given.max() < geometry["page_count"]:
        raise BadArgumentError(
            f"pages {given.min()} to {given.max()}: the pool has {geometry['page_count']}"
        )
    extent, slot = np.divmod(given, geometry["slab_slots"])
    start = geometry["extents_offset"] + extent * geometry["extent_bytes"]

    def pieces(kind: int) -> Offsets:
        found: Offsets = start + place.offsets[kind] + slot * place.slot_bytes[kind]
        return found

    return Places(
        digests=pieces(0),
        sketches=pieces(1) if place.piece_bytes[1] else None,
        keys=pieces(2),
        values=pieces(3) if place.piece_bytes[3] else None,
    )


def checksums_at(geometry: Mapping[str, int], pages: PageIds) -> Offsets:
    """Where the checksums of pages begin, in bytes from the region's start, by geometry alone:
    uint32 [layers of the part, kv_heads, 4], of digest, sketch, K and V."""
    extent, slot = np.divmod(np.asarray(pages, np.int64), geometry["slab_slots"])
    tables = geometry["extents_offset"] + extent * geometry["extent_bytes"]
    found: Offsets = tables + geometry["checksums_offset"] + slot * geometry["checksum_bytes"]
    return found


def _check_pages(count: int) -> None:
    if not is_whole(count):
        raise BadArgumentError(f"{count!r} pages: a whole number, 0 or more")


class Pages(OfThisProcess):
    """`pool.pages`: takes and gives back pages by id; batched, one lock a call."""

    _instead = "open the pool by its path there"

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool
        self.geometry = _core.pool_geometry(pool)
        self._total = self.geometry["page_count"]

    @cached_property
    def _layers(self) -> tuple[_core.LayerPlace, ...]:
        return layer_places(_core.pool_layout(self._pool)[0], self.geometry)

    def places(self, pages: PageIds, layer: int) -> Places:
        """Where the pieces of one layer of these pages lie, for a caller that writes them itself.

        The pages are of the layer's part: Batch.attach() says which those are.
        """
        if not is_whole(layer, 0, len(self._layers) - 1):
            raise BadArgumentError(f"layer {layer}: the pool has {len(self._layers)}")
        return places_of(self.geometry, self._layers[layer], pages)

    def alloc(self, count: int) -> PageIds:
        """`count` page ids, uint32; neighbours where there are any. Raises PoolFullError."""
        _check_pages(count)
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
        _check_pages(pages)
        return reclaim.retry(call, self._pool, lambda: pages)

    def evictable(self) -> npt.NDArray[np.bool_]:
        """By page id: published, of this host, pinned by nobody and held by nobody (leases too)."""
        return _core.evictable(self._pool, self._total)

    def want_room(self, pages: int, *, within_share: bool = False) -> None:
        """Tell the other hosts of a shared pool that this one lacks so many pages beyond those it
        has and may take: for two leases, or until it wants 0.

        Each host that has or wants extents has an equal share of those that can be reached. A host
        with more than its share owes room to hosts with less. If a host wants more than its share,
        the other host with the most extents owes it the rest. within_share: ask for as many extents
        as this host has, if that is more, but not beyond its share; for a caller that can also wait
        for its own requests to end.
        """
        _check_pages(pages)
        _core.pages_want(self._pool, pages, within_share)

    def owes_room(self) -> bool:
        """Whether this host is to make room for others: Tiers.give()."""
        return _core.extents_owed(self._pool) > 0

    def takeable(self) -> int:
        """Pages in the extents of a shared pool that this host may take: free ones and those that
        hosts left behind, less what hosts with an earlier turn want."""
        return _core.extents_takeable(self._pool) * self.geometry["slab_slots"]

    def wanted(self) -> PageIds:
        """This host's evictable pages whose eviction empties extents that it owes other hosts;
        empty if it owes none. They get all empty extents but one.
        """
        return _core.pages_wanted(self._pool, self._total)

    def free(self, pages: PageIds) -> None:
        """Gives pages back, all or none.

        Raises BadArgumentError for a page that this process did not get from alloc().
        """
        _core.pages_free(self._pool, np.ascontiguousarray(pages, np.uint32))


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
    the index), used, born, hits, parent (page, or NO_PAGE), part, hotness, flags (HELD: in use;
    LOST: of an object, that the one before it in its text is not there) and priority.
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


class Hotness(OfThisProcess):
    """`pool.hotness`: how often each page was used, by all processes of this host.

    A use: a select chose the page for a head; a fetch or attend read it for a head, or read all
    pages (once for each); a hit holds it. Uses are counted where they are made, so that nothing
    needs to sample accesses as a CHMU does. A count is halved with every epoch in which the page is
    not used and stops at 65535. An epoch ends when each page could have been used four times.
    Counts are advice: two threads that use one page at one time may count one use.

    An attend that is asked for its pages' mass, and with by_mass every attend of this process,
    deals its uses out by the attention that pages got: of a list of k pages, a page that got the
    share s has k * s, rounded.
    """

    _instead = "open the pool by its path there"

    name = "uses"

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool
        self._total = _core.pool_geometry(pool)["page_count"]
        self._enabled = True
        self._by_mass = False

    @property
    def enabled(self) -> bool:
        """Whether this process's uses are counted; they are at first. Others are not affected."""
        return self._enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        _core.hotness_enable(self._pool, on)
        self._enabled = on

    @property
    def by_mass(self) -> bool:
        """Whether attends of this process that it works on itself all count by attention, decodes
        too; at first not."""
        return self._by_mass

    @by_mass.setter
    def by_mass(self, on: bool) -> None:
        _core.hotness_by_mass(self._pool, on)
        self._by_mass = on

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
        _check_pages(count)
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
        if not is_whole(threshold, 1):
            raise BadArgumentError(f"a threshold of {threshold} uses: at least 1")
        counts, _, epoch = _core.hotness_read(self._pool, 0, self._total)
        units = np.flatnonzero(counts >= threshold).astype(np.uint64)
        return HotList(units << np.uint64(COUNTER_WIDTH) | counts[units], epoch)

    def published(self) -> Published:
        """The pages of this host that match() finds, in the order of their ids."""
        return Published(*_core.pool_published(self._pool))


class Records(OfThisProcess):
    """`pool.records`: batched; every call says of each page or record, by a code, how it went."""

    _instead = "open the pool by its path there"

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Bytes of a record, and the CRC of what two pools must agree in to exchange any."""
        return _core.record_shape(self._pool)

    def names(self, hashes: bytes, places: int = 1) -> Names:
        """[keys, places, parts, 16]: under which match() looks for each of the keys, in order."""
        return _core.names(self._pool, hashes, places)

    @cached_property
    def state_pages(self) -> int:
        """Pages of a state checkpoint; 0 where the layout has no states."""
        return _core.state_pages(self._pool)

    def state_names(self, hashes: bytes, pages: int) -> Names:
        """[keys, pages, 16]: of the first pages of a state checkpoint under each of the keys."""
        return _core.state_names(self._pool, hashes, pages)

    def find(self, names: Names) -> tuple[PageIds, Generations]:
        """The published page of each name and its generation; NO_PAGE and 0 where there is none."""
        return _core.find_pages(self._pool, names)

    def here(self, names: Names) -> npt.NDArray[np.bool_]:
        """Which of the names have a published page."""
        return np.not_equal(self.find(names)[0], NO_PAGE)

    def read(self, pages: PageIds, generations: Generations, out: RecordBytes) -> Codes:
        """Fill rows of `out` with published pages, verified: 0, STALE or CORRUPT of each."""
        return _core.records_read(self._pool, pages, generations, out)

    def write(self, records: RecordBytes, parents: Names | None = None) -> Codes:
        """Publish records, all or none when pages are short (PoolFullError): 0, PRESENT or CORRUPT.

        parents: the name of the page before each, zeros for none; None: not known.
        """
        return _core.records_write(self._pool, records, parents)

    def forget(self, pages: PageIds, generations: Generations, only_unheld: bool) -> Codes:
        """Take published pages out of the index: code 0 where the page is free now."""
        return _core.forget_pages(self._pool, pages, generations, only_unheld)

    def begin(self) -> _io_hooks.Transfer | None:
        """A transfer of records begins, for whoever has subscribed to the io hooks."""
        return _io_hooks.begin(self._pool)

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of the whole pool that this process has read and written over an emulated link."""
        return _io_hooks.moved_bytes(self._pool)
