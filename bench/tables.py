"""Tables of cases that have hundreds of figures: one kind in each column, a place in each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from cxlkv.bench.result import Result


def medians(result: Result) -> dict[str, float]:
    return {name: metric.median for name, metric in result.metrics.items()}


def pivot(title: str, figures: Mapping[str, float], columns: Sequence[str]) -> list[Table]:
    """Figures that are named COLUMN_ROW, in the rows that the first column has; [] without one."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        for column in columns:
            if name.startswith(f"{column}_"):
                rows.setdefault(name.removeprefix(f"{column}_"), {})[column] = value
    table = Table("", *columns, title=title)
    for row, cells in rows.items():
        if columns[0] in cells:
            table.add_row(row, *(f"{cells[one]:.3g}" if one in cells else "" for one in columns))
    return [table] if table.row_count else []
