"""Containers: processes that share a pool and not all else of the machine.

Goal: other mounts, PID and time namespaces than those of the pool's other users cost nobody a page,
a slot or a wrong answer. Method: real processes under unshare(1), and skipped where that is not
allowed. New features with state of their own beside a pool add their case here.
"""

from __future__ import annotations

import functools
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, ObjectPool
from cxlkv.stats import inspect

from .support.processes import Child, python
from .support.texts import DIM, HEADS, SMALL, grown
from .support.waiting import until

LAYOUT = KVLayout.objects("4KiB")


@functools.cache
def may_unshare(*flags: str) -> bool:
    done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    return done.returncode == 0


def needs(*flags: str) -> pytest.MarkDecorator:
    why = f"unshare {' '.join(flags)} is not allowed here"
    return pytest.mark.skipif(not may_unshare(*flags), reason=why)


# ---- mounts ----

# Two file systems that number their files alike, and a copy of a pool that is in use.
COPIED = """
import os, shutil, subprocess, sys
from cxlkv import ObjectPool, KVLayout
folders = ["one", "two"]
for folder in folders:
    os.mkdir(folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
ours, copy = "one/a.pool", "two/b.pool"
pool = ObjectPool.create(ours, layout=KVLayout.objects("64KiB"), capacity="8MiB", threads=1)
for i in range(8):
    pool.put(f"k{i}", bytes([i]) * 50000)
while True:  # until it has the number that the original has
    shutil.copyfile(ours, copy)
    found, wanted = os.stat(copy).st_ino, os.stat(ours).st_ino
    if found == wanted:
        break
    assert found < wanted, "no luck with the numbers"
    os.rename(copy, f"{copy}.{found}")
    if os.path.exists(f"{copy}.{found - 1}"):
        os.unlink(f"{copy}.{found - 1}")

def other(path, text):
    code = "from cxlkv import ObjectPool, object_keys\\n"
    code += f"with ObjectPool.open({path!r}, threads=1) as pool:\\n"
    subprocess.run([sys.executable, "-c", code + text], check=True)

# Its nonce is the original's, whose users have it: a copy is nobody's.
other(copy, '''
    assert pool.stats()["processes"] == 1, pool.stats()
    assert pool.admin.check()["clean"], pool.admin.check()
    pool.forget(object_keys(["k3"]))
    for i in range(3):
        pool.put(f"new{i}", b"new" * 1000)
''')
other(ours, '''
    assert pool.stats()["processes"] == 2, pool.stats()
    pool.put("third", b"3" * 100)
''')
for i in range(8):
    into = bytearray(50000)
    assert pool.get_into(f"k{i}", into) is not None
    assert bytes(into) == bytes([i]) * 50000, i
assert pool.get_into("third", into) is not None
assert pool.get_into("new0", into) is None
assert pool.admin.check()["clean"], pool.admin.check()
pool.close()
print("apart")
"""


@needs("-m")
def test_a_copy_on_another_file_system_is_another_pool(tmp_path: Path) -> None:
    """Also with the number of the original's file, and while that is in use."""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{COPIED}"
    assert python(code, before=("unshare", "-m")) == "apart\n"


# ---- hosts ----

OWN_MEMORY = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
"""A container with its own /dev/shm is a host of its own."""
ANY_HOST = """
import sys
from cxlkv import ObjectPool
print("here", flush=True)
sys.stdin.readline()
pool = ObjectPool.open(sys.argv[1], host="auto", threads=1)
for _ in sys.stdin:
    print(*(host.number for host in pool.admin.hosts() if host.is_self), flush=True)
"""


@needs("-m")
def test_containers_that_start_at_once_are_different_hosts(tmp_path: Path) -> None:
    path, count = tmp_path / "a.pool", 4
    ObjectPool.create(
        path,
        layout=LAYOUT,
        capacity="16MiB",
        sharing="software",
        hosts=count,
        host="auto",
        threads=1,
    ).close()
    before = ("unshare", "-m", "sh", "-c", OWN_MEMORY, "sh")
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("-c", ANY_HOST, path, before=before)) for _ in range(count)
        ]
        assert {child.hear() for child in children} == {"here"}
        for child in children:
            child.tell("")
        for child in children:
            child.tell("")
        assert sorted(child.hear() for child in children) == ["0", "1", "2", "3"]


# ---- PID namespaces ----

PAGES = 5  # that each of them takes
HOLD = """
import os, sys
from cxlkv import ObjectPool
pool = ObjectPool.open(sys.argv[1], threads=1)
kept = pool.reserve([4000] * int(sys.argv[2]))
"""
# Each in a PID namespace of its own, in which it is the first process; all are killed at once.
CONTAINERS = """
import ctypes, os, signal, sys
from cxlkv import ObjectPool
NEW_PID = 0x20000000
path, pages, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
unshare = ctypes.CDLL(None, use_errno=True).unshare
read, write = os.pipe()
outer = []
for _ in range(count):
    held, says = os.pipe()
    outer.append(os.fork())
    if outer[-1] == 0:
        os.close(write)
        assert unshare(NEW_PID) == 0, os.strerror(ctypes.get_errno())
        first = os.fork()
        if first == 0:
            os.close(held)
            pool = ObjectPool.open(path, threads=1)
            kept = pool.reserve([4000] * pages)
            assert os.getpid() == 1
            os.write(says, b"x")
            signal.pause()
        os.close(says)
        os.read(read, 1)  # the end of the pipe
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os._exit(0)
    os.close(says)
    assert os.read(held, 1) == b"x", "it did not open the pool"
    os.close(held)
os.close(write)
assert {os.waitpid(each, 0)[1] for each in outer} == {0}
"""


