"""Pools on NUMA nodes: bound, verified, read back; what is asked for wrongly is refused by name.

What needs two nodes skips on a machine with one; `make test-drivers` has a guest with two, where
tests/support/numa_guest.py runs the same without pytest.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, _core
from cxlkv.errors import (
    BadArgumentError,
    MemoryShortError,
    PlacementWarning,
    SystemCallError,
    UnsupportedError,
)
from cxlkv.machine import placement
from cxlkv.machine.regions import Place, parse_place

from ..support import numa_guest

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16")
NODES = Path("/sys/devices/system/node")


def nodes_or_skip(count: int) -> list[int]:
    """Nodes of this machine on which this process may bind; skips where there are fewer."""
    found = numa_guest.nodes_here()
    if len(found) < count:
        pytest.skip(f"{len(found)} NUMA nodes with memory may be bound here, {count} needed")
    return found


@pytest.fixture
def node() -> int:
    return nodes_or_skip(1)[0]


def test_what_a_place_says() -> None:
    assert parse_place("numa:1") == Place(None, (1,))
    assert parse_place("numa:2,0") == Place(None, (0, 2))
    assert parse_place("numa:1:/dev/shm/a.pool") == Place("/dev/shm/a.pool", (1,))
    assert parse_place("/dev/shm/a.pool") == Place("/dev/shm/a.pool")
    for text in ("numa:", "numa:x", "numa:-1", "numa:1,", "numa:1:", "numa:1 ", "numa:٣", "numa:,"):
        with pytest.raises(BadArgumentError):
            parse_place(text)
    with pytest.raises(BadArgumentError, match="named twice"):
        parse_place("numa:1,1")
    with pytest.raises(BadArgumentError, match="nodes 0 to 63"):
        parse_place("numa:64")
    with pytest.raises(UnsupportedError, match="keep their memory where it is"):
        parse_place("numa:1:dax:/dev/a+/dev/b")


def test_an_anonymous_pool_is_bound_and_read_back(node: int) -> None:
    with CXLPool.create(f"numa:{node}", layout=LAYOUT, capacity="16MiB") as pool:
        found = placement.placement_of(pool._handle)
        assert (found.policy, found.wanted_nodes) == ("bind", (node,))
        geometry = pool.pages.geometry
        pages = -(-geometry["region_bytes"] // found.page_bytes)
        assert found.pages_by_node == {node: pages}
        assert found.shares == {node: 1.0}
        assert found.pages_unseen == found.pages_elsewhere == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pool.admin.check()["clean"]
            assert pool.admin.check(deep=True)["clean"]


def test_a_file_keeps_its_nodes_for_whoever_opens_it(node: int, path: Path) -> None:
    """The policy is the file's: a process that knows the path only reads the same back."""
    keys = np.ones((40, 2, 64), np.float16)
    with CXLPool.create(f"numa:{node}:{path}", layout=LAYOUT, capacity="16MiB") as pool:
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, keys, keys)
        with CXLPool.open(path) as other, CXLPool.open(f"numa:{node}:{path}") as third:
            assert len(other.adopt(sequence.handle)) == 40
            for opened in (other, third):
                found = placement.placement_of(opened._handle, 1000)
                assert (found.policy, found.wanted_nodes) == ("bind", (node,))
                assert found.pages_by_node == {node: 1000}
                assert not found.pages_unseen
                told = cast("dict[str, object]", opened.describe()["placement"])
                assert told["share_by_node"] == {str(node): 1.0}
                assert told["policy"] == "bind"
    CXLPool.remove(f"numa:{node}:{path}")
    assert not path.exists()


def test_without_a_wish_nothing_is_touched() -> None:
    """describe() of a sparse pool must not take the memory that the pool does not use yet."""
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="64MiB") as pool:
        found = placement.placement_of(pool._handle)
        assert found.policy == "default"
        assert found.wanted_nodes == ()
        if pool.describe()["page_kind"] == "4KiB":
            assert found.pages_unseen > 10_000
            assert found == placement.placement_of(pool._handle)


def test_the_wrong_node_is_told_when_a_pool_is_opened(node: int, path: Path) -> None:
    """A pool that was made without nodes, opened as if it had been made on one."""
    with CXLPool.create(path, layout=LAYOUT, capacity="16MiB"):
        with pytest.warns(PlacementWarning, match=f"bound to no nodes, not to node {node}"):
            CXLPool.open(f"numa:{node}:{path}").close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CXLPool.open(path).close()


