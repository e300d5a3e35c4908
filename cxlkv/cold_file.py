"""The cold tier's file: its format, and how slots are read, written and erased. No policy."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.config import format_bytes
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    ColdError,
    CorruptError,
    DiskFullError,
    GeometryError,
    NotAColdFileError,
    TruncatedError,
    VersionError,
)

MAGIC = b"CXLKVCLD"
VERSION = 1
BLOCK_BYTES = 4096  # slots begin on such borders: pages of the page cache
BEING_MADE, WHOLE = 1, 2
SLOT_MAGIC = 0x53564B43  # "CKVS"
NAME_BYTES = 16
SEQUENCE_MAX = 1 << 62  # never reached by storing: whoever wrote a larger one was not this code
CALL_SLOTS_MAX = 256  # of one system call: three buffers each, and the kernel takes 1024

FILE_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("state", "<u4"),
        ("record_bytes", "<u8"),
        ("slot_bytes", "<u8"),
        ("slot_count", "<u8"),
        ("layout", "<u4"),
        ("reserved", "<u4"),
        ("text", "S460"),
        ("crc", "<u4"),
    ]
)
SLOT_HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("slot", "<u4"),
        ("sequence", "<u8"),
        ("name", "u1", NAME_BYTES),
        ("parent", "u1", NAME_BYTES),
        ("payload_bytes", "<u8"),
        ("payload_crc", "<u4"),
        ("crc", "<u4"),
    ]
)
SLOT_HEADER_BYTES = SLOT_HEADER.itemsize  # 64

Bytes = npt.NDArray[np.uint8]
Headers = npt.NDArray[np.void]

REMEDIES = {
    errno.EACCES: "This user may not write there: change owner or mode, or choose another path",
    errno.EPERM: "This user may not write there: change owner or mode, or choose another path",
    errno.EROFS: "Its file system is read-only: remount it, or choose another path",
    errno.ENOSPC: "Its file system is full: make room, or choose a smaller capacity",
    errno.EDQUOT: "This user's quota is used up: make room, or choose a smaller capacity",
    errno.EFBIG: "This process may not make files that large: raise it, ulimit -f",
    errno.EMFILE: "This process may have no more open files: raise it, ulimit -n",
    errno.ENOENT: "Its folder is missing: make it",
    errno.ENOTDIR: "Its folder is a file: choose another path",
    errno.EIO: "The disk fails: look at the kernel's log, and replace it",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def why(path: str, error: OSError) -> str:
    """What happened to the file, and what mends it."""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{path}: {error.strerror or error}" + (f". {remedy}" if remedy else "")


@dataclass(frozen=True)
class RecordShape:
    """What a pool's records look like from outside: only equal ones may share a file."""

    bytes: int
    layout: int  # the CRC of all that two pools must agree in
    text: str = ""  # the layout, for people

    @classmethod
    def of(cls, pool: _core.Handle) -> RecordShape:
        layout, _, sketch = _core.pool_layout(pool)
        size, crc = _core.record_shape(pool)
        return cls(size, crc, f"{layout}, {'with' if sketch else 'without'} sketches")


