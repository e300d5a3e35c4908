"""Pages that somebody else has written: read as if they had been appended, or refused."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv import CXLPool, KVLayout, LayerGroup, _core
from cxlkv.arrays import Floats
from cxlkv.emulation.link import emulate
from cxlkv.errors import BadArgumentError, CorruptError, UnevenError
from cxlkv.ndp.engine import Budget
from cxlkv.pages import NO_PAGE, layer_places
from cxlkv.prefix import prefix_keys
from cxlkv.sequence import Sequence

from .support.lengths import nightly

SEED = 7020
Rows = tuple[Floats, Floats]  # K and V of a layer
PAGE_TOKENS = 4


def layout_of(groups: int = 1) -> KVLayout:
    shape = [
        LayerGroup(layers=2, kv_heads=2, head_dim=8, value_head_dim=4, dtype="float32"),
        LayerGroup(layers=1, kv_heads=2, head_dim=8, value_head_dim=4, dtype="float32", window=6),
    ]
    return KVLayout.of(shape[:groups], page_tokens=PAGE_TOKENS)


def rows_of(generator: np.random.Generator, layout: KVLayout, tokens: int) -> list[Rows]:
    def numbers(dim: int) -> Floats:
        return generator.standard_normal((tokens, layout.kv_heads, dim)).astype(np.float32)

    return [
        (numbers(layout.head_dim), numbers(layout.value_head_dim)) for _ in range(layout.layers)
    ]


class Elsewhere:
    """Another program, which has the pool's file mapped and writes into pages that it was given.

    What it writes are the pieces that an append makes, copied from a sequence of the same rows.
    """

    def __init__(self, pool: CXLPool) -> None:
        assert pool.path is not None
        self.pool = pool
        self.memory = np.memmap(pool.path, np.uint8, "r+")
        self.geometry = pool.pages.geometry

    def write(self, rows: Sequences[Rows]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """(pages [parts, n], checksums [layers, n, kv_heads, 4])"""
        pool, parts = self.pool, self.geometry["part_count"]
        layout = pool.layout
        count = len(rows[0][0]) // PAGE_TOKENS
        pages = pool.pages.alloc(parts * count).reshape(parts, count)
        sums = np.zeros((layout.layers, count, layout.kv_heads, 4), np.uint32)
        for item in range(count):  # one by one: no window passes any
            source = pool.sequence()
            part = slice(item * PAGE_TOKENS, (item + 1) * PAGE_TOKENS)
            for layer, (k, v) in enumerate(rows):
                source.append(layer, k[part], v[part])
            for layer in range(layout.layers):
                which = layer_places(layout, self.geometry)[layer][0]
                self.copy(source.pages[which], pages[which, item], layer, sums[layer, item])
            source.release()
        return pages, sums

    def copy(
        self, source: np.uint32, target: np.uint32, layer: int, sums: npt.NDArray[np.uint32]
    ) -> None:
        layout = self.pool.layout
        places = self.pool.pages.places(np.array([source, target], np.uint32), layer)
        data = (2 * 8 * 4, 128, PAGE_TOKENS * 8 * 4, PAGE_TOKENS * 4 * 4)
        for kind, name in enumerate(("digest", "sketch", "key", "value")):
            offsets, size = places[kind], self.geometry[f"{name}_piece_bytes"]
            assert offsets is not None
            for head in range(layout.kv_heads):
                origin, goal = (int(at) + head * size for at in offsets)
                self.memory[goal : goal + size] = self.memory[origin : origin + size]
                piece = np.array(self.memory[goal : goal + data[kind]])
                sums[head, kind] = _core.crc32c(piece)


def pool_at(folder: Path, groups: int = 1) -> CXLPool:
    return CXLPool.create(folder / "pool", layout=layout_of(groups), capacity="4MiB", threads=2)


def check_same(one: Sequence, other: Sequence, generator: np.random.Generator) -> None:
    """Both read the same, in every way; other was appended to."""
    layout = one._layout
    assert len(one) == len(other)
    if not len(one):
        return
    for layer in range(layout.layers):
        q = generator.standard_normal((4, layout.head_dim)).astype(np.float32)
        for left, right in zip(one.attend(layer, q), other.attend(layer, q), strict=True):
            np.testing.assert_array_equal(left, right)
        for method in ("exact", "two_stage", "digest"):
            budget = Budget(pages=3)
            chosen = one.select(layer, q, budget, method=method)
            wanted = other.select(layer, q, budget, method=method)
            np.testing.assert_array_equal(chosen.pages, wanted.pages)
            np.testing.assert_array_equal(chosen.scores, wanted.scores)
        for left, right in zip(one.fetch(layer, chosen), other.fetch(layer, wanted), strict=True):
            np.testing.assert_array_equal(left, right)


def append_all(sequence: Sequence, rows: Sequences[Rows], rewind: int | None = None) -> None:
    for layer, (k, v) in enumerate(rows):
        sequence.append(layer, k, v, rewind=rewind)


STEP = st.tuples(
    st.sampled_from(["attach", "append", "truncate", "fork", "publish"]), st.integers(0, 11)
)


@pytest.mark.parametrize("examples", [15, nightly(60)])
def test_attached_pages_read_as_appended_ones(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(steps=st.lists(STEP, min_size=3, max_size=9), groups=st.sampled_from([1, 2]))
    def check(steps: list[tuple[str, int]], groups: int) -> None:
        check_steps(tmp_path_factory.mktemp("attach"), steps, groups)

    check()


def check_steps(folder: Path, steps: list[tuple[str, int]], groups: int) -> None:
    generator = np.random.default_rng(SEED)
    with pool_at(folder, groups) as pool:
        elsewhere = Elsewhere(pool)
        attached, appended = pool.sequence(), pool.sequence()
        for step, amount in steps:
            if step == "attach" and len(attached) % PAGE_TOKENS == 0:
                rows = rows_of(generator, pool.layout, amount % 4 * PAGE_TOKENS)
                pages, sums = elsewhere.write(rows)
                attached.attach(pages, sums, verify=amount % 2 == 0)
                append_all(appended, rows)
            elif step == "truncate":
                # At most as far back as a window allows.
                tokens = len(attached) - min(amount, len(attached) if groups == 1 else 0)
                attached.truncate(tokens)
                appended.truncate(tokens)
            elif step == "fork":
                attached, appended = attached.fork(), appended.fork()
            elif step == "publish":
                ids = np.arange(len(attached)) + 1000 * amount
                keys = prefix_keys(ids, PAGE_TOKENS)
                pool.publish(attached, keys, PAGE_TOKENS)
                with pool.match(keys) as hit:
                    assert hit.tokens >= len(keys) * PAGE_TOKENS - 4 * PAGE_TOKENS * (groups - 1)
                pool.forget(keys)
            else:
                rows = rows_of(generator, pool.layout, amount)
                append_all(attached, rows)
                append_all(appended, rows)
            check_same(attached, appended, generator)
        assert pool.admin.check(deep=True)["clean"]


def test_a_published_page_that_was_attached_is_found_by_others(tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 1)
    with pool_at(tmp_path) as pool:
        rows = rows_of(generator, pool.layout, 12)
        attached, appended = pool.sequence(), pool.sequence()
        attached.attach(*Elsewhere(pool).write(rows))
        append_all(appended, rows)
        keys = prefix_keys(np.arange(12), PAGE_TOKENS)
        assert pool.publish(attached, keys, PAGE_TOKENS) == 3
        with CXLPool.open(tmp_path / "pool") as other, other.match(keys) as hit:
            assert hit.tokens == 12
            check_same(hit.sequence(), appended, generator)
            adopted = other.adopt(attached.handle)
            check_same(adopted, appended, generator)


def test_batch_of_several(tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 2)
    with pool_at(tmp_path) as pool:
        first, second, third = (rows_of(generator, pool.layout, n) for n in (8, 0, 12))
        both = [
            (np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
            for a, b in zip(first, third, strict=True)
        ]
        sequences = [pool.sequence() for _ in range(3)]
        pages, sums = Elsewhere(pool).write(both)
        before = pool.stats()["appended_bytes"]
        pool.batch(sequences).attach(pages, [0, 2, 2, 5], sums.view(np.int32), verify=True)
        assert pool.stats()["appended_bytes"] - before == 20 * pool.layout.token_bytes
        for sequence, rows in zip(sequences, (first, second, third), strict=True):
            appended = pool.sequence()
            append_all(appended, rows)
            check_same(sequence, appended, generator)


def test_windows(tmp_path: Path) -> None:
    """In the layer with a window of 6 the pages that no token sees need not be there."""
    generator = np.random.default_rng(SEED + 3)
    with pool_at(tmp_path, groups=2) as pool:
        rows = rows_of(generator, pool.layout, 16)
        pages, sums = Elsewhere(pool).write(rows)
        windowed = layer_places(pool.layout, pool.pages.geometry)[2][:2]
        gone = pages[windowed[0], :2].copy()
        pool.pages.free(gone)
        pages[windowed[0], :2] = NO_PAGE
        attached, appended = pool.sequence(), pool.sequence()
        with pytest.raises(BadArgumentError, match="not given, and no window has passed it"):
            attached.attach(pages, sums)
        attached.attach(pages, sums, rewind=0)
        append_all(appended, rows, rewind=0)
        check_same(attached, appended, generator)


def test_pages_that_were_not_written_whole_are_never_used(tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 4)
    with pool_at(tmp_path) as pool:
        elsewhere, sequence = Elsewhere(pool), pool.sequence()
        pages, sums = elsewhere.write(rows_of(generator, pool.layout, 8))
        keys = pool.pages.places(pages[0], 1).keys
        elsewhere.memory[keys[1] + 5] ^= 1
        with pytest.raises(CorruptError, match=rf"page {pages[0, 1]}, layer 1, kv head 0: its K"):
            sequence.attach(pages, sums, verify=True)
        assert len(sequence) == 0
        sequence.attach(pages, sums)
        q = np.ones((2, 8), np.float32)
        sequence.attend(0, q)
        with pytest.raises(CorruptError, match="kv head 0"):
            sequence.attend(1, q)


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    generator = np.random.default_rng(SEED + 5)
    with pool_at(tmp_path) as pool:
        pages, sums = Elsewhere(pool).write(rows_of(generator, pool.layout, 8))
        sequence, open_tail, uneven = (pool.sequence() for _ in range(3))
        rows = rows_of(generator, pool.layout, 3)
        append_all(open_tail, rows)
        uneven.append(0, *rows_of(generator, pool.layout, 4)[0])
        held = pool.stats()["pages_held"]
        with pytest.raises(BadArgumentError, match="no multiple of 4"):
            open_tail.attach(pages, sums)
        with pytest.raises(UnevenError, match="append the rest of the step"):
            uneven.attach(pages, sums)
        with pytest.raises(BadArgumentError, match="no checksums"):
            sequence.attach(pages)
        with pytest.raises(BadArgumentError, match=r"checksums has shape \(1, 2, 2, 4\)"):
            sequence.attach(pages, sums[:1])
        with pytest.raises(BadArgumentError, match="pages are int64"):
            sequence.attach(pages.astype(np.int64), sums)
        with pytest.raises(BadArgumentError, match="pages has shape"):
            pool.batch([sequence]).attach(pages, [0, 3], sums)
        with pytest.raises(BadArgumentError, match="stands here twice"):
            sequence.attach(pages[:, [0, 0]], sums)
        with pytest.raises(BadArgumentError, match="rewind=-2"):
            sequence.attach(pages, sums, rewind=-2)
        assert pool.stats()["pages_held"] == held
        assert len(sequence) == 0
        sequence.attach(pages[0], sums)
        with pytest.raises(BadArgumentError, match="attached already"):
            pool.pages.free(pages[0])


def test_places_are_checked(tmp_path: Path) -> None:
    with pool_at(tmp_path) as pool:
        with pytest.raises(BadArgumentError, match="the pool has"):
            pool.pages.places(np.array([10**6], np.uint32), 0)
        with pytest.raises(BadArgumentError, match="layer 2"):
            pool.pages.places(np.array([0], np.uint32), 2)
        assert len(pool.pages.places(np.array([], np.uint32), 0).keys) == 0


def test_a_link_is_charged_what_an_attach_verifies(tmp_path: Path) -> None:
    """All pieces of the pages that were given, in each layer; without verify, tables alone move."""
    generator = np.random.default_rng(SEED)
    with pool_at(tmp_path, 2) as pool:
        elsewhere = Elsewhere(pool)
        rows = rows_of(generator, pool.layout, 3 * PAGE_TOKENS)
        names = ("digest", "sketch", "key", "value")
        page_bytes = 2 * sum(elsewhere.geometry[f"{name}_piece_bytes"] for name in names)
        verified, behind, plain = (elsewhere.write(rows) for _ in range(3))
        windowed = layer_places(pool.layout, elsewhere.geometry)[2].part
        behind[0][windowed, 0] = NO_PAGE
        with emulate(pool, "astera-a1000", mode="virtual") as link:
            pool.sequence().attach(*verified, verify=True)
            assert link.bytes["attach"] == 3 * 3 * page_bytes
            assert link.seconds == pytest.approx(link.alone_s(3 * 3 * page_bytes), rel=1e-12)
            pool.sequence().attach(*behind, rewind=0, verify=True)
            assert link.bytes["attach"] == (3 * 3 + 3 * 3 - 1) * page_bytes
            pool.sequence().attach(*plain)
            assert link.operations["attach"] == 2
