"""What a run of the lab found: a row of figures for each form, as a result, a table and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console, JustifyMethod
from rich.table import Table

from cxlkv.bench.lab.hits import SIZES
from cxlkv.bench.lab.statistics import bootstrap, mcnemar
from cxlkv.bench.lab.tasks import KINDS
from cxlkv.bench.lab.units import Arrays, Plan
from cxlkv.bench.result import Result
from cxlkv.demo.forms import Form
from cxlkv.demo.text.report import DIVERGENCE_NATS
from cxlkv.ndp import choosers
from cxlkv.ndp.engine import STAGED_TOKENS

ORACLE_MASS_LEAST = 0.99
"""Share of the best pages' attention, by arithmetic apart from the pool, in the worst text,
layer and kv head."""
ERROR_MOST = {"float32": 1e-4, "float16": 0.004, "bfloat16": 0.03}
"""The pool's relative error over all pages: a layer's mean over steps and heads, the worst."""
HEADS = (
    *("form", "loss", "below", "KL", "agrees", "copies", "below", "right", "p", "mass", "worst"),
    *("error", "recall", "scored", "fetched"),
)
Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One form. Samples are texts, each the mean of its steps.

    loss: share over full attention's; copy: over its mean of all texts, which for some texts is
    near zero. right: of the items that full attention
    solves; only_full, only_form: items that one of both solves, of all. chance: that full
    attention and the form are equally good.
    scored, fetched: bytes over those of all keys and values. mass, error, recall: means, and those
    of the worst tenth of (layer, head). attained: the least and the most share of the mass of the
    best pages, as many as these, that any text, layer and kv head keeps. error_most: in the worst
    layer, a mean over its heads and steps. sketched: lists that were chosen by sketches. kept: the
    share of selects that chose among pages that were best in an earlier step: mean, and worst text.
    hits: by SIZES, the share of the chosen pages that a hot buffer had, a sample a text.
    """

    form: Form
    loss: Samples
    divergence: Samples
    agreed: Samples
    copy: Samples
    right: int
    only_full: int
    only_form: int
    scored: float
    fetched: float
    mass: tuple[float, float]
    attained: tuple[float, float]
    error_most: float
    sketched: int
    error: tuple[float, float]
    recall: tuple[float, float]
    kept: tuple[float, float]
    hits: Samples

    @property
    def chance(self) -> float:
        return mcnemar(self.only_full, self.only_form)


@dataclass(frozen=True)
class Findings:
    plan: Plan
    rows: Sequence[Row]
    items: int
    solved: int
    solved_by_kind: Mapping[str, tuple[int, int]]
    loss_full: Samples
    dtype: str
    variants: Sequence[tuple[Form, tuple[float, float]]]
    """The attention that each keeps: mean, and worst tenth of the heads."""
    notes: Sequence[str]
    stale: int
    """Pages, by layer and kv head, that do not hold what transformers made."""
    step_bytes: float
    """Bytes of keys and values that a step sees in layers without a window, on average."""


