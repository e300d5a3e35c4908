"""States in an engine's blocks on a device, copied to and from host memory beside its own work.

As device_blocks.py does it for K and V, by the same streams. The engine writes states in place: it
may do so again behind fence(), as a checkpoint is copied on the device first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cxlkv.adapters.vllm.device_blocks import Link
from cxlkv.adapters.vllm.states import Blocks, Bytes, StateLayer, StateMemory
from cxlkv.gpu import streams
from cxlkv.sequence import Hit


@dataclass
class StagedStates:
    """A checkpoint in host memory, once `done` has passed."""

    memory: torch.Tensor
    done: torch.cuda.Event

    def read(self) -> Bytes:
        self.done.synchronize()
        return self.memory.numpy()


class DeviceStates(StateMemory):
    """Its layers' rows are on the link's device."""

    def __init__(self, layers: Sequence[StateLayer], words: Sequence[str], link: Link):
        super().__init__(layers, words)
        self._link, self._rows = link, [torch.as_tensor(layer.rows) for layer in layers]

    def stage(self, blocks: Blocks, out: torch.Tensor) -> StagedStates:
        """Copy to host memory what is in these blocks behind begin_gathers(); out: pinned."""
        return StagedStates(out, self._link.gather_states(partial(self.gathered, blocks), out))

    def gathered(self, blocks: Blocks) -> torch.Tensor:
        """The checkpoint, on the device."""
        made = torch.zeros(self.states.bytes, dtype=torch.uint8, device=self._link.device)
        for row, part in self._pairs(blocks, made):
            part.copy_(row)
        return made

    def load(self, hit: Hit, blocks: Blocks) -> None:
        """Into host memory, then into blocks behind begin_loads(); end_loads() waits for it."""
        self._link.send_states(self.states.bytes, hit.read_states, partial(self._spread, blocks))

    def _spread(self, blocks: Blocks, here: torch.Tensor) -> None:
        for row, part in self._pairs(blocks, here):
            row.copy_(part, non_blocking=True)

    def _pairs(
        self, blocks: Blocks, checkpoint: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's state in these blocks, and in a checkpoint."""
        for layer, rows, start in zip(self.layers, self._rows, self._starts, strict=True):
            row = rows[blocks[layer.group]]
            yield row, checkpoint[start : start + len(row)]

    # ---- with the host waiting ----

    def gather(self, blocks: Blocks) -> Bytes:
        here = streams.pinned(self.states.bytes, dtype=torch.uint8, device=self._link.device)
        self._link.begin_gathers()
        return self.stage(blocks, here).read()

    def scatter(self, found: Bytes, blocks: Blocks) -> None:
        self._link.begin_loads(self._link.mark())
        fill, spread = partial(np.copyto, src=found), partial(self._spread, blocks)
        self._link.send_states(len(found), fill, spread)
        self._link.end_loads()
