"""NUMA mode: the memory of another node stands for far memory, and that node's CPUs stay idle.

    CXLKV_EMULATE=numa:1 python serve.py

puts all pools that the program makes on node 1, verified, and keeps all its threads on the CPUs of
the other nodes. Far is another socket, or a node without CPUs (a true CXL expander); under the
kernel's numa=fake=2 all is as in earnest but the latency. What remote DRAM does not show of CXL:
docs/how-to/placement.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine.placement import named, parse_nodes
from cxlkv.machine.regions import Place
from cxlkv.machine.topology import NumaNode, probe

VARIABLE = "CXLKV_EMULATE"
SCHEME = "numa:"
ATTEMPTS = 16


def is_mode(text: str | None) -> TypeGuard[str]:
    """Tell whether CXLKV_EMULATE means NUMA mode; otherwise it names a link."""
    return text is not None and text.startswith(SCHEME)


def parse(text: str) -> tuple[int, ...]:
    """Parse the far nodes of "numa:1"; raises BadArgumentError."""
    return parse_nodes(text.removeprefix(SCHEME))


def from_environment() -> tuple[int, ...]:
    """Return the far nodes that CXLKV_EMULATE asks for; () when it is unset or names a link."""
    text = os.environ.get(VARIABLE, "").strip()
    if not is_mode(text):
        return ()
    try:
        return parse(text)
    except BadArgumentError as error:
        raise BadArgumentError(f"{VARIABLE}={text}: {error}") from None


def emulated(place: Place) -> Place:
    """Where a pool goes that is made at `place`, or is expected to lie that is opened there: as
    CXLKV_EMULATE says, unless the place names nodes itself. Then the threads are near ones."""
    nodes = from_environment()
    if not nodes:
        return place
    begin(nodes)
    return place._replace(nodes=place.nodes or nodes)


def near_cpus(nodes: tuple[int, ...], root: Path = Path("/")) -> frozenset[int]:
    """The CPUs that this process may use and that belong to a node other than `nodes`.

    Under numa=fake all nodes of a socket name the same CPUs, so none of them is idle: there is no
    other that is nearer. Raises UnsupportedError when a node is not there or none is left.
    """
    there = probe(root).nodes
    absent = [node for node in nodes if node not in {n.node for n in there}]
    if absent:
        raise UnsupportedError(
            f"numa:{','.join(map(str, nodes))}: {named(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not there; this machine has {_with_cpus(there)}"
        )
    cpus = {cpu for node in there if node.node not in nodes for cpu in node.cpus}
    near = frozenset(cpus & os.sched_getaffinity(0))
    if not near:
        raise UnsupportedError(
            f"numa:{','.join(map(str, nodes))}: this process has no CPU outside {named(nodes)}, so "
            f"nothing is far from it. This machine has {_with_cpus(there)}. A kernel started with "
            "numa=fake=2 has two nodes; a profile emulates a link on one (CXLKV_EMULATE=PROFILE)"
        )
    return near


def begin(nodes: tuple[int, ...], root: Path = Path("/")) -> frozenset[int]:
    """Keep all threads of this process, and those that it starts from now on, off the CPUs of
    `nodes`; returns the CPUs that they may use. Raises UnsupportedError as near_cpus()."""
    near = near_cpus(nodes, root)
    for _ in range(ATTEMPTS):  # a thread that starts meanwhile may have the old CPUs
        threads = map(int, os.listdir("/proc/self/task"))
        stray = [thread for thread in threads if not _runs_within(thread, near)]
        if not stray:
            break
        for thread in stray:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, near)
    return near


def _runs_within(thread: int, cpus: frozenset[int]) -> bool:
    try:
        return os.sched_getaffinity(thread) <= cpus
    except ProcessLookupError:
        return True


def label(nodes: tuple[int, ...], root: Path = Path("/")) -> str:
    """Describe the far nodes for results, with the kernel's distances from the CPUs."""
    near = near_cpus(nodes, root)
    there = probe(root).nodes
    places = {node.node: place for place, node in enumerate(there)}
    distances = {
        node.distances[places[far]]
        for node in there
        for far in nodes
        if near & set(node.cpus) and node.node not in nodes and len(node.distances) == len(there)
    }
    text = f"numa:{','.join(map(str, nodes))}"
    return text + (f", distance {min(distances)}" if distances else "")


def _with_cpus(nodes: tuple[NumaNode, ...]) -> str:
    if not nodes:
        return "no nodes that it shows"
    cpus = (f"{n.node} ({len(n.cpus)} CPU{'s' if len(n.cpus) != 1 else ''})" for n in nodes)
    return f"node{'s' if len(nodes) != 1 else ''} {', '.join(cpus)}"
