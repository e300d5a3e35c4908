"""What is counted against a dictionary of pages, which has no batches, races or bits; the lists and
rows that are made of it; whole processes and a worker that count together."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Sequence
from cxlkv.errors import BadArgumentError
from cxlkv.pages import HELD, NO_PAGE, HotnessSource, Published
from cxlkv.prefix import prefix_keys

from .conftest import MakePool, audit
from .support.lengths import nightly
from .support.processes import Child
from .support.sharing import shared
from .support.texts import SMALL, grown
from .test_groups import Key, Page, Twin, Walk

HEADS, DIM, PAGE = 2, 64, 4
Uses = Counter[int]
COUNT_MAX = 65535
GROUP = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")
WINDOW = 9

# name: layout, and the layers of each part
SHAPES = {
    "one part": (KVLayout.of([replace(GROUP, layers=2)], page_tokens=PAGE), [[0, 1]]),
    "window first": (
        KVLayout.of([replace(GROUP, window=WINDOW), GROUP], [0, 1], page_tokens=PAGE),
        [[0], [1]],
    ),
    "window last": (
        KVLayout.of([GROUP, replace(GROUP, window=WINDOW)], [0, 1], page_tokens=PAGE),
        [[0], [1]],
    ),
}


# ---- the model ----


@dataclass(eq=False)
class Row:
    """A page under one key."""

    page: int
    part: int
    born: int
    used: int
    parent: Row | None = None
    hits: int = 0


class HotnessWalk(Walk):
    """Also knows the pages by their ids, how often each was used, and the rows of those published.
    uses: {page: (epoch of the last use, count then)}."""

    def __init__(self, layout: KVLayout, parts: list[list[int]], seed: int) -> None:
        super().__init__(layout, parts, seed, free_pages=100)
        self.hot = self.pool.hotness
        self.ids: dict[Page, int] = {}
        self.uses: dict[Page, tuple[int, int]] = {}
        self.rows: dict[Key, Row] = {}
        self.pages_total = self.pool.stats()["pages_total"]
        self.uses_total = self.advances = self.clock = 0

    @property
    def epoch(self) -> int:
        return self.advances + self.uses_total // (4 * self.pages_total)

    def count(self, page: Page) -> int:
        then, count = self.uses.get(page, (0, 0))
        return count >> (self.epoch - then)

    def use(self, pages: list[Page]) -> None:
        """One call's; an epoch does not end in the middle of it."""
        if self.hot.enabled:
            epoch = self.epoch
            for page in pages:
                self.uses[page] = (epoch, min(self.count(page) + 1, COUNT_MAX))
            self.uses_total += len(pages)
            self.seen["uses"] += len(pages)

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.03:
            self.advances += 1
            assert self.hot.advance() == self.epoch
        elif dice < 0.05:
            self.hot.enabled = not self.hot.enabled
        elif dice < 0.15 and 0 < len(self.twins) < 12:
            self.publish(self.twins[-1])
            self.match(self.twins[0])
        else:
            super().step()

    # ---- uses ----

    def verify(self, twin: Twin) -> None:
        """What uses pages, of some sequences at once."""
        first, some = self.twins.index(twin), self.rng.random(4) < 0.5
        twins = self.twins[first : first + int(self.rng.integers(1, 4))]
        layer = int(self.rng.integers(2))
        part = self.part_of(layer)
        rows = [min(int(self.rng.integers(4)), len(t.ids)) for t in twins]
        rows = [row if self.sees(t, part, row) else 0 for t, row in zip(twins, rows, strict=True)]
        starts = np.cumsum([0, *rows]).astype(np.int32)
        queries = self.rng.standard_normal((int(starts[-1]), 2 * HEADS, DIM), np.float32)
        batch = self.pool.batch([t.real for t in twins])
        budget = Budget(
            pages=int(self.rng.integers(1, 7)),
            union=str(self.rng.choice(["kv_head", "layer"])),
            per=str(self.rng.choice(["query", "sequence"])),
        )
        method = str(self.rng.choice(["exact", "digest", "two_stage"]))
        picked = batch.select(layer, queries, starts, budget, method)
        lists = rows if budget.per == "query" else [1] * len(twins)
        of_lists = [
            t.pages[part] for t, count in zip(twins, lists, strict=True) for _ in range(count)
        ]
        chosen = [
            own[index]
            for own, indexes in zip(of_lists, picked.pages, strict=True)
            for index in indexes.flatten().tolist()
            if index in own
        ]
        self.use(chosen)
        if some[0]:
            batch.fetch(layer, picked)
            self.use(chosen)
        if some[1]:
            batch.attend(layer, queries, starts, picked)
            self.use(chosen)
        if some[2] and self.windows[part] is None:
            batch.fetch(layer)
            self.use([page for t in twins for page in t.pages[part].values()])
        if some[3]:
            batch.attend(layer, queries, starts)
            asked = [(t, row) for t, row in zip(twins, rows, strict=True) if row]
            self.use([page for t, row in asked for page in self.seen_pages(t, part, row)])

    def seen_pages(self, twin: Twin, part: int, rows: int) -> list[Page]:
        """Those that attention to all pages reads, once each."""
        low = self.window_page(part, len(twin.ids) - rows)
        return [page for index, page in twin.pages[part].items() if index >= low]

    # ---- prefixes ----

    def parent(self, key: Key) -> Row | None:
        text, part = key
        return self.rows.get((text if part else text[:-PAGE], 0))

    def publish_model(self, twin: Twin, salt: int) -> list[Key]:
        met = super().publish_model(twin, salt)
        for key in met:
            if key not in self.rows:
                self.clock += 1
                self.rows[key] = Row(self.ids[self.index[key]], key[1], self.clock, self.clock)
            self.rows[key].parent = self.parent(key)
        return met

    def matched(self, keys: list[Key]) -> None:
        for key in keys:
            row = self.rows[key]
            self.clock += 1
            row.used, row.hits, row.parent = self.clock, row.hits + 1, self.parent(key)
        self.use([self.index[key] for key in keys])

    def forget_texts(self, texts: list[tuple[int, ...]]) -> None:
        super().forget_texts(texts)
        self.rows = {key: row for key, row in self.rows.items() if key in self.index}
        alive = [None, *self.rows.values()]
        self.seen["orphans"] += any(row.parent not in alive for row in self.rows.values())

    # ---- what must hold ----

    def check(self) -> None:
        super().check()
        for twin in self.twins:
            own = [page for pages in twin.pages for _, page in sorted(pages.items())]
            for page, number in zip(own, twin.real.pages.tolist(), strict=True):
                assert self.ids.setdefault(page, number) == number
        held = self.held()
        alive = held.union(self.index.values())
        counts = {self.ids[page]: self.count(page) for page in alive}
        wanted = [counts.get(page, 0) for page in range(self.pages_total)]
        np.testing.assert_array_equal(self.hot.counts(), np.array(wanted, np.uint32))
        epochs = self.hot.epochs()
        assert all(
            epochs[self.ids[page]] == self.uses[page][0] for page in alive & self.uses.keys()
        )
        assert self.hot.epoch == self.epoch
        self.seen["epochs"] = self.epoch - self.advances
        self.check_rows({self.ids[page] for page in held}, counts)

    def check_rows(self, held: set[int], counts: dict[int, int]) -> None:
        got, alive = self.hot.published(), set(self.rows.values())
        wanted = []
        for row in sorted(alive, key=lambda row: row.page):
            parent = row.parent.page if row.parent in alive else NO_PAGE
            known = (row.page, row.born, row.used, row.hits, parent, row.part)
            wanted.append((*known, counts[row.page], HELD if row.page in held else 0))
        names = ["page", "born", "used", "hits", "parent", "part", "hotness", "flags"]
        assert [tuple(int(row[name]) for name in names) for row in got.rows] == wanted
        assert got.clock == self.clock
        assert len({tuple(row) for row in got.rows["hash"].tolist()}) == len(wanted)


