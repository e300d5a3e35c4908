"""Whose threads run a step's tasks, where the process has loaded an OpenMP runtime for one library
alone, as wheels with a runtime of their own do."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, sys, threading
import numpy as np
from cxlkv import Budget, CXLPool, KVLayout

runtime = ctypes.CDLL("libgomp.so.1")  # not in the global scope
runtime.omp_set_num_threads(2)
nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda context: None)
if sys.argv[1] == "team":
    runtime.GOMP_parallel(nothing, None, 0, 0)
if sys.argv[1] == "parent":
    runtime.GOMP_parallel(nothing, None, 0, 0)
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    over = threading.Event()
    for _ in range(3):
        threading.Thread(target=over.wait, daemon=True).start()
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
layout = KVLayout(layers=1, kv_heads=4, head_dim=64, page_tokens=16, dtype="float32")
rows = np.random.default_rng(0).random((4096, 4, 64), np.float32)
with CXLPool.create("anonymous:", layout=layout, capacity="16MiB", threads=2) as pool:
    sequence = pool.sequence()
    sequence.append(0, rows, rows)
    for _ in range(3):
        pool.batch([sequence]).attend(0, rows[:1], [0, 1])
    print(threads() - before)
    sequence.release()
"""


@pytest.mark.parametrize(("who", "more"), [("team", 0), ("nobody", 1), ("parent", 1)])
def test_a_team_is_found_and_none_is_started(who: str, more: int) -> None:
    """Where there is none, the pool has a thread of its own, and the runtime none. In a child, the
    runtime would wait for the team of the parent."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, who], capture_output=True, text=True, timeout=60
    )
    if "libgomp.so.1: cannot open" in done.stderr:
        pytest.skip("no libgomp here")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == more
