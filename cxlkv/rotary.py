"""The rotary embedding: by which angles a model turns keys and queries at their positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.numbers import FLOAT32_MAX, array_of, is_real, is_whole

PAIRS_MAX = 256
"""Most pairs of a layer; of all groups of a layout together, too."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of a layer's keys and queries.

    frequencies: of each pair of channels, the radians by which it turns from one token to the
    next, float32. The pairs are of a head's first 2n channels; the others are not turned.
    neighbours: pair i is channels 2i and 2i + 1 (GLM, Cohere); else i and n + i (Llama). A factor
    on all keys, such as YaRN's, is not part of it.
    """

    frequencies: tuple[float, ...]
    neighbours: bool = False

    def __post_init__(self) -> None:
        some: object = self.frequencies
        given = tuple(islice(some, PAIRS_MAX + 1)) if isinstance(some, Iterable) else ()
        finite = all(is_real(each, -FLOAT32_MAX, FLOAT32_MAX) for each in given)
        if not 1 <= len(given) <= PAIRS_MAX or not finite:
            raise BadArgumentError(
                f"frequencies of a rotary embedding: 1 to {PAIRS_MAX} finite numbers, radians a "
                f"token, not {self.frequencies!r:.60}"
            )
        rounded = tuple(float(np.float32(each)) for each in given)
        object.__setattr__(self, "frequencies", rounded)

    @classmethod
    def of(cls, theta: float, channels: int, *, neighbours: bool = False) -> Rotary:
        """Pair i of `channels` turns by theta ** (-2i / channels). Raises BadArgumentError."""
        right = is_real(theta, 1e-30) and is_whole(channels, 2, 2 * PAIRS_MAX)
        if not right or channels % 2:
            raise BadArgumentError(
                f"a rotary embedding of theta {theta!r:.40} and {channels!r:.40} channels: theta "
                f"is above 0, channels are an even number up to {2 * PAIRS_MAX}"
            )
        return cls(
            tuple(float(theta) ** (-i / channels) for i in range(0, channels, 2)), neighbours
        )

    @property
    def channels(self) -> int:
        """How many are turned."""
        return 2 * len(self.frequencies)

    @property
    def summary(self) -> str:
        """A few words for people."""
        how = "neighbours" if self.neighbours else "halves"
        first, last = self.frequencies[0], self.frequencies[-1]
        return f"{self.channels} channels, {how}, {first:.3g} to {last:.3g} radians a token"

    @property
    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the second channel of each pair."""
        n = len(self.frequencies)
        numbers = np.arange(n)
        return (2 * numbers, 2 * numbers + 1) if self.neighbours else (numbers, n + numbers)

    def rotate(self, x: Floats, positions: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
        """A copy of keys or queries [..., tokens, dim], turned to their positions [tokens]."""
        return self._turned(x, _places(positions))

    def unrotate(self, x: Floats, positions: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
        """A copy of keys or queries [..., tokens, dim] as they were before the rotation."""
        return self._turned(x, -_places(positions))

    def _turned(self, x: Floats, turns: npt.NDArray[np.float64]) -> Floats:
        given = np.asarray(x, np.float32)
        if given.ndim < 2 or given.shape[-1] < self.channels or turns.shape != given.shape[-2:-1]:
            raise BadArgumentError(
                f"keys or queries {given.shape} at positions {turns.shape}: wanted are [..., "
                f"tokens, dim] of {self.channels} channels or more, and [tokens]"
            )
        angles = turns[:, None] * np.array(self.frequencies)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = self.pairs
        turned, one, other = given.copy(), given[..., first], given[..., second]
        turned[..., first] = one * cos - other * sin
        turned[..., second] = other * cos + one * sin
        return turned


def _places(positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    given = array_of(positions, "positions")
    if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
        raise BadArgumentError(f"positions {positions!r:.60}: numbers of tokens are wanted")
    return given.astype(np.float64)
