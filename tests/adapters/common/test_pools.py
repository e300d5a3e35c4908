"""Engines' pools: made once, found by whom they serve, and each thing that is not ideal is said."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.adapters.common import pools
from cxlkv.adapters.common.pools import Place, concerns, found_at, make_or_open
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.vllm import pools as of_vllm
from cxlkv.errors import BadArgumentError, GeometryError
from cxlkv.machine.topology import GIB, MIB, SharedMemory, probe

from ...support.states import states_of

OBJECTS = KVLayout.objects("64KiB")
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=32, dtype="float32")
PLACE = Place("/dev/shm/a.pool", True, 32768, 2 * GIB)
GOOD = replace(
    probe(),
    shared_memory=SharedMemory(64 * GIB, 64 * GIB),
    memory=replace(probe().memory, memlock_bytes=None),
)


def test_larger_objects_will_do_for_smaller_ones(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    with make_or_open(ObjectPool, path, OBJECTS, "8MiB")[0]:
        for size in ("64KiB", "1KiB"):
            pool, made = make_or_open(ObjectPool, path, KVLayout.objects(size), None)
            with pool:
                assert (pool.layout, made) == (OBJECTS, False)
        kept = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16)
        for kind, other in ((ObjectPool, KVLayout.objects("65KiB")), (CXLPool, kept)):
            with pytest.raises(
                GeometryError, match="another pool than the one wanted: layout is of "
            ):
                make_or_open(kind, path, other, None)


def test_kept_keys_and_values_are_no_objects(tmp_path: Path) -> None:
    path = f"{tmp_path}/a.pool"
    kept = KVLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=16)
    CXLPool.create(path, layout=kept, capacity="8MiB").close()
    with pytest.raises(GeometryError, match="another pool than the one wanted: layout is of "):
        make_or_open(ObjectPool, path, OBJECTS, None)


SHARED = PoolSettings(sharing="software", hosts=4, lease_s=0.3)


def test_hosts_share_a_pool_by_settings(shm_path: Path) -> None:
    path = str(shm_path)
    first, _ = make_or_open(CXLPool, path, LAYOUT, "8MiB", shared=SHARED)
    with first:
        for state in states_of(shm_path):
            state.unlink()  # from here on we are another machine
        second, made = make_or_open(CXLPool, path, LAYOUT, "8MiB", shared=SHARED)
        with second:
            assert not made
            assert [host.number for host in second.admin.hosts() if host.is_self] == [1]
        wrong = {
            "sharing": SHARED.model_copy(update={"sharing": "hw_coherent"}),
            "hosts": SHARED.model_copy(update={"hosts": 2}),
        }
        for name, settings in wrong.items():
            with pytest.raises(GeometryError, match=f'{name} is .* write "{name}": '):
                make_or_open(CXLPool, path, LAYOUT, None, shared=settings)
        with pytest.raises(BadArgumentError, match=r'"sharing" as the pool has it.*"host": "auto"'):
            make_or_open(CXLPool, path, LAYOUT, None)


def test_where_and_how_large() -> None:
    assert found_at(PLACE) == "cxlkv: made /dev/shm/a.pool, for 32768 tokens (2 GiB)"
    assert found_at(replace(PLACE, made=False, ranks=2)) == (
        "cxlkv: found /dev/shm/a.pool, for 32768 tokens (2 GiB); its capacity stays what it "
        "was made with; each of the 2 ranks has one like it"
    )


def test_a_good_machine_is_no_concern() -> None:
    assert concerns(PLACE, GOOD, 32768) == []


def test_each_concern_names_its_remedy() -> None:
    small = replace(GOOD, shared_memory=SharedMemory(64 * MIB, 64 * MIB))
    (found,) = concerns(PLACE, small, 1)
    assert "/dev/shm holds 64 MiB only" in found
    assert "--shm-size" in found
    assert concerns(replace(PLACE, path="/mnt/a.pool"), small, 1) == []
    locked = replace(GOOD, memory=replace(GOOD.memory, memlock_bytes=8 * MIB))
    (found,) = concerns(PLACE, locked, 1)
    assert "only 8 MiB may be locked" in found
    assert "ulimit -l unlimited" in found
    (found,) = concerns(PLACE, GOOD, 40000)
    assert "holds 32768 tokens, and one request may have 40000" in found
    assert '"capacity"' in found
    (found,) = concerns(replace(PLACE, room_bytes=GIB, missing_bytes=2 * GIB), GOOD, 1)
    assert "may still grow by 2 GiB, and its file system has 1 GiB left" in found


def test_the_first_rank_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "probe", lambda: GOOD)
    with caplog.at_level(logging.INFO, "cxlkv"):
        for rank in (1, 0):
            path = str(tmp_path / f"{rank}.pool")
            layout = KVLayout.of(LAYOUT.groups, page_tokens=32, shard=(rank, 2, 0, 1))
            of_vllm.make_or_open(path, layout, "16MiB", of_vllm.Ranks(2, 1, rank), 1).close()
    (said,) = (line for line in caplog.messages if not line.startswith("huge pages hold"))
    assert f"made {tmp_path}/0.pool, for " in said
    assert "; each of the 2 ranks has one like it" in said
    with CXLPool.open(tmp_path / "0.pool") as pool:
        place = pools.measure(pool.admin.overview(), False, 1, 0, 1)
    assert place.bytes == (tmp_path / "0.pool").stat().st_size
    assert place.room_bytes is not None
