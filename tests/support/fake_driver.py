"""tests/support/fake_libcuda.c, compiled and loaded: what the tests of the seam to CUDA talk to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from cxlkv.gpu.driver import Driver

SOURCE = Path(__file__).parent / "fake_libcuda.c"
STREAM = 77  # any number but that of the default stream

INVALID_VALUE, OUT_OF_MEMORY, OPERATING_SYSTEM = 1, 2, 304
ALREADY_REGISTERED, NOT_SUPPORTED = 712, 801


class FakeCuda:
    """One copy of the library: it has its own state, and the driver that loads it sees that."""

    def __init__(self, folder: Path, batch: int = 2):
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (gcc): the fake libcuda.so.1 cannot be made")
        self.path = folder / f"libcuda-{batch}.so.1"
        flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-DBATCH={batch}"]
        subprocess.run([compiler, *flags, "-o", str(self.path), str(SOURCE)], check=True)
        self._library = ctypes.CDLL(str(self.path))
        self._library.fake_calls.restype = ctypes.c_char_p
        for name in ("fake_register_most", "fake_shift"):
            getattr(self._library, name).argtypes = [ctypes.c_uint64]

    def driver(self) -> Driver:
        return Driver(str(self.path))

    def fail(self, name: str, code: int, skip: int = 0) -> None:
        """The next call of this name, after `skip` of them, gives this code."""
        self._library.fake_fail(name.encode(), code, skip)

    def register_most(self, size: int) -> None:
        """Registrations of more bytes are refused."""
        self._library.fake_register_most(size)

    def shift(self, size: int) -> None:
        """The device sees registration i so far behind where the host does, times i."""
        self._library.fake_shift(size)

    def devices(self, count: int) -> None:
        self._library.fake_devices(count)

    @property
    def registered(self) -> int:
        return int(self._library.fake_registered())

    def calls(self, name: str = "") -> list[tuple[str, int, int, int]]:
        """(name, and three numbers) of all calls so far, or of those of one name."""
        rows = [line.split() for line in self._library.fake_calls().decode().splitlines()]
        found = [(row[0], int(row[1]), int(row[2]), int(row[3])) for row in rows]
        return [row for row in found if not name or row[0] == name]

    def forget(self) -> None:
        self._library.fake_forget()
