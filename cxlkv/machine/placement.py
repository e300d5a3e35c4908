"""Checks on which NUMA nodes a pool can lie, and reads where its pages are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cxlkv import _core
from cxlkv.errors import (
    BadArgumentError,
    MemoryShortError,
    PlacementWarning,
    SystemCallError,
    UnsupportedError,
)
from cxlkv.layout import format_bytes
from cxlkv.machine.sysfs import allowed_nodes, id_list, kilobytes, node_fields, read

NODES_MAX = 64  # the core's limit
POLICIES = {0: "default", 1: "preferred", 2: "bind", 3: "interleave", 4: "local"}
POLICIES |= {5: "preferred_many", 6: "weighted_interleave"}  # by the kernel's number
OPEN_PAGES = 4096  # looked at when a pool is opened or described: some milliseconds
CHECK_PAGES = 65536  # by check()


@dataclass(frozen=True)
class Placement:
    """Nodes on which a pool's pages are, and nodes that it is bound to."""

    policy: str  # "bind", "interleave", "weighted_interleave", or "default": no wish
    wanted_nodes: tuple[int, ...]
    page_bytes: int
    pages_by_node: dict[int, int]  # of those looked at
    pages_unseen: int  # never written, swapped out, or of a device
    pages_elsewhere: int  # on a node that is not wanted

    @property
    def shares(self) -> dict[int, float]:
        """Share of the sampled pages on each node."""
        seen = sum(self.pages_by_node.values())
        return {node: count / seen for node, count in self.pages_by_node.items()}

    def summary(self) -> dict[str, object]:
        """One line for people and for JSON."""
        return {
            "policy": self.policy,
            "wanted_nodes": list(self.wanted_nodes),
            "share_by_node": {str(node): round(share, 4) for node, share in self.shares.items()},
            "pages_elsewhere": self.pages_elsewhere,
            "pages_looked_at": sum(self.pages_by_node.values()) + self.pages_unseen,
            "pages_unseen": self.pages_unseen,
        }


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parse node lists such as "1" or "0,2"; raises BadArgumentError."""
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII):
        raise BadArgumentError(
            f"numa:{text}: a node's number is wanted, or several, as numa:1, numa:0,2 or "
            "numa:1:/dev/shm/my.pool"
        )
    nodes = tuple(int(number) for number in text.split(","))
    if len(set(nodes)) < len(nodes):
        raise BadArgumentError(f"numa:{text}: a node is named twice")
    if max(nodes) >= NODES_MAX:
        raise BadArgumentError(f"numa:{text}: nodes 0 to {NODES_MAX - 1} can be bound")
    return tuple(sorted(nodes))


def mask_of(nodes: tuple[int, ...]) -> int:
    """Return the core's bit mask of these nodes."""
    return sum(1 << node for node in nodes)


def check_nodes(nodes: tuple[int, ...], capacity_bytes: int, root: Path = Path("/")) -> None:
    """Raise when a pool of that size does not fit on these nodes.

    UnsupportedError: a node is not there, is offline or has no memory. SystemCallError: the cpuset
    forbids it. MemoryShortError: too little is free there; asked before, as a bound allocation that
    finds none does not fail: the kernel kills a process. What sysfs hides is left to the kernel.
    """
    folder = root / "sys/devices/system/node"
    online = id_list(read(folder / "online"))
    if not online:
        return
    with_memory = id_list(read(folder / "has_memory"))
    allowed = allowed_nodes(root)
    for node in nodes:
        if node not in online:
            possible = id_list(read(folder / "possible"))
            what = "is offline" if node in possible else "is not there"
            raise UnsupportedError(
                f"numa:{node}: node {node} {what}; this machine has "
                f"{named(online)}. `cxlkv info` shows them"
            )
        if with_memory and node not in with_memory:
            raise UnsupportedError(
                f"numa:{node}: node {node} has no memory; of this machine's nodes "
                f"{named(with_memory)} {'has' if len(with_memory) == 1 else 'have'} some"
            )
        if allowed and node not in allowed:
            raise SystemCallError(
                f"numa:{node}: this process may not use node {node}: its cpuset allows "
                f"{named(allowed)} (Mems_allowed_list in /proc/self/status). In Docker: "
                f"--cpuset-mems; else run it outside numactl or taskset's cgroup"
            )
    share_bytes = capacity_bytes // len(nodes)
    for node in nodes:
        free_bytes = _free_bytes(folder / f"node{node}" / "meminfo")
        if free_bytes is not None and share_bytes > free_bytes:
            raise MemoryShortError(
                f"numa:{','.join(map(str, nodes))}: {format_bytes(share_bytes)} wanted on node "
                f"{node}, which has {format_bytes(free_bytes)} free. Ask for less, or add a node"
            )


