"""CRC32C on a GPU: the checksums of many pieces; the shifts are made in `crc32c_shifts.py`.

A CRC is linear over GF(2): xor of messages is xor of their CRCs, if the register begins with 0. So
a piece is cut into rows of words, a lane goes down a column, and each step shifts its register by a
row (four tables of 256, one for each byte of the register) and adds a word. In the end lane j is
multiplied by the power of x that its place needs, and all are added. A last row that is not full is
as good as one filled with zeros: x has an inverse, and the powers are smaller by so much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cxlkv.arrays import address_of
from cxlkv.errors import BadArgumentError
from cxlkv.kernels.reference_encode import checksums_of
from cxlkv.kernels.runtime import one_device, runs_triton


def checksums(
    kinds: Sequence[torch.Tensor | None], sizes: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The CRC32C of every piece, int32 [..., kinds], 0 where a kind has none.

    kinds: up to four contiguous uint8 tensors [..., piece_bytes], the same number of pieces in
    each, each beginning at a multiple of 64 bytes; sizes: how many bytes of a piece count. The
    others are zero.
    """
    given = [pieces for pieces in kinds if pieces is not None]
    device = one_device(**{f"kind {i}": pieces for i, pieces in enumerate(given)}, out=out)
    shape = given[0].shape[:-1]
    for pieces, size in zip(kinds, sizes, strict=True):
        if pieces is not None and not (
            pieces.dtype == torch.uint8
            and pieces.is_contiguous()
            and pieces.shape[:-1] == shape
            and pieces.shape[-1] == -(-size // 64) * 64
            and address_of(pieces, "pieces") % 16 == 0
        ):
            raise BadArgumentError(
                f"pieces of {size} bytes: wanted contiguous uint8, whole lines of 64 bytes each, "
                f"got {pieces.dtype} {tuple(pieces.shape)}"
            )
    if out is None:
        out = torch.zeros((*shape, len(kinds)), dtype=torch.int32, device=device)
    if not runs_triton(device):
        for kind, (pieces, size) in enumerate(zip(kinds, sizes, strict=True)):
            if pieces is not None:
                out[..., kind] = checksums_of(pieces, size)
        return out
    if out.numel():
        from cxlkv.kernels.crc32c_triton import launch

        launch(kinds, sizes, out)
    return out
