"""Learns how soon pages are found again, and what holding one is worth.

For pages of a kind (found how often so far, how far apart) we count at which age they were found
again, and how many reached which age without: a life table (Kaplan and Meier 1958), whose hazard
is the chance to be found at an age when it was not before. What a page at age a is worth is

    max over b > a of  (hits expected between a and b) / (time that it is held for them),

since one would hold it until b at best: an index of Gittins (1979), with hits for reward and room
for cost. Caches that rank by learned hit density began with LHD (Beckmann et al., NSDI'18). So of a
loop larger than the cache a part is kept, a scan passes, and a user's pause between two turns of a
conversation is waited for. There is no constant of any workload in it.

Pages that went are remembered, by name, for some time: their ages count as well, and they are no
strangers when they come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Doubles, UInt32s

if TYPE_CHECKING:
    from cxlkv.tiers.policy import Published

Kinds = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]
Records = npt.NDArray[np.void]
Integers = npt.NDArray[np.int64]

BINS = 129
"""Bins of ages: four an octave, up to 2**32, which rounds up to a bin of its own."""
EDGES: Doubles = 2.0 ** (np.arange(BINS + 1) // 4) * (1 + np.arange(BINS + 1) % 4 / 4)
GAPS = 32
"""Kinds of time between finds, an octave each."""
KINDS = 2 + 2 * GAPS
GROUPS = (slice(0, 1), slice(1, 2 + GAPS), slice(2 + GAPS, KINDS))
"""Kinds that are alike: never found; found up to 7 times; found more often."""
KIND_SHARE, GROUP_WEIGHT = 1 / 8, 30.0
"""Lives after which a kind's own table counts for half, as a share of the pages (of more pages more
lives are seen in the same time), and a group's, in lives: before, that of the larger group does."""
GHOSTS_PER_PAGE = 8
PAGES_KEPT = 16
"""What was counted weighs 1/e when as many pages as there are were asked for so many times."""


class Ledger:
    """What is remembered of each page by its id: an array for each field, rows as records."""

    def __init__(self, record: npt.DTypeLike):
        self.record = np.dtype(record)
        self.columns: dict[str, UInt32s] = {
            name: np.zeros(64, self.record[name]) for name in self.record.names or ()
        }
        self.there = np.zeros(64, np.bool_)

    def __getitem__(self, name: str) -> UInt32s:
        """A field of all pages, of the type that the record says."""
        return self.columns[name]

    def read(self, ids: UInt32s) -> Records:
        """Their records; zeros for a page that was not there."""
        made = np.zeros(len(ids), self.record)
        for name, column in self.columns.items():
            made[name] = np.where(self.there[ids], column[ids], column.dtype.type(0))
        return made

    def write(self, ids: UInt32s, records: Records) -> None:
        for name, column in self.columns.items():
            column[ids] = records[name]
        self.there[ids] = True

    def changes(self, pages: Published) -> tuple[npt.NDArray[np.intp], Records]:
        """Rows of `pages` that are new or were found since they were written here, and the records
        of those that are not there any more, or whose id another has: they are forgotten."""
        ids = pages.pages
        self._grow(int(ids.max()) + 1 if len(ids) else 0)
        reborn = self["born"][ids] != pages.born
        changed = reborn | (self["used"][ids] != pages.used) | ~self.there[ids]
        gone = self.there.copy()
        gone[ids[~reborn]] = False
        left = np.flatnonzero(gone).astype(np.uint32)
        records = self.read(left)
        self.there[left] = False
        return np.flatnonzero(changed), records

    def _grow(self, size: int) -> None:
        more = size + size // 2 - len(self.there)
        if size > len(self.there):
            self.there = np.append(self.there, np.zeros(more, np.bool_))
            for name, column in self.columns.items():
                self.columns[name] = np.append(column, np.zeros(more, column.dtype))


def bin_of(ages: UInt32s) -> npt.NDArray[np.int32]:
    """The bin of each age: the exponent of its float32, and two bits of the mantissa."""
    bits = np.maximum(ages, 1).astype(np.float32).view(np.int32)
    return (bits >> 21) - np.int32(127 << 2)


