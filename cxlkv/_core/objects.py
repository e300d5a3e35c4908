"""The binding of objects and their leases: the pool stores them under keys of 16 bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv._core.base import (
    HASH_BYTES,
    Handle,
    check,
    flat,
    handle_of,
    int32s,
    int64s,
    new_place,
    view_of,
)
from cxlkv._native import ffi, lib
from cxlkv.arrays import Addresses, Hashes, Sizes

ABSENT: int = lib.CXLKV_OBJECT_ABSENT
DAMAGED: int = lib.CXLKV_OBJECT_DAMAGED
HELD: int = lib.CXLKV_OBJECT_HELD


def object_keys(names: bytes, ends: Addresses, root: bytes) -> Hashes:
    """Hash the names that end at `ends` in `names`: [n, HASH_BYTES]."""
    keys = np.empty((len(ends), HASH_BYTES), np.uint8)
    out = flat("uint8_t", keys, True)
    check(lib.cxlkv_object_keys(names, flat("uint64_t", ends), len(ends), root, out))
    return keys


class Memory(NamedTuple):
    """A cxlkv_buffers of arrays: addresses and sizes uint64 [m], starts uint64 [n + 1], forms
    uint32 [k, 3], of each the codes of encoding and dtype, and dim."""

    addresses: Addresses
    sizes: Addresses
    starts: Addresses | None = None
    forms: npt.NDArray[np.uint32] | None = None


def _buffers(memory: Memory) -> Any:
    """Buffers of arrays that the caller keeps alive."""
    struct = ffi.new("cxlkv_buffers *")
    struct.addresses, struct.sizes = flat("uint64_t", memory[0]), flat("uint64_t", memory[1])
    struct.starts = ffi.NULL if memory.starts is None else flat("uint64_t", memory.starts)
    if memory.forms is not None:
        struct.form_count = len(memory.forms)
        struct.forms = ffi.cast("cxlkv_row_form *", ffi.from_buffer(memory.forms))
    return struct


def row_form_bytes(encoding: int, dtype: int, dim: int, size: int) -> int:
    """What so many bytes of rows take in an object."""
    form = ffi.new("cxlkv_row_form *", (encoding, dtype, dim))
    return check(lib.cxlkv_row_form_bytes(form, size))


def objects_put(pool: Handle, keys: bytes, memory: Memory, replace: bool) -> npt.NDArray[np.int32]:
    """0 for each object that is new, RECORD_PRESENT for the others."""
    codes = np.empty(len(keys) // HASH_BYTES, np.int32)
    struct = _buffers(memory)
    check(lib.cxlkv_objects_put(pool, len(codes), keys, struct, replace, int32s(codes, True)))
    return codes


def objects_get(pool: Handle, keys: bytes, memory: Memory) -> Sizes:
    """Bytes of each object in the pool, ABSENT or DAMAGED."""
    got = np.empty(len(keys) // HASH_BYTES, np.int64)
    struct = _buffers(memory)
    check(lib.cxlkv_objects_get(pool, len(got), keys, struct, int64s(got, True)))
    return got


def objects_sizes(pool: Handle, keys: bytes) -> Sizes:
    got = np.empty(len(keys) // HASH_BYTES, np.int64)
    check(lib.cxlkv_objects_get(pool, len(got), keys, ffi.NULL, int64s(got, True)))
    return got


def objects_remove(pool: Handle, keys: bytes) -> npt.NDArray[np.int32]:
    """0 for each object that is gone, ABSENT or HELD for the others."""
    codes = np.empty(len(keys) // HASH_BYTES, np.int32)
    check(lib.cxlkv_objects_remove(pool, len(codes), keys, int32s(codes, True)))
    return codes


def objects_remove_all(pool: Handle) -> int:
    return check(lib.cxlkv_objects_remove(pool, 0, ffi.NULL, ffi.NULL))


def objects_chain(pool: Handle, keys: bytes) -> int:
    """How many objects of a chain of keys are there, from the first on."""
    return check(lib.cxlkv_objects_chain(pool, len(keys) // HASH_BYTES, keys))


def objects_ranges(pool: Handle, keys: bytes, ranges: Addresses, address: int, size: int) -> Sizes:
    """ranges is uint64 [m, 4]: object, offset, bytes, target in the memory at `address`."""
    got = np.empty(len(ranges), np.int64)
    given = ffi.cast("cxlkv_range *", ffi.from_buffer(ranges))
    to = ffi.cast("uint8_t *", address)
    named = (len(keys) // HASH_BYTES, keys)
    check(lib.cxlkv_objects_ranges(pool, *named, len(ranges), given, to, size, int64s(got, True)))
    return got


def lease_take(pool: Handle, keys: bytes) -> tuple[Handle, Addresses, Sizes]:
    """The lease, and of each object its address, 0 where there is none, and its size."""
    count = len(keys) // HASH_BYTES
    addresses, sizes = np.zeros(count, np.uint64), np.empty(count, np.int64)
    out = new_place("cxlkv_lease **", lib.cxlkv_lease_destroy)
    at = flat("uint64_t", addresses, True)
    check(lib.cxlkv_lease_take(pool, count, keys, at, int64s(sizes, True), out))
    return handle_of(out), addresses, sizes


def lease_reserve(pool: Handle, sizes: Addresses) -> tuple[Handle, Addresses]:
    """The lease, and the address of each page."""
    addresses = np.zeros(len(sizes), np.uint64)
    out = new_place("cxlkv_lease **", lib.cxlkv_lease_destroy)
    at = flat("uint64_t", addresses, True)
    check(lib.cxlkv_lease_reserve(pool, len(sizes), flat("uint64_t", sizes), at, out))
    return handle_of(out), addresses


def lease_views(
    pool: Handle, lease: Handle, places: Sequence[tuple[int, int]], writable: bool
) -> tuple[list[memoryview | None], list[weakref.ref[object] | None]]:
    """The memory of each (address, bytes), None at address 0, and a weak reference that lives as
    long as any view of it, or of a part of it, in whatever form.

    Each keeps the lease, and the pool, which would be unmapped when nobody has it any more.
    """
    views: list[memoryview | None] = []
    memories: list[weakref.ref[object] | None] = []
    for address, size in places:
        view = reference = None
        if address:
            view, reference = view_of(address, size, (pool, lease))
            if not writable:
                view = view.toreadonly()
        views.append(view)
        memories.append(reference)
    return views, memories


def lease_publish(
    lease: Handle, places: npt.NDArray[np.uint32], keys: bytes
) -> npt.NDArray[np.int32]:
    """Publish reserved objects; the codes are those of objects_put()."""
    codes = np.empty(len(places), np.int32)
    given = (len(places), flat("uint32_t", places), keys)
    check(lib.cxlkv_lease_publish(lease, *given, int32s(codes, True)))
    return codes


def lease_release(lease: Handle, places: npt.NDArray[np.uint32] | None) -> None:
    """None: all. Of a closed pool nothing is left to give back."""
    given = ffi.NULL if places is None else ffi.from_buffer("uint32_t[]", places)
    code = lib.cxlkv_lease_release(lease, 0 if places is None else len(places), given)
    if code != -lib.CXLKV_E_CLOSED:
        check(code)
