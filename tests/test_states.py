"""State checkpoints: published, found and read as a dictionary says; never half, never mixed.

Those of several processes and hosts are in tests/coherence/test_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup, PoolFullError, _core
from cxlkv.errors import (
    BadArgumentError,
    ClosedError,
    CorruptError,
    GeometryError,
    ReleasedError,
    StaleError,
)
from cxlkv.prefix import prefix_keys
from cxlkv.sequence.hit import Hit

from .conftest import audit
from .support.checkpoints import (
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
from .support.damaging import change_byte, poke
from .support.lengths import nightly
from .support.waiting import until

LAYOUTS = {
    "one page": layout_of(4, 700, group(2)),
    "two pages": layout_of(16, 4200, group()),
    "many pages": layout_of(4, 6 * 1792 - 64, group(2)),  # to the last byte
    "windows": layout_of(4, 1500, group(2, window=10), group(1), group(1, window=3)),
    "windows alone": layout_of(8, 900, group(1, window=9), group(1, window=1)),
    "latent": layout_of(
        16, 3000, group(2, kv_heads=1, head_dim=12, value_head_dim=8, values="key_prefix")
    ),
    "unlike groups": layout_of(
        4, 3000, group(2), group(2, window=9, kv_heads=1, head_dim=20, value_head_dim=12)
    ),
    "codes": layout_of(64, 9000, group(2, k_encoding="int8", v_encoding="int8")),
}


class Walk:
    def __init__(self, pool: CXLPool, room: CXLPool, rng: np.random.Generator) -> None:
        self.book, self.pool, self.rng = Book(pool, room), pool, rng
        self.texts: list[Text] = [()]
        self.hits: list[tuple[Hit, Bytes]] = []
        self.counts = dict.fromkeys(("hits", "misses", "tails", "full"), 0)

    def recent(self) -> Text:
        return self.texts[-self.rng.integers(1, min(len(self.texts), 9) + 1)]

    def text(self) -> Text:
        """One goes on from another, at any of its tokens."""
        base = self.recent()
        page_tokens = self.pool.layout.page_tokens
        base = base[: self.rng.integers(len(base) + 1)] if self.rng.random() < 0.6 else base
        more = int(self.rng.integers(1, 2 * page_tokens + 1))
        made = (*base, *map(int, self.rng.integers(0, 3, more)))[: 5 * page_tokens]
        self.texts.append(made)
        return made

    def publish(self) -> None:
        text, states = self.text(), None
        if self.rng.random() < 0.7:
            wanted = self.pool.layout.states
            assert wanted
            states = self.rng.integers(0, 256, wanted.bytes, np.uint8)
        try:
            self.book.publish(text, states, tail=bool(self.rng.integers(2)))
        except PoolFullError:
            self.counts["full"] += 1
            self.evict(12)

    def match(self) -> None:
        hit = self.book.find(self.recent())
        self.counts["hits" if hit.tokens else "misses"] += 1
        self.counts["tails"] += hit.tokens % self.pool.layout.page_tokens > 0
        if hit.tokens and len(self.hits) < 3:
            self.hits.append((hit, hit.read_states()))
        else:
            hit.release()

    def forget(self) -> None:
        self.book.forget(self.recent())

    def evict(self, count: int = 1) -> None:
        rows = self.pool.hotness.published().rows
        if len(rows):
            self.book.evict(self.rng.permutation(rows)[:count])

    def let_go(self) -> None:
        """What a hit holds stays what it is, whatever is forgotten."""
        if self.hits:
            hit, states = self.hits.pop()
            np.testing.assert_array_equal(hit.read_states(), states)
            hit.release()
            with pytest.raises(ReleasedError):
                hit.read_states()

    def step(self) -> None:
        steps = [self.publish, self.match, self.forget, self.evict, self.let_go]
        steps[self.rng.choice(5, p=[0.3, 0.4, 0.06, 0.12, 0.12])]()

    def end(self) -> None:
        """All that was taken is free again."""
        while self.hits:
            self.let_go()
        for text in sorted(self.texts, key=len):
            self.match_one(text)
        self.book.evict(self.pool.hotness.published().rows)

    def match_one(self, text: Text) -> None:
        self.book.find(text).release()


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[CXLPool, CXLPool]]:
    """Two of a layout, with a sketch or without."""
    layout, sketch = LAYOUTS[request.param[0]], request.param[1]
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                CXLPool.create(
                    "anonymous:", layout=layout, capacity="4MiB", sketch=sketch, threads=1
                )
            )
            for _ in range(2)
        ]
        yield made[0], made[1]
        audit(made[0])


CASES = [(one, index % 2 == 0) for index, one in enumerate(LAYOUTS)]


@pytest.mark.parametrize(
    ("pools", "steps"),
    [*[(one, 500) for one in CASES], *[nightly(one, 20000) for one in CASES]],
    indirect=["pools"],
    ids=str,
)
def test_random_walks_agree_with_a_dictionary(
    pools: tuple[CXLPool, CXLPool], steps: int, seed: int
) -> None:
    """In a pool of which few pages are free."""
    pool, walk = pools[0], Walk(*pools, np.random.default_rng(seed))
    total = pool.stats()["pages_free"]
    filler = pool.pages.alloc(total - 90)
    for _ in range(steps):
        walk.step()
    walk.end()
    pool.pages.free(filler)
    assert pool.stats()["pages_free"] == total
    assert walk.counts["hits"], walk.counts
    assert walk.counts["tails"], walk.counts


# ---- what a walk seldom meets ----

WINDOWS = layout_of(4, 500, group(1), group(1, window=3))
TEXT = tuple(range(1, 14))


@pytest.fixture
def book(path: Path, request: pytest.FixtureRequest) -> Iterator[Book]:
    layout: KVLayout = getattr(request, "param", LAYOUTS["many pages"])
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=1) as pool:
        yield Book(pool)
        with suppress(ClosedError):
            audit(pool)


@pytest.mark.parametrize("book", [WINDOWS], indirect=True)
@pytest.mark.parametrize(("tokens", "hit"), [(9, 0), (10, 10), (11, 11)])
def test_a_window_hides_a_gap_behind_it(book: Book, tokens: int, hit: int) -> None:
    """Also one that no whole page behind it hides: page 1 ends with token 7, and the next token
    sees one before it and another."""
    book.publish(TEXT[:tokens], made(book, 1))
    keys = prefix_keys(TEXT, 4)
    book.evict(rows_named(book, {name(keys[1], 1)}))
    book.find(TEXT).release()
    assert book.match(TEXT) == hit


@pytest.mark.parametrize("book", [WINDOWS], indirect=True)
def test_a_tail_of_a_part_that_has_its_page(book: Book) -> None:
    """One part has the page that the tails have become, the other one their copies; where that
    lacks one, the shorter tail is found all the same."""
    book.publish(TEXT[:5], made(book, 1))
    book.publish(TEXT[:6], made(book, 2))
    book.publish(TEXT[:8], None)
    keys, shorter, longer = prefix_keys(TEXT, 4), book.key(TEXT[:5]), book.key(TEXT[:6])
    book.evict(rows_named(book, {name(shorter, 0), name(longer, 0), name(keys[1], 1)}))
    for gone, tokens in ((longer, 6), (shorter, 5), (b"", 0)):
        book.find(TEXT[:8]).release()
        assert book.match(TEXT[:8]) == tokens
        if gone:
            book.evict(rows_named(book, {name(gone, 1)}))


@pytest.mark.parametrize("book", [LAYOUTS["windows alone"]], indirect=True)
def test_a_text_of_which_only_the_end_is_there(book: Book) -> None:
    """The first page that a match finds lies far behind those that it has room for at first."""
    text = tuple(range(1, 8 * 200 + 1))
    book.publish(text, made(book, 1))
    keys = prefix_keys(text, 8)
    behind = {name(key, part) for key in keys[:-1] for part in book.windows}
    book.evict(rows_named(book, behind))
    book.find(text).release()
    assert book.match(text) == len(text)


@pytest.mark.parametrize("gone", [[0], [0, 1, 2], [3], [5], [0, 4], [0, 3, 5]], ids=str)
def test_what_is_left_of_a_checkpoint_is_forgotten(book: Book, gone: list[int]) -> None:
    """Of its end and its beginning; by a scrubbing all."""
    book.publish(TEXT, made(book, 1))
    assert book.state_pages == 6
    book.evict(rows_named(book, {name(book.key(TEXT), 1, place) for place in gone}))
    assert book.pool.match_prefix(TEXT).tokens == 0
    if len(gone) == 1 or gone == [0, 1, 2]:
        book.forget(TEXT)
    else:
        left = len(book.look())
        assert book.pool.admin.scrub(prefix_keys(TEXT, 4, tail=True)) == (left, 0, 0)
    assert not book.look()
    assert book.pool.stats()["pages_free"] == book.pool.stats()["pages_total"]


def test_the_first_page_of_a_checkpoint_goes_first(book: Book) -> None:
    """Each page hangs on the next one, and the last on the text: so eviction, leaves first, makes
    a checkpoint none by its first page, and takes the text's own pages after it."""
    book.publish(TEXT, made(book, 1))
    key, rows = book.key(TEXT), book.pool.hotness.published().rows
    parents = {row["hash"].tobytes(): row["parent"] for row in rows}
    pages = {row["hash"].tobytes(): row["page"] for row in rows}
    chain = [*(name(key, 1, place) for place in range(book.state_pages)), name(key, 0)]
    for page, parent in pairwise(chain):
        assert parents[page] == pages[parent]


