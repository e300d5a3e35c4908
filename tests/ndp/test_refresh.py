"""Budget(refresh=): a step chooses among what was best in an earlier one, and what is new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from threading import Thread

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.arrays import Floats
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Decoded, unscored
from cxlkv.sequence import Sequence

from ..support.lengths import matrix

HEADS, GROUP, DIM, PAGE_TOKENS = 2, 3, 64, 16
SCALE = DIM**-0.5
KEPT_TIMES, WANTED_SHARE = 4, 0.95


@dataclass
class Head:
    """What a kv head keeps, as the rules say it."""

    interval: int = 0
    left: int = 0
    looked: int = 0
    best: list[int] = field(default_factory=list)


class Model:
    """The choices of one sequence in one layer, from scores of all pages."""

    def __init__(self, budget: Budget, place: int):
        self.budget, self.place = budget, place
        self.heads = [Head() for _ in range(HEADS)]

    def step(self, scores: Floats) -> list[list[int]]:
        """scores [HEADS, pages]; the pages of each head."""
        return [self.choose(number, head, scores[number]) for number, head in enumerate(self.heads)]

    def choose(self, number: int, head: Head, scores: Floats) -> list[int]:
        b, pages = self.budget, len(scores)
        forced = [*range(b.sinks), *range(pages - b.recent, pages)]
        free = [*range(b.sinks, pages - b.recent)]
        wanted = b.pages_at_most(pages, 0) - len(forced)
        if head.left:
            free = [page for page in free if page in head.best or page >= head.looked]
            head.left -= 1
            return sorted([*forced, *best(free, scores, wanted)])
        chosen = sorted([*forced, *best(free, scores, wanted)])
        before = head.interval
        weights = {page: np.exp(scores[page] - scores[chosen].max()) for page in chosen}
        had = [p for p in chosen if p in head.best or p >= head.looked or p < b.sinks]
        stood = before and sum(weights[p] for p in had) >= WANTED_SHARE * sum(weights.values())
        head.interval = min(2 * before, b.refresh) if stood else max((before + 1) // 2, 1)
        head.left = head.interval - 1
        if head.interval > before and head.left:
            head.left -= (self.place + number) % head.interval
        head.best = best(free, scores, KEPT_TIMES * wanted)
        head.looked = pages - b.recent
        return chosen


def best(pages: list[int], scores: Floats, count: int) -> list[int]:
    return sorted(sorted(pages, key=lambda page: -scores[page])[:count])


class Decoding:
    """Sequences of one layer that go on token by token."""

    def __init__(self, pool: CXLPool, rng: np.random.Generator, lengths: tuple[int, ...]):
        self.pool, self.rng = pool, rng
        self.sequences = [pool.sequence() for _ in lengths]
        self.keys = [self.rows(length)[0] for length in lengths]
        for sequence, keys in zip(self.sequences, self.keys, strict=True):
            sequence.append(0, keys, self.rows(len(keys))[1])
        self.batch = pool.batch(self.sequences)

    def rows(self, count: int) -> tuple[Floats, Floats]:
        k, v = (self.rng.standard_normal((count, HEADS, DIM), np.float32) for _ in "kv")
        return k, v

    def step(self, q: Floats, budget: Budget, method: str = "exact") -> Decoded:
        k, v = self.rows(len(self.sequences))
        self.keys = [np.concatenate([old, k[i : i + 1]]) for i, old in enumerate(self.keys)]
        starts = np.arange(len(self.sequences) + 1, dtype=np.int32)
        return self.batch.decode(0, q, k, v, starts, budget, method)

    def scores(self, i: int, q: Floats) -> Floats:
        """[HEADS, pages] of sequence i."""
        keys, queries = self.keys[i], q[i].reshape(HEADS, GROUP, DIM)
        by_token = SCALE * np.einsum("hgd,thd->hgt", queries, keys).max(axis=1)
        pages = range(0, len(keys), PAGE_TOKENS)
        return np.stack([by_token[:, at : at + PAGE_TOKENS].max(axis=1) for at in pages], axis=1)

    def attended(self, i: int, q: Floats, lists: list[list[int]]) -> Floats:
        starts = np.array([0, 1], np.int32)
        picked = unscored(np.array(lists, np.int32)[None], starts, "query")
        batch = self.pool.batch([self.sequences[i]])
        out = batch.attend(0, q[i : i + 1], starts, picked)[0]
        assert isinstance(out, np.ndarray)
        first: Floats = out[0]
        return first

    def walk(self, q: Floats, pace: float) -> Floats:
        """The next step's queries: mostly as they are, some of them turned."""
        turned = self.rng.standard_normal(q.shape, np.float32)
        return np.float32(np.sqrt(1 - pace**2)) * q + np.float32(pace) * turned

    def queries(self) -> Floats:
        shape = (len(self.sequences), HEADS * GROUP, DIM)
        return 3 * self.rng.standard_normal(shape, np.float32)


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    layout = KVLayout(
        layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32", page_tokens=PAGE_TOKENS
    )
    with CXLPool.create("anonymous:", layout=layout, capacity="128MiB", threads=2) as pool:
        yield pool


