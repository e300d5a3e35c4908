"""Copies between scattered addresses, against slices of the same memory taken one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cxlkv.errors import BadArgumentError
from cxlkv.kernels import reference_copies
from cxlkv.kernels.copies import (
    FRAGMENT_BYTES_MAX,
    copy_fragments,
)

GUARD = 0xA5
GAP = 32  # guard bytes between targets


class Memory:
    """Bytes at known addresses: host memory that the device reads, or the device's own."""

    def __init__(self, device: torch.device, size: int, *, on_host: bool = False) -> None:
        self.device = device
        place = torch.device("cpu") if on_host else device
        room = torch.full((size + 64,), GUARD, dtype=torch.uint8, device=place)
        if on_host and device.type == "cuda":
            room = room.pin_memory()
        first = -room.data_ptr() % 64
        self.bytes = room[first : first + size]

    def at(self, offsets: npt.NDArray[np.int64]) -> torch.Tensor:
        """Addresses of these offsets, as a table on the device; a negative offset is 0."""
        table = np.where(offsets < 0, 0, self.bytes.data_ptr() + offsets).astype(np.int64)
        return torch.from_numpy(table).to(self.device)

    def fill(self, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        data = rng.integers(0, 256, len(self.bytes), dtype=np.uint8)
        self.bytes.copy_(torch.from_numpy(data))
        return data

    def read(self) -> npt.NDArray[np.uint8]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.bytes.cpu().numpy().copy()


def scattered(
    rng: np.random.Generator, count: int, size: int, align: int, *, missing: float = 0.2
) -> tuple[npt.NDArray[np.int64], int]:
    """Offsets of `count` fragments in a random order with gaps, and where the last one ends.

    Some are -1: nothing there.
    """
    step = -(-(size + GAP) // align) * align
    offsets = rng.permutation(count) * step + align
    return np.where(rng.random(count) < missing, -1, offsets), (count + 1) * step + align


@pytest.mark.parametrize(
    ("fragment_bytes", "count", "programs"),
    [
        (1, 9, None),
        (2, 5, 2),
        (3, 40, 3),
        (656, 33, 2),  # more rows than a tile holds
        (1152, 7, None),
        (20480, 5, 1),  # large tiles: one program takes several, fragments cross them
        (4096 + 64, 17, 4),
        (4096 + 8, 3, 5),  # words of 8 bytes
        (36, 1, 1),  # words of 4 bytes
    ],
)
def test_fragments_go_where_the_tables_say(
    device: torch.device,
    rng: np.random.Generator,
    fragment_bytes: int,
    count: int,
    programs: int | None,
) -> None:
    align = int(np.gcd(fragment_bytes, 16))
    source_offsets, source_size = scattered(rng, count, fragment_bytes, align)
    target_offsets, target_size = scattered(rng, count, fragment_bytes, align)
    source = Memory(device, source_size, on_host=True)
    target = Memory(device, target_size)
    check_copies(rng, source, target, (source_offsets, target_offsets), fragment_bytes, programs)


def check_copies(
    rng: np.random.Generator,
    source: Memory,
    target: Memory,
    offsets: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    fragment_bytes: int,
    programs: int | None,
) -> int:
    """How many were copied; all other bytes of both stay what they were."""
    data = source.fill(rng)
    wanted, copied = target.read(), 0
    for there, here in zip(*offsets, strict=True):
        if there >= 0 and here >= 0:
            wanted[here : here + fragment_bytes] = data[there : there + fragment_bytes]
            copied += 1
    tables = source.at(offsets[0]), target.at(offsets[1])
    copy_fragments(*tables, fragment_bytes, programs=programs)
    np.testing.assert_array_equal(target.read(), wanted, err_msg=f"{fragment_bytes} bytes")
    np.testing.assert_array_equal(source.read(), data)
    return copied


def test_random_copies_agree_with_slices(device: torch.device, rng: np.random.Generator) -> None:
    copied = 0
    for _ in range(25):
        fragment_bytes = int(rng.integers(1, 3000)) * int(rng.choice([1, 4, 16]))
        count = int(rng.integers(1, 12))
        align = int(np.gcd(fragment_bytes, 16))
        source_offsets, source_size = scattered(rng, count, fragment_bytes, align)
        target_offsets, target_size = scattered(rng, count, fragment_bytes, align)
        source_offsets = rng.choice(source_offsets, count)  # the same source more than once
        source = Memory(device, source_size, on_host=True)
        target = Memory(device, target_size)
        programs = int(rng.integers(1, 6))
        offsets = source_offsets, target_offsets
        copied += check_copies(rng, source, target, offsets, fragment_bytes, programs)
    assert copied > 25


def test_a_scatter_puts_back_what_a_gather_fetched(
    device: torch.device, rng: np.random.Generator
) -> None:
    """Tables of any shape: a list of pages for each head."""
    offsets, size = scattered(rng, 12, 512, 64, missing=0)
    pool = Memory(device, size, on_host=True)
    pages = pool.at(offsets).view(2, 2, 3)
    slots = Memory(device, 12 * 512)
    slot_at = slots.at(np.arange(12) * 512).view(2, 2, 3)
    before = pool.fill(rng)
    copy_fragments(pages, slot_at, 512)
    slots.read()  # waits: the host must not write over what is still being fetched
    pool.bytes.fill_(GUARD)
    copy_fragments(slot_at, pages, 512)
    after = pool.read()
    for offset in offsets:
        np.testing.assert_array_equal(after[offset : offset + 512], before[offset : offset + 512])
        after[offset : offset + 512] = GUARD
    assert (after == GUARD).all()


def test_a_table_of_zeros_and_an_empty_one_copy_nothing(device: torch.device) -> None:
    target = Memory(device, 64)
    nothing = torch.zeros(4, dtype=torch.int64, device=device)
    copy_fragments(nothing, target.at(np.arange(4) * 16), 16)
    copy_fragments(target.at(np.arange(4) * 16), nothing, 16)
    copy_fragments(nothing[:0], nothing[:0], 16)
    assert (target.read() == GUARD).all()


def test_the_references_agree_with_the_kernels(rng: np.random.Generator) -> None:
    """What CPU tensors run without the interpreter, on the same memory."""
    device = torch.device("cpu")
    offsets, size = scattered(rng, 9, 656, 16)
    source = Memory(device, size)
    source.fill(rng)
    results = []
    for module in (None, reference_copies):
        copied = Memory(device, 9 * 656)
        slot_at = copied.at(np.arange(9) * 656)
        run = module.copy_fragments if module else copy_fragments
        run(source.at(offsets), slot_at, 656)
        results.append(copied.read())
    np.testing.assert_array_equal(results[0], results[1])


def test_bad_arguments_are_named(device: torch.device) -> None:
    table = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(BadArgumentError, match="target_at is"):
        copy_fragments(table, table[:3], 16)
    with pytest.raises(BadArgumentError, match="source_at is"):
        copy_fragments(table[::2], table[::2], 16)
    with pytest.raises(BadArgumentError, match=r"torch\.int32"):
        copy_fragments(table.int(), table.int(), 16)
    for wrong in (0, -16, FRAGMENT_BYTES_MAX + 1):
        with pytest.raises(BadArgumentError, match="fragment_bytes"):
            copy_fragments(table, table, wrong)
    with pytest.raises(BadArgumentError, match="programs is 0"):
        copy_fragments(table, table, 16, programs=0)
    if device.type == "cuda":
        with pytest.raises(BadArgumentError, match="different devices"):
            copy_fragments(table, table.cpu(), 16)
