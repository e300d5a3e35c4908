"""The bytes of pages of pools with an encoding, against those that the C core writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout
from cxlkv.kernels import encode
from cxlkv.kernels.code_pieces import as_kept
from cxlkv.layout import ENCODINGS

from ..support.lengths import matrix
from .test_encode import DTYPES, Written, check_sketches, rows, taken
from .test_encode import where as where  # a fixture

SHAPES = [(16, 2, 64, 128), (5, 1, 7, 3), (20, 2, 96, 80), (1, 1, 1, 1), (32, 1, 256, 192)]
"""page_tokens, heads, dim, value_dim."""


def drawn(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Of all sizes: rows of zeros, of huge and of tiny numbers, infinities and NaN."""
    made = rows(generator, shape, dtype).float()
    made *= torch.from_numpy(np.exp2(generator.integers(-20, 12, (shape[0], 1, 1))))
    made[0] = 0
    for row, number in enumerate((1e-40, -3e-9, 2e38, -6e4, np.inf, np.nan, -0.0), start=1):
        if row < len(made):
            made[row, :, row % shape[2] :: 2] = number
    if len(made) > 9:  # a block of the smallest numbers, whose steps are smaller
        made[9, :, 1 << shape[2].bit_length() - 1 :] = -2e-38
    tokens = len(made) // 3
    if tokens > 8:
        made[-tokens:] = rows(generator, (tokens, *shape[1:]), dtype)  # pages without a NaN
    return made.to(DTYPES[dtype])


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    page_tokens: int,
    pair: tuple[str, str],
    tmp_path: Path,
    dtype: str,
) -> None:
    written = Written(tmp_path, k.cpu(), v.cpu(), page_tokens, dtype, pair)
    made = encode.encode(k, v, page_tokens=page_tokens, encodings=pair)
    sums = made.checksums.cpu().numpy().view(np.uint32)
    exact = {2: (made.keys, written.keys), 3: (made.values, written.values)}
    if pair[0] != "none":  # its rows have NaN of any bits
        exact[0] = (made.digests, written.digests)
    for kind, (found, right) in exact.items():
        assert right is not None
        np.testing.assert_array_equal(taken(found), right)
        np.testing.assert_array_equal(sums[..., kind], written.checksums[..., kind])
    sketched = as_kept(k.float(), pair[0])
    check_sketches(taken(made.sketches), written.sketches, sketched, page_tokens)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@matrix(shape=SHAPES, dtype=DTYPES, k_encoding=ENCODINGS, v_encoding=ENCODINGS, times=2)
def test_pieces_are_those_of_the_core(
    where: torch.device,
    shape: tuple[int, int, int, int],
    dtype: str,
    k_encoding: str,
    v_encoding: str,
    tmp_path: Path,
    seed: int,
) -> None:
    page_tokens, heads, dim, value_dim = shape
    generator = np.random.default_rng(seed)
    k, v = (
        drawn(generator, (4 * page_tokens, heads, d), dtype).to(where) for d in (dim, value_dim)
    )
    check(k, v, page_tokens, (k_encoding, v_encoding), tmp_path, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@matrix(dtype=DTYPES, encoding=ENCODINGS)
def test_rows_as_they_are_kept_are_those_that_a_pool_gives_back(
    where: torch.device, dtype: str, encoding: str, seed: int
) -> None:
    """But for the last bit of float32's sums."""
    k = drawn(np.random.default_rng(seed), (40, 2, 48), dtype)
    layout = KVLayout(layers=1, kv_heads=2, head_dim=48, dtype=dtype).encoded(encoding)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        sequence.append(0, k, k)
        given = torch.empty((2, 3, 16, 48), dtype=k.dtype)
        sequence.fetch(0, out=(given, torch.empty_like(given)))
        sequence.release()
    wanted = given.flatten(1, 2)[:, :40].transpose(0, 1).float()
    found = as_kept(k.to(where), encoding).cpu().float()
    most = wanted.abs().nan_to_num(0).amax(-1, keepdim=True)
    near = torch.finfo(k.dtype).eps * most
    same = (found - wanted).abs() <= near
    assert (same | (found == wanted) | (found.isnan() & wanted.isnan())).all()
