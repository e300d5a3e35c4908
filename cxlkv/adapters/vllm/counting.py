"""The scheduler counts prompts and hits, the workers bytes and fill; one log line shows both.

Figures are plain numbers that travel from each process to the one that shows them. Counts are what
is new since the last ones, so they add up over ranks and over intervals; of a pool the newest
look counts. Tokens are counted once, by the scheduler, however many ranks share them; bytes and
audits by each rank, of its own shard.
"""

from __future__ import annotations

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from cxlkv.adapters.common.metrics import COLD, IN_COLD, MOVES, QUOTA, Moves, hosts
from cxlkv.adapters.vllm.messages import Report, Span
from cxlkv.errors import CXLKVError
from cxlkv.stats import COUNTERS, Overview
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

PREFIX = "vllm:cxlkv_"
"""The engine shows metrics of its own name only: LLM.get_metrics() looks for vllm:."""
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
    "audited_hits": "Hits given a block short, which was computed and compared, by each rank",
    "audited_selects": COUNTERS["audited_selects"],
    "audited_recall": "Recall, summed over the audited selects",
    "audited_mass": "Attention mass kept, summed over the audited selects",
}
NEAR = {
    "local_bytes": "Of the bytes of chosen pages that were fetched or attended to, those of copies "
    "in local memory",
    "hot_bytes": "Of chosen pages, bytes that the hot buffer of a GPU had",
    "hot_missed_bytes": "Of chosen pages, bytes that came to it over the link",
    "worker_calls": "Selects and attends that the worker near the memory did",
    "worker_missed": "Selects and attends that it was to do, and that were done here",
}
COUNTS = {**TOKENS, **{name: COUNTERS[name] for name in BYTES}, **AUDITS, **MOVES, **NEAR}
"""What is counted, by name, with what it means."""

KINDS = (
    "corrupt",
    "stale",
    "full",
    "quota",
    "late",
    "save",
    "match",
    "remote",
    "host",
    "bad_options",
    "audit",
)
"""Failures that are shown from the start, as 0; others appear when they happen."""

STATES = {
    "free": "for new tokens",
    "held": "of requests that run, or published and read by one",
    "published": "prefixes that nobody reads now",
}
LOCAL = "local"
CAPACITIES = {
    "tokens": {**STATES, **IN_COLD, **QUOTA},
    "bytes": {**STATES, **IN_COLD, **QUOTA, LOCAL: "copies in this engine's own memory"},
}
"""States of a pool's capacity, by its unit."""

LOOK_EVERY_S = 1.0
LOOK_SHARE = 0.01  # of the time; a look at a pool of a terabyte takes milliseconds


class Figures(TypedDict):
    """counts: by COUNTS; failures: by kind; links: bytes by LINKS; pools: by path what there is of
    each, "tokens" and "bytes" by STATES and "hosts" by HOST_STATES."""

    counts: dict[str, float]
    failures: dict[str, int]
    links: dict[str, int]
    pools: dict[str, dict[str, dict[str, int]]]


def nothing() -> Figures:
    return {"counts": {}, "failures": {}, "links": {}, "pools": {}}


def is_empty(figures: Figures) -> bool:
    return not any(figures.values())


def joined(one: Figures, other: Figures) -> Figures:
    """Join the figures of two ranks, or of two intervals, of which `other` is the later one."""
    return {
        "counts": added(one["counts"], other["counts"]),
        "failures": dict(Counter(one["failures"]) + Counter(other["failures"])),
        "links": dict(Counter(one["links"]) + Counter(other["links"])),
        "pools": {**one["pools"], **other["pools"]},
    }


def with_moves(figures: Figures, moves: Moves) -> Figures:
    """Add what this process's tiers have moved since the last call."""
    counts, links = moves.take()
    return joined(figures, {**nothing(), "counts": dict(counts), "links": links})


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


NONE: Counter[str] = Counter()
ENDED_MAX = 4096
"""Requests of which it is kept what ranks have said: they load and save beside the steps, some
sooner than others, and save after a request's end."""


