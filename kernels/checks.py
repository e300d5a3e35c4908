"""Checks on the device what was fetched: that pages are still those that were meant, and the CRC32C
of each piece.

Launched behind the copies that it vouches for. A piece is read where it was copied to, its sum
where it lies in the pool, and the page's descriptor after both: a page that was given away
meanwhile is told from one that is damaged. Nothing here allocates, or waits for the device: a CUDA
graph may hold it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from cxlkv.kernels.crc32c_shifts import lanes_for, shifts
from cxlkv.kernels.reference_encode import checksums_of
from cxlkv.kernels.runtime import check_table, check_tensor, current, one_device, runs_triton
from cxlkv.kernels.sources import STALE, Sources


class Shape(NamedTuple):
    """What is fetched of a page of a head. key_bytes, value_bytes: of its copies, multiples of 16;
    tail_bytes: of the keys' piece, 0 or 4, which are not copied. pages_max: of a request."""

    key_bytes: int
    value_bytes: int
    tail_bytes: int
    pages_max: int

    @property
    def summed(self) -> tuple[int, int]:
        """Bytes that the CRCs are of."""
        return self.key_bytes + self.tail_bytes, self.value_bytes


class Wrong(NamedTuple):
    """The piece whose number check_pieces() gave."""

    layer: int
    request: int
    head: int
    page: int
    kind: str

    @classmethod
    def of(cls, number: int, shape: Shape, requests: int, heads: int) -> Wrong:
        rest, kind = divmod(number, 2)
        rest, page = divmod(rest, shape.pages_max)
        rest, head = divmod(rest, heads)
        return cls(*divmod(rest, requests), head, page, "KV"[kind])


def prepare(shape: Shape, device: torch.device) -> None:
    """Bring a shape's tables to the device, before a graph is captured."""
    if runs_triton(device):
        shifts(shape.summed, lanes_for(max(shape.summed)), device)


def check_pieces(
    sources: Sources,
    targets: tuple[torch.Tensor, torch.Tensor | None],
    pages: torch.Tensor,
    found: torch.Tensor,
    shape: Shape,
    layer: int,
) -> None:
    """Raise found, int64 [requests], where a piece is not right of those that sources name, each
    [requests, kv_heads, k]: to STALE where its page is another, to its number + 1 where its CRC is
    wrong. A source of 0: nothing was fetched.

    targets: int64, where K and V were copied to, without V where it is a prefix of K. pages: int32,
    the pages' places in the requests. Raises BadArgumentError.
    """
    requests, heads, k = pages.shape
    check_tensor("pages", pages, torch.int32, (requests, heads, k))
    check_tensor("found", found, torch.int64, (requests,))
    named = {**sources._asdict(), "keys_at": targets[0], "values_at": targets[1]}
    for name, table in named.items():
        if table is not None:
            check_table(name, table, (requests, heads, k))
    device = one_device(pages=pages, found=found, **named)
    first = layer * requests * heads
    if not runs_triton(device):
        check_pieces_reference(sources, targets, pages, found, shape, first)
        return
    from cxlkv.kernels import checks_triton as kernels

    lanes = lanes_for(max(shape.summed))
    with current(device):
        kernels._check_kernel[(pages.numel(),)](
            *(sources.keys, sources.descriptors, sources.generations, sources.checksums),
            *(targets[0], targets[0] if targets[1] is None else targets[1], pages, found),
            *shifts(shape.summed, lanes, device),
            *(shape.key_bytes // 4, shape.value_bytes // 4, heads, k, shape.pages_max, first),
            KINDS=1 if targets[1] is None else 2,
            TAIL=shape.tail_bytes != 0,
            LANES=lanes,
            num_warps=lanes // 128,
            num_stages=1,
        )


def check_pieces_reference(
    sources: Sources,
    targets: tuple[torch.Tensor, torch.Tensor | None],
    pages: torch.Tensor,
    found: torch.Tensor,
    shape: Shape,
    first: int,
) -> None:
    """The same on addresses that this process can read."""
    _, heads, k = pages.shape
    named = [x.flatten().tolist() for x in (sources.keys, *targets) if x is not None]
    at = [piece for piece, addresses in enumerate(zip(*named, strict=True)) if all(addresses)]
    sums, source, *lines = (
        table.flatten()[at].tolist()
        for table in (sources.checksums, sources.keys, sources.descriptors, sources.generations)
    )
    for kind, (table, size) in enumerate(zip(targets, shape.summed, strict=True)):
        if table is None or not any(sums):
            continue
        tail = 0 if kind else shape.tail_bytes
        copied = size - tail
        data = b"".join(
            ctypes.string_at(to, copied) + ctypes.string_at(start + copied, tail)
            for to, start in zip(table.flatten()[at].tolist(), source, strict=True)
        )
        bits = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(at), size)
        for piece, total, wanted in zip(at, checksums_of(bits, size).tolist(), sums, strict=True):
            if wanted and total != ctypes.c_int32.from_address(wanted + 8 + 4 * kind).value:
                row = (first + piece // k) * shape.pages_max
                number = (row + int(pages.flatten()[piece])) * 2 + kind
                found[piece // k // heads].clamp_(min=number + 1)
    for piece, descriptor, generation in zip(at, *lines, strict=True):
        version = ctypes.c_int64.from_address(descriptor).value if descriptor else 0
        if version >> 8 & (1 << 56) - 1 != generation or version & 255 not in (1, 2):
            found[piece // k // heads] = STALE
