"""The decode step: near-data selection, and attention on a device that fetches what it misses.

With index="host", for each layer of a step, in this order in the device's stream:

    question    q, k, v go to pinned memory; the host appends k and v and selects pages for q
    meanwhile   what a hint named goes into the hot buffer, if hint() gave one before the layer;
                attention to what the device has: the newest pages, and the hot buffer's
    answer      the chosen pages; those that the hot buffer misses are fetched into its slots
    then        attention to these, and the merge of both by log-sum-exp

The thread that launches waits for nothing. Without a hot buffer the host attends to the chosen
pages, too, and its partial result crosses the link in place of pages; without a device that is all
there is. docs/explanation/gpu.md has the picture.

With index="device" a step does not involve the host. The device scores its summaries of all pages,
fetches the best pages that are not in the hot buffer, and attends to these pages and to the newest
ones. A hint does the same on a stream beside it, but for attending. Hot buffer and hints then
affect speed only, never outputs. The host appends k and v of all layers when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import positive_float32, softcap_of
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CXLKVError,
    OrderError,
    ReleasedError,
    UnevenError,
    UnsupportedError,
)
from cxlkv.gpu.driver import driver_of, index_of
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.hot import SlotCounts
from cxlkv.gpu.index import Placed, place_index, unserved
from cxlkv.gpu.mailbox import Mailbox
from cxlkv.gpu.pieces import DTYPES
from cxlkv.gpu.resident import Resident
from cxlkv.gpu.selector import DecodeStats, Selector, Step
from cxlkv.layout import KVLayout
from cxlkv.machine.lifetime import Closing
from cxlkv.ndp.engine import Budget, BudgetLike, Selection, budget_of, uniform
from cxlkv.numbers import is_whole, seconds
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence

__all__ = ["Decoder"]

DEADLINE_S = 2.0

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""q, k and v of all places, [requests, rows, heads, dim]."""


class LayerCounts(NamedTuple):
    """Counts by layer, int64 [layers]: pieces, which are pages of a kv head, that layers chose and
    the hot buffer had, or missed; those that were fetched for hints; and how often partial results
    crossed the link in place of pages."""

    hits: npt.NDArray[np.int64]
    misses: npt.NDArray[np.int64]
    hinted: npt.NDArray[np.int64]
    fallbacks: npt.NDArray[np.int64]
    piece_bytes: int

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """That crossed the link for the hot buffer."""
        return (self.misses + self.hinted) * self.piece_bytes

    @property
    def chosen(self) -> int:
        """Pieces that all layers chose."""
        return int(self.hits.sum() + self.misses.sum())

    def beside(self, other: LayerCounts) -> LayerCounts:
        """The counts of both."""
        return LayerCounts(
            self.hits + other.hits,
            self.misses + other.misses,
            self.hinted + other.hinted,
            self.fallbacks + other.fallbacks,
            self.piece_bytes,
        )


