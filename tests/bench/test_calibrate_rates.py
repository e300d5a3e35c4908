"""What `cxlkv tune` and `cxlkv advise` measure: that it is of what it says, not how fast it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.bench.calibrate import rates
from cxlkv.bench.result import Result
from cxlkv.errors import BadArgumentError, MemoryShortError, PoolFullError, SystemCallError
from cxlkv.layout import LayerGroup

SMALL = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=16)


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=2))


def test_a_line_through_two_sizes() -> None:
    # 1 ms whatever the size, and 1 GB/s.
    assert rates.fit(0.101, 0.002, 1e8, 1e6) == pytest.approx((1e9, 1e-3))
    # Small ones from the cache: all time is of the bytes.
    assert rates.fit(0.1, 0.0001, 1e8, 1e6)[1] == 0
    # Noise, or one size only: the same.
    assert rates.fit(0.1, 0.2, 1e8, 1e6) == (1e9, 0.0)
    assert rates.fit(0.1, 0.1, 1e8, 1e8) == (1e9, 0.0)


def test_memory_is_measured_through_a_pool() -> None:
    result = Result("tune")
    costs = rates.run(result, SMALL, threads=1)
    assert costs.local is not None
    assert costs.far is not None
    assert costs.cold is None
    assert costs.prefill is None
    # The same memory: the same figures, but nobody appends to copies.
    assert costs.local.bytes_per_s == costs.far.bytes_per_s
    assert costs.local.write_bytes_per_s is None
    assert costs.far.write_bytes_per_s is not None
    assert costs.far.where == rates.LOCAL
    assert set(result.metrics) >= {"local_read", "local_write", "local_score", "local_attend_call"}


def test_no_finding_of_one_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call costs beside its bytes was one number of two medians: 0 in a run, 768 us in the
    next. One slow round of many changes nothing that is kept, and is said."""
    calls_s = [20e-6, 900e-6, 20e-6, 0.0, 20e-6, 21e-6, 20e-6, 20e-6, 19e-6, 20e-6, 20e-6]

    def measured(functions: Mapping[str, object], *_: int) -> dict[str, list[float]]:
        small = all(name.endswith("_small") for name in functions)
        return {name: [(0 if small else 1e-3) + s for s in calls_s] for name in functions}

    monkeypatch.setattr(rates, "interleave", measured)
    monkeypatch.setattr(rates, "fit", lambda large_s, small_s, *_: (1e9, small_s))
    result = Result("tune")
    costs = rates.run(result, SMALL, threads=1)
    for verb in ("read", "score", "attend"):
        assert len(result.metrics[f"local_{verb}_call"].samples) == len(calls_s)
    assert costs.local is not None
    assert costs.local.latency_s == pytest.approx(20e-6, rel=0.1)
    assert any("outliers" in doubt for doubt in result.doubts())
    monkeypatch.setattr(rates, "fit", lambda *_: (1e9, 0.0))
    rates.run(result, SMALL, threads=1)
    assert "local_read_call: too short to be told from the time of bytes" in result.notes
    monkeypatch.undo()
    monkeypatch.setattr(rates, "SIZE", rates.Size(1 << 20, 1 << 20, 256 << 10, rounds=3))
    rates.file(result, SMALL, tmp_path)
    assert len(result.metrics["cold_write"].samples) == 3


def test_what_is_read_is_what_was_appended() -> None:
    with CXLPool.create("anonymous:", layout=SMALL, capacity="8MiB", threads=1) as pool:
        rows = rates._Rows.of(pool)
        sequence = rows.append(pool)
        q = np.ones((4, 32), np.float32)
        reader = rates._Reader(sequence, SMALL, q)
        assert reader.bytes == rows.bytes == SMALL.token_bytes * len(sequence)
        reader.fetch()
        k = np.asarray(reader.out[1][0])  # [kv_heads, pages, page_tokens, dim]
        expected = rows.k.reshape(-1, 2, 32)[: rows.tokens].transpose(1, 0, 2)
        assert k.reshape(2, -1, 32).astype(np.float32).tolist() == (
            np.resize(expected, (2, rows.tokens, 32)).astype(np.float32).tolist()
        )


