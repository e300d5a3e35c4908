"""The pool on the true Linux drivers: guests in QEMU that share memory. `make test-drivers`.

Exit status 0: all scenarios passed, 1: one failed, 77: what they need is not here; the output says
why. docs/project/drivers.md says what this proves and what it cannot.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.qemu.guest.answering import SEEDS, STEPS, answers_alone
from tests.qemu.image import Image, Missing, prepare
from tests.qemu.machine import (
    CHECKOUT,
    Failed,
    Guest,
    Shape,
    fake_nodes,
    networked,
    own_memory,
    shared_memory,
    two_nodes,
)

MEMORY_BYTES = 256 << 20
FOLDER = CHECKOUT / "build/drivers"
SKIPPED = 77
WAIT_LIMIT_S = 420.0
WAIT_STEP_S = 0.05
QUEUE_LIMIT_S = 60.0


class Host:
    """Guests of one scenario, and a memory that they may share, which lasts while this does."""

    def __init__(self, image: Image, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._image = image
        self.folder = folder
        self.memory = os.memfd_create("cxlkv-drivers")
        os.ftruncate(self.memory, MEMORY_BYTES)
        self._guests: list[Guest] = []
        self._began = time.monotonic()

    def boot(self, name: str, shape: Shape | None = None) -> Guest:
        """A guest; without a shape of its own it shares the memory."""
        self.tell(f"boot {name}")
        shape = shape or self.sharing(MEMORY_BYTES)
        guest = Guest(self._image, self.folder, name, self.folder.name, shape)
        self._guests.append(guest)
        return guest

    def sharing(self, memory_bytes: int) -> Shape:
        """A guest to which the shared memory has `memory_bytes`."""
        return shared_memory(f"/proc/{os.getpid()}/fd/{self.memory}", memory_bytes)

    def wait_for(self, step: str) -> None:
        """Until a guest has said `step`; raises Failed when one ends badly, or time is up."""
        self._wait((self.folder / step).exists, repr(step))

    def wait(self, guest: Guest) -> None:
        """Until `guest` has powered off."""
        self._wait(guest.has_ended, f"end of guest {guest.name}")

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while True:
            alive = [guest for guest in self._guests if not guest.has_ended()]
            if is_there():
                return
            if not alive or time.monotonic() > deadline:
                limit = f"within {WAIT_LIMIT_S:.0f} s" if alive else "before all guests ended"
                lines = "\n".join(guest.last_lines() for guest in alive or self._guests)
                raise Failed(f"no {what} {limit}\n{lines}")
            time.sleep(WAIT_STEP_S)

    def log(self, name: str) -> str:
        """What guest `name` has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def say(self, step: str) -> None:
        """All guests see that the host has come to `step`."""
        self.tell(step)
        (self.folder / step).touch()

    def tell(self, what: str) -> None:
        print(f"  {time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def close(self) -> None:
        for guest in self._guests:
            guest.kill()
        for script in self.folder.glob("*.sh"):
            script.unlink()  # it names folders of this machine
        os.close(self.memory)


def device(host: Host) -> None:
    """A pool on /dev/dax0.0: made by one guest, read by another, refused where it does not fit."""
    a, b = host.boot("a"), host.boot("b")
    host.wait_for("published")
    host.tell("a has published")
    host.wait(b)
    host.tell("b has read the same bytes")
    host.wait(host.boot("c", host.sharing(MEMORY_BYTES // 2)))
    host.tell("c, with half of the memory, was refused")
    host.say("all have read")
    host.wait(a)
    host.tell("a removed the pool; the device became RAM and came back")


def sharing(host: Host) -> None:
    """Two hosts in one pool: one of them fails while it writes, and comes back."""
    a, b = host.boot("a"), host.boot("b")
    host.wait_for("b holds what a published")
    host.wait_for("a keeps writing")
    host.tell("b has matched and read while a lives; a writes more")
    lines = Lines(host)
    queued = stop_in_queue(a, lines)
    a.kill()
    where = "in the queue for the pool's lock" if queued else "outside of the lock"
    host.tell(f"a was killed {where}")
    host.say("a is dead")
    host.wait_for("b has published")
    fenced = lines.fenced(by=1, host=0)
    if queued and not fenced:
        raise Failed("host b passed over host a in the queue, and did not fence it")
    host.tell("b still reads what it held, has published its own, and owns all that is not a's")
    host.tell(f"b has {'' if fenced else 'not '}fenced a")
    a = host.boot("a")
    host.wait_for("a is back")
    host.tell("a came back: it reads its own earlier pages, and those of b; b gave it memory")
    host.wait(a)
    host.wait(b)
    host.tell("both have published again, both checks were clean; a left, and b took the rest")


class Lines:
    """What two hosts say in lines of their own: docs/reference/memory-layout.md, host_lines.h."""

    LINE_BYTES, LOCK_LINE, FENCE_LINES = 64, 2, 4
    FENCED = 2

    def __init__(self, host: Host):
        text = (host.folder / "geometry").read_text()
        geometry = json.loads(text)
        self._first, self._block = geometry["hosts_offset"], geometry["host_block_bytes"]
        self._memory = mmap.mmap(host.memory, MEMORY_BYTES)

    def _word(self, host: int, line: int, word: int = 0) -> int:
        at = self._first + host * self._block + line * self.LINE_BYTES + word * 8
        return int.from_bytes(self._memory[at : at + 8], "little")

    def queues(self, host: int) -> bool:
        """It draws a ticket for the lock between hosts, or has one."""
        return self._word(host, self.LOCK_LINE) & (1 << 40) - 1 != 0

    def fenced(self, by: int, host: int) -> bool:
        word = self._word(by, self.FENCE_LINES, host)
        return word >> 40 != 0 and word >> 38 & 3 == self.FENCED


def stop_in_queue(a: Guest, lines: Lines) -> bool:
    """Stop the guest where a death is worst. False when that never came: it stands elsewhere."""
    deadline = time.monotonic() + QUEUE_LIMIT_S
    while time.monotonic() < deadline:
        if not lines.queues(0):
            continue
        a.stop()
        if lines.queues(0):
            return True
        a.go_on()
    return False


def litmus(host: Host) -> None:
    """The litmus run between two hosts on the device, and its certificates."""
    guests = [host.boot(name) for name in ("a", "b")]
    for guest in guests:
        host.wait(guest)
    result = json.loads((host.folder / "litmus-a.json").read_text())
    host.tell("both roles found no violation, and their certificates say mode fast")
    for test in ("message passing", "store buffering", "late eviction"):
        rounds, raced, speed, violations = (
            result["metrics"][f"{test}: {what}"]["median"]
            for what in ("rounds", "raced", "speed", "violations")
        )
        print(
            f"            {test}: {rounds:.0f} rounds, {100 * raced:.0f}% raced, "
            f"{violations:.0f} violations; {speed:.0f} rounds/s, functional only"
        )


def handover(host: Host) -> None:
    """Prefill on one host, decode on the other: after the first has let go, and after its death."""
    a, b = host.boot("a"), host.boot("b")
    wanted = [answers_alone(seed) for seed in SEEDS]
    host.wait_for("b has taken over 0")
    host.tell("a has read a context and handed it over; b has taken over")
    host.wait_for("a has handed over 1")
    a.kill()
    host.tell("a has let go of the first, read a second one, handed it over, and was killed")
    host.say("a is dead")
    host.wait(b)
    for number, answers in enumerate(wanted):
        found = json.loads((host.folder / f"answers-{number}").read_text())
        if found != answers:
            raise Failed(f"context {number}: b answered {found}, one host alone {answers}")
    host.tell(f"b answered both as one host alone does: {STEPS} tokens each, greedily")
    for line in re.findall(r".*functional only.*", host.log("a") + host.log("b")):
        print(f"            {line.strip()}")


def engines(host: Host) -> None:
    """vLLM's recorded requests on hosts of one pool, of which one is killed in a save and in a
    load, stopped in a load and in saves, loses its number, has no room."""
    a, b = host.boot("a"), host.boot("b")
    for kind, dead, goes_on in (
        ("save", "a is dead", "b goes on"),
        ("load", "a is dead again", "b has all but what a published"),
    ):
        host.wait_for(f"a stands in a {kind}")
        a.kill()
        host.say(dead)
        host.wait_for(goes_on)
        a = host.boot("a")
    for kind, declared in (("load", "b has fenced a"), ("save", "b has declared a off")):
        host.wait_for(f"a waits in a {kind}")
        a.stop()
        host.say(f"a is stopped in its {kind}")
        host.wait_for(declared)
        a.go_on()
        host.say(f"a goes on in its {kind}")
    host.wait_for("a waits for c")
    a.stop()
    host.wait_for("b has found what a served again")  # c may evict it for a, who will need room
    c = host.boot("c")
    host.wait_for("c has the number of a")
    a.go_on()
    host.say("a goes on beside c")
    host.wait_for("a is back")
    host.tell("a is back; it leaves, b takes all pages, and a needs some")
    for guest in (a, b, c):
        host.wait(guest)


def nodes(host: Host) -> None:
    """The pool on the device, on a kmem node, on weighted nodes, on fsdax; HMAT."""
    host.wait(host.boot("a", two_nodes()))


def suites(host: Host) -> None:
    """The project's tests of pool, select and attend, with all pools on NUMA node 1."""
    guests = [host.boot("two-nodes", two_nodes()), host.boot("numa-fake", fake_nodes())]
    for guest in guests:
        host.wait(guest)
        host.tell(f"{guest.name} has ended")


def rdma(host: Host) -> None:
    """A pool served to another guest over soft RDMA; servers and clients that are killed."""

    def boot(name: str, peer: str) -> Guest:
        """Only a has the device: nothing of a pool on it comes to others but over the network."""
        shape = host.sharing(MEMORY_BYTES) if name == "a" else own_memory()
        return host.boot(name, networked(shape, host.folder, name, peer))

    a, b = boot("a", "b"), boot("b", "a")
    wanted = answers_alone(SEEDS[0])
    host.wait_for("b has answered")
    found = json.loads((host.folder / "answers").read_text())
    if found != wanted:
        raise Failed(f"b answered {found}, one process alone {wanted}")
    host.tell(f"a has read a text, b has pulled its pages, and answered as one process: {STEPS}")
    host.wait_for("b has pulled and pushed")
    host.tell("b has pulled, pushed and selected; functional figures, all is emulated:")
    for line in lines_of(host.folder / "figures"):
        print(f"            {line}")
    host.wait_for("b has a link again")
    host.tell("the link was cut, and b reads on")
    host.wait_for("b reads on again")
    host.tell("the server's process was killed and begun again; b reads on")
    a.kill()
    host.say("a is dead")
    host.wait_for("b saw a's end")
    host.tell("a was killed; b had an error in time")
    a = boot("a", "b")
    host.wait_for("b holds")
    host.tell("a came back, b has pulled again and holds pages")
    b.kill()
    host.say("b is dead")
    host.wait(a)
    host.tell("b was killed; what it held came back")
    host.wait(boot("suite", "nobody"))


SCENARIOS: dict[str, Callable[[Host], None]] = {
    "device": device,
    "litmus": litmus,
    "sharing": sharing,
    "handover": handover,
    "engines": engines,
    "nodes": nodes,
    "rdma": rdma,
    "suites": suites,
}
NO_PROOF = (
    "All guests ran on one coherent machine, in an emulation: this proves what the pool does on "
    "the driver. It cannot show a missing flush, and its times and rates are no figures."
)


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
    began = time.monotonic()
    parts = [line for name in names or list(SCENARIOS) for line in run(image, name)]
    count = Counter(line.split()[0] for line in parts)
    print(NO_PROOF)
    print(*parts, sep="\n")
    print(
        f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped "
        f"in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return 1 if count["FAIL"] else 0


def run(image: Image, name: str) -> list[str]:
    """Its parts: those that its guests told, or itself."""
    print(f"{name}: {inspect.getdoc(SCENARIOS[name])}", flush=True)
    failure = ""
    with closing(Host(image, FOLDER / "run" / name)) as host:
        try:
            SCENARIOS[name](host)
        except Failed as error:
            failure = str(error)
            print(f"{name}: FAILED: {failure}", flush=True)
        told = [line for path in sorted(host.folder.glob("*.parts")) for line in lines_of(path)]
    if failure and not any(line.startswith("FAIL ") for line in told):
        told.append(f"FAIL {name}: {failure.splitlines()[0]}")
    return [re.sub(" ", f" {name}: ", line, count=1) for line in told] or [f"PASS {name}"]


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
