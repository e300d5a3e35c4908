"""The cold tier keeps records in a file, by name; they outlive the process and a reboot."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from cxlkv.arrays import Bytes, Mask
from cxlkv.errors import BadArgumentError, ClosedError
from cxlkv.layout import parse_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.tiers.cold_file import NAME_BYTES, ColdFile, Place, RecordShape, why
from cxlkv.tiers.compress import Codec

FSYNC = ("none", "batch")
LOOK_RECORDS = 16  # of an earlier opening, looked at together
FREE, STORED, RESERVED = 0, 1, 2

log = logging.getLogger("cxlkv")


class _Write(NamedTuple):
    """A record that is to be written: of which row, where to, and in which form."""

    key: bytes
    row: int
    place: Place
    record: Bytes


class ColdTier(Closing):
    """A file of `capacity` with slots for records; a dictionary from names to records.

    Names are rows of 16 bytes, the hashes under which pages are published; records are rows of
    shape.bytes, as _core.records_read() makes them. Each call takes many. When the file is full the
    least recently used records make room, never those that are being loaded.

    fsync "batch": when store() returns, its records are on the disk, and survive a crash of the
    machine. "none": the kernel writes when it likes; they survive the death of this process, not
    that of the machine. With both a crash at any instant costs at most the records of a store()
    that had not returned (and, with "none", of those not yet written): a torn record is a miss,
    never wrong bytes.

    compress "zstd" (`pip install 'cxlkv[compress]'`): records are kept in as few slots as they can
    be made to fit, those that cannot be made smaller as they are. It costs more time than a fast
    disk (docs/decisions/0019); a file keeps to what it was made with.

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
        compress: str | None = None,
    ):
        if fsync not in FSYNC:
            raise BadArgumentError(f"fsync={fsync!r}: one of {', '.join(FSYNC)}")
        self.path, self.shape, self.fsync = os.fspath(path), shape, fsync
        self.why_off = ""  # why nothing more is written; empty while all is well
        self._codec = Codec(compress, shape.bytes, shape.element_bytes) if compress else None
        self._file = ColdFile(self.path, shape, parse_bytes(capacity), fsync == "batch", compress)
        slots = self._file.slot_count
        # All below under the lock; free + stored + reserved = slots. I/O goes on without it, on
        # slots that are reserved, or stored and have a reader. What is known of a record (readers,
        # checked, parents) stands under its first slot.
        self._mutex = (
            threading.RLock()
        )  # taken by itself: Condition's own `with` can be interrupted
        self._lock = threading.Condition(self._mutex)
        self._running: set[int] = set()  # threads that are in a call
        self._torn = False
        self._closed = False
        self._index: OrderedDict[bytes, Place] = OrderedDict()  # the least recently used first
        self._state = np.zeros(slots, np.uint8)
        self._readers = np.zeros(slots, np.int32)
        self._checked = np.zeros(slots, np.bool_)  # its bytes were right in this opening
        self._parents = np.zeros((slots, NAME_BYTES), np.uint8)
        self._writing: set[bytes] = set()
        self._unerased: list[int] = []  # slots of dropped records that could not be erased
        names = "hits misses corrupt stored refused evicted dropped bytes_read bytes_written"
        names += " erase_failures packed packed_bytes_saved pack_us unpack_us"
        self._counts = dict.fromkeys(names.split(), 0)
        self._find_records()
        lifetime.watch(self)

    def _find_records(self) -> None:
        records, highest = self._file.scan()
        older: list[int] = []
        for name, parent, place in records:
            if name in self._index:  # a drop of it was lost in a crash
                before = self._index.pop(name)
                older += before.slots
                self._state[list(before.slots)] = FREE
            self._index[name] = place
            self._state[list(place.slots)] = STORED
            self._parents[place.slots[0]] = parent
        self._unerased.clear()
        self._erase(older)
        self._sequence = highest + 1
        # The lowest first, so that a batch lies side by side.
        self._free = np.flatnonzero(self._state == FREE)[::-1].tolist()

    # ---- what callers do ----

    def store(self, names: Bytes, records: Bytes, parents: Bytes | None = None) -> Mask:
        """Which of the records are in the tier now. One that was there is not written again.

        parents: for each the name of the record before it in its chain, kept for the caller.
        False: no slot could be had, the tier is off (why_off), or another thread stores it now.
        """
        keys = self._keys(names)
        check_rows("records", records, len(keys), self.shape.bytes)
        if parents is not None:
            check_rows("parents", parents, len(keys), NAME_BYTES)
        with self._operation():
            self._look_again(keys)
            wanted = self._wanted(keys)
            if wanted:
                self._write(self._reserve(keys, wanted, records), parents)
            with self._mutex:
                return np.array([key in self._index for key in keys], np.bool_)

    def load(self, names: Bytes, out: Bytes) -> Mask:
        """Fills the rows of out whose records the tier has; a row whose CRC is wrong is a miss, and
        zeros. The other rows stay as they are."""
        keys = self._keys(names)
        check_rows("out", out, len(keys), self.shape.bytes)
        if not out.flags.writeable:
            raise BadArgumentError("out cannot be written to")
        with self._operation():
            found = self._read(keys, out)
            with self._mutex:
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
            with self._mutex:
                for key in keys if sure else ():
                    if key in self._index:
                        self._index.move_to_end(key)
                return np.array([key in self._index for key in keys], np.bool_)

    def drop(self, names: Bytes) -> Mask:
        """Removes records, for good; which were there."""
        keys = self._keys(names)
        with self._operation():
            with self._mutex:
                there = np.array([key in self._index for key in keys], np.bool_)
                places = [self._unlink(key) for key in keys if key in self._index]
                self._counts["dropped"] += len(places)
            self._discard(_slots_of(places))
            return there

    def clear(self) -> bool:
        """Removes all records, for good."""
        self.drop(self.names()[0])
        return True

    def names(self) -> tuple[Bytes, Bytes]:
        """All names and their parents, the least recently used first (after an opening: the first
        stored)."""
        with self._operation(), self._mutex:
            joined = np.frombuffer(b"".join(self._index), np.uint8).reshape(-1, NAME_BYTES)
            first = [place.slots[0] for place in self._index.values()]
            return joined.copy(), self._parents[first]

    def stats(self) -> dict[str, int]:
        """slots_free + slots_stored + slots_reserved = slots_total, and how many records these are;
        and what was counted: packed records, the bytes of slots that they did without, and the
        microseconds of packing and unpacking."""
        with self._operation(), self._mutex:
            count = np.bincount(self._state, minlength=3)
            return {
                "slots_total": len(self._state),
                "slots_free": int(count[FREE]),
                "slots_stored": int(count[STORED]),
                "slots_reserved": int(count[RESERVED]),
                "slot_bytes": self._file.slot_bytes,
                "records": len(self._index),
                "file_bytes": self._file.file_bytes,
                "writes_off": int(bool(self.why_off)),
                **self._counts,
            }

    def moved_bytes(self) -> tuple[int, int]:
        """Read and written in this opening, by whole slots."""
        with self._mutex:
            return self._counts["bytes_read"], self._counts["bytes_written"]

    def check(self, deep: bool = False) -> list[str]:
        """What is not as it must be; empty: nothing. deep reads all records."""
        with self._operation():
            self._erase([])
            with self._mutex:
                problems = self._recount()
                if self._unerased:
                    problems.append(
                        f"{len(self._unerased)} slots of dropped records could not be erased: the "
                        f"next opening may find these records again ({self.why_off})"
                    )
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
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._lock.wait_for(lambda: self._running <= {threading.get_ident()})
                self._erase([])
            self._file.close()
            if self._codec is not None:
                self._codec.close()

    def reset_after_fork(self) -> None:
        """The file is closed, by itself."""
        self._mutex = threading.RLock()  # another thread of the parent may have had it
        self._lock = threading.Condition(self._mutex)
        self._closed, self._running = True, set()

    # ---- arguments ----

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """A call. One that an interrupt (Ctrl-C) ended leaves the tables half changed, as a crash
        leaves the file: then the next one reads them from the file anew, as an opening does."""
        this, whole = threading.get_ident(), False
        try:
            with self._mutex:
                if self._closed:
                    raise ClosedError(
                        f"the cold tier {self.path} was closed, or is another process's"
                    )
                # Still in the set: an interrupt came even to the end of the call before.
                self._torn |= this in self._running
                if self._torn:
                    self._lock.wait_for(lambda: self._running <= {this})
                    self._look_anew()
                self._running.add(this)
            yield
            whole = True
        except Exception:
            whole = True
            raise
        finally:
            with self._mutex:
                self._torn |= not whole
                self._running.discard(this)
                self._lock.notify_all()

    def _look_anew(self) -> None:
        """Read the tables from the file anew, while no call runs."""
        self._index.clear()
        self._writing.clear()
        self._state[:], self._readers[:], self._checked[:] = FREE, 0, False
        self._parents[:] = 0
        self._find_records()
        self._torn = False

    def _keys(self, names: Bytes) -> list[bytes]:
        check_rows("names", names, len(names), NAME_BYTES)
        joined = names.tobytes()
        return [joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES)]

    def _scratch(self, count: int) -> Bytes:
        return np.empty((count, self.shape.bytes), np.uint8)

    # ---- storing ----

    def _look_again(self, keys: Sequence[bytes]) -> None:
        """A record of an earlier opening may be torn: only one that is right counts as stored."""
        with self._mutex:
            there = [key for key in dict.fromkeys(keys) if key in self._index]
            doubtful = [key for key in there if not self._checked[self._index[key].slots[0]]]
        for first in range(0, len(doubtful), LOOK_RECORDS):
            some = doubtful[first : first + LOOK_RECORDS]
            self._read(some, self._scratch(len(some)))

    def _wanted(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Rows of records to be written, which no other thread writes from now on."""
        with self._mutex:
            wanted: dict[bytes, int] = {}
            for row, key in enumerate(keys):
                if key in self._index:
                    self._index.move_to_end(key)
                elif key not in self._writing:
                    wanted.setdefault(key, row)
            if self.why_off:
                self._counts["refused"] += len(wanted)
                return {}
            self._writing.update(wanted)
            return wanted

    def _reserve(
        self, keys: Sequence[bytes], wanted: dict[bytes, int], records: Bytes
    ) -> list[_Write]:
        """Slots for the first of the records, as many as can be had."""
        reserved: list[_Write] = []
        left: list[int] = []
        try:
            stored = self._packed([records[row] for row in wanted.values()])
            counts = [self._file.slots_of(record.nbytes) for record in stored]
            with self._mutex:
                freed = self._evict(sum(counts) - len(self._free), set(keys))
                room = len(freed) + len(self._free)
                fitting = int(np.searchsorted(np.cumsum(counts), room, side="right"))
                taken = sum(counts[:fitting])
                slots, left = freed[:taken], freed[taken:]
                slots = sorted(slots + [self._free.pop() for _ in range(taken - len(slots))])
                self._state[slots] = RESERVED
                for (key, row), record, count in zip(wanted.items(), stored, counts, strict=True):
                    if len(reserved) == fitting:
                        break
                    some, slots = tuple(slots[:count]), slots[count:]
                    place = Place(some, record.nbytes, self._sequence)
                    reserved.append(_Write(key, row, place, record))
                    self._sequence += 1
            return reserved
        finally:
            self._discard(left)
            with self._mutex:
                self._counts["refused"] += len(wanted) - len(reserved)
                self._writing.difference_update(set(wanted) - {item.key for item in reserved})

    def _packed(self, records: list[Bytes]) -> list[Bytes]:
        """Each record in the form that takes fewer slots."""
        if self._codec is None:
            return records
        began, raw = time.perf_counter_ns(), self._file.slots_of(self.shape.bytes)
        made = self._codec.pack(records)
        saved = [raw - self._file.slots_of(packed.nbytes) for packed in made]
        with self._mutex:
            self._counts["pack_us"] += (time.perf_counter_ns() - began) // 1000
        return [
            packed if less > 0 else record
            for packed, less, record in zip(made, saved, records, strict=True)
        ]

    def _evict(self, count: int, kept: set[bytes]) -> list[int]:
        """Reserve so many slots, if that can be, and less than a record more. Those that are not
        written are to be discarded, or an opening finds what was in them again."""
        victims: list[bytes] = []
        freed: list[int] = []
        for key, place in self._index.items():
            if len(freed) >= count:
                break
            if not (self._readers[place.slots[0]] or key in kept):
                victims.append(key)
                freed += place.slots
        for key in victims:
            self._unlink(key)
        self._counts["evicted"] += len(victims)
        return freed

    def _write(self, writes: list[_Write], parents: Bytes | None) -> None:
        parts = [
            part for item in writes for part in self._file.parts(item.key, item.place, item.record)
        ]
        above = np.zeros((len(writes), NAME_BYTES), np.uint8)
        if parents is not None:
            above[:] = parents[[item.row for item in writes]]
        counts = [len(item.place.slots) for item in writes]
        done, error = 0, None
        try:
            done, error = self._file.write(parts, np.repeat(above, counts, axis=0))
        finally:
            whole = int(np.searchsorted(np.cumsum(counts), done, side="right"))
            with self._mutex:
                for item, parent in zip(writes[:whole], above, strict=False):
                    self._add(item, parent)
                self._writing.difference_update(item.key for item in writes)
                self._counts["refused"] += len(writes) - whole
                if error is not None:
                    self._turn_off(error)
            self._discard(_slots_of(item.place for item in writes[whole:]))

    def _add(self, item: _Write, parent: Bytes) -> None:
        """Written whole: found from now on."""
        slots = list(item.place.slots)
        self._index[item.key] = item.place
        self._state[slots] = STORED
        self._checked[slots[0]], self._parents[slots[0]] = True, parent
        self._counts["stored"] += 1
        self._counts["bytes_written"] += len(slots) * self._file.slot_bytes
        if item.place.size < self.shape.bytes:
            saved = self._file.slots_of(self.shape.bytes) - len(slots)
            self._counts["packed"] += 1
            self._counts["packed_bytes_saved"] += saved * self._file.slot_bytes

    def _turn_off(self, error: OSError) -> None:
        if not self.why_off:
            self.why_off = why(self.path, error)
            log.warning("the cold tier takes no more records: %s", self.why_off)

    # ---- loading ----

    def _read(self, keys: Sequence[bytes], out: Bytes) -> Mask:
        """load() without its counts of hits; drops what is not right."""
        found = np.zeros(len(keys), np.bool_)
        with self._mutex:
            wanted = [(self._index[key], row) for row, key in enumerate(keys) if key in self._index]
            heads = [place.slots[0] for place, _ in wanted]
            np.add.at(self._readers, heads, 1)
            for key in keys:
                if key in self._index:
                    self._index.move_to_end(key)
        right: list[bool] = []
        try:
            right = self._fill(keys, wanted, out)
        finally:
            bad: list[Place] = []
            with self._mutex:
                np.subtract.at(self._readers, heads, 1)
                for (place, row), fits in zip(wanted, right, strict=False):
                    found[row] = fits
                    self._checked[place.slots[0]] |= fits
                    if not fits and self._index.get(keys[row]) == place:  # not dropped meanwhile
                        bad.append(self._unlink(keys[row]))
                        self._counts["corrupt"] += 1
                slots = sum(len(place.slots) for place, _ in wanted)
                self._counts["bytes_read"] += slots * self._file.slot_bytes
                self._lock.notify_all()
            self._discard(_slots_of(bad))
        return found

    def _fill(
        self, keys: Sequence[bytes], wanted: list[tuple[Place, int]], out: Bytes
    ) -> list[bool]:
        """Which of the rows hold their records then; zeros are in the others."""
        whole = self.shape.bytes
        stored = [
            out[row] if place.size == whole else np.empty(place.size, np.uint8)
            for place, row in wanted
        ]
        parts = [
            (part, number)
            for number, ((place, row), record) in enumerate(zip(wanted, stored, strict=True))
            for part in self._file.parts(keys[row], place, record)
        ]
        parts.sort(key=lambda item: item[0].slot)
        right = [True] * len(wanted)
        for fits, (_, number) in zip(self._file.read([p for p, _ in parts]), parts, strict=True):
            right[number] &= fits
        packed = [i for i, (place, _) in enumerate(wanted) if right[i] and place.size < whole]
        if packed and self._codec is not None:
            began = time.perf_counter_ns()
            pairs = [(stored[i], out[wanted[i][1]]) for i in packed]
            for i, fits in zip(packed, self._codec.unpack(pairs), strict=True):
                right[i] = fits
            with self._mutex:
                self._counts["unpack_us"] += (time.perf_counter_ns() - began) // 1000
        for fits, (_, row) in zip(right, wanted, strict=True):
            if not fits:
                out[row] = 0
        return right

    def _unlink(self, key: bytes) -> Place:
        """Take a record out of the index; its slots are to be discarded."""
        place = self._index.pop(key)
        self._state[list(place.slots)] = RESERVED
        self._checked[place.slots[0]] = False
        return place

    def _discard(self, slots: Sequence[int]) -> None:
        """Erases reserved slots, and frees them when no call reads them any more."""
        if not slots:
            return
        self._erase(slots)
        with self._mutex:
            self._lock.wait_for(lambda: self._torn or not self._readers[list(slots)].any())
            if self._torn:  # a reader was interrupted; all is to be looked at anew
                return
            self._state[list(slots)] = FREE
            self._checked[list(slots)] = False
            self._free += sorted(slots, reverse=True)

    def _erase(self, slots: Sequence[int]) -> None:
        """Erases slots, so that the next opening does not find their records, and those that the
        disk refused to erase before. It refuses once, and the tier writes nothing more: until an
        erase works, these slots hold what they held."""
        with self._mutex:
            unerased, self._unerased = [*self._unerased, *slots], []
        try:
            self._file.erase(unerased)
        except OSError as error:
            with self._mutex:
                self._unerased += unerased
                self._counts["erase_failures"] += 1
                self._turn_off(error)

    def _recount(self) -> list[str]:
        problems = []
        stored = np.zeros(len(self._state), np.bool_)
        slots = _slots_of(self._index.values())
        stored[slots] = True
        if stored.sum() != len(slots) or (stored != (self._state == STORED)).any():
            problems.append("the index does not name each stored slot once")
        if sorted(self._free) != np.flatnonzero(self._state == FREE).tolist():
            problems.append("the list of free slots is not that of those that are free")
        if (self._readers < 0).any():
            problems.append("a slot has fewer than no readers")
        return problems


def _slots_of(places: Iterable[Place]) -> list[int]:
    return [slot for place in places for slot in place.slots]


def check_rows(what: str, rows: Bytes, count: int, width: int) -> None:
    fits = rows.shape == (count, width) and rows.dtype == np.uint8
    if not (fits and rows.flags.c_contiguous):
        raise BadArgumentError(
            f"{what} of shape {rows.shape} and dtype {rows.dtype}: {(count, width)} of uint8 "
            "wanted, without gaps"
        )
