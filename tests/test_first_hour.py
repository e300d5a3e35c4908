"""The first hour on a machine that lacks something: the message names the cause and what helps,
and nothing stays behind. Each situation is real, made for a child process: limits, small or missing
file systems and masked files in a mount namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cxlkv.machine.topology import _cgroup_folders

# try_pool() prints what became of a pool: ["fine"], or the error's type, its text, what was left.
PROGRAM = """
import json, os, resource, sys
import numpy as np
from cxlkv import CXLPool, KVLayout, PoolFullError, _core
layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=4, dtype="float32")
k = np.ones((4000, 2, 8), np.float32)

def fill(pool):
    sequence = pool.sequence()
    try:
        while True:
            for layer in range(2):
                sequence.append(layer, k, k)
    except PoolFullError:
        assert pool.admin.check(deep=True)["clean"]

def try_pool(where, capacity, make=CXLPool.create):
    try:
        with make(where, layout=layout, capacity=capacity) as pool:
            fill(pool)
        if where != "anonymous:":
            CXLPool.remove(where)
        print(json.dumps(["fine"]))
    except Exception as error:
        names = os.listdir(os.path.dirname(where) or "/")
        left = [n for n in names if n.startswith(os.path.basename(where) or "?")]
        if os.path.isdir("/dev/shm/cxlkv.0"):
            left += os.listdir("/dev/shm/cxlkv.0")
        print(json.dumps([type(error).__name__, str(error), left]))

def limit(what, size):
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))

where, text = sys.argv[1:]
exec(text)
"""
SHM = "mount -t tmpfs tmpfs /dev/shm"


@cache
def namespace() -> list[str]:
    """The command that gives a shell mounts of its own; empty where nobody may."""
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c"]
    if not shutil.which("unshare"):
        return []
    return [] if subprocess.run([*command, SHM], capture_output=True).returncode else command


def run(text: str, where: Path | str, *before: str, small: bool = False) -> list[list[object]]:
    """Runs `text` in a child, in a shell that has done `before`; the lines that it printed.

    The child has a /dev/shm of its own where it may have one, so that all in it is its doing.
    """
    commands = [*([] if small else [SHM]), *before]
    shell = namespace()
    if not shell:
        if before:
            pytest.skip("no right to mount here: needs root or user namespaces, and unshare")
        commands, shell = [], ["sh", "-c"]
    program = [sys.executable, "-c", PROGRAM, str(where), text]
    done = subprocess.run(
        [*shell, " && ".join([*commands, 'exec "$@"']), "sh", *program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# Its shadow memory alone is terabytes of addresses.
unlimited_addresses = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer cannot run under a limit of addresses",
)


def assert_refused(line: list[object], kind: str, *words: str) -> None:
    name, text, left = line
    assert name == kind, line
    assert all(word in str(text) for word in words), text
    if namespace():
        assert left == [], "something was left behind"


# ---- /dev/shm ----


def test_a_small_shared_memory(tmp_path: Path) -> None:
    small = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
    in_it = 'try_pool("/dev/shm/a.pool", "32MiB")'
    beside = 'try_pool(where, "32MiB"); try_pool(where, "256MiB"); try_pool("anonymous:", "32MiB")'
    alone = 'try_pool("/dev/shm/b.pool", (8 << 20) - 4096)'  # leaves no room for its host state
    *lines, last = run(f"{in_it}; {beside}; {alone}", tmp_path / "a.pool", small, small=True)
    assert_refused(lines[0], "MemoryShortError", "8 MiB free", "Ask for less", "--shm-size")
    assert lines[1] == ["fine"]
    assert_refused(lines[2], "MemoryShortError", "no room in /dev/shm", "host state", "--shm-size")
    assert lines[3] == ["fine"]
    assert_refused(last, "MemoryShortError", "no room in /dev/shm", "--shm-size")


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "/dev/shm, which cannot be written"),
        ("mount -t tmpfs tmpfs /dev && touch /dev/null", "/dev/shm, which is missing"),
    ],
    ids=["read-only", "missing"],
)
def test_no_shared_memory(tmp_path: Path, before: str, words: str) -> None:
    """The table of a pool's processes lies there, wherever the pool lies."""
    text = 'try_pool(where, "8MiB"); try_pool("anonymous:", "8MiB")'
    lines = run(text, tmp_path / "a.pool", before, small=True)
    assert_refused(lines[0], "SystemCallError", words, "mount -t tmpfs tmpfs /dev/shm", "--tmpfs")
    assert lines[1] == ["fine"]


