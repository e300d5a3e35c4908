"""The control connection authenticates its peer, and carries messages within a deadline.

Each side says its version and a random number; then the client, and after it the server, proves
that it knows the secret: HMAC-SHA256 over its role, the version and both numbers. The secret itself
is never sent, and a recorded proof fits no other connection. What follows is neither hidden nor
signed, nor are one-sided reads: docs/explanation/transport.md says what network this is for.

A message is two lengths (4 bytes each), a header in JSON, and plain bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from typing import cast

from cxlkv import numbers
from cxlkv.errors import BadArgumentError, BusyError, PeerError, SecretError, VersionError

PROTOCOL = 1
MAGIC = b"CXLKVNET"
NONCE_BYTES = 32
HEADER_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 64 << 20
CODE_BYTES = 4  # of each record of an answer, before its bytes
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 16, 4096
GREET_S = 3.0  # a stranger holds a place no longer
MESSAGE_S = 30.0  # from a message's first byte to its last
_HELLO = struct.Struct(f"<8sII{NONCE_BYTES}s")  # magic, version, state, random number
_LENGTHS = struct.Struct("<II")
_READY, _BUSY, _REFUSED = 0, 1, 2
_PROOF_BYTES = hashlib.sha256().digest_size

Header = dict[str, object]
Body = bytes | bytearray | memoryview


class Deadline:
    """The time by which a call, with all that it waits for, must be done."""

    def __init__(self, seconds: float):
        self.seconds = numbers.seconds("deadline_s", seconds)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds; raises PeerError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PeerError(f"no answer within {self.seconds:g} s: the peer is gone, or too slow")
        return left

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """What a secret's file holds, blanks at its ends aside. Raises SecretError."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise SecretError(f"{path}: the secret cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise SecretError(f"{path}: others may read the secret (mode {mode:o}): chmod 600 {path}")
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise SecretError(
            f"{path}: a secret of {len(secret)} bytes, {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} "
            f"wanted. Make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return secret


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, [::1]:PORT for IPv6. Raises BadArgumentError."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in host and bare == host):
        raise BadArgumentError(f"{text!r} is not HOST:PORT ([::1]:7777 for IPv6)")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise BadArgumentError(f"{text!r}: the port is a number up to 65535")
    return bare, int(port)


class Wire:
    """A connected socket that speaks in messages; every wait has an end."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is gone says nothing: then the kernel ends the connection.
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 5),
            (socket.TCP_USER_TIMEOUT, 15_000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock

    def local_host(self) -> str:
        return str(self._socket.getsockname()[0])

    def send(self, header: Mapping[str, object], deadline: Deadline, body: Body = b"") -> None:
        text = json.dumps(header).encode()
        assert len(text) <= HEADER_BYTES_MAX, "headers are small: what grows is in the body"
        if len(body) > BODY_BYTES_MAX:
            raise BadArgumentError(
                f"a message of {len(body)} bytes: at most {BODY_BYTES_MAX}; ask for less at once"
            )
        self._send(_LENGTHS.pack(len(text), len(body)) + text, deadline)
        if body:
            self._send(body, deadline)

    def receive(self, deadline: Deadline | None = None) -> tuple[Header, bytearray]:
        """The next message; without a deadline it may begin at any time. Raises PeerError."""
        first = self._receive(1, deadline)
        deadline = deadline or Deadline(MESSAGE_S)
        lengths = first + self._receive(_LENGTHS.size - 1, deadline)
        header_bytes, body_bytes = _LENGTHS.unpack(lengths)
        if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
            raise PeerError(
                f"the peer announced {header_bytes} + {body_bytes} bytes, {HEADER_BYTES_MAX} + "
                f"{BODY_BYTES_MAX} are the most: it is no cxlkv, or is broken"
            )
        text = self._receive(header_bytes, deadline)
        try:
            header: object = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise PeerError(f"the peer sent a header that is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise PeerError("the peer sent a header that is no JSON object")
        return header, self._receive(body_bytes, deadline)

    def greet(self, secret: bytes, deadline: Deadline) -> None:
        """The client's part. Raises VersionError, SecretError, BusyError, PeerError."""
        mine = os.urandom(NONCE_BYTES)
        self._send(_HELLO.pack(MAGIC, PROTOCOL, _READY, mine), deadline)
        state, theirs = self._hello(deadline)
        if state == _BUSY:
            raise BusyError("the server has as many connections as it takes: try again later")
        self._send(_proof(secret, b"client", mine, theirs), deadline)
        answer = bytes(self._receive(1 + _PROOF_BYTES, deadline))
        if answer[0] == _BUSY:  # others came first, meanwhile
            raise BusyError("the server has as many connections as it takes: try again later")
        if answer[0] == _REFUSED:
            raise SecretError("the server refused the secret: both sides need the same one")
        if not hmac.compare_digest(answer[1:], _proof(secret, b"server", mine, theirs)):
            raise SecretError("the server does not know the secret: it is not the one you mean")

    def admit(self, secret: bytes, is_full: bool, enter: Callable[[], bool]) -> None:
        """The server's part; raises what is to be logged, the connection then ends. enter: called
        when the peer has proved itself; whether there is a place for it."""
        deadline = Deadline(GREET_S)
        mine = os.urandom(NONCE_BYTES)
        self._send(_HELLO.pack(MAGIC, PROTOCOL, _BUSY if is_full else _READY, mine), deadline)
        _, theirs = self._hello(deadline)
        if is_full:
            raise BusyError("as many connections as are taken")
        if not hmac.compare_digest(
            bytes(self._receive(_PROOF_BYTES, deadline)), _proof(secret, b"client", theirs, mine)
        ):
            self._send(bytes([_REFUSED]) + bytes(_PROOF_BYTES), deadline)
            raise SecretError("the peer does not know the secret")
        if not enter():
            self._send(bytes([_BUSY]) + bytes(_PROOF_BYTES), deadline)
            raise BusyError("as many connections as are taken")
        self._send(bytes([_READY]) + _proof(secret, b"server", theirs, mine), deadline)

    def _hello(self, deadline: Deadline) -> tuple[int, bytes]:
        hello = self._receive(_HELLO.size, deadline)
        magic, version, state, nonce = cast("tuple[bytes, int, int, bytes]", _HELLO.unpack(hello))
        if magic != MAGIC:
            raise PeerError("the peer is no cxlkv: another service has this port")
        if version != PROTOCOL:
            raise VersionError(
                f"the peer speaks protocol {version}, this build {PROTOCOL}: install the same "
                "release of cxlkv on both machines"
            )
        return state, nonce

    def _send(self, data: Body, deadline: Deadline) -> None:
        try:
            self._socket.settimeout(deadline.left())
            self._socket.sendall(data)
        except OSError as error:
            raise _broken(error, deadline) from error

    def _receive(self, size: int, deadline: Deadline | None) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while len(rest):
            try:
                self._socket.settimeout(None if deadline is None else deadline.left())
                count = self._socket.recv_into(rest)
            except OSError as error:
                raise _broken(error, deadline) from error
            if count == 0:
                raise PeerError("the peer closed the connection, or died")
            rest = rest[count:]
        return data

    def end(self) -> None:
        """Shut the connection down: threads that wait for it return."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, too: a forked child may have a copy of the socket, and the peer is to know."""
        self.end()
        self._socket.close()

    def leave(self) -> None:
        """Leave the connection to the parent, in a forked child."""
        self._socket.close()


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    text = b"%s %s %d" % (MAGIC, role, PROTOCOL)
    return hmac.digest(secret, text + client + server, "sha256")


def _broken(error: OSError, deadline: Deadline | None) -> PeerError:
    if isinstance(error, PeerError):
        return error
    if isinstance(error, TimeoutError) and deadline is not None:
        seconds = deadline.seconds
        return PeerError(f"no answer within {seconds:g} s: the peer is gone, or too slow")
    return PeerError(f"the connection broke: {error.strerror or error}")
