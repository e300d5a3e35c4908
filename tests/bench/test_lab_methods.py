"""The table of methods: peers choose as arithmetic does, and figures at equal bytes are right."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rich.console import Console

from cxlkv import CXLPool, KVLayout
from cxlkv.bench.lab import methods, peers, report
from cxlkv.bench.lab.costs import COSTS, Costs
from cxlkv.bench.lab.methods_picture import spread
from cxlkv.bench.lab.run import load_units, run, sources_of
from cxlkv.bench.lab.units import METHOD_STEPS, METHOD_TEXTS, Plan, known_methods
from cxlkv.demo.forms import Outside
from cxlkv.demo.text import inputs
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.ndp import names, scorers
from cxlkv.sequence import Sequence

from .test_lab import PLAN, model, texts

__all__ = ["model", "texts"]  # fixtures
HEADS, GROUP, DIM, PAGE = 2, 3, 16, 16
LAYOUT = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="float32")
Floats = npt.NDArray[np.float32]


class Stub(ModuleType):
    """What ours uses of the module that UCM builds, in numpy."""

    class RetrievalWorkerBackend:
        def __init__(self, data: Floats, cores: dict[int, list[int]]) -> None:
            assert [len(each) for each in cores.values()] == [1]
            self.data = data

        def submit(self, query: Floats, topk: int, indexes: npt.NDArray[np.int32]) -> int:
            allowed = [row[row >= 0] for row in indexes]
            scores = [self.data[own] @ asked for own, asked in zip(allowed, query, strict=True)]
            best = [np.argsort(-each, kind="stable")[:topk] for each in scores]
            pairs = list(zip(best, allowed, scores, strict=True))
            self.found = {
                "indices": np.stack([own[order] for order, own, _ in pairs]),
                "scores": np.stack([each[order] for order, _, each in pairs]),
            }
            return 7

        def wait(self, request: int) -> None:
            assert request == 7

        def get_result(self, request: int) -> Mapping[str, object]:
            assert request == 7
            return self.found


def made_by(name: str, context: Sequence) -> Outside:
    if name == "stub":
        return peers.UCM(Stub("stub"), context, LAYOUT)
    if reason := peers.why_not(name):
        pytest.skip(reason)
    return peers.load(name, LAYOUT)(context)


@pytest.fixture
def rows(seed: int) -> Iterator[tuple[Sequence, list[Sequence]]]:
    """A context, and two forks that read on: to the middle of a page, and over two pages."""
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB") as pool:
        context = pool.sequence()
        forks = []
        for sequence, more in ((context, 16 * 40 + 5), (None, 3), (None, 30)):
            if sequence is None:
                sequence = context.fork()
                forks.append(sequence)
            for layer in range(2):
                keys = random.standard_normal((more, HEADS, DIM)).astype(np.float32)
                sequence.append(layer, keys, keys)
        yield context, forks


@pytest.mark.parametrize("name", ["stub", "ucm", "faiss"])
def test_peers_rank_as_arithmetic_does(
    name: str,
    rows: tuple[Sequence, list[Sequence]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "PROBED", 1)  # all lists and all tokens, so that nothing is missed
    monkeypatch.setattr(peers, "FOUND_A_PAGE", PAGE)
    context, forks = rows
    peer = made_by(name, context)
    queries = np.random.default_rng(seed).standard_normal((2, HEADS * GROUP, DIM))
    for layer in (1, 0, 1):
        given = torch.from_numpy(queries.astype(np.float32))
        ranks, read = peer.rank(layer, forks, given, 60)
        assert read > 0
        for row, fork in enumerate(forks):
            keys = np.asarray(fork.fetch(layer)[0], np.float64)
            own = queries[row].reshape(HEADS, GROUP, DIM)
            whole = fork.tokens(layer) // PAGE
            if name == "faiss":
                wanted = np.einsum("hptd,hgd->hpgt", keys, own).max((2, 3))[:, :whole]
            else:
                total = np.einsum("hptd,hd->p", keys / PAGE, own.mean(1))[:whole]
                wanted = np.broadcast_to(total, (HEADS, whole))
            found = ranks[row, :, :whole]
            is_ranked = found > peers.UNSEEN / 2  # of the others it is known that they are worse
            assert is_ranked.sum(axis=1).min() >= 20
            for ranked, own_found, own_wanted in zip(is_ranked, found, wanted, strict=True):
                np.testing.assert_allclose(
                    own_found[ranked], own_wanted[ranked], rtol=1e-4, atol=1e-4
                )
                rest = own_wanted[~ranked]
                assert rest.max(initial=-np.inf) <= own_wanted[ranked].min() + 1e-4
    peer.release()


def test_what_a_peer_reads_is_counted(rows: tuple[Sequence, list[Sequence]]) -> None:
    context, forks = rows
    queries = torch.ones((1, HEADS * GROUP, DIM))
    peer = made_by("stub", context)
    assert peer.rank(0, [context], queries, 9)[1] == 40 * HEADS * DIM * 4
    assert peer.rank(0, forks[1:], queries, 9)[1] == 42 * HEADS * DIM * 4
    peer = made_by("faiss", context)
    _, some = peer.rank(0, [context], queries, 9)
    centroids = HEADS * peers.lists_of(16 * 40) * DIM * 4
    keys = HEADS * 16 * 40 * DIM * 4
    assert centroids < some < centroids + keys / 4  # lists that all queries read count once


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "BUILT", tmp_path)
    assert "make build/peers/ucm UCM=CHECKOUT" in peers.why_not("ucm")
    with pytest.raises(UnsupportedError, match="make build/peers/ucm"):
        known_methods("exact, ucm")
    assert "ucm" not in known_methods("all")
    (tmp_path / "ucm").mkdir()
    (tmp_path / "ucm" / "retrieval_backend.so").write_bytes(b"no library")
    assert peers.why_not("ucm").startswith("ucm: ")
    with pytest.raises(BadArgumentError, match="use one of exact"):
        known_methods("exakt")


def test_a_run_of_methods_ends_in_tables_and_a_picture(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_ucm", lambda: Stub("stub"))
    plan = PLAN.of_methods(known_methods("exact,digest,ucm"), "0.1,0.3")
    run(tmp_path, model, plan, Console())
    found = report.find(plan, load_units(tmp_path, plan), "small")
    methods.write(tmp_path, found, inputs.read_config(model))
    text = (tmp_path / "methods.md").read_text()
    for title in ("### 10 % of the pages", "### 30 % of the pages", "### At equal bytes"):
        assert title in text
    tables = [part for part in text.split("###") if "| `ucm` |" in part]
    assert len(tables) == 5
    assert "### A GPU's hot buffer" in text
    for row in found.rows[1:]:
        # An LRU buffer of more slots has what one of fewer has, and more.
        assert (np.diff(row.hits, axis=0) >= 0).all()
    newest = next(row for row in found.rows if row.form.method == "newest")
    drawn = next(row for row in found.rows if row.form.method == "random")
    assert newest.hits.min() > 0.9 > drawn.hits[0].max()
    assert all("| `exact` |" in part for part in tables)
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    rows = methods.curves(found)
    assert [row.form.share for row in rows["ucm"]] == [0.1, 0.3]
    assert rows["ucm"][0].scored == pytest.approx(1 / 32, rel=0.05)  # a mean of 16 keys
    assert rows["ucm"][1].mass[0] > rows["random"][1].mass[0]
    costs = Costs.read(tmp_path / COSTS)
    assert set(costs.choose) == {"exact", "digest", "ucm"}
    assert costs.shares == (0.1, 0.3)
    assert 0 < costs.step("exact", 0.1) < 60
    costs.save(tmp_path / "again.npz")
    again = Costs.read(tmp_path / "again.npz")
    assert again.first == costs.first
    np.testing.assert_array_equal(again.attend["ucm"], costs.attend["ucm"])


@pytest.mark.parametrize("budgets", ["5", "0.05,0", "nan", "0.1;0.2", ""])
def test_budgets_that_are_no_shares_are_refused_before_a_model_is_read(budgets: str) -> None:
    with pytest.raises(BadArgumentError, match="share"):
        Plan().of_methods(("exact",), budgets)


def test_a_run_of_methods_is_a_shorter_plan() -> None:
    plan = Plan().of_methods(("exact",), "0.02,0.3,0.3")
    assert len(plan.forms) == len({*plan.forms})
    assert (plan.steps, plan.watched_every) == (METHOD_STEPS, METHOD_STEPS // 2)
    assert (len(plan.texts), plan.contexts) == (METHOD_TEXTS, METHOD_TEXTS)
    more = Plan().of_methods(("exact",), "0.02", 16)
    assert (more.texts, more.contexts) == (Plan().texts, 16)
    assert more.shorter(None, 256).steps == 256
    assert Plan.quick().of_methods(("exact",), "0.02").steps == Plan.quick().steps
    assert replace(plan, texts=("one",)).distances_of("one", 7000) == (1000,)


SOURCE = """
from cxlkv.ndp.scorers import Scorer
{helper}
class Corner(Scorer):
    name = "corner"
