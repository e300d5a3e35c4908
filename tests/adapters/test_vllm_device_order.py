"""Copies between an engine's blocks on a device and the pool, in any order that waits allow.

The engine's own stream writes to blocks and reads them; blocks are saved and loaded meanwhile, and
given to others at once. tests/support/late_streams.py runs all of that late.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout
from cxlkv.sequence import Hit

from ..support.lengths import nightly

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")
if TYPE_CHECKING:
    from torch import Tensor

from cxlkv.adapters.vllm.device_blocks import DeviceMemory, Link, Reading, Staged  # noqa: E402
from cxlkv.adapters.vllm.device_states import DeviceStates, StagedStates  # noqa: E402
from cxlkv.adapters.vllm.saving import Ring  # noqa: E402
from cxlkv.adapters.vllm.states import Bytes, StateLayer, StateMemory  # noqa: E402
from cxlkv.gpu.read import PageReader  # noqa: E402

from ..support.late_streams import Schedule, Site  # noqa: E402
from ..support.paged_engines import use_references  # noqa: E402

HEADS, TOKENS, DIM, BLOCKS = 2, 4, 8, 8
STATE_BYTES = (100, 40)  # of two layers, each of its own group
STEPS = 25
Numbers = npt.NDArray[np.float32]
SITES = {
    "device_blocks.begin_gathers.wait_stream": 1,
    "device_blocks._take_out.record": 2,  # of the gather, and of the copy
    "device_blocks._take_out.wait_event": 1,
    "device_blocks.append.synchronize": 1,
    "device_blocks.fence.wait_event": 1,
    "device_blocks.mark.record": 1,
    "device_blocks.begin_loads.wait_event": 1,
    "device_blocks.take.synchronize": 1,
    "device_blocks.send.record": 1,
    "device_blocks.send_states.record": 1,
    "device_states.read.synchronize": 1,
    "device_blocks.room.record": 1,
    "device_blocks.read.record": 1,
    "copier._begin.wait_event": 1,
    "copier._end.record": 1,
    "device_blocks.read.wait_event": 1,
    "device_blocks.end_loads.record": 1,
    "device_blocks.end_loads.synchronize": 1,
    "read.using.synchronize": 1,
}
UNSEEN = ("device_blocks.room.record", "read.using.synchronize")
"""Waits for an allocator that gives memory away early, and for what an error has left."""


@dataclass
class Waiting:
    """Blocks on their way to the pool, and what was in them when they were saved."""

    staged: Staged
    right: Numbers


@dataclass
class KeptStates:
    """In the place of a hit."""

    checkpoint: Bytes

    def read_states(self, out: Bytes) -> None:
        out[:] = self.checkpoint


class Engine:
    """Blocks of one layer on a device, by the engine's stream, which is the current one."""

    def __init__(self, seed: int, schedule: Schedule, pool: CXLPool):
        self.random, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.schedule, self.pool = schedule, pool
        self.link = Link(torch.device("cpu"))
        self.cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
        self.memory = DeviceMemory(self.cache, DIM, TOKENS, 0, self.link)
        self.ring = Ring(self.memory.bytes_of(2 * BLOCKS), self.link.device)
        self.now = np.zeros(tuple(self.cache.shape), np.float32)  # when all is done that is queued
        self.waiting: deque[Waiting] = deque()
        layers = [
            StateLayer(str(group), group, np.zeros((BLOCKS, size), np.uint8))
            for group, size in enumerate(STATE_BYTES)
        ]
        rows = [torch.zeros(BLOCKS, size, dtype=torch.uint8) for size in STATE_BYTES]
        own = [replace(layer, rows=of) for layer, of in zip(layers, rows, strict=True)]
        self.states_now, self.states = StateMemory(layers), DeviceStates(own, (), self.link)
        self.state_ring = Ring(3 * self.states.states.bytes, self.link.device)
        self.waiting_states: deque[tuple[StagedStates, Bytes]] = deque()
        self.read: list[tuple[Tensor, Numbers | Bytes]] = []
        self.is_right = True
        self.kept = pool.sequence()
        made = np.random.default_rng(seed).random((2, HEADS, 4 * TOKENS, DIM), np.float32)
        self.kept.append(0, *(one.swapaxes(0, 1) for one in made))
        blocks = made.reshape(2, HEADS, 4, TOKENS, DIM).transpose(2, 1, 3, 0, 4)
        self.stored = blocks.reshape(4, HEADS, TOKENS, 2 * DIM)
        self.reader = PageReader(pool, self.link.device)

    def some(self) -> list[int]:
        return self.random.sample(range(BLOCKS), self.random.randint(1, 4))

    def write(self) -> None:
        for block in self.some():
            made = torch.rand(HEADS, TOKENS, 2 * DIM, generator=self.numbers)
            self.now[block] = made.numpy()
            self.cache[block].copy_(made)
        for own, now in self._states_in(self.random.randrange(BLOCKS)):
            made = torch.randint(0, 256, own.shape, dtype=torch.uint8, generator=self.numbers)
            now[:] = made.numpy()
            own.copy_(made)

    def _states_in(self, block: int) -> Iterator[tuple[Tensor, Bytes]]:
        """The layers' rows, and what they have when all is done that is queued."""
        for layer, own in zip(self.states_now.layers, self.states._rows, strict=True):
            yield own[block], np.asarray(layer.rows[block])

    def look(self) -> None:
        block = self.random.randrange(BLOCKS)
        seen = torch.empty(HEADS, TOKENS, 2 * DIM)
        seen.copy_(self.cache[block])
        self.read.append((seen, self.now[block].copy()))
        for own, now in self._states_in(block):
            row = torch.empty_like(own)
            row.copy_(own)
            self.read.append((row, now.copy()))

    def save(self) -> None:
        blocks = self.some()
        here = self.ring.take(self.memory.bytes_of(len(blocks)))
        if here is not None:
            self.link.begin_gathers()
            staged = self.link.gather(self.memory, self.link.numbers(self.memory, blocks), here)
            self.waiting.append(Waiting(staged, self.now[blocks]))

    def save_states(self) -> None:
        here = self.state_ring.take(self.states.states.bytes)
        if here is not None:
            blocks = dict(enumerate(self.random.sample(range(BLOCKS), len(STATE_BYTES))))
            self.link.begin_gathers()
            staged = self.states.stage(blocks, here)
            self.waiting_states.append((staged, self.states_now.gather(blocks)))

    def land_states(self) -> None:
        if self.waiting_states:
            staged, right = self.waiting_states.popleft()
            self.is_right = np.array_equal(staged.read(), right) and self.is_right
            self.state_ring.give_back()

    def land(self) -> None:
        if not self.waiting:
            return
        one, sequence = self.waiting.popleft(), self.pool.sequence()
        count = len(one.right)
        one.staged.append(self.pool.batch([sequence]), 0, range(count), [0, count], 1 << 20)
        self.ring.give_back()
        found = np.concatenate([np.asarray(rows) for rows in sequence.fetch(0)], axis=-1)
        shape = (HEADS, count, TOKENS, 2 * DIM)
        right = np.array_equal(found.reshape(shape).swapaxes(0, 1), one.right)
        self.is_right = self.is_right and right
        sequence.release()

    def load(self) -> None:
        self.link.begin_loads(self.link.mark())
        free = self.random.sample(range(BLOCKS), 6)
        for _ in range(3):  # one more than there are buffers
            count = self.random.randint(1, 2)
            blocks, first = [free.pop() for _ in range(count)], self.random.randint(0, 2)
            where = (blocks, [0, count], [first])
            self.memory.fetch(self.pool.batch([self.kept]), 0, *where)
            self.now[blocks] = self.stored[first : first + count]
        for block in self.random.sample(range(BLOCKS), 3):
            size = self.states.states.bytes
            found = KeptStates(np.array(self.random.choices(range(256), k=size), np.uint8))
            to = dict.fromkeys(range(len(STATE_BYTES)), block)
            self.states.load(cast(Hit, found), to)
            self.states_now.scatter(found.checkpoint, to)
        self.link.end_loads()

    def load_directly(self) -> None:
        """Out of the pool; what is read is right there."""
        self.link.begin_loads(self.link.mark())
        size = 2 * self.memory.bytes_of(1)
        with self.reader.using():
            rooms = [self.link.room(size) for _ in range(2)]
            free = self.random.sample(range(BLOCKS), 4)
            numbers = self.link.load_numbers(self.memory, free)
            listed = self.reader.pages(0, [(self.kept, 0, 4)])
            reading = Reading(self.reader, listed, numbers)
            for turn, begin in enumerate((0, 2, 3)):
                some = slice(begin, begin + 1 + (begin == 0))
                self.link.read(reading, self.memory, 0, some, rooms[turn % 2])
            self.now[free] = self.stored
            self.link.end_loads()
            self.is_right = self.is_right and not listed.found.any()

    def run(self) -> bool:
        for _ in range(STEPS):
            self.link.fence()
            saves = [self.save, self.save_states]
            lands = [self.land, self.land_states]
            loads = [self.load, self.load_directly]
            for act in self.random.choices([self.write, self.look, *saves, *lands, *loads], k=4):
                act()
                if act in saves:
                    self.link.fence()  # a step begins
        while self.waiting or self.waiting_states:
            self.land()
            self.land_states()
        self.schedule.pass_by(self.schedule.current.end())
        same = [np.array_equal(seen.numpy(), right) for seen, right in self.read]
        return self.is_right and all(same)


