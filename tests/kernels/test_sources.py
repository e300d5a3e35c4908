"""Tables of addresses for a gather, against indexing."""

from __future__ import annotations

import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.sources import (
    PageRows,
    Sources,
    known_pages,
    known_pages_reference,
    page_sources,
    page_sources_reference,
)


def rows_of(device: torch.device) -> PageRows:
    """Two requests with 6 pages; page 5 of the first is not in far memory."""
    at = 2**40 + torch.arange(12, device=device).reshape(2, 6) * 4096
    keys = at.clone()
    keys[0, 5] = 0
    sums = at + 11
    sums[1, 1] = 0
    return PageRows(keys, at + 2048, at + 7, at + 9, sums)


def test_addresses_of_missed_pages_only(device: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(-1, 8, (2, 3, 50), generator=generator, dtype=torch.int32).to(device)
    missed = torch.randint(0, 2, (2, 3, 50), generator=generator, dtype=torch.int8).to(device)
    shape = (2, 3, 50)
    got, wanted = Sources.empty(shape, device), Sources.empty(shape, device)
    got.keys.fill_(-1)
    page_sources(
        pages,
        missed,
        rows_of(device),
        got,
        layer_offset=2**33,
        checksums_offset=48,
        piece_bytes=(512, 256),
    )
    page_sources_reference(pages, missed, rows_of(device), wanted, (2**33, 48), (512, 256))
    for name in Sources._fields:
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    asked = (missed == 1) & (pages >= 0) & (pages < 6)
    asked[0] &= pages[0] != 5
    assert torch.equal(got.keys != 0, asked)


def test_literal_addresses(device: torch.device) -> None:
    pages = torch.tensor([[[3, -1]], [[0, 6]]], dtype=torch.int32, device=device)
    missed = torch.ones(2, 1, 2, dtype=torch.int8, device=device)
    got = Sources.empty((2, 1, 2), device)
    page_sources(
        pages,
        missed,
        rows_of(device),
        got,
        layer_offset=64,
        checksums_offset=32,
        piece_bytes=(512, 256),
    )
    assert got.keys.tolist() == [[[2**40 + 3 * 4096 + 64, 0]], [[2**40 + 6 * 4096 + 64, 0]]]
    assert got.values[0, 0, 0] == 2**40 + 3 * 4096 + 2048 + 64
    assert got.descriptors[1, 0].tolist() == [2**40 + 6 * 4096 + 7, 0]


def test_tables_of_other_shapes_are_refused(device: torch.device) -> None:
    pages = torch.zeros(2, 1, 2, dtype=torch.int32, device=device)
    missed = torch.ones(2, 1, 2, dtype=torch.int8, device=device)
    out = Sources.empty((2, 1, 3), device)
    with pytest.raises(BadArgumentError, match=r"out\.keys"):
        page_sources(
            pages,
            missed,
            rows_of(device),
            out,
            layer_offset=0,
            checksums_offset=0,
            piece_bytes=(1, 1),
        )


def test_lists_that_are_not_contiguous_are_refused(device: torch.device) -> None:
    """The kernels count places in them: they would read their neighbours."""
    apart = torch.zeros(2, 1, 4, dtype=torch.int32, device=device)[:, :, ::2]
    pages, answered = apart.contiguous(), torch.ones(2, dtype=torch.int32, device=device)
    missed, out = pages.to(torch.int8), Sources.empty((2, 1, 2), device)
    rows = rows_of(device)
    with pytest.raises(BadArgumentError, match="pages is"):
        page_sources(
            apart, missed, rows, out, layer_offset=0, checksums_offset=0, piece_bytes=(1, 1)
        )
    with pytest.raises(BadArgumentError, match="missed is"):
        page_sources(
            pages,
            torch.zeros(2, 1, 4, dtype=torch.int8, device=device)[:, :, ::2],
            rows,
            out,
            layer_offset=0,
            checksums_offset=0,
            piece_bytes=(1, 1),
        )
    with pytest.raises(BadArgumentError, match="pages is"):
        known_pages(apart, rows, answered, pages)
    with pytest.raises(BadArgumentError, match="known is"):
        known_pages(pages, rows, answered, apart)
    with pytest.raises(BadArgumentError, match="answered is"):
        known_pages(pages, rows, answered[:0], pages)


@pytest.mark.parametrize("answered", [1, 0, -1])
def test_pages_that_a_gather_may_bring(device: torch.device, seed: int, answered: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(-2, 9, (2, 3, 70), generator=generator, dtype=torch.int32).to(device)
    state = torch.tensor([answered, 1], dtype=torch.int32, device=device)
    got, wanted = torch.full_like(pages, 77), torch.full_like(pages, 78)
    known_pages(pages, rows_of(device), state, got)
    known_pages_reference(pages, rows_of(device), state, wanted)
    assert torch.equal(got, wanted)
    left = [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}] if answered == 1 else [set(), set()]
    for request, expected in enumerate(left):
        assert set(got[request].flatten().tolist()) - {-1} == expected
