"""Ctrl-C at any moment of any public call that takes or gives back something: nothing is lost.

Each of CASES is a call and what settles it: a caller who was interrupted drops what he has, and
releases again what he was about to release. After that the pool holds what it held before.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, ObjectPool, Sequence, object_keys
from cxlkv.errors import BadArgumentError
from cxlkv.machine.lifetime import Closing
from cxlkv.tiers import Tiers
from cxlkv.tiers.local import LocalTier
from cxlkv.transport.server import Server

from .support.interrupting import Alarms, alarms, interrupted_at, median_s
from .support.lengths import nightly
from .support.texts import SMALL, grown

OBJECTS = KVLayout.objects("4KiB")
IDS = np.arange(30)
INTERRUPTS, INTERRUPTS_QUICK = 10_000, 100
PLACES_MAX = 120

pytestmark = [
    # A cold tier that nobody can close any more is closed by Python, which says so.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600, method="thread"),  # SIGALRM is ours
]


class World:
    """Two pools with something in them, and what calls leave behind."""

    def __init__(self, folder: Path, path: Path):
        self.folder = folder
        self.pool = CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB", threads=1)
        self.objects = ObjectPool.create("anonymous:", layout=OBJECTS, capacity="4MiB", threads=1)
        self.path = str(path)
        self.kept: list[object] = []
        self.source = self.grown()
        self.pool.publish_prefix(self.source, IDS, tail=True)
        self.handle = self.source.handle
        self.objects.put("there", b"x" * 4000)
        self.before = self.held()

    def grown(self) -> Sequence:
        return grown(self.pool, range(len(IDS)))

    def keep(self, what: object) -> None:
        self.kept.append(what)

    def held(self) -> list[int]:
        pools = (self.pool.stats(), self.objects.stats())
        files = len(os.listdir("/proc/self/fd"))
        return [stats[name] for stats in pools for name in ("pages_held", "sequences")] + [files]

    def settle(self) -> None:
        """What is left is what was there before: whatever was kept is dropped."""
        self.kept.clear()

    def end(self) -> None:
        self.settle()
        assert self.held() == self.before
        self.source.release()
        for pool in (self.pool, self.objects):
            report = pool.admin.check(deep=True)
            assert report["clean"], report["problems"]
            pool.close()


Case = tuple[Callable[[], object], Callable[[], object]]


def taking(world: World) -> dict[str, Callable[[], object]]:
    """Calls whose result the caller drops."""
    pool, objects, keep = world.pool, world.objects, world.keep
    few = np.ones((3, 2, 8), np.float32)

    def append() -> None:
        world.grown().truncate(5)

    def batch() -> None:
        both = [world.source.fork(), pool.sequence()]
        together = pool.batch(both)
        for layer in range(SMALL.layers):
            together.append(layer, few, few, [0, 1, 3])
        picked = together.select(0, few[:2], [0, 1, 2], Budget(pages=2))
        together.attend(0, few[:2], [0, 1, 2], picked)
        together.fetch(0, picked)

    def reserve() -> None:
        with objects.reserve([100, 200]) as room:
            view = room.views[0]
            assert view is not None
            view[:] = b"z" * 100

    def lease() -> None:
        with objects.lease(["there", "absent"]) as found:
            assert bytes(found.views[0] or b"") == b"x" * 4000

    return {
        "sequence": pool.sequence,
        "append": append,
        "fork": world.source.fork,
        "handle": lambda: world.source.fork().handle,
        "adopt": lambda: pool.adopt(world.handle),
        "match": lambda: pool.match_prefix(IDS),
        "hit": lambda: pool.match_prefix(IDS).sequence(),
        "publish": lambda: pool.publish_prefix(world.grown(), IDS[::-1], tail=True),
        "batch": batch,
        "lease": lease,
        "reserve": reserve,
        "put": lambda: objects.put_batch(["there", "new"], [b"1", b"2"]),
        "get": lambda: objects.get_into("there", bytearray(4096)),
        "open": lambda: keep(CXLPool.open(world.path, threads=1)),
    }


def giving(world: World) -> dict[str, Case]:
    """Calls that give something back: what was interrupted is done again."""
    pool, objects = world.pool, world.objects
    slot: list[object] = []

    def released(make: Callable[[], object]) -> Case:
        def call() -> None:
            slot[:] = [make()]
            slot[0].release()  # type: ignore[attr-defined]

        def settle() -> None:
            for each in slot:
                each.release()  # type: ignore[attr-defined]
            slot.clear()

        return call, settle

    def alloc() -> None:
        slot.append(pool.pages.alloc(5))

    def free() -> None:
        slot[:] = [pool.pages.alloc(5)]
        pool.pages.free(slot[0])  # type: ignore[arg-type]

    def freed() -> None:
        for pages in slot:
            with suppress(BadArgumentError):  # it was done when the interrupt came
                pool.pages.free(pages)  # type: ignore[arg-type]
        slot.clear()

    def publish() -> None:
        room = objects.reserve([64])
        slot[:] = [room]
        room.publish(["made"])
        room.release_one(0)

    def published() -> None:
        for each in slot:
            each.release()  # type: ignore[attr-defined]
        slot.clear()
        objects.forget(object_keys(["made"]))

    return {
        "sequence.release": released(pool.sequence),
        "hit.release": released(lambda: pool.match_prefix(IDS)),
        "lease.release": released(lambda: objects.lease(["there"])),
        "reserved.release": released(lambda: objects.reserve([1, 2, 3])),
        "publish_objects": (publish, published),
        "pages.alloc": (alloc, freed),
        "pages.free": (free, freed),
    }


def opening(world: World) -> dict[str, Case]:
    """Calls that make and end what is there once, or has a file: its owner closes it."""
    pool = world.pool
    slot: list[object] = []

    def create() -> None:
        path = world.folder / "made.pool"
        slot[:] = [CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1)]

    def created() -> None:
        for each in slot:
            each.close()  # type: ignore[attr-defined]
            CXLPool.remove(world.folder / "made.pool")
        slot.clear()
        assert not (world.folder / "made.pool").exists()

    def near() -> None:
        with LocalTier(pool, "64KiB") as tier:
            slot[:] = [tier]
            tier.step()

    def tiers() -> None:
        cold = world.folder / "cold"
        with Tiers(pool, local="64KiB", cold=cold, cold_capacity="1MiB") as made:
            slot[:] = [made]
            pool.publish_prefix(world.grown(), IDS + 100)
            made.reclaim(pool.stats()["pages_free"] + 2)
            made.match_prefix(IDS + 100).release()

    def closed() -> None:
        for each in slot:
            each.close()  # type: ignore[attr-defined]
        slot.clear()
        with LocalTier(pool, "64KiB"):  # nobody has one any more
            pass

    return {
        "create": (create, created),
        "local": (near, closed),
        "tiers": (tiers, closed),
    }


def cases(world: World) -> dict[str, Case]:
    more = giving(world) | opening(world)
    return {name: (call, world.settle) for name, call in taking(world).items()} | more


NAMES = """
    sequence append fork handle adopt match hit publish batch lease reserve put get open
    sequence.release hit.release lease.release reserved.release publish_objects pages.alloc
    pages.free create local tiers
