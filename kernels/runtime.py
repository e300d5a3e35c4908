"""Says whether Triton runs a call, and checks what all wrappers want of their tensors."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch

from cxlkv.arrays import check_memory
from cxlkv.errors import BadArgumentError, UnsupportedError

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Triton's interpreter runs the kernels, on CPU tensors; settled when they are imported."""


def runs_triton(device: torch.device) -> bool:
    """True: the kernel; False: the torch reference, for CPU tensors without the interpreter.

    Raises UnsupportedError for a GPU without Triton, and for devices that are neither.
    """
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda":
        raise UnsupportedError(f"tensors on {device}: cpu and cuda are supported")
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError("tensors on a GPU need Triton: pip install 'cxlkv[gpu]'")
    return True


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device.index)  # a number, which torch takes faster


def one_device(**tensors: torch.Tensor | None) -> torch.device:
    """The device of all tensors given by name; raises BadArgumentError when they differ, and for
    what a kernel would read or write wrongly by its address."""
    found = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(found.values())) != 1:
        raise BadArgumentError(f"tensors lie on different devices: {found}")
    check_memory(tensors)
    return next(iter(found.values()))


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Contiguous, of this dtype and shape; raises BadArgumentError."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tuple(tensor.shape) != shape:
        raise BadArgumentError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, wanted contiguous "
            f"{str(dtype).removeprefix('torch.')} {shape}"
        )


def check_table(name: str, table: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A table of addresses: int64, contiguous, of this shape; 0 is nothing there."""
    check_tensor(name, table, torch.int64, shape)
