"""Methods against their authors' code: where the checkouts are, and the means to do so anywhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import Budget
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.choosers import Choice
from cxlkv.ndp.engine import VirtualRows
from tests.authors import ours
from tests.authors.__main__ import main
from tests.authors.asked import Answer, Asked
from tests.authors.checkouts import COMMITS, Checkouts, call
from tests.authors.checks import CHECKS, Check, compare, difference, mass, ranks
from tests.authors.choices import (
    STATE_CHECKS,
    Promise,
    StateCheck,
    compare_choices,
    output,
    sums,
)
from tests.authors.report import RANDOM, Plan, markdown, result_of, run, samples
from tests.authors.states import Sides, triton_module
from tests.authors.states_report import (
    StateFindings,
    run_states,
    states_markdown,
    states_result,
)

pytest.importorskip("numba", reason="numba compiles scorers")

FOLDER = os.environ.get("CXLKV_AUTHORS")
WRITTEN = """
import a_library_that_is_nowhere

LIMIT = 3


@a_library_that_is_nowhere.compiled
def double(number: Unknown) -> Unknown:
    return min(2 * number, LIMIT)


class Kept:
    @classmethod
    def made(cls):
        return cls()

    @property
    def all_of(self, count):
        total = self.start
        for index in range(count):
            step = index + 1
            step = step * 10
            total = total + step
        return total
