"""Tells when memory is touched: in the middle of a copy, whoever makes it, in C as well."""

from __future__ import annotations

import ctypes
import mmap
import signal
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_NONE, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_kept: list[object] = []  # what the kernel may still call


def at_touch(address: int, size: int, call: Callable[[], object]) -> None:
    """Once, before the first load or store in the first whole page of this memory of ours; it then
    goes on. `call` is made in the thread that does it, which has no lock of Python's then."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    assert begin + mmap.PAGESIZE <= address + size, "there is no whole page in it"

    def touched(_: int) -> None:
        _libc.signal(signal.SIGSEGV, before)
        call()
        _protect(begin, _ALL)

    handler = _Handler(touched)
    _kept.append(handler)
    before = _libc.signal(signal.SIGSEGV, ctypes.cast(handler, ctypes.c_void_p))
    _protect(begin, _NONE)


def _protect(page: int, how: int) -> None:
    assert _libc.mprotect(page, mmap.PAGESIZE, how) == 0, ctypes.get_errno()
