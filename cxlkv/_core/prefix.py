"""The binding of the prefix index: keys, publish, match, forget, scrub, pin, prioritize."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv import errors
from cxlkv._core.base import HASH_BYTES, Handle, check, flat, handle_of, int32s, new_place
from cxlkv._core.pool import pool_geometry
from cxlkv._native import ffi, lib
from cxlkv.arrays import Codes, Hashes, Names, Tokens
from cxlkv.numbers import is_whole, seconds

PLACES_MAX = 4096
"""Pages of one key."""
KEYS_CHAINED: int = lib.CXLKV_KEYS_CHAINED
KEYS_CONTENT: int = lib.CXLKV_KEYS_CONTENT
PAGE_HELD: int = lib.CXLKV_PAGE_HELD
NO_PAGE = 2**32 - 1


def page_keys(ids: Tokens, page_tokens: int, kind: int, root: bytes) -> Hashes:
    """[pages, HASH_BYTES]"""
    keys = np.empty((len(ids) // page_tokens, HASH_BYTES), np.uint8)
    out = flat("uint8_t", keys, True)
    check(lib.cxlkv_page_keys(flat("int64_t", ids), len(ids), page_tokens, kind, root, out))
    return keys


def tail_keys(ids: Tokens, before: bytes) -> Hashes:
    """Keys of every prefix of ids: [:1], [:2], ..."""
    keys = np.empty((len(ids), HASH_BYTES), np.uint8)
    out = flat("uint8_t", keys, True)
    check(lib.cxlkv_page_keys(flat("int64_t", ids), len(ids), 0, lib.CXLKV_KEYS_TAIL, before, out))
    return keys


def every_key(ids: Tokens, page_tokens: int, root: bytes) -> Hashes:
    """Keys of ids[:1], ids[:2], ...: of a page where they end one, else of a tail."""
    keys = np.empty((len(ids), HASH_BYTES), np.uint8)
    out = flat("uint8_t", keys, True)
    every = lib.CXLKV_KEYS_EVERY
    check(lib.cxlkv_page_keys(flat("int64_t", ids), len(ids), page_tokens, every, root, out))
    return keys


def publish(sequence: Handle, hashes: bytes, tokens_per_key: int, content: bool = False) -> int:
    count = len(hashes) // HASH_BYTES
    return check(lib.cxlkv_publish(sequence, count, tokens_per_key, hashes, content))


def publish_tail(sequence: Handle, tokens: int, before: bytes, key: bytes) -> int:
    return check(lib.cxlkv_publish_tail(sequence, tokens, before, key))


def publish_states(sequence: Handle, tokens: int, key: bytes, states: npt.NDArray[np.uint8]) -> int:
    return check(
        lib.cxlkv_publish_states(sequence, tokens, key, flat("uint8_t", states), len(states))
    )


def state_places(
    sequence: Handle, pages: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """The pages of a hit's checkpoint, which has so many, and their generations; or none."""
    found, generations = np.empty(pages, np.uint32), np.empty(pages, np.uint64)
    places = (flat("uint32_t", found, True), flat("uint64_t", generations, True), pages)
    count = check(lib.cxlkv_state_places(sequence, *places))
    return found[:count], generations[:count]


def read_states(sequence: Handle, out: npt.NDArray[np.uint8]) -> None:
    check(lib.cxlkv_read_states(sequence, flat("uint8_t", out, True), len(out)))


def match(
    pool: Handle,
    hashes: bytes,
    lease_s: float,
    *,
    single: bool = False,
    content: bool = False,
    ids: Tokens | None = None,
    root: bytes = b"",
) -> tuple[int, int, Handle]:
    """ids and root: keys are page_keys(); finds a page that is not full behind them, too. Returns
    the tokens of the hit, and those of which the pages alone are there."""
    args = ffi.new("cxlkv_match_args *")
    args.hashes, args.count = ffi.from_buffer("uint8_t[]", hashes), len(hashes) // HASH_BYTES
    args.single, args.content, args.lease_s = single, content, seconds("lease_s", lease_s)
    if ids is not None:
        args.ids, args.id_count = ffi.from_buffer("int64_t[]", ids), len(ids)
        args.root = ffi.from_buffer("uint8_t[]", root)
    known = args.known_tokens = ffi.new("uint64_t *")
    out = new_place("cxlkv_sequence **", lib.cxlkv_sequence_destroy)
    tokens = check(lib.cxlkv_match(pool, args, out))
    return tokens, max(tokens, known[0]), handle_of(out)


