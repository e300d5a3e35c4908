"""Attention in the pool for an engine on a GPU: what a step's rows see of the pool comes to them.

    decode rows   a Decoder has a place for each request: it chooses pages, fetches those that its
                  hot buffer misses, and attends (docs/explanation/gpu-decode.md)
    other rows    attend to the step's own K and V, and to all earlier pages, block by block; whole
                  pages are made on the device, and go to the pool behind the layer, what is before
                  and behind them when the step ends

No layer waits for the host, nor the host for a layer. end_each() of the decoder waits, once a step:
what it says went wrong breaks its request, before a token of it is given out. Where the device
chooses, the layers of a step whose requests all decode may be a CUDA graph: nothing of a step is in
its Python.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from collections.abc import Sequence as Sequences
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.common import steps as passes
from cxlkv.adapters.common.gpu_chunks import GpuChunks
from cxlkv.adapters.common.gpu_writes import GpuWrites
from cxlkv.adapters.common.prefill import attend_to_new
from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.vllm.pool_attention import Group, Held, Ints, PoolAttention, Rows, Scores, Step
from cxlkv.adapters.vllm.pools import ENGINES_FORM, WITHOUT_US
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CXLKVError,
    MemoryShortError,
    PoolFullError,
    StaleError,
    UnsupportedError,
)
from cxlkv.gpu.decode import Decoder, longest_list
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.hot import slot_bytes
from cxlkv.gpu.streams import pinned
from cxlkv.kernels.slots import SLOTS_MAX
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine import lifetime
from cxlkv.ndp.engine import PAGES_MAX, Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

ALL_PAGES = Budget(share=1.0)


@dataclass(frozen=True)
class Engine:
    """What the engine says of its steps. requests: that may run at once; rows: of a request that
    decodes, with those that it speculates; tokens_max: of a text. scores: of all layers, but for
    their windows and sinks."""

    device: torch.device
    requests: int
    rows: int
    q_heads: int
    tokens_max: int
    scores: Scores


@dataclass
class _Placed:
    """A request that has a place in the decoder. known: tokens that the device has rightly;
    is_cut: it has others behind them."""

    number: int
    sequence: Sequence
    known: int
    is_cut: bool = False


class DeviceSteps:
    """Makes the steps of one worker, and keeps what they share.

    budget: of requests that say nothing; None: all pages, which the host attends to, near the data.
    hot_bytes: of the device's memory for chosen pages; None: for twice as many as a step chooses.
    index: as in Decoder. Raises MemoryShortError, UnsupportedError, GpuError.
    """

    def __init__(
        self,
        pool: CXLPool,
        engine: Engine,
        budget: Budget | None,
        method: str = "auto",
        hot_bytes: int | None = None,
        index: str = "auto",
    ):
        self._engine, self._method, self._hot_bytes = engine, method, hot_bytes
        self._budget, self._index = budget, index
        self.captures = False  # graphs of layers were made
        self._rests = False  # the decoder's step is capture()'s
        self._busy = threading.RLock()  # a step is under way
        self._is_inside = False
        lifetime.watch(self)
        self._open(pool)

    def reset_after_fork(self) -> None:
        self._busy, self._is_inside = threading.RLock(), False

    @torch.inference_mode(False)  # a step may be outside of it, and writes there
    def _open(self, pool: CXLPool) -> None:
        engine, layout = self._engine, pool.layout
        pages_max = -(-engine.tokens_max // layout.page_tokens) + 1
        budget = self._wide(layout, self._budget)
        self._decoder = Decoder(
            pool,
            requests=engine.requests,
            rows=engine.rows,
            q_heads=engine.q_heads,
            budget=budget,
            pages_max=pages_max,
            device=engine.device,
            hot_pages=self._hot_pages(layout, budget, pages_max),
            recent_pages=budget.recent,
            method=self._method,
            scale=engine.scores.scale,
            softcap=engine.scores.softcap or None,
            index=self._index,
        )
        self.writes, self.chunks = GpuWrites(pool), GpuChunks(pool)
        self.writes.prepare(engine.device)
        self._placed: dict[str, _Placed] = {}
        # Which row of a step each row of the decoder is, and the other way round: a graph may have
        # more rows than requests may run.
        both = (2, 2 * engine.requests * engine.rows)
        self._numbers_host = pinned(*both, dtype=torch.int64, device=engine.device)
        self._numbers = torch.zeros(both, dtype=torch.int64, device=engine.device)
        self.pool, self.is_lost = pool, False
        pool.before_close(self._lose)  # before the device's use of its memory ends

    def _hot_pages(self, layout: KVLayout, budget: Budget, pages_max: int) -> int:
        """Slots of each head; 0: the host attends to what it chooses."""
        if self._budget is None and self._hot_bytes is None and self._index != "device":
            return 0
        engine = self._engine
        longest = longest_list(layout, budget, pages_max, engine.rows)
        if self._hot_bytes is None:
            return min(max(longest, min(2 * longest, pages_max)), SLOTS_MAX)
        page_bytes = engine.requests * layout.layers * layout.kv_heads * slot_bytes(layout)
        found = min(self._hot_bytes // page_bytes, pages_max, SLOTS_MAX)
        if found < min(longest, SLOTS_MAX):
            raise MemoryShortError(
                f'cxlkv: "hot" is {format_bytes(self._hot_bytes)}, and the pages that a step of '
                f"{engine.requests} requests of up to {engine.tokens_max} tokens may choose are "
                f"{format_bytes(longest * page_bytes)}: give it as much, or take a smaller "
                '"budget", --max-num-seqs or --max-model-len'
            )
        return found

    def _wide(self, layout: KVLayout, budget: Budget | None) -> Budget:
        """As the decoder takes it, with all pages in layers that have a window."""
        budget = ALL_PAGES if budget is None else budget
        most = PAGES_MAX if budget.pages is not None else 1.0
        wide = {layer: most for layer, window in enumerate(layout.windows) if window is not None}
        return replace(budget, by_layer={**budget.by_layer, **wide}) if wide else budget

    def __call__(
        self,
        attention: PoolAttention,
        request_rows: Sequences[int],
        starts: Ints,
        lengths: Sequences[int],
    ) -> DeviceStep:
        return DeviceStep(self, attention, request_rows, starts, lengths)

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    # ---- requests ----

    def cut(self, name: str, tokens: int) -> None:
        """The request's sequence was cut back to there."""
        placed = self._placed.get(name)
        if placed is not None and tokens < placed.known:
            placed.known, placed.is_cut = tokens, True

    def place(self, held: Held, sequence: Sequence) -> int | None:
        """The request's number in the decoder; None where that does not take its budget. Raises
        CorruptError for a page that the device would have."""
        placed = self._placed.get(held.name)
        if placed is None:
            budget = self._wide(self.pool.layout, held.options.budget)
            try:
                with gpu_errors("a request's newest pages"):
                    number = self._decoder.add(sequence, budget)
            except (BadArgumentError, UnsupportedError):
                return None
            placed = self._placed[held.name] = _Placed(number, sequence, len(sequence))
        elif placed.is_cut or placed.known != len(sequence):
            try:
                self._decoder.changed(placed.number, placed.known)
            except CXLKVError:
                self._decoder.remove(self._placed.pop(held.name).number)
                raise
            placed.known, placed.is_cut = len(sequence), False
        return placed.number

    def clear(self, current: dict[str, Sequence]) -> None:
        """Let go of places whose requests have ended, or begin again with another sequence."""
        for name, placed in list(self._placed.items()):
            if current.get(name) is not placed.sequence:
                del self._placed[name]
                self._decoder.remove(placed.number)

    # ---- a step ----

    def enter(self) -> None:
        """A step begins: a pool that is lost, which another thread closes, stays until leave()."""
        self.leave()
        self._busy.acquire()
        self._is_inside = True

    def leave(self) -> None:
        if self._is_inside:
            self._is_inside = False
            self._busy.release()

    def _lose(self) -> None:
        with self._busy:
            self.is_lost = True

    def begin(self, rows: dict[int, slice[int, int]]) -> None:
        """Begin a step of the decoder, of requests by their number with their rows of the step."""
        wide = self._engine.rows
        numbers, back = self._numbers_host.numpy()
        numbers[:] = 0
        for number, own in rows.items():
            count, first = own.stop - own.start, number * wide
            numbers[first : first + wide] = own.start  # rows that it does not have are not attended
            numbers[first : first + count] = np.arange(own.start, own.stop)
            if own.stop <= len(back):  # else the step has chunks, and is no graph's
                back[own] = np.arange(first, first + count)
        self._numbers.copy_(self._numbers_host, non_blocking=True)
        with gpu_errors("a step's beginning"):
            self._decoder.begin({number: own.stop - own.start for number, own in rows.items()})

    def capture(self) -> None:
        """What comes are layers of a graph, or of a replay that stands for no step."""
        self.abandon()
        if not self.captures:
            self._compile()
        self.captures = self._rests = True
        self.begin({})

    def _compile(self) -> None:
        """Launch what a graph captures: no first launch, which compiles and loads, may be in it,
        and vLLM's first runner warms up without these layers."""
        decoder, layout = self._decoder, self.pool.layout
        heads = (self._engine.q_heads, layout.head_dim), (layout.kv_heads, layout.head_dim)
        shapes = (*heads, (layout.kv_heads, layout.value_head_dim))[: 2 + (layout.values == "own")]
        lead = (self._engine.requests, self._engine.rows)
        rows = [torch.zeros(*lead, *of, dtype=decoder.dtype, device=self.device) for of in shapes]
        self.begin({})
        for layer in range(layout.layers):
            decoder.layer(layer, *rows)
        decoder.abandon()

    def rest(self) -> None:
        """Have a graph that is replayed now change nothing: the device's step is of no request."""
        self.begin({})
        self._decoder.abandon()

    def replayed(self, layer: int, given: Rows, scores: Scores) -> None:
        """A layer of a graph: each row is one of a request that decodes, or padding."""
        given.out.copy_(self._decoded(layer, given, self._numbers[1, : len(given.out)], scores))

    def decode(
        self, layer: int, given: Rows, to: torch.Tensor, places: torch.Tensor, scores: Scores
    ) -> None:
        """A layer of the rows that decode: `places`, of all that the decoder has, are rows `to`."""
        given.out.index_copy_(0, to, self._decoded(layer, given, places, scores))

    def _decoded(
        self, layer: int, given: Rows, places: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        engine, decoder = self._engine, self._decoder

        def picked(rows: torch.Tensor) -> torch.Tensor:
            some = rows.index_select(0, self._numbers[0, : engine.requests * engine.rows])
            return some.to(decoder.dtype).view(engine.requests, engine.rows, *rows.shape[1:])

        values = None if given.v is None else picked(given.v)
        made = decoder.layer(layer, picked(given.q), picked(given.k), values).flatten(0, 1)
        made = made.index_select(0, places)
        if scores.sinks is not None:
            assert decoder.lse is not None
            sums = decoder.lse.flatten(0, 1).index_select(0, places)
            made = beside_sinks(made, sums, scores.sinks)
        return made.to(given.out.dtype)

    def end(self, numbers: Container[int], *, replayed: bool) -> dict[int, CXLKVError]:
        """What went wrong in a step of these requests, by their numbers."""
        errors = self._decoder.end_each(replayed=replayed)
        for placed in self._placed.values():
            if placed.number in numbers:
                with suppress(CXLKVError):  # it was released
                    placed.known = len(placed.sequence)
        return errors

    def counts(self) -> dict[str, int]:
        """Bytes of chosen pages that the hot buffer had, and that came to it over the link; none
        while the pool is lost."""
        if self.is_lost:
            return {"hot_bytes": 0, "hot_missed_bytes": 0}
        if self._rests:
            self.abandon()  # what capture() has begun
        made = self._decoder.by_layer()
        hot, missed = int(made.hits.sum()), int(made.misses.sum() + made.hinted.sum())
        return {"hot_bytes": hot * made.piece_bytes, "hot_missed_bytes": missed * made.piece_bytes}

    def abandon(self) -> None:
        """Undo what is open: a step that did not end."""
        self._rests = False
        self._decoder.abandon()
        self.writes.abandon()

    def reopened(self, pool: CXLPool) -> None:
        """Go on in a new pool. Where that fails this stays lost, and may be called again. With
        graphs it raises RuntimeError, which ends the engine: they hold addresses of the lost pool,
        and would return wrong outputs silently."""
        if self.captures:
            raise RuntimeError(
                "cxlkv: the pool was lost and is open again, but this engine's CUDA graphs have "
                'addresses of the old one: start it anew, or without "index": "device"'
            )
        self.is_lost = True
        self.close()
        self._placed.clear()
        with gpu_errors("attention in the pool that is open again"):
            self._open(pool)

    def close(self) -> None:
        self.abandon()
        self._decoder.close()
        self.writes.close()
        self.chunks.close()


class DeviceStep(Step):
    """A step whose tensors are on a device."""

    def __init__(
        self,
        steps: DeviceSteps,
        attention: PoolAttention,
        request_rows: Sequences[int],
        starts: Ints,
        lengths: Sequences[int],
    ):
        self._steps, self._is_open = steps, True
        steps.enter()
        steps.abandon()  # one that did not end
        super().__init__(attention, request_rows, starts, lengths)

    def _align(self, place: int) -> None:
        if self._steps.is_lost:
            self._break(place, ClosedError("the pool was lost, and is not open again yet"))
            return
        super()._align(place)
        self._steps.cut(self._of(place).name, self.computed[place])

    def _plan(self) -> list[Group]:
        """Say how each request's rows go; nothing is the host's alone."""
        sequences = self._attention.requests.sequences
        self._steps.clear(sequences)
        decodes: dict[int, int] = {}  # places of the step, by the decoder's
        for place in self._sound():
            held = self._of(place)
            if self._count(place) <= self._attention.decode_rows:
                try:
                    number = self._steps.place(held, sequences[held.name])
                except CXLKVError as error:
                    self._break(place, error)
                    continue
                if number is not None:
                    decodes[number] = place
        self._decodes = decodes
        sound = {*self._sound(), *(place for place in self._places if not self.computed[place])}
        self._chunks = [place for place in self._places if place in sound - {*decodes.values()}]
        self._written, self._small = list[int](), list[int]()  # of these, those that are sound
        if decodes:
            self._begin(decodes)
        elif self._steps.captures:
            self._steps.rest()
        return []

    def _begin(self, decodes: dict[int, int]) -> None:
        rows = {number: self._span(place) for number, place in decodes.items()}
        try:
            self._steps.begin(rows)
        except CXLKVError as error:
            self._decodes = {}
            self._break_all(decodes.values(), error)
            if self._steps.captures:
                self._steps.rest()
            return
        wide = self._attention.decode_rows
        device = self._steps.device
        to = [np.arange(own.start, own.stop) for own in rows.values()]
        places = [number * wide + np.arange(own.stop - own.start) for number, own in rows.items()]
        self._to, self._from = (
            torch.from_numpy(np.concatenate(one).astype(np.int64)).to(device, non_blocking=True)
            for one in (to, places)
        )

    def _span(self, place: int) -> slice[int, int]:
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def _break_all(self, places: Iterable[int], error: CXLKVError) -> None:
        for place in places:
            self._break(place, error)

    def attend(self, layer: int, given: Rows, scores: Scores, is_shared: bool = False) -> None:
        """Do what Step.attend does, with tensors on the device."""
        assert not is_shared, "check_device() refuses such models"
        self.layers = max(self.layers, layer + 1)
        given.out[self._rows_end :] = 0
        if self._decodes:
            self._steps.decode(layer, given, self._to, self._from, scores)
        if layer == 0:
            self._begin_writes(given.k)
        self._write(layer, given)
        for place in self._chunks:
            self._attend_chunk(layer, place, given, scores)
        self._fill_failed(given.out)

    # ---- chunks ----

    def _begin_writes(self, like: torch.Tensor) -> None:
        """Take the pages of all chunks that fill one; others are kept until the step ends."""
        sound = [place for place in self._chunks if place not in self.broken]
        self._written = [place for place in sound if self._fills_page(place)]
        self._small = [place for place in sound if not self._fills_page(place)]
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._written_rows, self._small_rows = (
            torch.from_numpy(self._numbers(places)).to(like.device, non_blocking=True)
            for places in (self._written, self._small)
        )
        if not self._written:
            return
        held, step = [self._of(place) for place in self._written], self._pass(self._written)
        own = [self._attention.requests.sequences[one.name] for one in held]
        try:
            batch = self._attention.batch(held)
            # So that none of the step's pages goes behind a window before it is published.
            begun = self._steps.writes.begin(step, own, batch, step.tokens, like)
            assert begun, "each of them fills a page"
        except CXLKVError as error:
            broken, self._written = self._written, []
            self._break_all(broken, error)

    def _fills_page(self, place: int) -> bool:
        tokens = self._attention.pool.layout.page_tokens
        return self._count(place) - -self.computed[place] % tokens >= tokens

    def _numbers(self, places: list[int]) -> npt.NDArray[np.int64]:
        """Of their rows in the step."""
        rows = [np.arange(self.starts[place], self.starts[place + 1]) for place in places]
        return np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)

    def _pass(self, places: list[int]) -> passes.Step:
        new = np.array([self._count(place) for place in places], np.int64)
        starts = np.zeros(len(places) + 1, np.int32)
        np.cumsum(new, out=starts[1:])
        lengths = new + np.array([self.computed[place] for place in places])
        return passes.Step(len(places), int(new.max()), False, starts, new, lengths, None)

    def _write(self, layer: int, given: Rows) -> None:
        def picked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = None if given.v is None else given.v.index_select(0, rows)
            return given.k.index_select(0, rows), values

        if self._small:
            self._kept.append(picked(self._small_rows))
        if not self._written:
            return
        try:
            self._steps.writes.put(layer, *picked(self._written_rows))
        except CXLKVError as error:
            self._steps.writes.abandon()
            broken, self._written = self._written, []
            if layer == 0 and len(broken) > 1 and isinstance(error, PoolFullError):
                self._break_all(broken[-1:], error)  # the others may have room
                self._begin_writes(given.k)
                self._write(layer, given)
                return
            self._break_all(broken, error)

    def _attend_chunk(self, layer: int, place: int, given: Rows, scores: Scores) -> None:
        """A chunk's rows to their own tokens, and to what the pool has before them."""
        is_broken = place in self.broken
        if is_broken and self.computed[place]:
            return
        rows, pool = self._span(place), self._attention.pool
        part = passes.LayerStep(
            layer,
            self._pass([place]),
            scores.scale,
            scores.softcap or None,
            scores.window,
            scores.sinks,
        )
        v = given.k[..., : pool.layout.value_head_dim] if given.v is None else given.v
        query, *own = (one[rows].transpose(0, 1)[None] for one in (given.q, given.k, v))
        if is_broken or not (self.computed[place] or pool.layout.is_encoded):
            given.out[rows] = attend_to_new(part, query, *own)[0]
            return
        sequence = self._attention.requests.sequences[self._of(place).name]
        try:
            found = self._steps.chunks.attend(part, [sequence], query, (own[0], own[1]))
        except CXLKVError as error:
            self._break(place, error)
        else:
            given.out[rows] = found[0]

    # ---- its end ----

    def settle(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._settle()
        finally:
            self._steps.leave()

    def _settle(self) -> None:
        replayed = self.layers == 0 and self._steps.captures
        if replayed:  # the engine has made it as if they decoded
            self._break_all(self._chunks, UnsupportedError("no graph has these rows"))
            unknown = [place for place, one in enumerate(self.held) if one is None]
            self.failed.update(self.request_rows[one] for one in unknown if self._count(one))
        if replayed or self.layers == self._attention.pool.layout.layers:
            self._end_decodes(replayed)
            self._end_writes()
        else:
            self._steps.abandon()
            error = StaleError("the engine did not go through all layers")
            self._break_all(self._sound(), error)
        own = () if replayed else self._chunks
        lost = [place for place in self.broken if self.computed[place] or place not in own]
        self.failed.update(self.request_rows[place] for place in lost)

    def _end_decodes(self, replayed: bool) -> None:
        if not self._decodes:
            return
        for number, error in self._steps.end(self._decodes, replayed=replayed).items():
            self._break(self._decodes[number], error)

    def _end_writes(self) -> None:
        if self._written:
            try:
                self._steps.writes.finish()
            except CXLKVError as error:
                self._steps.writes.abandon()
                self._break_all(self._written, error)
        if self._small:
            self._append_small()

    def _append_small(self) -> None:
        """All layers of rows that fill no page, which come in one copy; by the host."""
        keys = torch.stack([keys for keys, _ in self._kept]).cpu()
        own = [values for _, values in self._kept if values is not None]
        values = torch.stack(own).cpu() if own else None
        first = 0
        for place in self._small:
            rows = slice(first, first := first + self._count(place))
            try:
                batch = self._attention.batch([self._of(place)])
                for layer, of in enumerate(keys):
                    given = (of[rows], None if values is None else values[layer, rows])
                    batch.append(layer, *given, [0, self._count(place)])
            except CXLKVError as error:
                self._break(place, error)

    def drop(self) -> None:
        self._steps.leave()

    def fill(self) -> None:
        """Nothing: settle() has broken a step without all layers."""


class Attends(Protocol):
    """Our implementation of a layer of the engine."""

    num_heads: int
    scores: Scores


def steps_on(
    device: torch.device,
    pool: CXLPool,
    layers: Sequences[object],
    sizes: tuple[int, int, int],
    settings: Settings,
) -> DeviceSteps | None:
    """How steps of tensors on this device are made; None: as those in host memory. sizes: as in
    Engine, requests, rows and tokens_max."""
    if device.type == "cpu":
        return None
    own = [cast("Attends", layer) for layer in layers]
    same = {(layer.num_heads, layer.scores.scale, layer.scores.softcap) for layer in own}
    if len(same) > 1:
        raise UnsupportedError(
            f"cxlkv: attention in the pool for tensors on {device} has one scale, softcap and "
            f"number of heads for all layers: {ENGINES_FORM}"
        )
    requests, rows, tokens_max = sizes
    engine = Engine(device, requests, rows, own[0].num_heads, tokens_max, own[0].scores)
    return DeviceSteps(pool, engine, settings.budget, settings.method, settings.hot, settings.index)


def check_device(device: torch.device, layout: KVLayout, shares: bool, drafts: bool) -> None:
    """Raises UnsupportedError for models that only steps in host memory serve: with layers that
    share others' K and V, or have unlike heads; and drafters with layers."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise UnsupportedError(f"attention in the pool for tensors on {device}: cpu and cuda are")
    unlike = len({(one.kv_heads, one.head_dim, one.value_head_dim) for one in layout.groups}) > 1
    for there, what, remedy in (
        (shares, "layers that share others' K and V", WITHOUT_US),
        (unlike, "layers with unlike heads", ENGINES_FORM),
        (drafts, "speculation by layers of their own", ENGINES_FORM),
    ):
        if there:
            raise UnsupportedError(
                f"cxlkv: attention in the pool for tensors on {device} has no {what}: {remedy}"
            )
