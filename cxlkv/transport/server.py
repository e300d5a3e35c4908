"""`cxlkv serve` serves a pool to peers. It trusts nothing in a request, and answers bad ones.

A thread for each connection. What a peer holds (matches, adopted sequences, a staging area, a queue
pair) is its connection's, and given back when that ends, however it ends; a match ends with its
lease, too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from cxlkv.arrays import NUMPY_DTYPES, Bytes, Names
from cxlkv.errors import BadArgumentError, BusyError, CXLKVError, StaleError
from cxlkv.layout import DTYPES
from cxlkv.ndp import choosers
from cxlkv.ndp.engine import METHODS, Budget
from cxlkv.numbers import is_whole
from cxlkv.pool import CXLPool
from cxlkv.prefix import HASH_BYTES, PageKeys
from cxlkv.sequence import Hit, Sequence
from cxlkv.transport import messages as m
from cxlkv.transport.base import chunk_records
from cxlkv.transport.far import pages_of_parts, shape_of
from cxlkv.transport.listener import Listener, listen
from cxlkv.transport.loopback import LoopbackDoor
from cxlkv.transport.wire import BODY_BYTES_MAX, CODE_BYTES, MESSAGE_S, Body, Deadline, Wire

if TYPE_CHECKING:
    from cxlkv.transport.verbs import VerbsDoor, VerbsHost

CONNECTIONS_MAX = 32  # of peers that have proved that they know the secret
HITS_MAX = 1024  # of one connection

Answer = tuple[dict[str, object], Body]


class Server(Listener["_Session"]):
    """Serves until close(), which pool.close() calls.

    listen: (host, port); port 0 takes a free one, see `address`. device: also over this RDMA
    device. connections: peers that know the secret; those that have not shown it yet have a few
    seconds, count apart, and lock nobody out. methods: scorers that peers may ask for besides the
    core's methods, "mean" or "loki=loki.npy" with what it has learned, all loaded now: a request
    names none of this machine's files. In a forked child it is closed, while the parent serves on.
    Raises UnsupportedError for pools without checksums or of objects, and for choosers, RdmaError,
    BadArgumentError for an address that cannot be had, or a method.
    """

    def __init__(
        self,
        pool: CXLPool,
        listen: tuple[str, int],
        secret: bytes,
        *,
        device: str | None = None,
        connections: int = CONNECTIONS_MAX,
        methods: Iterable[str] = (),
    ):
        if not is_whole(connections, 1):
            raise BadArgumentError(f"connections={connections!r}: a whole number, at least 1")
        self._pool, self._secret = pool, secret
        self._shape, self._methods = shape_of(pool), _loaded(pool, methods)
        self._verbs: VerbsHost | None = None
        super().__init__(_listening(listen), connections)
        if device is not None:
            from cxlkv.transport.verbs import VerbsHost  # pyverbs, which few machines have

            try:
                self._verbs = VerbsHost(device, *pool.pages.memory())
            except BaseException:
                self._end()
                raise
        self.start()
        pool.before_close(self.close)

    def _session(self, sock: socket.socket) -> _Session:
        size = self._shape.record_bytes
        return _Session(self._pool, Wire(sock), size, self._verbs, self._methods)

    def _serve(self, session: _Session) -> None:
        session.wire.admit(self._secret, self._is_full(), partial(self._enter, session))
        # What a pool has not is not named, so that clients that do not know it go on.
        session.wire.send(self._shape.model_dump(exclude_defaults=True), Deadline(MESSAGE_S))
        session.run()

    def _end(self) -> None:
        super()._end()
        if self._verbs is not None:
            self._verbs.close()

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        if self._verbs is not None:
            self._verbs.leave()


class _Session:
    """One peer: what it asked for last, and what it holds."""

    def __init__(
        self,
        pool: CXLPool,
        wire: Wire,
        record_bytes: int,
        verbs: VerbsHost | None,
        methods: Collection[str],
    ) -> None:
        self.wire, self._methods = wire, methods
        self._pool, self._verbs = pool, verbs
        self._records = chunk_records(record_bytes)
        self._record_bytes = record_bytes
        self._held: dict[int, tuple[Sequence, Hit | None]] = {}
        self._numbers = count(1)
        self._staging: Bytes = np.zeros(0, np.uint8)
        self._door: LoopbackDoor | VerbsDoor | None = None

    def run(self) -> None:
        """Answers until the peer leaves; PeerError."""
        while True:
            header, body = self.wire.receive()
            try:
                answer, data = self._answer(m.REQUEST.validate_python(header), body)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                place = ".".join(str(part) for part in first["loc"])
                answer, data = _refusal(BadArgumentError(f"bad request: {place}: {first['msg']}"))
            except CXLKVError as error:
                answer, data = _refusal(error)
            except (ValueError, OverflowError, KeyError) as error:
                answer, data = _refusal(BadArgumentError(f"bad request: {error}"))
            self.wire.send(answer, Deadline(MESSAGE_S), data)

    def end(self) -> None:
        self.wire.end()

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._give_back()
        self._staging = np.zeros(0, np.uint8)
        self.wire.close()

    def leave(self) -> None:
        self.wire.leave()
        if self._door is not None:
            self._door.leave()
        self._give_back()

    def _give_back(self) -> None:
        for number in list(self._held):
            with contextlib.suppress(CXLKVError):
                self._release(number)

    def _answer(self, asked: m.Request, given: bytearray) -> Answer:
        body = b"" if isinstance(asked, m.Write) else bytes(given)  # whole records are not copied
        match asked:
            case m.UseLoopback() | m.UseVerbs():
                return self._open(asked), b""
            case m.Match():
                return self._match(asked, body)
            case m.Adopt():
                return self._hold(self._pool.adopt(body), None)
            case m.Release():
                self._release(asked.hit)
                return {}, b""
            case m.Select():
                return self._select(asked, body)
            case m.Lacks():
                return {}, (~self._pool.records.here(_names(body))).tobytes()
            case m.Records():
                return {}, self._read(_names(body))
            case m.Publish():
                return self._publish(asked.records, body)
            case m.Read():
                return {}, self._loopback().read(body)
            case m.Write():
                self._loopback().write(asked.at, given)
                return {}, b""

    def _open(self, asked: m.UseLoopback | m.UseVerbs) -> dict[str, object]:
        if self._door is not None:
            raise BadArgumentError("the connection has its link already")
        self._staging = np.zeros(self._records * self._record_bytes, np.uint8)
        if isinstance(asked, m.UseLoopback):
            self._door = LoopbackDoor(self._pool.pages.memory(), self._pool.path, self._staging)
        elif self._verbs is None:
            raise BadArgumentError("the server uses no RDMA device: start it with --device NAME")
        else:
            self._door = self._verbs.door(asked, self._staging, self.wire.local_host())
        return self._door.answer()

    def _loopback(self) -> LoopbackDoor:
        if not isinstance(self._door, LoopbackDoor):  # the peer could change it meanwhile
            raise BadArgumentError("the connection has no link of this kind")
        return self._door

    def _match(self, asked: m.Match, body: bytes) -> Answer:
        if len(body) % HASH_BYTES:
            raise BadArgumentError(f"{len(body)} bytes are no keys of {HASH_BYTES}")
        self._check_room()
        tokens = self._pool.layout.page_tokens if asked.single else 0
        keys = PageKeys(_names(body), tokens, asked.strict)
        hit = self._pool.match(keys, lease_s=asked.lease_s, strict=asked.strict)
        if not hit:
            hit.release()
            return {"hit": 0, "tokens": 0, "parts": []}, b""
        return self._hold(hit._sequence, hit)

    def _check_room(self) -> None:
        if len(self._held) >= HITS_MAX:
            raise BusyError(f"the connection holds {HITS_MAX} hits: release some")

    def _hold(self, sequence: Sequence, hit: Hit | None) -> Answer:
        """The answer names the pages of each part, with their generations."""
        try:
            self._check_room()
            parts = pages_of_parts(self._pool, sequence)
        except CXLKVError:
            sequence.release()
            raise
        number = next(self._numbers)
        self._held[number] = (sequence, hit)
        header = {"hit": number, "tokens": len(sequence), "parts": [len(p) for p, _ in parts]}
        pages = np.concatenate([pages for pages, _ in parts])
        generations = np.concatenate([generations for _, generations in parts])
        return header, pages.tobytes() + generations.tobytes()

    def _release(self, number: int) -> None:
        sequence, _ = self._held.pop(number, (None, None))
        if sequence is None:
            raise StaleError(f"hit {number} was released, or is another connection's")
        sequence.release()

    def _select(self, asked: m.Select, body: bytes) -> Answer:
        if asked.hit not in self._held:
            raise StaleError(f"hit {asked.hit} was released, or is another connection's")
        sequence, _ = self._held[asked.hit]
        dtype = NUMPY_DTYPES[DTYPES.index(asked.dtype)]
        rows = np.frombuffer(body, dtype) if body else np.empty(0, dtype)
        count = asked.rows * asked.heads
        dim = rows.size // count if count else self._pool.layout.head_dim
        queries = rows.reshape(asked.rows, asked.heads, dim)
        budget = Budget(**asked.model_dump(include=set(m.BUDGET)))
        starts = [0, asked.rows]
        if asked.method not in self._methods:
            raise BadArgumentError(
                f"method {asked.method[:60]!r}: this server takes {', '.join(self._methods)}; "
                "`cxlkv serve --methods` loads others at its start"
            )
        picked = (
            sequence._own()
            .select(asked.layer, queries, starts, budget, asked.method, asked.scale, asked.recall)
            .plain("an answer of a server")
        )
        header: dict[str, object] = {
            "shape": picked.pages.shape,
            "bytes_scored": picked.bytes_scored,
            "bytes_fetched": picked.bytes_fetched,
            "per": picked.per,
            "stages": picked.stages and asdict(picked.stages),
        }
        arrays = (picked.pages, picked.scores, picked.counts)
        return header, b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)

    def _read(self, names: Names) -> bytes:
        """Codes, and records of this host's pages."""
        if len(names) > self._records or self._record_bytes + CODE_BYTES > BODY_BYTES_MAX:
            raise BadArgumentError(
                f"{len(names)} records of {self._record_bytes} bytes: {self._records} at once, and "
                f"no more than a message of {BODY_BYTES_MAX} bytes has"
            )
        pages, generations = self._pool.records.find(names)
        records = np.empty((len(names), self._record_bytes), np.uint8)
        codes = self._pool.records.read(pages, generations, records)
        return b"".join((codes.tobytes(), records[codes == 0].tobytes()))

    def _publish(self, records: int, body: bytes) -> Answer:
        if self._door is None:
            raise BadArgumentError("the connection has no link, so nothing has arrived")
        if records > self._records:
            raise BadArgumentError(f"{records} records: the staging area has {self._records}")
        parents = _names(body)
        arrived = self._staging[: records * self._record_bytes].reshape(records, -1)
        if not isinstance(
            self._door, LoopbackDoor
        ):  # its peer could change it while it is verified
            arrived = arrived.copy()
        codes = self._pool.records.write(arrived, parents)
        return {}, codes.tobytes()


def _listening(address: tuple[str, int]) -> socket.socket:
    pair: object = address
    if (
        not isinstance(pair, tuple)
        or list(map(type, pair)) != [str, int]
        or not (0 <= address[1] < 1 << 16)
    ):
        raise BadArgumentError(f"listen={address!r:.60}: (host, port), a port being 0 to 65535")
    try:
        return listen(*address)
    except OSError as error:
        host, port = address
        raise BadArgumentError(
            f"cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error


def _loaded(pool: CXLPool, methods: Iterable[str]) -> tuple[str, ...]:
    """Names that a request may have, of the core's methods and of these."""
    names = list(METHODS)
    for word in methods:
        name = word.partition("=")[0]
        choosers.refuse(name, "a client")
        if name in names:
            raise BadArgumentError(f"method {word!r}: a server has {name!r} already, once")
        names.append(pool._load_method(word))
    return tuple(names)


def _names(body: bytes) -> Names:
    return np.frombuffer(body, np.uint8).reshape(-1, HASH_BYTES)


def _refusal(error: Exception) -> Answer:
    return {"error": type(error).__name__, "text": str(error)[:4096]}, b""
