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
    row_checksums,
    keys,
    values,
    descriptors,
    generations,
    checksums,
    count,
    k,
    heads,
    row_pages,
    layer_offset,
    checksums_offset,
    key_piece_bytes,
    value_piece_bytes,
    CHECKSUM_BYTES: tl.constexpr,
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
    sums = tl.load(row_checksums + row, mask=wanted, other=0)
    sums = tl.where(sums != 0, sums + checksums_offset + head * CHECKSUM_BYTES, 0)
    tl.store(checksums + at, sums, inside)


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
        "row_keys row_values row_descriptors row_generations row_checksums": "*i64",
        "keys values descriptors generations checksums": "*i64",
        "count k heads list_pages row_pages key_piece_bytes value_piece_bytes": "i32",
        "layer_offset checksums_offset": "i64",
    }
    block: dict[str, object] = {"BLOCK": BLOCK}
    return [
        variant("sources", _sources_kernel, types, block | {"CHECKSUM_BYTES": 16}, num_warps=4),
        variant("known", _known_kernel, types, block, num_warps=4),
    ]