def test_more_pages_than_a_checkpoint_may_take() -> None:
    layout = layout_of(1, 1 << 30, LayerGroup(layers=1, kv_heads=1, head_dim=8))
    with pytest.raises(GeometryError, match="takes more than 65536 pages"):
        CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1)


def test_a_lease_ends(book: Book) -> None:
    book.publish(TEXT, made(book, 1))
    hit = book.pool.match_prefix(TEXT, lease_s=0.02)

    def has_ended() -> bool:
        try:
            np.testing.assert_array_equal(hit.read_states(), made(book, 1))
        except StaleError:
            return True
        return False

    until(has_ended)
    book.forget(TEXT)
    assert book.pool.stats()["pages_free"] == book.pool.stats()["pages_total"]


def test_bytes_that_are_no_checkpoint(book: Book) -> None:
    sequence = book.grown(book.pool, TEXT)
    right = made(book, 1)
    wrong: list[Bytes] = [right[:-1], right.view(np.int8), right[None]]
    for states in wrong:
        with pytest.raises(BadArgumentError, match=r"an array of uint8 \[10688\]"):
            book.pool.publish_prefix(sequence, TEXT, states=states)
    with pytest.raises(BadArgumentError, match="one token or more"):
        book.pool.publish_prefix(sequence, (), states=right)
    assert not book.look()
    book.pool.publish_prefix(sequence, TEXT, states=right)
    sequence.release()
    with book.pool.match_prefix(TEXT) as hit:
        for out in (np.empty(10687, np.uint8), np.empty(10688, np.int8)):
            with pytest.raises(BadArgumentError, match="wanted uint8"):
                hit.read_states(out)  # type: ignore[arg-type]
        taken = book.pool.adopt(hit.handle)
        assert len(taken) == 13  # K and V: a handle has no states
        taken.release()


