"""Each scorer chooses the pages that its numpy reference chooses, however old their summaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Rotary
from cxlkv.errors import BadArgumentError
from cxlkv.layout import LayerGroup
from cxlkv.ndp import scorers
from cxlkv.ndp.engine import Selection
from cxlkv.ndp.methods import SCORERS, codebooks, lsh, sparq
from cxlkv.ndp.scorers import Floats, Scorer, Shape
from cxlkv.sequence import Sequence

from ..support.lengths import matrix, nightly
from ..support.threads import run_all

pytest.importorskip("numba", reason="numba compiles scorers")

HEADS, GROUP, LAYERS = 2, 3, 2
ROUNDED_UP = 1.0079  # of a radius, before its rounding to 8 bits
NAMES = [each.name for each in SCORERS]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Asked:
    """One head's: keys [pages, tokens, dim], queries [n, dim], what was learned."""

    keys: Doubles
    queries: Doubles
    scale: float
    learned: Doubles

    def logits(self, keys: Doubles) -> Doubles:
        """[n, *keys.shape[:-1]]"""
        found: Doubles = self.scale * np.einsum("nd,...d->n...", self.queries, keys)
        return found


def log_sum(logits: Doubles) -> Doubles:
    top = logits.max(-1, keepdims=True)
    found: Doubles = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    return found


def mean(of: Asked) -> Doubles:
    return of.logits(of.keys.mean(1))


def mean_std(of: Asked) -> Doubles:
    found: Doubles = mean(of) + of.scale * np.abs(of.queries) @ of.keys.std(1).T
    return found


def ball(of: Asked) -> Doubles:
    centre = (of.keys.max(1, keepdims=True) + of.keys.min(1, keepdims=True)) / 2
    radius = np.linalg.norm(of.keys - centre, axis=2).max(1)
    lengths = np.linalg.norm(of.queries, axis=1)
    found: Doubles = of.logits(centre[:, 0])
    found += of.scale * np.outer(lengths, radius) * ROUNDED_UP
    return found


def gaussian(of: Asked) -> Doubles:
    quadratic = of.scale**2 * (of.queries**2 @ of.keys.var(1).T)
    found: Doubles = np.log(of.keys.shape[1]) + mean(of) + quadratic / 2
    return found


def locks(of: Asked) -> Doubles:
    variance, along = of.keys.var(1), np.zeros((len(of.queries), len(of.keys)))
    for page, keys in enumerate(of.keys - of.keys.mean(1, keepdims=True)):
        weights = 1.0 + np.arange(len(keys))
        for _ in range(8):  # as many rounds: where two directions are alike, more change the scores
            direction = weights @ keys
            direction /= np.linalg.norm(direction)
            weights = keys @ direction
        spread = (weights**2).mean()
        largest = np.linalg.svd(keys, compute_uv=False)[0] ** 2 / len(keys)
        assert largest / 2 < spread < 1.0001 * largest  # of noise, whose directions are alike
        u = direction * np.sqrt(spread)
        along[:, page] = of.scale * of.queries @ u
        variance[page] = np.maximum(0, variance[page] - u**2)
    quadratic = of.scale**2 * (of.queries**2 @ variance.T)
    found: Doubles = np.log(of.keys.shape[1]) + mean(of) + (quadratic + along**2) / 2
    return found


def fier(of: Asked) -> Doubles:
    middle = (of.keys.max(1, keepdims=True) + of.keys.min(1, keepdims=True)) / 2
    is_high = of.keys > middle
    counts = is_high.sum(1, keepdims=True)
    high = (of.keys * is_high).sum(1, keepdims=True) / np.maximum(counts, 1)
    low = (of.keys * ~is_high).sum(1, keepdims=True) / (of.keys.shape[1] - counts)
    found: Doubles = of.logits(np.where(is_high, high, low)).max(-1)
    return found


