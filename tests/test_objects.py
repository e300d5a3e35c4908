"""The store door: objects put, got, read by ranges and in place, by any number of processes."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Buffers, CXLPool, KVLayout, ObjectPool, Tiers, object_keys
from cxlkv.arrays import Bytes
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CorruptError,
    PoolFullError,
    ReleasedError,
)
from cxlkv.objects import ABSENT, DAMAGED
from cxlkv.pool import Pool
from cxlkv.prefix import root

from .support.damaging import poke

SIZE = 64 << 10
LAYOUT = KVLayout.objects(SIZE)


def made(seed: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture(params=[(True, 1), (True, 2), (False, 1), (False, 2)], ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectPool]:
    checksum, threads = request.param
    path = tmp_path / "objects"
    with ObjectPool.create(
        path, layout=LAYOUT, capacity="16MiB", checksum=checksum, threads=threads
    ) as pool:
        yield pool
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0


def test_keys_are_what_their_module_says() -> None:
    few: list[str | bytes] = ["", "a", b"b" * 47, "c" * 48, "d" * 49, "\u20ac" * 40, b"e" * 400]
    text: list[str | bytes] = [str(i) * (i % 30) for i in range(100)]  # a few are of two blocks
    for names, salt in ((few, b""), (few, b"tenant"), (text, b""), (text + few, b"tenant")):
        keys = object_keys(names, salt)
        for key, name in zip(keys, names, strict=True):
            raw = name.encode() if isinstance(name, str) else name
            wanted = hashlib.blake2s(root(salt) + raw, digest_size=16, person=b"cxlkvobj")
            assert key == wanted.digest()


def test_what_was_put_is_got(pool: ObjectPool) -> None:
    for seed, size in enumerate((1, 63, 64, 65, 16 << 10, SIZE - 1, SIZE)):
        data, out = made(seed, size), np.full(SIZE, 7, np.uint8)
        assert pool.put(f"of {size}", data)
        assert not pool.put(f"of {size}", data[::-1].copy()), "the first one stays"
        assert pool.get_into(f"of {size}", out) == size
        assert np.array_equal(out[:size], data)
        assert (out[size:] == 7).all()
    assert pool.get_into("another", np.empty(1, np.uint8)) is None
    assert list(pool.object_sizes(["of 63", "of 62"])) == [63, ABSENT]


def test_an_object_of_several_buffers(pool: ObjectPool) -> None:
    parts = [made(seed, size) for seed, size in enumerate((1, 100, 64, 4096, 30_000, 7))]
    whole = np.concatenate(parts)
    assert pool.put("joined", parts)
    out = [np.zeros(20_000, np.uint8), bytearray(0), np.zeros(20_000, np.uint8)]
    assert pool.get_into("joined", out) == whole.size
    assert np.array_equal(np.concatenate([out[0], out[2]])[: whole.size], whole)


def test_a_batch_by_addresses(pool: ObjectPool) -> None:
    data, names = made(1, 32 * 4096), [f"n{i}" for i in range(16)]
    at = data.ctypes.data + np.arange(32) * 4096
    given = Buffers(at, np.full(32, 4096), np.arange(0, 33, 2))
    assert pool.put_batch(names, given).all()
    assert not pool.put_batch(names, given).any()
    out = np.zeros_like(data)
    got = pool.get_batch_into(
        ["absent", *names[::-1]],
        Buffers(
            np.concatenate([[out.ctypes.data], out.ctypes.data + np.arange(16)[::-1] * 8192]),
            np.full(17, 8192),
        ),
    )
    assert got.tolist() == [ABSENT] + 16 * [8192]
    assert np.array_equal(out, data)


def test_a_batch_that_goes_past_the_caches(pool: ObjectPool) -> None:
    """3.7 MiB, to places that begin and end on lines and beside them."""
    sizes = SIZE - 37 * np.arange(60)
    data = [made(seed, size) for seed, size in enumerate(sizes.tolist())]
    names = [str(i) for i in range(60)]
    assert pool.put_batch(names, data).all()
    ends = np.cumsum(sizes)
    out = np.zeros(ends[-1], np.uint8)
    order = np.random.default_rng(3).permutation(60)
    given = Buffers(out.ctypes.data + (ends - sizes)[order], sizes[order])
    assert np.array_equal(pool.get_batch_into([names[i] for i in order], given), sizes[order])
    assert np.array_equal(out, np.concatenate(data))


def test_nothing_is_asked_for(pool: ObjectPool) -> None:
    assert pool.put_batch([], []).tolist() == []
    assert pool.get_batch_into([], []).tolist() == []
    assert pool.get_ranges([], [], bytearray(0)).tolist() == []
    assert pool.object_sizes([]).tolist() == []
    with pool.lease([]) as lease, pool.reserve([]) as reserved:
        assert (lease.views, reserved.views) == ([], [])
        assert reserved.publish([]).tolist() == []
    with pool.lease(["absent", "too"]) as lease:
        assert lease.views == [None, None]
        assert lease.sizes.tolist() == [ABSENT, ABSENT]
    assert not pool.forget(object_keys([]))


def test_objects_are_forgotten_and_pinned_by_their_names(pool: ObjectPool) -> None:
    pool.put_batch(["a", b"b"], [b"x", b"y"])
    assert pool.admin.pin(["a", "absent"]) == 1
    assert pool.stats()["pages_pinned"] == 1
    assert pool.admin.unpin(object_keys(["a"])) == 1
    assert pool.object_sizes([object_keys(["b"])[0], "a"]).tolist() == [1, 1]
    assert pool.forget(["a", "b", "absent"]) == 2
    assert pool.object_sizes(["a", "b"]).tolist() == [ABSENT, ABSENT]
    with pytest.raises(BadArgumentError, match="into a list"):
        pool.forget("a")


def test_objects_are_read_and_written_where_they_lie(pool: ObjectPool) -> None:
    first, second = made(1), made(2, 1000)
    with pool.reserve([SIZE, 1000, 5]) as reserved:
        for view, data in zip(reserved.views, (first, second), strict=False):
            assert view is not None
            view[:] = data.data
        assert list(pool.object_sizes(["first", "second"])) == [ABSENT, ABSENT]
        assert reserved.publish(["first", "second"], [0, 1]).tolist() == [True, True]
        assert reserved.publish(["first"], [1]).tolist() == [False], "it has a name already"
    with pool.lease(["second", "absent", "first"]) as lease:
        assert lease.sizes.tolist() == [1000, ABSENT, SIZE]
        assert lease.views[1] is None
        assert np.array_equal(np.asarray(lease.views[0]), second)
        assert np.array_equal(np.asarray(lease.views[2]), first)
        view = lease.views[2]
        assert view is not None
        assert view.readonly
        assert lease.addresses[2] % 4096 == 0
        assert pool.forget(object_keys(["first"])) == 1
        assert pool.object_sizes(["first"])[0] == ABSENT
        pool.put("first", made(9))
        assert np.array_equal(np.asarray(view), first), "a lease keeps what was forgotten"
        with pytest.raises(BusyError, match="2 objects"):
            pool.close()
    assert pool.stats()["pages_held"] == 0


def test_a_view_keeps_its_lease(pool: ObjectPool) -> None:
    pool.put("a", made(1))
    view = pool.lease(["a"]).views[0]
    assert pool.stats()["pages_held"] == 1
    assert np.array_equal(np.asarray(view), made(1))
    del view


def test_what_was_made_of_a_view_keeps_its_object(tmp_path: Path) -> None:
    """Once a view that outlived its lease showed what another process had put there since, and was
    SIGSEGV when the pool was closed."""
    layout = KVLayout.objects(SIZE)
    pool = ObjectPool.create(tmp_path / "a", layout=layout, capacity="4MiB")
    with ObjectPool.open(tmp_path / "a") as writer:
        pool.put_batch(["a", "b"], [made(1), made(2)])
        with pool.lease(["a", "b"]) as lease:
            one, other = lease.views
            part = np.asarray(one)[: SIZE // 2]
        with pytest.raises(ValueError, match="released"):
            bytes(other or b"")
        assert lease.views == [None, None]
        assert pool.stats()["pages_held"] == 1, "nobody has a view of the other"
        assert writer.forget(["a", "b"]) == 2
        for i in range(writer.stats()["pages_free"]):
            writer.put(f"n{i}", made(7))
        assert np.array_equal(part, made(1)[: SIZE // 2])
        with pytest.raises(BusyError, match="views"):
            pool.close()
        lease.release()
        assert pool.stats()["pages_held"] == 1
        del part
        assert pool.stats()["pages_held"] == 0
        pool.close()


def test_a_view_of_a_reservation_writes_to_nobody_else(pool: ObjectPool) -> None:
    reserved = pool.reserve([SIZE, SIZE])
    array, view = np.asarray(reserved.views[0]), reserved.views[1]
    reserved.release()
    with pytest.raises(ReleasedError, match="place 1"):
        reserved.publish(["a"], [1])
    others = [f"n{i}" for i in range(pool.stats()["pages_free"])]
    pool.put_batch(others, [made(7)] * len(others))
    array[:] = made(1)
    with pytest.raises(ValueError, match="released"):
        view[:] = made(1).data  # type: ignore[index]
    assert pool.admin.check(deep=True)["clean"]
    assert pool.stats()["pages_held"] == 1
    del array
    assert pool.stats()["pages_held"] == 0


def test_what_is_published_is_not_written_any_more(pool: ObjectPool) -> None:
    with pool.reserve([4, 4]) as reserved:
        first = reserved.views[0]
        assert first is not None
        first[:] = b"abcd"
        assert reserved.publish(["a"], [0]).all()
        assert [view and view.readonly for view in reserved.views] == [True, False]
        with pytest.raises(ValueError, match="released"):
            first[0] = 1


def test_one_that_is_given_back_waits_for_its_view(pool: ObjectPool) -> None:
    pool.put_batch(["a", "b", "c"], [made(1), made(2), made(3)])
    lease = pool.lease(["a", "b", "c"])
    array = np.asarray(lease.views[-1])
    lease.release_one(-1)
    lease.release_one(0)
    assert pool.stats()["pages_held"] == 2
    assert pool.forget(["c"]) == 1
    assert np.array_equal(array, made(3))
    del array
    lease.release()
    assert pool.stats()["pages_held"] == 0


@pytest.mark.parametrize("last", ["view", "pool", "lease", "array"])
def test_a_process_ends_with_all_of_it_open(last: str) -> None:
    """In whatever order: the names are global, and one of them is read at the very end."""
    program = f"""