def find(plan: Plan, units: Mapping[str, Arrays], model: str) -> Findings:
    """The figures of all units; model: its name."""
    texts = [units[f"text-{name}"] for name in plan.texts]
    tasks = [units[f"tasks-{number}"] for number in range(plan.contexts)]
    right = np.concatenate([unit["right"] for unit in tasks], axis=1).astype(bool)
    kinds = np.concatenate([unit["kinds"] for unit in tasks])
    full = right[0]
    copy_full = np.mean([unit["copy_full"].mean() for unit in texts])
    every = sum(int(unit["fetched"][0]) for unit in texts)
    rows = []
    for at, form in enumerate(plan.forms):
        mine = right[1 + at]
        rows.append(
            Row(
                form,
                loss=relative(texts, "losses", "full", at),
                divergence=np.array([u["divergences"][at].mean() for u in texts]),
                agreed=np.array([u["agreed"][at].mean() for u in texts]),
                copy=np.array([u["copy"][:, at].mean() - u["copy_full"].mean() for u in texts])
                / copy_full,
                right=int((mine & full).sum()),
                only_full=int((full & ~mine).sum()),
                only_form=int((mine & ~full).sum()),
                scored=sum(int(u["scored"][at]) for u in texts) / every,
                fetched=sum(int(u["fetched"][at]) for u in texts) / every,
                mass=kept(texts, "mass", at, worst_is_low=True),
                attained=attained(texts, at),
                error_most=max(
                    float(unit["error"][:, at].mean(axis=(0, 2)).max()) for unit in texts
                ),
                sketched=sum(int(unit["sketched"][at]) for unit in texts),
                error=kept(texts, "error", at, worst_is_low=False),
                recall=kept(texts, "recall", at, worst_is_low=True),
                kept=among_kept(texts, at),
                hits=np.stack([hit_shares(unit["hits"][at]) for unit in texts], axis=1),
            )
        )
    by_kind = {
        kind: (int(full[kinds == i].sum()), int((kinds == i).sum())) for i, kind in enumerate(KINDS)
    }
    losses = np.array([unit["full"].mean() for unit in texts])
    dtype = str(texts[0]["dtype"])
    variants = [
        (form, kept(texts, "mass", len(plan.forms) + at, worst_is_low=True))
        for at, form in enumerate(plan.variants)
    ]
    notes = notes_of(plan, rows, units, f"{model}, {dtype}")
    return Findings(
        *(plan, rows, len(full), int(full.sum()), by_kind, losses, dtype, variants, notes),
        stale=sum(int(unit["stale"]) for unit in texts),
        step_bytes=every / len(texts),
    )


def notes_of(plan: Plan, rows: Sequence[Row], units: Mapping[str, Arrays], model: str) -> list[str]:
    """What a reader has to know: what was measured, at which commits, and what a form did not do
    that its name says. model: its name and dtype."""
    commits = sorted({str(unit["commit"]) for unit in units.values()})
    prefixes = [int(units[f"text-{name}"]["prefix"]) for name in plan.texts]
    lengths = [int(units[f"tasks-{number}"]["tokens"]) for number in range(plan.contexts)]
    notes = [
        f"model: {model}; prefixes of {min(prefixes):,} to {max(prefixes):,} tokens, "
        f"contexts of items of {min(lengths):,} to {max(lengths):,}",
        f"measured at commit {', '.join(commits)}",
    ]
    windows = units[f"text-{plan.texts[0]}"].get("windows", np.zeros(0))
    if windows.any():
        notes.insert(
            1,
            f"{np.count_nonzero(windows)} of {len(windows)} layers have a window and attend to all "
            "of it: budgets, bytes, mass, error and recall are of the others",
        )
    if plan.part:
        forms = ", ".join(repr(pattern) for pattern in plan.part)
        notes.insert(0, f"a part of the plan: all pages, and the forms like {forms}")
    staged = [row for row in rows if row.form.method == "two_stage"]
    if staged and not any(row.sketched for row in staged):
        notes.append(
            f"two_stage read every key, as exact does: it has sketches from {STAGED_TOKENS:,} "
            "tokens on"
        )
    notes += [
        f"{row.form.name}: {100 * row.kept[0]:.0f} % of its selects chose among pages of an "
        f"earlier step, in the worst text {100 * row.kept[1]:.0f} %"
        for row in rows
        if row.form.refresh > 1
    ]
    return notes


def relative(texts: Sequence[Arrays], of: str, to: str, at: int) -> Samples:
    """By which share the loss is higher than full attention's, a sample a text."""
    return np.array([unit[of][at].mean() / unit[to].mean() - 1 for unit in texts])


