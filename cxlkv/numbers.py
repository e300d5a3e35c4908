"""What callers give as a number, of whatever type: whether it is one, and in its bounds.

A comparison alone lets NaN pass where it is written as what is refused, and raises TypeError for
text. These do neither.
"""

from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError

FLOAT32_MAX = 3.4028234663852886e38
SECONDS_MAX = 1e9  # 30 years: what clocks, timeouts and the core take


def is_whole(value: object, least: int = 0, most: int = 2**63 - 1) -> TypeGuard[int]:
    """Whether it is a whole number from `least` to `most`, numpy's too; True and False are none."""
    if type(value) is int:
        return least <= value <= most
    if type(value) is bool or not isinstance(value, Integral):
        return False
    return least <= int(value) <= most


def is_real(value: object, least: float = 0, most: float = sys.float_info.max) -> TypeGuard[float]:
    """Whether it is a number from `least` to `most`, finite by default, whole or not."""
    if type(value) is float:
        return least <= value <= most
    if type(value) is bool or not isinstance(value, Real):
        return False
    number = int(value) if isinstance(value, Integral) else float(value)  # of any length
    return least <= number <= most


def array_of(given: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Check whole numbers and return their array: its dtype is not looked at. Raises
    BadArgumentError for what numpy makes no array of, such as rows that differ in length.
    """
    try:
        return np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadArgumentError(f"{name}: no array: {error}") from None


def seconds(name: str, value: object) -> float:
    """A time to wait, as it was given. Raises BadArgumentError for what is none, or never ends."""
    if not is_real(value, 0, SECONDS_MAX) or value == 0:
        raise BadArgumentError(f"{name}={value!r:.40}: seconds, more than 0, that end")
    return float(value)
