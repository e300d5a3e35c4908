"""The local tier copies hot units of the pool to this process's own memory.

A unit is one layer of one page, all kv heads. While a copy is there, fetch and attend of this
process read it instead of the pool; select scores in the pool. The core counts how often each unit
is read of chosen pages (one for each kv head), and halves all counts from time to time; step()
decides by these counts. docs/explanation/local-tier.md tells the whole of it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core, _io_hooks
from cxlkv.arrays import Doubles, Generations, Units
from cxlkv.errors import BadArgumentError, ClosedError
from cxlkv.layout import parse_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.ndp.engine import Selection
from cxlkv.ndp.simd import picked_pages
from cxlkv.pool import Pool
from cxlkv.sequence import Batch

HIGH_SHARE, LOW_SHARE = 63 / 64, 15 / 16
"""Watermarks, in slots: when units were refused for want of room and more than HIGH_SHARE are
taken, the coldest go until LOW_SHARE are. While none is refused, every slot is used."""
BOUNCES_MAX = 7


@dataclass(frozen=True)
class Moved:
    """What one step did: the units that have a copy since, those that lost theirs, how many were
    refused for which reason (a name of _core.LOCAL_CODES), and the bytes that were copied."""

    promoted: Units
    demoted: Units
    refused: dict[str, int]
    copied_bytes: int


class LocalTier(Closing):
    """Slots for copies in this process; one tier for each pool and process.

    size is taken at once; MemoryShortError when it is not there. The tier ends with this object, at
    the latest. A forked child starts without a
    tier: there, and after close(), methods raise ClosedError. Any thread may call any method; one
    thread calls step().
    """

    def __init__(self, pool: Pool, size: str | int):
        if pool.layout.object_bytes is not None:
            raise BadArgumentError("a local tier is of K and V: this pool stores objects")
        self._handle = pool._handle
        self._heads = max(group.kv_heads for group in pool.layout.groups)
        self._closed = False
        made: list[int] = []
        try:
            _core.local_make(self._pool, parse_bytes(size), made)
            # The tier ends with this object: a caller that was interrupted cannot close it.
            _owners[self._pool] = id(self)
            self._closer = weakref.finalize(self, _end, self._pool, id(self))
            self._closer.atexit = False  # the process's memory is freed anyway
            lifetime.watch(self)
        except BaseException:
            if made == [0]:
                _core.local_destroy(self._pool)
            raise
        geometry = _core.pool_geometry(self._pool)
        self._unit_count = geometry["page_count"] * geometry["record_layers"]
        # How often a unit was taken out again, lately.
        self._bounces = np.zeros(self._unit_count, np.uint8)
        self._epoch = 0
        self._no_room = 0
        self._capacity = 4096

    def promote(self, units: npt.ArrayLike, generations: Generations | None = None) -> Moved:
        """Copy units into free slots, as far as there are some; each is verified by its CRCs.

        generations: only if the page still has that one. Nothing is raised for a unit that cannot
        be: `refused` counts why. Raises PoisonError when the pool's memory fails.
        """
        wanted = np.ascontiguousarray(units, np.int64).ravel()
        if generations is not None and len(generations) != len(wanted):
            raise BadArgumentError(f"{len(generations)} generations for {len(wanted)} units")
        transfer = _io_hooks.begin(self._pool)
        done, codes = _core.local_promote(self._pool, wanted, generations)
        number, times = np.unique(codes[codes != 0], return_counts=True)
        refused = {
            _core.LOCAL_CODES[n]: int(t)
            for n, t in zip(number.tolist(), times.tolist(), strict=True)
        }
        unit_bytes = _core.local_stats(self._pool)["unit_bytes"]
        size = done * unit_bytes
        if transfer:
            transfer.end("promote", int((codes == 0).sum()) * unit_bytes)
        return Moved(wanted[codes == 0], np.empty(0, np.int64), refused, size)

    def demote(self, units: npt.ArrayLike) -> int:
        """Drop copies; returns how many there were. Waits for the reads that are under way."""
        return _core.local_demote(self._pool, np.ascontiguousarray(units, np.int64).ravel())

    def hotness(self) -> tuple[Units, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """(units, counts, resident) of all units that were read lately, or have a copy."""
        units, counts, resident = _core.local_hotness(self._pool, self._capacity)
        self._capacity = max(self._capacity, len(units) + len(units) // 8)
        return units, counts, resident

    def step(self, limit_bytes: int | None = None) -> Moved:
        """One decision: take out what is cold, copy in what is hotter, at most limit_bytes of it.

        The rule for each move: a unit that was read `a` times takes

            a free slot if                     a     > kv_heads * (1 + bounces),
            that of one read `b` times if      a - b > (kv_heads + sqrt(a + b)) * (1 + bounces),

        the hottest one first, and the coldest one's slot. The copy itself reads the unit once,
        which is kv_heads reads: a smaller lead does not earn that back. sqrt(a + b) is the
        standard deviation of the difference of two counts: nobody is displaced by chance. bounces
        is how often the newcomer was taken out lately (it halves with the counts): a unit that
        comes and goes must be ever hotter. So two units of equal hotness do not take turns.
        """
        units, counts, resident = self.hotness()
        stats = _core.local_stats(self._pool)
        if stats["epoch"] != self._epoch:
            self._bounces >>= np.uint8(min(stats["epoch"] - self._epoch, 7))
            self._epoch = stats["epoch"]
        goal = stats["slots_total"]
        pressed = stats["refused_no_room"] > self._no_room
        if pressed and stats["slots_total"] - stats["slots_free"] > HIGH_SHARE * goal:
            goal = int(LOW_SHARE * goal)
        most = len(units) if limit_bytes is None else limit_bytes // stats["unit_bytes"]
        chosen = choose(
            counts.astype(np.float64),
            resident,
            self._bounces[units],
            spare=goal - stats["slots_held"] - stats["slots_reserved"],
            most=most,
            heads=self._heads,
        )
        out, into = units[chosen[0]], units[chosen[1]]
        if len(out):
            self.demote(out)
            self._bounces[out] = np.minimum(self._bounces[out] + 1, BOUNCES_MAX)
        moved = self.promote(into)
        self._no_room = _core.local_stats(self._pool)["refused_no_room"]
        return Moved(moved.promoted, out, moved.refused, moved.copied_bytes)

    def stats(self) -> dict[str, float]:
        """The core's counts, and share_local: of the reads of chosen pages, those of copies.

        slots_free + slots_held + slots_reserved = slots_total. reads_local and reads_far count one
        for each unit and kv head.
        """
        found: dict[str, float] = dict(_core.local_stats(self._pool))
        reads = found["reads_local"] + found["reads_far"]
        found["share_local"] = found["reads_local"] / reads if reads else 0.0
        return found

    def close(self) -> None:
        """Give the memory back; a second time does nothing. The pool's close() does it, too."""
        if not self._closed:  # the pool may have another one by now
            _end(self._handle, id(self))
        self._closed = True
        self._closer.detach()

    def reset_after_fork(self) -> None:
        """The core has left the parent's there already."""
        self._closed = True
        self._closer.detach()

    @property
    def _pool(self) -> _core.Handle:
        if self._closed:
            raise ClosedError(
                "there is no local tier: this one was closed, or is the parent's. A child starts "
                "without one: make it"
            )
        return self._handle


