"""Policies choose which published pages go when there is no room. Nothing is moved here.

Each gives every page a score, and the lowest go first:

    lru       0: of equal scores the one that was used longest ago goes
    s3fifo    its turn in two queues: what comes once passes quickly (Yang et al., SOSP'23)
    mass      how much attention it got: decayed counts of its uses, those of attends dealt out by
              attention (H2O, arXiv 2306.14048)
    adaptive  hits per page held and unit of time, learned from the ages at which pages come back
    cost      the same times the seconds that a hit saves

Those of lower priority go before all of higher (admin.prioritize()), whatever their scores. At most
half of the pages count as of higher priority than 0: of more, those that were used longest ago go
by their scores.

A page goes only after all that continue it: without it they could not be found. Those that cannot
be found already go before all of their priority. Pages that are held, pinned or leased never go. A
choice is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Counts, Floats, UInt32s
from cxlkv.errors import BadArgumentError
from cxlkv.pages import choose_pages
from cxlkv.tiers.reuse import Ledger, Records, Reuse

NONE = 0xFFFFFFFF
"""A page's parent when it is the first of its chain."""
RAISED_SHARE = 0.5
"""Share of the pages that may count as of higher priority than 0: others need pages, too."""


@dataclass(frozen=True)
class Published:
    """The published pages at one moment, a row each. Times are of a clock that counts pages asked
    for; it may wrap at 2**32."""

    clock: int
    pages: Counts
    """Ids in the pool."""
    names: npt.NDArray[np.uint64]
    """64 bits of the hash that a page is found under: the same when it comes back."""
    used: Counts
    """When it was found last, or published."""
    born: Counts
    hits: Counts
    """How often it was found since."""
    parents: Counts
    """Row of the page before it in its chain, or NONE; PARENT_LOST: one that is not there, so that
    nobody finds this one."""
    kept: npt.NDArray[np.bool_]
    """Held, pinned or leased: it stays."""
    hotness: Counts
    """Decayed count of its uses by select, fetch and attend: pool.hotness."""
    saved_s: Floats | None = None
    """Seconds that a hit saves; None: of all pages the same."""
    priorities: npt.NDArray[np.uint8] | None = None
    """Set by admin.prioritize(); None: all 0."""

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def ages(self) -> Counts:
        """Since each was used."""
        return np.uint32(self.clock & NONE) - self.used

    @property
    def ranks(self) -> npt.NDArray[np.uint8]:
        """Their priorities, but 0 for those that are too many: used longest ago, and of a chain the
        last pages first, as a page stays while one that continues it does."""
        same = np.zeros(len(self), np.uint8)
        if self.priorities is None:
            return same
        raised = self.priorities > 0
        excess = int(np.count_nonzero(raised)) - int(RAISED_SHARE * len(self))
        if excess <= 0:
            return self.priorities
        scores = np.zeros(len(self), np.float32)
        parents = np.where(raised, self.parents, np.uint32(NONE))
        ranks = self.priorities.copy()
        ranks[choose_pages(same, scores, self.ages, parents, ~raised, excess)] = 0
        return ranks


class Policy(Protocol):
    """Is given all published pages at each call, and may remember them by page and name."""

    name: str

    def scores(self, pages: Published) -> Floats:
        """float32 [pages]: what each is worth; the lowest go first."""


def choose(policy: Policy, pages: Published, wanted: int) -> UInt32s:
    """uint32 [wanted]: rows of the pages that go, in order; empty when fewer than that may go."""
    if wanted <= 0 or wanted > len(pages):
        return np.empty(0, np.uint32)
    scores = policy.scores(pages)
    chosen = choose_pages(pages.ranks, scores, pages.ages, pages.parents, pages.kept, wanted)
    return chosen if len(chosen) == wanted else chosen[:0]


class Lru:
    """Least recently used."""

    name = "lru"

    def scores(self, pages: Published) -> Floats:
        return np.zeros(len(pages), np.float32)


class Mass:
    """Least attention first, decayed as hotness is: heavy hitters stay."""

    name = "mass"

    def scores(self, pages: Published) -> Floats:
        return pages.hotness.astype(np.float32)


class Adaptive:
    """Fewest hits expected for the room that a page takes (cxlkv/tiers/reuse.py has how)."""

    name = "adaptive"

    def __init__(self) -> None:
        self._reuse = Reuse()

    def scores(self, pages: Published) -> Floats:
        return self._reuse.rates(pages)


class Cost(Adaptive):
    """Fewest seconds saved for the room that a page takes."""

    name = "cost"

    def scores(self, pages: Published) -> Floats:
        rates = super().scores(pages)
        return rates if pages.saved_s is None else rates * pages.saved_s


