"""Processes of one machine share a cold file: one has it open, and the others ask that one.

Whoever takes the file's lock is its owner and serves it (cold_server). When the owner ends, is
killed or closes its tiers, the next of the others that wants something takes the file, and goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import cast

import numpy as np

from cxlkv.arrays import Bytes, Mask
from cxlkv.errors import BadArgumentError, BusyError, ClosedError, GeometryError
from cxlkv.layout import parse_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.tiers import cold_server
from cxlkv.tiers.cold import ColdTier, check_rows
from cxlkv.tiers.cold_file import NAME_BYTES, RecordShape
from cxlkv.tiers.cold_server import NAMES_MAX, ColdServer, Message, SharedRows

ANSWER_S = 5.0
"""An owner that takes longer is as good as dead for now."""
CHECK_S = 600.0
"""A check() may read the whole file."""
SETUP_S = 10.0
"""An owner that has the lock serves the file by then: it has looked through it, or made it."""
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Pause after a failure, twice as long after the next; an engine computes meanwhile."""

ANSWERS = {"stats": ("stats", dict), "check": ("problems", list), "clear": ("cleared", bool)}
"""Name and type of what the owner answers."""

log = logging.getLogger("cxlkv")


class SharedColdTier(Closing):
    """A ColdTier that this process has open, or another process of this user for it.

    Arguments, records and errors are ColdTier's; processes that share a file give the same ones. An
    owner that dies is replaced at the next call. One that does not answer within ANSWER_S, stopped
    or on a disk that hangs, is counted in stats()["errors"] and said once in the log and in
    `why_off`: records are misses then and are not stored, until it answers again or is gone.

    Any number of threads; a child of os.fork() finds it closed. Raises what ColdTier raises;
    GeometryError where the owner has opened the file with other arguments, BusyError where the
    process that has it open does not serve it.
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
        self.path, self.shape = os.fspath(path), shape
        self._capacity, self._fsync, self._compress = parse_bytes(capacity), fsync, compress
        self._errors, self._pauses, self._off_until = 0, 0, 0.0
        self._reason = ""
        self._mutex = threading.Lock()
        self._closed = False
        self._joining: threading.Thread | None = None
        self._side: _Owner | _Peer | None = None
        lifetime.watch(self)
        self._side = self._joined()

    # ---- what callers do ----

    @property
    def why_off(self) -> str:
        side = self._side
        return side.why_off if side is not None else self._reason

    @property
    def file(self) -> ColdTier | None:
        """The file, where this process has it open now."""
        return self._side.tier if isinstance(self._side, _Owner) else None

    @property
    def is_owner(self) -> bool:
        return self.file is not None

    def contains(self, names: Bytes, sure: bool = False) -> Mask:
        return self._rows("contains", names, sure=sure)

    def store(self, names: Bytes, records: Bytes, parents: Bytes | None = None) -> Mask:
        if parents is None:
            parents = np.zeros((len(names), NAME_BYTES), np.uint8)
        return self._rows("store", names, records, parents)

    def load(self, names: Bytes, out: Bytes) -> Mask:
        return self._rows("load", names, out)

    def drop(self, names: Bytes) -> Mask:
        return self._rows("drop", names)

    def clear(self) -> bool:
        return bool(self._asked("clear").get("cleared"))

    def stats(self) -> dict[str, int]:
        """The owner's; and `errors`, of asking it, and whether this process is_owner."""
        found = self._asked("stats").get("stats", {})
        return {
            **cast("dict[str, int]", found),
            "errors": self._errors,
            "is_owner": int(self.is_owner),
            "writes_off": int(bool(self.why_off)),
        }

    def moved_bytes(self) -> tuple[int, int]:
        """ColdTier.moved_bytes(), while this process has the file open: each byte is counted by one
        process."""
        file = self.file
        return (0, 0) if file is None else file.moved_bytes()

    def check(self, deep: bool = False) -> list[str]:
        """ColdTier.check(); the first hundred problems where another process has the file."""
        answer = self._asked("check", deep=deep)
        return cast("list[str]", answer.get("problems", [self.why_off]))

    def close(self) -> None:
        """The file goes to another process that wants it. A second time does nothing."""
        with self._mutex:
            self._closed = True
            side, self._side = self._side, None
        if side is not None:
            side.close()

    def reset_after_fork(self) -> None:
        """Its parts reset themselves: the file and the sockets are the parent's."""
        self._mutex, self._closed, self._joining = threading.Lock(), True, None

    # ---- asking ----

    def _rows(
        self,
        does: str,
        names: Bytes,
        records: Bytes | None = None,
        parents: Bytes | None = None,
        sure: bool = False,
    ) -> Mask:
        check_rows("names", names, len(names), NAME_BYTES)
        if records is not None:
            check_rows(
                "out" if does == "load" else "records", records, len(names), self.shape.bytes
            )
            if does == "load" and not records.flags.writeable:
                raise BadArgumentError("out cannot be written to")
        if parents is not None:
            check_rows("parents", parents, len(names), NAME_BYTES)
        for _ in range(2):  # the second time with the next owner
            side = self._present()
            if side is None:
                break
            try:
                found = side.rows(does, names, records, parents, sure)
                self._pauses = 0
                return found
            except OSError as error:
                self._lose(side, error)
        return np.zeros(len(names), np.bool_)

    def _asked(self, does: str, **more: object) -> Message:
        for _ in range(2):
            side = self._present()
            if side is None:
                break
            try:
                return side.ask({"do": does, "count": 0, **more})
            except OSError as error:
                self._lose(side, error)
        return {}

    # ---- who has the file ----

    def _joined(self) -> _Owner | _Peer:
        """Opens the file, or connects to the process that has it."""
        until = time.monotonic() + SETUP_S
        while True:
            try:
                return _Owner(self.path, self.shape, self._capacity, self._fsync, self._compress)
            except BusyError as busy:
                terms = _terms(self.shape, self._capacity, self._fsync, self._compress)
                try:
                    return _Peer(self.path, self.shape, terms)
                except OSError as error:
                    if isinstance(error, TimeoutError) or time.monotonic() > until:
                        raise BusyError(f"{busy}. It does not serve the file: {error}") from error
            time.sleep(0.01)  # it has taken the lock, and reads or makes the file

    def _present(self) -> _Owner | _Peer | None:
        """The side that serves this process; None while none does."""
        with self._mutex:
            if self._closed:
                raise ClosedError(f"the cold tier {self.path} was closed, or is another process's")
            if self._side is not None or time.monotonic() < self._off_until:
                return self._side
            if self._joining is None:
                joining = threading.Thread(target=self._join_again, name="cxlkv-cold", daemon=True)
                try:
                    joining.start()
                except RuntimeError:  # no thread to be had now
                    return None
                self._joining = joining
            joining = self._joining
        joining.join(ANSWER_S)  # a large file takes longer: misses meanwhile
        return self._side

    def _join_again(self) -> None:
        side, reason = None, ""
        try:
            side = self._joined()
        except Exception as error:  # the next look tries again; without this thread none would
            reason = str(error) or type(error).__name__
        with self._mutex:
            self._joining = None
            if side is None:
                self._pause(reason)
            elif not self._closed:
                self._side, self._reason = side, ""
                return
        if side is not None:
            side.close()

    def _lose(self, side: _Owner | _Peer, error: Exception) -> None:
        """Drop a side that has gone, or does not answer; a stopped one still has the file, so that
        asking again at once would only cost another deadline."""
        with self._mutex:
            if self._side is side:
                self._side = None
                if isinstance(error, TimeoutError):
                    self._pause(f"{side.name} has not answered within {ANSWER_S:g} s")
        side.close()

    def _pause(self, reason: str) -> None:
        self._errors += 1
        self._off_until = time.monotonic() + min(PAUSE_MAX_S, PAUSE_S * 2**self._pauses)
        self._pauses += 1
        if not self._reason:
            log.warning("the cold tier %s is off for a while: %s", self.path, reason)
        self._reason = f"{self.path}: {reason}"