def placement_of(handle: _core.Handle, pages_max: int = 0) -> Placement:
    """Sample up to pages_max pages, all when it is 0; SystemCallError where that is not allowed."""
    numbers, pages_on = _core.pool_placed(handle, pages_max)
    wanted = numbers["wanted_nodes"]
    return Placement(
        policy=POLICIES.get(numbers["policy"], str(numbers["policy"])),
        wanted_nodes=tuple(node for node in range(NODES_MAX) if wanted >> node & 1),
        page_bytes=numbers["page_bytes"],
        pages_by_node={node: count for node, count in enumerate(pages_on) if count},
        pages_unseen=numbers["pages_unseen"],
        pages_elsewhere=numbers["pages_elsewhere"],
    )


def warn_of_moves(
    handle: _core.Handle, where: str, nodes: tuple[int, ...] = (), pages_max: int = OPEN_PAGES
) -> None:
    """Warns when pages of a bound pool lie elsewhere, or `nodes` are not those it is bound to."""
    try:
        bound = bool(placement_of(handle, 1).wanted_nodes)
        found = placement_of(handle, pages_max if bound else 1)
    except SystemCallError:  # a container may forbid to ask
        if nodes:
            raise
        return
    if nodes and found.wanted_nodes != nodes:
        there = named(found.wanted_nodes) if found.wanted_nodes else "no nodes"
        warnings.warn(
            f"{where}: bound to {there}, not to {named(nodes)}: it was made so. Make it anew to "
            "have it elsewhere",
            PlacementWarning,
            stacklevel=3,
        )
    if found.pages_elsewhere:
        seen = sum(found.pages_by_node.values())
        there = ", ".join(f"{share:.1%} on node {n}" for n, share in found.shares.items())
        warnings.warn(
            f"{where}: {found.pages_elsewhere} of {seen} pages are no longer on "
            f"{named(found.wanted_nodes)}, where the pool is bound: {there}. The kernel moved "
            "them (demotion: /sys/kernel/mm/numa/demotion_enabled; or migratepages, a cpuset)",
            PlacementWarning,
            stacklevel=3,
        )


def durable_note(durable: str, page_kind: str) -> str:
    """What durable="host" does not reach where the mapping is not of far memory itself; or ""."""
    if durable != "host" or page_kind in ("devdax", "fsdax"):
        return ""
    return (
        f"durable='host', but the memory is {page_kind}: what is written back survives its "
        "processes, not a loss of power. A dax device does, or a file on a file system that gives "
        "MAP_SYNC (ext4 or xfs with dax, famfs)"
    )


def named(nodes: Sequence[int]) -> str:
    """Format nodes for people: "node 1", "nodes 0, 2"."""
    return f"node{'s' if len(nodes) != 1 else ''} {', '.join(map(str, nodes))}"


def _free_bytes(path: Path) -> int | None:
    """Free bytes of a node: what is free, and the page cache, which the kernel drops on demand."""
    info = node_fields(path)
    free_bytes = kilobytes(info.get("MemFree"))
    if free_bytes is None:
        return None
    cache = (kilobytes(info.get(name)) or 0 for name in ("Active(file)", "Inactive(file)"))
    return free_bytes + sum(cache)
