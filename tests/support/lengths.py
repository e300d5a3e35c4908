"""One test at two lengths: short in each run of the tests, long in `make nightly`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from _pytest.mark.structures import MarkDecorator, ParameterSet


def nightly(*values: object) -> ParameterSet:
    """These arguments of a parametrised test are for `make nightly`, and have 15 minutes."""
    return pytest.param(*values, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])


def matrix(
    times: int = 1, *, indirect: Sequence[str] = (), **axes: Iterable[object]
) -> MarkDecorator:
    """All combinations of these arguments' values in `make nightly`; of them each run of the tests
    has so few that each value of each argument comes at least `times` times, beside drawn ones."""
    values = {name: list(some) for name, some in axes.items()}
    count = times * max(map(len, values.values()))
    draw = random.Random(0)  # the same in each process and each day
    columns = []
    for some in values.values():
        column = [index % len(some) for index in range(count)]
        draw.shuffle(column)
        columns.append(column)
    drawn = set(zip(*columns, strict=True))
    cells = []
    for at in itertools.product(*(range(len(some)) for some in values.values())):
        cell = [some[index] for some, index in zip(values.values(), at, strict=True)]
        marks = [] if at in drawn else [pytest.mark.nightly]
        cells.append(pytest.param(*cell, marks=marks, id="-".join(map(name_of, cell))))
    return pytest.mark.parametrize(tuple(values), cells, indirect=indirect)


def name_of(value: object) -> str:
    return "-".join(map(name_of, value)) if isinstance(value, tuple) else str(value)
