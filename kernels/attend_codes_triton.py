"""The kernel behind `attend.py` for pieces of codes (native/src/kernels/codes.h has their form).

A word of 4 bytes has 4 or 8 channels of a key, or of a channel the values of 4 or 8 tokens. Words
are loaded as they lie, and each byte or nibble of them is an operand of a product of its own: q's
channels 0, 4, 8 ... meet the lowest bytes of keys, and the weights of tokens 0, 4, 8 ... those of
values. So codes become numbers in registers, nothing is shuffled, and no row is ever whole.

Operands are float16, which has every code less half their number; sums are float32. A token's scale
goes with its logit, and into its weight. A weight times a scale may be beyond float16's range, so
the softmax is kept in order by the largest of these products, and not of the weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from cxlkv.kernels.attend_shape import Call, Shape, Tiles, power_of_two, tiles_of
from cxlkv.kernels.attend_triton import FAR, LN_2, LOG2_E, NAMES, TYPES, _store
from cxlkv.kernels.runtime import INTERPRETED
from cxlkv.kernels.variants import Variant, variant

BLOCK = tl.constexpr(16)  # tokens of a block
LEAST_SCALE = tl.constexpr(2.0**-25)  # below every float16 but 0
REACH = tl.constexpr(1 << 30)  # tokens behind the last page: farther ones count as if there
NOWHERE = tl.constexpr((1 << 31) - 1)
IN_PYTHON = tl.constexpr(INTERPRETED)


def _ptx(parts: int, numbers: dict[str, str], lines: list[str]) -> tl.constexpr:
    """PTX for `parts` pairs of float16 of two words next to each other, $parts and the next."""
    names = ", ".join(["x0", "x1", "y0", "y1", *numbers])
    loads = [f"mov.b32 {name}, {text};" for name, text in numbers.items()]
    text = "\n".join(["{", f".reg .b32 {names};", *loads, *lines, "}"])
    return tl.constexpr(text.replace("first", f"${parts}").replace("second", f"${parts + 1}"))


def _bytes_ptx(half: bool) -> tl.constexpr:
    """A byte in the low bits of the float16 1024 is added to it."""
    lines = ["prmt.b32 x0, first, second, 0x5140;", "prmt.b32 x1, first, second, 0x7362;"]
    for part in range(4):
        places = ("0x4140", "0x4342")[part % 2]
        lines.append(f"prmt.b32 ${part}, x{part // 2}, 0x64646464, {places};")
        lines.append(f"sub.f16x2 ${part}, ${part}, less;")
        lines += [f"add.f16x2 ${part}, ${part}, half;"] * half
    return _ptx(4, {"less": "0x64806480", "half": "0x38003800"}, lines)  # 1152 and 0.5


def _nibbles_ptx(half: bool) -> tl.constexpr:
    """Likewise; a high nibble there is added 16 times, which its product with 1/16 mends."""
    lines = ["prmt.b32 x0, first, second, 0x5410;", "prmt.b32 x1, first, second, 0x7632;"]
    lines += ["shr.u32 y0, x0, 8;", "shr.u32 y1, x1, 8;"]
    for low in range(4):
        of, high = f"{'xy'[low % 2]}{low // 2}", low + 4
        lines.append(f"lop3.b32 ${low}, {of}, 0x000f000f, 0x64006400, 0xea;")
        lines.append(f"sub.f16x2 ${low}, ${low}, less;")
        lines += [f"add.f16x2 ${low}, ${low}, half;"] * half
        lines.append(f"lop3.b32 ${high}, {of}, 0x00f000f0, 0x64006400, 0xea;")
        lines.append(f"fma.rn.f16x2 ${high}, ${high}, part, more;")
    more = "0xd478d478" if half else "0xd480d480"  # -71.5 or -72
    numbers = {"less": "0x64086408", "half": "0x38003800", "part": "0x2c002c00", "more": more}
    return _ptx(8, numbers, lines)


BYTES, BYTES_HALF = _bytes_ptx(half=False), _bytes_ptx(half=True)
NIBBLES, NIBBLES_HALF = _nibbles_ptx(half=False), _nibbles_ptx(half=True)

# fmt: off


@triton.jit
def _codes(words, BITS: tl.constexpr, HALF: tl.constexpr):
    """Codes of each byte of the words, or of each low nibble and then each high one; less half
    their number, and with HALF half a step on: what they stand for, but for the scale."""
    if IN_PYTHON:
        found = ()
        for part in tl.static_range(32 // BITS):
            shift = part * 8 if BITS == 8 else part % 4 * 8 + part // 4 * 4
            code = words >> shift & (1 << BITS) - 1
            number = code.to(tl.float16) - (1 << BITS - 1) + (0.5 if HALF else 0.0)
            found = found + (number,)  # type: ignore[assignment]  # noqa: RUF005
    elif BITS == 8:
        found = tl.inline_asm_elementwise(
            BYTES_HALF if HALF else BYTES, "=r,=r,=r,=r,r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        found = tl.inline_asm_elementwise(
            NIBBLES_HALF if HALF else NIBBLES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16,
             tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
    return found


@triton.jit
def _four(x):
    """x [.., n, 2, 2] as four of [.., n]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dealt(x, LINES: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr):
    """x [LINES, TOKENS] as the first of each group of tokens in a word, the second ones, ..."""
    if BITS == 8:
        found = _four(tl.reshape(x, [LINES, TOKENS // 4, 2, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [LINES, TOKENS // 8, 2, 2, 2]))
        zero, two, four, six = _four(even)
        one, three, five, seven = _four(odd)
        found = (zero, one, two, three, four, five, six, seven)
    return found


@triton.jit
def _places(
    keys_at, values_at, pages, token, k, low, high,
    PAGE_TOKENS: tl.constexpr, PAGE_ROOM: tl.constexpr,
):
    """Pieces of these tokens of a list, places in them, positions behind the first of page `high`
    (NOWHERE: nothing is there), and whether their pages are among those from `low` to `high`."""
    slot = token // PAGE_ROOM
    token = token % PAGE_ROOM
    inside = slot < k
    page = tl.load(pages + slot, mask=inside, other=-1)
    key_at = tl.load(keys_at + slot, mask=inside, other=0)
    value_at = tl.load(values_at + slot, mask=inside, other=0)
    wanted = (page >= low) & (page <= high)
    position = tl.maximum(page - high, -(REACH // PAGE_TOKENS)) * PAGE_TOKENS + token
    there = wanted & (key_at != 0) & (value_at != 0) & (token < PAGE_TOKENS)
    position = tl.where(there, position, NOWHERE)
    return key_at, value_at, token, position, wanted


@triton.jit
def _words(at, wanted, COUNT: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
           ALONG: tl.constexpr, RUN: tl.constexpr):
    """int32 of pieces. ALONG: of a row for each address, words side by side; else a word for each
    address, in COUNT of ROWS rows that are ROW_BYTES apart. Of RUN words all are wanted, or none,
    and the first lies on 16 bytes."""
    step = tl.arange(0, ROWS)
    if ALONG:
        pointer = at[:, None] + (step * 4)[None, :]
        mask = wanted[:, None] & (step < COUNT)[None, :]
    else:
        pointer = at[None, :] + (step * ROW_BYTES)[:, None]
        mask = wanted[None, :] & (step < COUNT)[:, None]
    pointer = pointer.to(tl.pointer_type(tl.int32))
    pointer = tl.multiple_of(tl.max_contiguous(pointer, [1, RUN]), [16, 16])
    return tl.load(pointer, mask=tl.max_constancy(mask, [1, RUN]), other=0)


@triton.jit
def _scales(at, token, wanted, OFFSET: tl.constexpr, TOKENS: tl.constexpr):
    """Scales of pairs of tokens in pieces, float32 of all TOKENS. Words of two scales are copied
    while the kernel works, where one scale would be waited for."""
    pointer = (at + OFFSET + token * 2).to(tl.pointer_type(tl.int32))
    pair = tl.load(pointer, mask=wanted, other=0)
    first = pair.to(tl.int16).to(tl.float16, bitcast=True)
    second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), [TOKENS]).to(tl.float32)


@triton.jit
def _plain(at, token, wanted, DIM: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr,
           COMPUTE: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of numbers, [tokens, WIDTH]."""
    channel = tl.arange(0, WIDTH)
    pointer = (at.to(tl.pointer_type(TYPE)) + token * DIM)[:, None] + channel[None, :]
    if ALIGNED:
        pointer = tl.multiple_of(tl.max_contiguous(pointer, [1, WIDTH]), [16, 16])
    mask = wanted[:, None] & (channel < DIM)[None, :]
    return tl.load(pointer, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _parted(q, row_at, used, scale, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
            PRECISE: tl.constexpr):
    """_query() for codes, and half the sum of each row's parts: _codes() leaves it out of keys."""
    parts: tl.constexpr = 32 // BITS
    word = tl.arange(0, WIDTH // parts) * parts
    rows = ()
    largest = tl.zeros([row_at.shape[0]], tl.float32)
    for part in tl.static_range(parts):
        mask = used[:, None] & (word + part < DIM)[None, :]
        row = tl.load(q + row_at[:, None] + (word + part)[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(row), 1))
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    divisor = tl.where(largest > 0, largest, 1.0)[:, None]
    found = ()
    rest = ()
    half = tl.zeros([row_at.shape[0]], tl.float32)
    for part in tl.static_range(parts):
        row = rows[part] / divisor
        found = found + (row.to(tl.float16),)  # type: ignore[assignment]  # noqa: RUF005
        half += tl.sum(found[part].to(tl.float32), 1) * 0.5
        if PRECISE:
            left = (row - found[part].to(tl.float32)).to(tl.float16)
            rest = rest + (left,)  # noqa: RUF005
            half += tl.sum(left.to(tl.float32), 1) * 0.5
    return found, rest, half, largest * scale


@triton.jit
def _query(q, row_at, used, scale, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
           COMPUTE: tl.constexpr, PRECISE: tl.constexpr):
    """The parts of rows as _codes() has those of keys, what these lack, half the sum of both, and
    what their products are to be multiplied by. Parts are divided by the largest channel: float16
    ends at 65504."""
    if BITS == 0:
        channel = tl.arange(0, WIDTH)
        mask = used[:, None] & (channel < DIM)[None, :]
        part = tl.load(q + row_at[:, None] + channel[None, :], mask=mask, other=0.0)
        found = (part.to(COMPUTE),)
        rest = ()
        factor = tl.where(used, scale, 0.0)
        half = factor
    else:
        found, rest, half, factor = _parted(q, row_at, used, scale, DIM, WIDTH, BITS, PRECISE)
    return found, rest, half, factor


@triton.jit
def _scores(
    query, rest, half, key_at, token, wanted,
    KEY_BITS: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TYPE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, PRECISE: tl.constexpr,
    LINES: tl.constexpr, TOKENS: tl.constexpr,
):
    """Products of the parts with keys, [LINES, TOKENS], but for the scales of keys."""
    if KEY_BITS == 0:
        keys = _plain(key_at, token, wanted, DIM, K, TYPE, COMPUTE, ALIGNED)
        sums = tl.dot(query[0], tl.trans(keys), input_precision="ieee")
    else:
        parts: tl.constexpr = 32 // KEY_BITS
        at = key_at + token // BLOCK * KEY_BLOCK + token % BLOCK * 4
        words = _words(at, wanted, (DIM + parts - 1) // parts, K // parts, 64, False, BLOCK)
        codes = _codes(words, KEY_BITS, False)
        sums = tl.zeros([LINES, TOKENS], tl.float32) + half[:, None]
        for part in tl.static_range(parts):
            sums = tl.dot(query[part], codes[part], sums)
            if PRECISE:
                sums = tl.dot(rest[part], codes[part], sums)
    return sums


@triton.jit
def _summed(
    sums, weights, value_at, token, wanted, seen,
    VALUE_BITS: tl.constexpr, DIM: tl.constexpr, V: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TYPE: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, PRECISE: tl.constexpr,
    SEVERAL: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr,
):
    """sums [LINES, V] and values by their weights [LINES, TOKENS]. value_at and token are of the
    first token of each group in a word; of each token where values are plain."""
    if VALUE_BITS == 0:
        values = _plain(value_at, token, wanted, DIM, V, TYPE, COMPUTE, ALIGNED)
        if SEVERAL:
            # A line that does not see a NaN has a weight of 0 for it, which would not hide it.
            odd = (tl.abs(values.to(tl.float32)) < float("inf")) == 0
            values = tl.where(odd, 0.0, values).to(COMPUTE)
            hurt = tl.dot(seen.to(tl.float16), odd.to(tl.float16))
            sums = tl.where(hurt > 0, float("nan"), sums)
        sums = tl.dot(weights.to(COMPUTE), values, sums, input_precision="ieee")
    else:
        groups: tl.constexpr = 32 // VALUE_BITS
        width: tl.constexpr = (DIM + 15) // 16 * 64  # bytes of a group
        at = value_at + token // BLOCK * VALUE_BLOCK + token % BLOCK // groups * width
        codes = _codes(_words(at, wanted, DIM, V, 0, True, V), VALUE_BITS, True)
        high = weights.to(tl.float16)
        dealt = _dealt(high, LINES, TOKENS, VALUE_BITS)
        for part in tl.static_range(groups):
            sums = tl.dot(dealt[part], codes[part], sums)
        if PRECISE:
            low = (weights - high.to(tl.float32)).to(tl.float16)
            rest = _dealt(low, LINES, TOKENS, VALUE_BITS)
            for part in tl.static_range(groups):
                sums = tl.dot(rest[part], codes[part], sums)
    return sums


@triton.jit
def _weighed(logits, scales, seen, top, total, VALUE_BITS: tl.constexpr):
    """The step of an online softmax, in powers of two: weights, times the values' scales where they
    have some, how far earlier sums fade, the largest weight so far and sums by place in a tile."""
    levels = logits
    if VALUE_BITS:
        # Near enough to the logarithm: a float's bits, the exponent the whole part.
        bits = tl.maximum(scales, LEAST_SCALE).to(tl.int32, bitcast=True)
        levels = logits + (bits.to(tl.float32) * 2.0**-23 - 127)[None, :]
    new_top = tl.maximum(top, tl.max(levels, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    fade = tl.exp2(top - base)
    places = weights
    if total.shape[1] < weights.shape[1]:
        times: tl.constexpr = weights.shape[1] // total.shape[1]
        places = tl.sum(tl.reshape(weights, [total.shape[0], times, total.shape[1]]), 1)
    total = total * fade[:, None] + places
    if VALUE_BITS:  # a scale may be NaN
        weights = tl.where(seen, weights * scales[None, :], 0.0)
    return weights, fade, new_top, total


@triton.jit
def _lines(program, rows, kv_heads, splits, GROUP: tl.constexpr, LINES: tl.constexpr):
    """A program's list, kv head and split, and its lines: their rows, whether these are there, and
    where they lie."""
    blocks = tl.cdiv(rows * GROUP, LINES)
    split = program // blocks % splits
    head = program // blocks // splits % kv_heads
    one = (program // blocks // splits // kv_heads).to(tl.int64)
    line = program % blocks * LINES + tl.arange(0, LINES)
    row = line // GROUP
    line_at = (one * rows + row) * kv_heads * GROUP + head * GROUP + line % GROUP
    return one, head, split, row, row < rows, line_at


@triton.jit
def _sight(positions, row, used, window):
    """Each line sees the tokens above `above`, up to `last`."""
    last = tl.load(positions + row, mask=used, other=-1)
    above = tl.where(window > 0, tl.maximum(last - window, -1), -1)
    return above, last


@triton.jit
def _behind(position, origin):
    """int32, as _places() has positions."""
    return tl.minimum(tl.maximum(position - origin, -2 * REACH), NOWHERE).to(tl.int32)


@triton.jit
def _weights(log_weights, slot, in_page, k, PAGE_TOKENS: tl.constexpr):
    """Weights of a tile's tokens, in powers of two; -inf: it is left out."""
    mask = (in_page < PAGE_TOKENS) & (slot < k)
    pointer = log_weights + slot * PAGE_TOKENS + in_page
    return tl.load(pointer, mask=mask, other=float("-inf")) * LOG2_E


@triton.jit
def _attended(
    query, rest, half, factor, keys_at, values_at, pages, log_weights, k, split, splits, softcap,
    above, last, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, TYPE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_SCALES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE_SCALES: tl.constexpr, ALIGNED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGE_ROOM: tl.constexpr, SEVERAL: tl.constexpr,
    SOFTCAP: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr, PLACES: tl.constexpr,
):
    """All tiles of a split: the largest weight, the sum of weights, and that of values by them."""
    any_last = tl.max(last, 0)
    any_above = tl.min(tl.where(last >= 0, above, FAR), 0)
    # Pages that any row sees; positions count from the last of them, in 32 bits.
    high = tl.where(any_last < 0, -1, tl.minimum(any_last // PAGE_TOKENS, NOWHERE)).to(tl.int32)
    low = tl.minimum((any_above + 1) // PAGE_TOKENS, NOWHERE).to(tl.int32)
    origin = high.to(tl.int64) * PAGE_TOKENS
    last = _behind(last, origin)
    above = _behind(above, origin)
    any_last = tl.max(last, 0)
    any_above = _behind(any_above, origin)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES, PLACES], tl.float32)  # by place in a tile, or a part of it
    sums = tl.zeros([LINES, V], tl.float32)
    in_word: tl.constexpr = 32 // VALUE_BITS if VALUE_BITS else 1
    token = tl.arange(0, TOKENS)
    group = tl.arange(0, TOKENS // in_word) * in_word
    pair = tl.arange(0, TOKENS // 2) * 2
    for tile in range(split, tl.cdiv(k * PAGE_ROOM, TOKENS), splits):
        begin = tile * TOKENS
        key_at, _, in_page, position, key_wanted = _places(
            keys_at, values_at, pages, begin + token, k, low, high, PAGE_TOKENS, PAGE_ROOM)
        _, value_at, group_in_page, _, value_wanted = _places(
            keys_at, values_at, pages, begin + group, k, low, high, PAGE_TOKENS, PAGE_ROOM)
        key_scale_at, value_scale_at, pair_in_page, _, scale_wanted = _places(
            keys_at, values_at, pages, begin + pair, k, low, high, PAGE_TOKENS, PAGE_ROOM)
        weight = None
        if log_weights is not None:
            weight = _weights(log_weights, (begin + token) // PAGE_ROOM, in_page, k, PAGE_TOKENS)
            position = tl.where(weight == float("-inf"), NOWHERE, position)
        in_sight = (position > any_above) & (position <= any_last)
        if SEVERAL:
            seen = (position[None, :] > above[:, None]) & (position[None, :] <= last[:, None])
        else:
            seen = in_sight[None, :]
        logits = _scores(
            query, rest, half, key_at, in_page,
            key_wanted & (key_at != 0) if KEY_BITS else in_sight, KEY_BITS, DIM, K, KEY_BLOCK,
            TYPE, COMPUTE, ALIGNED, PRECISE, LINES, TOKENS)
        if KEY_BITS:
            logits *= _scales(
                key_scale_at, pair_in_page, scale_wanted & (key_scale_at != 0), KEY_SCALES,
                TOKENS)[None, :]
        logits *= factor[:, None]
        if SOFTCAP:  # tanh, from a power that may overflow to infinity
            logits = softcap * (1 - 2 / (tl.exp2(logits) + 1))
        if weight is not None:
            logits += weight[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        scales = logits
        if VALUE_BITS:
            scales = _scales(
                value_scale_at, pair_in_page, scale_wanted & (value_scale_at != 0), VALUE_SCALES,
                TOKENS)
        weights, fade, top, total = _weighed(logits, scales, seen, top, total, VALUE_BITS)
        sums = sums * fade[:, None]
        sums = _summed(
            sums, weights, value_at, group_in_page,
            value_wanted & (value_at != 0) if VALUE_BITS else in_sight, seen, VALUE_BITS,
            VALUE_DIM, V, VALUE_BLOCK, TYPE, COMPUTE, ALIGNED, PRECISE, SEVERAL, LINES, TOKENS)
    return top, tl.sum(total, 1), sums


# Counts change from step to step: none of them may compile the kernel once more.
@triton.jit(
    do_not_specialize=["k", "rows", "kv_heads", "splits", "window"],
    do_not_specialize_on_alignment=["keys_at", "values_at", "pages", "positions", "log_weights",
                                    "lse"],
)
def _attend_codes_kernel(
    q,  # [lists, rows, q_heads, DIM], contiguous; float32 and rotated where keys are codes
    keys_at, values_at,  # int64 [lists, kv_heads, k]
    pages,  # int32 [lists, kv_heads, k]
    positions,  # int64 [lists, rows]
    log_weights,  # float32 [lists, kv_heads, k, PAGE_TOKENS], or None: another kernel
    out,  # float32 [lists, rows, q_heads, splits, VALUE_DIM]; rotated where values are codes
    lse,  # float32 [lists, rows, q_heads, splits]
    k, rows, kv_heads, splits,
    scale, softcap,  # in powers of two; with SOFTCAP scale is twice that over the cap
    window,  # tokens, 0: none
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,  # 0: rows of TYPE
    TYPE: tl.constexpr, COMPUTE: tl.constexpr,  # of plain rows in memory, and in tl.dot
    PRECISE: tl.constexpr,  # queries and weights in two float16 each
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr,  # powers of two that have them
    KEY_BLOCK: tl.constexpr, KEY_SCALES: tl.constexpr,  # bytes of a block, and of all
    VALUE_BLOCK: tl.constexpr, VALUE_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,  # plain rows begin on 16 bytes
    PAGE_TOKENS: tl.constexpr, PAGE_ROOM: tl.constexpr,  # tokens of a page, and of its blocks
    GROUP: tl.constexpr,  # query heads of a kv head
    SEVERAL: tl.constexpr,  # a tile has lines of more than one row
    SOFTCAP: tl.constexpr,
    LINES: tl.constexpr, TOKENS: tl.constexpr,  # a tile's query rows (row x head), and its tokens
    PLACES: tl.constexpr,  # weights are summed by so many
):
    one, head, split, row, used, line_at = _lines(
        tl.program_id(0), rows, kv_heads, splits, GROUP, LINES)
    table = (one * kv_heads + head) * k
    query, rest, half, factor = _query(
        q, line_at * DIM, used, scale, DIM, K, KEY_BITS, COMPUTE, PRECISE)
    above, last = _sight(positions + one * rows, row, used, window)
    if log_weights is not None:
        log_weights += table * PAGE_TOKENS
    top, total, sums = _attended(
        query, rest, half, factor, keys_at + table, values_at + table, pages + table, log_weights,
        k, split, splits, softcap, above, last, KEY_BITS, VALUE_BITS, TYPE, COMPUTE, PRECISE, DIM,
        VALUE_DIM, K, V, KEY_BLOCK, KEY_SCALES, VALUE_BLOCK, VALUE_SCALES, ALIGNED, PAGE_TOKENS,
        PAGE_ROOM, SEVERAL, SOFTCAP, LINES, TOKENS, PLACES)
    total = tl.where(last >= 0, total, 0.0)
    # Lines are found once more, rather than kept in registers all the while: there is no second
    # axis, so this is the same number, but no compiler knows.
    _, _, split, _, used, line_at = _lines(
        tl.program_id(0) + tl.program_id(1), rows, kv_heads, splits, GROUP, LINES)
    at = line_at * splits + split
    _store(out, at, sums, total, used, 0, V, VALUE_DIM)
    result = (top + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2
    result = tl.where(total == 0, float("-inf"), result)
    tl.store(lse + at, result, mask=used)


# fmt: on


def _width(dim: int, bits: int) -> int:
    """Channels of a tile of keys: a power of two, 16 or more words."""
    return max(power_of_two(dim), 16 * (32 // bits if bits else 1))


@lru_cache(maxsize=256)
def constants(shape: Shape, tiles: Tiles) -> dict[str, object]:
    """The kernel's constants for a shape; one compiled kernel for each set of them."""
    room = shape.page_room
    key_block = -(-shape.dim // 16) * 16 * 16 * shape.key_bits // 8
    value_block = -(-shape.value_dim // 16) * 16 * 16 * shape.value_bits // 8
    plain = [
        dim * shape.dtype.itemsize % 16 == 0
        for dim, bits in ((shape.dim, shape.key_bits), (shape.value_dim, shape.value_bits))
        if not bits
    ]
    return {
        "KEY_BITS": shape.key_bits,
        "VALUE_BITS": shape.value_bits,
        "TYPE": TYPES[shape.dtype],
        # The interpreter has no bf16: it would multiply the patterns of the bits.
        "COMPUTE": tl.float32 if INTERPRETED else TYPES[shape.compute],
        "PRECISE": shape.query_dtype == torch.float32,
        "DIM": shape.dim,
        "VALUE_DIM": shape.value_dim,
        "K": _width(shape.dim, shape.key_bits),
        "V": max(16, power_of_two(shape.value_dim)),
        "KEY_BLOCK": key_block,
        "KEY_SCALES": key_block * (room // 16),
        "VALUE_BLOCK": value_block,
        "VALUE_SCALES": value_block * (room // 16),
        "ALIGNED": all(plain),
        "PAGE_TOKENS": shape.page_tokens,
        "PAGE_ROOM": room,
        "GROUP": shape.group,
        "SEVERAL": shape.mixes_rows(tiles.lines),
        "SOFTCAP": shape.softcap,
        "LINES": tiles.lines,
        "TOKENS": tiles.tokens,
        # A dot's tile has 8 tokens of each warp side by side: a thread adds up what it has itself.
        "PLACES": min(tiles.tokens, 8 * tiles.warps) if shape.key_bits else tiles.tokens,
    }


def launch(
    call: Call, shape: Shape, tiles: Tiles, splits: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """attend_triton.launch for codes. q is contiguous, float32 and rotated where keys are codes;
    out is left rotated where values are."""
    lists, kv_heads, k = call.keys_at.shape
    blocks = triton.cdiv(shape.rows * shape.group, tiles.lines)
    factor = call.scale if call.softcap is None else 2 * call.scale / call.softcap
    _attend_codes_kernel[(blocks * splits * kv_heads * lists,)](
        call.q,
        call.keys_at,
        call.values_at,
        call.pages,
        call.positions,
        call.log_weights,
        out,
        lse,
        k,
        shape.rows,
        kv_heads,
        splits,
        factor * LOG2_E.value,
        (call.softcap or 0.0) * LOG2_E.value,
        call.window or 0,
        **constants(shape, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def variants() -> list[Variant]:
    """Usual shapes: all pairs of codes, grouped heads, pages of 16 tokens; prompts; plain keys."""
    bf16, fp32 = torch.bfloat16, torch.float32
    usual = Shape(bf16, bf16, 128, 128, True, 4, 1, 16, False, 8, 8)
    few = replace(usual, key_bits=4, value_bits=4)
    shapes = {
        "int8": usual,
        "int4": few,
        "int8_int4": replace(usual, value_bits=4),
        "int4_int8": replace(usual, key_bits=4),
        "int8_fp32": replace(usual, dtype=fp32, query_dtype=fp32),
        "int4_fp32": replace(few, dtype=fp32, query_dtype=fp32),
        "none_int4": replace(usual, key_bits=0, value_bits=4),
        "int8_none": replace(usual, value_bits=0),
        "int8_dim_512_fp32": replace(usual, dtype=fp32, query_dtype=fp32, dim=512, value_dim=512),
    }
    for name, each in (("int8", usual), ("int4", few)):
        shapes |= {
            f"{name}_dim_64": replace(each, dim=64, value_dim=64, group=8),
            f"{name}_dim_80": replace(each, dim=80, value_dim=80),
            f"{name}_dim_256_softcap": replace(each, dim=256, value_dim=256, softcap=True),
            f"{name}_4_rows": replace(each, rows=4),
            f"{name}_pages_of_32": replace(each, page_tokens=32),
            f"{name}_512_rows": replace(each, rows=512, page_tokens=64),
        }
    for name in ("int8", "int4"):
        shapes[f"{name}_weighed"] = replace(shapes[name], weighed=True)
    return [_variant(name, shape, tiles_of(shape)) for name, shape in shapes.items()]


def _variant(name: str, shape: Shape, tiles: Tiles) -> Variant:
    types = {
        "q": "*fp32" if shape.key_bits else f"*{NAMES[shape.query_dtype]}",
        "keys_at values_at positions": "*i64",
        "pages": "*i32",
        "out lse": "*fp32",
        "scale softcap": "fp32",
        "k rows kv_heads splits window": "i32",
    }
    fixed = constants(shape, tiles)
    if shape.weighed:
        types["log_weights"] = "*fp32"
    else:
        fixed = fixed | {"log_weights": None}
    return variant(f"attend_{name}", _attend_codes_kernel, types, fixed, tiles.warps, tiles.stages)
