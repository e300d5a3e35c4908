"""Checks of the place that a pool would have, and of what the machine gives this process."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterator
from glob import escape, glob

from cxlkv.adapters.common.pools import SHARED_MEMORY
from cxlkv.errors import BadArgumentError, CXLKVError, NotAPoolError
from cxlkv.layout import format_bytes
from cxlkv.machine.devices import probe_devices
from cxlkv.machine.locking import try_lock
from cxlkv.machine.nodes import probe_nodes
from cxlkv.machine.placement import named
from cxlkv.machine.regions import check_below_dev, is_device, is_striped
from cxlkv.machine.suggestions import lacking
from cxlkv.machine.sysfs import id_list, read
from cxlkv.machine.topology import GIB, missing, probe
from cxlkv.ops.doctor_findings import SHM_LARGER, Ask, Finding, State, of_error
from cxlkv.pool import CXLPool, Pool
from cxlkv.stats import find, inspect, pool_folders

IN_MEMORY = {"tmpfs", "hugetlbfs", "ramfs", "devtmpfs", "famfs"}
STORES = {"vllm": "K and V", "transformers": "K and V", "sglang": "objects", "lmcache": "objects"}
DAX = r"dax[0-9]+\.[0-9]+"


# ---- the place ----


def place(ask: Ask) -> Iterator[Finding]:
    """The folder, and what lies at the path already; a pool is opened as an engine would."""
    path = ask.parse().path
    if path is None:
        yield Finding("place", "ok", f"{ask.where}, memory of one process and its children")
    elif os.path.lexists(path) or is_striped(path):
        yield _existing(ask, path)
    else:
        yield _folder(ask, path)


def _folder(ask: Ask, path: str) -> Finding:
    check_below_dev(path)
    user, folder = os.geteuid(), os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        seen = f"{folder} cannot be written by user {user}"
        command = f"sudo setfacl -m u:{user}:rwx {folder}, or another --where"
        return Finding("place", "error", seen, "the pool's file is made there", command)
    mounts = (line.split() for line in read(ask.root / "proc/self/mounts").splitlines())
    kinds = {words[1]: words[2] for words in mounts if len(words) > 2}
    above = os.path.realpath(folder)
    while above not in kinds and above != "/":
        above = os.path.dirname(above)
    kind = kinds.get(above, "")
    if kind in IN_MEMORY or not kind:
        return Finding("place", "ok", f"{folder} ({kind or 'not known'}) can be written")
    why = "the kernel writes the pool to a disk, too, and reads it from there"
    return Finding(
        "place", "warning", f"{folder} is not in memory: {kind}", why, "--where /dev/shm/"
    )


def _existing(ask: Ask, path: str) -> Finding:
    why, user = "an engine opens what lies there, and makes nothing beside it", os.geteuid()
    try:
        found = inspect(path)
        if found.state == "damaged":  # or of an older format, which an upgrade mends
            command = of_error("place", CXLKVError(found.detail)).command
            remove = f"cxlkv pool remove {path}"
            command = command if command.startswith("cxlkv pool upgrade") else remove
            return Finding("place", "error", found.detail, why, command)
        owner = user if is_striped(path) or is_device(path) else os.stat(path).st_uid
        if owner != user and (ask.engine or user):
            seen = f"{path} belongs to user {owner}, this is user {user}"
            return Finding("place", "error", seen, why, f"sudo chown {user} {path}")
        with Pool.open(path, threads=1) as pool:
            return _opened(ask, path, pool, why)
    except NotAPoolError as error:
        if is_device(path):
            return Finding("place", "ok", f"no pool on {path} yet")
        return Finding("place", "error", str(error), why, f"another --where, or rm {path}")
    except BadArgumentError as error:
        if "hosts share this pool" not in str(error):
            raise
        command = 'export CXLKV_HOST=auto; for an engine: "host": "auto" and "sharing" as in '
        seen = f"{path}: hosts share this pool, and no host is named"
        return Finding("place", "error", seen, why, f"{command}cxlkv pool inspect {path}")


def _opened(ask: Ask, path: str, pool: Pool, why: str) -> Finding:
    stored = "K and V" if isinstance(pool, CXLPool) else "objects"
    wanted = STORES.get(ask.engine or "", stored)
    lacks = [] if stored == wanted else [f"stores {stored}, and {ask.engine} wants {wanted}"]
    lacks += [] if pool.checksum or ask.engine is None else ["has no checksums"]
    if lacks:
        command = f"--where FOLDER/, with a file for each kind; or cxlkv pool remove {path}"
        return Finding("place", "error", f"{path} {' and '.join(lacks)}", why, command)
    size = format_bytes(pool.pages.geometry["region_bytes"])
    return Finding("place", "ok", f"{path}: a pool of {stored}, {size}")


# ---- room, memory, nodes ----


def room(ask: Ask) -> Iterator[Finding]:
    """The size against all that bounds it: file system, memory, cgroup, ulimit."""
    where = ask.makeable
    if where is None:
        return
    wanted, machine = ask.wanted_bytes, probe(ask.root)
    memory, used = machine.memory, machine.memory.cgroup_usage_bytes or 0
    on_shm, gib = (where.path or "").startswith(SHARED_MEMORY), -(-(wanted + used) // GIB)
    bounds = [("ulimit -v", _limit(resource.RLIMIT_AS), "ulimit -v unlimited")]
    if where.path is not None:
        larger = SHM_LARGER.replace("16", str(gib)) if on_shm else "another --where"
        folder = os.path.dirname(os.path.abspath(where.path))
        bounds.append((folder, _free(ask, folder), f"{larger}, or a smaller --capacity"))
        bounds.append(("ulimit -f", _limit(resource.RLIMIT_FSIZE), "ulimit -f unlimited"))
    if on_shm or where.path is None:
        bounds.append(("available memory", memory.available_bytes, "a smaller --capacity"))
        limit = memory.cgroup_limit_bytes
        more = f"docker run --memory={gib}g ..., or: systemctl set-property UNIT MemoryMax={gib}G"
        bounds.append(("this cgroup's memory", None if limit is None else limit - used, more))
    known = [(name, size, command) for name, size, command in bounds if size is not None]
    for name, size, command in known:
        if size < wanted:
            seen = f"{format_bytes(wanted)} wanted, {format_bytes(max(0, size))} there ({name})"
            why = "the pool is reserved whole when it is made"
            yield Finding("room", "error", seen, why, command)
    if all(size >= wanted for _, size, _ in known):
        for advice in missing(machine):
            if on_shm and "/dev/shm" in advice.what:
                yield Finding("room", "warning", advice.what, advice.why, advice.command)
        least = min((size for _, size, _ in known), default=wanted)
        seen = f"{format_bytes(wanted)} of {format_bytes(least)}"
        by_default = "" if ask.capacity else ": what a server takes unless told a capacity"
        yield Finding("room", "ok", seen + by_default)


def _limit(which: int) -> int | None:
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _free(ask: Ask, folder: str) -> int | None:
    shared = probe(ask.root).shared_memory
    if folder == SHARED_MEMORY.rstrip("/") and shared.size_bytes is not None:
        return shared.size_bytes if shared.free_bytes is None else shared.free_bytes
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def locked(ask: Ask) -> Iterator[Finding]:
    """Lock as many bytes as the pool has, without taking memory for them."""
    wanted = max(mmap.PAGESIZE, ask.wanted_bytes)
    try:
        code = try_lock(wanted)
    except OSError as error:
        yield Finding("locked memory", "absent", f"not tried: {error.strerror}")
        return
    if code == 0:
        yield Finding("locked memory", "ok", f"{format_bytes(wanted)} can be locked")
        return
    limit = _limit(resource.RLIMIT_MEMLOCK)
    may = "" if limit is None else f"; ulimit -l is {format_bytes(limit)}"
    seen = f"{format_bytes(wanted)} cannot be locked: {os.strerror(code)}{may}"
    why = "the pool can be swapped out, and RDMA cannot use it"
    command = "ulimit -l unlimited, or: docker run --ulimit memlock=-1 ..."
    yield Finding("locked memory", "warning", seen, why, command)


def numa(ask: Ask) -> Iterator[Finding]:
    """Whether numactl or another parent keeps this process's memory on some nodes."""
    pattern = r"^[0-9a-f]+ ((?:bind|prefer|interleave|weighted)[^:\n]*):([0-9,-]+) .*(?:heap|stack)"
    policy = re.search(pattern, read(ask.root / "proc/self/numa_maps"), re.M)
    chosen = id_list(policy[2]) if policy else ()
    there = [node.node for node in probe(ask.root).nodes if node.total_bytes]
    if policy and set(there) - set(chosen) and not (ask.makeable and ask.makeable.nodes):
        seen = f"this process's memory goes to {named(chosen)} ({policy[1]}); there are {there}"
        meant = f"--where numa:{','.join(map(str, chosen))}:/dev/shm/"
        command = f"numactl --localalloc COMMAND; if it is meant, {meant}"
        yield Finding("numa", "warning", seen, "the pool's memory comes from there, too", command)
    else:
        yield Finding("numa", "ok", f"memory on {named(there) if there else 'any node'}")