@pytest.mark.parametrize("steps", [1000, nightly(3000)])
@pytest.mark.parametrize("name", SHAPES)
def test_counts_and_rows_are_a_dictionarys(name: str, steps: int, seed: int) -> None:
    walk = HotnessWalk(*SHAPES[name], seed)
    walk.run(steps, "uses", "hits", "epochs", "orphans", "another key", "full")


# ---- decay, lists ----


def attend(sequence: Sequence, times: int = 1) -> None:
    """Each complete page is used once a time."""
    for _ in range(times):
        sequence.attend(0, np.ones((4, 8), np.float32))


def test_an_open_tail_is_no_page_of_the_pool(pool: CXLPool) -> None:
    sequence = grown(pool, range(2 * PAGE + 1))
    attend(sequence)
    assert pool.hotness.counts().sum() == 2
    picked = sequence.select(0, np.ones((4, 8), np.float32), Budget(pages=3))
    assert (picked.pages == [0, 1, 2]).all()
    assert pool.hotness.counts()[sequence.pages].tolist() == [3, 3]  # 1 and one for each head
    # A page that the first layer completed is still a tail of the second one.
    rows = np.ones((PAGE - 1, 2, 8), np.float32)
    sequence.append(0, rows, rows)
    sequence.attend(1, np.ones((4, 8), np.float32))
    assert pool.hotness.counts()[sequence.pages].tolist() == [4, 4, 0]
    sequence.append(1, rows, rows)


