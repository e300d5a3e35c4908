"""The engine's memory of layers with states, and what a worker tries of it at its start.

As probe.py does for K and V: states must lie where StateMemory says, and come back from the pool as
they were. So an engine that keeps them in another way is refused, and never served with wrong ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Protocol

import numpy as np
import torch

from cxlkv.adapters.vllm.device_blocks import Link
from cxlkv.adapters.vllm.device_states import DeviceStates
from cxlkv.adapters.vllm.groups import BlockGroup, unit_of
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.probe import refusal
from cxlkv.adapters.vllm.states import Bytes, StateLayer, StateMemory
from cxlkv.errors import PoolFullError, UnsupportedError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys

Tensor = torch.Tensor


class StateSpec(Protocol):
    """What the engine says of a layer's states."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def dtypes(self) -> Sequence[torch.dtype]: ...


def memory_of(
    caches: Mapping[str, object],
    specs: Mapping[str, tuple[int, StateSpec]],
    link: Link | None = None,
) -> StateMemory:
    """specs: of each layer its group's number, too. caches: the engine's bytes, [blocks, ..., bytes
    of a state]; link: to them, where they are on a device. Raises UnsupportedError."""
    device = torch.device("cpu") if link is None else link.device
    layers, words = list[StateLayer](), list[str]()
    for name, (group, spec) in specs.items():
        memory, size = caches[name], sum(sizes_of(spec))
        if not (
            isinstance(memory, torch.Tensor)
            and memory.device == device
            and memory.shape[1:].numel() == memory.shape[-1] == size
            and memory.dtype == torch.int8
            and memory.stride(-1) == 1
        ):
            raise UnsupportedError(
                f"cxlkv: {name} does not keep its states as (blocks, 1, 1, {size}) bytes on "
                f"{device}, which is what is served"
            )
        rows = memory.view(torch.uint8).as_strided((memory.shape[0], size), (memory.stride(0), 1))
        layers.append(StateLayer(name, group, rows if link is not None else rows.numpy()))
        words.append(f" {[tuple(one) for one in spec.shapes]} {[str(one) for one in spec.dtypes]}")
    return StateMemory(layers, words) if link is None else DeviceStates(layers, words, link)


def sizes_of(spec: StateSpec) -> list[int]:
    """Bytes of each of a layer's states."""
    return [
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]


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
        self._states = [torch.as_tensor(layer.rows) for layer in memory.layers]
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
            for layer, states in zip(self._memory.layers, self._states, strict=True):
                self._check(layer.name, states)
            with suppress(PoolFullError):
                self._move(pool, few)
        finally:
            for states in self._states:
                states[: last + 1] = 0

    def _check(self, name: str, rows: Tensor) -> None:
        """Each of the layer's states has its own bytes of a block, and no others."""
        begin = 0
        for tensor in self._own[name]:
            if not tensor[1].is_contiguous():
                raise refusal(name, "a state of a block is in several pieces")
            rows[:3] = 0
            wanted = rows[:3].clone()
            end = begin + tensor[1].numel() * tensor.element_size()
            wanted[1, begin:end] = 0xA5
            tensor[1].view(torch.uint8).fill_(0xA5)
            if end > rows.shape[1] or not torch.equal(rows[:3], wanted):
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
                own.append(batch, number, range(count), [0, count])
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