import atexit, numpy as np
from cxlkv import ObjectPool, KVLayout
pool = ObjectPool.create("anonymous:", layout=KVLayout.objects("4KiB"), capacity="4MiB", threads=1)
pool.put("a", b"x" * 4096)
lease = pool.lease(["a"])
view = lease.views[0]
array = np.asarray(view)[5:]
reserved = pool.reserve([100] * 3)
rooms = reserved.views
class Last:
    def __init__(self, name):
        self.kept = {{"view": view, "array": array}}
        self.one = globals()[name]
    def __del__(self): print(bytes(self.kept["view"][:2]), int(self.kept["array"][0]))
last = Last("{last}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'xx' 120\n", "")


def test_a_view_keeps_its_pool(tmp_path: Path) -> None:
    """Once it was unmapped under the view: who read on died of SIGSEGV."""
    path = tmp_path / "objects"

    def view_alone() -> memoryview:
        pool = ObjectPool.create(path, layout=LAYOUT, capacity="4MiB")
        pool.put("a", made(1))
        found = pool.lease(["a"]).views[0]
        assert found is not None
        return found

    view = view_alone()
    gc.collect()
    assert np.array_equal(np.asarray(view), made(1))
    del view
    gc.collect()
    with ObjectPool.open(path) as pool:
        stats = pool.stats()
        assert (stats["processes"], stats["pages_held"]) == (1, 0)


