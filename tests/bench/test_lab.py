"""`cxlkv lab` on a small random model: it resumes, its page has its rows, and faults are caught."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import GptOssConfig, GptOssForCausalLM
from typer.testing import CliRunner

from cxlkv import Budget, Selection
from cxlkv.bench.lab import picture, prefill, report, units
from cxlkv.bench.lab.run import claimed, load_units, path_of, run
from cxlkv.bench.lab.statistics import bootstrap, mcnemar
from cxlkv.bench.lab.tasks import WORDS
from cxlkv.bench.lab.texts import TEXTS, Text
from cxlkv.bench.lab.units import Plan, Runner
from cxlkv.demo import smollm2
from cxlkv.demo.forms import Form
from cxlkv.errors import BadArgumentError, CorruptError, UnsupportedError
from cxlkv.ops.cli import app
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

from ..support.small_models import save_with_windows, save_with_words

NUMBERS = 300
SHAPE = {
    "vocab_size": NUMBERS + len(WORDS) + 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
FORMS = (
    Form.full(),
    Form("exact", 0.1),
    Form("exact", 0.1, refresh=8),
    *(Form(method, 0.1) for method in ("random", "newest", "oracle")),
)
PLAN = Plan(
    texts=("one", "two"),
    prefix=700,
    steps=24,
    watched_every=6,
    passage=24,
    distances=(300, 600),
    copies=1,
    contexts=1,
    context_tokens=300,
    forms=FORMS,
    variants=(Form("exact", 0.1, sinks=2), Form("exact", 0.1, recent=4)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32, whose tokens are words."""
    words = [*map(str, range(NUMBERS)), *dict.fromkeys(WORDS)]
    return save_with_words(tmp_path_factory.mktemp("lab"), SHAPE, words)


def drawn_texts(end: str = ".") -> tuple[Text, ...]:
    """Two texts of numbers, in sentences that end so."""

    def read(seed: int) -> Callable[[], str]:
        numbers = np.random.default_rng(seed).integers(0, NUMBERS, 2000)
        return lambda: " ".join(f"{n}{end if at % 9 == 8 else ''}" for at, n in enumerate(numbers))

    return tuple(Text(name, "prose", "drawn", read(at)) for at, name in enumerate(("one", "two")))


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (units, prefill):
        monkeypatch.setattr(module, "TEXTS", drawn_texts())


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of PLAN, measured without a break."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "TEXTS", drawn_texts())
        run(folder, model, PLAN, Console())
    return folder


def checks_of(folder: Path, plan: Plan = PLAN) -> dict[str, bool]:
    return report.result_of(report.find(plan, load_units(folder, plan), "small")).checks


