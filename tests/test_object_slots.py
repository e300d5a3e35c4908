"""Objects of several slots: whatever their sizes, little of the pool is lost; nothing half is
found."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Buffers, KVLayout, ObjectPool, RowForm
from cxlkv.arrays import Bytes
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    GeometryError,
    PoolFullError,
)
from cxlkv.objects import ABSENT, DAMAGED, HELD

from .conftest import audit
from .support.damaging import change_byte
from .support.lengths import nightly
from .support.processes import Child

SLOT = 4 << 10
LAYOUT = KVLayout.objects("256KiB", slot=SLOT)
SIZES = (4 << 10, 16 << 10, 60_000, 100_000, 256 << 10)
NOISE = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8)


def made(number: int, size: int) -> Bytes:
    """No two are alike."""
    at = number * 7919 % (len(NOISE) - size)
    data = NOISE[at : at + size].copy()
    data[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)[: min(8, size)]
    return data


def got(pool: ObjectPool, name: str, size: int) -> Bytes:
    out = np.zeros(size, np.uint8)
    assert pool.get_into(name, out) == size
    return out


@pytest.fixture(params=[(True, 1), (True, 2), (False, 2)], ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectPool]:
    checksum, threads = request.param
    with ObjectPool.create(
        tmp_path / "slots", layout=LAYOUT, capacity="8MiB", checksum=checksum, threads=threads
    ) as pool:
        yield pool
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0


def test_an_object_takes_what_its_bytes_need(pool: ObjectPool) -> None:
    free = pool.stats()["pages_free"]
    for number, size in enumerate([1, SLOT, SLOT + 1, 3 * SLOT, 100_001, 256 << 10]):
        data = made(number, size)
        cut = [data[begin:end] for begin, end in pairwise([0, size // 3, size // 3, size])]
        assert pool.put(str(number), cut)
        free -= -(-size // SLOT)
        assert pool.stats()["pages_free"] == free
        assert np.array_equal(got(pool, str(number), size), data)
        assert pool.object_sizes([str(number)]).tolist() == [size]
    with pytest.raises(BadArgumentError, match="stores objects of 1 to 262144 bytes"):
        pool.put("large", np.zeros((256 << 10) + 1, np.uint8))


def test_ranges_over_the_ends_of_slots(pool: ObjectPool) -> None:
    data, out = made(1, 100_001), np.zeros(50_000, np.uint8)
    pool.put("a", data)
    ranges = [[0, 4000, 200, 0], [0, 4096, 8192, 200], [0, 99_000, 1001, 8400], [0, 5, 0, 0]]
    assert pool.get_ranges(["a"], ranges, out).tolist() == [200, 8192, 1001, 0]
    assert np.array_equal(out[:200], data[4000:4200])
    assert np.array_equal(out[200:8392], data[4096:12288])
    assert np.array_equal(out[8400:9401], data[99_000:])
    with pytest.raises(BadArgumentError, match="of an object of 100001"):
        pool.get_ranges(["a"], [[0, 100_000, 2, 0]], out)


def test_a_lease_holds_it_without_a_view(pool: ObjectPool) -> None:
    data = made(1, 3 * SLOT)
    assert pool.put("large", data)
    assert pool.put("small", data[:SLOT])
    with pool.lease(["large", "small", "none"]) as lease:
        assert lease.sizes.tolist() == [3 * SLOT, SLOT, ABSENT]
        with pytest.raises(BadArgumentError, match=r"several slots.*get_into\(\)"):
            _ = lease.views
        gone = pool.admin.remove_objects(["large", "small", "none"])
        assert gone.tolist() == [HELD, HELD, ABSENT]
        assert pool.admin.remove_all() == 0
        free = pool.stats()["pages_free"]
        assert pool.forget(["large"]) == 1
        assert pool.stats()["pages_free"] == free
        assert pool.object_sizes(["large", "small"]).tolist() == [ABSENT, SLOT]
    assert pool.stats()["pages_free"] == free + 3
    assert pool.admin.remove_objects(["small"]).tolist() == [0]
    assert pool.admin.remove_objects(["small"]).tolist() == [ABSENT]
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_another_object_in_place_of_one(pool: ObjectPool) -> None:
    """Who has a lease keeps the old one's memory; of several under one key the first is put."""
    old, new = made(1, SLOT), made(2, 50_000)
    assert pool.put("a", old)
    assert not pool.put("a", new)
    with pool.lease(["a"]) as lease:
        assert pool.put_batch(["a", "a"], [new, old], replace=True).tolist() == [True, False]
        assert np.array_equal(got(pool, "a", 50_000), new)
        assert lease.views[0] == old.data
        assert pool.put("a", old, replace=True)
        assert pool.put("b", new, replace=True)
        assert lease.views[0] == old.data
    assert np.array_equal(got(pool, "a", SLOT), old)
    assert pool.stats()["pages_published"] == 1 + -(-50_000 // SLOT)


def test_another_object_has_the_pin_and_the_priority_of_the_one_before(pool: ObjectPool) -> None:
    """In all its slots, fewer or more; an object of another name, or one that is put anew, has
    none."""
    pool.put_batch(["a", "b"], [made(1, 3 * SLOT), made(2, 3 * SLOT)])
    pool.admin.pin(["a"])
    pool.admin.prioritize(["a"], 7)
    for number, slots in enumerate((5, 2, 1)):
        new = made(number, slots * SLOT)
        assert pool.put_batch(["b", "a"], [new, new], replace=True).all()
        assert pool.pages.evictable().sum() == slots
        assert sorted(pool.hotness.published().rows["priority"]) == [0] * slots + [7] * slots
    assert pool.forget(["a"]) == 1
    assert pool.put("a", made(3, SLOT), replace=True)
    assert pool.pages.evictable().sum() == 2
    assert not pool.hotness.published().rows["priority"].any()


def test_all_are_removed(pool: ObjectPool) -> None:
    for number in range(20):
        pool.put(str(number), made(number, SIZES[number % 5]))
    with pool.lease(["3"]):
        assert pool.admin.remove_all() == 19
        assert pool.object_sizes(["2", "3"]).tolist() == [ABSENT, SIZES[3]]
    assert pool.admin.remove_all() == 1
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_a_pin_and_a_forget_count_objects(pool: ObjectPool) -> None:
    pool.put("a", made(1, 10 * SLOT))
    assert pool.admin.pin(["a"]) == 1
    assert pool.pages.evictable().sum() == 0
    assert pool.admin.unpin(["a"]) == 1
    assert pool.pages.evictable().sum() == 10
    assert pool.admin.prioritize(["a"], 3) == 1
    assert pool.forget(["a"]) == 1
    assert pool.stats()["pages_published"] == 0


def test_what_needs_one_piece_is_refused_by_name(pool: ObjectPool) -> None:
    rows = np.zeros((256, 64), np.float32)
    memory = Buffers([rows.ctypes.data], [rows.nbytes], None, [RowForm("int8", "float32", 64)])
    with pytest.raises(BadArgumentError, match="encoded rows: these go into objects of one slot"):
        pool.put_batch(["a"], memory)
    with pytest.raises(BadArgumentError, match=r"in one piece is 1 to 4096 bytes.*put\(\)"):
        pool.reserve([SLOT, SLOT + 1])
    reserved = pool.reserve([SLOT])
    assert reserved.publish(["b"]).all()
    reserved.release()


def test_the_layout_is_the_pools(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    with ObjectPool.create(path, layout=LAYOUT, capacity="8MiB") as pool:
        assert pool.layout == LAYOUT
        assert pool.layout.object_bytes == 256 << 10
    with ObjectPool.open(path, layout=LAYOUT) as pool:
        assert pool.layout.summary == "objects of up to 256 KiB in slots of 4 KiB"
    with pytest.raises(GeometryError, match="in slots of 4 KiB there"):
        ObjectPool.open(path, layout=KVLayout.objects("256KiB"))
    assert KVLayout.objects("4KiB", slot="4KiB") == KVLayout.objects("4KiB")
    for size, slot in (("4KiB", "8KiB"), ("1GiB", "8KiB"), (1 << 20, 512), (1, 0)):
        with pytest.raises(BadArgumentError, match="a slot is no larger"):
            KVLayout.objects(size, slot=slot)


@pytest.mark.parametrize("page", range(5))
def test_damage_of_a_byte_in_any_page(tmp_path: Path, page: int) -> None:
    path = tmp_path / "slots"
    size = 4 * SLOT + 100
    with ObjectPool.create(path, layout=LAYOUT, capacity="8MiB") as pool:
        data, other = made(1, size), made(2, size)
        pool.put_batch(["a", "b"], [data, other])
        stored = path.read_bytes()
        change_byte(path, stored.index(data[page * SLOT : page * SLOT + 100].tobytes()) + 50)
        out = np.full(size, 7, np.uint8)
        with pytest.raises(CorruptError, match="'a'"):
            pool.get_into("a", out)
        assert not out.any()
        assert np.array_equal(got(pool, "b", size), other)
        with ObjectPool.open(path) as reader:
            assert reader.lease(["a"]).sizes.tolist() == [DAMAGED]
            assert reader.get_ranges(["a"], [[0, 0, 9, 0]], out).tolist() == [DAMAGED]
        pool.forget(["a"])
        assert pool.put("a", data)
        assert np.array_equal(got(pool, "a", size), data)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_pages_of_two_publications_make_no_object(tmp_path: Path, place: int) -> None:
    """A page that was brought back, of the object that was there before, fits no other one."""
    with ObjectPool.create(tmp_path / "slots", layout=LAYOUT, capacity="8MiB") as pool:
        records, size = pool.records, 5 * SLOT
        pool.put("a", made(1, size))
        rows = pool.hotness.published().rows
        row = rows[np.argsort(rows["born"])[::-1]][place : place + 1]  # the first is born last
        old = np.empty((1, records.shape[0]), np.uint8)
        assert records.read(row["page"].copy(), row["generation"].copy(), old).tolist() == [0]
        pool.put("a", made(2, size), replace=True)
        names = row["hash"].copy().view(np.uint8).reshape(1, 16)
        pages, generations = records.find(names)
        records.forget(pages, generations, False)
        assert records.write(old).tolist() == [0]
        assert pool.get_batch_into(["a"], [np.zeros(size, np.uint8)]).tolist() == [ABSENT]
        assert pool.put("a", made(3, size))
        assert np.array_equal(got(pool, "a", size), made(3, size))
        assert pool.forget(["a"]) == 1
        assert pool.stats()["pages_published"] == 0


def test_a_full_pool_takes_all_or_none(tmp_path: Path) -> None:
    with ObjectPool.create(tmp_path / "slots", layout=LAYOUT, capacity="8MiB") as pool:
        free = pool.stats()["pages_total"]
        pool.put("a", made(1, SIZES[4]))
        with pytest.raises(PoolFullError, match="slots of 4096 bytes wanted"):
            pool.put_batch([str(i) for i in range(free // 64)], [made(1, SIZES[4])] * (free // 64))
        assert pool.stats()["pages_free"] == free - 64
        rest = [str(i) for i in range((free - 64) // 64)]
        assert pool.put_batch(rest, [made(2, SIZES[4])] * len(rest)).all()


ORPHANS = """
import os, signal, sys
import numpy as np
from cxlkv import ObjectPool
pool = ObjectPool.open(sys.argv[1])
rows = pool.hotness.published().rows
first = rows[np.argsort(rows["born"])[-1:]]
pool.records.forget(first["page"].copy(), first["generation"].copy(), False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_death_leaves_of_an_object_makes_room(tmp_path: Path) -> None:
    """Its first page is gone, as between two steps of a forget()."""
    path = tmp_path / "slots"
    with ObjectPool.create(path, layout=LAYOUT, capacity="8MiB") as pool:
        pool.put("a", made(1, SIZES[4]))
        with Child("-c", ORPHANS, path) as child:
            child.popen.wait()
            assert child.popen.returncode == -signal.SIGKILL
        assert pool.object_sizes(["a"]).tolist() == [ABSENT]
        total = pool.stats()["pages_total"]
        assert pool.stats()["pages_free"] == total - 63
        pool.put_batch([str(i) for i in range(total)], [made(3, 100)] * total)
        assert pool.stats()["pages_free"] == 0
        audit(pool)


FILL = 0.9


@pytest.mark.parametrize("count", [20_000, nightly(1_000_000)])
def test_little_is_lost_of_a_pool_of_five_sizes(tmp_path: Path, count: int, seed: int) -> None:
    """Random puts and removes at 90 % fill: no put fails while there are slots for it, and of what
    is taken 95 % are bytes of objects."""
    draw = random.Random(seed)
    with ObjectPool.create(tmp_path / "slots", layout=LAYOUT, capacity="64MiB", threads=1) as pool:
        total = pool.stats()["pages_total"]
        free, worst = total, 1.0
        there: dict[str, tuple[int, int]] = {}
        for number in range(count):
            size = draw.choice(SIZES)
            need = -(-size // SLOT)
            while there and total - free + need > FILL * total:
                name = draw.choice(list(there)) if number % 100 == 0 else next(iter(there))
                value, gone = there.pop(name)
                if number % 50 == 0:
                    assert np.array_equal(got(pool, name, gone), made(value, gone))
                assert pool.admin.remove_objects([name]).tolist() == [0]
                free += -(-gone // SLOT)
            assert pool.put(str(number), made(number, size))
            there[str(number)] = number, size
            free -= need
            if number % 1000 == 0 and number > 2000:
                assert pool.stats()["pages_free"] == free
                stored = sum(size for _, size in there.values())
                worst = min(worst, stored / ((total - free) * SLOT))
        assert worst >= 0.95
        assert free <= (1 - FILL) * total + 64
        print(f"{count} puts: at least {worst:.3f} of what is taken are bytes of objects")
        for name, (value, size) in there.items():
            assert np.array_equal(got(pool, name, size), made(value, size))
        fits = free // 64
        assert pool.put_batch([f"+{i}" for i in range(fits)], [made(1, SIZES[4])] * fits).all()
        audit(pool)


@pytest.mark.parametrize("host", [1, 2])
def test_several_hosts(tmp_path: Path, host: int) -> None:
    """Every host reads an object whole, and no host finds one that another forgot or replaced."""
    path, data = tmp_path / "hosts", [made(i, size) for i, size in enumerate(SIZES)]
    names = [str(i) for i in range(5)]
    shared = {"sharing": "software", "hosts": 3, "host": 0, "capacity": "32MiB"}
    with (
        ObjectPool.create(path, layout=LAYOUT, **shared) as pool,  # type: ignore[arg-type]
        ObjectPool.open(path, host=host) as other,
    ):
        assert pool.put_batch(names, data).all()
        assert other.object_sizes(names).tolist() == list(SIZES)
        for name, one in zip(names, data, strict=True):
            assert np.array_equal(got(other, name, one.size), one)
        out = [np.zeros(size, np.uint8) for size in SIZES] * 2
        assert other.get_batch_into(names * 2, out).tolist() == list(SIZES) * 2
        with other.lease(names):
            assert pool.admin.remove_objects(names).tolist() == [HELD] * 5
        assert not other.put("4", data[0])
        assert pool.admin.remove_objects(["4"]).tolist() == [0]
        assert other.object_sizes(names).tolist() == [*SIZES[:4], ABSENT]
        assert other.put("4", data[3])
        assert pool.put("3", data[4], replace=True)
        assert np.array_equal(got(other, "3", SIZES[4]), data[4])
        assert np.array_equal(got(pool, "4", SIZES[3]), data[3])
        assert other.forget(["0", "2"]) == 2
        assert pool.object_sizes(names).tolist() == [
            ABSENT, SIZES[1], ABSENT, SIZES[4], SIZES[3],
        ]  # fmt: skip
        for each in (pool, other):
            audit(each)
            assert each.stats()["corrupt_pieces"] == 0
            assert each.stats()["pages_held"] == 0
