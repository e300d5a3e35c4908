"""`cxlkv tune --gpu`: below which size, and from how many pieces on, a kernel copies faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Mapping as Table
from dataclasses import dataclass

import numpy as np
import torch

from cxlkv.arrays import memory_of
from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError
from cxlkv.gpu.copier import Copier
from cxlkv.gpu.driver import driver_of
from cxlkv.gpu.mapping import Mapping
from cxlkv.layout import KVLayout
from cxlkv.ndp.tuning import GpuCopyConstants
from cxlkv.pool import CXLPool

KIB = 1 << 10
ALWAYS = 2**31 - 1
PLENTY = 0.95  # of the speed with the best number of programs: then no more SMs are taken
Point = tuple[int, int]  # pieces, and bytes of each


@dataclass(frozen=True)
class Size:
    """Pieces at random places of a pool in anonymous memory; all there are fit into it twice."""

    capacity: int = 1 << 30
    piece_kib: tuple[int, ...] = (1, 4, 8, 16, 24, 32, 48, 64, 128, 256)
    counts: tuple[int, ...] = (4, 8, 16, 32, 128, 1024)
    programs: tuple[int, ...] = (4, 8, 12, 16, 24, 32)
    rounds: int = 9
    repeat: int = 5


def run(result: Result, size: Size = Size(), device: str = "cuda") -> GpuCopyConstants:
    """Times of both ways at each point, queued and waited for as in use, and what follows.

    Raises UnsupportedError that says what is missing where there is no GPU.
    """
    where = torch.device(device)
    name = "cpu"
    if where.type == "cuda":
        driver_of(where)
        if not torch.cuda.is_available():
            raise UnsupportedError(f"{device}: torch sees no CUDA device")
        name = torch.cuda.get_device_name(where)
    layout = KVLayout(layers=1, kv_heads=8, head_dim=128)
    with CXLPool.create(
        "anonymous:", layout=layout, capacity=size.capacity, checksum=False
    ) as pool:
        mapping = Mapping(pool, where)
        most = max(size.counts), max(size.piece_kib) * KIB
        target = torch.empty(min(math.prod(most), size.capacity // 2), dtype=torch.uint8)
        target = target.to(where)
        sms = _programs(result, size, mapping, target)
        kernel, dma = _both_ways(result, size, mapping, target, sms)
        mapping.close()
    below = piece_bytes_below(kernel, dma)
    found = GpuCopyConstants(below, pieces_from(kernel, dma, below), sms, name)
    result.measure("kernel_piece_bytes_below", [found.kernel_piece_bytes_below], "bytes")
    result.measure("kernel_pieces_from", [found.kernel_pieces_from], "pieces")
    result.measure("kernel_sms", [found.kernel_sms], "SMs")
    result.checks["measured"] = True
    return found


def _both_ways(
    result: Result, size: Size, mapping: Mapping, target: torch.Tensor, sms: int
) -> tuple[dict[Point, float], dict[Point, float]]:
    """Microseconds of the kernel, and of DMA."""
    kernel: dict[Point, float] = {}
    dma: dict[Point, float] = {}
    forced = {"kernel": GpuCopyConstants(ALWAYS, 0, sms), "dma": GpuCopyConstants(0)}
    for piece in (kib * KIB for kib in size.piece_kib):
        for count in size.counts:
            if count * piece > target.numel():
                continue
            point = (count, piece)
            ways = {way: _copy(mapping, target, point, given) for way, given in forced.items()}
            samples = interleave(ways, size.rounds, size.repeat)
            median = result.times(samples, "us", f"{{}}_{piece // KIB}_kib_x{count}")
            kernel[point], dma[point] = median["kernel"], median["dma"]
    return kernel, dma


def _programs(result: Result, size: Size, mapping: Mapping, target: torch.Tensor) -> int:
    """The fewest programs that are about as fast as the best number of them, pieces of 4 KiB."""
    point = (min(max(size.counts), target.numel() // (4 * KIB)), 4 * KIB)
    ways = {
        str(programs): _copy(mapping, target, point, GpuCopyConstants(ALWAYS, 0, programs))
        for programs in size.programs
    }
    samples = interleave(ways, size.rounds, size.repeat)
    medians = result.times(samples, "us", "kernel_with_{}_programs")
    return fewest({int(programs): median for programs, median in medians.items()})


def _copy(
    mapping: Mapping, target: torch.Tensor, point: Point, constants: GpuCopyConstants
) -> Callable[[], None]:
    count, piece = point
    places = np.random.default_rng(7).permutation(mapping.size // (2 * piece))[:count]
    source_at = mapping.device_address + torch.from_numpy(places.astype(np.int64)) * (2 * piece)
    target_at = memory_of(target, "target") + torch.arange(count, dtype=torch.int64) * piece
    copier = Copier(mapping, constants)
    return lambda: copier.copy(source_at, target_at, piece).synchronize()


def fewest(medians: Table[int, float]) -> int:
    best = min(medians.values())
    return min(programs for programs, time in medians.items() if best >= PLENTY * time)


def piece_bytes_below(kernel: Table[Point, float], dma: Table[Point, float]) -> int:
    """The size from which on the kernel is never faster, at the most pieces that were tried; twice
    the largest that was tried if it is faster even there."""
    found = 2 * max(piece for _, piece in kernel)
    for piece in sorted({piece for _, piece in kernel}, reverse=True):
        point = max(count for count, size in kernel if size == piece), piece
        if kernel[point] < dma[point]:
            break
        found = piece
    return found


def pieces_from(kernel: Table[Point, float], dma: Table[Point, float], below: int) -> int:
    """The number of pieces from which on the kernel is faster, over all sizes below: in the
    geometric mean. One more than was tried if it is not."""
    found = 1 + max(count for count, _ in kernel)
    for count in sorted({count for count, _ in kernel}, reverse=True):
        points = [point for point in kernel if point[0] == count and point[1] < below]
        if sum(math.log(kernel[point] / dma[point]) for point in points) >= 0:
            break
        found = count
    return found
