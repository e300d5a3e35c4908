"""What the tests with LMCache share: engines and plugins whose pools are clean when they end."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from cxlkv import ObjectPool

if TYPE_CHECKING:
    from cxlkv.adapters.lmcache.storage import CXLStorage

    from .engines import Engine

IS_THERE = importlib.util.find_spec("lmcache") is not None
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # else it tells its makers
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")

# They import LMCache; the one that does not is there to say that they are skipped, and why.
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if not IS_THERE and path.name != "test_interface.py"
]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.LoggingHandler. in .opentelemetry")


@pytest.fixture(autouse=True, scope="session")
def lmcache_is_there() -> None:
    if not IS_THERE:
        pytest.skip("LMCache is not installed here: `make test-lmcache` has an environment for it")


@pytest.fixture(autouse=True, scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """LMCache makes a folder for them, in /tmp if nobody names one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path_factory.mktemp("figures")))
        yield


def audit(path: Path) -> None:
    """Nothing is held in the pool, and every byte in it is right."""
    with ObjectPool.open(path, threads=1) as pool:
        assert pool.stats()["pages_held"] == 0
        assert pool.admin.check(deep=True) == {
            "clean": True,
            "problem_count": 0,
            "problems": [],
            "repairs": [],
        }


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """A folder for pools, which are audited at the end."""
    folder = tmp_path / "pools"
    folder.mkdir()
    yield folder
    for path in folder.glob("*.pool"):
        audit(path)
        ObjectPool.remove(path)


class MakeEngine(Protocol):
    def __call__(
        self,
        place: Path | None = ...,
        *,
        worker: int = ...,
        workers: int = ...,
        model: str = ...,
        **changes: object,
    ) -> Engine: ...


@pytest.fixture
def make_engine(where: Path) -> Iterator[MakeEngine]:
    """Each with a pool in the folder, or at a path; changes: of config_of()."""
    from . import engines

    with ExitStack() as ending:

        def make(
            place: Path | None = None,
            *,
            worker: int = 0,
            workers: int = 1,
            model: str = "m",
            **changes: object,
        ) -> Engine:
            config = engines.config_of(place or where, **changes)  # type: ignore[arg-type]
            about = engines.metadata_of(worker, workers, model_name=model)
            made = engines.make_engine(config, about)
            ending.callback(made.close)
            return made

        yield make


class MakeStorage(Protocol):
    def __call__(self, place: Path | None = ..., **changes: object) -> CXLStorage: ...


@pytest.fixture
def make_storage(where: Path) -> Iterator[MakeStorage]:
    """The plugin alone, with no engine around it."""
    from cxlkv.adapters.lmcache.storage import CXLStorage

    from . import engines

    with ExitStack() as ending:

        def make(place: Path | None = None, **changes: object) -> CXLStorage:
            config = engines.config_of(place or where, **changes)  # type: ignore[arg-type]
            made = CXLStorage(config=config, metadata=engines.metadata_of())
            ending.callback(made.close)
            return made

        yield make


@pytest.fixture
def storage(make_storage: MakeStorage) -> CXLStorage:
    return make_storage()
