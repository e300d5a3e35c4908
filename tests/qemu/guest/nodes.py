"""The pool on one device and over two, on a kmem node, over weighted nodes, on fsdax; HMAT:
python -m ... a.

Nodes 0 and 1 have a CPU each. Node 2 is far memory, /dev/dax0.0 until kmem has it, and node 4 is
/dev/dax1.0. Persistent memory is the legacy kind (memmap=).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from cxlkv import CXLPool
from cxlkv.errors import (
    GeometryError,
    MemoryShortError,
    NotAPoolError,
    PoolExistsError,
    SystemCallError,
    UnsupportedError,
)
from tests.qemu.guest.placement import NODES, WEIGHTS, flags_of, pages_by_node
from tests.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    Skip,
    bind_device,
    command,
    end_parts,
    errno_of,
    load,
    make_system_ram,
    part,
    publish_texts,
    read_texts,
    refusal,
    wait_until,
)

FAR, SECOND_FAR, ABSENT = 2, 4, 9  # nodes
SECOND = "/dev/dax1.0"
STRIPED = f"dax:{DEVICE}+{SECOND}"
STRIPE_BYTES = UNIT_BYTES = 2 << 20
CAPACITY = "32MiB"
MOUNTED = Path("/run/pmem")
GIVEN_BYTES = 48 << 20  # of a file that is there before
SYNCHRONOUS = "sf"  # among the flags of a mapping: MAP_SYNC, which only direct access gives


def device() -> None:
    bind_device()
    with CXLPool.create(DEVICE, layout=LAYOUT, capacity="all", force=True, replace=True) as pool:
        assert pool.describe()["page_kind"] == "devdax"
        publish_texts(pool)
        read_texts(pool)
    # By the hardware that it was found through, whose name does not change with the numbers.
    found_by = (Path("/sys/bus/dax/devices") / Path(DEVICE).name).resolve().parent
    with CXLPool.open(f"dax:{found_by}", layout=LAYOUT) as pool:
        print(f"dax:{found_by} is {pool.path}", flush=True)
        assert pool.path == DEVICE
        read_texts(pool)
    CXLPool.remove(DEVICE)


def striped() -> None:
    """One pool over two devices: stripes in turn, as the kernel's list of mappings says."""
    bind_device(SECOND)
    for device, node in ((DEVICE, FAR), (SECOND, SECOND_FAR)):
        sysfs = Path("/sys/bus/dax/devices", Path(device).name)
        assert int((sysfs / "target_node").read_text()) == node
    make = partial(CXLPool.create, STRIPED, layout=LAYOUT)
    text = refusal(MemoryShortError, partial(make, capacity="300MiB"))
    assert "all together hold 252 MiB" in text  # twice the smaller one, less its label
    with make(capacity="250MiB") as pool:
        assert pool.describe()["page_kind"] == "devdax"
        mapped = mappings()
        print(f"{STRIPED}: {len(mapped)} mappings, the first {mapped[:4]}", flush=True)
        for i, (device, bytes_mapped, offset) in enumerate(mapped):
            assert device == (DEVICE, SECOND)[i % 2]
            assert offset == UNIT_BYTES + i // 2 * STRIPE_BYTES  # behind the label
            assert bytes_mapped == STRIPE_BYTES
        assert len(mapped) > 100
        publish_texts(pool)
        read_texts(pool)
        read_elsewhere(STRIPED)
    with CXLPool.open(STRIPED, layout=LAYOUT) as pool:
        read_texts(pool)
    refusal(PoolExistsError, partial(make, capacity="64MiB"))
    text = refusal(GeometryError, partial(CXLPool.open, f"dax:{SECOND}+{DEVICE}"))
    assert "is part 1 of 2 of its pool" in text
    for device in (DEVICE, SECOND):
        assert "part of a striped pool" in refusal(NotAPoolError, partial(CXLPool.open, device))
    CXLPool.remove(STRIPED)
    refusal(NotAPoolError, partial(CXLPool.open, STRIPED))
    for device in (DEVICE, SECOND):  # each may be a pool of its own again, without force
        CXLPool.create(device, layout=LAYOUT, capacity="all").close()
        CXLPool.remove(device)


def mappings() -> list[tuple[str, int, int]]:
    """Device, bytes and offset of all mappings of devices of this process, by address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = re.fullmatch(r"(\w+)-(\w+) \S+ (\w+) .* (/dev/dax\S+)", line)
        if parts:
            first, end, offset = (int(parts[i], 16) for i in (1, 2, 3))
            found.append((parts[4], end - first, offset))
    return found


def read_elsewhere(where: str) -> None:
    """A process of its own finds and compares what was published."""
    text = (
        "from cxlkv import CXLPool; from tests.qemu.guest.steps import read_texts; "
        f"pool = CXLPool.open({where!r}); read_texts(pool); pool.close()"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def far_node() -> None:
    """The pool's pages come from the far node, all of them."""
    make_system_ram()
    for where in (f"numa:{FAR}", f"numa:{FAR}:/dev/shm/cxlkv-far.pool"):
        assert set(pages_of_pool(where)) == {FAR}
    text = refusal(UnsupportedError, lambda: pages_of_pool(f"numa:{ABSENT}"))
    assert f"node {ABSENT}" in text


