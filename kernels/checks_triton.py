"""The kernel behind `checks.py`, which says how it goes. Imported only where Triton runs it."""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.crc32c_shifts import POLYNOMIAL, lanes_for
from cxlkv.kernels.crc32c_triton import _multiplied, _shifted
from cxlkv.kernels.sources import STALE
from cxlkv.kernels.variants import Variant, variant

CRC_POLYNOMIAL = tl.constexpr(POLYNOMIAL)
ANOTHER = tl.constexpr(STALE)


@triton.jit
def _sum_of(
    piece_at,
    source,
    words,
    kind,
    tables,
    factors,
    constants,
    TAIL: tl.constexpr,
    LANES: tl.constexpr,
):
    """The CRC32C of a piece; TAIL: one word more than its copy has, where it came from."""
    lane = tl.arange(0, LANES)
    words = tl.multiple_of(words, 4)
    register = tl.zeros([LANES], tl.uint32)
    for row in range(0, words + TAIL, LANES):
        place = row + lane
        at = piece_at.to(tl.pointer_type(tl.int32)) + place
        at = tl.multiple_of(tl.max_contiguous(at, LANES), 16)
        word = tl.load(at, mask=place < words, other=0)
        if TAIL:
            more = source.to(tl.pointer_type(tl.int32)) + place
            word = word | tl.load(more, mask=place == words, other=0)
        register = _shifted(register, tables) ^ word.to(tl.uint32, bitcast=True)
    factor = tl.load(factors + kind * LANES + lane).to(tl.uint32, bitcast=True)
    total = tl.xor_sum(_multiplied(register, factor, CRC_POLYNOMIAL), 0)
    return total.to(tl.int32, bitcast=True) ^ tl.load(constants + kind)


# Nothing is specialised on: another count must not compile a kernel again while a graph is being
# captured.
@triton.jit(do_not_specialize=["key_words", "value_words", "heads", "k", "pages_max", "first"])
def _check_kernel(
    sources,
    descriptors,
    generations,
    checksums,
    keys_at,
    values_at,
    pages,
    found,
    tables,
    factors,
    constants,
    key_words,
    value_words,
    heads,
    k,
    pages_max,
    first,
    KINDS: tl.constexpr,
    TAIL: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a page of a head: its K, its V, then its descriptor."""
    piece = tl.program_id(0).to(tl.int64)
    found += piece // k // heads
    source = tl.load(sources + piece)
    if source != 0:
        sums = tl.load(checksums + piece)
        if sums != 0:
            row = (first + piece // k) * pages_max + tl.load(pages + piece)
            for kind in tl.static_range(KINDS):
                at = tl.load((keys_at if kind == 0 else values_at) + piece)
                words = key_words if kind == 0 else value_words
                total = _sum_of(
                    at, source, words, kind, tables, factors, constants, TAIL and kind == 0, LANES
                )
                wanted = (sums + 8 + 4 * kind).to(tl.pointer_type(tl.int32))
                if total != tl.load(wanted, volatile=True):
                    tl.atomic_max(found, row * 2 + kind + 1, sem="relaxed")
        tl.debug_barrier()  # the sums are read before the descriptor, which vouches for them
        descriptor = tl.load(descriptors + piece).to(tl.pointer_type(tl.int64))
        there = descriptor.to(tl.int64) != 0  # else the page is none
        version = tl.load(descriptor, mask=there, other=0, volatile=True)
        state = version & 0xFF
        same = ((version >> 8) & 0xFFFFFFFFFFFFFF) == tl.load(generations + piece)
        if (same & ((state == 1) | (state == 2))) == 0:
            tl.atomic_max(found, tl.full((), ANOTHER, tl.int64), sem="relaxed")


def variants() -> list[Variant]:
    """Pieces of a usual model, as they are and as codes, and long ones of keys alone."""
    types = {
        "sources descriptors generations checksums keys_at values_at found": "*i64",
        "pages tables factors constants": "*i32",
        "key_words value_words heads k pages_max": "i32",
        "first": "i64",
    }
    return [
        variant(
            f"pieces of {largest} bytes, {kinds} of them, with{'' if tail else 'out'} a tail",
            _check_kernel,
            types,
            {"KINDS": kinds, "TAIL": tail, "LANES": lanes_for(largest)},
            num_warps=lanes_for(largest) // 128,
        )
        for largest, kinds, tail in ((4096, 2, False), (2048, 2, True), (64 * 576 * 2, 1, False))
    ]
