"""Scorers that are odd, missing, replaced or taught twice, and layouts that are."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import FunctionType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Rotary, Sequence, _core
from cxlkv.errors import BadArgumentError, ClosedError, PoisonError
from cxlkv.ndp import choosers, names, scorers
from cxlkv.ndp.choosers import Arrays, Chooser
from cxlkv.ndp.methods import SCORERS
from cxlkv.ndp.scorers import Floats, Scorer, Shape

from ..conftest import MakePool
from ..support.lengths import nightly

pytest.importorskip("numba", reason="numba compiles scorers")

FEW = Budget(pages=6)


def grown(pool: CXLPool, rng: np.random.Generator, tokens: int = 100) -> Sequence:
    sequence, layout = pool.sequence(), pool.layout
    for layer in range(layout.layers):
        keys = rng.standard_normal((tokens, layout.kv_heads, layout.head_dim)).astype(np.float32)
        values = rng.standard_normal((tokens, layout.kv_heads, layout.value_head_dim))
        own = None if layout.values == "key_prefix" else values.astype(np.float32)
        sequence.append(layer, keys, own)
    return sequence


def ones(pool: CXLPool, rows: int = 1) -> Floats:
    return np.ones((rows, pool.layout.kv_heads, pool.layout.head_dim), np.float32)


# ---- what is learned ----


def test_a_method_that_learns_again_is_what_it_learned_last(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """And what it learned first stays in memory, where the core has its address."""
    pool = make_pool()
    sequence = grown(pool, rng, 400)
    one = pool.calibrate("pq", sequence)
    other = np.ascontiguousarray(one[::-1, ::-1] * np.float32(0.5))
    found = []
    for learned in (one, other, one, other):
        pool.calibrate("pq", learned)
        picked = sequence.select(0, ones(pool), budget=FEW, method="pq")
        found.append((picked.pages.tobytes(), picked.scores.tobytes()))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_a_layer_with_a_window_is_learned_from_what_is_in_it(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """Such a pool was refused, as its first pages are given back."""
    group = LayerGroup(layers=1, kv_heads=2, head_dim=16, dtype="float32", window=64)
    pool = make_pool(layout=KVLayout.of([group, dataclasses.replace(group, window=None)]))
    sequence = grown(pool, rng, 400)
    for layer in range(2):  # a second step, before which all pages are there
        row = np.ones((1, 2, 16), np.float32)
        sequence.append(layer, row, row)
    learned = pool.calibrate("pq", sequence)
    assert np.isfinite(learned).all()
    assert learned[0].any()
    assert learned[1].any()


def test_a_pool_that_has_as_many_as_it_may(make_pool: MakePool) -> None:
    pool = make_pool()
    learned = np.zeros((1, 2, 1), np.float32)
    for count in range(32):
        pool.calibrate("shadow", learned + np.float32(count))
    with pytest.raises(BadArgumentError, match=r"this pool has 32 scorers.*open it again"):
        pool.calibrate("shadow", learned - np.float32(1))
    pool.calibrate("shadow", learned)


@pytest.mark.parametrize(
    "name", ["nothing", "folder", "fifo", "empty", "text", "many.npz", "huge.npy", "words.npy"]
)
def test_a_file_that_nothing_was_learned_in(tmp_path: Path, name: str) -> None:
    """It is refused at once, whatever it is and whatever size it claims."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no array")
    np.savez(tmp_path / "many.npz", np.zeros(3))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    (tmp_path / "huge.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    )
    with pytest.raises(BadArgumentError, match=r"numpy\.save writes"):
        scorers._read(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    [
        each.name if each.name == "shadow" else nightly(each.name)
        for each in SCORERS
        if each.calibrated
    ],
)
def test_numbers_of_another_model_are_refused(
    name: str, make_pool: MakePool, rng: np.random.Generator
) -> None:
    """The compiled functions do not look at bounds."""
    pool = make_pool(rotary=Rotary.of(10_000, 8))
    learned = pool.calibrate(name, grown(pool, rng, 400))
    assert learned.shape[2] == scorers.of(name).parameter_count(Shape(4, 8))
    with pytest.raises(BadArgumentError, match=f"'{name}': what it learned has shape"):
        pool.calibrate(name, np.ascontiguousarray(learned[..., :-1]))
    with pytest.raises(BadArgumentError, match="learn it with this layout"):
        pool.calibrate(name, np.concatenate([learned, learned]))


class Demanding(Scorer):
    name = "demanding"
    calibrated = True

    def calibrate(self, keys: Floats) -> Floats:
        raise ValueError(f"{len(keys)} keys are too few")


def test_too_few_tokens_to_learn_from(make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool()
    scorers.add(Demanding())
    with pytest.raises(BadArgumentError, match="'demanding' learns nothing from 8 tokens: 8 keys"):
        pool.calibrate("demanding", grown(pool, rng, 12))
    pool.calibrate("shadow", grown(pool, rng, 12))  # two pages are enough


# ---- which scorers there are ----


def test_threads_that_ask_for_the_first_time_at_once(
    make_pool: MakePool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the first one is in the core with it."""
    pool = make_pool()
    sequences = [grown(pool, rng), grown(pool, rng)]
    errors: list[Exception] = []
    threads: list[threading.Thread] = []

    def select(sequence: Sequence) -> None:
        try:
            sequence.select(0, ones(pool), budget=FEW, method="mean")
        except Exception as error:
            errors.append(error)

    add = _core.pool_add_scorer

    def slow(*given: object) -> None:
        if not threads:
            threads.append(threading.Thread(target=select, args=(sequences[1],)))
            threads[0].start()
            threads[0].join(0.5)  # it waits for us, or would add the same
        add(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(_core, "pool_add_scorer", slow)
    select(sequences[0])
    threads[0].join()
    assert errors == []


class Place(Scorer):
    """Earlier pages are better, or later ones."""

    def __init__(self, name: str, is_late: bool) -> None:
        self.name = name  # type: ignore[misc]
        if is_late:
            self.score = self.late  # type: ignore[method-assign]

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (2,), np.float32

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[0] = first

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            scores[:, page] = -summaries[page, 0]

    @staticmethod
    def late(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            scores[:, page] = summaries[page, 0]


class Nameless(Place):
    def __init__(self) -> None:
        super().__init__(3, is_late=False)  # type: ignore[arg-type]


class Other(Scorer):
    def __init__(self, name: object) -> None:
        self.name = name  # type: ignore[assignment,misc]


Renamed = partial(Other, "before")
OtherMean, OtherShadow, OtherRetro = (partial(Other, name) for name in ("mean", "shadow", "retro"))


class Another(Chooser[Arrays]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]


AnotherMean, AnotherShadow, AnotherRetro = (
    partial(Another, name) for name in ("mean", "shadow", "retro")
)


def test_a_scorer_that_takes_the_place_of_another_is_the_one_that_chooses(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """A notebook's cell runs again, with other code and the same pool."""
    pool = make_pool()
    sequence = grown(pool, rng)
    chosen = []
    for is_late in (False, True, False):
        scorers.add(Place("replaced", is_late))
        picked = sequence.select(0, ones(pool), budget=FEW, method="replaced")
        chosen.append(picked.pages[0, 0].tolist())
    assert chosen == [[0, 1, 2, 3, 23, 24], [0, 20, 21, 22, 23, 24], [0, 1, 2, 3, 23, 24]]


def test_steps_go_by_what_a_method_is_now(make_pool: MakePool, rng: np.random.Generator) -> None:
    """decode() keeps what it found right of tensors, and the scorer was one before."""
    torch = pytest.importorskip("torch")
    pool = make_pool()
    sequence, starts = grown(pool, rng, 1000), np.array([0, 1], np.int32)
    batch, new = pool.batch([sequence]), torch.from_numpy(ones(pool))
    for is_late in (False, True, False):
        scorers.add(Place("stepwise", is_late))
        found = batch.decode(0, new, new, new, starts, FEW, method="stepwise")
        picked = sequence.select(0, new[0], FEW, method="stepwise")
        out, _ = sequence.attend(0, new[0], picked)
        np.testing.assert_array_equal(np.asarray(found.out)[0], np.asarray(out))


class Wide(Place):
    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (4,), np.float32


def test_scorers_of_one_pool_are_told_apart(make_pool: MakePool, rng: np.random.Generator) -> None:
    """Names and sizes of summaries that differ in the same bits: ord("b") ^ ord("z") is 8 ^ 16."""
    pool = make_pool()
    sequence = grown(pool, rng)
    scorers.add(Place("band", is_late=False))
    scorers.add(Wide("zand", is_late=True))
    chosen = [
        sequence.select(0, ones(pool), budget=FEW, method=name).pages[0, 0].tolist()
        for name in ("band", "zand")
    ]
    assert chosen == [[0, 1, 2, 3, 23, 24], [0, 20, 21, 22, 23, 24]]


class Offer(Protocol):
    def __call__(self, *entries: EntryPoint) -> None: ...


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """offer(entries...): what the packages that are installed offer instead."""

    def entries_are(*entries: EntryPoint) -> None:
        def of(group: str) -> list[EntryPoint]:
            return [entry for entry in entries if entry.group == group]

        monkeypatch.setattr(names, "entry_points", of)
        monkeypatch.setattr(names, "left_out", {})
        for each in (names.scorers, names.choosers):
            each.cache_clear()
        names.installed_choosers.cache_clear()

    yield entries_are
    for each in (names.scorers, names.choosers):
        each.cache_clear()
    names.installed_choosers.cache_clear()


def test_a_package_that_is_broken_harms_nobody_else(
    make_pool: MakePool, rng: np.random.Generator, offer: Offer
) -> None:
    offer(
        EntryPoint("corner", "no_such_module:Corner", names.SCORER_GROUP),
        EntryPoint("other", "cxlkv.ndp.methods.fier:Fier", names.SCORER_GROUP),
        EntryPoint("renamed", f"{__name__}:Renamed", names.SCORER_GROUP),
        EntryPoint("nameless", f"{__name__}:Nameless", names.SCORER_GROUP),
    )
    assert not {"corner", "other", "nameless"} & {*scorers.names(), *choosers.names()}
    pool = make_pool()
    sequence = grown(pool, rng)
    sequence.select(0, ones(pool), budget=FEW, method="mean")
    for name, said in (
        ("corner", r"'corner' is installed, but .*no_such_module"),
        ("other", "a scorer cannot be called 'fier', the name of another method here"),
        ("renamed", "is called 'before' and its entry point 'renamed'"),
        ("nameless", "a scorer cannot be called 3: Nameless needs a name"),
    ):
        with pytest.raises(BadArgumentError, match=said):
            sequence.select(0, ones(pool), budget=FEW, method=name)


@pytest.mark.parametrize("group", [names.SCORER_GROUP, names.CHOOSER_GROUP])
def test_a_name_that_a_package_takes_from_a_built_in_method_is_nobodys(
    group: str, make_pool: MakePool, rng: np.random.Generator, offer: Offer
) -> None:
    """One who measures a method of their own must not be given the figures of another."""
    kind = "Other" if group == names.SCORER_GROUP else "Another"
    built_in = {"mean": "scorer", "shadow": "scorer", "retro": "chooser"}
    offer(*(EntryPoint(taken, f"{__name__}:{kind}{taken.title()}", group) for taken in built_in))
    pool = make_pool()
    sequence, new = grown(pool, rng), ones(pool)
    for taken, of in built_in.items():
        said = f"'{taken}' is installed, but .*a built-in {of}'s name: rename yours"
        if taken == "shadow":
            with pytest.raises(BadArgumentError, match=said):
                pool.calibrate(taken, sequence)
        with pytest.raises(BadArgumentError, match=said):
            sequence.select(0, new, budget=FEW, method=taken)
        with pytest.raises(BadArgumentError, match=said):
            pool.batch([sequence]).decode(0, new, new, new, [0, 1], FEW, taken)
        with pytest.raises(BadArgumentError, match=said):
            scorers.check(taken)
    sequence.select(0, ones(pool), budget=FEW, method="ball")
    sequence.select(0, ones(pool), budget=FEW, method="clusters")


def test_names_that_cannot_be_added() -> None:
    for wrong, said in (
        (Other("mean"), "called 'mean', a built-in scorer's name: rename yours"),
        (Other("clusters"), "called 'clusters', a built-in chooser's name: rename yours"),
        (Other("two_stage"), "called 'two_stage', one of the core's names"),
        (Other(3), "called 3: Other needs a name"),
        (Other(None), "called None: Other needs a name"),
        (Other, r"the class Other is no scorer: Other\(\) is wanted"),
        (object(), "object is no scorer: an instance of a subclass"),
    ):
        with pytest.raises(BadArgumentError, match=said):
            scorers.add(wrong)  # type: ignore[arg-type]
    scorers.add(scorers.of("mean"))


# ---- what is refused when a method is compiled ----


def compiled(score: object, summary: object = ((2,), np.float32)) -> scorers.Compiled:
    """Compile a scorer "late" with this score(); score may be a static method."""
    kind = type("Late", (Place,), {"score": score, "summary": lambda self, shape: summary})
    return scorers.compiled(kind("late", is_late=False), Shape(4, 8))


def einsum(queries, scale, tokens, summaries, parameters, scores):
    scores[:] = 0
    scores[:] = np.einsum("id,d->i", queries, queries[0])[:, None]  # where the message points


def product(queries, scale, tokens, summaries, parameters, scores):
    scores[:] = 0
    scores[0, 0] = queries[0] @ queries[0]


def unknown(queries, scale, tokens, summaries, parameters, scores):
    scores[:] = 0
    if queries.shape[0] > 64:
        scores[:] = no_such_thing  # type: ignore[name-defined]  # noqa: F821


def returned(queries, scale, tokens, summaries, parameters, scores):
    return queries @ queries.T


def pair(queries, scale, tokens, summaries, parameters, scores):
    scores[:, :2] = 1


def cosine(queries, scale, tokens, summaries, parameters, scores):
    for i in range(queries.shape[0]):
        scores[i] = queries[i, 0] / np.sqrt((queries[i] ** 2).sum())


def raising(queries, scale, tokens, summaries, parameters, scores):
    if summaries.shape[0] > 40:
        raise ValueError("so many pages")
    scores[:] = 1


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (
            einsum,
            r"numba cannot compile score\(\): .*'numpy\.einsum'.*test_scorers_odd\.py:LINE\)$",
        ),
        (
            unknown,
            r"numba cannot compile score\(\): .*'no_such_thing' is not defined .*/test_scorers_odd",
        ),
        (returned, r"leaves a score unset, .* what it returns is ignored"),
        (pair, "leaves a score unset, .* with 3 queries of noise and 5 pages"),
        (cosine, "or makes it NaN, with 1 queries of zeros and 1 pages"),
        (raising, r"score\(\) fails on 1 queries of noise and 64 pages, .*ValueError: so many"),
    ],
)
def test_a_score_that_is_wrong_says_where(score: FunctionType, said: str) -> None:
    line = inspect.getsourcelines(einsum)[1] + 2
    with pytest.raises(
        BadArgumentError, match="^method 'late': .*" + said.replace("LINE", str(line))
    ):
        compiled(staticmethod(score))


def test_a_function_with_self() -> None:
    def score(self: object, *given: Floats) -> None:
        given[-1][:] = 1

    with pytest.raises(BadArgumentError, match=r"'late': score\(\) takes no self: @staticmethod"):
        compiled(score)


def test_products_of_matrices_are_compiled() -> None:
    """By scipy, which the extra brings."""
    pytest.importorskip("scipy", reason="numba compiles @ by it")
    compiled(staticmethod(product))


@pytest.mark.parametrize(
    "summary",
    [
        (2, 8),
        ((2, 8),),
        (8, np.float32),
        ((2.5,), np.float32),
        ((8,), np.float64),
        None,
        ((8,), "x"),
    ],
)
def test_summaries_that_are_none(summary: object) -> None:
    with pytest.raises(BadArgumentError, match=r"'late': summary\(\) returns .* float32, int8,"):
        compiled(staticmethod(product), summary)


@pytest.mark.parametrize("given", [9, -1, 8 / 2])
def test_bytes_that_are_more_than_there_are(given: object) -> None:
    reading = Place("reading", is_late=False)
    reading.read_bytes = lambda shape: given  # type: ignore[assignment,method-assign,return-value]
    said = f"'reading': read_bytes.. returns {given!r} of a summary of 8 bytes"
    with pytest.raises(BadArgumentError, match=said):
        scorers.compiled(reading, Shape(16, 8))


class Late(Place):
    """Raises where it is called with more than it was tried with, or with keys of another kind."""

    @staticmethod
    def summarise(keys, first, parameters, summary):
        if keys[0, 0] > 1e6:
            raise ValueError("such a key")
        summary[0] = first

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        if queries[0, 0] > 1e6:
            raise ValueError("such a query")
        scores[:] = 1


def test_what_a_compiled_function_raises_fails_the_select(
    make_pool: MakePool, rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    """numba would print the exception, and the core would choose pages by stale scores."""
    scorers.add(Late("late", is_late=False))
    pool = make_pool()
    sequence, query = grown(pool, rng), ones(pool)
    right = sequence.select(0, query, budget=FEW, method="late")
    with pytest.raises(BadArgumentError, match=r"method 'late': score\(\) raised .* plain Python"):
        sequence.select(0, 1e7 * query, budget=FEW, method="late")
    again = sequence.select(0, query, budget=FEW, method="late")
    assert again.pages.tolist() == right.pages.tolist()
    keys = np.full((pool.layout.page_tokens, *query.shape[1:]), 1e7, np.float32)
    for layer in range(pool.layout.layers):
        sequence.append(layer, keys, keys)
    for _ in range(2):  # a summary that failed is not taken for made
        with pytest.raises(BadArgumentError, match=r"method 'late': summarise\(\) raised"):
            sequence.select(0, query, budget=FEW, method="late")
    assert capfd.readouterr().err == ""


class Loud(Place):
    """NaN for queries that are large."""

    log_sums = True

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for i in range(queries.shape[0]):
            for page in range(summaries.shape[0]):
                scores[i, page] = np.log(100 - queries[i, 0]) + summaries[page, 0]


class LoudBest(Loud):
    log_sums = False


@pytest.mark.parametrize("kind", [Loud, LoudBest])
def test_a_score_that_is_nan_for_some_queries_fails_the_select(
    kind: type[Place], make_pool: MakePool, rng: np.random.Generator
) -> None:
    """It was the best score, and the pages looked chosen. Of a query or a key that is no number it
    stays so."""
    scorers.add(kind("loud", is_late=False))
    pool = make_pool()
    sequence, query = grown(pool, rng), ones(pool)
    sequence.select(0, query, budget=FEW, method="loud")
    query[0, 1, 0] = 1000
    said = r"method 'loud': score\(\) gives NaN for page 0 of kv head 1 in layer 0"
    with pytest.raises(BadArgumentError, match=said):
        sequence.select(0, query, budget=FEW, method="loud")
    query[0, 1, 1] = np.inf
    sequence.select(0, query, budget=FEW, method="loud")


WITHOUT = """
import sys
sys.modules["numba"] = None
import numpy as np
from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.errors import UnsupportedError
layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
    sequence = pool.sequence()
    keys = np.ones((100, 1, 8), np.float32)
    sequence.append(0, keys, keys)
    for method in ("exact", "two_stage", "auto"):
        sequence.select(0, keys[0], budget=Budget(pages=4), method=method)
    try:
        sequence.select(0, keys[0], budget=Budget(pages=4), method="mean")
    except UnsupportedError as error:
        print(error)
"""


def test_without_numba_all_else_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'cxlkv[methods]'" in done.stdout


def test_memory_that_fails_while_pages_are_summarised(path: Path, rng: np.random.Generator) -> None:
    """It is an error each time, nothing waits for ever, and what is elsewhere is well."""
    layout = KVLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, dtype="float32")
    with CXLPool.create(path, layout=layout, capacity="8MiB", threads=2) as pool:
        first, second = grown(pool, rng, 16 * 40), grown(pool, rng, 16 * 100)
        with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=2) as other:
            copy = other.sequence()
            keys, values = first.fetch(0)
            copy.append(0, tokens(keys), tokens(values))
            right = copy.select(0, ones(other)[0], budget=FEW, method="mean")
        os.truncate(path, 4 << 20)
        for name in ("mean", "gaussian", "mean"):
            with pytest.raises(PoisonError, match="bus error"):
                second.select(0, ones(pool)[0], budget=FEW, method=name)
        found = first.select(0, ones(pool)[0], budget=FEW, method="mean")
        assert found.pages.tolist() == right.pages.tolist()
        assert found.scores.tolist() == right.scores.tolist()