def pages_of_pool(where: str) -> Counter[int]:
    """Makes a pool, uses it, removes it."""
    with CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY) as pool:
        publish_texts(pool)
        read_texts(pool)
        found = pages_by_node(*([pool.path] if pool.path else []))
    print(f"{where}: pages by node: {dict(found)}", flush=True)
    if pool.path:
        CXLPool.remove(pool.path)
    return found


def access(node: int, what: str) -> int:
    return int((NODES / f"node{node}/access0/initiators/{what}").read_text())


def hmat() -> None:
    """Latency, bandwidth, nearest CPUs and tier of the far node, once it is memory."""
    near, far = access(0, "read_latency"), access(FAR, "read_latency")
    print(f"read latency: {near} ns of node 0, {far} ns of node {FAR}", flush=True)
    assert (near, far) == (90, 250)
    assert access(0, "read_bandwidth") > access(FAR, "read_bandwidth") > 0
    nearest = {path.name for path in (NODES / f"node{FAR}/access0/initiators").glob("node*")}
    assert nearest == {"node0"}, nearest
    tiers = {
        path.read_text().strip(): path.parent.name
        for path in Path("/sys/devices/virtual/memory_tiering").glob("*/nodelist")
    }
    print(f"memory tiers: {tiers}", flush=True)
    assert str(FAR) in tiers, "the far node is a tier of its own"


def weighted() -> None:
    """Two pages on the near node, then one on the far one, and so on."""
    if not WEIGHTS.is_dir():
        raise Skip("this kernel has no weighted interleave (Linux 6.9 has)")
    for node, weight in ((0, 2), (FAR, 1)):
        (WEIGHTS / f"node{node}").write_text(str(weight))
    found = pages_of_pool(f"numa:0,{FAR}")
    assert set(found) == {0, FAR}, found
    assert abs(found[0] - 2 * found[FAR]) <= found.total() / 20, found


def pmem() -> Path:
    return wait_until(lambda: sorted(Path("/dev").glob("pmem*")), "/dev/pmem*")[0]


def mount() -> None:
    command(f"/guest/busybox mount -t ext4 -o dax=always {pmem()} {MOUNTED}")


def fsdax() -> None:
    """A pool in a file of ext4 on persistent memory, still there after the next mount."""
    if shutil.which("mkfs.ext4") is None:
        raise Skip("no mkfs.ext4 (Debian: apt-get install e2fsprogs)")
    load("fsdax")
    command(f"mkfs.ext4 -q -F -b 4096 {pmem()}")
    MOUNTED.mkdir()
    mount()
    path = MOUNTED / "far.pool"
    with CXLPool.create(path, layout=LAYOUT, capacity=CAPACITY) as pool:
        publish_texts(pool)
        read_texts(pool)
    command(f"/guest/busybox umount {MOUNTED}")
    mount()
    with CXLPool.open(path, layout=LAYOUT) as pool:
        read_texts(pool)
        assert SYNCHRONOUS in flags_of(str(path)), "it is mapped without MAP_SYNC"
    CXLPool.remove(path)


def in_place() -> None:
    """A pool in a file that is there, where nothing can be made, renamed or removed, as it is for a
    client of famfs; famfs itself is not in this kernel."""
    if not MOUNTED.is_mount():
        raise Skip("no file system with direct access is mounted")
    path, where = MOUNTED / "given", f"dax:{MOUNTED}/given"
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, GIVEN_BYTES)
    before = os.stat(path)
    # The flag comes with e2fsprogs, as mkfs.ext4 does; a later mount finds it still there.
    command(f"chattr +i {MOUNTED}")
    for refused in (
        (MOUNTED / "another").touch,
        partial(path.rename, MOUNTED / "another"),
        path.unlink,
    ):
        assert errno_of(refused) == errno.EPERM
    refusal(SystemCallError, partial(CXLPool.create, MOUNTED / "b", layout=LAYOUT, capacity="8MiB"))
    with CXLPool.create(where, layout=LAYOUT, capacity="all") as pool:
        kind, flags = pool.describe()["page_kind"], flags_of(str(path))
        print(f"{where}: {kind}, flags {sorted(flags)}", flush=True)
        assert kind == "fsdax"
        assert SYNCHRONOUS in flags, "it is mapped without MAP_SYNC"
        publish_texts(pool)
        read_elsewhere(where)
    command(f"/guest/busybox umount {MOUNTED}")
    mount()
    with CXLPool.open(path, layout=LAYOUT) as pool:
        read_texts(pool)
    refusal(PoolExistsError, partial(CXLPool.create, where, layout=LAYOUT, capacity="all"))
    CXLPool.remove(path)
    after = os.stat(path)
    assert (after.st_ino, after.st_size) == (before.st_ino, GIVEN_BYTES)
    assert "zeros" in refusal(NotAPoolError, partial(CXLPool.open, path))
    CXLPool.create(where, layout=LAYOUT, capacity="all").close()
    CXLPool.remove(where)


PARTS = {
    "the pool on /dev/dax": device,
    "the pool over two devices": striped,
    "the pool on the kmem node": far_node,
    "HMAT": hmat,
    "weighted interleave": weighted,
    "the pool on fsdax": fsdax,
    "the pool in place in a file of fsdax": in_place,
}


def main() -> None:
    for name, act in PARTS.items():
        with part(name):
            act()
    end_parts()


if __name__ == "__main__":
    main()
