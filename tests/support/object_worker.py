"""One process of a storm on a pool of objects: coherence/test_objects_processes.py starts them.

An object's bytes follow from its name and a number, and it begins with both and its size: whoever
finds one under a name sees whether it is that name's, whole, and of one writer only.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from functools import partial
from random import Random

import numpy as np

from cxlkv import ObjectPool
from cxlkv.arrays import Bytes
from cxlkv.errors import BadArgumentError, PoolFullError
from cxlkv.objects import ABSENT, Lease, Reserved

from .walks import Walk, kill_one

NAMES = 40
SIZE = 1 << 20
HEAD = struct.Struct("<QQQ")  # name, number, bytes
NOISE = np.random.default_rng(1).integers(0, 1 << 63, SIZE // 8, np.uint64)


def content(name: int, number: int) -> Bytes:
    """Most are small; one in four is of up to SIZE bytes, so that a put of it takes a while."""
    mixed = (name << 48 ^ number) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    size = 3 + (mixed >> 40) % (SIZE // 8 - 3) if mixed >> 62 == 0 else 3 + (mixed >> 40) % 1000
    data = NOISE[:size] ^ np.uint64(mixed)
    data[:3] = name, number, 8 * size
    return data.view(np.uint8)


class Torn(AssertionError):
    """What was found under a name is not what somebody stored under it."""


def verify(name: int, found: Bytes | memoryview) -> None:
    data = np.frombuffer(found, np.uint8)
    if data.size < HEAD.size:
        raise Torn(f"{data.size} bytes under the name {name}")
    said, number, size = HEAD.unpack_from(data.data)
    if (said, size) != (name, data.size) or not np.array_equal(content(name, number), data):
        raise Torn(f"{data.size} bytes under the name {name}: it says {said}, {number}, {size}")


def named(names: list[int]) -> list[str]:
    return [f"object {name}" for name in names]


READING = {"get": 20, "ranges": 10, "lease": 15, "release": 15, "sizes": 3}
WRITING = {"put": 20, "replace": 4, "reserve": 8, "publish": 8, "forget": 8, "remove": 3}
WRITING |= {"scrub": 3, "pin": 2}


class Worker(Walk):
    """Steps of any kind. held: with the names of a lease's objects; of a reservation, its bytes."""

    def __init__(self, path: str, seed: int, threads: int, reads_only: bool = False) -> None:
        super().__init__(Random(seed), READING if reads_only else READING | WRITING)
        self.pool = ObjectPool.open(path, threads=threads)
        self.leases: list[tuple[Lease, list[int]]] = []
        self.reserved: list[tuple[Reserved, list[int], list[Bytes]]] = []

    def make_room(self) -> None:
        self.release()
        self.forget()

    def draw(self, most: int = 4) -> list[int]:
        return self.random.choices(range(NAMES), k=self.random.randint(1, most))

    def contents(self, names: list[int]) -> list[Bytes]:
        return [content(name, self.random.getrandbits(40)) for name in names]

    def put(self) -> None:
        names = self.draw()
        self.seen["new"] += int(self.pool.put_batch(named(names), self.contents(names)).sum())

    def replace(self) -> None:
        names = self.draw()
        new = self.pool.put_batch(named(names), self.contents(names), replace=True)
        self.seen["replaced"] += int(new.sum())

    def get(self) -> None:
        """Each into two buffers, one behind the other."""
        names = self.draw()
        out = [np.empty(SIZE, np.uint8) for _ in names]
        middle = self.random.randrange(SIZE)
        sizes = self.pool.get_batch_into(named(names), [[m[:middle], m[middle:]] for m in out])
        for name, size, memory in zip(names, sizes.tolist(), out, strict=True):
            self.check(name, size, memory[:size])

    def check(self, name: int, size: int, found: Bytes | memoryview) -> None:
        if size == ABSENT:
            return
        if size < 0:
            raise Torn(f"the name {name} is damaged")
        verify(name, found)
        self.seen["found"] += 1

    def ranges(self) -> None:
        """Some bytes, and in the same call the head, which says what they must be: by then it may
        be another object, or a shorter one."""
        names = self.draw()
        there = self.pool.object_sizes(named(names)).clip(HEAD.size)
        ends = [self.random.randint(HEAD.size, size) for size in there.tolist()]
        rows, at = [], 0
        for i, end in enumerate(ends):
            begin = self.random.randint(0, end)
            rows += [[i, 0, HEAD.size, at], [i, begin, end - begin, at + HEAD.size]]
            at += HEAD.size + end - begin
        out = np.empty(at, np.uint8)
        try:
            found = self.pool.get_ranges(named(names), rows, out).tolist()
        except BadArgumentError:  # nothing was copied
            self.seen["shorter"] += 1
            return
        for name, head, size, row in zip(names, found[::2], found[1::2], rows[1::2], strict=True):
            if head != ABSENT or size != ABSENT:
                _, begin, count, at = row
                self.check_range(name, out[at - HEAD.size : at], begin, out[at : at + count])

    def check_range(self, name: int, head: Bytes, begin: int, found: Bytes) -> None:
        said, number, size = HEAD.unpack_from(head.data)
        wanted = content(name, number)
        if (said, size) != (name, wanted.size):
            raise Torn(f"the name {name} says {said}, {number}, {size}")
        if not np.array_equal(wanted[begin : begin + found.size], found):
            raise Torn(f"{found.size} bytes at {begin} of the name {name}, number {number}")
        self.seen["ranges found"] += 1

    def sizes(self) -> None:
        names = self.draw()
        for name, size in zip(names, self.pool.object_sizes(named(names)).tolist(), strict=True):
            if size != ABSENT and size < HEAD.size:
                raise Torn(f"{size} bytes under the name {name}")

    def lease(self) -> None:
        if len(self.leases) > 5:
            self.release()
        names = self.draw()
        lease = self.pool.lease(named(names))
        self.leases.append((lease, names))
        self.check_lease(lease, names)

    def check_lease(self, lease: Lease, names: list[int]) -> None:
        """Those in several slots have no view."""
        if ((lease.sizes > 0) & (lease.addresses == 0)).any():
            self.seen["leased in slots"] += 1
            return
        for name, size, view in zip(names, lease.sizes.tolist(), lease.views, strict=True):
            self.check(name, size, view if view is not None else memoryview(b""))

    def reserve(self) -> None:
        if len(self.reserved) > 2:
            self.release()
        names = self.draw()
        contents = self.contents(names)
        while max(one.size for one in contents) > self.pool.layout.page_tokens:
            contents = self.contents(names)
        reserved = self.pool.reserve([one.size for one in contents])
        for view, one in zip(reserved.views, contents, strict=True):
            assert view is not None
            view[:] = one.data
        self.reserved.append((reserved, names, contents))

    def publish(self) -> None:
        """Some of the places; nobody but us may have written to them until then."""
        if not self.reserved:
            return
        reserved, names, contents = self.random.choice(self.reserved)
        for view, one in zip(reserved.views, contents, strict=True):
            if view != one.data:
                raise Torn("somebody wrote to a reservation")
        places = [i for i in range(len(names)) if self.random.random() < 0.7]
        new = reserved.publish(named([names[i] for i in places]), places)
        self.seen["published"] += int(new.sum())

    def release(self) -> None:
        """A lease's objects are what they were when it was taken, whoever forgot them."""
        if self.leases:
            lease, names = self.leases.pop(self.random.randrange(len(self.leases)))
            self.check_lease(lease, names)
            lease.release()
        if self.reserved:
            self.reserved.pop(self.random.randrange(len(self.reserved)))[0].release()

    def forget(self) -> None:
        self.seen["forgotten"] += self.pool.forget(named(self.draw()))

    def remove(self) -> None:
        codes = self.pool.admin.remove_objects(named(self.draw()))
        self.seen["removed"] += int((codes == 0).sum())

    def scrub(self) -> None:
        self.seen["scrubbed"] += sum(self.pool.admin.scrub(named(self.draw(2))))

    def pin(self) -> None:
        admin = self.pool.admin
        (admin.pin if self.random.random() < 0.5 else admin.unpin)(named(self.draw()))

    def finish(self) -> None:
        while self.leases or self.reserved:
            self.release()
        self.pool.close()