def kind_of(hits: UInt32s, span: UInt32s) -> Kinds:
    """Kind of a page by how often it was found, and the mean time between: `span` is that of all
    finds."""
    gap = np.maximum(span // np.maximum(hits, 1), 1).astype(np.float32).view(np.int32)
    octaves = np.minimum((gap >> 23) - 127, GAPS - 1)
    often = 2 + octaves + np.where(hits >= 8, GAPS, 0)
    return np.where(hits < 2, hits, often).astype(np.uint8)


class Reuse:
    """What was seen of pages so far. Not for several threads at once."""

    RECORD = np.dtype(
        [
            ("kind", np.uint8),
            ("name", np.uint64),
            ("born", np.uint32),
            ("used", np.uint32),
            ("hits", np.uint32),
            ("first", np.uint32),  # when it was published for the first time
            ("before", np.uint32),  # how often it was found before it was published last
        ]
    )

    def __init__(self) -> None:
        self._ledger = Ledger(self.RECORD)
        self._ghosts = np.zeros(1024, self.RECORD)
        self._haunted = np.zeros(1024, np.bool_)
        """Which of the ghosts are any."""
        self._found = np.zeros((KINDS, BINS))
        """Lives that ended by a find, by kind and age."""
        self._lost = np.zeros((KINDS, BINS))
        """Lives whose end will not be seen."""
        self._rates = np.zeros((KINDS, BINS), np.float32)
        self._clock = self._learned = 0
        self._knows = False

    def rates(self, pages: Published) -> npt.NDArray[np.float32]:
        """Hits a page and unit of the clock, as far as holding each is worth it."""
        self._look(pages)
        passed = (pages.clock - self._learned) & 0xFFFFFFFF
        if not self._knows or passed >= max(1024, len(pages.pages) // 8):
            self._learn(pages, passed)
        ages = np.uint32(pages.clock & 0xFFFFFFFF) - pages.used
        kinds = self._ledger["kind"][pages.pages]
        return self._rates.ravel().take(kinds * np.int32(BINS) + bin_of(ages))

    def _look(self, pages: Published) -> None:
        """What happened to each page since the last time."""
        changed, gone = self._ledger.changes(pages)
        self._remember(gone, len(pages.pages))
        self._clock = pages.clock
        if not len(changed):
            return
        ids = pages.pages[changed]
        before, new = self._ledger.read(ids), ~self._ledger.there[ids]
        born, used, hits = (a[changed] for a in (pages.born, pages.used, pages.hits))
        before["first"][new] = before["used"][new] = born[new]
        self._return(before, np.flatnonzero(new), pages.names[changed], born)
        after = before.copy()
        after["name"], after["born"], after["used"] = pages.names[changed], born, used
        after["hits"] = hits
        after["kind"] = kind_of(after["before"] + hits, used - after["first"])
        self._ledger.write(ids, after)
        # Found several times since: as if after equal times, first as the kind that they were.
        found = hits > before["hits"]
        before, after = before[found], after[found]
        times = after["hits"] - before["hits"]
        ages = bin_of((after["used"] - before["used"]) // times)
        count(self._found, before["kind"], ages)
        count(self._found, after["kind"], ages, times - 1.0)

    def _remember(self, leaving: Records, pages: int) -> None:
        """Each in the place of its name. Of two in one place the later row stays."""
        wanted = GHOSTS_PER_PAGE * (pages + len(leaving))
        if wanted > 2 * len(self._ghosts):
            leaving = np.concatenate([self._ghosts[self._haunted], leaving])
            self._ghosts = np.zeros(1 << wanted.bit_length(), self.RECORD)
            self._haunted = np.zeros(len(self._ghosts), np.bool_)
        leaving["before"] += leaving["hits"]
        leaving["hits"] = 0
        places = leaving["name"] & np.uint64(len(self._ghosts) - 1)
        _, last = np.unique(places[::-1], return_index=True)
        stays = np.zeros(len(leaving), np.bool_)
        stays[len(leaving) - 1 - last] = True
        self._lose(leaving[~stays])
        places = places[stays]
        self._lose(self._ghosts[places][self._haunted[places]])
        self._ghosts[places] = leaving[stays]
        self._haunted[places] = True

    def _lose(self, ends: Records) -> None:
        count(self._lost, ends["kind"], bin_of(np.uint32(self._clock & 0xFFFFFFFF) - ends["used"]))

    def _return(
        self, records: Records, new: Integers, names: npt.NDArray[np.uint64], born: UInt32s
    ) -> None:
        """Count remembered pages as asked for when they were published again."""
        places = names[new] & np.uint64(len(self._ghosts) - 1)
        known = self._haunted[places] & (self._ghosts["name"][places] == names[new])
        new, places = new[known], places[known]
        ghosts = self._ghosts[places]
        self._haunted[places] = False
        count(self._found, ghosts["kind"], bin_of(born[new] - ghosts["used"]))
        records["first"][new] = ghosts["first"]
        records["before"][new] = ghosts["before"] + 1
        records["kind"][new] = kind_of(ghosts["before"] + 1, born[new] - ghosts["first"])

    def _learn(self, pages: Published, passed: int) -> None:
        """The rates of each kind, from its life table and those of its likes."""
        kept = np.exp(-passed / (PAGES_KEPT * max(1024, len(pages.pages))))
        self._found *= kept
        self._lost *= kept
        ended = self._lost.copy()
        ghosts = self._ghosts[self._haunted]
        now = np.uint32(pages.clock & 0xFFFFFFFF)
        count(ended, self._ledger["kind"][pages.pages], bin_of(now - pages.used))
        count(ended, ghosts["kind"], bin_of(now - ghosts["used"]))
        found, ended = blended(self._found, ended, KIND_SHARE * len(pages.pages))
        self._rates = indexes(found, ended).astype(np.float32)
        self._learned, self._knows = pages.clock, True


def count(
    into: Doubles,
    kinds: Kinds,
    bins: npt.NDArray[np.int32],
    times: Doubles | None = None,
) -> None:
    """Adds `times`, or 1 each, to [kind, bin]."""
    into += np.bincount(kinds * np.int32(BINS) + bins, times, KINDS * BINS).reshape(into.shape)


def blended(found: Doubles, ended: Doubles, kind_weight: float) -> tuple[Doubles, Doubles]:
    """Each kind's counts, with some of its group's, which has some of all: sums of weights."""
    everything = found.sum(0), ended.sum(0)
    made = np.empty_like(found), np.empty_like(ended)
    for group in GROUPS:
        of_group = tuple(
            table[group].sum(0) + GROUP_WEIGHT * share
            for table, share in zip((found, ended), shares(*everything), strict=True)
        )
        for out, table, share in zip(made, (found, ended), shares(*of_group), strict=True):
            out[group] = table[group] + kind_weight * share
    return made


def shares(found: Doubles, ended: Doubles) -> tuple[Doubles, Doubles]:
    lives = max(float(found.sum() + ended.sum()), 1.0)
    return found / lives, ended / lives


def indexes(found: Doubles, ended: Doubles) -> Doubles:
    """[kinds, BINS]: what a page that reached each age is worth, by the formula above."""
    at_risk = np.cumsum((found + ended)[:, ::-1], axis=1)[:, ::-1]
    counted = np.where(at_risk > 0.5, at_risk, 0).sum(1, keepdims=True)
    usual = (found.sum(1, keepdims=True) + 0.5) / (counted + 1)
    # Ends are in the middle of their bin; one life more that had the kind's usual hazard: an age
    # that nobody reached is neither worthless nor sure.
    hazard = (found + usual) / (np.maximum(at_risk - ended / 2, found) + 1)
    hazard = np.minimum(hazard, 1.0)
    held = np.diff(EDGES) * (1 - hazard / 2)
    made: Doubles = np.empty_like(hazard)
    for first in range(BINS):
        reaches = np.ones_like(hazard[:, first:])
        np.cumprod(1 - hazard[:, first:-1], axis=1, out=reaches[:, 1:])
        hits = np.cumsum(reaches * hazard[:, first:], axis=1)
        time = np.cumsum(reaches * held[:, first:], axis=1)
        made[:, first] = (hits / time).max(1)
    return made
