"""The suite that every store for an engine passes; a driver says how the engine stores and loads.

    class TestMyStore(StoreSuite):
        driver = MyDriver

A store keeps payloads of one size under names, in a pool of objects that its processes share. What
a payload holds follows from its name and a number, so whoever loads one can tell whether it is
right. Nothing that is wrong with the pool may raise: it is a miss, or not stored, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

import numpy as np
import pytest

from cxlkv import ObjectPool
from cxlkv.arrays import Bytes
from cxlkv.errors import CXLKVError
from cxlkv.prefix import PageKeys

from ..conftest import audit
from .damaging import damage_object
from .processes import Child
from .threads import run_all

ROOT = Path(__file__).resolve().parents[2]
CAPACITY = "8MiB"
OUR_TESTS = f"""
import sys, types
tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [{str(ROOT / "tests")!r}]
from tests.support import stores
"""
"""Programs begin with it: an engine's packages may have put another `tests` where ours is."""


class Driver(Protocol):
    """A store of one engine's process."""

    payload_bytes: ClassVar[int]
    """Bytes of every payload. CAPACITY holds 8 of them at least, and not 200."""

    def __init__(
        self, where: str, *, model: str = "a", salt: str = "", capacity: str = CAPACITY
    ) -> None:
        """Open the store in a folder (which ends in /), or in the pool at a path."""

    @property
    def pool(self) -> ObjectPool: ...

    def keys(self, names: Sequence[str]) -> PageKeys:
        """Under which the pool has the payloads of these names."""

    def store(self, names: Sequence[str], payloads: Sequence[Bytes]) -> list[bool]:
        """In one call of the engine's; which of them the store has then."""

    def load(self, names: Sequence[str]) -> list[Bytes | None]:
        """In one call of the engine's; None: a miss."""

    def exists(self, names: Sequence[str]) -> list[bool]: ...

    def failures(self) -> Mapping[str, int]:
        """Counts since the start, "corrupt", "mismatch", "full" and others."""

    def close(self) -> None: ...


DriverClass = type[Driver]


class Open(Protocol):
    """Another engine, in the test's folder or at another place."""

    def __call__(self, place: str = ..., *, model: str = ..., salt: str = ...) -> Driver: ...


