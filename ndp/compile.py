"""Compiles a scorer's functions by numba to C functions, as the core calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numba
import numpy as np
import numpy.typing as npt
from numba import carray, types

from cxlkv.ndp.scorers import Scorer, Shape

FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in any order, so that they are vectors; a NaN stays one."""
OPTIONS = {"error_model": "numpy", "fastmath": FASTMATH}
FLOATS = types.CPointer(types.float32)


class CFunction(Protocol):
    """numba's, which must stay as long as its address is used."""

    address: int


def c_functions(
    scorer: Scorer,
    shape: Shape,
    axes: tuple[int, ...],
    dtype: np.dtype[np.generic],
    parameter_count: int,
) -> Sequence[CFunction]:
    """(summarise, score) of cxlkv_scorer. Shapes are constants in them, so that loops unroll."""
    tokens, dim = shape.tokens, shape.dim
    summarise_page = numba.njit(**OPTIONS)(scorer.summarise)
    score_pages = numba.njit(**OPTIONS)(scorer.score)
    size, summary = types.int64, types.CPointer(numba.from_dtype(dtype))

    @numba.cfunc(types.void(FLOATS, size, size, size, FLOATS, summary), **OPTIONS)
    def summarise(keys, count, width, first, parameters, out):  # type: ignore[no-untyped-def]
        summarise_page(
            carray(keys, (tokens, dim)),
            first,
            carray(parameters, (parameter_count,)),
            carray(out, axes),
        )

    @numba.cfunc(
        types.void(FLOATS, size, size, types.float32, summary, size, FLOATS, FLOATS), **OPTIONS
    )
    def score(  # type: ignore[no-untyped-def]
        queries, count, width, scale, summaries, pages, parameters, scores
    ):
        score_pages(
            carray(queries, (count, dim)),
            scale,
            tokens,
            carray(summaries, (pages, *axes)),
            carray(parameters, (parameter_count,)),
            carray(scores, (count, pages)),
        )

    return summarise, score
