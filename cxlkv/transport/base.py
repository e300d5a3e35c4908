"""A link copies lists of pieces, one-sided, from and to a far pool.

The control connection (wire.py) carries requests and answers, which need the far process; a link
carries the bytes, which need not. Its far end has two memories: the pool's region, that is only
read, and a staging area for each connection, where records arrive that the far process then
verifies and publishes. So nothing that a peer sends can change the pool before it was checked.
"""

from __future__ import annotations

from typing import Protocol

from cxlkv.arrays import Bytes
from cxlkv.transport.far import Pieces
from cxlkv.transport.wire import Deadline

CHUNK_BYTES = 16 << 20  # of a link's buffer, and of a staging area: at least one record


def chunk_records(record_bytes: int) -> int:
    """Records that are on their way at once."""
    return max(1, CHUNK_BYTES // record_bytes)


class Link(Protocol):
    """The client's end. Raises PeerError when the far end is gone, or time is up; the link is then
    of no use, and neither is what is in its buffer."""

    name: str
    buffer: Bytes  # near memory: chunk_records() of them, side by side

    def read(self, pieces: Pieces, deadline: Deadline) -> None:
        """Copy from the far pool's region into the buffer."""

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        """Copy from the buffer into the far staging area."""

    def close(self) -> None:
        """A second time does nothing."""

    def leave(self) -> None:
        """Called in a forked child in place of close(): what the parent uses of it goes on."""
        self.close()


class Door(Protocol):
    """The server's end of one link: what it lends for the time of a connection."""

    def answer(self) -> dict[str, object]:
        """What the client needs to know."""

    def close(self) -> None:
        """Takes back what was lent: nothing arrives from afar when this has returned."""

    def leave(self) -> None:
        self.close()