_owners: WeakKeyDictionary[_core.Handle, int] = WeakKeyDictionary()
"""The LocalTier that made a pool's tier last: no other one ends it."""


def _end(pool: _core.Handle, owner: int) -> None:
    if _owners.get(pool) == owner:
        _core.local_destroy(pool)


def choose(
    counts: Doubles,
    resident: npt.NDArray[np.bool_],
    bounces: npt.NDArray[np.uint8],
    *,
    spare: int,
    most: int,
    heads: int,
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The choice of LocalTier.step alone: indices of units to take out, and to copy in.

    spare: free slots to be used; below 0, so many of the coldest go first. most: units to copy.
    """
    inside, outside = np.flatnonzero(resident), np.flatnonzero(~resident)
    most = min(most, len(outside), len(inside) + max(spare, 0))
    coldest = _lowest(counts, inside, most + max(-spare, 0))
    over, coldest = np.split(coldest, [min(max(-spare, 0), len(coldest))])
    hottest = _lowest(-counts, outside, most)
    # A newcomer each for the free slots, which hold nothing, then for the coldest ones.
    held = np.concatenate([np.zeros(max(spare, 0)), counts[coldest]])
    pairs = min(len(hottest), len(held))
    a, b = counts[hottest[:pairs]], held[:pairs]
    chance = np.where(np.arange(pairs) < spare, 0, np.sqrt(a + b))
    wanted = (heads + chance) * (1.0 + bounces[hottest[:pairs]])
    goes = a - b > wanted
    displaced = coldest[: max(pairs - max(spare, 0), 0)][goes[max(spare, 0) :]]
    return np.concatenate([over, displaced]), hottest[:pairs][goes]


def _lowest(values: Doubles, among: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
    """The `count` indices among those with the lowest values, ascending; no full sort."""
    if count <= 0:
        return among[:0]
    if count < len(among):
        among = among[np.argpartition(values[among], count - 1)[:count]]
    return among[np.argsort(values[among], kind="stable")]


def units_of(batch: Batch, layer: int, picked: Selection) -> Units:
    """The units that a selection names, each once, ascending; without those that cannot be
    promoted: padding, open tails, pages that are not complete in all layers or behind a window."""
    rows = picked_pages(picked, batch._layout.of_layer(layer))
    starts = np.ascontiguousarray(picked.starts, np.int32)
    if starts.shape != (len(batch) + 1,):
        raise BadArgumentError(
            f"the selection is of {len(starts) - 1} sequences, the batch has {len(batch)}"
        )
    found = np.unique(_core.batch_units(batch._handle, layer, rows, starts))
    return found[np.searchsorted(found, 0) :]