@matrix(
    pace=[0.0, 0.1, 0.5],
    budget=[Budget(share=0.1, refresh=8), Budget(pages=3, sinks=0, recent=1, refresh=4)],
)
def test_what_is_chosen_is_what_the_rules_say(
    pool: CXLPool, rng: np.random.Generator, budget: Budget, pace: float
) -> None:
    lengths = (640, 1501)
    decoding = Decoding(pool, rng, lengths)
    models = [Model(budget, place) for place in range(len(lengths))]
    q = decoding.queries()
    for _ in range(60):
        q = decoding.walk(q, pace)
        was_kept = [head.left > 0 for model in models for head in model.heads]
        got = decoding.step(q, budget)
        assert got.method == ("kept" if any(was_kept) else "exact")
        for i, model in enumerate(models):
            lists = model.step(decoding.scores(i, q))
            out = decoding.attended(i, q, lists)
            assert np.allclose(np.asarray(got.out)[i], out, rtol=1e-5, atol=1e-6)
    if pace == 0:
        assert {head.interval for model in models for head in model.heads} == {budget.refresh}


def test_a_kept_step_reads_little(pool: CXLPool, rng: np.random.Generator) -> None:
    """By keys a fifth of what all pages take, by sketches less than a fortieth."""
    budget = Budget(share=0.05, refresh=64)
    for method, share in (("exact", 0.22), ("two_stage", 0.025)):
        decoding = Decoding(pool, rng, (4000, 4000))
        q = decoding.queries()
        read = [decoding.step(q, budget, method) for _ in range(20)]
        least = min(got.bytes_scored for got in read)
        assert 0 < least < share * 2 * 4000 * HEADS * DIM * 4
        assert read[-1].method == "kept"


def test_estimates_choose_nearly_what_keys_would(pool: CXLPool, rng: np.random.Generator) -> None:
    decoding = Decoding(pool, rng, (4000,) * 4)  # of one alone the mean varies by 0.07
    q = decoding.queries()
    budget, starts = Budget(share=0.05, refresh=32), np.arange(5, dtype=np.int32)
    held: list[float] = []
    for _ in range(40):
        q = decoding.walk(q, 0.05)
        got = decoding.step(q, budget, "two_stage")
        exact = decoding.batch.select(0, q, starts, replace(budget, refresh=1), "exact")
        _, all_lse = decoding.batch.attend(0, q, starts)
        _, best_lse = decoding.batch.attend(0, q, starts, exact)
        share = np.exp(np.asarray(got.lse) - np.asarray(all_lse)).mean()
        held.append(float(share / np.exp(np.asarray(best_lse) - np.asarray(all_lse)).mean()))
    assert np.mean(held) > 0.7, held  # keys without any structure are the hardest


