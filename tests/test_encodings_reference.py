"""The reference of encodings: what codes stand for, how they lie in a piece, and how far off they
may be, on rows that are ordinary and on ones that are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxlkv.bench.lab import codes
from cxlkv.bench.lab.codes import Encoded, Floats
from tests.support import encodings
from tests.support.encodings import Form

DIMS = (1, 16, 24, 64, 80, 128)
BITS = (8, 4)


def rows_of(tokens: int, dim: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(tokens, dim)).astype(np.float32)


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthogonal_and_its_own_way_back(dim: int) -> None:
    matrix = codes.rotate(np.eye(dim, dtype=np.float32)).astype(np.float64)
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 1e-6
    rows = rows_of(40, dim, 1)
    assert np.abs(codes.rotate(rows) - rows @ matrix).max() < 1e-5
    assert np.abs(codes.unrotate(codes.rotate(rows)) - rows).max() < 1e-5


def test_signs_are_those_of_splitmix64() -> None:
    """Its first two outputs from seed 0 (Vigna's reference: e220a8397b1dcdaf, 6e789e6aa1b965f4)."""
    for block, output in enumerate((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)):
        bits = [output >> at & 1 for at in range(64)]
        assert codes.signs(128)[64 * block : 64 * block + 64].tolist() == [1 - 2 * b for b in bits]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_codes_are_within_their_bound(dim: int, bits: int) -> None:
    rows = rows_of(200, dim, dim) * np.logspace(-6, 3, 200, dtype=np.float32)[:, None]
    turned, encoded = codes.rotate(rows), codes.encode_rows(rows, bits)
    off = np.abs(codes.decode(encoded, bits) - turned)
    assert (off <= codes.bound_of(turned, encoded, bits)[:, None]).all()
    ordinary = np.abs(turned).max(axis=1) > 2.0**-6  # else scales are subnormal
    step = np.abs(turned).max(axis=1) / (1 << bits - 1)
    assert (off.max(axis=1) <= (0.5 + (1 << bits) * 2.0**-11) * step)[ordinary].all()


def test_errors_of_gaussian_rows_are_those_of_the_decision() -> None:
    """docs/decisions/0034-encodings.md: 0.0108 and 4.2e-5 at 128 channels."""
    rows = rows_of(4000, 128, 5)
    for bits, wanted in ((4, 0.0108), (8, 4.2e-5)):
        assert codes.relative_error(encodings.stand_for(rows, bits), rows) == pytest.approx(
            wanted, rel=0.02
        )


def test_the_upper_half_of_8_bits_is_the_code_of_4() -> None:
    rows = rows_of(500, 64, 7)
    upper, four = codes.upper_half(codes.encode_rows(rows, 8)), codes.encode_rows(rows, 4)
    assert (upper.codes == four.codes).all()
    assert (upper.scales == four.scales).all()


def test_a_row_is_coded_by_itself() -> None:
    rows = rows_of(33, 64, 8)
    whole = codes.encode_rows(rows, 4)
    for at in range(33):
        alone = codes.encode_rows(rows[at : at + 1], 4)
        assert (alone.codes[0] == whole.codes[at]).all()
        assert alone.scales[0] == whole.scales[at]


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_are_not_ordinary(bits: int) -> None:
    rows = rows_of(8, 64, 9)
    rows[0, 3], rows[1, 5], rows[2, 0] = np.nan, np.inf, 3e38
    rows[2, 1:] = 3e38  # finite, but their sum is not
    rows[3], rows[4], rows[5, 7] = 0, 1e-12, 1e4
    rows[6] *= 1e6  # the scale is cut off
    encoded = codes.encode_rows(rows, bits)
    assert np.isnan(encoded.scales[:3]).all()
    assert (encoded.codes[:5] == 0).all()
    found = codes.decode(encoded, bits)
    assert (found[3:5] == 0).all()
    assert np.isfinite(found[3:]).all()
    assert encoded.scales[6] == np.float16(65504) or bits == 8
    assert set(np.unique(encoded.codes[6])) <= set(range(1 << bits))
    turned = codes.rotate(rows)
    off, bound = np.abs(found - turned)[3:], codes.bound_of(turned, encoded, bits)[3:]
    assert (off <= bound[:, None]).all()


@pytest.mark.parametrize("tokens", [1, 16, 35])
@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("values", [False, True])
def test_a_piece_has_each_code_once(tokens: int, dim: int, bits: int, values: bool) -> None:
    form = Form(bits, dim, values)
    encoded = codes.encode_rows(rows_of(tokens, dim, 11), bits)
    piece = encodings.pack(form, encoded)
    assert len(piece) == form.piece_bytes(tokens)
    found = encodings.unpack(form, piece, tokens)
    assert (found.codes == encoded.codes).all()
    assert (found.scales == encoded.scales).all()
    places = {form.place(t, c) for t in range(tokens) for c in range(form.channels)}
    assert len(places) == tokens * form.channels
    assert max(byte for byte, _ in places) < form.scales_offset(tokens)


def test_a_piece_lies_as_the_header_says() -> None:
    """Lines of 64 bytes, by hand: see native/src/kernels/codes.h."""
    channels, tokens = np.meshgrid(np.arange(32), np.arange(16))
    numbered = Encoded((tokens * 8 + channels).astype(np.uint8), np.ones(16, np.float16))
    keys = encodings.pack(Form(8, 32, values=False), numbered)
    assert keys[64 * 3 + 4 * 5 : 64 * 3 + 4 * 6].tolist() == [5 * 8 + 12 + i for i in range(4)]
    values = encodings.pack(Form(8, 32, values=True), numbered)
    line = 64 * (1 * 2 + 1)  # tokens 4 to 7 of channels 16 to 31
    assert values[line + 4 * 2 : line + 4 * 3].tolist() == [t * 8 + 18 for t in (4, 5, 6, 7)]
    small = Encoded(((tokens + 3 * channels) % 16).astype(np.uint8), np.ones(16, np.float16))
    nibbles = encodings.pack(Form(4, 32, values=False), small)
    assert nibbles[64 + 4 * 2 + 1] == small.codes[2, 9] | small.codes[2, 13] << 4
    nibbles = encodings.pack(Form(4, 32, values=True), small)
    assert nibbles[64 * 3 + 4 * 2 + 1] == small.codes[9, 18] | small.codes[13, 18] << 4


@pytest.mark.parametrize("bits", BITS)
def test_scores_and_attention_are_within_their_bounds(bits: int) -> None:
    keys, values = rows_of(70, 64, 13), rows_of(70, 64, 14)
    query, scale = rows_of(1, 64, 15)[0], 0.125
    exact = scale * keys.astype(np.float64) @ query.astype(np.float64)
    encoded = codes.encode_rows(keys, bits)
    off = np.abs(encodings.scores(encoded, bits, query, scale) - exact)
    bound = encodings.score_bound(keys, bits, query, scale)
    assert (off <= bound).all()
    assert off.max() > bound.max() / 100  # it says something
    wanted = encodings.attend(keys, values, query, scale)
    logits = encodings.scores(encoded, bits, query, scale)
    weights = np.exp(logits - logits.max()).astype(np.float32)
    stored = codes.encode_rows(values, bits)
    found = codes.unrotate(encodings.accumulate(stored, bits, weights)) / weights.sum()
    coded_keys, coded_values = (encodings.stand_for(some, bits) for some in (keys, values))
    close = np.linalg.norm(found - encodings.attend(coded_keys, coded_values, query, scale))
    assert close < 2e-3 * np.linalg.norm(wanted)
    far = np.linalg.norm(found - wanted)
    assert far <= encodings.attend_bound(keys, values, query, scale, (bits, bits))


def test_queries_of_14_bits() -> None:
    turned = codes.rotate(rows_of(50, 64, 17))
    prepared = codes.rounded_query(turned, 14, scale=0.5)
    high, low = codes.halves_of_query(prepared.wholes)
    assert np.abs(prepared.wholes).max() == 8127
    assert (high > -64).all()
    assert (high <= 64).all()
    assert (low >= -64).all()
    assert (low < 64).all()
    off = np.abs(prepared.wholes * prepared.factors[:, None].astype(np.float64) - turned / 2)
    assert (off <= 0.502 * prepared.factors[:, None]).all()
    none = codes.rounded_query(np.zeros((1, 64), np.float32))
    assert (none.wholes == 0).all()
    assert none.factors[0] == 0
    broken = codes.rounded_query(np.full((1, 64), np.inf, np.float32))
    assert np.isnan(broken.factors[0])


def test_nothing_comes_of_weights_of_zero_and_a_nan_of_a_broken_row() -> None:
    encoded = codes.encode_rows(rows_of(20, 64, 19), 8)
    assert (encodings.accumulate(encoded, 8, np.zeros(20, np.float32)) == 0).all()
    encoded.scales[18] = np.nan
    assert np.isnan(encodings.accumulate(encoded, 8, np.ones(20, np.float32))).all()


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
    assert codes.relative_error(found, rows) < 0.01
