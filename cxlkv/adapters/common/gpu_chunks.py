"""Passes of several tokens on a device: what a pool has of earlier ones comes block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.adapters.common.prefill import attend_to_block, weighed
from cxlkv.adapters.common.sinks import beside_sinks
from cxlkv.adapters.common.steps import LayerStep
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.pieces import DTYPES, fetched_pieces
from cxlkv.gpu.staging import ALIGNMENT_BYTES, Staging
from cxlkv.kernels.code_pieces import as_kept
from cxlkv.kernels.merge import merge
from cxlkv.ndp.engine import Selection, unscored
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

BLOCK_BYTES = 16 << 20
"""Of keys and values of a sequence's pages that are attended to at a time, of all kv heads."""


class _Text(NamedTuple):
    """A row of the batch: it has `new` tokens more, from token `start` on, which are to see the
    first `end` tokens of the pool. blocks: the pages of these, each int32 [kv_heads, k]."""

    row: int
    start: int
    new: int
    end: int
    blocks: list[npt.NDArray[np.int32]]


class _Sum:
    """A row's attention to what it has seen so far."""

    def __init__(self, tokens: int, q_heads: int, value_dim: int, device: torch.device):
        self.out = torch.zeros((tokens, q_heads, value_dim), device=device)
        self.lse = torch.full((tokens, q_heads), -torch.inf, device=device)

    def add(self, first: int, part: tuple[Tensor, Tensor]) -> None:
        """Attention of the tokens from `first` on to some more keys."""
        rows = slice(first, first + len(part[0]))
        out, lse = merge([self.out[rows], part[0]], [self.lse[rows], part[1]])
        if len(out) == len(self.out):
            self.out, self.lse = out, lse
        else:
            self.out[rows], self.lse[rows] = out, lse


