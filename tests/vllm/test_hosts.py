"""Engines of two hosts on one pool: what one publishes the other hits, whatever becomes of either.

On one machine each host number has a host state of its own, so two engines can be two hosts. The
tokens are always those of an engine without a pool.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.errors import BusyError

from ..support.waiting import until
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE
from .forked import Life, Nursery, Tokens

LEASE_S = 1.0
HOSTS = 3
WATCHER = 2  # the test itself

FORMS = pytest.mark.parametrize("attention", ["engine", "pool"])


def texts(seed: int, count: int = 4, tokens: int = 300) -> list[Tokens]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(0, VOCABULARY_SIZE, tokens).tolist() for _ in range(count)]


def whole_blocks(prompt: Tokens) -> int:
    """Tokens of a prompt that can be hit."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Bench:
    """A pool of two hosts, engines that are them, and an engine without a pool."""

    def __init__(self, nursery: Nursery, folder: Path, attention: str):
        self._nursery, self.attention = nursery, attention
        self.path = folder / "shared.pool"
        self._lives: list[Life] = []
        self._stock: Life | None = None

    def begin(self, host: int, **more: object) -> Life:
        extra = {
            "where": str(self.path),
            "capacity": "64MiB",
            "attention": self.attention,
            "sharing": "software",
            "hosts": HOSTS,
            "host": host,
            "lease_s": LEASE_S,
            **more,
        }
        self._lives.append(self._nursery.life(extra))
        return self._lives[-1]

    def wanted(self, prompts: list[Tokens], max_tokens: int = 8) -> list[Tokens]:
        if self._stock is None:
            self._stock = self._nursery.life().ready()
        return [done["tokens"] for done in self._stock.generate(prompts, max_tokens)]

    def open(self, host: int = WATCHER) -> CXLPool:
        return CXLPool.open(self.path, host=host, lease_s=LEASE_S, threads=1)

    def kill_all(self) -> None:
        for life in (*self._lives, *([self._stock] if self._stock else [])):
            life.kill()

    def check_all(self) -> None:
        """When the engines have ended, nothing is held and nothing is wrong."""
        for host in range(HOSTS):
            with self.open(host) as pool:
                report, stats = pool.admin.check(deep=True), pool.stats()
                assert report["clean"], report["problems"]
                assert stats["pages_held"] == stats["pages_withdrawn"] == 0, stats


