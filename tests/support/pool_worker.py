"""One process of a storm on a shared pool: works on it, and checks all that it reads.

tests/support/storm.py starts them; CXLKV_HOST says on which host.

Every token's numbers follow from (seed, index), so whoever gets a sequence, by handle or by match,
can verify it. A text of segments [(seed, tokens), ...] says what a sequence holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

from cxlkv import CXLPool, Sequence
from cxlkv.arrays import Floats
from cxlkv.errors import PoolFullError, StaleError
from cxlkv.prefix import prefix_keys

LAYERS, HEADS, DIM, PAGE_TOKENS = 2, 2, 8, 4
FAMILIES = 24  # texts that every process knows, for publish and match
FAMILY_TOKENS = 5 * PAGE_TOKENS
TAIL_END = 3 * PAGE_TOKENS + 2  # where some of them are published up to, with a tail
TOKENS_MAX = 60
REPORT_EVERY = 100

Segments = list[tuple[int, int]]


def token_numbers(segments: Segments, layer: int, kind: int) -> Floats:
    """[tokens, HEADS, DIM]: whole numbers below 2**24, mixed from seed, index and place."""
    seeds = np.repeat(
        np.array([s for s, _ in segments], np.uint64), np.array([n for _, n in segments], np.intp)
    )
    starts = np.cumsum([0] + [n for _, n in segments])
    index = np.arange(starts[-1], dtype=np.uint64)
    place = np.arange(HEADS * DIM, dtype=np.uint64) + np.uint64(1000 * layer + 100 * kind)
    word = seeds[:, None] * np.uint64(0x9E3779B97F4A7C15)
    word = word + index[:, None] * np.uint64(0xBF58476D1CE4E5B9) + place * np.uint64(0x94D049BB)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return (word >> np.uint64(40)).astype(np.float32).reshape(-1, HEADS, DIM)


def cut(segments: Segments, tokens: int) -> Segments:
    kept: Segments = []
    for seed, count in segments:
        take = min(count, tokens)
        if take:
            kept.append((seed, take))
        tokens -= take
    return kept


def length(segments: Segments) -> int:
    return sum(count for _, count in segments)


class Torn(AssertionError):
    """A sequence does not hold what was written to it."""


def verify(sequence: Sequence, segments: Segments) -> None:
    tokens = length(segments)
    if len(sequence) != tokens:
        raise Torn(f"{len(sequence)} tokens, wanted {segments}")
    for layer in range(LAYERS if tokens else 0):
        got = sequence.fetch(layer)
        for kind in (0, 1):
            rows = np.asarray(got[kind]).transpose(1, 2, 0, 3).reshape(-1, HEADS, DIM)
            if not np.array_equal(rows[:tokens], token_numbers(segments, layer, kind)):
                raise Torn(f"layer {layer}, kind {kind} of {segments}: pages {sequence.pages}")


class Worker:
    def __init__(self, path: str, box: Path, seed: int) -> None:
        lease_s = float(os.environ.get("CXLKV_TEST_LEASE_S", "2"))
        self.pool = CXLPool.open(path, threads=1, lease_s=lease_s)
        self.box = box
        self.random = Random(seed)
        self.name = f"{os.getpid()}-{seed}"
        self.live: list[tuple[Sequence, Segments]] = []
        self.sent: list[tuple[Path, Sequence]] = []
        self.seen: Counter[str] = Counter()
        self.serial = 0

    def fresh_seed(self) -> int:
        self.serial += 1
        return self.random.getrandbits(40) << 16 | self.serial & 0xFFFF

    def step(self) -> None:
        """One operation; a full pool is met by letting something go, and now and then a text that
        is published: else a host whose neighbours have a page of one in each extent gets none."""
        names = ("append", "fork", "verify", "free", "send", "receive", "publish", "match")
        weights = (24, 12, 14, 14, 6, 8, 6, 12)
        name = self.random.choices((*names, "forget", "truncate"), (*weights, 3, 6))[0]
        try:
            getattr(self, name)()
            self.seen[name] += 1
        except PoolFullError:
            self.seen["full"] += 1
            for sequence, segments in self.live:
                if self.random.random() < 0.2:
                    verify(sequence, segments)
            self.free()
            self.settle()
            if self.random.random() < 0.25:
                self.forget()

    def pick(self) -> tuple[Sequence, Segments] | None:
        return self.random.choice(self.live) if self.live else None

    def write(self, sequence: Sequence, segments: Segments, seed: int, count: int) -> None:
        """Appends `count` tokens of `seed`, layer by layer; undoes a half step when full."""
        longer = [*segments, (seed, count)]
        before = length(segments)
        try:
            for layer in range(LAYERS):
                k, v = (token_numbers(longer, layer, kind)[before:] for kind in (0, 1))
                sequence.append(layer, k, v)
        except PoolFullError:
            if sequence.tokens(0) != before:
                raise Torn("a full pool left half an append behind") from None
            raise
        segments.append((seed, count))

    def append(self) -> None:
        chosen = self.pick()
        if chosen is None or len(self.live) < 6:
            chosen = (self.pool.sequence(), [])
            self.live.append(chosen)
        sequence, segments = chosen
        count = self.random.randrange(1, 12)
        if length(segments) + count <= TOKENS_MAX:
            self.write(sequence, segments, self.fresh_seed(), count)

    def fork(self) -> None:
        chosen = self.pick()
        if chosen is None or len(self.live) > 12:
            return
        child, segments = chosen[0].fork(), list(chosen[1])
        self.live.append((child, segments))
        if length(segments) < TOKENS_MAX:
            self.write(child, segments, self.fresh_seed(), 1)

    def verify(self) -> None:
        chosen = self.pick()
        if chosen:
            verify(*chosen)

    def truncate(self) -> None:
        if self.live:
            index = self.random.randrange(len(self.live))
            sequence, segments = self.live[index]
            tokens = self.random.randrange(length(segments) + 1)
            sequence.truncate(tokens)
            segments[:] = cut(segments, tokens)

    def free(self) -> None:
        if self.live:
            index = self.random.randrange(len(self.live))
            sequence, segments = self.live.pop(index)
            verify(sequence, segments)
            sequence.release()

    # A handle is a file in the box, NAME.box, until somebody takes it, and then NAME.PID.taken
    # until that process has adopted it or is dead: so long the sender keeps the sequence.

    def send(self) -> None:
        self.settle()
        chosen = self.pick()
        if chosen is None or len(self.sent) > 4:
            return
        kept = chosen[0].fork()
        handle, segments = kept.handle, chosen[1]
        self.serial += 1
        place = self.box / f"{self.name}-{self.serial}"
        text = json.dumps({"handle": handle.hex(), "segments": segments, "sender": os.getpid()})
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
        segments = [(int(s), int(n)) for s, n in letter["segments"]]
        try:
            sequence = self.pool.adopt(bytes.fromhex(letter["handle"]))
        except StaleError:
            if is_alive(letter["sender"]):
                raise
            self.seen["stale"] += 1
        else:
            verify(sequence, segments)
            self.seen["adopted"] += 1
            self.live.append((sequence, segments))
        finally:
            taken.unlink()
        if len(self.live) > 14:
            self.free()

    def family(self) -> tuple[int, Segments, list[int]]:
        seed = 1 + self.random.randrange(FAMILIES)
        return seed, [(seed, FAMILY_TOKENS)], token_ids(seed)

    def publish(self) -> None:
        """One in three of a text that ends within a page: with its tail."""
        seed, _, token_ids = self.family()
        sequence = self.pool.sequence()
        self.write(sequence, [], seed, FAMILY_TOKENS)
        tail = self.random.random() < 0.34
        ids = token_ids[: TAIL_END if tail else FAMILY_TOKENS]
        self.seen["published"] += self.pool.publish_prefix(sequence, ids, tail=tail)
        self.seen["tails"] += tail
        sequence.release()

    def match(self) -> None:
        _, segments, token_ids = self.family()
        with self.pool.match_prefix(token_ids) as hit:
            self.seen["tail_hits"] += hit.tokens % PAGE_TOKENS > 0
            if hit:
                sequence = hit.sequence()
                verify(sequence, cut(segments, hit.tokens))
                self.seen["hit"] += 1
                self.live.append((sequence, cut(segments, hit.tokens)))
        if len(self.live) > 14:
            self.free()

    def forget(self) -> None:
        ids = self.family()[2]
        tail = prefix_keys(ids[:TAIL_END], PAGE_TOKENS, tail=True)[-1]
        keys = [*prefix_keys(ids, PAGE_TOKENS), tail]
        if self.random.random() < 0.5:
            self.pool.admin.pin(keys)
        self.seen["forgotten"] += self.pool.forget(keys)

    def finish(self) -> None:
        while self.live:
            self.free()
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
        sequence = self.pool.sequence()
        self.write(sequence, [], seed, FAMILY_TOKENS)
        say(publishing=seed)
        pages = self.pool.publish_prefix(sequence, token_ids(seed))
        say(published=seed)
        if pages != FAMILY_TOKENS // PAGE_TOKENS:
            raise Torn(f"{pages} pages of {seed} published")
        sequence.release()
        self.own.append(seed)
        if len(self.own) > 3:
            forgotten = self.own.pop(0)
            say(forgotten=forgotten)
            self.pool.forget(prefix_keys(token_ids(forgotten), PAGE_TOKENS))


def token_ids(seed: int) -> list[int]:
    return [seed * 1000 + i for i in range(FAMILY_TOKENS)]


def say(**words: object) -> None:
    """One write, which no kill cuts in two."""
    os.write(1, json.dumps(words).encode() + b"\n")


def is_alive(pid: int) -> bool:
    """False for a zombie as well: the pool takes its pages back before its parent has waited."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


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
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            worker = Worker(path, box, seed + 1 + count)
            while True:
                worker.step()
                os.write(theirs, b"x")
        os.close(theirs)
        wanted = random.randrange(1, 120)
        while wanted > 0:
            got = os.read(ours, wanted)
            if not got:
                break  # it failed: its exit status says so below
            wanted -= len(got)
        for _ in range(random.randrange(4000)):
            pass
        os.kill(child, signal.SIGKILL)
        os.close(ours)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"victim {count} ended by itself: status {status}")
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