def kept(texts: Sequence[Arrays], name: str, at: int, worst_is_low: bool) -> tuple[float, float]:
    """The mean, and that of the worst tenth of (layer, head), by their means over all texts."""
    by_head = np.concatenate([unit[name][:, at] for unit in texts]).mean(axis=0).ravel()
    ordered = np.sort(by_head) if worst_is_low else np.sort(by_head)[::-1]
    return float(by_head.mean()), float(ordered[: max(1, len(ordered) // 10)].mean())


def among_kept(texts: Sequence[Arrays], at: int) -> tuple[float, float]:
    """Share of selects that chose among an earlier step's pages: mean, and worst text."""
    shares = [float(unit["kept"][at]) for unit in texts]
    return float(np.mean(shares)), min(shares)


def hit_shares(counts: npt.NDArray[np.int64]) -> Samples:
    """Of HotHits.found() of one form: by SIZES; nan where nothing was counted."""
    pieces = counts.sum(axis=1)
    shares: Samples = np.full(len(SIZES), np.nan)
    np.divide(counts[:, 0], pieces, out=shares, where=pieces > 0)
    return shares


def attained(texts: Sequence[Arrays], at: int) -> tuple[float, float]:
    """Mass that a form's lists hold over the mass of the best pages, over its steps: the least and
    the most of any text, layer and kv head.
    """
    shares = []
    for unit in texts:
        best = unit["attainable"][:, at]
        mass = unit["mass"][:, at].reshape(*best.shape, -1).mean(axis=-1)
        shares.append(mass.mean(axis=0) / best.mean(axis=0))
    return float(np.min(shares)), float(np.max(shares))


NARROW = ("form", "loss", "KL", "right", "mass", "scored", "fetched")


def table_of(found: Findings, heads: Sequence[str] = HEADS) -> Table:
    """For a terminal of 130 columns; with the heads NARROW, of 80."""
    table = Table(
        title=("part of the plan: " if found.plan.part else "")
        + f"{len(found.plan.texts)} texts, {found.plan.steps} tokens each behind "
        f"{found.plan.prefix:,}; {found.solved} of {found.items} items solved by full attention",
        caption="loss, copies: over full attention's (mean, and what it is below with 95 %\n"
        "confidence); right: of the items that full attention solves; p: McNemar's test;\n"
        "mass: attention kept (mean; worst tenth of heads); error: of the output; recall: of\n"
        "the best pages; scored, fetched: bytes, of all",
    )
    places = [place for place, name in enumerate(HEADS) if name in heads]
    for place in places:
        justify: JustifyMethod = "left" if HEADS[place] == "form" else "right"
        table.add_column(HEADS[place], justify=justify, no_wrap=True)
    for row in found.rows:
        own = cells(row, found)
        table.add_row(*(own[place] for place in places))
    return table


def fitting_table(found: Findings, console: Console) -> Table:
    """With fewer columns where all are wider than the terminal."""
    shown = table_of(found)
    unlimited = console.options.update(max_width=1000)
    if console.measure(shown, options=unlimited).minimum <= console.width:
        return shown
    return table_of(found, NARROW)


def cells(row: Row, found: Findings) -> list[str]:
    loss, copy = bootstrap(row.loss), bootstrap(row.copy)
    return [
        row.form.name,
        f"{100 * loss.mean:+.1f} %",
        loss.below(),
        f"{row.divergence.mean():.4f}",
        f"{100 * row.agreed.mean():.1f} %",
        f"{100 * copy.mean:+.1f} %",
        copy.below(),
        f"{row.right}/{found.solved}",
        f"{row.chance:.2g}",
        f"{row.mass[0]:.3f}",
        f"{row.mass[1]:.3f}",
        f"{row.error[0]:.3f}",
        f"{row.recall[0]:.2f}",
        f"{100 * row.scored:.1f} %",
        f"{100 * row.fetched:.1f} %",
    ]


def result_of(found: Findings) -> Result:
    """The result file: samples are texts."""
    result = Result("lab")
    full = found.rows[0]
    result.notes += found.notes
    oracles = [row for row in found.rows if row.form.method == "oracle"]
    result.checks["all_pages_are_full_attention"] = bool(
        full.divergence.max() <= DIVERGENCE_NATS[found.dtype]
    )
    result.checks["the_pool_attends_as_arithmetic_does"] = (
        full.error_most <= ERROR_MOST[found.dtype]
    )
    result.checks["the_pool_holds_what_was_read"] = found.stale == 0
    result.measure("stale_pages", [found.stale], "pages")
    result.measure("error_most", [full.error_most], "of the output of all pages, relative")
    if oracles:
        least = min(row.attained[0] for row in oracles)
        result.checks["oracle_knows_the_best_pages"] = least >= ORACLE_MASS_LEAST
        result.measure("oracle_least", [least], "share of the best")
        result.checks["no_form_keeps_more_than_the_oracle"] = keep_no_more_than_the_oracle(
            [(row.form, row.mass[0]) for row in found.rows]
        )
    if any(choosers.of(row.form.method) for row in found.rows):
        result.checks["no_form_keeps_more_than_the_best_pages"] = all(
            row.attained[1] <= 1.001 for row in found.rows
        )
    refreshed = [row for row in found.rows if row.form.refresh > 1]
    if refreshed:  # else they are their plain forms, under other names
        result.checks["a_refresh_chooses_among_kept_pages"] = all(
            row.kept[1] > 0 for row in refreshed
        )
    result.measure("loss_full", list(found.loss_full), "nats a token")
    result.measure("items_solved", [found.solved], "items")
    for kind, (solved, asked) in found.solved_by_kind.items():
        result.measure(f"items_solved_{kind}", [solved], f"of {asked} items")
    for form, (mean, worst) in found.variants:
        result.measure(f"mass_{key_of(form)}", [mean], "share of attention")
        result.measure(f"mass_worst_{key_of(form)}", [worst], "share of attention")
    for row in found.rows:
        name = key_of(row.form)
        result.measure(f"loss_{name}", list(row.loss), "share over full attention's")
        result.measure(f"divergence_{name}", list(row.divergence), "nats a token")
        result.measure(f"agreement_{name}", list(row.agreed), "share of tokens")
        result.measure(f"copies_{name}", list(row.copy), "share over full attention's")
        result.measure(f"right_{name}", [row.right], "items")
        result.measure(f"lost_{name}", [row.only_full], "items that full attention alone solves")
        result.measure(f"won_{name}", [row.only_form], "items that full attention does not solve")
        for what, (mean, worst) in (("error", row.error), ("recall", row.recall)):
            result.measure(f"{what}_{name}", [mean], "share")
            result.measure(f"{what}_worst_{name}", [worst], "share")
        result.measure(f"scored_{name}", [row.scored], "share of bytes")
        result.measure(f"fetched_{name}", [row.fetched], "share of bytes")
        result.measure(f"mass_{name}", [row.mass[0]], "share of attention")
        result.measure(f"mass_worst_{name}", [row.mass[1]], "share of attention")
        for size, shares in zip(SIZES, row.hits, strict=True):
            if np.isfinite(shares).all():
                result.measure(f"hits_{size:g}_{name}", list(shares), "share of chosen pages")
        if row.form.refresh > 1:
            result.measure(f"kept_{name}", [row.kept[0]], "share of selects")
    return result


def keep_no_more_than_the_oracle(kept: Sequence[tuple[Form, float]]) -> bool:
    """Forms and the mass that they keep, where they have as many pages as the oracle. A chooser
    lists so many tokens, in more pages than the oracle has, and is held against the best of as
    many.
    """
    oracles = {form.share: mass for form, mass in kept if form.method == "oracle"}
    return all(
        mass <= oracles.get(form.share, 1.0) + 0.001
        for form, mass in kept
        if not form.first_layers and not choosers.of(form.method)
    )


def failed_checks(result: Result) -> list[str]:
    return [name for name, holds in result.checks.items() if not holds]


def key_of(form: Form) -> str:
    return form.name.replace(" %", "_percent").replace(" ", "_").replace(",", "")
