"""Sizes: what people write is read exactly or refused, and comes back readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlkv.config import format_bytes, parse_bytes
from cxlkv.errors import BadArgumentError


@pytest.mark.parametrize(
    ("size", "expected_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("64B", 64),
        ("16KiB", 16 << 10),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("3TiB", 3 << 40),
        ("1GB", 10**9),
        ("0.5MB", 500_000),
    ],
)
def test_sizes_are_read_exactly(size: str | int, expected_bytes: int) -> None:
    assert parse_bytes(size) == expected_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "2G", "2 bananas", "-1GiB", "1e9", "0x10", "2GiB 1", "0.3B", -1, True, 1.5]
)
def test_what_is_no_size_is_refused_as_a_value_error(size: str | int) -> None:
    with pytest.raises(BadArgumentError) as caught:
        parse_bytes(size)
    assert isinstance(caught.value, ValueError)
    assert str(size) in str(caught.value)


def test_a_size_of_many_digits_loses_none() -> None:
    assert parse_bytes("9007199254740993B") == 9007199254740993


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_are_shown_short(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_what_is_shown_reads_back_to_four_digits(size_bytes: int) -> None:
    # Four digits may not be whole bytes ("1.001 KiB"), so the number is read apart from its unit.
    number, unit = format_bytes(size_bytes).split()
    assert abs(float(number) * parse_bytes(f"1{unit}") - size_bytes) <= size_bytes * 0.0005
