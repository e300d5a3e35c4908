"""The object cache: the suite of all stores without an engine, and what it leases and reserves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from threading import Event, RLock
from typing import ClassVar

import numpy as np
import pytest

from cxlkv import Buffers, KVLayout, ObjectPool, _core, object_keys
from cxlkv.adapters.common import object_cache, pools
from cxlkv.adapters.common.keys import namespace
from cxlkv.adapters.common.metrics import Counting
from cxlkv.adapters.common.object_cache import ObjectCache
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.arrays import Bytes, leading
from cxlkv.errors import BusyError, CXLKVError
from cxlkv.objects import ABSENT, Lease
from cxlkv.prefix import PageKeys

from ...support.lengths import nightly
from ...support.states import states_of
from ...support.stores import CAPACITY, StoreSuite
from ...support.threads import run_all
from ...support.waiting import until

SIZE, BYTES = 96 << 10, 64 << 10
SPACE = bytes(range(16))
KINDS = ("corrupt", "mismatch", "full", "quota", "host", "pool", "large", "changed")


def counting() -> Counting:
    return Counting([], {kind: f"it is {kind}" for kind in KINDS})


class ObjectCacheDriver:
    """Payloads of four buffers each, by their addresses."""

    payload_bytes: ClassVar[int] = SIZE

    def __init__(
        self, where: str, *, model: str = "a", salt: str = "", capacity: str = CAPACITY
    ) -> None:
        path = pools.path_for(where, f"{model}.pool")
        layout = KVLayout.objects(self.payload_bytes)
        pool, _ = pools.make_or_open(ObjectPool, path, layout, capacity)
        self.counting = counting()
        space = namespace({"model": model, "salt": salt})
        self.cache = ObjectCache(lambda: pool, space, self.counting, self.payload_bytes)

    @property
    def pool(self) -> ObjectPool:
        return self.cache.pool

    def keys(self, names: Sequence[str]) -> PageKeys:
        return self.cache.keys(names)

    def buffers(self, memory: Sequence[Bytes]) -> Buffers:
        quarter = self.payload_bytes // 4
        begins = np.array([one.ctypes.data for one in memory], np.uint64)
        addresses = begins[:, None] + np.arange(4, dtype=np.uint64) * np.uint64(quarter)
        sizes = np.full(addresses.size, quarter, np.uint64)
        return Buffers(addresses.reshape(-1), sizes, np.arange(0, addresses.size + 1, 4))

    def store(self, names: Sequence[str], payloads: Sequence[Bytes]) -> list[bool]:
        keys = self.keys(names)
        text = self.cache.text(keys)
        new = self.cache.put(keys, self.buffers(payloads), text[: len(text) - len(keys)])
        self.cache.chain(text)
        return [place < len(new) for place in range(len(names))]

    def load(self, names: Sequence[str]) -> list[Bytes | None]:
        memory = [np.full(self.payload_bytes, 7, np.uint8) for _ in names]
        good = self.cache.load(self.keys(names), self.buffers(memory))
        return [one if right else None for one, right in zip(memory, good, strict=True)]

    def exists(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = self.cache.present(self.keys(names)).tolist()
        return found

    def failures(self) -> Mapping[str, int]:
        return self.counting.failures

    def close(self) -> None:
        self.cache.close()


class TestObjectCache(StoreSuite):
    driver = ObjectCacheDriver


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ObjectCache]:
    """Cache of objects of any size."""
    path = tmp_path / "a.pool"
    pool = ObjectPool.create(path, layout=KVLayout.objects(BYTES), capacity="8MiB", threads=1)
    made = ObjectCache(lambda: pool, SPACE, counting())
    yield made
    if pool.path is not None and made.counting.failures["pool"] == 0:
        assert pool.stats()["pages_held"] == 0
        assert pool.admin.check(deep=True)["clean"]
    made.close()


def keys(*names: str) -> PageKeys:
    return object_keys(names, salt=SPACE)


def value(seed: int, size: int = BYTES) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def put(cache: ObjectCache, *names: str) -> list[bool]:
    found: list[bool] = cache.put(keys(*names), [[value(len(name))] for name in names]).tolist()
    return found


def test_what_was_put_is_leased_where_it_lies(cache: ObjectCache) -> None:
    assert put(cache, "a", "bb") == [True, True]
    assert put(cache, "a", "ccc") == [False, True]
    lease = cache.lease(keys("bb", "none", "a"))
    assert lease is not None
    assert lease.sizes.tolist() == [BYTES, ABSENT, BYTES]
    assert np.array_equal(np.asarray(lease.views[0]), value(2))
    lease.release()
    assert not cache.counting.failures.total()


def test_what_is_present(cache: ObjectCache) -> None:
    put(cache, "a", "bb", "dddd")
    there = cache.present(keys("a", "bb", "ccc", "dddd"))
    assert there.tolist() == [True, True, False, True]
    assert [leading(there), leading(there[:2]), leading(there[:0])] == [2, 2, 0]
    assert len(cache.present(keys())) == 0


def write_at(address: int, offset: int) -> None:
    """A byte of the pool's memory, as whoever got its address could."""
    one = ctypes.c_ubyte.from_address(address + offset)
    one.value ^= 1


