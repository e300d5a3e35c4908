"""What the tests with SGLang share: where it is not, they are skipped; its warnings are its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from . import images


@pytest.fixture(autouse=True, scope="session")
def sglang_is_there() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here: `make test-sglang` has its own environment")
    images.leave_out()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of the engine's own code are its own to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
