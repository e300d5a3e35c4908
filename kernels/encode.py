"""Encodes fresh K and V as the pieces of pages: head-major rows or codes, digests, sketches, their
CRC32C.

The bytes are those of the C core (native/src/sequence/page_write.c, sketch.h), but for codes of
sketches whose channels lie on a border between two, as among its own instruction sets, and for
which NaN a NaN of rows is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.code_pieces import CodePiece, as_kept, write_codes, write_fp8
from cxlkv.kernels.crc32c import checksums
from cxlkv.kernels.reference_encode import (
    SKETCH_CHANNELS,
    SKETCH_TOKENS,
    digests_of,
    pieces_of,
    sketches_of,
)
from cxlkv.kernels.runtime import current, one_device, runs_triton

LINE_BYTES = 64
CODES = ("int8", "int4", "progressive")
FP8 = "fp8_e4m3"
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
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    page_tokens: int,
    sketch: bool = True,
    encodings: tuple[str, str] = ("none", "none"),
) -> Encoded:
    """Pieces of k [tokens, kv_heads, dim] and v, of any strides; tokens fill pages.

    float32, float16 or bfloat16. v is None where values are a prefix of the keys. encodings: of
    keys and of values, as a KVLayout names them. Nothing here waits for the device, but that a
    shape's first call brings its tables there. Raises BadArgumentError, UnsupportedError.
    """
    device = one_device(k=k, v=v)
    _check(k, v, page_tokens)
    (tokens, heads, dim), size = k.shape, k.element_size()
    pages = tokens // page_tokens
    digest_bytes = 2 * dim * (size if encodings[0] == "none" else 1)
    sketch_size = sketch_bytes(page_tokens, dim) if sketch else 0
    digests = _pieces(pages, heads, digest_bytes, device)
    keys, key_bytes = _write(k, page_tokens, encodings[0], digests)
    values, value_bytes = (None, 0) if v is None else _write(v, page_tokens, encodings[1], None)
    sketches = _pieces(pages, heads, sketch_size, device) if sketch else None
    if sketches is not None and pages:
        given = k if encodings[0] == "none" else as_kept(k.float(), encodings[0])
        _sketch(given, page_tokens, sketches)
    sizes = (digest_bytes, sketch_size, key_bytes, value_bytes)
    sums = checksums((digests, sketches, keys, values), sizes)
    return Encoded(keys=keys, values=values, digests=digests, sketches=sketches, checksums=sums)


def _write(
    rows: torch.Tensor, page_tokens: int, encoding: str, digests: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """K, with digests, or V: pieces, and how many bytes of them count."""
    tokens, heads, dim = rows.shape
    piece = CodePiece(encoding, dim, digests is None, page_tokens)
    size = page_tokens * dim * (1 if encoding == FP8 else rows.element_size())
    size = piece.bytes if encoding in CODES else size
    shape = (tokens // page_tokens, heads, size)
    made = _pieces(*shape, rows.device, gaps=piece.has_planes)
    by_kernel, paged = runs_triton(rows.device), pieces_of(rows, page_tokens)
    if not tokens:
        return made, size
    if encoding == FP8:  # by torch, on a GPU too
        write_fp8(paged, made, digests)
    elif encoding in CODES and by_kernel:
        from cxlkv.kernels.encode_codes_triton import launch_codes

        with current(rows.device):
            launch_codes(rows, piece, made, digests)
    elif encoding in CODES:
        write_codes(paged, piece, made, digests)
    elif by_kernel:
        from cxlkv.kernels.encode_triton import launch_rows

        with current(rows.device):
            launch_rows(rows, made, digests, page_tokens)
    else:
        _put(paged, made)
        if digests is not None:
            _put(digests_of(paged), digests)
    return made, size


def _sketch(keys: torch.Tensor, page_tokens: int, sketches: torch.Tensor) -> None:
    if not runs_triton(keys.device):
        _put(sketches_of(pieces_of(keys, page_tokens)), sketches)
        return
    from cxlkv.kernels.encode_triton import launch_sketch

    with current(keys.device):
        launch_sketch(keys, sketches, page_tokens)


def _put(data: torch.Tensor, pieces: torch.Tensor) -> None:
    flat = data.contiguous().view(torch.uint8).flatten(2)
    pieces[..., : flat.shape[2]] = flat


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


def _pieces(
    pages: int, heads: int, size: int, device: torch.device, *, gaps: bool = False
) -> torch.Tensor:
    """Zeros where not all bytes are written: in gaps within, or up to the end of a line."""
    whole = -(-size // LINE_BYTES) * LINE_BYTES
    make = torch.zeros if gaps or whole != size else torch.empty
    return make((pages, heads, whole), dtype=torch.uint8, device=device)
