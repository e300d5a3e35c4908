"""The pool on a kmem node, over weighted nodes and on fsdax; HMAT: python -m ... a.

Nodes 0 and 1 have a CPU each. Node 2 is far memory, /dev/dax0.0 until kmem has it. Persistent
memory is the legacy kind (memmap=).
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from cxlkv import CXLPool
from cxlkv.emulation.qemu.guest.placement import NODES, WEIGHTS, flags_of, pages_by_node
from cxlkv.emulation.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    Skip,
    append,
    assert_holds,
    bind_device,
    command,
    end_parts,
    load,
    make_system_ram,
    part,
    refusal,
    token_ids,
    wait_until,
)
from cxlkv.errors import UnsupportedError

FAR, ABSENT = 2, 9  # nodes
TEXTS = {1: 40 * 16, 2: 7 * 16}  # seed of a published text, and its tokens
CAPACITY = "32MiB"
MOUNTED = Path("/run/pmem")
SYNCHRONOUS = "sf"  # among the flags of a mapping: MAP_SYNC, which only direct access gives


def publish(pool: CXLPool) -> None:
    for seed, tokens in TEXTS.items():
        sequence = pool.sequence()
        append(sequence, seed, tokens)
        pool.publish_prefix(sequence, token_ids(seed, tokens))
        sequence.release()


def read(pool: CXLPool) -> None:
    for seed, tokens in TEXTS.items():
        with pool.match_prefix(token_ids(seed, tokens)) as hit:
            assert_holds(hit.sequence(), seed, tokens)
    assert pool.check(deep=True)["clean"]


def device() -> None:
    bind_device()
    with CXLPool.create(DEVICE, layout=LAYOUT, capacity="all", force=True) as pool:
        assert pool.describe()["page_kind"] == "devdax"
        publish(pool)
        read(pool)
    CXLPool.remove(DEVICE)


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
        publish(pool)
        read(pool)
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


def fsdax() -> None:
    """A pool in a file of ext4 on persistent memory, still there after the next mount."""
    if shutil.which("mkfs.ext4") is None:
        raise Skip("no mkfs.ext4 (Debian: apt-get install e2fsprogs)")
    load("fsdax")
    there = wait_until(lambda: sorted(Path("/dev").glob("pmem*")), "/dev/pmem*")
    command(f"mkfs.ext4 -q -F -b 4096 {there[0]}")
    MOUNTED.mkdir()
    mount = f"/guest/busybox mount -t ext4 -o dax=always {there[0]} {MOUNTED}"
    command(mount)
    path = MOUNTED / "far.pool"
    with CXLPool.create(path, layout=LAYOUT, capacity=CAPACITY) as pool:
        publish(pool)
        read(pool)
    command(f"/guest/busybox umount {MOUNTED}")
    command(mount)
    with CXLPool.open(path, layout=LAYOUT) as pool:
        read(pool)
        assert SYNCHRONOUS in flags_of(str(path)), "it is mapped without MAP_SYNC"
    CXLPool.remove(path)


def main() -> None:
    with part("the pool on /dev/dax"):
        device()
    with part("the pool on the kmem node"):
        far_node()
    with part("HMAT"):
        hmat()
    with part("weighted interleave"):
        weighted()
    with part("the pool on fsdax"):
        fsdax()
    end_parts()


if __name__ == "__main__":
    main()
