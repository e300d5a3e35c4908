"""The pool on the true Linux drivers: guests in QEMU that share memory. `make test-drivers`.

Exit status 0: all scenarios passed, 1: one failed, 77: what they need is not here; the output says
why. docs/drivers.md says what this proves and what it cannot.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cxlkv.emulation.qemu.image import Image, Missing, prepare
from cxlkv.emulation.qemu.machine import CHECKOUT, Failed, Guest

MEMORY_BYTES = 256 << 20
FOLDER = CHECKOUT / "build/drivers"
SKIPPED = 77


class Host:
    """Guests over one memory, which lasts while this does, whatever becomes of them."""

    def __init__(self, image: Image, folder: Path, module: str):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._image = image
        self._folder = folder
        self._module = module
        self._memory = os.memfd_create("cxlkv-drivers")
        os.ftruncate(self._memory, MEMORY_BYTES)
        self._guests: list[Guest] = []
        self._began = time.monotonic()

    def boot(self, name: str, memory_bytes: int = MEMORY_BYTES) -> Guest:
        self.tell(f"boot {name}")
        memory = f"/proc/{os.getpid()}/fd/{self._memory}"
        guest = Guest(self._image, self._folder, name, self._module, memory, memory_bytes)
        self._guests.append(guest)
        return guest

    def say(self, step: str) -> None:
        """All guests see that the host has come to `step`."""
        self.tell(step)
        (self._folder / step).touch()

    def tell(self, what: str) -> None:
        print(f"  {time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def close(self) -> None:
        for guest in self._guests:
            guest.kill()
        os.close(self._memory)


def device(host: Host) -> None:
    """A pool on /dev/dax0.0: made by one guest, read by another, refused where it does not fit."""
    a, b = host.boot("a"), host.boot("b")
    a.wait_for("published")
    host.tell("a has published")
    b.wait()
    host.tell("b has read the same bytes")
    host.boot("c", MEMORY_BYTES // 2).wait()
    host.tell("c, with half of the memory, was refused")
    host.say("all have read")
    a.wait()
    host.tell("a removed the pool; the device became RAM and came back")


def sharing(host: Host) -> None:
    """Two hosts in one pool: one of them fails while it writes, and comes back."""
    a, b = host.boot("a"), host.boot("b")
    b.wait_for("b holds what a published")
    a.wait_for("a keeps writing")
    host.tell("b has matched and read while a lives; a writes more")
    a.kill()
    host.say("a is dead")
    b.wait_for("b has published")
    host.tell("b still reads what it held, and has published its own")
    a = host.boot("a")
    a.wait()
    host.tell("a came back: it reads its own earlier pages, and those of b")
    b.wait()


def why_not_sharing() -> str | None:
    from cxlkv import CXLPool  # the package needs its C core

    if "host" in inspect.signature(CXLPool.create).parameters:
        return None
    return 'CXLPool.create has no `host` yet: sharing="software" is not built'


SCENARIOS: dict[str, Callable[[Host], None]] = {"device": device, "sharing": sharing}
REASONS: dict[str, Callable[[], str | None]] = {"sharing": why_not_sharing}


@contextmanager
def hosting(image: Image, name: str) -> Iterator[Host]:
    host = Host(image, FOLDER / "run" / name, name)
    try:
        yield host
    finally:
        host.close()


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(SCENARIOS))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
        return 2
    try:
        image = prepare(FOLDER)
    except Missing as error:
        print(f"skipped: {error}")
        return SKIPPED
    failed = False
    for name in names or list(SCENARIOS):
        reason = REASONS[name]() if name in REASONS else None
        if reason is not None:
            print(f"skipped: {name}: {reason}")
            continue
        print(f"{name}: {inspect.getdoc(SCENARIOS[name])}", flush=True)
        try:
            with hosting(image, name) as host:
                SCENARIOS[name](host)
            print(f"{name}: passed", flush=True)
        except Failed as error:
            failed = True
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
