"""Faults on purpose do what they say, and a pool survives what it promises to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.emulation import faults
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    PoisonError,
    PoolMissingError,
    TruncatedError,
)

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="float32")
ROWS = np.random.default_rng(3).standard_normal((8, 1, 8)).astype(np.float32)


def make(path: Path) -> CXLPool:
    return CXLPool.create(path, layout=LAYOUT, capacity="3MiB", threads=1)


def test_poison(path: Path) -> None:
    with make(path) as pool:
        sequence = pool.sequence()
        sequence.append(0, ROWS, ROWS)
        before, at = path.stat().st_size, _core.pool_geometry(pool._handle)["extents_offset"]
        assert faults.poison(path, at - 5) == before
        assert path.stat().st_size == at
        with pytest.raises(PoisonError, match="bus error"):
            sequence.fetch(0)
        assert pool.stats()["pages_retired"] > 0
        os.truncate(path, before)  # zeros where the fault was
        assert path.stat().st_size == before
        sequence.release()
    for offset in (-4096, before, 1 << 40):
        with pytest.raises(BadArgumentError, match=f"offset {offset}: no page"):
            faults.poison(path, offset)


def test_truncated(path: Path) -> None:
    make(path).close()
    before = path.stat().st_size
    assert faults.truncated(path, 0.5) == before
    with pytest.raises(TruncatedError):
        CXLPool.open(path)
    with pytest.raises(BadArgumentError, match="part=1"):
        faults.truncated(path, 1)


def test_a_dead_device(path: Path) -> None:
    with make(path) as pool:
        sequence = pool.sequence()
        sequence.append(0, ROWS, ROWS)
        with faults.dead_device(path):
            with pytest.raises(PoisonError):
                sequence.fetch(0)
            with pytest.raises(PoolMissingError):
                CXLPool.open(path)
        with pytest.raises(CXLKVError):  # zeros are no pool
            CXLPool.open(path)


PROGRAM = """
import numpy as np
from cxlkv import CXLPool
from cxlkv.emulation.faults import at_point
with CXLPool.open({path!r}) as pool:
    sequence = pool.sequence()
    rows = np.ones((8, 1, 8), np.float32)
    at_point("before append")
    sequence.append(0, rows, rows)
    at_point("before publish")
"""


def child(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=str(path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_host_death_at_a_point(path: Path) -> None:
    """What it had appended, and not published, comes back to the pool."""
    with make(path) as pool:
        with child(path) as process:
            faults.reached(process, "before append")
            faults.let_go(process)
            faults.reached(process, "before publish")
            assert pool.stats()["pages_held"] == 2
            faults.let_go(process)
            with pytest.raises(EOFError, match="ended before"):
                faults.reached(process, "never there")
        with child(path) as process:
            faults.reached(process, "before append")
            faults.let_go(process)
            faults.kill_at(process, "before publish")
            assert process.returncode == -9
        assert pool.stats()["pages_held"] == 0
        assert pool.admin.check(deep=True)["clean"]


def test_a_host_that_hangs(path: Path) -> None:
    with make(path), child(path) as process:
        faults.reached(process, "before append")
        with faults.stopped(process.pid):
            status = Path(f"/proc/{process.pid}/stat").read_text()
            assert status.rpartition(")")[2].split()[0] == "T"
            faults.let_go(process)
            with pytest.raises(TimeoutError):
                faults.reached(process, "before publish", timeout_s=0.05)
        faults.reached(process, "before publish")
        faults.let_go(process)
    with pytest.raises(ProcessLookupError), faults.stopped(process.pid):
        pass
