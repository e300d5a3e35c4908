"""Random walks over a pool beside a model of plain lists: same contents, same pages, same errors.

The model knows a sequence as the ids of its tokens, from which K and V follow, and a page as an
object that lives while something names it. So it predicts the number of free pages, when the pool
is full, which handles are stale and what a match finds, and after each step the pool must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cxlkv import Budget, CXLPool, Hit, KVLayout, PoolFullError, Selection, Sequence
from cxlkv.arrays import Doubles, Floats
from cxlkv.errors import BadArgumentError, OrderError, StaleError, UnevenError

from .support import kept, reference
from .support.lengths import nightly

LAYERS, HEADS, DIM, VALUE_DIM, PAGE_TOKENS = 2, 2, 3, 2, 4
TOKEN_IDS = 2  # few, so that sequences agree in prefixes
USABLE_PAGES = 20  # the rest is taken away at the start, so that the pool is full often
KEYS_TABLE = np.random.default_rng(1).integers(-4, 5, (LAYERS, 64, TOKEN_IDS, HEADS, DIM))
VALUES_TABLE = np.random.default_rng(2).integers(-4, 5, (LAYERS, 64, TOKEN_IDS, HEADS, VALUE_DIM))


SEEN: Counter[str] = Counter()  # what the walks came by: without it they would show nothing


class Page:
    """A page of the pool, as the model knows it."""

    published = False  # under any key; a page has one at most
    dead = False


@dataclass(eq=False)
class Twin:
    """A sequence and what it must hold: token ids (of layer 0), layer 1's length, its pages."""

    real: Sequence
    ids: list[int] = field(default_factory=list)
    finished: int = 0  # tokens that the last layer has
    pages: list[Page] = field(default_factory=list)
    export: Page | None = None  # the tail's copy, for handles
    export_tokens: int | None = None

    @property
    def is_even(self) -> bool:
        return self.finished == len(self.ids)

    def length(self, layer: int) -> int:
        return len(self.ids) if layer == 0 else self.finished

    def contents(self, layer: int, first: int = 0) -> tuple[Floats, Floats]:
        ids = self.ids[first : self.length(layer)]
        places = np.arange(first, first + len(ids)) % 64
        return (
            KEYS_TABLE[layer, places, ids].astype(np.float32),
            VALUES_TABLE[layer, places, ids].astype(np.float32),
        )


@dataclass
class Handle:
    data: bytes
    ids: list[int]
    pages: list[Page]
    with_tail: bool


@dataclass
class Pinned:
    real: Hit
    ids: list[int]
    pages: list[Page]


def keys_of(ids: list[int], tokens_per_key: int, salt: int) -> list[bytes]:
    ends = range(tokens_per_key, len(ids) + 1, tokens_per_key)
    return [bytes([salt, *ids[:end]]) for end in ends]


indexes = st.integers(0, 2**16)
id_lists = st.lists(st.integers(0, TOKEN_IDS - 1), max_size=12)
short_lists = st.lists(st.integers(0, TOKEN_IDS - 1), max_size=3)
tokens_per_key = st.sampled_from([1, 3, 4, 6, 8, 9])
salts = st.integers(0, 1)