def test_a_killed_run_goes_on_and_ends_with_the_same_figures(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tmp_path / "parts"
    measure, seen = Runner.run, list[str]()

    def killed(self: Runner, unit: str, advance: units.Advance) -> units.Arrays:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(unit)
        return measure(self, unit, advance)

    monkeypatch.setattr(Runner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run(parts, model, PLAN, Console())
    monkeypatch.setattr(Runner, "run", measure)
    with claimed(path_of(parts, "text-two")) as is_ours:  # by another process
        assert is_ours
        assert run(parts, model, PLAN, Console()) == ["text-two"]
    assert run(parts, model, PLAN, Console()) == []
    first, second = load_units(whole, PLAN), load_units(parts, PLAN)
    for unit, arrays in first.items():
        for name in arrays.keys() - {"commit"}:
            np.testing.assert_array_equal(arrays[name], second[unit][name], f"{unit}: {name}")
    assert all(checks_of(whole).values()), checks_of(whole)

    with pytest.raises(BadArgumentError, match="a run with another plan: give another folder"):
        run(parts, model, replace(PLAN, steps=25), Console())
    (tmp_path / "absent").mkdir()
    with pytest.raises(BadArgumentError, match=r"has no config\.json"):
        run(tmp_path / "never", tmp_path / "absent", PLAN, Console())
    assert not (tmp_path / "never").exists()
    path = parts / "text-two.npz"
    good = path.read_bytes()
    for bad in (b"PK", b"", good[: len(good) // 2], good[:2000] + b"x" + good[2001:]):
        path.write_bytes(bad)
        with pytest.raises(CorruptError, match=r"text-two\.npz.*delete the file"):
            load_units(parts, PLAN)

    found = report.find(PLAN, first, "small")
    picture.draw(tmp_path, found, first)
    for name in ("lab.png", "lab-heads.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    metrics = report.result_of(found).metrics
    for form in (*FORMS, *PLAN.variants):
        assert f"mass_{report.key_of(form)}" in metrics
    assert report.table_of(found).row_count == len(FORMS)
    for width, columns in ((170, 15), (80, 7)):
        console = Console(width=width)
        shown = report.fitting_table(found, console)
        assert len(shown.columns) == columns
        with console.capture() as printed:
            console.print(shown)
        assert "…" not in printed.get(), "no figure is cut off"


WINDOW = 72


@pytest.fixture(scope="module")
def gemma(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_windows(model, tmp_path_factory.mktemp("windows"), SHAPE, WINDOW)


def test_a_model_with_windows_is_measured(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused. Budgets, and what they are judged by, are of the layers without a window."""
    every = (Form("exact", 1.0), Form("two_stage", 1.0))
    plan = replace(PLAN, forms=(*FORMS, *every))
    monkeypatch.setattr(Plan, "quick", lambda: plan)
    asked = ["lab", "run", "--quick", "--model", str(gemma), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    units = load_units(tmp_path, plan)
    found = report.find(plan, units, "small")
    full, exact, *_, oracle, whole, staged = found.rows
    assert units["text-one"]["mass"].shape[1:3] == (len(plan.forms) + len(plan.variants), 2)
    assert full.divergence.max() < 1e-6
    for row in (whole, staged):
        np.testing.assert_array_equal(row.divergence, full.divergence)
        np.testing.assert_array_equal(row.loss, full.loss)
        assert row.mass[0] == pytest.approx(1, abs=1e-5)
    assert full.mass[0] == pytest.approx(1, abs=1e-5)
    assert exact.divergence.min() > 1e-4
    assert exact.mass[0] <= oracle.mass[0] + 1e-6
    assert 0.05 < exact.fetched < 0.2 < 0.4 < exact.scored < 0.6
    a_layer = 2 * 2 * 16 * 4  # bytes of a token: K and V, kv heads, channels, float32
    assert found.step_bytes == pytest.approx(2 * a_layer * (PLAN.prefix + PLAN.steps / 2), rel=0.02)
    assert "4 of 6 layers have a window" in done.output
    assert "4 of 6 layers have a window" in (tmp_path / "lab.html").read_text()


def test_methods_are_measured_in_a_model_with_windows(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that learn, too, and choosers, which are not for layers with a window."""
    monkeypatch.setattr(Plan, "quick", lambda: replace(PLAN, texts=("one",)))
    asked = ["lab", "run", "--quick", "--model", str(gemma), "--out", str(tmp_path)]
    names = "exact,digest,low_rank,retro"
    done = CliRunner().invoke(app, [*asked, "--methods", names, "--budgets", "0.1"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "methods.md").read_text()
    assert "of 2 layers, 512 B a token" in text
    assert "| `digest` | 32 |" in text


def test_windows_alone_are_refused_before_weights_are_read(gemma: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 6
    config = json.loads((gemma / "config.json").read_text()) | {"layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="has a window in each layer"):
        run(tmp_path / "out", tmp_path, PLAN, Console())
    assert not (tmp_path / "out").exists()


def test_learned_sinks_are_refused_before_a_text_is_read(tmp_path: Path) -> None:
    shape = SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssForCausalLM(GptOssConfig.from_dict(shape)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="learned sinks"):
        run(tmp_path / "out", tmp_path, PLAN, Console())
    assert not (tmp_path / "out").exists()


def drop_the_best_page(monkeypatch: pytest.MonkeyPatch) -> None:
    select = Batch.select

    def faulty(self: Batch, *given: object, **more: object) -> Selection:
        picked: Selection = select(self, *given, **more)  # type: ignore[arg-type]
        for pages, scores in zip(
            picked.pages.reshape(-1, picked.pages.shape[-1]),
            picked.scores.reshape(-1, picked.pages.shape[-1]),
            strict=True,
        ):
            best = np.where(np.isfinite(scores), scores, -np.inf).argmax()
            pages[best] = 0 if pages[best] else 1
            pages.sort()
        return picked

    monkeypatch.setattr(Batch, "select", faulty)


def attend_with_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Batch.attend

    def faulty(
        self: Batch, layer: int, q: object, starts: object, picked: object, scale: float,
        softcap: float, error: float = 0.0,
    ) -> object:  # fmt: skip
        how = (1.1 * scale, softcap, error)
        return attend(self, layer, q, starts, picked, *how)  # type: ignore[call-overload]

    monkeypatch.setattr(Batch, "attend", faulty)


def keep_one_stale_page(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Tokens.append

    def faulty(self: Tokens, layer: int, k: torch.Tensor, v: torch.Tensor) -> object:
        if len(k) > 64 and layer == 1:
            v = v.clone()
            v[32:48] = v[:16].clone()
        return append(self, layer, k, v)

    monkeypatch.setattr(Tokens, "append", faulty)


def choose_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another budget asks the same sequences, so that no step finds what it kept in the last."""
    select = Batch.select

    def faulty(
        self: Batch, layer: int, q: object, starts: object, budgets: Sequence[Budget],
        *more: object,
    ) -> Selection:  # fmt: skip
        others = [replace(budget, sinks=3) for budget in budgets]
        select(self, layer, q, starts, others, *more)  # type: ignore[arg-type]
        return select(self, layer, q, starts, budgets, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "select", faulty)


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        (drop_the_best_page, ["oracle_knows_the_best_pages"]),
        (choose_in_between, ["a_refresh_chooses_among_kept_pages"]),
        (
            attend_with_a_wrong_scale,
            ["all_pages_are_full_attention", "the_pool_attends_as_arithmetic_does"],
        ),
        (keep_one_stale_page, ["the_pool_holds_what_was_read"]),
    ],
)
def test_a_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    checks: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    run(tmp_path, model, PLAN, Console())
    found = checks_of(tmp_path)
    assert not any(found[check] for check in checks)


def test_a_stale_page_behind_a_window_is_caught(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_one_stale_page(monkeypatch)
    run(tmp_path, gemma, PLAN, Console())
    assert not checks_of(tmp_path)["the_pool_holds_what_was_read"]


def test_all_pages_are_full_attention_to_the_last_bits(whole: Path) -> None:
    found = report.find(PLAN, load_units(whole, PLAN), "small")
    full, exact, refreshed, *_, oracle = found.rows
    assert full.divergence.max() < 1e-6
    assert np.abs(full.copy).max() < 1e-4
    assert full.right == found.solved
    assert full.mass[0] == pytest.approx(1, abs=1e-5)
    assert exact.mass[0] <= oracle.mass[0] + 1e-6
    assert 0.05 < exact.fetched < 0.2 < 0.4 < exact.scored < 0.6
    assert exact.kept == (0, 0)
    assert refreshed.kept[1] > 0.1  # of random keys the best pages change all the time
    assert refreshed.scored < 0.95 * exact.scored
    assert refreshed.mass[0] <= exact.mass[0] + 1e-3


def test_a_refresh_that_keeps_every_page_is_its_plain_form(model: Path, tmp_path: Path) -> None:
    """Four times 30 % of the pages are all, so no step can miss one."""
    assert Form("exact", 0.1, refresh=1) == Form("exact", 0.1)
    forms = [Form("exact", 0.3), Form("exact", 0.3, refresh=4), Form("two_stage", 0.3, refresh=8)]
    plan = replace(PLAN, forms=(Form.full(), *forms), variants=())
    run(tmp_path, model, plan, Console())
    found = load_units(tmp_path, plan)
    for unit in ("text-one", "text-two"):
        for name in ("losses", "copy", "mass", "error"):
            axis = {"losses": 0, "copy": 1, "mass": 1, "error": 1}[name]
            plain, *refreshed = np.moveaxis(found[unit][name], axis, 0)[1:]
            for one in refreshed:
                np.testing.assert_allclose(one, plain, rtol=1e-5, atol=1e-5, err_msg=name)
        assert found[unit]["kept"][:2].tolist() == [0, 0]
        assert found[unit]["kept"][2:].min() > 0.5
    right = found["tasks-0"]["right"]
    np.testing.assert_array_equal(right[3:], right[[2, 2]])
    checks = checks_of(tmp_path, plan)
    assert checks["a_refresh_chooses_among_kept_pages"]
    assert "oracle_knows_the_best_pages" not in checks


def test_a_part_of_the_plan_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "quick", lambda: PLAN)
    asked = ["lab", "run", "--quick", "--model", str(model), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*asked, "--forms", "*refresh*, newest 10 %"])
    assert done.exit_code == 0, done.output
    assert "part of the plan" in done.output
    result = json.loads((tmp_path / "lab.json").read_text())
    note = "a part of the plan: all pages, and the forms like '*refresh*', 'newest 10 %'"
    assert note in result["notes"]
    measured = {name for name in result["metrics"] if name.startswith("divergence_")}
    names = ("full", "exact_10_percent_refresh_8", "newest_10_percent")
    assert measured == {f"divergence_{name}" for name in names}
    assert "a part of the plan: all pages" in (tmp_path / "lab.html").read_text()
    with pytest.raises(BadArgumentError, match="no form is like 'exakt': full; exact 10 %; "):
        PLAN.only(["exact*", "exakt"])
    with pytest.raises(BadArgumentError, match="a run with another plan"):
        run(tmp_path, model, PLAN, Console())


def test_a_failed_check_is_loud(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an exit code, and a word in a file."""
    monkeypatch.setattr(Plan, "quick", lambda: PLAN)
    drop_the_best_page(monkeypatch)
    asked = ["lab", "run", "--quick", "--model", str(model), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*asked, "--methods", "exact", "--budgets", "0.1"])
    assert done.exit_code == 1
    assert "Failed checks: oracle_knows_the_best_pages" in done.output
    assert not json.loads((tmp_path / "lab.json").read_text())["checks"][
        "oracle_knows_the_best_pages"
    ]
    for name in ("lab.html", "methods.md"):
        assert "ailed checks: oracle_knows_the_best_pages" in (tmp_path / name).read_text()


def test_one_text_has_no_bound() -> None:
    """Its mean was printed as what it is below."""
    bounded = bootstrap([0.25])
    assert bounded == (0.25, -math.inf, math.inf)
    assert bounded.below() == "no bound"
    assert bootstrap([0.25, 0.5]).below(2).endswith(" %")


def test_the_plan_has_forms_with_refresh_beside_their_plain_ones() -> None:
    forms = Plan().forms
    refreshed = [form for form in forms if form.refresh > 1]
    assert {(form.method, form.share, form.refresh) for form in refreshed} == {
        (method, share, steps)
        for share in (0.05, 0.15)
        for method, steps in (("exact", 32), ("two_stage", 8), ("two_stage", 32))
    }
    assert all(form._replace(refresh=1) in forms for form in refreshed)
    assert len({form.name for form in forms}) == len(forms)


@pytest.mark.nightly
@pytest.mark.skipif(smollm2.model_file() is None, reason=f"no model: {smollm2.INSTALL}")
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (lambda monkeypatch: None, ""),
        (drop_the_best_page, "oracle_knows_the_best_pages"),
        (attend_with_a_wrong_scale, "the_pool_attends_as_arithmetic_does"),
        (keep_one_stale_page, "the_pool_holds_what_was_read"),
    ],
)
def test_a_fault_is_caught_with_the_trained_model(
    fault: Callable[[pytest.MonkeyPatch], None],
    check: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "TEXTS", TEXTS)
    fault(monkeypatch)
    plan = replace(
        Plan.quick(), texts=("essay",), contexts=1, prefix=1200, context_tokens=800, steps=16,
        watched_every=4, distances=(600,), forms=FORMS, variants=(),
    )  # fmt: skip
    run(tmp_path, smollm2.prepare(Console()), plan, Console())
    result = report.result_of(report.find(plan, load_units(tmp_path, plan), "SmolLM2"))
    print(
        {
            name: result.metrics[name].median
            for name in ("error_most", "oracle_least", "stale_pages")
        }
    )
    failed = [name for name, holds in result.checks.items() if not holds]
    assert (check in failed) if check else failed == []


def test_every_text_is_there_and_long_enough() -> None:
    assert len({text.name for text in TEXTS}) == 16
    for text in TEXTS:
        assert len(text.read()) > 20_000, text.name


def test_sparse_prefill_is_held_against_dense_text_by_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "MASSES", (0.3, 1.0))
    monkeypatch.setattr("cxlkv.adapters.transformers.sparse_prefill.TOKENS_LEAST", 256)
    told: list[int] = []
    plan = prefill.PrefillPlan(texts=("one", "two"), prefix=700, steps=24)
    found = prefill.measure(model, plan, lambda readings: told.append(len(readings.texts)))
    assert told == [1, 2]
    assert [one.attended for one in found.sparse[1.0]] == [1, 1]
    assert all(one.attended < 0.9 for one in found.sparse[0.3])
    for of in ("inside", "behind"):
        assert np.abs(found.relative(1.0, of)).max() < 1e-4 < np.abs(found.relative(0.3, of)).min()
    assert prefill.table_of(found).row_count == 2
    metrics = prefill.result_of(found).metrics
    assert metrics["loss_1_behind"].samples == found.relative(1.0, "behind")


def test_mcnemar_and_bootstrap_are_those_of_the_books() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)
    values = np.random.default_rng(3).normal(2, 1, 400)
    bounded = bootstrap(values)
    spread = values.std() / math.sqrt(len(values))
    assert bounded.mean == pytest.approx(values.mean())
    assert bounded.high == pytest.approx(values.mean() + 1.645 * spread, abs=0.1 * spread)
    assert bounded.low == pytest.approx(values.mean() - 1.645 * spread, abs=0.1 * spread)