class S3Fifo:
    """S3-FIFO by batches: a tenth of the pages are for those that were published once.

    small: in the order of arrival; a page that was found twice moves to main when its turn comes,
    the others go, and their names are remembered for as many pages as there are.
    main: in the order of arrival; each find, up to 3, is another turn.
    """

    name = "s3fifo"
    SMALL_SHARE = 0.1
    RECORD = np.dtype(
        [
            ("main", np.bool_),
            ("visits", np.uint8),
            ("name", np.uint64),
            ("born", np.uint32),
            ("used", np.uint32),
            ("hits", np.uint32),
            ("turn", np.int64),
        ]
    )

    def __init__(self) -> None:
        self._ledger = Ledger(self.RECORD)
        self._turns = 0
        self._ghosts: dict[int, None] = {}

    def scores(self, pages: Published) -> Floats:
        self._look(pages)
        ids = pages.pages
        main, turn = self._ledger["main"][ids], self._ledger["turn"][ids]
        small = np.flatnonzero(~main)
        excess = len(small) - int(self.SMALL_SHARE * len(pages))
        due = small[:0]
        if excess > 0:
            due = small[np.argpartition(turn[small], excess - 1)[:excess]]
        due = due[np.argsort(turn[due])]
        moves = self._ledger["visits"][ids[due]] > 1
        goes, moved = due[~moves], due[moves]
        self._enter_main(ids[moved])
        main, turn = self._ledger["main"][ids], self._ledger["turn"][ids]
        # Small ones that are due, main by its turns, then the rest of small.
        lap = np.where(main, self._ledger["visits"][ids] + np.int64(1), 5)
        lap[goes] = 0
        turn = turn - (turn.min() if len(turn) else 0)
        scores: Floats = (lap * (turn.max(initial=0) + 1) + turn).astype(np.float32)
        return scores

    def _enter_main(self, ids: Counts) -> None:
        self._ledger["main"][ids] = True
        self._ledger["visits"][ids] = 0
        self._ledger["turn"][ids] = self._turns + np.arange(len(ids))
        self._turns += len(ids)

    def _turn_main(self, gone: Records, ids: Counts) -> None:
        """What stayed though its turn came before that of the gone had one visit less from then on,
        and is behind the others: as often as the hand went round."""
        if not len(gone):
            return
        laps = gone["visits"].max()
        hand = gone["turn"][gone["visits"] == laps].max()
        main = ids[self._ledger.there[ids] & self._ledger["main"][ids]]
        visits = self._ledger["visits"][main].astype(np.int64) - laps
        passed = main[(self._ledger["turn"][main] < hand) & (visits > 0)]
        self._ledger["visits"][main] = np.maximum(visits, 0)
        passed = passed[np.argsort(self._ledger["turn"][passed])]
        self._ledger["visits"][passed] -= 1
        self._ledger["turn"][passed] = self._turns + np.arange(len(passed))
        self._turns += len(passed)

    def _look(self, pages: Published) -> None:
        """New pages queue up; those that are gone are remembered unless they were in main."""
        changed, gone = self._ledger.changes(pages)
        self._turn_main(gone[gone["main"]], pages.pages)
        self._ghosts.update(dict.fromkeys(gone["name"][~gone["main"]].tolist()))
        for name in list(self._ghosts)[: max(0, len(self._ghosts) - len(pages))]:
            del self._ghosts[name]
        changed = changed[np.argsort(pages.born[changed], kind="stable")]
        ids = pages.pages[changed]
        records, new = self._ledger.read(ids), np.flatnonzero(~self._ledger.there[ids])
        visits = records["visits"] + (pages.hits[changed] - records["hits"])
        records["visits"] = np.minimum(visits, 3)
        records["turn"][new] = self._turns + np.arange(len(new))
        self._turns += len(new)
        names = pages.names[changed]
        records["main"][new] = [name in self._ghosts for name in names[new].tolist()]
        for name in names[new].tolist():
            self._ghosts.pop(name, None)
        records["name"], records["born"] = names, pages.born[changed]
        records["used"], records["hits"] = pages.used[changed], pages.hits[changed]
        self._ledger.write(ids, records)


POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Adaptive, Cost, Lru, Mass, S3Fifo)
}
DEFAULT = Adaptive.name


def policy_named(name: str) -> Policy:
    """A new policy; raises BadArgumentError for a name that is none."""
    if name not in POLICIES:
        raise BadArgumentError(f"policy {name!r}: one of {', '.join(POLICIES)}")
    return POLICIES[name]()
