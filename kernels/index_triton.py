"""The kernels behind `index.py`. Imported only where Triton runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from cxlkv.kernels.rotate_triton import factors, paired, shape_of
from cxlkv.kernels.runtime import INTERPRETED
from cxlkv.kernels.variants import Variant, variant

if TYPE_CHECKING:
    from cxlkv.kernels.index import Choosing, Scoring, Scratch

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
QUERIES_MAX = 64
"""Queries that a program meets pages with at once; more are met tile after tile."""
WIDTH = 64
"""Channels at once."""
BLOCK_MAX = 4096
"""Scores that a program of choose() looks at at once; of so many pages they stay in registers."""


# ---- digests, and means with deviations ----


@triton.jit
def _best(found, asked):
    """[n]: the best of found [n, queries] over those asked; NaN where one is."""
    is_nan = (found != found) & asked[None, :]
    seen = tl.where(asked[None, :] & (found == found), found, float("-inf"))
    return tl.max(seen, 1), tl.max(is_nan.to(tl.int32), 1)


@triton.jit
def _rows_kernel(
    summaries,
    slots,
    q,
    positions,
    out,
    scale,
    rows,
    heads,
    pages,
    entry_elements,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGES: tl.constexpr,
    MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program for some pages of a list: both rows of a summary meet a part of the query each,
    q below and above 0 (digest), or q and |q| (MEAN)."""
    row_of_lists, page = tl.program_id(1), tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    request, head = row_of_lists // heads, row_of_lists % heads
    slot = tl.load(slots + request.to(tl.int64) * pages + page, mask=page < pages, other=-1)
    there = slot >= 0
    entry = summaries + (slot.to(tl.int64) * heads + head) * entry_elements
    best = tl.full([PAGES], float("-inf"), tl.float32)
    is_nan = tl.zeros([PAGES], tl.int32)
    for tile in range(0, rows * GROUP, QUERIES):
        query = tile + tl.arange(0, QUERIES)
        row = query // GROUP
        position = tl.load(positions + request * rows + row, mask=row < rows, other=-1)
        asked = position >= 0
        at = (request * rows + row).to(tl.int64) * heads + head
        at = q + (at * GROUP + query % GROUP) * DIM
        found = tl.zeros([PAGES, QUERIES], tl.float32)
        for first in tl.static_range(0, DIM, WIDTH):
            channel = first + tl.arange(0, WIDTH)
            inside = (channel < DIM)[None, :]
            x = tl.load(at[:, None] + channel[None, :], mask=asked[:, None] & inside, other=0.0)
            x = x.to(COMPUTE)
            low = x if MEAN else tl.where(x > 0, 0.0, x).to(COMPUTE)  # a NaN stays one
            high = tl.abs(x) if MEAN else tl.where(x < 0, 0.0, x).to(COMPUTE)
            mask = there[:, None] & inside
            one = tl.load(entry[:, None] + channel[None, :], mask=mask, other=0.0).to(COMPUTE)
            two = tl.load(entry[:, None] + DIM + channel[None, :], mask=mask, other=0.0)
            found = tl.dot(one, tl.trans(low), found, input_precision="ieee")
            found = tl.dot(two.to(COMPUTE), tl.trans(high), found, input_precision="ieee")
        own, own_nan = _best(found * scale, asked)
        best = tl.maximum(best, own)
        is_nan = tl.maximum(is_nan, own_nan)
    best = tl.where(is_nan != 0, float("nan"), best)
    best = tl.where(there, best, float("-inf"))
    tl.store(out + row_of_lists.to(tl.int64) * pages + page, best, mask=page < pages)


# ---- sketches ----


@triton.jit
def _queries_kernel(
    q,
    factors,
    codes,
    numbers,
    count,
    scale,
    DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn queries and round them to 8 bits, WHOLE of them a row (native/src/kernels/sketch.c)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    there = (row < count)[:, None] & (channel < DIM)[None, :]
    x = tl.load(q + row[:, None] * DIM + channel[None, :], mask=there, other=0).to(tl.float32)
    x *= tl.load(factors + channel)[None, :]
    for step in tl.static_range(STEPS):
        x = paired(x, channel, DIM, PADDED, ROWS, 1 << step)
    x *= tl.load(factors + PADDED + channel)[None, :]
    x = tl.where(there, x, 0.0)
    odd = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 1) != 0  # NaN, too
    largest = tl.where(odd, 0.0, tl.max(tl.where(x == x, tl.abs(x), 0.0), 1))
    some = largest > 1e-30
    unit = tl.div_rn(127.0, tl.where(some, largest, 1.0))
    whole = tl.where(some[:, None], x * unit[:, None], 0.0)
    whole = (whole + 12582912.0) - 12582912.0  # 1.5 * 2^23: the nearest whole number
    factor = tl.where(odd, float("nan"), tl.div_rn(scale * largest, 127.0))
    to = codes + row[:, None] * WHOLE + channel[None, :]
    tl.store(to, whole.to(tl.int8), mask=(row < count)[:, None] & (channel < WHOLE)[None, :])
    tl.store(numbers + row, factor, mask=row < count)
    tl.store(numbers + count + row, 1.5 * tl.sum(whole, 1), mask=row < count)


