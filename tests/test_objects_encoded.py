"""Rows that objects keep encoded: put and got as tests/support/kept.py says they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cxlkv import Buffers, KVLayout, ObjectPool, RowForm, object_keys
from cxlkv.errors import BadArgumentError
from cxlkv.objects import DAMAGED

from .support import kept
from .support.damaging import damage_object
from .support.kept_rows import check_kept
from .support.lengths import matrix

SIZE = 512 << 10
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PIECE_ROWS, LINE_BYTES = 64, 64
each_encoding = pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])


@pytest.fixture(params=[(True, 1), (True, 2), (False, 2)], ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectPool]:
    checksum, threads = request.param
    made = {"layout": KVLayout.objects(SIZE), "capacity": "16MiB", "threads": threads}
    with ObjectPool.create(tmp_path / "objects", checksum=checksum, **made) as pool:
        yield pool
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0


def rows_of(seed: int, rows: int, dim: int, dtype: str) -> torch.Tensor:
    made = np.random.default_rng(seed).standard_normal((rows, dim), np.float32)
    return torch.from_numpy(made * np.float32(3)).to(DTYPES[dtype])


def buffers(tensors: list[list[torch.Tensor]], form: RowForm) -> Buffers:
    """The first of each object's are rows, all but a last one of bytes."""
    flat = [one for some in tensors for one in some]
    starts = np.cumsum([0, *(len(some) for some in tensors)])
    forms = (form,) * sum(one.dtype != torch.uint8 for one in tensors[0])
    return Buffers([t.data_ptr() for t in flat], [t.nbytes for t in flat], starts, forms)


def stored_bytes(rows: int, dim: int, encoding: str) -> int:
    """Bytes by native/src/objects/rows.h: pieces of 64 rows, of whole lines."""
    found = 0
    for first in range(0, rows, PIECE_ROWS):
        count = min(PIECE_ROWS, rows - first)
        if encoding == "fp8_e4m3":
            size = count * dim
        else:
            blocks, channels = -(-count // 16), -(-dim // 16) * 16
            size = blocks * 16 * (channels * kept.BITS[encoding] // 8 + 2)
        found += -(-size // LINE_BYTES) * LINE_BYTES
    return found


@matrix(
    rows=[1, 16, 64, 67, 200],
    dim=[64, 80, 128],
    dtype=DTYPES,
    encoding=["int8", "int4", "fp8_e4m3"],
    times=3,
)
def test_rows_are_what_is_kept(
    tmp_path: Path, encoding: str, dtype: str, dim: int, rows: int
) -> None:
    """Objects of K and V and some bytes behind them, which stay as they are."""
    form = RowForm(encoding, dtype, dim)
    seed = rows * dim
    given = [[rows_of(seed + i, rows, dim, dtype) for i in (2 * n, 2 * n + 1)] for n in range(3)]
    foot = [torch.arange(n, n + 24, dtype=torch.uint8) for n in range(3)]
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        put = [[*some, end] for some, end in zip(given, foot, strict=True)]
        assert pool.put_batch(["a", "b", "c"], buffers(put, form)).all()
        size = 2 * stored_bytes(rows, dim, encoding) + 24
        assert pool.object_sizes(["a", "b", "c"]).tolist() == [size] * 3
        assert 2 * form.stored_bytes(given[0][0].nbytes) + 24 == size
        half = size // 2 - 12
        assert buffers(put, form).stored_bytes().tolist() == [half, half, 24] * 3
        got = [[torch.full_like(one, 7) for one in some] for some in put]
        assert pool.get_batch_into(["a", "b", "c"], buffers(got, form)).tolist() == [size] * 3
    for was, now in zip(put, got, strict=True):
        for i in (0, 1):
            check_kept(now[i], was[i], encoding)
        assert torch.equal(now[2], was[2])


@each_encoding
def test_every_pool_and_thread(pool: ObjectPool, encoding: str) -> None:
    """Twice as many objects as threads could be at once, of other sizes each."""
    form = RowForm(encoding, "bfloat16", 128)
    given = [[rows_of(n, 100 * n + 13, 128, "bfloat16")] for n in range(12)]
    names = [f"object {n}" for n in range(12)]
    assert pool.put_batch(names, buffers(given, form)).all()
    assert not pool.put_batch(names, buffers(given, form)).any()
    got = [[torch.empty_like(one[0])] for one in given]
    sizes = [form.stored_bytes(one[0].nbytes) for one in given]
    assert pool.get_batch_into(names, buffers(got, form)).tolist() == sizes
    for was, now in zip(given, got, strict=True):
        check_kept(now[0], was[0], encoding)


def test_the_same_rows_are_the_same_bytes(pool: ObjectPool) -> None:
    """Wherever they lie, and whatever was in the page before."""
    form = RowForm("int4", "float16", 40)
    rows = rows_of(1, 75, 40, "float16")
    shifted = torch.empty(rows.nbytes + 2, dtype=torch.uint8)
    shifted[2:] = rows.reshape(-1).view(torch.uint8)
    pool.put("old", np.full(SIZE, 255, np.uint8))
    pool.forget(["old"])
    at = Buffers([rows.data_ptr(), shifted.data_ptr() + 2], [rows.nbytes] * 2, None, (form,))
    assert pool.put_batch(["a", "b"], at).all()
    with pool.lease(["a", "b"]) as lease:
        first, second = (bytes(view or b"") for view in lease.views)
    assert first == second
    assert len(first) == form.stored_bytes(rows.nbytes)


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_a_bad_number_makes_a_nan_of_its_row(encoding: str) -> None:
    """And of no other; a row of numbers whose sums are none is kept, with its scale the largest."""
    rows = rows_of(2, 40, 64, "float32")
    rows[3, 5], rows[17, 0], rows[18, 63] = torch.nan, torch.inf, -torch.inf
    rows[20] = 3e38
    form, got = RowForm(encoding, "float32", 64), torch.zeros_like(rows)
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        pool.put_batch(["a"], buffers([[rows]], form))
        pool.get_batch_into(["a"], buffers([[got]], form))
    bad = [3, 17, 18]
    assert got[bad].isnan().all()
    good = [n for n in range(40) if n not in bad]
    check_kept(got[good], rows[good], encoding)


def test_fp8_has_no_nan(tmp_path: Path) -> None:
    """Like in pools of K and V: a NaN is 448 there, and so is what lies beyond."""
    rows = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e9]])
    form, got = RowForm("fp8_e4m3", "float32", 4), torch.zeros_like(rows)
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        pool.put_batch(["a"], buffers([[rows]], form))
        pool.get_batch_into(["a"], buffers([[got]], form))
    assert got.tolist() == [[448, 448, -448, 448]]


