"""Layer groups: windows and parts. Random walks beside a model that knows which pages must live.

The model holds, for each sequence and part, which pages it should have: so it predicts the number
of free pages after every step, when the pool is full, how far a truncation may reach, and what a
match finds. What the layers hold is compared with numpy's reference, window by window.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, PoolFullError, Sequence, _core
from cxlkv.arrays import Floats
from cxlkv.errors import BadArgumentError, CorruptError, StaleError
from cxlkv.prefix import prefix_keys

from .conftest import audit
from .support import reference
from .support.damaging import poke
from .support.lengths import nightly
from .support.processes import Child

HEADS, DIM, PAGE_TOKENS, TOKEN_IDS, PLACES = 2, 4, 4, 2, 1024


GROUP = LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")


def group(layers: int, window: int | None, values: str = "own") -> LayerGroup:
    return replace(GROUP, layers=layers, window=window, values=values)


def layout_of(groups: list[LayerGroup], order: list[int] | None = None) -> KVLayout:
    return KVLayout.of(groups, order, page_tokens=PAGE_TOKENS)


# name: layout, and the layers of each part as they should be
LAYOUTS: dict[str, tuple[KVLayout, list[list[int]]]] = {
    "gemma": (
        layout_of([group(6, 10), group(2, None)], [0, 0, 0, 1, 0, 0, 0, 1]),
        [[0, 1], [2, 4], [5, 6], [3, 7]],
    ),
    "windows of three sizes": (
        layout_of([group(1, 1), group(2, None), group(1, 9)], [1, 0, 2, 1]),
        [[1], [0], [3], [2]],
    ),
    "all layers windowed": (layout_of([group(2, 7)]), [[0, 1]]),
    "latent rows": (
        layout_of([group(1, 5, "key_prefix"), group(1, None, "key_prefix")]),
        [[0], [1]],
    ),
    "unlike heads": (  # a page holds two layers of either group
        layout_of(
            [group(6, 10), replace(GROUP, layers=2, kv_heads=1, head_dim=12, value_head_dim=8)],
            [0, 0, 0, 1, 0, 0, 0, 1],
        ),
        [[0, 1], [2, 4], [5, 6], [3, 7]],
    ),
    "an indexer's rows beside latent ones": (  # one latent layer is as large as two of the other
        layout_of(
            [
                replace(group(2, None, "key_prefix"), kv_heads=1, head_dim=20, value_head_dim=16),
                replace(group(2, 9, "key_prefix"), kv_heads=1, head_dim=6, value_head_dim=1),
            ],
            [0, 1, 0, 1],
        ),
        [[0], [2], [1, 3]],
    ),
    "keys and values, and keys alone": (
        layout_of([group(2, 7), replace(group(3, None, "key_prefix"), value_head_dim=DIM)]),
        [[0, 1], [2, 3, 4]],
    ),
}


class Page:
    """A page of the pool, as the model knows it."""

    published = False


@dataclass(eq=False)
class Twin:
    """A sequence, its token ids, and by part its pages {index: page} and the first one kept."""

    real: Sequence
    ids: list[int]
    pages: list[dict[int, Page]]
    first: list[int]
    export: list[Page] = field(default_factory=list)
    export_tokens: int | None = None


Key = tuple[tuple[int, ...], int]  # salt and ids up to a page's end, part


class Walk:
    def __init__(self, layout: KVLayout, parts: list[list[int]], seed: int, free_pages: int):
        self.layout, self.parts = layout, parts
        self.windows = [self.layout.windows[layers[0]] for layers in parts]
        self.rng = np.random.default_rng(seed)
        self.shapes = [layout.of_layer(layer) for layer in range(layout.layers)]
        self.keys = [self.table(each.kv_heads, each.head_dim) for each in self.shapes]
        self.values = [
            self.table(each.kv_heads, each.value_head_dim)
            if each.values == "own"
            else keys[..., : each.value_head_dim]
            for each, keys in zip(self.shapes, self.keys, strict=True)
        ]
        self.pool = CXLPool.create("anonymous:", layout=self.layout, capacity="4MiB", threads=1)
        total = self.pool.stats()["pages_total"]
        self.ballast = self.pool.pages.alloc(total - free_pages)
        self.usable = free_pages
        self.twins: list[Twin] = []
        self.index: dict[Key, Page] = {}
        self.seen: Counter[str] = Counter()

    def table(self, heads: int, dim: int) -> Floats:
        size = (PLACES, TOKEN_IDS, heads, dim)
        return self.rng.integers(-3, 4, size).astype(np.float32)

    def held(self) -> set[Page]:
        return {page for twin in self.twins for own in twin.pages for page in own.values()}

    def free(self) -> int:
        exports = (page for twin in self.twins for page in twin.export)
        return self.usable - len(self.held().union(self.index.values(), exports))

    def part_of(self, layer: int) -> int:
        return next(i for i, layers in enumerate(self.parts) if layer in layers)

    def sees(self, twin: Twin, part: int, rows: int) -> bool:
        """If the newest so many rows find all pages of their windows."""
        return self.window_page(part, len(twin.ids) - rows) >= twin.first[part]

    def texts(self, ids: list[int], salt: int) -> list[tuple[int, ...]]:
        """What the keys of its complete pages stand for."""
        ends = range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS)
        return [(salt, *ids[:end]) for end in ends]

    def salt(self) -> int:
        return 1 + int(self.rng.random() < 0.1)

    def window_page(self, part: int, position: int) -> int:
        window = self.windows[part]
        return 0 if window is None else max(0, position - window + 1) // PAGE_TOKENS

    def contents(self, ids: list[int], layer: int, first: int = 0) -> tuple[Floats, Floats]:
        places = np.arange(first, len(ids)) % PLACES
        return self.keys[layer][places, ids[first:]], self.values[layer][places, ids[first:]]

    def make(self, real: Sequence, ids: list[int], pages: list[dict[int, Page]]) -> Twin:
        first = [self.window_page(part, len(ids)) for part in range(len(self.parts))]
        twin = Twin(real, ids, pages, first)
        self.twins.append(twin)
        return twin

    # ---- steps ----

    def begin(self) -> None:
        self.make(self.pool.sequence(), [], [{} for _ in self.parts])

    def append(self, twin: Twin) -> None:
        count = int(self.rng.choice([1, 1, 2, 3, 7, 30]))
        rewind = [None, None, 0, 3, 100][int(self.rng.integers(5))]
        ids = [*twin.ids, *(int(i) for i in self.rng.integers(0, TOKEN_IDS, count))]
        before, after = len(twin.ids), len(ids)
        thens = []
        for part in range(len(self.parts)):
            back = before if rewind is None else max(0, after - rewind)
            now = max(twin.first[part], self.window_page(part, min(before, back)))
            self.drop_before(twin, part, now)
            thens.append(max(now, self.window_page(part, back)))
        fresh = [range(max(before // PAGE_TOKENS, then), after // PAGE_TOKENS) for then in thens]
        room = self.free() >= sum(len(indexes) for indexes in fresh)
        full = not room
        try:
            for layer in range(self.layout.layers):
                k, v = self.contents(ids, layer, before)
                stored = v if self.shapes[layer].values == "own" else None
                twin.real.append(layer, k, stored, rewind)
        except PoolFullError:
            assert full
            self.seen["full"] += 1
            for other in list(self.twins[::2]):
                self.forget(other)
                self.release(other)
            # Published texts without a sequence are never forgotten otherwise, and fill the pool.
            if self.rng.random() < 0.1:
                self.forget_texts(list(dict.fromkeys(text for text, _ in self.index)))
            return
        assert not full
        twin.ids = ids
        for part, indexes in enumerate(fresh):
            self.seen["freed"] += self.drop_before(twin, part, thens[part])
            wanted = range(before // PAGE_TOKENS, after // PAGE_TOKENS)
            self.seen["skipped"] += len(wanted) - len(indexes)
            twin.pages[part].update({index: Page() for index in indexes})

    def drop_before(self, twin: Twin, part: int, first: int) -> int:
        gone = [index for index in twin.pages[part] if index < first]
        for index in gone:
            del twin.pages[part][index]
        twin.first[part] = max(twin.first[part], first)
        return len(gone)

    def fork(self, twin: Twin) -> None:
        pages = [dict(p) for p in twin.pages]
        self.make(twin.real.fork(), list(twin.ids), pages).first = list(twin.first)

    def truncate(self, twin: Twin) -> None:
        tokens = int(self.rng.integers(max(0, len(twin.ids) - 12), len(twin.ids) + 1))
        if self.rng.random() < 0.05:
            tokens = 0
        parts = range(len(self.parts))
        if tokens and any(self.window_page(p, tokens) < twin.first[p] for p in parts):
            with pytest.raises(BadArgumentError, match="given back"):
                twin.real.truncate(tokens)
            self.seen["too far"] += 1
            return
        twin.real.truncate(tokens)
        self.seen["truncated"] += 1
        twin.export_tokens = None
        twin.ids = twin.ids[:tokens]
        for part in parts:
            end = tokens // PAGE_TOKENS
            twin.pages[part] = {i: page for i, page in twin.pages[part].items() if i < end}
            twin.first[part] = min(twin.first[part], end)

    def hand_over(self, twin: Twin) -> None:
        if twin.export_tokens != len(twin.ids):
            twin.export, twin.export_tokens = [], None
            wanted = len(self.parts) if len(twin.ids) % PAGE_TOKENS else 0
            if self.free() < wanted:
                with pytest.raises(PoolFullError):
                    _ = twin.real.handle
                return
            twin.export, twin.export_tokens = [Page() for _ in range(wanted)], len(twin.ids)
        with_pages = self.pool.adopt(twin.real.handle)
        adopted = self.make(with_pages, list(twin.ids), [dict(p) for p in twin.pages])
        adopted.first = list(twin.first)
        self.seen["adopted"] += 1

    def publish(self, twin: Twin) -> None:
        salt, before = self.salt(), len(self.index)
        self.publish_model(twin, salt)
        fresh = len(self.index) - before
        keys = [bytes(text) for text in self.texts(twin.ids, salt)]
        assert self.pool.publish(twin.real, keys, PAGE_TOKENS) == fresh
        self.seen["published"] += fresh

    def publish_model(self, twin: Twin, salt: int) -> list[Key]:
        """The keys that are published now, in the order in which the pool meets them."""
        met: list[Key] = []
        for index, text in enumerate(self.texts(twin.ids, salt)):
            for part, window in enumerate(self.windows):
                key, page = (text, part), twin.pages[part].get(index)
                if page is None:
                    continue
                if not page.published and key not in self.index:
                    page.published = True
                    self.index[key] = page
                if key in self.index:
                    met.append(key)
                elif window is None:
                    self.seen["another key"] += 1
                    return met
        return met

    def match(self, twin: Twin) -> None:
        pages = len(twin.ids) // PAGE_TOKENS
        texts = self.texts(twin.ids, self.salt())
        found = [
            {i: self.index.get((text, p)) for i, text in enumerate(texts)}
            for p in range(len(self.parts))
        ]
        best = max(
            n
            for n in range(pages + 1)
            if all(
                found[part][i] is not None
                for part in range(len(self.parts))
                for i in range(self.window_page(part, n * PAGE_TOKENS), n)
            )
        )
        with self.pool.match([bytes(text) for text in texts]) as hit:
            assert hit.tokens == best * PAGE_TOKENS
            held: list[dict[int, Page]] = []
            for part in range(len(self.parts)):
                low = self.window_page(part, best * PAGE_TOKENS)
                held.append({i: p for i in range(low, best) if (p := found[part][i])})
                self.matched([(texts[i], part) for i in range(low, best)])
            self.make(hit.sequence(), twin.ids[: hit.tokens], held)
        self.seen["hits"] += best > 0

    def matched(self, keys: list[Key]) -> None:
        """Matches of one part; for walks that count them."""

    def forget(self, twin: Twin) -> None:
        self.forget_texts([*self.texts(twin.ids, 1), *self.texts(twin.ids, 2)])

    def forget_texts(self, texts: list[tuple[int, ...]]) -> None:
        gone = 0
        for text in texts:
            for part in range(len(self.parts)):
                page = self.index.pop((text, part), None)
                if page is not None:
                    page.published = False
                    gone += 1
        assert self.pool.forget([bytes(text) for text in texts]) == gone
        self.seen["forgotten"] += gone

    def verify(self, twin: Twin) -> None:
        """One layer: attention of the newest tokens it can serve, and the bytes of its pages."""
        if not twin.ids:
            return
        layer = int(self.rng.integers(self.layout.layers))
        part = self.part_of(layer)
        tokens = len(twin.ids)
        rows = int(self.rng.integers(1, min(tokens, 9) + 1))
        keys, values = self.contents(twin.ids, layer)
        heads, dim = self.shapes[layer].kv_heads, self.shapes[layer].head_dim
        queries = self.rng.integers(-2, 3, (rows, 2 * heads, dim)).astype(np.float32)
        if not self.sees(twin, part, rows):
            with pytest.raises(BadArgumentError, match="given back"):
                twin.real.attend(layer, queries)
            self.seen["out of sight"] += 1
            return
        starts = np.array([0, rows], np.int32)
        out, lse = twin.real.attend(layer, queries, scale=0.25)
        want, want_lse = reference.attend(
            [keys],
            [values],
            queries,
            starts,
            page_tokens=PAGE_TOKENS,
            scale=0.25,
            window=self.windows[part],
        )
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
        picked = twin.real.select(layer, queries, Budget(share=1.0), scale=0.25)
        fetched_k, fetched_v = twin.real.fetch(layer, picked)
        for row, head in np.ndindex(rows, heads):
            count = int(picked.counts[row, head])
            at = (
                picked.pages[row, head, :count, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            ).ravel()
            real = at < tokens
            for fetched, wanted in ((fetched_k, keys), (fetched_v, values)):
                flat = np.asarray(fetched)[row, head, :count].reshape(len(at), -1)
                np.testing.assert_array_equal(flat[real], wanted[at[real], head])
                assert not flat[~real].any()
        self.seen["verified"] += 1

    def release(self, twin: Twin) -> None:
        twin.real.release()
        self.twins.remove(twin)

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.05 or not self.twins:
            return self.begin()
        twin = self.twins[int(self.rng.integers(len(self.twins)))]
        for chance, action in (
            (0.40, self.append),
            (0.48, self.fork),
            (0.56, self.truncate),
            (0.62, self.hand_over),
            (0.67, self.publish),
            (0.73, self.match),
            (0.76, self.forget),
            (0.90, self.verify),
        ):
            if dice < chance and (len(self.twins) < 12 or action in (self.append, self.verify)):
                return action(twin)
        if len(self.twins) > 3:
            self.release(twin)
        return None

    def check(self) -> None:
        assert self.pool.stats()["pages_free"] == self.free()

    def run(self, steps: int, *events: str) -> None:
        """So many steps, and on until each event was seen: a rare one may be late."""
        for number in range(20 * steps):
            if number >= steps and all(self.seen[event] for event in events):
                break
            self.step()
            self.check()
            if number % 200 == 0:
                assert self.pool.admin.check(deep=True)["clean"]
        for twin in list(self.twins):
            self.verify(twin)
            self.forget(twin)
            self.release(twin)
        stats = self.pool.stats()
        assert stats["window_pages_skipped"] == self.seen["skipped"]
        self.pool.pages.free(self.ballast)
        audit(self.pool)
        self.pool.close()
        print(dict(self.seen))
        assert all(self.seen[event] for event in events)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("part", "steps", "free_pages"), [(0, 1500, 60), *(nightly(i, 10000, 100) for i in range(1, 6))]
)
def test_random_walks(name: str, part: int, steps: int, free_pages: int, seed: int) -> None:
    walk = Walk(*LAYOUTS[name], seed + part, free_pages)
    walk.run(steps, "full", "skipped", "truncated", "too far", "adopted", "published", "hits")
    assert walk.seen["verified"] > 50


def test_parts_follow_from_the_layout() -> None:
    """Little of a page stays empty, and few pages stand for a token."""
    shape = {"kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    for sizes, record_layers, parts in [
        ((40, 8), 8, 6),  # Gemma-3 12B
        ((29, 5), 5, 7),  # 4B: 35 rows for 34 layers
        ((22, 4), 2, 13),  # 1B
        ((12, 12), 12, 2),  # gpt-oss 20B
        ((52, 10), 13, 5),  # 27B: 65 rows for 62 layers
        ((7,), 7, 1),
        ((1, 1, 1), 1, 3),
    ]:
        groups = [
            LayerGroup(layers=n, window=i or None, **shape)  # type: ignore[arg-type]
            for i, n in enumerate(sizes)
        ]
        with CXLPool.create("anonymous:", layout=KVLayout.of(groups), capacity="8MiB") as pool:
            geometry = pool.pages.geometry
            assert (geometry["record_layers"], geometry["part_count"]) == (record_layers, parts)
            assert pool.layout.groups == tuple(groups)


def test_a_steady_state_needs_no_more_pages() -> None:
    """A long decode of a windowed layer lives in its window; the pages behind it are counted."""
    layout = layout_of([group(2, 16)])
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        sequence = pool.sequence()
        token = np.ones((1, HEADS, DIM), np.float32)
        for step in range(400):
            for layer in range(2):
                sequence.append(layer, token, token)
            assert pool.stats()["pages_held"] <= 16 // PAGE_TOKENS + 2, step
        stats = pool.stats()
        assert stats["window_pages_freed"] + stats["pages_held"] == 400 // PAGE_TOKENS
        assert len(sequence.pages) == stats["pages_held"]
        sequence.release()
        audit(pool)


def test_a_full_pool_still_decodes_in_a_window() -> None:
    """What falls out of the window makes room for what comes in."""
    layout = layout_of([group(1, 8)])
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        sequence = pool.sequence()
        rows = np.ones((24, HEADS, DIM), np.float32)
        sequence.append(0, rows, rows)
        ballast = pool.pages.alloc(pool.stats()["pages_free"])
        for _ in range(50):
            sequence.append(0, rows[:1], rows[:1])
        with pytest.raises(PoolFullError):
            sequence.append(0, rows, rows)
        out, _ = sequence.attend(0, rows[:1])
        np.testing.assert_array_equal(out, rows[:1])
        pool.pages.free(ballast)


def test_a_damaged_page_of_a_part_is_named(tmp_path: Path) -> None:
    layout, _ = LAYOUTS["gemma"]
    path = tmp_path / "pool"
    pool = CXLPool.create(path, layout=layout, capacity="4MiB")
    sequence = pool.sequence()
    rows = np.random.default_rng(5).standard_normal((32, HEADS, DIM)).astype(np.float32)
    for layer in range(layout.layers):
        sequence.append(layer, rows + layer, rows)
    ids = list(range(32))
    assert pool.publish_prefix(sequence, ids) == len(sequence.pages)
    assert pool.match_prefix(ids).tokens == 32
    pattern = (rows[20, 0] + 3).tobytes()  # in layer 3, which sees all tokens
    data = path.read_bytes()
    assert data.count(pattern) == 1
    poke(path, data.index(pattern), b"\xff\xff")
    report = pool.admin.check(deep=True)
    assert [line for line in report["problems"] if "layer 3" in line]
    with pytest.raises(CorruptError, match="layer 3"):
        sequence.fetch(3)
    sequence.attend(0, rows[:1, [0, 0]])  # the other parts are whole
    pool.close()


ADOPTER = """
import sys
import numpy as np
from cxlkv import CXLPool
pool = CXLPool.open(sys.argv[1], threads=1)
sequence = pool.adopt(bytes.fromhex(sys.argv[2]))
hit = pool.match_prefix(range(100))
found = hit.sequence()
for line in sys.stdin:
    query = np.full((4, 4), float(line), np.float32)
    for held in (sequence, found):
        for layer in range(pool.layout.layers):
            print(held.attend(layer, query)[0].tobytes().hex())
    print(hit.tokens, flush=True)
