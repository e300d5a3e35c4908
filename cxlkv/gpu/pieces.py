"""What a page of one head is on a device: rows, or codes as a pool with an encoding keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.kernels.attend import CODE_BITS
from cxlkv.kernels.reference_codes import CodeForm
from cxlkv.layout import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Piece:
    """A tensor of this dtype and shape; code: the form of its codes, or None for rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    code: CodeForm | None = None

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def piece_of(
    page_tokens: int, dim: int, dtype: torch.dtype, encoding: str, *, values: bool
) -> Piece:
    if encoding == "none":
        return Piece(dtype, (page_tokens, dim))
    form = CodeForm(CODE_BITS[encoding], dim, values)
    return Piece(torch.uint8, (form.piece_bytes(page_tokens),), form)


def pieces_of(layout: KVLayout, *, decoded: bool = False) -> tuple[Piece, Piece]:
    """Of keys and of values; decoded: as fetch() gives them by itself, rows in any case."""
    encodings = ("none", "none") if decoded else encodings_of(layout)
    dims, dtype = (layout.head_dim, layout.value_head_dim), DTYPES[layout.dtype]
    keys, values = (
        piece_of(layout.page_tokens, dims[i], dtype, encodings[i], values=i == 1) for i in range(2)
    )
    return keys, values


def encodings_of(layout: KVLayout) -> tuple[str, str]:
    """Of keys and of values, as kernels.attend takes them."""
    return layout.k_encoding, layout.v_encoding
