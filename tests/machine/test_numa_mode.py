"""NUMA mode: pools on the far node, all threads on CPUs of the others. Machines are recorded trees;
what needs two true nodes is in tests/support/numa_guest.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.machine import numa_mode

from ..support import numa_guest

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16")
CPUS = sorted(os.sched_getaffinity(0))


def machine(root: Path, nodes: dict[int, tuple[list[int], str]]) -> Path:
    """A machine whose nodes have these CPUs and distances."""
    for node, (cpus, distances) in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cpus)) + "\n")
        (folder / "distance").write_text(distances + "\n")
    return root


def test_a_node_without_cpus_is_far_from_all(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: (CPUS, "10 24"), 2: ([], "24 10")})
    assert numa_mode.near_cpus((2,), root) == set(CPUS)
    assert numa_mode.label((2,), root) == "numa:2, distance 24"


def test_another_socket_leaves_its_cpus_idle(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: (CPUS[:1], "10 21"), 1: ([*CPUS[1:], 999], "21 10")})
    assert numa_mode.near_cpus((1,), root) == {CPUS[0]}
    assert numa_mode.label((1,), root) == "numa:1, distance 21"


def test_fake_nodes_share_their_cpus(tmp_path: Path) -> None:
    """With numa=fake=2 each node names all CPUs of its socket, all distances are 10."""
    root = machine(tmp_path, {0: (CPUS, "10 10"), 1: (CPUS, "10 10")})
    assert numa_mode.near_cpus((1,), root) == set(CPUS)
    assert numa_mode.label((1,), root) == "numa:1, distance 10"


def test_nothing_is_far_on_one_node(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: (CPUS, "10")})
    count = f"{len(CPUS)} CPU{'s' if len(CPUS) > 1 else ''}"
    with pytest.raises(UnsupportedError, match=rf"no CPU outside node 0, .* node 0 \({count}\)"):
        numa_mode.near_cpus((0,), root)
    with pytest.raises(UnsupportedError, match=rf"numa:1: node 1 is not there.* 0 \({count}\)"):
        numa_mode.near_cpus((1,), root)
    with pytest.raises(UnsupportedError, match=r"numa:1,3: nodes 1, 3 are not there"):
        numa_mode.begin((1, 3), root)
    with pytest.raises(UnsupportedError, match=r"no nodes that it shows"):
        numa_mode.near_cpus((0,), tmp_path / "nowhere")


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "astera-a1000", "astera-a1000, virtual"):
        monkeypatch.setenv("CXLKV_EMULATE", text)
        assert numa_mode.from_environment() == ()
    monkeypatch.setenv("CXLKV_EMULATE", " numa:2,1 ")
    assert numa_mode.from_environment() == (1, 2)
    monkeypatch.setenv("CXLKV_EMULATE", "numa:far")
    with pytest.raises(BadArgumentError, match=r"CXLKV_EMULATE=numa:far: .*a node's number"):
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB")


def test_a_pool_is_not_made_near_when_far_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 63 is nowhere: the variable is not passed over."""
    monkeypatch.setenv("CXLKV_EMULATE", "numa:63")
    with pytest.raises(UnsupportedError, match=r"numa:63: node 63 is not there"):
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB")


def test_all_threads_move_to_the_near_cpus(tmp_path: Path) -> None:
    """Those that run already, and those that a pool starts later."""
    if len(CPUS) < 2:
        pytest.skip("one CPU: there is none to leave")
    machine(tmp_path, {0: (CPUS[:1], "10 21"), 1: (CPUS[1:], "21 10")})
    program = textwrap.dedent(
        f"""
        import os, threading
        from pathlib import Path
        import numpy as np
        from cxlkv import CXLPool, KVLayout
        from cxlkv.machine import numa_mode
        stay, started = threading.Event(), threading.Barrier(4)
        for _ in range(3):
            threading.Thread(target=lambda: (started.wait(), stay.wait()), daemon=True).start()
        started.wait()
        assert numa_mode.begin((1,), Path({str(tmp_path)!r})) == {{{CPUS[0]}}}
        layout = KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float16")
        with CXLPool.create("anonymous:", layout=layout, capacity="16MiB", threads=4) as pool:
            keys = np.ones((600, 2, 64), np.float16)
            sequence = pool.sequence()
            for layer in range(2):
                sequence.append(layer, keys, keys)
            sequence.attend(0, np.ones((2, 64), np.float16))
            threads = [int(name) for name in os.listdir("/proc/self/task")]
            cpus = [os.sched_getaffinity(thread) for thread in threads]
        stay.set()
        print(len(threads), cpus)
        assert len(threads) > 4 and all(c == {{{CPUS[0]}}} for c in cpus), cpus
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_runs_with_its_pools_far() -> None:
    nodes = numa_guest.nodes_here()
    if len(nodes) < 2:
        pytest.skip(f"{len(nodes)} NUMA nodes with memory may be bound here, 2 needed")
    numa_guest.emulated(nodes[1])
