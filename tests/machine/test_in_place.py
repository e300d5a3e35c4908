"""A pool in a file that is there and keeps its name and size, as famfs gives files: `dax:PATH`.

A file on true fsdax, in a folder that nothing can be made in or renamed, is `make test-drivers`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import signal
import struct
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CorruptError,
    GeometryError,
    MemoryShortError,
    NotAPoolError,
    PoolExistsError,
    SystemCallError,
    TruncatedError,
    UnsupportedError,
)
from cxlkv.ops.gc import collect, find_garbage
from cxlkv.stats import find

from ..support.forking import in_child

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=64, dtype="float16")
FILE_BYTES = 12 << 20
PAGE = 4096  # of the superblock
MARK_OFFSET = 2112
DESCRIPTOR_BYTES = 64
CLOCK_NANOSLEEP = 230


@pytest.fixture
def file(shm_path: Path) -> Path:
    shm_path.write_bytes(bytes(FILE_BYTES))
    return shm_path


def make(
    file: Path, capacity: str = "all", *, force: bool = False, replace: bool = False
) -> CXLPool:
    return CXLPool.create(
        f"dax:{file}", layout=LAYOUT, capacity=capacity, force=force, replace=replace
    )


def test_it_is_made_used_and_ended_in_the_same_file(file: Path) -> None:
    before = os.stat(file)
    keys = np.random.default_rng(7).standard_normal((480, 4, 64)).astype(np.float16)
    with make(file) as pool:
        assert pool.path == str(file)
        size = pool.pages.geometry["region_bytes"]
        assert FILE_BYTES - (3 << 20) < size <= FILE_BYTES
        sequence = pool.sequence()
        for layer in range(2):
            sequence.append(layer, keys, keys)
        pool.publish_prefix(sequence, range(480))
        sequence.release()
    for where in (file, f"dax:{file}"):
        with CXLPool.open(where, layout=LAYOUT) as pool, pool.match_prefix(range(480)) as hit:
            for fetched in hit.sequence().fetch(1):
                rows = np.asarray(fetched).reshape(4, -1, 64).transpose(1, 0, 2)
                assert np.array_equal(rows, keys)
            assert pool.admin.check(deep=True)["clean"]
    (seen,) = find([str(file)])
    assert seen.state == "idle"
    CXLPool.remove(file)
    after = os.stat(file)
    assert (after.st_ino, after.st_size, after.st_nlink) == (before.st_ino, FILE_BYTES, 1)
    assert file.read_bytes()[:PAGE] == bytes(PAGE)
    assert find([str(file)]) == []
    make(file).close()  # what was wiped needs no force


def test_the_file_is_never_another_one(file: Path) -> None:
    """Nothing is made or renamed beside it, with and without force, by create() and by remove()."""
    inode = os.stat(file).st_ino
    names = set(os.listdir("/dev/shm"))
    with make(file):
        beside = {name for name in os.listdir("/dev/shm") if name.startswith(file.name)}
        assert beside == {file.name}
    make(file, "8MiB", replace=True).close()
    CXLPool.remove(f"dax:{file}")
    file.write_bytes(b"letters" * 1_000_000)
    make(file, "5MiB", force=True).close()
    assert (os.stat(file).st_ino, os.stat(file).st_size) == (inode, 7_000_000)
    tail = file.read_bytes()[6 << 20 :]
    assert set(tail) == set(b"letters")  # behind the pool all is as it was
    assert {name for name in set(os.listdir("/dev/shm")) - names if file.name in name} == set()


def test_a_pool_that_was_a_file_of_its_own_is_replaced_in_place(file: Path) -> None:
    file.unlink()
    CXLPool.create(file, layout=LAYOUT, capacity="10MiB").close()
    before = os.stat(file)
    with pytest.raises(PoolExistsError, match="is a pool already"):
        make(file)
    make(file, replace=True).close()
    after = os.stat(file)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    CXLPool.remove(file)
    assert os.stat(file).st_ino == before.st_ino


def test_what_the_file_holds_is_kept(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(1000)
        opened.write(b"x")  # not at its very start
    with pytest.raises(PoolExistsError, match="not overwritten unless force=True"):
        make(file)
    assert file.read_bytes()[1000:1001] == b"x"
    with make(file, force=True) as pool:
        for replace in (False, True):
            with pytest.raises(BusyError if replace else PoolExistsError):
                make(file, force=True, replace=replace)
        with pytest.raises(BusyError):
            CXLPool.remove(file)
        assert pool.admin.check(deep=True)["clean"]
    with pytest.raises(PoolExistsError, match="is a pool already"):
        make(file)
    with pytest.raises(PoolExistsError):  # without the word it is a file as any other
        CXLPool.create(file, layout=LAYOUT, capacity="8MiB")


def waits_for_a_lock(process: int) -> bool:
    """It naps between two tries: nothing else on its way does."""
    return Path(f"/proc/{process}/syscall").read_text().split()[0] == str(CLOCK_NANOSLEEP)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not os.access("/proc/self/syscall", os.R_OK),
    reason="looks at /proc/PID/syscall, and knows the number of clock_nanosleep on x86-64",
)
@pytest.mark.parametrize("opens", [True, False])
def test_who_comes_while_it_is_made_waits(file: Path, opens: bool) -> None:
    """The first bytes are zeros until the superblock is written: an opener, or a second maker, that
    comes meanwhile finds a whole pool."""
    make(file).close()
    whole = file.read_bytes()[:PAGE]
    with file.open("r+b", buffering=0) as maker:
        maker.write(bytes(PAGE))
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(maker, fcntl.F_OFD_SETLK, lock)
        child = os.fork()
        if child == 0:
            maker.close()  # the lock stays with the parent's
            status = 1
            try:
                if opens:
                    CXLPool.open(file, layout=LAYOUT).close()
                    status = 0
                else:
                    try:
                        make(file)
                    except PoolExistsError:
                        status = 0
            finally:
                os._exit(status)
        while not waits_for_a_lock(child):
            assert os.waitpid(child, os.WNOHANG)[0] == 0, "it did not wait"
        maker.seek(0)
        maker.write(whole)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_creation_that_is_killed_leaves_no_pool(file: Path) -> None:
    """Over a pool that was there: neither the old one nor a new one."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=1)  # many descriptors
    os.truncate(file, 64 << 20)
    while True:  # until it was killed in time
        with CXLPool.create(f"dax:{file}", layout=layout, capacity="all", replace=True) as pool:
            geometry = pool.pages.geometry
        first, count = geometry["descriptors_offset"], geometry["page_count"]
        # Where the generation of a descriptor is; erased, so that its writing can be seen.
        early, last = (first + page * DESCRIPTOR_BYTES + 1 for page in (count // 8, count - 1))
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
            memory[early] = memory[last] = 0
            child = os.fork()
            if child == 0:
                CXLPool.create(f"dax:{file}", layout=layout, capacity="all", replace=True)
                os._exit(0)
            ended, status = 0, 0
            while memory[early] == 0 and not ended:
                ended, status = os.waitpid(child, os.WNOHANG)
            assert status == 0
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if memory[last] == 0:
                break
    for act in (CXLPool.open, CXLPool.remove):
        with pytest.raises(NotAPoolError, match="zeros, as before one is made, when its making"):
            act(file)
    assert os.stat(file).st_size == 64 << 20
    make(file).close()


def test_a_damaged_one_is_wiped(file: Path) -> None:
    make(file).close()
    with file.open("r+b") as opened:
        opened.seek(700)
        opened.write(b"\xff")
    with pytest.raises(CorruptError):
        CXLPool.open(file)
    CXLPool.remove(file)
    assert file.read_bytes()[:PAGE] == bytes(PAGE)


def test_no_cleaning_takes_the_file(file: Path) -> None:
    """Idle pools go when asked for; not one whose file was there before it."""
    make(file).close()
    assert find_garbage([str(file)], idle_s=0) == []
    with file.open("r+b") as opened:
        opened.seek(MARK_OFFSET)
        assert opened.read(8) == b"INPLACE\0"
        opened.seek(MARK_OFFSET)
        opened.write(bytes(8))
    (garbage,) = find_garbage([str(file)], idle_s=0)  # it is the mark that keeps it
    assert collect(garbage, idle_s=0)
    assert not file.exists()


def test_sizes(file: Path) -> None:
    with pytest.raises(MemoryShortError, match=r"has 12 MiB, .* wanted: ask for less"):
        make(file, "64MiB")
    with pytest.raises(BadArgumentError, match="dax device, or a file in place"):
        CXLPool.create(file, layout=LAYOUT, capacity="all")
    os.truncate(file, 1 << 20)
    with pytest.raises(GeometryError, match="holds no page"):
        make(file)
    os.truncate(file, 100)
    with pytest.raises(MemoryShortError, match=r"has 100 bytes: .*give it one before \(fallocate"):
        make(file, "8MiB")
    os.truncate(file, 0)
    with pytest.raises(BadArgumentError, match="which is empty: give the file its size before"):
        make(file)
    assert os.stat(file).st_size == 0
    os.truncate(file, (10 << 20) + 1234)  # holes are filled, the size stays
    with make(file):
        pass
    status = os.stat(file)
    assert status.st_size == (10 << 20) + 1234
    size = int.from_bytes(file.read_bytes()[320:328], "little")
    assert status.st_blocks * 512 >= size
    os.truncate(file, 4 << 20)
    with pytest.raises(TruncatedError, match="is truncated"):
        CXLPool.open(file)


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    for where in (f"dax:{tmp_path}", f"dax:{tmp_path}/absent", "dax:absent"):
        with pytest.raises(UnsupportedError, match="is no device, nor a file"):
            CXLPool.create(where, layout=LAYOUT, capacity="8MiB")
    with pytest.raises(UnsupportedError, match="keep their memory where it is"):
        CXLPool.create(f"numa:0:dax:{file}", layout=LAYOUT, capacity="8MiB")
    os.chmod(file, 0o444)

    def make_as_nobody() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(SystemCallError, match=f"{file}: cannot open: Permission denied"):
            make(file)

    in_child(make_as_nobody)
    assert file.read_bytes()[:PAGE] == bytes(PAGE)


def test_from_a_configuration(file: Path) -> None:
    inode = os.stat(file).st_ino
    config: dict[str, object] = {
        "where": f"dax:{file}",
        "capacity": "all",
        "layout": {"layers": 2, "kv_heads": 4, "head_dim": 64, "dtype": "float16"},
    }
    with CXLPool.from_config(config) as pool, CXLPool.from_config(config) as again:
        first = pool.describe()["identity"]
        assert first == again.describe()["identity"]
    assert os.stat(file).st_ino == inode
