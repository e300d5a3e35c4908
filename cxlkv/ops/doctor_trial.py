"""A small pool is made where an engine's would be, used, measured, and gone again.

Its file loses its name as soon as it is there: whatever ends this process, the kernel takes the
memory back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cxlkv.adapters.common.pools import SHARED_MEMORY
from cxlkv.errors import CorruptError, CXLKVError
from cxlkv.layout import KVLayout, format_bytes
from cxlkv.machine.huge_pages import huge_bytes, mapped
from cxlkv.machine.regions import Place
from cxlkv.ops.doctor_findings import Ask, Finding, of_error
from cxlkv.pool import CXLPool

TRIAL_BYTES = 64 << 20
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=64, page_tokens=16, dtype="float32")
TOKENS = 4096
ROUNDS = 3
SLOW = 0.1  # of plain memory's speed: far memory is faster, a disk is not
GPU_FILE = "/dev/nvidiactl"


def trial(ask: Ask) -> Iterator[Finding]:
    """Makes a pool, uses it, looks how it is mapped, measures, registers."""
    place = ask.makeable
    if place is None:
        yield Finding("pool", "absent", "not tried: no place where a file may be made")
        return
    with made(ask, place) as pool:
        yield _used(pool)
        yield _speed(pool)  # touches all of it
        pool.admin.prefault()
        yield _huge(place, mapped(*pool.pages.memory()))
        yield _registered(pool)


@contextmanager
def made(ask: Ask, place: Place) -> Iterator[CXLPool]:
    """The pool, of which other processes see nothing."""
    where, path = ask.where, None
    if place.path is not None:
        folder = os.path.dirname(os.path.abspath(place.path))
        path = os.path.join(folder, f"cxlkv-doctor-{os.getpid()}-{time.monotonic_ns()}.pool")
        nodes = ",".join(map(str, place.nodes))
        where = f"numa:{nodes}:{path}" if nodes else path
    capacity = min(TRIAL_BYTES, ask.wanted_bytes)
    try:
        pool = CXLPool.create(where, layout=LAYOUT, capacity=capacity, threads=1)
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)
    with pool:
        yield pool


def _used(pool: CXLPool) -> Finding:
    """Append, publish, match, fetch and compare; then a check of every byte."""
    room = pool.pages.geometry["page_count"] * LAYOUT.page_tokens
    k = np.random.default_rng(1).standard_normal((min(TOKENS, room), 1, 64)).astype(np.float32)
    ids, sequence = np.arange(len(k)), pool.sequence()
    for layer in range(LAYOUT.layers):
        sequence.append(layer, k, -k)
    pool.publish_prefix(sequence, ids)
    with pool.match_prefix(ids) as hit:
        found = [hit.sequence().fetch(layer) for layer in range(LAYOUT.layers)]
    same = all(np.array_equal(a.ravel(), k.ravel()) and np.array_equal(a, -b) for a, b in found)
    if not same or not pool.admin.check(deep=True)["clean"]:
        raise CorruptError("what was read is not what was written. Test this machine's memory")
    told = pool.describe()
    if "emulated" in told:
        seen, why = f"works behind a link: {told['emulated']}", "transfers wait as on that device"
        return Finding("pool", "warning", seen, why, "unset CXLKV_EMULATE")
    size = format_bytes(pool.pages.geometry["region_bytes"])
    return Finding("pool", "ok", f"{size} made, filled, published, matched, checked, removed")


def _speed(pool: CXLPool) -> Finding:
    """Copies of the whole region, out and back, beside copies in plain memory."""
    region = np.frombuffer(pool._region_view(), np.uint8)
    plain, other = np.zeros_like(region), np.ones_like(region)
    memory = _rate(lambda: np.copyto(other, plain), region.nbytes)
    read = _rate(lambda: np.copyto(plain, region), region.nbytes)
    write = _rate(lambda: np.copyto(region, plain), region.nbytes)  # the bytes that it has
    seen = f"reads {read:.1f}, writes {write:.1f} GB/s; plain memory {memory:.1f}"
    if label := pool.describe().get("emulated"):
        seen += f" (this machine's memory: such copies do not go over the emulated {label})"
    if min(read, write) >= SLOW * memory:
        return Finding("speed", "ok", seen)
    command = "--where /dev/shm/, or memory nearer to these CPUs: cxlkv info"
    return Finding("speed", "warning", seen, "cached keys are read at this speed", command)


def _rate(copy: Callable[[], None], size: int) -> float:
    """GB/s, the best of some rounds."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return size / best_s / 1e9


def _huge(place: Place, kib: dict[str, int]) -> Finding:
    """From Linux 6.1 on a pool has them without any setting, as long as there are whole ones."""
    if kib.get("KernelPageSize", 4) > 64:  # hugetlbfs
        return Finding("huge pages", "ok", f"all reserved, {kib['KernelPageSize'] >> 10} MiB each")
    huge = huge_bytes(kib) >> 10
    seen = f"{huge >> 10} of {kib.get('Rss', 0) >> 10} MiB mapped by huge pages"
    if huge * 2 >= kib.get("Rss", 0):
        return Finding("huge pages", "ok", seen)
    why = "with small pages, address translation slows each scan of a large pool"
    command = "echo within_size | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if place.path is not None:
        shm = "sudo mount -o remount,huge=within_size /dev/shm"
        command = shm if place.path.startswith(SHARED_MEMORY) else f"--where /dev/shm/, and {shm}"
        command += " (older kernels: huge=always); then make the pool anew"
    return Finding("huge pages", "warning", seen, why, command)


def _registered(pool: CXLPool) -> Finding:
    """The CUDA driver is told of the region, as for an engine on a GPU."""
    if not os.path.exists(GPU_FILE):
        return Finding("gpu", "absent", "no NVIDIA GPU")
    try:
        from cxlkv.gpu.mapping import Mapping

        Mapping(pool, "cuda").close()
    except ModuleNotFoundError as error:
        return Finding("gpu", "absent", f"not tried: {error.name} is not installed")
    except CXLKVError as error:
        found = of_error("gpu", error)
        return Finding("gpu", "warning", found.seen, "it reads through copies", found.command)
    return Finding("gpu", "ok", "the driver has registered the pool's memory")