class GpuChunks:
    """Attention of new tokens to what a pool has before them, on the device of the queries.

    Pages are fetched and verified by the host into pinned buffers, and copied to the device while
    it attends to the block before; the device keeps two blocks at a time. Beyond the tensors of the
    pass, and its output in float32, that is 2 * BLOCK_BYTES, or two pages of all kv heads where
    these are more, one block more where the model has another dtype than the pool, and logits of
    some 300 MiB at most, whatever the length of the text. The host pins three blocks. Memory is
    taken by the first pass that needs it.
    """

    def __init__(self, pool: CXLPool):
        self._pool, layout = pool, pool.layout
        self._pieces = fetched_pieces(layout, decoded=True)
        page_bytes = layout.kv_heads * sum(piece.bytes for piece in self._pieces)
        self._columns = max(1, BLOCK_BYTES // page_bytes)
        self._buffer_bytes = self._columns * page_bytes + 2 * ALIGNMENT_BYTES
        self._staging: Staging | None = None
        self._blocks: list[list[Tensor]] = []  # memory on the device, of keys and of values

    @property
    def bytes(self) -> int:
        """What is kept on the device."""
        return sum(one.numel() * one.element_size() for block in self._blocks for one in block)

    @torch.no_grad()
    def attend(
        self,
        part: LayerStep,
        sequences: Sequence[Tokens],
        query: Tensor,
        own: tuple[Tensor, Tensor] | None,
        picked: Selection | None = None,
    ) -> Tensor:
        """Attention of a pass's tokens, which the pool has already: query [batch, q_heads, tokens,
        dim] -> [batch, tokens, q_heads, value_dim], zeros where padding is.

        own: keys and values of these tokens, [batch, kv_heads, tokens, dim], to attend to in place
        of the pool's. picked: the pages that a step of one token attends to; None: all that it
        sees. Raises CorruptError for a damaged page, GpuError, GpuMemoryError, MemoryShortError.
        """
        step, layout = part.step, self._pool.layout
        kept = (layout.k_encoding, layout.v_encoding)
        shape = (step.batch, step.tokens, query.shape[1], layout.value_head_dim)
        out = query.new_zeros(shape)
        with gpu_errors("attention to earlier pages"):
            self._prepare(query.device)
            texts = [
                self._text(part, row, own is None, picked)
                for row, count in enumerate(step.new.tolist())
                if count
            ]
            staged = self._staged(part.index, sequences, texts)
            for text in texts:
                new = slice(step.tokens - text.new, None)
                asked, found = query[text.row, :, new], _Sum(text.new, *shape[2:], query.device)
                if own is not None:
                    keys, values = (
                        self._as_kept(one[text.row, :, new], encoding, query)
                        for one, encoding in zip(own, kept, strict=True)
                    )
                    found.add(0, attend_to_block(part, asked, keys, values, 0))
                for pages in text.blocks:
                    keys, values = (one.to(query.dtype) for one in next(staged))
                    attend = self._attend_to_pages if picked is None else self._attend_to_picked
                    found.add(*attend(part, text, asked, keys, values, pages))
                out[text.row, new] = beside_sinks(found.out, found.lse, part.sinks).to(out.dtype)
        return out

    def _as_kept(self, states: Tensor, encoding: str, query: Tensor) -> Tensor:
        """As the pool would give them back."""
        found = as_kept(states.to(DTYPES[self._pool.layout.dtype]), encoding)
        return found.to(query.dtype)

    def _text(self, part: LayerStep, row: int, is_all: bool, picked: Selection | None) -> _Text:
        """is_all: the new tokens are read from the pool, too."""
        step, layout = part.step, self._pool.layout
        new, length = int(step.new[row]), int(step.lengths[row])
        start = length - new
        end = length if is_all else start
        if picked is None:
            low = 0 if part.window is None else max(0, start - part.window + 1)
            seen = np.arange(low // layout.page_tokens, -(-end // layout.page_tokens))
            pages = np.broadcast_to(seen.astype(np.int32), (layout.kv_heads, len(seen)))
        else:
            pages = picked.pages[int(step.starts[row]) if picked.per == "query" else row]
            pages = pages[:, : int((pages >= 0).sum(1).max(initial=0))]
        blocks = [
            pages[:, at : at + self._columns] for at in range(0, pages.shape[1], self._columns)
        ]
        return _Text(row, start, new, end, blocks)

    def _attend_to_pages(
        self,
        part: LayerStep,
        text: _Text,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        pages: npt.NDArray[np.int32],
    ) -> tuple[int, tuple[Tensor, Tensor]]:
        """To pages that follow each other, [kv_heads, tokens, dim], by those tokens that see any;
        returns the first of these with their attention."""
        first = int(pages[0, 0]) * self._pool.layout.page_tokens
        tokens = min(keys.shape[1], text.end - first)
        begin, behind = max(0, first - text.start), text.new
        if part.window is not None:
            behind = min(behind, first + tokens - 1 + part.window - text.start)
        block = (query[:, begin:behind], keys[:, :tokens], values[:, :tokens])
        return begin, attend_to_block(part, *block, text.start + begin - first)

    def _attend_to_picked(
        self,
        part: LayerStep,
        text: _Text,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        pages: npt.NDArray[np.int32],
    ) -> tuple[int, tuple[Tensor, Tensor]]:
        """To the pages of each head that were picked for one token, all of which it may see."""
        named = torch.from_numpy(np.ascontiguousarray(pages)).to(keys.device)[..., None]
        page_tokens = self._pool.layout.page_tokens
        at = named * page_tokens + torch.arange(page_tokens, device=keys.device)
        seen = ((named >= 0) & (at < text.end)).flatten(1)
        seen = seen.repeat_interleave(query.shape[0] // len(seen), 0)[None, :, None]
        out, lse = weighed(part, query[None], keys[None], values[None], seen)
        return 0, (out[0].transpose(0, 1).contiguous(), lse[0].T.contiguous())

    # ---- the way from the pool ----

    @torch.inference_mode(False)  # the next pass may be outside of it, and writes there
    def _prepare(self, device: torch.device) -> None:
        if self._staging is not None and self._staging.device == device:
            return
        self.close()
        layout = self._pool.layout
        self._staging = Staging(self._pool, device, buffer=self._buffer_bytes)
        own = self._pieces if layout.values == "own" else self._pieces[:1]
        numbers = self._columns * layout.kv_heads * layout.page_tokens
        self._blocks = [
            [torch.empty(numbers * p.shape[1], dtype=p.dtype, device=device) for p in own]
            for _ in range(2)
        ]

    def _staged(
        self, layer: int, sequences: Sequence[Tokens], texts: list[_Text]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [kv_heads, tokens, dim] of all blocks, each copied to the device while
        that attends to the one before. The memory of a block is written again behind what is queued
        when the block after it is asked for."""
        staging = self._staging
        assert staging is not None
        number, before = 0, None
        for text in texts:
            batch = self._pool.batch([sequences[text.row]])
            for pages in text.blocks:
                wanted = unscored(pages[None], np.array([0, 1], np.int32), "sequence")
                came = staging.get(batch, layer, wanted, self._memory(number % 2, pages.shape))
                if before is not None:
                    before.wait()
                    yield before.keys[0].flatten(1, 2), before.values[0].flatten(1, 2)
                number, before = number + 1, came
        if before is not None:
            before.wait()
            yield before.keys[0].flatten(1, 2), before.values[0].flatten(1, 2)

    def _memory(self, place: int, pages: tuple[int, ...]) -> list[Tensor]:
        """Outputs [1, kv_heads, k, page_tokens, dim] for so many pages."""
        shapes = [(1, *pages, *piece.shape) for piece in self._pieces]
        return [
            memory[: torch.Size(shape).numel()].view(shape)
            for memory, shape in zip(self._blocks[place], shapes, strict=False)
        ]

    def close(self) -> None:
        """Free the buffers."""
        staging, self._staging, self._blocks = self._staging, None, []
        if staging is not None:
            staging.close()
