"""One suite over all links: a pool served by another process, read, written, killed, lied to.

verbs runs where CXLKV_TEST_RDMA names an RDMA device (`make test-drivers ARGS=rdma` does, with soft
RDMA in a guest); CXLKV_TEST_RDMA_HOST is an address of this machine on its network.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, ObjectPool, _core
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    CXLKVError,
    GeometryError,
    PeerError,
    PoolFullError,
    RdmaError,
    SecretError,
    StaleError,
    UnsupportedError,
    VersionError,
)
from cxlkv.ndp.engine import Selection
from cxlkv.prefix import PageKeys, key_hashes, prefix_keys
from cxlkv.transport import (
    Moved,
    Remote,
    Server,
    answers,
    pull,
    push,
    read_secret,
    transfer,
    wire,
)
from cxlkv.transport.client import RemoteHit
from cxlkv.transport.far import Pieces
from cxlkv.transport.listener import STRANGERS_MAX
from cxlkv.transport.verbs import Far, VerbsLink
from cxlkv.transport.wire import Deadline, Wire, parse_address

from ..conftest import audit
from ..support.cable import Cable
from ..support.damaging import damage_piece
from ..support.forking import in_child, living_child
from ..support.lengths import matrix, nightly
from ..support.processes import Child
from ..support.sharing import shared
from ..support.stopping import stop
from ..support.waiting import until
from ..test_records import LAYOUTS, PAGE, grown, seen

SECRET = b"a secret of the tests"
RDMA, RDMA_HOST = (os.environ.get(f"CXLKV_TEST_RDMA{part}", "") for part in ("", "_HOST"))
HOST = RDMA_HOST or "127.0.0.1"
NO_RDMA = "no RDMA device here (CXLKV_TEST_RDMA names none): make test-drivers ARGS=rdma"
LINKS = [
    "file",
    "socket",
    pytest.param("verbs", marks=pytest.mark.skipif(not RDMA, reason=NO_RDMA)),
]
TOKENS = 10 * PAGE
WAIT_S = 60.0
SOON_S = 3.0


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


def made(folder: Path, link: str, layout: KVLayout, capacity: str = "4MiB") -> CXLPool:
    """A pool to be served: what "socket" reads has no file."""
    where = "anonymous:" if link == "socket" else folder / "pool"
    return CXLPool.create(where, layout=layout, capacity=capacity, threads=2)


def local(layout: KVLayout, checksum: bool = True, sketch: bool | None = None) -> CXLPool:
    return CXLPool.create(
        "anonymous:", layout=layout, capacity="4MiB", checksum=checksum, sketch=sketch, threads=2
    )


def device_of(link: str) -> str | None:
    return RDMA if link == "verbs" else None


@contextmanager
def serving(pool: CXLPool, link: str, connections: int = 32) -> Iterator[Server]:
    device = device_of(link)
    with Server(pool, (HOST, 0), SECRET, device=device, connections=connections) as server:
        yield server


@contextmanager
def remote_of(
    address: tuple[str, int] | str, link: str, deadline_s: float = WAIT_S, secret: bytes = SECRET
) -> Iterator[Remote]:
    text = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    given = {"device": device_of(link), "deadline_s": deadline_s}
    with Remote(text, secret, connect=False, **given) as remote:  # type: ignore[arg-type]
        yield remote


@contextmanager
def both(
    folder: Path, link: str, layout: KVLayout = LAYOUTS["float32"]
) -> Iterator[tuple[CXLPool, Server, Remote]]:
    """A served pool, in this process, and a client of it; both are clean when all ends."""
    with made(folder, link, layout) as pool:
        with serving(pool, link) as server:
            with remote_of(server.address, link) as remote:
                assert remote.link == link
                yield pool, server, remote
            until(lambda: server.connections() == 0)
        audit(pool)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """A server of a pool in a file, for the tests of permission to connect."""
    with made(folder, "file", LAYOUTS["float32"]) as pool, serving(pool, "file") as server:
        yield server


def publish(
    pool: CXLPool, rng: np.random.Generator, tokens: int = TOKENS, salt: bytes = b""
) -> PageKeys:
    sequence = grown(pool, rng, tokens)
    pool.publish_prefix(sequence, list(range(tokens)), salt)
    sequence.release()
    return prefix_keys(list(range(tokens)), pool.layout.page_tokens, salt)


QUERY = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 2, 12)


def ask(remote: Remote, hit: RemoteHit) -> Selection:
    """A small select there."""
    return remote.select(hit, 0, QUERY, Budget(pages=1))


def what(pool: CXLPool, keys: PageKeys) -> list[object]:
    """All that select, fetch and attend say of a prefix."""
    with pool.match(keys) as hit:
        sequence = hit.sequence()
    try:
        return [hit.tokens, *seen(pool, sequence)]
    finally:
        sequence.release()


# ---- what moves ----


SERVED = [name for name, layout in LAYOUTS.items() if not layout.has_shapes]


@matrix(name=SERVED, verb=["pull", "push"])
def test_a_prefix_that_was_moved_is_the_same(
    folder: Path, link: str, name: str, verb: str, rng: np.random.Generator
) -> None:
    move, layout = {"pull": pull, "push": push}[verb], LAYOUTS[name]
    with both(folder, link, layout) as (pool, _, remote), local(layout) as here:
        keys = publish(pool if move is pull else here, rng)
        moved = move(remote, here, keys)
        assert moved.tokens == TOKENS
        assert moved.pages == moved.bytes // here.records.shape[0] > 0
        assert (moved.damaged, moved.stale, moved.present) == (0, 0, 0)
        assert what(here, keys) == what(pool, keys)
        assert move(remote, here, keys) == Moved(tokens=TOKENS, present=moved.pages)
        audit(here)
        assert pool.stats()["pages_held"] == 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of three records."""
    for module in ("server", "client", "loopback", "verbs", "transfer"):
        monkeypatch.setattr(f"cxlkv.transport.{module}.chunk_records", lambda record_bytes: 3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("checksum", [True, False])
def test_more_than_a_chunk_moves(
    folder: Path, link: str, checksum: bool, rng: np.random.Generator
) -> None:
    """Parents are known across chunks, and order is kept; with and without checksums here."""
    layout = LAYOUTS["gemma"]
    with both(folder, link, layout) as (pool, _, remote), local(layout, checksum) as here:
        keys = publish(pool, rng)
        with local(layout) as third:
            assert pull(remote, third, keys[:4]).tokens == 4 * PAGE
            first = push(remote, third, keys[:4])
            assert first.present > 0 == first.pages
        assert pull(remote, here, keys).tokens == TOKENS
        assert what(here, keys) == what(pool, keys)


def test_keys_of_any_bytes_and_of_content(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    with both(folder, link) as (pool, _, remote), local(pool.layout) as here:
        sequence = grown(pool, rng, 4 * PAGE)
        pool.publish(sequence, [b"one", b"two"], 2 * PAGE)
        pool.publish(sequence, [b"loose"], PAGE, strict=False)  # its page has a name already
        sequence.release()
        assert pull(remote, here, [b"one", b"two", b"three"]).tokens == 4 * PAGE
        with here.match([b"one"]) as hit:
            assert hit.tokens == 2 * PAGE
        assert pull(remote, here, [b"nothing"]) == Moved()


def test_a_select_there_is_the_same(folder: Path, link: str, rng: np.random.Generator) -> None:
    with both(folder, link, LAYOUTS["gemma"]) as (pool, _, remote):
        keys = publish(pool, rng)
        q = rng.standard_normal((2, 4, 12)).astype(np.float32)
        with remote.match(keys) as hit, pool.match(keys) as near:
            sequence = near.sequence()
            for layer, queries, budget in (
                (0, q, Budget(pages=3)),
                (3, q, Budget(share=0.5, per="sequence")),
                (1, q[0], Budget(pages=2)),
                (0, q, None),
                (0, q, Budget(pages=3, dense_layers=1)),
                (2, q, Budget(share=0.1, by_layer={2: 0.5})),
                (2, q[1], Budget(pages=2, per="sequence")),
                (0, q[:0], Budget(pages=2)),
            ):
                picked = remote.select(hit, layer, queries, budget)
                wanted = sequence.select(layer, queries, budget)
                for name in ("pages", "scores", "counts"):
                    np.testing.assert_array_equal(getattr(picked, name), getattr(wanted, name))
                assert str(picked.stages) == str(wanted.stages)
                assert picked.bytes_scored == wanted.bytes_scored
            once = remote.select(hit, 0, q[0], top_k=3, method="exact", scale=0.5)
            wanted = sequence.select(0, q[0], top_k=3, method="exact", scale=0.5)
            np.testing.assert_array_equal(once.scores, wanted.scores)
            adopted = remote.adopt(sequence.handle)
            again = remote.select(adopted, 0, q, Budget(pages=3))
            np.testing.assert_array_equal(
                again.pages, remote.select(hit, 0, q, Budget(pages=3)).pages
            )
            adopted.release()
            sequence.release()


@pytest.mark.parametrize(
    "name", ["private", "not-there", "fifo", "folder", "loki.npy", "../../etc/passwd"]
)
def test_a_request_names_no_file_of_the_server(
    folder: Path, name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is opened or said, whatever lies there; a FIFO would hold the thread."""
    (folder / "private").write_text("secret")
    np.save(folder / "loki.npy", np.zeros((1, 2, 12), np.float32))
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    opened: list[object] = []
    monkeypatch.setattr("cxlkv.ndp.scorers._read", opened.append)
    with both(folder, "socket") as (pool, _, remote), remote.match(publish(pool, rng)) as hit:
        said = set()
        for method in (f"mean={folder / name}", f"loki={folder / name}", str(folder / name)):
            with pytest.raises(
                BadArgumentError, match=r"this server takes exact, .*--methods"
            ) as e:
                remote.select(hit, 0, QUERY, Budget(pages=1), method=method)
            said.add(str(e.value).partition(": this server")[2])
        assert len(said) == 1
        assert not opened
        assert ask(remote, hit).counts.any()


def test_a_server_has_the_methods_that_it_was_begun_with(
    folder: Path, rng: np.random.Generator
) -> None:
    """By their names, learned ones too; files are read at its start and never again."""
    file = folder / "loki.npy"
    with local(LAYOUTS["float32"]) as other:
        np.save(file, other.calibrate("loki", grown(other, rng, TOKENS)))
    with made(folder, "socket", LAYOUTS["float32"]) as pool:
        keys = publish(pool, rng)
        for wrong in ("exact", "retro", "loki", "best", f"loki={folder}", "loki=nowhere"):
            with pytest.raises((BadArgumentError, UnsupportedError)):
                Server(pool, (HOST, 0), SECRET, methods=[wrong])
        given = ["mean", f"loki={file}"]
        with (
            Server(pool, (HOST, 0), SECRET, methods=given) as server,
            remote_of(server.address, "socket") as remote,
            remote.match(keys) as hit,
            pool.match(keys) as near,
        ):
            sequence = near.sequence()
            file.unlink()
            for name in ("mean", "loki"):
                found = remote.select(hit, 0, QUERY, top_k=3, method=name)
                wanted = sequence.select(0, QUERY, top_k=3, method=name)
                np.testing.assert_array_equal(found.pages, wanted.pages)
            for unknown in ("best", "retro", "norm"):
                with pytest.raises(BadArgumentError, match=r"takes exact, .*, mean, loki"):
                    remote.select(hit, 0, QUERY, top_k=3, method=unknown)
            sequence.release()


def test_pieces_go_where_they_should(link: str, folder: Path) -> None:
    """Many pieces of many sizes, of which some are neighbours, against the memory itself."""
    with both(folder, link) as (pool, _, remote):
        address, size = pool.pages.memory()
        import ctypes

        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        rng = np.random.default_rng(5)
        sizes = rng.integers(1, 3000, 400)
        far = rng.integers(0, size - 3000, 400)
        far[1::3] = far[0::3][: len(far[1::3])] + sizes[0::3][: len(far[1::3])]
        near = np.cumsum(sizes) - sizes
        pieces = Pieces(far, near, sizes)
        assert remote._link is not None
        remote._link.read(pieces, Deadline(WAIT_S))
        for at, start, count in zip(near, far, sizes, strict=True):
            got = remote._link.buffer[at : at + count]
            np.testing.assert_array_equal(got, memory[start : start + count])


# ---- what is wrong with the bytes ----


def test_a_damaged_page_is_not_published(folder: Path, link: str, rng: np.random.Generator) -> None:
    if link == "socket":
        pytest.skip("memory without a file is not changed from outside")
    with made(folder, link, LAYOUTS["float32"]) as pool, local(pool.layout) as here:
        keys = publish(pool, rng)
        with serving(pool, link) as server, remote_of(server.address, link) as remote:
            with remote.match(keys) as hit:
                damage_piece(pool, int(hit.pages[6]), 1, "keys")
            moved = pull(remote, here, keys)
            assert (moved.tokens, moved.damaged, moved.pages) == (6 * PAGE, 1, 9)
            audit(here)


def test_a_stale_generation_is_told(folder: Path, link: str, rng: np.random.Generator) -> None:
    with both(folder, link) as (pool, _, remote):
        keys = publish(pool, rng)
        with remote.match(keys) as hit:
            pages, generations = hit.pages, hit.generations.copy()
        generations[3] += 1
        records, codes = remote.read(pages, generations)
        assert codes.tolist() == [0, 0, 0, _core.E_STALE, *[0] * 6]
        assert not records[3, :64].any()
        with local(pool.layout) as here:
            found = here.records.write(records)
            assert found.tolist() == [0, 0, 0, _core.E_CORRUPT, *[0] * 6]
        pool.forget(keys)
        publish(pool, rng, salt=b"other")
        _, codes = remote.read(pages, hit.generations)
        assert set(codes.tolist()) == {_core.E_STALE}
        with pytest.raises(BadArgumentError, match="fewer"):
            remote.read(np.array([1 << 20], np.uint32), np.array([1], np.uint64))


def test_damaged_records_are_not_taken(folder: Path, link: str, rng: np.random.Generator) -> None:
    with both(folder, link) as (pool, _, remote), local(pool.layout) as here:
        keys = publish(here, rng)
        names = here.records.names(key_hashes(keys), 1).reshape(-1, 16)
        pages, generations = here.records.find(names)
        records = np.zeros((len(pages), here.records.shape[0]), np.uint8)
        assert not here.records.read(pages, generations, records).any()
        records[2, -900] ^= 1
        codes = remote.write(records)
        assert codes[2] == _core.E_CORRUPT
        assert (codes != 0).sum() == 1
        with pool.match(keys) as hit:
            assert hit.tokens == 2 * PAGE
        with pytest.raises(GeometryError):
            remote.write(records[:, :-64])


def test_a_full_pool_says_so(folder: Path, link: str, rng: np.random.Generator) -> None:
    layout = LAYOUTS["float32"]
    with both(folder, link) as (pool, _, remote), local(layout) as small:
        keys = publish(pool, rng)
        taken = small.pages.alloc(small.stats()["pages_free"] - 4)
        with pytest.raises(PoolFullError):
            pull(remote, small, keys)
        small.pages.free(taken)
        keys = publish(small, rng, salt=b"more")
        taken = pool.pages.alloc(pool.stats()["pages_free"] - 4)
        with pytest.raises(PoolFullError, match="at the server"):
            push(remote, small, keys)
        pool.pages.free(taken)
        assert push(remote, small, keys).tokens == TOKENS


def test_other_layouts_are_refused(folder: Path, link: str) -> None:
    with (
        both(folder, link) as (_, _, remote),
        local(LAYOUTS["float16"]) as other,
        local(LAYOUTS["float32"], sketch=False) as unsketched,
        local(LAYOUTS["float32"].encoded("int8"), sketch=True) as encoded,
    ):
        for pool in (other, unsketched, encoded):
            with pytest.raises(GeometryError, match="another layout"):
                pull(remote, pool, [])
            with pytest.raises(GeometryError, match="another layout"):
                push(remote, pool, [])


def test_what_cannot_be_verified_is_not_served() -> None:
    with (
        local(LAYOUTS["float32"], checksum=False) as bare,
        local(LAYOUTS["unlike groups"]) as unlike,
        ObjectPool.create("anonymous:", layout=KVLayout.objects(4096), capacity="8MiB") as objects,
    ):
        refused = (
            (bare, "checksum"),
            (unlike, "unlike shapes"),
            (cast(CXLPool, objects), "objects"),
        )
        for pool, why in refused:
            with pytest.raises(UnsupportedError, match=why):
                Server(pool, ("127.0.0.1", 0), SECRET)


# ---- who is at the other end ----


def test_a_wrong_secret_is_refused(server: Server) -> None:
    with (
        remote_of(server.address, "file", secret=b"another secret of tests") as remote,
        pytest.raises(SecretError, match="refused"),
    ):
        remote.match([])
    until(lambda: server.connections() == 0)


HELLO = wire._HELLO.pack(wire.MAGIC, wire.PROTOCOL, 0, bytes(32))
NEWER = wire._HELLO.pack(wire.MAGIC, wire.PROTOCOL + 1, 0, bytes(32))


def proof(sock: socket.socket) -> bytes:
    """Proof of a client that knows the secret, after both said hello."""
    sock.sendall(HELLO)
    _, _, state, theirs = wire._HELLO.unpack(sock.recv(wire._HELLO.size))
    assert state == wire._READY
    return wire._proof(SECRET, b"client", bytes(32), theirs)


def test_the_secret_is_not_on_the_wire(server: Server) -> None:
    """A proof is of one connection: what was recorded opens no other."""
    with closing(socket.create_connection(server.address)) as sock:
        recorded = proof(sock)
        sock.sendall(recorded)
        assert sock.recv(1) == b"\0"
    assert SECRET not in recorded
    with closing(socket.create_connection(server.address)) as sock:
        sock.sendall(HELLO + recorded)
        sock.recv(wire._HELLO.size)
        assert sock.recv(1) == b"\2"


def test_a_newer_client_is_named(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with closing(socket.create_connection(server.address)) as sock:
        sock.sendall(NEWER)
        until(lambda: "protocol 2" in caplog.text)


@contextmanager
def stranger(act: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """A service that does `act` with whoever connects, and then waits until they leave."""

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with closing(sock):
                act(sock)
                with suppress(ConnectionError):
                    while sock.recv(1 << 16):
                        pass

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_S)


def prove_nothing(sock: socket.socket) -> None:
    """It says that all is well, and does not know the secret."""
    sock.recv(wire._HELLO.size)
    sock.sendall(HELLO)
    sock.recv(32)
    sock.sendall(bytes(33))


@pytest.mark.parametrize(
    ("act", "deadline_s", "error", "match"),
    [
        (prove_nothing, WAIT_S, SecretError, "does not know"),
        (lambda sock: sock.sendall(NEWER), WAIT_S, VersionError, "protocol 2, this build 1"),
        (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad\r\n" * 4), 1.0, PeerError, "no cxlkv"),
        (lambda sock: None, 0.5, PeerError, "no answer within"),
    ],
    ids=["without the secret", "newer", "another service", "silent"],
)
def test_what_is_no_server_is_left_in_time(
    act: Callable[[socket.socket], object], deadline_s: float, error: type[CXLKVError], match: str
) -> None:
    began = time.monotonic()
    with stranger(act) as address:
        with (
            remote_of(address, "file", deadline_s) as remote,
            pytest.raises(error, match=match),
        ):
            remote.match([])
        text = f"{address[0]}:{address[1]}"
        with pytest.raises(error, match=f"^{text}: .*{match}"):
            Remote(text, SECRET, deadline_s=deadline_s)
    assert time.monotonic() - began < WAIT_S


def test_nobody_there_says_what_to_do() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = listener.getsockname()
    with (
        remote_of(address, "file", 0.3) as remote,
        pytest.raises(PeerError, match="cxlkv serve"),
    ):
        remote.match([])
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"^127.0.0.1:{address[1]} cannot be reached: .*this port"):
        Remote(f"127.0.0.1:{address[1]}", SECRET, deadline_s=10 * WAIT_S)
    assert time.monotonic() - began < WAIT_S


BAD_REQUESTS: list[tuple[dict[str, object], bytes]] = [
    ({}, b""),
    ({"op": "format the disk"}, b""),
    ({"op": "match", "lease_s": 1e9, "strict": True, "single": True}, b""),
    ({"op": "match", "lease_s": 60.0, "strict": True, "single": True}, b"odd"),
    ({"op": "match", "lease_s": 60.0, "strict": 1, "single": True}, b""),
    ({"op": "match", "lease_s": 60.0, "strict": True, "single": True, "more": 1}, b""),
    ({"op": "adopt"}, b"no handle"),
    ({"op": "release", "hit": 77}, b""),
    ({"op": "read"}, struct.pack("<qq", -1, 5)),
    ({"op": "read"}, struct.pack("<qq", 0, 1 << 62)),
    ({"op": "read"}, struct.pack("<qq", (1 << 62), 1 << 62)),
    ({"op": "read"}, struct.pack("<qq", 0, 4 << 20) * 17),
    ({"op": "read"}, b"123"),
    ({"op": "write", "at": 1 << 40}, b"x"),
    ({"op": "write", "at": -1}, b"x"),
    ({"op": "lacks"}, b"x" * 17),
    ({"op": "publish", "records": 1 << 30}, b""),
    ({"op": "publish", "records": 1}, b""),
    ({"op": "publish", "records": 0}, b""),
    ({"op": "loopback"}, b""),  # a second time
    ({"op": "verbs", "qp": 1, "psn": 1, "gid": "::1", "lid": 0, "mtu": 3, "reads": 1}, b""),
]


def test_bad_requests_are_answered_and_change_nothing(
    folder: Path, rng: np.random.Generator
) -> None:
    with both(folder, "file") as (pool, _, remote):
        keys = publish(pool, rng)
        over = struct.pack("<qq", pool.pages.memory()[1] - 1, 2)
        wrong: list[tuple[dict[str, object], bytes]] = [*BAD_REQUESTS, ({"op": "read"}, over)]
        for header, body in wrong:
            with pytest.raises((CXLKVError,), match="at the server"):
                remote._ask(header, answers.nothing, body)
        with remote.match(keys) as hit:
            assert ask(remote, hit).pages.shape == (1, 2, 3)
            assert hit.tokens == TOKENS


def test_a_select_there_refuses_what_one_here_does(folder: Path, rng: np.random.Generator) -> None:
    """In the same words."""
    q = QUERY
    with both(folder, "file") as (pool, _, remote):
        keys = publish(pool, rng)
        with remote.match(keys) as hit, pool.match(keys) as near, ExitStack() as stack:
            sequence = near.sequence()
            stack.callback(sequence.release)
            for arguments, words in (
                ((99, q, Budget(pages=1)), {}),
                ((-1, q, Budget(pages=1)), {}),
                ((0, q, Budget(pages=1)), {"top_k": 1}),
                ((0, q[0, 0], Budget(pages=1)), {}),
                ((0, q[None], Budget(pages=1)), {}),
                ((0, q[:, :, :5], Budget(pages=1)), {}),
                ((0, q[:, :, :0], Budget(pages=1)), {}),
                ((0, q[:, :0], Budget(pages=1)), {}),
                ((0, np.zeros((1, 3, 12), np.float32), Budget(pages=1)), {}),
                ((0, q, Budget(pages=1)), {"method": "two_stage", "recall": 0.1}),
                ((0, q, Budget(pages=1)), {"scale": -1.0}),
            ):
                with pytest.raises(CXLKVError) as here:
                    sequence.select(*arguments, **words)
                with pytest.raises(type(here.value)) as there:
                    remote.select(hit, *arguments, **words)
                assert str(there.value).removesuffix(" (at the server)") == str(here.value)
            with pytest.raises(BadArgumentError, match="4097 query rows: a server takes 4096"):
                remote.select(hit, 0, np.zeros((4097, 2, 12), np.float32), top_k=1)


def test_nonsense_on_the_wire_ends_one_connection_only(
    folder: Path, rng: np.random.Generator, seed: int
) -> None:
    """Truncated messages, lengths without end, random bytes: at any point of the talk."""
    with both(folder, "file") as (pool, server, remote):
        keys = publish(pool, rng)
        text = json.dumps(BAD_REQUESTS[2][0]).encode()
        whole = struct.pack("<II", len(text), 0) + text
        nonsense = [
            b"",
            whole[:3],
            whole[:20],
            struct.pack("<II", 1 << 30, 0),
            struct.pack("<II", 2, 1 << 31),
            struct.pack("<II", 4, 0) + b"[[[[",
            struct.pack("<II", 2, 0) + b"[]",
            struct.pack("<II", 60000, 0) + b"[" * 60000,
            *(rng.bytes(int(rng.integers(1, 300))) for _ in range(20)),
        ]
        for data in nonsense:
            for greets in (True, False):
                with closing(socket.create_connection(server.address)) as sock:
                    if greets:
                        Wire(sock).greet(SECRET, Deadline(WAIT_S))
                    sock.sendall(data)
        until(lambda: server.connections() == 1)
        with remote.match(keys) as hit:
            assert hit.tokens == TOKENS


def test_more_connections_than_places_are_refused(folder: Path) -> None:
    with (
        made(folder, "file", LAYOUTS["float32"]) as pool,
        serving(pool, "file", connections=1) as server,
        remote_of(server.address, "file") as first,
        remote_of(server.address, "file") as second,
    ):
        first.match([])
        with pytest.raises(BusyError, match="connections"):
            second.match([])
        first.close()
        until(lambda: server.connections() == 0)
        assert second.match([]).tokens == 0


def test_silent_strangers_lock_nobody_out(folder: Path, rng: np.random.Generator) -> None:
    """The oldest of them go; clients inside stay, and one with the secret comes in at once."""
    with (
        made(folder, "file", LAYOUTS["float32"]) as pool,
        serving(pool, "file", connections=2) as server,
        remote_of(server.address, "file") as first,
        remote_of(server.address, "file") as second,
        ExitStack() as strangers,
    ):
        keys = publish(pool, rng)
        hit = first.match(keys)
        silent = [
            strangers.enter_context(closing(socket.create_connection(server.address)))
            for _ in range(2 * STRANGERS_MAX)
        ]
        silent[0].settimeout(WAIT_S)
        with suppress(ConnectionError):  # it is told who it talks to, and then no more
            while silent[0].recv(4096):
                pass
        assert second.match(keys).tokens == TOKENS
        until(lambda: server.connections() <= STRANGERS_MAX + 2)
        assert ask(first, hit).counts.any()


def test_a_stranger_has_a_short_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREET_S", 0.05)
    with closing(socket.create_connection(server.address)) as stranger:
        stranger.settimeout(WAIT_S)
        assert len(stranger.recv(4096)) == wire._HELLO.size
        assert stranger.recv(1) == b""


def test_the_last_place_goes_to_who_proves_itself_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger takes no place from others; so both are told to go on, and one is refused."""
    with (
        made(folder, "file", LAYOUTS["float32"]) as pool,
        serving(pool, "file", connections=1) as server,
        closing(socket.create_connection(server.address)) as one,
        closing(socket.create_connection(server.address)) as other,
    ):
        proofs = proof(one), proof(other)
        other.sendall(proofs[1])
        assert other.recv(1)[0] == wire._READY
        one.sendall(proofs[0])
        assert one.recv(1)[0] == wire._BUSY
        monkeypatch.setattr(server, "_is_full", lambda: False)
        monkeypatch.setattr(server, "_enter", lambda session: False)
        with remote_of(server.address, "file") as remote, pytest.raises(BusyError):
            remote.match([])


def test_a_server_that_gets_no_thread_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, wanted = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "cxlkv-peer":
            wanted.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        remote_of(server.address, "file", 0.1) as remote,
        pytest.raises(PeerError, match=r"closed|broke|answer"),
    ):
        remote.match([])
    assert wanted.is_set()
    until(lambda: server.connections() == 0)
    monkeypatch.undo()
    with remote_of(server.address, "file") as remote:
        remote.match([])


def test_a_server_without_descriptors_waits_for_some(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that accepts takes no CPU time worth the name, and says it once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.socket() for _ in range(8)]
    clock = time.pthread_getcpuclockid(cast(int, server._thread.ident))
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        for one in strangers:
            one.connect(server.address)
        until(lambda: "could not be accepted" in caplog.text)
        began, cpu = time.monotonic(), time.clock_gettime(clock)
        threading.Event().wait(1.5)
        share = (time.clock_gettime(clock) - cpu) / (time.monotonic() - began)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert share < 0.01
    assert caplog.text.count("could not be accepted") == 1
    for one in strangers:
        one.close()
    with remote_of(server.address, "file") as remote:
        remote.match([])


def test_addresses_and_secrets_are_checked(folder: Path) -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":80", "::1:80", "host:99999", "host:x"):
        with pytest.raises(BadArgumentError):
            parse_address(text)
    assert read_secret(folder / "secret") == SECRET
    (folder / "secret").chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        read_secret(folder / "secret")
    (folder / "short").write_bytes(b"short")
    (folder / "short").chmod(0o600)
    for name in ("short", "missing"):
        with pytest.raises(SecretError):
            read_secret(folder / name)
    with (
        local(LAYOUTS["float32"]) as pool,
        serving(pool, "socket") as server,
        pytest.raises(BadArgumentError, match="cannot listen"),
    ):
        Server(pool, server.address, SECRET)


def test_no_device_says_what_is_missing(folder: Path) -> None:
    missing = "no RDMA device" if RDMA else "python3-pyverbs"
    with local(LAYOUTS["float32"]) as pool:
        with pytest.raises(RdmaError, match=missing):
            Server(pool, ("127.0.0.1", 0), SECRET, device="no such device")
        with serving(pool, "socket") as server:
            address = f"{HOST}:{server.address[1]}"
            with (
                Remote(address, SECRET, device="no such device", connect=False) as remote,
                pytest.raises(RdmaError, match=missing),
            ):
                remote.match([])
            until(lambda: server.connections() == 0)


# ---- what is held ----


def test_a_hit_ends_with_its_release_its_lease_or_its_connection(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    with both(folder, link) as (pool, _, remote):
        keys = publish(pool, rng)
        hit = remote.match(keys)
        assert pool.stats()["pages_held"] > 0
        hit.release()
        hit.release()
        assert pool.stats()["pages_held"] == 0
        with pytest.raises(StaleError):
            ask(remote, hit)
        short = remote.match(keys, lease_s=0.05)
        until(lambda: pool.stats()["pages_held"] == 0)
        with pytest.raises(StaleError):
            ask(remote, short)
        lost = remote.match(keys)
        remote.close()
        until(lambda: pool.stats()["pages_held"] == 0)
        assert remote.match(keys).tokens == TOKENS
        with pytest.raises(StaleError, match="lost"):
            ask(remote, lost)
        lost.release()


def test_a_closed_pool_lends_nothing(folder: Path, link: str, rng: np.random.Generator) -> None:
    """The region's key, and the file, are of no use to a client that was connected."""
    pool = made(folder, link, LAYOUTS["float32"])
    keys = publish(pool, rng)
    server = Server(pool, (HOST, 0), SECRET, device=device_of(link))
    with remote_of(server.address, link, SOON_S) as remote:
        hit = remote.match(keys)
        pool.close()  # ends the server
        if link == "verbs":  # what was read by is gone, not only the talk
            assert remote._link is not None
            line = Pieces(*(np.array([number]) for number in (0, 0, 64)))
            with pytest.raises(PeerError, match="RDMA failed"):
                remote._link.read(line, Deadline(WAIT_S))
        with pytest.raises(PeerError):
            ask(remote, hit)
        with pytest.raises(PeerError):
            remote.match(keys)
        hit.release()


def test_a_pool_that_is_closed_under_a_reader(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    """A named error in time, and nothing half in the reader's pool."""
    pool = made(folder, link, LAYOUTS["float32"])
    keys = publish(pool, rng)
    server = Server(pool, (HOST, 0), SECRET, device=device_of(link))
    ended: list[CXLKVError] = []
    pulled = threading.Event()
    with remote_of(server.address, link, SOON_S) as remote, local(pool.layout) as here:

        def read() -> None:
            try:
                while True:
                    here.forget(keys)
                    assert pull(remote, here, keys).tokens == TOKENS
                    pulled.set()
            except CXLKVError as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert pulled.wait(WAIT_S)
        pool.close()
        reader.join(WAIT_S)
        assert isinstance(ended[0], (PeerError, StaleError)), ended
        audit(here)


# ---- forked children ----


@pytest.mark.parametrize("first", ["pool", "server", "remote"])
def test_a_child_that_closes_its_copies_leaves_the_parents(
    folder: Path, link: str, rng: np.random.Generator, first: str
) -> None:
    """The server serves on, old clients and new ones, and what they hold stays theirs."""
    with both(folder, link) as (pool, server, remote):
        keys = publish(pool, rng)
        hit = remote.match(keys)

        def close_all() -> None:
            assert server.connections() == 0
            closers = {"pool": pool, "server": server, "remote": remote}
            for one in (closers.pop(first), *closers.values()):
                one.close()
                one.close()

        in_child(close_all)
        assert ask(remote, hit).counts.any()
        with remote_of(server.address, link) as newcomer:
            assert newcomer.match(keys).tokens == TOKENS
        hit.release()


def test_a_child_of_a_client_has_a_connection_of_its_own(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    if link == "verbs":
        pytest.skip("RDMA does not cross a fork: a device is opened in the process that uses it")
    with both(folder, link) as (pool, server, remote):
        keys = publish(pool, rng)
        hit = remote.match(keys)

        def use() -> None:
            with pytest.raises(StaleError, match="lost"):
                hit.number()
            hit.release()
            assert remote.match(keys).tokens == TOKENS
            assert remote.read(hit.pages, hit.generations)[1].tolist() == [0] * len(hit.pages)

        in_child(use)
        until(lambda: server.connections() == 1)
        assert ask(remote, hit).counts.any()
        hit.release()


def test_a_child_hides_no_end_from_the_peer(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    """It has no copy of a socket, whichever side it is of, and holds no page for a peer."""
    with both(folder, link) as (pool, server, remote):
        keys = publish(pool, rng)
        remote.match(keys)
        with living_child():
            remote.close()
            until(lambda: server.connections() == 0)
            until(lambda: pool.stats()["pages_held"] == 0)  # the child may just begin
            remote.match(keys)
            server.close()
            with (
                pytest.raises(PeerError, match="reached"),
                remote_of(server.address, link, 0.1) as r,
            ):
                r.match(keys)


@pytest.mark.skipif(not RDMA, reason=NO_RDMA)
def test_verbs_a_key_opens_one_pool_while_that_is_served(
    folder: Path, rng: np.random.Generator
) -> None:
    """By the queue pair of another pool on the same device, which is sound: RDMA itself refuses."""
    line = Pieces(*(np.array([number]) for number in (0, 0, 64)))
    with both(folder, "verbs") as (pool, _, remote), local(pool.layout) as other:
        keys = publish(pool, rng)
        with serving(other, "verbs") as server, remote_of(server.address, "verbs") as second:
            second.match(keys)
            region = far_of(second).region
            read_by_key(remote, keys, line, region)
        read_by_key(remote, keys, line, region)
        assert remote.match(keys).tokens == TOKENS


def far_of(remote: Remote) -> Far:
    assert isinstance(remote._link, VerbsLink)
    return remote._link._far


def read_by_key(remote: Remote, keys: PageKeys, line: Pieces, region: tuple[int, int, int]) -> None:
    remote.match(keys)
    link, own = remote._link, far_of(remote)
    assert isinstance(link, VerbsLink)
    link.read(line, Deadline(WAIT_S))
    link._far = own.model_copy(update={"region": region})
    with pytest.raises(PeerError, match="IBV_WC_REM_ACCESS_ERR"):
        link.read(line, Deadline(WAIT_S))
    remote.close()


@pytest.mark.skipif(not RDMA, reason=NO_RDMA)
def test_verbs_a_region_that_may_not_be_locked_is_refused(folder: Path) -> None:
    """A user with a small `ulimit -l` sees this; root could lock more, if it were let."""
    made(folder, "verbs", LAYOUTS["float32"]).close()
    limit = ["setpriv", "--bounding-set", "-ipc_lock", "sh", "-c", 'ulimit -l 64; exec "$@"', "sh"]
    words = ["serve", str(folder / "pool"), "--listen", f"{HOST}:0", "--device", RDMA]
    done = subprocess.run(
        [*limit, sys.executable, "-m", "cxlkv.ops.cli", *words, "--secret", str(folder / "secret")],
        capture_output=True,
        text=True,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode > 0
    assert f"{RDMA} does not register" in said
    assert "Locked memory (ulimit -l) is 64 KiB here: raise it (ulimit -l unlimited" in said


# ---- hosts that share the pool ----


@pytest.mark.usefixtures("elsewhere")
def test_a_pool_of_several_hosts_is_served(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    """What another host has published is pulled by way of this one; it finds what is pushed."""
    path, layout = folder / "pool", LAYOUTS["float32"]
    with (
        shared(path, layout) as writes,
        CXLPool.open(path, host=1, threads=1) as serves,
        local(layout) as here,
    ):
        keys = publish(writes, rng)
        with serving(serves, link) as server, remote_of(server.address, link) as remote:
            assert pull(remote, here, keys).tokens == TOKENS
            assert what(here, keys) == what(writes, keys)
            pushed = publish(here, rng, salt=b"pushed")
            assert push(remote, here, pushed).tokens == TOKENS
            assert what(writes, pushed) == what(here, pushed)
            with remote.match(keys) as hit:  # which keeps the pages from being written again
                writes.forget(keys)
                taken = [grown(writes, rng, TOKENS)]
                while writes.stats()["pages_free"] >= TOKENS // PAGE:
                    taken.append(grown(writes, rng, TOKENS))
                _, codes = remote.read(hit.pages, hit.generations)
                assert not codes.any()
            for sequence in taken:
                sequence.release()
        audit(writes)
        audit(here)


# ---- peers that come, and die: real processes ----


def test_a_pull_waits_for_a_server_that_is_on_its_way(
    folder: Path, link: str, rng: np.random.Generator
) -> None:
    started: list[Server] = []
    with made(folder, link, LAYOUTS["float32"]) as pool, local(pool.layout) as here:
        keys = publish(pool, rng)
        with serving(pool, link) as server:
            address = server.address
        device = device_of(link)
        later = threading.Timer(
            0.3, lambda: started.append(Server(pool, address, SECRET, device=device))
        )
        later.start()
        with remote_of(address, link) as remote:
            assert pull(remote, here, keys).tokens == TOKENS
        later.join()
        started[0].close()


@pytest.mark.parametrize(("deadline_s", "attempts"), [(0.01, 1), (WAIT_S, 2)])
def test_a_pull_that_waited_in_vain_does_not_wait_again(deadline_s: float, attempts: int) -> None:
    began: list[Deadline] = []

    def attempt(moved: Moved) -> None:
        began.append(Deadline(0.02))
        until(began[-1].is_over)
        raise PeerError("nobody there")

    with pytest.raises(PeerError, match="nobody"):
        transfer._going_on(attempt, deadline_s)
    assert len(began) == attempts


@pytest.fixture
def elsewhere(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is used as if from another machine, though the pool has a file."""
    if link == "socket":
        monkeypatch.setattr("cxlkv.transport.loopback._boot", lambda: "")


class ServerProcess(Child):
    """`cxlkv serve` of a pool in a file."""

    def __init__(self, folder: Path, link: str, port: int = 0, methods: str = ""):
        listen, secret = f"{HOST}:{port}", str(folder / "secret")
        more = ["--device", RDMA] if link == "verbs" else []
        more += ["--methods", methods] if methods else []
        command = ["serve", folder / "pool", "--listen", listen, "--secret", secret, *more]
        super().__init__("-m", "cxlkv.ops.cli", *command)
        said = self.hear()
        found = re.search(r" on (\S+):(\d+)$", said)
        assert found, said
        self.address = (found[1], int(found[2]))


@pytest.fixture
def served(
    folder: Path, link: str, elsewhere: None, rng: np.random.Generator
) -> Iterator[tuple[CXLPool, PageKeys, ServerProcess]]:
    """A pool with a prefix, served by another process; the pool is open here, too."""
    with made(folder, "file", LAYOUTS["float32"]) as pool:
        keys = publish(pool, rng)
        with ServerProcess(folder, link) as server:
            yield pool, keys, server
        until(lambda: pool.stats()["pages_held"] == 0)
        audit(pool)


@pytest.mark.parametrize(
    ("halt", "deadline_s"),
    [(Child.kill, SOON_S), (lambda server: stop(server.popen), 0.3)],
    ids=["killed", "stopped"],
)
def test_a_halted_server_is_an_error_in_time(
    served: tuple[CXLPool, PageKeys, ServerProcess],
    link: str,
    halt: Callable[[Child], None],
    deadline_s: float,
) -> None:
    pool, keys, server = served
    with remote_of(server.address, link, deadline_s) as remote, local(pool.layout) as here:
        hit = remote.match(keys)
        assert pool.stats()["pages_held"] > 0
        halt(server)
        for act in (
            lambda: ask(remote, hit),
            lambda: pull(remote, here, keys),
            lambda: remote.read(hit.pages, hit.generations),
        ):
            began = time.monotonic()
            with pytest.raises((PeerError, StaleError)):
                act()
            assert time.monotonic() - began < WAIT_S
        audit(here)


def test_a_server_that_comes_back_is_found_again(
    served: tuple[CXLPool, PageKeys, ServerProcess], folder: Path, link: str
) -> None:
    pool, keys, server = served
    with remote_of(server.address, link) as remote, local(pool.layout) as here:
        assert remote.match(keys).tokens == TOKENS
        server.kill()
        with ServerProcess(folder, link, server.address[1]) as again:
            assert pull(remote, here, keys).tokens == TOKENS
            assert remote.link == link
            assert what(here, keys) == what(pool, keys)
            again.end(signal.SIGTERM)


def test_the_command_loads_methods(folder: Path, rng: np.random.Generator) -> None:
    with made(folder, "file", LAYOUTS["float32"]) as pool:
        keys = publish(pool, rng)
        with (
            ServerProcess(folder, "file", methods="mean, ball") as server,
            remote_of(server.address, "file") as remote,
            remote.match(keys) as hit,
        ):
            assert remote.select(hit, 0, QUERY, top_k=3, method="mean").counts.any()
            with pytest.raises(BadArgumentError, match="sketch, mean, ball; "):
                remote.select(hit, 0, QUERY, top_k=3, method="loki")
    words: list[str | Path] = ["serve", folder / "pool", "--listen", f"{HOST}:0"]
    words += ["--secret", folder / "secret"]
    words += ["--methods", f"loki={folder}"]
    run = [sys.executable, "-m", "cxlkv.ops.cli", *words]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode > 0
    assert "numpy.save writes" in " ".join(done.stderr.split())


CLIENT = """
import sys
from cxlkv import CXLPool
from cxlkv.prefix import prefix_keys
from cxlkv.transport import Remote, pull, push, read_secret
from tests.transport.test_transport import LAYOUTS, PAGE, TOKENS, grown, local
import numpy as np
import cxlkv.transport.loopback as loopback
address, secret, device, link = sys.argv[1:]
if link == "socket":
    loopback._boot = lambda: ""
with Remote(address, read_secret(secret), device=device or None, deadline_s=60) as remote:
    layout = LAYOUTS["float32"]
    keys = prefix_keys(range(TOKENS), PAGE)
    remote.match(keys)
    print("begins", flush=True)
    for number in range(10**9):
        with local(layout) as here:
            pull(remote, here, keys)
            salt = str(number).encode()
            sequence = grown(here, np.random.default_rng(number), TOKENS)
            here.publish_prefix(sequence, range(TOKENS), salt)
            push(remote, here, prefix_keys(range(TOKENS), PAGE, salt))
            sequence.release()
        remote.match(keys, lease_s=600)  # held, and never released
"""


@pytest.mark.parametrize("after_s", [0.05, nightly(0.0), nightly(0.3)])
@pytest.mark.usefixtures("elsewhere")
def test_killed_clients_leave_nothing(
    folder: Path, link: str, rng: np.random.Generator, after_s: float
) -> None:
    """At any point of pulls and pushes; a client that lives goes on undisturbed."""
    with made(folder, "file", LAYOUTS["float32"], capacity="64MiB") as pool:
        keys = publish(pool, rng)
        with serving(pool, link) as server, remote_of(server.address, link) as remote:
            address = f"{server.address[0]}:{server.address[1]}"
            arguments = [address, folder / "secret", device_of(link) or "", link]
            with (
                Child("-c", CLIENT, *arguments) as one,
                Child("-c", CLIENT, *arguments) as two,
                local(pool.layout) as here,
            ):
                assert one.hear() == two.hear() == "begins"
                assert pull(remote, here, keys).tokens == TOKENS
                threading.Event().wait(after_s)
                one.kill()
                two.kill()
                assert pull(remote, here, keys).tokens == TOKENS
            remote.close()
            until(lambda: server.connections() == 0)
            assert pool.stats()["pages_held"] == 0
        audit(pool)


@pytest.mark.usefixtures("small_chunks")
def test_a_link_that_flaps_is_mended(folder: Path, link: str, rng: np.random.Generator) -> None:
    """Broken once in each pull, at many points of it: the prefix arrives whole all the same."""
    layout = LAYOUTS["float32"]
    with made(folder, link, layout) as pool, serving(pool, link) as server:
        keys = publish(pool, rng)
        flaps: list[int] = []
        with Cable(f"{server.address[0]}:{server.address[1]}") as cable:
            for after in (10, 100, 1000, 3000, 9000, 12000):

                def flap(cable: Cable, after: int = after) -> None:
                    flaps.append(after)
                    cable.mend()

                with remote_of(("127.0.0.1", cable.port), link) as remote, local(layout) as here:
                    cable.after(after, flap)
                    assert pull(remote, here, keys).tokens == TOKENS
                    assert what(here, keys) == what(pool, keys)
                cable.mend()
        assert len(flaps) >= 2
        until(lambda: server.connections() == 0)
        assert pool.stats()["pages_held"] == 0
