"""Binds the CUDA driver by ctypes, for what torch lacks: registered memory and batched copies.

The only file that calls libcuda. Calls run in torch's own context, the primary one of a device.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np
import torch

from cxlkv.arrays import Pointers, Sizes
from cxlkv.errors import BadArgumentError, GpuError, GpuMemoryError, UnsupportedError

LIBRARY = "libcuda.so.1"
SUCCESS = 0
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712

REGISTER_PORTABLE = 1
REGISTER_DEVICEMAP = 2
REGISTER_READ_ONLY = 8
ORDERED_BY_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    """CUmemLocation: a hint, which the driver does not need for memory that it knows."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of all copies of a batch."""

    _fields_ = (
        ("source_order", c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


# Of each function its arguments; all return a CUresult. The batched copy comes in two forms, and
# drivers before 12.8 have neither.
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
_BATCH = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t)
_BATCHES: dict[str, tuple[type, ...]] = {
    "cuMemcpyBatchAsync_v2": (*_BATCH, c_void_p),  # CUDA 13
    "cuMemcpyBatchAsync": (*_BATCH, c_void_p, c_void_p),  # 12.8: failIdx before the stream
}


class Driver:
    """One loaded driver. Any thread may use it, in the process that made it."""

    def __init__(self, library: str = LIBRARY):
        """Raises UnsupportedError when there is no driver, or no device, that can be used."""
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
        except OSError as error:
            raise UnsupportedError(
                f"no CUDA driver: {error}. Install NVIDIA's driver; in a container, start it with "
                "GPUs (docker run --gpus all)"
            ) from error
        except AttributeError as error:
            raise UnsupportedError(
                f"{library} is no CUDA driver of 11.0 or newer: {error}"
            ) from error
        self._batch = ""
        for name, arguments in _BATCHES.items():
            if not self._batch and hasattr(self._library, name):
                getattr(self._library, name).argtypes = arguments
                self._batch = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        code = self._raw("cuInit", 0)
        if code != SUCCESS:
            raise UnsupportedError(f"the CUDA driver does not start: {self.describe(code)}")
        if self.device_count() == 0:
            raise UnsupportedError("no CUDA device: the driver is there and sees none")

    @property
    def has_batched_copies(self) -> bool:
        """Whether one call takes many copies: from driver 12.8 on."""
        return bool(self._batch)

    @property
    def alive(self) -> bool:
        """False in a forked child, which CUDA does not serve."""
        return os.getpid() == self._pid

    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver serves, like (13, 0)."""
        number = c_int()
        self._call("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def device_count(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make that device the current one of this thread, within the block."""
        context, now = self._context_of(device), c_void_p()
        self._call("cuCtxGetCurrent", byref(now))
        if now.value == context:
            yield
            return
        self._call("cuCtxPushCurrent_v2", c_void_p(context))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(now))

    def _context_of(self, device: int) -> int:
        """torch's own: retaining it makes it if torch has not, and it stays until the end."""
        if not self.alive:
            raise UnsupportedError(
                "CUDA does not survive os.fork(): start processes by the spawn method"
            )
        with self._lock:
            if device not in self._contexts:
                handle, context = c_int(), c_void_p()
                self._call("cuDeviceGet", byref(handle), device)
                self._call("cuDevicePrimaryCtxRetain", byref(context), handle)
                assert context.value is not None
                self._contexts[device] = context.value
            return self._contexts[device]

    def synchronize(self) -> None:
        """Wait for all work of the current device."""
        self._call("cuCtxSynchronize")

    def register(self, address: int, size: int, flags: int) -> int:
        """Pin and map host memory; returns the driver's code, which the caller must check."""
        return self._raw("cuMemHostRegister_v2", c_void_p(address), size, flags)

    def unregister(self, address: int) -> int:
        return self._raw("cuMemHostUnregister", c_void_p(address))

    def device_address(self, address: int) -> int:
        """Where the device sees registered memory: with unified addressing, where the host does."""
        found = c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(address), 0)
        return found.value

    def copy(self, targets: Pointers, sources: Pointers, sizes: Sizes, stream: int) -> None:
        """Queue copies, one after the other, each between addresses of registered host memory and
        of the device. The arrays are of one length and are not needed afterwards."""
        for row in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._call("cuMemcpyAsync", *row, c_void_p(stream))

    def copy_batch(self, targets: Pointers, sources: Pointers, sizes: Sizes, stream: int) -> None:
        """Queue copies in one call, in any order. Not on the default stream, whose number is 0."""
        if not len(targets) == len(sources) == len(sizes):
            raise BadArgumentError("copies of a batch: as many targets as sources and sizes")
        kept = [np.ascontiguousarray(array, np.int64) for array in (targets, sources, sizes)]
        attributes = _Attributes(source_order=ORDERED_BY_STREAM)
        first, failed = c_size_t(0), c_size_t(2**64 - 1)
        arguments = [
            *(c_void_p(array.ctypes.data) for array in kept),
            len(sizes),
            byref(attributes),
            byref(first),
            1,
        ]
        if self._batch == "cuMemcpyBatchAsync":
            arguments.append(byref(failed))
        code = self._raw(self._batch, *arguments, c_void_p(stream))
        if code != SUCCESS:
            which = f" (copy {failed.value} of {len(sizes)})" if failed.value < len(sizes) else ""
            raise self._error(self._batch, code, which)

    def describe(self, code: int) -> str:
        """The driver's name and text of an error."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            known = self._raw(name, code, byref(text)) == SUCCESS and text.value
            words.append(text.value.decode(errors="replace") if known and text.value else "")
        return f"{words[0] or f'error {code}'}{f' ({words[1]})' if words[1] else ''}"

    def _raw(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def _call(self, name: str, *arguments: object) -> None:
        code = self._raw(name, *arguments)
        if code != SUCCESS:
            raise self._error(name, code)

    def _error(self, name: str, code: int, which: str = "") -> GpuError:
        kind = GpuMemoryError if code == OUT_OF_MEMORY else GpuError
        return kind(f"{name}{which}: {self.describe(code)}")


_lock = threading.Lock()
_driver: list[Driver] = []


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _driver.clear()


os.register_at_fork(after_in_child=_forget)


def driver_of(device: torch.device) -> Driver:
    """The process's driver for a CUDA device; raises UnsupportedError that says what is missing."""
    if device.type != "cuda":
        raise BadArgumentError(f"{device} is no CUDA device")
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"{device}: this torch ({torch.__version__}) was built without CUDA; install one with "
            "it, or use device 'cpu'"
        )
    with _lock:
        if not _driver:
            _driver.append(Driver())
        return _driver[0]


def index_of(device: torch.device) -> int:
    """The device's number, by default torch's current one."""
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
