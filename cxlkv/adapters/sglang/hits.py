"""Finds how far a text can be restored when several host pools must have their part of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Mask


def restorable(there: Mask, trailing: int | None = None) -> Mask:
    """bool [n + 1]: whether a host pool can restore the first i of n pages.

    It needs all of them, or, as of a sliding window or a state, only the `trailing` last ones of
    the i. No pages can always be restored.
    """
    missing: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(~there)])
    ends = np.arange(len(missing))
    begins = np.zeros_like(ends) if trailing is None else np.maximum(ends - trailing, 0)
    found: Mask = missing[ends] == missing[begins]
    return found
