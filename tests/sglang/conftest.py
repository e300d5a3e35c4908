"""What the tests with SGLang share: folders for pools, which must be clean at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cxlkv import ObjectPool
from cxlkv.errors import CXLKVError

from ..conftest import audit


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    yield f"{tmp_path}/"
    for path in tmp_path.rglob("*.pool"):
        with ObjectPool.open(path) as pool:
            audit(pool)
        with suppress(CXLKVError):
            ObjectPool.remove(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of the engine's own code are its own to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
