"""Rotations, held to sums of products with the matrix that tests/support has."""

from __future__ import annotations

import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import rotate as subject
from cxlkv.kernels.rotate import rotate, rotate_reference

from ..support import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dim", [1, 3, 16, 80, 128, 256, 1000])
def test_rotate_and_back(dim: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn((3, 7, dim), generator=rng).to(dtype)
    found = rotate(rows.to(device))
    wanted = torch.from_numpy(reference.hadamard(rows.double().numpy()))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate_reference(rows).double(), wanted, rtol=1e-5, atol=1e-5)
    back = rotate_reference(found.cpu(), back=True)
    assert rotate(found, found, back=True) is found
    torch.testing.assert_close(found.cpu(), rows.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(back, rows.float(), rtol=1e-5, atol=1e-5)


def test_without_a_kernel_it_is_the_reference(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(subject, "runs_triton", lambda device: False)
    rows = torch.randn((5, 24), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(rotate(rotate(rows), back=True), rows, rtol=1e-5, atol=1e-5)


def test_there_may_be_no_rows(device: torch.device) -> None:
    assert rotate(torch.zeros((0, 16), device=device)).shape == (0, 16)


@pytest.mark.parametrize(
    ("rows", "out"),
    [
        (torch.zeros(2, 16, dtype=torch.int32), None),
        (torch.zeros(16, 2).T, None),
        (torch.zeros(2, 1025), None),
        (torch.zeros(2, 16), torch.zeros(2, 16).half()),
        (torch.zeros(2, 16), torch.zeros(2, 17)),
    ],
    ids=["whole", "strided", "long", "dtype", "shape"],
)
def test_other_rows_are_refused(rows: torch.Tensor, out: torch.Tensor | None) -> None:
    with pytest.raises(BadArgumentError):
        rotate(rows, out)
