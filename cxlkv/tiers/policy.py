"""Policies choose which published pages go when there is no room. Nothing is moved here.

Each gives every page a score, and the lowest go first:

    lru       0: of equal scores the one that was used longest ago goes
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
from cxlkv.refusals import SETTINGS, refusal
from cxlkv.tiers.reuse import Reuse

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


POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Adaptive, Cost, Lru)
}
DEFAULT = Adaptive.name


def policy_named(name: str) -> Policy:
    """A new policy; raises BadArgumentError for a name that is none."""
    if name not in POLICIES:
        one_of = f"policy {name!r}: one of {', '.join(POLICIES)}"
        raise BadArgumentError(refusal(SETTINGS, f"policy: {name}") or one_of)
    return POLICIES[name]()