@triton.jit
def _sketch_kernel(
    summaries,
    slots,
    codes,
    numbers,
    positions,
    out,
    count,
    rows,
    heads,
    pages,
    entry_words,
    LINES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program for some pages of a list, 16 tokens of each at once."""
    row_of_lists, page = tl.program_id(1), tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    request, head = row_of_lists // heads, row_of_lists % heads
    flat = tl.arange(0, PAGES * 16)
    token, owner = flat % 16, tl.program_id(0) * PAGES + flat // 16
    slot = tl.load(slots + request.to(tl.int64) * pages + owner, mask=owner < pages, other=-1)
    there = slot >= 0
    entry = summaries + (slot.to(tl.int64) * heads + head) * entry_words + token
    best = tl.full([PAGES], float("-inf"), tl.float32)
    is_nan = tl.zeros([PAGES], tl.int32)
    channel = tl.arange(0, 16)
    for tile in range(0, rows * GROUP, QUERIES):
        query = tile + tl.arange(0, QUERIES)
        row = query // GROUP
        position = tl.load(positions + request * rows + row, mask=row < rows, other=-1)
        asked = position >= 0
        at = ((request * rows + row).to(tl.int64) * heads + head) * GROUP + query % GROUP
        factor = tl.load(numbers + at, mask=asked, other=0.0)
        offset = tl.load(numbers + count + at, mask=asked, other=0.0)
        for block in tl.static_range(BLOCKS):
            found = tl.zeros([PAGES * 16, QUERIES], tl.float32)
            for first in tl.static_range(0, LINES, AT_ONCE):
                line = first + tl.arange(0, AT_ONCE)
                words = entry[:, None] + ((block * (LINES + 1) + line) * 16)[None, :]
                words = tl.load(words, mask=there[:, None] & (line < LINES)[None, :], other=0)
                parts = (words[:, :, None] >> (2 * channel)[None, None, :]) & 3
                parts = tl.reshape(parts, [PAGES * 16, AT_ONCE * 16]).to(COMPUTE)
                place = first * 16 + tl.arange(0, AT_ONCE * 16)
                x = codes + at[:, None] * (LINES * 16) + place[None, :]
                x = tl.load(x, mask=asked[:, None] & (place < LINES * 16)[None, :], other=0)
                found = tl.dot(parts, tl.trans(x.to(COMPUTE)), found, input_precision="ieee")
            bits = tl.load(entry + (block * (LINES + 1) + LINES) * 16, mask=there, other=0)
            scales = bits.to(tl.float32, bitcast=True)
            found = (found - offset[None, :]) * factor[None, :] * scales[:, None]
            own, own_nan = _best(found, asked)
            seen = block * 16 + token < PAGE_TOKENS
            own = tl.reshape(tl.where(seen, own, float("-inf")), [PAGES, 16])
            own_nan = tl.reshape(tl.where(seen, own_nan, 0), [PAGES, 16])
            best = tl.maximum(best, tl.max(own, 1))
            is_nan = tl.maximum(is_nan, tl.max(own_nan, 1))
    known = tl.load(slots + request.to(tl.int64) * pages + page, mask=page < pages, other=-1)
    best = tl.where(is_nan != 0, float("nan"), best)
    best = tl.where(known >= 0, best, float("-inf"))
    tl.store(out + row_of_lists.to(tl.int64) * pages + page, best, mask=page < pages)


def score(call: Scoring, scratch: Scratch) -> None:
    if call.form.name == "sketch":
        _score_sketches(call, scratch)
        return
    form, requests, heads, pages = call.form, *call.out.shape
    rows, count = call.q.shape[1], _pages(16)
    _rows_kernel[(triton.cdiv(pages, count), requests * heads)](
        call.summaries.view(form.dtype),
        call.slots,
        call.q,
        call.positions,
        call.out,
        call.scale,
        rows,
        heads,
        pages,
        form.bytes // form.dtype.itemsize,
        DIM=form.dim,
        WIDTH=WIDTH,
        GROUP=call.group,
        QUERIES=_queries(rows * call.group),
        PAGES=count,
        MEAN=form.name == "mean_std",
        COMPUTE=_compute(call.q.dtype, form.dtype),
        num_warps=4,
        num_stages=2,
    )


def _score_sketches(call: Scoring, scratch: Scratch) -> None:
    form, requests, heads, pages = call.form, *call.out.shape
    rows, count = call.q.shape[1], _pages(4)
    total, lines = requests * rows * call.q.shape[2], -(-form.dim // 16)
    padded, steps, at_once, warps = shape_of(form.dim)
    _queries_kernel[(triton.cdiv(total, at_once),)](
        call.q,
        factors(form.dim, padded, call.q.device),
        scratch.codes,
        scratch.numbers,
        total,
        call.scale,
        DIM=form.dim,
        WHOLE=lines * 16,
        PADDED=padded,
        STEPS=steps,
        ROWS=at_once,
        num_warps=warps,
        num_stages=1,
    )
    _sketch_kernel[(triton.cdiv(pages, count), requests * heads)](
        call.summaries.view(torch.int32),
        call.slots,
        scratch.codes,
        scratch.numbers,
        call.positions,
        call.out,
        total,
        rows,
        heads,
        pages,
        form.bytes // 4,
        LINES=lines,
        AT_ONCE=min(4, triton.next_power_of_2(lines)),
        PAGE_TOKENS=form.page_tokens,
        BLOCKS=-(-form.page_tokens // 16),
        GROUP=call.group,
        QUERIES=_queries(rows * call.group),
        PAGES=count,
        COMPUTE=tl.float32 if INTERPRETED else tl.float16,
        num_warps=4,
        num_stages=2,
    )


def _queries(count: int) -> int:
    return int(min(max(16, triton.next_power_of_2(count)), QUERIES_MAX))


def _pages(count: int) -> int:
    """Of a program; the interpreter takes long for each program, whatever it has."""
    return 16 * count if INTERPRETED else count


def _compute(query: torch.dtype, kept: torch.dtype) -> tl.dtype:
    same = query == kept and not INTERPRETED
    return TYPES[query] if same else tl.float32


# ---- the best ----


@triton.jit
def _ranks(scores, page, inside):
    """Numbers in the order of scores, NaN above all; 0: not inside."""
    score = tl.load(scores + page, mask=inside, other=0.0) + 0.0  # -0 is 0
    bits = score.to(tl.uint32, bitcast=True)
    rank = bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000)
    rank = tl.where(score == score, rank, 0xFFFFFFFF)
    return tl.where(inside, rank, 0).to(tl.uint32)


@triton.jit
def _choose_kernel(
    scores,
    first,
    last,
    wanted,
    out,
    sinks,
    heads,
    pages,
    k,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program a list. The rank of the worst page that is chosen is found bit by bit; ONE: all
    pages are in one block, whose ranks stay in registers."""
    row = tl.program_id(0)
    request = row // heads
    scores += row.to(tl.int64) * pages
    out += row.to(tl.int64) * k
    low = tl.load(first + request)
    high = tl.maximum(tl.minimum(tl.load(last + request), pages), low)
    free = tl.minimum(low + sinks, high)
    count = tl.maximum(tl.minimum(tl.load(wanted + request), k) - (free - low), 0)
    place = tl.arange(0, BLOCK)
    ranks = _ranks(scores, place, (place >= free) & (place < high))
    worst = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 0x80000000, tl.uint32)
    for _ in range(32):
        least = worst | bit
        if ONE:
            found = tl.sum((ranks >= least).to(tl.int32), 0)
        else:
            found = 0
            for start in range(0, pages, BLOCK):
                page = start + place
                some = _ranks(scores, page, (page >= free) & (page < high))
                found += tl.sum((some >= least).to(tl.int32), 0)
        worst = tl.where(found >= count, least, worst)
        bit = bit >> 1
    above = 0
    for start in range(0, pages, BLOCK):
        page = start + place
        some = ranks if ONE else _ranks(scores, page, (page >= free) & (page < high))
        above += tl.sum((some > worst).to(tl.int32), 0)
    forced = tl.arange(0, SINKS)
    tl.store(out + forced, low + forced, mask=(forced < free - low) & (forced < k))
    written = tl.minimum(free - low, k)
    equal = 0
    for start in range(0, pages, BLOCK):
        page = start + place
        inside = (page >= free) & (page < high)
        some = ranks if ONE else _ranks(scores, page, inside)
        same = inside & (some == worst)
        order = equal + tl.cumsum(same.to(tl.int32), 0)
        takes = inside & ((some > worst) | (same & (order <= count - above)))
        at = written + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(out + at, page, mask=takes & (at < k))
        written += tl.sum(takes.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    for start in range(0, k, BLOCK):
        at = start + place
        tl.store(out + at, -1, mask=(at >= written) & (at < k))


def choose(call: Choosing) -> None:
    requests, heads, pages = call.scores.shape
    block, warps = _choose_shape(pages)
    _choose_kernel[(requests * heads,)](
        call.scores,
        call.first,
        call.last,
        call.wanted,
        call.out,
        call.sinks,
        heads,
        pages,
        call.out.shape[2],
        BLOCK=block,
        ONE=block >= pages,
        SINKS=triton.next_power_of_2(max(call.sinks, 1)),
        num_warps=warps,
        num_stages=1,
    )


def _choose_shape(pages: int) -> tuple[int, int]:
    """(pages of a block, warps)."""
    block = min(max(64, triton.next_power_of_2(pages)), BLOCK_MAX)
    return block, max(1, min(block // 256, 8))


# ---- what is compiled ----


def variants() -> list[Variant]:
    found = [
        _rows_variant(128, torch.bfloat16, torch.bfloat16, 4),
        _rows_variant(64, torch.float16, torch.float16, 3),
        _rows_variant(576, torch.bfloat16, torch.bfloat16, 128),
        _rows_variant(128, torch.float16, torch.bfloat16, 6, mean=True),
        _rows_variant(128, torch.bfloat16, torch.bfloat16, 8, mean=True),
    ]
    for dim, group in ((128, 4), (80, 16), (256, 8)):
        found += [_sketch_variant(dim, group), _queries_variant(dim, torch.bfloat16)]
    return [*found, _choose_variant(8192), _choose_variant(2048)]


def _rows_variant(
    dim: int, query: torch.dtype, kept: torch.dtype, group: int, mean: bool = False
) -> Variant:
    constants: dict[str, object] = {
        "DIM": dim,
        "WIDTH": WIDTH,
        "GROUP": group,
        "QUERIES": _queries(group),
        "PAGES": 16,
        "MEAN": mean,
        "COMPUTE": TYPES[query] if query == kept else tl.float32,
    }
    types = {
        "summaries": f"*{SHORT[kept]}",
        "q": f"*{SHORT[query]}",
        "slots": "*i32",
        "positions": "*i64",
        "out": "*fp32",
        "scale": "fp32",
        "rows heads pages entry_elements": "i32",
    }
    name = f"{'means' if mean else 'digests'} of {dim} {SHORT[query]} by {group}"
    return variant(name, _rows_kernel, types, constants, 4, 2)


def _sketch_variant(dim: int, group: int) -> Variant:
    lines = -(-dim // 16)
    constants: dict[str, object] = {
        "LINES": lines,
        "AT_ONCE": min(4, triton.next_power_of_2(lines)),
        "PAGE_TOKENS": 16,
        "BLOCKS": 1,
        "GROUP": group,
        "QUERIES": _queries(group),
        "PAGES": 4,
        "COMPUTE": tl.float16,
    }
    types = {
        "summaries slots": "*i32",
        "codes": "*i8",
        "numbers out": "*fp32",
        "positions": "*i64",
        "count rows heads pages entry_words": "i32",
    }
    return variant(f"sketches of {dim} by {group}", _sketch_kernel, types, constants, 4, 2)


def _queries_variant(dim: int, dtype: torch.dtype) -> Variant:
    padded, steps, rows, warps = shape_of(dim)
    constants: dict[str, object] = {
        "DIM": dim,
        "WHOLE": -(-dim // 16) * 16,
        "PADDED": padded,
        "STEPS": steps,
        "ROWS": rows,
    }
    types = {
        "q": f"*{SHORT[dtype]}",
        "factors numbers": "*fp32",
        "codes": "*i8",
        "count": "i32",
        "scale": "fp32",
    }
    return variant(f"queries of {dim} in 8 bits", _queries_kernel, types, constants, warps)


def _choose_variant(pages: int) -> Variant:
    block, warps = _choose_shape(pages)
    constants: dict[str, object] = {"BLOCK": block, "ONE": block >= pages, "SINKS": 1}
    types = {
        "scores": "*fp32",
        "first last wanted out": "*i32",
        "sinks heads pages k": "i32",
    }
    return variant(f"the best of {pages} pages", _choose_kernel, types, constants, warps)