def test_hot_and_cold_lists_are_sorted_slices(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """By count, then by id: as a full sort would have it, whatever the ties."""
    pool = make_pool("8MiB")
    for _ in range(12):
        attend(grown(pool, range(int(rng.integers(1, 9)) * PAGE)), int(rng.integers(4)))
    kept = [grown(pool, range(5 * PAGE)) for _ in range(6)]
    for times, sequence in enumerate(kept):
        attend(sequence, times // 2)  # ties
    hot, counts = pool.hotness, pool.hotness.counts().tolist()
    hottest = sorted(range(len(counts)), key=lambda page: (-counts[page], page))
    coldest = sorted(range(len(counts)), key=lambda page: (counts[page], page))
    for count in (0, 1, 7, 12, 29, len(counts), len(counts) + 5):
        assert hot.hottest(count).tolist() == hottest[:count]
        assert hot.coldest(count).tolist() == coldest[:count]
    some = rng.permutation(np.concatenate([s.pages for s in kept[1:]]))[:17]
    for count in (0, 3, 17, 18):
        among = [page for page in coldest if page in some]
        assert hot.coldest(count, some).tolist() == among[:count]
        among = [page for page in hottest if page in some]
        assert hot.hottest(count, some).tolist() == among[:count]
    assert hot.hottest(3, np.empty(0, np.uint32)).tolist() == []
    with pytest.raises(BadArgumentError, match="-1 pages"):
        hot.hottest(-1)
    with pytest.raises(BadArgumentError, match="the pool has"):
        hot.coldest(1, np.array([len(counts)], np.uint32))


def test_records_have_the_shape_of_a_hot_list(pool: CXLPool) -> None:
    source: HotnessSource = pool.hotness
    few, many = grown(pool, range(2 * PAGE)), grown(pool, range(PAGE))
    attend(few, 3)
    pool.hotness.advance()
    attend(few)
    attend(many, 40)
    assert source.name == "uses"
    hot = source.records()
    units = [*few.pages.tolist(), *many.pages.tolist()]
    assert hot.entries.tolist() == [units[0] << 16 | 2, units[1] << 16 | 2, units[2] << 16 | 40]
    assert (hot.units.tolist(), hot.counts.tolist()) == (units, [2, 2, 40])
    assert (hot.epoch, hot.counter_width) == (1, 16)
    assert source.records(3).units.tolist() == units[2:]
    assert source.records(41).entries.size == 0
    with pytest.raises(BadArgumentError, match="at least 1"):
        source.records(0)


# ---- by attention ----


def dealt(sequence: Sequence, names: npt.NDArray[np.int32], mass: npt.NDArray[np.float64]) -> Uses:
    """By page id, what an attend counts: of one list of pages of the sequence, and their shares."""
    uses: Uses = Counter()
    wanted = mass * np.count_nonzero(names >= 0)
    for name, count in zip(names.tolist(), wanted.tolist(), strict=True):
        assert abs(count % 1 - 0.5) > 1e-4, "a tie: take another seed"
        if 0 <= name < len(sequence.pages):
            uses[int(sequence.pages[name])] += round(count)
    return uses


@pytest.mark.parametrize("asks", [True, False], ids=["asked for", "by_mass"])
@pytest.mark.parametrize("per", ["query", "sequence", "all"])
def test_attention_deals_out_uses(asks: bool, per: str, rng: np.random.Generator) -> None:
    """Uses add up to the returned mass, whether a caller wants it or only the counter does."""
    layout = KVLayout.of([GROUP], page_tokens=PAGE)
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        sequences = [pool.sequence() for _ in range(3)]
        for sequence, tokens in zip(sequences, (203, 80, 9), strict=True):
            sequence.append(0, *rng.standard_normal((2, tokens, HEADS, DIM), np.float32))
        batch, starts = pool.batch(sequences), np.array([0, 2, 2, 3], np.int32)
        q = rng.standard_normal((3, 2 * HEADS, DIM), np.float32)
        picked = None
        if per != "all":
            picked = batch.select(0, q, starts, Budget(share=0.5, per=per))
        wanted, before = Uses(), pool.hotness.counts()
        mass = np.asarray(batch.attend(0, q, starts, picked, page_mass=True)[2], np.float64)
        if not asks:
            pool.hotness.by_mass = True
            before = pool.hotness.counts()
            batch.attend(0, q, starts, picked)
        for i, sequence in enumerate(sequences):
            own = mass[starts[i] : starts[i + 1]]
            if len(own) == 0:
                continue
            if picked is None:
                names = np.arange(sequence.page_count(0), dtype=np.int32)
                wanted += dealt(sequence, names, own.mean(axis=(0, 1))[: len(names)])
                continue
            rows = range(len(own)) if per == "query" else [slice(None)]
            for row in rows:
                names = picked.pages[starts[i] + row if per == "query" else i]
                for head in range(HEADS):
                    shares = own[row, head] if per == "query" else own[:, head].mean(axis=0)
                    wanted += dealt(sequence, names[head], shares)
        counted = pool.hotness.counts().astype(np.int64) - before
        assert {int(page): int(counted[page]) for page in np.flatnonzero(counted)} == wanted
        assert sum(wanted.values()) > 20
        pool.hotness.enabled = False
        before = pool.hotness.counts()
        batch.attend(0, q, starts, picked, page_mass=True)
        assert (pool.hotness.counts() == before).all()


def test_a_decode_counts_as_its_parts_do(rng: np.random.Generator) -> None:
    counts = []
    rows = rng.standard_normal((2, 103, HEADS, DIM), np.float32)
    q = rng.standard_normal((1, 2 * HEADS, DIM), np.float32)
    k, v = rows[:, -1:]
    for whole in (True, False):
        with CXLPool.create(
            "anonymous:", layout=KVLayout.of([GROUP], page_tokens=PAGE), capacity="8MiB"
        ) as pool:
            sequence = pool.sequence()
            sequence.append(0, *rows[:, :-1])
            batch, starts = pool.batch([sequence]), [0, 1]
            pool.hotness.by_mass = whole
            assert pool.hotness.by_mass == whole
            if whole:
                batch.decode(0, q, k, v, starts, Budget(share=0.5), "exact")
                batch.decode(0, q, k, v, starts)
            else:
                batch.append(0, k, v, starts)
                picked = batch.select(0, q, starts, Budget(share=0.5), "exact")
                batch.attend(0, q, starts, picked, page_mass=True)
                batch.append(0, k, v, starts)
                batch.attend(0, q, starts, page_mass=True)
            counts.append(pool.hotness.counts().tolist())
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 3


# ---- published pages, with literal ids ----


def family(got: Published) -> dict[int, tuple[int, int, int, int]]:
    """{page: (parent, born, used, hits)}"""
    names = ("page", "parent", "born", "used", "hits")
    rows = [[int(row[name]) for name in names] for row in got.rows]
    return {page: (parent, born, used, hits) for page, parent, born, used, hits in rows}


def test_a_match_learns_of_another_parent(pool: CXLPool) -> None:
    """A page goes, and another copy of it comes by a text that ends with it."""
    ids = list(range(3 * PAGE))
    whole, short = grown(pool, ids), grown(pool, ids[: 2 * PAGE])
    pool.publish_prefix(whole, ids)
    pool.forget(prefix_keys(ids, PAGE)[1:2])
    pool.publish_prefix(short, ids[: 2 * PAGE])
    last = int(whole.pages[2])
    assert family(pool.hotness.published())[last][0] == NO_PAGE
    pool.match_prefix(ids).release()
    assert family(pool.hotness.published())[last][0] == short.pages[1]


@pytest.mark.parametrize("per_key", [1, 2, 3, 6, 8, 12])
def test_parents_where_keys_are_no_pages(pool: CXLPool, per_key: int) -> None:
    sequence = grown(pool, range(24))
    pool.publish(sequence, [f"k{i}".encode() for i in range(24 // per_key)], per_key)
    pages = sequence.pages.tolist()
    tree = family(pool.hotness.published())
    assert [tree[page][0] for page in pages] == [NO_PAGE, *pages[:-1]]


def test_rows_say_who_is_held_and_name_generations(pool: CXLPool) -> None:
    sequence = grown(pool, range(2 * PAGE))
    pool.publish(sequence, [b"k"], 2 * PAGE)
    rows = pool.hotness.published()
    assert rows.held.tolist() == [True, True]
    before = rows.rows["generation"].tolist()
    pages = sequence.pages.tolist()
    sequence.release()
    assert pool.hotness.published().held.tolist() == [False, False]
    hit = pool.match([b"k"])
    assert pool.hotness.published().held.tolist() == [True, True]
    hit.release()
    pool.match([b"k"], lease_s=1e-9)  # over when it begins
    assert pool.hotness.published().held.tolist() == [False, False]
    pool.forget([b"k"])
    again = grown(pool, range(2 * PAGE))
    assert again.pages.tolist() == pages
    pool.publish(again, [b"k"], 2 * PAGE)
    after = pool.hotness.published().rows["generation"].tolist()
    assert after == [generation + 1 for generation in before]


# ---- several processes, hosts, and a worker ----


ATTEND = """
import sys
import numpy as np
from cxlkv import CXLPool
with CXLPool.open(sys.argv[1], threads=1) as pool:
    sequence = pool.adopt(bytes.fromhex(sys.argv[3]))
    for _ in range(int(sys.argv[2])):
        sequence.attend(0, np.ones((4, 8), np.float32))
"""


def test_processes_count_together(path: Path) -> None:
    """Three at one time, each its own pages, so that no use is lost; then one pool's total."""
    with CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1) as pool:
        sequences = [grown(pool, range(3 * PAGE)) for _ in range(3)]
        times = [300, 400, 500]
        with contextlib.ExitStack() as stack:
            for child in [
                stack.enter_context(Child("-c", ATTEND, path, count, sequence.handle.hex()))
                for sequence, count in zip(sequences, times, strict=True)
            ]:
                child.end()
        assert pool.hotness.epoch == 0  # nothing was halved
        counts = [pool.hotness.counts()[s.pages].tolist() for s in sequences]
        assert counts == [[count] * 3 for count in times]
        audit(pool)


SERVE = """
import sys
from cxlkv import CXLPool
from cxlkv.ndp.worker import serve
with CXLPool.open(sys.argv[1], threads=1) as pool:
    serve(pool._handle, lambda line: print(line, flush=True))
"""


def test_what_a_worker_does_is_counted_once(path: Path) -> None:
    with (
        CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1) as pool,
        Child("-c", SERVE, path) as worker,
    ):
        assert "serves" in worker.hear()
        pool.use_worker("only", deadline_s=30)
        sequence = grown(pool, range(5 * PAGE + 1))
        query = np.ones((4, 8), np.float32)
        wanted = np.zeros(5, np.int64)
        for pages in (1, 2, 4):
            picked = sequence.select(0, query, Budget(pages=pages, sinks=0, recent=1))
            sequence.attend(0, query, picked)
            chosen = picked.pages[(picked.pages >= 0) & (picked.pages < 5)]
            wanted += 2 * np.bincount(chosen, minlength=5)
        sequence.attend(0, query)
        wanted += 1
        mass = np.asarray(sequence.attend(0, query, page_mass=True)[2])
        wanted += np.rint(mass.mean(axis=0)[:5] * 6).astype(np.int64)
        assert pool.worker.selects == 3
        assert pool.worker.attends == 5
        assert pool.hotness.counts()[sequence.pages].tolist() == wanted.tolist()
        assert pool.hotness.counts().sum() == wanted.sum()
        worker.end(signal.SIGTERM)


def test_a_pool_that_is_opened_again_knows_no_uses(path: Path) -> None:
    layout, _ = SHAPES["window last"]
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        rows = np.zeros((4 * PAGE, HEADS, DIM), np.float32)
        for layer in range(2):
            sequence.append(layer, rows, rows)
        pool.publish(sequence, [b"k"], 4 * PAGE)
        pool.match([b"k"]).release()
        before = pool.hotness.published().rows
        assert len(before) == 8
        assert before["hits"].sum() > 0
    with CXLPool.open(path, threads=1) as pool:
        after = pool.hotness.published()
        for name in ("page", "generation", "hash", "part"):
            np.testing.assert_array_equal(after.rows[name], before[name])
        for name in ("used", "born", "hits", "hotness", "flags"):
            assert not after.rows[name].any()
        assert (after.rows["parent"] == NO_PAGE).all()
        assert after.clock == pool.hotness.epoch == 0
        pool.match([b"k"]).release()  # which sees the chain again
        tree = pool.hotness.published().rows
        found = {int(row["page"]): int(row["parent"]) for row in tree if row["part"] == 0}
        chain = list(found)
        assert list(found.values()) == [NO_PAGE, *chain[:-1]]


def test_a_parent_that_was_forgotten_is_none(path: Path) -> None:
    """Even if nothing is known of its birth."""
    with CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1) as pool:
        pool.publish_prefix(grown(pool, range(2 * PAGE)), list(range(2 * PAGE)))
    with CXLPool.open(path, threads=1) as pool:
        ids = list(range(2 * PAGE))
        pool.match_prefix(ids).release()
        first, second = pool.hotness.published().rows["page"].tolist()
        assert family(pool.hotness.published())[second][0] == first
        assert pool.forget(prefix_keys(ids, PAGE)[:1]) == 1
        assert family(pool.hotness.published()) == {second: (NO_PAGE, 0, 2, 1)}


def test_hosts_list_their_own_pages_and_see_pins(path: Path) -> None:
    """What another host has pinned is held; its own pages are its own to list."""
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(shared(path, SMALL, (2 << 20) + (500 << 10)))
        two = stack.enter_context(CXLPool.open(path, host=1, threads=1))
        ids = list(range(3 * PAGE))
        sequence = grown(one, range(3 * PAGE))
        one.publish_prefix(sequence, ids)
        pages = sequence.pages.tolist()
        sequence.release()
        assert one.hotness.published().held.tolist() == [False] * 3
        hit = two.match_prefix(ids)
        assert hit.tokens == 3 * PAGE
        assert one.hotness.published().rows["page"].tolist() == pages
        assert one.hotness.published().held.tolist() == [True] * 3
        assert one.hotness.published().rows["hits"].tolist() == [0] * 3  # of this host's
        assert len(two.hotness.published().rows) == 0
        attend(hit.sequence())
        assert two.hotness.counts()[pages].tolist() == [2] * 3
        assert one.hotness.counts()[pages].tolist() == [0] * 3
        hit.release()