def forget(pool: Handle, hashes: bytes) -> int:
    return check(lib.cxlkv_forget(pool, len(hashes) // HASH_BYTES, hashes, ffi.NULL))


class Scrubbed(NamedTuple):
    """Pages that were overwritten; that will be, when the last who holds one lets go (poisoned ones
    never are); and those of other hosts, of which nothing was done: they are theirs to scrub."""

    pages: int
    held: int
    elsewhere: int


def scrub(pool: Handle, hashes: bytes) -> Scrubbed:
    out = ffi.new("cxlkv_scrubbed *")
    check(lib.cxlkv_forget(pool, len(hashes) // HASH_BYTES, hashes, out))
    return Scrubbed(out.pages, out.held, out.elsewhere)


def pin(pool: Handle, hashes: bytes, pinned: bool) -> int:
    return check(
        lib.cxlkv_mark(pool, len(hashes) // HASH_BYTES, hashes, lib.CXLKV_MARK_PIN, pinned)
    )


PRIORITY_MAX: int = lib.CXLKV_PRIORITY_MAX


def prioritize(pool: Handle, hashes: bytes, priority: int, lowers: bool) -> int:
    mark = lib.CXLKV_MARK_PRIORITY if lowers else lib.CXLKV_MARK_PRIORITY_AT_LEAST
    return check(lib.cxlkv_mark(pool, len(hashes) // HASH_BYTES, hashes, mark, priority))


def evictable(pool: Handle, page_count: int) -> npt.NDArray[np.bool_]:
    flags = np.empty(page_count, np.bool_)
    check(lib.cxlkv_evictable(pool, ffi.from_buffer("uint8_t[]", flags, True), page_count))
    return flags


def pages_want(pool: Handle, page_count: int, within_share: bool) -> None:
    check(lib.cxlkv_pages_want(pool, page_count, within_share))


def extents_owed(pool: Handle) -> int:
    return check(lib.cxlkv_extents_due(pool, False))


def extents_takeable(pool: Handle) -> int:
    return check(lib.cxlkv_extents_due(pool, True))


def pages_wanted(pool: Handle, page_count: int) -> npt.NDArray[np.uint32]:
    pages = np.empty(page_count, np.uint32)
    return pages[: check(lib.cxlkv_pages_wanted(pool, flat("uint32_t", pages, True), page_count))]


def names(pool: Handle, hashes: bytes, places: int) -> npt.NDArray[np.uint8]:
    """[keys, places, parts, 16]: under what match() looks for each of the keys, in its order."""
    if not is_whole(places, 0, PLACES_MAX):
        raise errors.BadArgumentError(f"{places!r:.40} places of a key: 0 to {PLACES_MAX}")
    count = len(hashes) // 16
    out = np.empty((count, places, pool_geometry(pool)["part_count"], 16), np.uint8)
    check(lib.cxlkv_names(pool, count, hashes, places, flat("uint8_t", out, True)))
    return out


def state_names(pool: Handle, hashes: bytes, pages: int) -> npt.NDArray[np.uint8]:
    """[keys, pages, 16]"""
    if not is_whole(pages, 0, 1 << 16):
        raise errors.BadArgumentError(f"{pages!r:.40} pages of a checkpoint: 0 to 65536")
    out = np.empty((len(hashes) // HASH_BYTES, pages, 16), np.uint8)
    check(lib.cxlkv_state_names(pool, len(out), hashes, pages, flat("uint8_t", out, True)))
    return out


def find_pages(pool: Handle, names: Names) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """The published page of each name and its generation; NO_PAGE and 0 where there is none."""
    pages, generations = np.empty(len(names), np.uint32), np.empty(len(names), np.uint64)
    if names.shape != (len(names), 16) or not names.flags.c_contiguous:
        raise errors.BadArgumentError(f"names of shape {names.shape}: rows of 16 bytes wanted")
    given = (flat("uint32_t", pages, True), flat("uint64_t", generations, True))
    check(lib.cxlkv_find_pages(pool, len(names), flat("uint8_t", names), *given))
    return pages, generations


def forget_pages(
    pool: Handle,
    pages: npt.NDArray[np.uint32],
    generations: npt.NDArray[np.uint64],
    only_unheld: bool,
) -> Codes:
    """Takes published pages of these generations out of the index; code 0: the page is free now."""
    if len(generations) != len(pages):
        raise errors.BadArgumentError(f"{len(pages)} pages, {len(generations)} generations")
    codes = np.zeros(len(pages), np.int32)
    given = (flat("uint32_t", pages), flat("uint64_t", generations), int(only_unheld))
    check(lib.cxlkv_forget_pages(pool, len(pages), *given, int32s(codes, True)))
    return codes
