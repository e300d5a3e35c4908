"""The kernels behind `slots.py`. Imported only where Triton runs them."""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.variants import Variant, variant

BLOCK_MAX = 1024
"""Pages or slots that a program works on at once; more are walked in blocks."""


def block_of(count: int, most: int = BLOCK_MAX) -> int:
    return max(32, min(1 << (count - 1).bit_length(), most))


def warps_of(block: int) -> int:
    return max(1, min(block // 64, 8))


def blocks_of(k: int, slots: int) -> tuple[int, int, int]:
    """Pages and slots at once, and warps: no thread idle, none has more than 4."""
    warps = warps_of(max(block_of(k), block_of(slots)))
    return max(block_of(k), 32 * warps), max(block_of(slots), 32 * warps), warps


@triton.jit
def _assign_kernel(
    pages, tags,
    slot_of_page, page_of_slot, tag_of_slot, order, stamp, scratch, clock,
    limits, slot_keys_at, slot_values_at,
    slot, missed, miss_pages, keys_at, values_at, miss_keys_at, miss_values_at,
    hits, misses, errors,
    kv_heads, k, slots, pages_max, request_stride,
    VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Tables are changed by some threads of the program and read by others, through global memory:
    # a barrier stands between each pass and the next. Nothing is shared between programs but the
    # counters.
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = request * kv_heads + head
    tags += request * pages_max
    slot_of_page += row * pages_max
    page_of_slot += request * request_stride + head * slots
    tag_of_slot += row * slots
    order += row * slots
    stamp += row * slots
    scratch += row * slots
    slot_keys_at += row * slots
    slot_values_at += row * slots
    pages += row * k
    slot += row * k
    missed += row * k
    miss_pages += row * k
    keys_at += row * k
    values_at += row * k
    miss_keys_at += row * k
    miss_values_at += row * k
    limit = tl.load(limits + head)
    now = tl.load(clock + row) + 1

    hit_count, miss_count, error_count = _look_up(
        pages, tags, slot_of_page, page_of_slot, tag_of_slot, stamp, slot,
        k, pages_max, limit, now, BLOCK_K,
    )  # fmt: skip
    tl.debug_barrier()  # the stamps of the hits, before they are read by slot
    free_count, used_count = _classify(
        tags, slot_of_page, page_of_slot, tag_of_slot, order, stamp, scratch, limit, now, BLOCK_S
    )
    tl.debug_barrier()  # the whole order is in scratch, before it is written anew
    # A selection of at most `limit` pages has room always; the bound keeps any other harmless.
    victim_count = tl.minimum(miss_count, limit - used_count)
    kept_count = limit - used_count - victim_count
    _reorder(order, scratch, limit, free_count, victim_count, kept_count, BLOCK_S)
    tl.debug_barrier()  # the victims stand in the order, before the misses take them
    _place(
        pages, tags, slot_of_page, page_of_slot, tag_of_slot, order + kept_count, stamp,
        slot_keys_at, slot_values_at,
        slot, missed, miss_pages, keys_at, values_at, miss_keys_at, miss_values_at,
        k, victim_count, now, VALUES, BLOCK_K,
    )  # fmt: skip
    # Each thread has read the clock long before: barriers lie between.
    tl.store(clock + row, now)
    error_count += miss_count - victim_count
    tl.atomic_add(hits + request, hit_count.to(tl.int64), sem="relaxed")
    tl.atomic_add(misses + request, miss_count.to(tl.int64), sem="relaxed")
    tl.atomic_add(errors + request, error_count.to(tl.int64), mask=error_count > 0, sem="relaxed")


@triton.jit
def _look_up(
    pages, tags, slot_of_page, page_of_slot, tag_of_slot, stamp, slot,
    k, pages_max, limit, now, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Into `slot`: a hit's slot, -1 for padding, -2 - m for the miss with the number m.
    hit_count = tl.zeros([], dtype=tl.int32)
    miss_count = tl.zeros([], dtype=tl.int32)
    error_count = tl.zeros([], dtype=tl.int32)
    for start in range(0, k, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        page = tl.load(pages + i, mask=i < k, other=-1)
        valid = (page >= 0) & (page < pages_max)
        error_count += tl.sum(((page < -1) | (page >= pages_max)).to(tl.int32), 0)
        found = tl.load(slot_of_page + page, mask=valid, other=-1).to(tl.int32)
        maybe = valid & (found >= 0) & (found < limit)
        held_page = tl.load(page_of_slot + found, mask=maybe, other=-1)
        held_tag = tl.load(tag_of_slot + found, mask=maybe, other=0)
        tag = tl.load(tags + page, mask=maybe, other=0)
        hit = maybe & (held_page == page) & (held_tag == tag)
        tl.store(stamp + found, tl.zeros_like(found) + now, mask=hit)
        miss = (valid & (hit == 0)).to(tl.int32)
        number = miss_count + tl.cumsum(miss, 0) - miss
        code = tl.where(hit, found, tl.where(miss != 0, -2 - number, -1))
        tl.store(slot + i, code, mask=i < k)
        hit_count += tl.sum(hit.to(tl.int32), 0)
        miss_count += tl.sum(miss, 0)
    return hit_count, miss_count, error_count


@triton.jit
def _classify(
    tags, slot_of_page, page_of_slot, tag_of_slot, order, stamp, scratch,
    limit, now, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Into `scratch`, in the order of use: slot * 4 + (0 free, 1 held, 2 used by this call).
    free_count = tl.zeros([], dtype=tl.int32)
    used_count = tl.zeros([], dtype=tl.int32)
    for start in range(0, limit, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        inside = i < limit
        s = tl.load(order + i, mask=inside, other=0)
        used = inside & (tl.load(stamp + s, mask=inside, other=0) == now)
        page = tl.load(page_of_slot + s, mask=inside, other=-1)
        tag = tl.load(tag_of_slot + s, mask=inside, other=0)
        some = inside & (page >= 0)
        back = tl.load(slot_of_page + page, mask=some, other=-1).to(tl.int32)
        held = some & (back == s) & (tl.load(tags + page, mask=some, other=0) == tag)
        free = inside & (held == 0) & (used == 0)
        kind = tl.where(used, 2, tl.where(held, 1, 0))
        tl.store(scratch + i, s * 4 + kind, mask=inside)
        free_count += tl.sum(free.to(tl.int32), 0)
        used_count += tl.sum(used.to(tl.int32), 0)
    return free_count, used_count


@triton.jit
def _reorder(order, scratch, limit, free_count, victim_count, kept_count, BLOCK_S: tl.constexpr):
    # Anew: kept slots, then the victims in the order of the misses, then the used ones.
    free_before = tl.zeros([], dtype=tl.int32)
    held_before = tl.zeros([], dtype=tl.int32)
    for start in range(0, limit, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S)
        inside = i < limit
        code = tl.load(scratch + i, mask=inside, other=2)
        kind = code & 3
        free = (kind == 0).to(tl.int32)
        held = (kind == 1).to(tl.int32)
        free_rank = free_before + tl.cumsum(free, 0) - free
        held_rank = held_before + tl.cumsum(held, 0) - held
        rank = tl.where(kind == 0, free_rank, free_count + held_rank)
        unused_at = tl.where(rank < victim_count, kept_count + rank, rank - victim_count)
        used_at = kept_count + victim_count + (i - free_rank - held_rank)
        tl.store(order + tl.where(kind == 2, used_at, unused_at), code >> 2, mask=inside)
        free_before += tl.sum(free, 0)
        held_before += tl.sum(held, 0)


@triton.jit
def _place(
    pages, tags, slot_of_page, page_of_slot, tag_of_slot, victims, stamp,
    slot_keys_at, slot_values_at,
    slot, missed, miss_pages, keys_at, values_at, miss_keys_at, miss_values_at,
    k, victim_count, now, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for start in range(0, k, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        inside = i < k
        page = tl.load(pages + i, mask=inside, other=-1)
        code = tl.load(slot + i, mask=inside, other=-1)
        # Other threads may have read the same code: all have it before one writes there.
        tl.debug_barrier()
        miss = code < -1
        taken = miss & (-2 - code < victim_count)
        s = tl.load(victims + (-2 - code), mask=taken, other=-1)
        s = tl.where(miss, s, code)
        tag = tl.load(tags + page, mask=taken, other=0)
        tl.store(page_of_slot + s, page, mask=taken)
        tl.store(tag_of_slot + s, tag, mask=taken)
        tl.store(stamp + s, tl.zeros_like(s) + now, mask=taken)
        tl.store(slot_of_page + page, s.to(tl.int16), mask=taken)
        tl.store(slot + i, s, mask=inside)
        tl.store(missed + i, miss.to(tl.int8), mask=inside)
        tl.store(miss_pages + i, tl.where(miss, page, -1), mask=inside)
        at = tl.load(slot_keys_at + s, mask=s >= 0, other=0)
        tl.store(keys_at + i, at, mask=inside)
        tl.store(miss_keys_at + i, tl.where(miss, at, 0), mask=inside)
        if VALUES:
            at = tl.load(slot_values_at + s, mask=s >= 0, other=0)
            tl.store(values_at + i, at, mask=inside)
            tl.store(miss_values_at + i, tl.where(miss, at, 0), mask=inside)


@triton.jit
def _residents_kernel(
    tags, slot_of_page, page_of_slot, tag_of_slot, limits, pages,
    kv_heads, slots, pages_max, request_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = request * kv_heads + head
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.minimum(tl.load(limits + head), slots)
    at = page_of_slot + request * request_stride + head * slots + i
    page = tl.load(at, mask=inside, other=-1)
    tag = tl.load(tag_of_slot + row * slots + i, mask=inside, other=0)
    some = page >= 0
    back = tl.load(slot_of_page + row * pages_max + page, mask=some, other=-1).to(tl.int32)
    now = tl.load(tags + request * pages_max + page, mask=some, other=0)
    held = some & (back == i) & (now == tag)
    tl.store(pages + row * slots + i, tl.where(held, page, -1), mask=i < slots)


@triton.jit
def _invalidate_kernel(
    slot, miss_pages, failed, page_of_slot,
    kv_heads, k, slots, request_stride,
    failed_request_stride, failed_head_stride, failed_page_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = request * kv_heads + head
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    failed += request * failed_request_stride + head * failed_head_stride
    bad = tl.load(failed + i * failed_page_stride, mask=i < k, other=0) != 0
    page = tl.load(miss_pages + row * k + i, mask=bad, other=-1)
    s = tl.load(slot + row * k + i, mask=bad, other=-1)
    bad = bad & (page >= 0) & (s >= 0) & (s < slots)
    at = page_of_slot + request * request_stride + head * slots + s
    # A slot that was given to another page since then keeps it.
    bad = bad & (tl.load(at, mask=bad, other=-1) == page)
    tl.store(at, tl.zeros_like(page) - 1, mask=bad)


_TYPES = {
    "missed": "*i8",
    "slot_of_page": "*i16",
    "pages page_of_slot order stamp scratch clock limits slot miss_pages failed": "*i32",
    "tags tag_of_slot slot_keys_at slot_values_at keys_at values_at": "*i64",
    "miss_keys_at miss_values_at hits misses errors": "*i64",
    "kv_heads k slots pages_max request_stride": "i32",
    "failed_request_stride failed_head_stride failed_page_stride": "i32",
}


def variants() -> list[Variant]:
    """What the usual shapes make Python choose; for the compile check."""
    found = []
    for slots, k, values in (
        (64, 16, True),
        (64, 64, False),
        (256, 64, True),
        (1024, 256, True),
        (4096, 16, True),
        (4096, 2048, True),
        (6144, 2048, False),
    ):
        block_k, block_s, warps = blocks_of(k, slots)
        name = f"assign, {slots} slots, k {k}, {'K and V' if values else 'K only'}"
        constants: dict[str, object] = {"VALUES": values, "BLOCK_K": block_k, "BLOCK_S": block_s}
        found.append(variant(name, _assign_kernel, _TYPES, constants, warps))
    for block in (32, 64, 256):
        for kernel in (_residents_kernel, _invalidate_kernel):
            name = f"{kernel.__name__}, {block} at once"
            found.append(variant(name, kernel, _TYPES, {"BLOCK": block}, warps_of(block)))
    return found
