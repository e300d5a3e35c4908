"""States of recurrent and convolution layers: in the engine's blocks, and in checkpoints of a pool.

In vLLM's mamba cache mode "align" a block of such a layer has one state, that behind its last
token. The engine keeps those at which its steps end, and says which ones (boundary offloads):

    block of a text     0     1     2     3
    full attention      K V   K V   K V   K V
    states              .     s     .     s       .: no block

All layers' states behind one token are one checkpoint, beside the pages of K and V before it. So a
hit ends where a checkpoint lies, and its last block alone is filled: the engine goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cxlkv.errors import StaleError, UnsupportedError
from cxlkv.layout import LINE_BYTES, States
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit

if TYPE_CHECKING:
    import torch

    Rows = npt.NDArray[np.uint8] | torch.Tensor

Bytes = npt.NDArray[np.uint8]
Blocks = Mapping[int, int]
"""A block of each group with states, by the group's number."""
KIND = "MambaSpec"


def check_states(kinds: Sequence[tuple[str, object]], replays: bool, remote: bool) -> None:
    """kinds: as in pools.check_groups(); replays: --use-replayssm. Raises UnsupportedError for
    states that the engine does not keep in its blocks as they are served."""
    for kind, spec in kinds:
        if kind != KIND:
            continue
        if getattr(spec, "mamba_cache_mode", "") != "align":
            raise UnsupportedError(
                f"cxlkv: this model has layers with states ({KIND}), and without prefix caching "
                "(mamba cache mode none) vLLM keeps none to go on from: add --enable-prefix-caching"
            )
        if getattr(spec, "num_speculative_blocks", 0):
            raise UnsupportedError(
                f"cxlkv: speculation in a model with states ({KIND}) is not served: leave out "
                "--speculative-config"
            )
        if replays:
            raise UnsupportedError(
                "cxlkv: --use-replayssm keeps a part of the states beside vLLM's blocks, which is "
                "not served: leave it out"
            )
        if remote:
            raise UnsupportedError(
                f'cxlkv: "remote" does not serve models with states ({KIND}) yet: leave it out'
            )


def words_of(kinds: Sequence[tuple[str, object]], cache: object) -> dict[str, object]:
    """Words of a namespace that make states what they are; none for models without."""
    found = sorted(
        {
            (getattr(one, "block_size", 0), str(one.shapes), str(one.dtypes), _type(one))
            for kind, one in kinds
            if kind == KIND and hasattr(one, "shapes") and hasattr(one, "dtypes")
        }
    )
    dtypes = [str(getattr(cache, f"mamba_{of}cache_dtype", "auto")) for of in ("", "ssm_")]
    return {"states": found, "state_dtypes": dtypes} if found else {}


def _type(spec: object) -> str:
    return str(getattr(spec, "mamba_type", ""))


@dataclass(frozen=True)
class StateLayer:
    """A layer's memory: uint8 [block_count, bytes], a row for each block."""

    name: str
    group: int
    rows: Rows


class StateMemory:
    """The engine's own memory of all layers with states, in the model's order."""

    def __init__(self, layers: Sequence[StateLayer], words: Sequence[str] = ()):
        self.layers = list(layers)
        self.groups = frozenset(layer.group for layer in layers)
        sizes = [layer.rows.shape[1] for layer in layers]
        named = [layer.name + word for layer, word in zip(layers, words, strict=False)]
        names = named or [layer.name for layer in layers]
        self.states = States.of(
            [(name, (size,), "int8") for name, size in zip(names, sizes, strict=True)]
        )
        lines = (-(-size // LINE_BYTES) * LINE_BYTES for size in sizes)
        self._starts = list(accumulate(lines, initial=0))[:-1]

    def gather(self, blocks: Blocks) -> Bytes:
        """The checkpoint of what is in these blocks now."""
        out = np.zeros(self.states.bytes, np.uint8)
        for layer, start in zip(self.layers, self._starts, strict=True):
            row = np.asarray(layer.rows[blocks[layer.group]])
            out[start : start + len(row)] = row
        return out

    def scatter(self, found: Bytes, blocks: Blocks) -> None:
        for layer, start in zip(self.layers, self._starts, strict=True):
            row = np.asarray(layer.rows[blocks[layer.group]])
            row[:] = found[start : start + len(row)]

    def load(self, hit: Hit, blocks: Blocks) -> None:
        """The checkpoint of a hit. Raises CorruptError, StaleError; then nothing was written."""
        self.scatter(hit.read_states(), blocks)


# ---- a hit ----


@dataclass
class Checkpoint:
    """A hit's, that is to come to these blocks. last: where the last unit of the hit begins: what
    is good of it where the checkpoint is not."""

    hit: Hit
    memory: StateMemory
    blocks: Blocks
    last: int

    @classmethod
    def of(
        cls, pool: CXLPool, keys: PageKeys, memory: StateMemory, blocks: Sequence[Sequence[int]]
    ) -> Checkpoint:
        """keys: of all tokens of the hit. blocks: by group, of which the last ones are filled.
        Raises StaleError where it is gone."""
        hit, unit = pool.match(keys), keys.page_tokens
        named = {group: blocks[group][-1] for group in memory.groups if blocks[group]}
        if hit.tokens != len(keys) * unit or named.keys() != memory.groups:
            hit.release()
            raise StaleError(f"the state checkpoint behind {len(keys) * unit} tokens is gone")
        return cls(hit, memory, named, hit.tokens - unit)

    def load(self) -> None:
        self.memory.load(self.hit, self.blocks)

    def release(self) -> None:
        self.hit.release()