# ---- damage ----


KINDS = ("digest", "sketch", "keys", "values", "header", "sums", "descriptor")


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_is_found(book: Book, kind: str, place: int) -> None:
    """A miss, or an error when it is read; a check names the page; a repair makes room for another
    checkpoint, and what is published then is found."""
    book.publish(TEXT, made(book, 1))
    of_page = rows_named(book, {name(book.key(TEXT), 1, place % book.state_pages)})
    page = int(of_page["page"][0])
    at = pieces(book, page)[kind]
    change_byte(str(book.pool.path), at + (0 if kind in ("header", "sums", "descriptor") else 20))
    hit = book.pool.match_prefix(TEXT)
    is_table = place == 0 and kind == "digest"
    assert hit.tokens == (0 if is_table or kind in ("header", "descriptor") else 13)
    if hit.tokens:
        with pytest.raises(CorruptError, match=f"page {page},"):
            hit.read_states()
    hit.release()
    report = book.pool.admin.check(deep=True)
    assert any(f"page {page}" in line for line in report["problems"]), report
    book.pool.admin.check(deep=True, repair=True)
    audit(book.pool)
    found = book.pool.match_prefix(TEXT)
    assert found.tokens == (13 if kind == "descriptor" else 0)
    if found.tokens:
        np.testing.assert_array_equal(found.read_states(), made(book, 1))
    found.release()
    book.there = book.look()
    book.publish(TEXT, made(book, 2))
    book.find(TEXT).release()


def test_a_damaged_tail_is_a_shorter_hit(book: Book) -> None:
    book.publish(TEXT[:7], made(book, 1))
    book.publish(TEXT, made(book, 2))
    tail = rows_named(book, {name(book.key(TEXT), 0)})
    at = pieces(book, int(tail["page"][0]))["keys"]
    change_byte(str(book.pool.path), at)
    with book.pool.match_prefix(TEXT) as hit:
        assert hit.tokens == 7
        np.testing.assert_array_equal(hit.read_states(), made(book, 1))
    assert book.pool.stats()["pages_held"] == 0
    book.pool.admin.check(deep=True, repair=True)


