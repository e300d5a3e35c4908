"""The kernel behind `attend.py`. Imported only where Triton runs it.

A program has one kv head of one list, a tile of its query rows, and every `splits`-th tile of the
list's tokens; a tile of tokens goes by the list's order, whatever a page's size. Tiles are dealt
out in turn, so padding at a list's end costs all splits the same. Addresses are read a tile ahead
of the rows that they name: Triton's pipeliner then finds addresses at hand, and keeps the copies
of the next tiles under way (cp.async) while it works on one.

Where the query rows see different tokens (speculative ones do, at the end of the list), the main
loop takes the tokens that all rows of the program see; the others are done row by row afterwards.
So a value that a row must not see, NaN for all we know, never meets that row's weight of zero.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from cxlkv.arrays import address_of
from cxlkv.kernels.attend_shape import Call, Shape, Tiles, blocks_of, tiles_of
from cxlkv.kernels.runtime import INTERPRETED
from cxlkv.kernels.variants import Variant, variant

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LOG2_E = tl.constexpr(1 / math.log(2))
LN_2 = tl.constexpr(math.log(2))
FAR = tl.constexpr(1 << 62)  # past every position

# Triton's functions take no structures, so the constants of a call go through all of them one by
# one: their lists are packed here, not an argument a line.
# fmt: off


@triton.jit
def _look(
    keys_at, values_at, pages, tile, k,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Where the rows of a tile's tokens lie, and their positions; -1: nothing is there."""
    flat = tile * TOKENS + tl.arange(0, TOKENS)
    slot = flat // PAGE_TOKENS
    token = flat % PAGE_TOKENS
    inside = slot < k
    page = tl.load(pages + slot, mask=inside, other=-1)
    key_at = tl.load(keys_at + slot, mask=inside, other=0)
    there = (page >= 0) & (key_at != 0)
    value_at = key_at
    if VALUE_BYTES:
        value_at = tl.load(values_at + slot, mask=inside, other=0)
        there = there & (value_at != 0)
    position = tl.where(there, page.to(tl.int64) * PAGE_TOKENS + token, -1)
    return key_at + token * KEY_BYTES, value_at + token * VALUE_BYTES, position


@triton.jit
def _weights(log_weights, tile, k, PAGE_TOKENS: tl.constexpr, TOKENS: tl.constexpr):
    """Weights of a tile's tokens, in powers of two; -inf: it is left out."""
    flat = tile * TOKENS + tl.arange(0, TOKENS)
    inside = flat < k * PAGE_TOKENS
    return tl.load(log_weights + flat, mask=inside, other=float("-inf")) * LOG2_E


