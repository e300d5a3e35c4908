"""Copies between scattered addresses.

Tables hold absolute addresses that the device can read: its own memory, or host memory that was
registered and mapped. 0 is nothing there. So one launch reads any mix of sources. Nothing here
allocates (where the result is passed in) or waits for the device: all of it can be captured in a
CUDA graph.
"""

from __future__ import annotations

import math

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_copies as reference
from cxlkv.kernels.runtime import check_table, current, one_device, runs_triton

PROGRAMS = 12
"""How many programs copy, if the caller does not say: as many SMs as a link needs to be full.

vLLM chose 12 on an H100 with PCIe 5, as the fewest within 5 % of the peak, in
vllm/v1/kv_offload/cpu/swap_blocks_triton.py. A copy within the device wants as many as there are
SMs, and more."""

FRAGMENT_BYTES_MAX = 1 << 30
"""A place in a fragment is counted in 32 bits."""


def copy_fragments(
    source_at: torch.Tensor,
    target_at: torch.Tensor,
    fragment_bytes: int,
    *,
    programs: int | None = None,
) -> None:
    """Copies fragments of one size, all in one launch: a gather or a scatter, by the tables.

    source_at, target_at: int64 addresses, of one shape; a fragment with 0 in either is skipped.
    fragment_bytes: 1 to 2**30. The largest power of two up to 16 that divides it is copied at
    once, and must divide all addresses: a GPU faults otherwise. Targets must not overlap anything.
    programs: how many of them copy; PROGRAMS if None.

    Raises BadArgumentError for other tables or sizes.
    """
    device = one_device(source_at=source_at, target_at=target_at)
    check_table("source_at", source_at, tuple(source_at.shape))
    check_table("target_at", target_at, tuple(source_at.shape))
    programs = PROGRAMS if programs is None else programs
    if programs < 1:
        raise BadArgumentError(f"programs is {programs}, wanted 1 or more")
    if not 1 <= fragment_bytes <= FRAGMENT_BYTES_MAX:
        raise BadArgumentError(f"fragment_bytes is {fragment_bytes}, wanted 1 to 2**30")
    count = source_at.numel()
    if count == 0:
        return
    if not runs_triton(device):
        reference.copy_fragments(source_at, target_at, fragment_bytes)
        return
    from cxlkv.kernels import copies_triton as kernels

    word_bytes = math.gcd(fragment_bytes, 16)
    words = fragment_bytes // word_bytes
    element, lanes = kernels.ELEMENTS[word_bytes]
    large = count * words >= programs * kernels.LARGE_TILE[0]
    tile, warps = kernels.LARGE_TILE if large else kernels.SMALL_TILE
    with current(device):
        kernels._copy_kernel[(min(programs, -(-count * words // tile)),)](
            source_at,
            target_at,
            count,
            words,
            ELEMENT=element,
            LANES=lanes,
            WORD_BYTES=word_bytes,
            TILE=tile,
            num_warps=warps,
            num_stages=1,
        )
