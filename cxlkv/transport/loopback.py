"""The link on one machine reads the pool's file, or asks over the control connection.

The second way also serves between machines without RDMA, as fast as TCP is.
"""

from __future__ import annotations

import os
import stat
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.errors import PeerError, PoisonError
from cxlkv.transport import answers
from cxlkv.transport.base import Door, Link, chunk_records
from cxlkv.transport.far import Pieces
from cxlkv.transport.wire import BODY_BYTES_MAX, Body, Deadline, Header

PARTS_MAX = 1024  # of one preadv
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


class Call(Protocol):
    """Asks the server over the control connection."""

    def __call__(
        self, header: Header, deadline: Deadline, read: answers.Reader[T], body: Body = ...
    ) -> T: ...


class LoopbackLink(Link):
    """preadv() scatters, as an RDMA READ does, and fails where a mapping would raise SIGBUS."""

    def __init__(self, call: Call, record_bytes: int, deadline: Deadline):
        self.buffer: Bytes = np.zeros(chunk_records(record_bytes) * record_bytes, np.uint8)
        self._call = call
        self._file = _open_same(call({"op": "loopback"}, deadline, answers.place))
        self.name = "file" if self._file >= 0 else "socket"

    def read(self, pieces: Pieces, deadline: Deadline) -> None:
        cuts = pieces.cuts(PARTS_MAX, len(self.buffer))
        if self._file >= 0:
            self._read_file(pieces, cuts)
            return
        first = np.array(cuts[:-1])
        sizes = np.add.reduceat(pieces.size, first)
        asked = np.stack([pieces.far[first], sizes], axis=1)
        size = partial(answers.body_of, int(pieces.size.sum()))
        body = self._call({"op": "read"}, deadline, size, asked.tobytes())
        came, at = np.frombuffer(body, np.uint8), 0
        for near, size in zip(pieces.near.tolist(), pieces.size.tolist(), strict=True):
            self.buffer[near : near + size] = came[at : at + size]
            at += size

    def _read_file(self, pieces: Pieces, cuts: list[int]) -> None:
        buffer = memoryview(self.buffer.data)
        parts = [
            buffer[near : near + size]
            for near, size in zip(pieces.near.tolist(), pieces.size.tolist(), strict=True)
        ]
        for first, end in pairwise(cuts):
            wanted = int(pieces.size[first:end].sum())
            try:
                count = os.preadv(self._file, parts[first:end], int(pieces.far[first]))
            except OSError as error:
                raise PeerError(f"the pool's file cannot be read: {error.strerror}") from error
            if count != wanted:
                raise PeerError("the pool's file ends before its pages do: it was truncated")

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        for far, near, size in zip(*(column.tolist() for column in pieces), strict=True):
            data = self.buffer[near : near + size].data
            self._call({"op": "write", "at": far}, deadline, answers.nothing, data)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class LoopbackDoor(Door):
    """Says which file the pool lies in, or reads it for the peer."""

    def __init__(self, memory: tuple[int, int], path: str | None, staging: Bytes):
        self._address, self._size = memory
        self._path = path
        self._staging = staging
        # The kernel copies: memory that is gone or poisoned is an error, no SIGBUS.
        self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def answer(self) -> dict[str, object]:
        """A file is known by its place and the boot of its machine."""
        if self._path is None or not os.path.isfile(self._path):
            return {"path": None}
        found = os.stat(self._path)
        path = os.path.abspath(self._path)
        return {"path": path, "file": [found.st_dev, found.st_ino], "boot": _boot()}

    def read(self, asked: bytes) -> bytearray:
        """What "read" asks for; raises ValueError for ranges that are not the pool's."""
        ranges = np.frombuffer(asked, np.int64).reshape(-1, 2)
        offsets, sizes = ranges.T
        if (ranges < 0).any() or (offsets > self._size).any() or (sizes > self._size).any():
            raise ValueError("a range outside of the region")
        if (offsets + sizes > self._size).any():
            raise ValueError("a range that ends outside of the region")
        if sum(sizes.tolist()) > BODY_BYTES_MAX:
            raise ValueError(f"more than {BODY_BYTES_MAX} bytes at once")
        found = bytearray(sizes.sum())
        rest = memoryview(found)
        try:
            for offset, size in ranges.tolist():
                if os.preadv(self._memory, [rest[:size]], self._address + offset) < size:
                    raise PoisonError("the pool's memory cannot be read: it ends before that")
                rest = rest[size:]
        except OSError as error:
            raise PoisonError(f"the pool's memory cannot be read: {error.strerror}") from error
        return found

    def write(self, at: int, data: Body) -> None:
        """What "write" asks for, into the staging area."""
        if at + len(data) > len(self._staging):
            raise ValueError(f"{len(data)} bytes at {at}: behind the end of the staging area")
        self._staging[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = -1


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _open_same(said: answers.Place) -> int:
    """The server's file, if this process sees the same one and may read it; else -1. Nothing else
    is opened, whatever a server names: a FIFO would wait, and a device may act."""
    boot = _boot()
    if said.path is None or not boot or said.boot != boot:
        return -1
    try:
        place = os.open(said.path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return -1
    try:
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode) or [found.st_dev, found.st_ino] != said.file:
            return -1
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    finally:
        os.close(place)