@triton.jit
def _rows(
    at, seen,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    TYPE: tl.constexpr, COMPUTE: tl.constexpr,
):
    """Channels FIRST to FIRST + WIDTH - 1 of the rows at these addresses; 0 where not seen."""
    channel = FIRST + tl.arange(0, WIDTH)
    pointer = at.to(tl.pointer_type(TYPE))[:, None] + channel[None, :]
    if ALIGNED:  # nothing is known of an address from memory: each element would be a load
        pointer = tl.multiple_of(tl.max_contiguous(pointer, [1, WIDTH]), [16, 16])
    mask = seen[:, None]
    if FIRST + WIDTH > DIM:
        mask = mask & (channel < DIM)[None, :]
    return tl.load(pointer, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _step(
    q1, q2, top, total, sum1, sum2, key_at, value_at, seen, weight, scale, softcap,
    TYPE: tl.constexpr, COMPUTE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    VALUE_BYTES: tl.constexpr, ALIGNED: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """A tile of tokens into the state of an online softmax, in powers of two; weight: what is added
    to their logits, or None."""
    k1 = _rows(key_at, seen, 0, K1, DIM, ALIGNED, TYPE, COMPUTE)
    v1 = k1
    if VALUE_BYTES:
        v1 = _rows(value_at, seen, 0, V1, VALUE_DIM, ALIGNED, TYPE, COMPUTE)
    logits = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    k2 = k1
    if K2:
        k2 = _rows(key_at, seen, K1, K2, DIM, ALIGNED, TYPE, COMPUTE)
        logits = tl.dot(q2, tl.trans(k2), logits, input_precision="ieee")
    logits *= scale
    if SOFTCAP:  # tanh, from a power that may overflow to infinity
        logits = softcap * (1 - 2 / (tl.exp2(logits) + 1))
    if weight is not None:
        logits += weight[None, :]
    logits = tl.where(seen[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(COMPUTE)
    sum1 = tl.dot(weights, v1, sum1 * fade[:, None], input_precision="ieee")
    if V2:
        v2 = k2
        if VALUE_BYTES:
            v2 = _rows(value_at, seen, V1, V2, VALUE_DIM, ALIGNED, TYPE, COMPUTE)
        sum2 = tl.dot(weights, v2, sum2 * fade[:, None], input_precision="ieee")
    return new_top, total, sum1, sum2


@triton.jit
def _query(q, row_at, used, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
           ALIGNED: tl.constexpr, COMPUTE: tl.constexpr):
    """Channels FIRST to FIRST + WIDTH - 1 of the query rows; 0 where there is no row."""
    channel = FIRST + tl.arange(0, WIDTH)
    pointer = q + row_at[:, None] + channel[None, :]
    if ALIGNED:
        pointer = tl.multiple_of(tl.max_contiguous(pointer, [1, WIDTH]), [16, 16])
    return tl.load(pointer, mask=used[:, None] & (channel < DIM)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def _store(out, at, part, total, used, FIRST: tl.constexpr, WIDTH: tl.constexpr,
           DIM: tl.constexpr):
    """The sums over their total, as channels from FIRST on; 0 where nothing was seen."""
    channel = FIRST + tl.arange(0, WIDTH)
    empty = (total == 0)[:, None]
    part = tl.where(empty, 0.0, part / tl.where(empty, 1.0, total[:, None]))
    mask = used[:, None] & (channel < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + channel[None, :], part, mask=mask)


@triton.jit
def _together(
    q1, q2, top, total, sum1, sum2, keys_at, values_at, pages, log_weights, split, splits, k, scale,
    softcap,
    above, last, any_above, any_last,  # tokens that all rows see, and those that any row sees
    TYPE: tl.constexpr, COMPUTE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, ALIGNED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SEVERAL: tl.constexpr, SOFTCAP: tl.constexpr, TOKENS: tl.constexpr,
):
    """All tiles of a split, tokens that all rows see; and between which tiles others lie."""
    tiles = tl.cdiv(k * PAGE_TOKENS, TOKENS)
    low = tl.full([TOKENS], 2147483647, tl.int32)
    high = tl.full([TOKENS], -1, tl.int32)
    next_key_at, next_value_at, next_position = _look(
        keys_at, values_at, pages, split, k, KEY_BYTES, VALUE_BYTES, PAGE_TOKENS, TOKENS)
    if log_weights is not None:
        next_weight = _weights(log_weights, split, k, PAGE_TOKENS, TOKENS)
    for tile in range(split, tiles, splits):
        key_at = next_key_at
        value_at = next_value_at
        position = next_position
        next_key_at, next_value_at, next_position = _look(
            keys_at, values_at, pages, tile + splits, k, KEY_BYTES, VALUE_BYTES, PAGE_TOKENS,
            TOKENS)
        seen = (position > above) & (position <= last)
        if SEVERAL:
            apart = (position > any_above) & (position <= any_last) & (seen == 0)
            low = tl.minimum(low, tl.where(apart, tile, 2147483647))
            high = tl.maximum(high, tl.where(apart, tile, -1))
        weight = None
        if log_weights is not None:
            weight = next_weight
            next_weight = _weights(log_weights, tile + splits, k, PAGE_TOKENS, TOKENS)
            seen = seen & (weight != float("-inf"))
        top, total, sum1, sum2 = _step(
            q1, q2, top, total, sum1, sum2, key_at, value_at, seen, weight, scale, softcap, TYPE,
            COMPUTE, DIM, VALUE_DIM, K1, K2, V1, V2, VALUE_BYTES, ALIGNED, SOFTCAP)
    return top, total, sum1, sum2, low, high


@triton.jit
def _apart(
    q1, q2, top, total, sum1, sum2, keys_at, values_at, pages, log_weights, begin, end, splits, k,
    scale, softcap, above, last, positions, row, rows, window,
    TYPE: tl.constexpr, COMPUTE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, ALIGNED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, TOKENS: tl.constexpr,
):
    """The tokens of tiles from begin to end that some rows see and others do not, row by row."""
    first_row = tl.min(row, 0)
    last_row = tl.minimum(tl.max(row, 0), rows - 1)
    for tile in tl.range(begin, end, splits, num_stages=1):
        key_at, value_at, position = _look(
            keys_at, values_at, pages, tile, k, KEY_BYTES, VALUE_BYTES, PAGE_TOKENS, TOKENS)
        left = (position <= above) | (position > last)
        weight = None
        if log_weights is not None:
            weight = _weights(log_weights, tile, k, PAGE_TOKENS, TOKENS)
            left = left & (weight != float("-inf"))
        for one in tl.range(first_row, last_row + 1, num_stages=1):
            own_last = tl.load(positions + one)
            own_above = tl.where(window > 0, tl.maximum(own_last - window, -1), -1)
            seen = left & (position > own_above) & (position <= own_last)
            new_top, new_total, new_sum1, new_sum2 = _step(
                q1, q2, top, total, sum1, sum2, key_at, value_at, seen, weight, scale, softcap,
                TYPE, COMPUTE, DIM, VALUE_DIM, K1, K2, V1, V2, VALUE_BYTES, ALIGNED, SOFTCAP)
            mine = row == one
            top = tl.where(mine, new_top, top)
            total = tl.where(mine, new_total, total)
            sum1 = tl.where(mine[:, None], new_sum1, sum1)
            sum2 = tl.where(mine[:, None], new_sum2, sum2)
    return top, total, sum1, sum2


@triton.jit
def _sight(positions, row, used, first_row, window, SEVERAL: tl.constexpr):
    """Tokens above `above` up to `last` are seen by all rows, and by any: (above, last) twice."""
    if SEVERAL:
        position = tl.load(positions + row, mask=used, other=-1)
        there = position >= 0
        below = tl.where(window > 0, tl.maximum(position - window, -1), -1)
        any_last = tl.max(position, 0)
        last = tl.minimum(tl.min(tl.where(there, position, FAR), 0), any_last)
        above = tl.max(tl.where(there, below, -1), 0)
        any_above = tl.min(tl.where(there, below, FAR), 0)
    else:
        last = tl.load(positions + first_row)
        above = tl.where(window > 0, tl.maximum(last - window, -1), -1)
        any_last = last
        any_above = above
    return above, last, any_above, any_last


# Counts and strides change from step to step: none of them may compile the kernel once more.
@triton.jit(
    do_not_specialize=["k", "rows", "kv_heads", "splits", "list_stride", "row_stride",
                       "head_stride", "window"],
    do_not_specialize_on_alignment=["keys_at", "values_at", "pages", "positions", "log_weights",
                                    "lse"],
)
def _attend_kernel(
    q,  # [lists, rows, q_heads, DIM], of these strides
    keys_at, values_at,  # int64 [lists, kv_heads, k]
    pages,  # int32 [lists, kv_heads, k]
    positions,  # int64 [lists, rows]
    log_weights,  # float32 [lists, kv_heads, k, PAGE_TOKENS], or None: another kernel
    out,  # float32 [lists, rows, q_heads, splits, VALUE_DIM]
    lse,  # float32 [lists, rows, q_heads, splits]
    k, rows, kv_heads, splits, list_stride, row_stride, head_stride,
    scale, softcap,  # in powers of two; with SOFTCAP scale is twice that over the cap
    window,  # tokens, 0: none
    TYPE: tl.constexpr, COMPUTE: tl.constexpr,  # of keys and values in memory, and in tl.dot
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,  # Shape's blocks
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr,  # of a row; 0: values are from the keys
    ALIGNED: tl.constexpr, Q_ALIGNED: tl.constexpr,  # every row begins at a multiple of 16
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    SEVERAL: tl.constexpr,  # a tile has lines of more than one row
    SOFTCAP: tl.constexpr,
    LINES: tl.constexpr, TOKENS: tl.constexpr,  # a tile's query rows (row x head), and its tokens
):
    blocks = tl.cdiv(rows * GROUP, LINES)
    program = tl.program_id(0)
    split = program // blocks % splits
    head = program // blocks // splits % kv_heads
    one = (program // blocks // splits // kv_heads).to(tl.int64)
    table = (one * kv_heads + head) * k
    positions += one * rows
    if log_weights is not None:
        log_weights += table * PAGE_TOKENS
    first_line = program % blocks * LINES
    line = first_line + tl.arange(0, LINES)
    row = line // GROUP
    used = row < rows
    q_head = head * GROUP + line % GROUP
    q_at = one * list_stride + row.to(tl.int64) * row_stride + q_head.to(tl.int64) * head_stride
    q1 = _query(q, q_at, used, 0, K1, DIM, Q_ALIGNED, COMPUTE)
    q2 = q1
    if K2:
        q2 = _query(q, q_at, used, K1, K2, DIM, Q_ALIGNED, COMPUTE)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    sum1 = tl.zeros([LINES, V1], tl.float32)
    sum2 = tl.zeros([LINES, V2 if V2 else 1], tl.float32)
    above, last, any_above, any_last = _sight(
        positions, row, used, first_line // GROUP, window, SEVERAL)
    top, total, sum1, sum2, low, high = _together(
        q1, q2, top, total, sum1, sum2, keys_at + table, values_at + table, pages + table,
        log_weights, split, splits, k, scale, softcap, above, last, any_above, any_last, TYPE,
        COMPUTE, DIM, VALUE_DIM, K1, K2, V1, V2, KEY_BYTES, VALUE_BYTES, ALIGNED, PAGE_TOKENS,
        SEVERAL, SOFTCAP, TOKENS)
    if SEVERAL:
        top, total, sum1, sum2 = _apart(
            q1, q2, top, total, sum1, sum2, keys_at + table, values_at + table, pages + table,
            log_weights, tl.min(low, 0), tl.max(high, 0) + 1, splits, k, scale, softcap, above,
            last, positions, row, rows, window, TYPE, COMPUTE, DIM, VALUE_DIM, K1, K2, V1, V2,
            KEY_BYTES, VALUE_BYTES, ALIGNED, PAGE_TOKENS, SOFTCAP, TOKENS)
        # A row that is not there went along with the others.
        there = tl.load(positions + row, mask=used, other=-1) >= 0
        total = tl.where(there, total, 0.0)
    at = ((one * rows + row) * kv_heads * GROUP + q_head) * splits + split
    _store(out, at, sum1, total, used, 0, V1, VALUE_DIM)
    if V2:
        _store(out, at, sum2, total, used, V1, V2, VALUE_DIM)
    result = (top + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2
    result = tl.where(total == 0, float("-inf"), result)
    tl.store(lse + at, result, mask=used)


# fmt: on


@lru_cache(maxsize=256)
def constants(shape: Shape, tiles: Tiles, query_aligned: bool) -> dict[str, object]:
    """The kernel's constants for a shape; one compiled kernel for each set of them."""
    k1, k2 = blocks_of(shape.dim)
    v1, v2 = blocks_of(shape.value_dim)
    if not shape.own_values:  # the keys' own blocks
        v1, v2 = k1, k2 if shape.value_dim > k1 else 0
    key_bytes = shape.dim * shape.dtype.itemsize
    value_bytes = shape.value_dim * shape.dtype.itemsize if shape.own_values else 0
    return {
        "TYPE": TYPES[shape.dtype],
        # The interpreter has no bf16: it would multiply the patterns of the bits.
        "COMPUTE": tl.float32 if INTERPRETED else TYPES[shape.compute],
        "DIM": shape.dim,
        "VALUE_DIM": shape.value_dim,
        "K1": k1,
        "K2": k2,
        "V1": v1,
        "V2": v2,
        "KEY_BYTES": key_bytes,
        "VALUE_BYTES": value_bytes,
        "ALIGNED": shape.page_tokens == 1 or (key_bytes % 16 == 0 and value_bytes % 16 == 0),
        "Q_ALIGNED": query_aligned,
        "PAGE_TOKENS": shape.page_tokens,
        "GROUP": shape.group,
        "SEVERAL": shape.mixes_rows(tiles.lines),
        "SOFTCAP": shape.softcap,
        "LINES": tiles.lines,
        "TOKENS": tiles.tokens,
    }


def launch(
    call: Call, shape: Shape, tiles: Tiles, splits: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """One launch: out [lists, rows, q_heads, splits, value_dim], lse without the last of these."""
    lists, kv_heads, k = call.keys_at.shape
    blocks = triton.cdiv(shape.rows * shape.group, tiles.lines)
    strides = call.q.stride()[:3]
    row_bytes = [stride * call.q.element_size() for stride in strides]
    aligned = all(at % 16 == 0 for at in (address_of(call.q, "q"), *row_bytes))
    factor = call.scale if call.softcap is None else 2 * call.scale / call.softcap
    _attend_kernel[(blocks * splits * kv_heads * lists,)](
        call.q,
        call.keys_at,
        call.keys_at if call.values_at is None else call.values_at,
        call.pages,
        call.positions,
        call.log_weights,
        out,
        lse,
        k,
        shape.rows,
        kv_heads,
        splits,
        *strides,
        factor * LOG2_E.value,
        (call.softcap or 0.0) * LOG2_E.value,
        call.window or 0,
        **constants(shape, tiles, aligned),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def variants() -> list[Variant]:
    """Usual shapes: grouped heads, pages of 16 tokens; prompts; MLA by pages and by rows."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    usual = Shape(bf16, bf16, 128, 128, True, 4, 1, 16, False)
    mla = replace(usual, dim=576, value_dim=512, own_values=False, group=16)
    tokens = replace(mla, page_tokens=1)
    shapes = {
        "gqa_bf16": usual,
        "gqa_fp16": replace(usual, dtype=fp16, query_dtype=fp16),
        "gqa_fp32": replace(usual, dtype=fp32, query_dtype=fp32),
        "gqa_bf16_q_fp32": replace(usual, query_dtype=fp32),
        "gqa_bf16_softcap_dim_256": replace(usual, dim=256, value_dim=256, softcap=True),
        "gqa_bf16_dim_64": replace(usual, dim=64, value_dim=64, group=8),
        "gqa_bf16_dim_80": replace(usual, dim=80, value_dim=80),
        "gqa_bf16_dim_192_128": replace(usual, dim=192, group=1),
        "gqa_bf16_4_rows": replace(usual, rows=4),
        "gqa_bf16_8_rows": replace(usual, rows=8),
        "gqa_bf16_16_heads_4_rows": replace(usual, group=16, rows=4),
        "gqa_bf16_512_rows": replace(usual, rows=512, page_tokens=64),  # a chunk of a prompt
        "gqa_bf16_512_rows_softcap_dim_256": replace(
            usual, rows=512, page_tokens=64, dim=256, value_dim=256, group=2, softcap=True
        ),
        "mla_bf16": replace(mla, page_tokens=64),
        "mla_bf16_tokens": tokens,
        "mla_fp16_tokens": replace(tokens, dtype=fp16, query_dtype=fp16),
        "mla_fp32_tokens": replace(tokens, dtype=fp32, query_dtype=fp32),
        "mla_bf16_2_rows": replace(mla, page_tokens=64, rows=2),
        "mla_bf16_128_heads": replace(mla, page_tokens=64, group=128),
        "mla_bf16_128_heads_2_rows": replace(mla, page_tokens=64, group=128, rows=2),
    }
    for name in ("gqa_bf16", "gqa_bf16_4_rows", "mla_bf16"):
        shapes[f"{name}_weighed"] = replace(shapes[name], weighed=True)
    return [_variant(name, shape, tiles_of(shape)) for name, shape in shapes.items()]


def _variant(name: str, shape: Shape, tiles: Tiles) -> Variant:
    types = {
        "q": f"*{NAMES[shape.query_dtype]}",
        "keys_at values_at positions": "*i64",
        "pages": "*i32",
        "out lse": "*fp32",
        "scale softcap": "fp32",
        "k rows kv_heads splits list_stride row_stride head_stride window": "i32",
    }
    fixed = constants(shape, tiles, True)
    if shape.weighed:
        types["log_weights"] = "*fp32"
    else:
        fixed = fixed | {"log_weights": None}
    name = f"attend_{name}"
    return variant(name, _attend_kernel, types, fixed, tiles.warps, tiles.stages)
