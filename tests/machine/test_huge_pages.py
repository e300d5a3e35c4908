"""Huge pages of a pool in a file in memory: taken, refused, required, seen by all processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import BadArgumentError, MemoryShortError
from cxlkv.machine import huge_pages
from cxlkv.machine.topology import gives_huge_pages, probe
from cxlkv.ops.cli import app

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32")


needs_huge = pytest.mark.skipif(
    not gives_huge_pages(probe()), reason="this kernel makes none for /dev/shm (Linux 6.1 does)"
)


@needs_huge
@pytest.mark.parametrize("sharing", ["host", "software"])
def test_a_pool_has_them_and_so_has_who_opens_it(shm_path: Path, sharing: str) -> None:
    host, huge = (None, "require") if sharing == "host" else (0, "try")
    with CXLPool.create(
        shm_path, layout=LAYOUT, capacity="32MiB", huge=huge, sharing=sharing, host=host
    ) as pool:
        size = pool.pages.memory()[1] // huge_pages.SMALLEST * huge_pages.SMALLEST
        assert pool.admin.huge_bytes() >= (size if sharing == "host" else huge_pages.SMALLEST)
        rows = np.random.default_rng(5).standard_normal((300, 2, 64)).astype(np.float32)
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, rows, -rows)
        pool.publish_prefix(sequence, np.arange(300))
        code = f"""
from cxlkv import CXLPool
with CXLPool.open({str(shm_path)!r}, host={host!r}) as pool:
    pool.admin.prefault()
    print(pool.admin.huge_bytes())
"""
        told = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        assert int(told.stdout) == pool.admin.huge_bytes()
        with pool.match_prefix(np.arange(300)) as hit:
            found = hit.sequence().fetch(1)[0]  # [kv_heads, pages, tokens of a page, channels]
        assert np.array_equal(found.reshape(2, -1, 64), rows[: hit.tokens].transpose(1, 0, 2))
        assert pool.admin.check(deep=True)["clean"]


@needs_huge
@pytest.mark.parametrize("huge", ["require", "never"])
def test_inspect_says_which_pages_there_are(shm_path: Path, huge: str) -> None:
    """This process has not touched the pool; any setting of the kernel will do."""
    with CXLPool.create(shm_path, layout=LAYOUT, capacity="32MiB", huge=huge) as pool:
        size = pool.pages.memory()[1]
        if huge == "require":
            assert pool.describe()["page_kind"] == "thp"
    told = CliRunner().invoke(
        app, ["pool", "inspect", str(shm_path), "--json"], catch_exceptions=False
    )
    found = json.loads(told.stdout)
    assert found["huge_looked_at_bytes"] == size
    whole = size // huge_pages.SMALLEST * huge_pages.SMALLEST
    wanted = ("thp", whole) if huge == "require" else ("4KiB", 0)
    assert (found["page_kind"], found["huge_bytes"]) == wanted


@needs_huge
def test_never_takes_none_and_a_pool_without_gets_them_where_they_are_required(
    shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {
        "where": str(shm_path),
        "capacity": "32MiB",
        "layout": {"layers": 2, "kv_heads": 2, "head_dim": 64},
    }
    with CXLPool.from_config({**described, "huge": "never"}) as pool:
        assert pool.admin.huge_bytes() == 0
    with CXLPool.from_config(described) as pool:
        pool.admin.prefault(huge="never")
        monkeypatch.setattr(_core, "pool_prefault", lambda *_: 1 << 40)
        with pytest.raises(MemoryShortError, match=r"huge pages hold 0 B of 3.* wants all"):
            pool.admin.prefault(huge="require")
    monkeypatch.undo()
    with CXLPool.from_config({**described, "huge": "require"}) as pool:
        assert pool.admin.huge_bytes() >= 28 << 20


def test_where_there_are_none_nothing_stays(
    shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "mapped", lambda *_: {"Rss": 32768})
    with pytest.raises(MemoryShortError, match=r"sysctl vm\.nr_hugepages=1"):
        CXLPool.create(shm_path, layout=LAYOUT, capacity="32MiB", huge="require")
    assert not shm_path.exists()
    with pytest.raises(BadArgumentError, match="huge is 'yes': one of never, try, require"):
        CXLPool.create(shm_path, layout=LAYOUT, capacity="32MiB", huge="yes")