"""


def test_a_run_knows_the_source_of_its_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another function of a method's module is another method."""
    plan = Plan().of_methods(("exact", "mean", "corner", "retro"), "0.02")
    found = []
    monkeypatch.syspath_prepend(tmp_path)
    for helper in ("def weight(): return 1", "def weight(): return 22"):
        (tmp_path / "corner.py").write_text(SOURCE.format(helper=helper))
        monkeypatch.delitem(sys.modules, "corner", raising=False)
        importlib.invalidate_caches()
        scorers.add(importlib.import_module("corner").Corner())
        found.append(sources_of(plan))
    names.scorers().pop("corner")
    assert set(found[0]) == {"mean", "corner", "retro"}
    assert found[0]["corner"] != found[1]["corner"]
    assert found[0]["mean"] == found[1]["mean"]


def test_a_method_that_was_left_out_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name the lab measured the one of this package, and wrote its figures."""
    monkeypatch.setattr(names, "left_out", {"shadow": "theirs:Shadow: a taken name: rename yours"})
    with pytest.raises(BadArgumentError, match=r"'shadow' is installed, but .*rename yours"):
        known_methods("exact,shadow")
    assert "shadow" not in known_methods("all")
    assert known_methods("exact,mean") == ("exact", "mean")


def test_between_budgets_kl_is_on_straight_lines_of_logs() -> None:
    curve = [(0.1, 0.4), (0.2, 0.1), (0.4, 0.05)]
    assert methods.divergence_at(curve, 0.2) == pytest.approx(0.1)
    assert methods.divergence_at(curve, 0.1 * math.sqrt(2)) == pytest.approx(0.2)
    assert methods.divergence_at(curve, 0.09) is None
    assert methods.divergence_at(curve, 0.41) is None
    assert methods.divergence_at([], 0.1) is None
    for divergence, read in ((0.2, 0.1 * math.sqrt(2)), (0.1, 0.2)):
        sign, share = methods.bytes_to(curve, divergence)
        assert sign == ""
        assert share == pytest.approx(read)
    assert methods.bytes_to(curve, 0.5) == ("<", 0.1)
    assert methods.bytes_to(curve, 0.01) == (">", 0.4)


def test_names_keep_apart_and_in_order(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    for count in (1, 2, 7, 20):
        heights = sorted(random.random(count).tolist())
        found = np.array(spread(heights, 0.04))
        assert (np.diff(found) >= 0.04 - 1e-9).all()
        assert found.min() >= -1e-9
        assert found.max() <= 1 + 1e-9
    assert spread([0.1, 0.5], 0.04) == [0.1, 0.5]
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
