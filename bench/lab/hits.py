"""How often a GPU's hot buffer would have had the pages that each form of attention chose.

Slots change hands as on the GPU (`kernels/reference_slots.py`), and the pages are those that a
model's queries chose, step by step. The newest pages, which a GPU has anyway, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.demo.forms import Form
from cxlkv.kernels.reference_slots import assign
from cxlkv.kernels.slots import SLOTS_MAX, Slots, new_assigned, new_slots
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Selection
from cxlkv.sequence import Batch

SIZES = (1.0, 1.5, 2.0, 4.0)
"""Slots of a head, over the pages that a form chooses."""
COLD_STEPS = 8
"""First steps, which fill the slots and do not count."""
NEWEST = 4
"""Pages that a GPU keeps apart from the hot buffer."""
PAGES_MORE = 1024
"""Pages that a text may grow by, for which the tables have places."""


class HotHits:
    """Give take() to a FormsCache as on_choice. forms: of its rows."""

    def __init__(self, forms: Sequence[Form], layout: KVLayout) -> None:
        self._forms, self._page_tokens = forms, layout.page_tokens
        self._last = max(i for i, window in enumerate(layout.windows) if window is None)
        self._chosen: list[npt.NDArray[np.int32]] = []  # of a step's layers so far
        self._slots: dict[tuple[int, float], Slots] = {}
        self._steps = 0

    def take(self, batch: Batch, layer: int, picked: Selection) -> None:
        lengths = np.array([len(one) for one in batch.sequences])
        newest = (-(-lengths // self._page_tokens) - NEWEST)[:, None, None]
        self._chosen.append(np.where(picked.pages < newest, picked.pages, -1))
        if layer != self._last:
            return
        most = max(chosen.shape[2] for chosen in self._chosen)
        fill = [((0, 0), (0, 0), (0, most - chosen.shape[2])) for chosen in self._chosen]
        padded = [np.pad(a, b, constant_values=-1) for a, b in zip(self._chosen, fill, strict=True)]
        self._chosen, pages = [], np.stack(padded)
        for row, form in enumerate(self._forms):
            if form.method != "full":
                self._look(row, pages[:, row], int(newest.max()) + NEWEST)
        self._steps += 1

    def _look(self, row: int, pages: npt.NDArray[np.int32], count: int) -> None:
        """One row's pages of all layers, [layers, kv_heads, k]."""
        longest = int((pages >= 0).sum(2).max())
        kept = torch.from_numpy(-np.sort(-pages, axis=2)[..., :longest].copy())
        for size in SIZES:
            slots = self._slots.get((row, size))
            if slots is None:
                room = min(round(size * (longest + NEWEST)), SLOTS_MAX)
                at = torch.zeros((*pages.shape[:2], room), dtype=torch.int64)
                slots = new_slots([room] * pages.shape[1], count + PAGES_MORE, at, None)
                self._slots[row, size] = slots
            if self._steps == COLD_STEPS:
                slots.hits.zero_()
                slots.misses.zero_()
            tags = torch.zeros((len(pages), slots.pages_max), dtype=torch.int64)
            made = new_assigned(*kept.shape, values=False, device=kept.device)
            assign(slots, kept, tags, made)

    def found(self) -> npt.NDArray[np.int64]:
        """Pieces that were there and that were not, int64 [forms, SIZES, 2]."""
        counts = np.zeros((len(self._forms), len(SIZES), 2), np.int64)
        for (row, size), slots in self._slots.items():
            if self._steps > COLD_STEPS:
                counts[row, SIZES.index(size)] = int(slots.hits.sum()), int(slots.misses.sum())
        return counts
