"""Whole pages as records, by name: what tiers, transports and stores take out of a pool and put in.

A name is what the index has of a page, 16 bytes; a record is a page with all that belongs to it, as
it lies outside of the pool (docs/memory-layout.md).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from cxlkv import _core, io_hooks
from cxlkv.pages import NO_PAGE, PageIds

Codes = _core.Codes
Names = _core.Names
RecordBytes = _core.Records
crc32c = _core.crc32c
names_of = _core.names_of
CORRUPT, STALE, PRESENT = _core.E_CORRUPT, _core.E_STALE, _core.RECORD_PRESENT
"""Codes of single records: wrong bytes; the page is another by now; the name is there already."""
RECORD_HEADER, RECORD_MAGIC = _core.RECORD_HEADER, _core.RECORD_MAGIC
PACKED_HEADER, PACKED_MAGIC = _core.PACKED_HEADER, _core.PACKED_MAGIC
PACKED_VERSION = _core.PACKED_VERSION
"""The line at the front of a page's record in a pool, and of a record outside of one."""

Generations = npt.NDArray[np.uint64]


class Records:
    """`pool.records`: batched; every call says of each page or record, by a code, how it went."""

    def __init__(self, pool: _core.Handle) -> None:
        self._pool = pool

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Bytes of a record, and the CRC of what two pools must agree in to exchange any."""
        return _core.record_shape(self._pool)

    def names(self, hashes: bytes, places: int = 1) -> Names:
        """[keys, places, parts, 16]: under which match() looks for each of the keys, in order."""
        return _core.names(self._pool, hashes, places)

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

    def begin(self) -> io_hooks.Transfer | None:
        """A transfer of records begins, for whoever has subscribed to the io hooks."""
        return io_hooks.begin(self._pool)
