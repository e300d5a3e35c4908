"""The GPU of this machine, for `cxlkv advise`: its link, and its own memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from cxlkv.bench.result import Result
from cxlkv.errors import UnsupportedError

DEVICE_FILE = Path("/dev/nvidiactl")  # without it there is no need to load torch
COPY_BYTES = 256 << 20
ROUNDS = 5


class Gpu(NamedTuple):
    """link_bytes_per_s: from pinned memory of this host; bytes_per_s: of the GPU's own memory."""

    name: str
    link_bytes_per_s: float
    bytes_per_s: float


def run(result: Result, device: str = "cuda", copy_bytes: int = COPY_BYTES) -> Gpu:
    """Times of copies into it and within it. Raises UnsupportedError that says what is missing."""
    if device == "cuda" and not DEVICE_FILE.exists():
        raise UnsupportedError("this machine has no NVIDIA GPU")
    try:
        import torch
    except ModuleNotFoundError:
        raise UnsupportedError("torch is not installed, which measures a GPU") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device")
    is_cuda = device == "cuda"
    host = torch.zeros(copy_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    one, other = (torch.empty(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def seconds(to: torch.Tensor, source: torch.Tensor) -> list[float]:
        taken = []
        for _ in range(ROUNDS + 1):  # the first one wakes the device
            began = time.perf_counter()
            to.copy_(source)
            if is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return taken[1:]

    link = [copy_bytes / s for s in seconds(one, host)]
    own = [2 * copy_bytes / s for s in seconds(other, one)]  # read and written
    return Gpu(
        torch.cuda.get_device_name() if is_cuda else device,
        result.measure("gpu_link", link, "bytes/s").median,
        result.measure("gpu_memory", own, "bytes/s").median,
    )
