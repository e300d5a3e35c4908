"""Describes NUMA nodes: their speed, their kind of memory, and the kernel's settings for them.

Only `cxlkv info` asks for this; what a pool asks at each creation is in topology.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cxlkv.machine.sysfs import allowed_nodes, flag, id_list, names, number, read

SPEEDS = ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")  # files of Access


@dataclass(frozen=True)
class Access:
    """Speed of a node's memory, from firmware (HMAT) or device (CDAT); None if neither says.

    Class 0 is as seen by the nearest initiators of any kind, class 1 by the nearest CPUs.
    """

    access_class: int
    initiators: tuple[int, ...]  # their nodes
    read_latency_ns: int | None
    write_latency_ns: int | None
    read_bandwidth_mb_per_s: int | None
    write_bandwidth_mb_per_s: int | None


@dataclass(frozen=True)
class NodeDetails:
    """Details of a node that `NumaNode` does not have."""

    node: int
    online: bool | None
    has_cpus: bool | None
    allowed: bool | None  # this process may have its memory (cpuset); None also if it has none
    accesses: tuple[Access, ...]
    tier: int | None  # of memory_tier4: lower is faster
    weight: int | None  # in weighted interleave
    zones: tuple[str, ...]  # those with memory: DMA, DMA32, Normal, Movable
    offline_blocks_count: int  # pieces of memory that are there, but not handed out

    @property
    def movable_only(self) -> bool:
        """True for memory that the kernel keeps movable: long-term pins move pages away from it."""
        return self.zones == ("Movable",)


@dataclass(frozen=True)
class Numa:
    """All nodes, and the kernel settings that move pages between them; None: not known."""

    nodes: tuple[NodeDetails, ...]
    nodes_offline: tuple[int, ...]  # possible, not online
    nodes_allowed: tuple[int, ...]  # of this process's cpuset; (): not known
    demotion_enabled: bool | None  # cold pages of fast nodes go to slow ones
    balancing: int | None  # 0 off, 1 pages follow their threads, 2 hot ones go to fast nodes
    auto_online: str  # what becomes of new memory: "offline", "online", "online_movable" ...

    def of(self, node: int) -> NodeDetails | None:
        return next((each for each in self.nodes if each.node == node), None)


def probe_nodes(root: Path = Path("/")) -> Numa:
    """Read the nodes of the machine whose procfs and sysfs lie below `root`."""
    folder = root / "sys/devices/system/node"
    online = id_list(read(folder / "online"))
    possible = id_list(read(folder / "possible"))
    # The kernel allows no node before its memory is online: that is not the cpuset's doing.
    with_memory = id_list(read(folder / "has_memory"))
    with_cpus = id_list(read(folder / "has_cpu"))
    allowed = allowed_nodes(root)
    tiers, zones = _tiers(root), _zones(root)
    found = []
    for name in names(folder, r"node[0-9]+"):
        node = int(name.removeprefix("node"))
        found.append(
            NodeDetails(
                node=node,
                online=node in online if online else None,
                has_cpus=node in with_cpus if with_cpus else None,
                allowed=node in allowed if allowed and node in (with_memory or (node,)) else None,
                accesses=_accesses(folder / name),
                tier=tiers.get(node),
                weight=number(root / f"sys/kernel/mm/mempolicy/weighted_interleave/{name}"),
                zones=zones.get(node, ()),
                offline_blocks_count=sum(
                    read(folder / name / block / "state") == "offline"
                    for block in names(folder / name, r"memory[0-9]+")
                ),
            )
        )
    return Numa(
        nodes=tuple(found),
        nodes_offline=tuple(node for node in possible if node not in online) if online else (),
        nodes_allowed=allowed,
        demotion_enabled=flag(root / "sys/kernel/mm/numa/demotion_enabled"),
        balancing=number(root / "proc/sys/kernel/numa_balancing"),
        auto_online=read(root / "sys/devices/system/memory/auto_online_blocks"),
    )


def _accesses(folder: Path) -> tuple[Access, ...]:
    found = []
    for name in names(folder, r"access[01]"):
        inside = folder / name / "initiators"
        nodes = tuple(int(each[4:]) for each in names(inside, r"node[0-9]+"))
        speeds = (number(inside / speed) for speed in SPEEDS)
        found.append(Access(int(name.removeprefix("access")), nodes, *speeds))
    return tuple(found)


def _tiers(root: Path) -> dict[int, int]:
    """The tier of each node that is in one."""
    folder = root / "sys/devices/virtual/memory_tiering"
    return {
        node: int(name.removeprefix("memory_tier"))
        for name in names(folder, r"memory_tier[0-9]+")
        for node in id_list(read(folder / name / "nodelist"))
    }


def _zones(root: Path) -> dict[int, tuple[str, ...]]:
    """The zones of each node that have pages."""
    found: dict[int, tuple[str, ...]] = {}
    node, zone = 0, ""
    for line in read(root / "proc/zoneinfo").splitlines():
        if match := re.match(r"Node ([0-9]{1,5}), zone\s+(\w+)", line):
            node, zone = int(match[1]), match[2]
        elif zone and re.match(r"\s+managed\s+[1-9]", line):
            found[node] = (*found.get(node, ()), zone)
    return found
