"""Loads are cut into pieces that the host has memory for."""

from __future__ import annotations

import pytest

from cxlkv.adapters.vllm.loading import pieces


@pytest.mark.parametrize(
    ("counts", "most", "wanted"),
    [
        ([], 3, []),
        ([0, 2], 3, [[(1, range(2))]]),
        ([3], 3, [[(0, range(3))]]),
        ([2, 5], 3, [[(0, range(2)), (1, range(1))], [(1, range(1, 4))], [(1, range(4, 5))]]),
        ([1, 0, 1], 1, [[(0, range(1))], [(2, range(1))]]),
    ],
)
def test_pieces_have_all_blocks_in_order(
    counts: list[int], most: int, wanted: list[list[tuple[int, range]]]
) -> None:
    assert list(pieces(counts, most)) == wanted
