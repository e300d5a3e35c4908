"""The scheduler's side of weights that a running engine loads anew: see loaded.py."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cxlkv.adapters.common.keys import namespace, xor
from cxlkv.adapters.vllm.messages import Report


class Weights:
    """States of the ranks' weights, as their workers report them; b"" is that of the start.

    space: of keys at the start. awaited: ranks that are to look, and have not answered.
    are_mixed: weights have changed and the engine's own prefix cache was not reset since, so that a
    request which has blocks from there has K and V of both.
    """

    def __init__(self, space: bytes, ranks: int):
        self._start, self._states = space, [b""] * ranks
        self.awaited: set[int] = set()
        self.are_mixed = False

    def ask(self) -> None:
        """The engine's own prefix cache was reset, which is what users do behind new weights."""
        self.awaited, self.are_mixed = set(range(len(self._states))), False

    def hear(self, reports: Sequence[Report]) -> bool:
        """Whether the weights are others now."""
        changed = False
        for rank, state in [one for report in reports for one in report.weights.items()]:
            if state != self._states[rank]:
                changed = True
                self.are_mixed = self.are_mixed or rank not in self.awaited
                self._states[rank] = state
            self.awaited.discard(rank)
        return changed

    @property
    def told(self) -> tuple[bytes, ...]:
        """States by rank, for a message; empty as long as all are those of the start."""
        return tuple(self._states) if any(self._states) else ()

    @property
    def space(self) -> bytes:
        """The space of keys from now on."""
        if not self.told:
            return self._start
        return xor(self._start, namespace({"weights": [state.hex() for state in self._states]}))

    def reset(self) -> None:
        """Nothing that was stored is found any more, whatever the weights."""
        self._start = namespace({"before": self._start.hex(), "reset": os.urandom(16).hex()})
