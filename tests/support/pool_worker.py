"""One process of a storm on a shared pool: works on it, and checks all that it reads.

tests/support/storm.py starts them; CXLKV_HOST says on which host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from random import Random

from cxlkv import CXLPool, PoolFullError, Sequence
from cxlkv.errors import StaleError
from cxlkv.prefix import prefix_keys

from . import texts
from .walks import PAGE_TOKENS, TextWalk, kill_one, token_ids

REPORT_EVERY = 100


class Worker(TextWalk):
    """A walk that hands sequences to other processes, through files in a box."""

    def __init__(self, path: str, box: Path, seed: int) -> None:
        lease_s = float(os.environ.get("CXLKV_TEST_LEASE_S", "2"))
        pool = CXLPool.open(path, threads=1, lease_s=lease_s)
        super().__init__(pool, Random(seed), send=6, receive=8)
        self.box = box
        self.name = f"{os.getpid()}-{seed}"
        self.sent: list[tuple[Path, Sequence]] = []
        self.serial = 0

    def make_room(self) -> None:
        for sequence, ids in self.live:
            if self.random.random() < 0.2:
                self.check(sequence, ids)
        super().make_room()
        self.settle()

    # A handle is a file in the box, NAME.box, until somebody takes it, and then NAME.PID.taken
    # until that process has adopted it or is dead: so long the sender keeps the sequence.

    def send(self) -> None:
        self.settle()
        if len(self.sent) > 4:
            return
        sequence, ids = self.pick()
        kept = sequence.fork()
        self.serial += 1
        place = self.box / f"{self.name}-{self.serial}"
        text = json.dumps({"handle": kept.handle.hex(), "ids": ids, "sender": os.getpid()})
        draft = place.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(place.with_suffix(".box"))
        self.sent.append((place, kept))

    def settle(self) -> None:
        """Let go of what was taken."""
        waiting = []
        for place, kept in self.sent:
            if place.with_suffix(".box").exists() or any(map(is_taker_alive, takers(place))):
                waiting.append((place, kept))
            else:
                kept.release()
        self.sent = waiting

    def receive(self) -> None:
        names = [name for name in os.listdir(self.box) if name.endswith(".box")]
        if not names:
            return
        place = self.box / self.random.choice(names)
        taken = place.with_suffix(f".{os.getpid()}.taken")
        try:
            place.rename(taken)
        except FileNotFoundError:
            return  # another was faster
        letter = json.loads(taken.read_text())
        try:
            sequence = self.pool.adopt(bytes.fromhex(letter["handle"]))
        except StaleError:
            if not is_ending(letter["sender"]):
                raise
            self.seen["stale"] += 1
        else:
            self.check(sequence, letter["ids"])
            self.seen["adopted"] += 1
            self.live.append((sequence, letter["ids"]))
        finally:
            taken.unlink()

    def finish(self) -> None:
        super().finish()
        for place, _ in self.sent:
            place.with_suffix(".box").unlink(missing_ok=True)  # nobody may begin to take it now
        while self.sent:
            self.settle()
            os.sched_yield()
        self.pool.close()


class Publisher(Worker):
    """Publishes texts of its own as well, and says so as soon as publish has returned."""

    def __init__(self, path: str, box: Path, seed: int) -> None:
        super().__init__(path, box, seed)
        self.own: list[int] = []

    def step(self) -> None:
        super().step()
        if self.random.random() < 0.2:
            with contextlib.suppress(PoolFullError):
                self.publish_own()

    def publish_own(self) -> None:
        seed = 1000 + self.random.getrandbits(48)
        ids = token_ids(seed)
        sequence = texts.grown(self.pool, ids)
        say(publishing=seed)
        pages = self.pool.publish_prefix(sequence, ids)
        say(published=seed)
        assert pages == len(ids) // PAGE_TOKENS, f"{pages} pages of {seed} published"
        sequence.release()
        self.own.append(seed)
        if len(self.own) > 3:
            forgotten = self.own.pop(0)
            say(forgotten=forgotten)
            self.pool.forget(prefix_keys(token_ids(forgotten), PAGE_TOKENS))


def say(**words: object) -> None:
    """One write, which no kill cuts in two."""
    os.write(1, json.dumps(words).encode() + b"\n")


PF_EXITING = 4  # a flag of a process, linux/sched.h


def stat_of(pid: int) -> tuple[str, int]:
    """Its state and its flags; of none as of one that is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[6])


def is_alive(pid: int) -> bool:
    """False for a zombie as well: the pool takes its pages back before its parent has waited."""
    return stat_of(pid)[0] not in "ZX"


def is_ending(pid: int) -> bool:
    """True before it is a zombie, too: its locks go first, and with them its pages."""
    return not is_alive(pid) or bool(stat_of(pid)[1] & PF_EXITING)


def takers(place: Path) -> list[Path]:
    return list(place.parent.glob(f"{place.name}.*.taken"))


def is_taker_alive(taken: Path) -> bool:
    return is_alive(int(taken.suffixes[0][1:]))


def work(path: str, box: Path, seed: int, operations: int) -> None:
    """`operations` steps, then give all back; says on stdout how far it is."""
    worker = Worker(path, box, seed)
    for done in range(1, operations + 1):
        worker.step()
        if done % REPORT_EVERY == 0:
            print(json.dumps({"done": done}), flush=True)
    worker.finish()
    print(json.dumps({"done": operations, "seen": worker.seen}), flush=True)


def victims(path: str, box: Path, seed: int, kills: int) -> None:
    """Forks workers and kills each after a random number of steps, and a random moment more."""
    random = Random(seed)
    for count in range(kills):

        def act(told: int, seed: int = seed + 1 + count) -> None:
            worker = Worker(path, box, seed)
            while True:
                worker.step()
                os.write(told, b"x")

        kill_one(act, random.randrange(1, 120), random, 2e-4, f"victim {count}")
        print(json.dumps({"done": count + 1}), flush=True)


def publisher(path: str, box: Path, seed: int, _: int) -> None:
    """Until SIGTERM; says first what the pool looks like to a newcomer."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    worker = Publisher(path, box, seed)
    say(stats=worker.pool.stats(), problems=worker.pool.admin.check(deep=True)["problems"])
    while not ended:
        worker.step()
    worker.finish()
    say(seen=worker.seen)


if __name__ == "__main__":
    command, where, letters, number, amount = sys.argv[1:]
    commands = {"work": work, "victims": victims, "publisher": publisher}
    commands[command](where, Path(letters), int(number), int(amount))
