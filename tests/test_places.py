"""Where pages lie: the bytes at these offsets of the region are those that fetch() copies out."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.arrays import NUMPY_DTYPES, Bytes
from cxlkv.errors import BadArgumentError, ClosedError, ReleasedError
from cxlkv.layout import DTYPES, LayerGroup
from cxlkv.ndp.engine import unscored
from cxlkv.sequence import Sequence

HEADS, DIM, VALUE_DIM, PAGE_TOKENS = 3, 24, 8, 4


def region_of(pool: CXLPool) -> Bytes:
    address, size = _core.pool_memory(pool._handle)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def piece(region: Bytes, offset: int, stride: int, size: int) -> list[bytes]:
    return [region[offset + h * stride :][:size].tobytes() for h in range(HEADS)]


def compare(pool: CXLPool, sequence: Sequence, layer: int, pages: int) -> None:
    """Every complete page of the layer, head by head."""
    region, geometry = region_of(pool), _core.pool_geometry(pool._handle)
    at = _core.sequence_places(sequence._handle, layer)
    assert len(at.pages) == pages
    wanted = np.tile(np.arange(pages, dtype=np.int32), (HEADS, 1))
    picked = unscored(wanted, np.array([0, 1], np.int32), "sequence")
    keys, values = (np.asarray(array) for array in sequence.fetch(layer, picked))
    in_keys = pool.layout.shape.values == "key_prefix"
    for i in range(pages):
        size = keys[0, i].nbytes
        got = piece(region, int(at.keys[i]), geometry["key_piece_bytes"], size)
        assert got == [keys[h, i].tobytes() for h in range(HEADS)]
        if in_keys:
            assert at.values[i] == at.keys[i]
            continue
        size = values[0, i].nbytes
        got = piece(region, int(at.values[i]), geometry["value_piece_bytes"], size)
        assert got == [values[h, i].tobytes() for h in range(HEADS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["own", "key_prefix"])
@pytest.mark.parametrize("where", ["anonymous:", "file"])
def test_the_bytes_are_those_of_fetch(
    where: str, values: str, dtype: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Values in the keys lie where the keys do."""
    group = LayerGroup(
        layers=2,
        kv_heads=HEADS,
        head_dim=DIM,
        value_head_dim=VALUE_DIM,
        dtype=dtype,
        values=values,
    )
    layout = KVLayout.of([group], page_tokens=PAGE_TOKENS)
    path = where if where == "anonymous:" else tmp_path / "places.pool"
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        kind = NUMPY_DTYPES[DTYPES.index(dtype)]
        for layer in range(2):
            k = rng.standard_normal((4 * PAGE_TOKENS + 3, HEADS, DIM)).astype(kind)
            v = rng.standard_normal((4 * PAGE_TOKENS + 3, HEADS, VALUE_DIM)).astype(kind)
            sequence.append(layer, k, v if values == "own" else None)
        for layer in range(2):
            compare(pool, sequence, layer, pages=4)


def test_first_and_room(pool: CXLPool) -> None:
    sequence = pool.sequence()
    rows = np.zeros((6 * 4, 2, 8), np.float32)
    sequence.append(0, rows, rows)
    whole = _core.sequence_places(sequence._handle, 0)
    later = _core.sequence_places(sequence._handle, 0, first=4, capacity=5)
    assert len(whole.pages) == 6
    assert later.keys.tolist() == whole.keys[4:].tolist()
    assert later.pages.tolist() == whole.pages[4:].tolist()
    assert (whole.descriptors == -1).all()  # layer 1 is not there: no page has its seal
    sequence.append(1, rows, rows)
    assert (_core.sequence_places(sequence._handle, 0).descriptors > 0).all()


def test_nothing_of_what_is_gone(pool: CXLPool) -> None:
    sequence = pool.sequence()
    with pytest.raises(BadArgumentError, match="layer 2"):
        _core.sequence_places(sequence._handle, 2)
    sequence.release()
    with pytest.raises(ReleasedError):
        _core.sequence_places(sequence._handle, 0)
    handle = pool._handle
    pool.close()
    with pytest.raises(ClosedError):
        _core.pool_memory(handle)