"""


@pytest.fixture
def written(tmp_path: Path) -> Checkouts:
    """A folder with one repository, called owner/name, of one file."""
    folder = tmp_path / "owner+name"
    folder.mkdir()
    (folder / "file.py").write_text(WRITTEN)
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    commit(folder)
    return Checkouts(tmp_path)


def commit(folder: Path) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("add", "."), (*who, "commit", "-q", "-m", "A file")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_pieces_need_nothing_that_their_file_imports(written: Checkouts) -> None:
    found = written.pieces("owner/name", "file.py", ["LIMIT", "double"])
    assert (found.double(1), found.double(5)) == (2, 3)
    other = written.pieces("owner/name", "file.py", ["double"], LIMIT=100)
    assert other.double(5) == 10


def test_a_class_keeps_its_class_methods_and_properties(written: Checkouts) -> None:
    found = written.pieces("owner/name", "file.py", ["Kept"])
    made = found.Kept.made()
    made.start = 3
    assert isinstance(vars(found.Kept)["all_of"], property)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'count'"):
        made.all_of  # noqa: B018


def test_a_whole_file_is_imported(written: Checkouts) -> None:
    path = written.path("owner/name")
    (path / "kernels.py").write_text("def double(number):\n    return 2 * number\n")
    with pytest.raises(BadArgumentError, match=r"kernels\.py was changed, or is missing"):
        written.module("owner/name", "kernels.py")
    commit(path)
    assert call(written.module("owner/name", "kernels.py").double, 2) == 4


def test_statements_of_a_function_run_alone(written: Checkouts) -> None:
    name = "Kept.all_of"
    first = written.run("owner/name", "file.py", name, ("step", "step"), index=4)
    assert first.step == 5
    whole = written.run("owner/name", "file.py", name, ("step", "total"), index=4, total=7)
    assert (whole.step, whole.total) == (50, 57)
    second = written.run("owner/name", "file.py", name, ("step", "step 2"), index=4)
    assert second.step == 50


def test_what_is_not_their_code_is_refused(written: Checkouts) -> None:
    with pytest.raises(BadArgumentError, match="their code has no triple"):
        written.pieces("owner/name", "file.py", ["triple"])
    with pytest.raises(BadArgumentError, match="does not assign nothing"):
        written.run("owner/name", "file.py", "double", ("nothing", "nothing"))
    with pytest.raises(BadArgumentError, match=r"git clone https://github\.com/HugoZHL/PQCache"):
        written.check()
    path = written.path("owner/name") / "other.py"
    path.write_text("LIMIT = 4")
    with pytest.raises(BadArgumentError, match=r"other\.py was changed, or is missing"):
        written.pieces("owner/name", "other.py", ["LIMIT"])


def test_the_command_says_what_is_missing(
    written: Checkouts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["authors", str(written.folder)])
    assert main() == 2
    assert "git clone https://github.com/HugoZHL/PQCache" in capsys.readouterr().out


def test_a_checkout_at_another_commit_is_refused(written: Checkouts) -> None:
    for repository in COMMITS:
        written.path(repository).symlink_to(written.path("owner/name"))
    with pytest.raises(BadArgumentError, match=rf"checkout {COMMITS['HugoZHL/PQCache']}"):
        written.check()


def asked_of(rng: np.random.Generator, heads: int = 2, group: int = 2, tokens: int = 160) -> Asked:
    numbers = rng.standard_normal((heads, 2 * tokens + group, 64)).astype(np.float32)
    parts = (numbers[:, :tokens], numbers[:, tokens:-group], numbers[:, -group:])
    keys, values, queries = (torch.from_numpy(part.copy()) for part in parts)
    return Asked(keys, values, queries, 0.125)


def means(folder: Checkouts, asked: Asked) -> Answer:
    return Answer(asked.scale * (asked.queries @ asked.pages(16).mean(2).mT).amax(1))


def shares(folder: Checkouts, asked: Asked) -> Answer:
    return Answer((asked.scale * asked.queries @ asked.keys.mT).log_softmax(-1)[:, 0])


def opposite(folder: Checkouts, asked: Asked) -> Answer:
    return Answer(-means(folder, asked).scores)


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (Check("means", "mean", "", "", means, 16), 1.0),
        (Check("grouped", "mean", "", "", means, 16, "kv_head"), 1.0),
        (Check("opposite", "mean", "", "", opposite, 16), -1.0),
        (Check("attention", "attention", "", "", shares), 1.0),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_is_alike_is_found_alike(check: Check, wanted: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)  # others may have two pages that are too near
    found = compare(check, Checkouts(tmp_path), asked_of(rng))
    assert len(found.correlation) == (4 if check.union == "query_head" else 2)
    assert np.abs(found.correlation - wanted).max() < 0.02
    if wanted > 0:
        assert found.difference.max() < 0.05
        assert min(one.min() for one in found.same) == 1.0
    else:
        assert max(one.max() for one in found.same) == 0.0


def test_equal_scores_are_as_good_as_each_other(rng: np.random.Generator, tmp_path: Path) -> None:
    def halves(folder: Checkouts, asked: Asked) -> Answer:
        scores = means(folder, asked).scores
        return Answer((scores > scores.median(dim=1, keepdim=True).values).float())

    found = compare(Check("halves", "mean", "", "", halves, 16), Checkouts(tmp_path), asked_of(rng))
    assert [one.tolist() for one in found.same] == [[1.0] * 4, [1.0] * 4]


def test_a_mass_is_held_against_their_list(rng: np.random.Generator, tmp_path: Path) -> None:
    def top(folder: Checkouts, asked: Asked) -> Answer:
        scores = shares(folder, asked).scores
        order = scores.argsort(dim=-1, descending=True)
        before = scores.gather(1, order).exp().cumsum(-1) - scores.gather(1, order).exp()
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before < 0.5)
        return Answer(scores, chosen=chosen)

    check = Check("top", "attention", "", "", top, mass=0.5)
    found = compare(check, Checkouts(tmp_path), asked_of(rng))
    assert check.labels == ["mass 0.5"]
    assert found.same[0].min() > 0.95


def test_measures_by_hand() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    assert difference(np.array([0.0, 5.0, np.inf]), np.array([0.0, 4.0, 1.0])) == 0.5
    keys = torch.zeros(1, 48, 64)
    keys[0, 16:32, 0] = 8 * math.log(3)
    query = torch.nn.functional.one_hot(torch.tensor([[0]]), 64).float()
    asked = Asked(keys, keys, query, 0.125)
    chosen = np.array([[True, True, False]])
    assert math.isclose(mass(asked, chosen), 3 / 4, rel_tol=1e-6)  # the first page counts nothing


def test_ours_learns_from_all_keys_that_are_asked(rng: np.random.Generator) -> None:
    """The same scores as of what those keys give, learned apart."""
    from cxlkv.ndp import scorers

    asked = asked_of(rng)
    budgets = [Budget(pages=3, sinks=0, recent=0)]
    learned = [scorers.of("loki").calibrate(head) for head in asked.keys.numpy()]
    own = ours.scores("loki", asked, 16, budgets)
    given = ours.scores("loki", asked, 16, budgets, np.stack(learned))
    assert np.abs(own.of - given.of).max() < 1e-2
    assert (own.chosen[0] == given.chosen[0]).mean() > 0.8


def test_samples_and_the_table(rng: np.random.Generator, tmp_path: Path) -> None:
    plan = Plan(tokens=160, queries=(0, 1))
    kinds, asked = zip(*samples(plan, None), strict=True)
    assert kinds == (RANDOM, RANDOM)
    assert asked[0].keys.shape == (2, 160, 128)
    same = Check("one", "attention", "", "", shares)
    one = compare(same, Checkouts(tmp_path), asked_of(rng))
    found = {(check.name, RANDOM): [one] for check in CHECKS}
    result = result_of(found)
    assert result.passed
    assert result.metrics["digest_random_same_5"].samples == [1.0]
    assert len(markdown(found).splitlines()) == 2 + len(CHECKS)


def stated(asked: Asked, least: float) -> StateCheck:
    """The tokens whose logits are at least so large, weighed by 2, beside all of weight 1."""

    def sides(folder: Checkouts, own: Asked, share: float) -> Sides:
        logits = (own.scale * own.queries @ own.keys.mT)[:, 0]
        some = torch.full(logits.shape, math.log(2)).masked_fill(logits < least, -torch.inf)
        return Sides(
            Choice(some.numpy(), None, 0), Choice(torch.zeros(logits.shape).numpy(), None, 0)
        )

    return StateCheck("some", "attention", "MoonshotAI/MoBA", "", sides)


def test_choices_are_compared_by_tokens_weights_and_outputs(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    asked = asked_of(rng)
    found = compare_choices(stated(asked, 0.5), Checkouts(tmp_path), asked)
    logits = (asked.scale * asked.alone.queries @ asked.alone.keys.mT)[:, 0]
    chosen = logits >= 0.5
    chosen[:, :16] = False
    assert found.same.tolist() == [1.0] * 4
    assert math.isclose(found.weights, 1, rel_tol=1e-6)
    assert found.tokens == (float(chosen.sum(1).double().mean()), 144)
    assert np.abs(found.errors[1]).max() < 1e-6, "theirs has all tokens"
    weights = logits.double().exp() * (2 * chosen)
    weights[:, :16] = logits[:, :16].double().exp()  # in on both sides, as they are
    ours = (weights / weights.sum(1, keepdim=True))[:, None] @ asked.alone.values.double()
    full = logits.double().softmax(-1)[:, None] @ asked.alone.values.double()
    right = (ours - full).norm(dim=-1) / full.norm(dim=-1)
    np.testing.assert_allclose(found.errors[0], right[:, 0], rtol=1e-5)
    np.testing.assert_allclose(found.apart, right[:, 0], rtol=1e-5)


def test_rows_stand_for_tokens(rng: np.random.Generator) -> None:
    """A row for each token that is left out, of a count of 1, is full attention."""
    asked = asked_of(rng).alone
    weights = np.zeros(asked.keys.shape[:2], np.float32)
    weights[:, 100:] = -np.inf
    counts = np.zeros((4, 60), np.float32)
    rows = VirtualRows(asked.keys[:, 100:].numpy(), asked.values[:, 100:].numpy(), counts)
    right = output(asked, None)
    assert (output(asked, Choice(weights, rows, 0)) - right).abs().max() < 1e-12
    assert (output(asked, Choice(weights, None, 0)) - right).abs().max() > 1e-3


def test_sums_and_sizes_by_hand() -> None:
    keys = torch.zeros(1, 4, 64)
    keys[0, 0, 0] = 8 * math.log(3)
    query = torch.nn.functional.one_hot(torch.tensor([[0]]), 64).float()
    asked = Asked(keys, keys, query, 0.125)
    half = Choice(np.array([[0, math.log(3), -np.inf, -np.inf]], np.float32), None, 0)
    assert math.isclose(sums(asked, None), 2, rel_tol=1e-6)  # 1 + 3 / 3
    assert math.isclose(sums(asked, half), 2, rel_tol=1e-6)


def test_the_table_of_states(rng: np.random.Generator, tmp_path: Path) -> None:
    asked = asked_of(rng)
    one = compare_choices(stated(asked, 0.5), Checkouts(tmp_path), asked)
    findings = StateFindings(
        {(check.name, RANDOM): [one] for check in STATE_CHECKS},
        {RANDOM: [Promise((0.9, 0.8), (10, 20), (0.1, 0.2), 1)]},
    )
    result = states_result(findings)
    assert not result.passed, "outputs are apart"
    assert result.checks["promise_random_sizes_are_alike"]
    assert result.metrics["magicpig_random_same"].samples == [1.0]
    table = states_markdown(findings).splitlines()
    assert len(table) == 2 + len(STATE_CHECKS) + 1 + 2 + 1
    assert "| 90.0 % | 80.0 % | 10 | 20 | 0.1000 | 0.2000 | 1 |" in table[-1]


def test_kernels_need_the_interpreter(written: Checkouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BadArgumentError, match="set TRITON_INTERPRET=1"):
        triton_module(written, "owner/name", "file.py")


@pytest.mark.skipif(
    not FOLDER, reason="CXLKV_AUTHORS names a folder of checkouts: docs/methods.md says of which"
)
@pytest.mark.parametrize("states", [False, True], ids=["methods", "choosers"])
def test_they_are_those_of_their_authors(states: bool) -> None:
    pytest.importorskip("sklearn", reason="their codebooks and components are scikit-learn's")
    pytest.importorskip("triton", reason="RetroInfer's clusters are made by its kernels")
    assert FOLDER
    folder, plan = Checkouts(Path(FOLDER)), Plan(tokens=1024, queries=(0,))
    folder.check()
    if states:
        result = states_result(run_states(folder, plan, None))
    else:
        result = result_of(run(folder, plan, None))
    print(result.checks)
    assert result.passed, [name for name, holds in result.checks.items() if not holds]
