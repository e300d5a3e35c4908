"""Several devices as one region: files of a fixed size stand for them, as the core takes them too.

True dax devices are `make test-drivers`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CorruptError,
    GeometryError,
    MemoryShortError,
    NotAPoolError,
    PoolExistsError,
    UnsupportedError,
)
from cxlkv.regions import parse_where
from cxlkv.sequence import Sequence

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=64, dtype="float16")
CAPACITY = "20MiB"
MEMBER_BYTES = 12 << 20
STRIPE_BYTES = LABEL_BYTES = 2 << 20


@pytest.fixture
def parts() -> Iterator[list[Path]]:
    paths = [Path(f"/dev/shm/cxlkv-test-stripe-{os.getpid()}-{i}") for i in range(3)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(MEMBER_BYTES)
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def of(parts: list[Path]) -> str:
    return "dax:" + "+".join(map(str, parts))


def fill(pool: CXLPool, tokens: int = 480) -> tuple[Sequence, npt.NDArray[np.float16]]:
    keys = np.random.default_rng(5).standard_normal((tokens, 4, 64)).astype(np.float16)
    sequence = pool.sequence()
    for layer in range(2):
        sequence.append(layer, keys, keys)
    return sequence, keys


@pytest.mark.parametrize("count", [2, 3])
def test_stripes_lie_in_turn_and_read_as_one(parts: list[Path], count: int) -> None:
    """The bytes of each stripe are where the documents say, file by file."""
    parts = parts[:count]
    with CXLPool.create(of(parts), layout=LAYOUT, capacity=CAPACITY) as pool:
        written, keys = fill(pool)
        with CXLPool.open(of(parts)) as other:
            sequence = other.adopt(written.handle)
            for layer in range(2):
                for fetched in sequence.fetch(layer):  # [kv_heads, pages, page_tokens, dim]
                    rows = np.asarray(fetched).reshape(4, -1, 64).transpose(1, 0, 2)
                    assert np.array_equal(rows, keys)
            assert other.check(deep=True)["clean"]
        size = cast("dict[str, int]", pool.describe()["geometry"])["region_bytes"]
        address, _ = _core.pool_memory(pool._handle)
        mapped = ctypes.string_at(address, size)
    data = [path.read_bytes()[LABEL_BYTES:] for path in parts]
    for stripe in range(0, -(-size // STRIPE_BYTES)):
        wanted = mapped[stripe * STRIPE_BYTES : (stripe + 1) * STRIPE_BYTES]
        at = stripe // count * STRIPE_BYTES
        found = data[stripe % count][at : at + len(wanted)]
        if stripe:  # the first holds what closing writes
            assert found == wanted, stripe
    assert data[0][:8] == b"CXLKVPOL"


def test_a_child_by_fork_uses_it(parts: list[Path]) -> None:
    with CXLPool.create(of(parts), layout=LAYOUT, capacity=CAPACITY) as pool:
        written, keys = fill(pool)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with CXLPool.open(of(parts)) as other:
                    handle = written.handle
                    lengths = {len(p.adopt(handle)) for p in (other, pool)}
                status = 0 if lengths == {len(keys)} else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.check(deep=True)["clean"]


def test_parts_given_otherwise_are_refused(parts: list[Path]) -> None:
    a, b, c = parts
    CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY).close()
    with pytest.raises(GeometryError, match=r"is part 1 of 2 of its pool, and was given as part 0"):
        CXLPool.open(of([b, a]))
    with pytest.raises(GeometryError, match=r"is part 0 of 2 .* as part 0 of 3: name all"):
        CXLPool.open(of([a, b, c]))
    with pytest.raises(NotAPoolError, match=r"no part of a striped pool lies there"):
        CXLPool.open(of([a, c]))
    for part in (a, b):
        with pytest.raises(NotAPoolError, match=r"is a part of a striped pool: open all"):
            CXLPool.open(part)
        with pytest.raises(PoolExistsError):
            CXLPool.create(part, layout=LAYOUT, capacity="8MiB")
    with pytest.raises(BadArgumentError, match=r"named twice"):
        CXLPool.open(of([a, a]))
    with pytest.raises(UnsupportedError, match=r"neither a device nor a file"):
        CXLPool.open(f"dax:{a}+/dev/shm/cxlkv-nowhere")


def test_what_holds_something_is_kept(parts: list[Path]) -> None:
    a, b = parts[:2]
    with b.open("r+b") as file:
        file.write(b"letters")
    with pytest.raises(PoolExistsError, match=r"holds something \(no pool\)"):
        CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY)
    assert b.read_bytes()[:7] == b"letters"
    pool = CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY, force=True)
    with pytest.raises(BusyError, match=r"in use"):
        CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY, force=True)
    with pytest.raises(BusyError, match=r"in use"):
        CXLPool.remove(of([a, b]))
    pool.close()
    with pytest.raises(PoolExistsError, match=r"a part of a pool, maybe this one"):
        CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY)
    CXLPool.remove(of([a, b]))
    with pytest.raises(NotAPoolError):
        CXLPool.open(of([a, b]))
    CXLPool.create(of([b, a]), layout=LAYOUT, capacity=CAPACITY).close()


def test_no_part_of_a_pool_in_use_is_overwritten(parts: list[Path]) -> None:
    """Not only the first part, which the pool's own descriptor holds."""
    a, b, c = parts
    CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY).close()
    with CXLPool.open(of([a, b])) as pool:
        written, _ = fill(pool)
        for others in ([b, c], [c, b]):
            with pytest.raises(BusyError, match=rf"{b} is in use"):
                CXLPool.create(of(others), layout=LAYOUT, capacity=CAPACITY, force=True)
        assert pool.check(deep=True)["clean"]
        written.release()
    CXLPool.create(of([c, b]), layout=LAYOUT, capacity=CAPACITY, force=True).close()


def test_too_much_is_refused(parts: list[Path]) -> None:
    """12 MiB each have 5 stripes after the label: 20 MiB of two."""
    with pytest.raises(MemoryShortError, match=r"all together hold 20 MiB in stripes of 2 MiB"):
        CXLPool.create(of(parts[:2]), layout=LAYOUT, capacity="30MiB")
    assert parts[0].read_bytes()[:4096] == bytes(4096)


def test_damaged_labels(parts: list[Path]) -> None:
    """Each byte of the label that is changed is seen; those behind it mean nothing."""
    where = of(parts[:2])
    CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY).close()
    whole = parts[1].read_bytes()[:64]
    for at in range(60):
        with parts[1].open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
        with pytest.raises((CorruptError, NotAPoolError)):
            CXLPool.open(where)
        with parts[1].open("r+b") as file:
            file.write(whole)
    CXLPool.open(where).close()
    CXLPool.remove(where)


def test_from_a_configuration(parts: list[Path]) -> None:
    config: dict[str, object] = {
        "where": of(parts[:2]),
        "capacity": CAPACITY,
        "layout": {"layers": 2, "kv_heads": 4, "head_dim": 64, "dtype": "float16"},
    }
    with CXLPool.from_config(config) as pool, CXLPool.from_config(config) as again:
        assert pool.describe()["identity"] == again.describe()["identity"]
        assert pool.path == parse_where(str(config["where"])) == of(parts[:2])
