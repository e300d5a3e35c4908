"""A method chooses the same, to the bit, wherever the pages are and were: summaries and states are
of keys and values, and of nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Rotary, Sequence
from cxlkv.bench import loops
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import scorers
from cxlkv.ndp.scorers import Floats, Sample
from cxlkv.prefix import prefix_keys
from cxlkv.tiers import Tiers
from cxlkv.tiers.local import LocalTier, units_of
from cxlkv.transport import Remote, Server, pull

from ..support.forking import in_child
from ..support.lengths import nightly
from ..support.processes import Child
from ..support.texts import append, grown
from .test_worker import DIM, HEADS, PAGE, WATCHDOG_S, Twins, make_pool

methods = pytest.importorskip("cxlkv.ndp.methods", reason="numba compiles scorers")

# Of each run: plain, learned, by log-sums; tokens and rows, a sample. All at night: what goes by
# positions, low_rank, takes each process 8 s to compile.
NAMES: tuple[str, ...] = ("mean", "pq", "gaussian")
CHOOSERS: tuple[str, ...] = ("retro", "vattention")
ALL_NAMES = tuple(each.name for each in methods.SCORERS)
ALL_CHOOSERS = tuple(each.name for each in methods.CHOOSERS)
LAYERS = 2
STARTS = np.array([0, 1], np.int32)
SMALL = KVLayout(
    layers=LAYERS,
    kv_heads=2,
    head_dim=8,
    page_tokens=4,
    dtype="float32",
    rotary=Rotary.of(10_000, 6),
)
IDS = [7 * i for i in range(4 * 40)]
FEW = Budget(pages=7)
AMOUNTS = (
    FEW,
    Budget(share=0.2, sinks=0, recent=0),
    Budget(share=0.2, dense_layers=1),
    Budget(share=0.1, by_layer={1: 0.4}),
)


@pytest.fixture(autouse=True, params=["some methods", nightly("all methods")])
def chosen_methods(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "all methods":
        monkeypatch.setattr(sys.modules[__name__], "NAMES", ALL_NAMES)
        monkeypatch.setattr(sys.modules[__name__], "CHOOSERS", ALL_CHOOSERS)


def learned() -> list[str]:
    return [name for name in NAMES if scorers.of(name).calibrated]


def numbers(name: str, dim: int) -> Floats:
    """What a method has learned: [layers, kv_heads, n]."""
    random = np.random.default_rng(5)
    pages = random.standard_normal((LAYERS, HEADS, 64, 4, dim)).astype(np.float32)
    queries = random.standard_normal((9, dim)).astype(np.float32)
    scorer, rotary = scorers.of(name), Rotary.of(10_000, dim - dim % 2)
    made = [[scorer.learn(Sample(head, queries, rotary)) for head in layer] for layer in pages]
    return np.array(made, np.float32)


def know(*pools: CXLPool) -> None:
    """The pools know all of NAMES."""
    for pool in pools:
        for name in learned():
            pool.calibrate(name, numbers(name, pool.layout.head_dim))


Lists = tuple[npt.NDArray[np.int32], Floats]


def lists(sequence: Sequence, budget: Budget = FEW) -> list[Lists]:
    """Lists of all methods, in all layers: pages and scores; choosers' weights and what is
    attended to come last.
    """
    random = np.random.default_rng(9)
    layout, found = sequence._layout, []
    queries = random.standard_normal((2, 2 * layout.kv_heads, layout.head_dim)).astype(np.float32)
    for name in NAMES:
        for layer in range(layout.layers):
            picked = sequence.select(layer, queries, budget=budget, method=name)
            assert picked.method == name
            found.append((picked.pages, picked.scores))
    for name in CHOOSERS:
        for layer in range(layout.layers):
            picked = sequence.select(layer, queries, budget=budget, method=name)
            assert picked.log_weights is not None
            found.append((picked.pages, picked.log_weights))
            found.append((picked.pages, np.asarray(sequence.attend(layer, queries, picked)[0])))
    return found


def assert_same(one: list[Lists], other: list[Lists]) -> None:
    for (pages, scores), (theirs, wanted) in zip(one, other, strict=True):
        np.testing.assert_array_equal(pages, theirs)
        np.testing.assert_array_equal(scores, wanted)


def small(where: str | Path = "anonymous:", **more: object) -> CXLPool:
    of = {"layout": SMALL, "capacity": "4MiB", "threads": 1} | more
    made = CXLPool.create(where, **of)  # type: ignore[arg-type]
    know(made)
    return made


@pytest.fixture
def right() -> list[Lists]:
    """What a pool that has just this text says of it."""
    with small() as pool:
        return lists(grown(pool, IDS))


# ---- the worker ----


class Served(Protocol):
    def __call__(self, methods: str, **more: object) -> tuple[CXLPool, Twins]: ...


@pytest.fixture
def served(path: Path, tmp_path: Path, rng: np.random.Generator) -> Iterator[Served]:
    """Twins of three sequences, one of which a worker serves that was begun with these methods."""
    for name in learned():
        np.save(tmp_path / f"{name}.npy", numbers(name, DIM))
    with ExitStack() as stack:

        def make(methods: str, **more: object) -> tuple[CXLPool, Twins]:
            pool = stack.enter_context(make_pool(path, **more))  # type: ignore[arg-type]
            twins = stack.enter_context(Twins(path, pool, rng, 3))
            know(pool, twins.here)
            words = [
                f"{word}={tmp_path / word}.npy" if word in learned() else word
                for word in filter(None, methods.split(","))
            ]
            words = ["--methods", ",".join(words)] if words else []
            command = ["-m", "cxlkv.ops.cli", "ndp-worker", path, "--threads", 1]
            worker = stack.enter_context(Child(*command, *words))
            assert "serves up to" in worker.hear()
            pool.use_worker("only", deadline_s=WATCHDOG_S)
            return pool, twins

        yield make


@pytest.mark.parametrize("encoding", ["none", "int4", nightly("progressive")])
def test_a_worker_chooses_what_this_process_would(served: Served, encoding: str) -> None:
    names = NAMES if encoding == "none" or NAMES == ALL_NAMES else ("mean",)
    pool, twins = served(",".join(names), encodings=(encoding, "none"))
    twins.append([50, 8, 131])
    for step in range(3):
        for layer in range(LAYERS):
            for name in names:
                twins.select([1, 2, 3], FEW, layer, name)
                twins.select([1, 0, 3], Budget(pages=6, per="sequence"), layer, name)
            if "gaussian" in names:
                twins.select([1, 2, 1], Budget(mass=0.7), layer, "gaussian")
        twins.truncate(2, 131 - 20 * step - 3)  # then other keys, in pages of the same numbers
        twins.append([1, 3, 40])
    assert (pool.worker.connections, pool.worker.selects_here) == (1, 0)


def test_a_worker_decodes_by_a_scorer(served: Served) -> None:
    pool, twins = served("mean")
    twins.append([200, 70, 131])
    starts = np.arange(4, dtype=np.int32)
    for layer in range(LAYERS):
        keys, values = (twins.drawn(3, HEADS, DIM) for _ in range(2))
        q = twins.drawn(3, 2 * HEADS, DIM)
        one, other = (
            batch.decode(layer, q, keys, values, starts, FEW, "mean") for batch in twins.batches
        )
        assert one.method == other.method == "mean"
        np.testing.assert_array_equal(one.out, other.out)
        np.testing.assert_array_equal(one.lse, other.lse)
        picked = twins.batches[1].select(layer, q, starts, FEW, "mean")
        out, lse = twins.batches[1].attend(layer, q, starts, picked)
        np.testing.assert_array_equal(one.out, out)
        np.testing.assert_array_equal(one.lse, lse)
    assert pool.worker.selects_here == pool.worker.attends_here == 0


@pytest.mark.parametrize("encoding", ["progressive", nightly("none"), nightly("int4")])
def test_a_worker_chooses_tokens_that_this_process_would(served: Served, encoding: str) -> None:
    pool, twins = served(",".join(ALL_CHOOSERS), encodings=(encoding, "none"))
    twins.append([150, 8, 331])
    calls = 0
    for step in range(3):
        for layer in range(2):
            for name in ALL_CHOOSERS:
                twins.select([1, 2, 3], AMOUNTS[(step + layer) % 4], layer, name)
                per_sequence = Budget(pages=6 + step, per="sequence")
                twins.select([1, 0, 3], per_sequence, layer, name)
                several = [FEW, Budget(pages=9), Budget(share=1.0)]
                twins.select([1, 1, 1], several, layer, name, scale=0.3 / 7)
                calls += 3
        twins.truncate(2, 331 - 20 * step - 3)  # then other keys, in pages of the same numbers
        twins.append([1, 3, 40])
    use = pool.worker
    assert (use.connections, use.selects_here, use.selects) == (1, 0, calls)


def test_a_worker_decodes_by_choosers(served: Served) -> None:
    """By each in turn, across the borders of pages."""
    pool, twins = served(",".join(CHOOSERS))
    twins.append([200, 70, 131])
    starts, steps = np.arange(4, dtype=np.int32), len(CHOOSERS) * (2 * PAGE + 2)
    for step in range(steps):
        name, layer = CHOOSERS[step // 2 % len(CHOOSERS)], step % 2
        keys, values = (twins.drawn(3, HEADS, DIM) for _ in range(2))
        q = twins.drawn(3, 2 * HEADS, DIM)
        one, other = (
            batch.decode(layer, q, keys, values, starts, Budget(share=0.3), name)
            for batch in twins.batches
        )
        assert one.method == other.method == name
        np.testing.assert_array_equal(one.out, other.out)
        np.testing.assert_array_equal(one.lse, other.lse)
    use = pool.worker
    assert (use.selects_here, use.attends_here, use.attends) == (0, 0, steps)


def test_a_worker_that_was_not_told_of_a_method_says_how_to_tell_it(served: Served) -> None:
    pool, twins = served("")
    twins.append([50, 8, 131])
    for name in NAMES:
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        with pytest.raises(BadArgumentError, match=r"begun with.*--methods"):
            twins.select([1, 1, 1], FEW, 0, name)
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        twins.select([1, 1, 1], FEW, 0, name)
        assert "--methods" in pool.worker.why
    assert pool.worker.selects_here == len(NAMES)
    twins.select([1, 1, 1], FEW, 0, "exact")  # it is as well as before
    assert (pool.worker.selects, pool.worker.connections) == (1, 1)


CODE = """
import numpy as np
from cxlkv.ndp.choosers import Choice, Chooser
from cxlkv.ndp.scorers import Scorer

