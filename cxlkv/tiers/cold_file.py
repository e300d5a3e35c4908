"""The cold tier's file: its format, and how slots are read, written and erased. No policy."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes
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
from cxlkv.layout import DTYPE_BYTES, format_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.regions import check_below_dev
from cxlkv.pages import crc32c
from cxlkv.pool import Pool

MAGIC = b"CXLKVCLD"
VERSIONS = {None: 1, "zstd": 2}  # of the format, by how records are compressed
BLOCK_BYTES = 4096  # slots begin on such borders: pages of the page cache
BEING_MADE, WHOLE = 1, 2
SLOT_MAGIC = 0x53564B43  # "CKVS"
NAME_BYTES = 16
SEQUENCE_MAX = 1 << 62  # never reached by storing: whoever wrote a larger one was not this code
CALL_SLOTS_MAX = 256  # of one system call: three buffers each, and the kernel takes 1024
PARTS = 16  # slots of a record that is not made smaller, about

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
        ("payload_bytes", "<u4"),
        ("part", "<u2"),  # which slot of its record this is
        ("more", "<u2"),  # how many slots of the record follow
        ("payload_crc", "<u4"),
        ("crc", "<u4"),
    ]
)
SLOT_HEADER_BYTES = SLOT_HEADER.itemsize  # 64

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
# "head_dim=64" of a layout's text, "order=(0, 0)", "without sketches".
_WORD = re.compile(r"[a-z_]+=(?:'[^']*'|\([^()]*\)|[^,()]+)|with\w* sketches")
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
    element_bytes: int = 1  # of K and V, for compression

    @classmethod
    def of(cls, pool: Pool) -> RecordShape:
        text = f"{pool.layout}, {'with' if pool.sketch else 'without'} sketches"
        dtypes = {group.dtype for group in pool.layout.groups}
        one = len(dtypes) == 1 and not pool.layout.is_encoded
        element = DTYPE_BYTES.get(dtypes.pop(), 1) if one else 1
        return cls(*pool.records.shape, text, element)

    def apart(self, pool: RecordShape) -> str:
        """Tells how records that are there differ from a pool's, by the words that differ."""
        texts = [_WORD.findall(one.text) for one in (self, pool)]
        sides = zip((self, pool), texts, reversed(texts), strict=True)
        there, ours = (
            f"{one.bytes} bytes each, {', '.join(w for w in own if w not in others) or one.text}"
            for one, own, others in sides
        )
        return f"{there}; this pool's have {ours}"


class Place(NamedTuple):
    """Where a record lies: its slots in order, how many bytes they hold of it together, and its
    sequence number, which no other record has."""

    slots: tuple[int, ...]
    size: int
    sequence: int


class Part(NamedTuple):
    """What is to lie in a slot: a part of the record `name`."""

    slot: int
    name: bytes
    sequence: int
    part: int
    more: int
    bytes: Bytes


class Found(NamedTuple):
    """A record that the file has, as far as headers say."""

    name: bytes
    parent: Bytes
    place: Place


class _OwnedFile(FileIO):
    """Closed with its owner: a tier that is only dropped is no leak to be warned of."""

    def __del__(self) -> None:
        self.close()


def _opened(path: str) -> FileIO:
    """A plain file, made if there is none."""
    if not os.path.exists(path):
        check_below_dev(path)
    opened: list[FileIO] = []
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:  # in one call, so that no interrupt comes while a number alone stands for the open file
        opened.extend(map(_OwnedFile, map(os.open, (path,), (flags,), (0o600,)), ("r+",)))
    except IsADirectoryError as error:
        raise NotAColdFileError(f"{path} is a folder: give the path of a file") from error
    except OSError as error:
        raise ColdError(why(path, error)) from error
    if not stat.S_ISREG(os.fstat(opened[0].fileno()).st_mode):
        opened[0].close()
        raise NotAColdFileError(f"{path} is no plain file: give another path")
    return opened[0]


