"""Checks where a pool may lie, and whether there is memory for it, before anything is mapped."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cxlkv import _core
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    MemoryShortError,
    SystemCallError,
    UnsupportedError,
)
from cxlkv.layout import format_bytes, parse_bytes
from cxlkv.machine.devices import dax_devices_of, probe_devices
from cxlkv.machine.placement import parse_nodes
from cxlkv.machine.topology import probe

HOST_FOLDER = "/dev/shm"
ADDRESSES_BYTES = 1 << 47  # of one process on today's machines
STRIPED = "dax:"  # before the paths of several devices, with a + between
ALL = "all"  # the capacity of a whole device, or of a file that keeps its size
OF_FILES = ("/dev/shm/", "/dev/hugepages/")  # below /dev, whether something is mounted there or not


class Place(NamedTuple):
    """Location of a pool: a path, or None for anonymous memory; NUMA nodes, if asked for.

    in_place: in the file that is there (dax:PATH), which keeps its name and its size.
    """

    path: str | None
    nodes: tuple[int, ...] = ()
    in_place: bool = False


def parse_where(where: str | os.PathLike[str]) -> str | None:
    """Return only the path of parse_place()."""
    return parse_place(where).path


def parse_place(where: str | os.PathLike[str]) -> Place:
    """What "anonymous:", a path, "numa:NODES", "numa:NODES:PATH", "dax:DEVICE", "dax:FILE" or
    "dax:DEVICE+DEVICE" says; raises for other schemes and relative nonsense."""
    if not isinstance(where, (str, os.PathLike)):
        raise BadArgumentError(
            f"{where!r} is not a place for a pool: a path as text or pathlib.Path, or 'anonymous:'"
        )
    text = os.fspath(where)
    if text == "anonymous:":
        return Place(None)
    scheme, colon, rest = text.partition(":")
    if not colon or "/" in scheme:
        return Place(_path_of(text))
    if scheme == "numa":
        nodes, colon, path = rest.partition(":")
        if is_striped(path):
            raise UnsupportedError(
                f"{text}: devices and files that exist keep their memory where it is: leave out "
                "the nodes"
            )
        return Place(_path_of(path) if colon else None, parse_nodes(nodes))
    if scheme == "dax":
        path = _device_of(text, rest)
        return Place(path, in_place=not is_striped(path) and not is_device(path))
    if scheme == "cxl":
        raise UnsupportedError(
            f"{text}: pools on a CXL region are not built yet; use its dax device or NUMA node, "
            "a path, or 'anonymous:'"
        )
    raise BadArgumentError(
        f"{text}: unknown region {scheme + ':'!r}; use a path like /dev/shm/my.pool, "
        "numa:1, dax:/dev/dax0.0 or 'anonymous:'"
    )


def _device_of(text: str, name: str) -> str:
    if "+" in name:
        parts = [_path_in_dev(text, part) for part in name.split("+")]
        for part in parts:
            if not _is_there(part):
                raise UnsupportedError(
                    f"{text}: {part or 'nothing'} is neither a device nor a file; of several, all "
                    "must be there, files with the size that they keep"
                )
        return STRIPED + "+".join(parts)
    path = _path_in_dev(text, name)
    if not _is_there(path):
        raise UnsupportedError(
            f"{text}: {path} is no device, nor a file with the size that it keeps; of dax devices "
            f"{_dax_devices_there()}"
        )
    return path


def _dax_devices_there() -> str:
    there = sorted(str(device) for device in Path("/dev").glob("dax*"))
    return f"there are {', '.join(there)}" if there else "this machine has none (cxlkv info)"


def check_below_dev(path: str | os.PathLike[str]) -> None:
    """Raises UnsupportedError for a file that would be made among the devices of /dev.

    The name is meant for a device, which is not there now or has another number since the last
    boot. A file of that name would lie in this host's memory, and each host would have its own.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if not f"{folder}/".startswith("/dev/") or f"{folder}/".startswith(OF_FILES):
        return
    with suppress(OSError):  # no such folder: no file either
        if os.stat(folder).st_dev != os.stat("/dev").st_dev:
            return  # something is mounted there
    raise UnsupportedError(
        f"{path}: there is no such device, and no file is made among devices; of dax devices "
        f"{_dax_devices_there()}. Name a device that is there, or a file in memory, as "
        "/dev/shm/my.pool"
    )


