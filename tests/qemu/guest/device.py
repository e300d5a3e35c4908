"""A pool on the true /dev/dax0.0, used by two guests after one another: python -m ... NAME.

Guest a finds the device without a driver, mends that, makes a pool over garbage, publishes. Guest b
reads it. Guest c has half of the memory. Then a removes the pool and turns the device into RAM.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import cast

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import (
    BusyError,
    MemoryShortError,
    NotAPoolError,
    PoolExistsError,
    SystemCallError,
    TruncatedError,
)
from cxlkv.ops.gc import find_garbage
from cxlkv.stats import find
from tests.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    TEXTS,
    bind_device,
    check,
    command,
    errno_of,
    found,
    make_system_ram,
    publish_texts,
    read_texts,
    refusal,
    say,
    token_ids,
    wait_for,
)

UNIT_BYTES = 2 << 20
DEVICE_BYTES = 256 << 20
DESCRIPTOR_BYTES = 64
CREATE = partial(CXLPool.create, DEVICE, layout=LAYOUT)
# In a process of its own: it finds and compares text 1.
OTHER_PROCESS = f"""
from cxlkv import CXLPool
from tests.qemu.guest.steps import found
with CXLPool.open("{DEVICE}") as pool:
    found(pool, 1, {TEXTS[1]}).release()
