"""The binding of sequences: create, fork, truncate, export and adopt them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv._core.base import (
    Handle,
    check,
    checked,
    flat,
    handle_of,
    int64s,
    made,
    new_place,
    with_capacity,
)
from cxlkv._native import ffi, lib

HANDLE_BYTES_GUESS, PAGES_GUESS = 4096, 256


# made(), written out: these are called for each request, and take a microsecond in all.
def sequence_create(pool: Handle) -> Handle:
    out = new_place("cxlkv_sequence **", lib.cxlkv_sequence_destroy)
    check(lib.cxlkv_sequence_create(pool, out))
    return handle_of(out)


def sequence_fork(sequence: Handle) -> Handle:
    out = new_place("cxlkv_sequence **", lib.cxlkv_sequence_destroy)
    check(lib.cxlkv_sequence_fork(sequence, out))
    return handle_of(out)


sequence_truncate: Callable[[Handle, int], int] = checked(lib.cxlkv_sequence_truncate)


def sequence_release(sequence: Handle) -> None:
    check(lib.cxlkv_sequence_release(sequence))


def sequence_tokens(sequence: Handle, layer: int = lib.CXLKV_LAYER_LAST) -> int:
    return check(lib.cxlkv_sequence_tokens(sequence, layer))


def sequence_pages(sequence: Handle) -> npt.NDArray[np.uint32]:
    """Ids of its complete pages in the pool."""

    def fill(capacity: int) -> tuple[npt.NDArray[np.uint32], int]:
        pages = np.empty(capacity, np.uint32)
        n = check(lib.cxlkv_sequence_pages(sequence, flat("uint32_t", pages, True), capacity))
        return pages[:n], n

    return with_capacity(fill, PAGES_GUESS)


class Places(NamedTuple):
    """Where complete pages of a layer lie in the region, each array [pages]; -1: nowhere.

    Keys and values: of all kv heads, side by side at the geometry's key_piece_bytes and
    value_piece_bytes. Descriptors: -1 also of pages that have no seal yet.
    """

    keys: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]
    descriptors: npt.NDArray[np.int64]
    pages: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]


def sequence_places(sequence: Handle, layer: int, first: int = 0, capacity: int = 0) -> Places:
    """Places of the layer's complete pages, from `first` on; capacity: a guess of how many."""

    def fill(capacity: int) -> tuple[Places, int]:
        keys, values, descriptors = (np.empty(capacity, np.int64) for _ in range(3))
        pages, generations = np.empty(capacity, np.uint32), np.empty(capacity, np.uint64)
        out = (
            *(int64s(array, True) for array in (keys, values, descriptors)),
            flat("uint32_t", pages, True),
            flat("uint64_t", generations, True),
        )
        n = check(lib.cxlkv_sequence_places(sequence, layer, first, capacity, *out))
        return Places(keys[:n], values[:n], descriptors[:n], pages[:n], generations[:n]), n

    return with_capacity(fill, capacity)


def sequence_export(sequence: Handle) -> bytes:
    def fill(capacity: int) -> tuple[bytes, int]:
        out = ffi.new("uint8_t[]", capacity)
        n = check(lib.cxlkv_sequence_export(sequence, out, capacity))
        return bytes(ffi.buffer(out, min(n, capacity))), n

    return with_capacity(fill, HANDLE_BYTES_GUESS)


def sequence_adopt(pool: Handle, handle: bytes) -> Handle:
    made_by = ("cxlkv_sequence **", lib.cxlkv_sequence_destroy, lib.cxlkv_sequence_adopt)
    return made(*made_by, pool, handle, len(handle))