def test_what_changed_after_it_was_published_is_found_by_verify(cache: ObjectCache) -> None:
    put(cache, "a", "bb")
    lease = cache.lease(keys("a"))
    assert lease is not None
    cache.verify(keys("a"))
    assert cache.counting.failures["changed"] == 0
    write_at(int(lease.addresses[0]), 100)
    cache.verify(keys("a"))
    cache.verify(keys("bb"))
    assert cache.counting.failures["changed"] == 1
    assert not cache.present(keys("a"))
    lease.release()


def test_a_reservation_is_published_in_place(cache: ObjectCache) -> None:
    reserved = cache.reserve([BYTES, 100])
    assert reserved is not None
    view = reserved.views[1]
    assert view is not None
    view[:] = value(3, 100).data
    assert not cache.present(keys("a"))
    assert cache.publish(reserved, 1, keys("a"))
    assert not cache.publish(reserved, 0, keys("a"))
    reserved.release()
    out = np.zeros(100, np.uint8)
    assert cache.pool.get_batch_into(keys("a"), [out]).tolist() == [100]
    assert np.array_equal(out, value(3, 100))


def test_a_pool_full_of_what_is_held_refuses(cache: ObjectCache) -> None:
    total = cache.pool.stats()["pages_total"]
    reserved = cache.reserve([1] * (total - 2))
    assert reserved is not None
    assert cache.reserve([1] * 3) is None
    assert put(cache, "a", "bb", "ccc") == [True, True], "the first ones"
    assert cache.counting.failures["full"] == 1
    lease = cache.lease(keys("a", "bb"))
    assert put(cache, "dddd") == []
    assert lease is not None
    lease.release()
    assert cache.reserve([1], evict=False) is None
    assert put(cache, "dddd") == [True]
    reserved.release()


def test_wrong_sizes_are_refused(cache: ObjectCache) -> None:
    assert cache.reserve([BYTES + 1]) is None
    assert len(cache.put(keys("a"), [[value(1, BYTES), b"x"]])) == 0
    assert cache.counting.failures["large"] == 2


def test_a_pool_that_is_gone_is_a_miss(
    cache: ObjectCache, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, "a")
    held = cache.reserve([1])
    assert held is not None
    with pytest.raises(BusyError):
        cache.close()
    held.release()
    cache.close()
    assert not cache.present(keys("a"))
    assert cache.lease(keys("a")) is None
    assert cache.reserve([1]) is None
    assert put(cache, "a", "bb") == []
    assert cache.forget(keys("a")) == 0
    cache.verify(keys("a"))
    assert cache.counting.failures["pool"] == 6
    assert len(caplog.records) == 1
    assert "closed" in caplog.text


# ---- with a cold file ----


@contextmanager
def over_a_file(folder: Path, sharing: str = "host") -> Iterator[ObjectCache]:
    """A cache whose pool holds some 50 objects, with a file for ten times as many."""
    path, layout = str(folder / "a.pool"), KVLayout.objects(BYTES)
    given = {"cold": f"{folder}/cold/", "cold_capacity": "32MiB", "sharing": sharing}
    settings = PoolSettings.model_validate(given)
    pool, _ = pools.make_or_open(ObjectPool, path, layout, "5MiB", shared=settings)
    made = ObjectCache(lambda: pool, SPACE, counting(), BYTES, settings=settings)
    yield made
    assert pool.stats()["pages_held"] == 0
    assert pool.admin.check(deep=True)["clean"]
    assert not made.counting.failures.total()
    made.close()


