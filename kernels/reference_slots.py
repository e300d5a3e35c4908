"""The reference of `slots.py`, in torch: all heads at once, a sort where the kernel counts.

Writes that are not wanted go to one more column, which is thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cxlkv.kernels.slots import Assigned, Slots

FREE, HELD, USED, BEYOND = range(4)  # kinds of slots, in the order of a call's victims


def assign(state: Slots, pages: torch.Tensor, tags: torch.Tensor, out: Assigned) -> None:
    """`slots.assign`, into out."""
    state.clock.add_(1)
    valid = (pages >= 0) & (pages < state.pages_max)
    page = torch.where(valid, pages, 0).long()
    page_tags = tags.unsqueeze(1).expand(-1, pages.shape[1], -1).gather(2, page)

    found = state.slot_of_page.gather(2, page).long()
    limits = state.limits[None, :, None]
    maybe = valid & (found >= 0) & (found < limits)
    at = torch.where(maybe, found, 0)
    hit = maybe & (state.page_of_slot.gather(2, at) == page)
    hit &= state.tag_of_slot.gather(2, at) == page_tags
    miss = valid & ~hit
    now = state.clock.unsqueeze(2)
    _put(state.stamp, found, now, hit)

    used = state.stamp == now
    kind = torch.where(residents(state, tags) >= 0, HELD, FREE)
    kind[used] = USED
    slot_numbers = torch.arange(kind.shape[2], device=pages.device)
    kind[(slot_numbers >= limits).expand_as(kind)] = BEYOND
    order = _sorted_by(kind.gather(2, state.order.long()), state.order)

    # Victims move behind the slots that are kept, and before those that this call has used.
    unused_count = ((kind == FREE) | (kind == HELD)).sum(2, keepdim=True)
    victim_count = torch.minimum(miss.sum(2, keepdim=True), unused_count)
    place = torch.where(slot_numbers < victim_count, 1, 0)
    place = torch.where(slot_numbers >= unused_count, 2, place)
    state.order.copy_(_sorted_by(place, order))

    number = miss.long().cumsum(2) - 1
    taken = miss & (number < victim_count)
    victim = order.gather(2, torch.where(taken, number, 0)).long()
    slot = torch.where(hit, found, torch.where(taken, victim, -1))
    _put(state.page_of_slot, slot, pages, taken)
    _put(state.tag_of_slot, slot, page_tags, taken)
    _put(state.stamp, slot, now, taken)
    _put(state.slot_of_page, page, slot, taken)

    state.hits.add_(hit.sum((1, 2)))
    state.misses.add_(miss.sum((1, 2)))
    state.errors.add_((~valid & (pages != -1)).sum((1, 2)) + (miss & ~taken).sum((1, 2)))
    _fill(out, state, pages, slot, miss)


def residents(state: Slots, tags: torch.Tensor) -> torch.Tensor:
    """`slots.residents`."""
    page = state.page_of_slot.clamp(min=0).long()
    now = tags.unsqueeze(1).expand(-1, page.shape[1], -1).gather(2, page)
    numbers = torch.arange(page.shape[2], device=tags.device)
    held = (state.page_of_slot >= 0) & (numbers < state.limits[None, :, None])
    held &= (state.slot_of_page.gather(2, page) == numbers) & (state.tag_of_slot == now)
    return torch.where(held, state.page_of_slot, -1)


def invalidate(state: Slots, assigned: Assigned, failed: torch.Tensor) -> None:
    """`slots.invalidate`; failed is [requests, kv_heads, k]."""
    slot = assigned.slot.long()
    bad = (failed != 0) & (assigned.miss_pages >= 0) & (slot >= 0) & (slot < state.shape[2])
    there = state.page_of_slot.gather(2, torch.where(bad, slot, 0))
    _put(state.page_of_slot, slot, torch.tensor(-1), bad & (there == assigned.miss_pages))


def _fill(
    out: Assigned, state: Slots, pages: torch.Tensor, slot: torch.Tensor, miss: torch.Tensor
) -> None:
    out.slot.copy_(slot)
    out.missed.copy_(miss)
    out.miss_pages.copy_(torch.where(miss, pages, -1))
    for slot_at, at, miss_at in (
        (state.slot_keys_at, out.keys_at, out.miss_keys_at),
        (state.slot_values_at, out.values_at, out.miss_values_at),
    ):
        if slot_at is not None and at is not None and miss_at is not None:
            at.copy_(torch.where(slot >= 0, slot_at.gather(2, slot.clamp(min=0)), 0))
            miss_at.copy_(torch.where(miss, at, 0))


def _sorted_by(key: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.gather(2, key.argsort(dim=2, stable=True))


def _put(table: torch.Tensor, at: torch.Tensor, value: torch.Tensor, where: torch.Tensor) -> None:
    """table[..., at] = value, where that is wanted."""
    wide = torch.nn.functional.pad(table, (0, 1))
    index = torch.where(where, at, table.shape[2])
    wide.scatter_(2, index, value.to(table.dtype).expand(index.shape))
    table.copy_(wide[..., :-1])