@dataclass
class _Shares:
    """What ranks have done for a request. spans: of its blocks that each has stored; told: up to
    which block all have, and that was counted. tails: ranks that have stored its end."""

    loaded: set[int] = field(default_factory=set)
    spans: dict[int, range] = field(default_factory=dict)
    told: int = 0
    tails: set[int] = field(default_factory=set)

    def stored(self, rank: int, span: Span) -> None:
        known = self.spans.get(rank)
        if known is not None and known.start <= span.first <= known.stop:
            self.spans[rank] = range(known.start, max(known.stop, span.last))
        else:  # the first one, or the pool was lost
            self.spans[rank] = range(span.first, span.last)
            self.told = min(self.told, span.first)

    def take(self, ranks: int) -> int:
        """Blocks that all of so many ranks have now, and had not before."""
        if len(self.spans) < ranks:
            return 0
        begin = max(self.told, *(span.start for span in self.spans.values()))
        end = min(span.stop for span in self.spans.values())
        self.told = max(self.told, end)
        return max(0, end - begin)


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
        self._shares: OrderedDict[str, _Shares] = OrderedDict()

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
        """Count what all ranks have done by now. reports: of all of them about one step."""
        for rank, report in enumerate(reports):
            self._counts["audited_hits"] += report.audited
            for name in report.failed:
                self._of(name).loaded.clear()
            for name in report.loaded:
                of = self._of(name)
                of.loaded.add(rank)
                if len(of.loaded) == len(reports):
                    self._counts["loaded_tokens"] += self._asked.get(name, (0, 0))[1]
                    of.loaded.clear()
        saving = [report for report in reports if report.saves]
        for rank, report in enumerate(saving):
            for span in report.stored:
                self._of(span.request).stored(rank, span)
            for name, tokens in report.tails.items():
                of = self._of(name)
                of.tails.add(rank)
                if len(of.tails) == len(saving):
                    self._counts["saved_tokens"] += tokens
                    of.tails.clear()
        for name in {span.request for report in saving for span in report.stored}:
            self._counts["saved_tokens"] += self._of(name).take(len(saving)) * self._block_tokens

    def _of(self, name: str) -> _Shares:
        found = self._shares.setdefault(name, _Shares())
        self._shares.move_to_end(name)
        while len(self._shares) > ENDED_MAX:
            self._shares.popitem(last=False)
        return found

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
    last one is counted by the next. device: what a GPU's part has counted, between two steps.
    """

    def __init__(
        self,
        tiers: Tiers,
        clock: Callable[[], float] = time.monotonic,
        quota: Quota | None = None,
        device: Callable[[], Mapping[str, int]] = dict,
    ):
        self._tiers, self._pool, self._clock = tiers, tiers.pool, clock
        self._device = device
        self._quota = quota
        self._moves = Moves(tiers)
        self._parts = self._pool.pages.geometry["part_count"]
        self._page_tokens = self._pool.layout.page_tokens
        self._page_bytes, _ = self._pool.records.shape
        self._told: Mapping[str, float] = self._counts(self._pool.admin.overview())
        self._next_s = clock()

    def _counts(self, overview: Overview) -> dict[str, float]:
        found = _own(self._tiers, overview)
        for name, count in self._device().items():
            found[name] = found.get(name, 0) + count
        return found

    def take(self) -> Figures | None:
        """What is new, None when it is too early or the pool is gone. Never raises for a pool."""
        begin_s = self._clock()
        if begin_s < self._next_s:
            return None
        try:
            overview, there = self._pool.admin.overview(), hosts(self._pool)
            counts = self._counts(overview)
            capacity = self._capacity(overview)
        except (CXLKVError, OSError):
            self._next_s = begin_s + LOOK_EVERY_S
            return None
        end_s = self._clock()
        self._next_s = end_s + max(LOOK_EVERY_S, (end_s - begin_s) / LOOK_SHARE)
        new = {name: count - self._told.get(name, 0) for name, count in counts.items()}
        self._told = counts
        found = nothing()
        found["counts"].update({name: count for name, count in new.items() if count > 0})
        found["pools"][overview.path] = {**capacity, "hosts": there}
        return with_moves(found, self._moves)

    def _capacity(self, overview: Overview) -> dict[str, dict[str, int]]:
        pages = {name: overview.pages[name] for name in STATES}
        if self._quota is not None:
            own = self._quota.stats()
            pages.update(quota=own["pages"], quota_used=own["used_pages"])
        sizes = {name: count * self._page_bytes for name, count in pages.items()}
        if self._tiers.cold is not None:
            pages[COLD], sizes[COLD] = self._moves.cold()
        local = _local(self._tiers)
        if local:
            sizes[LOCAL] = int(local["slots_held"] * local["unit_bytes"])
        tokens = {name: count // self._parts * self._page_tokens for name, count in pages.items()}
        return {"tokens": tokens, "bytes": sizes}


def _own(tiers: Tiers, overview: Overview) -> dict[str, float]:
    """What this process has counted since it opened the pool."""
    rows = [one.counters for one in overview.processes if one.alive and one.pid == os.getpid()]
    names = (*BYTES, "audited_selects")
    found: dict[str, float] = {name: sum(row[name] for row in rows) for name in names}
    found["audited_recall"] = sum((row.recall_sum for row in rows), 0.0)
    found["audited_mass"] = sum((row.mass_sum for row in rows), 0.0)
    local, layout = _local(tiers), tiers.pool.layout
    if local:  # reads are of a head's pages: where layers have unlike heads, of the mean one's
        heads = sum(layout.of_layer(layer).kv_heads for layer in range(layout.layers))
        found["local_bytes"] = local["reads_local"] * local["unit_bytes"] * layout.layers // heads
    worker = tiers.pool.worker
    found["worker_calls"] = worker.selects + worker.attends
    found["worker_missed"] = worker.selects_here + worker.attends_here
    return found


def _local(tiers: Tiers) -> dict[str, float]:
    """What the local tier counts; nothing where there is none."""
    try:
        return {} if tiers.local is None else tiers.local.stats()
    except CXLKVError:
        return {}


def line(figures: Figures) -> str:
    """One interval's figures for people; what is nothing is left out."""
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


def _fill(pools: Iterable[Mapping[str, Mapping[str, int]]]) -> str:
    """Ranks have the same tokens, each its shard of them: the fullest pool is what matters."""
    tokens = [one["tokens"] for one in pools]
    totals = [
        (one["held"] + one["published"], sum(one[state] for state in STATES)) for one in tokens
    ]
    held, total = max(totals, key=lambda pair: pair[0] / pair[1] if pair[1] else 1.0)
    share = held / total * 100 if total else 100
    return f"pool {share:.0f} % full ({held:,} of {total:,} tokens held)"


def _failures(failures: Mapping[str, int]) -> str:
    count = sum(failures.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(failures.items()))
    return f"{count} failure{'' if count == 1 else 's'}" + (f" ({kinds})" if kinds else "")
