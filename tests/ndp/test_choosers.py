"""Choosers against numpy, wherever the pages are: what they choose depends on the tokens alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.bench import loops as flushes
from cxlkv.emulation.link import emulate
from cxlkv.errors import BadArgumentError, CXLKVError, UnsupportedError
from cxlkv.layout import LayerGroup
from cxlkv.ndp import choosers, names, scorers, simd
from cxlkv.ndp.choosers import Choice, Chooser, Question
from cxlkv.ndp.engine import Selection, VirtualRows
from cxlkv.ndp.scorers import Floats
from cxlkv.prefix import prefix_keys
from cxlkv.sequence import Sequence

from ..support.forking import in_child
from ..support.texts import grown
from ..support.threads import run_all

pytest.importorskip("numba", reason="numba compiles choosers")

from cxlkv.ndp.methods import CHOOSERS, sampling

HEADS, GROUP, LAYERS, DIM, PAGE = 2, 3, 2, 64, 16
NAMES = [each.name for each in CHOOSERS]
DRAWN = ("magicpig", "vattention")
Doubles = npt.NDArray[np.float64]
RUNS = [(0, 16), (16, 32), (32, 36), (36, 40)]
"""Runs of 40 pages."""


class Texts:
    """A pool with sequences whose neighbouring keys are alike, and the queries that tests ask."""

    def __init__(self, seed: int, tokens: int = PAGE * 40 + 5, **more: object) -> None:
        print(f"seed {seed}")
        self.random = np.random.default_rng(seed)
        shape = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"} | more
        self.layout = KVLayout(page_tokens=PAGE, **shape)  # type: ignore[arg-type]
        self.pool = CXLPool.create("anonymous:", layout=self.layout, capacity="16MiB", threads=2)
        self.sequence = self.pool.sequence()
        self.append(self.sequence, tokens)
        self.queries = self.drawn(HEADS * GROUP, DIM)

    def drawn(self, *shape: int) -> Floats:
        return self.random.standard_normal(shape, np.float32)

    def rows(self, tokens: int) -> Floats:
        middle = np.repeat(self.drawn(-(-tokens // 24), HEADS, DIM), 24, axis=0)[:tokens]
        return middle + self.drawn(tokens, HEADS, DIM)

    def append(self, sequence: Sequence, tokens: int) -> None:
        for layer in range(LAYERS):
            sequence.append(layer, self.rows(tokens), self.rows(tokens))

    def twin(self, sequence: Sequence) -> Sequence:
        """The same tokens in a pool of their own, as they are kept."""
        layout = KVLayout(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="float32"
        )
        pool = CXLPool.create("anonymous:", layout=layout, capacity="16MiB", threads=1)
        made = pool.sequence()
        for layer in range(LAYERS):
            keys, values = kept(sequence, layer)
            made.append(layer, keys.swapaxes(0, 1), values.swapaxes(0, 1))
        self._pools = [*getattr(self, "_pools", []), pool]
        return made


def kept(sequence: Sequence, layer: int) -> tuple[Floats, Floats]:
    """Keys and values, decoded, [kv_heads, tokens, dim]."""
    tokens = sequence.tokens(layer)
    keys, values = (
        np.asarray(each).astype(np.float32).reshape(HEADS, -1, DIM)[:, :tokens]
        for each in sequence.fetch(layer)
    )
    return keys, values


def weights_of(picked: Selection, tokens: int) -> Floats:
    """One row's log-weights [kv_heads, tokens], -inf for what is left out."""
    found = np.full((HEADS, -(-tokens // PAGE), PAGE), -np.inf, np.float32)
    for head in range(HEADS):
        for place, page in enumerate(picked.pages[head]):
            if page >= 0:
                own = 0 if picked.log_weights is None else picked.log_weights[head, place]
                found[head, page] = own
    return found.reshape(HEADS, -1)[:, :tokens]


def attention(sequence: Sequence, layer: int, queries: Floats, picked: Selection | None) -> Doubles:
    """[q_heads, dim], in float64; None: full attention."""
    keys, values = (each.astype(np.float64) for each in kept(sequence, layer))
    tokens = keys.shape[1]
    added = np.zeros((HEADS, tokens)) if picked is None else weights_of(picked, tokens)
    out = []
    for q, query in enumerate(queries.astype(np.float64)):
        head = q // GROUP
        logits = keys[head] @ query / math.sqrt(DIM) + added[head]
        own = values[head]
        if picked is not None and picked.rows is not None:
            rows = picked.rows.k[head].astype(np.float64) @ query / math.sqrt(DIM)
            logits = np.concatenate([logits, rows + picked.rows.log_counts[head]])
            own = np.concatenate([own, picked.rows.v[head]])
        weights = np.exp(logits - logits.max())
        out.append(weights @ own / weights.sum())
    return np.array(out)


def assert_same(one: Selection, other: Selection) -> None:
    np.testing.assert_array_equal(one.pages, other.pages)
    assert (one.log_weights is None) == (other.log_weights is None)
    if one.log_weights is not None:
        np.testing.assert_array_equal(one.log_weights, other.log_weights)
    assert (one.rows is None) == (other.rows is None)
    if one.rows is not None and other.rows is not None:
        for name in ("k", "v", "log_counts"):
            np.testing.assert_array_equal(getattr(one.rows, name), getattr(other.rows, name))


# ---- the references: which tokens, with which weights; keys [tokens, dim] of one kv head ----


def nearest(keys: Floats, count: int, centred: bool) -> npt.NDArray[np.int64]:
    keys = keys - keys.mean(0) if centred else keys
    rows = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    first = keys if centred else rows
    centres = np.array([first[int((i + 0.5) * len(rows) / count)] for i in range(count)])
    for _ in range(9):
        cells = (rows @ centres.T).argmax(1)
        for cell in set(cells.tolist()):
            total = keys[cells == cell].sum(0)
            centres[cell] = total / np.linalg.norm(total)
    found: npt.NDArray[np.int64] = (rows @ centres.T).argmax(1)
    return found


def softmaxes(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    found: Doubles = (weights / weights.sum(1, keepdims=True)).sum(0)
    return found


def by_clusters(
    name: str, keys: Floats, values: Floats, queries: Doubles, most: int, free: range
) -> tuple[Floats, list[tuple[float, Doubles, Doubles]]]:
    """Log-weights of the free tokens, and (tokens, mean key, mean value) of clusters that are left
    out, the best first."""
    size, begin, parts = (80 if name == "clusters" else 16), 0, []
    for first, last in RUNS:
        own = keys[PAGE * first : PAGE * last]
        count = -(-len(own) // size)
        parts.append(nearest(own, count, name == "retro") + begin)
        begin += count
    every = np.concatenate(parts)
    means = np.array([keys[every == cell].mean(0) for cell in range(begin)])
    ranked = np.argsort(-softmaxes(queries @ means.T / math.sqrt(DIM)), kind="stable")
    weights: Floats = np.full(len(every), -np.inf, np.float32)
    rest: list[tuple[float, Doubles, Doubles]] = []
    for cell in ranked:
        members = [t for t in np.flatnonzero(every == cell).tolist() if t in free]
        taken, left = members[:most], members[most:]
        weights[taken] = 0
        most -= len(taken)
        if left:
            own = every == cell
            mean = values[own].mean(0).astype(np.float64)
            rest.append((len(left), means[cell].astype(np.float64), mean))
    return weights, rest[: round(0.232 * len(means))]


@pytest.mark.parametrize("name", ["clusters", "retro"])
def test_clusters_as_numpy_finds_them(name: str, seed: int) -> None:
    of = Texts(seed)
    for layer in range(LAYERS):
        picked = of.sequence.select(layer, of.queries, Budget(pages=9), method=name)
        keys, values = kept(of.sequence, layer)
        found = weights_of(picked, keys.shape[1])
        free = range(PAGE, PAGE * 39)  # the first page and the last two are in
        for head in range(HEADS):
            own = of.queries[head * GROUP : (head + 1) * GROUP].astype(np.float64)
            cut = (keys[head, : PAGE * 40], values[head, : PAGE * 40])
            right, rows = by_clusters(name, *cut, own, PAGE * (9 - 3), free)
            assert (found[head, free] == right[free]).mean() > 0.97
            assert (found[head, free] == 0).sum() == PAGE * (9 - 3)
            assert (found[head, : free[0]] == 0).all()
            assert (found[head, free[-1] + 1 :] == 0).all()
            if name == "clusters":
                assert picked.rows is None
                continue
            assert picked.rows is not None
            counts = np.exp(picked.rows.log_counts[head])
            assert (counts > 0).sum() == len(rows)
            alike = [
                abs(counts[i] - count) < 1e-3
                and np.abs(picked.rows.k[head, i] - key).max() < 1e-4
                and np.abs(picked.rows.v[head, i] - value).max() < 1e-4
                for i, (count, key, value) in enumerate(rows)
            ]
            assert np.mean(alike) > 0.8, "of neighbours of like rank two may have changed places"


def drawn_member(token: int, seed: int) -> int:
    """Which query of a group a token is hashed against."""
    mixed = (token * 2654435761 + seed) % 2**64
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD) % 2**64
    return ((mixed ^ (mixed >> 33)) >> 8) % GROUP


def test_hash_tables_as_numpy_finds_them(seed: int) -> None:
    of = Texts(seed)
    picked = of.sequence.select(0, of.queries, Budget(pages=20), method="magicpig")
    keys, _ = kept(of.sequence, 0)
    found = weights_of(picked, keys.shape[1])
    planes = sampling.planes_of(1, DIM)
    for head in range(HEADS):
        queries = of.queries[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        bits = (queries @ planes > 0).reshape(GROUP, 75, 8)
        second, chance = np.full(PAGE * 40, 99), np.zeros((PAGE * 40, 76))
        for first, last in RUNS:
            span = range(PAGE * first, PAGE * last)
            centred = keys[head, span].astype(np.float64)
            centred -= keys[head, span].mean(0)
            for t, key in zip(span, centred, strict=True):
                member = drawn_member(t, hash((1, 0, PAGE * 40 + 5)) & (2**62 - 1))
                same = ((key @ planes > 0).reshape(75, 8) == bits[member]).all(1)
                if same.sum() >= 2:
                    second[t] = np.flatnonzero(same)[1]
                cosines = queries @ key / np.linalg.norm(key) / np.linalg.norm(queries, axis=1)
                p = (1 - np.arccos(cosines) / np.pi) ** 8
                for tables in range(76):
                    twice = 1 - (1 - p) ** tables - tables * p * (1 - p) ** max(0, tables - 1)
                    chance[t, tables] = twice.mean()
        free = np.arange(PAGE, PAGE * 39)
        fits = [n for n in range(76) if (second[free] < n).sum() <= PAGE * (20 - 3)]
        drawn = second[free] < fits[-1]
        assert 0 < drawn.sum() < len(free)
        assert (drawn == (found[head, free] > -np.inf)).mean() > 0.99
        right = -np.log(np.maximum(1e-4, chance[free, fits[-1]]))
        both = drawn & (found[head, free] > -np.inf)
        np.testing.assert_allclose(found[head, free][both], right[both], atol=0.05)


def estimates(keys: Floats, queries: Doubles) -> Doubles:
    """SparQ's logits [n, tokens], of an eighth of the channels."""
    sizes = np.abs(queries)
    chosen = sizes >= np.sort(sizes, axis=1)[:, -DIM // 8, None]
    share = (sizes * chosen).sum(1) / sizes.sum(1)
    found: Doubles = (queries * chosen) @ keys.T / np.sqrt(DIM * share)[:, None]
    return found


def test_the_mean_value_stands_for_the_rest(seed: int) -> None:
    of = Texts(seed)
    picked = of.sequence.select(1, of.queries, Budget(pages=9), method="sparq_mean")
    keys, values = kept(of.sequence, 1)
    found = weights_of(picked, keys.shape[1])
    assert picked.rows is not None
    for head in range(HEADS):
        queries = of.queries[head * GROUP : (head + 1) * GROUP].astype(np.float64)
        logits = estimates(keys[head, : PAGE * 40], queries)
        rank, free = softmaxes(logits), np.arange(PAGE, PAGE * 39)
        best = free[np.argsort(-rank[free])[: PAGE * 6]]
        assert np.isin(np.flatnonzero(found[head, free] == 0) + PAGE, best).mean() > 0.98
        out = np.isinf(found[head, : PAGE * 40])
        right = queries @ keys[head, : PAGE * 40].astype(np.float64).T / math.sqrt(DIM)
        odds = np.exp(logits[:, out]).sum(1) / np.exp(logits[:, ~out]).sum(1)
        rest = np.log(odds * np.exp(right[:, ~out]).sum(1))
        row = queries @ picked.rows.k[head, 0] / math.sqrt(DIM) + picked.rows.log_counts[head, 0]
        np.testing.assert_allclose(row, rest, atol=0.05)
        np.testing.assert_allclose(
            picked.rows.v[head, 0], values[head, : PAGE * 40].mean(0), atol=1e-5
        )


def test_a_sample_is_as_large_as_its_spread_asks(seed: int) -> None:
    of = Texts(seed, tokens=PAGE * 100)
    keys, _ = kept(of.sequence, 0)
    sizes = []
    for length in (0.1, 1.0, 4.0):
        queries = of.queries * np.float32(length)
        picked = of.sequence.select(0, queries, Budget(pages=60), method="vattention")
        found = weights_of(picked, PAGE * 100)
        for head in range(HEADS):
            own = queries[head * GROUP : (head + 1) * GROUP].astype(np.float64)
            free = np.arange(PAGE, PAGE * 98)
            best, rest = PAGE * 57 // 2, len(free) - PAGE * 57 // 2
            taken = free[found[head, free] == 0]
            rank = softmaxes(estimates(keys[head], own))
            assert len(taken) == best
            assert np.isin(taken, free[np.argsort(-rank[free])[:best]]).mean() > 0.98
            drawn = free[found[head, free] > 0]
            np.testing.assert_allclose(found[head, drawn], math.log(rest / len(drawn)), rtol=1e-5)
            assert len(drawn) >= math.ceil(0.025 * rest)
            sizes.append(len(drawn))
    assert sum(sizes[:2]) < sum(sizes[2:4]), "the flatter, the fewer"


def test_the_size_of_a_sample_keeps_its_promise(seed: int) -> None:
    """A sum of that many of the rest is right by 5 % in 95 of 100 cases."""
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    chosen, rest = random.standard_normal(100) + 2, random.standard_normal(20000)
    whole = np.exp(chosen).sum() + np.exp(rest).sum()
    misses = []
    for _ in range(400):
        order = random.permutation(len(rest))
        base = np.concatenate([chosen, rest[order[:500]]])[None].astype(np.float32)
        size = sampling.sample_size(base, len(chosen), len(rest))
        assert 500 < size < len(rest)
        found = np.exp(chosen).sum() + len(rest) * np.exp(rest[order[:size]]).mean()
        misses.append(abs(found / whole - 1) > 0.05)
    assert 0.01 < np.mean(misses) < 0.15  # 1.64 deviations, of both sides: a tenth


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_stands_for_all(name: str, seed: int) -> None:
    """Over many seeds the weighed sums of what is chosen are those of all tokens."""
    of = Texts(seed, tokens=PAGE * 16)
    keys, values = kept(of.sequence, 0)
    kind = next(each for each in CHOOSERS if each.name == name)
    queries = (of.queries / np.float32(4)).reshape(HEADS, GROUP, DIM)
    tokens = PAGE * 16
    asked = Question(queries, DIM**-0.5, tokens, PAGE, tokens - PAGE, PAGE * 12, 0)
    sums = []
    for trial in range(200):
        chooser: choosers.AnyChooser = kind(seed=trial)  # type: ignore[assignment]
        states = [chooser.state(keys, values)]
        weights = chooser.choose(states, asked._replace(seed=trial)).log_weights
        sums.append(np.exp(weights[:, PAGE:-PAGE].astype(np.float64)))
    drawn = np.array(sums)  # [trials, heads, tokens]
    logits = np.einsum("hnd,htd->hnt", queries, keys)[:, :, PAGE:-PAGE] / math.sqrt(DIM)
    found = np.einsum("sht,hnt->shn", drawn, np.exp(logits))
    right, spread = np.exp(logits).sum(-1), found.std(0) / math.sqrt(len(found))
    assert (np.abs(found.mean(0) - right) < 4.5 * spread + 0.01 * right).all(), (
        found.mean(0),
        right,
    )


# ---- all of them ----


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_of_the_choice(name: str, seed: int) -> None:
    of = Texts(seed)
    for layer in range(LAYERS):
        picked = of.sequence.select(layer, of.queries, Budget(pages=9), method=name)
        assert picked.method == name
        out, _ = of.sequence.attend(layer, of.queries, picked)
        wanted = attention(of.sequence, layer, of.queries, picked)
        np.testing.assert_allclose(np.asarray(out), wanted, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_all_pages_are_full_attention(name: str, seed: int) -> None:
    of = Texts(seed)
    whole, _ = of.sequence.attend(0, of.queries)
    for budget in (Budget(share=1.0), Budget(pages=41), Budget(share=0.1, dense_layers=1)):
        picked = of.sequence.select(0, of.queries, budget, method=name)
        assert picked.counts.tolist() == [41] * HEADS
        assert picked.is_plain
        assert np.array_equal(of.sequence.attend(0, of.queries, picked)[0], whole)


@pytest.mark.parametrize("name", NAMES)
def test_more_is_never_worse(name: str, seed: int) -> None:
    """More tokens, or, on average over draws, a smaller error of the output."""
    of = Texts(seed)
    asked = [of.drawn(HEADS * GROUP, DIM) * np.float32(2) for _ in range(20)]
    full = [attention(of.sequence, 0, queries, None) for queries in asked]
    errors, before = [], [np.zeros((HEADS, PAGE * 40 + 5), np.bool_)] * len(asked)
    for pages in (5, 10, 20, 39):
        found = []
        for at, (queries, right) in enumerate(zip(asked, full, strict=True)):
            picked = of.sequence.select(0, queries, Budget(pages=pages), method=name)
            out = attention(of.sequence, 0, queries, picked)
            found.append(np.linalg.norm(out - right) / np.linalg.norm(right))
            chosen = weights_of(picked, PAGE * 40 + 5) > -np.inf
            if name not in DRAWN:
                assert chosen[before[at]].all()
            before[at] = chosen
        errors.append(float(np.mean(found)))
    print(errors)
    for fewer, more in pairwise(errors):
        assert more < 1.1 * fewer + 0.02, errors
    assert errors[-1] < (1.05 if name == "magicpig" else 0.5) * errors[0]  # it draws no more


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_is_so_many_tokens(name: str, seed: int) -> None:
    of = Texts(seed)
    for budget, most in ((Budget(pages=9), 9), (Budget(share=0.3), 13), (Budget(pages=2), 3)):
        picked = of.sequence.select(0, of.queries, budget, method=name)
        chosen = (weights_of(picked, PAGE * 40 + 5) > -np.inf).sum(1)
        assert (chosen <= most * PAGE - 11).all()  # the last page has five tokens
        if name not in DRAWN or most == 3:
            assert (chosen == most * PAGE - 11).all()
    none = of.sequence.select(0, of.queries, Budget(pages=9, sinks=0, recent=0), method=name)
    assert 40 in none.pages[0], "what is not a whole page has no state, and is always in"


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_queries_that_say_nothing(name: str, seed: int) -> None:
    """All the same, 0, or no numbers: an error of ours at most."""
    of = Texts(seed, tokens=0)
    one = of.drawn(1, HEADS, DIM)
    for key, query in ((one, 1.0), (0 * one, 1.0), (one, 0.0), (0 * one, 0.0)):
        sequence = of.pool.sequence()
        rows = np.repeat(key, PAGE * 40 + 5, axis=0)
        for layer in range(LAYERS):
            sequence.append(layer, rows, of.rows(len(rows)))
        queries = of.queries * np.float32(query)
        picked = sequence.select(0, queries, Budget(pages=9), method=name)
        out, _ = sequence.attend(0, queries, picked)
        assert np.isfinite(np.asarray(out)).all()
        wanted = attention(sequence, 0, queries, picked)
        np.testing.assert_allclose(np.asarray(out), wanted, atol=1e-3)
    for bad in (np.nan, np.inf, 3e38):
        sequence = of.pool.sequence()
        rows = of.rows(PAGE * 40 + 5)
        rows[PAGE * 10 + 3] = bad
        for layer in range(LAYERS):
            sequence.append(layer, rows, rows)
        for queries in (of.queries, np.full_like(of.queries, bad)):
            with suppress(CXLKVError), np.errstate(all="ignore"):
                sequence.attend(
                    0, queries, sequence.select(0, queries, Budget(pages=9), method=name)
                )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_after_forks_and_truncations(name: str, seed: int) -> None:
    of = Texts(seed)

    def check(sequence: Sequence) -> None:
        twin = of.twin(sequence)
        for layer in range(LAYERS):
            one, other = (
                each.select(layer, of.queries, Budget(pages=7), method=name)
                for each in (sequence, twin)
            )
            assert_same(one, other)

    check(of.sequence)
    fork = of.sequence.fork()
    fork.truncate(PAGE * 30 + 3)
    check(fork)
    of.append(fork, PAGE * 9)
    check(fork)
    fork.truncate(PAGE * 20)
    of.append(fork, PAGE * 8)
    check(fork)
    check(of.sequence)
    of.sequence.release()
    fork.release()
    again = of.pool.sequence()  # which gets the same pages
    of.append(again, PAGE * 40)
    check(again)


@pytest.mark.parametrize("encoding", ["int8", "int4", "progressive", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["retro", "magicpig", "vattention"])
def test_states_are_of_decoded_keys(name: str, encoding: str, seed: int) -> None:
    of = Texts(seed, k_encoding=encoding, v_encoding=encoding)
    twin = of.twin(of.sequence)
    one, other = (
        each.select(1, of.queries, Budget(pages=7), method=name) for each in (of.sequence, twin)
    )
    assert_same(one, other)
    out, wanted = (
        np.asarray(each.attend(1, of.queries, picked)[0], np.float64)
        for each, picked in ((of.sequence, one), (twin, other))
    )
    np.testing.assert_allclose(out, wanted, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_several_rows(name: str, seed: int) -> None:
    """Each row's list is what it was when the row was the last; together they have one."""
    of = Texts(seed, tokens=PAGE * 20 + 2)
    rows = of.drawn(4, HEADS * GROUP, DIM)
    one_by_one = []
    for row in rows:
        of.append(of.sequence, 1)
        one_by_one.append(of.sequence.select(0, row, Budget(pages=6), method=name))
    each = of.sequence.select(0, rows, Budget(pages=6), method=name)
    for at, single in enumerate(one_by_one):
        found = each.at(at)
        assert_same(
            replace(found, pages=found.pages[:, : single.pages.shape[1]],
                    log_weights=found.log_weights[:, : single.pages.shape[1]]
                    if found.log_weights is not None else None),
            single,
        )  # fmt: skip
    out, _ = of.sequence.attend(0, rows, each)
    assert np.isfinite(np.asarray(out)).all()
    together = of.sequence.select(0, rows, Budget(pages=6, per="sequence"), method=name)
    assert together.pages.shape[0] == HEADS
    out, _ = of.sequence.attend(0, rows, together)
    wanted = attention(of.sequence, 0, rows[3], together)
    np.testing.assert_allclose(np.asarray(out)[3], wanted, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_see_what_comes_later(name: str, seed: int) -> None:
    """A page that the first row does not see as a whole is in no state."""
    of = Texts(seed, tokens=PAGE * 20 + 14)
    rows = of.drawn(4, HEADS * GROUP, DIM)
    other = of.sequence.fork()
    for sequence in (of.sequence, other):
        of.append(sequence, 4)  # of which the first two end a page, other ones in each
    one, two = (each.select(0, rows, Budget(pages=6), method=name) for each in (of.sequence, other))
    assert_same(one, two)


@pytest.mark.parametrize("name", NAMES)
def test_an_audit_counts_what_chosen_tokens_hold(name: str, seed: int) -> None:
    """Not what they stand for: drawn ones have weights, and rows are of tokens that were left."""
    of = Texts(seed)
    of.pool.admin.audit = 1
    picked = of.sequence.select(0, of.queries, Budget(pages=4), method=name)
    keys, _ = kept(of.sequence, 0)
    chosen = weights_of(picked, keys.shape[1]) > -np.inf
    shares = []
    for q, query in enumerate(of.queries.astype(np.float64)):
        weights = np.exp(keys[q // GROUP].astype(np.float64) @ query / math.sqrt(DIM))
        shares.append(weights[chosen[q // GROUP]].sum() / weights.sum())
    assert of.pool.admin.overview().totals.mass == pytest.approx(np.mean(shares), abs=1e-5)


def test_a_select_is_one_transfer(seed: int) -> None:
    """To make states it reads all keys and values, which an emulated link is to carry once."""
    of = Texts(seed)
    with emulate(of.pool, "astera-a1000", mode="virtual") as link:
        for selects in (1, 2):
            before = link.bytes["select"]
            picked = of.sequence.select(0, of.queries, Budget(pages=4), method="clusters")
            assert link.bytes["select"] - before == picked.bytes_scored
            assert (link.operations["select"], link.operations["fetch"]) == (selects, 0)


def test_batches_and_decode(seed: int) -> None:
    of = Texts(seed)
    short, none = of.sequence.fork(), of.pool.sequence()
    short.truncate(PAGE * 3)
    batch = of.pool.batch([of.sequence, short, none])
    starts = np.arange(4, dtype=np.int32)
    for name in NAMES:
        for layer in range(LAYERS):
            q, k, v = of.drawn(3, HEADS * GROUP, DIM), of.rows(3), of.rows(3)
            found = batch.decode(layer, q, k, v, starts, Budget(pages=7), name)
            picked = batch.select(layer, q, starts, Budget(pages=7), name)
            out, lse = batch.attend(layer, q, starts, picked)
            np.testing.assert_array_equal(found.out, out)
            np.testing.assert_array_equal(found.lse, lse)
            assert found.method == name
            assert found.bytes_scored > picked.bytes_scored > 0, "states are made once"
            alone = of.sequence.select(layer, q[0], Budget(pages=7), method=name)
            k = alone.pages.shape[1]
            np.testing.assert_array_equal(picked.pages[0, :, :k], alone.pages)
    for per in ("query", "sequence"):
        few = Budget(pages=7, per=per)
        chosen, wanted = (
            batch.select(0, q[:1], [0, 0, 1, 1], few, method) for method in ("retro", "exact")
        )
        assert chosen.counts.shape == wanted.counts.shape
        assert ((chosen.counts > 0) == (wanted.counts > 0)).all()
        assert batch.select(0, q[:0], [0] * 4, few, "retro").counts.sum() == 0
    assert batch.decode(0, q, of.rows(3), of.rows(3), starts, None, name).method == "all"


# ---- states ----


class Counting(Chooser[tuple[Floats]]):
    """Chooses the first tokens, and says how many states it made."""

    name = "counting"
    made: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def state(self, keys: Floats, values: Floats) -> tuple[Floats]:
        self.made.append(keys.shape[1] // PAGE)
        return (keys.copy(),)

    def choose(self, states: list[tuple[Floats]], asked: Question) -> Choice:
        assert sum(keys.shape[1] for (keys,) in states) == asked.tokens
        weights = np.full((len(asked.queries), asked.tokens), -np.inf, np.float32)
        weights[:, asked.first : asked.first + asked.most] = 0
        return Choice(weights, None, 100)


def test_forks_share_states_and_nobody_keeps_old_ones(seed: int) -> None:
    of, counting = Texts(seed), Counting()
    choosers.add(counting)

    def choose(sequence: Sequence) -> list[int]:
        counting.made.clear()
        picked = sequence.select(0, of.queries, Budget(pages=7), method="counting")
        token = of.layout.stored_token_bytes // LAYERS
        assert picked.bytes_scored == 100 + PAGE * sum(counting.made) * token
        return list(counting.made)

    assert choose(of.sequence) == [last - first for first, last in RUNS]
    assert choose(of.sequence) == []
    fork = of.sequence.fork()
    assert choose(fork) == []
    fork.truncate(PAGE * 33 + 2)
    assert choose(fork) == [1]
    of.append(fork, PAGE * 7)  # the old tail ends page 33
    assert choose(fork) == [4, 4]
    known = choosers._runs[of.pool._handle]
    assert len(known) == len(RUNS) + 2
    of.sequence.release()
    del of.sequence
    gc.collect()
    assert len(known) == 4
    del fork
    gc.collect()
    assert not known


def test_a_sequence_that_changes_meanwhile_leaves_no_wrong_state(seed: int) -> None:
    """Another thread truncates it between the look at its pages and the fetch."""
    of, counting = Texts(seed), Counting()
    choosers.add(counting)
    fork, fetch = of.sequence.fork(), simd.fetch

    def late(*given: object) -> object:
        if fork.tokens(1) > PAGE * 40:  # once
            fork.truncate(PAGE * 30)
            of.append(fork, PAGE * 10)
        return fetch(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simd, "fetch", late)
        fork.select(0, of.queries, Budget(pages=7), method="counting")
    held = choosers._held[fork._handle]
    keys = np.asarray(fork.fetch(0)[0]).reshape(HEADS, -1, DIM)
    found = [run.state[0] for run in held.runs[counting, 0]]  # type: ignore[index]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), keys[:, : PAGE * 40])
    counting.made.clear()
    of.sequence.select(0, of.queries, Budget(pages=7), method="counting")
    assert counting.made == [16, 4, 4], "its pages are no longer those of the fork"


def test_a_chooser_of_another_seed_has_states_of_its_own(seed: int) -> None:
    of = Texts(seed)
    first = of.sequence.select(0, of.queries, Budget(pages=9), method="magicpig")
    choosers.add(sampling.MagicPIG(seed=2))
    try:
        other = of.sequence.select(0, of.queries, Budget(pages=9), method="magicpig")
    finally:
        choosers.add(sampling.MagicPIG())
    again = of.sequence.select(0, of.queries, Budget(pages=9), method="magicpig")
    assert_same(first, again)
    assert not np.array_equal(first.pages, other.pages)


@pytest.mark.parametrize("name", NAMES)
def test_several_threads(name: str, seed: int) -> None:
    of = Texts(seed)
    wanted = of.twin(of.sequence).select(1, of.queries, Budget(pages=7), method=name)
    forks = [of.sequence.fork() for _ in range(4)]
    found: list[Selection] = []

    def work(fork: Sequence) -> None:
        found.append(fork.select(1, of.queries, Budget(pages=7), method=name))

    run_all([partial(work, fork) for fork in forks])
    for other in found:
        assert_same(wanted, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_forked_child(name: str, seed: int) -> None:
    """With the states that the parent had, and without; while a thread of the parent is at them."""
    of = Texts(seed)

    def choose(layer: int) -> Selection:
        return of.sequence.select(layer, of.queries, Budget(pages=7), method=name)

    wanted = choose(0)
    twin = of.twin(of.sequence).select(1, of.queries, Budget(pages=7), method=name)

    def act() -> None:
        assert_same(choose(0), wanted)
        assert_same(choose(1), twin)

    with choosers._lock:
        in_child(act)
    act()


@pytest.mark.skipif(flushes.flush_name() == "none", reason="this CPU cannot flush lines")
def test_two_hosts(shm_path: Path) -> None:
    """A page that one host frees and the other fills anew has another state."""
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
    shared = {"sharing": "software", "hosts": 2, "host": 0, "capacity": "16MiB", "threads": 1}
    queries = np.random.default_rng(9).standard_normal((4, 8), np.float32)

    def choose(sequence: Sequence) -> Selection:
        return sequence.select(0, queries, Budget(pages=7), method="retro")

    with (
        CXLPool.create(shm_path, layout=layout, **shared) as first,  # type: ignore[arg-type]
        CXLPool.open(shm_path, host=1, threads=1) as second,
    ):
        for number in range(4):
            ids = [100000 * number + 7 * i for i in range(160)]
            sequence = grown(first, ids)
            first.publish_prefix(sequence, ids)
            sequence.release()
            with second.match_prefix(ids) as hit:
                theirs = hit.sequence()
            with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as alone:
                assert_same(choose(theirs), choose(grown(alone, ids)))
            theirs.release()
            first.forget(prefix_keys(ids, 4))


# ---- what is refused ----


def test_errors_name_cause_and_remedy(seed: int) -> None:
    of = Texts(seed)
    for budget, error, said in (
        (Budget(mass=0.5), BadArgumentError, "knows no mass: give pages or a share"),
        (Budget(pages=4, union="layer"), UnsupportedError, "no union='layer'"),
    ):
        with pytest.raises(error, match=said):
            of.sequence.select(0, of.queries, budget, method="retro")
        before, row = of.sequence.tokens(0), np.zeros((1, HEADS, DIM), np.float32)
        with pytest.raises(error, match=said):
            of.pool.batch([of.sequence]).decode(
                0, of.queries[None], row, row, [0, 1], budget, method="retro"
            )
        assert of.sequence.tokens(0) == before, "refused before anything is stored"
    with pytest.raises(BadArgumentError, match=r"method 'nothing': use one of .*retro"):
        of.sequence.select(0, of.queries, Budget(pages=4), method="nothing")
    with pytest.raises(BadArgumentError, match="no multiple of 2 kv heads"):
        of.sequence.select(0, of.queries[:3], Budget(pages=4), method="retro")
    with pytest.raises(UnsupportedError, match="a GPU takes pages alone"):
        choosers.refuse("retro", "a GPU")
    choosers.refuse("two_stage", "a GPU")
    choosers.refuse("mean", "a GPU")
    with pytest.raises(UnsupportedError, match=r"'retro' .* nothing is learned"):
        scorers.number_of(of.pool._handle, of.layout, "retro")  # as pool.calibrate() would
    for taken in ("exact", "mean", "retro", "two words", 3):
        wrong = Counting()
        wrong.name = taken  # type: ignore[misc,assignment]
        with pytest.raises(BadArgumentError, match=f"cannot be called {taken!r}"):
            choosers.add(wrong)
    with pytest.raises(BadArgumentError, match=r"the class Counting is no chooser: Counting\(\)"):
        choosers.add(Counting)  # type: ignore[arg-type]


class Wrong(Counting):
    """state() and choose() return what a test says, made of what is right."""

    name = "wrong"
    own_state: Callable[[Floats], object] = staticmethod(lambda keys: (keys,))
    own_choice: Callable[[Choice], object] = staticmethod(lambda right: right)

    def state(self, keys: Floats, values: Floats) -> tuple[Floats]:
        return cast(tuple[Floats], self.own_state(keys))

    def choose(self, states: list[tuple[Floats]], asked: Question) -> Choice:
        weights, _, read = super().choose(states, asked)
        self.asked = asked
        k, v = np.ones((2, HEADS, 3, DIM), np.float32)
        rows = VirtualRows(k, v, np.zeros((HEADS, 3), np.float32))
        return cast(Choice, self.own_choice(Choice(weights, rows, read)))


def changed(right: Choice, **to: object) -> Choice:
    return right._replace(**to)  # type: ignore[arg-type]


def rows_of(right: Choice, name: str, change: Callable[[Floats], object]) -> Choice:
    assert right.rows is not None
    own = {each: getattr(right.rows, each) for each in ("k", "v", "log_counts")}
    return changed(right, rows=VirtualRows(**own | {name: change(own[name])}))


def spoiled(array: Floats, value: float) -> Floats:
    other = array.copy()
    other[..., 40 % array.shape[-1]] = value
    return other


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda keys: None, "returns None; wanted is a tuple of numpy arrays"),
        (lambda keys: keys, r"returns an array, float32 \[2, \d+, 64\]; wanted is a tuple"),
        (lambda keys: (keys, 3), "returns tuple; wanted is a tuple of numpy arrays"),
    ],
)
def test_states_that_are_no_arrays(state: Callable[[Floats], object], said: str, seed: int) -> None:
    wrong = Wrong()
    wrong.own_state = state
    choosers.add(wrong)
    of = Texts(seed)
    with pytest.raises(BadArgumentError, match=rf"^method 'wrong': state\(\) {said}"):
        of.sequence.select(0, of.queries, Budget(pages=4), method="wrong")
    with pytest.raises(BadArgumentError, match=r"^method 'wrong': state\(\)"):
        choosers.kept_share(cast(choosers.AnyChooser, wrong), of.layout)


CHOICES: dict[str, tuple[Callable[[Choice], object], str]] = {
    "nothing": (lambda right: None, r"choose\(\) returns None; wanted is Choice\("),
    "a pair": (lambda right: (right[0], 1), r"choose\(\) returns tuple; wanted is Choice"),
    "transposed": (
        lambda right: changed(right, log_weights=right.log_weights.T),
        r"log_weights of the Choice is an array, float32 \[640, 2\]; wanted is float32 \[2, 640\]",
    ),
    "short": (lambda right: changed(right, log_weights=right.log_weights[:, 16:]), "log_weights"),
    "whole": (
        lambda right: changed(right, log_weights=(right.log_weights == 0).astype(np.int64)),
        "log_weights of the Choice is an array, int64",
    ),
    "bool": (
        lambda right: changed(right, log_weights=right.log_weights == 0),
        "log_weights of the Choice is an array, bool",
    ),
    "NaN": (
        lambda right: changed(right, log_weights=spoiled(right.log_weights, np.nan)),
        r"log_weights of the Choice has NaN or \+inf",
    ),
    "infinite": (
        lambda right: changed(right, log_weights=spoiled(right.log_weights, np.inf)),
        "log_weights of the Choice has NaN",
    ),
    "one too many": (
        lambda right: changed(right, log_weights=spoiled(right.log_weights, -40)),
        r"the Choice has 17 tokens of a kv head in \[first, last\); the budget has 16",
    ),
    "rows": (lambda right: changed(right, rows=(1, 2, 3)), "rows of the Choice are tuple; wanted"),
    "of a list": (
        lambda right: rows_of(right, "k", lambda k: k[None]),
        r"rows.k of the Choice is an array, float32 \[1, 2, 3, 64\]; wanted is float32 \[2, 3",
    ),
    "values": (lambda right: rows_of(right, "v", lambda v: v[:, :2]), r"rows\.v of the Choice"),
    "counts": (
        lambda right: rows_of(right, "log_counts", lambda counts: None),
        r"rows\.log_counts of the Choice",
    ),
    "NaN of rows": (
        lambda right: rows_of(right, "v", lambda v: spoiled(v, np.nan)),
        r"rows\.v of the Choice has NaN",
    ),
    "bytes": (lambda right: changed(right, bytes_read=None), "bytes_read is None; wanted"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_are_wrong(name: str, seed: int) -> None:
    made, said = CHOICES[name]
    wrong = Wrong()
    wrong.own_choice = made
    choosers.add(wrong)
    of = Texts(seed)
    with pytest.raises(BadArgumentError, match=f"^method 'wrong': {said}"):
        of.sequence.select(0, of.queries, Budget(pages=4), method="wrong")


def test_what_is_not_looked_at_may_be_anything(seed: int) -> None:
    """Weights outside of [first, last), and rows that are not there."""
    wrong = Wrong()

    def outside(right: Choice) -> Choice:
        assert right.rows is not None
        weights, k, v = right.log_weights.copy(), right.rows.k.copy(), right.rows.v.copy()
        counts = right.rows.log_counts.copy()
        weights[:, : wrong.asked.first] = weights[:, wrong.asked.last :] = np.nan
        k[:, 1] = v[:, 1] = np.nan
        counts[:, 1] = -np.inf
        return Choice(weights, VirtualRows(k, v, counts), right.bytes_read)

    wrong.own_choice = outside
    choosers.add(wrong)
    of = Texts(seed)
    picked = of.sequence.select(0, of.queries, Budget(pages=4), method="wrong")
    out, _ = of.sequence.attend(0, of.queries, picked)
    assert np.isfinite(np.asarray(out)).all()


def test_a_package_that_is_broken_harms_nobody_else(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        EntryPoint("corner", "no_such_module:Corner", names.CHOOSER_GROUP),
        EntryPoint("counting", f"{__name__}:Counting", names.CHOOSER_GROUP),
    ]
    monkeypatch.setattr(
        names, "entry_points", lambda group: [each for each in entries if each.group == group]
    )
    monkeypatch.setattr(names, "left_out", {})
    look_again()
    try:
        of = Texts(seed)
        assert {"counting", *NAMES} <= set(choosers.names())
        of.sequence.select(0, of.queries, Budget(pages=4), method="counting")
        with pytest.raises(BadArgumentError, match=r"'corner' is installed, but .*no_such_module"):
            of.sequence.select(0, of.queries, Budget(pages=4), method="corner")
    finally:
        look_again()


def look_again() -> None:
    names.installed_choosers.cache_clear()
    names.choosers.cache_clear()


def test_layers_with_a_window_are_refused(seed: int) -> None:
    group = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    layout = KVLayout.of([group, replace(group, window=160)], page_tokens=PAGE)
    random = np.random.default_rng(seed)
    with CXLPool.create("anonymous:", layout=layout, capacity="16MiB") as pool:
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, *random.standard_normal((2, 640, HEADS, DIM)).astype("float32"))
        queries = random.standard_normal((HEADS * GROUP, DIM)).astype(np.float32)
        assert sequence.select(0, queries, Budget(pages=9), method="retro").method == "retro"
        with pytest.raises(UnsupportedError, match="not for layers with a window"):
            sequence.select(1, queries, Budget(pages=9), method="retro")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_beside_keys_and_values(name: str) -> None:
    chooser = choosers.of(name)
    assert chooser is not None
    layout = KVLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")
    expected = {"clusters": 0.02, "retro": 0.133, "magicpig": 0.793, "vattention": 0.5}
    share = choosers.kept_share(chooser, layout)
    assert share == pytest.approx(expected.get(name, 0.5), abs=0.005)