def test_another_question_looks_at_all_pages(pool: CXLPool, rng: np.random.Generator) -> None:
    """A sequence that was cut, a fork, another budget, a step that was asked for again."""
    decoding = Decoding(pool, rng, (900, 900))
    budget = Budget(pages=8, refresh=8)
    q, starts = decoding.queries(), np.array([0, 1, 2], np.int32)

    def keep() -> None:
        while decoding.step(q, budget).method != "kept":
            pass

    keep()
    other = replace(budget, pages=9)
    assert decoding.step(q, other).method == "exact"
    keep()
    for sequence in decoding.sequences:
        sequence.truncate(len(sequence) - 1)
    assert decoding.step(q, budget).method == "exact"
    keep()
    assert decoding.batch.select(0, q, starts, budget, "exact").method == "exact"
    keep()
    forks = pool.batch([sequence.fork() for sequence in decoding.sequences])
    k, v = decoding.rows(2)
    assert forks.decode(0, q, k, v, starts, budget, "exact").method == "exact"
    assert decoding.step(q, budget).method == "kept"  # which the forks have not disturbed
    assert decoding.step(q, replace(budget, union="layer")).method == "exact"


def test_what_is_kept_outlives_the_batch(pool: CXLPool, rng: np.random.Generator) -> None:
    """Requests come and go: another batch goes on where the last one was."""
    decoding = Decoding(pool, rng, (900, 700, 500))
    budget, q = Budget(pages=8, refresh=8), decoding.queries()
    while decoding.step(q, budget).method != "kept":
        pass
    decoding.batch = pool.batch([*decoding.sequences[::-1]])
    decoding.sequences.reverse()
    decoding.keys.reverse()
    assert decoding.step(q[::-1].copy(), budget).method == "kept"


def test_a_step_of_several_rows_beside_others(pool: CXLPool, rng: np.random.Generator) -> None:
    """A prompt's chunk looks at all pages; the sequence beside it goes on with what it kept."""
    decoding = Decoding(pool, rng, (900, 700))
    budget, q = Budget(pages=8, refresh=8), decoding.queries()
    while decoding.step(q, budget).method != "kept":
        pass
    k, v = decoding.rows(5)
    rows = np.concatenate([q[:1], np.repeat(q[1:], 4, axis=0)])
    got = decoding.batch.decode(0, rows, k, v, np.array([0, 1, 5], np.int32), budget, "exact")
    assert got.method == "kept"
    alone = decoding.batch.select(
        0, rows, np.array([0, 1, 5], np.int32), replace(budget, refresh=1), "exact"
    )
    wanted, _ = decoding.batch.attend(0, rows, np.array([0, 1, 5], np.int32), alone)
    assert np.array_equal(np.asarray(got.out)[1:], np.asarray(wanted)[1:])


def test_threads_with_one_sequence(pool: CXLPool, rng: np.random.Generator) -> None:
    """One of them has what was kept; the others look at all pages. None is wrong."""
    sequence: Sequence = pool.sequence()
    k = rng.standard_normal((2000, HEADS, DIM), np.float32)
    sequence.append(0, k, k)
    q = rng.standard_normal((HEADS * GROUP, DIM), np.float32)
    wanted = sequence.select(0, q, Budget(pages=9), method="exact").pages
    found: list[bool] = []

    def ask() -> None:
        own = pool.batch([sequence])
        starts = np.array([0, 1], np.int32)
        for _ in range(200):
            got = own.select(0, q[None], starts, Budget(pages=9, refresh=4), "exact")
            found.append(bool((got.pages[0] == wanted).all()))

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    assert all(found)


@pytest.mark.parametrize("refresh", [0, -1, 1025])
def test_a_refresh_that_is_none(refresh: int) -> None:
    with pytest.raises(BadArgumentError, match="refresh="):
        Budget(refresh=refresh)