def test_opening_without_shared_memory(tmp_path: Path) -> None:
    text = "CXLPool.create(where, layout=layout, capacity='8MiB').close()"
    assert run(text, tmp_path / "a.pool") == []
    lines = run(
        "try_pool(where, 0, make=lambda where, **_: CXLPool.open(where))",
        tmp_path / "a.pool",
        "mount -t tmpfs -o ro tmpfs /dev/shm",
        small=True,
    )
    assert lines[0][:1] == ["SystemCallError"]
    assert "/dev/shm, which cannot be written" in str(lines[0])
    assert lines[0][2] == ["a.pool"]


# ---- the pool's own place ----


def test_a_full_disk(tmp_path: Path) -> None:
    text = 'try_pool(where, "8MiB")'
    lines = run(text, tmp_path / "a.pool", f"mount -t tmpfs -o size=4m tmpfs {tmp_path}")
    assert_refused(lines[0], "MemoryShortError", "4 MiB free", "Ask for less", "another file sys")


def test_a_disk_that_is_full_when_the_file_is_reserved(tmp_path: Path) -> None:
    """Past the check: as when another program takes the room between the two."""
    text = """
def late(where, layout, capacity):
    _core.pool_create(where, layout, True, True, (0, 0, 1), capacity, False, None)
try_pool(where, 8 << 20, make=late)
"""
    lines = run(text, tmp_path / "a.pool", f"mount -t tmpfs -o size=4m tmpfs {tmp_path}")
    assert_refused(lines[0], "MemoryShortError", "cannot reserve", "MiB free", "Ask for less")


def test_a_disk_that_is_full_later_harms_no_pool(tmp_path: Path) -> None:
    """The file was reserved whole: no store into the pool can meet a hole, which were SIGBUS."""
    text = """
def crowded(where, layout, capacity):
    pool = CXLPool.create(where, layout=layout, capacity=capacity)
    for folder in (os.path.dirname(where), "/dev/shm"):
        try:
            with open(folder + "/crowd", "wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        except OSError as error:
            assert error.errno == 28, error
    return pool
try_pool(where, "8MiB", make=crowded)
"""
    disks = [f"mount -t tmpfs -o size=9m tmpfs {place}" for place in (tmp_path, "/dev/shm")]
    assert run(text, tmp_path / "a.pool", *disks, small=True) == [["fine"]]


def test_a_read_only_place(tmp_path: Path) -> None:
    text = 'try_pool(where, "8MiB")'
    lines = run(text, tmp_path / "a.pool", f"mount -t tmpfs -o ro tmpfs {tmp_path}")
    assert_refused(lines[0], "SystemCallError", f"the folder {tmp_path} cannot be written", "Choos")


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    text = 'os.geteuid() or os.setuid(65534); try_pool(where, "8MiB")'
    lines = run(text, "/a.pool") if os.geteuid() == 0 else run(text, tmp_path / "a.pool")
    assert_refused(lines[0], "SystemCallError", "cannot be written by this user", "Choose another")


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    text = """
os.geteuid() or os.setuid(65534)
try:
    CXLPool.create(where, layout=layout, capacity="8MiB")
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
    ((kind, words),) = run(text, tmp_path / "closed" / "inner" / "a.pool")
    (tmp_path / "closed").chmod(0o700)
    assert kind == "BadArgumentError"
    assert "does not exist, or cannot be reached by this user" in str(words)


# ---- limits of the process ----


@pytest.mark.parametrize(
    ("what", "size", "words", "remedy"),
    [
        ("RLIMIT_FSIZE", "1 << 20", "File too large. This process may not make files", "ulimit -f"),
        pytest.param(
            *("RLIMIT_AS", "600 << 20", "no address space for 5", "ulimit -v"),
            marks=unlimited_addresses,
        ),
    ],
    ids=["files", "addresses"],
)
def test_a_limit_of_memory(tmp_path: Path, what: str, size: str, words: str, remedy: str) -> None:
    text = f"""