class First(Scorer):
    name = "first"
    def summary(self, shape):
        return (shape.dim,), np.float32
    @staticmethod
    def summarise(keys, first, parameters, summary):
        for d in range(keys.shape[1]):
            summary[d] = keys[0, d]
    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for i in range(queries.shape[0]):
            for page in range(summaries.shape[0]):
                scores[i, page] = SIGN * scale * np.dot(queries[i], summaries[page])

class Begin(Chooser):
    name = "begin"
    def state(self, keys, values):
        return (keys[..., 0].copy(),)
    def choose(self, states, asked):
        weights = np.full((len(asked.queries), asked.tokens), -np.inf, np.float32)
        weights[:, asked.first : asked.first + asked.most] = SIGN - 1
        return Choice(weights, None, 0)
"""
PACKAGE = {
    "cxlkv.scorers": "first = own_methods:First",
    "cxlkv.choosers": "begin = own_methods:Begin",
}


def install(folder: Path, sign: int) -> None:
    """A package with two methods, whose scores have the sign."""
    (folder / "own_methods.py").write_text(CODE.replace("SIGN", str(sign)))
    told = folder / "own_methods-1.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: own-methods\nVersion: 1\n")
    points = [f"[{group}]\n{point}\n" for group, point in PACKAGE.items()]
    (told / "entry_points.txt").write_text("\n".join(points))


ASK = """
import sys
import numpy as np
from cxlkv import Budget, CXLPool
with CXLPool.open(sys.argv[1], threads=1, worker=True) as pool:
    sequence = pool.sequence()
    rows = np.random.default_rng(1).standard_normal((200, 2, 16)).astype(np.float32)
    sequence.append(0, rows, rows)
    for name in ("first", "begin"):
        sequence.select(0, rows[:2].reshape(4, 16), Budget(pages=7), method=name)
    print(pool.worker.selects, pool.worker.why)
    sequence.release()