def test_what_a_scorer_cannot_do_is_said_before_a_step_appends(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    pool = make_pool()
    sequence = grown(pool, rng)
    batch, new = pool.batch([sequence]), ones(pool)
    with pytest.raises(BadArgumentError, match="no mass: give pages or a share") as raised:
        batch.decode(0, new, new, new, [0, 1], Budget(mass=0.5), "mean")
    assert not raised.value.appended
    assert sequence.tokens(0) == 100
    pool.close()
    with pytest.raises(ClosedError):
        sequence.select(0, new, budget=FEW, method="mean")


def tokens(pages: object) -> Floats:
    """[tokens, heads, dim] of [heads, pages, tokens of a page, dim]."""
    of = np.asarray(pages)
    return of.transpose(1, 2, 0, 3).reshape(-1, of.shape[0], of.shape[3])


# ---- layouts ----


ODD = [("mean", 1), ("fier", 7), ("pq", 576)]
MORE = [("mean", 7), ("mean", 576), ("fier", 1), ("fier", 576), ("pq", 1), ("pq", 7)]
MORE += [("low_rank", 7), ("low_rank", 576)]


@pytest.mark.parametrize(("name", "dim"), [*ODD, *(nightly(*pair) for pair in MORE)])
def test_odd_dims(name: str, dim: int, make_pool: MakePool, rng: np.random.Generator) -> None:
    rotary = Rotary.of(10_000, min(dim - dim % 2, 512), neighbours=True) if dim > 1 else None
    layout = KVLayout(
        layers=1, kv_heads=1, head_dim=dim, page_tokens=4, dtype="float32", rotary=rotary
    )
    pool = make_pool("8MiB", layout=layout)
    sequence = grown(pool, rng, 400)
    if scorers.of(name).calibrated:
        pool.calibrate(name, sequence)
    queries = rng.standard_normal((1, dim)).astype(np.float32)
    picked = sequence.select(0, queries, budget=Budget(pages=30), method=name)
    exact = sequence.select(0, queries, budget=Budget(pages=30), method="exact")
    both = set(picked.pages[0].tolist()) & set(exact.pages[0].tolist())
    print(name, dim, len(both))
    assert len(both) > 11, "no better than chance, which is 9 of 30"


def test_more_queries_than_one_call_has(make_pool: MakePool, rng: np.random.Generator) -> None:
    """128 query heads of one kv head, as in latent attention, in three rows."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
    pool = make_pool("8MiB", layout=layout)
    sequence = grown(pool, rng, 400)
    queries = rng.standard_normal((3, 128, 8)).astype(np.float32)
    picked = sequence.select(0, queries, budget=Budget(pages=9), method="mean")
    means = np.asarray(sequence.fetch(0)[0], np.float64)[0].mean(1)
    best = (queries @ means.T).max(1) * 8**-0.5
    for row in range(3):
        own = picked.pages[row, 0]
        free = own[(own >= 1) & (own < 98)]
        np.testing.assert_allclose(picked.scores[row, 0][1:-2], best[row, free], rtol=0.02)
        others = np.setdiff1d(np.arange(1, 98), free)
        assert best[row, free].min() >= best[row, others].max() - 0.02


class Largest(Place):
    """A summary of as many bytes as it may have, all of which it looks at."""

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (4096,), np.float32

    @staticmethod
    def summarise(keys, first, parameters, summary):
        summary[:] = first

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            low, high = summaries[page].min(), summaries[page].max()
            scores[:, page] = -low if low == high else np.inf


def test_summaries_as_large_as_they_may_be(make_pool: MakePool, rng: np.random.Generator) -> None:
    scorers.add(Largest("largest", is_late=False))
    pool = make_pool()
    picked = grown(pool, rng).select(0, ones(pool), budget=FEW, method="largest")
    assert picked.pages[0].tolist() == [[0, 1, 2, 3, 23, 24]] * 2
