"""The kernels behind `sources.py`: one thread for each page of each list."""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.variants import Variant, variant

BLOCK = 128


@triton.jit
def _sources_kernel(
    pages,
    missed,
    row_keys,
    row_values,
    row_descriptors,
    row_generations,
    keys,
    values,
    descriptors,
    generations,
    count,
    k,
    heads,
    row_pages,
    layer_offset,
    key_piece_bytes,
    value_piece_bytes,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    page = tl.load(pages + at, mask=inside, other=-1).to(tl.int64)
    wanted = inside & (page >= 0) & (page < row_pages)
    wanted = wanted & (tl.load(missed + at, mask=inside, other=0) != 0)
    head = at // k % heads
    row = at // k // heads * row_pages + page
    key = tl.load(row_keys + row, mask=wanted, other=0)
    value = tl.load(row_values + row, mask=wanted, other=0)
    wanted = wanted & (key != 0)
    tl.store(keys + at, tl.where(wanted, key + layer_offset + head * key_piece_bytes, 0), inside)
    value = tl.where(wanted, value + layer_offset + head * value_piece_bytes, 0)
    tl.store(values + at, value, inside)
    descriptor = tl.load(row_descriptors + row, mask=wanted, other=0)
    tl.store(descriptors + at, descriptor, inside)
    generation = tl.load(row_generations + row, mask=wanted, other=0)
    tl.store(generations + at, generation, inside)


@triton.jit
def _known_kernel(
    pages,
    row_keys,
    answered,
    known,
    count,
    list_pages,
    row_pages,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    request = at // list_pages
    page = tl.load(pages + at, mask=inside, other=-1)
    wanted = inside & (page >= 0) & (page < row_pages)
    wanted = wanted & (tl.load(answered) == 1)
    row = tl.where(wanted, request * row_pages + page, 0)
    wanted = wanted & (tl.load(row_keys + row, mask=wanted, other=0) != 0)
    tl.store(known + at, tl.where(wanted, page, -1), inside)


def variants() -> list[Variant]:
    types = {
        "missed": "*i8",
        "pages answered known": "*i32",
        "row_keys row_values row_descriptors row_generations": "*i64",
        "keys values descriptors generations": "*i64",
        "count k heads list_pages row_pages key_piece_bytes value_piece_bytes": "i32",
        "layer_offset": "i64",
    }
    kernels = {"sources": _sources_kernel, "known": _known_kernel}
    return [
        variant(name, kernel, types, {"BLOCK": BLOCK}, num_warps=4)
        for name, kernel in kernels.items()
    ]