@pytest.mark.parametrize("sharing", ["host", "software"])
def test_what_had_to_go_is_present_and_comes_back(tmp_path: Path, sharing: str) -> None:
    """Also for another process, and after all have ended."""
    names = [f"object {number}" for number in range(80)]
    values = {name: value(number) for number, name in enumerate(names)}

    def check(cache: ObjectCache) -> None:
        assert cache.present(keys(*names)).all()
        for name in names:
            out = np.zeros(BYTES, np.uint8)
            assert cache.load(keys(name), [[out]]).all()
            np.testing.assert_array_equal(out, values[name])
            with cache.lease(keys(name)) as lease:  # type: ignore[union-attr]
                assert lease.sizes[0] == BYTES

    with over_a_file(tmp_path, sharing) as cache, over_a_file(tmp_path, sharing) as other:
        assert cache.pool.stats()["pages_total"] < 50
        for name in names:
            assert cache.put(keys(name), [[values[name]]]).all()
        check(cache)
        check(other)
        assert cache.present(keys("nobody's")).tolist() == [False]
    (tmp_path / "a.pool").unlink()
    with over_a_file(tmp_path, sharing) as cache:
        check(cache)


def test_what_is_forgotten_or_cleared_does_not_come_back(tmp_path: Path) -> None:
    with over_a_file(tmp_path) as cache, over_a_file(tmp_path) as other:
        names = [f"object {number}" for number in range(60)]
        for number, name in enumerate(names):
            assert cache.put(keys(name), [[value(number)]]).all()
        assert other.forget(keys(*names[:20])) == 20
        for one in (cache, other):
            assert one.present(keys(*names)).tolist() == [False] * 20 + [True] * 40
        other.clear()
        assert not cache.present(keys(*names)).any()
        assert not cache.load(keys(names[40]), [[np.zeros(BYTES, np.uint8)]]).any()


# ---- tenants with quotas ----

QUOTA = 8


class Tenant:
    """One user of a pool that both use. stored: what it has put and not forgotten, as a model."""

    def __init__(self, path: Path, number: int, rng: Random, cold: Mapping[str, object]) -> None:
        layout, self.space = KVLayout.objects(BYTES), bytes([number] * 16)
        # For two processes; a page takes a bit more than its object.
        settings = PoolSettings.model_validate({"quota": 2 * QUOTA * (BYTES + 4096), **cold})
        pool, _ = pools.make_or_open(ObjectPool, str(path), layout, "5MiB")
        self.counting = counting()
        made = partial(ObjectCache, lambda: pool, self.space, self.counting, BYTES)
        self.cache = made(settings=settings, processes=2)
        assert self.cache.quota is not None
        assert self.cache.quota.pages == QUOTA
        self.number, self.rng, self.quota = number, rng, self.cache.quota
        self.is_tiered = bool(cold)
        self.names = [f"object {one}" for one in range(20)]
        self.stored: dict[str, Bytes] = {}
        self.leases: list[Lease] = []

    def present(self) -> set[str]:
        """In the pool, whatever the cold tier has."""
        there = self.cache.pool.object_sizes(self.cache.keys(self.names)) == BYTES
        return {name for name, is_there in zip(self.names, there, strict=True) if is_there}

    def some(self, most: int) -> list[str]:
        return self.rng.sample(self.names, self.rng.randint(1, most))

    def put(self, most: int = 10) -> None:
        names = self.some(most)
        payloads = [self.stored.get(name, value(self.rng.randrange(1 << 20))) for name in names]
        count = len(self.cache.put(self.cache.keys(names), [[one] for one in payloads]))
        self.stored.update(zip(names[:count], payloads, strict=False))
        assert set(names[:count]) <= self.present()
        assert self.leases or count == min(len(names), QUOTA)

    def write_in_place(self) -> None:
        """What finds no room is given back, and nobody finds it."""
        names = [name for name in self.some(3) if name not in self.stored]
        reserved = self.cache.reserve([BYTES] * len(names)) if names else None
        if reserved is None:
            return
        for place, name in enumerate(names):
            payload = value(self.rng.randrange(1 << 20))
            np.asarray(reserved.views[place])[:] = payload
            if self.cache.publish(reserved, place, self.cache.keys([name])):
                self.stored[name] = payload
                assert name in self.present()
        reserved.release()

    def hold(self) -> None:
        if (lease := self.cache.lease(self.cache.keys(self.some(3)))) is not None:
            self.leases.append(lease)

    def let_go(self) -> None:
        while self.leases:
            self.leases.pop().release()

    def forget(self) -> None:
        name = self.rng.choice(self.names)
        self.cache.forget(self.cache.keys([name]))
        self.stored.pop(name, None)

    def check(self) -> None:
        there = self.present()
        assert there <= self.stored.keys()
        assert len(there) == self.quota.used()
        for name in self.some(3):
            out = np.zeros(BYTES, np.uint8)
            if self.cache.load(self.cache.keys([name]), [[out]]).all():
                np.testing.assert_array_equal(out, self.stored[name])
        assert len(self.present()) == self.quota.used()
        # What is read back counts, and what is held makes no room for it.
        assert self.quota.used() <= QUOTA or (self.leases and self.is_tiered)

    def step(self) -> None:
        weights = {
            self.put: 5,
            self.write_in_place: 3,
            self.hold: 1,
            self.let_go: 2,
            self.forget: 1,
        }
        self.rng.choices([*weights], [*weights.values()])[0]()


