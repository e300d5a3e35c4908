"""Fixtures of all tests: seeds that a failure shows, pools that are audited when a test ends."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import ClosedError, UnsupportedError
from cxlkv.pool import Pool

from .support import interpreter, states

# Torch's threads wait for each other at each of many small operations: with as many tests at once
# as there are cores, longer than they compute. Processes of the tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton reads this when a kernel's module is imported: without a GPU its interpreter runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Examples take as long as the machine lets them, so no deadline; the number bounds the time.
_SLOW_START = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "fast",
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_START,
    # A gate fails for the change, not for the draw; at a desk every run explores.
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("fast")


class MakePool(Protocol):
    def __call__(
        self,
        capacity: str | int = ...,
        *,
        layout: KVLayout | None = ...,
        checksum: bool = ...,
        threads: int = ...,
        **shape: object,
    ) -> CXLPool: ...


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded to be shown, with record_property("show", text): here it comes
    through from the workers of xdist, and is there when they pass, too."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in report.user_properties if report.when == "call" else []:
                if name == "show":
                    terminalreporter.write_line(str(text))


def pytest_collection_finish() -> None:
    """What was imported stays to the end: the garbage collector need not look at it again and
    again. Where Triton's interpreter runs kernels: with less to look for."""
    gc.collect()
    gc.freeze()
    kernels = sys.modules.get("cxlkv.kernels.runtime")
    if kernels is not None and kernels.INTERPRETED:
        interpreter.hasten()


@pytest.fixture(autouse=True, scope="session")
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a user has tuned or certified changes no test."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that passed leaves nothing in shared memory."""
    if hasattr(session.config, "workerinput") or session.exitstatus != 0:
        return
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    left = states.left_behind(folder)
    if left:
        print("\nerror: left in shared memory:", *left, sep="\n  ")
        session.exitstatus = 1


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """Path of a pool in shared memory, which is gone afterwards with its host states."""
    path = states.SHARED_MEMORY / f"{states.OWN}{uuid.uuid4().hex[:12]}.pool"
    yield path
    states.remove(path)


@pytest.fixture
def path(shm_path: Path) -> Path:
    """Where most suites have their pool."""
    return shm_path


@pytest.fixture
def seed() -> int:
    """CXLKV_TEST_SEED or a fresh number; stands in the captured output of a test that fails."""
    given = os.environ.get("CXLKV_TEST_SEED")
    chosen = int(given) if given else random.SystemRandom().randrange(2**32)
    print(f"CXLKV_TEST_SEED={chosen} repeats this test's data")
    return chosen


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def force_isa() -> Iterator[Callable[[str], str]]:
    """Forces an instruction set until the test ends, and returns its name; skips where the CPU has
    none of it."""

    def force(name: str) -> str:
        try:
            _core.isa_force(name)
        except UnsupportedError as error:
            model = "; its source was tested on a model of the tiles, in C" if name == "amx" else ""
            pytest.skip(f"{name}: this CPU has none{model} ({error})")
        return name

    yield force
    _core.isa_force("auto")


PAGES = ("free", "held", "published_only", "quarantined", "retired", "withdrawn", "elsewhere")


def pages_accounted(stats: dict[str, int]) -> int:
    """Each page is in one of these states: the total."""
    return sum(stats[f"pages_{state}"] for state in PAGES)


def audit(pool: Pool) -> None:
    """What holds for a pool at all times; without sequences, nothing is held either."""
    report = pool.admin.check(deep=True)
    assert report["clean"], report["problems"]
    stats = pool.stats()
    assert pages_accounted(stats) == stats["pages_total"], stats
    if stats["sequences"] == 0 and stats["processes"] == 1:
        assert stats["pages_held"] == 0, stats


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Makes anonymous pools, of a layout or of SMALL's shape but for what is named:
    make_pool(capacity, layers=..., checksum=...); one layer if no number is."""
    made: list[CXLPool] = []

    def make(
        capacity: str | int = "4MiB",
        *,
        layout: KVLayout | None = None,
        checksum: bool = True,
        threads: int = 1,
        **shape: object,
    ) -> CXLPool:
        small = {"layers": 1, "kv_heads": 2, "head_dim": 8, "page_tokens": 4, "dtype": "float32"}
        chosen = layout or KVLayout(**(small | shape))  # type: ignore[arg-type]
        made.append(
            CXLPool.create(
                "anonymous:", layout=chosen, capacity=capacity, checksum=checksum, threads=threads
            )
        )
        return made[-1]

    yield make
    for pool in made:
        with contextlib.suppress(ClosedError):
            audit(pool)
        pool.close()


@pytest.fixture
def pool(make_pool: MakePool) -> CXLPool:
    """A small pool: 2 layers, 2 kv heads of 8 channels, pages of 4 tokens, float32."""
    return make_pool(layers=2)
