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

from cxlkv.kernels.variants import Variant

# Words a tile, warps. Eight loads a thread are in flight with the first, which keep 384 KiB on
# their way with 12 programs, several times what a link of 64 GB/s has under way in 2.5 us.
# The second is for copies that would otherwise leave programs idle.
LARGE_TILE = (2048, 8)
SMALL_TILE = (512, 4)

ROWS_A_TILE, ROW_WARPS = 32, 8
DESCRIPTORS_A_TURN, DESCRIPTOR_WARPS = 2048, 8

# Bytes of a word: the type of its elements, and how many. 16 bytes are one load of a thread.
ELEMENTS = {
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}

_BOX = (
    "row_words",
    "inner_rows",
    "source_outer_bytes",
    "source_inner_bytes",
    "target_outer_bytes",
    "target_inner_bytes",
)


# Nothing is specialised on: another count must not compile a kernel again while a graph is being
# captured.
@triton.jit(
    do_not_specialize=["count", "words", *_BOX],
    do_not_specialize_on_alignment=["source_at", "target_at"],
)
def _copy_kernel(
    source_at,  # int64 [count]: addresses, 0: nothing there
    target_at,  # int64 [count]
    count,  # fragments
    words,  # of a fragment, all of its rows
    row_words,  # the rest only if BOXED: a fragment is [outer, inner_rows] rows of words
    inner_rows,
    source_outer_bytes,
    source_inner_bytes,
    target_outer_bytes,
    target_inner_bytes,
    BOXED: tl.constexpr,  # whether a fragment has rows with strides, or is contiguous
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
        if BOXED:
            row = word // row_words
            outer = row // inner_rows
            inner = row - outer * inner_rows
            within = (word - row * row_words).to(tl.int64) * WORD_BYTES
            outer = outer.to(tl.int64)
            inner = inner.to(tl.int64)
            source += outer * source_outer_bytes + inner * source_inner_bytes + within
            target += outer * target_outer_bytes + inner * target_inner_bytes + within
        else:
            source += word.to(tl.int64) * WORD_BYTES
            target += word.to(tl.int64) * WORD_BYTES
        mask = live[:, None]
        # An address from a table has no known alignment: without the hints each lane would be a
        # load of its own. They go on the whole tensor of pointers, or they are lost in between.
        load_at = source[:, None].to(tl.pointer_type(ELEMENT)) + lanes
        load_at = tl.multiple_of(tl.max_contiguous(load_at, [1, LANES]), [WORD_BYTES, WORD_BYTES])
        store_at = target[:, None].to(tl.pointer_type(ELEMENT)) + lanes
        store_at = tl.multiple_of(tl.max_contiguous(store_at, [1, LANES]), [WORD_BYTES, WORD_BYTES])
        tl.store(store_at, tl.load(load_at, mask=mask), mask=mask)
        start += step


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["source_at"],
)
def _unpack_rows_kernel(
    source_at,  # int64 [count]: addresses of rows of 656 bytes, 0: nothing there
    out,  # bfloat16 [count, 576] as int16
    count,
    ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles = tl.cdiv(count, ROWS)
    while tile < tiles:
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < count
        source = tl.load(source_at + row, mask=live, other=0)[:, None]
        there = source != 0
        code = tl.arange(0, 512)[None, :]
        code_at = source.to(tl.pointer_type(tl.int8)) + code
        code_at = tl.multiple_of(tl.max_contiguous(code_at, [1, 512]), [16, 16])
        codes = tl.load(code_at, mask=there, other=0)
        group = tl.arange(0, 4)[None, :]
        scale_at = (source + 512).to(tl.pointer_type(tl.float32)) + group
        scale_at = tl.multiple_of(tl.max_contiguous(scale_at, [1, 4]), [16, 16])
        scales = tl.load(scale_at, mask=there, other=0.0)
        rotary = tl.arange(0, 64)[None, :]
        rotary_at = (source + 528).to(tl.pointer_type(tl.int16)) + rotary
        rotary_at = tl.multiple_of(tl.max_contiguous(rotary_at, [1, 64]), [16, 16])
        rotaries = tl.load(rotary_at, mask=there, other=0)
        values = tl.reshape(_e4m3(codes), [ROWS, 4, 128]) * scales[:, :, None]
        values = tl.reshape(_bfloat16_bits(values), [ROWS, 512])
        out_at = out + row.to(tl.int64)[:, None] * 576
        tl.store(out_at + code, values, mask=live[:, None])
        tl.store(out_at + 512 + rotary, rotaries, mask=live[:, None])
        tile += tl.num_programs(0)


@triton.jit
def _e4m3(codes):
    """float32 of e4m3 bits, with no instruction that GPUs before sm_89 lack.

    The bits but the sign, seven further up, are a half whose exponent is 8 too small; denormals
    stay right, as halves have them and the conversion is exact. 0x7f is the one NaN.
    """
    bits = codes.to(tl.int16)  # the sign comes along
    half = (((bits & 0x7F) << 7) | (bits & -0x8000)).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _bfloat16_bits(values):
    """float32 rounded to nearest, ties to even: Triton's interpreter would cut off."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["descriptor_at", "expected"],
)
def _check_generations_kernel(
    descriptor_at,  # int64 [count]: addresses, 0: no page
    expected,  # int64 [count]
    wrong,  # int32 [1]
    count,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < count:
        index = start + tl.arange(0, BLOCK)
        live = index < count
        address = tl.load(descriptor_at + index, mask=live, other=0)
        there = address != 0
        # Volatile: what the host has stored by now, not what a cache of the GPU kept.
        version = tl.load(address.to(tl.pointer_type(tl.int64)), mask=there, other=0, volatile=True)
        wanted = tl.load(expected + index, mask=live, other=0)
        state = version & 0xFF
        same = ((version >> 8) & 0xFFFFFFFFFFFFFF) == wanted
        valid = same & ((state == 1) | (state == 2))
        total += (there & (valid == 0)).to(tl.int32)
        start += BLOCK
    tl.store(wrong, tl.sum(total, axis=0))


def _copy_variant(name: str, word_bytes: int, tile: tuple[int, int], *, boxed: bool) -> Variant:
    element, lanes = ELEMENTS[word_bytes]
    constants: dict[str, object] = {
        "BOXED": boxed,
        "ELEMENT": element,
        "LANES": lanes,
        "WORD_BYTES": word_bytes,
        "TILE": tile[0],
    }
    signature = {"source_at": "*i64", "target_at": "*i64", "count": "i32", "words": "i32"}
    signature |= dict.fromkeys(_BOX, "i32") | dict.fromkeys(constants, "constexpr")
    return Variant(name, "_copy_kernel", signature, constants, num_warps=tile[1], num_stages=1)


def variants() -> list[Variant]:
    """What `copies.py` launches; of the narrow words, which differ in nothing else, some."""
    found = [
        _copy_variant(f"{kind} {tile[0]} x {word_bytes} B", word_bytes, tile, boxed=boxed)
        for kind, boxed, narrow in (("fragments", False, (4, 1)), ("pages", True, (8, 2)))
        for word_bytes, tile in [
            (16, LARGE_TILE),
            (16, SMALL_TILE),
            *((word_bytes, LARGE_TILE) for word_bytes in narrow),
        ]
    ]
    unpack = {"source_at": "*i64", "out": "*i16", "count": "i32", "ROWS": "constexpr"}
    check = {"descriptor_at": "*i64", "expected": "*i64", "wrong": "*i32", "count": "i32"}
    check["BLOCK"] = "constexpr"
    rows: dict[str, object] = {"ROWS": ROWS_A_TILE}
    block: dict[str, object] = {"BLOCK": DESCRIPTORS_A_TURN}
    return [
        *found,
        Variant("rows of 656 B", "_unpack_rows_kernel", unpack, rows, ROW_WARPS, 1),
        Variant("generations", "_check_generations_kernel", check, block, DESCRIPTOR_WARPS, 1),
    ]
