"""The suite that every engine's adapter passes; a driver says how its engine makes K and V.

    class TestMyEngine(AdapterSuite):
        driver = MyDriver

Texts are lists of token ids; what a request attends to follows from its ids alone, so that a
request that went on from stored pages can be compared with one that made all of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.common.keys import block_keys, namespace
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.arrays import Doubles
from cxlkv.errors import BadArgumentError, CorruptError, PoolFullError
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.tiers import Tiers

from ..conftest import audit
from .damaging import damage_piece

ROOT = Path(__file__).resolve().parents[2]
CAPACITY = "8MiB"


class Driver(Protocol):
    """An engine as the suite needs it, over a pool of its layout()."""

    page_size: ClassVar[int]
    """Tokens of a key, a page of the pool or several."""

    def __init__(self, pool: CXLPool, tiers: Tiers | None = None) -> None: ...

    @property
    def adapter(self) -> PoolRequests: ...

    @staticmethod
    def layout() -> KVLayout: ...

    def give(self, request: str, ids: list[int]) -> None:
        """Make K and V of those of ids that the request lacks; raises PoolFullError as append."""

    def attends(self, request: str, ids: list[int]) -> Doubles:
        """K and V that it sees, and what attention makes of them; raises CorruptError."""

    def query(self) -> object:
        """One row of queries, for select()."""


DriverClass = type[Driver]


class AdapterSuite:
    driver: ClassVar[DriverClass]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "pool"

    @pytest.fixture
    def open_(self, path: Path) -> Iterator[Callable[[], Driver]]:
        """Each call is another engine on one pool; what they leave in it must be clean."""
        pools: list[CXLPool] = []

        def another() -> Driver:
            if not pools:
                pool = CXLPool.create(path, layout=self.driver.layout(), capacity=CAPACITY)
            else:
                pool = CXLPool.open(path)
            pools.append(pool)
            return self.driver(pool)

        yield another
        for pool in pools[1:]:
            pool.close()
        if pools:
            audit(pools[0])
            pools[0].close()

    @pytest.fixture
    def engine(self, open_: Callable[[], Driver]) -> Driver:
        return open_()

    def keys(self, ids: list[int], space: str = "a") -> PageKeys:
        size = self.driver.page_size
        hashes = list(prefix_keys(ids, size))
        return block_keys(hashes, size, namespace({"model": space}))

    def text(self, blocks: float, start: int = 0) -> list[int]:
        """So many blocks of ids, other ones for another start."""
        count = int(blocks * self.driver.page_size)
        return [1 + (start * 31 + i * (7 + start)) % 61 for i in range(count)]

    def fresh(self, engine: Driver, request: str, ids: list[int]) -> Doubles:
        """What a request attends to that made all itself."""
        assert engine.adapter.load(request, None, 0) == 0
        engine.give(request, ids)
        return engine.attends(request, ids)

    def stored(self, engine: Driver, ids: list[int], request: str = "first") -> Doubles:
        seen = self.fresh(engine, request, ids)
        assert engine.adapter.store(request, self.keys(ids)) > 0
        return seen

    def loaded(self, engine: Driver, ids: list[int], request: str = "second") -> int:
        """Begins a request as an engine does: the last token is never taken from a hit."""
        size = self.driver.page_size
        keys = self.keys(ids)[: (len(ids) - 1) // size]
        with engine.adapter.match(keys) as hit:
            handle = hit.handle if hit else None
            return engine.adapter.load(request, handle, hit.tokens, keys)

    def matched(self, engine: Driver, ids: list[int], space: str = "a") -> int:
        with engine.adapter.match(self.keys(ids, space)) as hit:
            return hit.tokens

    # ---- hits ----

    def test_a_hit_is_what_was_stored(self, engine: Driver) -> None:
        ids, size = self.text(3.5), self.driver.page_size
        wanted = self.stored(engine, ids)
        assert self.loaded(engine, ids) == 3 * size
        engine.give("second", ids)
        same(engine.attends("second", ids), wanted)
        for name in ("first", "second"):
            engine.adapter.release(name)
        assert self.loaded(engine, ids, "third") == 3 * size, "prefixes stay"
        engine.give("third", ids)
        same(engine.attends("third", ids), wanted)
        engine.adapter.release("third")
        assert not engine.adapter.failures()

    def test_a_prefix_that_parts(self, engine: Driver) -> None:
        size = self.driver.page_size
        ids = self.text(4)
        self.stored(engine, ids)
        other = ids[: 2 * size + 1] + self.text(2, start=3)
        wanted = self.fresh(engine, "alone", other)
        assert self.loaded(engine, other) == 2 * size
        engine.give("second", other)
        same(engine.attends("second", other), wanted)
        assert engine.adapter.store("second", self.keys(other)) > 0
        assert self.matched(engine, other) == len(other) // size * size
        assert self.matched(engine, ids) == 4 * size
        release(engine, "first", "second", "alone")

    def test_other_words_in_the_namespace_are_a_miss(self, engine: Driver) -> None:
        ids = self.text(2)
        self.stored(engine, ids)
        assert self.matched(engine, ids, "b") == 0
        assert self.matched(engine, self.text(2, start=5)) == 0
        assert self.matched(engine, []) == 0
        release(engine, "first")

    def test_fewer_tokens_than_the_hit(self, engine: Driver) -> None:
        """All that were asked for, or where layers have windows those that a shorter hit has."""
        ids, size = self.text(3.5), self.driver.page_size
        self.stored(engine, ids)
        short = ids[: 2 * size + 1]
        wanted = self.fresh(engine, "alone", short)
        keys = self.keys(ids)
        with engine.adapter.match(keys) as hit:
            has = engine.adapter.load("second", hit.handle, 2 * size - 1, keys)
            with pytest.raises(BadArgumentError, match="tokens"):
                engine.adapter.load("third", hit.handle, hit.tokens + 1, keys)
            for tokens in range(1, hit.tokens + 1):
                before = engine.adapter.failures()["window"]
                got = engine.adapter.load("any", hit.handle, tokens, keys)
                lacks = engine.adapter.failures()["window"] - before
                assert got == (tokens // size * size if lacks else tokens)
                release(engine, "any")
        assert has == 2 * size - 1 or engine.adapter.failures()["window"]
        assert set(engine.adapter.failures()) <= {"window"}
        engine.give("second", short)
        same(engine.attends("second", short), wanted)
        release(engine, "first", "second", "alone", "third")

    def test_two_requests_share_pages(self, engine: Driver, path: Path) -> None:
        ids = self.text(3) + self.text(0.5, start=2)
        wanted = self.stored(engine, ids)
        with CXLPool.open(path) as pool:
            before = pool.stats()["pages_free"]
            assert self.loaded(engine, ids, "second") == 3 * self.driver.page_size
            assert self.loaded(engine, ids, "third") == 3 * self.driver.page_size
            assert pool.stats()["pages_free"] == before
        for name in ("second", "third"):
            engine.give(name, ids)
        release(engine, "first", "second")
        same(engine.attends("third", ids), wanted)
        release(engine, "third")

    def test_selected_pages(self, engine: Driver) -> None:
        ids = self.text(6)
        self.stored(engine, ids)
        picked = engine.adapter.sequence("first").select(0, engine.query(), Budget(pages=3))
        assert picked.pages.shape[0] == self.driver.layout().kv_heads
        assert 0 < picked.counts.max() <= 3
        release(engine, "first")

    def test_what_one_process_stored_another_loads(self, engine: Driver, path: Path) -> None:
        ids, size = self.text(3.5), self.driver.page_size
        wanted = self.stored(engine, ids)
        release(engine, "first")
        with engine.adapter.match(self.keys(ids)) as hit:
            found = path.with_suffix(".npy")
            driver = (self.driver.__module__, self.driver.__name__)
            words = (*driver, str(path), hit.handle.hex(), str(found), ids)
            program = f"import sys; sys.path.append({str(ROOT)!r})\n"
            program += f"from tests.support import adapters; adapters.other_process(*{words!r})"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        assert int(done.stdout) == 3 * size
        same(np.load(found), wanted)

    # ---- one thing after another ----

    def test_requests_that_are_not_there(self, engine: Driver) -> None:
        ids = self.text(1)
        adapter = engine.adapter
        adapter.release("nobody")
        for use in (
            lambda: adapter.store("nobody", self.keys(ids)),
            lambda: adapter.sequence("nobody"),
        ):
            with pytest.raises(BadArgumentError, match="nobody is not there"):
                use()
        adapter.load("one", None, 0)
        with pytest.raises(BadArgumentError, match="one is there already"):
            adapter.load("one", None, 0)
        release(engine, "one", "one")
        adapter.load("one", None, 0)
        release(engine, "one")

    def test_storing_twice_and_more(self, engine: Driver) -> None:
        ids, size = self.text(4.5), self.driver.page_size
        adapter, keys = engine.adapter, self.keys(ids)
        adapter.load("one", None, 0)
        assert adapter.store("one", keys) == 0
        engine.give("one", ids[: size // 2])
        assert adapter.store("one", keys) == 0, "nothing is complete"
        engine.give("one", ids[: 2 * size])
        first = adapter.store("one", keys)
        assert first > 0
        assert adapter.store("one", keys) == 0
        engine.give("one", ids)
        assert adapter.store("one", keys[:3]) > 0, "no more than there are keys"
        assert self.matched(engine, ids) == 3 * size
        assert adapter.store("one", keys) > 0
        self.fresh(engine, "two", ids)
        assert adapter.store("two", keys) == 0, "the first copy stays"
        assert self.matched(engine, ids) == 4 * size
        release(engine, "one", "two")

    # ---- faults ----

    def test_a_handle_whose_pages_are_gone(self, engine: Driver, path: Path) -> None:
        ids = self.text(3.5)
        keys, adapter = self.keys(ids), engine.adapter
        self.stored(engine, ids)
        with adapter.match(keys) as hit:
            handle, tokens = hit.handle, hit.tokens
        release(engine, "first")
        with CXLPool.open(path) as pool:
            assert pool.forget(keys) > 0
        assert adapter.load("second", handle, tokens, keys) == 0
        assert adapter.load("third", handle, tokens) == 0
        assert adapter.failures() == {"stale": 2}
        wanted = self.fresh(engine, "alone", ids)
        engine.give("second", ids)
        same(engine.attends("second", ids), wanted)
        assert adapter.store("second", keys) > 0
        release(engine, "second", "third", "alone")

    @pytest.mark.parametrize("kind", ["keys", "values"])
    def test_a_damaged_page_is_a_miss(
        self, open_: Callable[[], Driver], path: Path, kind: str
    ) -> None:
        """Found by a process that has not read it before; the key is forgotten, once for all."""
        first, second = open_(), open_()
        ids, size = self.text(4.5), self.driver.page_size
        wanted = self.stored(first, ids)
        damage(path, self.keys(ids), block=2, kind=kind)
        with second.adapter.match(self.keys(ids)) as hit:
            assert second.adapter.load("no keys", hit.handle, hit.tokens) == 0
            assert second.adapter.failures() == {"corrupt": 1}
        assert self.loaded(second, ids) == 2 * size
        assert second.adapter.failures()["corrupt"] == 2
        for engine in (first, second):
            assert self.matched(engine, ids) == 2 * size
        second.give("second", ids)
        same(second.attends("second", ids), wanted)
        release(first, "first")
        assert second.adapter.store("second", self.keys(ids)) > 0
        assert self.matched(first, ids) == 4 * size, "what was behind the damage is found again"
        release(second, "second", "no keys")

    def test_damage_that_is_found_later(self, engine: Driver, path: Path) -> None:
        """Its own pages a process does not verify when it loads them: reading does."""
        ids, size = self.text(4.5), self.driver.page_size
        wanted = self.stored(engine, ids)
        assert self.loaded(engine, ids) == 4 * size
        assert engine.adapter.mend(self.keys(ids)) == []
        engine.give("second", ids)
        damage(path, self.keys(ids), block=3, kind="values")
        with pytest.raises(CorruptError):
            engine.attends("second", ids)
        assert engine.adapter.mend(self.keys(ids)) == [3]
        assert self.matched(engine, ids) == 3 * size
        release(engine, "first", "second")
        assert self.loaded(engine, ids) == 3 * size
        engine.give("second", ids)
        same(engine.attends("second", ids), wanted)
        release(engine, "second")

    @pytest.mark.parametrize("left", [0, 1, 2])
    def test_a_full_pool(self, engine: Driver, path: Path, left: int) -> None:
        """Also in the middle of a pass, where some layers have got their pages."""
        ids, size = self.text(3.2), self.driver.page_size
        adapter = engine.adapter
        wanted = self.stored(engine, ids)
        release(engine, "first")
        with CXLPool.open(path) as pool:
            taken = pool.pages.alloc(pool.stats()["pages_free"] - left)
            assert self.loaded(engine, ids) == 3 * size
            longer = ids + self.text(3, start=4)
            with pytest.raises(PoolFullError):
                engine.give("second", longer)
            adapter.store("second", self.keys(longer))
            assert 3 * size <= self.matched(engine, longer) < len(longer) - size
            release(engine, "second")
            assert self.loaded(engine, ids) == 3 * size, "the engine goes on"
            engine.give("second", ids)
            same(engine.attends("second", ids), wanted)
            pool.pages.free(taken)
            engine.give("second", longer)
            assert adapter.store("second", self.keys(longer)) > 0
        alone = self.fresh(engine, "alone", longer)
        same(engine.attends("second", longer), alone)
        release(engine, "second", "alone")

    # ---- many ----

    @pytest.mark.parametrize("cold", [False, True])
    def test_eviction_keeps_what_is_used(self, path: Path, cold: bool) -> None:
        """Texts of more than the pool, twice: what is found of them is right."""
        below = path.with_suffix(".cold") if cold else None
        capacity = "32MiB" if cold else None
        with (
            CXLPool.create(path, layout=self.driver.layout(), capacity=CAPACITY) as pool,
            Tiers(pool, policy="lru", cold=below, cold_capacity=capacity) as tiers,
        ):
            engine = self.driver(pool, tiers)
            taken = pool.pages.alloc(pool.stats()["pages_free"] - 24 * self.pages_a_key())
            kept = self.text(2.2)
            wanted = self.stored(engine, kept, "kept")
            first: dict[int, Doubles] = {}
            for start in [*range(1, 13), *range(1, 13)]:
                ids = self.text(3.2, start)
                has = self.loaded(engine, ids, "one")
                engine.give("one", ids)
                seen = engine.attends("one", ids)
                same(seen, first.setdefault(start, seen))
                engine.adapter.store("one", self.keys(ids))
                release(engine, "one")
            assert (has > 0) == cold, "the last one to come was the longest away"
            assert self.matched(engine, kept) == 2 * self.driver.page_size
            same(engine.attends("kept", kept), wanted)
            assert tiers.stats()["evicted_pages"] > 0
            release(engine, "kept")
            pool.pages.free(taken)
            audit(pool)

    def pages_a_key(self) -> int:
        layout = self.driver.layout()
        return self.driver.page_size // layout.page_tokens * len(set(layout.windows))

    def test_many_requests_against_a_dictionary(
        self, open_: Callable[[], Driver], seed: int
    ) -> None:
        Walk(self, [open_(), open_()], seed).run()


class Walk:
    """Random requests of two engines on one pool, and a dictionary of what is published."""

    STEPS = 120

    def __init__(self, suite: AdapterSuite, engines: list[Driver], seed: int) -> None:
        self.suite, self.engines, self.random = suite, engines, Random(seed)
        self.published: set[bytes] = set()
        self.live: dict[str, tuple[Driver, list[int]]] = {}
        self.wanted: dict[tuple[int, ...], Doubles] = {}
        self.made = self.hits = 0

    def ids(self) -> list[int]:
        """One of a few texts that share beginnings, up to somewhere."""
        whole: list[int] = []
        for _ in range(4):
            whole += self.suite.text(1, self.random.randrange(2))
        return whole[: self.random.randrange(1, len(whole) + 1)]

    def found(self, keys: PageKeys) -> int:
        for place, key in enumerate(keys):
            if bytes(key) not in self.published:
                return place
        return len(keys)

    def run(self) -> None:
        for _ in range(self.STEPS):
            self.random.choice((self.begin, self.begin, self.store, self.look, self.release))()
        while self.live:
            self.release()
        assert self.hits > 0
        assert not any(engine.adapter.failures() for engine in self.engines)

    def pick(self) -> str | None:
        return self.random.choice(list(self.live)) if self.live else None

    def begin(self) -> None:
        if len(self.live) >= 8:
            return self.release()
        engine, ids, name = self.random.choice(self.engines), self.ids(), f"request {self.made}"
        self.made += 1
        size = self.suite.driver.page_size
        known = self.found(self.suite.keys(ids)[: (len(ids) - 1) // size])
        assert self.suite.loaded(engine, ids, name) == known * size
        self.hits += known
        engine.give(name, ids)
        self.live[name] = engine, ids

    def store(self) -> None:
        name = self.pick()
        if name is not None:
            engine, ids = self.live[name]
            keys = self.suite.keys(ids)
            new = engine.adapter.store(name, keys)
            fresh = {bytes(key) for key in keys} - self.published
            assert (new > 0) == bool(fresh)
            self.published |= fresh

    def look(self) -> None:
        """Equal texts see the same, whoever made them."""
        name = self.pick()
        if name is not None:
            engine, ids = self.live[name]
            seen = engine.attends(name, ids)
            same(seen, self.wanted.setdefault(tuple(ids), seen))

    def release(self) -> None:
        name = self.pick()
        if name is not None:
            self.live.pop(name)[0].adapter.release(name)


def release(engine: Driver, *requests: str) -> None:
    for request in requests:
        engine.adapter.release(request)


def same(seen: Doubles, wanted: Doubles) -> None:
    assert seen.shape == wanted.shape
    np.testing.assert_allclose(seen, wanted, rtol=1e-3, atol=1e-3)


def damage(path: Path, keys: PageKeys, block: int, kind: str) -> None:
    """Changes a byte of the K or V that key number `block` names, in the pool's file."""
    with CXLPool.open(path) as pool:
        page_tokens = pool.layout.page_tokens
        places = keys.page_tokens // page_tokens
        names = pool.records.names(keys[block : block + 1].packed.tobytes(), places)
        layer = pool.layout.windows.index(None)  # its pages are all there
        part = _part_of(pool.layout, layer)
        pages, _ = pool.records.find(np.ascontiguousarray(names[0, :, part]))
        damage_piece(pool, int(pages[-1]), layer, kind)


def _part_of(layout: KVLayout, layer: int) -> int:
    """Part of a layer in a layout whose groups are kinds of windows."""
    kinds = list(dict.fromkeys(layout.windows))
    return kinds.index(layout.windows[layer])


def other_process(
    module: str, name: str, path: str, handle: str, found: str, ids: list[int]
) -> None:
    """Loads what another process has stored, goes on to the end of ids, and says what it sees."""
    driver: DriverClass = getattr(import_module(module), name)
    with CXLPool.open(path) as pool:
        engine = driver(pool)
        has = len(ids) // driver.page_size * driver.page_size
        print(engine.adapter.load("other", bytes.fromhex(handle), has))
        engine.give("other", ids)
        np.save(found, engine.attends("other", ids))
        engine.adapter.release("other")
