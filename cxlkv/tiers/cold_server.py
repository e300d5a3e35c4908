"""The process that has a cold file open serves it to the others of its machine.

It listens on a socket beside the file. A peer brings memory that both map: names, answers and
records lie there, and only what is to be done with them goes through the socket.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.errors import CXLKVError, NotAColdFileError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.tiers.cold import ColdTier
from cxlkv.tiers.cold_file import NAME_BYTES

VERSION = 1
"""Version of the messages; peers of other releases learn of it from the answer."""
NAMES_MAX = 1 << 16  # of one message
RECORDS_BYTES = 16 << 20  # of one message: so much is on the disk long before a peer's deadline
MESSAGE_BYTES = 64 << 10
WELCOME_S = 3.0  # a peer that has not said its terms by then is left
ACCEPT_PAUSE_S = 0.1  # after a peer that could not be accepted
SOCKET_NAME_MAX = 80  # letters, so that an address has room for it
ADDRESS_MAX = 107  # letters

Message = Mapping[str, object]

log = logging.getLogger("cxlkv")


class SharedRows:
    """Memory that a peer has made and both map: NAMES_MAX names, parents and answers, then as many
    records as RECORDS_BYTES holds, at least one."""

    def __init__(self, descriptor: int, record_bytes: int):
        """The descriptor stays open. Raises OSError for memory that is too small."""
        rows = max(1, RECORDS_BYTES // record_bytes)
        heads = NAMES_MAX * (2 * NAME_BYTES + 1)
        size = heads + rows * record_bytes
        if os.fstat(descriptor).st_size < size:
            raise OSError(f"memory of {os.fstat(descriptor).st_size} bytes; {size} are needed")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("memory that its maker could make shorter, and so end who reads it")
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        names = memory[: 2 * NAMES_MAX * NAME_BYTES].reshape(2, NAMES_MAX, NAME_BYTES)
        self.names, self.parents = names
        self.answers = memory[names.nbytes : heads]
        self.records = memory[heads:].reshape(rows, record_bytes)

    @staticmethod
    def make(record_bytes: int) -> tuple[int, SharedRows]:
        """Make shared rows and their descriptor. Sealed: a peer that made them shorter would end
        the reader."""
        rows = max(1, RECORDS_BYTES // record_bytes)
        descriptor = os.memfd_create("cxlkv-cold", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, NAMES_MAX * (2 * NAME_BYTES + 1) + rows * record_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return descriptor, SharedRows(descriptor, record_bytes)
        except BaseException:
            os.close(descriptor)
            raise


class _OwnedSocket(socket.socket):
    """Closed with its owner: one that is only dropped is no leak to be warned of."""

    def __del__(self, close: Callable[[_socket.socket], None] = _socket.socket.close) -> None:
        close(self)  # also where its own __init__ was interrupted, and when modules are gone


def _accept(listener: socket.socket, owner: weakref.ref[ColdServer]) -> None:
    """Accept peers. Nothing ends it but the owner's end: what fails is tried again."""
    said = False
    while True:
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # closed, or shut down
                listener.close()
                return
            if not said:  # no descriptor, no memory
                log.warning("the cold file takes no peer for now: %s", error)
            said = True
            time.sleep(ACCEPT_PAUSE_S)
            continue
        server = owner()
        if server is None:
            peer.close()
            return
        server.admit(peer)
        del server


