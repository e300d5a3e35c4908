"""Which slot of the hot buffer holds which page: exact LRU in one launch, a program per head.

The state of one layer is a set of tables on the device (`Slots`). A slot s holds a page p while
both tables agree, page_of_slot[s] == p and slot_of_page[p] == s, and the slot's tag is the page's
tag of now. So an entry that is out of date needs no clearing: a page that was evicted, truncated or
written anew is simply not held, and its slot is free.

    assign, for each (request, kv head):
      1. look each page up: a hit stamps its slot, a miss gets a number m
      2. walk the slots from least to most recently used: free, held, or used by this call
      3. victims are the first slots of (free, then held); they move behind those that are kept,
         and the used ones behind them: a stable partition by prefix sums, no sort
      4. miss m takes victim m

Idea: per-request hot buffers with LRU inside, looked up on the GPU (SGLang HiSparse), steady pages
that stay near the GPU (PnG-KV).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_slots
from cxlkv.kernels.runtime import check_table, one_device, runs_triton
from cxlkv.kernels.variants import Variant

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # then the reference runs, on CPU tensors only

    def jit(function):
        return function


SLOTS_MAX = 2**15 - 1
"""Slots of a head: their numbers are kept in 16 bits for each page that a request may have."""
BLOCK_MAX = 1024
"""Pages or slots that a program works on at once; more are walked in blocks."""


@dataclass(frozen=True)
class Slots:
    """The slots of one layer: tables on one device, changed by `assign` and `invalidate` only.

    page_of_slot may be a view whose requests lie further apart, so that one fill forgets a request
    in all layers; everything else is contiguous.
    """

    slot_of_page: torch.Tensor  # int16 [requests, kv_heads, pages_max]; -1 or out of date: none
    page_of_slot: torch.Tensor  # int32 [requests, kv_heads, slots]; -1: free
    tag_of_slot: torch.Tensor  # int64 [requests, kv_heads, slots]
    order: torch.Tensor  # int32 [requests, kv_heads, slots], least to most recently used
    stamp: torch.Tensor  # int32 [requests, kv_heads, slots]: the clock when it was last used
    scratch: torch.Tensor  # int32 [requests, kv_heads, slots], between two passes of one call
    clock: torch.Tensor  # int32 [requests, kv_heads]: calls so far
    limits: torch.Tensor  # int32 [kv_heads]: a head uses its first `limit` slots
    slot_keys_at: torch.Tensor  # int64 [requests, kv_heads, slots], addresses; 0 beyond the limit
    slot_values_at: torch.Tensor | None  # likewise; None: values are a prefix of the keys
    hits: torch.Tensor  # int64 [requests], counted up
    misses: torch.Tensor  # int64 [requests]
    errors: torch.Tensor  # int64 [requests]: page numbers that cannot be, pages without a slot
    limit_min: int  # the smallest of the limits: what a selection may name at most

    @property
    def shape(self) -> tuple[int, int, int]:
        """requests, kv_heads, slots"""
        requests, kv_heads, slots = self.page_of_slot.shape
        return requests, kv_heads, slots

    @property
    def pages_max(self) -> int:
        return int(self.slot_of_page.shape[2])


class Assigned(NamedTuple):
    """Where the pages of a selection are, each tensor [requests, kv_heads, k].

    The tables of addresses have 0 where there is nothing: keys_at and values_at for padding, the
    tables of misses also for hits. values tables are None where values are a prefix of the keys.
    """

    slot: torch.Tensor  # int32, -1 for padding
    missed: torch.Tensor  # int8: 1 where the slot's bytes must be fetched
    miss_pages: torch.Tensor  # int32: the page where it was missed, else -1
    keys_at: torch.Tensor  # int64
    values_at: torch.Tensor | None
    miss_keys_at: torch.Tensor
    miss_values_at: torch.Tensor | None

    @property
    def miss_targets(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where fetched keys and values belong; 0: nothing to fetch."""
        return self.miss_keys_at, self.miss_values_at


