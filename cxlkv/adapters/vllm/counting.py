"""The scheduler counts prompts and hits, the workers bytes and fill; one log line shows both.

Figures are plain numbers that travel from each process to the one that shows them. Counts are what
is new since the last ones, so they add up over ranks and over intervals; of a pool the newest
look counts. Tokens are counted once, by the scheduler, however many ranks share them; bytes and
audits by each rank, of its own shard.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from cxlkv.adapters.vllm.messages import Report, stored_by_all
from cxlkv.errors import CXLKVError
from cxlkv.pool import CXLPool
from cxlkv.stats import COUNTERS, Overview
from cxlkv.tiers import Tiers

TOKENS = {
    "asked_tokens": "Prompt tokens of admitted requests that the engine did not have itself",
    "hit_tokens": "Of them, tokens that the pool had",
    "loaded_tokens": "Tokens copied whole from the pool into the engine's blocks, by all ranks",
    "saved_tokens": "Tokens published in the pool, by all ranks",
    "restored_tokens": "Tokens of requests that came back from the cold tier to the pool",
    "pulled_tokens": "Tokens of requests that came from a remote pool to the pool",
}
BYTES = ("appended_bytes", "fetched_bytes", "attended_bytes", "scored_bytes")
AUDITS = {
    "audited_selects": COUNTERS["audited_selects"],
    "audited_recall": "Recall, summed over the audited selects",
    "audited_mass": "Attention mass kept, summed over the audited selects",
}
MOVES = {
    "demoted_bytes": "Bytes of pages that made room and went to the cold tier",
    "dropped_bytes": "Bytes of pages that were to go to the cold tier, which did not take them",
    "promoted_bytes": "Bytes of pages that came back from the cold tier",
}
COUNTS = {**TOKENS, **{name: COUNTERS[name] for name in BYTES}, **AUDITS, **MOVES}
"""What is counted, by name, with what it means."""

KINDS = ("corrupt", "stale", "full", "late", "save", "match", "remote", "host", "bad_options")
"""Failures that are shown from the start, as 0; others appear when they happen."""

STATES = {
    "free": "for new tokens",
    "held": "of requests that run, or published and read by one",
    "published": "prefixes that nobody reads now",
}
COLD = "cold"
"""Of a pool's tokens, beside STATES: those whose records the cold tier has, wherever else they
are."""

LOOK_EVERY_S = 1.0
LOOK_SHARE = 0.01  # of the time; a look at a pool of a terabyte takes milliseconds


class Figures(TypedDict):
    """counts: by COUNTS; failures: by kind; pools: tokens by STATES, of each pool by its path."""

    counts: dict[str, float]
    failures: dict[str, int]
    pools: dict[str, dict[str, int]]


def nothing() -> Figures:
    return {"counts": {}, "failures": {}, "pools": {}}


def is_empty(figures: Figures) -> bool:
    return not any(figures.values())


def joined(one: Figures, other: Figures) -> Figures:
    """Of two ranks, or of two intervals, of which `other` is the later one."""
    return {
        "counts": added(one["counts"], other["counts"]),
        "failures": dict(Counter(one["failures"]) + Counter(other["failures"])),
        "pools": {**one["pools"], **other["pools"]},
    }


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


NONE: Counter[str] = Counter()


class Counting:
    """The scheduler's side. A request counts once, when it is admitted first: not each time that it
    is asked for, nor again after a preemption or a load that failed."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._asked: dict[str, tuple[int, int]] = {}  # (tokens asked for, hit), of the last match
        self._admitted: set[str] = set()
        self._ended: set[str] = set()  # since the last take()
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._come: Counter[str] = Counter()

    def matched(self, name: str, asked: int, hit: int) -> None:
        self._ended.discard(name)
        self._asked[name] = (asked, hit)

    def admitted(self, name: str, external: int) -> None:
        """external: tokens that the engine loads from us; 0 where it takes another's hit."""
        if name in self._admitted or name not in self._asked:
            return
        self._admitted.add(name)
        asked, hit = self._asked[name]
        self._asked[name] = asked, min(hit, external)
        self._counts.update(asked_tokens=asked, hit_tokens=min(hit, external))

    def ended(self, name: str) -> None:
        """What the step that ended it has loaded is heard of after this, and before take()."""
        self._admitted.discard(name)
        self._ended.add(name)

    def heard(self, reports: Sequence[Report]) -> None:
        """Of all ranks about one step: what every one of them has counts."""
        if not reports:
            return
        loaded = Counter(name for report in reports for name in set(report.loaded))
        for name, count in loaded.items():
            if count == len(reports):
                self._counts["loaded_tokens"] += self._asked.get(name, (0, 0))[1]
        for one in stored_by_all(reports):
            self._counts["saved_tokens"] += max(0, one.last - one.first) * self._block_tokens
        for name, tokens in reports[0].tails.items():
            if all(name in report.tails for report in reports):
                self._counts["saved_tokens"] += tokens

    def take(self, failures: Counter[str], come: Counter[str] = NONE) -> Figures:
        """What is new since the last call. failures, come (tokens that came for requests, by name):
        all, since the start."""
        for name in self._ended:
            self._asked.pop(name, None)
        self._ended.clear()
        found = nothing()
        self._counts.update(come - self._come)
        self._come = come.copy()
        found["counts"].update({name: count for name, count in self._counts.items() if count})
        found["failures"].update(failures - self._told)
        self._counts.clear()
        self._told = failures.copy()
        return found


