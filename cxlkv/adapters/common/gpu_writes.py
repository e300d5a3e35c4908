"""Passes of many tokens on a device: whole pages go to the pool while the model computes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.adapters.common.steps import Step
from cxlkv.errors import CXLKVError, MemoryShortError, RegistrationError
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.errors import gpu_errors
from cxlkv.gpu.mapping import Mapping
from cxlkv.gpu.write import WriteThrough
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

Rows = tuple[Tensor, Tensor | None]  # keys and values [rows, kv_heads, dim]
Starts = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass
class _Pass:
    """One pass: which of its rows each way takes, in the order of `step`, and where each sequence's
    begin there. paged: fill pages; heads, tails: before and behind those, to a page's end and from
    its start; others: of sequences that get no page full."""

    batch: Batch
    before: list[int]  # tokens of each sequence
    rewind: int
    ahead: list[int]  # of each sequence, its heads
    paged: Tensor
    paged_starts: Starts
    heads: Tensor
    head_starts: Starts
    tails: Tensor
    tail_starts: Starts
    others: Tensor
    other_starts: Starts
    kept_heads: list[Rows] = field(default_factory=list)  # of each layer, on the device
    kept_tails: list[Rows] = field(default_factory=list)


class GpuWrites:
    """Appends a pass, layer by layer, of rows that lie on a device. Pages are made there and go to
    the pool on a stream of their own (WriteThrough); sequences have them, with what is before and
    behind them, once finish() returns. The host appends rows of sequences that get no page full.
    The device writes into the pool's memory where that can be registered and no other host has it;
    else pages go through pinned memory."""

    def __init__(self, pool: CXLPool):
        self._pool = pool
        self._writer: WriteThrough | None = None
        self._mapping: Mapping | None = None
        self._device: torch.device | None = None
        self._pass: _Pass | None = None

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    def begin(
        self,
        step: Step,
        sequences: Sequence[Tokens],
        batch: Batch,
        rewind: int,
        like: Tensor,
    ) -> bool:
        """Whether the pass fills a page from its start on; then layers are to be put, else it is
        the host's. like: keys, on the device. rewind: as in Batch.append()."""
        self.abandon()
        page_tokens = self._pool.layout.page_tokens
        before = [len(one) for one in sequences]
        heads = np.minimum(-np.array(before, np.int64) % page_tokens, step.new)
        paged = (step.new - heads) // page_tokens * page_tokens
        if not paged.any():
            return False
        self.prepare(like.device)
        others = np.where(paged > 0, 0, step.new)
        heads = np.where(paged > 0, heads, 0)
        tails = np.where(paged > 0, step.new - heads - paged, 0)
        first = step.starts[:-1].astype(np.int64)
        ways = ((heads, paged), (0, heads), (heads + paged, tails), (0, others))
        taken = [_rows(first + begin, count, like.device) for begin, count in ways]
        ahead: list[int] = heads.tolist()
        numbers = [one for way in taken for one in way]
        self._pass = _Pass(batch, before, rewind, ahead, *numbers)  # type: ignore[arg-type]
        return True

    def put(self, layer: int, keys: Tensor, values: Tensor | None) -> None:
        """Write a layer's rows, of which nothing is to be seen before finish(); those of `others`
        are appended. An error leaves the pass open, for abandon(), and so does one of finish()."""
        run, writer, dtype = self._pass, self._writer, getattr(torch, self._pool.layout.dtype)
        assert run is not None
        assert writer is not None
        with torch.no_grad(), gpu_errors("writing pages of a pass"):
            rows = (keys.detach().to(dtype), None if values is None else values.detach().to(dtype))
            rewind, ahead = (run.rewind, run.ahead) if layer == 0 else (None, None)
            taken = _picked(rows, run.paged)
            writer.put(run.batch, layer, *taken, run.paged_starts, rewind=rewind, ahead=ahead)
            for wanted, kept in ((run.heads, run.kept_heads), (run.tails, run.kept_tails)):
                if len(wanted):
                    kept.append(_picked(rows, wanted))
            if len(run.others):
                others = _picked(rows, run.others)
                run.batch.append(layer, *_at_home(others), run.other_starts, run.rewind)

    def finish(self) -> None:
        """Make the pass visible: append its heads, wait for its pages, and append its tails."""
        run, writer = self._pass, self._writer
        assert run is not None
        assert writer is not None
        with torch.no_grad(), gpu_errors("writing pages of a pass"):
            for layer, rows in enumerate(_all_at_home(run.kept_heads)):
                run.batch.append(layer, *rows, run.head_starts, run.rewind)
            writer.finish()
            for layer, rows in enumerate(_all_at_home(run.kept_tails)):
                run.batch.append(layer, *rows, run.tail_starts, run.rewind)
        self._pass = None

    def abandon(self) -> None:
        """Undo an open pass: its pages are free again, and sequences as long as before."""
        run, self._pass = self._pass, None
        if run is None:
            return
        assert self._writer is not None
        self._writer.abandon()
        for sequence, length in zip(run.batch.sequences, run.before, strict=True):
            with suppress(CXLKVError):  # it was released, or has what windows had to give back
                sequence.truncate(length)

    def prepare(self, device: torch.device) -> None:
        """Register the pool with the device, which the first pass does otherwise."""
        if self._writer is not None and self._device == device:
            return
        self.close()
        copier = None
        with suppress(RegistrationError, MemoryShortError):
            self._mapping = Mapping(self._pool, device)
            if self._mapping.writable:
                copier = Copier(self._mapping)
        self._writer, self._device = WriteThrough(self._pool, copier), device

    def close(self) -> None:
        """Undo an open pass, and let go of the device."""
        self.abandon()
        writer, self._writer = self._writer, None
        mapping, self._mapping = self._mapping, None
        for one in (writer, mapping):
            if one is not None:
                one.close()


def _rows(first: Numbers, counts: Numbers, device: torch.device) -> tuple[Tensor, Starts]:
    """The rows of each sequence from `first` on, `counts` of them, and where they begin among
    themselves."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = np.concatenate([np.arange(a, a + n) for a, n in zip(first, counts, strict=True)])
    return torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True), starts


def _picked(rows: Rows, wanted: Tensor) -> Rows:
    keys, values = rows
    if len(wanted) == len(keys):
        return rows
    return keys[wanted], None if values is None else values[wanted]


def _at_home(rows: Rows) -> Rows:
    return rows[0].cpu(), None if rows[1] is None else rows[1].cpu()


def _all_at_home(kept: list[Rows]) -> Iterator[Rows]:
    """Of all layers, which come in one copy."""
    if not kept:
        return
    keys = torch.stack([one for one, _ in kept]).cpu().unbind()
    own = [one for _, one in kept if one is not None]
    values = torch.stack(own).cpu().unbind() if own else (None,) * len(keys)
    yield from zip(keys, values, strict=True)
