"""States of recurrent and convolution layers: in the engine's blocks, and in checkpoints of a pool.

In vLLM's mamba cache mode "align" a block of such a layer has one state, that behind its last
token. The engine keeps those at which its steps end, and says which ones (boundary offloads):

    block of a text     0     1     2     3
    full attention      K V   K V   K V   K V
    states              .     s     .     s       the others are nobody's

All layers' states behind one token are one checkpoint, beside the pages of K and V before it. So a
hit ends where a checkpoint lies, and its last block alone is filled: the engine goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.adapters.vllm.groups import BlockGroup, unit_of
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.probe import refusal
from cxlkv.errors import PoolFullError, StaleError, UnsupportedError
from cxlkv.layout import LINE_BYTES, States
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit

Tensor = torch.Tensor
Bytes = npt.NDArray[np.uint8]
Blocks = Mapping[int, int]
"""A block of each group with states, by the group's number."""
KIND = "MambaSpec"


class StateSpec(Protocol):
    """What the engine says of a layer's states."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...


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
    rows: Bytes


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
            row = layer.rows[blocks[layer.group]]
            out[start : start + len(row)] = row
        return out

    def scatter(self, found: Bytes, blocks: Blocks) -> None:
        for layer, start in zip(self.layers, self._starts, strict=True):
            row = layer.rows[blocks[layer.group]]
            row[:] = found[start : start + len(row)]


def memory_of(
    caches: Mapping[str, object], specs: Mapping[str, tuple[int, StateSpec]]
) -> StateMemory:
    """specs: of each layer its group's number, too. caches: the engine's bytes, [blocks, ..., bytes
    of a state]. Raises UnsupportedError."""
    layers, words = list[StateLayer](), list[str]()
    for name, (group, spec) in specs.items():
        memory, size = caches[name], sum(sizes_of(spec))
        if not (
            isinstance(memory, torch.Tensor)
            and memory.is_cpu
            and memory.shape[1:].numel() == memory.shape[-1] == size
            and memory.dtype == torch.int8
            and memory.stride(-1) == 1
        ):
            raise UnsupportedError(
                f"cxlkv: {name} does not keep its states as (blocks, 1, 1, {size}) bytes on the "
                "CPU, which is what is served yet"
            )
        rows = memory.view(torch.uint8).numpy().reshape(memory.shape[0], 1, size)[:, 0]
        assert np.shares_memory(rows, memory.numpy())
        layers.append(StateLayer(name, group, rows))
        words.append(f" {[tuple(one) for one in spec.shapes]} {[str(one) for one in spec.dtypes]}")
    return StateMemory(layers, words)


def sizes_of(spec: StateSpec) -> list[int]:
    """Bytes of each of a layer's states."""
    return [
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]


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
        """Raises CorruptError, StaleError; then nothing was written."""
        self.memory.scatter(self.hit.read_states(), self.blocks)

    def release(self) -> None:
        self.hit.release()


# ---- at the start ----


class StateProbe:
    """Tries, as Probe does for K and V, whether states lie where StateMemory says, and come back
    from the pool as they were. own: the tensors in which each layer keeps its states."""

    def __init__(
        self,
        own: Mapping[str, Sequence[Tensor]],
        memory: StateMemory,
        rows: Sequence[BlockMemory],
        groups: Sequence[BlockGroup],
    ):
        self._own, self._memory, self._rows = own, memory, rows
        self._groups, self._unit = groups, unit_of(groups)
        numbers = sorted(memory.groups)
        self._from = {group: 1 + 2 * place for place, group in enumerate(numbers)}
        self._to = {group: 2 + 2 * place for place, group in enumerate(numbers)}

    def run(self, pool: CXLPool) -> None:
        """Raises UnsupportedError with the layer's name."""
        last = 1 + 2 * len(self._from)
        few = [self._unit // self._groups[own.group].block_tokens for own in self._rows]
        if any(len(layer.rows) <= last for layer in self._memory.layers) or any(
            own.keys.shape[0] < count for own, count in zip(self._rows, few, strict=True)
        ):
            return
        try:
            for layer in self._memory.layers:
                self._check(layer.name, layer.rows)
            with suppress(PoolFullError):
                self._move(pool, few)
        finally:
            for layer in self._memory.layers:
                layer.rows[: last + 1] = 0

    def _check(self, name: str, rows: Bytes) -> None:
        """Each of the layer's states has its own bytes of a block, and no others."""
        begin = 0
        for tensor in self._own[name]:
            rows[:3] = 0
            wanted = rows[:3].copy()
            end = begin + tensor[1].numel() * tensor.element_size()
            wanted[1, begin:end] = 0xA5
            tensor[1].view(torch.uint8).fill_(0xA5)
            if end > rows.shape[1] or not np.array_equal(rows[:3], wanted):
                raise refusal(name, "a state of a block is not where it was")
            begin = end
        if begin != rows.shape[1]:
            raise refusal(name, f"its states have {begin} bytes, its blocks {rows.shape[1]}")

    def _move(self, pool: CXLPool, few: Sequence[int]) -> None:
        memory, sequence = self._memory, pool.sequence()
        for number, layer in enumerate(memory.layers):
            numbers = np.random.default_rng(number).integers(0, 256, layer.rows.shape[1], np.uint8)
            self._write(layer, numbers)
        key = PageKeys(np.frombuffer(os.urandom(16), np.uint8).reshape(1, 16), self._unit)
        try:
            batch = pool.batch([sequence])
            for number, (own, count) in enumerate(zip(self._rows, few, strict=True)):
                batch.append_blocks(number, own.keys, own.values, range(count), [0, count])
            pool.publish(sequence, key, self._unit, states=memory.gather(self._from))
            with pool.match(key) as hit:
                memory.scatter(hit.read_states(), self._to)
        finally:
            sequence.release()
            pool.forget(key)
        for layer in memory.layers:
            for tensor in self._own[layer.name]:
                pair = [tensor[of[layer.group]].view(torch.uint8) for of in (self._from, self._to)]
                if not torch.equal(*pair):
                    raise refusal(layer.name, "the pool gives back another state than it was given")

    def _write(self, layer: StateLayer, numbers: Bytes) -> None:
        """By the tensors that the engine writes to. Layers of several groups share memory."""
        begin, block = 0, self._from[layer.group]
        for tensor in self._own[layer.name]:
            to = tensor[block].view(torch.uint8)
            to.copy_(torch.from_numpy(numbers[begin : begin + to.numel()]).view(to.shape))
            begin += to.numel()