class Looking:
    """A worker's side: what its pool says, of this process's bytes and of everybody's pages.

    A look reads the state of all pages, so there is one a second at most; what happened after the
    last one is counted by the next.
    """

    def __init__(
        self,
        pool: CXLPool,
        clock: Callable[[], float] = time.monotonic,
        tiers: Tiers | None = None,
    ):
        self._pool, self._clock = pool, clock
        self._moves = None if tiers is None or tiers.cold is None else Moves(tiers)
        self._parts = pool.pages.geometry["part_count"]
        self._page_tokens = pool.layout.page_tokens
        self._told = _own(pool.admin.overview())
        self._next_s = clock()

    def take(self) -> Figures | None:
        """What is new, None when it is too early or the pool is gone. Never raises for a pool."""
        begin_s = self._clock()
        if begin_s < self._next_s:
            return None
        try:
            overview = self._pool.admin.overview()
        except (CXLKVError, OSError):
            self._next_s = begin_s + LOOK_EVERY_S
            return None
        end_s = self._clock()
        self._next_s = end_s + max(LOOK_EVERY_S, (end_s - begin_s) / LOOK_SHARE)
        counts, told = _own(overview), self._told
        self._told = counts
        found = nothing()
        new = {name: counts[name] - told[name] for name in counts}
        found["counts"].update({name: count for name, count in new.items() if count > 0})
        pages = overview.pages
        found["pools"][overview.path] = {
            name: pages[name] // self._parts * self._page_tokens for name in STATES
        }
        if self._moves is not None:
            found["counts"].update(self._moves.take())
            records = self._moves.records()
            found["pools"][overview.path][COLD] = records // self._parts * self._page_tokens
        return found


class Moves:
    """What one process's tiers have moved. Never raises for a tier that is off or closed."""

    def __init__(self, tiers: Tiers):
        self._tiers, self._told = tiers, Counter[str]()
        self._record_bytes, _ = tiers.pool.records.shape

    def take(self) -> dict[str, float]:
        """Bytes by MOVES that are new since the last call."""
        found = Counter[str]()
        for name in MOVES:
            kind = name.removesuffix("_bytes")
            found[name] = self._tiers.moved_pages(kind) * self._record_bytes
        new, self._told = found - self._told, found
        return dict(new)

    def records(self) -> int:
        """That the cold tier has; 0 of a remote one, which does not say."""
        try:
            return int(self._tiers.cold.stats().get("records", 0)) if self._tiers.cold else 0
        except CXLKVError:
            return 0


def _own(overview: Overview) -> dict[str, float]:
    """What this process has counted since it opened the pool."""
    rows = [one.counters for one in overview.processes if one.alive and one.pid == os.getpid()]
    names = (*BYTES, "audited_selects")
    found: dict[str, float] = {name: sum(row[name] for row in rows) for name in names}
    found["audited_recall"] = sum((row.recall_sum for row in rows), 0.0)
    found["audited_mass"] = sum((row.mass_sum for row in rows), 0.0)
    return found


def line(figures: Figures) -> str:
    """For people, of one interval; what there is nothing to say of is left out."""
    counts, parts = figures["counts"], []
    asked = int(counts.get("asked_tokens", 0))
    if asked:
        share = counts.get("hit_tokens", 0) / asked
        parts.append(f"hit rate {share * 100:.0f} % of {asked:,} prompt tokens")
    if figures["pools"]:
        parts.append(_fill(figures["pools"].values()))
    audits = int(counts.get("audited_selects", 0))
    if audits:
        recall = counts.get("audited_recall", 0) / audits
        mass = counts.get("audited_mass", 0) / audits
        parts.append(f"recall {recall:.2f}, mass {mass:.2f} ({audits} audits)")
    parts.append(_failures(figures["failures"]))
    return ", ".join(parts)


def _fill(pools: Iterable[Mapping[str, int]]) -> str:
    """Ranks have the same tokens, each its shard of them: the fullest pool is what matters."""
    totals = [
        (one["held"] + one["published"], sum(one[state] for state in STATES)) for one in pools
    ]
    held, total = max(totals, key=lambda pair: pair[0] / pair[1] if pair[1] else 1.0)
    share = held / total * 100 if total else 100
    return f"pool {share:.0f} % full ({held:,} of {total:,} tokens held)"


def _failures(failures: Mapping[str, int]) -> str:
    count = sum(failures.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(failures.items()))
    return f"{count} failure{'' if count == 1 else 's'}" + (f" ({kinds})" if kinds else "")
