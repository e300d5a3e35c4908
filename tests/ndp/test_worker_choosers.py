"""Choosers in the worker: their states are made once for all of its clients, and go with the last
sequence; what it cannot do is done here."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, _core
from cxlkv.errors import BadArgumentError, UnsupportedError, WorkerError
from cxlkv.ndp import choosers, names, worker
from cxlkv.ndp.choosers import Choice, Chooser, Question
from cxlkv.ndp.engine import Budget, Selection, VirtualRows
from cxlkv.ndp.scorers import Floats
from cxlkv.sequence import Sequence

from ..support.lengths import nightly
from ..support.processes import Child
from ..support.waiting import until
from ..support.worker_thread import serving
from .test_choosers import Counting
from .test_worker import DIM, HEADS, PAGE, WATCHDOG_S, Twins, make_pool, same

sampling = pytest.importorskip("cxlkv.ndp.methods.sampling", reason="numba compiles choosers")

FEW = Budget(pages=7)


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_queries_of_other_dtypes(path: Path, rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="numpy has no bfloat16")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float16
    q = torch.from_numpy(rng.standard_normal((3, 2 * HEADS, DIM), np.float32)).to(wanted)
    with (
        make_pool(path, "bf16") as pool,
        Twins(path, pool, rng, 3) as twins,
        serving(pool, ["retro"]),
    ):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([150, 8, 331])
        starts = np.arange(4, dtype=np.int32)
        same(*(batch.select(0, q, starts, FEW, "retro") for batch in twins.batches))


def test_requests_that_are_split(path: Path, rng: np.random.Generator) -> None:
    """By sequences, when a slot is small; and answers that are longer than a slot."""
    with (
        make_pool(path) as pool,
        Twins(path, pool, rng, 12) as twins,
        serving(pool, ["retro"], request_bytes=4096, response_bytes=4096),
    ):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([90 + 7 * n for n in range(12)])
        twins.select([1] * 12, Budget(share=0.4), 0, "retro")
        twins.select([1] * 12, [Budget(pages=5 + n) for n in range(12)], 1, "retro")
        twins.select([0, 1, 3] * 4, Budget(pages=6, per="sequence"), 0, "retro")
        twins.select([0] * 11 + [1], FEW, 1, "retro")  # requests that have no list
        twins.select([20, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 1], FEW, 0, "retro")
        assert (pool.worker.selects, pool.worker.selects_here) == (5, 0)


def test_a_sequence_that_grows_and_shrinks(path: Path, rng: np.random.Generator) -> None:
    """The worker knows of no page that it let go, and nothing of a tail is told in vain."""
    with (
        make_pool(path) as pool,
        Twins(path, pool, rng, 2) as twins,
        serving(pool, ["retro"]),
    ):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([PAGE * 300 + 3, PAGE * 9])
        twins.select([1, 1], FEW)
        twins.append([PAGE, 0])
        twins.select([1, 1], FEW, 0, "retro")
        twins.truncate(0, PAGE * 300 + 1)
        twins.select([1, 1], FEW)
        assert _core.pool_worker_state(pool._handle)[0]["refused"] == 0
        for tokens in (PAGE * 32 + 3, PAGE * 20):
            twins.select([1, 1], FEW, 1, "retro")
            twins.truncate(0, tokens)
            twins.select([1, 1], FEW, 0, "retro")
            twins.select([1, 1], FEW)
            twins.append([PAGE * 40, 0])


def test_pages_of_a_step_that_is_half_done(path: Path, rng: np.random.Generator) -> None:
    """They have no record yet but that of their last use, when the last layer was longer."""
    with (
        make_pool(path) as pool,
        Twins(path, pool, rng, 1) as twins,
        serving(pool, ["retro"]),
    ):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([PAGE * 40])
        for layer in range(2):
            twins.select([1], FEW, layer, "retro")
        twins.truncate(0, PAGE * 20)
        twins.append([PAGE * 20], layers=[0])
        twins.select([1], FEW, 0, "retro")


# ---- states ----


class CountingPages(Counting):
    def state(self, keys: Floats, values: Floats) -> tuple[Floats]:
        self.made.append(keys.shape[1] // PAGE)
        return (keys.copy(),)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """A chooser that packages here and there offer, as it seems."""
    made = CountingPages()
    monkeypatch.setitem(names.installed_choosers(), "counting", made)
    monkeypatch.setitem(names.choosers(), "counting", made)
    return made


def chosen(sequence: Sequence, name: str = "counting") -> int:
    """Bytes that a select read."""
    q = np.ones((2 * HEADS, DIM), np.float32)
    return sequence.select(0, q, FEW, method=name).bytes_scored


def test_processes_share_states_and_nobody_keeps_old_ones(path: Path, counting: Counting) -> None:
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["counting"]) as choose:
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        counting.made.clear()
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, rows, rows)
        token_bytes = pool.layout.stored_token_bytes // 2
        assert chosen(sequence) == 100 + PAGE * 20 * token_bytes
        assert counting.made == [16, 4]
        with CXLPool.open(path, threads=1) as other:
            other.use_worker("only", deadline_s=WATCHDOG_S)
            theirs = other.adopt(sequence.handle)
            assert chosen(theirs) == chosen(sequence) == 100
            fork = sequence.fork()
            assert chosen(fork) == 100
            assert counting.made == [16, 4]
            known = choosers._runs[choose._pool]
            assert len(choose._held) == 3
            sequence.release()
            fork.release()
            until(lambda: len(choose._held) == 1)
            assert len(known) == 2
            theirs.release()
            until(lambda: not choose._held)
        until(lambda: not known)


def test_states_are_made_in_steps(
    path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Each question is answered when a state is made, and asked again until all are."""
    monkeypatch.setattr(worker, "STATES_S", 0.0)
    with (
        make_pool(path) as pool,
        Twins(path, pool, rng, 3) as twins,
        serving(pool, ["counting", "retro"]),
    ):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([PAGE * 23, 3, PAGE * 5])
        counting.made.clear()
        twins.select([1, 1, 1], FEW, 0, "counting")
        twins.select([1, 1, 1], FEW, 1, "retro")
        assert counting.made == 2 * [16, 4, 1, 1, 1], "by the worker, and here"
        assert (pool.worker.selects, pool.worker.selects_here) == (2, 0)


