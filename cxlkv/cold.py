"""The cold tier: records in a file, found by name, that outlive process and machine."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from cxlkv.closing import Closing
from cxlkv.cold_file import NAME_BYTES, SLOT_HEADER, Bytes, ColdFile, RecordShape, why
from cxlkv.config import parse_bytes
from cxlkv.errors import BadArgumentError, ClosedError

FSYNC = ("none", "batch")
LOOK_RECORDS = 16  # of an earlier opening, looked at together
FREE, STORED, RESERVED = 0, 1, 2

Mask = npt.NDArray[np.bool_]
log = logging.getLogger("cxlkv")
_open_tiers: weakref.WeakSet[ColdTier] = weakref.WeakSet()


class ColdTier(Closing):
    """A file of `capacity` with one slot for each record; a dictionary from names to records.

    Names are rows of 16 bytes, the hashes under which pages are published; records are rows of
    shape.bytes, as _core.records_read() makes them. Each call takes many. When the file is full the
    least recently used records make room, never those that are being loaded or are protected.

    fsync "batch": when store() returns, its records are on the disk, and survive a crash of the
    machine. "none": the kernel writes when it likes; they survive the death of this process, not
    that of the machine. With both a crash at any instant costs at most the records of a store()
    that had not returned (and, with "none", of those not yet written): a torn record is a miss,
    never wrong bytes.

    When the file cannot be written any more (disk full, permission lost, disk failed), the tier
    says so once in the log and in `why_off`, takes no new records, and goes on serving those that
    it has. Removing the file does not disturb an open tier; its records are gone with it.

    One process at a time, any number of threads; a child of os.fork() finds it closed. Raises
    BusyError, ColdError and its kinds (DiskFullError, NotAColdFileError), GeometryError when the
    file has records of another layout or another size, TruncatedError, VersionError, CorruptError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shape: RecordShape,
        capacity: str | int,
        fsync: str = "batch",
    ):
        if fsync not in FSYNC:
            raise BadArgumentError(f"fsync={fsync!r}: one of {', '.join(FSYNC)}")
        self.path, self.shape, self.fsync = os.fspath(path), shape, fsync
        self.why_off = ""  # why nothing more is written; empty while all is well
        self._file = ColdFile(self.path, shape, parse_bytes(capacity), fsync == "batch")
        slots = self._file.slot_count
        # All below under the lock; free + stored + reserved = slots. I/O goes on without it, on
        # slots that are reserved, or stored and have a reader.
        self._lock = threading.Condition()
        self._running = 0
        self._closed = False
        self._index: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._state = np.zeros(slots, np.uint8)
        self._readers = np.zeros(slots, np.int32)
        self._checked = np.zeros(slots, np.bool_)  # its bytes were right in this opening
        self._parents = np.zeros((slots, NAME_BYTES), np.uint8)
        self._writing: set[bytes] = set()
        self._protected: set[bytes] = set()
        names = "hits misses corrupt stored refused evicted dropped bytes_read bytes_written"
        self._counts = dict.fromkeys(names.split(), 0)
        self._find_records()
        _open_tiers.add(self)

    def _find_records(self) -> None:
        headers = self._file.scan()
        older: list[int] = []
        for header in headers[np.argsort(headers["sequence"], kind="stable")]:
            name, slot = header["name"].tobytes(), int(header["slot"])
            if name in self._index:  # a drop of it was lost in a crash
                older.append(self._index.pop(name))
                self._state[older[-1]] = FREE
            self._index[name] = slot
            self._state[slot] = STORED
            self._parents[slot] = header["parent"]
        with suppress(OSError):
            self._file.erase(older)
        self._sequence = int(headers["sequence"].max(initial=0)) + 1
        # The lowest first, so that a batch lies side by side.
        self._free = np.flatnonzero(self._state == FREE)[::-1].tolist()

    # ---- what callers do ----

    def store(self, names: Bytes, records: Bytes, parents: Bytes | None = None) -> Mask:
        """Which of the records are in the tier now. One that was there is not written again.

        parents: for each the name of the record before it in its chain, kept for the caller.
        False: no slot could be had, the tier is off (why_off), or another thread stores it now.
        """
        keys = self._keys(names)
        self._check_rows("records", records, len(keys), self.shape.bytes)
        if parents is not None:
            self._check_rows("parents", parents, len(keys), NAME_BYTES)
        with self._operation():
            self._look_again(keys)
            rows, slots = self._reserve(keys)
            if slots:
                self._write(keys, rows, slots, records, parents)
            with self._lock:
                return np.array([key in self._index for key in keys], np.bool_)

    def load(self, names: Bytes, out: Bytes) -> Mask:
        """Fills the rows of out whose records the tier has; a row whose CRC is wrong is a miss, and
        zeros. The other rows stay as they are."""
        keys = self._keys(names)
        self._check_rows("out", out, len(keys), self.shape.bytes)
        if not out.flags.writeable:
            raise BadArgumentError("out cannot be written to")
        with self._operation():
            found = self._read(keys, out)
            with self._lock:
                hits = int(found.sum())
                self._counts["hits"] += hits
                self._counts["misses"] += len(keys) - hits
            return found

    def contains(self, names: Bytes, sure: bool = False) -> Mask:
        """Which names are stored, as far as their slots' headers say; no use of them. sure: as
        store() would find them; records of an earlier opening, which may be torn, are read and
        verified first, each once, and it is a use of those that are there."""
        keys = self._keys(names)
        with self._operation():
            if sure:
                self._look_again(keys)
            with self._lock:
                for key in keys if sure else ():
                    if key in self._index:
                        self._index.move_to_end(key)
                return np.array([key in self._index for key in keys], np.bool_)

    def drop(self, names: Bytes) -> Mask:
        """Removes records, for good; which were there."""
        keys = self._keys(names)
        with self._operation():
            with self._lock:
                there = np.array([key in self._index for key in keys], np.bool_)
                slots = [self._unlink(key) for key in keys if key in self._index]
                self._counts["dropped"] += len(slots)
            self._discard(slots)
            return there

    def protect(self, names: Bytes) -> None:
        """Records of these names make no room for others, until unprotect()."""
        with self._operation(), self._lock:
            self._protected.update(self._keys(names))

    def unprotect(self, names: Bytes) -> None:
        with self._operation(), self._lock:
            self._protected.difference_update(self._keys(names))

    def names(self) -> tuple[Bytes, Bytes]:
        """All names and their parents, the least recently used first (after an opening: the first
        stored)."""
        with self._operation(), self._lock:
            joined = np.frombuffer(b"".join(self._index), np.uint8).reshape(-1, NAME_BYTES)
            return joined.copy(), self._parents[list(self._index.values())]

    def stats(self) -> dict[str, int]:
        """slots_free + slots_stored + slots_reserved = slots_total; and what was counted."""
        with self._operation(), self._lock:
            count = np.bincount(self._state, minlength=3)
            return {
                "slots_total": len(self._state),
                "slots_free": int(count[FREE]),
                "slots_stored": int(count[STORED]),
                "slots_reserved": int(count[RESERVED]),
                "file_bytes": self._file.file_bytes,
                "writes_off": int(bool(self.why_off)),
                **self._counts,
            }

    def check(self, deep: bool = False) -> list[str]:
        """What is not as it must be; empty: nothing. deep reads all records."""
        with self._operation():
            with self._lock:
                problems = self._recount()
                keys = list(self._index)
            if os.fstat(self._file.fd).st_nlink == 0:
                problems.append(f"{self.path} was removed: its records go with this process")
            if deep:
                for first in range(0, len(keys), LOOK_RECORDS):
                    some = keys[first : first + LOOK_RECORDS]
                    found = self._read(some, self._scratch(len(some)))
                    wrong = [key.hex() for key, right in zip(some, found, strict=True) if not right]
                    problems += [f"the record of {key} is damaged: dropped" for key in wrong]
            return problems

    def close(self) -> None:
        """Waits for calls of other threads; a second time does nothing."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: self._running == 0)
            self._file.close()

    # ---- arguments ----

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError(f"the cold tier {self.path} was closed, or is another process's")
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()

    def _keys(self, names: Bytes) -> list[bytes]:
        self._check_rows("names", names, len(names), NAME_BYTES)
        joined = names.tobytes()
        return [joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES)]

    @staticmethod
    def _check_rows(what: str, rows: Bytes, count: int, width: int) -> None:
        fits = rows.shape == (count, width) and rows.dtype == np.uint8
        if not (fits and rows.flags.c_contiguous):
            raise BadArgumentError(
                f"{what} of shape {rows.shape} and dtype {rows.dtype}: {(count, width)} of uint8 "
                "wanted, without gaps"
            )

    def _scratch(self, count: int) -> Bytes:
        return np.empty((count, self.shape.bytes), np.uint8)

    # ---- storing ----

    def _look_again(self, keys: Sequence[bytes]) -> None:
        """A record of an earlier opening may be torn: only one that is right counts as stored."""
        with self._lock:
            doubtful = [k for k in dict.fromkeys(keys) if not self._checked[self._index.get(k, 0)]]
            doubtful = [key for key in doubtful if key in self._index]
        for first in range(0, len(doubtful), LOOK_RECORDS):
            some = doubtful[first : first + LOOK_RECORDS]
            self._read(some, self._scratch(len(some)))

    def _reserve(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Rows of records to be written, and a slot for each."""
        with self._lock:
            wanted: dict[bytes, int] = {}
            for row, key in enumerate(keys):
                if key in self._index:
                    self._index.move_to_end(key)
                elif key not in self._writing:
                    wanted.setdefault(key, row)
            if self.why_off:
                self._counts["refused"] += len(wanted)
                return [], []
            self._evict(len(wanted) - len(self._free), set(keys))
            count = min(len(wanted), len(self._free))
            self._counts["refused"] += len(wanted) - count
            chosen = list(wanted.items())[:count]
            slots = sorted(self._free.pop() for _ in chosen)
            self._state[slots] = RESERVED
            self._writing.update(key for key, _ in chosen)
            return [row for _, row in chosen], slots

    def _evict(self, count: int, kept: set[bytes]) -> None:
        victims: list[bytes] = []
        for key, slot in self._index.items():
            if len(victims) >= count:
                break
            if not (self._readers[slot] or key in self._protected or key in kept):
                victims.append(key)
        freed = [self._index.pop(key) for key in victims]
        self._state[freed] = FREE  # its bytes are overwritten, so they need not be erased
        self._free += sorted(freed, reverse=True)
        self._counts["evicted"] += len(freed)

    def _write(
        self,
        keys: Sequence[bytes],
        rows: list[int],
        slots: list[int],
        records: Bytes,
        parents: Bytes | None,
    ) -> None:
        headers = np.zeros(len(slots), SLOT_HEADER)
        headers["slot"] = slots
        with self._lock:
            headers["sequence"] = np.arange(self._sequence, self._sequence + len(slots))
            self._sequence += len(slots)
        headers["name"] = np.frombuffer(b"".join(keys[row] for row in rows), np.uint8).reshape(
            -1, NAME_BYTES
        )
        if parents is not None:
            headers["parent"] = parents[rows]
        done, error = 0, None
        try:
            done, error = self._file.write(np.array(slots), headers, records, np.array(rows))
        finally:
            with self._lock:
                for row, slot, header in zip(rows[:done], slots[:done], headers, strict=False):
                    self._index[keys[row]] = slot
                    self._parents[slot] = header["parent"]
                self._state[slots[:done]] = STORED
                self._checked[slots[:done]] = True
                self._writing.difference_update(keys[row] for row in rows)
                self._counts["stored"] += done
                self._counts["refused"] += len(slots) - done
                self._counts["bytes_written"] += done * self._file.slot_bytes
                if error is not None:
                    self._turn_off(error)
            self._discard(slots[done:])

    def _turn_off(self, error: OSError) -> None:
        if not self.why_off:
            self.why_off = why(self.path, error)
            log.warning("the cold tier takes no more records: %s", self.why_off)

    # ---- loading ----

    def _read(self, keys: Sequence[bytes], out: Bytes) -> Mask:
        """load() without its counts of hits; drops what is not right."""
        found = np.zeros(len(keys), np.bool_)
        with self._lock:
            wanted = sorted(
                (self._index[key], row) for row, key in enumerate(keys) if key in self._index
            )
            slots, rows = np.array(wanted, np.int64).reshape(-1, 2).T
            np.add.at(self._readers, slots, 1)
            for key in keys:
                if key in self._index:
                    self._index.move_to_end(key)
        right: list[bool] = []
        try:
            right = self._file.read(slots, [keys[row] for row in rows], out, rows)
        finally:
            bad: list[int] = []
            with self._lock:
                np.subtract.at(self._readers, slots, 1)
                for (slot, row), fits in zip(wanted, right, strict=False):
                    found[row] = fits
                    self._checked[slot] |= fits
                    if not fits and self._index.get(keys[row]) == slot:  # not dropped meanwhile
                        bad.append(self._unlink(keys[row]))
                        self._counts["corrupt"] += 1
                self._counts["bytes_read"] += len(slots) * self._file.slot_bytes
                self._lock.notify_all()
            self._discard(bad)
        return found

    def _unlink(self, key: bytes) -> int:
        """Not found any more; its slot is to be discarded."""
        slot = self._index.pop(key)
        self._state[slot] = RESERVED
        self._checked[slot] = False
        return slot

    def _discard(self, slots: Sequence[int]) -> None:
        """Reserved slots become free when nobody reads them; on the disk, too, if it can be."""
        if not slots:
            return
        with suppress(OSError):
            self._file.erase(slots)
        with self._lock:
            self._lock.wait_for(lambda: not self._readers[list(slots)].any())
            self._state[list(slots)] = FREE
            self._checked[list(slots)] = False
            self._free += sorted(slots, reverse=True)

    def _recount(self) -> list[str]:
        problems = []
        stored = np.zeros(len(self._state), np.bool_)
        stored[list(self._index.values())] = True
        if stored.sum() != len(self._index) or (stored != (self._state == STORED)).any():
            problems.append("the index does not name each stored slot once")
        if sorted(self._free) != np.flatnonzero(self._state == FREE).tolist():
            problems.append("the list of free slots is not that of those that are free")
        if (self._readers < 0).any():
            problems.append("a slot has fewer than no readers")
        return problems


def _close_in_child() -> None:
    """The file, and the lock on it, stay the parent's."""
    for tier in list(_open_tiers):
        tier._lock = threading.Condition()  # another thread of the parent may have had it
        tier._closed, tier._running = True, 0
        tier._file.close(unlock=False)


os.register_at_fork(after_in_child=_close_in_child)
