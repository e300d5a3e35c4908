"""An audit compares a selection with the exact method's, on the same queries, now and then.

Recall is |chosen and exact| / |exact| by list, the mean over the lists. Mass is the share of the
attention that the chosen pages hold, exp(lse over them - lse over all) by query and head, the mean.
Both are of real selects on real keys; the sums go to the counters that all processes see.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import CXLKVError
from cxlkv.layout import KVLayout, parse_share
from cxlkv.ndp import simd
from cxlkv.ndp.engine import Asked, Selection

RECENT = 16
"""Audits over which the recall is averaged before an alarm is raised."""
MARGIN = 0.02
"""By how much they may fall short: a recall that is asked for is an expectation."""

log = logging.getLogger("cxlkv")


@dataclass(frozen=True)
class _Plan:
    share: float
    every: int
    selects: Iterator[int]  # counts in one step, so that threads need no lock
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


used = False
"""Whether this process has ever audited: until then nobody needs to ask is_due()."""
# By pool, while it lives.
_plans: WeakKeyDictionary[_core.Handle, _Plan] = WeakKeyDictionary()


def share_or_none(given: float | str) -> float:
    """A share of the selects; 0: none of them. Raises BadArgumentError."""
    if given == 0 and not isinstance(given, bool):
        return 0.0
    return parse_share(given, "a share of the selects, or 0 for none")


def set_share(pool: _core.Handle, share: float) -> None:
    """Audit this share of the selects from now on: every round(1 / share)-th, none for 0."""
    global used
    share = share_or_none(share)
    _plans.pop(pool, None)
    if share > 0:
        used = True
        _plans[pool] = _Plan(share, round(1 / share), itertools.count(1))


def share(pool: _core.Handle) -> float:
    plan = _plans.get(pool)
    return plan.share if plan else 0.0


def is_due(pool: _core.Handle) -> bool:
    """Once for each select: is it one to audit?"""
    plan = _plans.get(pool)
    return plan is not None and next(plan.selects) % plan.every == 0


def measure(
    pool: _core.Handle,
    batch: _core.Handle,
    layout: KVLayout,
    asked: Asked,
    picked: Selection,
) -> None:
    """Measure one selection and count it. Never fails the select that it follows.

    What it meets where the select did not look, such as a damaged page, is counted there.
    """
    try:
        exact = picked
        if picked.method not in ("exact", "attention"):  # which read all that they judge by
            budgets = tuple(replace(budget, refresh=1) for budget in asked.budgets)
            wanted = asked._replace(method="exact", budgets=budgets, scorer=0)
            exact = simd.select(batch, layout, wanted, picked.pages.shape[2])
        got = recall(picked, exact)
        kept = mass(batch, layout, asked, picked)
        if got is not None and kept is not None:
            _core.count_audit(pool, got, kept)
            _watch(_plans.get(pool), asked, picked, got)
    except CXLKVError:
        return


def _watch(plan: _Plan | None, asked: Asked, picked: Selection, got: float) -> None:
    """Alarm, as a warning in the log, when two-stage selects fall short of their recall."""
    if plan is None or picked.stages is None:
        return
    plan.recent.append(got - asked.recall)
    short = -sum(plan.recent) / len(plan.recent)
    if len(plan.recent) < RECENT or short <= MARGIN:
        return
    plan.recent.clear()  # the next alarm after as many audits
    log.warning(
        "two-stage selects found %.3f of the pages of exact ones in the last %d audits (layer %d), "
        "%.2f is asked for: ask for more recall, or use method exact. %s",
        asked.recall - short,
        RECENT,
        asked.layer,
        asked.recall,
        picked.stages,
    )


def recall(chosen: Selection, exact: Selection) -> float | None:
    """Mean over the lists that are not empty; None when all are."""
    if exact.pages.size == 0 or chosen.pages.size == 0:
        return None
    shares = []
    lists = chosen.pages.shape[0] * chosen.pages.shape[1]
    rows = zip(chosen.pages.reshape(lists, -1), exact.pages.reshape(lists, -1), strict=True)
    for ours, theirs in rows:
        wanted = theirs[theirs >= 0]
        if len(wanted):
            shares.append(np.isin(wanted, ours).mean())
    return float(np.mean(shares)) if shares else None


def mass(batch: _core.Handle, layout: KVLayout, asked: Asked, picked: Selection) -> float | None:
    """Attention to the chosen tokens, each for itself alone; the mean over the queries that see
    something. None when none does, or a key is no number.
    """

    def log_sums(pages: Selection | None) -> npt.NDArray[np.float64]:
        found = simd.attend(
            batch, layout, asked.layer, asked.queries, asked.starts, pages, asked.scale, None, 0.0
        )
        return np.asarray(found.lse, np.float64)

    weights = picked.log_weights
    if weights is not None:
        weights = np.where(weights > -math.inf, 0, -math.inf).astype(np.float32)
    part, whole = log_sums(replace(picked, log_weights=weights, rows=None)), log_sums(None)
    seen = whole > -math.inf
    if not seen.any() or np.isnan(part).any() or np.isnan(whole).any():
        return None
    # Rounding may put the part above the whole by a last bit.
    return float(np.minimum(1.0, np.exp(part[seen] - whole[seen])).mean())
