"""Single calls, timed while another process is at work: `make regress` runs it with both builds.

    python regress_tails.py FOLDER CALLS OUT.npz

put, get, match, publish and append are timed call by call beside a second writer, beside a reap (a
process died, and its references are given back) and beside a rebuild of the host state (a process
died inside the lock). Only what the releases of both builds offer is called, by its public name;
CXLKV_SITE is the folder with the build, instead of the package that is installed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if "CXLKV_SITE" in os.environ:
    sys.meta_path[:] = [one for one in sys.meta_path if "Scikit" not in type(one).__name__]
    sys.path.insert(0, os.environ["CXLKV_SITE"])

import cxlkv
from cxlkv import CXLPool, KVLayout, Sequence
from cxlkv.objects import object_keys
from cxlkv.prefix import PageKeys, prefix_keys

if TYPE_CHECKING:
    from cxlkv import ObjectPool
else:
    ObjectPool = getattr(cxlkv, "ObjectPool", CXLPool)  # up to 0.2 one class was both

PAGES, PAGE_TOKENS, TOKENS = 64, 16, 8192
OBJECT_BYTES, OBJECTS = 64 << 10, 64
MUTEX_OFFSET = 96  # of the lock in the host state, behind its fixed head
BESIDE = ("writer", "reap", "rebuild")
Nanoseconds = npt.NDArray[np.int64]


def timed(
    count: int, call: Callable[[], object], undo: Callable[[], object] = lambda: None
) -> Nanoseconds:
    """Each of `count` calls; what undoes it is not timed."""
    took, now = np.empty(count, np.int64), time.perf_counter_ns
    for i in range(count):
        began = now()
        call()
        took[i] = now() - began
        undo()
    return took


class Objects:
    """A pool of objects of 64 KiB."""

    calls = ("put", "get")

    def __init__(self, path: str, made: bool):
        layout = KVLayout.objects(OBJECT_BYTES)
        self.pool = (
            ObjectPool.create(path, layout=layout, capacity="256MiB", threads=1)
            if made
            else ObjectPool.open(path, threads=1)
        )
        self.data = np.full(OBJECT_BYTES, 7, np.uint8)
        self.names = [f"object {i}" for i in range(OBJECTS)]

    def measure(self, call: str, count: int) -> Nanoseconds:
        pool, hashed = self.pool, object_keys(["one"])
        if call == "put":
            return timed(count, lambda: pool.put("one", self.data), lambda: pool.forget(hashed))
        pool.put("another", self.data)
        out = np.empty_like(self.data)
        return timed(count, lambda: pool.get_into("another", out))

    def write(self) -> None:
        self.pool.put_batch(self.names, [self.data] * OBJECTS)
        self.pool.forget(object_keys(self.names))

    def hold(self) -> object:
        """References that a process leaves behind when it dies."""
        return self.pool.reserve([OBJECT_BYTES] * 8)


class Pages:
    """A pool of K and V: two layers, 8 heads of 128 channels, 16 tokens a page."""

    calls = ("match", "publish", "append")

    def __init__(self, path: str, made: bool):
        layout = KVLayout(
            layers=2, kv_heads=8, head_dim=128, dtype="float16", page_tokens=PAGE_TOKENS
        )
        self.pool = (
            CXLPool.create(path, layout=layout, capacity="256MiB", threads=1)
            if made
            else CXLPool.open(path, threads=1)
        )
        self.rows = np.ones((PAGES * PAGE_TOKENS, 8, 128), np.float16)

    def measure(self, call: str, count: int) -> Nanoseconds:
        pool, sequence = self.pool, self.hold()
        keys = self.keys(first=self.calls.index(call))
        if call == "append":
            row = self.rows[:1]

            def begin_anew() -> None:
                if len(sequence) >= TOKENS:
                    sequence.truncate(0)

            took = timed(count, lambda: sequence.append(0, row, row), begin_anew)
        elif call == "publish":
            took = timed(
                count,
                lambda: pool.publish(sequence, keys, PAGE_TOKENS),
                lambda: pool.forget(keys),
            )
        else:
            pool.publish(sequence, keys, PAGE_TOKENS)
            took = timed(count, lambda: pool.match(keys).release())
            pool.forget(keys)
        sequence.release()
        return took

    def keys(self, first: int) -> PageKeys:
        return prefix_keys(np.arange(first, first + PAGES * PAGE_TOKENS), PAGE_TOKENS)

    def write(self) -> None:
        sequence, keys = self.hold(), self.keys(first=9)
        self.pool.publish(sequence, keys, PAGE_TOKENS)
        self.pool.forget(keys)
        sequence.release()

    def hold(self) -> Sequence:
        sequence = self.pool.sequence()
        for layer in range(2):
            sequence.append(layer, self.rows, self.rows)
        return sequence


KINDS: dict[str, type[Objects | Pages]] = {"objects": Objects, "pages": Pages}


# ---- the other process ----


def take_the_lock(pool_path: str) -> None:
    """That of the host state, which is mapped here beside the pool."""
    mapped = re.findall(r"(?m)^(\w+)-\w+ rw-s 00000000 \S+ \S+ +(/dev/shm/.*)$", maps())
    (address,) = {int(at, 16) for at, path in mapped if path != pool_path}
    assert ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(address + MUTEX_OFFSET)) == 0


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def die(subject: Objects | Pages, path: str, beside: str) -> None:
    """A child of this process does, with what `beside` says."""
    child = os.fork()
    if child == 0:
        held = [subject.hold()] if beside == "reap" else []  # until its end
        if not held:
            take_the_lock(path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def be_beside(beside: str, kind: str, path: str) -> None:
    """Until stdin ends; says when it was so once, and at last how often."""
    subject, times, said = KINDS[kind](path, False), 0, False
    wait_s = 0 if beside == "writer" else 0.001
    with subject.pool as pool:
        while not times or not select.select([sys.stdin], [], [], wait_s)[0]:
            if beside == "writer":
                subject.write()
                times += 1
            else:
                die(subject, path, beside)
                stats = pool.stats()  # whoever comes first gives back, or rebuilds
                times = stats["rebuilds" if beside == "rebuild" else "reaped_processes"]
            if not said and times:
                print("ready", flush=True)
                said = True
        print(times)


@contextmanager
def neighbour(beside: str, kind: str, path: Path) -> Iterator[None]:
    command = [sys.executable, "-P", __file__, "--beside", beside, kind, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"no {beside} beside us")
        yield
        said, _ = process.communicate()
        if process.returncode or int(said) < 1:
            raise SystemExit(f"the {beside} beside us did nothing: {said}")


def main(folder: Path, count: int, out: Path) -> None:
    samples: dict[str, Nanoseconds] = {}
    gc.disable()
    for kind, made in KINDS.items():
        path = folder / f"{kind}.pool"
        subject = made(str(path), True)
        with subject.pool:
            for beside in BESIDE:
                with neighbour(beside, kind, path):
                    for call in subject.calls:
                        samples[f"{call}, {beside}"] = subject.measure(call, count)
        CXLPool.remove(path)
    np.savez(out, **samples)  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[1] == "--beside":
        be_beside(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
