"""Checks of fetched pieces, against the core's CRCs and literal descriptors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv import _core
from cxlkv.errors import BadArgumentError
from cxlkv.kernels.checks import (
    Shape,
    Wrong,
    check_pieces,
    check_pieces_reference,
)
from cxlkv.kernels.sources import STALE, Sources

REQUESTS, HEADS, K, PAGES_MAX, LAYER = 2, 2, 5, 50, 3
COUNT = REQUESTS * HEADS * K
GENERATION = 2**40 + 7
SHAPES = [
    Shape(256, 128, 0, PAGES_MAX),
    Shape(560, 1040, 4, PAGES_MAX),
    Shape(512, 512, 4, PAGES_MAX),  # the tail begins a row of lanes
    Shape(18432, 16, 0, PAGES_MAX),
]


class Fetched:
    """Every piece in the pool's memory and its copy on the device; every fourth was not missed."""

    def __init__(self, device: torch.device, seed: int, shape: Shape, *, values: bool = True):
        rng, self.device, self.shape = np.random.default_rng(seed), device, shape
        sizes = [size if i == 0 or values else 0 for i, size in enumerate(shape.summed)]
        self.pool = [
            self._host(torch.from_numpy(rng.integers(0, 256, (COUNT, size + 60), np.uint8)))
            for size in sizes
        ]
        self.sums = self._host(torch.zeros((COUNT, 4), dtype=torch.int32))
        for kind, size in enumerate(sizes):
            made = [_core.crc32c(row[:size]) for row in self.pool[kind].numpy()]
            self.sums[:, 2 + kind] = torch.from_numpy(np.array(made, np.uint32).view(np.int32))
        self.descriptors = self._host(torch.full((COUNT,), GENERATION << 8 | 2))
        copied = (shape.key_bytes, shape.value_bytes)
        self.slots = [self.pool[i][:, : copied[i]].to(device, copy=True) for i in range(2)]
        self.generations = torch.full((COUNT,), GENERATION)
        self.missed = torch.arange(COUNT) % 4 != 0
        self.has_values, self.has_sums = values, True
        self.pages = torch.arange(COUNT, dtype=torch.int32, device=device).view(REQUESTS, HEADS, K)

    def _host(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def _table(self, rows: torch.Tensor, *, there: bool = True) -> torch.Tensor:
        at = rows.data_ptr() + torch.arange(COUNT) * (rows[0].numel() * rows.element_size())
        table = torch.where(self.missed & there, at, 0).view(REQUESTS, HEADS, K)
        return table.to(self.device)

    def found(self, by: str = "kernel") -> list[int]:
        keys, values, descriptors = (self._table(rows) for rows in (*self.pool, self.descriptors))
        expected = torch.where(self.missed, self.generations, 0).view(REQUESTS, HEADS, K)
        sums = self._table(self.sums, there=self.has_sums)
        sources = Sources(keys, values, descriptors, expected.to(self.device), sums)
        values_at = self._table(self.slots[1]) if self.has_values else None
        targets = (self._table(self.slots[0]), values_at)
        out = torch.zeros(REQUESTS, dtype=torch.int64, device=self.device)
        asked = (sources, targets, self.pages, out, self.shape)
        if by == "kernel":
            check_pieces(*asked, LAYER)
        else:
            check_pieces_reference(*asked, LAYER * REQUESTS * HEADS)
        return [int(x) for x in out.tolist()]


@pytest.mark.parametrize("by", ["kernel", "reference"])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_changed_bit_is_found(
    device: torch.device, seed: int, shape: Shape, values: bool, by: str
) -> None:
    """In the first and the last byte of a copy, and in a tail, which is read in the pool."""
    if by == "reference" and device.type != "cpu":
        pytest.skip("it reads addresses of this process")
    fetched = Fetched(device, seed, shape, values=values)
    assert fetched.found(by) == [0, 0]
    for kind in range(1 + values):
        for piece, byte in ((1, 0), (COUNT - 1, -1)):
            fetched.slots[kind][piece, byte] ^= 16
            found = fetched.found(by)
            fetched.slots[kind][piece, byte] ^= 16
            request, head = divmod(piece // K, HEADS)
            wanted = Wrong(LAYER, request, head, piece, "KV"[kind])
            assert Wrong.of(found[request] - 1, shape, REQUESTS, HEADS) == wanted
            assert found[1 - request] == 0
    if shape.tail_bytes:
        fetched.pool[0][2, shape.key_bytes + 3] ^= 1
        found = fetched.found(by)
        assert found[0] > 0
        assert found[1] == 0
        fetched.pool[0][2, shape.key_bytes + 3] ^= 1
    fetched.slots[0][4] ^= 1  # a hit: nothing was fetched into it
    fetched.sums[8] += 1
    assert fetched.found(by) == [0, 0]
    fetched.slots[0][5] ^= 1
    fetched.has_sums = False
    assert fetched.found(by) == [0, 0]


@pytest.mark.parametrize("by", ["kernel", "reference"])
def test_a_page_that_is_another_is_stale(device: torch.device, seed: int, by: str) -> None:
    if by == "reference" and device.type != "cpu":
        pytest.skip("it reads addresses of this process")
    fetched = Fetched(device, seed, SHAPES[0])
    for generation, state, stale in (
        (GENERATION, 1, 0),
        (GENERATION, 0, 1),
        (GENERATION, 3, 1),
        (GENERATION + 1, 2, 1),
        (GENERATION + 2**54, 2, 1),
    ):
        fetched.descriptors[6] = generation << 8 | state
        fetched.descriptors[4] = 0  # of a hit
        assert fetched.found(by) == [STALE * stale, 0]
    for piece in (7, 11):
        fetched.slots[0][piece, 3] ^= 1
        fetched.slots[1][piece, 3] ^= 1
    stale, number = fetched.found(by)
    assert stale == STALE
    assert Wrong.of(number - 1, SHAPES[0], REQUESTS, HEADS) == (LAYER, 1, 0, 11, "V")


def test_other_tables_are_refused(device: torch.device, seed: int) -> None:
    fetched = Fetched(device, seed, SHAPES[0])
    fetched.pages = fetched.pages[:, :1].contiguous()
    with pytest.raises(BadArgumentError, match="keys is"):
        fetched.found()
