"""Hits: published pages that a match found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv.errors import (
    BadArgumentError,
    CXLKVError,
    state_of,
)
from cxlkv.layout import KVLayout
from cxlkv.machine.lifetime import Closing
from cxlkv.sequence.sequence import Sequence, size_text


class Hit(Closing):
    """The published pages that a match found, held until release() or the end of the lease.

    tokens: of the hit. known_tokens: of which the pages are there. In a pool with states that may
    be more: another text began alike, and a checkpoint there would serve the next one.
    """

    _instead = "pass its handle on, and adopt() it there"

    def __init__(
        self,
        pool: _core.Handle,
        layout: KVLayout,
        tokens: int,
        known_tokens: int,
        handle: _core.Handle,
        strict: bool = True,
    ):
        self.tokens = tokens
        self.known_tokens = known_tokens
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

    def read_states(self, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Copy the state checkpoint behind the hit's last token, verified: uint8
        [layout.states.bytes], into `out` if it is given. Raises CorruptError, StaleError, and
        BadArgumentError where the hit has none."""
        states = self._sequence._layout.states
        size = states.bytes if states else 0
        if out is None:
            out = np.empty(size, np.uint8)
        elif out.shape != (size,) or out.dtype != np.uint8:
            raise BadArgumentError(f"out is {out.dtype} {out.shape}, wanted uint8 ({size},)")
        _core.read_states(self._sequence._handle, out)
        return out

    def sequence(self) -> Sequence:
        """A sequence of the hit's tokens, to go on from; it outlives the hit."""
        return self._sequence.fork()

    def release(self) -> None:
        """Unpin; a second time does nothing."""
        self._sequence.release()

    close = release
