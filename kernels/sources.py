"""Makes the tables of a gather: which chosen pages come from far memory, and where they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cxlkv.kernels.runtime import check_table, check_tensor, current, one_device, runs_triton

CHECKSUM_BYTES = 16
"""Of a (page, layer, head): of its digest, sketch, K and V."""
STALE = 1 << 62
"""check_pieces() writes this for a request if one of its pages was given away. Numbers of pieces
are smaller."""


class PageRows(NamedTuple):
    """Pages by request and place in its sequence, int64 [requests, pages]: the address of the K run
    and of the V run of the part's first layer, of the descriptor, the generation, and the address
    of the checksums of the part's first layer (0: the pool has none). 0: no such page in far
    memory."""

    keys: torch.Tensor
    values: torch.Tensor
    descriptors: torch.Tensor
    generations: torch.Tensor
    checksums: torch.Tensor


class Sources(NamedTuple):
    """Where each page of a list is, int64 [requests, kv_heads, k]; 0 where nothing is to be
    fetched. checksums: the address of the four of the page's head."""

    keys: torch.Tensor
    values: torch.Tensor
    descriptors: torch.Tensor
    generations: torch.Tensor
    checksums: torch.Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int, int], device: torch.device) -> Sources:
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(5)))


def known_pages(
    pages: torch.Tensor,
    rows: PageRows,
    answered: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """known = pages, or -1 where they are not in far memory; all -1 unless answered[0] is 1.

    pages, known: int32 [requests, kv_heads, k]; answered: int32 [2], as mail.await_answer has it.
    """
    requests, heads, k = pages.shape
    check_tensor("pages", pages, torch.int32, (requests, heads, k))
    check_tensor("known", known, torch.int32, (requests, heads, k))
    check_tensor("answered", answered, torch.int32, (2,))
    check_table("rows.keys", rows.keys, (requests, rows.keys.shape[1]))
    device = one_device(pages=pages, known=known, answered=answered, rows=rows.keys)
    if not runs_triton(device):
        known_pages_reference(pages, rows, answered, known)
        return
    from cxlkv.kernels import sources_triton as kernels

    count = pages.numel()
    with current(device):
        kernels._known_kernel[(-(-count // kernels.BLOCK),)](
            pages,
            rows.keys,
            answered,
            known,
            count,
            heads * k,
            rows.keys.shape[1],
            BLOCK=kernels.BLOCK,
            num_warps=4,
        )


def known_pages_reference(
    pages: torch.Tensor,
    rows: PageRows,
    answered: torch.Tensor,
    known: torch.Tensor,
) -> None:
    """The same by indexing."""
    wanted = (pages >= 0) & (pages < rows.keys.shape[1])
    request = torch.arange(len(pages), device=pages.device)[:, None, None].expand(pages.shape)
    wanted &= rows.keys[request, torch.where(wanted, pages, 0).long()] != 0
    known.copy_(torch.where(wanted & (answered[0] == 1), pages, -1))


def page_sources(
    pages: torch.Tensor,
    missed: torch.Tensor,
    rows: PageRows,
    out: Sources,
    *,
    layer_offset: int,
    checksums_offset: int,
    piece_bytes: tuple[int, int],
) -> None:
    """Fill `out` for pages int32 [requests, kv_heads, k] where missed (int8) is not 0.

    layer_offset, checksums_offset: from the part's first layer to the wanted one; piece_bytes: from
    one head's K to the next one's, and of V. A page that has no row, or none in far memory, gets
    zeros.
    """
    requests, heads, k = pages.shape
    row_pages = rows.keys.shape[1]
    check_tensor("pages", pages, torch.int32, (requests, heads, k))
    check_tensor("missed", missed, torch.int8, (requests, heads, k))
    for name, row, to in zip(rows._fields, rows, out, strict=True):
        check_table(f"rows.{name}", row, (requests, row_pages))
        check_table(f"out.{name}", to, (requests, heads, k))
    device = one_device(pages=pages, missed=missed, rows=rows.keys, out=out.keys)
    if not runs_triton(device):
        offsets = (layer_offset, checksums_offset)
        page_sources_reference(pages, missed, rows, out, offsets, piece_bytes)
        return
    from cxlkv.kernels import sources_triton as kernels

    count = pages.numel()
    with current(device):
        kernels._sources_kernel[(-(-count // kernels.BLOCK),)](
            pages,
            missed,
            *rows,
            *out,
            count,
            k,
            heads,
            row_pages,
            layer_offset,
            checksums_offset,
            *piece_bytes,
            CHECKSUM_BYTES=CHECKSUM_BYTES,
            BLOCK=kernels.BLOCK,
            num_warps=4,
        )


def page_sources_reference(
    pages: torch.Tensor,
    missed: torch.Tensor,
    rows: PageRows,
    out: Sources,
    offsets: tuple[int, int],
    piece_bytes: tuple[int, int],
) -> None:
    """The same by indexing. offsets: of the layer, and of its checksums."""
    requests, heads, _ = pages.shape
    wanted = (missed != 0) & (pages >= 0) & (pages < rows.keys.shape[1])
    request = torch.arange(requests, device=pages.device)[:, None, None].expand(pages.shape)
    head = torch.arange(heads, device=pages.device)[None, :, None].expand(pages.shape)
    row = (request, torch.where(wanted, pages, 0).long())
    wanted &= rows.keys[row] != 0
    steps: list[torch.Tensor | int] = [offsets[0] + head * step for step in piece_bytes]
    steps += [0, 0, offsets[1] + head * CHECKSUM_BYTES]
    for table, to, more in zip(rows, out, steps, strict=True):
        there = wanted if table is not rows.checksums else wanted & (table[row] != 0)
        to.copy_(torch.where(there, table[row] + more, 0))
