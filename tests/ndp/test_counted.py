"""What methods say they read is what they read: each is run as Python, on arrays that mark it.

Of the core's own methods, which are C, tests/native/ndp/test_counted.c does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Rotary
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import kinds, scorers, trials
from cxlkv.ndp.choosers import AnyChooser, Question
from cxlkv.ndp.counted import Watched
from cxlkv.ndp.scorers import Floats, Sample, Scorer, Shape

pytest.importorskip("numba", reason="numba compiles methods")

from cxlkv.ndp.methods import CHOOSERS, SCORERS, loops

SHAPE, PAGES = Shape(tokens=16, dim=32), 2
UNREAD = 8
"""Unread bytes of a summary, which is padded to 8 bytes."""


def learned(scorer: Scorer, keys: Floats) -> Floats:
    rotary = Rotary.of(1e4, SHAPE.dim)
    found = np.empty(0, np.float32)
    if scorer.calibrated:
        found = scorer.learn(Sample(keys, None, rotary)).astype(np.float32)
    turns = scorers.turns(rotary, SHAPE.dim) if scorer.rotary else found[:0]
    return np.concatenate([turns, found])


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", SCORERS)
def test_a_scorer_reads_what_it_says(kind: type[Scorer], count: int, seed: int) -> None:
    random, scorer = np.random.default_rng(seed), kind()
    keys = random.standard_normal((40, SHAPE.tokens, SHAPE.dim)).astype(np.float32)
    parameters = learned(scorer, keys)
    axes, dtype = kinds.summary_of(scorer, SHAPE)
    summaries = np.zeros((PAGES, *axes), dtype)
    for page in range(PAGES):
        first = page * SHAPE.tokens
        summarise = getattr(scorer, "summarise")  # noqa: B009
        summarise(keys[page].copy(), first, parameters, summaries[page])
    queries = random.standard_normal((count, SHAPE.dim)).astype(np.float32)
    counted, said = trials.reads(scorer, SHAPE, queries, summaries, parameters)
    print(scorer.name, counted, said)
    assert said[0] - UNREAD < counted[0] <= said[0]
    assert counted[1] <= said[1]
    angles = 4 * SHAPE.dim // 2 if scorer.rotary else 0  # one channel's of each pair
    assert counted[1] == said[1] - angles


@pytest.mark.parametrize("heads", [1, 8])
def test_every_channel_of_every_query_of_a_group_counts(heads: int) -> None:
    """Those of the first query alone were counted."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16, dtype="float32")
    keys = np.random.default_rng(0).standard_normal((2, 640, 1, 64), np.float32)
    queries = np.zeros((heads, 64), np.float32)
    for head in range(heads):
        queries[head, 8 * head : 8 * head + 8] = 1 + np.arange(8)
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        sequence = pool.sequence()
        sequence.append(0, *keys)
        for method in ("sparq", "sparq_mean"):
            sequence.select(0, queries, Budget(pages=4), method=method)
            picked = sequence.select(0, queries, Budget(pages=4), method=method)
            estimates = 640 * 8 * heads * 2
            more = 4 * 16 * (64 - 8 * heads) * 2 + 64 * 4 * 4  # chosen keys; sums of four runs
            assert picked.bytes_scored == estimates + more * (method == "sparq_mean")


def test_parameters_count_once_a_select() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, dtype="float32")
    keys = np.random.default_rng(0).standard_normal((2, 3200, 2, 64), np.float32)
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB") as pool:
        sequence = pool.sequence()
        sequence.append(0, *keys)
        for method, bytes_ in (("ivf", 256 * 64 * 4), ("pq", 8 * 64 * 8 * 4), ("shadow", 0)):
            pool.calibrate(method, sequence)
            first, again = (
                sequence.select(0, np.ones((2, 64), np.float32), Budget(pages=9), method=method)
                for _ in range(2)
            )
            page = scorers.summary_bytes(scorers.of(method), Shape(16, 64))
            assert again.bytes_scored == 2 * (200 * page + bytes_)
            made = 2 * 3200 * 64 * 4 + 2 * 4 * (method == "shadow")  # the threshold
            assert first.bytes_scored == again.bytes_scored + made


# ---- choosers ----


@pytest.fixture
def as_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loops of choosers."""
    for name, value in vars(loops).copy().items():
        if isinstance(plain := getattr(value, "py_func", None), FunctionType):
            monkeypatch.setattr(loops, name, plain)
    with np.errstate(all="ignore"):
        yield


@pytest.mark.usefixtures("as_python")
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", CHOOSERS)
def test_a_chooser_reads_what_it_says(kind: type[AnyChooser], count: int, seed: int) -> None:
    random, chooser, tokens, heads = np.random.default_rng(seed), kind(), (128, 32), 2
    states, watched = [], []
    for size in tokens:
        rows = random.standard_normal((2, heads, size, SHAPE.dim)).astype(np.float32)
        made = chooser.state(*rows)
        arrays = [Watched.of(array) for array in made]
        watched += arrays
        states.append(type(made)(*arrays))
    queries = random.standard_normal((heads, count, SHAPE.dim)).astype(np.float32)
    asked = Question(queries, SHAPE.dim**-0.5, sum(tokens), 16, sum(tokens) - 32, 48, 7)
    said = chooser.choose(states, asked).bytes_read
    counted = sum(array.bytes_read for array in watched)
    if chooser.name == "magicpig":  # its hash planes are of no state
        counted += SHAPE.dim * loops.TABLES * loops.BITS * 4
    print(chooser.name, counted, said)
    assert counted == said


# ---- methods of others ----


class Half(Scorer):
    """Says that it reads one number of two."""

    name = "half"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (2,), np.float32

    def read_bytes(self, shape: Shape) -> int | None:
        return 4

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[0] = keys[0, 0]
        summary[1] = keys[0, 1]

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                scores[i, page] = summaries[page, 0]
                if i > 4:
                    scores[i, page] += summaries[page, 1]


class Untold(Half):
    name = "untold"

    def read_bytes(self, shape: Shape) -> int | None:
        return None


def test_a_method_that_reads_more_than_it_says_is_refused() -> None:
    with pytest.raises(BadArgumentError, match=r"'half': .* reads 8 bytes .* 8 queries and says 4"):
        scorers.compiled(Half(), SHAPE)
    with pytest.raises(BadArgumentError, match=r"'untold': .* score\(\) is to return how many"):
        scorers.compiled(Untold(), SHAPE)