class ColdServer(Closing):
    """Serves an open tier to processes of this user, a thread for each, until close(). Where the
    file system takes no sockets, or the process gets no thread, the tier is this process's alone:
    the log says so.

    terms: what peers must agree in, besides the shape of records. Raises NotAColdFileError where
    something else lies at the socket's path.
    """

    def __init__(self, tier: ColdTier, terms: Message):
        self._tier, self._terms = tier, terms
        self._path = socket_path(tier.path)
        if _is_others(self._path):
            raise NotAColdFileError(
                f"{self._path} is no cold tier's socket, which is to lie there. Nothing was "
                f"changed: give another path than {tier.path}, or move that away"
            )
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._mutex = threading.Lock()
        self._closed = False
        self._listener = _OwnedSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inode = -1
        # The thread has a weak reference only, so that a server that is dropped ends it.
        waiting = (self._listener, weakref.ref(self))
        self._thread = threading.Thread(
            target=_accept, args=waiting, name="cxlkv-cold", daemon=True
        )
        lifetime.watch(self)
        try:
            self._listen()
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._listener.close()
            log.warning("%s is not shared with other processes: %s", tier.path, error)

    def _listen(self) -> None:
        with suppress(FileNotFoundError):  # a dead owner's: whoever has the file's lock is new
            os.unlink(self._path)
        with _address(self._path) as address:
            self._listener.bind(address)
        os.chmod(self._path, 0o600)
        self._inode = os.stat(self._path).st_ino
        self._listener.listen(64)

    def admit(self, peer: socket.socket) -> None:
        """Serve a peer of this user, in a thread."""
        try:
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            with self._mutex:
                if self._closed or not is_own(peer):
                    peer.close()
                    return
                self._peers[peer] = thread
            thread.start()
        except Exception:  # no thread, no memory to be had: it asks again
            self._leave(peer)

    def _serve(self, peer: socket.socket) -> None:
        try:
            rows = self._welcome(peer)
            while rows is not None:
                request, _ = receive(peer)
                send(peer, self._answer(request, rows))
        except (OSError, CXLKVError, KeyError, TypeError, ValueError):
            pass  # it has gone, speaks another language, or the tier was closed: its own loss
        except Exception:
            log.exception("a peer of the cold file %s was left by a fault of ours", self._path)
        finally:
            self._leave(peer)

    def _leave(self, peer: socket.socket) -> None:
        with self._mutex:
            self._peers.pop(peer, None)
        peer.close()

    def _welcome(self, peer: socket.socket) -> SharedRows | None:
        peer.settimeout(WELCOME_S)
        terms, descriptors = receive(peer, descriptors=1)
        peer.settimeout(None)
        try:
            wrong = difference(terms, self._terms)
            send(peer, {"wrong": wrong})
            return None if wrong else SharedRows(descriptors[0], self._tier.shape.bytes)
        finally:
            for one in descriptors:
                os.close(one)

    def _answer(self, request: Message, rows: SharedRows) -> Message:
        does, count = str(request["do"]), int(str(request["count"]))
        if does == "stats":
            return {"stats": self._tier.stats()}
        if does == "check":
            return {"problems": self._tier.check(bool(request["deep"]))[:100]}
        if does == "clear":
            return {"cleared": self._tier.clear()}
        most = len(rows.records) if does in ("store", "load") else NAMES_MAX
        if not 0 <= count <= most:
            raise ValueError(f"{count} rows")
        names = rows.names[:count].copy()  # the peer could change them meanwhile
        rows.answers[:count] = self._done(does, bool(request.get("sure")), names, rows)
        return {"why_off": self._tier.why_off}

    def _done(self, does: str, sure: bool, names: Bytes, rows: SharedRows) -> Bytes:
        records, parents = rows.records[: len(names)], rows.parents[: len(names)]
        if does == "store":
            return self._tier.store(names, records, parents.copy()).view(np.uint8)
        if does == "load":
            return self._tier.load(names, records).view(np.uint8)
        if does == "drop":
            return self._tier.drop(names).view(np.uint8)
        if does == "contains":
            return self._tier.contains(names, sure).view(np.uint8)
        raise ValueError(does)

    def close(self) -> None:
        """The tier is closed by its maker, after this."""
        with self._mutex:
            if self._closed:
                return
            self._closed, peers = True, dict(self._peers)
        for one in (self._listener, *peers):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes who waits on it
        for thread in (self._thread, *peers.values()):
            if thread.ident is not None:
                thread.join()
        self._listener.close()
        with suppress(OSError):
            there = os.lstat(self._path)  # of another owner and file, or another file, by now?
            if stat.S_ISSOCK(there.st_mode) and there.st_ino == self._inode:
                os.unlink(self._path)

    def __del__(self, end: int = socket.SHUT_RDWR) -> None:
        try:  # wakes who waits on it
            self._listener.shutdown(end)
            self._listener.close()
        except (OSError, AttributeError):
            pass

    def reset_after_fork(self) -> None:
        """The sockets, and the threads that wait at them, are the parent's."""
        self._mutex, self._closed = threading.Lock(), True
        for one in (self._listener, *self._peers):
            one.close()
        self._peers = {}


def difference(terms: Message, wanted: Message) -> str:
    """What a peer's terms are otherwise than the owner's; empty: nothing."""
    return ", ".join(
        f"{name} is {wanted.get(name)!r} there and {terms.get(name)!r} here"
        for name in sorted({*terms, *wanted})
        if terms.get(name) != wanted.get(name)
    )


def socket_path(path: str) -> str:
    """Path of the socket of a cold file's owner."""
    folder, name = os.path.split(os.path.abspath(path))
    if len(os.fsencode(name)) > SOCKET_NAME_MAX:
        name = hashlib.blake2s(os.fsencode(name), digest_size=16).hexdigest()
    return os.path.join(folder, f"{name}.sock")


@contextmanager
def _address(path: str) -> Iterator[str]:
    """The path as a socket takes it: a long one by its folder's descriptor."""
    if len(os.fsencode(path)) <= ADDRESS_MAX:
        yield path
        return
    place, name = os.path.split(path)
    folder = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)


def _is_others(path: str) -> bool:
    """Something lies there that is no cold tier's socket, a dead owner's or a live one's."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return True
        with _OwnedSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, _address(path) as to:
            probe.setblocking(False)
            return probe.connect_ex(to) == errno.EPROTOTYPE  # a program listens, by streams
    except OSError:
        return False


def connect(path: str) -> socket.socket:
    """Connect to the owner of a cold file; raises OSError."""
    peer = _OwnedSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _address(socket_path(path)) as address:
            peer.connect(address)
        if not is_own(peer):
            raise ConnectionError(f"{path} is served by another user")
        return peer
    except BaseException:
        peer.close()
        raise


def peer_ids(peer: socket.socket) -> tuple[int, int]:
    """Process and user at the other end; of another container, as they are called here."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


def is_own(peer: socket.socket) -> bool:
    return peer_ids(peer)[1] == os.geteuid()


def send(peer: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(peer, [json.dumps(message).encode()], descriptors)


def receive(peer: socket.socket, descriptors: int = 0) -> tuple[Message, list[int]]:
    """A message, and descriptors that came with it, which the caller closes. Raises OSError,
    ConnectionError at the end and for what is no message."""
    flags = socket.MSG_CMSG_CLOEXEC
    data, found, state, _ = socket.recv_fds(peer, MESSAGE_BYTES, descriptors, flags)
    try:
        if not data:
            raise ConnectionError("the other process has ended, or closed its file")
        cut = state & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        message = _message(data) if not cut and len(found) == descriptors else None
        if message is None:
            raise ConnectionError(f"the other process sends what is no message: {data[:80]!r}")
        return message, found
    except BaseException:
        for one in found:
            os.close(one)
        raise


def _message(data: bytes) -> Message | None:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
