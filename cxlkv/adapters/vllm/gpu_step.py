"""Attention in the pool for an engine on a GPU: which rows attend where, and what is copied.

The pool's K and V stay where they are. In each layer of a step
    down   k and v of all rows, q of those that see earlier tokens: one wait
    here   k and v are appended; q attends near the pages of earlier tokens, or to chosen ones
    up     these partial results
while the device attends to the step's own k and v, which it has: for a first chunk of a prompt
that is all there is to see, for a later one the rest, merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.vllm.pool_attention import (
    ALL,
    EARLIER,
    OWN,
    Group,
    Ints,
    Kind,
    MakeStep,
    PoolAttention,
    Rows,
    Scores,
    Step,
)
from cxlkv.adapters.vllm.pools import WITHOUT_US
from cxlkv.arrays import memory_of
from cxlkv.errors import UnsupportedError
from cxlkv.kernels.attend import attend
from cxlkv.kernels.merge import merge
from cxlkv.ndp.engine import Selection, unscored

PIECE_TOKENS = 64
ROWS_TOGETHER = 512
"""Rows that one launch attends: it passes over the keys behind the last of them, too."""

if TYPE_CHECKING:
    from cxlkv.layout import KVLayout

    Span = slice[int, int]
    Partial = tuple[torch.Tensor, torch.Tensor]


class Link:
    """Rows between a device and host memory, which is pinned where the device is a GPU.

    bring() and send() only begin; after wait() all that was brought is there, and the memory from
    which earlier layers sent may be written again: all goes over one stream, the engine's.
    """

    def __init__(self, device: torch.device):
        self.device = device
        on_gpu = device.type == "cuda"
        self._done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._held: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: Sequences[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory of this name, the same every time; it grows when more is wanted."""
        wanted, held = prod(shape), self._held.get(name)
        if held is None or held.dtype != dtype or held.numel() < wanted:
            pinned = self._done is not None
            held = torch.empty(wanted, dtype=dtype, device="cpu", pin_memory=pinned)
            self._held[name] = held
        return held[:wanted].view(*shape)

    def bring(self, name: str, there: torch.Tensor, spans: Sequences[Span]) -> torch.Tensor:
        """Rows of a tensor on the device; only these are written, at their own numbers."""
        here = self.buffer(name, there.shape, there.dtype)
        for span in spans:
            here[span].copy_(there[span], non_blocking=True)
        return here

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def mark(self) -> None:
        """wait() is for what was begun until now."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))

    def send(self, here: torch.Tensor, there: torch.Tensor, spans: Sequences[Span]) -> None:
        for span in spans:
            there[span].copy_(here[span], non_blocking=True)


@dataclass(frozen=True)
class Split:
    """A later chunk of a prompt: the tokens from `skipped` on lie behind the page that also holds
    earlier ones."""

    place: int
    rows: Span
    skipped: int


class DeviceStep(Step):
    """A step whose tensors are on a device. A request's rows are neighbours, as in any step."""

    def __init__(
        self,
        link: Link,
        attention: PoolAttention,
        request_rows: Sequences[int],
        starts: Ints,
        lengths: Sequences[int],
    ):
        self._link = link
        self._page_tokens = attention.pool.layout.page_tokens
        super().__init__(attention, request_rows, starts, lengths)

    def _plan(self) -> list[Group]:
        """K and V of all rows arrive together, and are appended so."""
        groups, sound = super()._plan(), self._sound()
        self._all = groups if [group.places for group in groups] == [sound] else []
        if sound and not self._all:
            self._all = [self._group(sound, ALL)]
        return groups

    def _kind(self, place: int) -> Kind:
        if not self.computed[place]:
            return OWN
        kind = super()._kind(place)
        rows = self._count(place)
        small = rows <= max(self._attention.decode_rows, self._skipped(place))
        return kind if kind != ALL or small else EARLIER

    def _skipped(self, place: int) -> int:
        """Tokens of the step that lie in a page with earlier ones."""
        return -self.computed[place] % self._page_tokens

    def _span(self, place: int) -> Span:
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def attend(self, layer: int, given: Rows, scores: Scores, is_shared: bool = False) -> None:
        """Do what Step.attend does, with tensors on the device, which has K and V of all layers."""
        assert not is_shared, "check_device() refuses such models"
        q, k, v, out = given
        assert v is not None, "vLLM asks for no latents of the backend for devices"
        link, rows = self._link, int(self.starts[-1])
        near_q = link.bring("q", q[:rows], self._near_spans())
        near_k, near_v = (
            link.bring(name, one[:rows], [slice(0, rows)]) for name, one in (("k", k), ("v", v))
        )
        link.mark()
        out[rows:] = 0
        # The device has these to do while the host waits for the rows, and reads the pool.
        self._attend_first(q, k, v, out, scores)
        parts = {split.place: attend_behind(split, q, k, v, scores) for split in self._splits()}
        link.wait()
        self._each(self._all, lambda group: group.append(layer, near_k, near_v))
        found = link.buffer("out", (rows, *out.shape[1:]), out.dtype)
        sums = link.buffer("lse", (rows, q.shape[1]), torch.float32)

        def near(group: Group) -> None:
            picked = None
            if group.kind == EARLIER:
                first = [self.computed[place] for place in group.places]
                picked = earlier_pages(self._attention, layer, first, scores.window)
            own, sums[group.rows] = group.attend(layer, near_q, scores, picked)
            sinks = None if group.kind == EARLIER else scores.sinks  # else when both are merged
            found[group.rows] = beside_sinks(own, sums[group.rows], sinks)

        self._each(self._groups, near)
        link.send(found, out, self._near_spans())
        self._merge(parts, sums, out, scores)
        self._fill_failed(out)

    def _near_spans(self) -> list[Span]:
        """Rows that see the pool, neighbours as one."""
        spans: list[Span] = []
        for place in sorted(place for group in self._groups for place in group.places):
            span = self._span(place)
            if spans and spans[-1].stop == span.start:
                span = slice(spans.pop().start, span.stop)
            spans.append(span)
        return spans

    def _splits(self) -> list[Split]:
        return [
            Split(place, self._span(place), self._skipped(place))
            for group in self._groups
            if group.kind == EARLIER
            for place in group.places
        ]

    def _attend_first(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scores: Scores
    ) -> None:
        """First chunks, whatever became of their pages."""
        for place in self._places:
            if not self.computed[place]:
                rows = self._span(place)
                out[rows] = attend_to_own(q[rows], k[rows], v[rows], scores)

    def _merge(
        self, parts: dict[int, Partial], sums: torch.Tensor, out: torch.Tensor, scores: Scores
    ) -> None:
        """What the device found of later chunks, into what came from near the pool."""
        for split in self._splits():
            own, own_sums = parts[split.place]
            near_sums = torch.empty_like(own_sums)
            near_sums.copy_(sums[split.rows], non_blocking=True)
            both = [out[split.rows].contiguous(), own], [near_sums, own_sums]
            merged, lse = merge(*both, dtype=out.dtype)
            out[split.rows] = beside_sinks(merged, lse, scores.sinks)