class Decoder(Closing):
    """Decode steps of up to `requests` sequences: add() them; begin(), layer() for each, end().

    device: "cuda", or "cpu", where no bytes move unless hot_pages is given. budget: how many pages
    a step's rows of one request attend to together, for each kv head; those that the device has
    come on top. rows: tokens of each request in a step (more than 1: speculated ones). hot_pages:
    slots of the hot buffer, a number, or one for each layer, or for each layer and kv head; 0: the
    near-data engine attends, and partial results cross the link. That is also what happens, with
    `fallback` saying why, where the driver does not map the pool's memory. recent_pages: the newest
    pages, kept on the device. pages_max: the longest sequence, in pages. deadline_s: how long the
    device waits for an answer.

    index: "host", or "device", by the methods "digest", "mean_std" and "sketch" ("auto" is this
    one) and budgets of pages or shares, a list for each kv head; then the newest recent_pages, at
    least the budget's `recent`, stand for its recent ones. "auto": "device" where it serves the
    method and the budget and has room for the summaries; `index` says which, `index_reason` why not
    "device". index_pages: how many pages the device keeps summaries of; by default all that
    requests may have.

    Raises MemoryShortError or GpuMemoryError when the device has too little memory, GpuError,
    UnsupportedError without CUDA, BadArgumentError. One thread uses a decoder, and nobody else
    appends to its sequences.
    """

    def __init__(
        self,
        pool: CXLPool,
        *,
        requests: int,
        q_heads: int,
        budget: BudgetLike,
        pages_max: int,
        device: str | torch.device = "cpu",
        rows: int = 1,
        hot_pages: SlotCounts = 0,
        recent_pages: int = 4,
        method: str = "auto",
        scale: float | None = None,
        softcap: float | None = None,
        deadline_s: float = DEADLINE_S,
        index: str = "host",
        index_pages: int | None = None,
    ):
        layout = pool.layout
        _check_sizes(layout, (requests, rows, pages_max), recent_pages, q_heads)
        deadline_s = seconds("deadline_s", deadline_s)
        self.pool, self.layout, self.device = pool, layout, _device(device)
        self._requests, self._rows, self._q_heads = requests, rows, q_heads
        self._budget = replace(budget_of(budget), per="sequence")
        self._budgets, self._pages_max = [self._budget] * requests, pages_max
        self._sequences: list[Sequence | None] = [None] * requests
        self._step: Step | None = None
        self._layer, self._closed = 0, False
        self._hint: tuple[int, torch.Tensor] | None = None  # to be asked: a layer, its guess
        self._brings: int | None = None  # the layer whose hint was asked
        self._fallbacks = np.zeros(layout.layers, np.int64)
        scale = layout.head_dim**-0.5 if scale is None else positive_float32(scale, "scale")
        softcap = softcap_of(softcap) or None
        self._resident: Resident | None = None
        self._mail: Mailbox | None = None
        self.rewind: int | None = None  # of what a step appends, as in Batch.append()
        self.lse: torch.Tensor | None = None
        """float32 [requests, rows, q_heads], the log-sum-exp of the last layer() on a device."""
        self._lists = longest_list(layout, self._budget, pages_max, rows)
        """Pages of the longest list that a request's budget may want."""
        placed = place_index(
            *(index, method, self._budget, hot_pages, index_pages, layout),
            *(requests * pages_max, self.device),
        )
        if self.device.type != "cpu" or not is_whole(hot_pages, 0, 0):
            make = partial(
                Resident,
                *(pool, self.device),
                requests=requests,
                rows=rows,
                q_heads=q_heads,
                pages_max=pages_max,
                hot_pages=hot_pages,
                recent_pages=recent_pages,
                lists=self._lists,
                scale=scale,
                softcap=softcap,
                budget=self._budget,
            )
            host_method = method if index == "auto" else None
            placed, self._resident = _made(make, placed, index_pages, host_method)
        self.index, method, self.index_reason = placed
        self._selector = Selector(method, scale, softcap)
        if self._resident is None:
            return
        self._asked = self._rows_for_host(self._resident)
        if self.index == "host":
            self._mail = Mailbox(self.device, self._serve, self._then, deadline_s)

    def _rows_for_host(self, resident: Resident) -> dict[str, torch.Tensor]:
        """Pinned memory for what the host is sent: a layer's rows, or k and v of all layers."""
        layout, lead = self.layout, [self._requests, self._rows]
        dims = {
            "q": (self._q_heads, layout.head_dim),
            "k": (layout.kv_heads, layout.head_dim),
            "v": (layout.kv_heads, layout.value_head_dim),
            "hint": (self._q_heads, layout.head_dim),
        }
        if resident.index is not None:
            dims, lead = {name: dims[name] for name in "kv"}, [layout.layers, *lead]
        return {
            name: resident._pinned(*lead, *shape, dtype=self.dtype) for name, shape in dims.items()
        }

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.layout.dtype]

    @property
    def stats(self) -> DecodeStats:
        return self._selector.stats

    @property
    def fallback(self) -> str | None:
        """The reason why partial results cross the link although a hot buffer was asked for."""
        return None if self._resident is None else self._resident.fallback

    def by_layer(self) -> LayerCounts:
        """Counts since the decoder was made, between two steps; waits for the device."""
        self._check_between_steps()
        layout, resident = self.layout, self._resident
        counts = np.zeros((2, 3, layout.layers), np.int64)
        if resident is not None and resident.hot is not None:
            counts = resident.hot.by_layer()
        heads = layout.kv_heads * layout.layers
        piece_bytes = layout.stored_token_bytes * layout.page_tokens // heads
        (hits, misses, _), (_, hinted, _) = counts
        return LayerCounts(hits, misses, hinted, self._fallbacks.copy(), piece_bytes)

    # ---- requests ----

    def add(self, sequence: Sequence, budget: BudgetLike | None = None) -> int:
        """Add a sequence whose layers are equally long; returns the request's number.

        The decoder appends to it from now on. budget: of this request, instead of the decoder's.
        Raises UnevenError in the middle of a step, BadArgumentError when all places are taken or
        the budget wants longer lists than the decoder's, UnsupportedError where the device chooses
        and the budget has other sinks than the decoder's or more recent pages than the device.
        """
        self._check_between_steps()
        own = self._budget if budget is None else self._own_budget(budget)
        if None not in self._sequences:
            raise BadArgumentError(f"all {self._requests} places are taken: remove() one")
        if len({sequence.tokens(layer) for layer in range(self.layout.layers)}) > 1:
            raise UnevenError("the sequence's layers have different lengths: a step is half done")
        request = self._sequences.index(None)
        if self._resident is not None:
            self._resident.give(request, own)
        self._restart(request, sequence)
        self._sequences[request], self._budgets[request] = sequence, own
        return request

    def _own_budget(self, given: BudgetLike) -> Budget:
        budget = replace(budget_of(given), per="sequence")
        uniform((self._budget, budget))
        if self.index == "device" and (reason := unserved(budget)):
            raise UnsupportedError(reason)
        longest = longest_list(self.layout, budget, self._pages_max, self._rows)
        if longest > self._lists:
            raise BadArgumentError(
                f"the request's budget wants lists of up to {longest} pages, the decoder was made "
                f"for {self._lists}: make it with the largest budget of its requests"
            )
        return budget

    def remove(self, request: int) -> Sequence:
        """Give a request's sequence back; its row and its memory on the device become free."""
        self._check_between_steps()
        sequence = self._of(request)
        self._sequences[request] = None
        if self._resident is not None:
            self._resident.forget(request)
        return sequence

    def truncate(self, request: int, tokens: int) -> None:
        """Sequence.truncate() of a request, between two steps: rejected speculated tokens go."""
        self._check_between_steps()
        self._cut(request, tokens)

    def _cut(self, request: int, tokens: int) -> None:
        sequence = self._of(request)
        sequence.truncate(tokens)
        with gpu_errors("a truncate"):
            if self._resident is not None:
                # From here on pages are others, or were copied to others.
                self._resident.forget(request, tokens // self.layout.page_tokens)
            self._restart(request, sequence)

    def changed(self, request: int, tokens: int) -> None:
        """Load anew what the device has of a request from token `tokens` on: its sequence was cut
        back to there, or appended to, by somebody else between two steps. Raises
        BadArgumentError."""
        self._check_between_steps()
        if not is_whole(tokens):
            raise BadArgumentError(f"tokens={tokens!r:.40}: a whole number, 0 or more")
        sequence = self._of(request)
        with gpu_errors("a change"):
            if self._resident is not None:
                self._resident.forget(request, tokens // self.layout.page_tokens)
            self._restart(request, sequence)

    def _of(self, request: int) -> Sequence:
        known = is_whole(request, 0, self._requests - 1)
        found = self._sequences[request] if known else None
        if found is None:
            raise BadArgumentError(f"there is no request {request!r:.40}")
        return found

    def _restart(self, request: int, sequence: Sequence) -> None:
        if self._resident is not None:
            self._resident.load(request, sequence)

    def _check_between_steps(self) -> None:
        if self._closed:
            raise ClosedError("the decoder was closed")
        if self._step is not None:
            raise OrderError("a step is under way: end() or abandon() it first")

    # ---- a step ----

    def begin(self, counts: Mapping[int, int] | None = None) -> None:
        """Begin a step: counts[request] more tokens for each of these requests, which are the first
        of its `rows`; other rows and requests stay out of it, and none may take part. None: `rows`
        for all requests. With counts, end() and end_each() have the errors of requests that cannot
        begin, too. Raises BadArgumentError."""
        self._check_between_steps()
        taken, resident = self._checked(counts), self._resident
        active = np.array(sorted(taken), np.int64)
        requests: list[int] = active.tolist()
        sequences = [self._of(request) for request in requests]
        step = Step(
            pool=self.pool,
            active=active,
            counts=np.array([taken[request] for request in requests], np.int64),
            rows=self._rows,
            sequences=sequences,
            lengths=np.array([_length(sequence) for sequence in sequences], np.int64),
            recent_from=np.full(len(active), np.iinfo(np.int32).max, np.int32),
            budgets=[self._budgets[request] for request in requests],
            rewind=self.rewind,
        )
        self._served = step  # what of it the engine serves
        self._errors: dict[int, CXLKVError] = {}  # of requests that it has left out since
        self._picked: Selection | None = None  # of the question that is being served
        if resident is not None:
            self._each(resident.refresh)
            if counts is None and self._errors:
                raise next(iter(self._errors.values()))
            self._served = replace(self._served, recent_from=resident.begin(self._served))
        self._step = step
        self._layer, self._hint, self._brings = 0, None, None
        self._guesses: list[torch.Tensor] = []  # until the step ends: other streams may read them
        self._selector.begin()

    def _checked(self, counts: Mapping[int, int] | None) -> Mapping[int, int]:
        if counts is None:
            held = [i for i, one in enumerate(self._sequences) if one is not None]
            if not held:
                raise BadArgumentError("no request to decode: add() one")
            return dict.fromkeys(held, self._rows)
        if not isinstance(counts, Mapping):
            raise BadArgumentError(f"counts={counts!r:.40}: rows of requests by number, {{0: 1}}")
        for request, count in counts.items():
            self._of(request)
            if not is_whole(count, 1, self._rows):
                raise BadArgumentError(
                    f"request {request}: {count!r:.40} rows, the decoder was made for 1 to "
                    f"{self._rows} in a step"
                )
        return counts

    def hint(self, layer: int, q: torch.Tensor) -> None:
        """Say what the query of a layer will be like, q [requests, rows, q_heads, head_dim]: before
        layer() of the layer in front of it, as soon as that one's input is known, or just behind.

        Pages for it are chosen while the device computes, and fetched into the hot buffer while the
        host chooses for the query itself; the layer attends to both. q is read when the layer in
        front has its answer. With index="device" the device chooses and fetches at once, beside the
        current stream, and the layer attends to what is chosen for its own query alone. Where no
        pages cross the link, a hint does nothing.
        """
        if self._step is None or layer not in (self._layer, self._layer + 1):
            raise OrderError(f"a hint for layer {layer}: only for the next two, within a step")
        self._check_tensor("q", q, self._q_heads, self.layout.head_dim)
        mail = self._mail
        if self._resident is None or self._resident.hot is None or layer >= self.layout.layers:
            return
        if self._brings == layer or self._resident.brings(layer):
            raise OrderError(f"a hint for layer {layer} was given and asked already")
        self._guesses.append(q)
        with gpu_errors(f"a hint for layer {layer}"):
            self._resident.follow()  # q may be read on another stream
            if mail is None:
                self._resident.bring_by_index(layer, q)
                self.stats.hints += 1
                return
            self._hint = (layer, q)
            if layer == self._layer:
                self._ask_hint(layer)

    def _ask_hint(self, layer: int) -> None:
        """Ask what hint() said of a layer. One question at a time is on its way."""
        if self._hint is None or self._hint[0] != layer:
            return
        assert self._mail is not None
        self._asked["hint"].copy_(self._hint[1], non_blocking=True)
        self._mail.ask(self.layout.layers + layer)
        self._hint, self._brings = None, layer

    def layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One layer's rows of all requests: q [requests, rows, q_heads, head_dim], k and v
        [requests, rows, kv_heads, dim], in the pool's dtype; returns the attention's output
        [requests, rows, q_heads, value_head_dim], zeros for places without a request.

        Layers come in order, each once a step. What goes wrong near the data is raised by end().
        """
        if self._step is None or layer != self._layer:
            raise OrderError(f"layer {layer}: begin() a step, then layers from 0 on, in order")
        self._check_rows(q, k, v)
        self._layer += 1
        resident = self._resident
        if resident is None:
            out = torch.zeros((*q.shape[:3], self.layout.value_head_dim), dtype=q.dtype)
            self._each(lambda step: self._attend(step, layer, (q, k, v), out, None))
            return out
        mail = self._mail
        with gpu_errors(f"layer {layer}"):
            resident.follow()
            if mail is None:
                for name, rows in (("k", k), ("v", v)):
                    if rows is not None:
                        self._asked[name][layer].copy_(rows, non_blocking=True)
                out, self.lse = resident.attend_by_index(layer, q, k, v)
                return out
            brings, self._brings = self._brings == layer, None
            if brings:
                mail.await_answer()
                resident.take_hint(layer, mail.answered)
            for name, rows in (("q", q), ("k", k), ("v", v)):
                if rows is not None:
                    self._asked[name].copy_(rows, non_blocking=True)
            mail.ask(layer)
            if brings:
                resident.bring(layer)
            resident.attend_resident(layer, q, k, v)
            mail.await_answer()
            if resident.hot is None:
                resident.take_partial(mail.answered)
            else:
                resident.take_chosen(layer, mail.answered)
                self._ask_hint(layer + 1)
                resident.attend_chosen(layer, q)
            out, self.lse = resident.merged()
            return out

    def end(self, *, replayed: bool = False) -> None:
        """Wait for the step, and raise what went wrong in it: then nothing of it stays, and its
        outputs are not to be used.

        StaleError: a page was freed while it was on its way. CorruptError: its bytes were changed.
        WorkerError: the near-data engine was late. GpuError: a kernel failed. Else what the engine
        raised, PoolFullError among them.
        replayed: the layers were in a CUDA graph, captured from layer() calls between begin() and
        abandon(), and replayed on begin()'s stream.
        """
        step, errors = self._finish(replayed)
        if errors:
            self._take_back(step, step.active.tolist())
            raise next(iter(errors.values()))
        self.stats.steps += 1

    def end_each(self, *, replayed: bool = False) -> dict[int, CXLKVError]:
        """End the step as end() does, but return errors by request. A request with an error keeps
        nothing of the step; the outputs of all others are right, and they go on. WorkerError and
        GpuError are errors of all requests that took part."""
        step, errors = self._finish(replayed)
        self._take_back(step, list(errors))
        self.stats.steps += 1
        return errors

    def _finish(self, replayed: bool) -> tuple[Step, dict[int, CXLKVError]]:
        """End the step; what went wrong, by request."""
        step = self._step
        if step is None or (self._layer != self.layout.layers and not replayed):
            raise OrderError("end() comes after begin() and all layers")
        self._settle(step)
        if self._resident is not None and self._resident.index is not None:
            good = [i for i, one in enumerate(step.active.tolist()) if one not in self._errors]
            self._served = step.only(good)
            self._each(self._append_all)
        return step, self._errors

    def _append_all(self, step: Step) -> None:
        """Append what the device has attended to already: rows of all layers."""
        assert self._resident is not None
        assert self._resident.index is not None
        own = self.layout.values == "own"
        for layer in range(self.layout.layers):
            values = step.rows_of(self._asked["v"][layer]) if own else None
            step.append(layer, step.rows_of(self._asked["k"][layer]), values)
        self.stats.selects += self.layout.layers
        self.stats.bytes_scored += sum(map(self._resident.index.bytes_of, step.active.tolist()))

    def abandon(self) -> None:
        """Undo a step, as if it had not begun; its errors are not raised."""
        step = self._step
        if step is not None:
            with suppress(CXLKVError):
                self._settle(step)
            self._take_back(step, step.active.tolist())

    def _settle(self, step: Step) -> None:
        """Wait for device and engine, which ends the step, and note what went wrong."""
        resident = self._resident
        try:
            if resident is not None:
                with gpu_errors("a decode step"):
                    resident.synchronize()
                if self._mail is not None:
                    self._mail.check()
                for request, error in resident.check().items():
                    self._errors.setdefault(request, error)
        except CXLKVError as error:
            if self._mail is not None:  # what it still appends is taken back, too
                with suppress(CXLKVError), gpu_errors("a decode step"):
                    self._mail.check()
            if not len(step.active):
                raise
            self._errors = dict.fromkeys(step.active.tolist(), error)
        finally:
            self._step = None
            self._guesses.clear()

    def _take_back(self, step: Step, requests: list[int]) -> None:
        """The step's rows of some requests, and what the device keeps of them."""
        lengths = dict(zip(step.active.tolist(), step.lengths.tolist(), strict=True))
        for request in requests:
            # A released sequence is its owner's; a device whose context is lost says so again.
            with suppress(CXLKVError):  # the others are taken back all the same
                self._cut(request, lengths[request])

    def _check_rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        layout = self.layout
        if (v is None) == (layout.values == "own"):
            raise BadArgumentError("v is given exactly when the pool stores values of their own")
        for name, tensor, heads, dim in (
            ("q", q, self._q_heads, layout.head_dim),
            ("k", k, layout.kv_heads, layout.head_dim),
            ("v", v, layout.kv_heads, layout.value_head_dim),
        ):
            if tensor is not None:
                self._check_tensor(name, tensor, heads, dim)

    def _check_tensor(self, name: str, tensor: torch.Tensor, heads: int, dim: int) -> None:
        shape = (self._requests, self._rows, heads, dim)
        if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            raise BadArgumentError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, wanted {self.dtype} {shape}"
            )
        if tensor.device != self.device:
            raise BadArgumentError(f"{name} lies on {tensor.device}, not on {self.device}")

    # ---- near the data ----

    def _each(self, work: Callable[[Step], None]) -> None:
        """Work for all requests that are served; where that fails, for one after the other: who
        fails again is left out for the rest of the step."""
        step = self._served
        try:
            if len(step.active):
                work(step)
        except CXLKVError:
            good = []
            for place, request in enumerate(step.active.tolist()):
                try:
                    work(step.only([place]))
                    good.append(place)
                except CXLKVError as error:
                    self._errors[request] = error
            self._served, self._picked = step.only(good), None

    def _serve(self, subject: int) -> None:
        """Append a layer's rows, choose pages for its queries; the answer lies in pinned memory. Or
        a hint's: its subject is the layer's number after those of all layers."""
        resident = self._resident
        assert resident is not None
        layer = subject % self.layout.layers
        if subject >= self.layout.layers:
            self._serve_hint(resident, layer)
            return
        q, k, v = (self._asked[name] for name in "qkv")
        own = v if self.layout.values == "own" else None
        if resident.hot is None:
            self._fallbacks[layer] += 1
            results = resident.near_out, resident.near_lse
            self._each(lambda step: self._attend(step, layer, (q, k, own), *results))
            return

        def choose(step: Step) -> None:
            _, picked = self._choose(step, layer, (q, k, own))
            self._name(step, layer, picked, resident.chosen)
            self._picked = picked

        resident.chosen.numpy().fill(-1)
        self._each(choose)

    def _serve_hint(self, resident: Resident, layer: int) -> None:
        step = self._served
        resident.hinted.numpy().fill(-1)
        with suppress(CXLKVError):  # the layer's own question has it, too
            if len(step.active):
                q = step.rows_of(self._asked["hint"])
                picked = self._selector.follow_hint(step, layer, q)
                if picked is not None:
                    self._name(step, layer, picked, resident.hinted)

    def _name(self, step: Step, layer: int, picked: Selection, lists: torch.Tensor) -> None:
        """Write the lists for the device, which will read the pages by their addresses."""
        step.batch.verify(layer, picked)
        lists.numpy()[step.active, :, : picked.pages.shape[2]] = picked.pages

    def _then(self, subject: int) -> None:
        picked, self._picked = self._picked, None
        if picked is not None:
            self._selector.compare(subject, picked)

    def _choose(self, step: Step, layer: int, rows: Rows) -> tuple[torch.Tensor, Selection]:
        """The queries as the engine has them, and the pages that it chooses for them."""
        q, k = (step.rows_of(one) for one in rows[:2])
        v = None if rows[2] is None else step.rows_of(rows[2])
        return q, self._selector.choose(step, layer, q, k, v)

    def _attend(
        self, step: Step, layer: int, rows: Rows, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Append, choose and attend near the data."""
        found, sums = self._selector.attend(step, layer, *self._choose(step, layer, rows))
        step.put_rows(out, found)
        if lse is not None:
            step.put_rows(lse, sums)

    # ---- ending ----

    def close(self) -> None:
        """Free the device's memory; sequences stay with their owners."""
        if self._closed:
            return
        self._closed = True
        if self._resident is not None:
            self._resident.synchronize()
            if self._mail is not None:
                self._mail.close()
            self._resident.close()
            # Not when the collector comes: whoever opens the next one has room for one.
            self._resident = self._mail = None


def _length(sequence: Sequence) -> int:
    """Before a step; 0 of a released one, which is an error of the step."""
    try:
        return len(sequence)
    except ReleasedError:
        return 0


def longest_list(layout: KVLayout, budget: Budget, pages_max: int, rows: int) -> int:
    """The most pages of a list, in any layer; one with a window sees few."""
    tokens = layout.page_tokens
    return max(
        budget.pages_at_most(
            pages_max if window is None else min(pages_max, (window + rows - 2) // tokens + 2),
            layer,
        )
        for layer, window in enumerate(layout.windows)
    )


def _check_sizes(layout: KVLayout, sizes: tuple[int, ...], recent_pages: int, q_heads: int) -> None:
    if not all(is_whole(one, 1, 2**31 - 1) for one in sizes):
        raise BadArgumentError("requests, rows and pages_max are whole numbers, at least 1")
    if not is_whole(recent_pages, 0, 2**31 - 1):
        raise BadArgumentError(f"recent_pages={recent_pages!r:.40}: a whole number, 0 or more")
    if not is_whole(q_heads, 1) or q_heads % layout.kv_heads:
        raise BadArgumentError(f"{q_heads} query heads are none for {layout.kv_heads} kv heads")


def _made(
    make: partial[Resident], placed: Placed, pages: int | None, host_method: str | None
) -> tuple[Placed, Resident]:
    """Take the device's memory. host_method: by which the host may choose where the device cannot
    have the index."""
    with gpu_errors("a decoder's memory"):
        try:
            return placed, make(index=placed.on_device(pages))
        except UnsupportedError as error:
            if host_method is None or placed.where == "host":
                raise
            return Placed("host", host_method, str(error)), make(index=None)


def _device(given: str | torch.device) -> torch.device:
    """The device with its number: tensors have one, too. Raises UnsupportedError without CUDA."""
    device = torch.device(given)
    if device.type == "cpu":
        return device
    driver_of(device)
    return torch.device("cuda", index_of(device))
