"""A worker's side of attention in an engine whose blocks are on a device.

As engine_attention.py has it, but that no step waits for a copy: a step's blocks are copied to host
memory behind it, and a thread saves them (saving.py). A step that waits for hits begins when these
are in its blocks: where a graph is replayed, no layer says that it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link
from cxlkv.adapters.vllm.device_loads import DeviceLoad, is_emulated, reader_of
from cxlkv.adapters.vllm.device_states import DeviceStates
from cxlkv.adapters.vllm.engine_attention import ALONE, EngineAttention, Share, _Writing
from cxlkv.adapters.vllm.groups import BlockGroup
from cxlkv.adapters.vllm.loading import BlockMemory, Load, Part
from cxlkv.adapters.vllm.messages import KEY_BYTES, Left, Message, Report
from cxlkv.adapters.vllm.saving import Ring, Save, SavedText, Saver
from cxlkv.adapters.vllm.settings import Settings
from cxlkv.adapters.vllm.states import Blocks, StateMemory
from cxlkv.errors import GpuMemoryError
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

STEPS, ROOM_BYTES = 2, 4 << 30
"""Host memory for what is on its way: of so many of the largest steps, but no more than that."""


class DeviceAttention(EngineAttention):
    """link: to the blocks' device. step_tokens: of the largest step, for which there is host memory
    on the way; what finds no room there is saved by a later step. threaded: as in Saver."""

    def __init__(
        self,
        pool: CXLPool,
        layers: Mapping[str, BlockMemory],
        settings: Settings,
        *,
        groups: Sequence[BlockGroup],
        link: Link,
        step_tokens: int,
        share: Share = ALONE,
        tiers: Tiers | None = None,
        quota: Quota | None = None,
        states: StateMemory | None = None,
        overlaps: bool = False,
        threaded: bool = True,
    ):
        super().__init__(
            pool,
            layers,
            settings,
            groups=groups,
            share=share,
            tiers=tiers,
            quota=quota,
            states=states,
            overlaps=overlaps,
        )
        self._link = link
        self._blocks = [own for own in layers.values() if isinstance(own, DeviceMemory)]
        self._of_group = [memory.group for memory in self._blocks]
        self._ratios = [self.unit // group.block_tokens for group in groups]
        self._unit_bytes = sum(
            memory.bytes_of(self._ratios[memory.group]) for memory in self._blocks
        )
        self._units = STEPS * -(-step_tokens // self.unit)
        self._ring = self._ring_of(self._unit_bytes)
        self._state_ring = self._ring_of(0 if states is None else states.states.bytes)
        self._saver = Saver(
            pool,
            self.tiers,
            quota,
            self._ring,
            unit=self.unit,
            groups=self._of_group,
            ratios=self._ratios,
            threaded=threaded,
        )
        self._saves_now: list[Save] = []
        self._reader, self._read_before = reader_of(pool, link.device), 0

    def _ring_of(self, size: int) -> Ring:
        """size: of a unit, or of the states behind it."""
        return Ring(max(size, min(self._units * size, ROOM_BYTES)), self._link.device)

    def reopened(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        self._read_before += self._reader.bytes if self._reader else 0
        self._reader = None  # the old one has ended with its pool
        super().reopened(pool, tiers)
        self._saver.reopened(pool, self.tiers)
        self._reader = reader_of(pool, self._link.device)

    # ---- loads ----

    def _load(self, parts: list[Part]) -> Load:
        reader = None if is_emulated(self.pool) else self._reader
        return DeviceLoad(self.pool, parts, self.settings.deadline_s, self._link, reader)

    def start_loads(self) -> None:
        super().start_loads()
        if self._now is not None:
            self._now.wait(len(self._blocks) + 1)  # until it has ended

    def rest(self) -> None:
        super().rest()
        self._saver.wait()

    # ---- saves ----

    def hear(self, message: Message) -> None:
        self._take_outcome()
        self.drop_step()  # one that did not end; its memory goes back before what is taken now
        super().hear(message)
        self._link.fence()  # what the step writes to may be what a request has left

    def _take_outcome(self) -> None:
        found = self._saver.take()
        for name in found.dropped & self._held.keys():
            self._drop(name)
        for name, saved in found.gaps.items():
            held = self._held.get(name)
            if held is not None:
                held.saved = min(held.saved, saved)
        self._report.stored += found.stored
        self._report.tails.update(found.tails)
        self._report.failures.update(found.failures)

    def _plan(self) -> list[_Writing]:
        """What this step completes. Its copies begin when its layers are computed."""
        if self._saver.is_lost():
            return []
        upto, planned, room = dict[str, int](), set[bytes](), self._ring.room // self._unit_bytes
        for name, held in self._held.items():
            if not held.scheduled or not held.options.save or held.awaits:
                continue
            complete = min(held.complete(self.groups, self.unit), held.saved + room)
            key = held.keys[held.saved * KEY_BYTES :][:KEY_BYTES]
            if complete > held.saved and key not in planned:
                planned.add(key)
                upto[name] = complete
                room -= complete - held.saved
        for some, rewind in self._together(upto):
            texts = [self._text(name, end) for name, end in some.items()]
            made = self._save(texts, rewind)
            if made is not None:
                self._saves_now.append(made)
        return []

    def drop_step(self) -> None:
        super().drop_step()
        for save in self._saves_now:
            self._saver.submit(replace(save, texts=[]))
        self._saves_now = []

    def _text(self, name: str, end: int) -> SavedText:
        held = self._held[name]
        return SavedText(name, held.keys[: end * KEY_BYTES], held.saved, end)

    def _save(self, texts: list[SavedText], rewind: int) -> Save | None:
        units = sum(text.end - text.first for text in texts)
        memory = self._ring.take(units * self._unit_bytes)
        if memory is None:
            return None
        counts = np.cumsum([0, *(text.end - text.first for text in texts)], dtype=np.int32)
        return Save(texts, [counts * ratio for ratio in self._ratios], rewind, memory)

    def save_layer(self, name: str) -> None:
        layer = self._layers.get(name)
        if layer is not None and any(len(save.layers) == layer for save in self._saves_now):
            self._link.begin_gathers()
            self._saves_now = [
                save
                for save in self._saves_now
                if len(save.layers) != layer or self._has_gathered(save, layer)
            ]

    def _has_gathered(self, save: Save, *layers: int) -> bool:
        """Begin these layers' copies; where the device lacks memory, a later step saves it."""
        try:
            for layer in layers:
                self._gather(save, layer)
        except torch.OutOfMemoryError as error:
            self._note_short(error)
            self._saver.submit(replace(save, texts=[]))
            return False
        return True

    def _note_short(self, error: torch.OutOfMemoryError) -> None:
        short = f"no memory on {self._link.device} for blocks on their way to the pool: {error}"
        self.requests.fail("save", GpuMemoryError(short))

    def _gather(self, save: Save, layer: int) -> None:
        own = self._blocks[layer]
        kind, ratio = (own.group, own.ratio), self._ratios[own.group]
        if kind not in save.numbers:
            blocks = [
                self._held[text.name].blocks[own.group][text.first * ratio : text.end * ratio]
                for text in save.texts
            ]
            save.numbers[kind] = self._link.numbers(own, np.concatenate(blocks))
        count = len(save.numbers[kind]) // own.ratio
        here = save.part(own.bytes_of(count))
        save.layers.append(self._link.gather(own, save.numbers[kind], here))

    def end_step(self) -> None:
        super().end_step()
        self._submit()  # where an audit has ended it
        self._link.fence()  # the engine writes to new blocks before the next hear()

    def _submit(self) -> None:
        for save in self._saves_now:
            assert len(save.layers) == len(self._blocks), "save_layer() was called for each"
            save.texts = [self._checked(text) for text in save.texts]
            self._saver.submit(save)
        self._saves_now = []

    def _checked(self, text: SavedText) -> SavedText:
        """Of a text that turned out to be wrong, nothing."""
        held = self._held[text.name]
        if not held.options.save or held.valid < text.end * self.unit:
            return replace(text, end=text.first)
        held.saved = text.end
        return text

    def _save_states(self) -> None:
        self._submit()  # the pages before them
        super()._save_states()

    def _store_states(self, states: StateMemory, name: str, keys: PageKeys, blocks: Blocks) -> None:
        assert isinstance(states, DeviceStates)
        if self._saver.is_lost():
            return
        memory = self._state_ring.take(states.states.bytes)
        if memory is None:
            self._report.failures["late"] += 1
            return
        self._link.begin_gathers()
        staged = None
        try:
            staged = states.stage(blocks, memory)
        except torch.OutOfMemoryError as error:
            self._note_short(error)
        text = SavedText(name, keys.packed.tobytes(), 0, len(keys))
        self._saver.submit_states(text, staged, self._state_ring)

    def _save_left(self, left: Left) -> None:
        name, held = left.request, self._held.get(left.request)
        if held is None or not self._may_leave(name, held) or self._saver.is_lost():
            return
        whole, keys = self._complete_keys(held, left)
        end = len(keys) // KEY_BYTES
        tail = left.tokens - whole * self.unit if end > whole else 0
        if end <= held.saved:
            return
        room = self._ring.room // self._unit_bytes
        if end > held.saved + room:  # of more than there is memory for, what comes first
            self._report.failures["late"] += 1
            end, tail = held.saved + room, 0
        together = self._together({name: end}) if end > held.saved else ()
        if not together:  # nothing of it can be found by itself
            return
        text = SavedText(name, keys[: end * KEY_BYTES], held.saved, end, tail)
        save = self._save([text], together[0][1])
        assert save is not None, "there is room"
        self._link.begin_gathers()
        if self._has_gathered(save, *range(len(self._blocks))):
            self._saver.submit(save)

    def _end(self, name: str) -> None:
        held = self._held.get(name)
        priority = 0 if held is None else held.options.priority
        keys = b"" if held is None else held.keys
        if held is not None:
            held.options = replace(held.options, priority=0)  # the saver's, behind its saves
        super()._end(name)
        if held is not None:
            self._saver.end(name, keys, priority)

    def _drop(self, name: str) -> None:
        super()._drop(name)
        self._saver.cancel([name])

    # ---- for the scheduler ----

    def report(self) -> Report:
        self._take_outcome()
        return super().report()

    def device_counts(self) -> dict[str, int]:
        return {"fetched_bytes": self._read_before + (self._reader.bytes if self._reader else 0)}

    def close(self) -> None:
        self._saver.close()
        super().close()
        if self._reader is not None:
            self._reader.close()