def payload(name: str, size: int, number: int = 0) -> Bytes:
    """What the store should have under a name; another one for another number."""
    digest = blake2b(f"{name} {number}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).integers(0, 256, size, np.uint8)


class StoreBasics:
    """What needs no other process, for stores whose processes take long to start."""

    driver: ClassVar[DriverClass]

    @pytest.fixture
    def where(self, tmp_path: Path) -> str:
        """A folder; what lies in it when the test has ended must be clean."""
        return f"{tmp_path}/"

    @pytest.fixture
    def open_(self, where: str) -> Iterator[Open]:
        """Each call is another engine in the folder."""
        opened: list[Driver] = []

        def another(place: str = where, *, model: str = "a", salt: str = "") -> Driver:
            opened.append(self.driver(place, model=model, salt=salt))
            return opened[-1]

        yield another
        for one in opened:
            one.close()
        for path in Path(where).rglob("*.pool"):
            with ObjectPool.open(path) as pool:
                audit(pool)
            with suppress(CXLKVError):
                ObjectPool.remove(path)

    @pytest.fixture
    def store(self, open_: Open) -> Driver:
        return open_()

    # ---- what a test needs ----

    def payloads(self, names: Sequence[str], number: int = 0) -> list[Bytes]:
        return [payload(name, self.driver.payload_bytes, number) for name in names]

    def fill(self, store: Driver, names: Sequence[str]) -> None:
        assert store.store(names, self.payloads(names)) == [True] * len(names)

    def loaded(self, store: Driver, names: Sequence[str]) -> list[bool]:
        """Which of them are hits; what is one must be right."""
        found = store.load(names)
        for name, one in zip(names, found, strict=True):
            if one is not None:
                assert np.array_equal(one, payload(name, self.driver.payload_bytes)), name
        return [one is not None for one in found]

    # ---- hits and misses ----

    def test_what_was_stored_is_loaded(self, store: Driver) -> None:
        names = ["one", "two", "three"]
        assert store.exists(names) == [False] * 3
        assert self.loaded(store, names) == [False] * 3
        self.fill(store, names)
        assert store.exists(names) == [True] * 3
        assert self.loaded(store, ["absent", *names[::-1], "absent, too"]) == [
            False,
            *[True] * 3,
            False,
        ]
        assert self.loaded(store, names) == [True] * 3, "a load takes nothing away"
        assert not any(store.failures().values())

    def test_none_at_all(self, store: Driver) -> None:
        assert store.store([], []) == []
        assert store.load([]) == []
        assert store.exists([]) == []

    def test_what_is_stored_twice_stays(self, store: Driver) -> None:
        self.fill(store, ["one"])
        given = [payload("one", self.driver.payload_bytes, 1), *self.payloads(["two"])]
        assert store.store(["one", "two"], given) == [True, True]
        assert self.loaded(store, ["one", "two"]) == [True, True]

    def test_another_engine_finds_it_and_so_does_the_next(self, open_: Open) -> None:
        first, second = open_(), open_()
        self.fill(first, ["one"])
        self.fill(second, ["two"])
        assert first.pool.path == second.pool.path
        assert self.loaded(second, ["one"]) == [True]
        first.close()
        second.close()
        third = open_()
        assert self.loaded(third, ["one", "two", "three"]) == [True, True, False]

    def test_another_model_or_tenant_is_a_miss(self, open_: Open, tmp_path: Path) -> None:
        """In a folder, and in one pool, whose objects have the same size for both."""
        for place in (f"{tmp_path}/", f"{tmp_path}/one.pool"):
            store, other, tenant = open_(place), open_(place, model="b"), open_(place, salt="b")
            self.fill(store, ["one"])
            for another in (other, tenant):
                assert another.exists(["one"]) == [False]
                assert self.loaded(another, ["one"]) == [False]
                given = [payload("one", self.driver.payload_bytes, 1)]
                assert another.store(["one"], given) == [True]
                found = another.load(["one"])[0]
                assert found is not None
                assert np.array_equal(found, given[0])
            assert self.loaded(store, ["one"]) == [True]
        assert other.pool.path == store.pool.path, "the last place was a pool"

    # ---- what goes wrong ----

    def test_a_damaged_object_is_a_miss_and_stored_again(self, open_: Open) -> None:
        first, second = open_(), open_()
        names = ["one", "two", "three"]
        self.fill(first, names)
        with ObjectPool.open(str(first.pool.path)) as pool:
            damage_object(pool, first.keys(["two"]))
        assert self.loaded(second, names) == [True, False, True]
        assert second.failures()["corrupt"] == 1
        assert first.exists(names) == [True, False, True], "it is forgotten"
        self.fill(second, names)
        assert self.loaded(second, names) == [True] * 3
        third = open_()
        assert self.loaded(third, names) == [True] * 3
        assert not any(third.failures().values())

    def test_an_object_of_another_size_is_a_miss(self, store: Driver) -> None:
        """Whatever has put it there, shorter or as long as a page of the pool."""
        whole = bytes(int(store.pool.layout.object_bytes or 0))
        for number, wrong in enumerate((b"x", whole[:-1] if whole else b"", whole), start=1):
            name = f"name {number}"
            store.pool.put_batch(store.keys([name]), [wrong])
            found = store.load([name])[0]
            if found is not None:  # zeros of the right size are no mistake
                assert len(wrong) == found.size
                assert not found.any()
                continue
            assert sum(store.failures().values()) >= number
            self.fill(store, [name])
            assert self.loaded(store, [name]) == [True]

    def test_a_full_pool_lets_the_oldest_go(self, store: Driver) -> None:
        names = [f"name {i}" for i in range(240)]
        for first in range(0, 240, 4):
            self.fill(store, names[first : first + 4])
        hits = self.loaded(store, names)
        assert not all(hits)
        assert hits[-4:] == [True] * 4
        assert not any(store.failures().values())

    def test_of_texts_that_go_the_beginnings_stay(self, store: Driver) -> None:
        """Those of a call are a text, whose last payloads nobody finds without its first."""
        texts = store.pool.stats()["pages_total"] // 6 + 8
        named = [[f"{text}, {block}" for block in range(6)] for text in range(texts)]
        for text in named:
            self.fill(store, text)
        there = [store.exists(text) for text in named]
        assert any(0 < sum(some) < 6 for some in there)
        for some in there:
            assert some == [True] * sum(some) + [False] * (6 - sum(some))

    def test_a_pool_that_is_full_of_what_is_used(self, store: Driver) -> None:
        """Nothing can go, so nothing new is stored; what is there is loaded, and all goes on."""
        self.fill(store, ["one", "two"])
        pool = store.pool
        with pool.lease(store.keys(["one", "two"])):
            taken = pool.pages.alloc(pool.stats()["pages_free"])
            assert store.store(["three"], self.payloads(["three"])) == [False]
            assert store.failures()["full"] == 1
            assert self.loaded(store, ["one", "two", "three"]) == [True, True, False]
            pool.pages.free(taken[:1])
            there = store.store(["three", "four"], self.payloads(["three", "four"]))
            assert there == [True, False], "the first ones, as a text's beginning is worth more"
            pool.pages.free(taken[1:])
        self.fill(store, ["four"])
        assert self.loaded(store, ["one", "two", "three", "four"]) == [True] * 4

    def test_a_batch_of_more_than_the_pool(self, store: Driver) -> None:
        names = [f"name {i}" for i in range(200)]
        there = store.store(names, self.payloads(names))
        count = there.index(False)
        assert 0 < count == sum(there)
        assert self.loaded(store, names) == there

    def test_what_is_read_is_not_taken_away(self, open_: Open) -> None:
        """Its bytes stay while somebody reads them in place; nobody finds it any more."""
        store = open_()
        self.fill(store, ["one", "two"])
        with (
            ObjectPool.open(str(store.pool.path)) as pool,
            pool.lease(store.keys(["one"])) as lease,
        ):
            before = np.asarray(lease.views[0]).copy()
            assert store.pool.forget(store.keys(["one"])) == 1
            assert store.exists(["one", "two"]) == [False, True]
            assert self.loaded(store, ["one", "two"]) == [False, True]
            self.fill(store, ["one", *(f"name {i}" for i in range(8))])
            assert np.array_equal(np.asarray(lease.views[0]), before)
        assert self.loaded(store, ["one"]) == [True]

    def test_the_file_is_removed_under_it(self, open_: Open) -> None:
        """A user that has it open goes on; the next one makes another."""
        store = open_()
        self.fill(store, ["one"])
        os.unlink(str(store.pool.path))
        self.fill(store, ["two"])
        assert self.loaded(store, ["one", "two"]) == [True, True]
        other = open_()
        assert self.loaded(other, ["one", "two"]) == [False, False]
        self.fill(other, ["one"])
        assert self.loaded(other, ["one"]) == [True]
        assert not any(store.failures().values())

    def test_the_file_is_cut_short_under_it(self, tmp_path: Path) -> None:
        """Its memory is gone where the file was: misses, and no signal."""
        folder = tmp_path / "short"
        folder.mkdir()
        store = self.driver(f"{folder}/")
        self.fill(store, ["one", "two"])
        os.truncate(str(store.pool.path), 4096)
        for _ in range(2):
            assert self.loaded(store, ["one", "two"]) == [False, False]
            store.store(["three"], self.payloads(["three"]))
        assert any(store.failures().values())
        with suppress(CXLKVError):  # whatever: it must not end the process
            store.close()

    # ---- many ----

    def test_several_threads(self, store: Driver, seed: int) -> None:
        def work(number: int) -> None:
            random = Random(seed + number)
            for _ in range(40):
                names = random.sample([f"name {i}" for i in range(12)], 3)
                if random.random() < 0.4:
                    self.fill(store, names)
                else:
                    self.loaded(store, names)

        run_all(partial(work, number) for number in range(4))
        assert not any(store.failures().values())

    def test_many_calls_against_a_dictionary(self, open_: Open, seed: int) -> None:
        """Two engines use one pool, and one of them begins anew now and then."""
        random, there = Random(seed), dict[str, int]()
        engines = [open_(), open_()]
        for step in range(200):
            names = random.sample([f"name {i}" for i in range(8)], random.randrange(1, 5))
            which = random.randrange(2)
            engine = engines[which]
            match random.choice(("store", "load", "load", "exists", "forget", "begin")):
                case "store":
                    assert engine.store(names, self.payloads(names, step)) == [True] * len(names)
                    there = {**dict.fromkeys(names, step), **there}
                case "load":
                    for name, found in zip(names, engine.load(names), strict=True):
                        assert (found is not None) == (name in there), name
                        if found is not None:
                            wanted = payload(name, self.driver.payload_bytes, there[name])
                            assert np.array_equal(found, wanted), name
                case "exists":
                    assert engine.exists(names) == [name in there for name in names]
                case "forget":
                    engine.pool.forget(engine.keys(names))
                    there = {name: there[name] for name in there if name not in names}
                case "begin":
                    engine.close()
                    engines[which] = open_()
        assert not any(sum(engine.failures().values()) for engine in engines)


class StoreSuite(StoreBasics):
    """All of it: also with processes of the engine's."""

    def test_what_another_process_stored(self, open_: Open, where: str) -> None:
        with self.other("store_some", where, 5) as engine:
            engine.end()
        assert self.loaded(open_(), [f"name {i}" for i in range(6)]) == [*[True] * 5, False]

    @pytest.mark.parametrize("lines", [1, 6, 13])
    def test_an_engine_is_killed(self, open_: Open, where: str, lines: int) -> None:
        """While it stores; what it had stored is there and right, and nothing is lost of the
        pool."""
        told = []
        with self.other("store_on", where, 0) as engine:
            for _ in range(lines):
                told.append(int(engine.hear()))
                engine.tell("go on")
        assert told == list(range(lines))
        store = open_()
        names = [f"name {4 * i + k}" for i in told for k in range(4)]
        assert any(self.loaded(store, names))
        self.loaded(store, [f"name {4 * lines + k}" for k in range(4)])
        names = [f"other {i}" for i in range(200)]
        for first in range(0, 200, 4):
            self.fill(store, names[first : first + 4])
        audit(store.pool)
        assert not any(store.failures().values())

    def other(self, function: str, where: str, count: int) -> Child:
        """Another process, which calls store_some() or store_on()."""
        words = (self.driver.__module__, self.driver.__name__, where, count)
        return Child("-c", f"{OUR_TESTS}stores.{function}{words!r}")


def driver_named(module: str, name: str) -> DriverClass:
    found: DriverClass = getattr(import_module(module), name)
    return found


def store_some(module: str, name: str, where: str, count: int) -> None:
    store = driver_named(module, name)(where)
    names = [f"name {i}" for i in range(count)]
    assert all(store.store(names, [payload(one, store.payload_bytes) for one in names]))
    store.close()


def store_on(module: str, name: str, where: str, batch: int) -> None:
    """Stores 4 in a call, says which call it was, and waits to be told to go on."""
    store = driver_named(module, name)(where)
    while True:
        names = [f"name {4 * batch + i}" for i in range(4)]
        assert all(store.store(names, [payload(one, store.payload_bytes) for one in names]))
        print(batch, flush=True)
        input()
        batch += 1