def new_slots(
    limits: Sequence[int],
    pages_max: int,
    keys_at: torch.Tensor,
    values_at: torch.Tensor | None,
    *,
    page_of_slot: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Slots:
    """Free slots for a layer, on the device of keys_at.

    limits: slots of each kv head. keys_at, values_at: int64 [requests, kv_heads, max(limits)], the
    addresses of the slots. page_of_slot: memory for that table (see Slots); counters: int64
    [3, requests], that layers may share. Raises BadArgumentError.
    """
    device = one_device(keys_at=keys_at, values_at=values_at, page_of_slot=page_of_slot)
    requests, kv_heads, slots = keys_at.shape
    if len(limits) != kv_heads or max(limits) != slots or min(limits) < 1 or slots > SLOTS_MAX:
        raise BadArgumentError(
            f"limits are {tuple(limits)}, with addresses of {slots} slots in each of {kv_heads} "
            f"heads: one limit a head, from 1 to {SLOTS_MAX}, the largest as many as there are"
        )
    if not 1 <= pages_max < 2**31:
        raise BadArgumentError(f"pages_max is {pages_max}: outside 1 to {2**31 - 1}")
    shape = (requests, kv_heads, slots)
    check_table("keys_at", keys_at, shape)
    if values_at is not None:
        check_table("values_at", values_at, shape)

    def table(value: int, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(size, value, dtype=dtype, device=device)

    if page_of_slot is None:
        page_of_slot = table(-1, *shape)
    if counters is None:
        counters = table(0, 3, requests, dtype=torch.int64)
    numbers = torch.arange(slots, dtype=torch.int32, device=device)
    return Slots(
        slot_of_page=table(-1, requests, kv_heads, pages_max, dtype=torch.int16),
        page_of_slot=page_of_slot,
        tag_of_slot=table(0, *shape, dtype=torch.int64),
        order=numbers.expand(shape).contiguous(),
        stamp=table(0, *shape),
        scratch=table(0, *shape),
        clock=table(0, requests, kv_heads),
        limits=torch.tensor(list(limits), dtype=torch.int32, device=device),
        slot_keys_at=keys_at,
        slot_values_at=values_at,
        hits=counters[0],
        misses=counters[1],
        errors=counters[2],
        limit_min=min(limits),
    )


def slots_bytes(requests: int, kv_heads: int, slots: int, pages_max: int, *, values: bool) -> int:
    """What the tables of a layer take, without what layers share: the counters."""
    a_slot = 4 + 8 + 4 + 4 + 4 + 8 * (1 + values)
    return requests * kv_heads * (slots * a_slot + pages_max * 2 + 4) + kv_heads * 4


def new_assigned(
    requests: int, kv_heads: int, k: int, *, values: bool, device: torch.device
) -> Assigned:
    """Memory for what `assign` returns, to be passed in again at each step."""

    def table(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((requests, kv_heads, k), dtype=dtype, device=device)

    return Assigned(
        slot=table(torch.int32),
        missed=table(torch.int8),
        miss_pages=table(torch.int32),
        keys_at=table(torch.int64),
        values_at=table(torch.int64) if values else None,
        miss_keys_at=table(torch.int64),
        miss_values_at=table(torch.int64) if values else None,
    )


@jit
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


@jit
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


@jit
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


@jit
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


@jit
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


@jit
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


@jit
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


def assign(
    state: Slots, pages: torch.Tensor, tags: torch.Tensor, out: Assigned | None = None
) -> Assigned:
    """Gives each page of a selection a slot: its own, or that of the least recently used page.

    pages: int32 [requests, kv_heads, k], each page once in a list, -1 for padding; k at most the
    smallest limit. tags: int64 [requests, pages_max], what tells a page's bytes from others that
    had or will have its place: pages are hits only with the tag that they had when they came. out:
    where to write (`new_assigned`), for CUDA graphs. Pages outside 0 to pages_max - 1 count as
    padding, and in state.errors. Never waits for the device. Raises BadArgumentError.
    """
    requests, kv_heads, _ = state.shape
    _check_selection(state, pages)
    _check_tags(state, tags)
    k = pages.shape[2]
    device = one_device(pages=pages, tags=tags, state=state.page_of_slot)
    values_at = state.slot_values_at
    if out is None:
        out = new_assigned(requests, kv_heads, k, values=values_at is not None, device=device)
    elif out.slot.shape != pages.shape or (out.values_at is None) != (values_at is None):
        raise BadArgumentError(
            f"out is for {tuple(out.slot.shape)} pages, the selection has {tuple(pages.shape)}, or "
            "only one of out and the slots has values: make it with new_assigned"
        )
    if not runs_triton(device):
        reference_slots.assign(state, pages, tags, out)
        return out
    _launch_assign(state, pages, tags, out)
    return out


def _launch_assign(state: Slots, pages: torch.Tensor, tags: torch.Tensor, out: Assigned) -> None:
    requests, kv_heads, slots = state.shape
    k = pages.shape[2]
    block_k, block_s, warps = _blocks(k, slots)
    # Without values the kernel gets the tables of the keys in their place and leaves them alone.
    slot_at = (state.slot_keys_at, _or(state.slot_values_at, state.slot_keys_at))
    at = (out.keys_at, _or(out.values_at, out.keys_at))
    miss_at = (out.miss_keys_at, _or(out.miss_values_at, out.miss_keys_at))
    found = (state.slot_of_page, state.page_of_slot, state.tag_of_slot)
    used = (state.order, state.stamp, state.scratch, state.clock)
    with _on(pages.device):
        _assign_kernel[(requests, kv_heads)](
            *(pages, tags, *found, *used, state.limits, *slot_at),
            *(out.slot, out.missed, out.miss_pages, *at, *miss_at),
            *(state.hits, state.misses, state.errors),
            *(kv_heads, k, slots, state.pages_max, state.page_of_slot.stride(0)),
            VALUES=state.slot_values_at is not None,
            BLOCK_K=block_k,
            BLOCK_S=block_s,
            num_warps=warps,
            num_stages=1,
        )


def residents(state: Slots, tags: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Which page each slot holds: int32 [requests, kv_heads, slots], -1 where it is free.

    The addresses beside them are state.slot_keys_at and state.slot_values_at. tags as for `assign`.
    """
    _check_tags(state, tags)
    device = one_device(tags=tags, state=state.page_of_slot, out=out)
    requests, kv_heads, slots = state.shape
    if out is None:
        out = torch.empty(state.shape, dtype=torch.int32, device=device)
    elif out.dtype != torch.int32 or tuple(out.shape) != state.shape or not out.is_contiguous():
        raise BadArgumentError(f"out is not contiguous int32 {state.shape}")
    if not runs_triton(device):
        return out.copy_(reference_slots.residents(state, tags))
    block = _block(slots, 256)
    with _on(device):
        _residents_kernel[(requests, kv_heads, triton.cdiv(slots, block))](
            tags,
            state.slot_of_page,
            state.page_of_slot,
            state.tag_of_slot,
            state.limits,
            out,
            kv_heads,
            slots,
            state.pages_max,
            state.page_of_slot.stride(0),
            BLOCK=block,
            num_warps=_warps(block),
            num_stages=1,
        )
    return out


def invalidate(state: Slots, assigned: Assigned, failed: torch.Tensor | None = None) -> None:
    """Takes the misses of an `assign` back whose bytes did not arrive: their slots are free.

    failed: integers or booleans on the device, of a shape that expands to [requests, kv_heads, k],
    such as [1]: only where it is not 0; None: all misses. So a flag that a kernel has set decides,
    and nobody waits for it.
    """
    requests, kv_heads, slots = state.shape
    k = assigned.slot.shape[2]
    if failed is None:
        failed = assigned.missed
    if failed.dtype == torch.bool:
        failed = failed.view(torch.int8)
    if failed.is_floating_point():
        raise BadArgumentError(f"failed is {failed.dtype}: integers or booleans are wanted")
    try:
        failed = failed.expand(requests, kv_heads, k)
    except RuntimeError as error:
        raise BadArgumentError(
            f"failed has shape {tuple(failed.shape)}, which does not expand to "
            f"{(requests, kv_heads, k)}"
        ) from error
    device = one_device(slot=assigned.slot, failed=failed, state=state.page_of_slot)
    if not runs_triton(device):
        reference_slots.invalidate(state, assigned, failed)
        return
    block = _block(k, 256)
    with _on(device):
        _invalidate_kernel[(requests, kv_heads, triton.cdiv(k, block))](
            assigned.slot,
            assigned.miss_pages,
            failed,
            state.page_of_slot,
            kv_heads,
            k,
            slots,
            state.page_of_slot.stride(0),
            failed.stride(0),
            failed.stride(1),
            failed.stride(2),
            BLOCK=block,
            num_warps=_warps(block),
            num_stages=1,
        )


def _check_selection(state: Slots, pages: torch.Tensor) -> None:
    requests, kv_heads, _ = state.shape
    if pages.dtype != torch.int32 or pages.dim() != 3 or not pages.is_contiguous():
        raise BadArgumentError(
            f"pages is {pages.dtype} {tuple(pages.shape)}, wanted contiguous int32 "
            f"[{requests}, {kv_heads}, k]"
        )
    if tuple(pages.shape[:2]) != (requests, kv_heads) or pages.shape[2] < 1:
        raise BadArgumentError(
            f"pages has shape {tuple(pages.shape)}, wanted ({requests}, {kv_heads}, k)"
        )
    if pages.shape[2] > state.limit_min:
        raise BadArgumentError(
            f"a selection of {pages.shape[2]} pages a head, but a head has {state.limit_min} slots "
            "only: give the hot buffer at least as many slots as a selection has pages"
        )


def _check_tags(state: Slots, tags: torch.Tensor) -> None:
    check_table("tags", tags, (state.shape[0], state.pages_max))


def _or(table: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if table is None else table


def _block(count: int, most: int = BLOCK_MAX) -> int:
    return max(32, min(1 << (count - 1).bit_length(), most))


def _warps(block: int) -> int:
    return max(1, min(block // 64, 8))


def _blocks(k: int, slots: int) -> tuple[int, int, int]:
    """Pages and slots at once, and warps: no thread idle, none has more than 4."""
    warps = _warps(max(_block(k), _block(slots)))
    return max(_block(k), 32 * warps), max(_block(slots), 32 * warps), warps


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_TYPES = {
    "*i8": "missed",
    "*i16": "slot_of_page",
    "*i32": "pages page_of_slot order stamp scratch clock limits slot miss_pages failed",
    "*i64": "tags tag_of_slot slot_keys_at slot_values_at keys_at values_at miss_keys_at "
    "miss_values_at hits misses errors",
    "i32": "kv_heads k slots pages_max request_stride failed_request_stride failed_head_stride "
    "failed_page_stride",
    "constexpr": "VALUES BLOCK_K BLOCK_S BLOCK",
}


def _variant(
    name: str, kernel: str, arguments: list[str], constants: dict[str, int], warps: int
) -> Variant:
    types = {one: kind for kind, names in _TYPES.items() for one in names.split()}
    signature = {argument: types[argument] for argument in arguments}
    return Variant(name, kernel, signature, {**constants}, num_warps=warps, num_stages=1)


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
        block_k, block_s, warps = _blocks(k, slots)
        found.append(
            _variant(
                f"assign, {slots} slots, k {k}, {'K and V' if values else 'K only'}",
                "_assign_kernel",
                _assign_kernel.arg_names,
                {"VALUES": values, "BLOCK_K": block_k, "BLOCK_S": block_s},
                warps,
            )
        )
    for block in (32, 64, 256):
        for kernel in (_residents_kernel, _invalidate_kernel):
            name = kernel.__name__
            constants = {"BLOCK": block}
            found.append(
                _variant(
                    f"{name}, {block} at once", name, kernel.arg_names, constants, _warps(block)
                )
            )
    return found
