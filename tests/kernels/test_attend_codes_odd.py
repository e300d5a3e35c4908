"""Attention to pieces of codes where numbers are odd: beyond float16, zeros, NaN, no address."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .test_attend import BF16, BROKEN, FP16, FP32, Case, expected, place_of
from .test_attend_codes import PAIRS, Encodings, check, coded, scales_of


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_may_be_beyond_float16(size: float, device: torch.device, seed: int) -> None:
    of = coded(Case([[60]], dim=32, page_tokens=16), PAIRS[0], FP32, seed)
    plain = replace(of.case)
    wanted, q = expected(of), of.q
    of.q = q * size
    found = of.call(device, scale=plain.dim**-0.5 / size)
    of.q = q
    check(found, wanted, of)


@pytest.mark.parametrize("encodings", PAIRS[:2], ids="-".join)
@pytest.mark.parametrize("size", [2.0**-14, 2.0**12])
def test_values_may_be_beyond_float16(
    encodings: Encodings, size: float, device: torch.device, seed: int
) -> None:
    """A code of 8 bits times the largest scale is 127 times the largest float16."""
    of = coded(Case([[60]], dim=32, page_tokens=16), encodings, BF16, seed)
    scales_of(of.pieces["values"], of.form("values"), 16).mul_(size)
    of.decode()
    check(of.call(device), expected(of), of)


def test_values_that_are_zeros_leave_the_weights_right(device: torch.device, seed: int) -> None:
    of = coded(Case([[60]], dim=32, page_tokens=16), PAIRS[0], FP32, seed)
    scales = scales_of(of.pieces["values"], of.form("values"), 16)
    scales.copy_(torch.where(scales.isnan(), scales, 0))
    of.decode()
    found = of.call(device)
    check(found, expected(of), of)
    assert not found[0].any()


ROWS = Case([[37, 38, 39], [14, 15, 13]], kv_heads=1, k=4, page_tokens=16)


@BROKEN
@pytest.mark.parametrize(
    "encodings", [*PAIRS[:2], ("none", "int8"), ("int8", "none")], ids="-".join
)
@pytest.mark.parametrize("what", ["keys", "values"])
def test_nan_reaches_the_rows_that_see_it_and_no_others(
    what: str, encodings: Encodings, device: torch.device, seed: int
) -> None:
    of = coded(ROWS, encodings, FP16, seed)
    for one, position in ((0, 38), (1, 14)):
        place = place_of(of, one, position)
        if what in of.pieces:
            scales_of(of.pieces[what], of.form(what), 16)[place] = torch.nan
        else:
            getattr(of, what)[place] = torch.nan
    of.decode()
    found = of.call(device)
    check(found, expected(of), of)
    broken = found[0][..., 0].isnan()
    assert broken.any(-1).tolist() == [[False, True, True], [True, True, False]]
    assert found[1].isnan().equal(broken if what == "keys" else torch.zeros_like(broken))


def test_a_zero_address_leaves_the_page_out(device: torch.device, seed: int) -> None:
    of = coded(Case([[60]], dim=16, page_tokens=16, kv_heads=1), PAIRS[0], FP32, seed)
    tables = [at for at in of.tables(device) if at is not None]
    tables[0][0, 0, 0] = 0
    tables[1][0, 0, 1] = 0
    of.tables = lambda device: (tables[0], tables[1])  # type: ignore[method-assign]
    found = of.call(device)
    of.pages[0, 0, :2] = -1
    check(found, expected(of), of)
