"""The machine report, on recorded pieces of /proc and /sys of other machines.

`plant` writes such a tree; each test says which machine it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cxlkv.machine.devices import probe_devices
from cxlkv.machine.topology import (
    GIB,
    KIB,
    MIB,
    HugePagePool,
    Machine,
    NumaNode,
    SharedMemory,
    missing,
    probe,
)

XEON_CPU = """\
processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Platinum 8480+
flags		: fpu sse4_2 avx2 fma f16c avx512f clflushopt clwb avx512_bf16 movdir64b amx_bf16 \
amx_tile amx_int8 avx512_fp16

processor	: 1
model name	: Intel(R) Xeon(R) Platinum 8480+
flags		: fpu
"""

GRAVITON_CPU = """\
processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd evtstrm aes crc32 dcpop sve bf16 i8mm
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: 0xd40
"""

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {memlock}              8388608              bytes
"""


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A bare server: two nodes, the second a CXL expander without CPUs; cgroup v2."""
    return plant(
        tmp_path,
        {
            "proc/cpuinfo": XEON_CPU,
            "proc/meminfo": "MemTotal:       528279292 kB\nMemAvailable:   500000000 kB\n",
            "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,8\n",
            "proc/self/limits": LIMITS.format(memlock="unlimited"),
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
            "tmpfs /dev/shm tmpfs rw,size=264139644k 0 0\n",
            "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
            "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{64 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{5 * GIB}\n",
            "sys/devices/system/node/node0/cpulist": "0-7\n",
            "sys/devices/system/node/node0/distance": "10 14\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  264139644 kB\n"
            "Node 0 MemFree:        251000000 kB\nNode 0 MemUsed:     13139644 kB\n",
            "sys/devices/system/node/node1/cpulist": "\n",
            "sys/devices/system/node/node1/distance": "14 10\n",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  134217728 kB\n"
            "Node 1 MemFree:        134217728 kB\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "1024\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1000\n",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never]"
            " deny force\n",
            "sys/bus/cxl/devices/mem10/serial": "0x10\n",
            "sys/bus/cxl/devices/mem2/serial": "0x2\n",
            "sys/bus/cxl/devices/root0/uevent": "",
            "sys/bus/dax/devices/dax0.0/size": "0\n",
        },
    )


def docker(root: Path) -> Path:
    """A container as Docker makes it, on cgroup v1: the host's path, a 64 MB /dev/shm."""
    return plant(
        root,
        {
            "proc/cpuinfo": "model name : QEMU Virtual CPU version 2.5+\nflags : fpu sse2\n",
            "proc/self/limits": LIMITS.format(memlock="65536"),
            "proc/self/cgroup": "12:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/docker/ab\n",
            "proc/self/mounts": "cgroup /sys/fs/cgroup/cpu cgroup ro,cpu,cpuacct 0 0\n"
            "cgroup /sys/fs/cgroup/memory cgroup ro,nosuid,memory 0 0\n"
            "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never] deny\n",
        },
    )


def test_a_server_is_read_whole(server: Path) -> None:
    machine = probe(server)
    assert machine.kernel == "6.8.0-45-generic"
    assert machine.cpu.model == "Intel(R) Xeon(R) Platinum 8480+"
    assert machine.cpu.architecture == "x86_64"
    assert machine.cpu.cores_allowed == (0, 1, 2, 3, 8)
    assert machine.cpu.isa == tuple(
        "sse4_2 avx2 fma f16c avx512f avx512_bf16 amx_tile amx_bf16 amx_int8"
        " clflushopt clwb movdir64b".split()
    )
    assert machine.memory.total_bytes == 528279292 * KIB
    assert machine.memory.available_bytes == 500000000 * KIB
    assert machine.memory.memlock_bytes is None
    assert machine.nodes == (
        NumaNode(0, tuple(range(8)), 264139644 * KIB, 251000000 * KIB, (10, 14)),
        NumaNode(1, (), 134217728 * KIB, 134217728 * KIB, (14, 10)),
    )
    assert machine.huge_pages.pools == (
        HugePagePool(2 * MIB, 1024, 1000),
        HugePagePool(GIB, 0, 0),
    )
    assert machine.huge_pages.transparent == "madvise"
    assert machine.huge_pages.shared_memory == "never"
    assert machine.shared_memory == SharedMemory(264139644 * KIB, None)
    devices = probe_devices(server)
    assert [device.name for device in devices.cxl_memory_devices] == ["mem2", "mem10"]
    assert [device.name for device in devices.dax_devices] == ["dax0.0"]


