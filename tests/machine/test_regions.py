"""Places for a pool: huge pages, devices, and file systems that do not say how large they are."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.bench.cases.litmus import open_region
from cxlkv.errors import (
    BadArgumentError,
    MemoryShortError,
    NotAPoolError,
    PoolExistsError,
    UnsupportedError,
)
from cxlkv.machine import regions
from cxlkv.machine.devices import Devices
from cxlkv.stats import find
from cxlkv.tiers import Tiers


def huge_folder() -> Path:
    """A writable hugetlbfs with 64 MiB free; skips where there is none."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            free = int(line.split()[1])
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    folders = [Path(m[1]) for m in mounts if m[2] == "hugetlbfs" and os.access(m[1], os.W_OK)]
    if free < 40 or not folders:
        pytest.skip(f"{free} huge pages free, {len(folders)} hugetlbfs mounted: 40 and 1 needed")
    return folders[0]


def test_a_pool_on_hugetlbfs_is_made_opened_and_removed() -> None:
    path = huge_folder() / "cxlkv-test.pool"
    layout = KVLayout(layers=2, kv_heads=8, head_dim=64, dtype="float16")
    k = np.ones((100, 8, 64), np.float16)
    with CXLPool.create(path, layout=layout, capacity="32MiB") as pool, CXLPool.open(path) as other:
        assert pool.describe()["page_kind"] == "hugetlb"
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, k, k)
        assert len(other.adopt(sequence.handle)) == 100
        assert pool.admin.check(deep=True)["clean"]
    CXLPool.remove(path)
    assert not path.exists()


def test_a_file_system_of_unknown_size_is_left_to_the_reservation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """hugetlbfs mounted without size= reports 0 free of 0 blocks; a full disk 0 of many."""
    unknown = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0)
    monkeypatch.setattr(os, "statvfs", lambda path: unknown)
    regions.check_room(regions.Place(str(tmp_path / "a.pool")), 1 << 30)
    full = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(MemoryShortError, match="0 B free"):
        regions.check_room(regions.Place(str(tmp_path / "a.pool")), 1 << 30)


def test_a_whole_device_is_as_large_as_sysfs_says(tmp_path: Path) -> None:
    """The true driver is held by `make test-drivers`; here any device stands for its number."""
    number = os.stat("/dev/null").st_rdev
    device = tmp_path / f"sys/dev/char/{os.major(number)}:{os.minor(number)}"
    device.mkdir(parents=True)
    with pytest.raises(UnsupportedError, match="/dev/null is no dax device with memory"):
        regions.whole_device_bytes("/dev/null", tmp_path)
    (tmp_path / "sys/bus/dax").mkdir(parents=True)
    (device / "subsystem").symlink_to("../../../bus/dax")
    (device / "size").write_text("268435456\n")
    assert regions.whole_device_bytes("/dev/null", tmp_path) == 256 << 20
    (device / "size").write_text("0\n")
    with pytest.raises(UnsupportedError, match="no dax device with memory"):
        regions.whole_device_bytes("/dev/null", tmp_path)


def test_a_device_by_its_folder_in_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/null stands for the device; `make test-drivers` has true ones."""
    here = [SimpleNamespace(file="/dev/null")]
    asked = []

    def devices_of(devices: Devices, folder: str) -> list[SimpleNamespace]:
        asked.append(folder)
        return here

    monkeypatch.setattr(regions, "dax_devices_of", devices_of)
    assert regions.parse_place("dax:/sys/class/mem") == regions.Place("/dev/null")
    assert asked == [os.path.realpath("/sys/class/mem")]
    assert regions.parse_where("dax:/sys/class/mem+/dev/zero") == "dax:/dev/null+/dev/zero"
    here.append(SimpleNamespace(file="/dev/zero"))
    with pytest.raises(UnsupportedError, match="has 2 dax devices: /dev/null, /dev/zero; one is"):
        regions.parse_place("dax:/sys/class/mem")
    here.clear()
    with pytest.raises(UnsupportedError, match="/sys/class/mem has no dax device; one is wanted"):
        regions.parse_place("dax:/sys/class/mem")
    with pytest.raises(UnsupportedError, match="is not a folder of sysfs here"):
        regions.parse_place("dax:/sys/devices/nowhere")


def test_all_is_the_capacity_of_a_device_only(tmp_path: Path) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64)
    for where in (tmp_path / "a.pool", "anonymous:"):
        with pytest.raises(BadArgumentError, match="'all' is for a dax device, or a file in place"):
            CXLPool.create(where, layout=layout, capacity="all")
    with pytest.raises(UnsupportedError, match="/dev/null is no dax device"):
        CXLPool.create("/dev/null", layout=layout, capacity="all")


def test_no_file_is_made_among_devices(tmp_path: Path) -> None:
    """The name of a device that is not there makes no pool of this host's own memory."""
    path, layout = "/dev/dax97.3", KVLayout(layers=2, kv_heads=2, head_dim=64)
    link = tmp_path / "a.pool"
    link.symlink_to(path)
    try:
        for make in (CXLPool.create, CXLPool.open_or_create):
            for capacity in ("16MiB", "all"):
                with pytest.raises(UnsupportedError, match="no such device, and no file is made"):
                    make(path, layout=layout, capacity=capacity)
        described = (
            f"where: {path}\ncapacity: 16MiB\nlayout: {{layers: 2, kv_heads: 2, head_dim: 64}}"
        )
        (tmp_path / "pool.yaml").write_text(described)
        with pytest.raises(UnsupportedError, match="no such device"):
            CXLPool.from_config(tmp_path / "pool.yaml")
        with CXLPool.create("anonymous:", layout=layout, capacity="16MiB") as pool:
            for where in (path, str(link)):
                with pytest.raises(UnsupportedError, match="no such device"):
                    Tiers(pool, cold=where, cold_capacity="16MiB")
        with pytest.raises(UnsupportedError, match="no such device"):
            open_region(Path(path))
        assert not os.path.lexists(path)
    finally:
        Path(path).unlink(missing_ok=True)


def test_files_below_dev_where_something_is_mounted() -> None:
    regions.check_below_dev("/dev/shm/cxlkv-test.pool")
    regions.check_below_dev("/dev/hugepages/2M/cxlkv-test.pool")
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for folder in mounts:
        if folder.startswith("/dev/") and os.path.isdir(folder):
            regions.check_below_dev(f"{folder}/cxlkv-test.pool")
    for folder in ("/dev", "/dev/shm/..", "/dev/no-such-folder"):
        with pytest.raises(UnsupportedError, match="no such device"):
            regions.check_below_dev(f"{folder}/cxlkv-test.pool")


def test_a_device_that_is_no_dax_device_is_refused() -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64)
    for force in (False, True):
        with pytest.raises(PoolExistsError, match="neither a regular file nor a dax device"):
            CXLPool.create("/dev/null", layout=layout, capacity="64MiB", force=force)
    with pytest.raises(NotAPoolError, match="neither a regular file nor a dax device"):
        CXLPool.open("/dev/null")
    with pytest.raises(NotAPoolError):
        CXLPool.remove("/dev/null")
    assert find(["/dev/null"]) == []