class _Owner(Closing):
    """This process has the file."""

    def __init__(
        self, path: str, shape: RecordShape, capacity: int, fsync: str, compress: str | None
    ):
        self.tier = ColdTier(path, shape=shape, capacity=capacity, fsync=fsync, compress=compress)
        try:
            self._server = ColdServer(self.tier, _terms(shape, capacity, fsync, compress))
        except BaseException:
            self.tier.close()
            raise
        self.name = "this process"

    @property
    def why_off(self) -> str:
        return self.tier.why_off

    def rows(
        self, does: str, names: Bytes, records: Bytes | None, parents: Bytes | None, sure: bool
    ) -> Mask:
        if records is not None and parents is not None:
            return self.tier.store(names, records, parents)
        if records is not None:
            return self.tier.load(names, records)
        return self.tier.drop(names) if does == "drop" else self.tier.contains(names, sure)

    def ask(self, request: Message) -> Message:
        if request["do"] == "check":
            return {"problems": self.tier.check(bool(request["deep"]))}
        if request["do"] == "clear":
            return {"cleared": self.tier.clear()}
        return {"stats": self.tier.stats()}

    def close(self) -> None:
        self._server.close()
        self.tier.close()


class _Peer(Closing):
    """Another process has the file, and answers this one."""

    def __init__(self, path: str, shape: RecordShape, terms: Message):
        self.why_off = ""
        self._shape = shape
        self._mutex = threading.Lock()  # one call at a time has the rows
        self._socket = cold_server.connect(path)
        lifetime.watch(self)
        try:
            self.name = f"process {cold_server.peer_ids(self._socket)[0]}"
            self._socket.settimeout(ANSWER_S)
            descriptor, self._shared = SharedRows.make(shape.bytes)
            try:
                cold_server.send(self._socket, terms, [descriptor])
            finally:
                os.close(descriptor)
            wrong = str(cold_server.receive(self._socket)[0].get("wrong"))
        except BaseException:
            self._socket.close()
            raise
        if wrong:
            self._socket.close()
            raise GeometryError(
                f"{path} is open in {self.name}, with other settings: {wrong}. Give both the same"
            )

    def rows(
        self, does: str, names: Bytes, records: Bytes | None, parents: Bytes | None, sure: bool
    ) -> Mask:
        found = np.zeros(len(names), np.bool_)
        most = NAMES_MAX if records is None else len(self._shared.records)
        for first in range(0, len(names), most):
            some = slice(first, min(first + most, len(names)))
            with self._mutex:
                self._put(names[some], None if parents is None else parents[some])
                if records is not None and parents is not None:
                    self._shared.records[: some.stop - first] = records[some]
                self._exchange({"do": does, "count": some.stop - first, "sure": sure})
                found[some] = self._shared.answers[: some.stop - first] == 1
                if does == "load" and records is not None:
                    rows = np.flatnonzero(found[some])
                    records[first + rows] = self._shared.records[rows]
        return found

    def _put(self, names: Bytes, parents: Bytes | None) -> None:
        self._shared.names[: len(names)] = names
        if parents is not None:
            self._shared.parents[: len(names)] = parents

    def ask(self, request: Message) -> Message:
        with self._mutex:
            answer = self._exchange(request)
        name, kind = ANSWERS[str(request["do"])]
        if not isinstance(answer.get(name), kind):
            raise ConnectionError(f"{self.name} answers what makes no sense: no {name}")
        return answer

    def _exchange(self, request: Message) -> Message:
        """One call that an interrupt (Ctrl-C) ended would leave its answer to the next."""
        try:
            self._socket.settimeout(CHECK_S if request["do"] == "check" else ANSWER_S)
            cold_server.send(self._socket, request)
            answer, _ = cold_server.receive(self._socket)
        except BaseException:
            self._socket.close()
            raise
        self.why_off = str(answer.get("why_off", ""))
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def reset_after_fork(self) -> None:
        """The connection, and the memory that its answers come to, are the parent's."""
        self._mutex = threading.Lock()
        self._socket.close()


def _terms(shape: RecordShape, capacity: int, fsync: str, compress: str | None) -> Message:
    """What processes that share a file must agree in."""
    return {
        "messages": cold_server.VERSION,
        "record_bytes": shape.bytes,
        "layout": shape.layout,
        "capacity": capacity,
        "fsync": fsync,
        "compress": compress,
    }