def test_a_worker_that_is_never_done(path: Path) -> None:
    """It is asked as often as there are pages, and no more."""
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["retro"]) as choose:
        answer, asked = choose.answer, []

        def never(handle: _core.Handle) -> None:
            if _core.worker_asked(handle) is None:
                answer(handle)
                return
            asked.append(1)
            _core.worker_refuse(handle, "states of 0 pages are made", again=True)

        choose.answer = never  # type: ignore[assignment, method-assign]
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        sequence.append(0, rows, rows)
        with pytest.raises(WorkerError, match="of 0 pages"):
            chosen(sequence, "retro")
        assert 20 <= len(asked) <= 25
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        assert chosen(sequence, "retro") > 0
        assert pool.worker.selects_here == 1
        assert "of 0 pages" in pool.worker.why


class Wrong(Chooser[tuple[Floats]]):
    """It does well when it is tried out."""

    name = "wrong"

    def state(self, keys: Floats, values: Floats) -> tuple[Floats]:
        return (keys,)

    def choose(self, states: list[tuple[Floats]], asked: Question) -> Choice:
        if asked.tokens != PAGE * 16:
            raise LookupError("there is no such cluster")
        return Choice(np.full((HEADS, asked.tokens), -np.inf, np.float32), None, 0)


def test_what_a_worker_cannot_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done here, where errors are as without a worker."""
    wrong = Wrong()
    for known in (names.installed_choosers(), names.choosers()):
        monkeypatch.setitem(known, "wrong", wrong)
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    with make_pool(path, window=PAGE * 4) as pool, serving(pool, ["wrong", "retro"]):
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        for layer in range(3):
            sequence.append(layer, rows, rows)
        with pytest.raises(LookupError, match="no such cluster"):
            chosen(sequence, "wrong")
        assert "LookupError: there is no such cluster" in pool.worker.why
        assert pool.worker.selects_here == 1
        chosen(sequence, "clusters")
        assert "--methods): wrong, retro" in pool.worker.why
        choosers.add(sampling.MagicPIG(seed=2))
        try:
            chosen(sequence, "magicpig")  # the worker has another one, and is not asked
            assert "this process added the chooser itself" in pool.worker.why
            assert pool.worker.selects_here == 3
            pool.use_worker("only", deadline_s=WATCHDOG_S)
            with pytest.raises(WorkerError, match="no worker has it"):
                chosen(sequence, "magicpig")
            pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        finally:
            names.choosers()["magicpig"] = names.installed_choosers()["magicpig"]
        q = np.ones((2 * HEADS, DIM), np.float32)
        with pytest.raises(UnsupportedError, match="window"):
            sequence.select(2, q, FEW, method="retro")
        with pytest.raises(BadArgumentError, match="no mass"):
            sequence.select(0, q, Budget(mass=0.5), method="retro")
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        with pytest.raises(BadArgumentError, match="LookupError"):
            chosen(sequence, "wrong")
        chosen(sequence, "retro")
        assert pool.worker.connections == 1


def test_a_choice_that_is_too_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker says so, and serves on."""
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    many = np.zeros((1, HEADS, 1_100_000, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["retro"]):
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        sequence.append(0, rows, rows)
        right = choosers.select_here

        def longer(*given: object) -> Selection:
            found = right(*given)  # type: ignore[arg-type]
            return replace(found, rows=VirtualRows(many, many, many[..., 0].copy()))

        with monkeypatch.context() as patch:
            patch.setattr(choosers, "select_here", longer)
            with pytest.raises(BadArgumentError, match="ask for fewer rows"):
                chosen(sequence, "retro")
        assert chosen(sequence, "retro") > 0


def test_a_worker_that_is_always_asked_forgets(
    path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no time between two questions."""
    monkeypatch.setattr(worker, "FORGET_S", 0.0)
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["counting"]) as choose:
        answer = choose.answer

        def when_asked(handle: _core.Handle) -> None:
            if _core.worker_asked(handle) is not None:
                answer(handle)

        monkeypatch.setattr(choose, "answer", when_asked)
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        for _ in range(9):
            sequence = pool.sequence()
            sequence.append(0, rows, rows)
            chosen(sequence)
            until(lambda: len(choose._held) == 1)
            sequence.release()


def test_states_stay_when_all_is_told_anew(
    path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release had no time to report it."""
    monkeypatch.setattr(worker, "FORGET_S", 0.0)
    monkeypatch.setattr(worker, "STATES_S", 0.0)
    rows = np.zeros((PAGE * 23, HEADS, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["counting"]) as choose:
        answer = choose.answer

        def when_asked(handle: _core.Handle) -> None:
            if _core.worker_asked(handle) is not None:
                answer(handle)

        choose.answer = when_asked  # type: ignore[assignment, method-assign]
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        sequence.append(0, rows, rows)
        counting.made.clear()
        chosen(sequence)
        pool.use_worker("none")
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        chosen(sequence)
        assert counting.made == [16, 4, 1, 1, 1]


@pytest.mark.parametrize("wrong", ["page", "lists", "pages"])
def test_an_answer_that_is_none(path: Path, wrong: str) -> None:
    """A broken worker is left, and the process chooses."""
    rows = np.zeros((PAGE * 20, HEADS, DIM), np.float32)
    with make_pool(path) as pool, serving(pool, ["retro"]) as choose:
        answer = choose.answer

        def wrongly(handle: _core.Handle) -> None:
            if _core.worker_asked(handle) is None:
                answer(handle)
                return
            shape = {"page": (1, HEADS, 1), "lists": (2, HEADS, 1), "pages": (1, HEADS, 21)}[wrong]
            pages = np.full(shape, 20 if wrong == "page" else 0, np.int32)
            _core.worker_answer(handle, pages, None, None, 0, 0)

        choose.answer = wrongly  # type: ignore[assignment, method-assign]
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        sequence.append(0, rows, rows)
        with pytest.raises(WorkerError, match="is none of this pool"):
            chosen(sequence, "retro")
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        assert chosen(sequence, "retro") > 0
        assert "is none of this pool" in pool.worker.why
        choose.answer = answer  # type: ignore[method-assign]
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        assert chosen(sequence, "retro") > 0


COMPILED = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.ndp import choosers
from cxlkv.ndp.methods import loops

def kinds():
    made = {name: each for name, each in vars(loops).items() if isinstance(each, Dispatcher)}
    return {name: len(each.signatures) for name, each in made.items()}

dims = {"layers": 1, "kv_heads": int(sys.argv[1]), "head_dim": 16, "page_tokens": 4}
layout = KVLayout(**dims, dtype="float32")
for name in choosers.names():
    choosers.try_out(choosers.of(name), layout)
before = kinds()
with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
    for tokens in (64, 66, 900):
        rows = np.random.default_rng(1).standard_normal((tokens, layout.kv_heads, 16), np.float32)
        sequence = pool.sequence()
        sequence.append(0, rows, rows)
        for name in choosers.names():
            sequence.select(0, rows[0], Budget(pages=7), method=name)
        sequence.release()
print("more:", [name for name, count in kinds().items() if count != before[name]], flush=True)
"""


@pytest.mark.parametrize("heads", [2, nightly(1)])
def test_all_is_compiled_before_a_worker_serves(heads: int) -> None:
    with Child("-c", COMPILED, heads) as child:
        assert child.hear() == "more: []"


# ---- who dies ----

STUCK = """
import sys, time
from cxlkv import CXLPool
from cxlkv.ndp import choosers
from cxlkv.ndp.worker import Choosers, serve
with CXLPool.open(sys.argv[1], threads=1) as pool:
    choose = Choosers(pool._handle, pool.layout, ["retro"])
    def state(keys, values):
        print("asked", flush=True)
        time.sleep(3600)
    choosers.of("retro").state = state
    serve(pool._handle, lambda line: print(line, flush=True), choose=choose)
"""


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_worker_that_dies_or_stops_meanwhile(
    path: Path, way: str, rng: np.random.Generator
) -> None:
    with (
        make_pool(path) as pool,
        Twins(path, pool, rng, 2) as twins,
        Child("-c", STUCK, path) as stuck,
    ):
        assert "serves up to" in stuck.hear()
        pool.use_worker("if_there", deadline_s=WATCHDOG_S if way == "killed" else 0.1)
        twins.append([PAGE * 20, 9])

        def kill() -> None:
            assert stuck.hear() == "asked"
            if way == "killed":
                os.kill(stuck.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        twins.select([1, 1], FEW, 0, "retro")
        killer.join()
        use = pool.worker
        assert (use.selects, use.selects_here) == (0, 1)
        assert ("is dead" if way == "killed" else "did not answer in time") in use.why
