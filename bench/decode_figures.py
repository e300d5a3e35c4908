"""What the parts of `cxlkv bench decode` found, by the names of their figures: for tables and
pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table

from cxlkv.bench.result import Result, short

Cells = dict[str, dict[str, dict[str, float]]]
"""Of a map: by row, column and kind of ratio."""
Lines = dict[str, dict[int, float]]
"""Milliseconds a step: by form and tokens."""
POINT = re.compile(r"(?P<form>\w+)_(?P<of>[^_]+)_(?P<requests>\d+)x(?P<tokens>\d+k?)")


def maps_of(result: Result, ratios: Sequence[str]) -> dict[str, Cells]:
    """RATIO_MAP_ROW_COLUMN: by map."""
    maps: dict[str, Cells] = {}
    for name, value in result.ratios.items():
        for ratio in ratios:
            match name.removeprefix(f"{ratio}_").split("_"):
                case [of, row, column]:
                    cells = maps.setdefault(of, {}).setdefault(row, {})
                    cells.setdefault(column, {})[ratio] = value
    return maps


def columns_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(column for row in cells.values() for column in row))


def lines_of(result: Result, forms: Sequence[str]) -> dict[tuple[str, int], Lines]:
    """FORM_OF_REQUESTSxTOKENS: by what it is of, and requests."""
    found: dict[tuple[str, int], Lines] = {}
    for name, metric in result.metrics.items():
        match = POINT.fullmatch(name)
        if match and match["form"] in forms:
            lines = found.setdefault((match["of"], int(match["requests"])), {})
            lines.setdefault(match["form"], {})[tokens_of(match["tokens"])] = metric.median
    return found


def tokens_of(text: str) -> int:
    """What short() made this of."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def contexts_of(lines: Lines) -> list[int]:
    return sorted({tokens for line in lines.values() for tokens in line})


def map_tables(result: Result, ratios: Sequence[str]) -> list[Table]:
    """A table for each map, with a line for each kind of ratio in each row."""
    tables = []
    for of, cells in maps_of(result, ratios).items():
        made = Table(title=f"cxlkv bench decode-shapes: {of}")
        columns = columns_of(cells)
        for column in ("", "ratio", *columns):
            made.add_column(column, no_wrap=True)
        for row, by_column in cells.items():
            for ratio in ratios:
                values = [by_column.get(column, {}).get(ratio) for column in columns]
                made.add_row(row, ratio, *("" if v is None else f"{v:.2f}" for v in values))
            made.add_section()
        tables.append(made)
    return tables


def line_table(result: Result, forms: Sequence[str], title: str) -> Table:
    """A line for each model, device and number of requests at each length."""
    made = Table(title=f"{title}, ms a step")
    for column in ("model", "requests", "tokens", *forms):
        made.add_column(column)
    for (of, requests), lines in lines_of(result, forms).items():
        for tokens in contexts_of(lines):
            values = [lines.get(form, {}).get(tokens) for form in forms]
            shown = ("" if v is None else f"{v:.3g}" for v in values)
            made.add_row(of.replace("-over-", " over "), str(requests), short(tokens), *shown)
        made.add_section()
    return made