def test_a_close_that_is_refused_leaves_all_as_it_is(tmp_path: Path) -> None:
    """Once it had closed the pool's tiers by then."""
    layout = KVLayout.objects(SIZE)
    with ObjectPool.create(tmp_path / "a", layout=layout, capacity="4MiB") as pool, Tiers(pool):
        many = pool.stats()["pages_total"]
        ended: list[int] = []
        pool.before_close(lambda: ended.append(1))
        with pool.reserve([1]), pytest.raises(BusyError, match="1 objects"):
            pool.close()
        assert not ended
        for i in range(2 * many):
            assert pool.put(f"n{i}", b"x"), "its tiers make room"
    assert ended


def test_a_full_pool_takes_all_or_none(tmp_path: Path) -> None:
    with ObjectPool.create(tmp_path / "small", layout=LAYOUT, capacity="8MiB") as pool:
        pages = pool.stats()["pages_total"]
        names = [str(i) for i in range(pages + 1)]
        size = LAYOUT.object_bytes
        with pytest.raises(PoolFullError, match=f"takes a slot of {size} bytes, the largest size"):
            pool.put_batch(names, [b"x"] * len(names))
        assert (pool.object_sizes(names) == ABSENT).all()
        assert pool.put_batch(names[:-1], [b"x"] * pages).all()
        assert not pool.put(names[0], b"y"), "what is there needs no room"
        with pytest.raises(PoolFullError):
            pool.reserve([1])


def test_damage_is_told_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "objects"
    with ObjectPool.create(path, layout=LAYOUT, capacity="16MiB") as pool:
        data = [made(seed) for seed in range(3)]
        pool.put_batch(list("abc"), data)
        stored = path.read_bytes()
        at = stored.index(data[1].tobytes())
        poke(path, at + 12_345, bytes([data[1][12_345] ^ 1]))
        out = [np.full(SIZE, 7, np.uint8) for _ in range(3)]
        assert pool.get_batch_into(list("abc"), out).tolist() == [SIZE, DAMAGED, SIZE]
        assert not out[1].any()
        assert np.array_equal(out[0], data[0])
        assert np.array_equal(out[2], data[2])
        with pytest.raises(CorruptError, match="'b'"):
            pool.get_into("b", out[1])
        with ObjectPool.open(path) as other:
            assert other.lease(list("abc")).sizes.tolist() == [SIZE, DAMAGED, SIZE]
            ranges = [[0, 0, 10, 0], [1, 0, 10, 10], [2, 0, 10, 20]]
            assert other.get_ranges(list("abc"), ranges, out[0]).tolist() == [10, DAMAGED, 10]
        assert not pool.put("b", data[1])
        pool.forget(object_keys(["b"]))
        assert pool.put("b", data[1])
        assert pool.get_into("b", out[1]) == SIZE
        assert np.array_equal(out[1], data[1])


