"""A pool of another process: each path of cxlkv.transport on this machine, beside bare reads."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cxlkv.arrays import Bytes
from cxlkv.bench.measure import interleave_reported, seconds_of
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.transport import Remote, Server, pull, push
from cxlkv.transport.client import RemoteHit

LINKS = ("file", "socket")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Size:
    """A text of `pages` pages, of `layers` layers as an 8B model has them: 64 MiB of K and V.

    short_rounds: of what takes less than a millisecond.
    """

    pages: int = 64
    layers: int = 8
    page_tokens: int = 32
    rounds: int = 7
    short_rounds: int = 200
    folder: str = "/dev/shm"

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            layers=self.layers,
            kv_heads=8,
            head_dim=128,
            page_tokens=self.page_tokens,
            dtype="float16",
        )

    @property
    def capacity(self) -> int:
        """Bytes of the far pool: each round's pushes, and some more."""
        text = self.pages * self.page_tokens * self.layout.token_bytes
        return int(text * (self.rounds + 4) * 1.3) + (16 << 20)

    def keys(self, text: str) -> PageKeys:
        return prefix_keys(
            np.arange(self.pages * self.page_tokens), self.page_tokens, text.encode()
        )


def publish(pool: CXLPool, size: Size, text: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((size.pages * size.page_tokens, 8, 128)).astype(np.float16)
    sequence = pool.sequence()
    for layer in range(size.layers):
        sequence.append(layer, rows, rows)
    pool.publish(sequence, size.keys(text), size.page_tokens)
    sequence.release()


# ---- the other process ----


def serve(folder: str, size: Size) -> None:
    """Two pools with one text, one in a file and one that has none, and plain bytes, until stdin
    ends; says where, as JSON."""
    secret = bytes.fromhex(sys.stdin.readline())
    with contextlib.ExitStack() as stack:
        addresses: dict[str, str] = {}
        for link, where in zip(LINKS, (f"{folder}/pool", "anonymous:"), strict=True):
            pool = CXLPool.create(where, layout=size.layout, capacity=size.capacity)
            stack.enter_context(pool)
            pool.admin.prefault()
            publish(pool, size, "a")
            server = stack.enter_context(Server(pool, (LOOPBACK, 0), secret))
            addresses[link] = f"{LOOPBACK}:{server.address[1]}"
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        threading.Thread(target=send_plain, args=(listener,), daemon=True).start()
        addresses["tcp"] = f"{LOOPBACK}:{listener.getsockname()[1]}"
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()


def send_plain(listener: socket.socket) -> None:
    """To the first who connects: as many bytes as it asks for, in eight bytes each time."""
    peer, _ = listener.accept()
    memory = memoryview(b"")
    with peer:
        while asked := peer.recv(8, socket.MSG_WAITALL):
            count = int.from_bytes(asked, "little")
            if count > len(memory):
                memory = memoryview(b"\1" * count)
            peer.sendall(memory[:count])


@contextlib.contextmanager
def served(size: Size, secret: bytes) -> Iterator[tuple[Path, dict[str, str]]]:
    words = (size.pages, size.layers, size.page_tokens, size.rounds)
    with tempfile.TemporaryDirectory(dir=size.folder) as folder:
        command = [sys.executable, "-m", __name__, folder, *map(str, words)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(secret.hex() + "\n")
                process.stdin.flush()
                yield Path(folder), json.loads(process.stdout.readline())
            finally:
                process.stdin.close()
                process.wait()


# ---- this one ----

Timed = Callable[[], float]
"""Does something once; returns the seconds that it took."""


def run(result: Result, size: Size = Size()) -> None:
    """Metrics LINK_{ask,match,select} in us, LINK_{read,pull,push} and bare_{pread,tcp,memcpy} in
    GB/s; ratios LINK_{read,pull}_to_bare, over pread for the file and tcp for the socket."""
    secret = secrets.token_bytes(32)
    near = CXLPool.create("anonymous:", layout=size.layout, capacity=size.capacity)
    with near, served(size, secret) as (folder, addresses), contextlib.ExitStack() as stack:
        near.admin.prefault()
        remotes = {
            link: stack.enter_context(contextlib.closing(Remote(addresses[link], secret)))
            for link in LINKS
        }
        hits = {link: remote.match(size.keys("a")) for link, remote in remotes.items()}
        for link, remote in remotes.items():
            result.checks[f"{link}_is_the_link"] = remote.link == link
            result.checks[f"{link}_finds_all"] = len(hits[link].pages) == size.pages
        short = {
            f"{link}_{name}": act
            for link, remote in remotes.items()
            for name, act in short_acts(remote, hits[link], size).items()
        }
        result.times(interleave_reported(short, size.short_rounds), "us")
        bare = bare_acts(folder / "pool", addresses["tcp"], remotes["file"], size, stack)
        moves = dict(bare)
        for link, remote in remotes.items():
            moves |= move_acts(result, link, remote, hits[link], near, size)
        moved_bytes = size.pages * record_bytes(remotes["file"])
        speed = result.speeds(interleave_reported(moves, size.rounds), moved_bytes)
        for link, beside in zip(LINKS, ("bare_pread", "bare_tcp"), strict=True):
            for name in ("read", "pull", "push"):
                ratio = speed[f"{link}_{name}"] / speed[beside]
                result.ratios[f"{link}_{name}_to_bare"] = ratio
        for hit in hits.values():
            hit.release()
    result.notes.append(
        f"transport: {moved_bytes >> 20} MiB in {size.pages} records, server and client on one "
        "machine: its memory and its loopback interface, no network"
    )


def record_bytes(remote: Remote) -> int:
    assert remote._far is not None
    return remote._far.shape.record_bytes


def timed(act: Callable[[], object]) -> Timed:
    return partial(seconds_of, act)


def short_acts(remote: Remote, hit: RemoteHit, size: Size) -> dict[str, Timed]:
    name = np.zeros((1, 16), np.uint8)
    q = np.random.default_rng(2).standard_normal((1, 32, 128)).astype(np.float16)
    return {
        "ask": timed(lambda: remote.lacks(name)),
        "match": timed(lambda: remote.match(size.keys("a")).release()),
        "select": timed(lambda: remote.select(hit, 0, q, Budget(pages=8))),
    }


def bare_acts(
    path: Path, address: str, remote: Remote, size: Size, stack: contextlib.ExitStack
) -> dict[str, Timed]:
    """The same bytes in one piece."""
    count = size.pages * record_bytes(remote)
    out: Bytes = np.zeros(count, np.uint8)
    source: Bytes = np.ones(count, np.uint8)
    file = os.open(path, os.O_RDONLY)
    stack.callback(os.close, file)
    host, _, port = address.rpartition(":")
    tcp = stack.enter_context(socket.create_connection((host, int(port))))

    def receive() -> None:
        tcp.sendall(count.to_bytes(8, "little"))
        at = 0
        while at < count:
            at += tcp.recv_into(out[at:].data)

    return {
        "bare_memcpy": timed(lambda: np.copyto(out, source)),
        "bare_pread": timed(lambda: os.preadv(file, [out.data], 0)),
        "bare_tcp": timed(receive),
    }


def move_acts(
    result: Result, link: str, remote: Remote, hit: RemoteHit, near: CXLPool, size: Size
) -> dict[str, Timed]:
    keys, turns = size.keys("a"), itertools.count()

    def pulled() -> float:
        near.forget(keys)
        return seconds_of(lambda: check(f"{link}_pull_brings_all", pull(remote, near, keys).pages))

    def pushed() -> float:
        turn = next(turns)
        text = f"{link} {turn}"
        near.forget(size.keys(f"{link} {turn - 1}"))
        publish(near, size, text)
        return seconds_of(
            lambda: check(f"{link}_push_brings_all", push(remote, near, size.keys(text)).pages)
        )

    def check(name: str, pages: int) -> None:
        result.checks[name] = result.checks.get(name, True) and pages == size.pages

    return {
        f"{link}_read": timed(lambda: remote.read(hit.pages, hit.generations)),
        f"{link}_pull": pulled,
        f"{link}_push": pushed,
    }


if __name__ == "__main__":
    pages, layers, page_tokens, rounds = map(int, sys.argv[2:])
    serve(sys.argv[1], Size(pages, layers, page_tokens, rounds))
