"""A cable between a client and a server of TCP, which is cut, or hangs, after so many bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from typing_extensions import Self


class Cable:
    """Connections to `address` pass through its own one. Bytes from the server are counted."""

    def __init__(self, to: str):
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._sockets: list[socket.socket] = []
        self._left: int | None = None
        self._act: Callable[[Cable], None] = Cable.cut
        self._goes = threading.Event()
        self._goes.set()
        self._is_cut = False
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def after(self, count: int, act: Callable[[Cable], None]) -> None:
        """`act` happens after so many bytes more from the server; 0: now."""
        self._act, self._left = act, count
        if not count:
            self._happen()

    def _happen(self) -> None:
        self._left = None
        self._act(self)

    def cut(self) -> None:
        """Connections end, and no new one can be made."""
        self._is_cut = True
        self._end(self._sockets)

    def hang(self) -> None:
        """Nothing passes any more; connections stay, and new ones are accepted."""
        self._goes.clear()

    def mend(self) -> None:
        """New connections work."""
        self._left, self._is_cut = None, False
        self._end(self._sockets)
        self._goes.set()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:  # nobody serves there
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                args = (source, sink, source is far)
                self._threads.append(threading.Thread(target=self._copy, args=args, daemon=True))
                self._threads[-1].start()

    def _copy(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if counts and self._left is not None:
                    some, self._left = data[: self._left], self._left - len(data)
                    if self._left <= 0:
                        sink.sendall(some)
                        self._happen()
                        data = data[len(some) :]
                self._goes.wait()
                sink.sendall(data)
        self._end([source, sink])

    def _end(self, sockets: list[socket.socket]) -> None:
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end([self._listener])
        self._is_cut = True
        self.mend()
        for thread in self._threads:
            thread.join(60)
        for one in (self._listener, *self._sockets):
            one.close()
