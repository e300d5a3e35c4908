"""Hits: published pages that a match found."""

from __future__ import annotations

from cxlkv import _core
from cxlkv.errors import (
    CXLKVError,
    state_of,
)
from cxlkv.layout import KVLayout
from cxlkv.machine.lifetime import Closing
from cxlkv.sequence.sequence import Sequence, size_text


class Hit(Closing):
    """The published pages that a match found, held until release() or the end of the lease."""

    _instead = "pass its handle on, and adopt() it there"

    def __init__(
        self,
        pool: _core.Handle,
        layout: KVLayout,
        tokens: int,
        handle: _core.Handle,
        strict: bool = True,
    ):
        self.tokens = tokens
        self.strict = strict  # False: pages may have been computed behind other text
        self._sequence = Sequence(pool, layout, handle)

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __repr__(self) -> str:
        kind = "" if self.strict else ", computed behind other text, perhaps"
        try:
            len(self._sequence)
            state = "held"
        except CXLKVError as error:
            state = state_of(error)
        return f"<Hit: {size_text(self.tokens, self._sequence._layout)}{kind}, {state}>"

    @property
    def handle(self) -> bytes:
        """Bytes for pool.adopt() in any process, while the hit is pinned. Raises StaleError."""
        return self._sequence.handle

    def sequence(self) -> Sequence:
        """A sequence of the hit's tokens, to go on from; it outlives the hit."""
        return self._sequence.fork()

    def release(self) -> None:
        """Unpin; a second time does nothing."""
        self._sequence.release()

    close = release
