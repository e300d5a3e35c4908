"""Merges partial attentions exactly, by their log-sum-exp, wherever they were computed.

out = sum_i exp(lse_i) out_i / sum_i exp(lse_i): splits of one list, lists of different tiers, or
the part that the near-data engine computed where the pages lie (Batch.attend).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_attend as reference
from cxlkv.kernels.attend_shape import FLOATS
from cxlkv.kernels.runtime import check_tensor, current, one_device, runs_triton


def merge(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n partial results as one: (out, lse).

    outs: n tensors [..., dim] of any float dtypes, or one [n, ..., dim]; lses: likewise float32
    [...], natural logarithms, -inf where a part has seen nothing (its out is then ignored). All
    contiguous. A part whose lse is NaN makes the row NaN. Where no part has seen anything: 0, -inf.

    out: [..., dim] of `dtype`, float32 if None; lse: float32 [...]. One launch, without allocation
    if out and lse are given and do not overlap a part; a list of more than four is stacked first.
    Raises BadArgumentError.
    """
    given = list(outs)
    sums = list(lses)
    if not given or len(given) != len(sums):
        raise BadArgumentError(f"{len(given)} partial results with {len(sums)} lses")
    for index, (part, own) in enumerate(zip(given, sums, strict=True)):
        if part.dtype not in FLOATS or part.ndim == 0:
            raise BadArgumentError(f"outs[{index}] is {part.dtype} {tuple(part.shape)}")
        check_tensor(f"outs[{index}]", part, part.dtype, tuple(given[0].shape))
        check_tensor(f"lses[{index}]", own, torch.float32, tuple(part.shape[:-1]))
    device = one_device(
        **{f"outs[{i}]": part for i, part in enumerate(given)},
        **{f"lses[{i}]": own for i, own in enumerate(sums)},
        out=out,
        lse=lse,
    )
    dtype = dtype or (torch.float32 if out is None else out.dtype)
    if dtype not in FLOATS:
        raise BadArgumentError(f"dtype is {dtype}: float32, float16 or bfloat16")
    out = torch.empty_like(given[0], dtype=dtype) if out is None else out
    lse = torch.empty_like(sums[0]) if lse is None else lse
    check_tensor("out", out, dtype, tuple(given[0].shape))
    check_tensor("lse", lse, torch.float32, tuple(sums[0].shape))
    if not runs_triton(device):
        reference.merge(given, sums, out, lse)
    elif out.numel():
        _launch(given, sums, outs, lses, out, lse)
    return out, lse


def _launch(
    given: list[torch.Tensor],
    sums: list[torch.Tensor],
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    from cxlkv.kernels import merge_triton  # it needs Triton

    with current(out.device):
        if len(given) <= merge_triton.FEW:
            merge_triton.merge_few(given, sums, out, lse)
            return
        if not isinstance(outs, torch.Tensor) or not outs.is_contiguous():
            outs = torch.stack([part.float() for part in given])
        if not isinstance(lses, torch.Tensor) or not lses.is_contiguous():
            lses = torch.stack(sums)
        rows = lse.numel()
        merge_triton.merge_strided(outs, lses, out, lse, len(given), 1, rows)
