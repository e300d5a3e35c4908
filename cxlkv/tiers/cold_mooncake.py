"""The Mooncake tier keeps cold records in a store of several machines' memory and disks.

    MooncakeTier("mooncake://10.0.0.1:50051", shape=shape, lend="64GiB")

The store keeps each record under its layout and name, so all machines with pools of one layout
share it; it evicts by itself. Bytes go through memory of the tier's own that is registered with
Mooncake, so that a transfer which outlives its deadline writes into nobody's record. What comes
back is verified: name, layout, length and CRC32C.

Mooncake is imported only when somebody asks for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes, Mask
from cxlkv.errors import BadArgumentError, ClosedError, ColdError, UnsupportedError
from cxlkv.layout import parse_bytes
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.pages import crc32c
from cxlkv.tiers.cold_file import NAME_BYTES, RecordShape

SCHEME = "mooncake://"
TRAILER_MAGIC = 0x52564B43  # "CKVR"
TRAILER = np.dtype(
    [
        ("magic", "<u4"),
        ("layout", "<u4"),
        ("name", "u1", NAME_BYTES),
        ("bytes", "<u8"),
        ("record_crc", "<u4"),
        ("crc", "<u4"),  # of all before it
    ]
)
STAGE_BYTES = 64 << 20
LOCAL_BUFFER_BYTES = 16 << 20  # of Mooncake's own; our transfers do not go through it
SETUP_S = 30.0
PAUSE_S = 5.0
"""Pause after a failure: an engine computes meanwhile."""
NO_SPACE, DOES_NOT_FIT, NOT_FOUND = -200, -600, -704  # Mooncake's codes

Made = TypeVar("Made")
log = logging.getLogger("cxlkv")


class Client(Protocol):
    """What is used of mooncake.store.MooncakeDistributedStore."""

    def setup(self, *options: str | int) -> int: ...
    def register_buffer(self, address: int, size: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], at: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def close(self) -> int: ...


class MooncakeTier(Closing):
    """A dictionary from names to records, as ColdTier is one, in the Mooncake store whose master is
    at `where`: mooncake://HOST:PORT, and behind ? with & between: local=ADDRESS of this machine,
    where others reach it (default: as the master is reached), protocol=tcp or rdma, device=NAME,
    timeout_s=SECONDS of one transfer or question (default 5).

    lend: bytes of this process's memory for the store; what lies there goes with the process.

    A master or a machine that is gone, and a call that is not done in time, is counted in
    stats()["errors"], said once in the log and in `why_off`, and for PAUSE_S seconds nothing is
    asked: records are misses, and are not stored. Then it is tried again. What a call that never
    returns still holds is never used again.

    Any number of threads; a child of os.fork() finds it closed. Raises BadArgumentError, ColdError
    when no master answers, UnsupportedError where Mooncake is not installed.
    """

    def __init__(self, where: str, *, shape: RecordShape, lend: str | int = 0):
        self.where, self.shape = where, shape
        options = _options(where)
        self._timeout_s = float(options["timeout_s"])
        self._row_bytes = -(-(shape.bytes + TRAILER.itemsize) // 64) * 64
        self._rows = max(1, STAGE_BYTES // self._row_bytes)
        self._prefix = f"cxlkv-{shape.layout:08x}-{shape.bytes}-"
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # of what stands below
        self._staging = threading.Lock()  # one call works on the staged rows
        self._calls: list[threading.Thread] = []  # that have not returned
        self._late: list[threading.Thread] = []  # of them, those past their deadline
        self._off_until, self._reason = 0.0, ""
        self._closed = False
        self._client = _client(where)
        lifetime.watch(self)
        self._stage = np.zeros((self._rows, self._row_bytes), np.uint8)
        self._set_up(options, parse_bytes(lend) if lend else 0)

    def _set_up(self, options: dict[str, str], lent_bytes: int) -> None:
        local = options["local"] or _own_address(options["host"], int(options["port"]))
        given = (
            f"{local}:{_free_port(local)}",
            "P2PHANDSHAKE",
            lent_bytes,
            LOCAL_BUFFER_BYTES,
            options["protocol"],
            options["device"],
            f"{options['host']}:{options['port']}",
        )
        code = self._timed(lambda: self._client.setup(*given), SETUP_S)
        if code != 0:
            reason = "no answer" if code is None else f"its code is {code}"
            raise ColdError(
                f"{self.where}: no Mooncake store can be had there ({reason}). Start "
                "mooncake_master there, or name the host and port that it listens on"
            )
        code = self._client.register_buffer(self._stage.ctypes.data, self._stage.nbytes)
        if code != 0:
            self.close()
            raise ColdError(
                f"{self.where}: Mooncake registers no {self._stage.nbytes} bytes, its code is "
                f"{code}. Raise the limit of locked memory, ulimit -l"
            )

    # ---- what callers do ----

    @property
    def why_off(self) -> str:
        """Why nothing is asked at the moment; empty while all is well."""
        with self._lock:
            self._late = [thread for thread in self._late if thread.is_alive()]
            off = self._late or time.monotonic() < self._off_until
            return self._reason if off else ""

    def contains(self, names: Bytes, sure: bool = False) -> Mask:
        """Which names the store has; none while it is off. sure makes no difference: what was
        stored in part is not there."""
        self._check()
        keys = self._keys(names)
        codes = self._ask("asked", lambda: self._client.batch_is_exist(keys), len(keys), (0, 1))
        return _equal(codes, 1)

    def store(self, names: Bytes, records: Bytes, parents: Bytes | None = None) -> Mask:
        """Which of the records are in the store now; one that was there is not sent again. Parents
        are not kept."""
        self._check()
        _check_rows("records", records, (len(names), self.shape.bytes))
        keys, there = self._keys(names), self.contains(names)
        kept = {key for key, is_there in zip(keys, there.tolist(), strict=True) if is_there}
        wanted = {key: row for row, key in enumerate(keys) if key not in kept}
        rows = np.array(list(wanted.values()), np.intp)
        for first in range(0, len(rows), self._rows):
            some = rows[first : first + self._rows]
            with self._staging:
                stored = self._put(names, records, some)
            kept |= {keys[row] for row in some[stored].tolist()}
        with self._lock:
            self._counts["refused"] += len(set(keys) - kept)
        return np.array([key in kept for key in keys], np.bool_)

    def load(self, names: Bytes, out: Bytes) -> Mask:
        """Fills the rows of out whose records the store has. One that is not what was stored is a
        miss, zeros, counted, and taken out of the store. The other rows stay as they are."""
        self._check()
        _check_rows("out", out, (len(names), self.shape.bytes))
        found = np.zeros(len(names), np.bool_)
        _, unique, of = np.unique(self._keys(names), return_index=True, return_inverse=True)
        for first in range(0, len(unique), self._rows):
            some = unique[first : first + self._rows]
            with self._staging:
                found[some] = self._get(names, out, some)
        for row in np.flatnonzero(unique[of] != np.arange(len(names))).tolist():  # asked for twice
            found[row] = found[unique[of[row]]]
            if found[row]:
                out[row] = out[unique[of[row]]]
        with self._lock:
            self._counts["hits"] += int(found.sum())
            self._counts["misses"] += int((~found).sum())
        return found

    def drop(self, names: Bytes) -> Mask:
        """Removes records, also those that others read just now; which were there."""
        self._check()
        keys = self._keys(names)
        right = (0, NOT_FOUND)
        codes = self._ask(
            "removing", lambda: self._client.batch_remove(keys, True), len(keys), right
        )
        return _equal(codes, 0)

    def clear(self) -> bool:
        """False: other machines' records lie there, too."""
        return False

    def stats(self) -> dict[str, int]:
        self._check()
        names = "hits misses corrupt stored refused errors bytes_read bytes_written"
        off = int(bool(self.why_off))
        with self._lock:
            return {"off": off, **{name: self._counts[name] for name in names.split()}}

    def moved_bytes(self) -> tuple[int, int]:
        with self._lock:
            return self._counts["bytes_read"], self._counts["bytes_written"]

    def close(self) -> None:
        """A second time does nothing. Does not wait for calls that are past their deadline."""
        if self._closed:
            return
        with self._lock:
            self._closed, calls = True, self._calls
        for call in calls:
            call.join(self._timeout_s)
        if not any(call.is_alive() for call in calls):
            last = threading.Thread(target=self._client.close, daemon=True)
            last.start()
            last.join(SETUP_S)

    def reset_after_fork(self) -> None:
        """What Mooncake has here, its threads and its peers know as the parent's."""
        self._lock, self._staging = threading.Lock(), threading.Lock()
        self._calls, self._late, self._closed = [], [], True
        lifetime.keep_for_ever(self._client)

    # ---- transfers, under the staging lock ----

    def _put(self, names: Bytes, records: Bytes, some: npt.NDArray[np.intp]) -> Mask:
        if self.why_off:  # the staged rows may be somebody's still
            return np.zeros(len(some), np.bool_)
        rows, trailers = self._stage[: len(some)], np.zeros(len(some), TRAILER)
        trailers["magic"], trailers["layout"] = TRAILER_MAGIC, self.shape.layout
        trailers["bytes"], trailers["name"] = self.shape.bytes, names[some]
        for i, row in enumerate(some.tolist()):
            rows[i, : self.shape.bytes] = records[row]
            trailers["record_crc"][i] = crc32c(records[row])
            trailers["crc"][i] = crc32c(trailers[i : i + 1].tobytes()[:-4])
        end = self.shape.bytes + TRAILER.itemsize
        rows[:, self.shape.bytes : end] = trailers.view(np.uint8).reshape(len(some), -1)
        given, right = (self._keys(names[some]), *self._places(len(some))), (0, NO_SPACE)
        codes = self._ask("storing", lambda: self._client.batch_put_from(*given), len(some), right)
        stored = _equal(codes, 0)
        with self._lock:
            self._counts["stored"] += int(stored.sum())
            self._counts["bytes_written"] += int(stored.sum()) * self._row_bytes
        return stored

    def _get(self, names: Bytes, out: Bytes, some: npt.NDArray[np.intp]) -> Mask:
        found = np.zeros(len(some), np.bool_)
        if self.why_off:
            return found
        self._stage[: len(some), self.shape.bytes :] = 0  # what lay here before is no answer
        given, right = (
            (self._keys(names[some]), *self._places(len(some))),
            (NOT_FOUND, DOES_NOT_FIT),
        )
        codes = self._ask("loading", lambda: self._client.batch_get_into(*given), len(some), right)
        wrong = []
        for i, (code, row) in enumerate(zip(codes, some.tolist(), strict=True)):
            if code <= 0 and code != DOES_NOT_FIT:  # something larger lies there
                continue
            found[i] = code == self._row_bytes and self._fits(i, names[row])
            out[row] = self._stage[i, : self.shape.bytes] if found[i] else 0
            if not found[i]:
                wrong.append(row)
        with self._lock:
            self._counts["corrupt"] += len(wrong)
            self._counts["bytes_read"] += int(found.sum()) * self._row_bytes
        if wrong:
            self.drop(np.ascontiguousarray(names[wrong]))
        return found

    def _fits(self, i: int, name: Bytes) -> bool:
        record = self._stage[i, : self.shape.bytes]
        line = self._stage[i, self.shape.bytes : self.shape.bytes + TRAILER.itemsize].tobytes()
        trailer = np.frombuffer(line, TRAILER)[0]
        return bool(
            trailer["magic"] == TRAILER_MAGIC
            and trailer["layout"] == self.shape.layout
            and trailer["bytes"] == self.shape.bytes
            and (trailer["name"] == name).all()
            and int(trailer["crc"]) == crc32c(line[:-4])
            and int(trailer["record_crc"]) == crc32c(record)
        )

    def _places(self, count: int) -> tuple[list[int], list[int]]:
        base = self._stage.ctypes.data
        return [base + i * self._row_bytes for i in range(count)], [self._row_bytes] * count

    # ---- calls that may fail, or never return ----

    def _ask(
        self, what: str, call: Callable[[], list[int]], count: int, right: tuple[int, ...]
    ) -> list[int]:
        """What Mooncake says of each; NOT_FOUND while it is off, or when it does not answer in
        time. A code below 0 that is not `right` is a failure."""
        nothing = [NOT_FOUND] * count
        if not count or self.why_off:
            return nothing
        codes = self._timed(call, self._timeout_s)
        if codes is None or len(codes) != count:
            self._fail(f"{what}, it did not answer in {self._timeout_s:g} s")
            return nothing
        failed = [code for code in codes if code < 0 and code not in right]
        if failed:
            self._fail(f"{what}, its code is {failed[0]}")
        return codes

    def _timed(self, call: Callable[[], Made], limit_s: float) -> Made | None:
        """Call with a limit of time; None when that is over: the call goes on, and the tier is off
        until it ends."""
        made: list[Made] = []

        def work() -> None:
            try:
                made.append(call())
            except Exception as error:  # as no answer
                log.warning("Mooncake raised %s: %s", type(error).__name__, error)

        thread = threading.Thread(target=work, name="cxlkv-mooncake", daemon=True)
        with self._lock:
            self._check()
            self._calls = [one for one in self._calls if one.is_alive()]
            try:
                thread.start()
            except RuntimeError:  # no thread to be had now: as no answer
                return None
            self._calls.append(thread)
        thread.join(limit_s)
        if made:
            return made[0]
        with self._lock:
            self._late.append(thread)
        return None

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._counts["errors"] += 1
            first = not self._reason
            self._reason = f"{self.where}: {reason}. Is its master up, and all who lend memory?"
            self._off_until = time.monotonic() + PAUSE_S
        if first:
            log.warning("the remote tier is off for a while: %s", self._reason)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the tier {self.where} was closed, or is another process's")

    def _keys(self, names: Bytes) -> list[str]:
        _check_rows("names", names, (len(names), NAME_BYTES))
        return [self._prefix + row.tobytes().hex() for row in names]