class ColdFile:
    """An open file of slots, locked against other processes; methods may run in several threads, as
    long as no two of them work on one slot."""

    def __init__(self, path: str, shape: RecordShape, capacity_bytes: int, durable: bool):
        if shape.bytes < 1:
            raise BadArgumentError(f"records of {shape.bytes} bytes")
        self.path, self.shape, self.durable = path, shape, durable
        self.slot_bytes = -(-(SLOT_HEADER_BYTES + shape.bytes) // BLOCK_BYTES) * BLOCK_BYTES
        self.slot_count = (capacity_bytes - BLOCK_BYTES) // self.slot_bytes
        if not 1 <= self.slot_count < 2**32:
            raise GeometryError(
                f"a cold tier of {format_bytes(capacity_bytes)} has {max(0, self.slot_count)} "
                f"slots of {format_bytes(self.slot_bytes)}: at least one is needed, and fewer than "
                "2**32. Ask for another capacity"
            )
        self.fd = self._open()
        try:
            self._lock()
            self._make_or_check()
        except BaseException:
            self.close()
            raise

    # ---- opening ----

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except IsADirectoryError as error:
            raise NotAColdFileError(f"{self.path} is a folder: give the path of a file") from error
        except OSError as error:
            raise ColdError(why(self.path, error)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotAColdFileError(f"{self.path} is no plain file: give another path")
        return fd

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"{self.path} is in use by {self._holder()}: one process at a time uses a cold "
                "tier's file. End that one, or give this one a file of its own"
            ) from error
        except OSError as error:
            raise ColdError(f"{self.path} cannot be locked: {error.strerror}") from error

    def _holder(self) -> str:
        status = os.fstat(self.fd)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with suppress(OSError), open("/proc/locks") as locks:
            for line in locks:
                words = line.split()
                if "FLOCK" in words and place in words:
                    return f"process {words[words.index(place) - 1]}"
        return "another process"

    def _make_or_check(self) -> None:
        try:
            head = os.pread(self.fd, FILE_HEADER.itemsize, 0)
        except OSError as error:
            raise ColdError(why(self.path, error)) from error
        if not head:
            self._make()
            return
        if head[:8] != MAGIC or len(head) < FILE_HEADER.itemsize:
            raise NotAColdFileError(
                f"{self.path} is no cold tier's file. Nothing was changed: give another path"
            )
        if self._check_header(np.frombuffer(head, FILE_HEADER)[0]) == BEING_MADE:
            self._make()

    def _check_header(self, header: np.void) -> int:
        """Its state; raises when the file is not what this tier asks for."""
        if header["version"] != VERSION:
            raise VersionError(
                f"{self.path} has format version {header['version']}, this build reads {VERSION}: "
                "remove the file, and the tier begins empty"
            )
        if int(header["crc"]) != _core.crc32c(header.tobytes()[:-4]):
            raise CorruptError(
                f"{self.path}: the CRC of its header is wrong, its bytes were changed. Remove the "
                "file, and the tier begins empty"
            )
        if header["state"] == BEING_MADE:  # killed before anything was stored
            return BEING_MADE
        if (header["record_bytes"], header["layout"]) != (self.shape.bytes, self.shape.layout):
            raise GeometryError(
                f"{self.path} holds records of another pool layout: "
                f"{header['text'].decode(errors='replace')}, {header['record_bytes']} bytes each; "
                f"this pool's have {self.shape.bytes}: {self.shape.text}. Give each layout a file "
                "of its own"
            )
        if (header["slot_bytes"], header["slot_count"]) != (self.slot_bytes, self.slot_count):
            raise GeometryError(
                f"{self.path} has {header['slot_count']} slots of {header['slot_bytes']} bytes, "
                f"asked for were {self.slot_count} of {self.slot_bytes}: give the capacity that it "
                "was made with, or remove the file, and the tier begins empty"
            )
        size = os.fstat(self.fd).st_size
        if size < self.file_bytes:
            raise TruncatedError(
                f"{self.path} is truncated: {size} bytes of {self.file_bytes}. Remove the file, "
                "and the tier begins empty"
            )
        return WHOLE

    @property
    def file_bytes(self) -> int:
        return BLOCK_BYTES + self.slot_count * self.slot_bytes

    def _make(self) -> None:
        """Reserved whole, so that it cannot be full later; a killed maker's file is made again."""
        try:
            self._write_header(BEING_MADE)
            os.ftruncate(self.fd, BLOCK_BYTES)  # what follows reads as zeros: free slots
            os.posix_fallocate(self.fd, 0, self.file_bytes)
            self._write_header(WHOLE)
            os.fsync(self.fd)
            folder = os.open(os.path.dirname(os.path.abspath(self.path)), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.fd, 0)
                os.unlink(self.path)
            if error.errno not in FULL:
                raise ColdError(why(self.path, error)) from error
            space = os.fstatvfs(self.fd)
            raise DiskFullError(
                f"{self.path}: {format_bytes(self.file_bytes)} wanted, its file system has "
                f"{format_bytes(space.f_bavail * space.f_frsize)} free ({error.strerror}). "
                f"{REMEDIES[error.errno]}"
            ) from error

    def _write_header(self, state: int) -> None:
        header = np.zeros(1, FILE_HEADER)
        values = (MAGIC, VERSION, state, self.shape.bytes, self.slot_bytes, self.slot_count)
        text = self.shape.text.encode()[:459]
        header[0] = (*values, self.shape.layout, 0, text, 0)
        header["crc"] = _core.crc32c(header.tobytes()[:-4])
        if os.pwrite(self.fd, header.tobytes(), 0) != FILE_HEADER.itemsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self.fd)

    def close(self, unlock: bool = True) -> None:
        """By name: a forked child that has not yet closed its descriptors would keep the lock."""
        if unlock and self.fd >= 0:
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    # ---- slots ----

    def _offset(self, slot: int) -> int:
        return BLOCK_BYTES + slot * self.slot_bytes

    def scan(self) -> Headers:
        """The headers of all slots that have one, whole; the others are free."""
        found = np.zeros(self.slot_count, SLOT_HEADER)
        row = found.view(np.uint8).reshape(self.slot_count, SLOT_HEADER_BYTES)
        for first in range(0, self.slot_count, 1024):
            some = range(first, min(first + 1024, self.slot_count))
            for slot in some:  # so that the disk looks for several at a time
                os.posix_fadvise(
                    self.fd, self._offset(slot), SLOT_HEADER_BYTES, os.POSIX_FADV_WILLNEED
                )
            for slot in some:
                with suppress(OSError):  # unreadable: free
                    os.preadv(self.fd, [row[slot].data], self._offset(slot))
        looks = found["magic"] == SLOT_MAGIC
        looks &= found["payload_bytes"] == self.shape.bytes
        looks &= found["slot"] == np.arange(self.slot_count)
        looks &= found["sequence"] < SEQUENCE_MAX
        for slot in np.flatnonzero(looks).tolist():
            looks[slot] = int(found["crc"][slot]) == _core.crc32c(row[slot, :-4])
        whole: Headers = found[looks]
        return whole

    def write(
        self,
        slots: npt.NDArray[np.int64],
        headers: Headers,
        records: Bytes,
        rows: npt.NDArray[np.int64],
    ) -> tuple[int, OSError | None]:
        """Writes records[rows[i]] to slots[i], which rise; headers have name, parent, sequence.

        Returns how many are written, from the first on, and why it is not all of them.
        """
        headers["magic"], headers["payload_bytes"] = SLOT_MAGIC, self.shape.bytes
        lines = headers.view(np.uint8).reshape(-1, SLOT_HEADER_BYTES)
        rest = np.zeros(self.slot_bytes - SLOT_HEADER_BYTES - self.shape.bytes, np.uint8)
        done = 0
        try:
            for first, last in _runs(slots, CALL_SLOTS_MAX):
                buffers: list[memoryview] = []
                for i in range(first, last):
                    record = records[rows[i]]
                    headers["payload_crc"][i] = _core.crc32c(record)
                    headers["crc"][i] = _core.crc32c(lines[i, :-4])
                    buffers += [lines[i].data, record.data, rest.data]
                self._write_all(buffers, self._offset(int(slots[first])))
                done = last
            if self.durable:
                os.fdatasync(self.fd)
        except OSError as error:
            return (0 if self.durable else done), error
        return done, None

    def _write_all(self, buffers: list[memoryview], offset: int) -> None:
        while buffers:
            wrote = os.pwritev(self.fd, buffers, offset)
            if wrote == 0 and any(buffers):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            offset += wrote
            _advance(buffers, wrote)

    def read(
        self,
        slots: npt.NDArray[np.int64],
        names: Sequence[bytes],
        out: Bytes,
        rows: npt.NDArray[np.int64],
    ) -> list[bool]:
        """Reads slots[i], which rise, to out[rows[i]]; False: what lies there is not names[i], or
        not what its CRC says, and the row is zeros."""
        header_bytes = np.zeros((len(slots), SLOT_HEADER_BYTES), np.uint8)
        rest = np.empty(self.slot_bytes - SLOT_HEADER_BYTES - self.shape.bytes, np.uint8)
        right: list[bool] = []
        for first, last in _runs(slots, CALL_SLOTS_MAX):
            buffers: list[memoryview] = []
            for i in range(first, last):
                buffers += [header_bytes[i].data, out[rows[i]].data, rest.data]
            got = self._read_all(buffers, self._offset(int(slots[first])))
            for i in range(first, last):
                whole = got - (i - first) * self.slot_bytes >= SLOT_HEADER_BYTES + self.shape.bytes
                fits = whole and self._fits(header_bytes[i], int(slots[i]), names[i], out[rows[i]])
                right.append(fits)
                if not fits:
                    out[rows[i]] = 0
        return right

    def _fits(self, header_bytes: Bytes, slot: int, name: bytes, record: Bytes) -> bool:
        header = header_bytes.view(SLOT_HEADER)[0]
        return bool(
            header["magic"] == SLOT_MAGIC
            and header["slot"] == slot
            and header["name"].tobytes() == name
            and header["payload_bytes"] == self.shape.bytes
            and int(header["crc"]) == _core.crc32c(header_bytes[:-4])
            and int(header["payload_crc"]) == _core.crc32c(record)
        )

    def _read_all(self, buffers: list[memoryview], offset: int) -> int:
        """How many bytes could be read: fewer at the end of a file that was cut, or that fails."""
        got = 0
        try:
            while buffers:
                count = os.preadv(self.fd, buffers, offset + got)
                if count == 0:
                    break
                got += count
                _advance(buffers, count)
        except OSError:
            return got
        return got

    def erase(self, slots: Sequence[int]) -> None:
        """Their headers become zeros: nothing is found there after an opening either."""
        for slot in slots:
            os.pwrite(self.fd, bytes(SLOT_HEADER_BYTES), self._offset(slot))
        if self.durable and slots:
            os.fdatasync(self.fd)


def _advance(buffers: list[memoryview], count: int) -> None:
    """Takes away the first `count` bytes, that are done."""
    at = 0
    while at < len(buffers) and count >= buffers[at].nbytes:
        count -= buffers[at].nbytes
        at += 1
    del buffers[:at]
    if buffers:
        buffers[0] = buffers[0][count:]


def _runs(slots: npt.NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """[first, last) of neighbours among rising slots, of at most `longest`."""
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or i - first == longest:
            yield first, i
            first = i