def test_a_damaged_object_is_zeros(tmp_path: Path) -> None:
    path, form = tmp_path / "objects", RowForm("int8", "bfloat16", 64)
    rows = rows_of(3, 128, 64, "bfloat16")
    with ObjectPool.create(path, layout=KVLayout.objects(SIZE), capacity="16MiB") as pool:
        pool.put_batch(["a"], buffers([[rows]], form))
        damage_object(pool, object_keys(["a"]))
        got = torch.ones_like(rows)
        assert pool.get_batch_into(["a"], buffers([[got]], form)).tolist() == [DAMAGED]
        assert not got.any()


REFUSED: list[tuple[RowForm, int, str]] = [
    (RowForm("int8", "bfloat16", 64), 130, "130 bytes is no whole number of rows of 64"),
    (RowForm("progressive", "bfloat16", 64), 128, "int8, int4 or fp8_e4m3"),
    (RowForm("int3", "bfloat16", 64), 128, "encoding 'int3'"),
    (RowForm("int8", "uint8", 64), 128, "dtype 'uint8' is not stored"),
    (RowForm("int8", "bfloat16", 0), 128, "rows of 0 channels"),
    (RowForm("int8", "bfloat16", 1025), 2050, "rows of 1025 channels"),
]


@pytest.mark.parametrize(("form", "size", "message"), REFUSED)
def test_what_is_refused(form: RowForm, size: int, message: str) -> None:
    memory = np.zeros(size, np.uint8)
    with pytest.raises(BadArgumentError, match=message):
        form.stored_bytes(size)
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        pool.put("there", memory)
        given = Buffers([memory.ctypes.data], [size], None, (form,))
        with pytest.raises(BadArgumentError, match=message):
            pool.put_batch(["a"], given)
        with pytest.raises(BadArgumentError, match=message):
            pool.get_batch_into(["there"], given)


def test_memory_of_another_size_is_refused() -> None:
    """Also where there is more room: which rows would be whose?"""
    form = RowForm("int8", "bfloat16", 64)
    rows, larger = rows_of(4, 64, 64, "bfloat16"), torch.zeros(80, 64, dtype=torch.bfloat16)
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        pool.put_batch(["a"], buffers([[rows]], form))
        for memory in (larger, larger[:48]):
            with pytest.raises(BadArgumentError, match="Nothing was copied"):
                pool.get_batch_into(["a"], buffers([[memory]], form))
    assert not larger.any()


def test_none_is_bytes_as_they_are() -> None:
    form = RowForm("none", "bfloat16", 64)
    data: npt.NDArray[np.uint8] = np.arange(131, dtype=np.uint8)
    got = np.zeros_like(data)
    with ObjectPool.create("anonymous:", layout=KVLayout.objects(SIZE), capacity="8MiB") as pool:
        pool.put_batch(["a"], Buffers([data.ctypes.data], [131], None, (form,)))
        assert pool.get_into("a", got) == 131
    assert np.array_equal(got, data)
