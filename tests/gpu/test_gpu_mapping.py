"""A pool mapped for a device: registered once, in pieces if need be, undone when it is closed."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    ClosedError,
    GpuError,
    MemoryShortError,
    RegistrationError,
    UnsupportedError,
)
from cxlkv.gpu import mapping as module
from cxlkv.gpu.driver import Driver
from cxlkv.gpu.mapping import ALIGNMENT_BYTES, Mapping, borders, check_limits, unbacked_bytes
from cxlkv.machine.topology import Memory, probe

from ..support.fake_driver import (
    INVALID_VALUE,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    FakeCuda,
)
from ..support.forking import in_child
from ..support.sharing import shared
from ..test_records import grown

GIB = 1 << 30
PORTABLE_AND_MAPPED, READ_ONLY = 3, 8
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    return fake.driver()


def many_extents(where: str = "anonymous:") -> CXLPool:
    return CXLPool.create(where, layout=LAYOUT, capacity="256MiB", threads=1)


def at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def test_on_the_cpu_nothing_is_registered(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = grown(pool, rng, 14)
    with Mapping(pool, "cpu") as mapping:
        assert mapping.device_address == pool.pages.memory()[0] == mapping.tensor.data_ptr()
        assert mapping.tensor.numel() == mapping.size == _core.pool_memory(pool._handle)[1]
        assert bytes(mapping.tensor[:8].tolist()) == b"CXLKVPOL"
        table = mapping.pages(sequence, 1)
        k, v = (np.asarray(array) for array in sequence.fetch(1))
        for head in range(2):
            for page in range(3):
                key_at, value_at = int(table.keys_at[head, page]), int(table.values_at[head, page])
                assert at(key_at, 128) == k[head, page].tobytes()
                assert at(value_at, 128) == v[head, page].tobytes()
        for page in range(3):
            line = at(int(table.descriptors_at[page]), 64)
            version = int.from_bytes(line[:8], "little")
            assert version >> 8 == int(table.generations[page])
            assert int.from_bytes(line[28:32], "little") == int(table.pages[page])
        assert mapping.pages(sequence, 1, first=2).keys_at.tolist() == [
            row[2:] for row in table.keys_at.tolist()
        ]
        assert mapping.writable
    with pytest.raises(ClosedError):
        _ = mapping.tensor


def test_a_tensor_of_the_region_keeps_it_mapped(pool: CXLPool) -> None:
    mapping = Mapping(pool, "cpu")
    part = mapping.tensor[:16].view(8, 2)
    mapping.close()
    with pytest.raises(BusyError, match="drop it"):
        pool.close()
    assert bytes(part.flatten()[:8].tolist()) == b"CXLKVPOL"
    del part
    pool.close()


def test_a_tensor_of_the_region_keeps_a_pool_that_nobody_else_has() -> None:
    def tensor() -> torch.Tensor:
        return Mapping(many_extents(), "cpu").tensor[:8]

    kept = tensor()
    gc.collect()
    assert bytes(kept.tolist()) == b"CXLKVPOL"


def test_pages_without_a_seal_and_behind_a_window(rng: np.random.Generator) -> None:
    from cxlkv.layout import LayerGroup

    groups = [
        LayerGroup(layers=1, kv_heads=2, head_dim=8, dtype="float32", window=window)
        for window in (None, 5)
    ]
    layout = KVLayout.of(groups, page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        sequence, mapping = pool.sequence(), Mapping(pool, "cpu")
        rows = rng.standard_normal((4, 2, 8)).astype(np.float32)
        for _ in range(5):
            for layer in range(2):
                sequence.append(layer, rows, rows)
        table = mapping.pages(sequence, 1)
        assert table.keys_at.shape == (2, 5)
        assert (table.keys_at[:, 0] == 0).all()
        assert (table.values_at[:, 0] == 0).all()
        assert table.descriptors_at[0] == 0
        assert (table.keys_at[:, -1] > 0).all()
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="8MiB", threads=1) as pool:
        sequence, mapping = pool.sequence(), Mapping(pool, "cpu")
        sequence.append(0, rows, rows)
        assert mapping.pages(sequence, 0).descriptors_at.tolist() == [0]
        sequence.append(1, rows, rows)
        assert mapping.pages(sequence, 0).descriptors_at[0] > 0


@pytest.mark.parametrize("where", ["anonymous:", "/dev/shm", "file"])
def test_registered_once_for_two_users(
    where: str, tmp_path: Path, shm_path: Path, fake: FakeCuda, driver: Driver
) -> None:
    path = {"file": str(tmp_path / "pool"), "/dev/shm": str(shm_path)}
    place = path.get(where, where)
    with CXLPool.create(place, layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        address, size = _core.pool_memory(pool._handle)
        first = Mapping(pool, "cuda:0", driver=driver)
        second = Mapping(pool, "cuda:1", driver=driver)
        expected = [("cuMemHostRegister_v2", address, size, PORTABLE_AND_MAPPED)]
        assert fake.calls("cuMemHostRegister_v2") == expected
        assert first.device_address == second.device_address == address
        first.close()
        first.close()
        assert fake.registered == 1
        assert second.device_address == address
        fake.forget()
        second.close()
        # Both devices have read it: the last one waits for both, then takes it back.
        names = [row[:2] for row in fake.calls() if row[0] != "cuDevicePrimaryCtxRetain"]
        synchronized = [("cuCtxSynchronize", 100), ("cuCtxSynchronize", 101)]
        assert names == [*synchronized, ("cuMemHostUnregister", address)]
        assert fake.registered == 0
        with Mapping(pool, "cuda:0", driver=driver):
            assert fake.registered == 1
    if place != "anonymous:":
        CXLPool.remove(place)


def test_the_pool_unregisters_before_it_unmaps(fake: FakeCuda) -> None:
    pool = many_extents()
    mapping = Mapping(pool, "cuda:0", driver=fake.driver())
    assert fake.registered == 1
    pool.close()
    assert fake.registered == 0
    with pytest.raises(ClosedError, match="the mapping is closed"):
        _ = mapping.device_address
    mapping.close()
    pool.close()
    with pytest.raises(ClosedError):
        Mapping(pool, "cuda:0", driver=fake.driver())


def test_what_nobody_closes_is_collected(fake: FakeCuda, driver: Driver) -> None:
    pool = many_extents()
    mapping = Mapping(pool, "cuda:0", driver=driver)
    cycle: list[object] = [mapping, pool]
    cycle.append(cycle)
    del mapping, pool, cycle
    gc.collect()
    assert fake.registered == 0


@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED])
def test_a_refusal_is_named(fake: FakeCuda, pool: CXLPool, code: int) -> None:
    fake.fail("cuMemHostRegister_v2", code)
    with pytest.raises(RegistrationError, match=r"CUDA_ERROR_.*cxlkv\.gpu\.staging") as raised:
        Mapping(pool, "cuda:0", driver=fake.driver())
    assert len(fake.calls("cuMemHostRegister_v2")) == 1  # smaller pieces would not help
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = _core.pool_memory(pool._handle)[1]
    assert ("ulimit -l" in str(raised.value)) == (0 <= soft < size)
    assert fake.registered == 0


def test_the_limit_of_locked_memory_is_named_but_does_not_forbid(
    fake: FakeCuda, driver: Driver, pool: CXLPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(probe(), memory=Memory(None, None, None, None, memlock_bytes=65536))
    monkeypatch.setattr(module, "probe", lambda: machine)
    Mapping(pool, "cuda:0", driver=driver).close()
    fake.fail("cuMemHostRegister_v2", OPERATING_SYSTEM)
    with pytest.raises(RegistrationError, match=r"may lock 64 KiB \(ulimit -l\)"):
        Mapping(pool, "cuda:0", driver=driver)


def test_memory_that_somebody_else_registered(fake: FakeCuda, driver: Driver) -> None:
    with many_extents() as pool:
        address, _ = _core.pool_memory(pool._handle)
        with driver.current(0):
            assert driver.register(address + 8192, 4096, 3) == 0
        with pytest.raises(RegistrationError, match="Somebody else in this process"):
            Mapping(pool, "cuda:0", driver=driver)
        assert fake.registered == 1


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", 40 << 20)


def test_the_borders_of_pieces() -> None:
    with many_extents() as pool:
        address, size = _core.pool_memory(pool._handle)
        assert borders(pool) == [0, size]
        geometry = _core.pool_geometry(pool._handle)
        for most in (40 << 20, 52 << 20, 70 << 20):
            cuts = borders(pool, most)
            assert cuts[0] == 0
            assert cuts[-1] == size
            assert len(cuts) > 3
            for cut in cuts[1:-1]:
                assert (address + cut) % ALIGNMENT_BYTES == 0
                assert (cut - geometry["extents_offset"]) % geometry["extent_bytes"] == 0
            assert all(0 < end - start <= most for start, end in pairwise(cuts))


@pytest.mark.usefixtures("small_pieces")
def test_a_region_that_is_refused_whole_goes_in_pieces(
    fake: FakeCuda, rng: np.random.Generator
) -> None:
    fake.register_most(40 << 20)
    with many_extents() as pool:
        sequence = grown(pool, rng, 14)
        with Mapping(pool, "cuda:0", driver=fake.driver()) as mapping:
            cuts = borders(pool)
            address, _ = pool.pages.memory()
            asked = [(row[1], row[2]) for row in fake.calls("cuMemHostRegister_v2")]
            pieces = [(address + a, b - a) for a, b in pairwise(cuts)]
            assert asked == [(address, mapping.size), *pieces]
            assert fake.registered == len(pieces) > 3
            assert mapping.device_address == address
            assert (mapping.pages(sequence, 0).keys_at > 0).all()
        assert fake.registered == 0


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_pieces_that_were_registered_are_undone(
    fake: FakeCuda, driver: Driver, broken: int
) -> None:
    fake.register_most(40 << 20)
    fake.fail("cuMemHostRegister_v2", OPERATING_SYSTEM, skip=1 + broken)
    with many_extents() as pool:
        with pytest.raises(RegistrationError, match="OPERATING_SYSTEM"):
            Mapping(pool, "cuda:0", driver=driver)
        assert fake.registered == 0
        assert len(fake.calls("cuMemHostUnregister")) == broken
        Mapping(pool, "cuda:0", driver=driver).close()  # nothing is left of it
    assert fake.registered == 0


@pytest.mark.usefixtures("small_pieces")
def test_pieces_that_the_device_sees_apart(fake: FakeCuda, driver: Driver) -> None:
    fake.shift(4096)
    with many_extents() as pool:
        Mapping(pool, "cuda:0", driver=driver).close()  # one piece may lie anywhere
        fake.register_most(40 << 20)
        with pytest.raises(RegistrationError, match="places of their own"):
            Mapping(pool, "cuda:0", driver=driver)
        assert fake.registered == 0
        fake.register_most(1 << 62)
        fake.fail("cuMemHostGetDevicePointer_v2", INVALID_VALUE)
        with pytest.raises(GpuError, match="cuMemHostGetDevicePointer_v2"):
            Mapping(pool, "cuda:0", driver=driver)
        assert fake.registered == 0


def test_an_error_at_the_end_does_not_keep_the_pool_open(fake: FakeCuda) -> None:
    pool = many_extents()
    Mapping(pool, "cuda:0", driver=fake.driver())
    fake.fail("cuCtxSynchronize", 700)  # a kernel before has failed
    pool.close()
    assert fake.registered == 0


def test_a_pool_of_several_hosts_is_for_reading(fake: FakeCuda, tmp_path: Path) -> None:
    pool = shared(tmp_path / "shared", LAYOUT)
    with pool, Mapping(pool, "cuda:0", driver=fake.driver()) as mapping:
        assert not mapping.writable
        assert fake.calls("cuMemHostRegister_v2")[0][3] == PORTABLE_AND_MAPPED | READ_ONLY
        fake.fail("cuMemHostRegister_v2", NOT_SUPPORTED)
        mapping.close()
        with pytest.raises(RegistrationError, match="Hosts share this pool"):
            Mapping(pool, "cuda:0", driver=fake.driver())


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_none(fake: FakeCuda, driver: Driver) -> None:
    pool = many_extents()
    mapping = Mapping(pool, "cuda:0", driver=driver)
    fake.forget()

    def child() -> None:
        with pytest.raises(ClosedError, match="spawn"):
            _ = mapping.tensor
        with pytest.raises(UnsupportedError, match="fork"):
            Mapping(pool, "cuda:0", driver=driver)
        mapping.close()
        pool.close()
        assert fake.calls() == []  # what is registered is the parent's
        assert fake.registered == 1

    in_child(child)
    assert mapping.device_address > 0
    pool.close()
    assert fake.registered == 0


def test_what_cannot_be_mapped(pool: CXLPool, make_pool: Callable[[], CXLPool]) -> None:
    with pytest.raises(UnsupportedError, match="not for meta"):
        Mapping(pool, "meta")
    if torch.version.cuda is None:
        with pytest.raises(UnsupportedError, match="without CUDA"):
            Mapping(pool, "cuda")
    with pytest.raises(BadArgumentError, match="another pool"):
        Mapping(pool, "cpu").pages(make_pool().sequence(), 0)


def memory(limit: int | None, usage: int | None, available: int | None) -> Memory:
    return Memory(None, available, limit, usage, None)


def test_limits_of_what_pinning_brings_in() -> None:
    check_limits(100 * GIB, 0, memory(GIB, GIB, GIB))  # all of it lies in memory already
    check_limits(100 * GIB, 3 * GIB, memory(None, None, None))
    check_limits(100 * GIB, 3 * GIB, memory(8 * GIB, 5 * GIB, 3 * GIB))
    with pytest.raises(MemoryShortError, match=r"3 GiB are not there yet.*cgroup may use 8 GiB"):
        check_limits(100 * GIB, 3 * GIB, memory(8 * GIB, 5 * GIB + 1, None))
    with pytest.raises(MemoryShortError, match="this machine has 1 GiB available"):
        check_limits(100 * GIB, 3 * GIB, memory(None, None, GIB))


def test_the_limits_are_checked_before_the_driver_is_asked(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(probe(), memory=memory(GIB, GIB - (1 << 20), None))
    monkeypatch.setattr(module, "probe", lambda: short)
    with many_extents() as pool, pytest.raises(MemoryShortError, match="cgroup"):
        Mapping(pool, "cuda:0", driver=fake.driver())
    assert fake.calls("cuMemHostRegister_v2") == []


def test_what_is_not_in_memory_yet() -> None:
    import mmap

    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as area:
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert unbacked_bytes(address, 64 * mmap.PAGESIZE) == 64 * mmap.PAGESIZE
        for page in (0, 7, 63):
            area[page * mmap.PAGESIZE] = 1
        assert unbacked_bytes(address, 64 * mmap.PAGESIZE) == 61 * mmap.PAGESIZE
        gc.collect()
    assert unbacked_bytes(0, mmap.PAGESIZE) == 0  # nothing is mapped there
