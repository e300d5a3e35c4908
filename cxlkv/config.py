"""Parses and prints sizes in bytes: "2GiB", "2 GiB"."""

from __future__ import annotations

import re
from fractions import Fraction

from cxlkv.errors import BadArgumentError

_UNIT_BYTES = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(size: str | int) -> int:
    """The number of bytes in `size`: a whole number, or text such as "2GiB", "512 MiB", "1.5gib".

    A bare "G" is refused, as half of the world means 10**9 by it and the other half 2**30.
    Raises BadArgumentError for anything that is not a whole number of bytes, 0 or more.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BadArgumentError(f"{size!r} is no size: give bytes as a number, or text like 2GiB")
    if isinstance(size, int):
        if size < 0:
            raise BadArgumentError(f"a size cannot be negative: {size}")
        return size
    match = _SIZE.fullmatch(size)
    unit_bytes = _UNIT_BYTES.get(match[2].lower() or "b") if match else None
    if match is None or unit_bytes is None:
        raise BadArgumentError(f"{size!r} is no size: write it like 512MiB, 2GiB or 4096")
    count = Fraction(match[1]) * unit_bytes
    if count.denominator != 1:
        raise BadArgumentError(f"{size!r} is not a whole number of bytes")
    return int(count)


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` for a person, with up to four digits in the largest binary unit that fits."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
