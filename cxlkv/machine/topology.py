"""Describes what this machine has for a pool and what it lacks, for `cxlkv info`.

Everything is read from procfs and sysfs below one `root`, so that a recorded tree of another
machine gives that machine. Files that a container masks, or that a kernel lacks, are None
("not known") or empty, never an error: the report must come out on any machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cxlkv.machine.locking import limit_counts
from cxlkv.machine.sysfs import (
    chosen,
    fields,
    id_list,
    kilobytes,
    names,
    node_fields,
    number,
    numbers,
    read,
)

# What our kernels and our cache flushes can make use of, in the kernel's spelling.
ISA_OF_INTEREST = {
    "x86_64": (
        "sse4_2 avx2 fma f16c avx512f avx512_bf16 amx_tile amx_bf16 amx_int8"
        " clflushopt clwb movdir64b"
    ).split(),
    "aarch64": "asimd bf16 dcpop".split(),
}

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Docker gives a container 64 MiB of /dev/shm, less than one layer of a short prompt.
SHARED_MEMORY_SMALL_BYTES = GIB
# The kernel's default is 8 MiB; anything below this cannot lock a useful pool.
MEMLOCK_SMALL_BYTES = GIB
# The settings of shmem_enabled with which a pool in /dev/shm has huge pages: it is reserved before
# it is mapped, so that "advise" gives none.
SHARED_MEMORY_HUGE = {"always", "within_size", "force"}
# From this Linux on a pool asks for them by itself, and only "deny" forbids that.
COLLAPSE_SINCE = (6, 1)
# cgroup v1 says "no limit" by the largest multiple of the page size that fits, hence not equal.
CGROUP_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Cpu:
    """The processor, as this process may use it."""

    model: str
    architecture: str  # "x86_64", "aarch64", or "" where /proc/cpuinfo does not tell
    cores_allowed: tuple[int, ...]
    isa: tuple[str, ...]  # those of ISA_OF_INTEREST that are there


@dataclass(frozen=True)
class Memory:
    """Memory of the machine and what this process may have of it; None: no limit known."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_limit_bytes: int | None  # the tightest of this cgroup and those above it
    cgroup_usage_bytes: int | None  # of the cgroup that sets that limit, less idle page cache
    memlock_bytes: int | None  # None also where it does not count: CAP_IPC_LOCK


@dataclass(frozen=True)
class NumaNode:
    """One memory node; a CXL expander shows as a node without CPUs."""

    node: int
    cpus: tuple[int, ...]
    total_bytes: int | None
    free_bytes: int | None
    distances: tuple[int, ...]  # to each online node, in order; 10 is itself


@dataclass(frozen=True)
class HugePagePool:
    """Reserved huge pages of one size."""

    page_bytes: int
    total_count: int
    free_count: int


@dataclass(frozen=True)
class HugePages:
    """Reserved pools and the settings of transparent huge pages ("" where there are none)."""

    pools: tuple[HugePagePool, ...]
    transparent: str  # "always", "madvise" or "never"
    shared_memory: str  # the same for /dev/shm: "always", "within_size", "advise", "never" ...


@dataclass(frozen=True)
class SharedMemory:
    """/dev/shm; None: not known."""

    size_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Machine:
    """One machine; `dataclasses.asdict` makes plain JSON of it."""

    kernel: str
    cpu: Cpu
    memory: Memory
    nodes: tuple[NumaNode, ...]
    huge_pages: HugePages
    shared_memory: SharedMemory


@dataclass(frozen=True)
class Advice:
    """One thing that this machine lacks, and what to do about it."""

    what: str
    why: str
    command: str  # what mends it


def probe(root: Path = Path("/")) -> Machine:
    """Read the machine whose procfs and sysfs lie below `root`."""
    return Machine(
        kernel=read(root / "proc/sys/kernel/osrelease"),
        cpu=_cpu(root),
        memory=_memory(root),
        nodes=_nodes(root),
        huge_pages=_huge_pages(root),
        shared_memory=_shared_memory(root),
    )