"""


def test_another_process_adopts_and_matches_what_has_windows(tmp_path: Path) -> None:
    """It reads the same, also when the giver has gone on; killed, it leaves nothing held."""
    layout, _ = LAYOUTS["gemma"]
    rng = np.random.default_rng(9)
    with CXLPool.create(tmp_path / "pool", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        rows = [rng.standard_normal((102, HEADS, DIM)).astype(np.float32) for _ in range(8)]
        for first, last in ((0, 90), (90, 102)):
            for layer in range(layout.layers):
                part = rows[layer][first:last]
                sequence.append(layer, part, -part)
        pool.publish_prefix(sequence, range(102))
        kept = sequence.fork()
        with Child("-c", ADOPTER, tmp_path / "pool", sequence.handle.hex()) as child:
            for number in range(3):
                query = np.full((4, 4), float(number), np.float32)
                child.tell(str(number))
                got = [bytes.fromhex(child.hear()) for _ in range(2 * layout.layers)]
                assert child.hear() == "100"
                kept.truncate(102)
                for layer in range(layout.layers):
                    assert got[layer] == np.asarray(kept.attend(layer, query)[0]).tobytes()
                    before = pool.match_prefix(range(100)).sequence().attend(layer, query)[0]
                    assert got[layout.layers + layer] == np.asarray(before).tobytes()
                for layer in range(layout.layers):  # the giver goes on: its windows move
                    sequence.append(layer, rows[layer], rows[layer])
                if number == 1:
                    sequence.release()
                    sequence = pool.sequence()
        sequence.release()
        kept.release()
        pool.forget(prefix_keys(range(102), PAGE_TOKENS))
        gc.collect()
        assert pool.stats()["pages_held"] == pool.stats()["pages_published"] == 0
        audit(pool)


def test_hostile_handles(rng: np.random.Generator) -> None:
    """Whatever a handle claims under a right CRC: it is refused, or what it names can be read."""
    layout, _ = LAYOUTS["windows of three sizes"]
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        rows = rng.standard_normal((50, HEADS, DIM)).astype(np.float32)
        for layer in range(layout.layers):
            sequence.append(layer, rows, rows, rewind=2)
        good = sequence.handle
        assert len(pool.adopt(good)) == 50
        refused = 0
        for _ in range(3000):
            bad = bytearray(good[:-4])
            for _ in range(int(rng.integers(1, 3))):
                at = int(rng.integers(24, len(bad)))  # behind magic, version and identity
                bad[at] = int(rng.choice([0, 1, 13, 255, bad[at] ^ 1]))
            if rng.random() < 0.1:
                bad = bad[: int(rng.integers(len(bad)))]
            try:
                adopted = pool.adopt(bytes(bad) + _core.crc32c(bytes(bad)).to_bytes(4, "little"))
            except (StaleError, CorruptError):
                refused += 1
                continue
            for layer in range(layout.layers if len(adopted) else 0):
                adopted.attend(layer, rows[:1, [0, 0]])
            adopted.release()
        assert refused > 2000
        sequence.release()
        audit(pool)


def test_values_are_given_exactly_when_they_are_stored() -> None:
    rows = np.ones((3, HEADS, DIM), np.float32)
    for values, v in (("own", None), ("key_prefix", rows)):
        layout = layout_of([group(1, None, values)])
        with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
            with pytest.raises(BadArgumentError, match=r"prefix|stores"):
                pool.sequence().append(0, rows, v)
            with pytest.raises(BadArgumentError, match="rewind"):
                pool.sequence().append(0, rows, rows if v is None else None, rewind=-1)


def test_pages_of_a_window_are_named_to_be_fetched() -> None:
    layout = layout_of([group(1, 5)])
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        sequence = pool.sequence()
        rows = np.ones((40, HEADS, DIM), np.float32)
        sequence.append(0, rows, rows, rewind=0)
        with pytest.raises(BadArgumentError, match="name the pages"):
            sequence.fetch(0)
        sequence.append(0, rows[:1], rows[:1])
        picked = sequence.select(0, np.ones((HEADS, DIM), np.float32), Budget(share=1.0))
        assert picked.pages.min() == (41 - 5) // PAGE_TOKENS
        picked.pages[:] = 0
        with pytest.raises(BadArgumentError, match="behind the window"):
            sequence.fetch(0, picked)
        out, lse = sequence.attend(0, np.ones((HEADS, DIM), np.float32), picked)
        assert not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all()