def test_moved_pages_are_told(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is replaced, as one node has nowhere to move a page to."""
    pool = CXLPool.create(f"numa:{node}", layout=LAYOUT, capacity="16MiB")
    true = _core.pool_placed

    def moved(handle: object, pages_max: int) -> tuple[dict[str, int], list[int]]:
        numbers, pages_on = true(handle, pages_max)
        pages_on[node], pages_on[node + 1] = pages_on[node] - 1, 1
        return numbers | {"pages_elsewhere": 1}, pages_on

    monkeypatch.setattr(_core, "pool_placed", moved)
    with pool, pytest.warns(PlacementWarning, match=r"1 of \d+ pages are no longer on node"):
        pool.admin.check()


def test_a_file_system_without_policies_is_refused(node: int, tmp_path: Path) -> None:
    kinds = {m.split()[1]: m.split()[2] for m in Path("/proc/mounts").read_text().splitlines()}
    folder = next(str(p) for p in [tmp_path, *tmp_path.parents] if str(p) in kinds)
    if kinds[folder] in ("tmpfs", "hugetlbfs"):
        pytest.skip(f"{tmp_path} is on {kinds[folder]}, which has policies")
    with pytest.raises(SystemCallError, match="have no NUMA policy: choose a path on tmpfs"):
        CXLPool.create(f"numa:{node}:{tmp_path / 'a.pool'}", layout=LAYOUT, capacity="16MiB")
    assert list(tmp_path.iterdir()) == []


def machine(tmp_path: Path, allowed: str = "0-1", free_kib: int = 4096) -> Path:
    """A machine of nodes 0 and 1 with memory, 2 with CPUs only, and 3 offline."""
    folder = tmp_path / "sys/devices/system/node"
    folder.mkdir(parents=True)
    for name, text in {"online": "0-2", "has_memory": "0-1", "possible": "0-3"}.items():
        (folder / name).write_text(text + "\n")
    for node in range(2):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}/meminfo").write_text(
            f"Node {node} MemTotal:  9000000 kB\nNode {node} MemFree:  {free_kib} kB\n"
            f"Node {node} Active(file):  1024 kB\nNode {node} Inactive(file):  1024 kB\n"
            f"Node {node} Active:  99999 kB\n"
        )
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
    return tmp_path


def test_a_node_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    root = machine(tmp_path)
    placement.check_nodes((0, 1), 12 << 20, root)  # 6 MiB of each, page cache included
    with pytest.raises(UnsupportedError, match="node 7 is not there; this machine has nodes 0, 1"):
        placement.check_nodes((7,), 1, root)
    with pytest.raises(UnsupportedError, match="node 3 is offline"):
        placement.check_nodes((3,), 1, root)
    with pytest.raises(UnsupportedError, match=r"node 2 has no memory; of this .* nodes 0, 1 have"):
        placement.check_nodes((0, 2), 1, root)
    with pytest.raises(MemoryShortError, match="8 MiB wanted on node 1, which has 6 MiB free"):
        placement.check_nodes((1,), 8 << 20, root)
    with pytest.raises(MemoryShortError, match=r"numa:0,1: 6.5 MiB wanted on node 0"):
        placement.check_nodes((0, 1), 13 << 20, root)


def test_a_cpuset_that_forbids_a_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemCallError, match=r"its cpuset allows node 0 .*--cpuset-mems"):
        placement.check_nodes((1,), 1, machine(tmp_path, allowed="0"))


def test_where_sysfs_is_masked_the_kernel_decides(tmp_path: Path) -> None:
    placement.check_nodes((5,), 1 << 60, tmp_path)
    broken = machine(tmp_path)
    for text in ("", "0-", "x", "0--1", "0,"):
        (broken / "sys/devices/system/node/has_memory").write_text(text)
        (broken / "proc/self/status").write_text(f"Mems_allowed_list:\t{text}\n")
        placement.check_nodes((0,), 1, broken)


def test_an_absent_node_is_refused_by_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """mbind's own EINVAL, where nothing was checked before."""
    nodes_or_skip(1)
    absent = max(int(name.name[4:]) for name in NODES.glob("node[0-9]*")) + 1
    monkeypatch.setattr("cxlkv.pool.base.check_nodes", lambda nodes, capacity_bytes: None)
    for where in (f"numa:{absent}", f"numa:{absent},{absent + 1}"):
        with pytest.raises(SystemCallError, match=r"cannot bind memory .* has no memory, or this"):
            CXLPool.create(where, layout=LAYOUT, capacity="16MiB")


def test_a_node_without_room_names_its_free_bytes(node: int) -> None:
    with pytest.raises(
        MemoryShortError, match=rf"numa:{node}: 900 TiB wanted on node {node}, which has .*B free"
    ):
        CXLPool.create(f"numa:{node}", layout=LAYOUT, capacity="900TiB")


def test_pools_on_two_nodes() -> None:
    """All of tests/support/numa_guest.py, in this process."""
    nodes_or_skip(2)
    assert numa_guest.main() == 0


def test_a_durable_pool_says_what_its_memory_does_not_keep(path: Path) -> None:
    """No file system here gives MAP_SYNC; fsdax is `make test-drivers`."""
    with CXLPool.create(path, layout=LAYOUT, capacity="16MiB", durable="host") as pool:
        described = pool.describe()
        assert described["page_kind"] in ("4KiB", "thp")
        assert "not a loss of power" in str(described["note"])
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB") as pool:
        assert "note" not in pool.describe()
    assert placement.durable_note("host", "fsdax") == placement.durable_note("host", "devdax") == ""
