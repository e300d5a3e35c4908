"""What operators of a pool do: check and repair, fence hosts, scrub, pin, prioritize, audit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.machine import prefault
from cxlkv.machine.coherence import HOSTS_MAX
from cxlkv.machine.hosts import Host, hosts_of
from cxlkv.machine.huge_pages import check_huge, huge_bytes, look, mapped, require
from cxlkv.machine.lifetime import OfThisProcess
from cxlkv.machine.placement import CHECK_PAGES, warn_of_moves
from cxlkv.ndp import audit
from cxlkv.numbers import is_whole
from cxlkv.pages import PRIORITY_MAX
from cxlkv.stats import Overview, of_pool


class CheckReport(TypedDict):
    """What pool.admin.check() found, and repaired; the first 64 KiB of texts."""

    clean: bool
    problem_count: int
    problems: list[str]
    repairs: list[str]


class Admin(OfThisProcess):
    """`pool.admin`: looks into a pool, and changes what no request does."""

    _instead = "open the pool by its path there"

    def __init__(
        self,
        handle: _core.Handle,
        path: str | None,
        hashes: Callable[[Iterable[str | bytes], bool], bytes],
        before_close: Callable[[Callable[[], object]], None],
    ) -> None:
        self._handle = handle
        self._path = path
        self._hashes = hashes
        self._before_close = before_close

    def overview(self) -> Overview:
        """Pages, the processes that have the pool open, and what each and all have counted."""
        return of_pool(self._handle, self._path)

    @property
    def audit(self) -> float:
        """Share of this process's selects that are audited: every n-th, 0 (none) at first.

        An audited select also runs the exact method at the same budget on the same queries and
        attends once to the chosen pages and once to all: so its recall and the attention mass that
        it kept are measured, for overview() and the metrics. It reads about twice the K and all of
        the V of its sequences; what it reads is counted as read.
        """
        return audit.share(self._handle)

    @audit.setter
    def audit(self, share: float) -> None:
        audit.set_share(self._handle, share)

    def remove_objects(self, keys: Iterable[str | bytes]) -> npt.NDArray[np.int32]:
        """Take objects out of a pool of objects, but those that somebody reads or has a lease of,
        which forget() would not spare: int32 [n], 0 for each that is gone, objects.ABSENT or HELD.
        Of another host's object its readers there are not seen."""
        return _core.objects_remove(self._handle, self._hashes(keys, True))

    def remove_all(self) -> int:
        """remove_objects() of all; returns how many are gone."""
        return _core.objects_remove_all(self._handle)

    def check(self, deep: bool = False, repair: bool = False) -> CheckReport:
        """Recount what must hold; deep=True also reads every piece against its CRC.

        repair=True first mends what this host owns: a page whose descriptor is damaged is found
        again under its key if its header and all its CRCs are right, else it is free, with a
        generation that no handle has; with deep=True a published page whose bytes were changed is
        not found any more. A page that somebody holds is never given away. `repairs` says what.
        Warns (PlacementWarning) when pages are not on the NUMA nodes that the pool is bound to.
        """
        count, lines = _core.pool_check(self._handle, deep, repair)
        pages = 0 if deep else CHECK_PAGES
        warn_of_moves(self._handle, self._path or "anonymous:", pages_max=pages)
        mended = [line for line in lines if line.startswith("repaired: ")]
        problems = [line for line in lines if not line.startswith("repaired: ")]
        return {
            "clean": count == 0,
            "problem_count": count,
            "problems": problems,
            "repairs": [line.removeprefix("repaired: ") for line in mended],
        }

    def hosts(self) -> list[Host]:
        """The hosts of a shared pool, as this one sees them; else raises BadArgumentError."""
        return hosts_of(self._handle)

    def fence(self, host: int, *, confirmed_off: bool = False) -> None:
        """Declare a host dead that has been silent for a lease (waits for that long).

        Its epoch ends: nothing that it claims from now on counts, until it comes back with a new
        one. What it published stays readable, its other pages are nobody's to write. With
        confirmed_off=True, others may take all that it owned: say so only when its machine
        certainly does not run, since stores of a running one would land in others' pages. Raises
        BusyError when it beats, BadArgumentError when it is not there.
        """
        if not is_whole(host, 0, HOSTS_MAX - 1):
            raise BadArgumentError(f"host {host}: outside 0 to {HOSTS_MAX - 1}")
        _core.pool_fence(self._handle, host, confirmed_off)

    def scrub(self, keys: Iterable[str | bytes], *, strict: bool = True) -> _core.Scrubbed:
        """forget(), and overwrite with zeros what the pool has of these pages: K and V, sketches,
        digests, checksums, header.

        Who holds a page, or has a hit on it, keeps it as it is; it is overwritten when the last one
        lets go, dies, or its lease ends. Pages that another host has written are its own to scrub.
        Copies in a local tier, a cold file or a process's memory are not touched
        (docs/how-to/tenants.md).
        strict: as in publish().
        """
        return _core.scrub(self._handle, self._hashes(keys, strict))

    def pin(self, keys: Iterable[str | bytes], *, strict: bool = True) -> int:
        """Mark published pages of `keys`, so that no eviction chooses them; returns how many.

        A mark, not a count: one unpin() takes it off. It is of this host, for its own pages (those
        of other hosts are theirs to pin), seen by all its processes, and lost when the last one
        closes the pool, or when the page is forgotten.
        """
        return _core.pin(self._handle, self._hashes(keys, strict), True)

    def unpin(self, keys: Iterable[str | bytes], *, strict: bool = True) -> int:
        """Take the mark of pin() off published pages of `keys`; returns how many there are."""
        return _core.pin(self._handle, self._hashes(keys, strict), False)

    def prioritize(
        self,
        keys: Iterable[str | bytes],
        priority: int,
        *,
        lowers: bool = False,
        strict: bool = True,
    ) -> int:
        """Let published pages of `keys` make room after all of lower priority; returns how many.

        0, which every page has at first, to 100. A page keeps the higher of its own and this one,
        so that a prefix which texts share has the highest of theirs; lowers=True: it gets this one.
        It ends when the page is forgotten or evicted. Of this host's published pages at most half
        count as of more than 0, those that were used last. Like a pin, it is of this host, for its
        own pages. Raises BadArgumentError.
        """
        if not is_whole(priority, 0, PRIORITY_MAX):
            raise BadArgumentError(f"priority {priority}: 0 to {PRIORITY_MAX}")
        return _core.prioritize(self._handle, self._hashes(keys, strict), priority, lowers)

    def prefault(self, *, background: bool = False, huge: str = "try") -> None:
        """Bring all of the pool's memory into place now: at its first use each page of it is zeroed
        and mapped, which takes longer than a copy. A reader of the pool sees no change.

        background=True: in a thread, which ends with the pool at the latest (not with
        huge="require"). huge: "try" makes huge pages of a file in memory (/dev/shm) and of
        anonymous memory where the kernel has free ones (Linux 6.1 or later, whatever its settings;
        a GiB takes about a second). Scans are faster with them. "require" raises MemoryShortError
        unless all are huge; "never" makes none. Interleaved pages, and those at the border between
        the parts of two hosts, stay small. Raises SystemCallError on kernels before Linux 5.14.
        """
        check_huge(huge)
        if background and huge != "require":
            self._before_close(prefault.Background(self._handle, huge != "never").end)
        else:
            prefault.run(self._handle, huge != "never")
        if huge == "require":
            require(self._path or "anonymous memory", *_core.pool_memory(self._handle))

    def huge_bytes(self) -> int:
        """Bytes that the kernel keeps in huge pages, of memory that this process has touched."""
        return huge_bytes(mapped(*_core.pool_memory(self._handle)))

    def huge_looked_at(self) -> tuple[int, int]:
        """(bytes in huge pages, bytes looked at), after touching a page of each 2 MiB, of 512 of
        them at most; (0, 0) where the kernel does not say."""
        return look(self._handle)
