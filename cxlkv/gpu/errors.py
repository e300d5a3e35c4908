"""Turns errors of torch and Triton into this project's exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cxlkv.errors import CXLKVError, GpuError, GpuMemoryError


@contextmanager
def gpu_errors(doing: str) -> Iterator[None]:
    """GpuMemoryError, or GpuError for a kernel that could not be compiled, launched or ended."""
    try:
        yield
    except CXLKVError:
        raise
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"{doing}: the GPU has too little memory ({_first_line(error)}). Ask for fewer "
            "requests or hot pages"
        ) from error
    except Exception as error:
        if not isinstance(error, RuntimeError) and type(error).__module__.split(".")[0] != "triton":
            raise
        raise GpuError(
            f"{doing}: {_first_line(error)}. After a fault in a kernel this process's CUDA context "
            "is lost: what was published is in the pool, start the process anew"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
