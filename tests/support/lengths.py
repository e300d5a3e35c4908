"""One test at two lengths: short in each run of the tests, long in `make nightly`."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet


def nightly(*values: object) -> ParameterSet:
    """These arguments of a parametrised test are for `make nightly`, and have 15 minutes."""
    return pytest.param(*values, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])
