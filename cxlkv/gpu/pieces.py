"""What a page of one head is on a device: rows, or codes as a pool with an encoding keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.errors import UnsupportedError
from cxlkv.kernels.attend import CODE_BITS
from cxlkv.kernels.reference_codes import CodeForm
from cxlkv.layout import FP8, KVLayout

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


def pieces_of(layout: KVLayout) -> tuple[Piece, Piece]:
    """The pieces of keys and of values, as they lie in the pool; raises UnsupportedError for what
    kernels do not read there."""
    return _pieces_of(layout, encodings_of(layout))


def fetched_pieces(layout: KVLayout, decoded: bool) -> tuple[Piece, Piece]:
    """The pieces that fetch() returns: rows, or the codes of what is encoded."""
    both = (layout.k_encoding, layout.v_encoding)
    if decoded:
        return _pieces_of(layout, ("none", "none"))
    if FP8 in both:
        raise UnsupportedError(
            f"decoded=False of a pool that keeps keys and values as {layout.encoding}: kernels do "
            "not attend to fp8. Leave it out: rows are decoded on the way"
        )
    keys, values = ("int8" if each == "progressive" else each for each in both)  # planes are joined
    return _pieces_of(layout, (keys, values))


def _pieces_of(layout: KVLayout, encodings: tuple[str, str]) -> tuple[Piece, Piece]:
    dims, dtype = (layout.head_dim, layout.value_head_dim), DTYPES[layout.dtype]
    keys, values = (
        piece_of(layout.page_tokens, dims[i], dtype, encodings[i], values=i == 1) for i in range(2)
    )
    return keys, values


def encodings_of(layout: KVLayout) -> tuple[str, str]:
    """The encodings of keys and of values, as kernels.attend takes them; raises UnsupportedError
    for others."""
    both = (layout.k_encoding, layout.v_encoding)
    if not set(both) <= set(CODE_BITS):
        raise UnsupportedError(
            f"a device's kernels read int8 and int4 in a pool, this one keeps keys and values as "
            f"{layout.encoding}. Staging brings them; or make the pool in int8"
        )
    return both
