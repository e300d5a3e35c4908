"""Budgets of a batch: one for all rows, or one a row; None means full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cxlkv.errors import BadArgumentError
from cxlkv.layout import LAYERS_MAX
from cxlkv.ndp.engine import Budget, BudgetLike, budget_of, uniform

Budgets = BudgetLike | Sequence[BudgetLike | None] | None


def checked(budgets: Budgets) -> Budget | tuple[Budget | None, ...] | None:
    """Check budgets, and return them as a cache keeps them; raises BadArgumentError for what is no
    budget, and for mixed union or per."""
    if budgets is None:
        return None
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        return budget_of(budgets)
    kept = tuple(None if one is None else budget_of(one) for one in budgets)
    if not kept:
        raise BadArgumentError("budget=[]: one for each row is wanted, or None for all pages")
    given = [b for b in kept if b is not None]
    if given:
        uniform(given)
    return kept


def for_rows(budgets: tuple[Budget | None, ...], rows: int) -> tuple[Budget | None, ...]:
    """One for each of `rows`: generate() repeats each prompt side by side for beams and samples."""
    if rows % len(budgets):
        raise BadArgumentError(f"{len(budgets)} budgets for {rows} rows: one for each is wanted")
    return tuple(b for b in budgets for _ in range(rows // len(budgets)))


def for_select(budgets: Budget | tuple[Budget | None, ...] | None) -> list[Budget]:
    """Budgets as Batch.select takes them, one or one for each row; none when no row has one."""
    if budgets is None or isinstance(budgets, Budget):
        return [] if budgets is None else [budgets]
    given = [b for b in budgets if b is not None]
    if not given:
        return []
    every_page = replace(given[0], dense_layers=LAYERS_MAX, error=0.0)
    return [every_page if b is None else b for b in budgets]