class ColdFile:
    """An open file of slots, locked against other processes; methods may run in several threads, as
    long as no two of them work on one slot.

    A record has one slot; where records are compressed, as many as it needs, anywhere."""

    def __init__(
        self,
        path: str,
        shape: RecordShape,
        capacity_bytes: int,
        durable: bool,
        compress: str | None = None,
    ):
        if not 1 <= shape.bytes < 2**32:
            raise BadArgumentError(f"records of {shape.bytes} bytes")
        self.path, self.shape, self.durable = path, shape, durable
        self.compress = compress
        blocks = -(-(SLOT_HEADER_BYTES + shape.bytes) // BLOCK_BYTES)
        self.slot_bytes = -(-blocks // (PARTS if compress else 1)) * BLOCK_BYTES
        self.payload_bytes = min(shape.bytes, self.slot_bytes - SLOT_HEADER_BYTES)  # of one slot
        self.slot_count = (capacity_bytes - BLOCK_BYTES) // self.slot_bytes
        if not 1 <= self.slot_count < 2**32:
            raise GeometryError(
                f"a cold tier of {format_bytes(capacity_bytes)} has {max(0, self.slot_count)} "
                f"slots of {format_bytes(self.slot_bytes)}: at least one is needed, and fewer than "
                "2**32. Ask for another capacity"
            )
        self._owner: FileIO | None = None  # closed when the last reference to this object is gone
        self.fd = -1
        lifetime.watch(self)  # now: to lock and to look through it takes a while
        self._owner = _opened(self.path)
        self.fd = self._owner.fileno()
        try:
            self._lock()
            self._make_or_check()
        except BaseException:
            self.close()
            raise

    # ---- opening ----

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
        """The file's state; raises when it is not what this tier asks for."""
        version = int(header["version"])
        if version not in VERSIONS.values():
            known = " and ".join(map(str, VERSIONS.values()))
            raise VersionError(
                f"{self.path} has format version {version}, this build reads {known}: use the "
                "release that made it, or remove the file, and the tier begins empty"
            )
        if int(header["crc"]) != crc32c(header.tobytes()[:-4]):
            raise CorruptError(
                f"{self.path}: the CRC of its header is wrong, its bytes were changed. Remove the "
                "file, and the tier begins empty"
            )
        if header["state"] == BEING_MADE:  # killed before anything was stored
            return BEING_MADE
        if (header["record_bytes"], header["layout"]) != (self.shape.bytes, self.shape.layout):
            there = RecordShape(
                header["record_bytes"], header["layout"], header["text"].decode(errors="replace")
            )
            raise GeometryError(
                f"{self.path} holds records of another pool layout: {there.apart(self.shape)}. "
                "Give each layout a file of its own"
            )
        if version != VERSIONS[self.compress]:
            made = next(name for name, number in VERSIONS.items() if number == version)
            raise GeometryError(
                f"{self.path} was made with compress={made!r}, asked for was "
                f"compress={self.compress!r}: ask for that, or remove the file, and the tier "
                "begins empty"
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
        version = VERSIONS[self.compress]
        values = (MAGIC, version, state, self.shape.bytes, self.slot_bytes, self.slot_count)
        text = self.shape.text.encode()[:459]
        header[0] = (*values, self.shape.layout, 0, text, 0)
        header["crc"] = crc32c(header.tobytes()[:-4])
        if os.pwrite(self.fd, header.tobytes(), 0) != FILE_HEADER.itemsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self.fd)

    def close(self, unlock: bool = True) -> None:
        """Unlocks by name: a forked child that has not yet closed its descriptors would keep the
        lock."""
        if unlock and self.fd >= 0:
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.fd = -1
        if self._owner is not None:
            self._owner.close()

    def reset_after_fork(self) -> None:
        """The file, and the lock on it, are the parent's."""
        self.close(unlock=False)

    # ---- slots ----

    def _offset(self, slot: int) -> int:
        return BLOCK_BYTES + slot * self.slot_bytes

    def slots_of(self, size: int) -> int:
        """How many slots `size` bytes of a record take."""
        return -(-size // self.payload_bytes)

    def parts(self, name: bytes, place: Place, record: Bytes) -> list[Part]:
        """A record, as it lies at its place."""
        step, last = self.payload_bytes, len(place.slots) - 1
        return [
            Part(slot, name, place.sequence, i, last - i, record[i * step : (i + 1) * step])
            for i, slot in enumerate(place.slots)
        ]

    def scan(self) -> tuple[list[Found], int]:
        """The records all of whose slots have a whole header, the first stored first, and the
        highest sequence number; the other slots are free."""
        headers = self._headers()
        highest = int(headers["sequence"].max(initial=0))
        headers = headers[np.lexsort((headers["part"], headers["sequence"]))]
        begins = np.flatnonzero(np.diff(headers["sequence"], prepend=0)).tolist()
        found = []
        for first, last in zip(begins, [*begins, len(headers)][1:], strict=True):
            parts, count = headers[first:last], last - first
            name, size = parts["name"][0].tobytes(), int(parts["payload_bytes"].sum())
            whole = (parts["part"] == np.arange(count)).all()
            whole &= (parts["more"] == np.arange(count)[::-1]).all()
            whole &= parts["name"].tobytes() == name * count
            if whole and self.slots_of(size) == count and size <= self.shape.bytes:
                sequence = int(parts["sequence"][0])
                place = Place(tuple(parts["slot"].tolist()), size, sequence)
                found.append(Found(name, parts["parent"][0], place))
        return found, highest

    def _headers(self) -> Headers:
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
        looks &= (found["payload_bytes"] >= 1) & (found["payload_bytes"] <= self.payload_bytes)
        if not self.compress:
            looks &= found["payload_bytes"] == self.shape.bytes
        looks &= found["slot"] == np.arange(self.slot_count)
        looks &= (found["sequence"] >= 1) & (found["sequence"] < SEQUENCE_MAX)
        for slot in np.flatnonzero(looks).tolist():
            looks[slot] = int(found["crc"][slot]) == crc32c(row[slot, :-4])
        whole: Headers = found[looks]
        return whole

    def write(self, parts: Sequence[Part], parents: Bytes) -> tuple[int, OSError | None]:
        """Writes parts, whose slots rise, with the parent of each.

        Returns how many are written, from the first on, and why it is not all of them.
        """
        headers = np.zeros(len(parts), SLOT_HEADER)
        headers["magic"], headers["parent"] = SLOT_MAGIC, parents
        lines = headers.view(np.uint8).reshape(-1, SLOT_HEADER_BYTES)
        zeros = np.zeros(self.slot_bytes, np.uint8)
        done = 0
        try:
            for first, last in _runs(parts, CALL_SLOTS_MAX):
                buffers: list[memoryview] = []
                for i in range(first, last):
                    slot, name, sequence, part, more, payload = parts[i]
                    headers["slot"][i], headers["sequence"][i] = slot, sequence
                    headers["name"][i] = np.frombuffer(name, np.uint8)
                    headers["part"][i], headers["more"][i] = part, more
                    headers["payload_bytes"][i] = payload.nbytes
                    headers["payload_crc"][i] = crc32c(payload)
                    headers["crc"][i] = crc32c(lines[i, :-4])
                    rest = zeros[: self.slot_bytes - SLOT_HEADER_BYTES - payload.nbytes]
                    buffers += [lines[i].data, payload.data, rest.data]
                self._write_all(buffers, self._offset(parts[first].slot))
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

    def read(self, parts: Sequence[Part]) -> list[bool]:
        """Fills the bytes of parts, whose slots rise; False: what lies there is another part, or
        not what its CRC says."""
        lines = np.zeros((len(parts), SLOT_HEADER_BYTES), np.uint8)
        rest = np.empty(self.slot_bytes, np.uint8)
        right: list[bool] = []
        for first, last in _runs(parts, CALL_SLOTS_MAX):
            buffers: list[memoryview] = []
            for i in range(first, last):
                payload = parts[i].bytes
                behind = self.slot_bytes - SLOT_HEADER_BYTES - payload.nbytes
                buffers += [lines[i].data, payload.data, rest[:behind].data]
            got = self._read_all(buffers, self._offset(parts[first].slot))
            for i in range(first, last):
                there = got - (i - first) * self.slot_bytes
                whole = there >= SLOT_HEADER_BYTES + parts[i].bytes.nbytes
                right.append(whole and self._fits(lines[i], parts[i]))
        return right

    def _fits(self, header_bytes: Bytes, part: Part) -> bool:
        header = header_bytes.view(SLOT_HEADER)[0]
        return bool(
            header["magic"] == SLOT_MAGIC
            and header["slot"] == part.slot
            and header["sequence"] == part.sequence
            and header["name"].tobytes() == part.name
            and (header["part"], header["more"]) == (part.part, part.more)
            and header["payload_bytes"] == part.bytes.nbytes
            and int(header["crc"]) == crc32c(header_bytes[:-4])
            and int(header["payload_crc"]) == crc32c(part.bytes)
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
            at = self._offset(slot)
            try:
                os.pwrite(self.fd, bytes(SLOT_HEADER_BYTES), at)
            except OSError:  # in a hole, where a full disk has no room for zeros, nothing is found
                if os.pread(self.fd, SLOT_HEADER_BYTES, at).strip(b"\0"):
                    raise
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


def _runs(parts: Sequence[Part], longest: int) -> Iterator[tuple[int, int]]:
    """[first, last) of neighbours among parts whose slots rise, of at most `longest`."""
    first = 0
    for i in range(1, len(parts) + 1):
        if i == len(parts) or parts[i].slot != parts[i - 1].slot + 1 or i - first == longest:
            yield first, i
            first = i
