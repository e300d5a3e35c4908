"""The lab's encodings: its codes are those of pools, the others are as far off as they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv.bench.lab import codes
from cxlkv.bench.lab.codes import Floats

from ..support import kept


def rows_of(tokens: int, dim: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(tokens, dim)).astype(np.float32)


@pytest.mark.parametrize("encoding", ["int8", "int4"])
@pytest.mark.parametrize("dim", [1, 16, 24, 64, 80, 128])
def test_codes_are_those_that_pools_keep(dim: int, encoding: str) -> None:
    """As tests/support/kept.py has them, which the core's own are held against: of ordinary rows
    and of others, and what they stand for."""
    bits, rows = kept.BITS[encoding], rows_of(200, dim, dim)
    rows *= np.logspace(-6, 3, 200, dtype=np.float32)[:, None]
    rows[0], rows[1], rows[2, 0] = 0, 1e-12, 1e4
    rows[3, 0], rows[4, 0] = np.nan, np.inf
    encoded, (wanted, scales) = codes.encode_rows(rows, bits), kept.codes(rows, encoding)
    np.testing.assert_array_equal(encoded.codes, wanted)
    np.testing.assert_array_equal(encoded.scales.astype(np.float32), scales)
    found = codes.unrotate(codes.decode(encoded, bits))
    np.testing.assert_allclose(found, kept.kept(rows, encoding), rtol=1e-4, atol=1e-3)


def test_signs_are_those_of_splitmix64() -> None:
    """Its first two outputs from seed 0 (Vigna's reference: e220a8397b1dcdaf, 6e789e6aa1b965f4)."""
    for block, output in enumerate((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)):
        bits = [output >> at & 1 for at in range(64)]
        assert codes.signs(128)[64 * block : 64 * block + 64].tolist() == [1 - 2 * b for b in bits]


def test_the_upper_half_of_8_bits_is_the_code_of_4() -> None:
    rows = rows_of(500, 64, 7)
    upper, four = codes.upper_half(codes.encode_rows(rows, 8)), codes.encode_rows(rows, 4)
    assert (upper.codes == four.codes).all()
    assert (upper.scales == four.scales).all()


def test_queries_of_14_bits() -> None:
    turned = codes.rotate(rows_of(50, 64, 17))
    prepared = codes.rounded_query(turned, 14, scale=0.5)
    assert np.abs(prepared.wholes).max() == 8127
    off = np.abs(prepared.wholes * prepared.factors[:, None].astype(np.float64) - turned / 2)
    assert (off <= 0.502 * prepared.factors[:, None]).all()
    none = codes.rounded_query(np.zeros((1, 64), np.float32))
    assert (none.wholes == 0).all()
    assert none.factors[0] == 0
    broken = codes.rounded_query(np.full((1, 64), np.inf, np.float32))
    assert np.isnan(broken.factors[0])


def test_fp8_to_the_nearest_is_torch_and_decodes_as_torch() -> None:
    numbers = np.concatenate([
        rows_of(1, 4000, 21)[0] * np.logspace(-4, 2, 4000, dtype=np.float32),
        np.array([0, -0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 448, 447], np.float32),
    ]).astype(np.float32)  # fmt: skip
    numbers = np.clip(numbers, -448, 448)
    by_torch = torch.from_numpy(numbers).to(torch.float8_e4m3fn)
    found = codes.fp8(numbers, nearest=True)
    differs = found != by_torch.view(torch.uint8).numpy()
    assert (np.abs(numbers[differs]) * 2.0**10 <= 1).all()  # only the sign of what is rounded to 0
    every = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codes.decode_fp8(every), wanted, equal_nan=True)


def test_fp8_is_cut_off_as_on_vllms_cpus() -> None:
    """Bytes that vLLM 0.32's cpu_attn_reshape_and_cache wrote for these numbers."""
    numbers = [np.nan, np.inf, -np.inf, 448, 449, 1e4, -1e4, 0, -0.0, 2**-9, 2**-10]
    numbers += [1.5 * 2**-9, -(2**-12), 2**-6, 0.0156, 17.5]
    some = np.array(numbers, np.float32)
    by_vllm = "7e 7e fe 7e 7e 7e fe 00 00 01 00 01 80 08 07 58"
    assert codes.fp8(some).tobytes() == bytes.fromhex(by_vllm)
    by_vllm = "7e 7e fe 7e 7e 7e fe 00 00 02 01 04 80 12 12 63"
    assert codes.fp8(some, 0.37).tobytes() == bytes.fromhex(by_vllm)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_is_within_half_a_step(bits: int) -> None:
    keys, values = rows_of(70, 64, 23), rows_of(70, 64, 24)
    found = codes.kivi_keys(keys, bits)
    assert (found[64:] == keys[64:]).all()  # no whole group
    for group in (slice(0, 32), slice(32, 64)):
        spread = keys[group].max(axis=0) - keys[group].min(axis=0)
        step = spread / ((1 << bits) - 1)
        room = 0.5 * step + 2.0**-10 * (spread + np.abs(keys[group]).max(axis=0))
        assert (np.abs(found[group] - keys[group]) <= room).all()
    whole = codes.kivi_values(values, bits)
    for token in (0, 69):
        assert (codes.kivi_values(values[token : token + 1], bits)[0] == whole[token]).all()
    equal = np.full((32, 64), 0.3, np.float32)
    assert np.abs(codes.kivi_keys(equal, bits) - 0.3).max() < 2.0**-11
    broken = keys[:32].copy()
    broken[4, 5] = np.nan
    assert np.isnan(codes.kivi_keys(broken, bits)).any(axis=0).sum() == 1


def test_q4_0_has_its_largest_channel_to_float16() -> None:
    rows = rows_of(30, 64, 27)
    found = codes.q4_0(rows)
    groups, made = codes.in_groups(rows, 32), codes.in_groups(found, 32)
    at = np.abs(groups).argmax(axis=-1)[..., None]
    largest, kept = (np.take_along_axis(some, at, axis=-1) for some in (groups, made))
    assert np.allclose(kept, largest, rtol=2.0**-10)
    assert (codes.q4_0(np.zeros((1, 32), np.float32)) == 0).all()
    assert np.linalg.norm(found - rows) < 0.1 * np.linalg.norm(rows)
