"""Encodes fresh K and V as the pieces of pages: head-major rows, digests, sketches, their CRC32C.

The bytes are those of the C core (native/src/sequence/append.c, sketch.h), but for codes of
channels that lie on a border between two, as among its own instruction sets, and for which NaN a
NaN is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.crc32c import checksums
from cxlkv.kernels.reference_encode import (
    SKETCH_CHANNELS,
    SKETCH_TOKENS,
    digests_of,
    pieces_of,
    sketches_of,
)
from cxlkv.kernels.runtime import one_device, runs_triton

LINE_BYTES = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Encoded:
    """Pieces of pages, uint8 [pages, heads, piece_bytes]: data, then zeros up to a line of 64."""

    keys: torch.Tensor
    values: torch.Tensor | None  # None: they are a prefix of the keys
    digests: torch.Tensor
    sketches: torch.Tensor | None
    checksums: torch.Tensor  # int32 [pages, heads, 4]: of digest, sketch, K, V; 0: there is none


def sketch_bytes(page_tokens: int, dim: int) -> int:
    """Bytes of a sketch piece."""
    return -(-page_tokens // SKETCH_TOKENS) * (-(-dim // SKETCH_CHANNELS) + 1) * LINE_BYTES


def encode(
    k: torch.Tensor, v: torch.Tensor | None, *, page_tokens: int, sketch: bool = True
) -> Encoded:
    """Pieces of k [tokens, kv_heads, dim] and v, of any strides; tokens fill pages.

    float32, float16 or bfloat16. v is None where values are a prefix of the keys. Nothing here
    waits for the device, but that a shape's first call brings its tables there. Raises
    BadArgumentError, UnsupportedError.
    """
    device = one_device(k=k, v=v)
    _check(k, v, page_tokens)
    (tokens, heads, dim), size = k.shape, k.element_size()
    pages = tokens // page_tokens
    key_bytes, digest_bytes = page_tokens * dim * size, 2 * dim * size
    value_bytes = page_tokens * v.shape[2] * size if v is not None else 0
    sketch_size = sketch_bytes(page_tokens, dim) if sketch else 0
    keys = _pieces(pages, heads, key_bytes, device)
    digests = _pieces(pages, heads, digest_bytes, device)
    values = None if v is None else _pieces(pages, heads, value_bytes, device)
    sketches = _pieces(pages, heads, sketch_size, device) if sketch else None
    if not runs_triton(device):
        _by_reference(k, v, page_tokens, (keys, values, digests, sketches))
    elif pages:
        from cxlkv.kernels.encode_triton import launch

        launch(k, v, page_tokens, (keys, values, digests, sketches))
    sizes = (digest_bytes, sketch_size, key_bytes, value_bytes)
    sums = checksums((digests, sketches, keys, values), sizes)
    return Encoded(keys=keys, values=values, digests=digests, sketches=sketches, checksums=sums)


def _check(k: torch.Tensor, v: torch.Tensor | None, page_tokens: int) -> None:
    if k.ndim != 3 or k.dtype not in DTYPES:
        raise BadArgumentError(f"k is {k.dtype} {tuple(k.shape)}: [tokens, kv_heads, dim] wanted")
    if page_tokens < 1 or k.shape[0] % page_tokens:
        raise BadArgumentError(f"{k.shape[0]} tokens do not fill pages of {page_tokens}")
    if not (k.shape[1] >= 1 and 1 <= k.shape[2] <= 4096):
        raise BadArgumentError(f"k has {k.shape[1]} heads of {k.shape[2]} channels: 1 to 4096")
    if v is None:
        return
    if v.ndim != 3 or v.dtype != k.dtype or v.shape[:2] != k.shape[:2] or v.shape[2] < 1:
        raise BadArgumentError(
            f"v is {v.dtype} {tuple(v.shape)}, k is {k.dtype} {tuple(k.shape)}: they may differ "
            "in their channels only"
        )


def _pieces(pages: int, heads: int, size: int, device: torch.device) -> torch.Tensor:
    whole = -(-size // LINE_BYTES) * LINE_BYTES
    make = torch.empty if whole == size else torch.zeros
    return make((pages, heads, whole), dtype=torch.uint8, device=device)


def _by_reference(
    k: torch.Tensor,
    v: torch.Tensor | None,
    page_tokens: int,
    out: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
) -> None:
    pieces = pieces_of(k, page_tokens)
    made = (
        pieces,
        None if v is None else pieces_of(v, page_tokens),
        digests_of(pieces),
        sketches_of(pieces) if out[3] is not None else None,
    )
    for to, data in zip(out, made, strict=True):
        if to is not None and data is not None:
            flat = data.contiguous().view(torch.uint8).flatten(2)
            to[..., : flat.shape[2]] = flat
