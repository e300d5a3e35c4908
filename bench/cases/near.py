"""The local tier: how fast units move, and what share of a decode run's page reads it serves."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cxlkv import _core
from cxlkv.adapters.transformers import CXLCache, LayerStep, layout_of
from cxlkv.bench.cases.transfer import Mapped, append_all, source
from cxlkv.bench.cases.transfer import Size as CopySize
from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.demo.measure import Examiner, Plan
from cxlkv.demo.run import demo_pool, load_model
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.tiers.local import LocalTier, Units, units_of
from cxlkv.tiers.prefetch import LastStep, LayerAhead, Prefetcher

Reads = list[Units]
"""The units that each (step, layer) read, in order: each once, ascending."""

HUGE_BYTES = 2 << 20


# ---- how fast units move ----


@dataclass(frozen=True)
class MoveSize:
    """256 MiB of K and V by default, in units of 64 KiB (8 kv heads, 128 channels, bf16)."""

    layers: int = 8
    tokens: int = 8192
    batch_units: int = 256
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7


class Local:
    """As much of this process's own memory as a local tier takes, got and touched as it does."""

    def __init__(self, size: int):
        self._map = mmap.mmap(-1, size + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        first = -whole.ctypes.data % HUGE_BYTES
        self.bytes = whole[first : first + size]
        self.bytes[::4096] = 1


def run_moves(result: Result, size: MoveSize = MoveSize()) -> None:
    """The local tier: how fast units move from the pool into it, beside memcpy.

    Metrics move_*, memcpy_* in GB/s, for each number of threads, with CRCs verified and without:
    the units go from the pool to slots, in random order, in batches.

    memcpy_runs copies the same bytes from the same addresses (in another mapping), run of K by run
    of V; memcpy_flat as many bytes in one piece, which memory likes best. Ratios move_*_to_memcpy
    are to the faster of the two, move_*_to_memcpy_runs to the first.
    """
    with_heads = CopySize(layers=size.layers, tokens=size.tokens)
    layout = KVLayout(
        layers=size.layers,
        kv_heads=with_heads.kv_heads,
        head_dim=with_heads.head_dim,
        page_tokens=with_heads.page_tokens,
    )
    capacity = int(layout.token_bytes * size.tokens * 1.2) + (64 << 20)
    for checksum in (True, False):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = Path(folder) / "bench.pool"
            with CXLPool.create(
                path, layout=layout, capacity=capacity, checksum=checksum, sketch=False
            ) as pool:
                _measure_moves(result, pool, path, size, with_heads, checksum)
    result.notes.append(
        f"moves: {layout.token_bytes * size.tokens >> 20} MiB of K and V, {size.batch_units} units "
        "a call, from a pool in /dev/shm to private memory with huge pages where there are any"
    )


def _measure_moves(
    result: Result, pool: CXLPool, path: Path, size: MoveSize, shape: CopySize, checksum: bool
) -> None:
    sequence = append_all(pool, shape, source(shape, 1), source(shape, 2))
    ids = sequence.pages.astype(np.int64)
    units = (ids[:, None] * size.layers + np.arange(size.layers)).ravel()
    units = np.random.default_rng(4).permutation(units)
    total = pool.layout.token_bytes * shape.tokens
    mapped, local = Mapped(pool, path, shape), Local(total)
    moves = list(_runs(mapped, units, local))
    name = "crc" if checksum else "plain"
    with LocalTier(pool, total) as tier:
        for threads in size.threads:
            pool.set_threads(threads)

            def promote() -> None:
                for first in range(0, len(units), size.batch_units):
                    tier.promote(units[first : first + size.batch_units])

            def move() -> None:
                promote()
                tier.demote(units)

            samples = interleave(
                {
                    "move": move,
                    "memcpy_flat": _flat(mapped, local, total, threads),
                    "memcpy_runs": _each(moves, threads),
                },
                size.rounds,
            )
            speed = {
                kind: result.measure(
                    f"{kind}_{name}_{threads}", [total / s / 1e9 for s in seconds], "GB/s"
                ).median
                for kind, seconds in samples.items()
            }
            best = max(speed["memcpy_flat"], speed["memcpy_runs"])
            result.ratios[f"move_{name}_{threads}_to_memcpy"] = speed["move"] / best
            runs = speed["move"] / speed["memcpy_runs"]
            result.ratios[f"move_{name}_{threads}_to_memcpy_runs"] = runs
            promote()
            stats = tier.stats()
            result.checks[f"move_{name}_{threads}_all"] = stats["slots_held"] == len(units)
            tier.demote(units)
    sequence.release()


def _runs(mapped: Mapped, units: Units, local: Local) -> Iterator[tuple[int, int, int]]:
    """(destination, source, bytes) of K and of V of each unit, slot after slot."""
    base, to = mapped.bytes.ctypes.data, local.bytes.ctypes.data
    run = mapped.size.kv_heads * mapped.piece_bytes
    for unit in units.tolist():
        page, layer = divmod(unit, mapped.size.layers)
        for kind in ("keys_offset", "values_offset"):
            yield to, base + mapped.offset(page, layer, kind), run
            to += run


def _each(moves: list[tuple[int, int, int]], threads: int) -> Callable[[], None]:
    """memmove() of each, shared out over threads; it lets go of Python's lock."""

    def some(first: int) -> None:
        for to, start, count in moves[first::threads]:
            ctypes.memmove(to, start, count)

    return _shared(some, threads)


def _flat(mapped: Mapped, local: Local, total: int, threads: int) -> Callable[[], None]:
    base, to = mapped.bytes.ctypes.data, local.bytes.ctypes.data
    part = total // threads

    def some(first: int) -> None:
        ctypes.memmove(to + first * part, base + first * part, part)

    return _shared(some, threads)


def _shared(some: Callable[[int], None], threads: int) -> Callable[[], None]:
    if threads == 1:
        return lambda: some(0)
    team = ThreadPoolExecutor(threads)
    return lambda: [None for _ in team.map(some, range(threads))].clear()


# ---- what share of a decode run is read near ----


@dataclass
class Served:
    """Shares of the page reads that a tier of some slots serves: of ours as it ran, of as many
    units drawn blindly, of the best choice that is there from the beginning and stays, and of the
    optimum that begins empty, as ours does. later: of ours in the
    second half of the run; learned: there, too, of the units that the first half read most, which
    is the best that who does not know the questions could have placed by then."""

    slots: int
    ours: float
    random: float
    static: float
    optimum: float
    later: float
    learned: float
    copied_units: int
    prefetchers: dict[str, float] = field(default_factory=dict)


def optimum(reads: Reads, slots: int) -> float:
    """The share of reads that Belady's choice serves: who is read is copied in, unless it is read
    again later than all that are there; demand-fetched, with bypass."""
    trace = np.concatenate(reads)
    following = _next_reads(trace)
    until: dict[int, int] = {}  # of what is there: its next reading
    latest: list[tuple[int, int]] = []  # (-next reading, unit), with old entries among them
    hits = 0
    for unit, later in zip(trace.tolist(), following.tolist(), strict=True):
        hits += unit in until
        if later == len(trace):  # never again
            until.pop(unit, None)
            continue
        until[unit] = later
        heapq.heappush(latest, (-later, unit))
        while len(until) > slots:
            last, which = heapq.heappop(latest)
            if until.get(which) == -last:
                del until[which]
    return hits / len(trace)


def _next_reads(trace: Units) -> npt.NDArray[np.int64]:
    """For each reading the place of the unit's next one; len(trace): there is none."""
    order = np.argsort(trace, kind="stable")
    following = np.full(len(trace), len(trace), np.int64)
    same = trace[order[1:]] == trace[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


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


def drawn(reads: Reads, every: Units, slots: int, draws: int = 16) -> float:
    """The mean share of as many units, drawn from all."""
    random = np.random.default_rng(5)
    trace = np.concatenate(reads)
    shares = [
        np.isin(trace, random.choice(every, min(slots, len(every)), replace=False)).mean()
        for _ in range(draws)
    ]
    return float(np.mean(shares))


@dataclass(frozen=True)
class DecodeSize:
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
        """Of the reads from the first-th (step, layer) on, those of units that were near."""
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
        by_heads = _core.batch_units(batch._handle, layer, (picked.pages, 0), picked.starts)
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


def run_decode(result: Result, size: DecodeSize = DecodeSize()) -> list[Served]:
    """The local tier: what share of a decode run's page reads it serves, beside random and optimum.

    For each size of the tier: metrics served_*, ratios served_*_to_optimum and _to_random.

    Moves happen between questions only, the optimum's at each read; the prefetchers' runs are
    apart. A check holds the core's count of near reads against where the units were.
    """
    model = load_model()
    plan = Plan.of(size.tokens, None)
    found: list[Served] = []
    with demo_pool(layout_of(model), plan) as (pool, _):
        examiner = Examiner(model, pool, plan)
        examiner.prefill()
        budget = examiner.budget(size.share)
        pages = [cache.sequences[0].pages.astype(np.int64) for cache in examiner.prefilled]
        rows = _core.pool_geometry(pool._handle)["record_layers"]
        every = (np.concatenate(pages)[:, None] * rows + np.arange(rows)).ravel()
        for part in size.tiers:
            found.append(_decode(result, examiner, budget, every, part))
        examiner.release()
    result.notes.append(
        f"decode: {len(plan.seeds) * plan.questions} questions about {size.tokens} tokens, "
        f"{budget.pages} of {examiner.pages()} pages attended to by each layer and kv head; "
        f"{len(every)} units; reads of a unit counted once for each layer of a question"
    )
    return found


def _decode(
    result: Result, examiner: Examiner, budget: Budget, every: Units, part: float
) -> Served:
    slots = max(1, int(part * len(every)))
    name = f"{100 * part:g}_percent"
    watcher = _ask(result, examiner, budget, slots, name, ())
    reads = watcher.reads
    served = Served(
        slots=slots,
        ours=watcher.share(),
        random=drawn(reads, every, slots),
        static=static(reads, slots),
        optimum=optimum(reads, slots),
        later=watcher.share(len(reads) // 2),
        learned=learned(reads, slots),
        copied_units=watcher.copied,
    )
    for kind in (LastStep, LayerAhead):
        ahead = _ask(result, examiner, budget, slots, f"{name}_{kind.__name__}", (kind,))
        served.prefetchers[kind.__name__] = ahead.share()
        result.measure(
            f"accuracy_{kind.__name__}_{name}", [ahead.prefetchers[0].accuracy], "share of guesses"
        )
    for what in ("ours", "random", "static", "optimum", "later", "learned"):
        result.measure(f"served_{what}_{name}", [getattr(served, what)], "share of page reads")
    for which, share in served.prefetchers.items():
        result.measure(f"served_{which}_{name}", [share], "share of page reads")
    result.measure(f"copied_{name}", [served.copied_units / slots], "units a slot")
    result.ratios[f"served_{name}_to_optimum"] = served.ours / served.optimum
    result.ratios[f"served_{name}_to_random"] = served.ours / served.random
    return served


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
        answers = examiner.ask_with(watched(watcher), budget).answers
        stats = tier.stats()
        watcher.copied = int(stats["promoted"])
        result.checks[f"slots_{name}"] = stats["slots_total"] == slots
        # A prefetcher moves between the look and the reading.
        result.checks[f"counted_{name}"] = bool(kinds) or (
            stats["reads_local"] == watcher.near_by_heads
        )
    result.checks[f"answers_{name}"] = answers == examiner.ask(budget).answers
    return watcher