def test_the_tightest_limit_above_the_process_counts(server: Path) -> None:
    memory = probe(server).memory
    assert (memory.cgroup_limit_bytes, memory.cgroup_usage_bytes) == (64 * GIB, 5 * GIB)


def test_a_server_with_huge_pages_lacks_nothing(server: Path) -> None:
    assert missing(probe(server)) == []


def test_a_container_gets_its_own_limit_though_the_path_is_the_hosts(tmp_path: Path) -> None:
    memory = probe(docker(tmp_path)).memory
    assert (memory.cgroup_limit_bytes, memory.cgroup_usage_bytes) == (2 * GIB, GIB)


def test_cgroup_v1_without_a_limit_has_none(tmp_path: Path) -> None:
    root = plant(
        docker(tmp_path),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
    )
    assert probe(root).memory.cgroup_limit_bytes is None


@pytest.mark.parametrize(
    ("stat", "usage"),
    [
        (f"anon 7\ninactive_file {3 * MIB}\nactive_file 9\n", GIB - 3 * MIB),
        (f"inactive_file 5\ntotal_inactive_file {4 * MIB}\n", GIB - 4 * MIB),  # v1
        (f"inactive_file {2 * GIB}\n", 0),  # read a moment later
    ],
)
def test_page_cache_that_is_idle_does_not_count_as_used(
    tmp_path: Path, stat: str, usage: int
) -> None:
    """The kernel drops it before it kills: a model file just read does not stand in the way."""
    root = plant(docker(tmp_path), {"sys/fs/cgroup/memory/memory.stat": stat})
    assert probe(root).memory.cgroup_usage_bytes == usage


def test_a_masked_usage_file_leaves_the_limit(tmp_path: Path) -> None:
    root = docker(tmp_path)
    usage = root / "sys/fs/cgroup/memory/memory.usage_in_bytes"
    usage.unlink()
    usage.mkdir()  # unreadable for anyone, root included
    memory = probe(root).memory
    assert (memory.cgroup_limit_bytes, memory.cgroup_usage_bytes) == (2 * GIB, None)


def test_a_container_is_told_what_it_lacks_and_what_mends_it(tmp_path: Path) -> None:
    advice = missing(probe(docker(tmp_path)))
    assert [item.what for item in advice] == [
        "no avx2",
        "/dev/shm holds 64 MiB only",
        "no huge pages for shared memory",
        "only 0.0625 MiB may be locked in memory",
    ]
    assert "--shm-size" in advice[1].command
    assert "huge=within_size" in advice[2].command
    assert "--ulimit memlock" in advice[3].command
    assert all(item.why for item in advice)


@pytest.mark.parametrize("setting", ["always", "within_size", "force"])
def test_transparent_huge_pages_for_shared_memory_are_enough(tmp_path: Path, setting: str) -> None:
    root = plant(
        docker(tmp_path),
        {"sys/kernel/mm/transparent_hugepage/shmem_enabled": f"deny [{setting}] never\n"},
    )
    assert not any("huge" in item.what for item in missing(probe(root)))


def test_an_arm_server(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {"proc/cpuinfo": GRAVITON_CPU, "sys/devices/system/cpu/online": "0-1\n"},
    )
    cpu = probe(root).cpu
    assert cpu.architecture == "aarch64"
    assert cpu.model == "implementer 0x41 part 0xd40"
    assert cpu.isa == ("asimd", "bf16", "dcpop")
    assert cpu.cores_allowed == (0, 1)


def test_a_machine_where_everything_is_masked_still_gives_a_report(tmp_path: Path) -> None:
    machine = probe(tmp_path)
    assert machine.cpu.cores_allowed == ()
    assert machine.memory.total_bytes is None
    assert machine.memory.cgroup_limit_bytes is None
    assert machine.nodes == ()
    assert machine.shared_memory == SharedMemory(None, None)
    assert [item.what for item in missing(machine)] == ["no huge pages for shared memory"]


def test_this_machine_is_read() -> None:
    machine = probe()
    assert machine.kernel
    assert machine.cpu.cores_allowed
    assert (machine.memory.total_bytes or 0) > 0
    assert machine.shared_memory.size_bytes is None or machine.shared_memory.size_bytes > 0


def test_a_machine_becomes_json_and_is_frozen(server: Path) -> None:
    machine = probe(server)
    read_back = json.loads(json.dumps(asdict(machine)))
    assert read_back["nodes"][1]["total_bytes"] == 134217728 * KIB
    assert hash(machine) == hash(replace(machine))
    assert isinstance(machine, Machine)