def missing(machine: Machine) -> list[Advice]:
    """List what this machine lacks, most important first."""
    return list(_missing(machine))


def _missing(machine: Machine) -> Iterator[Advice]:
    wanted = {"x86_64": "avx2", "aarch64": "asimd"}.get(machine.cpu.architecture)
    if wanted is not None and wanted not in machine.cpu.isa:
        yield Advice(
            what=f"no {wanted}",
            why="keys are scored by plain C code, several times slower than memory can bring them",
            command="in a virtual machine, pass the CPU through: qemu -cpu host; else another"
            " machine",
        )
    size_bytes = machine.shared_memory.size_bytes
    if size_bytes is not None and size_bytes < SHARED_MEMORY_SMALL_BYTES:
        yield Advice(
            what=f"/dev/shm holds {size_bytes // MIB} MiB only",
            why="a pool that processes share lies there by default, and must fit",
            command="docker run --shm-size=16g ..., or: sudo mount -o remount,size=16G /dev/shm",
        )
    pages = machine.huge_pages
    if not gives_huge_pages(machine) and not any(pool.total_count > 0 for pool in pages.pools):
        yield Advice(
            what="no huge pages for shared memory",
            why="with 4 KiB pages, address translation slows each scan of a large pool",
            command="sudo mount -o remount,huge=within_size /dev/shm, or reserve 2 GiB: sudo sysctl"
            " vm.nr_hugepages=1024",
        )
    limit_bytes = machine.memory.memlock_bytes
    if limit_bytes is not None and limit_bytes < MEMLOCK_SMALL_BYTES:
        yield Advice(
            what=f"only {limit_bytes / MIB:g} MiB may be locked in memory",
            why="a pool beyond that cannot be pinned, so it can be swapped out and RDMA cannot use"
            " it",
            command="ulimit -l unlimited, or: docker run --ulimit memlock=-1 ...",
        )


def gives_huge_pages(machine: Machine) -> bool:
    """Whether a pool in /dev/shm has some once it was brought into place."""
    setting = machine.huge_pages.shared_memory
    version = tuple(map(int, re.findall(r"\d+", machine.kernel)[:2]))
    collapses = version >= COLLAPSE_SINCE and setting not in ("deny", "")
    return collapses or setting in SHARED_MEMORY_HUGE


def _cpu(root: Path) -> Cpu:
    info = fields(read(root / "proc/cpuinfo"))
    # x86 says "flags", arm "Features"; arm has no name for its CPUs, only part numbers.
    architecture = "x86_64" if "flags" in info else "aarch64" if "Features" in info else ""
    flags = set((info.get("flags") or info.get("Features") or "").split())
    model = info.get("model name", "")
    if not model and "CPU part" in info:
        model = f"implementer {info.get('CPU implementer', '?')} part {info['CPU part']}"
    allowed = fields(read(root / "proc/self/status")).get("Cpus_allowed_list")
    return Cpu(
        model=model,
        architecture=architecture,
        cores_allowed=id_list(allowed or read(root / "sys/devices/system/cpu/online")),
        isa=tuple(name for name in ISA_OF_INTEREST.get(architecture, ()) if name in flags),
    )


