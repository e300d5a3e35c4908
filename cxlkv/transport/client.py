"""The client matches, reads, writes and selects in a pool of another machine.

Every call ends within its deadline. A connection that broke is made again by the next call; match()
tries until its deadline. What a lost connection held is gone: its hits raise StaleError.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import (
    Bytes,
    Codes,
    Names,
    Offsets,
    RecordBytes,
    is_torch,
    positive_float32,
)
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CXLKVError,
    GeometryError,
    PeerError,
    SecretError,
    StaleError,
    VersionError,
)
from cxlkv.layout import DTYPES
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.ndp.engine import PAGES_MAX, RECALL, BudgetLike, Selection, errors_of
from cxlkv.numbers import is_whole, seconds
from cxlkv.pages import PRESENT, names_of
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys, key_hashes
from cxlkv.sequence import one_budget, query_rows
from cxlkv.transport import answers
from cxlkv.transport.base import Link, chunk_records
from cxlkv.transport.far import FarPool, Pieces, Shape, part_of
from cxlkv.transport.loopback import LoopbackLink
from cxlkv.transport.messages import BUDGET, ROWS_MAX
from cxlkv.transport.wire import Body, Deadline, Header, Wire, parse_address

DEADLINE_S = 10.0
CONNECT_S = 3.0  # of a server that is there: it greets at once
RETRY_S = (0.02, 0.5)  # between two attempts to connect: first, at most

T = TypeVar("T")
Skip = Callable[[Names], npt.NDArray[np.bool_]]


class RemoteHit(Closing):
    """Pages of a far pool that its server holds: of a match, until its lease ends, of an adopted
    sequence, until the connection does; or until release().

    pages, generations: uint32 and uint64 [n], part after part (docs/reference/memory-layout.md),
    parts[i] of part i; those behind a window are not there.
    """

    def __init__(self, remote: Remote, found: answers.Held, body: bytearray):
        self._remote, self._life = remote, remote._life
        self._number, self.tokens, self.parts = found.hit, found.tokens, found.parts
        count = sum(self.parts)
        self.pages = np.frombuffer(body, np.uint32, count)
        self.generations = np.frombuffer(body, np.uint64, count, 4 * count)

    def __bool__(self) -> bool:
        return self.tokens > 0

    def release(self) -> None:
        """A second time, or when the connection is lost, there is nothing left to do."""
        if self._number and self._life == self._remote._life:
            with contextlib.suppress(CXLKVError):
                self._remote._ask({"op": "release", "hit": self._number}, answers.nothing)
        self._number = 0

    close = release

    def number(self) -> int:
        """The number by which the server knows it; raises StaleError."""
        if self._life != self._remote._life:
            raise StaleError("the connection that held this hit was lost: match again")
        if not self._number:
            raise StaleError("the hit was released, or found nothing")
        return self._number


class Remote(Closing):
    """A far pool. Connects when it is made, within a few seconds: a wrong address or secret is told
    at once. A call connects again where the connection was lost, within deadline_s. Both raise
    PeerError, SecretError, VersionError, BusyError, RdmaError.

    address: HOST:PORT of `cxlkv serve`. device: the RDMA device to read with; None: the pool's file
    on the same machine, else the control connection. attempts: how often match() connects at most;
    None: until its deadline. connect=False: only calls connect, for a server that starts later.
    Threads take turns. A forked child has a connection of its own, made when it asks first; hits of
    its parent are none there.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        device: str | None = None,
        deadline_s: float = DEADLINE_S,
        attempts: int | None = None,
        connect: bool = True,
    ):
        if attempts is not None and not is_whole(attempts, 1):
            raise BadArgumentError(f"attempts={attempts!r}: a whole number, at least 1")
        Deadline(deadline_s)  # raises for what is none
        self.address, self._place = address, parse_address(address)
        self._secret, self._device, self.deadline_s = secret, device, deadline_s
        self._attempts = attempts
        self._lock = threading.RLock()
        self._wire: Wire | None = None
        self._link: Link | None = None
        self._far: FarPool | None = None
        self._life = 0  # of the connection: how many there were
        self.read_bytes = 0  # of the far pool, by all links so far
        lifetime.watch(self)
        if connect:
            self.connect(min(deadline_s, CONNECT_S))

    # ---- what callers do ----

    def connect(self, deadline_s: float = CONNECT_S) -> None:
        """Connect now, by one attempt; does nothing where there is a connection."""
        self._shape(Deadline(deadline_s))

    def match(
        self, keys: Iterable[bytes], *, lease_s: float = 60.0, strict: bool = True
    ) -> RemoteHit:
        """The longest prefix of `keys` published there, held for lease_s; see CXLPool.match()."""
        hashes = key_hashes(keys, strict)
        ask: Header = {"op": "match", "lease_s": seconds("lease_s", lease_s), "strict": strict}

        def once(deadline: Deadline) -> RemoteHit:
            shape = self._shape(deadline)
            single = isinstance(keys, PageKeys) and keys.page_tokens == shape.page_tokens
            most = PAGES_MAX * shape.page_tokens
            if isinstance(keys, PageKeys):
                most = len(keys) * keys.page_tokens
            read = partial(answers.held, shape, most)
            return RemoteHit(self, *self._call({**ask, "single": single}, deadline, read, hashes))

        return self.retried(once)

    def adopt(self, handle: bytes) -> RemoteHit:
        """The sequence there that a handle names, to select on; see CXLPool.adopt()."""
        with self._lock:
            shape = self._shape(Deadline(self.deadline_s))
            read = partial(answers.held, shape, PAGES_MAX * shape.page_tokens)
            return RemoteHit(self, *self._ask({"op": "adopt"}, read, handle))

    def select(
        self,
        hit: RemoteHit,
        layer: int,
        q: object,
        budget: BudgetLike | None = None,
        *,
        top_k: int | None = None,
        method: str = "auto",
        scale: float | None = None,
        recall: float = RECALL,
    ) -> Selection:
        """Sequence.select(), done there: the same arguments, shapes and errors. At most ROWS_MAX
        query rows; of the methods, the core's and those that the server has loaded. StaleError for
        a hit that is not held any more."""
        chosen = one_budget(budget, top_k)
        rows, single, _ = query_rows(q)
        if rows.shape[0] > ROWS_MAX:
            raise BadArgumentError(f"{rows.shape[0]} query rows: a server takes {ROWS_MAX} at once")
        words: Header = {"rows": rows.shape[0], "heads": rows.shape[1], "dtype": DTYPES[rows.dtype]}
        if not is_whole(layer, 0, 2**32 - 1):
            raise BadArgumentError(f"layer {layer!r}: layers are counted from 0")
        errors_of(recall)  # raises for what is none
        words |= {name: getattr(chosen, name) for name in BUDGET}
        words["by_layer"] = {str(number): of for number, of in chosen.by_layer.items()}
        if scale is not None:
            scale = positive_float32(scale, "scale")
        words |= {"method": method, "scale": scale}
        words |= {"recall": float(recall), "layer": int(layer)}
        with self._lock:
            ask: Header = {"op": "select", "hit": hit.number(), **words}
            shape = self._shape(Deadline(self.deadline_s))
            pages = -(-hit.tokens // shape.page_tokens)
            read = partial(answers.selection, rows.shape[0], chosen.per, shape.kv_heads, pages)
            picked = self._ask(ask, read, _bytes_of(rows.owner))
        return picked if chosen.per == "query" and not single else picked.at(0)

    def read(
        self,
        pages: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
    ) -> tuple[RecordBytes, Codes]:
        """Whole packed records of pages of these generations, [n, record_bytes], and a code for
        each: 0, or STALE, CORRUPT.

        Header, generation and the table of CRCs were verified; every piece is by whoever uses the
        records, as Records.write() does.
        """
        deadline = Deadline(self.deadline_s)
        with self._lock:
            shape = self._shape(deadline)
            records = np.zeros((len(pages), shape.record_bytes), np.uint8)
            codes = np.zeros(len(pages), np.int32)
            step = chunk_records(shape.record_bytes)
            for first in range(0, len(pages), step):
                some = slice(first, first + step)
                rows, codes[some] = self._read(pages[some], generations[some], deadline)
                records[some] = rows
        return records, codes

    def write(self, records: RecordBytes, parents: Names | None = None) -> Codes:
        """Publishes packed records there, once the server has verified each byte; see
        Records.write()."""
        deadline = Deadline(self.deadline_s)
        codes = np.zeros(len(records), np.int32)
        with self._lock:
            shape = self._shape(deadline)
            if records.shape != (len(records), shape.record_bytes):
                raise GeometryError(
                    f"records of shape {records.shape}: of {shape.record_bytes} bytes there"
                )
            step = chunk_records(shape.record_bytes)
            for first in range(0, len(records), step):
                some = slice(first, first + step)
                names = None if parents is None else parents[some]
                codes[some] = self._write(records[some], names, deadline)
        return codes

    def lacks(self, names: Names) -> npt.NDArray[np.bool_]:
        """Which of these names no published page has there."""
        read = partial(answers.flags, len(names))
        return self._ask({"op": "lacks"}, read, np.ascontiguousarray(names).tobytes())

    def named(self, names: Names, deadline: Deadline) -> tuple[RecordBytes, Codes]:
        """Whole packed records of pages of these names that the server's host has published, as
        many as a chunk has at most, and a code for each as read() has it. Nothing is held there."""
        shape = self._shape(deadline)
        read = partial(answers.records, names, shape.record_bytes)
        body = np.ascontiguousarray(names).tobytes()
        with self._lock:
            records, codes = self._call({"op": "records"}, deadline, read, body)
            self.read_bytes += int((codes == 0).sum()) * shape.record_bytes
        return records, codes

    def check_fits(self, pool: CXLPool) -> None:
        """Raises GeometryError if records of one of the two pools are none of the other."""
        record_bytes, layout_crc = pool.records.shape
        if self.shape(layout_crc).record_bytes != record_bytes:
            raise GeometryError(f"the pool of {self.address} has records of other sizes")

    def shape(self, layout_crc: int) -> Shape:
        """What the server says of its pool; raises GeometryError if its layout is another one
        (pages.layout_crc)."""
        found = self.retried(self._shape)
        if found.layout_crc != layout_crc:
            raise GeometryError(
                f"the pool of {self.address} has another layout: layers, heads, dims, dtype, "
                "encodings, page_tokens, model_id, shard and sketch must be the same on both sides"
            )
        return found

    @contextlib.contextmanager
    def records(
        self, hit: RemoteHit, some: Offsets, deadline: Deadline, skip: Skip
    ) -> Iterator[tuple[RecordBytes, Codes]]:
        """Records of some of a hit's pages, as many as a chunk has at most, in the link's buffer
        while the block lasts; and a code for each: PRESENT where `skip` says so of its name."""
        with self._lock:
            hit.number()
            yield self._read(hit.pages[some], hit.generations[some], deadline, skip)

    @property
    def link(self) -> str:
        """How bytes come: "file", "socket" or "verbs"; connects."""
        with self._lock:
            self._shape(Deadline(self.deadline_s))
            assert self._link is not None
            return self._link.name

    def close(self) -> None:
        """Gives back what the server holds for this client; a later call connects again."""
        with self._lock:
            self._drop()

    def reset_after_fork(self) -> None:
        """The parent's connection goes on."""
        self._lock = threading.RLock()
        link, wire = self._link, self._wire
        self._link = self._wire = self._far = None
        self._life += 1
        if link is not None:
            link.leave()
        if wire is not None:
            wire.leave()

    def retried(self, act: Callable[[Deadline], T]) -> T:
        """What `act` returns, by a new connection each time that one breaks, until the deadline or
        `attempts`; then the first break is raised, which says more than that time is up."""
        deadline, pause = Deadline(self.deadline_s), RETRY_S[0]
        first: PeerError | None = None
        made = 0
        while True:
            made += 1
            try:
                with self._lock:
                    return act(deadline)
            except PeerError as error:
                first = first or error
            if deadline.is_over() or made == self._attempts:
                raise first
            time.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    # ---- the connection ----

    def _shape(self, deadline: Deadline) -> Shape:
        """What the server said of its pool; connects."""
        with self._lock:
            if self._far is None:
                self._connect(deadline)
            assert self._far is not None
            return self._far.shape

    def _connect(self, deadline: Deadline) -> None:
        host, port = self._place
        try:
            sock = socket.create_connection((host, port), timeout=deadline.left())
        except PeerError:
            raise
        except OSError as error:
            raise PeerError(
                f"{self.address} cannot be reached: {error.strerror or error}. Does `cxlkv serve` "
                "run there, and listen on this port?"
            ) from error
        self._wire = Wire(sock)
        try:
            self._wire.greet(self._secret, deadline)
            header, _ = self._wire.receive(deadline)
            shape = answers.checked(Shape, header)
            self._far = FarPool(shape)
            self._life += 1
            self._link = self._make_link(shape, deadline)
        except (PeerError, SecretError, VersionError, BusyError) as error:
            self._drop()
            raise type(error)(f"{self.address}: {error}") from error
        except BaseException:
            self._drop()
            raise

    def _make_link(self, shape: Shape, deadline: Deadline) -> Link:
        if self._device is None:
            return LoopbackLink(self._call, shape.record_bytes, deadline)
        from cxlkv.transport.verbs import VerbsLink  # pyverbs, which few machines have

        assert self._wire is not None
        local = self._wire.local_host()
        return VerbsLink(self._device, self._call, shape.record_bytes, local, deadline)

    def _drop(self) -> None:
        link, wire = self._link, self._wire
        self._link = self._wire = self._far = None
        self._life += 1
        if link is not None:
            link.close()
        if wire is not None:
            wire.close()

    def _ask(self, header: Header, read: answers.Reader[T], body: bytes = b"") -> T:
        deadline = Deadline(self.deadline_s)
        with self._lock:
            self._shape(deadline)
            return self._call(header, deadline, read, body)

    def _call(
        self, header: Header, deadline: Deadline, read: answers.Reader[T], body: Body = b""
    ) -> T:
        """One request, and what `read` makes of its answer. One that did not come, or makes no
        sense, ends the connection: a later one would be taken for another's."""
        if self._wire is None:
            raise PeerError("the connection is lost")
        try:
            self._wire.send(header, deadline, body)
            answer, data = self._wire.receive(deadline)
            if "error" not in answer:
                return read(answer, data)
            refused = answers.told(answer)
        except BaseException as error:
            if not isinstance(error, BadArgumentError):
                self._drop()
            raise
        raise refused

    # ---- records ----

    def _read(
        self,
        pages: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
        deadline: Deadline,
        skip: Skip | None = None,
    ) -> tuple[RecordBytes, Codes]:
        """Read the records of as many pages as a chunk has at most; they lie in the link's buffer.
        Records whose names `skip` says are left out: PRESENT."""
        self._shape(deadline)
        far, link = self._far, self._link
        assert far is not None
        assert link is not None
        if len(pages) and pages.max() >= far.shape.geometry["page_count"]:
            raise BadArgumentError(f"page {pages.max()}: the far pool has fewer")
        size = len(pages) * far.shape.record_bytes
        records: Bytes = link.buffer[:size].reshape(len(pages), far.shape.record_bytes)
        try:
            self._read_pieces(link, far.heads(pages), deadline)
            codes = far.seal(records, pages, generations)
            if skip is not None:
                codes[(codes == 0) & skip(names_of(records))] = PRESENT
            parts = np.array([part_of(record) for record in records])
            for part in np.unique(parts[codes == 0]).tolist():
                rows = np.flatnonzero((codes == 0) & (parts == part))
                self._read_pieces(link, far.payload(part, pages[rows], rows), deadline)
                for row in rows.tolist():
                    far.clear_rest(records[row], part)
        except PeerError:
            self._drop()
            raise
        return records, codes

    def _read_pieces(self, link: Link, pieces: Pieces, deadline: Deadline) -> None:
        link.read(pieces, deadline)
        self.read_bytes += int(pieces.size.sum())

    def _write(self, records: RecordBytes, parents: Names | None, deadline: Deadline) -> Codes:
        self._shape(deadline)
        assert self._link is not None
        self._link.buffer[: records.size] = records.ravel()
        try:
            # The buffer's first bytes to the staging area's first.
            self._link.write(Pieces(*np.array([[0], [0], [records.size]], np.int64)), deadline)
        except PeerError:
            self._drop()
            raise
        given = np.zeros((len(records), 16), np.uint8) if parents is None else parents
        ask: Header = {"op": "publish", "records": len(records)}
        read = partial(answers.codes, len(records))
        return self._call(ask, deadline, read, np.ascontiguousarray(given).tobytes())


def _bytes_of(q: object) -> bytes:
    """Bytes of a numpy array or a torch tensor; numpy has no bfloat16 of torch's."""
    if not is_torch(q):
        return np.asarray(q).tobytes()
    from torch import uint8

    return q.detach().contiguous().view(uint8).numpy().tobytes()
