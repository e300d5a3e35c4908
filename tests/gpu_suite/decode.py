"""A decode step against context: every page fetched, and the selected ones only, side by side.

The pool is host memory that the GPU maps. A step is one layer's: queries to the host, the scan near
the data on host cores, the fetch of what was chosen, attention on the GPU, the merge. Decoder
lets them overlap; here they also come one after the other, so that each can be timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.arrays import Pointers, memory_of
from cxlkv.bench.result import short
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.decode import Decoder
from cxlkv.gpu.mapping import Mapping
from cxlkv.kernels.attend import attend
from cxlkv.kernels.copies import copy_fragments
from cxlkv.kernels.merge import merge
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget, Selection, unscored
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

from .attend import TOLERANCE
from .case import Progress, Timer

CHUNK_TOKENS = 65536
SINKS, RECENT = 1, 2  # pages that stay on the GPU
QUERIES = 16
INDEXES = ("sketch", "digest")


@dataclass(frozen=True)
class Size:
    """Llama 3 8B's attention in bf16. Layers take turns, so that no cache keeps one: as many as
    pool_bytes hold, 8 at most and 1 at least. The contexts that we want most come first."""

    contexts: tuple[int, ...] = (32768, 131072, 8192, 524288, 1048576)
    share: float = 0.05
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    pool_bytes: int = 4 << 30
    rounds: int = 21


TINY = Size(
    contexts=(64, 128),
    share=0.4,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    pool_bytes=128 << 10,
    rounds=1,
)


class Clock:
    """Seconds of each part of a step, if it is on: then the device ends one before the next."""

    def __init__(self, device: torch.device):
        self.on = False
        self.parts: dict[str, float] = {}
        self._device, self._began = device, 0.0

    def start(self, on: bool) -> None:
        self.on, self.parts = on, {}
        self._began = time.perf_counter()

    def ended(self, part: str) -> None:
        if self.on:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            now = time.perf_counter()
            self.parts[part] = self.parts.get(part, 0.0) + now - self._began
            self._began = now


Fetch = Callable[[Pointers, Pointers, int], None]
"""Copies pieces of one size, from addresses to addresses, on the current stream."""


class Context:
    """A pool with one sequence of some length, mapped, and a step of each kind over its layers."""

    def __init__(self, size: Size, tokens: int, device: torch.device, stack: ExitStack):
        self.size, self.tokens, self.device = size, tokens, device
        row = 2 * size.head_dim
        self.piece_bytes = size.page_tokens * row
        layer_bytes = 2 * tokens * size.kv_heads * row
        self.layers = max(1, min(8, size.pool_bytes // layer_bytes))
        layout = KVLayout(
            layers=self.layers,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            page_tokens=size.page_tokens,
            dtype="bfloat16",
        )
        capacity = int(1.3 * self.layers * layer_bytes) + (64 << 20)
        self.pool = stack.enter_context(
            CXLPool.create("anonymous:", layout=layout, capacity=capacity)
        )
        self.sequence = self.pool.sequence()
        self._fill()
        self.mapping = stack.enter_context(Mapping(self.pool, device))
        self.pages = tokens // size.page_tokens
        self.budget = Budget(share=size.share, sinks=SINKS, recent=RECENT)
        self.clock = Clock(device)
        self._tables()

    def _fill(self) -> None:
        random = torch.Generator(self.device).manual_seed(self.tokens)
        heads, dim = self.size.kv_heads, self.size.head_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.bfloat16, device=self.device)

        for first in range(0, self.tokens, CHUNK_TOKENS):
            rows = min(CHUNK_TOKENS, self.tokens - first)
            for layer in range(self.layers):
                k, v = (draw(rows, heads, dim).cpu() for _ in range(2))
                self.sequence.append(layer, k, v)
        # Each step has another: the hot buffer finds by chance only what it looks for.
        self.queries = 2 * draw(QUERIES, 1, 1, self.size.q_heads, dim)
        self.rows = draw(2, 1, 1, heads, dim)  # K and V of a step's token
        self.q = self.queries[0]
        self.host_q = torch.empty(
            self.size.q_heads, dim, dtype=torch.bfloat16, pin_memory=self.device.type == "cuda"
        )
        self.positions = torch.full((1, 1), self.tokens - 1, device=self.device)

    def _tables(self) -> None:
        """Where pieces come from, and where on the device they go to: all of them for a full
        fetch, page by page, heads side by side."""
        heads, piece = self.size.kv_heads, self.piece_bytes
        tables = [self.mapping.pages(self.sequence, layer) for layer in range(self.layers)]
        self.sources = [np.stack([t.keys_at.numpy(), t.values_at.numpy()]) for t in tables]
        self.store = torch.empty(
            2 * self.pages * heads * piece, dtype=torch.uint8, device=self.device
        )
        place = np.arange(self.pages, dtype=np.int64) * (heads * piece)
        both = np.array([0, self.store.numel() // 2], np.int64)[:, None, None]
        head = np.arange(heads, dtype=np.int64)[:, None] * piece
        self.targets = memory_of(self.store, "store") + both + head + place
        self.all_at = self._up(self.targets)
        self.all_pages = self._up(np.arange(self.pages, dtype=np.int32)).expand(1, heads, -1)
        self.all_pages = self.all_pages.contiguous()
        forced = {*range(SINKS), *range(self.pages - RECENT, self.pages)}
        self.forced = np.array(sorted(forced), np.int32)
        # What a full fetch brought stands for what stays: attention to it reads other addresses.
        self.kept = torch.empty(2 * heads * len(forced) * piece, dtype=torch.uint8).to(self.device)
        count = 2 * heads * len(forced)
        kept_at = memory_of(self.kept, "kept") + np.arange(count, dtype=np.int64) * piece
        self.kept_host = kept_at.reshape(2, heads, -1)
        self.kept_at = self._up(self.kept_host)
        self.kept_pages = self._up(np.tile(self.forced, (1, heads, 1)))

    def _up(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        """To the device; from pinned memory, so that the host goes on."""
        if self.device.type != "cuda":
            return torch.from_numpy(array.copy())
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def keep(self, layer: int) -> None:
        """The forced pages of a layer onto the device, as they would have stayed there."""
        source = self._up(np.ascontiguousarray(self.sources[layer][:, :, self.forced]))
        copy_fragments(source, self.kept_at, self.piece_bytes)

    def full(self, layer: int, fetch: Fetch) -> Tensor:
        """Fetch every page, attend to all."""
        run = self.size.kv_heads * self.piece_bytes
        fetch(self.sources[layer][:, 0].ravel(), self.targets[:, 0].ravel(), run)
        self.clock.ended("fetch")
        out, _ = attend(
            self.q,
            self.all_at[0][None],
            self.all_at[1][None],
            self.all_pages,
            self.positions,
            page_tokens=self.size.page_tokens,
        )
        self.clock.ended("attention")
        return out

    def selected(self, layer: int) -> tuple[Tensor, Selection]:
        """Ask the host's cores for pages, fetch those that are not kept, attend, merge."""
        self.host_q.copy_(self.q[0, 0], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.clock.ended("query")
        picked = self.sequence.select(layer, self.host_q, self.budget)
        self.clock.ended("scan")
        pages = np.where(np.isin(picked.pages, self.forced), -1, picked.pages).astype(np.int32)
        wanted = np.broadcast_to(pages >= 0, (2, *pages.shape))
        index = np.broadcast_to(pages.clip(0).astype(np.int64), wanted.shape)
        source = np.where(wanted, np.take_along_axis(self.sources[layer], index, axis=2), 0)
        target = self._up(np.ascontiguousarray(self.targets[:, :, : pages.shape[1]]))
        copy_fragments(self._up(source), target, self.piece_bytes)
        chosen = self._up(pages[None])
        self.clock.ended("fetch")
        tokens = self.size.page_tokens
        kept = attend(
            self.q,
            self.kept_at[0][None],
            self.kept_at[1][None],
            self.kept_pages,
            self.positions,
            page_tokens=tokens,
        )
        fetched = attend(
            self.q, target[0][None], target[1][None], chosen, self.positions, page_tokens=tokens
        )
        self.clock.ended("attention")
        out, _ = merge([kept[0], fetched[0]], [kept[1], fetched[1]])
        self.clock.ended("merge")
        return out, picked


def fetches(context: Context) -> dict[str, Fetch]:
    """Ways to fetch every page, of which the fastest counts."""
    copier = Copier(context.mapping)

    def kernel(sources: Pointers, targets: Pointers, piece: int) -> None:
        copy_fragments(context._up(sources), context._up(targets), piece)

    def dispatcher(sources: Pointers, targets: Pointers, piece: int) -> None:
        copier.copy(torch.from_numpy(sources), torch.from_numpy(targets), piece).wait()

    return {"kernel": kernel, "dispatcher": dispatcher}


def run(progress: Progress, device: torch.device, size: Size) -> None:
    """Metrics full_<context>, selected_<context> and of each part ..._<part>, in us, and of an
    index on the device sketch_<context>, digest_<context>; ratios selected_<context>_to_full, of
    speeds."""
    timer = Timer(device, size.rounds)
    progress.result.notes.append(
        f"one layer's step of one sequence, {size.q_heads} query heads on {size.kv_heads} kv heads "
        f"of {size.head_dim}, bf16, Gaussian keys; selected: {100 * size.share:g} % of the pages, "
        "by cxlkv.gpu.decode.Decoder, captured in a CUDA graph, a hot buffer of as many pages, a "
        "query that differs in each step; sketch, digest: likewise with that index on the device; "
        "eager: the same, not captured; serial: the same by parts "
        "that come one after the other, no hot buffer; full: "
        "all pages by the faster of kernel copy and dispatcher, then attention; a time is the "
        "host's, from the call until the device is idle; parts were timed in calls of their own"
    )
    for tokens in size.contexts:
        if progress.left(f"{tokens} tokens"):
            with ExitStack() as stack:
                measure(progress, timer, Context(size, tokens, device, stack))


def measure(progress: Progress, timer: Timer, context: Context) -> None:
    """One context: checked, timed as a whole, then by its parts."""
    result, name = progress.result, short(context.tokens)
    timer.wait()
    with timer.here():
        ways = fetches(context)
        for way, fetch in ways.items():
            context.store.fill_(0xFF)  # NaN in bf16: nothing right was there before
            out = context.full(0, fetch)
            result.checks[f"full_{way}_{name}"] = close(out, reference(context, 0, None))
        context.keep(0)
        out, picked = context.selected(0)
        right = close(out, reference(context, 0, picked))
        result.checks[f"selected_{name}"] = right
        whole = {
            way: times(timer, context, partial(context.full, fetch=f)) for way, f in ways.items()
        }
        serial = times(timer, context, context.selected)
        best = min(whole, key=lambda way: float(np.median(whole[way])))
        full = result.measure(f"full_{name}", [1e6 * s for s in whole[best]], "us")
        result.measure(f"serial_{name}", [1e6 * s for s in serial], "us")
        parts(progress, timer, context, f"full_{name}", partial(context.full, fetch=ways[best]))
        parts(progress, timer, context, f"selected_{name}", context.selected)
        for method in INDEXES:
            eager, captured = steps(progress, timer, context, method)
            result.measure(f"{method}_eager_{name}", eager, "us")
            result.measure(f"{method}_{name}", captured, "us")
        eager, captured = steps(progress, timer, context)
        result.measure(f"eager_{name}", eager, "us")
        ours = result.measure(f"selected_{name}", captured, "us")
    result.ratios[f"selected_{name}_to_full"] = full.median / ours.median
    scanned = f"the scan read {picked.bytes_scored >> 10} KiB"
    result.notes.append(f"{name}: {context.layers} layers in turn, full by {best}, {scanned}")
    progress.save(f"{name} tokens", f"full {full.median:.0f} us, selected {ours.median:.0f} us")


def steps(
    progress: Progress, timer: Timer, context: Context, method: str | None = None
) -> tuple[list[float], list[float]]:
    """Microseconds a layer of whole decode steps, launched one kernel after the other, and captured
    in a CUDA graph; they append, so they come last. The first one, before the hot buffer has
    anything, is compared with the C core. method: of an index on the device; None: the host
    chooses."""
    size, layers = context.size, range(context.layers)
    tokens = len(context.sequence)
    with Decoder(
        context.pool,
        requests=1,
        q_heads=size.q_heads,
        budget=context.budget,
        pages_max=context.pages + 8,
        device=context.device,
        hot_pages=context.budget.pages_at_most(context.pages + 8),
        recent_pages=RECENT + 1,
        method=method or "auto",
        index="host" if method is None else "device",
    ) as decoder:
        decoder.add(context.sequence)
        queries = itertools.cycle(context.queries)
        k, v = context.rows

        def step() -> list[Tensor]:
            q = next(queries)
            decoder.begin()
            outs = [decoder.layer(layer, q, k, v).clone() for layer in layers]
            decoder.end()
            return outs

        timer.wait()
        outs = step()
        name = f"{method or 'decoder'}_{short(context.tokens)}"
        held = [close(outs[layer], chosen(context, layer, method)) for layer in layers]
        progress.result.checks[name] = all(held)
        if decoder.fallback is not None:
            progress.result.notes.append(f"{name}: {decoder.fallback}")
        eager = timer.whole(step)
        captured = eager
        if timer.stream is not None:
            replay = capture(decoder, context)
            outs = replay(next(queries))
            finite = all(bool(out.isfinite().all()) for out in outs)
            progress.result.checks[f"captured_{name}"] = finite
            captured = timer.whole(lambda: replay(next(queries)))
        a_layer = 1e6 / context.layers
        decoder.truncate(0, tokens)  # the next decoder begins where this one did
        return [a_layer * s for s in eager], [a_layer * s for s in captured]


def capture(decoder: Decoder, context: Context) -> Callable[[Tensor], list[Tensor]]:
    """A step for a query, all layers of it captured; returns what the layers return."""
    k, v = context.rows
    q = context.queries[0].clone()
    graph = torch.cuda.CUDAGraph()
    decoder.begin()
    with torch.cuda.graph(graph):
        outs = [decoder.layer(layer, q, k, v) for layer in range(context.layers)]
    decoder.abandon()

    def replay(query: Tensor) -> list[Tensor]:
        q.copy_(query)
        decoder.begin()
        graph.replay()
        decoder.end(replayed=True)
        return outs

    return replay


def chosen(context: Context, layer: int, method: str | None) -> Tensor:
    """The C core's attention to what a decoder's first step attends to: the pages chosen for the
    first query, and the newest."""
    sequence, q = context.sequence, context.queries[0][0].float().cpu()
    budget = replace(context.budget, per="sequence")
    if method is not None:  # pages besides the ring's, which are one more than the budget's newest
        most = budget.pages_at_most(-(-len(sequence) // context.size.page_tokens)) + 1
        budget = Budget(pages=most, sinks=SINKS, recent=RECENT + 1, per="sequence")
    picked = sequence.select(layer, q, budget, method=method or "auto")
    last = (len(sequence) - 1) // context.size.page_tokens
    newest = np.arange(last - RECENT, last + 1)
    lists = [np.union1d(row[row >= 0], newest) for row in picked.pages]
    pages = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, found in zip(pages, lists, strict=True):
        row[: len(found)] = found
    out, _ = sequence.attend(layer, q, unscored(pages[None], picked.starts, "sequence"))
    return torch.as_tensor(out).view(-1, context.size.head_dim)


def times(timer: Timer, context: Context, step: Callable[[int], object]) -> list[float]:
    """Seconds of a whole step, of one layer after the other."""
    layers = itertools.cycle(range(context.layers))
    context.clock.start(on=False)
    return timer.whole(lambda: step(next(layers)))


def parts(
    progress: Progress, timer: Timer, context: Context, name: str, step: Callable[[int], object]
) -> None:
    """Metrics name_part in us, over all rounds."""
    found: dict[str, list[float]] = {}
    layers = itertools.cycle(range(context.layers))
    for turn in range(-timer.warm, timer.rounds):
        timer.wait()
        context.clock.start(on=True)
        step(next(layers))
        if turn >= 0:
            for part, seconds in context.clock.parts.items():
                found.setdefault(part, []).append(1e6 * seconds)
    for part, samples in found.items():
        progress.result.measure(f"{name}_{part}", samples, "us")


def reference(context: Context, layer: int, picked: Selection | None) -> Tensor:
    """The C core's attention to the same pages, where they lie: [q_heads, head_dim]."""
    sequence: Sequence = context.sequence
    out, _ = sequence.attend(layer, context.q[0, 0].float().cpu(), picked)
    return torch.as_tensor(out)


def close(out: Tensor, wanted: Tensor) -> bool:
    """Relative, in the Frobenius norm; NaN is not."""
    got = out[0, 0].float().cpu()
    return bool((got - wanted).norm() / wanted.norm() < TOLERANCE)