limit(resource.{what}, {size})
try_pool(where, "512MiB")
try_pool("/dev/shm/a.pool", "512MiB")
try_pool("anonymous:", "512MiB")
"""
    lines = run(text, tmp_path / "a.pool")
    assert len(lines) == 3
    for line in lines:
        assert_refused(line, "MemoryShortError", words, remedy)


def test_a_limit_of_open_files(tmp_path: Path) -> None:
    """A pool has four open: its file, the host state, its folder, and one whose lock says that it
    lives. Whichever is one too many."""
    text = """
free = os.dup(0)
os.close(free)
for more in range(5):
    limit(resource.RLIMIT_NOFILE, free + more)
    try_it = []
    try:
        with CXLPool.create(where, layout=layout, capacity="8MiB"):
            try_it = ["fine"]
    except Exception as error:
        try_it = [type(error).__name__, str(error)]
    limit(resource.RLIMIT_NOFILE, free + 100)
    names = [n for n in os.listdir(os.path.dirname(where)) if n != "a.pool" or try_it != ["fine"]]
    names += os.listdir("/dev/shm/cxlkv.0") if os.path.isdir("/dev/shm/cxlkv.0") else []
    print(json.dumps([*try_it, names]))
"""
    lines = run(text, tmp_path / "a.pool")
    for line in lines[:4]:
        assert_refused(line, "SystemCallError", "Too many open files")
    assert "raise it, ulimit -n" in str(lines[0])
    assert lines[4][0] == "fine"


def test_a_low_limit_of_locked_memory(tmp_path: Path) -> None:
    """No pool is locked in memory by itself: it works, and `cxlkv info` says what it cannot do."""
    text = """
limit(resource.RLIMIT_MEMLOCK, 0)
try_pool(where, "8MiB")
from cxlkv.machine.locking import try_lock
from cxlkv.machine.topology import missing, probe
advice = {item.what: item.command for item in missing(probe())}
print(json.dumps([advice.get("only 0 MiB may be locked in memory", ""), try_lock(1 << 20)]))
"""
    fine, (advice, refused) = run(text, tmp_path / "a.pool")
    assert fine == ["fine"]
    assert ("ulimit -l unlimited" in str(advice)) == bool(refused)  # root's limit may not count


def test_one_cpu_and_no_environment(tmp_path: Path) -> None:
    """Threads are made for the CPUs that this process may use, not for those of the machine."""
    text = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.clear()
with CXLPool.create("anonymous:", layout=layout, capacity="32MiB") as pool:
    before = len(os.listdir("/proc/self/task"))
    fill(pool)
    sequence = pool.sequence()
    print(json.dumps([len(os.listdir("/proc/self/task")) - before]))
try_pool(where, "8MiB")
"""
    assert run(text, tmp_path / "a.pool") == [[0], ["fine"]]


# ---- what the machine says of itself ----

REPORT = """
from cxlkv.ops.cli import main
sys.stdout = open(os.devnull, "w")
main_result = None
try:
    main(["info"])
except SystemExit as end:
    main_result = end.code
sys.stdout = sys.__stdout__
print(json.dumps([main_result]))
"""


