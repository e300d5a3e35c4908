"""What share of a decode run's page reads the local tier serves, beside random and optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cxlkv import _core
from cxlkv.adapters.transformers import CXLCache, LayerStep, layout_of
from cxlkv.arrays import Units
from cxlkv.bench.replay.caches import belady
from cxlkv.bench.result import Result
from cxlkv.demo.facts import Examiner, Plan, load_model, pool_for
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch
from cxlkv.tiers.local import LocalTier, units_of
from cxlkv.tiers.prefetch import LastStep, LayerAhead, Prefetcher

Reads = list[Units]
"""The units that each (step, layer) read, in order: each once, ascending."""


def optimum(reads: Reads, slots: int) -> float:
    """The most that any choice serves, which may change at each reading and begins empty."""
    trace = np.concatenate(reads).tolist()
    return sum(belady(trace, slots)) / len(trace)


def static(reads: Reads, slots: int) -> float:
    """The share that the most read units serve if they are there from the beginning."""
    times = np.sort(np.unique(np.concatenate(reads), return_counts=True)[1])
    return float(times[::-1][:slots].sum() / times.sum())


def learned(reads: Reads, slots: int) -> float:
    """The share of the second half's reads that the most read units of the first half serve."""
    half = len(reads) // 2
    units, times = np.unique(np.concatenate(reads[:half]), return_counts=True)
    best = units[np.argsort(-times, kind="stable")[:slots]]
    return float(np.isin(np.concatenate(reads[half:]), best).mean())


def drawn(reads: Reads, every: Units, slots: int) -> float:
    """The mean share of as many units, drawn from all."""
    random = np.random.default_rng(5)
    trace = np.concatenate(reads)
    shares = [
        np.isin(trace, random.choice(every, min(slots, len(every)), replace=False)).mean()
        for _ in range(16)
    ]
    return float(np.mean(shares))


@dataclass(frozen=True)
class Size:
    """The demo's model, asked about one context; `share` of the pages are attended to, and the tier
    has slots for each of `tiers` of all units."""

    tokens: int = 65_536
    share: float = 0.05
    tiers: tuple[float, ...] = (0.05, 0.10)


class Watcher:
    """Sees each select of a decode run: records the units, asks where they are, lets the tier step
    at the beginning of each question and prefetchers observe."""

    def __init__(self, tier: LocalTier, kinds: tuple[type[Prefetcher], ...]):
        self.tier = tier
        self.copied = 0  # units
        self.reads: Reads = []
        self.near: list[int] = []  # how many of each of them were near
        self.near_by_heads = 0
        self.prefetchers: list[Prefetcher] = []
        self._kinds = kinds

    def share(self, first: int = 0) -> float:
        """Share of the reads from the first-th (step, layer) on that hit local units."""
        return sum(self.near[first:]) / sum(map(len, self.reads[first:]))

    def saw(self, batch: Batch, layer: int, picked: Selection) -> None:
        """A layer has chosen, and will attend to it next."""
        if not self.prefetchers:
            self.prefetchers = [kind(self.tier, batch) for kind in self._kinds]
        if layer == 0:
            self.tier.step()
        units, _, resident = self.tier.hotness()
        near = units[resident]
        read = units_of(batch, layer, picked)
        self.reads.append(read)
        self.near.append(int(np.isin(read, near).sum()))
        by_heads = _core.batch_units(
            batch._handle, layer, _core.Picked(picked.pages, 0), picked.starts
        )
        self.near_by_heads += int(np.isin(by_heads, near).sum())
        for prefetcher in self.prefetchers:
            prefetcher.batch = batch
            prefetcher.observe(layer, picked)


def watched(watcher: Watcher) -> type[CXLCache]:
    """A cache whose selects a watcher sees."""

    class Watched(CXLCache):
        def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
            picked = super().choose(part, queries)
            assert picked is not None
            assert self._batch is not None
            watcher.saw(self._batch, part.index, picked)
            return picked

    return Watched


def run(result: Result, size: Size = Size()) -> None:
    """For each size of the tier: metrics served_*, ratios served_*_to_optimum and _to_random.

    served_*: shares of the page reads that a tier of some slots serves: ours as it ran; random, as
    many units drawn blindly; static, the best choice that is there from the beginning and stays;
    optimum, which begins empty, as ours does. later: ours in the second half of the run; learned:
    there, too, the units that the first half read most, which is the best that who does not know
    the questions could have placed by then.

    Moves happen between questions only, the optimum's at each read; the prefetchers' runs are
    apart. A check holds the core's count of near reads against where the units were.
    """
    model = load_model()
    plan = Plan.of(size.tokens)
    with pool_for(layout_of(model), plan) as pool:
        examiner = Examiner(model, pool, plan)
        examiner.prefill()
        budget = examiner.budget(size.share)
        pages = [cache.sequences[0].pages.astype(np.int64) for cache in examiner.prefilled]
        rows = pool.pages.geometry["record_layers"]
        every = (np.concatenate(pages)[:, None] * rows + np.arange(rows)).ravel()
        for part in size.tiers:
            _decode(result, examiner, budget, every, part)
        examiner.release()
    result.notes.append(
        f"residency: {len(plan.seeds) * plan.questions} questions about {size.tokens} tokens, "
        f"{budget.pages} of {examiner.pages()} pages attended to by each layer and kv head; "
        f"{len(every)} units; reads of a unit counted once for each layer of a question"
    )


def _decode(result: Result, examiner: Examiner, budget: Budget, every: Units, part: float) -> None:
    slots = max(1, int(part * len(every)))
    name = f"{100 * part:g}_percent"
    watcher = _ask(result, examiner, budget, slots, name, ())
    reads = watcher.reads
    served = {
        "ours": watcher.share(),
        "random": drawn(reads, every, slots),
        "static": static(reads, slots),
        "optimum": optimum(reads, slots),
        "later": watcher.share(len(reads) // 2),
        "learned": learned(reads, slots),
    }
    for kind in (LastStep, LayerAhead):
        which = kind.__name__
        ahead = _ask(result, examiner, budget, slots, f"{name}_{which}", (kind,))
        served[which] = ahead.share()
        accuracy = ahead.prefetchers[0].accuracy
        result.measure(f"accuracy_{which}_{name}", [accuracy], "share of guesses")
    for what, share in served.items():
        result.measure(f"served_{what}_{name}", [share], "share of page reads")
    result.measure(f"copied_{name}", [watcher.copied / slots], "units a slot")
    for beside in ("optimum", "random"):
        result.ratios[f"served_{name}_to_{beside}"] = served["ours"] / served[beside]


def _ask(
    result: Result,
    examiner: Examiner,
    budget: Budget,
    slots: int,
    name: str,
    kinds: tuple[type[Prefetcher], ...],
) -> Watcher:
    """All questions with a tier that is empty at first."""
    unit_bytes = examiner.pool.layout.token_bytes * examiner.pool.layout.page_tokens
    with LocalTier(examiner.pool, slots * unit_bytes // examiner.pool.layout.layers) as tier:
        watcher = Watcher(tier, kinds)
        answers = examiner.ask(budget, kind=watched(watcher)).answers
        stats = tier.stats()
        watcher.copied = int(stats["promoted"])
        result.checks[f"slots_{name}"] = stats["slots_total"] == slots
        # A prefetcher moves between the look and the reading.
        result.checks[f"counted_{name}"] = bool(kinds) or (
            stats["reads_local"] == watcher.near_by_heads
        )
    result.checks[f"answers_{name}"] = answers == examiner.ask(budget).answers
    return watcher
