"""The reference of encodings, kept.py, which the core and its kernels are held against."""

from __future__ import annotations

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.arrays import Floats
from tests.support import kept, reference


def rows_of(tokens: int, dim: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(tokens, dim)).astype(np.float32)


def test_signs_are_those_of_splitmix64() -> None:
    """Its first two outputs from seed 0 (Vigna's reference: e220a8397b1dcdaf, 6e789e6aa1b965f4)."""
    for block, output in enumerate((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)):
        bits = [output >> at & 1 for at in range(64)]
        assert reference.sign_bits(128)[64 * block : 64 * block + 64].tolist() == bits


@pytest.mark.parametrize("dim", [1, 16, 24, 64, 80, 128])
def test_codes_are_off_by_half_a_step_of_a_rotation(dim: int) -> None:
    """The rotation keeps lengths, and is undone; a scale is rounded to float16."""
    matrix = reference.hadamard(np.eye(dim))
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 1e-6
    rows = rows_of(200, dim, dim) * np.logspace(-2, 3, 200, dtype=np.float32)[:, None]
    turned = reference.hadamard(rows.astype(np.float64))
    assert np.abs(kept.unrotated(turned) - rows).max() < 1e-6 * np.abs(rows).max()
    for encoding, bits in (("int8", 8), ("int4", 4)):
        off = np.abs(kept.in_rotated_space(rows, encoding) - turned).max(axis=1)
        step = np.abs(turned).max(axis=1) / (1 << bits - 1)
        ordinary = step > 2.0**-13  # else scales are subnormal
        assert (off <= (0.5 + (1 << bits) * 2.0**-11) * step)[ordinary].all()


def test_errors_of_gaussian_rows_are_those_of_the_decision() -> None:
    """docs/decisions/0034-encodings.md: 0.0108 and 4.2e-5 at 128 channels."""
    rows = rows_of(4000, 128, 5)
    for encoding, wanted in (("int4", 0.0108), ("int8", 4.2e-5)):
        off = kept.kept(rows, encoding) - rows
        assert (off**2).sum() / (rows**2).sum() == pytest.approx(wanted, rel=0.02)


def test_the_upper_half_of_8_bits_is_the_code_of_4() -> None:
    rows = rows_of(500, 64, 7)
    (eight, by_256), (four, by_16) = (kept.codes(rows, name) for name in ("int8", "int4"))
    assert (eight // 16 == four).all()
    assert (16 * by_256 == by_16).all()


def test_fp8_is_cut_off_as_on_vllms_cpus() -> None:
    """Bytes that vLLM 0.32's cpu_attn_reshape_and_cache wrote for these numbers."""
    numbers = [np.nan, np.inf, -np.inf, 448, 449, 1e4, -1e4, 0, -0.0, 2**-9, 2**-10]
    numbers += [1.5 * 2**-9, -(2**-12), 2**-6, 0.0156, 17.5]
    by_vllm = "7e 7e fe 7e 7e 7e fe 00 00 01 00 01 80 08 07 58"
    layout = KVLayout(layers=1, kv_heads=1, head_dim=16, dtype="float32").encoded("fp8_e4m3")
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        sequence, row = pool.sequence(), np.array(numbers, np.float32).reshape(1, 1, 16)
        sequence.append(0, row, row)
        for pieces in sequence.fetch(0, decoded=False):
            assert np.asarray(pieces).tobytes()[:16] == bytes.fromhex(by_vllm)
    finite = np.array(numbers[3:], np.float32)
    assert kept.in_fp8(finite)[:4].tolist() == [448, 448, 448, -448]
