"""Rotates rows by signs and Walsh-Hadamard transforms, as a pool with an encoding does before it
makes codes: a query meets keys there, and what is summed of values comes back from there."""

from __future__ import annotations

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.reference_encode import hadamard, signs
from cxlkv.kernels.runtime import current, one_device, runs_triton

DIM_MAX = 1024


def rotate(
    rows: torch.Tensor, out: torch.Tensor | None = None, *, back: bool = False
) -> torch.Tensor:
    """float32 like rows [..., dim], which are contiguous and of any float; back: the inverse.

    out may be rows. Raises BadArgumentError.
    """
    dim = rows.shape[-1]
    if not 1 <= dim <= DIM_MAX or not rows.is_floating_point() or not rows.is_contiguous():
        raise BadArgumentError(
            f"rows {rows.dtype} {tuple(rows.shape)}: contiguous floats of 1 to {DIM_MAX} channels"
        )
    if out is None:
        out = torch.empty(rows.shape, device=rows.device)
    elif out.dtype != torch.float32 or out.shape != rows.shape or not out.is_contiguous():
        raise BadArgumentError(f"out is {out.dtype} {tuple(out.shape)}: contiguous float32 wanted")
    if not runs_triton(one_device(rows=rows, out=out)):
        out.copy_(rotate_reference(rows, back))
    elif rows.numel():
        from cxlkv.kernels.rotate_triton import launch

        with current(rows.device):
            launch(rows, out, back)
    return out


def prepare(dim: int, device: torch.device) -> None:
    """Bring the tables of rotations of so many channels to the device, which else a first call
    does: none may while a CUDA graph is captured."""
    if runs_triton(device):
        from cxlkv.kernels.rotate_triton import factors, shape_of

        factors(dim, shape_of(dim)[0], device)


def rotate_reference(rows: torch.Tensor, back: bool = False) -> torch.Tensor:
    """The same in torch: the transform is its own inverse, the signs come behind it then."""
    if not back:
        return hadamard(rows.float())
    change = signs(rows.shape[-1]).to(rows.device)
    return hadamard(rows.float() * change) * change