def steps_on(device: torch.device) -> MakeStep | None:
    """How steps of tensors on this device are made; None: as those in host memory."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise UnsupportedError(f"attention in the pool for tensors on {device}: cpu and cuda are")
    return partial(DeviceStep, Link(device))


def check_device(device: torch.device, layout: KVLayout, shares: bool) -> None:
    """Raises UnsupportedError for layers of an engine on a device that share others' K and V, and
    for an encoded pool: it attends to a step's own K and V as they were made, and to those of
    earlier steps as they are kept, so that what a model says would depend on the chunks of a
    prompt."""
    if device.type != "cpu" and shares:
        raise UnsupportedError(
            f"cxlkv: attention in the pool for tensors on {device} has no layers that share "
            f"others' K and V: {WITHOUT_US}"
        )
    if device.type != "cpu" and layout.is_encoded:
        raise UnsupportedError(
            f"attention in the pool for tensors on {device}, with keys and values kept as "
            f'{layout.encoding}: not built yet. Write "attention": "engine", whose prefixes may be '
            'kept so, or leave out "encoding"'
        )


def earlier_pages(
    attention: PoolAttention, layer: int, computed: Sequences[int], window: int | None
) -> Selection:
    """The pages that hold anything from before the step and that its rows see, of each request."""
    layout, behind = attention.pool.layout.of_layer(layer), window or 1 << 62
    first = [max(0, tokens - behind + 1) // layout.page_tokens for tokens in computed]
    last = [-(-tokens // layout.page_tokens) for tokens in computed]
    most = max(end - start for start, end in zip(first, last, strict=True))
    pages = np.full((len(first), layout.kv_heads, most), -1, np.int32)
    for row, start, end in zip(pages, first, last, strict=True):
        row[:, : end - start] = np.arange(start, end)
    return unscored(pages, np.zeros(len(first) + 1, np.int32), "sequence")


def attend_to_own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention of a text's first tokens, [rows, heads, dim], over themselves, on their device."""
    rows, heads, dim = q.shape
    windowed = scores.window is not None and rows > scores.window
    if scores.softcap or windowed or v.shape[2] != dim or scores.sinks is not None:
        out, lse = attend_behind(Split(0, slice(0, rows), 0), q, k, v, scores)
        return beside_sinks(out, lse, scores.sinks).to(q.dtype)
    query, key, value = (one.transpose(0, 1)[None] for one in (q, k, v))
    grouped = heads != k.shape[1]
    found = scaled_dot_product_attention(
        query, key, value, is_causal=rows > 1, scale=scores.scale, enable_gqa=grouped
    )
    return found[0].transpose(0, 1)


