"""Pools on two NUMA nodes: `python -m tests.support.numa_guest`, in a guest or where there are two.

No pytest and no torch, as a guest has neither: numpy and the package. Exit status 0: all held, 1:
one did not, 77: fewer than two nodes are here, and what one node can show was shown.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import PlacementWarning, UnsupportedError
from cxlkv.machine.placement import placement_of

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=64, dtype="float16")
CAPACITY_BYTES = 24 << 20
TOKENS = 200
SKIPPED = 77
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # system call numbers
MOVE = 2  # MPOL_MF_MOVE


def ids(text: str) -> list[int]:
    """The numbers in "0-1,4"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def nodes_here() -> list[int]:
    """Nodes with memory that this process may bind to."""
    try:
        with_memory = ids(Path("/sys/devices/system/node/has_memory").read_text())
        status = Path("/proc/self/status").read_text()
        allowed = next(line for line in status.splitlines() if line.startswith("Mems_allowed_list"))
        nodes = [node for node in ids(allowed.partition(":")[2]) if node in with_memory]
        CXLPool.create(f"numa:{nodes[0]}", layout=LAYOUT, capacity=CAPACITY_BYTES).close()
    except (OSError, StopIteration, IndexError):  # masked, or a container forbids mbind
        return []
    return nodes


def use(pool: CXLPool) -> None:
    """Appends, selects over all and attends; the answer is what numpy says."""
    random = np.random.default_rng(7)
    k, v = (random.standard_normal((TOKENS, 4, 64)).astype(np.float16) for _ in range(2))
    q = random.standard_normal((4, 64)).astype(np.float16)
    sequence = pool.sequence()
    for layer in range(2):
        sequence.append(layer, k, v)
    out, _ = sequence.attend(1, q, scale=0.125)
    logits = np.einsum("hd,thd->ht", q.astype(np.float32), k.astype(np.float32)) * 0.125
    weights = np.exp(logits - logits.max(1, keepdims=True))
    wanted = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v.astype(np.float32))
    assert np.abs(np.asarray(out, np.float32) - wanted).max() < 0.01
    assert pool.admin.check(deep=True)["clean"]


def bound(node: int) -> None:
    for where in (f"numa:{node}", f"numa:{node}:/dev/shm/cxlkv-numa-{os.getpid()}.pool"):
        with CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY_BYTES) as pool:
            found = placement_of(pool._handle)
            assert found.pages_by_node.keys() == {node}, found
            assert (found.policy, found.wanted_nodes, found.pages_unseen) == ("bind", (node,), 0)
            use(pool)
            if pool.path:
                with CXLPool.open(pool.path) as other:
                    assert placement_of(other._handle) == found
        if pool.path:
            CXLPool.remove(pool.path)


def interleaved(nodes: list[int]) -> None:
    where = f"numa:{','.join(map(str, nodes))}"
    with CXLPool.create(where, layout=LAYOUT, capacity=CAPACITY_BYTES) as pool:
        found = placement_of(pool._handle)
        assert found.policy in ("interleave", "weighted_interleave"), found
        assert found.wanted_nodes == tuple(nodes) == tuple(found.pages_by_node), found
        if set(weights(nodes)) == {1}:
            most, least = max(found.pages_by_node.values()), min(found.pages_by_node.values())
            assert most - least <= 512, found  # as much as a huge page may differ
        print(f"    {found.policy}: {found.pages_by_node}")
        use(pool)


def weights(nodes: list[int]) -> list[int]:
    """Weights as the kernel has them; 1 each where it knows none."""
    folder = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
    try:
        return [int((folder / f"node{node}").read_text()) for node in nodes]
    except (OSError, ValueError):
        return [1] * len(nodes)


def moved(node: int, other: int) -> None:
    """Pages are moved as the kernel would, by move_pages(); check() and open() tell."""
    path = f"/dev/shm/cxlkv-numa-moved-{os.getpid()}.pool"
    with CXLPool.create(f"numa:{node}:{path}", layout=LAYOUT, capacity=CAPACITY_BYTES) as pool:
        pages = move_all(pool, other)
        looks: list[Callable[[], object]] = [pool.admin.check, lambda: CXLPool.open(path).close()]
        for look in looks:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                look()
            texts = [str(w.message) for w in told if w.category is PlacementWarning]
            assert len(texts) == 1, texts
            assert f"no longer on node {node}" in texts[0], texts
        found = placement_of(pool._handle)
        assert found.shares.get(other, 0) > 0.9, found
        print(f"    {pages} pages moved; {texts[0]}")
    CXLPool.remove(path)


def move_all(pool: CXLPool, node: int) -> int:
    """Moves the pool's pages to a node behind its back; returns how many there are."""

    address, size = pool.pages.memory()
    count = size // 4096
    pages = (ctypes.c_void_p * count)(*(address + 4096 * i for i in range(count)))
    nodes, status = (ctypes.c_int * count)(*([node] * count)), (ctypes.c_int * count)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = MOVE_PAGES[platform.machine()]
    code = call(number, 0, ctypes.c_ulong(count), pages, nodes, status, MOVE)
    assert code >= 0, os.strerror(ctypes.get_errno())
    return sum(1 for at in status if at == node)


def absent(nodes: list[int]) -> None:
    said = ""
    try:
        CXLPool.create("numa:63", layout=LAYOUT, capacity=CAPACITY_BYTES).close()
    except UnsupportedError as error:
        said = str(error)
    print(f"    {said}")
    assert said.startswith("numa:63: node 63 is not there")
    assert all(str(node) in said for node in nodes)


def emulated(node: int) -> None:
    """CXLKV_EMULATE=numa:N for a program that knows nothing of nodes."""
    program = (
        "import os, sys; from tests.support import numa_guest as g; from cxlkv import CXLPool;"
        "from cxlkv.machine import numa_mode as numa;"
        "from cxlkv.machine.placement import placement_of;"
        f"pool = CXLPool.create('anonymous:', layout=g.LAYOUT, capacity={CAPACITY_BYTES});"
        f"g.use(pool); print(numa.label(({node},)), os.sched_getaffinity(0));"
        f"assert placement_of(pool._handle).pages_by_node.keys() == {{{node}}};"
        f"assert os.sched_getaffinity(0) == numa.near_cpus(({node},))"
    )
    environment = {**os.environ, "CXLKV_EMULATE": f"numa:{node}"}
    folder = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"    {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr


def main() -> int:
    """Runs all that these nodes allow; returns the exit status."""
    nodes = nodes_here()
    two = len(nodes) >= 2
    steps: list[tuple[str, Callable[[], None]]] = [
        *((f"bound to node {node}", lambda node=node: bound(node)) for node in nodes[:2]),
        ("an absent node is refused", lambda: absent(nodes)),
    ]
    if two:
        steps.append(("interleaved", lambda: interleaved(nodes[:2])))
        steps.append(("NUMA mode", lambda: emulated(nodes[1])))
        steps.append(("moved behind our back", lambda: moved(nodes[1], nodes[0])))
    failed = 0
    for name, step in steps:
        try:
            step()
        except Exception as error:
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}")
        else:
            print(f"PASS {name}")
    if not two:
        print(f"SKIP two nodes: {len(nodes)} with memory may be bound here")
    return 1 if failed else 0 if two else SKIPPED


if __name__ == "__main__":
    sys.exit(main())