@pytest.mark.parametrize("is_tiered", [False, True], ids=["", "over a file"])
def test_tenants_make_room_for_themselves_only(tmp_path: Path, is_tiered: bool) -> None:
    seed = SystemRandom().randrange(1 << 32)
    print("seed", seed)
    cold = {"cold": f"{tmp_path}/cold/", "cold_capacity": "16MiB"} if is_tiered else {}
    rng = Random(seed)
    tenants = [Tenant(tmp_path / "a.pool", number, rng, cold) for number in range(2)]
    for _ in range(300):
        one = rng.randrange(2)
        others = tenants[1 - one].present()
        tenants[one].step()
        tenants[one].check()
        assert tenants[1 - one].present() == others
    for tenant in tenants:
        tenant.let_go()
        assert tenant.counting.failures.keys() - {"quota"} == set(KINDS) - {"quota"}
        assert tenant.counting.failures.total() == tenant.counting.failures["quota"] > 0
        assert tenant.quota.stats()["evicted_pages"] > 0
        assert tenant.cache.pool.admin.check(deep=True)["clean"]
        tenant.cache.close()


# ---- with other hosts ----

LEASE_S, NEVER_S = 0.3, 3600.0
SHARED = PoolSettings(sharing="software", hosts=4, host="auto", lease_s=LEASE_S)


class Hosts:
    """Caches of several machines on one pool, clean at the end."""

    def __init__(self, path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch):
        self._path, self._stack = path, stack
        self._looks = RLock()
        look = _core.pool_hosts

        def hosts_of(handle: _core.Handle) -> list[dict[str, int]]:
            with self._looks:
                return look(handle)

        monkeypatch.setattr(_core, "pool_hosts", hosts_of)
        monkeypatch.setattr(object_cache, "LOOKS_A_LEASE", NEVER_S / 0.01)

    def begin(self, **changes: object) -> ObjectCache:
        """Another machine."""
        settings = SHARED.model_copy(update=changes)

        def opened() -> ObjectPool:
            for state in states_of(self._path):
                state.unlink()
            layout = KVLayout.objects(BYTES)
            made = pools.make_or_open(ObjectPool, str(self._path), layout, "24MiB", shared=settings)
            return made[0]

        made = ObjectCache(opened, SPACE, counting(), BYTES, settings=settings)
        self._stack.callback(made.close)
        return made

    def lose(self, cache: ObjectCache) -> ObjectCache:
        """Another machine takes the number of one that has a lease of NEVER_S, and so beats only
        when it looks: which it does not meanwhile."""
        number = number_of(cache)
        with self._looks:
            return self.begin(host=number)


