"""Whether memory may be locked: tried, as a right to lock more than the limit shows in no file."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

MLOCK_ONFAULT = 1
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def try_lock(size_bytes: int) -> int:
    """Lock so many bytes and let go of them, without taking memory: 0, or the errno.

    ulimit -l does not count for a process that has CAP_IPC_LOCK in the first user namespace, as
    root has. Raises OSError where there is no room for so many addresses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    with mmap.mmap(-1, max(mmap.PAGESIZE, size_bytes), flags=flags) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        size = ctypes.c_size_t(len(memory))
        code = _libc().mlock2(ctypes.c_void_p(address), size, MLOCK_ONFAULT)
        return 0 if code == 0 else ctypes.get_errno()


def limit_counts(limit_bytes: int) -> bool:
    """Whether this process may not lock more than that."""
    try:
        return try_lock(limit_bytes + mmap.PAGESIZE) != 0
    except OSError:
        return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