def _path_in_dev(text: str, name: str) -> str:
    """The path in /dev of a device's name, or of a folder of sysfs that has one: it lasts when
    numbers change."""
    if not name.startswith("/sys/"):
        return name if name.startswith("/") else f"/dev/{name}"
    if "\0" in name or not os.path.isdir(name):
        raise UnsupportedError(f"{text}: {name} is not a folder of sysfs here (cxlkv info)")
    found = [each.file for each in dax_devices_of(probe_devices(), os.path.realpath(name))]
    if len(found) != 1:
        what = f"has {len(found)} dax devices: {', '.join(found)}" if found else "has no dax device"
        raise UnsupportedError(f"{text}: {name} {what}; one is wanted (cxlkv info)")
    return found[0]


def _is_there(path: str) -> bool:
    return "\0" not in path and (is_device(path) or os.path.isfile(path))


def is_striped(path: str) -> bool:
    """Tell whether a path names several devices or files, as the core writes them."""
    return path.startswith(STRIPED)


def striped_paths(path: str) -> list[str]:
    """List the devices or files of a striped region, or the single path."""
    return path.removeprefix(STRIPED).split("+") if is_striped(path) else [path]


def meant_by(text: str) -> str | None:
    """The place that a bare word surely means which else would be a file's name; None: no other."""
    if re.fullmatch(r"dax\d+\.\d+", text, re.ASCII):
        return f"/dev/{text}"
    return {"anonymous": "anonymous:", "numa": "numa:NODE"}.get(text)


def _path_of(text: str) -> str:
    if not text or "\0" in text:
        raise BadArgumentError(f"{text!r} is not a path of a file")
    if text.endswith("/") or os.path.isdir(text):
        raise BadArgumentError(
            f"{text} is a folder: write a file in it, like {os.path.join(text, 'my.pool')}"
        )
    if meant := meant_by(text):
        raise BadArgumentError(
            f"{text} would be a file in this folder: write {meant}, or ./{text} for the file"
        )
    parent = Path(text).absolute().parent
    if not os.path.isdir(parent):
        raise BadArgumentError(
            f"{text}: the folder {parent} does not exist, or cannot be reached by this user"
        )
    return text


@contextmanager
def one_maker() -> Iterator[None]:
    """Hold a lock, so that one of this user's processes at a time creates a pool.

    When all processes of a server start at once, each would reserve the whole capacity for a draft
    of its own. The lock is on the user's own folder of host states: it leaves nothing behind, and
    no other user can take it, as any user can take one on /dev/shm. Between users the first
    finished draft wins, and the others raise PoolExistsError.
    """
    folders: list[int] = []
    try:
        with suppress(OSError, CXLKVError):  # making the pool complains about the folder
            folders.append(_core.state_folder())
            fcntl.flock(folders[0], fcntl.LOCK_EX)
        yield
    finally:
        for folder in folders:
            with suppress(OSError):  # by name: a child of os.fork() may have the folder open too
                fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)


def check_host_folder(path: str | None) -> None:
    """Raises SystemCallError when the processes of a pool at `path` could not find each other.

    Wherever a pool's file lies, its processes share their host state in /dev/shm
    (docs/explanation/architecture.md). The core's own error would name a file that the user has
    never heard of.
    """
    if path is None or os.access(HOST_FOLDER, os.W_OK | os.X_OK):
        return
    what = "cannot be written" if os.path.isdir(HOST_FOLDER) else "is missing"
    raise SystemCallError(
        f"{path}: the processes of a pool share a table in {HOST_FOLDER}, which {what}. "
        "Mount it (mount -t tmpfs tmpfs /dev/shm; in Docker: --tmpfs /dev/shm), or use 'anonymous:'"
    )


def is_device(path: str) -> bool:
    """Tell whether `path` leads to a character device, such as /dev/dax0.0."""
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def whole_device_bytes(path: str, root: Path = Path("/")) -> int:
    """Return the size of the dax device at `path`.

    A device has no size of its own: sysfs tells it, below `root`. Raises UnsupportedError when
    sysfs does not know the device as a dax device, or says that it has no memory.
    """
    number = os.stat(path).st_rdev
    folder = root / f"sys/dev/char/{os.major(number)}:{os.minor(number)}"
    size_bytes = 0
    with suppress(OSError, ValueError):
        if (folder / "subsystem").resolve().name == "dax":
            size_bytes = int((folder / "size").read_text())
    if size_bytes <= 0:
        raise UnsupportedError(f"{path} is no dax device with memory: {folder} does not say so")
    return size_bytes


