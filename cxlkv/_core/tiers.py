"""The binding of what tiers move and weigh: records, hotness, eviction, the local tier."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core.base import (
    HASH_BYTES,
    Handle,
    Numbers,
    check,
    dtype_of,
    flat,
    int32s,
    int64s,
    keep,
    numbers_from,
    with_capacity,
)
from cxlkv._core.pool import pool_set
from cxlkv._native import ffi, lib
from cxlkv.arrays import Codes, Names, RecordBytes, Units

RECORD_PRESENT: int = lib.CXLKV_RECORD_PRESENT  # codes, by record or page; 0: done
RECORD_MAGIC: int = lib.CXLKV_RECORD_MAGIC
RECORD_HEADER = dtype_of("cxlkv_record_header")  # in the pool
PACKED_MAGIC: int = lib.CXLKV_PACKED_MAGIC
PACKED_VERSION: int = lib.CXLKV_PACKED_VERSION
PACKED_HEADER = dtype_of("cxlkv_packed_header")  # outside
_HASH = ffi.offsetof("cxlkv_packed_header", "hash")


def record_shape(pool: Handle) -> tuple[int, int]:
    """Bytes of a record outside of the pool, and the CRC of what two pools must agree in."""
    described = ffi.new("cxlkv_description *")
    lib.cxlkv_pool_describe(pool, described)
    return int(described.packed_bytes), int(described.layout_crc)


def state_pages(pool: Handle) -> int:
    """Pages of a state checkpoint; 0 where the layout has none."""
    described = ffi.new("cxlkv_description *")
    lib.cxlkv_pool_describe(pool, described)
    return int(described.state_pages)


def records_read(
    pool: Handle,
    pages: npt.NDArray[np.uint32],
    generations: npt.NDArray[np.uint64],
    out: RecordBytes,
) -> Codes:
    """Fills rows of out with published pages of these generations; the codes say which."""
    _check_records(pool, len(pages), out)
    if len(generations) != len(pages):
        raise errors.BadArgumentError(f"{len(pages)} pages, {len(generations)} generations")
    codes = np.zeros(len(pages), np.int32)
    given = (flat("uint32_t", pages), flat("uint64_t", generations), flat("uint8_t", out, True))
    check(lib.cxlkv_records_read(pool, len(pages), *given, int32s(codes, True)))
    return codes


def records_write(pool: Handle, records: RecordBytes, parents: Names | None = None) -> Codes:
    """Publishes records, all or none when pages are short (PoolFullError); the codes say which.

    parents: the name of the page before each, zeros for none; None: not known.
    """
    _check_records(pool, len(records), records)
    if parents is not None and parents.shape != (len(records), 16):
        raise errors.BadArgumentError(f"parents of shape {parents.shape}: a name for each record")
    codes = np.zeros(len(records), np.int32)
    before = ffi.NULL if parents is None else flat("uint8_t", parents)
    given = (len(records), flat("uint8_t", records), before, int32s(codes, True))
    check(lib.cxlkv_records_write(pool, *given))
    return codes


def _check_records(pool: Handle, count: int, records: RecordBytes) -> None:
    wanted = (count, record_shape(pool)[0])
    if records.shape != wanted or records.dtype != np.uint8 or not records.flags.c_contiguous:
        raise errors.BadArgumentError(
            f"records of shape {records.shape} and dtype {records.dtype}: {wanted} of uint8 "
            "wanted, without gaps"
        )


def names_of(records: RecordBytes) -> Names:
    """Names that the records are published under; zeros for one that was not read."""
    return np.ascontiguousarray(records[:, _HASH : _HASH + HASH_BYTES])


PUBLISHED = dtype_of("cxlkv_published")
PUBLISHED_HELD: int = lib.CXLKV_PUBLISHED_HELD
PUBLISHED_PINNED: int = lib.CXLKV_PUBLISHED_PINNED
PUBLISHED_LOST: int = lib.CXLKV_PUBLISHED_LOST
PARENT_LOST: int = lib.CXLKV_PARENT_LOST


def hotness_read(
    pool: Handle, first: int, count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], int]:
    """Counts of pages [first, first + count), the epochs of their last uses, and the epoch now."""
    counts, epochs = np.empty(count, np.uint32), np.empty(count, np.uint32)
    out = (ffi.from_buffer("uint32_t[]", array, True) for array in (counts, epochs))
    return counts, epochs, check(lib.cxlkv_hotness_read(pool, first, count, *out))


def hotness_advance(pool: Handle) -> int:
    return pool_set(pool, lib.CXLKV_SET_EPOCH, True)


def hotness_enable(pool: Handle, on: bool) -> None:
    pool_set(pool, lib.CXLKV_SET_COUNTED, on)


def hotness_by_mass(pool: Handle, on: bool) -> None:
    pool_set(pool, lib.CXLKV_SET_BY_MASS, on)


def pool_published(pool: Handle) -> tuple[npt.NDArray[np.void], int]:
    """A row of PUBLISHED for each page that match() finds, by page; and the clock."""
    clock = ffi.new("uint64_t *")

    def fill(capacity: int) -> tuple[npt.NDArray[np.void], int]:
        rows = np.empty(capacity, PUBLISHED)
        at = ffi.from_buffer("cxlkv_published[]", rows, True)
        n = check(lib.cxlkv_pool_published(pool, at, capacity, clock))
        return rows[:n], n

    return with_capacity(fill), int(clock[0])


def choose(
    priorities: npt.NDArray[np.uint8],
    scores: npt.NDArray[np.float32],
    ages: npt.NDArray[np.uint32],
    parents: npt.NDArray[np.uint32],
    blocked: npt.NDArray[np.bool_],
    wanted: int,
) -> npt.NDArray[np.uint32]:
    """Rows that go, leaves first; all arrays are of one length and contiguous, or this refuses."""
    count = len(scores)
    arrays = (
        (priorities, np.uint8),
        (scores, np.float32),
        (ages, np.uint32),
        (parents, np.uint32),
        (blocked, np.bool_),
    )
    if any(a.shape != (count,) or a.dtype != t or not a.flags.c_contiguous for a, t in arrays):
        raise errors.BadArgumentError("choose: arrays of one length, and of the documented types")
    chosen = np.empty(min(wanted, count), np.uint32)
    ranks = (flat("uint8_t", priorities), flat("float", scores), flat("uint32_t", ages))
    tree = (flat("uint32_t", parents), flat("uint8_t", blocked))
    out = (len(chosen), flat("uint32_t", chosen, True))
    return chosen[: check(lib.cxlkv_evict_order(count, *ranks, *tree, *out))]


# By the core's number: what became of a unit that was to be promoted.
LOCAL_CODES = ("done", "there", "no_room", "not_sealed", "changed", "damaged", "unknown")
local_stats: Numbers = partial(numbers_from, "cxlkv_local_state *", lib.cxlkv_local_stats)


def local_make(pool: Handle, size: int, made: list[int]) -> None:
    """made: gets a 0 when the tier was made, also when an interrupt comes then."""
    keep(made, lib.cxlkv_local_make, pool, max(size, 1))  # 0 would end one
    check(made[0])


def local_destroy(pool: Handle) -> None:
    check(lib.cxlkv_local_make(pool, 0))


def local_promote(
    pool: Handle, units: Units, generations: npt.NDArray[np.uint64] | None
) -> tuple[int, npt.NDArray[np.int32]]:
    """How many can be read near now, and of each unit its place in LOCAL_CODES."""
    codes = np.empty(len(units), np.int32)
    wanted = ffi.NULL if generations is None else ffi.from_buffer("uint64_t[]", generations)
    out = int32s(codes, True)
    done = check(lib.cxlkv_local_move(pool, False, len(units), int64s(units), wanted, out))
    return done, codes


def local_demote(pool: Handle, units: Units) -> int:
    count = len(units)
    return check(lib.cxlkv_local_move(pool, True, count, int64s(units), ffi.NULL, ffi.NULL))


Hotness = tuple[Units, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]


def local_hotness(pool: Handle, capacity: int) -> Hotness:
    """(units, counts, resident) of all units with a count or a copy; capacity: a guess of how
    many."""

    def fill(capacity: int) -> tuple[Hotness, int]:
        units, counts = np.empty(capacity, np.int64), np.empty(capacity, np.uint32)
        resident = np.empty(capacity, np.uint8)
        out = (int64s(units, True), flat("uint32_t", counts, True), flat("uint8_t", resident, True))
        n = check(lib.cxlkv_local_hotness(pool, *out, capacity))
        return (units[:n], counts[:n], resident[:n].astype(np.bool_)), n

    return with_capacity(fill, capacity)