def sparq_scores(of: Asked) -> Doubles:
    kept = -(-of.queries.shape[1] // sparq.PART)
    sizes = np.abs(of.queries)
    chosen = sizes >= np.sort(sizes, axis=1)[:, -kept, None]
    share = (sizes * chosen).sum(1) / sizes.sum(1)
    logits = np.einsum("nd,ptd->npt", of.queries * chosen, of.keys) * of.scale
    return log_sum(logits / np.sqrt(share)[:, None, None])


def loki_scores(of: Asked) -> Doubles:
    basis = of.learned.reshape(-1, of.keys.shape[2])
    projected = of.keys @ basis.T @ basis
    return log_sum(of.logits(projected))


def low_rank(of: Asked) -> Doubles:
    pages, tokens, dim = of.keys.shape
    down, up = of.learned.reshape(2, -1, dim)
    turn = np.arange(pages * tokens)[:, None] * np.array(rotary_of(dim).frequencies)
    turn = np.exp(1j * turn).reshape(pages, tokens, -1)
    pairs = (of.keys[..., : dim // 2] + 1j * of.keys[..., dim // 2 :]) / turn
    before = np.concatenate([pairs.real, pairs.imag], axis=-1)
    kept = np.clip(np.rint(before @ down.T), -127, 127) @ up
    pairs = (kept[..., : dim // 2] + 1j * kept[..., dim // 2 :]) * turn
    return log_sum(of.logits(np.concatenate([pairs.real, pairs.imag], axis=-1)))


def pq(of: Asked) -> Doubles:
    part = of.keys.shape[2] // codebooks.SUBSPACES
    books = of.learned.reshape(codebooks.SUBSPACES, codebooks.WORDS, part)
    parts = of.keys.reshape(*of.keys.shape[:2], codebooks.SUBSPACES, 1, part)
    nearest = ((parts - books) ** 2).sum(-1).argmin(-1)
    words = np.take_along_axis(books[None, None], nearest[..., None, None], axis=3)
    return log_sum(of.logits(words.reshape(of.keys.shape)))


def ivf(of: Asked) -> Doubles:
    cells = of.learned.reshape(codebooks.CELLS, -1)
    nearest = ((of.keys[:, :, None] - cells) ** 2).sum(-1).argmin(-1)
    return log_sum(of.logits(cells[nearest]))


def lsh_scores(of: Asked) -> Doubles:
    dim = of.keys.shape[2]
    planes = of.learned[dim:].reshape(lsh.TABLES, lsh.BITS, dim)
    ours = np.einsum("ptd,abd->ptab", of.keys - of.learned[:dim], planes) > 0
    theirs = np.einsum("nd,abd->nab", of.queries, planes) > 0
    same = (ours == theirs[:, None, None]).all(-1).sum(-1)
    found: Doubles = same.max(-1).astype(np.float64)
    return found


def shadow(of: Asked) -> Doubles:
    centre = of.keys.mean(1, keepdims=True)
    lengths = np.linalg.norm(of.keys, axis=2) * np.linalg.norm(centre, axis=2)
    least = ((of.keys * centre).sum(2) / lengths).min(1)
    found: Doubles = np.where(least < of.learned[0], np.inf, mean(of))
    return found


REFERENCES: dict[str, Callable[[Asked], Doubles]] = {
    "mean": mean,
    "mean_std": mean_std,
    "ball": ball,
    "gaussian": gaussian,
    "locks": locks,
    "fier": fier,
    "sparq": sparq_scores,
    "loki": loki_scores,
    "low_rank": low_rank,
    "pq": pq,
    "ivf": ivf,
    "lsh": lsh_scores,
    "shadow": shadow,
}


def rotary_of(dim: int) -> Rotary:
    return Rotary.of(10_000, dim)


@cache
def is_by_attention(name: str) -> bool:
    return scorers.of(name).log_sums


class Pages:
    """A sequence whose random pages differ from each other, and the queries that tests ask."""

    def __init__(
        self,
        seed: int,
        tokens: int = 16 * 40 + 5,
        dim: int = 64,
        encoding: str = "none",
        **more: object,
    ) -> None:
        print(f"seed {seed}")
        self.random = np.random.default_rng(seed)
        self.layout = KVLayout(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=dim,
            page_tokens=16,
            dtype="float32",
            k_encoding=encoding,
            rotary=rotary_of(dim),
            **more,  # type: ignore[arg-type]
        )
        self.pool = CXLPool.create("anonymous:", layout=self.layout, capacity="16MiB")
        self.sequence = self.pool.sequence()
        self.append(self.sequence, tokens)
        self.queries = self.random.standard_normal((HEADS * GROUP, dim)).astype(np.float32)

    def rows(self, tokens: int) -> Floats:
        shape = (-(-tokens // 16), HEADS, self.layout.head_dim)
        middle = np.repeat(self.random.standard_normal(shape), 16, axis=0)[:tokens]
        noise = self.random.standard_normal((tokens, *shape[1:]))
        return (middle + noise).astype(np.float32)

    def append(self, sequence: Sequence, tokens: int) -> None:
        for layer in range(LAYERS):
            sequence.append(layer, self.rows(tokens), self.rows(tokens))

    def calibrate(self, name: str) -> Doubles:
        """[layers, heads, n]"""
        if not scorers.of(name).calibrated:
            return np.empty((LAYERS, HEADS, 0))
        return self.pool.calibrate(name, self.sequence).astype(np.float64)

    def wanted(
        self, name: str, sequence: Sequence, queries: Floats, layer: int, learned: Doubles
    ) -> tuple[Doubles, Doubles]:
        """Scores [heads, complete pages] of one row, and how far off they may be."""
        keys = np.asarray(sequence.fetch(layer)[0], np.float64)[:, : sequence.tokens(layer) // 16]
        scale = self.layout.head_dim**-0.5
        found, bounds = [], []
        for head in range(HEADS):
            own = queries.reshape(HEADS, GROUP, -1)[head].astype(np.float64)
            of = Asked(keys[head], own, scale, learned[layer, head])
            scores = REFERENCES[name](of)
            # Numbers of a summary are rounded to 8 bits, and their errors add up like chances.
            size = scale * np.sqrt((own**2) @ (keys[head] ** 2).max(1).T) * 2**-7
            if name == "ball":
                size += scale * np.linalg.norm(own, axis=1)[:, None] * keys[head].max() * 2**-5
            if is_by_attention(name):
                tail = np.asarray(sequence.fetch(layer)[0], np.float64)[head, len(scores[0]) :]
                rest = tail.reshape(-1, tail.shape[-1])[: sequence.tokens(layer) % 16]
                last = log_sum(of.logits(rest))[:, None] if len(rest) else np.empty((GROUP, 0))
                every = np.concatenate([scores, last], axis=1)
                shares = np.exp(every - log_sum(every)[:, None]).mean(0)
                found.append(shares[: scores.shape[1]])
                bounds.append(found[-1] * (np.exp(4 * size.max(0)) - 1) + 1e-6)
            else:
                found.append(scores.max(0))
                bounds.append(size.max(0) + 1e-5)
        return np.stack(found), np.stack(bounds)

    def check(
        self, name: str, learned: Doubles, sequence: Sequence | None = None, pages: int = 12
    ) -> Selection:
        sequence = sequence or self.sequence
        for layer in range(LAYERS):
            picked = sequence.select(layer, self.queries, budget=Budget(pages=pages), method=name)
            wanted, bounds = self.wanted(name, sequence, self.queries, layer, learned)
            assert picked.method == name
            assert_chosen(
                picked, wanted, bounds, is_sharp=name not in ("ivf", "lsh", "pq", "shadow")
            )
        return picked


def assert_chosen(picked: Selection, wanted: Doubles, bounds: Doubles, is_sharp: bool) -> None:
    """One row's lists are of the best pages. Of hash values, codes and thresholds a few lie
    between two, and may be the other one: not is_sharp."""
    odd, count = 0, 0
    for pages, scores, right, bound in zip(
        picked.pages, picked.scores, wanted, bounds, strict=True
    ):
        own = [(p, s) for p, s in zip(pages, scores, strict=True) if 0 <= p < len(right)]
        for page, score in own:
            off = 0 if score == right[page] else abs(score - right[page])
            odd += not off <= bound[page]
            count += 1
        free = [right[p] - bound[p] for p in range(1, len(right) - 2) if p not in pages]
        taken = [right[p] + bound[p] for p, _ in own if 1 <= p < len(right) - 2]
        if free and taken and is_sharp:
            assert max(free) <= min(taken), "a better page was left out"
    assert odd <= (0 if is_sharp else 0.05 * count), f"{odd} of {count} scores are wrong"


@matrix(name=NAMES, encoding=["none", "int8", "progressive", "fp8_e4m3"])
def test_pages_are_chosen_as_numpy_chooses_them(name: str, encoding: str, seed: int) -> None:
    of = Pages(seed, encoding=encoding, dim=64)
    of.check(name, of.calibrate(name))


@pytest.mark.parametrize("name", ["sparq", *map(nightly, ("gaussian", "pq", "low_rank"))])
def test_other_dims(name: str, seed: int) -> None:
    of = Pages(seed, dim=40)
    of.check(name, of.calibrate(name))


@pytest.mark.parametrize("name", NAMES)
def test_all_pages_are_all_pages_and_more_are_never_worse(name: str, seed: int) -> None:
    of = Pages(seed)
    of.calibrate(name)
    pages = of.sequence.page_count(0)
    before: set[int] = set()
    for count in (4, 9, 20, pages):
        picked = of.sequence.select(0, of.queries, budget=Budget(pages=count), method=name)
        chosen = set(picked.pages[0].tolist())
        assert len(chosen) == count
        assert chosen >= before
        before = chosen
    out, _ = of.sequence.attend(0, of.queries, picked)
    whole, _ = of.sequence.attend(0, of.queries)
    assert np.array_equal(out, whole)


@pytest.mark.parametrize("name", ["mean", "sparq"])
def test_summaries_follow_what_pages_hold(name: str, seed: int) -> None:
    """Forks, tokens taken back and written anew, pages that another sequence had before."""
    of = Pages(seed)
    nothing = of.calibrate(name)
    of.check(name, nothing)
    fork = of.sequence.fork()
    fork.truncate(16 * 30 + 3)
    of.append(fork, 16 * 9)
    of.check(name, nothing, fork)
    of.check(name, nothing)
    fork.truncate(16 * 20)
    of.append(fork, 16 * 8)
    of.check(name, nothing, fork)
    of.sequence.release()
    fork.release()
    of.sequence = of.pool.sequence()
    of.append(of.sequence, 16 * 40)
    of.check(name, nothing)


def test_rows_see_what_lies_before_them(seed: int) -> None:
    """Several rows, a list each or one together; a page of which a row sees a part goes first."""
    of = Pages(seed, tokens=16 * 20)
    rows = of.random.standard_normal((20, HEADS * GROUP, 64)).astype(np.float32)
    each = of.sequence.select(0, rows, budget=Budget(pages=8), method="mean")
    keys = np.asarray(of.sequence.fetch(0)[0], np.float64)
    for row in (0, 7, 19):
        position = 300 + row
        for head in range(HEADS):
            own = rows[row].reshape(HEADS, GROUP, 64)[head].astype(np.float64)
            right = (own @ keys[head].mean(1).T).max(0) / 8
            seen = position // 16 + 1
            free = {int(p) for p in each.pages[row, head] if 1 <= p < seen - 2}
            best = {int(p) for p in 1 + np.argsort(-right[1 : seen - 2])[: 8 - 3]}
            assert len(free & best) >= len(best) - 1, (row, head)
            assert {0, seen - 1, seen - 2} <= set(each.pages[row, head].tolist())


def test_windows(seed: int) -> None:
    print(f"seed {seed}")
    group = LayerGroup(layers=1, kv_heads=HEADS, head_dim=64, dtype="float32")
    layout = KVLayout.of([group, replace(group, window=160)], page_tokens=16)
    with CXLPool.create("anonymous:", layout=layout, capacity="16MiB") as pool:
        sequence, random = pool.sequence(), np.random.default_rng(seed)
        for layer in range(2):
            sequence.append(layer, *random.standard_normal((2, 640, HEADS, 64)).astype("float32"))
        queries = random.standard_normal((HEADS * GROUP, 64)).astype(np.float32)
        picked = sequence.select(1, queries, budget=Budget(pages=9), method="mean")
        assert picked.pages.min() >= (640 - 160) // 16


@pytest.mark.parametrize("name", [each.name for each in SCORERS if each.log_sums])
def test_a_mass_is_that_of_the_estimates(name: str, seed: int) -> None:
    of = Pages(seed)
    learned = of.calibrate(name)
    wanted, bounds = of.wanted(name, of.sequence, of.queries, 0, learned)
    picked = of.sequence.select(0, of.queries, budget=Budget(mass=0.7), method=name)
    for head in range(HEADS):
        own = picked.pages[head][picked.pages[head] >= 0]
        scores = picked.scores[head][: len(own)]
        assert scores.sum() >= 0.7 - 1e-4
        free = scores[(own >= 1) & (own < of.sequence.page_count(0) - 2)]
        assert scores.sum() - free.min() <= 0.7, "fewer would do"
        assert np.abs(scores[:-1] - wanted[head, own[:-1]]).max() <= bounds[head].max()


def test_log_sums_are_those_of_doubles(seed: int) -> None:
    print(f"seed {seed}")
    bfloat16 = pytest.importorskip("cxlkv.ndp.methods.bfloat16")
    numbers = np.concatenate([[0, -1e-30, -1e-3], -np.random.default_rng(seed).random(10_000) * 87])
    found = [bfloat16.exp_of(np.float32(n)) for n in numbers]
    np.testing.assert_allclose(found, np.exp(numbers.astype(np.float32), dtype=float), rtol=4e-7)
    assert 0 <= bfloat16.exp_of(np.float32(-np.inf)) < 1e-37
    for logits in (numbers[:16] - 40, np.array([30.0, 29, -500, -np.inf]), numbers[3:4]):
        given = logits.astype(np.float32)
        wanted = log_sum(given.astype(float))
        assert bfloat16.log_sum(given, len(given)) == pytest.approx(wanted, abs=2e-5)
    assert np.isnan(bfloat16.log_sum(np.array([1, np.nan, 2], np.float32), 3))


def test_several_threads_summarise_together(seed: int) -> None:
    of = Pages(seed, tokens=16 * 100)
    forks = [of.sequence.fork() for _ in range(4)]
    wanted = of.sequence.select(1, of.queries, budget=Budget(pages=12), method="exact")
    found: list[Selection] = []

    def work(fork: Sequence) -> None:
        found.append(fork.select(1, of.queries, budget=Budget(pages=12), method="mean"))

    run_all([partial(work, fork) for fork in forks])
    assert wanted.pages.shape == found[0].pages.shape
    for other in found[1:]:
        assert np.array_equal(found[0].pages, other.pages)
        assert np.array_equal(found[0].scores, other.scores)


def test_what_is_read_is_counted(seed: int) -> None:
    of = Pages(seed)
    first = of.sequence.select(0, of.queries, budget=Budget(pages=8), method="mean")
    again = of.sequence.select(0, of.queries, budget=Budget(pages=8), method="mean")
    assert again.bytes_scored == HEADS * 40 * 64 * 2
    assert first.bytes_scored == again.bytes_scored + HEADS * 40 * 16 * 64 * 4


class First(Scorer):
    """Earlier pages are better."""

    name = "first"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (4,), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[0] = first // keys.shape[0]

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for i in range(queries.shape[0]):
            for page in range(summaries.shape[0]):
                scores[i, page] = -np.float32(summaries[page, 0])


@pytest.mark.parametrize("name", ["pq", "ivf"])
def test_queries_of_any_size_have_scores(name: str, seed: int) -> None:
    """Logits are so far apart that most have an exp of 0."""
    of = Pages(seed)
    of.calibrate(name)
    of.queries *= 1000
    every = Budget(pages=of.sequence.page_count(0))
    picked = of.sequence.select(0, of.queries, budget=every, method=name)
    assert np.abs(picked.scores.sum(axis=1) - 1).max() < 1e-4


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_shadow_learns_from_pages_as_they_are(
    page_tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a long text are drawn; keys of a page are alike, at any size, so that the common
    part of the keys makes no page an outlier.
    """
    print(f"seed {seed}")
    monkeypatch.setattr(scorers, "CALIBRATED_TOKENS", 512)
    random = np.random.default_rng(seed)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=page_tokens, dtype="float32")
    with CXLPool.create("anonymous:", layout=layout, capacity="16MiB") as pool:
        middle = np.repeat(random.standard_normal((64, 1, 64)), page_tokens, axis=0)
        keys = (middle + 0.1 * random.standard_normal(middle.shape)).astype(np.float32)
        sequence = pool.sequence()
        sequence.append(0, keys, keys)
        learned = float(pool.calibrate("shadow", sequence)[0, 0, 0])
        assert learned > 0.9, "cosines of keys to the mean of their own page"


def test_a_scorer_of_ones_own(seed: int) -> None:
    scorers.add(First())
    of = Pages(seed)
    picked = of.sequence.select(0, of.queries, budget=Budget(pages=10), method="first")
    assert picked.pages[0].tolist() == [*range(8), 39, 40]


class Large(First):
    name = "large"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (1 << 14,), np.uint16


class Outside(First):
    name = "outside"

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[4] = 1


class Unset(First):
    name = "unset"

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        scores[0, 0] = 1


class Odd(First):
    name = "odd"

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[0] = len({**{}, first: keys[0].tobytes().hex()})


class Exact(First):
    name = "exact"


def test_errors_name_cause_and_remedy(seed: int) -> None:
    of = Pages(seed)

    def select(method: str, budget: Budget | None = None) -> None:
        of.sequence.select(0, of.queries, budget=budget or Budget(pages=4), method=method)

    with pytest.raises(BadArgumentError, match=r"method 'nothing': use one of exact, .*mean"):
        select("nothing")
    with pytest.raises(BadArgumentError, match=r"learns from keys first: pool\.calibrate"):
        select("loki")
    with pytest.raises(BadArgumentError, match="no mass: give pages or a share"):
        select("mean", Budget(mass=0.5))
    with pytest.raises(BadArgumentError, match="learns nothing"):
        of.pool.calibrate("mean", of.sequence)
    with pytest.raises(BadArgumentError, match="two pages or more"):
        of.pool.calibrate("loki", of.pool.sequence())
    scorers.add(Large())
    with pytest.raises(BadArgumentError, match=r"32768 bytes .* 16384 at most"):
        select("large")
    for wrong, said in (
        (Outside(), r"'outside': summarise\(\) fails on a page of noise, as Python: IndexError"),
        (Unset(), r"score\(\) leaves a score unset"),
        (Odd(), r"'odd': numba cannot compile summarise\(\): .* 'hex' of type"),
    ):
        scorers.add(wrong)
        with pytest.raises(BadArgumentError, match=said):
            select(wrong.name)
    with pytest.raises(BadArgumentError, match="cannot be called 'exact'"):
        scorers.add(Exact())