def run(seed: int, site: Site | None = None) -> tuple[bool, Schedule]:
    """Whether every copy has the bytes that it should; site: a wait that is left out."""
    layout = KVLayout(layers=1, kv_heads=HEADS, head_dim=DIM, page_tokens=TOKENS, dtype="float32")
    schedule = Schedule(seed)
    schedule.dropped = site
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", checksum=False) as pool:
        with pytest.MonkeyPatch.context() as patch:
            use_references(patch)
            schedule.stand_in(patch)
            engine = Engine(seed, schedule, pool)
            with schedule:
                is_right = engine.run()
        engine.kept.release()
        engine.reader.close()
    return is_right, schedule


@pytest.mark.parametrize("orders", [10, nightly(1000)])
def test_blocks_are_those_of_any_order(seed: int, orders: int) -> None:
    names: dict[str, set[Site]] = {}
    for number in range(orders):
        is_right, schedule = run(seed + number)
        assert is_right, seed + number
        for site in schedule.sites:
            names.setdefault(".".join(site[:3]), set()).add(site)
    assert {name: len(sites) for name, sites in names.items()} == SITES


@pytest.mark.parametrize("name", [name for name in SITES if name not in UNSEEN])
def test_a_wait_that_is_left_out_is_seen(seed: int, name: str) -> None:
    sites = [one for one in run(seed)[1].sites if ".".join(one[:3]) == name]
    assert len(sites) == SITES[name]
    for site in sites:
        assert not all(run(seed + number, site)[0] for number in range(150)), site