@pytest.fixture
def pool(path: Path) -> Iterator[ObjectPool]:
    with ObjectPool.create(path, layout=LAYOUT, capacity="8MiB", threads=1) as made:
        yield made


@needs("-p", "-f")
def test_who_dies_in_a_container_leaves_nothing(pool: ObjectPool) -> None:
    """All pages and slots are back within one reap, which counts the dead."""
    count = 100
    free = pool.stats()["pages_free"]
    reaped = pool.stats()["reaped_processes"]
    python(CONTAINERS, pool.path, PAGES, count)
    assert len(inspect(str(pool.path)).processes) == count + 1  # nobody came by
    after = pool.stats()
    assert (after["pages_free"], after["processes"]) == (free, 1)
    assert after["reaped_processes"] == reaped + count
    assert pool.admin.check(deep=True)["clean"]


@needs("-p", "-f")
def test_who_lives_in_a_container_keeps_what_it_has(pool: ObjectPool) -> None:
    """Seen as alive from outside, too, by a process that shares no namespace with it."""
    free = pool.stats()["pages_free"]
    code = f"{HOLD}\nprint(pool.stats()['processes'], flush=True); sys.stdin.read()"
    unshare = ("unshare", "-pf", "--kill-child")
    with Child("-c", code, pool.path, PAGES, before=unshare) as child:
        assert child.hear() == "2"
        stats = pool.stats()
        assert (stats["pages_free"], stats["processes"]) == (free - PAGES, 2)
        assert [each.alive for each in inspect(str(pool.path)).processes] == [True, True]
        child.kill()  # and the kernel with it who is within
    until(lambda: pool.stats()["processes"] == 1)
    assert pool.stats()["pages_free"] == free


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_that_never_touches_the_pool_does_not_hide_its_parents_death(
    pool: ObjectPool, when: str
) -> None:
    """The parent's lock is not the child's, whether that has a slot of its own or lets go of it."""
    free = pool.stats()["pages_free"]
    fork = """
child = os.fork()
if child == 0:
    if when == "after":
        kept.release()
        pool.close()
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
"""
    code = f"when = {when!r}\n{HOLD}{fork}import signal; signal.pause()"
    with Child("-c", code, pool.path, PAGES) as child:
        grandchild = os.pidfd_open(int(child.hear()))
        assert pool.stats()["processes"] == (3 if when == "before" else 2)
        child.popen.kill()
        child.popen.wait()
        stats = pool.stats()
        # What the child inherited is its own, until it ends.
        expected = (free - PAGES, 2) if when == "before" else (free, 1)
        assert (stats["pages_free"], stats["processes"]) == expected
    # The end of its stdin has let the grandchild go: here it is gone, with all its locks.
    assert select.select([grandchild], [], [], 60)[0]
    os.close(grandchild)
    assert (pool.stats()["pages_free"], pool.stats()["processes"]) == (free, 1)


# ---- time namespaces ----

# A host that has run for longer than its machine, as one that was restored may think.
AHEAD = ("-rT", "--boottime", "86400", "--monotonic", "86400", "--kill-child")
LOOK = """
import sys
from cxlkv import ObjectPool
pool = ObjectPool.open(sys.argv[1], host=0, lease_s=0.5, threads=1)
for _ in sys.stdin:
    print(pool.admin.hosts()[1].state, flush=True)
"""


@needs(*AHEAD)
def test_clocks_of_their_own_make_no_live_host_silent(path: Path) -> None:
    """Two processes of a host look at another in turn; each has noted when that last beat."""
    with (
        ObjectPool.create(
            path,
            layout=LAYOUT,
            capacity="16MiB",
            sharing="software",
            hosts=2,
            host=0,
            lease_s=0.5,
            threads=1,
        ) as pool,
        Child("-c", LOOK, path, before=("unshare", *AHEAD)) as ahead,
    ):
        with ObjectPool.open(path, host=1, lease_s=0.5, threads=1):
            for _ in range(50):
                assert ahead.ask("") == "live"
                assert pool.admin.hosts()[1].state == "live"
                time.sleep(0.02)
        assert ahead.ask("") == pool.admin.hosts()[1].state == "left"
        ahead.end()


@needs(*AHEAD)
def test_a_worker_with_a_clock_of_its_own_is_alive(path: Path) -> None:
    """A process is known by its start, which /proc shifts for whoever looks."""
    command = ("-m", "cxlkv.ops.cli", "ndp-worker", path, "--threads", 1)
    with (
        CXLPool.create(path, layout=SMALL, capacity="16MiB", threads=1) as pool,
        Child(*command, before=("unshare", *AHEAD)) as worker,
    ):
        worker.hear()
        pool.use_worker("only", deadline_s=60)
        sequence = grown(pool, range(40))
        query = np.ones((1, HEADS, DIM), np.float32)
        assert sequence.select(0, query, Budget(pages=2)).pages.size
        assert pool.worker.connected
        worker.kill()  # and the kernel with it who is within
        until(lambda: pool.stats()["processes"] == 1)
