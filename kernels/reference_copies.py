"""What `copies.py` does, in torch and ctypes, on addresses that this process can read."""

from __future__ import annotations

import ctypes

import torch


def memory(address: int, size: int) -> torch.Tensor:
    """The bytes from an address on, as uint8; no copy, and nothing keeps them alive."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def copy_fragments(source_at: torch.Tensor, target_at: torch.Tensor, fragment_bytes: int) -> None:
    """Each fragment from its source to its target; none where either address is 0."""
    pairs = zip(source_at.flatten().tolist(), target_at.flatten().tolist(), strict=True)
    for source, target in pairs:
        if source and target:
            ctypes.memmove(target, source, fragment_bytes)


def convert_pages(
    source_at: torch.Tensor,
    target_at: torch.Tensor,
    *,
    tokens: int,
    heads: int,
    row_bytes: int,
    source_strides: tuple[int, int],
    target_strides: tuple[int, int],
) -> None:
    """The same rows [heads, tokens] of each page and layer, at other strides."""

    def rows(address: int, strides: tuple[int, int]) -> torch.Tensor:
        head_bytes, token_bytes = strides
        size = (heads - 1) * head_bytes + (tokens - 1) * token_bytes + row_bytes
        shape = (heads, tokens, row_bytes)
        return memory(address, size).as_strided(shape, (head_bytes, token_bytes, 1))

    pairs = zip(source_at.flatten().tolist(), target_at.flatten().tolist(), strict=True)
    for source, target in pairs:
        if source and target:
            rows(target, target_strides).copy_(rows(source, source_strides))


def unpack_rows(source_at: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of 656 bytes widened to 576 bfloat16; zeros where the address is 0."""
    count = source_at.shape[0]
    packed = torch.zeros((count, 656), dtype=torch.uint8)
    row_at = packed.data_ptr() + 656 * torch.arange(count)
    copy_fragments(source_at, row_at, 656)
    codes = packed[:, :512].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    out[:, :512] = (codes.view(count, 4, 128) * scales[:, :, None]).view(count, 512).bfloat16()
    out[:, 512:] = packed[:, 528:].contiguous().view(torch.bfloat16)


def check_generations(
    descriptor_at: torch.Tensor, expected: torch.Tensor, out: torch.Tensor
) -> None:
    """Counts the pages that are free or of another generation; address 0 is no page."""
    addresses = descriptor_at.tolist()
    versions = torch.tensor(
        [ctypes.c_int64.from_address(address).value if address else 0 for address in addresses],
        dtype=torch.int64,
    )
    state = versions & 0xFF
    generation = (versions >> 8) & ((1 << 56) - 1)
    valid = (generation == expected) & ((state == 1) | (state == 2))
    out.copy_(((descriptor_at != 0) & ~valid).sum(dtype=torch.int32).reshape(1))