def dax(ask: Ask) -> Iterator[Finding]:
    """Devices, and other far memory that is there and cannot be used as it is."""
    devices, asked = probe_devices(ask.root), set(re.findall(DAX, ask.where))
    for advice in lacking(probe_nodes(ask.root), devices):
        state: State = "error" if asked & set(re.findall(DAX, advice.what)) else "warning"
        yield Finding("dax", state, advice.what, advice.why, advice.command)
    for each in devices.dax_devices:
        if each.name in asked and each.driver == "kmem":
            seen = f"{each.file} is system RAM (kmem), node {each.target_node}"
            command = f"sudo daxctl reconfigure-device --mode=devdax --force {each.name}"
            yield Finding("dax", "error", seen, "it cannot be mapped as a device", command)
        elif each.driver == "device_dax" and not each.file_trouble:
            yield Finding("dax", "ok", f"{each.file}, {format_bytes(each.size_bytes or 0)}")
    if not devices.dax_devices and not asked:
        yield Finding("dax", "absent", "none")


def links(ask: Ask) -> Iterator[Finding]:
    """GPUs that could have more lanes than they have; their speed falls while nothing runs."""
    gpus = [each for each in probe_devices(ask.root).gpus if each.driver and each.lanes]
    for each in gpus:
        seen = f"{each.address}: {each.lanes} of {each.lanes_most} lanes"
        if each.lanes_most and each.lanes and each.lanes < each.lanes_most:
            why = "keys and values go over this link: put the card where it has all lanes"
            yield Finding("link", "warning", seen, why, f"sudo lspci -vv -s {each.address}")
        else:
            yield Finding("link", "ok", seen)
    if not gpus:
        yield Finding("link", "absent", "no GPU")


