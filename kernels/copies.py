"""Copies between scattered addresses: gather, scatter, layouts of pages, rows of 656 bytes.

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

PACKED_ROW_BYTES = 656
"""A token of DeepSeek sparse attention, as FlashMLA and vLLM ("fp8_ds_mla") store it: 512 e4m3
channels, 4 fp32 scales, each of 128 of them, and 64 rotary channels in bf16."""

ROW_CHANNELS = 576


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
    device, programs = _checked(source_at, target_at, programs)
    if not 1 <= fragment_bytes <= FRAGMENT_BYTES_MAX:
        raise BadArgumentError(f"fragment_bytes is {fragment_bytes}, wanted 1 to 2**30")
    if source_at.numel() == 0:
        return
    if not runs_triton(device):
        reference.copy_fragments(source_at, target_at, fragment_bytes)
        return
    word_bytes = math.gcd(fragment_bytes, 16)
    _copy(source_at, target_at, word_bytes, fragment_bytes // word_bytes, None, programs)


def convert_pages(
    source_at: torch.Tensor,
    target_at: torch.Tensor,
    *,
    tokens: int,
    heads: int,
    row_bytes: int,
    source_strides: tuple[int, int],
    target_strides: tuple[int, int],
    programs: int | None = None,
) -> None:
    """Copies pages from one layout to another, all pages and layers in one launch.

    source_at, target_at: int64 [pages, layers], or of any one shape: where the K (or V) of a page
    in a layer begins on each side; 0 in either: skipped. Layer-first and page-first differ in
    these addresses alone. row_bytes: a head's channels of one token. Strides are (head_bytes,
    token_bytes): ours (row_bytes * tokens, row_bytes); an engine's blocks [token][head][channel]
    (row_bytes, row_bytes * heads). Addresses are multiples of 16, or of the largest power of two
    that divides row_bytes and all strides if that is smaller.

    Raises BadArgumentError for other tables, and for strides with which rows overlap.
    """
    device, programs = _checked(source_at, target_at, programs)
    if min(tokens, heads, row_bytes) < 1 or tokens * heads * row_bytes > FRAGMENT_BYTES_MAX:
        raise BadArgumentError(
            f"{heads} heads, {tokens} tokens and rows of {row_bytes} bytes: wanted 1 or more of "
            "each, and up to 2**30 bytes a page and layer"
        )
    _check_strides("source_strides", source_strides, (heads, tokens), row_bytes)
    _check_strides("target_strides", target_strides, (heads, tokens), row_bytes)
    if source_at.numel() == 0:
        return
    if not runs_triton(device):
        reference.convert_pages(
            source_at,
            target_at,
            tokens=tokens,
            heads=heads,
            row_bytes=row_bytes,
            source_strides=source_strides,
            target_strides=target_strides,
        )
        return
    source_head, source_token = source_strides if heads > 1 else (0, source_strides[1])
    target_head, target_token = target_strides if heads > 1 else (0, target_strides[1])
    if tokens == 1:
        source_token = target_token = 0
    word_bytes = math.gcd(row_bytes, source_head, source_token, target_head, target_token, 16)
    # Rows are read in the order in which they lie: loads of neighbours become one.
    if source_head > source_token:
        order = (tokens, source_head, source_token, target_head, target_token)
    else:
        order = (heads, source_token, source_head, target_token, target_head)
    words = tokens * heads * row_bytes // word_bytes
    box = (row_bytes // word_bytes, *order)
    _copy(source_at, target_at, word_bytes, words, box, programs)


def unpack_rows(source_at: torch.Tensor, out: torch.Tensor, *, programs: int | None = None) -> None:
    """Fetches rows of 656 bytes and widens them to 576 bfloat16 on the way.

    source_at: int64 [n], multiples of 16. out: bfloat16 [n, 576], contiguous; a row whose address
    is 0 becomes zeros. Channels below 512 are e4m3 times scale in fp32, rounded to bfloat16.

    Raises BadArgumentError for other shapes.
    """
    count = source_at.shape[0] if source_at.ndim == 1 else -1
    device = one_device(source_at=source_at, out=out)
    check_table("source_at", source_at, (max(count, 0),))
    if out.dtype != torch.bfloat16 or out.shape != (count, ROW_CHANNELS):
        raise BadArgumentError(
            f"out is {out.dtype} {tuple(out.shape)}, wanted bfloat16 ({count}, {ROW_CHANNELS})"
        )
    if not out.is_contiguous():
        raise BadArgumentError("out is not contiguous")
    programs = _programs(programs)
    if count == 0:
        return
    if not runs_triton(device):
        reference.unpack_rows(source_at, out)
        return
    from cxlkv.kernels import copies_triton as kernels

    grid = (min(programs, -(-count // kernels.ROWS_A_TILE)),)
    with current(device):
        kernels._unpack_rows_kernel[grid](
            source_at,
            out.view(torch.int16),
            count,
            ROWS=kernels.ROWS_A_TILE,
            num_warps=kernels.ROW_WARPS,
            num_stages=1,
        )


def check_generations(
    descriptor_at: torch.Tensor, expected: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """How many pages are no longer what a list named: free, or of another generation.

    Launched behind the copies that it vouches for: a page that was released while it was on its
    way has another version by then. descriptor_at: int64 [n], addresses of the pages' descriptors
    (docs/memory-layout.md), multiples of 8; 0 is no page. expected: int64 [n], generations.
    Returns out, int32 [1], which is made if it is None; what it held before is lost.

    Raises BadArgumentError for other shapes.
    """
    if descriptor_at.ndim != 1:
        raise BadArgumentError(f"descriptor_at is {tuple(descriptor_at.shape)}, wanted one axis")
    device = one_device(descriptor_at=descriptor_at, expected=expected, out=out)
    check_table("descriptor_at", descriptor_at, tuple(descriptor_at.shape))
    check_table("expected", expected, tuple(descriptor_at.shape))
    if out is None:
        out = torch.empty(1, dtype=torch.int32, device=device)
    elif out.dtype != torch.int32 or out.shape != (1,):
        raise BadArgumentError(f"out is {out.dtype} {tuple(out.shape)}, wanted int32 (1,)")
    if not runs_triton(device):
        reference.check_generations(descriptor_at, expected, out)
        return out
    from cxlkv.kernels import copies_triton as kernels

    with current(device):
        kernels._check_generations_kernel[(1,)](
            descriptor_at,
            expected,
            out,
            descriptor_at.shape[0],
            BLOCK=kernels.DESCRIPTORS_A_TURN,
            num_warps=kernels.DESCRIPTOR_WARPS,
            num_stages=1,
        )
    return out


def _copy(
    source_at: torch.Tensor,
    target_at: torch.Tensor,
    word_bytes: int,
    words: int,
    box: tuple[int, int, int, int, int, int] | None,
    programs: int,
) -> None:
    from cxlkv.kernels import copies_triton as kernels

    count = source_at.numel()
    element, lanes = kernels.ELEMENTS[word_bytes]
    large = count * words >= programs * kernels.LARGE_TILE[0]
    tile, warps = kernels.LARGE_TILE if large else kernels.SMALL_TILE
    grid = (min(programs, -(-count * words // tile)),)
    with current(source_at.device):
        kernels._copy_kernel[grid](
            source_at,
            target_at,
            count,
            words,
            *(box or (1, 1, 0, 0, 0, 0)),
            BOXED=box is not None,
            ELEMENT=element,
            LANES=lanes,
            WORD_BYTES=word_bytes,
            TILE=tile,
            num_warps=warps,
            num_stages=1,
        )


def _programs(programs: int | None) -> int:
    if programs is None:
        return PROGRAMS
    if programs < 1:
        raise BadArgumentError(f"programs is {programs}, wanted 1 or more")
    return programs


def _checked(
    source_at: torch.Tensor, target_at: torch.Tensor, programs: int | None
) -> tuple[torch.device, int]:
    device = one_device(source_at=source_at, target_at=target_at)
    check_table("source_at", source_at, tuple(source_at.shape))
    check_table("target_at", target_at, tuple(source_at.shape))
    return device, _programs(programs)


def _check_strides(
    name: str, strides: tuple[int, int], counts: tuple[int, int], row_bytes: int
) -> None:
    """One axis within the other, and rows within both: no two of them overlap."""
    reach = row_bytes
    for stride, count in sorted(zip(strides, counts, strict=True)):
        if count > 1:
            if stride < reach:
                raise BadArgumentError(
                    f"{name} are {strides} for {counts} heads and tokens of {row_bytes} bytes: "
                    "rows overlap"
                )
            reach += stride * (count - 1)
