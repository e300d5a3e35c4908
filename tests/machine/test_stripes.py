"""Several devices as one region: files of a fixed size stand for them, as the core takes them too.

True dax devices are `make test-drivers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

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
from cxlkv.machine.regions import parse_where
from cxlkv.ops.cli import app
from cxlkv.ops.gc import find_garbage
from cxlkv.sequence import Sequence
from cxlkv.stats import find, inspect

from ..support.damaging import poke
from ..support.forking import in_child

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=64, dtype="float16")
CAPACITY = "20MiB"
MEMBER_BYTES = 12 << 20
STRIPE_BYTES = LABEL_BYTES = 2 << 20


@pytest.fixture
def parts(shm_path: Path) -> list[Path]:
    paths = [shm_path.with_suffix(f".{i}") for i in range(3)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(MEMBER_BYTES)
    return paths


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
            assert other.admin.check(deep=True)["clean"]
        size = pool.pages.geometry["region_bytes"]
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

        def adopt() -> None:
            with CXLPool.open(of(parts)) as other:
                handle = written.handle
                assert {len(p.adopt(handle)) for p in (other, pool)} == {len(keys)}

        in_child(adopt)
        assert pool.admin.check(deep=True)["clean"]


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
        CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY, replace=True)
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
                CXLPool.create(of(others), layout=LAYOUT, capacity=CAPACITY, replace=True)
        for part in (a, b):
            with pytest.raises(BusyError, match=rf"{part} is in use"):
                CXLPool.create(part, layout=LAYOUT, capacity="8MiB", replace=True)
        assert pool.admin.check(deep=True)["clean"]
        written.release()
    for other in (of([c, b]), b):
        with pytest.raises(PoolExistsError, match="replace=True"):
            CXLPool.create(other, layout=LAYOUT, capacity=CAPACITY, force=True)
    CXLPool.create(of([c, b]), layout=LAYOUT, capacity=CAPACITY, replace=True).close()


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
        poke(parts[1], at, bytes([whole[at] ^ 1]))
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


def test_it_is_looked_at_from_outside(parts: list[Path]) -> None:
    """The same as from inside, while it is used and afterwards; nothing in the files changes."""
    where = of(parts)
    pool = CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY)
    sequence, _ = fill(pool)
    pool.publish(sequence, [bytes([i]) for i in range(4)], LAYOUT.page_tokens)
    inside, outside = pool.admin.overview(), inspect(where)
    assert outside.state == "live"
    assert (outside.pages, outside.identity) == (inside.pages, inside.identity)
    assert [process.pid for process in outside.processes] == [os.getpid()]
    pool.close()
    before = [path.read_bytes() for path in parts]
    idle = inspect(where)
    assert (idle.state, idle.processes) == ("idle", ())
    assert idle.pages["published"] == 4
    assert idle.pages["free"] == idle.pages_total - 4
    assert idle.totals["appended_bytes"] == outside.totals["appended_bytes"] > 0
    assert [path.read_bytes() for path in parts] == before


def test_it_is_found_by_its_parts(parts: list[Path]) -> None:
    a, b, c = (str(path) for path in parts)
    where = of([parts[2], parts[0]])  # not as the names are sorted
    with CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY):
        for places in ([a, b, c], [where], [where, a, b, c], [a, c, a]):
            assert [(pool.path, pool.state) for pool in find(places)] == [(where, "live")], places
        listed = CliRunner().invoke(app, ["pool", "list", "--json", where])
        assert json.loads(listed.output)["pools"][0]["path"] == where
        watched = CliRunner().invoke(app, ["pool", "top", "--once", a, c]).output
        assert "live" in watched
        assert "not there" not in watched
    assert find_garbage([a, b, c], idle_s=0) == []
    (alone,) = find([a, b])
    assert (alone.path, alone.state) == (a, "part")
    assert alone.detail.startswith("part 1 of 2 of a striped pool")
    with pytest.raises(UnsupportedError, match="neither a device nor a file"):
        find([f"dax:{a}+/dev/shm/cxlkv-nowhere"])
    shutil.copy(a, b)  # now a part is there twice: which one is meant nobody knows
    assert [pool.state for pool in find([a, b, c])] == ["part"] * 3


def test_a_damaged_one_is_said_to_be(parts: list[Path]) -> None:
    a, b = parts[:2]
    CXLPool.create(of([a, b]), layout=LAYOUT, capacity=CAPACITY).close()
    whole = a.read_bytes()
    for at, wrong in ((LABEL_BYTES + 200, "superblock's CRC"), (20, "label of its part")):
        a.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damaged = inspect(of([a, b]))
        assert damaged.state == "damaged"
        assert wrong in damaged.detail
        assert damaged.bytes == 2 * MEMBER_BYTES
        found = {pool.path: pool.state for pool in find([str(a), str(b)])}
        assert found in ({of([a, b]): "damaged"}, {str(a): "damaged", str(b): "part"})
    a.write_bytes(whole)
    label = bytearray(whole[:LABEL_BYTES])
    label[12:16] = (9).to_bytes(4, "little")  # index 9 of 2, with a right CRC
    label[56:60] = _core.crc32c(bytes(label[:56])).to_bytes(4, "little")
    a.write_bytes(label + whole[LABEL_BYTES:])
    with pytest.raises(CorruptError, match="part 9 of 2"):
        _core.striped_part(str(a))
    a.write_bytes(b"CXLKVSTR")
    assert find([str(a)]) == []
