"""Budgets of a batch: one for all rows, or one a row; None means full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cxlkv.errors import BadArgumentError
from cxlkv.layout import LAYERS_MAX
from cxlkv.ndp.engine import Budget, uniform

Budgets = Budget | Sequence[Budget | None] | None


def checked(budgets: Budgets) -> Budget | tuple[Budget | None, ...] | None:
    """As it is kept; raises BadArgumentError for what is no budget, and for mixed union or per."""
    if budgets is None or isinstance(budgets, Budget):
        return budgets
    if not isinstance(budgets, Sequence):
        raise BadArgumentError(
            f"budget={budgets!r}: a Budget is wanted, such as Budget(share=0.05) or "
            "Budget(pages=64), None for full attention, or one of these for each row"
        )
    kept = tuple(budgets)
    if not kept or not all(b is None or isinstance(b, Budget) for b in kept):
        raise BadArgumentError("budget is a Budget, None, or one of these for each row")
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
    """As Batch.select takes them, one or one for each row; none when no row has one."""
    if budgets is None or isinstance(budgets, Budget):
        return [] if budgets is None else [budgets]
    given = [b for b in budgets if b is not None]
    if not given:
        return []
    every_page = replace(given[0], dense_layers=LAYERS_MAX)
    return [every_page if b is None else b for b in budgets]


def with_dense_layers(
    budgets: Budget | tuple[Budget | None, ...] | None, layers: int
) -> Budget | tuple[Budget | None, ...] | None:
    if budgets is None or isinstance(budgets, Budget):
        return budgets and replace(budgets, dense_layers=layers)
    return tuple(b and replace(b, dense_layers=layers) for b in budgets)