"""


def test_a_worker_has_no_method_whose_code_has_changed(path: Path, tmp_path: Path) -> None:
    install(tmp_path, 1)
    at = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["-m", "cxlkv.ops.cli", "ndp-worker", path, "--threads", 1]
    with (
        make_pool(path),
        Child(*command, "--methods", "first,begin", before=(), **at) as worker,
    ):
        assert "serves up to" in worker.hear()
        with Child("-c", ASK, path, before=(), **at) as asks:
            assert asks.hear() == "2 "
        install(tmp_path, -1)
        with Child("-c", ASK, path, before=(), **at) as asks:
            said = asks.hear()
        assert said.startswith("0 ")
        assert "of another name, seed or code" in said


# ---- other places ----


def test_a_forked_child_and_forks_of_a_sequence(right: list[Lists]) -> None:
    with small() as pool:
        sequence = grown(pool, IDS)
        in_child(lambda: assert_same(lists(sequence), right))  # which makes all summaries
        lists(sequence.fork())
        in_child(lambda: assert_same(lists(sequence), right))  # which has them
        other = sequence.fork()
        other.truncate(4 * 20 + 1)
        append(other, [13 * i for i in range(60)])

        def told() -> list[Lists]:
            with small() as alone:
                return lists(grown(alone, IDS[:81] + [13 * i for i in range(60)]))

        wanted = told()
        in_child(lambda: assert_same(lists(other), wanted))
        assert_same(lists(other), wanted)
        assert_same(lists(sequence), right)


def test_pages_of_the_cold_tier_come_back_with_the_same_scores(tmp_path: Path) -> None:
    """Other texts had their places meanwhile, and were summarised."""
    texts = {n: [100000 * n + i for i in IDS] for n in range(8)}
    with (
        small(capacity="2350KiB") as pool,
        Tiers(pool, cold=tmp_path / "cold", cold_capacity="4MiB") as tiers,
    ):
        for ids in texts.values():
            sequence = grown(pool, ids)
            pool.publish_prefix(sequence, ids)
            lists(sequence)
            sequence.release()
        gone = [n for n, ids in texts.items() if not is_here(pool, ids)]
        assert len(gone) >= 4
        for number in gone[:2]:
            with tiers.match(prefix_keys(texts[number], 4)) as hit:
                assert hit.tokens == len(IDS)
                sequence = hit.sequence()
            with small() as alone:
                assert_same(lists(sequence), lists(grown(alone, texts[number])))
            sequence.release()


def is_here(pool: CXLPool, ids: list[int]) -> bool:
    with pool.match_prefix(ids) as hit:
        return hit.tokens == len(ids)


def test_copies_in_the_local_tier_change_nothing(right: list[Lists]) -> None:
    with small() as pool:
        sequence = grown(pool, IDS)
        batch = pool.batch([sequence])
        q = np.ones((1, 4, 8), np.float32)
        with LocalTier(pool, "1MiB") as tier:
            picked = [batch.select(n, q, STARTS, Budget(pages=20)) for n in range(LAYERS)]
            units = [units_of(batch, n, of) for n, of in enumerate(picked)]
            assert not tier.promote(np.concatenate(units)).refused
            assert_same(lists(sequence), right)
            assert_same(lists(sequence), right)


def test_pages_that_were_pulled_and_selects_of_a_server(tmp_path: Path, right: list[Lists]) -> None:
    secret = b"a secret of the tests"
    with (
        small() as there,
        small() as here,
        Server(there, ("127.0.0.1", 0), secret, methods=NAMES) as server,
    ):
        sequence = grown(there, IDS)
        there.publish_prefix(sequence, IDS)
        sequence.release()
        address = f"{server.address[0]}:{server.address[1]}"
        with Remote(address, secret, connect=False, deadline_s=WATCHDOG_S) as remote:
            keys = prefix_keys(IDS, 4)
            assert pull(remote, here, keys).tokens == len(IDS)
            with here.match(keys) as hit:
                assert_same(lists(hit.sequence()), right)
            random = np.random.default_rng(9)
            q = random.standard_normal((2, 4, 8)).astype(np.float32)
            with remote.match(keys) as far:
                found = [
                    remote.select(far, layer, q, FEW, method=name)
                    for name in NAMES
                    for layer in range(LAYERS)
                ]
                assert_same([(of.pages, of.scores) for of in found], right[: len(found)])
                with pytest.raises(BadArgumentError, match="method 'nothing': this server takes"):
                    remote.select(far, 0, q, FEW, method="nothing")


@pytest.mark.skipif(loops.flush_name() == "none", reason="this CPU cannot flush lines")
def test_two_hosts_and_two_processes(shm_path: Path, right: list[Lists]) -> None:
    """A page that one host frees and the other fills anew has the other's scores."""
    shared = {"sharing": "software", "hosts": 2, "host": 0, "capacity": "16MiB"}
    with small(shm_path, **shared) as first, CXLPool.open(shm_path, host=1, threads=1) as second:
        know(second)
        sequence = grown(first, IDS)
        first.publish_prefix(sequence, IDS)
        sequence.release()
        with second.match_prefix(IDS) as hit:
            theirs = hit.sequence()
        assert_same(lists(theirs), right)
        theirs.release()
        for number in range(1, 4):
            ids = [100000 * number + i for i in IDS]
            sequence = grown(first, ids)
            first.publish_prefix(sequence, ids)
            sequence.release()
            with second.match_prefix(ids) as hit:
                theirs = hit.sequence()
            with small() as alone:
                assert_same(lists(theirs), lists(grown(alone, ids)))
            theirs.release()
            first.forget(prefix_keys(ids, 4))
        with CXLPool.open(shm_path, host=0, threads=1) as again:
            know(again)
            with again.match_prefix(IDS) as hit:
                assert_same(lists(hit.sequence()), right)
