"""Appends fresh rows of K and V to a ring of pages on the device: each request's newest tokens.

ring[request, head, slot] is a piece, [page_tokens, dim] or of codes; page p of a request lies in
slot p % slots.
"""

from __future__ import annotations

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.reference_codes import CodeForm, codes_of, encode, packed
from cxlkv.kernels.runtime import current, one_device, runs_triton


def append_rows(rows: torch.Tensor, ring: torch.Tensor, positions: torch.Tensor) -> None:
    """rows [requests, steps, heads, dim], last dimension contiguous, into ring [requests, heads,
    slots, page_tokens, dim] at positions int64 [requests, steps]; nothing where that is below 0."""
    requests, steps, heads, dim = rows.shape
    if ring.shape[:2] != (requests, heads) or ring.shape[4] != dim or ring.dtype != rows.dtype:
        raise BadArgumentError(
            f"rows {rows.dtype} {tuple(rows.shape)} do not fit a ring {ring.dtype} "
            f"{tuple(ring.shape)}"
        )
    _check_positions(rows, ring, positions)
    if not runs_triton(one_device(rows=rows, ring=ring, positions=positions)):
        append_rows_reference(rows, ring, positions)
        return
    from cxlkv.kernels import recent_triton as kernels

    with current(rows.device):
        kernels._append_rows_kernel[(requests * steps * heads,)](
            rows,
            ring,
            positions,
            steps,
            heads,
            ring.shape[2],
            ring.shape[3],
            rows.stride(0),
            rows.stride(1),
            rows.stride(2),
            dim,
            BLOCK=1 << (dim - 1).bit_length(),
            num_warps=1,
        )


def _check_positions(rows: torch.Tensor, ring: torch.Tensor, positions: torch.Tensor) -> None:
    wanted = rows.shape[:2]
    if positions.shape != wanted or positions.dtype != torch.int64:
        raise BadArgumentError(f"positions are int64 {list(wanted)}")
    if not ring.is_contiguous() or not positions.is_contiguous() or rows.stride(3) != 1:
        raise BadArgumentError("ring and positions are contiguous, and so is a row")


def append_rows_reference(rows: torch.Tensor, ring: torch.Tensor, positions: torch.Tensor) -> None:
    """The same by indexing."""
    slots, page_tokens = ring.shape[2:4]
    request, step = torch.nonzero(positions >= 0, as_tuple=True)
    at = positions[request, step]
    ring[request, :, at // page_tokens % slots, at % page_tokens] = rows[request, step]


def append_codes(
    rows: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    form: CodeForm,
    page_tokens: int,
) -> None:
    """append_rows into uint8 [requests, heads, slots, piece_bytes]: the rows' codes and scales,
    which are those that a pool makes of them. What a slot had of other tokens stays."""
    requests, _, heads, dim = rows.shape
    piece_bytes = form.piece_bytes(page_tokens)
    if (
        ring.shape[:2] != (requests, heads)
        or ring.shape[3] != piece_bytes
        or ring.dtype != torch.uint8
        or dim != form.dim
    ):
        raise BadArgumentError(
            f"rows {rows.dtype} {tuple(rows.shape)} do not fit a ring {ring.dtype} "
            f"{tuple(ring.shape)} of pieces of {piece_bytes} bytes, {form.dim} channels"
        )
    _check_positions(rows, ring, positions)
    if not runs_triton(one_device(rows=rows, ring=ring, positions=positions)):
        append_codes_reference(rows, ring, positions, form, page_tokens)
    elif rows.numel():
        from cxlkv.kernels.recent_codes_triton import launch

        with current(rows.device):
            launch(rows, ring, positions, form, page_tokens)


def append_codes_reference(
    rows: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    form: CodeForm,
    page_tokens: int,
) -> None:
    """The same row by row."""
    slots = ring.shape[2]
    codes, scales = encode(rows, form)
    for request, step in torch.nonzero(positions >= 0).tolist():
        at = int(positions[request, step])
        pieces, token = ring[request, :, at // page_tokens % slots], at % page_tokens
        there, end = codes_of(pieces, form, page_tokens), form.scales_offset(page_tokens)
        there[:, token] = codes[request, step]
        pieces[:, :end] = packed(there, form)
        pieces[:, end:].view(torch.float16)[:, token] = scales[request, step].half()