OFFSETS = {"feature": 2072, "bytes": 2088, "digest": 2096, "crc": 2108}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("bytes", 0, "the feature without states"),
        ("feature", 0, "has states without the feature"),
        ("bytes", 1 << 37, "up to 68719476736 are kept"),
        ("bytes", (1 << 64) - 1, "up to 68719476736 are kept"),
        ("bytes", 1 << 36, "takes more than 65536 pages"),
        ("bytes", 10687, ""),
        ("bytes", 64, ""),  # of one page
        ("bytes", 1 << 24, ""),
        ("digest", 8, ""),
    ],
)
def test_a_superblock_of_other_states(
    book: Book, path: Path, field: str, value: int, text: str
) -> None:
    """It is refused; or no checkpoint is found: each says what its bytes are."""
    book.publish(TEXT, made(book, 1))
    book.pool.close()
    block = bytearray(poke(path, 0, b"", 4096))
    size = 4 if field == "digest" else 8
    block[OFFSETS[field] : OFFSETS[field] + size] = value.to_bytes(size, "little")
    sum_ = _core.crc32c(bytes(block[: OFFSETS["crc"]]))
    block[OFFSETS["crc"] : OFFSETS["crc"] + 4] = sum_.to_bytes(4, "little")
    before = poke(path, 0, block)
    if text:
        with pytest.raises(GeometryError, match=text):
            CXLPool.open(path, threads=1)
    else:
        with CXLPool.open(path, threads=1) as pool, pool.match_prefix(TEXT) as hit:
            assert hit.tokens == 0
    poke(path, 0, before)
    with CXLPool.open(path, threads=1) as pool, pool.match_prefix(TEXT) as hit:
        np.testing.assert_array_equal(hit.read_states(), made(book, 1))


# ---- records ----


def records_of(book: Book, names: list[bytes]) -> Bytes:
    pages, generations = book.pool.records.find(
        np.frombuffer(b"".join(names), np.uint8).reshape(-1, 16)
    )
    out = np.zeros((len(names), book.pool.records.shape[0]), np.uint8)
    assert not book.pool.records.read(pages, generations, out).any()
    return out


@pytest.fixture
def other(book: Book) -> Iterator[Book]:
    with CXLPool.create("anonymous:", layout=book.layout, capacity="4MiB", threads=1) as pool:
        yield Book(pool)
        audit(pool)


@pytest.mark.parametrize("book", [LAYOUTS["one page"], LAYOUTS["many pages"]], indirect=True)
def test_a_checkpoint_lies_in_its_pages_as_documented(book: Book) -> None:
    """The CRC of the layout, the other pages' sums of sums up to the end of a line, its bytes,
    zeros. A record has the pieces of a page in this order."""
    for number in (2, 1):  # in pages that others were in before
        book.publish(TEXT, made(book, number))
        key, count = book.key(TEXT), book.state_pages
        records = records_of(book, [name(key, 1, place) for place in range(count)])
        book.forget(TEXT)
    stream = records[:, 128:].tobytes()  # behind header and sums
    table = -(-4 * count // 64) * 64
    of_layout, *_ = records[0, 44:48].view(np.uint32)
    sums = [_core.crc32c(record[64:128].tobytes()) for record in records[1:]]
    states = made(book, 1).tobytes()
    assert stream[: 4 * count] == np.array([of_layout, *sums], np.uint32).tobytes()
    assert stream[table:].startswith(states)
    assert not any(stream[4 * count : table] + stream[table + len(states) :])


def test_records_make_the_same_checkpoint(book: Book, other: Book) -> None:
    """Whole only with the last of them; with one of another checkpoint never."""
    book.publish(TEXT, made(book, 1))
    records = records_of(book, sorted(book.look()))
    for row in range(len(records)):
        assert other.pool.match_prefix(TEXT).tokens == 0
        assert not other.pool.records.write(records[row : row + 1]).any()
    other.states, other.there, other.state_pages = book.states, other.look(), book.state_pages
    assert other.there == book.look()
    other.find(TEXT).release()
    assert other.match(TEXT) == 13
    changed = records[:1].copy()
    changed[0, -80] ^= 1
    other.evict(rows_named(other, other.there))
    assert other.pool.records.write(changed).any()


@pytest.mark.parametrize("mixed", ["bytes", "place in the text"])
def test_records_of_two_checkpoints_are_none(book: Book, other: Book, mixed: str) -> None:
    """Under one key: of other bytes, or of the same bytes behind another token."""
    key, number = book.key(TEXT), 1 if mixed == "place in the text" else 2
    count = 13 if mixed == "bytes" else 9
    book.publish(TEXT, made(book, 1))
    with CXLPool.create("anonymous:", layout=book.layout, capacity="4MiB", threads=1) as pool:
        sequence = book.grown(pool, TEXT)
        pool.publish_prefix(sequence, TEXT, tail=True)
        _core.publish_states(sequence._handle, count, key, made(book, number))
        sequence.release()
        states = [name(key, 1, place) for place in range(book.state_pages)]
        mine, theirs = records_of(book, states), records_of(Book(pool), states)
    texts = records_of(book, sorted(book.look() - set(states)))
    assert not other.pool.records.write(texts).any()
    for first in range(1, len(states)):
        mixture = np.concatenate([mine[:first], theirs[first:]])
        assert not other.pool.records.write(mixture).any()
        assert other.pool.match_prefix(TEXT).tokens == 0
        other.there = other.look()
        other.evict(rows_named(other, set(states)))