""".split()


@pytest.fixture
def world(tmp_path: Path, shm_path: Path) -> Iterator[World]:
    made = World(tmp_path, shm_path)
    with CXLPool.create(made.path, layout=SMALL, capacity="4MiB", threads=1):
        made.before = made.held()
        yield made


def test_every_case_has_its_name(world: World) -> None:
    assert sorted(cases(world)) == sorted(NAMES)
    world.end()


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_at_every_place_of_a_call(world: World, name: str, seed: int) -> None:
    """By construction: wherever Python may run a handler within the package; in calls of more than
    PLACES_MAX places, at as many of them."""
    call, settle = cases(world)[name]
    call()  # what is made once, as imports are, is made
    settle()
    world.before = world.held()
    count = interrupted_at(sys.maxsize, call)
    settle()
    assert count > 1
    for n in sorted(random.Random(seed).sample(range(count), min(count, PLACES_MAX))):
        interrupted_at(n, call)
        settle()
        if world.held() != world.before:
            gc.collect()
            assert world.held() == world.before, f"{name}: after an interrupt at place {n}"
    world.end()


def many(world: World, name: str, alarms_: Alarms, wanted: int) -> int:
    """So many interrupts at random times of a call; how many calls that took."""
    call, settle = cases(world)[name]
    call()
    settle()
    world.before = world.held()
    most_s = 1.2 * median_s(call, settle)
    calls = interrupts = 0
    while interrupts < wanted:
        calls += 1
        interrupts += alarms_.interrupted(call, most_s)
        settle()
        if world.held() != world.before:
            gc.collect()
            assert world.held() == world.before, f"{name}: after {interrupts} interrupts"
    return calls


# Python lets none out of what it calls when an object goes: a WeakSet's callback, say.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("wanted", [INTERRUPTS_QUICK, nightly(INTERRUPTS)])
@pytest.mark.parametrize("name", NAMES)
def test_interrupts_at_random_times(world: World, name: str, seed: int, wanted: int) -> None:
    with alarms(random.Random(seed)) as clock:
        calls = many(world, name, clock, wanted)
    world.end()
    print(f"{name}: {wanted} interrupts in {calls} calls, nothing held")


ENDED = ("cxlkv-mover", "cxlkv-serve")  # threads
CLOSED: dict[str, Callable[[CXLPool], Closing]] = {
    "tiers": Tiers,
    "server": lambda pool: Server(pool, ("127.0.0.1", 0), b"a secret of some length"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_close_that_was_interrupted_anywhere_is_called_again(world: World, name: str) -> None:
    """And ends what the first one did not: no lock stays taken."""
    for n in count():
        subject = CLOSED[name](world.pool)
        if isinstance(subject, Tiers):
            subject.start(every_s=10)
        places = interrupted_at(n, subject.close)
        subject.close()
        assert not [each for each in threading.enumerate() if each.name in ENDED]
        if places <= n:
            break
    assert n > 5
