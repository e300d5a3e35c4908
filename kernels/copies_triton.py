"""The kernels behind `copies.py`. Imported only where Triton runs them, so that `copies.py` needs
torch alone.

A copy from host memory is bound by the link, and the link is kept busy by many independent loads
in flight. So few programs copy, each a tile of words at a time: the loads of a tile are all issued
before its first store, 16 bytes a thread each. Tiles are cut from all fragments laid end to end,
whatever a fragment's size: 128 fragments of 20 KB, 10,000 of 4 KiB and rows of 656 bytes all fill
every lane, and every program has the same work but for one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.variants import Variant, variant

# Words a tile, warps. Eight loads a thread are in flight with the first, which keep 384 KiB on
# their way with 12 programs, several times what a link of 64 GB/s has under way in 2.5 us.
# The second is for copies that would otherwise leave programs idle.
LARGE_TILE = (2048, 8)
SMALL_TILE = (512, 4)

# Bytes of a word: the type of its elements, and how many. 16 bytes are one load of a thread.
ELEMENTS = {
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}


# Nothing is specialised on: another count must not compile a kernel again while a graph is being
# captured.
@triton.jit(
    do_not_specialize=["count", "words"],
    do_not_specialize_on_alignment=["source_at", "target_at"],
)
def _copy_kernel(
    source_at,  # int64 [count]: addresses, 0: nothing there
    target_at,  # int64 [count]
    count,  # fragments
    words,  # of a fragment
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TILE: tl.constexpr,  # words
):
    lanes = tl.arange(0, LANES)[None, :]
    fragment_words = tl.cast(words, tl.int64)
    total_words = fragment_words * count
    start = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0).to(tl.int64) * TILE
    while start < total_words:
        # One division in 64 bits a tile; from there on a word's place fits into 32.
        first = start // fragment_words
        local = (start - first * fragment_words).to(tl.int32) + tl.arange(0, TILE)
        ahead = local // words
        word = local - ahead * words
        fragment = first + ahead
        live = fragment < count
        source = tl.load(source_at + fragment, mask=live, other=0)
        target = tl.load(target_at + fragment, mask=live, other=0)
        live = live & (source != 0) & (target != 0)
        within = word.to(tl.int64) * WORD_BYTES
        source += within
        target += within
        mask = live[:, None]
        # An address from a table has no known alignment: without the hints each lane would be a
        # load of its own. They go on the whole tensor of pointers, or they are lost in between.
        load_at = source[:, None].to(tl.pointer_type(ELEMENT)) + lanes
        load_at = tl.multiple_of(tl.max_contiguous(load_at, [1, LANES]), [WORD_BYTES, WORD_BYTES])
        store_at = target[:, None].to(tl.pointer_type(ELEMENT)) + lanes
        store_at = tl.multiple_of(tl.max_contiguous(store_at, [1, LANES]), [WORD_BYTES, WORD_BYTES])
        tl.store(store_at, tl.load(load_at, mask=mask), mask=mask)
        start += step


_TYPES = {
    "source_at target_at": "*i64",
    "count words": "i32",
}


def _copy_variant(word_bytes: int, tile: tuple[int, int]) -> Variant:
    element, lanes = ELEMENTS[word_bytes]
    constants: dict[str, object] = {
        "ELEMENT": element,
        "LANES": lanes,
        "WORD_BYTES": word_bytes,
        "TILE": tile[0],
    }
    name = f"fragments {tile[0]} x {word_bytes} B"
    return variant(name, _copy_kernel, _TYPES, constants, num_warps=tile[1])


def variants() -> list[Variant]:
    """What `copies.py` launches; of the narrow words, which differ in nothing else, all."""
    return [
        _copy_variant(16, SMALL_TILE),
        *(_copy_variant(word_bytes, LARGE_TILE) for word_bytes in ELEMENTS),
    ]