class PoolModel(RuleBasedStateMachine):
    """near: what attention may be off by; step: what fetch gives may be."""

    encodings = ("none", "none")
    tables: tuple[Doubles, Doubles] = (
        KEYS_TABLE.astype(np.float64),
        VALUES_TABLE.astype(np.float64),
    )
    near, step = 1e-5, 0.0

    def __init__(self) -> None:
        super().__init__()
        layout = KVLayout(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=DIM,
            value_head_dim=VALUE_DIM,
            page_tokens=PAGE_TOKENS,
            dtype="float32",
            k_encoding=self.encodings[0],
            v_encoding=self.encodings[1],
        )
        self.pool = CXLPool.create("anonymous:", layout=layout, capacity="2600KiB", threads=1)
        total = self.pool.stats()["pages_total"]
        self.ballast = self.pool.pages.alloc(total - USABLE_PAGES)
        self.twins: list[Twin] = []
        self.hits: list[Pinned] = []
        self.handles: list[Handle] = []
        self.index: dict[tuple[bytes, int], tuple[Page, int]] = {}  # to (page, its ordinal)
        self.alive: set[Page] = set()

    # ---- the model's own bookkeeping ----

    def free(self) -> int:
        alive = {page for page, _ in self.index.values()}
        holders: list[Twin | Pinned] = [*self.twins, *self.hits]
        for holder in holders:
            alive.update(holder.pages)
        alive.update(t.export for t in self.twins if t.export is not None)
        for page in self.alive - alive:
            page.dead = True
        self.alive = alive
        return USABLE_PAGES - len(alive)

    def twin(self, index: int) -> Twin:
        return self.twins[index % len(self.twins)]

    def walk(self, ids: list[int], per_key: int, salt: int) -> list[Page]:
        """What match() must find."""
        found: list[Page] = []
        for key in keys_of(ids, per_key, salt):
            place = 0
            while self.index.get((key, place), (None, -1))[1] == len(found):
                found.append(self.index[key, place][0])
                place += 1
        return found

    def unchanged_after(self, error: type[Exception], call: Callable[[], object]) -> None:
        """`call` must fail so, and leave the pool as it was; the contents are the invariants'."""
        SEEN[error.__name__] += 1
        before = self.pool.stats()
        with pytest.raises(error):
            call()
        after = self.pool.stats()
        before["stale_handles"] = after["stale_handles"]
        assert after == before

    def make_room(self) -> None:
        """Few sequences and hits at a time, so that the walk meets each of them again."""
        while len(self.twins) > 5:
            self.twins.pop(0).real.release()
        while len(self.hits) > 2:
            self.hits.pop(0).real.release()

    # ---- rules ----

    @initialize(ids=id_lists, rest=id_lists)
    def begin(self, ids: list[int], rest: list[int]) -> None:
        """Two sequences that agree in a prefix, as most rules need some."""
        for own in (ids, ids + rest):
            self.twins.append(Twin(self.pool.sequence()))
            self.append(len(self.twins) - 1, own, True)

    @rule()
    def create(self) -> None:
        self.make_room()
        self.twins.append(Twin(self.pool.sequence()))

    @rule(
        index=indexes,
        ids=id_lists,
        finish=st.booleans(),
    )
    def append(self, index: int, ids: list[int], finish: bool) -> None:
        twin = self.twin(index)
        grown = Twin(twin.real, twin.ids + ids, 0)
        k, v = grown.contents(0, len(twin.ids))
        needed = len(grown.ids) // PAGE_TOKENS - len(twin.pages)
        if needed > self.free():
            self.unchanged_after(PoolFullError, lambda: twin.real.append(0, k, v))
            return
        twin.real.append(0, k, v)
        twin.ids = grown.ids
        twin.pages = twin.pages + [Page() for _ in range(needed)]
        if finish:
            self.catch_up(index, 99)

    @rule(index=indexes, count=st.integers(1, 20))
    def catch_up(self, index: int, count: int) -> None:
        """The last layer gets some of the tokens that the first one has."""
        twin = self.twin(index)
        count = min(count, len(twin.ids) - twin.finished)
        k, v = Twin(twin.real, twin.ids, twin.finished + count).contents(1, twin.finished)
        if twin.finished + count == len(twin.ids):
            again = np.concatenate([k, k[:1]]), np.concatenate([v, v[:1]])
            if count:
                self.unchanged_after(OrderError, lambda: twin.real.append(1, *again))
        twin.real.append(1, k, v)
        twin.finished += count

    @rule(first=indexes, ids=id_lists)
    def append_to_all(self, first: int, ids: list[int]) -> None:
        """One batch: all sequences grow, or none does."""
        start = first % len(self.twins)
        twins = [t for t in self.twins[start:] + self.twins[:start] if t.is_even]
        if not twins:
            return
        batch = self.pool.batch([t.real for t in twins])
        own = [ids[: len(ids) * (i + 1) // len(twins)] for i in range(len(twins))]
        starts = np.concatenate([[0], np.cumsum([len(x) for x in own])])
        grown = [
            Twin(t.real, t.ids + x, len(t.ids) + len(x)) for t, x in zip(twins, own, strict=True)
        ]
        new = [len(g.ids) // PAGE_TOKENS - len(t.pages) for g, t in zip(grown, twins, strict=True)]
        full = sum(new) > self.free()
        for layer in range(LAYERS):
            parts = [g.contents(layer, len(t.ids)) for g, t in zip(grown, twins, strict=True)]
            k, v = (np.concatenate(x) for x in zip(*parts, strict=True))
            if full:
                self.unchanged_after(PoolFullError, partial(batch.append, 0, k, v, starts))
                return
            batch.append(layer, k, v, starts)
        for twin, made, count in zip(twins, grown, new, strict=True):
            twin.ids, twin.finished = made.ids, made.finished
            twin.pages = twin.pages + [Page() for _ in range(count)]

    @rule(index=indexes)
    def fork(self, index: int) -> None:
        twin = self.twin(index)
        if not twin.is_even:
            self.unchanged_after(UnevenError, twin.real.fork)
            return
        self.make_room()
        if twin not in self.twins:
            return
        self.twins.append(Twin(twin.real.fork(), list(twin.ids), twin.finished, list(twin.pages)))

    @rule(index=indexes, mine=short_lists, own=short_lists)
    def diverge(self, index: int, mine: list[int], own: list[int]) -> None:
        """Parent and child write to the tail that they share."""
        before = len(self.twins)
        twin = self.twin(index)
        self.fork(index)
        if len(self.twins) > before and twin.is_even:
            child = self.twins[-1]
            for who, ids in ((twin, mine), (child, own)):
                self.append(self.twins.index(who), ids, True)
                SEEN["tails shared"] += len(child.ids) % PAGE_TOKENS > 0 and bool(ids)

    @rule(index=indexes, cut=indexes)
    def truncate(self, index: int, cut: int) -> None:
        twin = self.twin(index)
        self.unchanged_after(BadArgumentError, lambda: twin.real.truncate(len(twin.ids) + 1))
        tokens = cut % (len(twin.ids) + 1)
        twin.real.truncate(tokens)
        twin.ids, twin.finished = twin.ids[:tokens], min(twin.finished, tokens)
        twin.pages = twin.pages[: tokens // PAGE_TOKENS]
        twin.export_tokens = None

    @rule(index=indexes)
    def release(self, index: int) -> None:
        twin = self.twin(index)
        twin.real.release()
        twin.real.release()
        self.twins.remove(twin)
        if not self.twins:
            self.create()

    @rule(index=indexes)
    def export(self, index: int) -> None:
        twin = self.twin(index)
        if not twin.is_even:
            self.unchanged_after(UnevenError, lambda: twin.real.handle)
            return
        if twin.export_tokens != len(twin.ids):
            twin.export, twin.export_tokens = None, None  # the last handle's tail goes first
        has_tail = len(twin.ids) % PAGE_TOKENS > 0
        if has_tail and twin.export is None:
            if self.free() == 0:
                SEEN["export full"] += 1
                with pytest.raises(PoolFullError):
                    _ = twin.real.handle
                return
            twin.export, twin.export_tokens = Page(), len(twin.ids)
        pages = [*twin.pages, *([twin.export] if twin.export is not None else [])]
        self.handles.append(Handle(twin.real.handle, list(twin.ids), pages, has_tail))

    @precondition(lambda self: self.handles)
    @rule(index=indexes)
    def adopt(self, index: int) -> None:
        handle = self.handles[index % len(self.handles)]
        self.free()
        if any(page.dead for page in handle.pages):
            self.unchanged_after(StaleError, lambda: self.pool.adopt(handle.data))
            return
        SEEN["adopt"] += 1
        complete = handle.pages[: len(handle.ids) // PAGE_TOKENS]
        real = self.pool.adopt(handle.data)
        self.twins.append(Twin(real, list(handle.ids), len(handle.ids), list(complete)))
        self.make_room()

    @rule(index=indexes, per_key=tokens_per_key, salt=salts)
    def publish(self, index: int, per_key: int, salt: int) -> None:
        twin = self.twin(index)
        keys = keys_of(twin.ids[: twin.finished], per_key, salt)
        self.unchanged_after(
            BadArgumentError,
            lambda: self.pool.publish(twin.real, [*keys, b"one too many"], per_key),
        )
        expected = page = 0
        gap = False
        for i, key in enumerate(keys):
            place = 0
            while not gap and (page + 1) * PAGE_TOKENS <= (i + 1) * per_key:
                mine = twin.pages[page]
                if (key, place) not in self.index:
                    if mine.published:
                        gap = True
                        SEEN["gap"] += 1
                        break
                    self.index[key, place] = (mine, page)
                    mine.published = True
                    expected += 1
                page, place = page + 1, place + 1
        assert self.pool.publish(twin.real, keys, per_key) == expected

    @rule(index=indexes, per_key=tokens_per_key, salt=salts, use=st.booleans())
    def match(self, index: int, per_key: int, salt: int, use: bool) -> None:
        """A hit never holds more than agrees; half of them go on as sequences."""
        ids = self.twin(index).ids
        if self.index and index % 2:
            key = sorted(self.index)[index // 2 % len(self.index)][0]
            salt, ids = key[0], [*key[1:], *ids[:5]]
        found = self.walk(ids, per_key, salt)
        hit = self.pool.match(keys_of(ids, per_key, salt))
        assert hit.tokens == len(found) * PAGE_TOKENS
        agreed = ids[: hit.tokens]
        self.hits.append(Pinned(hit, agreed, found))
        SEEN["hit" if found else "miss"] += 1
        if use:
            self.twins.append(Twin(hit.sequence(), list(agreed), hit.tokens, list(found)))
            self.handles.append(Handle(hit.handle, agreed, found, False))
        self.make_room()

    @precondition(lambda self: self.hits)
    @rule(index=indexes)
    def unpin(self, index: int) -> None:
        self.hits.pop(index % len(self.hits)).real.release()

    @rule(index=indexes, per_key=tokens_per_key, salt=salts, skip=st.integers(0, 2))
    def forget(self, index: int, per_key: int, salt: int, skip: int) -> None:
        keys = keys_of(self.twin(index).ids, per_key, salt)[skip:]
        expected = 0
        for key in keys:
            place = 0
            while (key, place) in self.index:
                self.index.pop((key, place))[0].published = False
                expected, place = expected + 1, place + 1
        assert self.pool.forget(keys) == expected

    @rule(index=indexes, layer=st.integers(0, LAYERS - 1), seed=indexes)
    def score(self, index: int, layer: int, seed: int) -> None:
        """select and attend against the reference, on whole numbers."""
        twin = self.twin(index)
        if twin.length(layer) == 0:
            return
        keys, values = self.kept(twin, layer)
        rows = min(1 + seed % 3, len(keys))
        queries = np.random.default_rng(seed).integers(-2, 3, (rows, 2 * HEADS, DIM))
        budget = Budget(pages=1 + seed % 4, sinks=seed % 2, recent=seed % 3)
        starts = np.array([0, rows], np.int32)
        q = queries.astype(np.float32)
        got = twin.real.select(layer, q, budget, scale=1)
        want = reference.select([keys], q, starts, [budget], page_tokens=PAGE_TOKENS, scale=1)
        self.compare_choice(got, want)
        out, lse = twin.real.attend(layer, q, got)
        expected = reference.attend(
            [keys], [values], q, starts, page_tokens=PAGE_TOKENS, picked=got
        )
        near = self.near
        np.testing.assert_allclose(out, expected[0], rtol=near, atol=near)
        np.testing.assert_allclose(lse, expected[1], rtol=near, atol=near)

    def kept(self, twin: Twin, layer: int) -> tuple[Floats, Floats]:
        """What the pool has of a sequence."""
        ids = twin.ids[: twin.length(layer)]
        places = np.arange(len(ids)) % 64
        k, v = (table[layer, places, ids].astype(np.float32) for table in self.tables)
        return k, v

    def compare_choice(self, got: Selection, want: Selection) -> None:
        np.testing.assert_array_equal(got.pages, want.pages)
        np.testing.assert_array_equal(got.scores, want.scores)

    # ---- after each step ----

    @invariant()
    def the_pool_is_clean_and_counted(self) -> None:
        report = self.pool.admin.check()
        assert report["clean"], report["problems"]
        stats = self.pool.stats()
        parts = ("free", "held", "published_only", "quarantined", "retired")
        assert sum(stats[f"pages_{part}"] for part in parts) == stats["pages_total"]
        assert stats["pages_free"] == self.free()
        assert stats["pages_published"] == len(self.index)

    @invariant()
    def contents_are_what_was_written(self) -> None:
        for twin in self.twins:
            assert len(twin.real) == twin.finished
            for layer in range(LAYERS):
                self.compare(twin, layer)

    def compare(self, twin: Twin, layer: int) -> None:
        got = twin.real.fetch(layer)
        for array, expected in zip(got, self.kept(twin, layer), strict=True):
            pages = -(-len(expected) // PAGE_TOKENS)
            padded = np.zeros((pages * PAGE_TOKENS, *expected.shape[1:]), np.float32)
            padded[: len(expected)] = expected
            shape = (HEADS, pages, PAGE_TOKENS, expected.shape[2])
            assert isinstance(array, np.ndarray)
            wanted = padded.transpose(1, 0, 2).reshape(shape)
            if not np.array_equal(array, wanted):  # the other comparison is slow, and says where
                np.testing.assert_allclose(array, wanted, rtol=0, atol=self.step)
            assert not array.reshape(HEADS, -1, shape[-1])[:, len(expected) :].any()

    def teardown(self) -> None:
        """All released: everything is free but what is published, and that can be forgotten."""
        holders: list[Twin | Pinned] = [*self.twins, *self.hits]
        for holder in holders:
            holder.real.release()
        self.pool.pages.free(self.ballast)
        stats = self.pool.stats()
        assert stats["pages_held"] == 0
        assert stats["pages_published_only"] == len(self.index)
        assert self.pool.admin.check(deep=True)["clean"]
        self.pool.forget([key for key, place in self.index if place == 0])
        stats = self.pool.stats()
        assert stats["pages_free"] == stats["pages_total"]
        self.pool.close()


class EncodedModel(PoolModel):
    encodings = ("int8", "int4")
    tables = (
        kept.kept(KEYS_TABLE.astype(np.float32), "int8"),
        kept.kept(VALUES_TABLE.astype(np.float32), "int4"),
    )
    near, step = 0.02, 1e-5

    def compare_choice(self, got: Selection, want: Selection) -> None:
        """Pages that are as good, where two are nearly equal."""
        np.testing.assert_array_equal(got.counts, want.counts)
        one, other = (np.sort(np.asarray(picked.scores)) for picked in (got, want))
        np.testing.assert_allclose(one, other, rtol=0, atol=self.near)


# Each part is well under pytest's faulthandler_timeout.
@pytest.mark.parametrize(
    ("part", "model", "examples", "steps"),
    [
        (0, PoolModel, 100, 40),
        (0, EncodedModel, 40, 40),
        *(
            nightly(part, model, 300, 100)
            for part in range(1, 6)
            for model in (PoolModel, EncodedModel)
        ),
    ],
)
def test_random_walks_agree_with_the_model(
    part: int, model: type[PoolModel], examples: int, steps: int
) -> None:
    """More of them where something never happened: what is drawn is chance."""
    SEEN.clear()
    wanted = "PoolFullError StaleError UnevenError OrderError adopt hit miss gap".split()
    wanted.append("tails shared")
    while not all(SEEN[what] for what in wanted):
        run_state_machine_as_test(
            model, settings=settings(max_examples=examples, stateful_step_count=steps)
        )
        examples *= 2
    print(dict(SEEN))
