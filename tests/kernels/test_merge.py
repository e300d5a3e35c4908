"""Partial results merge into the whole, also with the near-data engine's part of a real pool."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cxlkv import CXLPool
from cxlkv.errors import BadArgumentError
from cxlkv.kernels import merge as subject
from cxlkv.kernels.attend import attend
from cxlkv.kernels.merge import merge
from cxlkv.ndp.engine import Budget
from tests.conftest import MakePool

from ..support import reference
from ..support.lengths import matrix

BROKEN = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", EPSILON, ids=["fp32", "fp16", "bf16"])


def expected(
    outs: list[torch.Tensor], lses: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of parts by their weights, which is as it is written."""
    weights = torch.stack(lses).double().exp()
    parts = torch.stack([part.double() for part in outs])
    parts[weights == 0] = 0
    total = weights.sum(0)
    out = (weights[..., None] * parts).sum(0) / total.clamp(min=1e-300)[..., None]
    return torch.where((total == 0)[..., None], 0, out), total.log()


def parts_of(count: int, dtype: torch.dtype, seed: int, dim: int = 40) -> tuple[
    list[torch.Tensor], list[torch.Tensor]
]:  # fmt: skip
    """Parts of 3 x 5 rows; some saw nothing and have NaN where nobody looks, one row nowhere."""
    rng = torch.Generator().manual_seed(seed)
    outs = [torch.randn(3, 5, dim, generator=rng).to(dtype) for _ in range(count)]
    lses = [4 * torch.randn(3, 5, generator=rng) for _ in range(count)]
    for index, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        for row in (0, 1 + index % 4):
            lse[2, row] = -math.inf
            part[2, row] = math.nan
    return outs, lses


def close(
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    assert found[0].dtype == dtype
    torch.testing.assert_close(
        found[0].cpu().double(), wanted[0], rtol=0, atol=4 * EPSILON[dtype], equal_nan=True
    )
    torch.testing.assert_close(
        found[1].cpu().double(), wanted[1], rtol=1e-6, atol=4e-6, equal_nan=True
    )


@matrix(count=[1, 2, 3, 4, 5, 70], stacked=[False, True], dtype=EPSILON)
def test_parts_merge(
    count: int, stacked: bool, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    outs, lses = parts_of(count, dtype, seed)
    there = [part.to(device) for part in outs], [lse.to(device) for lse in lses]
    found = merge(torch.stack(there[0]), torch.stack(there[1])) if stacked else merge(*there)
    close(found, expected(outs, lses), torch.float32)
    assert found[1][2, 0] == -math.inf
    assert not found[0][2, 0].any()


@DTYPES
def test_the_result_has_the_dtype_asked_for(
    dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    outs, lses = parts_of(2, torch.float32, seed, dim=136)
    outs[1] = outs[1].to(dtype)
    wanted = expected(outs, lses)
    there = [part.to(device) for part in outs], [lse.to(device) for lse in lses]
    close(merge(*there, dtype), wanted, dtype)
    out = torch.full((3, 5, 136), math.nan, dtype=dtype, device=device)
    lse = torch.full((3, 5), math.nan, device=device)
    found = merge(*there, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    close(found, wanted, dtype)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_reference_merges(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    outs, lses = parts_of(count, torch.float32, seed)
    close(merge(outs, lses), expected(outs, lses), torch.float32)


@BROKEN
@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_part_breaks_its_row_only(
    count: int, broken: float, device: torch.device, seed: int
) -> None:
    outs, lses = parts_of(count, torch.float32, seed)
    lses[1][0, 3] = broken
    outs[1][1, 2, 7] = math.nan
    found, lse = merge([part.to(device) for part in outs], [lse.to(device) for lse in lses])
    rows = torch.zeros(3, 5, dtype=torch.bool)
    rows[0, 3] = True
    assert lse.isnan().cpu().equal(rows)
    channels = rows[..., None].repeat(1, 1, 40)
    channels[1, 2, 7] = True
    assert found.isnan().cpu().equal(channels)


def test_no_rows(device: torch.device) -> None:
    part = torch.zeros(0, 16, device=device)
    out, lse = merge([part, part], [part[:, 0], part[:, 0]])
    assert (out.shape, lse.shape) == ((0, 16), (0,))


def test_wrong_arguments_are_named() -> None:
    out, lse = torch.zeros(3, 8), torch.zeros(3)
    wrong: list[tuple[str, tuple[object, ...]]] = [
        ("0 partial results", ([], [])),
        ("2 partial results with 1", ([out, out], [lse])),
        (r"outs\[1\] is", ([out, out[:2]], [lse, lse])),
        (r"outs\[0\] is", ([out.int()], [lse])),
        (r"lses\[0\] is", ([out], [lse.double()])),
        (r"lses\[0\] is", ([out], [out])),
        ("dtype is", ([out], [lse], torch.int32)),
    ]
    for message, given in wrong:
        with pytest.raises(BadArgumentError, match=message):
            merge(*given)  # type: ignore[arg-type]
    with pytest.raises(BadArgumentError, match="out is"):
        merge([out], [lse], out=out[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_near_engine_and_the_kernel_share_the_pages(
    dtype: str, make_pool: MakePool, device: torch.device, rng: np.random.Generator
) -> None:
    """The engine attends to some pages in the pool, the kernel to copies of the others."""
    pool = make_pool(kv_heads=2, head_dim=16, value_head_dim=8, page_tokens=4, dtype=dtype)
    kept = getattr(torch, dtype)
    keys, values, q = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)).to(kept)
        for shape in ((39, 2, 16), (39, 2, 8), (2, 4, 16))
    )
    starts = np.array([0, 2], np.int32)
    out, lse = _both(pool, keys, values, q, starts, device)
    wanted = reference.attend(
        [keys.float().numpy()], [values.float().numpy()], q.float().numpy(), starts, page_tokens=4
    )
    wanted_out, wanted_lse = map(torch.from_numpy, wanted)
    largest = float(wanted_out.abs().max())
    assert float((out.cpu().double() - wanted_out).abs().max()) <= 2 * EPSILON[kept] * largest
    assert float((lse.cpu().double() - wanted_lse).abs().max()) <= 1e-5


def _both(
    pool: CXLPool,
    keys: torch.Tensor,
    values: torch.Tensor,
    q: torch.Tensor,
    starts: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequence = pool.sequence()
    sequence.append(0, keys, values)
    batch = pool.batch([sequence])
    budget = Budget(pages=4, sinks=0, recent=0, per="sequence")
    near = batch.select(0, q, starts, budget, method="exact")
    near_out, near_lse = batch.attend(0, q, starts, near)
    others = np.stack([np.setdiff1d(np.arange(10), head) for head in near.pages[0]])
    rest = replace(near, pages=others[None].astype(np.int32))
    shape = (1, *others.shape, 4)
    pieces = torch.empty(*shape, 16, dtype=q.dtype), torch.empty(*shape, 8, dtype=q.dtype)
    batch.fetch(0, rest, pieces)
    sequence.release()
    held = [part.to(device) for part in pieces]
    keys_at, values_at = [
        torch.tensor([[[page.data_ptr() for page in head] for head in part[0]]], device=device)
        for part in held
    ]
    far_out, far_lse = attend(
        q[None].to(device),
        keys_at,
        values_at,
        torch.from_numpy(rest.pages).to(device),
        torch.tensor([[37, 38]], device=device),
        page_tokens=4,
        value_dim=8,
    )
    found = [torch.as_tensor(near_out).to(device), torch.as_tensor(near_lse).to(device)]
    return merge([found[0], far_out[0]], [found[1], far_lse[0]])
