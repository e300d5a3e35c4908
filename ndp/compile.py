"""Compiles a scorer's functions by numba to C functions, as the core calls them."""

from __future__ import annotations

import re
from typing import Protocol

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from cxlkv.ndp.kinds import Shape
from cxlkv.ndp.methods.bfloat16 import FASTMATH

FLOATS = types.CPointer(types.float32)
FAILED = -1
"""What C gets of an exception; numba would print it and go on."""


class CFunction(Protocol):
    """It must stay as long as its address is used."""

    address: int


def c_summarise(
    function: object,
    shape: Shape,
    axes: tuple[int, ...],
    dtype: npt.DTypeLike,
    parameter_count: int,
) -> CFunction:
    """summarise() of cxlkv_scorer, by that of a Scorer. Shapes are constants in it, so that loops
    unroll."""
    tokens, dim = shape.tokens, shape.dim
    summarise_page = numba.njit(error_model="numpy", fastmath=FASTMATH)(function)
    carray, size = numba.carray, types.int64
    summary = types.CPointer(numba.from_dtype(np.dtype(dtype)))

    def summarise(keys, count, width, first, parameters, out):
        try:
            summarise_page(
                carray(keys, (tokens, dim)),
                first,
                carray(parameters, (parameter_count,)),
                carray(out, axes),
            )
        except Exception:
            return FAILED
        return 0

    signature = types.int32(FLOATS, size, size, size, FLOATS, summary)
    made: CFunction = numba.cfunc(signature, error_model="numpy", fastmath=FASTMATH)(summarise)
    return made


def c_score(
    function: object,
    shape: Shape,
    axes: tuple[int, ...],
    dtype: npt.DTypeLike,
    parameter_count: int,
    counted: bool = False,
) -> CFunction:
    """score() of cxlkv_scorer, likewise. counted: it returns the bytes that it read."""
    tokens, dim = shape.tokens, shape.dim
    score_pages = numba.njit(error_model="numpy", fastmath=FASTMATH)(function)
    bytes_of = numba.njit((lambda found: found) if counted else (lambda found: 0))
    carray, size = numba.carray, types.int64
    summary = types.CPointer(numba.from_dtype(np.dtype(dtype)))

    def score(queries, count, width, scale, summaries, pages, parameters, scores):
        of_pages = carray(summaries, (pages, *axes))
        try:
            found = score_pages(
                carray(queries, (count, dim)),
                scale,
                tokens,
                of_pages,
                carray(parameters, (parameter_count,)),
                carray(scores, (count, pages)),
            )
        except Exception:
            return FAILED
        return bytes_of(found)

    signature = types.int32(FLOATS, size, size, types.float32, summary, size, FLOATS, FLOATS)
    made: CFunction = numba.cfunc(signature, error_model="numpy", fastmath=FASTMATH)(score)
    return made


def reason(error: Exception, function: object) -> str:
    """numba's own sentence, and file:line of what it cannot compile, or else of the function."""
    said = [line for line in str(error).splitlines() if line and "nopython mode" not in line]
    sentence = said[0].rstrip(".") if said else type(error).__name__
    if "scipy" in sentence:
        sentence += ": pip install scipy, which @ and numpy.dot need"
    for path, line in re.findall(r" at (\S.*) \((\d+)\)", str(error)):
        if path != __file__:
            return f"{sentence} ({path}:{line})"
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    return f"{sentence} ({code.co_filename}:{code.co_firstlineno})" if code else sentence
