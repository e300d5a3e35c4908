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
    check_generations,
    convert_pages,
    copy_fragments,
    unpack_rows,
)

GUARD = 0xA5
GAP = 32  # guard bytes between targets

pytestmark = pytest.mark.usefixtures("one_thread")


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


# What a page of a layer looks like on either side: (head_bytes, token_bytes) of rows of `row`.
LAYOUTS = {
    "ours": lambda heads, tokens, row: (tokens * row, row),
    "engine NHD": lambda heads, tokens, row: (row, heads * row),
    "engine, K beside V": lambda heads, tokens, row: (2 * row, 2 * heads * row),
    "padded": lambda heads, tokens, row: (tokens * (row + 16) + 64, row + 16),
}


@pytest.mark.parametrize(
    ("source_layout", "target_layout", "tokens", "heads", "dtype", "channels"),
    [
        ("engine NHD", "ours", 16, 2, torch.bfloat16, 128),
        ("ours", "engine NHD", 4, 3, torch.float16, 80),
        ("engine, K beside V", "padded", 3, 2, torch.float32, 36),
        ("padded", "engine, K beside V", 5, 1, torch.bfloat16, 20),  # words of 8 bytes
        ("engine NHD", "ours", 1, 4, torch.bfloat16, 33),  # rows of 66 bytes
        ("ours", "engine NHD", 2, 2, torch.float8_e4m3fn, 7),
        ("padded", "ours", 1, 1, torch.bfloat16, 576),
    ],
)
def test_pages_change_their_layout(
    device: torch.device,
    rng: np.random.Generator,
    source_layout: str,
    target_layout: str,
    tokens: int,
    heads: int,
    dtype: torch.dtype,
    channels: int,
) -> None:
    row = channels * dtype.itemsize
    strides = [LAYOUTS[name](heads, tokens, row) for name in (source_layout, target_layout)]
    reach = [row + (heads - 1) * head + (tokens - 1) * token for head, token in strides]
    pages, layers = 3, 2
    source_offsets, source_size = scattered(rng, pages * layers, reach[0], 16, missing=0.1)
    target_offsets, target_size = scattered(rng, pages * layers, reach[1], 16, missing=0.1)
    source = Memory(device, source_size, on_host=True)
    target = Memory(device, target_size)
    data = source.fill(rng)
    wanted = target.read()
    for there, here in zip(source_offsets, target_offsets, strict=True):
        for head in range(heads if there >= 0 and here >= 0 else 0):
            for token in range(tokens):
                begin = there + head * strides[0][0] + token * strides[0][1]
                end = here + head * strides[1][0] + token * strides[1][1]
                wanted[end : end + row] = data[begin : begin + row]
    convert_pages(
        source.at(source_offsets).view(pages, layers),
        target.at(target_offsets).view(pages, layers),
        tokens=tokens,
        heads=heads,
        row_bytes=row,
        source_strides=strides[0],
        target_strides=strides[1],
        programs=2,
    )
    np.testing.assert_array_equal(target.read(), wanted)


