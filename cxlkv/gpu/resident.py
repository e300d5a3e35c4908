"""The device's part of a decode step: attend to the pages it has, and fetch those it lacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.errors import (
    CorruptError,
    CXLKVError,
    MemoryShortError,
    RegistrationError,
    StaleError,
    UnsupportedError,
)
from cxlkv.gpu import streams
from cxlkv.gpu.hot import HotBuffer, SlotCounts
from cxlkv.gpu.index import DeviceIndex, Marks
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.pieces import encodings_of, pieces_of
from cxlkv.gpu.recent import Recent
from cxlkv.gpu.selector import Step
from cxlkv.gpu.tables import PageTables
from cxlkv.kernels.attend import attend
from cxlkv.kernels.checks import Shape, Wrong, check_pieces
from cxlkv.kernels.checks import prepare as prepare_checks
from cxlkv.kernels.copies import copy_fragments
from cxlkv.kernels.merge import merge
from cxlkv.kernels.rotate import prepare
from cxlkv.kernels.slots import Assigned
from cxlkv.kernels.sources import STALE, Sources, known_pages, page_sources
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

PROGRAMS = 1024
"""Programs among which attention splits its lists: more than any GPU runs at once."""


@dataclass(frozen=True)
class _There:
    """What the device has of a layer: the ring's slots, then the hot buffer's; addresses stay."""

    pages: torch.Tensor
    hot_pages: torch.Tensor | None
    keys_at: torch.Tensor
    values_at: torch.Tensor | None


@dataclass(frozen=True)
class _Lane:
    """What pages are chosen and fetched with, on one stream: for layers, or for hints."""

    known: torch.Tensor  # the pages
    assigned: Assigned
    sources: Sources
    # Where fetched pieces come from and where they go, K and V side by side: one copy.
    sources_at: torch.Tensor
    targets_at: torch.Tensor
    found: torch.Tensor  # what check_pieces() finds in a step
    marks: Marks | None
    is_hint: bool


class Resident:
    """The ring of newest pages, the hot buffer and its tables, and the step's two partial results.

    Everything that a step writes is made once. fallback: why there is no hot buffer although one
    was asked for. `lists` is the longest list of chosen pages. index: by which method the device
    chooses pages, with this budget, and how many pages have a summary; None: the host does.
    """

    def __init__(
        self,
        pool: CXLPool,
        device: torch.device,
        *,
        requests: int,
        rows: int,
        q_heads: int,
        pages_max: int,
        hot_pages: SlotCounts,
        recent_pages: int,
        lists: int,
        scale: float,
        softcap: float | None,
        budget: Budget,
        index: tuple[str, int | None] | None = None,
    ):
        self.layout, self.device = pool.layout, device
        self.index, self._sinks = None, budget.sinks
        self.budgets = [budget] * requests
        """Of each request; where the device chooses, all with as many sinks."""
        if index is not None:
            self.index = DeviceIndex(
                pool,
                device,
                index[0],
                requests=requests,
                rows=rows,
                q_heads=q_heads,
                pages_max=pages_max,
                pages=index[1],
                scale=scale,
            )
        self._requests, self._rows = requests, rows
        self._scale, self._softcap = scale, softcap
        self._dtype: torch.dtype = getattr(torch, pool.layout.dtype)
        self._pieces = pieces_of(pool.layout)
        self.fallback: str | None = None
        self.hot: HotBuffer | None = None
        self._mapping: Mapping | None = None
        self._check_pieces(pages_max)
        if hot_pages != 0:
            self._map(pool, pages_max, hot_pages)
        # The open tail and what a step completes are in the ring, whatever is asked; where the
        # device chooses, all that a budget calls recent.
        least = 1 + -(-rows // pool.layout.page_tokens)
        slots = max(recent_pages, least, budget.recent if index is not None else 0)
        self._recent = Recent(pool.layout, requests, slots, device)
        self._make_buffers(q_heads, lists)
        self._make_lanes(lists)
        self._side = streams.Side(device, pool.layout.layers)  # of hints
        self._stream = streams.current(device)  # that was last used
        if index is not None:
            self._make_plan(q_heads, lists)
        self._lists: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._there = [self._made_there(layer) for layer in range(pool.layout.layers)]

    # ---- making ----

    def _check_pieces(self, pages_max: int) -> None:
        for piece in self._pieces:
            if piece.bytes % 16:
                raise UnsupportedError(
                    f"a page has {piece.bytes} bytes of one head: a device takes multiples of 16"
                )
            if piece.code is not None:
                prepare(piece.code.dim, self.device)
        keys, values = self._pieces
        tail = 4 if keys.code is not None else 0  # a digest's scale
        self._shape = Shape(keys.bytes, values.bytes, tail, pages_max)
        prepare_checks(self._shape, self.device)

    def _map(self, pool: CXLPool, pages_max: int, hot_pages: SlotCounts) -> None:
        try:
            self._mapping = Mapping(pool, self.device)
        except (RegistrationError, MemoryShortError) as error:
            if self.index is not None:
                raise UnsupportedError(
                    f'index="device" reads pages where they lie, but the pool is not mapped: '
                    f"{error}"
                ) from error
            self.fallback = str(error)
            return
        layout, requests = self.layout, self._requests
        address = self._mapping.device_address
        self._tables = PageTables(pool, requests, pages_max, address, self.device)
        if self.index is not None:
            self.index.base_address = address
        self.hot = HotBuffer(
            requests=requests,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            slots=hot_pages,
            pages_max=pages_max,
            page_tokens=layout.page_tokens,
            head_dim=layout.head_dim,
            value_head_dim=layout.value_head_dim if layout.values == "own" else None,
            dtype=self._dtype,
            device=self.device,
            encodings=encodings_of(layout),
        )

    def _make_buffers(self, q_heads: int, lists: int) -> None:
        requests, rows, layout = self._requests, self._rows, self.layout
        out, chosen = (requests, rows, q_heads), (requests, layout.kv_heads, lists)
        ring = (requests, 1, self._recent.slots)
        self._positions_host = self._pinned(requests, rows, dtype=torch.int64)
        self._ring_host = self._pinned(*ring, dtype=torch.int32)
        self._below_host = self._pinned(requests, dtype=torch.int32)
        self.chosen = self._pinned(*chosen, dtype=torch.int32)  # the host's answer: pages
        self.hinted = self._pinned(*chosen, dtype=torch.int32)  # the same, of a hint
        self.near_out = self._pinned(*out, layout.value_head_dim, dtype=torch.float32)  # or these
        self.near_lse = self._pinned(*out, dtype=torch.float32)
        self._positions = self._here(requests, rows, dtype=torch.int64)
        self._ring = self._here(*ring, dtype=torch.int32)
        self._below = self._here(requests, dtype=torch.int32)
        self._chosen = self._here(*chosen, dtype=torch.int32)
        self._none = torch.tensor(-1, dtype=torch.int32, device=self.device)
        self._partials = self._here(2, *out, layout.value_head_dim, dtype=torch.float32)
        self._lses = self._here(2, *out, dtype=torch.float32)
        splits = max(1, PROGRAMS // (requests * layout.kv_heads))
        line = splits * (layout.value_head_dim + 1)
        self._scratch = self._here(requests * rows * q_heads * line, dtype=torch.float32)

    def _make_lanes(self, lists: int) -> None:
        if self.hot is not None:
            self._choice = self._made_lane(self.hot, lists, is_hint=False)
            self._hint = self._made_lane(self.hot, lists, is_hint=True)

    def _made_lane(self, hot: HotBuffer, lists: int, *, is_hint: bool) -> _Lane:
        made = hot.outputs(lists)
        both = (2, *made.slot.shape)
        sources_at, targets_at = (self._here(*both, dtype=torch.int64) for _ in range(2))
        others = self._here(3, *made.slot.shape, dtype=torch.int64)
        values_at = None if made.miss_values_at is None else targets_at[1]
        return _Lane(
            known=self._here(*made.slot.shape, dtype=torch.int32),
            assigned=made._replace(miss_keys_at=targets_at[0], miss_values_at=values_at),
            sources=Sources(sources_at[0], sources_at[1], *others),
            sources_at=sources_at,
            targets_at=targets_at,
            found=self._here(self._requests, dtype=torch.int64),
            marks=None if self.index is None else self.index.marks(),
            is_hint=is_hint,
        )

    def _make_plan(self, q_heads: int, lists: int) -> None:
        """What the device chooses by, and where it attends to what it has chosen: the ring's slots,
        then the chosen pages."""
        requests, rows, layout = self._requests, self._rows, self.layout
        ring = self._recent.slots
        plan = (2, layout.layers, requests)  # the first page that is seen, and how many are chosen
        self._plan_host = self._pinned(*plan, dtype=torch.int32)
        self._plan = self._here(*plan, dtype=torch.int32)
        self._counts: list[dict[tuple[int, int], int]] = [{} for _ in range(requests)]
        both = (requests, layout.kv_heads, ring + lists)
        self._pages = self._here(*both, dtype=torch.int32)
        self._keys_at = self._here(layout.layers, *both, dtype=torch.int64)
        self._keys_at[..., :ring] = self._recent.keys_at
        self._values_at: torch.Tensor | None = None
        if self._recent.values_at is not None:
            self._values_at = self._here(layout.layers, *both, dtype=torch.int64)
            self._values_at[..., :ring] = self._recent.values_at
        out = (layout.layers, requests, rows, q_heads, layout.value_head_dim)
        self._outs = self._here(*out, dtype=self._dtype)

    def _made_there(self, layer: int) -> _There:
        keys_at = self._recent.keys_at[layer]
        values_at = None if self._recent.values_at is None else self._recent.values_at[layer]
        hot_pages = None
        if self.hot is not None:
            part = self._tables.place(layer).part
            held = self.hot.residents(layer, self._tables.tags[part])
            hot_pages = held.pages
            keys_at = torch.cat([keys_at, held.keys_at], dim=2)
            if values_at is not None and held.values_at is not None:
                values_at = torch.cat([values_at, held.values_at], dim=2)
        # Layers with as many slots share these: each fills them in before it attends.
        size = keys_at.shape[2]
        if size not in self._lists:
            self._lists[size] = (torch.full_like(keys_at, -1, dtype=torch.int32), hot_pages)
        return _There(*self._lists[size], keys_at, values_at)

    def _pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return streams.pinned(*shape, dtype=dtype, device=self.device)

    def _here(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # ---- requests ----

    def give(self, request: int, budget: Budget) -> None:
        """Choose by this budget for a request. Raises UnsupportedError."""
        if self.index is not None:
            if budget.sinks != self._sinks or budget.recent > self._recent.slots:
                raise UnsupportedError(
                    f'index="device": a request has as many sinks as the decoder ({self._sinks}, '
                    f"not {budget.sinks}), and at most as many recent pages as the device keeps "
                    f'({self._recent.slots}, not {budget.recent}): index="host" has others'
                )
            self._counts[request].clear()
        self.budgets[request] = budget

    def load(self, request: int, sequence: Sequence) -> None:
        """Load a sequence's newest pages, before its first step or after a truncate."""
        self.follow()
        self._recent.load(request, sequence)

    def forget(self, request: int, from_page: int = 0) -> None:
        """Drop a request's pages from `from_page` on: they changed, or the request has ended."""
        self.follow()
        if self.index is not None:
            self.index.forget(request, from_page)
        if self.hot is not None:
            self._tables.forget(request, from_page)
            if from_page == 0:
                self.hot.forget(request)

    # ---- a step ----

    def follow(self) -> None:
        """Queue what is to come behind all that was queued, whatever the current stream was then. A
        graph that is captured is replayed on the stream of begin()."""
        now = streams.current(self.device)
        if now != self._stream and not streams.captures(self.device):
            now.wait_stream(self._stream)
            self._stream = now

    def refresh(self, step: Step) -> None:
        """Take in the pages that a step's requests have completed; raises what is wrong with
        them."""
        self.follow()
        named = dict(zip(step.active.tolist(), step.sequences, strict=True))
        if self.hot is not None:
            for request, sequence in named.items():
                self._tables.refresh(request, sequence)
        if self.index is not None:
            self.index.refresh(named, self._recent)

    def begin(self, step: Step) -> npt.NDArray[np.int32]:
        """Where the step's rows lie, after refresh(); returns the first page, of each request at
        work, that the ring has with them."""
        self.follow()
        slots = self._recent.slots
        positions = np.full((self._requests, self._rows), -1, np.int64)
        row = np.arange(self._rows)
        positions[step.active] = np.where(
            row < step.counts[:, None], step.lengths[:, None] + row, -1
        )
        newest: npt.NDArray[np.int64] = positions.max(1, keepdims=True)
        last = newest // self.layout.page_tokens
        pages = last - (last - np.arange(slots)) % slots  # the newest page that lies in each slot
        pages[(pages < 0) | (newest < 0)] = -1
        below = np.maximum(last[:, 0] - slots + 1, 0).astype(np.int32)
        self.near_lse.numpy().fill(-np.inf)  # the engine writes for these requests only
        self._send(self._positions_host, self._positions, positions)
        self._send(self._ring_host, self._ring, pages[:, None].astype(np.int32))
        for there, _ in self._lists.values():
            there[:, :, :slots] = self._ring
        self._send(self._below_host, self._below, below)
        if self.hot is not None:
            for lane in (self._choice, self._hint):
                lane.found.zero_()
        if self.index is not None:
            self._send_plan(step)
            self._pages[:, :, :slots] = self._ring
        return below[step.active]

    def _send_plan(self, step: Step) -> None:
        """For each layer, the first page that a request's rows see, and how many are to be chosen
        besides the newest."""
        tokens, layout = self.layout.page_tokens, self.layout
        plan = np.zeros((2, layout.layers, self._requests), np.int32)
        of = (step.active.tolist(), step.lengths.tolist(), step.counts.tolist())
        for request, length, count in zip(*of, strict=True):
            last = -(-(length + count) // tokens)
            for layer, window in enumerate(layout.windows):
                low = 0 if window is None else max(0, length - window + 1) // tokens
                plan[:, layer, request] = low, self._count(request, layer, last - low)
        self._plan_host.copy_(torch.from_numpy(plan))
        self._plan.copy_(self._plan_host, non_blocking=True)

    def _count(self, request: int, layer: int, visible: int) -> int:
        counts, budget = self._counts[request], self.budgets[request]
        found = counts.get((layer, visible))
        if found is None:
            found = max(0, budget.pages_at_most(visible, layer) - budget.recent)
            counts[layer, visible] = found
        return found

    def _send(
        self,
        host: torch.Tensor,
        here: torch.Tensor,
        array: npt.NDArray[np.int64] | npt.NDArray[np.int32],
    ) -> None:
        host.copy_(torch.from_numpy(array))
        here.copy_(host, non_blocking=True)

    def attend_resident(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> None:
        """Append the step's rows; attend to the newest pages and to those of the hot buffer."""
        self._recent.append(layer, k, v, self._positions)
        there = self._there[layer]
        if self.hot is not None:
            part = self._tables.place(layer).part
            hot_pages = self.hot.residents(layer, self._tables.tags[part], there.hot_pages).pages
            # After a truncate the ring has pages that the hot buffer has as well.
            older = hot_pages < self._below[:, None, None]
            torch.where(older, hot_pages, self._none, out=there.pages[:, :, self._recent.slots :])
        self._attend(layer, q, there.keys_at, there.values_at, there.pages, 0)

    def take_hint(self, layer: int, answered: torch.Tensor) -> None:
        """Copy what a hint named, for bring(): after that the next question may be asked."""
        self._take(layer, self.hinted, answered, self._hint)

    def bring(self, layer: int) -> None:
        """Fetch what the hot buffer misses of the hinted pages: attend_resident() attends to it."""
        self._fetch(layer, self._hint)

    def take_chosen(self, layer: int, answered: torch.Tensor) -> None:
        """Copy the lists of chosen pages, for attend_chosen(), as take_hint() does."""
        self._take(layer, self.chosen, answered, self._choice)

    def attend_chosen(self, layer: int, q: torch.Tensor) -> None:
        """Fetch what the hot buffer misses of the chosen pages, and attend to that."""
        made = self._fetch(layer, self._choice)
        self._attend(layer, q, *made.miss_targets, made.miss_pages, 1)

    def bring_by_index(self, layer: int, q: torch.Tensor) -> None:
        """Fetch, beside what the current stream does, pages that the index chooses for a guess of a
        layer's query, which stays as it is until the step ends."""
        with self._side.fork(layer):
            self._choose(layer, q, self._hint)
            self._fetch(layer, self._hint)

    def brings(self, layer: int) -> bool:
        """True from bring_by_index() until the layer attends."""
        return layer in self._side

    def attend_by_index(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the step's rows, choose pages by the index, fetch those that the hot buffer
        misses, and attend to them and to the newest. Each layer's output stays until the next
        step's."""
        self._recent.append(layer, k, v, self._positions)
        self._choose(layer, q, self._choice)
        self._side.join(layer)
        made = self._fetch(layer, self._choice)
        ring = self._recent.slots
        self._pages[:, :, ring:] = self._choice.known
        keys_at, values_at = self._keys_at[layer], None
        keys_at[:, :, ring:] = made.keys_at
        if self._values_at is not None and made.values_at is not None:
            values_at = self._values_at[layer]
            values_at[:, :, ring:] = made.values_at
        self._attend(layer, q, keys_at, values_at, self._pages, 0)
        return self._outs[layer].copy_(self._partials[0]), self._lses[0]

    def _take(self, layer: int, lists: torch.Tensor, answered: torch.Tensor, lane: _Lane) -> None:
        part = self._tables.place(layer).part
        self._chosen.copy_(lists, non_blocking=True)
        known_pages(self._chosen, self._tables.rows[part], answered, lane.known)

    def _choose(self, layer: int, q: torch.Tensor, lane: _Lane) -> None:
        assert self.index is not None
        assert lane.marks is not None
        first, wanted = self._plan[0, layer], self._plan[1, layer]
        seen = (self._positions, first, self._below)
        self.index.choose(layer, q, *seen, self._sinks, wanted, lane.marks, lane.known)

    def _fetch(self, layer: int, lane: _Lane) -> Assigned:
        """Give pages slots of the hot buffer, and fetch those that it misses."""
        assert self.hot is not None
        place, sources = self._tables.place(layer), lane.sources
        rows, tags = self._tables.rows[place.part], self._tables.tags[place.part]
        made = self.hot.assign(layer, lane.known, tags, lane.assigned, is_hint=lane.is_hint)
        page_sources(
            lane.known,
            made.missed,
            rows,
            sources,
            layer_offset=place.offset,
            checksums_offset=place.checksums_offset,
            piece_bytes=self._tables.piece_bytes,
        )
        key_bytes, value_bytes = (piece.bytes for piece in self._pieces)
        keys_at, values_at = made.miss_targets
        if self.layout.values == "own" and key_bytes == value_bytes:
            copy_fragments(lane.sources_at, lane.targets_at, key_bytes)
        else:
            copy_fragments(sources.keys, keys_at, key_bytes)
            if values_at is not None:
                copy_fragments(sources.values, values_at, value_bytes)
        check_pieces(sources, made.miss_targets, lane.known, lane.found, self._shape, layer)
        # Nobody attends to these bytes in a later step; nor to what this step fetches after them.
        self.hot.invalidate(layer, made, lane.found[:, None, None])
        return made

    def take_partial(self, answered: torch.Tensor) -> None:
        """Copy the near-data engine's partial result, or an empty one if there is no answer."""
        self._partials[1].copy_(self.near_out, non_blocking=True)
        self._lses[1].copy_(self.near_lse, non_blocking=True)
        self._lses[1].masked_fill_(answered[:1] != 1, -torch.inf)

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge both partial results into the layer's output and its log-sum-exp."""
        return merge(self._partials, self._lses, dtype=self._dtype)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        keys_at: torch.Tensor,
        values_at: torch.Tensor | None,
        pages: torch.Tensor,
        partial: int,
    ) -> None:
        attend(
            q,
            keys_at,
            values_at,
            pages,
            self._positions,
            page_tokens=self.layout.page_tokens,
            value_dim=self.layout.value_head_dim,
            scale=self._scale,
            softcap=self._softcap,
            window=self.layout.windows[layer],
            encodings=encodings_of(self.layout),
            out=self._partials[partial],
            lse=self._lses[partial],
            scratch=self._scratch,
        )

    def synchronize(self) -> None:
        """Wait for everything queued on the stream, and for hints."""
        self.follow()
        self._stream.synchronize()
        self._side.synchronize()

    def check(self) -> dict[int, CXLKVError]:
        """What went wrong, by request, after synchronize(): StaleError when pages were freed while
        they were on their way, CorruptError when others are not what was written. What a hint
        brought in vain is missed again, if it is chosen."""
        found = [] if self.hot is None else self._choice.found.tolist()
        return {request: self._error(number) for request, number in enumerate(found) if number}

    def _error(self, number: int) -> CXLKVError:
        if number == STALE:
            return StaleError("pieces were fetched from pages that were freed meanwhile")
        wrong = Wrong.of(number - 1, self._shape, self._requests, self.layout.kv_heads)
        return CorruptError(
            f"page {wrong.page} of request {wrong.request}, layer {wrong.layer}, kv head "
            f"{wrong.head}: the CRC of its {wrong.kind} is wrong, the bytes were changed. "
            "Release the sequence and recompute it"
        )

    def close(self) -> None:
        """End the device's use of the pool's memory; call it after synchronize()."""
        if self._mapping is not None:
            self._mapping.close()
