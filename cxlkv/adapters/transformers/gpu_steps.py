"""Steps of one token on a device: a Decoder chooses, fetches and attends for a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.common.steps import LayerStep
from cxlkv.errors import BadArgumentError, ReleasedError, UnsupportedError
from cxlkv.gpu.decode import Decoder, LayerCounts, longest_list
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.index import unserved
from cxlkv.gpu.pieces import encodings_of
from cxlkv.kernels.slots import SLOTS_MAX
from cxlkv.ndp import choosers
from cxlkv.ndp.engine import PAGES_MAX, Budget
from cxlkv.numbers import is_whole
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

if TYPE_CHECKING:
    from cxlkv.adapters.transformers.graph import Captured

PAGES_MORE = 64  # for which a decoder has room beyond what its texts have
ALL = Budget(share=1.0)


class _Asked(NamedTuple):
    """What a decoder is made for."""

    requests: int
    q_heads: int
    device: torch.device
    budgets: frozenset[Budget]
    scale: float
    softcap: float | None


class GpuSteps:
    """The decoder of a cache. It is made for a batch when that takes its first step, and anew when
    a text outgrows it. Raises UnsupportedError for what a decoder does not do."""

    def __init__(self, pool: CXLPool, method: str, index: str, hot_pages: int | None):
        encodings_of(pool.layout)
        choosers.refuse(method, "a GPU")
        if hot_pages is not None and not is_whole(hot_pages, 1):
            raise BadArgumentError(f"hot_pages={hot_pages!r:.40}: a whole number, at least 1")
        self._pool, self._method, self._index, self._hot_pages = pool, method, index, hot_pages
        self._decoder: Decoder | None = None
        self.captured: Captured | None = None  # a step of this decoder, as a graph
        self._pages_max = 0
        self.counts: LayerCounts | None = None
        """Of all steps, as the last one left them."""
        self._before: LayerCounts | None = None  # of decoders that were closed
        self._guess: tuple[int, Tensor] | None = None  # of a step that is to begin
        self._rows: list[Tokens] = []
        self._budgets: list[Budget] = []  # the rows'
        self._given: Sequence[Budget] = ()
        self._wanted = [self._wide(ALL)]  # what was given, as decoders take it
        self._made_for: _Asked | None = None
        self._is_current = False
        self._detach: Callable[[], object] = lambda: None
        self._known: list[int] = []  # of each row, the tokens that the device has at least rightly

    def changed(self) -> None:
        """The rows are others, or have got tokens or lost some, elsewhere."""
        self._is_current, self._guess = False, None
        if self._decoder is not None and self._decoder._step is not None:
            self._decoder.abandon()  # a pass that failed on its way
        for request, row in enumerate(self._rows):
            with suppress(ReleasedError):
                self._known[request] = min(self._known[request], len(row))

    def hint(self, layer: int, query: Tensor) -> None:
        """Pass on what a layer's query [rows, q_heads, dim] will be like, before the layer in front
        of it; what a decoder does not take is dropped."""
        decoder = self._decoder
        if decoder is None or decoder._step is None:
            self._guess = (layer, query)  # the first layer begins the step
            return
        decoder.hint(layer, query.to(decoder.dtype)[:, None].contiguous())

    def layer(
        self,
        part: LayerStep,
        sequences: Sequence[Tokens],
        budgets: Sequence[Budget],
        rows: tuple[Tensor, Tensor, Tensor | None],
        rewind: int,
    ) -> Tensor:
        """Attend with q, and keep k and v of rows [rows, heads, dim], a token of each sequence;
        returns [rows, q_heads, value_dim]. The last layer ends the step, and raises what went
        wrong. budgets: one for all rows, or one for each; none: all pages. rewind: as in
        Batch.append()."""
        q = rows[0]
        if part.index == 0:
            wanted = frozenset(self._want(budgets))
            asked = _Asked(
                *(len(sequences), q.shape[1], q.device, wanted, part.scale, part.softcap)
            )
            self._begin(asked, sequences, rewind)
            guess, self._guess = self._guess, None
            if guess is not None and guess[1].shape == q.shape:
                self.hint(*guess)
        out = self.attend(part, rows)
        if part.index == self._pool.layout.layers - 1:
            self._end()
        return out

    def attend(self, part: LayerStep, rows: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        """layer() within a step: nothing begins or ends here, and a graph may capture it."""
        decoder, made = self._decoder, self._made_for
        assert decoder is not None
        assert made is not None
        if (made.scale, made.softcap) != (part.scale, part.softcap):
            raise UnsupportedError('attention="gpu": layers differ in scale or softcap')
        query, key, value = (
            None if one is None else one.to(decoder.dtype)[:, None] for one in rows
        )
        assert query is not None
        assert key is not None
        out = decoder.layer(part.index, query.contiguous(), key, value)[:, 0]
        if part.sinks is not None:
            assert decoder.lse is not None
            out = beside_sinks(out, decoder.lse[:, 0], part.sinks)
        return out.to(rows[0].dtype)

    def fits(self, sequences: Sequence[Tokens], budgets: Sequence[Budget]) -> bool:
        """Whether the decoder that is there takes the next step of these."""
        made, pages = self._made_for, self._pages(sequences)
        if self._decoder is None or made is None or pages > self._pages_max:
            return False
        wanted = frozenset(self._want(budgets))
        return made == made._replace(requests=len(sequences), budgets=wanted)

    def whole(
        self,
        sequences: Sequence[Tokens],
        budgets: Sequence[Budget],
        rewind: int,
        work: Callable[[], object],
        *,
        undone: bool = False,
    ) -> None:
        """A step of all layers, which work() has the device do, by a graph; fits() was asked.
        undone: work() only captured it, and nothing of the step stays."""
        assert self._made_for is not None
        assert self._decoder is not None
        self._want(budgets)
        self._guess = None
        self._begin(self._made_for, sequences, rewind)
        with gpu_errors("a captured step"):
            work()
        if undone:
            self._decoder.abandon()
        else:
            self._end(replayed=True)

    def _begin(self, asked: _Asked, sequences: Sequence[Tokens], rewind: int) -> None:
        try:
            decoder = self._ready(asked, sequences)
        except BaseException:
            self.close()
            raise
        decoder.rewind = rewind
        decoder.begin()

    def _end(self, *, replayed: bool = False) -> None:
        assert self._decoder is not None
        self._decoder.end(replayed=replayed)
        self._known = [len(row) for row in self._rows]

    def _pages(self, sequences: Sequence[Tokens]) -> int:
        """Of the longest one behind its next step."""
        return -(-(max(map(len, sequences)) + 1) // self._pool.layout.page_tokens)

    def _want(self, given: Sequence[Budget]) -> list[Budget]:
        """As decoders take them: one for all rows, or one for each."""
        if given is not self._given:
            self._given, self._wanted = given, [self._wide(one) for one in given or [ALL]]
        return self._wanted

    def _ready(self, asked: _Asked, sequences: Sequence[Tokens]) -> Decoder:
        """The decoder, with these rows as they are now."""
        pages, wanted = self._pages(sequences), self._wanted
        budgets = wanted * len(sequences) if len(wanted) == 1 else wanted
        if self._decoder is None or asked != self._made_for or pages > self._pages_max:
            self._make(asked, pages)
        elif not self._is_current or budgets != self._budgets:
            self._meet(sequences, budgets)
        decoder = self._decoder
        assert decoder is not None
        if not self._rows:
            for sequence, budget in zip(sequences, budgets, strict=True):
                decoder.add(sequence, budget)
            self._rows, self._budgets = list(sequences), budgets
            self._known = [len(row) for row in self._rows]
        self._is_current = True
        return decoder

    def _wide(self, budget: Budget) -> Budget:
        """With all pages in layers that have a window."""
        most = PAGES_MAX if budget.pages is not None else 1.0
        windows = self._pool.layout.windows
        wide = {layer: most for layer, window in enumerate(windows) if window is not None}
        return replace(budget, by_layer={**budget.by_layer, **wide}) if wide else budget

    def _meet(self, sequences: Sequence[Tokens], budgets: list[Budget]) -> None:
        """Rows that stay keep what the device has of them, up to where they are the same."""
        assert self._decoder is not None
        changed = []
        for request, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            if self._rows[request] is sequence and self._budgets[request] == budget:
                self._decoder.changed(request, self._known[request])
            else:
                changed.append(request)
        for request in changed:
            self._decoder.remove(request)
        for request in changed:  # the lowest place that is free is the next one's
            self._decoder.add(sequences[request], budgets[request])
        self._rows, self._budgets = list(sequences), budgets
        self._known = [len(row) for row in self._rows]

    @torch.inference_mode(False)  # the next step may be outside of it, and writes there
    def _make(self, asked: _Asked, pages: int) -> None:
        self.close()
        self._pages_max = max(pages, min(1 << (pages + PAGES_MORE - 1).bit_length(), SLOTS_MAX))
        lists = {
            budget: longest_list(self._pool.layout, budget, self._pages_max, rows=1)
            for budget in asked.budgets
        }
        longest = max(lists.values())
        index = self._index
        if index == "auto" and any(unserved(budget) for budget in lists):
            index = "host"
        hot_pages = max(longest, self._hot_pages or min(2 * longest, self._pages_max, SLOTS_MAX))
        self._decoder = Decoder(
            self._pool,
            requests=asked.requests,
            q_heads=asked.q_heads,
            budget=max(lists, key=lambda budget: (lists[budget], str(budget))),
            pages_max=self._pages_max,
            device=asked.device,
            hot_pages=hot_pages,
            recent_pages=max(budget.recent for budget in lists),
            method=self._method,
            scale=asked.scale,
            softcap=asked.softcap,
            index=index,
        )
        self._made_for = asked
        # A decoder's mailbox, which is a thread, holds it: it ends with its cache.
        self._detach = weakref.finalize(self, self._decoder.close).detach

    def read(self) -> tuple[int, int]:
        """(bytes that were read to choose, pieces of pages that were chosen) since the last call;
        waits for the device."""
        decoder = self._decoder
        if decoder is None:
            return 0, 0
        made, before, last = decoder.by_layer(), self._before, self.counts
        self.counts = made if before is None else made.beside(before)
        pieces = self.counts.chosen - (0 if last is None else last.chosen)
        scored, decoder.stats.bytes_scored = decoder.stats.bytes_scored, 0
        return scored, pieces

    def close(self) -> None:
        self._detach()
        decoder, self._decoder = self._decoder, None
        self._rows, self._budgets, self._known = [], [], []
        self._before, self._guess = self.counts, None
        if decoder is not None:
            if decoder._step is not None:
                decoder.abandon()
            self.captured = None  # nothing of it runs any more
            decoder.close()