def plant(folder: Path, mounts: str, cgroup: str, **files: str) -> list[str]:
    """Commands by which the child finds these files as its cgroup's, whatever it has."""
    folder.mkdir()
    for name, text in {**files, "mounts": mounts, "cgroup": cgroup}.items():
        (folder / name.replace("__", ".")).write_text(text)
    return [
        f"mount --bind {folder} /sys/fs/cgroup",
        f"mount --bind {folder}/mounts /proc/$$/mounts",  # the shell's id stays the child's
        f"mount --bind {folder}/cgroup /proc/$$/cgroup",
    ]


V2 = ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/\n")


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        ("max\n", f"{1 << 30}\n", "fine"),
        ("", "", "fine"),  # masked: there, and empty
        (f"{1 << 40}\n", "", "fine"),
        (f"{20 << 20}\n", f"{15 << 20}\n", "may use 20 MiB and uses 15 MiB"),
        (f"{4 << 20}\n", "", "may use 4 MiB"),
    ],
    ids=["none", "masked", "large", "used up", "small"],
)
def test_limits_of_a_cgroup(tmp_path: Path, limit: str, usage: str, expected: str) -> None:
    before = plant(tmp_path / "cgroup", *V2, memory__max=limit, memory__current=usage)
    text = 'try_pool("/dev/shm/a.pool", "8MiB"); try_pool("anonymous:", "8MiB")' + REPORT
    *lines, reported = run(text, tmp_path, *before)
    assert reported in ([None], [0])
    for line in lines:
        if expected == "fine":
            assert line == ["fine"]
        else:
            assert_refused(line, "MemoryShortError", expected, "raise the container's memory limit")


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    """A cgroup with a limit of 512 MiB; skips where none can be made."""
    for folder, limit_name, _ in _cgroup_folders(Path("/")):
        made = folder / f"cxlkv-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            try:
                (made / limit_name).write_text(str(512 << 20))
                yield made
                return
            finally:
                made.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here: needs root and the controller")


def test_a_real_cgroup(tmp_path: Path, own_cgroup: Path) -> None:
    text = 'try_pool("anonymous:", "1GiB"); try_pool("anonymous:", "32MiB")'
    join = f"echo $$ > {own_cgroup}/cgroup.procs"
    short, fine = run(text, tmp_path, join)
    assert_refused(short, "MemoryShortError", "this cgroup may use 512 MiB", "memory limit")
    assert fine == ["fine"]


@pytest.mark.parametrize(
    "before",
    [
        ["mount -t tmpfs tmpfs /sys/fs/cgroup"],
        ["mount -t tmpfs tmpfs /sys"],
        [f"mount --bind /dev/null /proc/$$/{name}" for name in ("cgroup", "mounts", "limits")],
        [f"mount --bind /dev/null /proc/{name}" for name in ("meminfo", "cpuinfo", "$$/status")],
    ],
    ids=["no cgroups", "no sysfs", "no limits", "no meminfo"],
)
def test_masked_files(tmp_path: Path, before: list[str]) -> None:
    text = 'try_pool(where, "8MiB"); try_pool("anonymous:", "8MiB")' + REPORT
    *lines, reported = run(text, tmp_path / "a.pool", *before)
    assert lines == [["fine"], ["fine"]]
    assert reported in ([None], [0])


@unlimited_addresses
def test_more_than_the_machine_has_where_nothing_says_how_much(tmp_path: Path) -> None:
    """Else the pool would be begun, and the kernel would end some process for it: hence a limit
    that would stop it."""
    text = """
limit(resource.RLIMIT_AS, 8 << 30)
try_pool("anonymous:", "100TiB")
try_pool("anonymous:", 1 << 62)
"""
    masked = [f"mount --bind /dev/null /proc/{name}" for name in ("meminfo", "$$/cgroup")]
    short, endless = run(text, tmp_path, *masked)
    assert_refused(short, "MemoryShortError", "100 TiB wanted, this machine has", "Ask for less")
    assert_refused(endless, "MemoryShortError", "more than a process can address", "Ask for less")