def _equal(codes: list[int], wanted: int) -> Mask:
    return np.array([code == wanted for code in codes], np.bool_)


def _check_rows(what: str, rows: Bytes, shape: tuple[int, int]) -> None:
    if rows.shape != shape or rows.dtype != np.uint8:
        raise BadArgumentError(
            f"{what} of shape {rows.shape} and dtype {rows.dtype}: {shape} of uint8 wanted"
        )


def _options(where: str) -> dict[str, str]:
    wanted = f"{where}: {SCHEME}HOST:PORT is wanted"
    found = {"local": "", "protocol": "tcp", "device": "", "timeout_s": "5"}
    try:
        parts = urlsplit(where)
        found |= {"host": parts.hostname or "", "port": str(parts.port or "")}
        given = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise BadArgumentError(f"{wanted}: {error}") from error
    if not where.startswith(SCHEME) or not (found["host"] and found["port"]) or parts.path:
        raise BadArgumentError(wanted)
    for key, value in given.items():
        if key not in ("local", "protocol", "device", "timeout_s"):
            raise BadArgumentError(f"{where}: local, protocol, device, timeout_s, not {key}")
        found[key] = value
    try:
        in_order = 0 < float(found["timeout_s"]) < 3600
    except ValueError:
        in_order = False
    if not in_order:
        raise BadArgumentError(f"{where}: timeout_s is a number of seconds, more than 0")
    return found


def _client(where: str) -> Client:
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:  # OSError: a library of the system that it needs
        raise UnsupportedError(
            f"{where} needs Mooncake ({error}): pip install mooncake-transfer-engine, or "
            "mooncake-transfer-engine-non-cuda where there is no CUDA"
        ) from error
    made: Client = MooncakeDistributedStore()
    return made


def _own_address(host: str, port: int) -> str:
    """This machine's, as packets to the master carry it; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ColdError(f"{SCHEME}{host}:{port} cannot be reached: {error}") from error


def _free_port(address: str) -> int:
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ColdError(f"{address} is no address of this machine: {error}") from error


def is_mooncake(where: object) -> bool:
    return isinstance(where, str) and where.startswith(SCHEME)