def test_bad_input_is_named(pool: ObjectPool) -> None:
    pool.put("a", made(1, 100))
    for wrong, words in (
        (lambda: pool.put("b", b""), "1 to 65536 bytes"),
        (lambda: pool.put("b", bytes(SIZE + 1)), "1 to 65536 bytes"),
        (lambda: pool.put("b", np.zeros((4, 4))[:, 1]), "contiguous"),
        (lambda: pool.put("b", 5), "no buffer"),
        (lambda: pool.put("b", np.array([object()])), "of Python objects"),
        (lambda: pool.put("b", Buffers(np.arange(1), np.arange(1), np.arange(2))), "not for one"),
        (lambda: pool.put(5, b"x"), "text or bytes"),  # type: ignore[arg-type]
        (lambda: pool.put_batch("ab", [b"x", b"y"]), "into a list"),
        (lambda: pool.put_batch(["a", "b"], [b"x"]), "1 objects for 2 keys"),
        (lambda: pool.get_into("a", bytearray(99)), "is 100 bytes, its buffers hold 99"),
        (lambda: pool.get_into("a", bytes(100)), "read-only"),
        (lambda: pool.get_ranges(["a"], [[0, 90, 11, 0]], bytearray(99)), "an object of 100"),
        (lambda: pool.get_ranges(["a"], [[0, 0, 11, 90]], bytearray(99)), "a buffer of 99"),
        (lambda: pool.get_ranges(["a"], [[1, 0, 11, 0]], bytearray(99)), "there are 1 keys"),
        (lambda: pool.get_ranges(["a"], [[0, -1, 11, 0]], bytearray(99)), "from 0"),
        (lambda: pool.get_ranges(["a"], [0, 1], bytearray(99)), "[m, 4]"),
        (lambda: pool.reserve([0]), "1 to 65536 bytes"),
        (lambda: pool.reserve([5]).publish(["a", "b"]), "2 keys for 1 places"),
        (lambda: pool.reserve([5]).publish(["a"], [0.5]), "places"),  # type: ignore[list-item]
        (lambda: pool.reserve([5]).publish(["a"], [-1]), "places"),
        (lambda: pool.reserve([5]).publish(["a"], [1]), "places"),
        (lambda: pool.put_batch(["b"], Buffers([1, 2], [1, 1], [0, 3])), "rising"),
    ):
        with pytest.raises(BadArgumentError) as found:
            wrong()
        assert words in str(found.value)


def test_the_pools_class_is_of_what_it_stores(tmp_path: Path) -> None:
    path = tmp_path / "objects"
    kv = KVLayout(layers=1, kv_heads=1, head_dim=64)
    with pytest.raises(BadArgumentError, match="it is a CXLPool"):
        ObjectPool.create(tmp_path / "kv", layout=kv, capacity="8MiB")
    assert not (tmp_path / "kv").exists()
    with pytest.raises(BadArgumentError, match="it is an ObjectPool"):
        CXLPool.create(path, layout=LAYOUT, capacity="8MiB")
    assert not path.exists()
    ObjectPool.create(path, layout=LAYOUT, capacity="8MiB").close()
    with pytest.raises(BadArgumentError, match="it is an ObjectPool"):
        CXLPool.open(path)
    with Pool.open(path) as pool:
        assert isinstance(pool, ObjectPool)
    with Pool.create("anonymous:", layout=kv, capacity="8MiB") as pool:
        assert isinstance(pool, CXLPool)


def test_the_layout_is_the_pools(tmp_path: Path) -> None:
    layout = KVLayout.objects("2MiB", model_id="m", shard=(1, 2, 0, 1))
    with ObjectPool.create(tmp_path / "a", layout=layout, capacity="64MiB") as pool:
        assert not pool.sketch
    with ObjectPool.open(tmp_path / "a", layout=layout) as pool:
        assert pool.layout.object_bytes == 2 << 20
        assert pool.layout.token_bytes == 1
    assert KVLayout(layers=1, kv_heads=1, head_dim=64).object_bytes is None
    for wrong in (0, (1 << 30) + 1, "2 GiB"):
        with pytest.raises(BadArgumentError):
            KVLayout.objects(wrong)
