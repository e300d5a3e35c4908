"""State checkpoints of several processes and hosts: whole, or not found; whoever dies, and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.prefix import prefix_keys

from ..conftest import audit
from ..support.checkpoints import (
    Book,
    Bytes,
    Text,
    group,
    layout_of,
    made,
    name,
    pieces,
    rows_named,
)
from ..support.damaging import change_byte
from ..support.lengths import nightly
from ..support.waiting import until
from ..support.walks import kill_one

LAYOUT = layout_of(4, 5000, group(1), group(1, window=6, kv_heads=1, head_dim=20))
TEXT: Text = tuple(range(1, 14))


def number_in(states: Bytes) -> int:
    return int(states[:4].view(np.uint32)[0])


def signed(book: Book, number: int) -> Bytes:
    """A checkpoint that says which one it is."""
    states = made(book, number)
    states[:4] = np.array([number], np.uint32).view(np.uint8)
    return states


def publish(book: Book, text: Text, number: int) -> None:
    sequence = book.grown(book.pool, text)
    book.pool.publish_prefix(sequence, text, states=signed(book, number))
    sequence.release()


def found(book: Book, text: Text) -> tuple[int, int]:
    """Tokens of a hit, and the number of its checkpoint, which is whole."""
    with book.pool.match_prefix(text) as hit:
        if not hit.tokens:
            return 0, 0
        states = hit.read_states()
        number = number_in(states)
        np.testing.assert_array_equal(states, signed(book, number))
        got, wanted = hit.sequence(), book.grown(book.room, (*text[: hit.tokens], 1))
        book.append(got, (*text[: hit.tokens], 1), hit.tokens)
        book.compare(got, wanted)
        got.release()
        wanted.release()
        return hit.tokens, number


def forget_all(book: Book) -> None:
    for end in range(1, 14):
        book.pool.forget(prefix_keys(TEXT[:end], 4, tail=True))


@pytest.fixture
def room() -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        yield pool


# ---- processes ----


@pytest.fixture
def book(path: Path, room: CXLPool) -> Iterator[Book]:
    with CXLPool.create(path, layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        yield Book(pool, room)
        audit(pool)


def texts(random: Random) -> Text:
    return TEXT[: random.randrange(1, 14)]


@pytest.mark.parametrize("kills", [25, nightly(1000)])
def test_a_publisher_is_killed(book: Book, kills: int, seed: int) -> None:
    """What it leaves is a checkpoint, or none; another one is published then."""
    random = Random(seed)
    for kill in range(kills):

        def act(told: int, number: int = 1000 * kill) -> None:
            own = Random(seed + number)
            with CXLPool.open(str(book.pool.path), threads=1) as pool:
                theirs = Book(pool)
                while True:
                    number += 1
                    text = texts(own)
                    publish(theirs, text, number)
                    if own.random() < 0.5:
                        pool.forget(prefix_keys(text, 4, tail=True))
                    os.write(told, b"x")

        kill_one(act, random.randrange(1, 12), random, 1e-3, f"publisher {kill}")
        for end in range(1, 14):
            found(book, TEXT[:end])
        text = texts(random)
        publish(book, text, 1000 * kill)
        assert found(book, text)[0] == len(text)
        audit(book.pool)
        assert book.pool.stats()["pages_held"] == 0
    forget_all(book)
    assert not book.look()
    assert book.pool.stats()["pages_free"] == book.pool.stats()["pages_total"]


@pytest.mark.parametrize("looks", [nightly(150), nightly(10000)])
def test_two_writers_of_one_text(book: Book, looks: int) -> None:
    """A match has the checkpoint of one of them, whole, or none."""
    children = []
    for first in (1000, 2000):
        child = os.fork()
        if child == 0:
            with CXLPool.open(str(book.pool.path), threads=1) as pool:
                theirs, keys = Book(pool), prefix_keys(TEXT, 4, tail=True)
                for number in range(first, first + 100000):
                    publish(theirs, TEXT, number)
                    pool.forget(keys)
            os._exit(1)
        children.append(child)
    seen = set[int]()

    def both_are_seen() -> bool:
        seen.update(found(book, TEXT)[1] // 1000 for _ in range(looks))
        return {1, 2} <= seen

    try:
        until(both_are_seen)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    publish(book, TEXT, 3000)
    assert found(book, TEXT)[0] == 13


# ---- hosts ----


@pytest.fixture(params=["software", "hw_coherent"])
def hosts(request: pytest.FixtureRequest, path: Path, room: CXLPool) -> Iterator[list[Book]]:
    """Two of one pool; both leave no pin."""
    with ExitStack() as stack:
        first = CXLPool.create(
            path, layout=LAYOUT, capacity="8MiB", sharing=request.param, hosts=2, host=0, threads=1
        )
        second = CXLPool.open(path, host=1, threads=1)
        both = [Book(stack.enter_context(pool), room) for pool in (first, second)]
        yield both
        for book in both:
            forget_all(book)
        for book in both:
            found(book, TEXT)  # hears of what the other one has forgotten
        for book in both:
            until(partial(is_free, book), "pages are pinned by nobody that holds them")
            audit(book.pool)


def is_free(book: Book) -> bool:
    book.pool.match_prefix(TEXT).release()
    stats = book.pool.stats()
    return not (stats["pages_held"] or stats["pages_withdrawn"] or stats["pages_published_only"])


def test_another_host_finds_a_checkpoint(hosts: list[Book]) -> None:
    mine, other = hosts
    for end in (6, 8, 13):
        publish(mine, TEXT[:end], end)
        assert found(other, TEXT) == (end, end)
    publish(other, TEXT, 99)  # it is there
    assert found(mine, TEXT) == found(other, TEXT) == (13, 13)
    publish(other, TEXT[:11], 11)  # behind pages of the other's
    assert found(mine, TEXT[:12]) == found(other, TEXT[:12]) == (11, 11)


def test_what_a_host_holds_stays(hosts: list[Book]) -> None:
    """Whatever its owner forgets; a copy that is published meanwhile is another one."""
    mine, other = hosts
    publish(mine, TEXT, 1)
    hit = other.pool.match_prefix(TEXT)
    mine.pool.forget(prefix_keys(TEXT, 4, tail=True))
    assert found(other, TEXT) == (0, 0)
    publish(mine, TEXT, 2)
    np.testing.assert_array_equal(hit.read_states(), signed(other, 1))
    assert found(other, TEXT) == (13, 2)
    np.testing.assert_array_equal(hit.read_states(), signed(other, 1))
    hit.release()


@pytest.mark.parametrize("held", [False, True])
def test_a_damaged_page_of_another_host(hosts: list[Book], held: bool) -> None:
    """A look at the checkpoint leaves no pin, and takes none away from what is held."""
    mine, other = hosts
    publish(mine, TEXT, 1)
    key, part = mine.key(TEXT), mine.states_part
    pages = rows_named(mine, {name(key, part, place) for place in range(30)})["page"]
    page = rows_named(mine, {name(key, part, 2)})["page"][0]
    hit = other.pool.match_prefix(TEXT)
    if not held:
        hit.release()
    change_byte(str(mine.pool.path), pieces(mine, int(page))["header"])
    assert found(other, TEXT) == (0, 0)
    forget_all(mine)
    withdrawn = mine.pool.stats()["pages_withdrawn"]
    assert withdrawn > len(pages) if held else withdrawn == 0
    publish(mine, TEXT, 2)
    if held:
        np.testing.assert_array_equal(hit.read_states(), signed(other, 1))
    hit.release()


def test_pages_of_two_hosts_are_no_checkpoint(hosts: list[Book]) -> None:
    """One place of the first host's checkpoint is evicted, and the second host publishes that of
    its own."""
    mine, other = hosts
    publish(mine, TEXT, 1)
    mine.look()
    key, part = mine.key(TEXT), mine.states_part
    names = [name(key, part, place) for place in range(30)]
    count = len(rows_named(mine, set(names)))
    assert count > 3
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        second = Book(pool)
        publish(second, TEXT, 2)
        packed = np.frombuffer(b"".join(names[:count]), np.uint8).reshape(-1, 16)
        records = np.zeros((count, pool.records.shape[0]), np.uint8)
        assert not pool.records.read(*pool.records.find(packed), records).any()
    for place in range(count):
        rows = rows_named(mine, {names[place]})
        mine.pool.records.forget(rows["page"].copy(), rows["generation"].copy(), False)
        assert found(other, TEXT) == (0, 0)
        assert not other.pool.records.write(records[place : place + 1]).any()
        at_end = (13, 2) if place == count - 1 else (0, 0)
        assert found(mine, TEXT) == found(other, TEXT) == at_end
    publish(mine, TEXT, 3)
    assert found(mine, TEXT) == found(other, TEXT) == (13, 2)


@pytest.mark.parametrize("looks", [60, nightly(3000)])
def test_a_host_frees_while_another_looks(hosts: list[Book], looks: int) -> None:
    mine, other = hosts
    child = os.fork()
    if child == 0:
        with CXLPool.open(str(mine.pool.path), host=0, threads=1) as pool:
            theirs = Book(pool)
            for number in range(1, 1 << 20):
                publish(theirs, TEXT, number)
                pool.forget(prefix_keys(TEXT, 4, tail=True))
        os._exit(1)
    try:
        for _ in range(looks):
            found(other, TEXT)
        until(lambda: found(other, TEXT)[0] > 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    mine.pool.forget(prefix_keys(TEXT, 4, tail=True))
    publish(mine, TEXT, 7)
    assert found(other, TEXT) == (13, 7)