def capacity_bytes_at(place: Place, capacity: str | int) -> int:
    """What was asked for in bytes; "all" is a whole device, or a file that keeps its size, as
    nothing else has a size before."""
    if capacity != ALL:
        return parse_bytes(capacity)
    if place.path is not None and place.in_place:
        size_bytes = os.stat(place.path).st_size
        if size_bytes == 0:
            raise BadArgumentError(
                f"capacity 'all' of {place.path}, which is empty: give the file its size before "
                "(fallocate -l 8GiB)"
            )
        return size_bytes
    if place.path is None or not is_device(place.path):
        if place.path is not None:
            check_below_dev(place.path)
        raise BadArgumentError(
            "capacity 'all' is for a dax device, or a file in place (dax:PATH): say how much, "
            "like 8GiB"
        )
    return whole_device_bytes(place.path)


def check_room(place: Place, capacity_bytes: int) -> None:
    """Raises MemoryShortError when `capacity_bytes` cannot be had at `place` now.

    A device has the memory that it has, and so has a file in place: the core holds the pool against
    it, and asks the file system for what a file with holes lacks. Any other file is reserved
    whole when it is made, so that it cannot fail later; memory that backs /dev/shm or an anonymous
    pool is also held against what is available and the cgroup's limit. Raises SystemCallError when
    the folder cannot be written, UnsupportedError for a file among the devices of /dev.
    """
    if capacity_bytes >= ADDRESSES_BYTES:
        raise MemoryShortError(
            f"{format_bytes(capacity_bytes)} wanted: more than a process can address. Ask for less"
        )
    path = place.path
    if path is not None and (is_device(path) or is_striped(path)):
        return
    if path is not None and place.in_place:
        if path.startswith("/dev/shm/"):
            check_memory(max(0, capacity_bytes - os.stat(path).st_blocks * 512))
        return
    if path is not None:
        check_below_dev(path)
        folder = Path(path).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SystemCallError(
                f"{path}: the folder {folder} cannot be written by this user, or is read-only. "
                "Choose another path"
            )
        space = os.statvfs(folder)
        free_bytes = space.f_bavail * space.f_frsize
        # hugetlbfs without a size says 0 of 0: then the reservation itself finds out.
        if space.f_blocks and capacity_bytes > free_bytes:
            larger = (
                "make it larger (in Docker: --shm-size; else: mount -o remount,size=... /dev/shm)"
                if path.startswith("/dev/shm/")
                else "choose a path on another file system"
            )
            raise MemoryShortError(
                f"{path}: {format_bytes(capacity_bytes)} wanted, its file system has "
                f"{format_bytes(free_bytes)} free. Ask for less, or {larger}"
            )
    if path is None or path.startswith("/dev/shm/"):
        check_memory(capacity_bytes)


def check_memory(capacity_bytes: int) -> None:
    """Raises MemoryShortError when that much memory is not available to this process."""
    memory = probe().memory
    if memory.available_bytes is None:  # /proc/meminfo is masked: the kernel still says how much
        machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if capacity_bytes > machine_bytes:
            raise MemoryShortError(
                f"{format_bytes(capacity_bytes)} wanted, this machine has "
                f"{format_bytes(machine_bytes)} of memory. Ask for less"
            )
    if memory.available_bytes is not None and capacity_bytes > memory.available_bytes:
        raise MemoryShortError(
            f"{format_bytes(capacity_bytes)} wanted, {format_bytes(memory.available_bytes)} of "
            "memory available. Ask for less, or place the pool on a file system with more room"
        )
    limit, usage = memory.cgroup_limit_bytes, memory.cgroup_usage_bytes
    if limit is not None and capacity_bytes > limit - (usage or 0):
        raise MemoryShortError(
            f"{format_bytes(capacity_bytes)} wanted, this cgroup may use {format_bytes(limit)} and "
            f"uses {format_bytes(usage or 0)}. Ask for less, or raise the container's memory limit"
        )