def attend_behind(
    split: Split, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> Partial:
    """Attention of rows of a step over its own tokens, but for the first `skipped` of them:
    float32 (out [rows, heads, value dim], lse), 0 and -inf for rows that see none."""
    queries, skipped = q[split.rows], split.skipped
    keys, values = (as_pieces(one[split.rows][skipped:]) for one in (k, v))
    rows, heads, _ = queries.shape
    out = torch.empty((rows, heads, v.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    keys_at, values_at = addresses(keys), addresses(values)
    for first in range(0, rows, ROWS_TOGETHER):
        some = slice(first, min(first + ROWS_TOGETHER, rows))
        begin = 0 if scores.window is None else max(0, first - skipped - scores.window + 1)
        seen = slice(begin // PIECE_TOKENS, max(0, -(-(some.stop - skipped) // PIECE_TOKENS)))
        places = torch.arange(some.start, some.stop, device=q.device) - skipped
        attend(
            queries[some][None],
            keys_at[:, :, seen].contiguous(),
            values_at[:, :, seen].contiguous(),
            numbers(keys, seen),
            places.clamp(min=-1)[None],  # -1: a row that sees nothing here
            page_tokens=PIECE_TOKENS,
            value_dim=v.shape[2],
            scale=scores.scale,
            softcap=scores.softcap or None,
            window=scores.window,
            out=out[some][None],
            lse=lse[some][None],
        )
    return out, lse


def as_pieces(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] as [heads, pieces, PIECE_TOKENS, dim], the last piece not filled up."""
    tokens, heads, dim = rows.shape
    pieces = -(-tokens // PIECE_TOKENS)
    made = rows.new_empty((heads, pieces * PIECE_TOKENS, dim))
    made[:, :tokens] = rows.transpose(0, 1)
    return made.view(heads, pieces, PIECE_TOKENS, dim)


def numbers(pieces: torch.Tensor, some: Span) -> torch.Tensor:
    """Numbers of these pieces of every head: int32 [1, heads, n]."""
    found = torch.arange(some.start, some.stop, dtype=torch.int32, device=pieces.device)
    return found.expand(1, pieces.shape[0], -1).contiguous()


def addresses(pieces: torch.Tensor) -> torch.Tensor:
    """Where the pieces of every head lie: int64 [1, heads, pieces]."""
    heads, count, tokens, dim = pieces.shape
    index = torch.arange(heads * count, device=pieces.device).view(1, heads, count)
    return index * (tokens * dim * pieces.element_size()) + memory_of(pieces, "pieces")
