"""Compiles a scorer's functions by numba to C functions, as the core calls them."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from cxlkv.ndp.methods.bfloat16 import FASTMATH
from cxlkv.ndp.scorers import Shape

FLOATS = types.CPointer(types.float32)


def c_functions(
    functions: Sequence[object],
    shape: Shape,
    axes: tuple[int, ...],
    dtype: npt.DTypeLike,
    parameter_count: int,
) -> tuple[tuple[int, int], tuple[object, object]]:
    """Addresses of (summarise, score) of cxlkv_scorer, and what must stay as long as they are used.

    functions: those of a Scorer. Shapes are constants in them, so that loops unroll.
    """
    tokens, dim = shape.tokens, shape.dim
    summarise_page = numba.njit(error_model="numpy", fastmath=FASTMATH)(functions[0])
    score_pages = numba.njit(error_model="numpy", fastmath=FASTMATH)(functions[1])
    element = numba.from_dtype(np.dtype(dtype))
    carray = numba.carray
    size, summary = types.int64, types.CPointer(element)
    of_page = types.void(FLOATS, size, size, size, FLOATS, summary)
    of_pages = types.void(FLOATS, size, size, types.float32, summary, size, FLOATS, FLOATS)

    @numba.cfunc(of_page, error_model="numpy", fastmath=FASTMATH)
    def summarise(keys, count, width, first, parameters, out):
        summarise_page(
            carray(keys, (tokens, dim)),
            first,
            carray(parameters, (parameter_count,)),
            carray(out, axes),
        )

    @numba.cfunc(of_pages, error_model="numpy", fastmath=FASTMATH)
    def score(queries, count, width, scale, summaries, pages, parameters, scores):
        score_pages(
            carray(queries, (count, dim)),
            scale,
            tokens,
            carray(summaries, (pages, *axes)),
            carray(parameters, (parameter_count,)),
            carray(scores, (count, pages)),
        )

    return (summarise.address, score.address), (summarise, score)
