"""Finds the heads that keep choosing the same pages: few pages of those need a local copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Doubles
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Selection

__all__ = ["Stability"]


class Stability:
    """How many of its pages each kv head chooses again at the next step, of one sequence.

    The idea is FlexiCache's (arXiv 2511.00868): heads differ in that, and those that keep choosing
    the same pages need few of them near. Forced pages (sinks, recent ones) count as chosen.
    """

    def __init__(self, layers: int, kv_heads: int, weight: float = 0.125) -> None:
        """weight: of a step's share in the average; the others' falls by as much each step."""
        if layers < 1 or kv_heads < 1:
            raise BadArgumentError(f"{layers} layers of {kv_heads} heads: at least 1 of each")
        if not 0 < weight <= 1:
            raise BadArgumentError(f"weight={weight}: outside (0, 1]")
        self._weight = weight
        self._last: list[npt.NDArray[np.int32] | None] = [None] * layers
        self._shares = np.full((layers, kv_heads), np.nan)

    def see(self, layer: int, chosen: Selection) -> None:
        """A layer's next selection: pages [kv_heads, k], or [lists, kv_heads, k], a step each."""
        if not 0 <= layer < len(self._last):
            raise BadArgumentError(f"layer {layer}: there are {len(self._last)}")
        pages = chosen.pages[None] if chosen.pages.ndim == 2 else chosen.pages
        if pages.ndim != 3 or pages.shape[1] != self._shares.shape[1]:
            raise BadArgumentError(
                f"pages of shape {chosen.pages.shape}, wanted [.., {self._shares.shape[1]}, k]"
            )
        for step in pages:
            before = self._last[layer]
            if before is not None:
                self._add(self._shares[layer], _kept(before, step))
            self._last[layer] = step.copy()

    def _add(self, average: Doubles, share: Doubles) -> None:
        known = ~np.isnan(share)
        first = known & np.isnan(average)
        average[first] = share[first]
        again = known & ~first
        average[again] += self._weight * (share[again] - average[again])

    @property
    def shares(self) -> Doubles:
        """[layers, kv_heads]: average share chosen again; NaN before a head's second step."""
        return self._shares.copy()

    def stable_heads(self, floor: float) -> npt.NDArray[np.bool_]:
        """[layers, kv_heads]: which heads choose at least this share of their pages again."""
        return self._shares >= floor  # False for NaN


def _kept(before: npt.NDArray[np.int32], now: npt.NDArray[np.int32]) -> Doubles:
    """By head, the share of `now` that is in `before`; NaN where nothing was chosen now."""
    width = 2 + max(int(before.max(initial=-1)), int(now.max(initial=-1)))
    was = np.zeros((len(now), width), np.bool_)
    np.put_along_axis(was, before, True, axis=1)
    was[:, -1] = False  # where -1, the padding, went
    same = np.take_along_axis(was, now, axis=1).sum(1)
    count = (now >= 0).sum(1)
    share: Doubles = np.divide(same, count, out=np.full(len(now), np.nan), where=count > 0)
    return share