def packed_row(
    codes: torch.Tensor, scales: torch.Tensor, rotary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of 656 bytes, and the 576 channels that it stands for, one by one."""
    row = torch.cat([codes, scales.view(torch.uint8), rotary.view(torch.uint8)])
    channels = [
        codes[i : i + 1].view(torch.float8_e4m3fn).float() * scales[i // 128] for i in range(512)
    ]
    return row, torch.cat([torch.cat(channels).bfloat16(), rotary])


def test_packed_rows_are_widened(device: torch.device, rng: np.random.Generator) -> None:
    """Each of the 256 codes, NaN and denormals among them, and more rows than a tile holds."""
    rows, wanted = [], []
    for index in range(37):
        codes = torch.from_numpy(rng.integers(0, 256, 512, dtype=np.uint8))
        if index == 0:
            codes = torch.arange(512).to(torch.uint8)
        scales = torch.from_numpy(np.exp(rng.normal(0, 8, 4)).astype(np.float32))
        if index == 0:  # some products lie half-way between two bfloat16
            scales = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 5 * 2**-8])
        rotary = torch.from_numpy(rng.integers(0, 2**16, 64, dtype=np.uint16)).view(torch.bfloat16)
        row, channels = packed_row(codes, scales, rotary)
        rows.append(row)
        wanted.append(channels)
    offsets, size = scattered(rng, 37, 656, 16, missing=0)
    offsets[0] = max(offsets[0], 0)
    source = Memory(device, size, on_host=True)
    for offset, row in zip(offsets, rows, strict=True):
        source.bytes[offset : offset + 656] = row
    missing = rng.random(37) < 0.2
    missing[0] = False
    room = torch.full((39, 576), float("nan"), dtype=torch.bfloat16, device=device)
    unpack_rows(source.at(np.where(missing, -1, offsets)), room[1:38], programs=1)
    found = room.cpu()
    assert found[0].isnan().all()
    assert found[38].isnan().all()
    expected = torch.stack(wanted)
    expected[torch.from_numpy(missing)] = 0
    assert torch.equal(same_nan(found[1:38]), same_nan(expected))


def same_nan(rows: torch.Tensor) -> torch.Tensor:
    """The bits of bfloat16 rows, with one NaN for all in the channels that are computed."""
    return torch.cat([rows[:, :512].nan_to_num(nan=1.0), rows[:, 512:]], dim=1).view(torch.int16)


@pytest.mark.parametrize("given", [True, False])
def test_pages_of_another_generation_are_counted(
    device: torch.device, rng: np.random.Generator, given: bool
) -> None:
    states = [0, 1, 2, 3]
    generations = [0, 1, 5, 2**55, 2**56 - 1]
    cases = [
        (generation, state, expected, there)
        for generation in generations
        for state in states
        for expected in generations
        for there in (True, False)
    ]
    count = len(cases)
    descriptors = Memory(device, 64 * count, on_host=True)
    versions = np.array([generation << 8 | state for generation, state, _, _ in cases], np.uint64)
    lines = np.full((count, 8), 2**64 - 1, np.uint64)
    lines[:, 0] = versions
    descriptors.bytes.copy_(torch.from_numpy(lines.view(np.uint8).reshape(-1)))
    offsets = np.array([64 * i if case[3] else -1 for i, case in enumerate(cases)])
    expected = torch.tensor([case[2] for case in cases], device=device)
    wrong = sum(
        there and (generation != wanted or state not in (1, 2))
        for generation, state, wanted, there in cases
    )
    out = torch.full((1,), 77, dtype=torch.int32, device=device) if given else None
    found = check_generations(descriptors.at(offsets), expected, out=out)
    assert int(found) == wrong
    assert out is None or found is out
    again = check_generations(descriptors.at(offsets)[:0], expected[:0], out=out)
    assert int(again) == 0


def test_more_pages_than_one_turn_reads(device: torch.device) -> None:
    descriptors = Memory(device, 64, on_host=True)
    descriptors.bytes[:16] = torch.tensor([7 << 8 | 2, 8 << 8 | 2]).view(torch.uint8)
    offsets = np.where(np.arange(5000) % 4 == 0, 8, 0)
    expected = torch.full((5000,), 7, device=device)
    assert int(check_generations(descriptors.at(offsets), expected)) == 1250


def test_the_references_agree_with_the_kernels(rng: np.random.Generator) -> None:
    """What CPU tensors run without the interpreter, on the same memory."""
    device = torch.device("cpu")
    offsets, size = scattered(rng, 9, 656, 16)
    source = Memory(device, size)
    source.fill(rng)
    for offset in offsets[offsets >= 0]:
        source.bytes[offset + 512 : offset + 528] = torch.rand(4).view(torch.uint8)
    results = []
    for module in (None, reference_copies):
        copied, converted = Memory(device, 9 * 656), Memory(device, 9 * 656)
        out = torch.full((9, 576), float("nan"), dtype=torch.bfloat16)
        wrong = torch.zeros(1, dtype=torch.int32)
        slot_at = copied.at(np.arange(9) * 656)
        run = module.copy_fragments if module else copy_fragments
        run(source.at(offsets), slot_at, 656)
        change = module.convert_pages if module else convert_pages
        change(
            source.at(offsets),
            converted.at(np.arange(9) * 656),
            tokens=5,
            heads=4,
            row_bytes=32,
            source_strides=(160, 32),
            target_strides=(32, 128),
        )
        if module:
            module.unpack_rows(source.at(offsets), out)
            module.check_generations(source.at(offsets), torch.full((9,), 3), wrong)
        else:
            unpack_rows(source.at(offsets), out)
            check_generations(source.at(offsets), torch.full((9,), 3), out=wrong)
        results.append((copied.read(), converted.read(), same_nan(out).numpy(), wrong.numpy()))
    for kernel, reference in zip(*results, strict=True):
        np.testing.assert_array_equal(kernel, reference)


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
    with pytest.raises(BadArgumentError, match=r"target_strides .* overlap"):
        convert_pages(
            table,
            table,
            tokens=4,
            heads=2,
            row_bytes=32,
            source_strides=(128, 32),
            target_strides=(96, 32),
        )
    with pytest.raises(BadArgumentError, match="0 tokens"):
        convert_pages(
            table,
            table,
            tokens=0,
            heads=2,
            row_bytes=32,
            source_strides=(128, 32),
            target_strides=(128, 32),
        )
    rows = torch.zeros(4, 576, dtype=torch.bfloat16, device=device)
    with pytest.raises(BadArgumentError, match="out is"):
        unpack_rows(table, rows.half())
    with pytest.raises(BadArgumentError, match="out is"):
        unpack_rows(table, rows[:3])
    with pytest.raises(BadArgumentError, match="not contiguous"):
        unpack_rows(table, rows.t().contiguous().t())
    with pytest.raises(BadArgumentError, match="expected is"):
        check_generations(table, table[:1])
    with pytest.raises(BadArgumentError, match="out is"):
        check_generations(table, table, out=table)
