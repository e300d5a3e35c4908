"""Containers: processes that share a pool and not all else of the machine.

Goal: other mounts and other PID namespaces than those of the pool's other users cost nobody a page,
a slot or a wrong answer. Method: real processes under unshare(1), and skipped where that is not
allowed. New features with state of their own beside a pool add their case here.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BOUND_S = 120


@functools.cache
def may_unshare(*flags: str) -> bool:
    done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    return done.returncode == 0


def needs(*flags: str) -> pytest.MarkDecorator:
    why = f"unshare {' '.join(flags)} is not allowed here"
    return pytest.mark.skipif(not may_unshare(*flags), reason=why)


def python(code: str, *arguments: object, within: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*within, sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(f"/dev/shm/cxlkv-test-containers-{os.getpid()}-{time.monotonic_ns()}.pool")
    yield path
    path.unlink(missing_ok=True)


# ---- mounts ----

# Two file systems that number their files alike, and a copy of a pool that is in use.
COPIED = """
import os, shutil, subprocess, sys
from cxlkv import CXLPool, KVLayout
folders = ["one", "two"]
for folder in folders:
    os.mkdir(folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
ours, copy = "one/a.pool", "two/b.pool"
pool = CXLPool.create(ours, layout=KVLayout.objects("64KiB"), capacity="8MiB", threads=1)
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
    code = "from cxlkv import CXLPool, object_keys\\n"
    code += f"with CXLPool.open({path!r}, threads=1) as pool:\\n"
    subprocess.run([sys.executable, "-c", code + text], check=True)

# Its nonce is the original's, whose users have it: a copy is nobody's.
other(copy, '''
    assert pool.stats()["processes"] == 1, pool.stats()
    assert pool.check()["clean"], pool.check()
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
assert pool.check()["clean"], pool.check()
pool.close()
print("apart")
"""


@needs("-m")
def test_a_copy_on_another_file_system_is_another_pool(tmp_path: Path) -> None:
    """Also with the number of the original's file, and while that is in use."""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{COPIED}"
    assert python(code, within=("unshare", "-m")) == "apart\n"