"""


def check_facts() -> None:
    """What the core takes for granted about the driver."""
    fd = os.open(DEVICE, os.O_RDWR)
    assert os.fstat(fd).st_size == 0
    sysfs = Path(f"/sys/dev/char/{os.major(os.fstat(fd).st_rdev)}:{os.minor(os.fstat(fd).st_rdev)}")
    assert int((sysfs / "size").read_text()) == DEVICE_BYTES
    assert int((sysfs / "align").read_text()) == UNIT_BYTES
    assert (sysfs / "subsystem").resolve().name == "dax"
    for refused in (
        lambda: os.read(fd, 16),
        lambda: os.pread(fd, 16, 0),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, DEVICE_BYTES),
        lambda: mmap.mmap(fd, 4096),
        lambda: mmap.mmap(fd, UNIT_BYTES, offset=4096),
        lambda: mmap.mmap(fd, UNIT_BYTES, flags=mmap.MAP_PRIVATE),
    ):
        assert errno_of(refused) == errno.EINVAL
    mmap.mmap(fd, DEVICE_BYTES + UNIT_BYTES).close()  # too long, and not refused
    with mmap.mmap(fd, DEVICE_BYTES) as memory:
        assert errno_of(memory.flush) == errno.EINVAL
        for at in range(0, DEVICE_BYTES, UNIT_BYTES):
            memory[at : at + UNIT_BYTES] = os.urandom(UNIT_BYTES)
    os.close(fd)
    print("the driver does what the core expects; the device is full of random bytes", flush=True)


def check_mended(why: str) -> None:
    """Each way to a pool says why it cannot be had, and its command mends it."""
    for act in (partial(CREATE, capacity="64MiB"), partial(CXLPool.open, DEVICE)):
        text = refusal(SystemCallError, act)
        assert why in text
    mend = re.search(r"daxctl .*", text)
    assert mend is not None
    command(mend[0])


def lock_first_byte(fd: int) -> int:
    """Lock as the core does: 0, or the errno of the refusal."""
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    return errno_of(partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, wanted))


def check_locks() -> None:
    """Byte locks work on the device, and belong to its node: docs/how-to/operations.md says so."""
    other = "/run/another-node"
    os.mknod(other, stat.S_IFCHR | 0o600, os.stat(DEVICE).st_rdev)
    files = [os.open(name, os.O_RDWR) for name in (DEVICE, DEVICE, other)]
    assert [lock_first_byte(fd) for fd in files] == [0, errno.EAGAIN, 0]
    for fd in files:
        os.close(fd)
    os.unlink(other)


def make_and_publish() -> None:
    refusal(PoolExistsError, partial(CREATE, capacity="64MiB"))
    refusal(
        MemoryShortError,
        partial(CREATE, capacity=DEVICE_BYTES + UNIT_BYTES, force=True, replace=True),
    )
    with CREATE(capacity="all", force=True, replace=True) as pool:
        assert pool.describe()["page_kind"] == "devdax"
        publish_texts(pool)
        read_texts(pool)
        assert "is a pool already" in refusal(PoolExistsError, partial(CREATE, capacity="64MiB"))
        refusal(BusyError, partial(CREATE, capacity="64MiB", force=True, replace=True))
        refusal(BusyError, partial(CXLPool.remove, DEVICE))
        subprocess.run([sys.executable, "-c", OTHER_PROCESS], check=True)
        fork_and_read(pool)
        (seen,) = find([DEVICE])
        alive = [process.pid for process in seen.processes if process.alive]
        assert (seen.state, alive) == ("live", [os.getpid()])
    (seen,) = find([DEVICE])
    pages = sum(TEXTS.values()) // LAYOUT.page_tokens
    assert (seen.state, seen.prefix_pages, seen.bytes > 0) == ("idle", pages, True)
    assert find_garbage([DEVICE], idle_s=0) == []
    assert not list(Path("/dev/shm").glob("cxlkv.*/*"))


def fork_and_read(pool: CXLPool) -> None:
    child = os.fork()
    if child == 0:
        try:
            found(pool, 2, TEXTS[2]).release()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def read() -> None:
    with CXLPool.open(DEVICE, layout=LAYOUT) as pool:
        read_texts(pool)
        assert not pool.match_prefix(token_ids(3, 64))
        check(pool)


def check_cut_short() -> None:
    """Killed while it formats, over a pool that was there: neither the old one nor a new one."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=1)  # many descriptors
    with CXLPool.create(DEVICE, layout=layout, capacity="all") as pool:
        geometry = cast("dict[str, int]", pool.describe()["geometry"])
    first, count = geometry["descriptors_offset"], geometry["page_count"]
    # Where the generation of a descriptor is; erased, so that its writing can be seen.
    early, last = (first + page * DESCRIPTOR_BYTES + 1 for page in (count // 4, count - 1))
    fd = os.open(DEVICE, os.O_RDWR)
    with mmap.mmap(fd, DEVICE_BYTES) as memory:
        memory[early] = memory[last] = 0
        child = os.fork()
        if child == 0:
            CXLPool.create(DEVICE, layout=layout, capacity="all", force=True, replace=True)
            os._exit(0)
        while memory[early] == 0:
            assert os.waitpid(child, os.WNOHANG)[0] == 0, "it ended before the kill"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert memory[last] == 0, "too late: it was finished"
    os.close(fd)
    refusal(NotAPoolError, partial(CXLPool.open, DEVICE))
    refusal(NotAPoolError, partial(CXLPool.remove, DEVICE))
    CREATE(capacity="all").close()  # the superblock's page is empty: no force needed
    CXLPool.remove(DEVICE)


def remove() -> None:
    CXLPool.remove(DEVICE)
    refusal(NotAPoolError, partial(CXLPool.open, DEVICE))
    refusal(NotAPoolError, partial(CXLPool.remove, DEVICE))
    assert find([DEVICE]) == []
    layout = {"layers": 2, "kv_heads": 2, "head_dim": 64}
    config = {"where": DEVICE, "capacity": "all", "layout": layout}
    for _ in range(2):  # makes it, opens it
        CXLPool.from_config(config).close()
    CREATE(capacity="32MiB", force=True, replace=True).close()  # over a pool that nobody uses
    assert not list(Path("/dev/shm").glob("cxlkv.*/*"))
    CXLPool.remove(DEVICE)


def check_system_ram() -> None:
    """Check a device that kmem has."""
    make_system_ram()
    check_mended("is system RAM now (driver kmem, NUMA node 1)")
    CREATE(capacity="all", force=True, replace=True).close()
    CXLPool.remove(DEVICE)


def main(name: str) -> None:
    if name == "a":
        check_mended("no driver is bound")
        check_facts()
        check_locks()
        make_and_publish()
        say("published")
        wait_for("all have read")
        remove()
        check_cut_short()
        check_system_ram()
    elif name == "b":
        bind_device()
        wait_for("published")
        read()
    else:  # half of the memory
        bind_device()
        assert "is truncated" in refusal(TruncatedError, partial(CXLPool.open, DEVICE))


if __name__ == "__main__":
    main(sys.argv[1])
