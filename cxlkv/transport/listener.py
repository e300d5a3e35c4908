"""A listener accepts connections and serves each in a thread; idle strangers never fill it up.

A peer that has not proved itself is a stranger. Strangers are few, and one more pushes out the
oldest: so a client that says nothing holds no thread and no descriptor that another one needs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import abstractmethod
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from cxlkv.errors import CXLKVError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing

STRANGERS_MAX = 32  # more push out the oldest ones
END_S = 10.0
ACCEPT_PAUSE_S = (0.01, 0.5)  # after a connection that could not be accepted: first, at most
LOG_EVERY_S = 60.0

log = logging.getLogger(__name__)


class Session(Protocol):
    """A connection, with what its peer holds."""

    def end(self) -> None:
        """Wakes the thread that serves it, which then ends."""

    def close(self) -> None:
        """Gives back all that the peer held."""

    def leave(self) -> None:
        """Leave the peer to the parent, in a forked child."""


S = TypeVar("S", bound=Session)


class Listener(Closing, Generic[S]):
    """Serves from start() until close(); in a forked child it is closed, and the parent serves on.

    listening: from listen(); it is the listener's from now on. places: for peers that have proved
    themselves.
    """

    def __init__(self, listening: socket.socket, places: int = 0):
        self._socket, self._places = listening, places
        self.address: tuple[str, int] = listening.getsockname()[:2]
        # By the state of their peer; a session in neither is ending, and its thread with it.
        self._sessions: set[S] = set()
        self._strangers: dict[S, None] = {}  # the oldest first
        self._proved: set[S] = set()
        # Taken by itself, and no Event for _over: an interrupt (Ctrl-C) in the `with` of a
        # Condition, or in set(), can leave the lock taken.
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._closed = False
        self._ended = False  # and all of it is done
        self._over = SimpleQueue[None]()
        self._thread = threading.Thread(target=self._accept, name="cxlkv-serve", daemon=True)
        lifetime.watch(self)

    @abstractmethod
    def _session(self, sock: socket.socket) -> S:
        """The session of a new connection."""

    @abstractmethod
    def _serve(self, session: S) -> None:
        """Serve a session in its thread; calls _enter() when the peer has proved itself."""

    def start(self) -> None:
        try:
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def _accept(self) -> None:
        """Accept connections. Nothing ends it but close(): what fails is tried again, and waits
        longer each time."""
        failures, quiet_until_s = 0, 0.0
        while not self._closed:
            try:
                self._begin(*self._socket.accept())
                failures = 0
            except Exception as error:  # no descriptor, no thread, no memory; or a peer that left
                if self._closed:
                    return
                self._push_out()  # what it has may be what is missing
                if time.monotonic() >= quiet_until_s:
                    quiet_until_s = time.monotonic() + LOG_EVERY_S
                    log.warning("a connection could not be accepted: %s", error)
                first_s, most_s = ACCEPT_PAUSE_S
                with contextlib.suppress(Empty):
                    self._over.get(timeout=min(first_s * 2**failures, most_s))
                failures = min(failures + 1, 16)

    def _begin(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        session: S | None = None
        try:
            session = self._session(sock)
            with self._mutex:
                if self._closed or len(self._sessions) >= self._places + 2 * STRANGERS_MAX:
                    sock.close()  # those that were pushed out are not gone yet
                    return
                if len(self._strangers) >= STRANGERS_MAX:
                    self._push_out()
                self._sessions.add(session)
                self._strangers[session] = None
            args = (session, f"{peer[0]}:{peer[1]}")
            thread = threading.Thread(target=self._run, args=args, name="cxlkv-peer", daemon=True)
            thread.start()
        except BaseException:
            sock.close()
            with self._mutex:
                if session is not None:
                    self._forget(session)
            raise

    def _push_out(self) -> None:
        """The oldest of those who have not proved themselves: a peer does so at once."""
        with self._mutex:
            for oldest in self._strangers:
                del self._strangers[oldest]
                oldest.end()
                return

    def _is_full(self) -> bool:
        return len(self._proved) >= self._places

    def _enter(self, session: S) -> bool:
        """The peer has proved itself. False: there is no place for it, or it was pushed out."""
        with self._mutex:
            if session not in self._strangers or self._is_full():
                return False
            del self._strangers[session]
            self._proved.add(session)
            return True

    def _forget(self, session: S) -> None:
        self._sessions.discard(session)
        self._strangers.pop(session, None)
        self._proved.discard(session)
        self._lock.notify_all()

    def _run(self, session: S, peer: str) -> None:
        try:
            self._serve(session)
        except (CXLKVError, OSError) as error:
            if not self._closed:
                log.info("the connection of %s ended: %s", peer, error)
        except Exception:
            log.exception("the connection of %s ended by a fault of ours", peer)
        finally:
            session.close()
            with self._mutex:
                self._forget(session)

    def connections(self) -> int:
        """Peers that are connected now, and those that try to."""
        with self._mutex:
            return len(self._sessions)

    def close(self) -> None:
        """Ends all connections and gives back what they held; a second time does nothing."""
        with self._mutex:
            if self._ended:
                return
            self._closed = True
            for session in self._sessions:
                session.end()
        self._over.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(END_S)
        with self._mutex:
            self._lock.wait_for(lambda: not self._sessions, END_S)
        self._end()
        self._ended = True

    def _end(self) -> None:
        self._socket.close()

    def reset_after_fork(self) -> None:
        """Nobody is served here, and nothing is held for the parent's peers."""
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._closed = self._ended = True
        self._socket.close()
        for session in self._sessions:
            session.leave()
        for each in (self._sessions, self._strangers, self._proved):
            each.clear()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)