def _memory(root: Path) -> Memory:
    info = fields(read(root / "proc/meminfo"))
    limit_bytes, usage_bytes = _cgroup_memory(root)
    limits = read(root / "proc/self/limits")
    memlock = re.search(r"^Max locked memory\s+([0-9]{1,20})\s", limits, re.M)
    memlock_bytes = int(memlock[1]) if memlock else None
    if memlock_bytes is not None and root == Path("/") and not limit_counts(memlock_bytes):
        memlock_bytes = None
    return Memory(
        total_bytes=kilobytes(info.get("MemTotal")),
        available_bytes=kilobytes(info.get("MemAvailable")),
        cgroup_limit_bytes=limit_bytes,
        cgroup_usage_bytes=usage_bytes,
        memlock_bytes=memlock_bytes,
    )


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Limit and usage in the cgroup with the tightest memory limit, this one or one above it."""
    found: list[tuple[int, int | None]] = []
    for folder, limit_name, usage_name in _cgroup_folders(root):
        limit_bytes = number(folder / limit_name)
        if limit_bytes is not None and limit_bytes < CGROUP_NO_LIMIT_BYTES:
            found.append((limit_bytes, _cgroup_usage(folder, usage_name)))
    return min(found, key=lambda pair: pair[0], default=(None, None))


def _cgroup_usage(folder: Path, usage_name: str) -> int | None:
    """What the cgroup uses, without files in the page cache that the kernel would drop first."""
    usage_bytes = number(folder / usage_name)
    if usage_bytes is None:
        return None
    counts = dict(re.findall(r"^(\w+) ([0-9]{1,20})$", read(folder / "memory.stat"), re.M))
    # v1 has sums with the cgroups below under names of their own; in v2 every number is one.
    dropped_bytes = int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
    return max(0, usage_bytes - dropped_bytes)


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each folder from this process's cgroup up to the mount, and its files for limit and usage."""
    mounts = _mounts(root)
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "?", ""][:3]
        if not controllers:  # the one line of v2
            limit_name, usage_name = "memory.max", "memory.current"
            tops = [mount for mount in mounts if mount.kind == "cgroup2"]
        elif "memory" in controllers.split(","):
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
            tops = [m for m in mounts if m.kind == "cgroup" and "memory" in m.options]
        else:
            continue
        for mount in tops:
            top = root / mount.target.lstrip("/")
            # In a container the path is often the host's and not below this mount; then the
            # mount itself is the container's cgroup, and the last step of this walk.
            folder = top / path.lstrip("/")
            while folder != top:
                yield folder, limit_name, usage_name
                folder = folder.parent
            yield top, limit_name, usage_name


def _nodes(root: Path) -> tuple[NumaNode, ...]:
    folder = root / "sys/devices/system/node"
    nodes = []
    for name in names(folder, r"node\d+"):
        info = node_fields(folder / name / "meminfo")
        nodes.append(
            NumaNode(
                node=int(name.removeprefix("node")),
                cpus=id_list(read(folder / name / "cpulist")),
                total_bytes=kilobytes(info.get("MemTotal")),
                free_bytes=kilobytes(info.get("MemFree")),
                distances=numbers(read(folder / name / "distance")),
            )
        )
    return tuple(nodes)


def _huge_pages(root: Path) -> HugePages:
    folder = root / "sys/kernel/mm/hugepages"
    pools = tuple(
        HugePagePool(
            page_bytes=int(name.removeprefix("hugepages-").removesuffix("kB")) * KIB,
            total_count=number(folder / name / "nr_hugepages") or 0,
            free_count=number(folder / name / "free_hugepages") or 0,
        )
        for name in names(folder, r"hugepages-\d+kB")
    )
    transparent = root / "sys/kernel/mm/transparent_hugepage"
    return HugePages(
        pools=pools,
        transparent=chosen(transparent / "enabled"),
        shared_memory=chosen(transparent / "shmem_enabled"),
    )


def _shared_memory(root: Path) -> SharedMemory:
    folder = root / "dev/shm"
    if os.path.ismount(folder):
        # An unset `size=` means half of the memory, so the file system itself is asked first.
        usage = os.statvfs(folder)
        return SharedMemory(usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize)
    for mount in _mounts(root):
        if mount.target == "/dev/shm":
            for option in mount.options:
                if match := re.fullmatch(r"size=([0-9]{1,20})k", option):
                    return SharedMemory(int(match[1]) * KIB, None)
    return SharedMemory(None, None)


@dataclass(frozen=True)
class _Mount:
    target: str
    kind: str
    options: tuple[str, ...]


def _mounts(root: Path) -> list[_Mount]:
    lines = (line.split() for line in read(root / "proc/self/mounts").splitlines())
    return [_Mount(part[1], part[2], tuple(part[3].split(","))) for part in lines if len(part) > 3]
