"""The reference of `encode.py` and `crc32c.py`, in torch: pieces, digests, sketches, checksums."""

from __future__ import annotations

from functools import cache

import torch

BITS = {2: torch.int16, 4: torch.int32}  # an element's bits as a number, by its bytes
SKETCH_TOKENS = 16
SKETCH_CHANNELS = 16
CRC_CHUNK_BYTES = 256
CRC_BEGIN = bytes.fromhex("54641f64")  # after them a register that was 0 has all its bits set


def pieces_of(rows: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """[tokens, heads, dim] as [pages, heads, page_tokens, dim]: no copy."""
    tokens, heads, dim = rows.shape
    return rows.reshape(tokens // page_tokens, page_tokens, heads, dim).transpose(1, 2)


def digests_of(pieces: torch.Tensor) -> torch.Tensor:
    """[pages, heads, 2, dim]: minima, then maxima of each channel over a page's tokens.

    By value, and -0 is below +0: the order of the bits read as sign and magnitude. A channel with
    a NaN is NaN in both.
    """
    bits = pieces.contiguous().view(BITS[pieces.element_size()])
    largest = torch.iinfo(bits.dtype).max
    ordered = torch.where(bits < 0, bits ^ largest, bits)
    found = torch.stack([ordered.amin(2), ordered.amax(2)], dim=2)
    digests = torch.where(found < 0, found ^ largest, found).view(pieces.dtype)
    nan = pieces.isnan().any(dim=2).unsqueeze(2)
    return digests.masked_fill(nan, float("nan"))


@cache
def signs(dim: int) -> torch.Tensor:
    """float32 [dim]: -1 where bit d % 64 of splitmix64(d / 64) is set, else 1."""
    words = []
    for block in range(-(-dim // 64)):
        z = (block + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
        words.append(z ^ z >> 31)
    return torch.tensor([1.0 - 2 * (words[d // 64] >> d % 64 & 1) for d in range(dim)])


def butterflies(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of rows [..., dim] whose signs were changed, in blocks of powers of two from dim's
    largest down, and what each channel is to be multiplied by, [dim]: 1 / root of its block."""
    dim = rows.shape[-1]
    rows = rows * signs(dim).to(rows.device)
    blocks, norms, first = [], [], 0
    while first < dim:
        size = 1 << (dim - first).bit_length() - 1
        block, half = rows[..., first : first + size], 1
        while half < size:
            pairs = block.unflatten(-1, (-1, 2, half))
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            block = torch.stack([low + high, low - high], dim=-2).flatten(-3)
            half *= 2
        blocks.append(block)
        norms.append((1 / torch.tensor(float(size)).sqrt()).expand(size))
        first += size
    return torch.cat(blocks, dim=-1), torch.cat(norms).to(rows.device)


def hadamard(keys: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transforms of keys [..., dim] with signs changed, in blocks of powers of two
    from dim's largest down."""
    sums, norms = butterflies(keys)
    return sums * norms


def sketches_of(pieces: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, heads, sketch_piece_bytes]: docs/reference/memory-layout.md has the bytes."""
    tokens, dim = pieces.shape[2:]
    y = hadamard(pieces.float())
    squares = y.square().sum(-1, keepdim=True)
    step = (squares / dim).sqrt()
    codes = (y >= -step).int() + (y >= 0).int() + (y >= step).int()
    products = (y * (codes - 1.5)).sum(-1, keepdim=True)
    scales = torch.where(squares > 0, squares / products, torch.zeros_like(squares))
    scales = scales.masked_fill(~squares.isfinite(), float("nan"))
    padding = (0, -dim % SKETCH_CHANNELS, 0, -tokens % SKETCH_TOKENS)
    codes = torch.nn.functional.pad(codes, padding)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, -tokens % SKETCH_TOKENS))
    # [block, token, group of channels, channel], then a word for each group and token.
    codes = codes.unflatten(2, (-1, SKETCH_TOKENS)).unflatten(-1, (-1, 4, 4))
    weights = torch.tensor([1, 4, 16, 64], dtype=torch.int32, device=y.device)
    packed = (codes * weights).sum(-1).to(torch.uint8).transpose(3, 4).flatten(3)
    scale_bytes = scales.unflatten(2, (-1, SKETCH_TOKENS)).flatten(3).contiguous().view(torch.uint8)
    return torch.cat([packed, scale_bytes], dim=-1).flatten(2)


def _advanced(register: int) -> int:
    """A CRC's register after a zero byte."""
    for _ in range(8):
        register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


@cache
def _bit_columns(size: int) -> torch.Tensor:
    """float32 [8 * size, 32]: what each bit of `size` bytes, low ones first, adds to a register
    that began with 0; of the register's own bits, the first 32 rows of 4 bytes."""
    rows: list[list[int]] = []
    for _ in range(size):
        last = [_advanced(1 << bit) for bit in range(8)]
        rows = [[_advanced(word) for word in byte] for byte in rows] + [last]
    words = torch.tensor([word for byte in rows for word in byte], dtype=torch.int64)
    return (words.unsqueeze(-1) >> torch.arange(32) & 1).float()


def _bits(data: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes] as float32 [n, 8 * bytes]."""
    places = torch.arange(8, device=data.device)
    return (data.to(torch.int32).unsqueeze(-1) >> places & 1).flatten(-2).float()


def checksums_of(pieces: torch.Tensor, size: int) -> torch.Tensor:
    """int32 [...]: the CRC32C of the first `size` bytes of each piece, uint8 [..., piece_bytes].

    A register is a sum, modulo 2, over the bits of what came before: a product with a matrix for
    each chunk. Zeros before a message leave a register of 0 as it is.
    """
    data = pieces[..., :size].reshape(-1, size)
    begin = torch.tensor(list(CRC_BEGIN), dtype=torch.uint8, device=data.device)
    data = torch.cat([begin.expand(len(data), 4), data], dim=1)
    data = torch.nn.functional.pad(data, (-(size + 4) % CRC_CHUNK_BYTES, 0))
    columns = _bit_columns(CRC_CHUNK_BYTES).to(data.device)
    register = torch.zeros((len(data), 32), device=data.device)
    for start in range(0, data.shape[1], CRC_CHUNK_BYTES):
        bits = _bits(data[:, start : start + CRC_CHUNK_BYTES])
        bits[:, :32] += register
        register = (bits.remainder(2) @ columns).remainder(2)
    places = torch.arange(32, dtype=torch.int64, device=data.device)
    words = ((1 - register).to(torch.int64) << places).sum(-1)
    return words.to(torch.int32).reshape(pieces.shape[:-1])
