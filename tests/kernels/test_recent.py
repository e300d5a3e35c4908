"""Rows into the ring of recent pages, against indexing."""

from __future__ import annotations

import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.recent import append_rows, append_rows_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 40, 64])
def test_rows_go_to_their_places_and_nowhere_else(
    device: torch.device, seed: int, dtype: torch.dtype, dim: int
) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(3, 2, 5, dim).to(dtype).to(device)
    positions = torch.tensor([[7, 8], [-1, -1], [100, 101]], device=device)
    ring = torch.full((3, 5, 2, 4, dim), torch.nan, dtype=dtype, device=device)
    wanted = ring.clone()
    append_rows(rows, ring, positions)
    append_rows_reference(rows, wanted, positions)
    assert torch.equal(ring.nan_to_num(99), wanted.nan_to_num(99))
    assert torch.equal(ring[0, :, 1, 3], rows[0, 0])  # token 7: page 1, row 3
    assert torch.equal(ring[0, :, 0, 0], rows[0, 1])  # token 8: page 2, slot 0
    assert ring[1].isnan().all()
    assert int((~ring.isnan()).sum()) == 4 * 5 * dim


def test_strided_rows_of_one_projection(device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    both = torch.randn(2, 1, 3, 2, 16, device=device)  # K and V side by side
    ring = torch.zeros(2, 3, 3, 4, 16, device=device)
    append_rows(both[:, :, :, 1], ring, torch.tensor([[5], [2]], device=device))
    assert torch.equal(ring[0, :, 1, 1], both[0, 0, :, 1])
    assert torch.equal(ring[1, :, 0, 2], both[1, 0, :, 1])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    ring = torch.zeros(2, 3, 3, 4, 16, device=device)
    positions = torch.zeros(2, 1, dtype=torch.int64, device=device)
    with pytest.raises(BadArgumentError, match="do not fit a ring"):
        append_rows(torch.zeros(2, 1, 3, 8, device=device), ring, positions)
    with pytest.raises(BadArgumentError, match="positions are int64"):
        append_rows(torch.zeros(2, 1, 3, 16, device=device), ring, positions.int())