@pytest.fixture
def hosts(shm_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(shm_path, stack, monkeypatch)
    monkeypatch.undo()
    for number in range(4):
        with ObjectPool.open(shm_path, host=number, lease_s=LEASE_S, threads=1) as pool:
            assert pool.admin.check(deep=True)["clean"]
            stats = pool.stats()
            assert stats["pages_held"] == stats["pages_withdrawn"] == 0


def number_of(cache: ObjectCache) -> int:
    return next(host.number for host in cache.pool.admin.hosts() if host.is_self)


def loaded(cache: ObjectCache, *names: str) -> list[bool]:
    """Which are there; those are right."""
    memory = [np.zeros(BYTES, np.uint8) for _ in names]
    good: list[bool] = cache.load(keys(*names), [[one] for one in memory]).tolist()
    for name, one, right in zip(names, memory, good, strict=True):
        assert not right or np.array_equal(one, value(len(name))), name
    return good


def test_a_pool_that_was_lost_is_a_miss_until_it_is_open_again(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine takes the number of this one, which holds an object, and a reservation."""
    cache = hosts.begin(lease_s=NEVER_S)
    put(cache, "a", "bb")
    lease, reserved = cache.lease(keys("a")), cache.reserve([BYTES])
    assert lease is not None
    assert reserved is not None
    cache.let_go = lease.release
    before = cache.pool
    assert cache.keeps()
    other = hosts.lose(cache)
    until(lambda: not cache.keeps())
    for _ in range(2):
        assert not cache.present(keys("a")).any()
        assert loaded(cache, "a") == [False]
        assert cache.lease(keys("a")) is None
        assert cache.reserve([1]) is None
        assert put(cache, "ccc") == []
        assert cache.forget(keys("a")) == 0
        assert not cache.publish(reserved, 0, keys("ccc"))
    until(lambda: not len(lease.views) or lease.views[0] is None)
    assert cache.pool is before, "it cannot be closed yet"
    assert put(other, "dddd") == [True]
    reserved.release()
    until(lambda: cache.pool is not before)
    until(lambda: loaded(cache, "a", "bb", "ccc", "dddd") == [True, True, False, True])
    assert number_of(cache) != number_of(other)
    assert put(cache, "ccc") == [True]
    assert loaded(other, "a", "ccc") == [True, True]
    assert cache.counting.failures.total() == cache.counting.failures["host"] > 0
    until(lambda: "is open again" in caplog.text)
    said = [record.getMessage() for record in caplog.records]
    parts = ["while memory of it is in use", "counted as host", "computes until", "is open again"]
    assert [sum(part in text for text in said) for part in parts] == [1] * len(said)


def test_room_is_given_to_a_host_that_has_none(hosts: Hosts) -> None:
    """What is read stays, and what is evicted is a miss."""
    full, other = hosts.begin(), hosts.begin()
    names = ["x" * size for size in range(1, full.pool.stats()["pages_total"] + 1)]
    for name in names:
        put(full, name)
    lease = full.lease(keys(*names[-50:]))
    assert lease is not None
    until(lambda: put(other, "a", "bb") == [True, True])
    assert loaded(full, "a", "bb") == [True, True]
    assert (lease.sizes == BYTES).all()
    assert loaded(other, *names[-50:]) == [True] * 50
    assert not all(loaded(full, *names))
    lease.release()
    for cache in (full, other):
        failed = {kind for kind, count in cache.counting.failures.items() if count}
        assert failed <= {"full"}


@pytest.mark.parametrize("losses", [2, nightly(5)])
def test_any_calls_while_it_is_lost_again_and_again(hosts: Hosts, seed: int, losses: int) -> None:
    """Four threads call: none raises, and whatever they find is right."""
    cache = hosts.begin(lease_s=NEVER_S)
    names = ["x" * size for size in range(1, 13)]
    ended = Event()

    def work(number: int) -> None:
        random = Random(seed + number)
        while not ended.is_set():
            some = random.sample(names, 3)
            match random.choice(("put", "load", "lease", "reserve", "forget", "clear")):
                case "put":
                    put(cache, *some)
                case "load":
                    loaded(cache, *some)
                case "lease" if (lease := cache.lease(keys(*some))) is not None:
                    if cache.keeps():
                        for name, view in zip(some, lease.views, strict=True):
                            assert view is None or np.array_equal(view, value(len(name)))
                    lease.release()
                case "reserve" if (reserved := cache.reserve([BYTES])) is not None:
                    np.asarray(reserved.views[0])[:] = value(len(some[0]))
                    cache.publish(reserved, 0, keys(some[0]))
                    reserved.release()
                case "forget":
                    cache.forget(keys(*some))
                case "clear":
                    with suppress(CXLKVError):
                        cache.clear()

    def lose() -> None:
        try:
            for _ in range(losses):
                before = cache.pool
                taker = hosts.lose(cache)
                until(lambda: cache.pool is not before)  # noqa: B023 it is called at once
                taker.close()
        finally:
            ended.set()

    run_all([lose, *(partial(work, number) for number in range(4))])
    until(lambda: put(cache, *names) is not None and loaded(cache, *names) == [True] * 12)
    assert set(+cache.counting.failures) <= {"host", "full"}
