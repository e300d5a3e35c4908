"""Registers a pool's memory with the GPU driver, and says where its pages lie.

docs/explanation/gpu.md says what a registration needs; docs/decisions/0015-gpu-mapping.md why it is
like this.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from cxlkv.arrays import Offsets
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    GpuError,
    MemoryShortError,
    RegistrationError,
    UnsupportedError,
)
from cxlkv.gpu.driver import (
    ALREADY_REGISTERED,
    REGISTER_DEVICEMAP,
    REGISTER_PORTABLE,
    REGISTER_READ_ONLY,
    SUCCESS,
    Driver,
    driver_of,
    index_of,
)
from cxlkv.layout import format_bytes
from cxlkv.machine.lifetime import Closing
from cxlkv.machine.topology import Memory, probe
from cxlkv.pages import Pages
from cxlkv.pool import Pool
from cxlkv.sequence import Sequence

PIECE_BYTES_MAX = 64 << 30
"""Most bytes of one registration, where all at once is refused: some drivers (R580) refuse 512
GiB."""
ALIGNMENT_BYTES = 2 << 20
RESIDENT_STEP_BYTES = 1 << 30
UNCHARGED = ("hugetlb", "devdax")  # kinds of pages that no memory cgroup counts


class PageTable(NamedTuple):
    """Where the complete pages of one layer of a sequence are, as kernels take it: int64 on the
    CPU, absolute addresses that the device can read, 0: nothing there (behind a window).

    keys_at, values_at: [kv_heads, pages], a piece each, of codes where the pool has an encoding
    (kernels.attend takes the layout's); where values are the first channels of the keys, both are
    the same. descriptors_at: [pages], 0 also while a page has no seal yet.
    generations: [pages], which a descriptor shows as long as the page is this one. pages: [pages],
    their ids.
    """

    keys_at: torch.Tensor
    values_at: torch.Tensor
    descriptors_at: torch.Tensor
    generations: torch.Tensor
    pages: torch.Tensor


class Mapping(Closing):
    """The region of a pool for one device; several users of a pool share one registration.

    Registering pins all of the region's memory. On device "cpu" nothing is registered. Addresses
    are good until the pool is closed, or the last Mapping of it, whichever comes first: both wait
    for the devices. A forked child has no mapping, as it has no CUDA.
    """

    def __init__(
        self, pool: Pool, device: torch.device | str = "cuda", *, driver: Driver | None = None
    ):
        """driver: another one than the process's.

        Raises UnsupportedError without CUDA, MemoryShortError when limits forbid to pin so much,
        RegistrationError when the driver refuses: then cxlkv.gpu.staging is the way.
        """
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"a pool is mapped for 'cpu' or 'cuda', not for {self.device}")
        self.pool = pool
        self._pid = os.getpid()
        host_address, self.size = pool.pages.memory()
        self._geometry = pool.pages.geometry
        self.writable = True
        """Whether the device may write: not where hosts share the pool, as most is not ours."""
        self._address = host_address
        self.driver: Driver | None = None
        """How the device was told of the region; None on the CPU."""
        self.cuts = np.empty(0, np.int64)
        """Device addresses that no DMA may go across: where pieces of the registration meet."""
        held = None
        if self.device.type == "cuda":
            found = driver if driver is not None else driver_of(self.device)
            held = _acquire(pool, found, index_of(self.device))
            self.driver, self.writable = found, held.writable
            self._address = held.device_address
            starts = np.array([at for at, _ in held.pieces[1:]], np.int64)
            self.cuts = starts - host_address + self._address
        self._closer = weakref.finalize(self, _release, held, self._pid, pool.pages)
        pool.before_close(self.close)

    @property
    def tensor(self) -> torch.Tensor:
        """The whole region, uint8 on the CPU, in place. The pool cannot be closed while in use."""
        self._check()
        return torch.frombuffer(self.pool._region_view(), dtype=torch.uint8)

    @property
    def device_address(self) -> int:
        """Device address of the region's first byte; with unified addressing the host's."""
        self._check()
        return self._address

    def pages(self, sequence: Sequence, layer: int, first: int = 0) -> PageTable:
        """Return the table of the layer's complete pages from `first` on."""
        self._check()
        if sequence not in self.pool:
            raise BadArgumentError("the sequence is of another pool than the mapping")
        found = sequence.places(layer, first)
        own = self.pool.layout.values == "own"
        stride = self._geometry["value_piece_bytes" if own else "key_piece_bytes"]
        return PageTable(
            keys_at=self._pieces(found.keys, self._geometry["key_piece_bytes"]),
            values_at=self._pieces(found.values, stride),
            descriptors_at=self._pieces(found.descriptors, 0)[0],
            generations=torch.from_numpy(found.generations.astype(np.int64)),
            pages=torch.from_numpy(found.pages.astype(np.int64)),
        )

    def _pieces(self, offsets: Offsets, stride: int) -> torch.Tensor:
        heads = self.pool.layout.kv_heads if stride else 1
        steps = stride * np.arange(heads, dtype=np.int64)[:, None]
        at = np.where(offsets >= 0, offsets + steps + self._address, 0)
        return torch.from_numpy(at)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this mapping is of the parent process: CUDA does not survive os.fork(). Start "
                "processes by the spawn method, and map the pool there"
            )
        if not self._closer.alive:
            raise ClosedError("the mapping is closed")

    def close(self) -> None:
        """Wait for the device, and unregister if nobody else uses the registration; a second time
        does nothing. The pool's close() does it, too."""
        self._closer()