@pytest.fixture(scope="module")
def nursery(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(model, tmp_path_factory.mktemp("lives")) as made:
        yield made


@pytest.fixture
def bench(nursery: Nursery, pools_folder: Path, attention: str) -> Iterator[Bench]:
    made = Bench(nursery, pools_folder, attention)
    yield made
    made.kill_all()


def check(life: Life, prompts: list[Tokens], wanted: list[Tokens], hits: bool = False) -> None:
    done = life.generate(prompts)
    assert [one["tokens"] for one in done] == wanted
    if hits:
        assert [one["cached"] for one in done] == [whole_blocks(prompt) for prompt in prompts]


@FORMS
def test_an_engine_that_dies_leaves_what_it_has_published(bench: Bench) -> None:
    """Killed while it saves, and while it reads a hit: the other one goes on. The pages that it had
    not published come back with it, or when an operator has said that it is off."""
    one = bench.begin(0).ready()
    other = bench.begin(1).ready()
    first, second, third = texts(1), texts(2), texts(3)
    wanted = bench.wanted([*first, *second, *third])
    check(one, first, wanted[:4])
    check(other, first, wanted[:4], hits=True)
    check(other, second, wanted[4:8])

    for where, prompts in (("save", third), ("load", first)):
        other.forget()
        other.ask(do="signal", where=where, number=signal.SIGKILL)
        for name, prompt in enumerate(prompts):
            other.add(str(name), prompt)
        assert other.has_ended()
        other.kill()
        one.forget()
        check(one, [*first, *second], wanted[:8], hits=True)
        with bench.open() as watcher:
            until(lambda: watcher.admin.hosts()[1].state == "silent")
            assert watcher.admin.check(deep=True)["clean"]
        if where == "save":
            other = bench.begin(1).ready()
            with bench.open(1) as its:
                assert its.stats()["pages_held"] == 0
            check(other, third, wanted[8:])
    with bench.open() as watcher:
        watcher.admin.fence(1, confirmed_off=True)
        assert watcher.admin.hosts()[1].state == "off"
        one.end()
        stats = watcher.stats()
        free = stats["pages_total"] - stats["pages_published"]
        watcher.pages.free(watcher.pages.alloc(free))
        assert watcher.admin.check(deep=True)["clean"]
    bench.check_all()


def stop_in(life: Life, where: str, prompts: list[Tokens], watcher: CXLPool) -> None:
    """In the middle of it, until the others take its host for dead."""
    life.forget()
    life.ask(do="signal", where=where, number=signal.SIGSTOP)
    for name, prompt in enumerate(prompts):
        life.add(str(name), prompt)
    until(lambda: watcher.admin.hosts()[1].state == "silent")


@FORMS
def test_an_engine_that_was_fenced_comes_back_by_itself(bench: Bench, attention: str) -> None:
    """Stopped for longer than a lease while it saves, reads a hit, or decodes: its requests end.
    Who was fenced only has all that it had. Declared off, it opens the pool anew."""
    one, other = bench.begin(0).ready(), bench.begin(1).ready()
    known = texts(1)
    wanted = bench.wanted(known)
    check(one, known, wanted)
    stops = [(off, where) for off in (False, True) for where in ("save", "load", "decode")]
    with bench.open() as watcher:
        for number, (off, where) in enumerate(stops):
            if where == "decode" and attention == "engine":
                continue
            some = texts(2 + number) if where == "save" else known
            expected = bench.wanted(some)
            stop_in(other, where, some, watcher)
            watcher.admin.fence(1, confirmed_off=off)
            if off:  # others write where it was about to
                watcher.pages.free(watcher.pages.alloc(watcher.stats()["pages_free"]))
            os.kill(other.pid, signal.SIGCONT)
            found = [done["tokens"] for done in other.answers(len(some))]
            assert found == expected, (where, off)
            until(lambda: watcher.admin.hosts()[1].state == "live")
            until(lambda: hits_all(other, known))
            if where == "save" and not off:
                one.forget()
                check(one, some, expected, hits=True)
    assert other.log.read_text().count("is open again, as host 1") > 1
    one.end()
    other.end()
    bench.check_all()


def hits_all(life: Life, prompts: list[Tokens]) -> bool:
    life.forget()
    done = life.generate(prompts)
    return [one["cached"] for one in done] == [whole_blocks(prompt) for prompt in prompts]


@FORMS
def test_a_pool_that_is_removed_or_full(bench: Bench) -> None:
    """An engine that has it open keeps it, and another makes a new one. In one that holds a fifth
    of the texts, and that another host has filled, all requests end."""
    one, other = bench.begin(0).ready(), bench.begin(1).ready()
    known, many = texts(1), texts(2, count=24, tokens=500)
    wanted = bench.wanted([*known, *many])
    check(one, known, wanted[:4])
    with pytest.raises(BusyError, match="in use"):
        CXLPool.remove(bench.path)
    bench.path.unlink()
    check(other, known, wanted[:4], hits=True)
    other.end()
    other = bench.begin(1, capacity="6MiB").ready()
    check(other, known, wanted[:4])
    check(one, known, wanted[:4])
    one.end()
    one = bench.begin(0).ready()
    check(one, known, wanted[:4], hits=True)
    for life in (one, other):  # the second one comes when the first has taken all pages
        check(life, many, wanted[4:])
    for life in (one, other):
        for number, prompt in enumerate(many):
            life.add(str(number), prompt)
    for life in (one, other):
        assert [done["tokens"] for done in life.answers(len(many))] == wanted[4:]
        life.forget()
    for life in (one, other):
        life.end()
    bench.check_all()