# ---- who is killed ----


def until_holding(worker: Worker) -> None:
    while not (worker.leases and worker.reserved):
        worker.step()


def put_large(worker: Worker) -> None:
    """Puts of a few large objects and nothing else, without end."""
    names = worker.random.sample(range(NAMES), 4)
    objects = [large(name, worker.random) for name in names]
    while True:
        worker.pool.forget(named(names))
        try:
            worker.pool.put_batch(named(names), objects)
        except PoolFullError:
            worker.make_room()


def large(name: int, random: Random) -> Bytes:
    while (made := content(name, random.getrandbits(40))).size < SIZE // 2:
        pass
    return made


MOMENTS = ("any", "holding", "putting")


def victim(path: str, seed: int, threads: int, moment: str, ready: int) -> None:
    worker = Worker(path, seed, threads)
    for _ in range(worker.random.randrange(60)):
        worker.step()
    if moment == "holding":
        until_holding(worker)
    os.write(ready, b"x")
    while moment == "holding":
        signal.pause()
    if moment == "putting":
        put_large(worker)
    while True:
        worker.step()


def victims(path: str, seed: int, threads: int, kills: int) -> None:
    """Forks workers and kills each, up to 3 ms after it says that it is where it shall die."""
    random = Random(seed)
    for count in range(kills):
        moment = MOMENTS[count % len(MOMENTS)]
        act = partial(victim, path, seed + 1 + count, threads, moment)
        kill_one(act, 1, random, 3e-3, f"victim {count}, {moment},")
        say(killed=moment)


# ---- who works on ----


def work(path: str, seed: int, threads: int, reads_only: int) -> None:
    """Until SIGTERM, then gives all back. At SIGUSR1 it says what it has seen so far."""
    ended: list[int] = []
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    worker = Worker(path, seed, threads, bool(reads_only))
    say(ready=True)
    while not ended:
        worker.step()
        if asked:
            asked.clear()
            say(seen=worker.seen)
    worker.finish()
    say(seen=worker.seen)


def put_once(path: str, seed: int, threads: int, count: int) -> None:
    """One put of that many large objects; then it waits for its end."""
    worker = Worker(path, seed, threads)
    objects = [large(name, worker.random) for name in range(count)]
    say(ready=True)
    worker.pool.put_batch(named(list(range(count))), objects)
    signal.pause()


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    command, where, *numbers = sys.argv[1:]
    commands = {"work": work, "victims": victims, "put_once": put_once}
    commands[command](where, *map(int, numbers))
