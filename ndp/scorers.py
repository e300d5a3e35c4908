"""Scorers are ways to choose pages that are no part of the core: a class each, found by its name.

docs/how-to/methods.md says how one is written. numba compiles its two functions to C functions,
which the core calls from its threads, here or in a worker (native/src/ndp/select_scorer.c).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import KVLayout

GROUP = "cxlkv.scorers"
"""Entry points of packages that have some."""
SUMMARY_BYTES_MAX = 16384
Floats = npt.NDArray[np.float32]
Summary = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Shape:
    """What a scorer is compiled for: tokens of a page, channels of a key."""

    tokens: int
    dim: int


class Scorer:
    """One way to score pages, by a summary of each page and kv head.

    A subclass says its `name` and its `paper`, and has the four functions below. summarise() and
    score() are static and compiled by numba in nopython mode: loops and numpy, no Python objects,
    nothing allocated, nothing raised. They run on several threads at once.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    calibrated: ClassVar[bool] = False
    """Whether it needs calibrate() before its first use."""

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        """Shape and dtype of a page's summary, 16 KiB at most; float32, int8, uint8, uint16 ..."""
        raise NotImplementedError

    @staticmethod
    def summarise(keys: Floats, first: int, parameters: Floats, summary: Summary) -> None:
        """Fill the summary of a page: keys [tokens, dim] as attention sees them, the first of which
        is token `first` of its sequence."""
        raise NotImplementedError

    @staticmethod
    def score(
        queries: Floats, scale: float, summaries: Summary, parameters: Floats, scores: Floats
    ) -> None:
        """Fill scores [pages]: the higher, the more it matters to queries [n, dim], which share the
        list. summaries is [pages, *summary]. Logits are scale * q.k."""
        raise NotImplementedError

    def calibrate(self, keys: Floats) -> Floats:
        """What summarise() and score() get as `parameters`, one axis: of one layer and kv head, of
        which these are keys [n, dim]."""
        return np.empty(0, np.float32)


@cache
def _found() -> dict[str, Scorer]:
    from cxlkv.ndp.methods import SCORERS

    found = {made.name: made for made in (each() for each in SCORERS)}
    for entry in entry_points(group=GROUP):
        made = entry.load()()
        if made.name != entry.name or made.name in found:
            raise BadArgumentError(
                f"scorer {made.name!r} of {entry.value}: the entry point is {entry.name!r}, which "
                "must be its name and nobody else's"
            )
        found[made.name] = made
    return found


def names() -> tuple[str, ...]:
    """Of all scorers that are installed, in this package and others."""
    return tuple(_found())


def add(scorer: Scorer) -> None:
    """Make a scorer known to this process by its name. Raises BadArgumentError."""
    from cxlkv.ndp.engine import METHODS_TAKEN

    if scorer.name in METHODS_TAKEN or not scorer.name.isidentifier():
        raise BadArgumentError(f"a scorer cannot be called {scorer.name!r}")
    _found()[scorer.name] = scorer


def of(name: str) -> Scorer:
    """Raises BadArgumentError for a name that no scorer has."""
    try:
        return _found()[name]
    except KeyError:
        from cxlkv.ndp.engine import METHODS

        known = ", ".join((*METHODS, *names()))
        raise BadArgumentError(f"method {name!r}: use one of {known}") from None


# ---- compiled ----


@dataclass(frozen=True)
class Compiled:
    """Addresses of C functions, as cxlkv_scorer has them; kept: what they need."""

    summary_bytes: int
    summarise: int
    score: int
    kept: tuple[object, ...]


def summary_bytes(scorer: Scorer, shape: Shape) -> int:
    """Of a page and kv head. Raises BadArgumentError where there are too many."""
    axes, dtype = scorer.summary(shape)
    found = int(np.prod(axes)) * np.dtype(dtype).itemsize
    if found % 8 or not 0 < found <= SUMMARY_BYTES_MAX:
        raise BadArgumentError(
            f"method {scorer.name!r}: a summary of {found} bytes for pages of {shape.tokens} "
            f"tokens and {shape.dim} channels; a multiple of 8 is wanted, {SUMMARY_BYTES_MAX} at "
            "most"
        )
    return found


@cache
def compiled(scorer: Scorer, shape: Shape, parameter_count: int = 0) -> Compiled:
    """By numba, for this CPU. Raises UnsupportedError without numba."""
    try:
        from cxlkv.ndp.compile import c_functions
    except ImportError as error:
        raise UnsupportedError(
            f"method {scorer.name!r} is compiled by numba, which is not installed: "
            "pip install 'cxlkv[methods]'"
        ) from error
    axes, dtype = scorer.summary(shape)
    size = summary_bytes(scorer, shape)
    summarise, score = c_functions(scorer, shape, axes, np.dtype(dtype), parameter_count)
    return Compiled(size, summarise.address, score.address, kept=(summarise, score))


@dataclass(frozen=True)
class _Use:
    """A scorer in a pool: its number there, and the memory that the core reads."""

    number: int
    kept: tuple[object, ...]


_uses: WeakKeyDictionary[_core.Handle, dict[str, _Use]] = WeakKeyDictionary()


def number_of(pool: _core.Handle, layout: KVLayout, name: str) -> int:
    """By what the core knows a scorer of this pool; it is added where it is new there.

    Raises BadArgumentError for an unknown name and for one that has to be calibrated first.
    """
    used = _uses.get(pool)
    if used is not None and name in used:
        return used[name].number
    scorer = of(name)
    if scorer.calibrated:
        raise BadArgumentError(
            f"method {name!r} has to learn from keys first: pool.calibrate({name!r}, sequence)"
        )
    return use(pool, layout, scorer, None)


def use(
    pool: _core.Handle, layout: KVLayout, scorer: Scorer, parameters: Floats | None
) -> int:
    """parameters: [layers, kv_heads, n], or None."""
    count = 0 if parameters is None else parameters.shape[2]
    made = compiled(scorer, Shape(layout.page_tokens, layout.head_dim), count)
    number = zlib.crc32(scorer.name.encode(), made.summary_bytes)
    if parameters is not None:
        parameters = np.ascontiguousarray(parameters, np.float32)
        number = zlib.crc32(parameters.tobytes(), number)
    number = number or 1
    _core.pool_add_scorer(
        pool, number, made.summary_bytes, made.summarise, made.score, parameters
    )
    known = _uses.setdefault(pool, {})
    known[scorer.name] = _Use(number, (made, parameters))
    return number