@dataclass(eq=False)
class _Registration:
    """What the driver was told of one region; its pieces are (address, bytes), by address."""

    driver: Driver
    address: int
    device_address: int
    writable: bool
    pieces: list[tuple[int, int]]
    users: int = 0
    devices: set[int] = field(default_factory=set)


_lock = threading.RLock()  # the collector may close a mapping while this thread makes one
_registrations: dict[tuple[Driver, int], _Registration] = {}


def _forget() -> None:
    """Forget registrations in a forked child: they are its parent's."""
    global _lock
    _lock = threading.RLock()
    _registrations.clear()


os.register_at_fork(after_in_child=_forget)


def _release(held: _Registration | None, pid: int, pages: Pages) -> None:
    """One user less; the last one unregisters. Given the pool's pages, so that the memory is
    unmapped afterwards, in whatever order the collector finds the two."""
    if held is None or os.getpid() != pid:
        return
    with _lock:
        held.users -= 1
        if held.users == 0:
            del _registrations[held.driver, held.address]
            _unregister(held)


def _acquire(pool: Pool, driver: Driver, device: int) -> _Registration:
    address, size = pool.pages.memory()
    with _lock:
        held = _registrations.get((driver, address))
        if held is None:
            described = pool.describe()
            kind = str(described["page_kind"])
            if kind not in UNCHARGED:
                check_limits(size, unbacked_bytes(address, size), probe().memory)
            shared = described["sharing"] != "host"
            with driver.current(device):
                held = _register(driver, address, borders(pool), shared, kind)
            _registrations[driver, address] = held
        held.users += 1
        held.devices.add(device)
        return held


