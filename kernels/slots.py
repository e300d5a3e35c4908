"""Assigns slots of the hot buffer to pages: exact LRU in one launch, a program for each head.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_slots
from cxlkv.kernels.runtime import check_table, current, one_device, runs_triton

SLOTS_MAX = 2**15 - 1
"""Slots of a head: their numbers are kept in 16 bits for each page that a request may have."""


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
    from cxlkv.kernels import slots_triton as kernels

    requests, kv_heads, slots = state.shape
    k = pages.shape[2]
    block_k, block_s, warps = kernels.blocks_of(k, slots)
    # Without values the kernel gets the tables of the keys in their place and leaves them alone.
    slot_at = (state.slot_keys_at, _or(state.slot_values_at, state.slot_keys_at))
    at = (out.keys_at, _or(out.values_at, out.keys_at))
    miss_at = (out.miss_keys_at, _or(out.miss_values_at, out.miss_keys_at))
    found = (state.slot_of_page, state.page_of_slot, state.tag_of_slot)
    used = (state.order, state.stamp, state.scratch, state.clock)
    with current(pages.device):
        kernels._assign_kernel[(requests, kv_heads)](
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
    from cxlkv.kernels import slots_triton as kernels

    block = kernels.block_of(slots, 256)
    with current(device):
        kernels._residents_kernel[(requests, kv_heads, -(-slots // block))](
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
            num_warps=kernels.warps_of(block),
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
    from cxlkv.kernels import slots_triton as kernels

    block = kernels.block_of(k, 256)
    with current(device):
        kernels._invalidate_kernel[(requests, kv_heads, -(-k // block))](
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
            num_warps=kernels.warps_of(block),
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
