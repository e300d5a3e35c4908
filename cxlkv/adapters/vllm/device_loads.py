"""Loads into blocks of a device, by its own DMA out of the pool where the driver has it registered.

Else, and where anything of a load was wrong, the host copies it by way of pinned memory: that tells
which block is damaged, and forgets it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from cxlkv import _io_hooks
from cxlkv.adapters.vllm.device_blocks import BUFFERS, DeviceMemory, Link, Reading
from cxlkv.adapters.vllm.loading import BlockMemory, Load, Part
from cxlkv.errors import CXLKVError, MemoryShortError, RegistrationError, UnsupportedError
from cxlkv.gpu.read import PageReader
from cxlkv.pool import CXLPool

log = logging.getLogger("cxlkv")


def reader_of(pool: CXLPool, device: torch.device) -> PageReader | None:
    """None: the host copies."""
    if device.type == "cpu":
        return None
    try:
        return PageReader(pool, device)
    except (MemoryShortError, RegistrationError, UnsupportedError) as error:
        log.info("cxlkv: hits come to %s by way of pinned memory: %s", device, error)
        return None


def is_emulated(pool: CXLPool) -> bool:
    """Whether its link is: then the host copies, whose copies take as long as that says."""
    with suppress(CXLKVError):  # it was lost: loads say so
        return _io_hooks.subscriber is not None and "emulated" in pool.describe()
    return False


class DeviceLoad(Load):
    def __init__(
        self,
        pool: CXLPool,
        parts: list[Part],
        deadline_s: float,
        link: Link,
        reader: PageReader | None,
    ):
        super().__init__(pool, parts, deadline_s, link)
        self._device_link, self._reader = link, reader

    def _bring_all(self, memory: Sequence[BlockMemory]) -> None:
        with suppress(CXLKVError):  # the host's copy says it of the request that it is about
            if self._reader is not None and self._reads_all(self._reader, memory):
                for part in self.parts:
                    part.good = part.end if part.sequence is not None else part.begin
                    part.bring_states()
                self._layers = len(memory)
                return
        super()._bring_all(memory)

    def _reads_all(self, reader: PageReader, memory: Sequence[BlockMemory]) -> bool:
        """False where something was not right, or it is given up."""
        link, made = self._device_link, dict[tuple[int, int, int], Reading]()
        assert self._behind is not None
        link.begin_loads(self._behind)
        parts = [part for part in self.parts if part.sequence is not None]
        if not parts:
            return True
        own = [one for one in memory if isinstance(one, DeviceMemory)]
        most = max(min(one.at_once, self._blocks(parts, one)) * one.bytes_of(1) for one in own)
        with reader.using():
            rooms, turn = [link.room(most) for _ in range(BUFFERS)], 0
            for layer, one in enumerate(own):
                kind = (one.group, one.ratio, reader.part(layer))
                if kind not in made:
                    made[kind] = self._reading(reader, layer, one, parts)
                count = self._blocks(parts, one)
                for begin in range(0, count, one.at_once):
                    if self._given_up:
                        return False
                    turn = (turn + 1) % BUFFERS
                    some = slice(begin, min(count, begin + one.at_once))
                    link.read(made[kind], one, layer, some, rooms[turn])
            link.end_loads()
        return not any(bool(one.pages.found.any()) for one in made.values())

    def _reading(
        self, reader: PageReader, layer: int, own: DeviceMemory, parts: list[Part]
    ) -> Reading:
        each = own.tokens // self._pool.layout.page_tokens
        spans, blocks = [], []
        for part in parts:
            assert part.sequence is not None
            first, count = part.first[own.group], _count(part, own)
            spans.append((part.sequence, first * each, (first + count) * each))
            blocks.append(np.array(part.blocks[own.group][:count], np.int64))
        numbers = self._device_link.load_numbers(own, np.concatenate(blocks))
        return Reading(reader, reader.pages(layer, spans), numbers)

    @staticmethod
    def _blocks(parts: list[Part], own: BlockMemory) -> int:
        return sum(_count(part, own) for part in parts)


def _count(part: Part, own: BlockMemory) -> int:
    """Blocks of a group that come."""
    found = part.end // own.tokens - part.first[own.group]
    return max(0, min(found, len(part.blocks[own.group])))