def borders(pool: Pool, piece_bytes_max: int | None = None) -> list[int]:
    """Offsets at which a region may be cut, from 0 to its end: no more than piece_bytes_max between
    them, if extents allow it, each at 2 MiB, and none within an extent. A copy may not go across
    two registrations, and no page lies in two extents."""
    most = PIECE_BYTES_MAX if piece_bytes_max is None else piece_bytes_max
    geometry = pool.pages.geometry
    size, first = geometry["region_bytes"], geometry["extents_offset"]
    step = math.lcm(geometry["extent_bytes"], ALIGNMENT_BYTES)
    step *= max(1, (most - first) // step)
    return [0, *range(first + step, size, step), size]


def _register(
    driver: Driver, address: int, cuts: list[int], shared: bool, kind: str
) -> _Registration:
    """All at once, else in pieces; of a pool that hosts share for reading only, as the mapping of
    what is not ours is read-only itself."""
    flags = REGISTER_PORTABLE | REGISTER_DEVICEMAP | (REGISTER_READ_ONLY if shared else 0)
    code = SUCCESS
    for offsets in ([cuts[0], cuts[-1]], cuts):
        pieces = [(address + start, end - start) for start, end in pairwise(offsets)]
        held = _Registration(driver, address, address, not shared, [])
        for piece in pieces:
            code = driver.register(*piece, flags)
            if code != SUCCESS:
                break
            held.pieces.append(piece)
        if code == SUCCESS:
            held.device_address = _device_address(held)
            return held
        _unregister(held)
        if code == ALREADY_REGISTERED or len(cuts) == 2:
            break
    raise RegistrationError(_refusal(driver.describe(code), code, cuts[-1], kind, shared))


def _device_address(held: _Registration) -> int:
    """Raises RegistrationError when the device does not see the pieces side by side."""
    try:
        seen = [held.driver.device_address(at) - at + held.address for at, _ in held.pieces]
    except GpuError:
        _unregister(held)
        raise
    if len(set(seen)) != 1:
        _unregister(held)
        raise RegistrationError(
            f"the region was registered in {len(held.pieces)} pieces, and the device sees them at "
            "places of their own. Read the pool through cxlkv.gpu.staging"
        )
    return seen[0]


def _unregister(held: _Registration) -> None:
    """Unregister memory after all work of the devices. Errors are the driver's own end, as the
    process ends, or a failure that the next call shows, too; the memory is the pool's in any
    case."""
    for device in held.devices:
        with suppress(GpuError), held.driver.current(device):
            held.driver.synchronize()
    # None while it is being made: then a context is current.
    context = held.driver.current(min(held.devices)) if held.devices else nullcontext()
    with suppress(GpuError), context:
        for at, _ in reversed(held.pieces):
            held.driver.unregister(at)


def _refusal(what: str, code: int, size: int, kind: str, shared: bool) -> str:
    text = f"the CUDA driver does not register the pool's {format_bytes(size)} ({kind}): {what}. "
    if code == ALREADY_REGISTERED:
        return text + (
            "Somebody else in this process has registered a part of it: let cxlkv do it alone, or "
            "read the pool through cxlkv.gpu.staging"
        )
    if shared:
        text += "Hosts share this pool, so it was asked for reading only, which not all can. "
    memlock = probe().memory.memlock_bytes
    if memlock is not None and memlock < size:
        text += (
            f"This process may lock {format_bytes(memlock)} (ulimit -l); if the kernel counts what "
            "the driver pins, that is too little. "
        )
    return text + (
        "What helps: memory in /dev/shm, huge pages or a dax device in place of a file on a disk; "
        "a smaller pool; or to read the pool through cxlkv.gpu.staging"
    )


def check_limits(size: int, unbacked: int, memory: Memory) -> None:
    """Raises MemoryShortError when there is no memory for what pinning `size` bytes brings in.

    Pages of /dev/shm and anonymous pools are charged to the cgroup that touches them first: what
    lies in memory already has been, and pinning touches the other `unbacked` bytes.
    """
    text = (
        f"a GPU reads a pool in memory that is there and stays there: of its {format_bytes(size)} "
        f"{format_bytes(unbacked)} are not there yet, and"
    )
    limit, usage = memory.cgroup_limit_bytes, memory.cgroup_usage_bytes or 0
    if limit is not None and unbacked > limit - usage:
        raise MemoryShortError(
            f"{text} this cgroup may use {format_bytes(limit)} and uses {format_bytes(usage)}. "
            "Raise the container's memory limit, make a smaller pool, or read it through "
            "cxlkv.gpu.staging"
        )
    if memory.available_bytes is not None and unbacked > memory.available_bytes:
        raise MemoryShortError(
            f"{text} this machine has {format_bytes(memory.available_bytes)} available. Make a "
            "smaller pool, or read it through cxlkv.gpu.staging"
        )


def unbacked_bytes(address: int, size: int) -> int:
    """Count a mapping's bytes that have no page in memory; 0 where the kernel does not say."""
    look = ctypes.CDLL(None).mincore
    look.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    missing = 0
    for start in range(0, size, RESIDENT_STEP_BYTES):
        length = min(RESIDENT_STEP_BYTES, size - start)
        pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
        if look(address + start, length, pages.ctypes.data) != 0:
            return 0
        missing += len(pages) - int(np.count_nonzero(pages & 1))
    return min(size, missing * mmap.PAGESIZE)
