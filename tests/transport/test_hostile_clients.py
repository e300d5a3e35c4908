"""A client that has the secret and means no good.

Goal: whatever it says, the server answers with errors of ours or ends that connection, serves
others right meanwhile, and holds nothing for it afterwards. Method: thousands of messages of all
kinds, with fields, bodies and framing changed at random, and between them another client's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import socket
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cxlkv import CXLPool, errors
from cxlkv.errors import PeerError
from cxlkv.transport import Server
from cxlkv.transport.wire import _LENGTHS, Deadline, Header, Wire

from ..fuzz_readers import changed, requests
from ..support.lengths import nightly
from ..support.waiting import until
from ..test_records import PAGE, grown
from .test_transport import QUERY, SECRET, TOKENS, WAIT_S, ask, both, publish
from .test_transport import folder as folder

OTHERS_EVERY = 100
GROWTH_BYTES_MAX = 24 << 20
VALUES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 255, 4096, 1 << 31, 1 << 63, 1 << 64, 10**40, 0.5),
    *(-0.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "float32", "bf16"),
    *("a" * 5000, "\ud800", "\0", "../../etc/passwd", [], [1] * 300, {}, {"1": 0.5}, {"x": []}),
    *("exact", "two_stage", "mean=/etc/passwd", "sequence", "query", "head", "batch"),
)


class Hostile:
    """One connection after the other; what ends one is part of the game."""

    def __init__(self, server: Server, requests: list[tuple[Header, bytes]], seed: int):
        self._server, self._requests = server, requests
        self._random = random.Random(seed)
        self._socket: socket.socket | None = None
        self._hits = [1]  # some that it had, here or on an earlier connection
        self.answers, self.errors, self.ends = 0, dict[str, int](), 0

    def say(self) -> None:
        header, body = self._message()
        text = json.dumps(header).encode()
        data = _LENGTHS.pack(len(text), len(body)) + text + body
        spoilt = self._random.random() < 0.02
        if spoilt:
            data = changed(self._random, data)
        wire = self._wire()
        try:
            wire._send(data, Deadline(WAIT_S))
            if spoilt:  # it may wait for more, for ever
                self._end()
                return
            answer, _ = wire.receive(Deadline(WAIT_S))
        except PeerError:
            self._end()
            return
        self.answers += 1
        if "hit" in answer:
            self._hits = [*self._hits[-9:], cast(int, answer["hit"])]
        error = answer.get("error")
        if error is not None:
            assert issubclass(getattr(errors, str(error)), errors.CXLKVError), answer
            assert answer["text"]
            self.errors[str(error)] = self.errors.get(str(error), 0) + 1
        if self._random.random() < 0.01:
            self._end()

    def _message(self) -> tuple[Header, bytes]:
        generator = self._random
        header, body = generator.choice(self._requests)
        header = dict(header)
        if "hit" in header:
            header["hit"] = generator.choice(self._hits)
        for _ in range(generator.choice((0, 0, 0, 1, 1, 2, 5))):
            name = generator.choice((*header, "op", "more"))
            if generator.random() < 0.2:
                header.pop(name, None)
            elif name != "op" or generator.random() < 0.1:
                header[name] = generator.choice(VALUES)
        kind = generator.random()
        if kind < 0.3:
            body = changed(generator, body)
        elif kind < 0.4:
            body = generator.randbytes(generator.choice((0, 1, 15, 16, 160, 4096, 1 << 20)))
        return header, body

    def _wire(self) -> Wire:
        if self._socket is None:
            self._socket = socket.create_connection(self._server.address)
            Wire(self._socket).greet(SECRET, Deadline(WAIT_S))
            Wire(self._socket).receive(Deadline(WAIT_S))  # the pool's shape
        return Wire(self._socket)

    def _end(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket, self.ends = None, self.ends + 1

    def close(self) -> None:
        if self._socket is not None:
            self._end()


def held(pool: CXLPool) -> tuple[int, int, float, float]:
    stats = pool.stats()
    files = len(os.listdir("/proc/self/fd"))
    return threading.active_count(), files, stats["pages_held"], stats["sequences"]


def resident_bytes() -> int:
    """Memory in use. What ended threads freed stays in their arenas until it is trimmed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("messages", [8000, nightly(30_000)])
def test_a_hostile_client(
    folder: Path,
    messages: int,
    rng: np.random.Generator,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # what earlier tests left open is not to close meanwhile: descriptors are counted
    with both(folder, "file") as (pool, server, remote):
        keys, sequence = publish(pool, rng), grown(pool, rng, 3 * PAGE)
        with remote.match(keys) as hit:
            wanted = ask(remote, hit)
        before, resident = held(pool), list[int]()
        asked = requests(b"".join(keys), sequence.handle, QUERY)
        hostile = Hostile(server, asked, seed)
        for number in range(messages):
            hostile.say()
            if number % OTHERS_EVERY == 0:
                with remote.match(keys) as hit:
                    assert hit.tokens == TOKENS
                    np.testing.assert_array_equal(ask(remote, hit).scores, wanted.scores)
            if number % (messages // 10) == 0 and number <= messages // 2:
                resident.append(resident_bytes())  # with what is kept for the next message
        hostile.close()
        until(lambda: held(pool) == before)
        assert resident_bytes() - max(resident) < GROWTH_BYTES_MAX
        assert "fault of ours" not in caplog.text
        print(hostile.answers, hostile.ends, hostile.errors)
        assert min(hostile.answers - sum(hostile.errors.values()), hostile.ends) > messages / 50
        sequence.release()