def test_a_pool_in_use_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "my.pool"
    keys = np.ones((64, 2, 32), np.float32).astype(rates._Rows(SMALL, 16).k.dtype)
    with CXLPool.create(path, layout=SMALL, capacity="8MiB", threads=1) as pool:
        mine = pool.sequence()
        for layer in range(2):
            mine.append(layer, keys, keys)
        before = pool.stats()
        costs = rates.run(Result("advise"), SMALL, pool=path, threads=1)
        after = pool.stats()
        assert (after["pages_free"], after["pages_held"]) == (
            before["pages_free"],
            before["pages_held"],
        )
        assert pool.admin.check(deep=True)["clean"]
    assert costs.far is not None
    assert costs.far.where == str(path)


def test_a_full_pool_says_so(pool: CXLPool) -> None:
    sequence = pool.sequence()
    keys = np.ones((4, 2, 8), np.float32)
    while pool.stats()["pages_free"] > 7:
        for layer in range(2):
            sequence.append(layer, keys, keys)
    with pytest.raises(PoolFullError, match="7 pages are free, measuring takes 8"):
        rates.through(Result("advise"), "far", pool)
    assert pool.stats()["pages_free"] == 7


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.of(
            [
                LayerGroup(layers=2, kv_heads=2, head_dim=32, window=32),
                LayerGroup(layers=1, kv_heads=2, head_dim=32),
            ]
        ),
        KVLayout.of(
            [LayerGroup(layers=2, kv_heads=1, head_dim=64, value_head_dim=48, values="key_prefix")]
        ),
        KVLayout(layers=1, kv_heads=2, head_dim=32, dtype="float32", page_tokens=64),
    ],
    ids=["windows", "mla", "float32"],
)
def test_every_kind_of_layout(layout: KVLayout) -> None:
    with CXLPool.create("anonymous:", layout=layout, capacity="16MiB", threads=1) as pool:
        costs = rates.through(Result("advise"), "far", pool)
        assert costs.tiers == ("far",)
        assert pool.stats()["pages_held"] == 0
    assert rates.run(Result("advise"), layout, threads=1).tiers == ("local", "far")


# ---- files ----


def test_a_file_is_measured_and_removed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "later.cold"):
        result = Result("tune")
        cold = rates.file(result, SMALL, path)
        assert cold.where in (f"{tmp_path}, O_DIRECT", f"{tmp_path}, {rates.FORGOTTEN}")
        assert cold.write_bytes_per_s is not None
        assert set(result.metrics) == {"cold_read", "cold_read_record", "cold_write"}
        assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags)

    made = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "open", refuse)
    fd, how = rates._open_past_the_cache(made)
    assert how == rates.FORGOTTEN
    assert sum(records for records, _ in rates._write(made, 4096, 8)) == 8
    runs, singles = rates._read(fd, 4096, 8, 4, how)
    assert len(runs) >= 2
    assert len(singles) == 8
    os.ftruncate(made, 4096)
    with pytest.raises(OSError, match="of 4096 bytes were read"):
        rates._read(fd, 4096, 8, 1, how)
    os.close(fd)
    os.close(made)


def test_a_record_is_the_pools(tmp_path: Path) -> None:
    with CXLPool.create("anonymous:", layout=SMALL, capacity="8MiB", threads=1) as pool:
        record_bytes = pool.pages.geometry["record_bytes"]
    padded_bytes, kv_bytes = rates._record(SMALL)
    assert kv_bytes == SMALL.token_bytes * 16
    assert padded_bytes % 4096 == 0
    assert kv_bytes < record_bytes <= padded_bytes <= record_bytes + 8192


def test_places_where_no_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result("tune")
    with pytest.raises(BadArgumentError, match="its folder does not exist"):
        rates.file(result, SMALL, tmp_path / "absent" / "cold")
    with pytest.raises(MemoryShortError, match="/proc: 0 B free"):
        rates.file(result, SMALL, Path("/proc"))

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SystemCallError, match="No space left on device"):
        rates.file(result, SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert result.metrics == {}
