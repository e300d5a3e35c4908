"""What a batch asks of its arguments: arrays, layers, offsets; what is wrong raises."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import (
    BYTES,
    Starts,
    View,
)
from cxlkv.errors import (
    BadArgumentError,
)
from cxlkv.layout import DTYPE_BYTES, DTYPES, FP8, STORED, KVLayout
from cxlkv.ndp.engine import (
    Budget,
    BudgetLike,
    budget_of,
)
from cxlkv.numbers import array_of, is_whole


class Row(NamedTuple):
    """What a pool takes of K or V: dtype is a code; or_bytes: bytes, too, stored as they are."""

    heads: int
    dim: int
    dtype: int
    or_bytes: bool


class LayerShape(NamedTuple):
    """What a layer has; value_row None: its values are a prefix of its keys."""

    layout: KVLayout
    key_row: Row
    value_row: Row | None
    scale: float  # of its logits, unless somebody says another


def layer_shapes(layout: KVLayout) -> tuple[LayerShape, ...]:
    """By layer."""
    if not layout.has_shapes:
        return (_layer_shape(layout),) * layout.layers
    made = {one: _layer_shape(layout.of_layer(layout.order.index(one))) for one in layout.order}
    return tuple(made[group] for group in layout.order)


def _layer_shape(layout: KVLayout) -> LayerShape:
    dtype = DTYPES.index(layout.dtype)
    keys = Row(layout.kv_heads, layout.head_dim, dtype, layout.k_encoding == FP8)
    values = keys._replace(dim=layout.value_head_dim, or_bytes=layout.v_encoding == FP8)
    own = layout.values == "own"
    return LayerShape(layout, keys, values if own else None, float(layout.head_dim**-0.5))


def budgets_of(given: BudgetLike | Sequences[BudgetLike] | None) -> tuple[Budget, ...]:
    """One for all sequences, or one for each; of None, none."""
    if isinstance(given, Sequences) and not isinstance(given, str):
        if not given:
            raise BadArgumentError("a list of no budgets: one, or one for each sequence; or None")
        return tuple(map(budget_of, given))
    return () if given is None else (budget_of(given),)


def int32_of(given: npt.ArrayLike, name: str) -> Starts:
    """A copy: the caller's array may change meanwhile."""
    array = array_of(given, name)
    if array.size == 0:  # of any dtype
        array = array.astype(np.int32)
    return np.array(whole_int32(array, name), np.int32, order="C")


def whole_int32(given: npt.NDArray[np.int64], name: str) -> Starts:
    """Other integers as int32, none of them changed."""
    narrow = given.astype(np.int32) if given.dtype.kind in "iu" else None
    if narrow is None or not np.array_equal(narrow, given):
        raise BadArgumentError(f"{name} are {given.dtype}: whole numbers below 2**31 are wanted")
    return narrow


def words_of(given: npt.ArrayLike, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Words as contiguous uint32 of this shape; bits of int32 stay what they are."""
    array = array_of(given, name)
    if array.shape == shape[1:] and shape[0] == 1:
        array = array[None]
    if array.shape != shape:
        raise BadArgumentError(f"{name} has shape {array.shape}, wanted {shape}")
    if array.dtype == np.int32:
        array = np.ascontiguousarray(array).view(np.uint32)
    if array.dtype != np.uint32:
        raise BadArgumentError(f"{name} are {array.dtype}: uint32 is wanted")
    return np.ascontiguousarray(array)


def rewind_of(rewind: int | None) -> int:
    """rewind= as the core takes it: -1 for none."""
    if rewind is not None and not is_whole(rewind, 0, (1 << 62) - 1):
        raise BadArgumentError(f"rewind={rewind!r}: a number of tokens, 0 or more")
    return -1 if rewind is None else rewind


def layer_of(layer: int) -> int:
    if (type(layer) is not int and not is_whole(layer)) or not 0 <= layer < 1 << 32:
        raise BadArgumentError(f"layer {layer!r}: layers are counted from 0")
    return layer  # the core knows how many there are


def check_rows(got: View, name: str, rows: int, row: Row) -> None:
    heads, dim = row[:2]
    if got.shape != (rows, heads, dim):
        shape = tuple(got.shape)
        raise BadArgumentError(f"{name} has shape {shape}, wanted ({rows}, {heads}, {dim})")
    _check_dtype(got, name, row)


def _check_dtype(got: View, name: str, row: Row) -> None:
    if got.dtype != row.dtype and not (row.or_bytes and got.dtype == BYTES):
        dtype = DTYPES[row.dtype]
        raise BadArgumentError(f"{name} is {STORED[got.dtype]}, the pool stores {dtype}")


def check_apart(got: View, name: str) -> None:
    """Raises BadArgumentError where blocks or heads to be written begin within one another."""
    size = math.prod(got.shape[2:]) * DTYPE_BYTES[STORED[got.dtype]]
    for length, stride in zip(got.shape[:2], got.strides[:2], strict=True):
        if length > 1 and abs(stride) < size:
            raise BadArgumentError(
                f"{name}: blocks overlap, strides {got.strides} bytes: each is to have its memory"
            )


def check_blocks(got: View, name: str, row: Row) -> None:
    """[block_count, heads, block_tokens, dim], contiguous in the last two axes."""
    heads, dim = row[:2]
    shape = tuple(got.shape)
    if len(shape) != 4 or shape[1] != heads or shape[3] != dim:
        wanted = f"(blocks, {heads}, block_tokens, {dim})"
        raise BadArgumentError(f"{name} has shape {shape}, wanted {wanted}")
    _check_dtype(got, name, row)
    size = DTYPE_BYTES[STORED[got.dtype]]
    # An axis of length 1 is never stepped along.
    if (shape[3] > 1 and got.strides[3] != size) or (shape[2] > 1 and got.strides[2] != dim * size):
        raise BadArgumentError(
            f"{name}: tokens of a block and head are not contiguous, strides {got.strides} bytes"
        )