# ---- what others left ----


def left_overs(ask: Ask) -> Iterator[Finding]:
    """What processes that were killed have left: first beside the pool, then where pools lie by
    default."""
    where = ask.makeable
    folder = os.path.dirname(os.path.abspath(where.path)) if where and where.path else ""
    beside = [] if folder in ("", "/dev/shm") else glob(f"{escape(folder)}/*.pool*")
    found = find([*pool_folders(), *beside], missing=[])
    found.sort(key=lambda each: os.path.dirname(each.path) != folder)
    gone = [each for each in found if each.state in ("half-made", "orphan")]
    killed = [each for each in found if each.state == "idle" and not each.settled]
    damaged = [each for each in found if each.state == "damaged"]
    remove = "cxlkv pool remove PATH"
    for pools, what, command in (
        (gone, "of pools that no process can open any more", "cxlkv pool gc"),
        (killed, "of processes that were killed", f"{remove}, or cxlkv pool gc --idle-s 86400"),
        (damaged, "that cannot be opened", remove),
    ):
        if pools:
            paths = ", ".join(each.path for each in pools[:2]) + (" ..." if pools[2:] else "")
            size = format_bytes(sum(each.bytes for each in pools))
            seen = f"{len(pools)} file{'s'[: len(pools) > 1]} {what}, {size}: {paths}"
            why = "a new pool cannot have their memory"
            yield Finding("left-overs", "warning", seen, why, command)
    if not (gone or killed or damaged):
        yield Finding("left-overs", "ok", "none")
