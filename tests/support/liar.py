"""A server that knows the secret, and answers nonsense: one that is sane, with what it says changed
on its way."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from cxlkv.errors import CXLKVError
from cxlkv.transport.wire import Body, Deadline, Header, Wire

Said = tuple[Header, Body]
Lie = Callable[[str, Header, bytearray], Said]
WAIT_S = 60.0
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**40, 2**53, 2**62, 2**63, 2**70, -(2**70), 0.5, 1e308)
WORDS = ("", "x", "PoolFullError", "PeerError", "Exception", "SystemExit", "/dev/zero", "\0")
OTHERS: tuple[object, ...] = (
    None,
    True,
    float("nan"),
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    ["x"] * 20,
    [2**40] * 3,
)
NASTY = (*NUMBERS, *WORDS, *OTHERS)


def truth(op: str, header: Header, body: bytearray) -> Said:
    return header, body


def changed(rng: np.random.Generator, header: Header, body: bytearray) -> Said:
    """A header or a body that is somewhat, or altogether, another."""
    kind = int(rng.integers(6))
    if kind == 0:
        return {"error": nasty(rng), "text": nasty(rng)}, body
    if kind == 1:
        return {str(nasty(rng)): nasty(rng) for _ in range(rng.integers(3))}, body
    if kind == 2:
        return header, rng.bytes(int(rng.integers(3000)))
    if kind == 3:
        return header, bytes(body[: int(rng.integers(len(body) + 1))]) + b"x" * int(rng.integers(2))
    if kind == 4 and body:
        noise, at = rng.bytes(int(rng.integers(1, 40))), int(rng.integers(len(body)))
        return header, bytes(body[:at] + noise + body[at + len(noise) :])
    made = copy.deepcopy(header)
    change(rng, made)
    return made, body


def lying_once(rng: np.random.Generator, after: int, and_on: bool = False) -> Lie:
    """In the answer behind so many others; and_on: and in all that follow."""
    left = after

    def lie(op: str, header: Header, body: bytearray) -> Said:
        nonlocal left
        left -= 1
        lies = left == -1 or (and_on and left < 0)
        return changed(rng, header, body) if lies else (header, body)

    return lie


def nasty(rng: np.random.Generator) -> object:
    return copy.deepcopy(NASTY[int(rng.integers(len(NASTY)))])


def change(rng: np.random.Generator, value: dict[str, object] | list[object]) -> None:
    """One thing in it, or below it."""
    places: list[object] = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not places or rng.random() < 0.1:
        if isinstance(value, dict):
            value["more"] = nasty(rng)
        else:
            value.append(nasty(rng))
        return
    place = places[int(rng.integers(len(places)))]
    inner = value[place]  # type: ignore[index, call-overload]
    if isinstance(inner, (dict, list)) and rng.random() < 0.7:
        change(rng, inner)
    elif rng.random() < 0.2:
        del value[place]  # type: ignore[arg-type]
    else:
        value[place] = nasty(rng)  # type: ignore[index, call-overload]


class Liar:
    """Stands before the server at `to`. lie(op, header, body): what it answers in place of these;
    op "hello" is what a server says first."""

    def __init__(self, to: tuple[str, int], secret: bytes):
        self.lie: Lie = truth
        self._to, self._secret = to, secret
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(near,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        near, far = Wire(sock), Wire(socket.create_connection(self._to))
        with suppress(CXLKVError, OSError):
            near.admit(self._secret, False, lambda: True)
            far.greet(self._secret, Deadline(WAIT_S))
            op = "hello"
            while True:
                header, body = self.lie(op, *far.receive(Deadline(WAIT_S)))
                near.send(header, Deadline(WAIT_S), body)
                asked, given = near.receive()
                op = str(asked["op"])
                far.send(asked, Deadline(WAIT_S), given)
        near.close()
        far.close()

    def close(self) -> None:
        """Once those who are connected have left."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)


@contextmanager
def liar_before(to: tuple[str, int], secret: bytes) -> Iterator[Liar]:
    made = Liar(to, secret)
    try:
        yield made
    finally:
        made.close()
