"""fetch(decoded=False): pieces as a pool with an encoding keeps them, blocks and scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import KVLayout
from cxlkv.arrays import Bytes, Floats
from cxlkv.errors import BadArgumentError, CorruptError
from cxlkv.layout import FP8
from cxlkv.ndp.engine import same_pages

from .support import kept
from .support.damaging import change_byte
from .support.encodings import Form, unpack
from .support.lengths import matrix
from .test_encoded_pools import place_of
from .test_encodings import BOTH, DTYPES, ENCODED, bits, drawn, layout_of, pool_of

HEADS = 2


def check_piece(piece: Bytes, rows: Floats, layout: KVLayout, kind: int) -> None:
    """A piece of rows [tokens, dim] has their codes and scales; the tokens behind them have none,
    and codes 0."""
    encoding = (layout.k_encoding, layout.v_encoding)[kind]
    if encoding == FP8:
        rest = np.zeros((layout.page_tokens - len(rows), rows.shape[1]), np.uint8)
        numbers = torch.from_numpy(kept.in_fp8(rows.astype(np.float32)))  # which fp8 has
        codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        wanted = np.concatenate([codes, rest])
        np.testing.assert_array_equal(piece, wanted.ravel())
        return
    form = Form(kept.BITS[encoding], rows.shape[1], kind == 1)
    all_tokens = -(-layout.page_tokens // 16) * 16
    assert piece.shape == (form.piece_bytes(layout.page_tokens),)
    found = unpack(form, piece, all_tokens)
    made, scales = kept.codes(rows.astype(np.float32), encoding)
    np.testing.assert_array_equal(found.codes[: len(rows)], made)
    np.testing.assert_array_equal(found.scales[: len(rows)].astype(np.float32), scales)
    assert not found.codes[len(rows) :].any()
    assert not found.scales[len(rows) :].any()


@matrix(
    encodings=ENCODED,
    dtype=DTYPES,
    sizes=[(16, 16, 4), (80, 24, 20), (128, 64, 16), (3, 256, 32)],
)
def test_pieces_are_those_of_the_reference(
    encodings: tuple[str, str],
    dtype: str,
    sizes: tuple[int, int, int],
    rng: np.random.Generator,
) -> None:
    """Complete pages and the open tail; what has no encoding is rows as ever."""
    dim, value_dim, page_tokens = sizes
    layout = layout_of(
        encodings, dim=dim, value_dim=value_dim, page_tokens=page_tokens, dtype=dtype
    )
    tokens = 2 * page_tokens + page_tokens // 2
    rows = drawn(rng, layout, tokens)
    with pool_of(layout, tokens) as pool:
        sequence = pool.sequence()
        sequence.append(0, *rows)
        both = zip(sequence.fetch(0, decoded=False), sequence.fetch(0), strict=True)
        for kind, (pieces, decoded) in enumerate(both):
            if encodings[kind] == "none":
                assert bits(pieces) == bits(decoded)
                continue
            assert pieces.dtype == np.uint8
            for head in range(HEADS):
                for page in range(3):
                    own = rows[kind][page * page_tokens : (page + 1) * page_tokens, head]
                    check_piece(np.asarray(pieces)[head, page], own, layout, kind)


@pytest.mark.parametrize("pair", BOTH)
def test_what_was_cut_off_a_tail_is_not_in_its_piece(
    pair: tuple[str, str], rng: np.random.Generator
) -> None:
    layout = layout_of(pair, dim=32, page_tokens=16)
    rows = drawn(rng, layout, 30)
    with pool_of(layout) as pool:
        sequence = pool.sequence()
        sequence.append(0, *rows)
        sequence.truncate(20)
        for kind, pieces in enumerate(sequence.fetch(0, decoded=False)):
            check_piece(np.asarray(pieces)[1, 1], rows[kind][16:20, 1], layout, kind)


@pytest.mark.parametrize("kind", ["key", "value"])
def test_pieces_are_verified(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "pool"
    layout = layout_of(BOTH[0], dim=32, page_tokens=16, layers=2)
    with pool_of(layout, path=path) as pool:
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, *drawn(rng, layout, 32))
        page = int(sequence.places(1).pages[0])
        change_byte(path, place_of(pool, page, kind) + 5)
        with pytest.raises(CorruptError):
            sequence.fetch(1, decoded=False)


def test_padding_is_zeros_and_arrays_of_the_caller_are_filled(rng: np.random.Generator) -> None:
    layout = layout_of(BOTH[0], dim=32, page_tokens=16)
    with pool_of(layout) as pool:
        sequence = pool.sequence()
        sequence.append(0, *drawn(rng, layout, 50))
        picked = same_pages([2, -1, 0], HEADS)
        wanted = [np.asarray(each) for each in sequence.fetch(0, picked, decoded=False)]
        every = [np.asarray(each) for each in sequence.fetch(0, decoded=False)]
        out = (torch.full(wanted[0].shape, 7).byte(), torch.full(wanted[1].shape, 7).byte())
        sequence.fetch(0, picked, out, decoded=False)
        for got, made, each in zip(out, wanted, every, strict=True):
            assert not made[..., 1, :].any()
            np.testing.assert_array_equal(made[..., [0, 2], :], each[:, [2, 0]][None])
            np.testing.assert_array_equal(got.numpy(), made)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda good: good.float(),
        lambda good: good[..., 1:].contiguous(),
        lambda good: good.repeat(2, 1, 1)[::2],
        lambda good: good.to("meta"),
        lambda good: np.lib.stride_tricks.as_strided(good.numpy(), writeable=False),
    ],
    ids=["dtype", "shape", "order", "device", "read-only"],
)
def test_other_arrays_are_refused(wrong: object, rng: np.random.Generator) -> None:
    layout = layout_of(BOTH[0], dim=32, page_tokens=16)
    assert callable(wrong)
    with pool_of(layout) as pool:
        sequence = pool.sequence()
        sequence.append(0, *drawn(rng, layout, 50))
        good = [torch.as_tensor(np.array(each)) for each in sequence.fetch(0, decoded=False)]
        out = (good[0], wrong(good[1]))
        with pytest.raises(BadArgumentError, match=r"out\[1\]"):
            sequence.fetch(0, out=out, decoded=False)
