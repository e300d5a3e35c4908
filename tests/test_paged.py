"""Whole blocks of an engine's paged memory into pages and back, against copies by numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numpy.lib.stride_tricks import as_strided

from cxlkv import Batch, CXLPool, KVLayout, LayerGroup, Sequence
from cxlkv.arrays import NUMPY_DTYPES, Bytes, Floats
from cxlkv.emulation import faults
from cxlkv.errors import (
    BadArgumentError,
    CorruptError,
    CXLKVError,
    OrderError,
    PoisonError,
    PoolFullError,
)
from cxlkv.layout import DTYPES
from cxlkv.pages import layer_places

from .conftest import MakePool
from .support.threads import run_all
from .test_places import region_of
from .test_verify import damage

Ids = npt.NDArray[np.int32]
PAGE = 4
FORMS = ("one behind the other", "heads first", "backwards", "apart")


def layout_of(
    dtype: str = "float32",
    layers: int = 2,
    kv_heads: int = 2,
    values: str = "own",
    value_head_dim: int = 8,
    window: int | None = None,
) -> KVLayout:
    """window: of the first layer; the others have none."""
    shape = {
        "kv_heads": kv_heads,
        "head_dim": 8,
        "value_head_dim": value_head_dim,
        "dtype": dtype,
        "values": values,
    }
    groups = [LayerGroup(layers=layers - 1, **shape)]  # type: ignore[arg-type]
    groups.insert(0, LayerGroup(layers=1, window=window, **shape))  # type: ignore[arg-type]
    return KVLayout.of(groups, page_tokens=PAGE)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Floats:
    """NaN, infinities, whatever: what an engine packs are no numbers."""
    kind = NUMPY_DTYPES[DTYPES.index(dtype)]
    made = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8)
    return made.view(kind)


class Paged:
    """An engine's blocks of one layer, laid out as engines do, of random bits."""

    def __init__(
        self,
        rng: np.random.Generator,
        layout: KVLayout,
        blocks: int,
        tokens: int,
        form: str = FORMS[0],
    ):
        heads, dims = layout.kv_heads, (layout.head_dim, layout.value_head_dim)
        self.own_values = layout.values == "own"
        size = NUMPY_DTYPES[DTYPES.index(layout.dtype)].itemsize
        self.arrays = []
        if form == "one behind the other":  # vLLM on CPU: K and V of each block and head
            whole = random_bits(rng, (blocks, heads, tokens * sum(dims)), layout.dtype)
            for first, dim in ((0, dims[0]), (tokens * dims[0], dims[1])):
                strides = (*whole.strides[:2], dim * size, size)
                part = whole[..., first:]
                self.arrays.append(as_strided(part, (blocks, heads, tokens, dim), strides))
        else:
            for dim in dims:
                shape = (blocks, heads, tokens, dim)
                if form == "heads first":
                    made = random_bits(rng, (heads, blocks, tokens, dim), layout.dtype)
                    self.arrays.append(made.transpose(1, 0, 2, 3))
                elif form == "backwards":
                    self.arrays.append(random_bits(rng, shape, layout.dtype)[::-1, ::-1])
                else:  # every other block, a token more than there seems to be
                    shape = (2 * blocks, heads, tokens + 1, dim)
                    self.arrays.append(random_bits(rng, shape, layout.dtype)[::2, :, :tokens])

    @property
    def keys(self) -> Floats:
        return self.arrays[0]

    @property
    def values(self) -> Floats | None:
        return self.arrays[1] if self.own_values else None

    def rows(self, blocks: Ids) -> tuple[Floats, Floats | None]:
        """The tokens of these blocks, [tokens, kv_heads, dim], as append() takes them."""
        k, v = (a[blocks].transpose(0, 2, 1, 3) for a in self.arrays)
        k, v = (a.reshape(-1, *a.shape[2:]) for a in (k, v))
        return k, v if self.own_values else None

    def bits(self) -> list[Bytes]:
        return [bits(a) for a in self.arrays[: 1 + self.own_values]]


def bits(array: Floats) -> Bytes:
    """To be compared: NaN is not what it is."""
    return np.ascontiguousarray(array).view(np.uint8)


def starts_of(counts: npt.ArrayLike) -> Ids:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def page_ids(pool: CXLPool, sequence: Sequence, layer: int) -> npt.NDArray[np.uint32]:
    """Ids of the complete pages of a layer that are still there; part 0 has the window, if any
    has.
    """
    part = layer_places(pool.layout, pool.pages.geometry)[layer][0]
    every, count = sequence.pages, sequence.tokens(0) // PAGE
    first = len(every) - count  # of part 1
    missing = count - sequence.tokens(layer) // PAGE  # of later layers, in the middle of a step
    return every[first:][: count - missing] if part else every[:first][: first - missing]


def pieces(pool: CXLPool, sequence: Sequence, layer: int) -> list[bytes]:
    """All that the pool stores of a sequence's pages in one layer: digests, sketches, K, V."""
    geometry, found = pool.pages.geometry, []
    places = pool.pages.places(page_ids(pool, sequence, layer), layer)
    for name, offsets in zip(("digest", "sketch", "key", "value"), places, strict=True):
        size = geometry[f"{name}_piece_bytes"] * pool.layout.kv_heads
        for at in [] if offsets is None else offsets.tolist():
            found.append(region_of(pool)[at : at + size].tobytes())
    return found


# ---- round trips ----


def append_at_random(
    rng: np.random.Generator, batch: Batch, layout: KVLayout, layers: list[Paged], times: int
) -> list[list[Ids]]:
    """The blocks that each sequence got, in each call."""
    got: list[list[Ids]] = [[] for _ in batch.sequences]
    for _ in range(times):
        starts = starts_of(rng.integers(0, 4, len(batch)))
        blocks = rng.integers(0, len(layers[0].keys), starts[-1]).astype(np.int32)
        for layer, source in enumerate(layers):
            batch.append_blocks(layer, source.keys, source.values, blocks, starts)
        for i, mine in enumerate(got):
            mine.append(blocks[starts[i] : starts[i + 1]])
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", ["own", "key_prefix"])
def test_blocks_come_back_as_they_were(
    make_pool: MakePool, rng: np.random.Generator, values: str, form: str, dtype: str
) -> None:
    """Into blocks elsewhere, from any page on; all other blocks stay what they are. What lies in
    the pool is what append() makes of the same tokens."""
    heads, value_dim = (
        (1, 4) if values == "key_prefix" else (int(rng.integers(1, 4)), int(rng.choice([4, 8, 12])))
    )
    layout = layout_of(dtype, kv_heads=heads, values=values, value_head_dim=value_dim)
    pool = make_pool(layout=layout, checksum=bool(rng.integers(2)), threads=int(rng.integers(1, 4)))
    tokens = PAGE * int(rng.integers(1, 5))
    layers = [Paged(rng, layout, 9, tokens, form) for _ in range(2)]
    sequences = [pool.sequence() for _ in range(3)]
    batch = pool.batch(sequences)
    got = [np.concatenate(mine) for mine in append_at_random(rng, batch, layout, layers, 3)]
    for layer, source in enumerate(layers):
        for sequence, blocks in zip(sequences, got, strict=True):
            other = pool.sequence()
            for below in range(layer + 1):
                other.append(below, *layers[below].rows(blocks))
            assert other.tokens(layer) == sequence.tokens(layer) == len(blocks) * tokens
            assert pieces(pool, sequence, layer) == pieces(pool, other, layer)
            other.release()
        check_fetched(rng, batch, layout, (layer, source), got)
    for sequence in sequences:
        sequence.release()


def check_fetched(
    rng: np.random.Generator,
    batch: Batch,
    layout: KVLayout,
    appended: tuple[int, Paged],
    got: list[Ids],
) -> None:
    """Into blocks of another length than they were appended from, any whole number of pages."""
    layer, source = appended
    tokens, count = PAGE * int(rng.integers(1, 4)), 40
    target = Paged(rng, layout, count, tokens, FORMS[rng.integers(len(FORMS))])
    wanted = target.bits()
    lengths = [s.tokens(layer) for s in batch.sequences]
    first = np.array([rng.integers(0, n // PAGE + 1) for n in lengths])
    counts = [
        rng.integers(0, (n - PAGE * page) // tokens + 1)
        for n, page in zip(lengths, first.tolist(), strict=True)
    ]
    starts = starts_of(np.minimum(counts, count // len(batch)))
    blocks = rng.permutation(count)[: starts[-1]]
    batch.fetch_blocks(layer, target.keys, target.values, blocks, starts, first)
    for i, mine in enumerate(got):
        for place, block in enumerate(blocks[starts[i] : starts[i + 1]]):
            begin = int(first[i]) * PAGE + place * tokens
            for kind, rows in enumerate(source.rows(mine)):
                if rows is not None:
                    piece = rows[begin : begin + tokens].transpose(1, 0, 2)
                    wanted[kind][block] = bits(piece)
    for one, two in zip(target.bits(), wanted, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_cache_of_torch(make_pool: MakePool, rng: np.random.Generator) -> None:
    """vLLM's layout on the CPU: [blocks, kv_heads, 2 * block_tokens, head_dim], in two chunks."""
    torch = pytest.importorskip("torch")
    pool = make_pool(layout=layout_of("bfloat16"), threads=2)
    there = torch.randn(6, 2, 2 * 2 * PAGE, 8).to(torch.bfloat16)
    here = torch.zeros_like(there)
    sequence = pool.sequence()
    batch = pool.batch([sequence])
    table = torch.tensor([4, 0, 5])  # int64, as well
    k, v = there.chunk(2, dim=2)
    batch.append_blocks(0, k, v, table, [0, 3])
    k, v = here.chunk(2, dim=2)
    batch.fetch_blocks(0, k, v, [3, 2, 1], [0, 3], [0])
    assert torch.equal(here[[3, 2, 1]], there[[4, 0, 5]])
    assert not here[[0, 4, 5]].any()


def test_several_threads_each_with_its_own_batch(
    make_pool: MakePool, seed: int, rng: np.random.Generator
) -> None:
    layout = layout_of()
    pool = make_pool("16MiB", layout=layout, threads=3)

    def work(number: int) -> None:
        own = np.random.default_rng([seed, number])
        for _ in range(5):
            layers = [Paged(own, layout, 9, 2 * PAGE) for _ in range(2)]
            batch = pool.batch([pool.sequence() for _ in range(3)])
            parts = append_at_random(own, batch, layout, layers, 4)
            got = [np.concatenate(mine) for mine in parts]
            for appended in enumerate(layers):
                check_fetched(own, batch, layout, appended, got)
            for sequence in batch.sequences:
                sequence.release()

    run_all(partial(work, number) for number in range(4))


# ---- windows ----


def test_a_window_gives_back_what_append_does(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    """Blocks that are longer than pages, a rewind or none: the same pages stay."""
    layout = layout_of(window=9)
    pool = make_pool(layout=layout, threads=2)
    tokens = 3 * PAGE
    layers = [Paged(rng, layout, 6, tokens) for _ in range(2)]
    for rewind in (None, 0, 5, 100):
        appended, copied = pool.sequence(), pool.sequence()
        batch = pool.batch([copied])
        for _ in range(4):
            blocks = rng.integers(0, 6, rng.integers(1, 4)).astype(np.int32)
            before = pool.stats()["window_pages_freed"]
            for layer, source in enumerate(layers):
                appended.append(layer, *source.rows(blocks), rewind=rewind)
            between = pool.stats()["window_pages_freed"]
            for layer, source in enumerate(layers):
                starts = [0, len(blocks)]
                batch.append_blocks(layer, source.keys, source.values, blocks, starts, rewind)
            assert pool.stats()["window_pages_freed"] - between == between - before
            assert len(appended.pages) == len(copied.pages)
            for layer in range(2):
                assert pieces(pool, appended, layer) == pieces(pool, copied, layer)
        appended.release()
        copied.release()


def test_a_block_that_the_window_cuts(make_pool: MakePool, rng: np.random.Generator) -> None:
    """Its pages behind the window are zeros, the others what they were."""
    layout = layout_of(window=5)
    pool = make_pool(layout=layout, threads=2)
    tokens = 4 * PAGE
    source = Paged(rng, layout, 4, tokens)
    sequence = pool.sequence()
    batch = pool.batch([sequence])
    for layer in range(2):
        batch.append_blocks(layer, source.keys, source.values, [1, 3], [0, 2], 0)
    target = Paged(rng, layout, 4, tokens)
    # 32 tokens: token 32 sees 28 to 31, and what comes before page 7 was given back.
    with pytest.raises(BadArgumentError, match=r"page 0 lies behind the window of 5.*are 7 to 7"):
        batch.fetch_blocks(0, target.keys, target.values, [0, 2], [0, 2], [0])
    batch.fetch_blocks(0, target.keys, target.values, [2], [0, 1], [4])
    for here, there in zip(target.bits(), source.bits(), strict=True):
        assert not here[2][:, : 3 * PAGE].any()
        np.testing.assert_array_equal(here[2][:, 3 * PAGE :], there[3][:, 3 * PAGE :])
    batch.fetch_blocks(1, target.keys, target.values, [0, 2], [0, 2], [0])
    np.testing.assert_array_equal(target.bits()[0][[0, 2]], source.bits()[0][[1, 3]])


# ---- a full pool ----


def fill(pool: CXLPool, left: int) -> Sequence:
    """A sequence that leaves so many pages free."""
    hog = pool.sequence()
    tokens = (pool.stats()["pages_free"] - left) * PAGE
    rows = np.zeros((tokens, 2, 8), np.float32)
    hog.append(0, rows, rows)
    assert pool.stats()["pages_free"] == left
    return hog


def test_a_pool_that_is_full_midway(make_pool: MakePool, rng: np.random.Generator) -> None:
    """The first sequence would find room, the second not: neither is changed."""
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=PAGE, dtype="float32")
    pool = make_pool(layout=layout, threads=2)
    source = Paged(rng, layout, 4, 2 * PAGE)
    batch = pool.batch([pool.sequence(), pool.sequence()])
    for layer in range(2):
        batch.append_blocks(layer, source.keys, source.values, [0, 1], [0, 1, 2])
    hog = fill(pool, 5)
    before = pool.stats()
    with pytest.raises(PoolFullError, match="Nothing was written"):
        batch.append_blocks(0, source.keys, source.values, [0, 1, 2], [0, 1, 3])
    assert [s.tokens(0) for s in batch.sequences] == [2 * PAGE] * 2
    assert pool.stats()["pages_free"] == before["pages_free"] == 5
    check_fetched(rng, batch, layout, (0, source), [np.array([0], np.int32), np.array([1])])
    batch.append_blocks(0, source.keys, source.values, [2, 3], [0, 2, 2])
    assert pool.stats()["pages_free"] == 1
    hog.release()


def test_room_is_made_as_for_append(make_pool: MakePool, rng: np.random.Generator) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, page_tokens=PAGE, dtype="float32")
    pool = make_pool(layout=layout, threads=2)
    source = Paged(rng, layout, 4, 3 * PAGE)
    hog, asked = fill(pool, 2), []

    def make_room(pages: int) -> bool:
        asked.append(pages)
        hog.release()
        return True

    pool.pages.register(make_room)
    sequence = pool.sequence()
    pool.batch([sequence]).append_blocks(0, source.keys, source.values, [2, 3], [0, 2])
    pool.pages.unregister(make_room)
    assert len(sequence) == 6 * PAGE
    assert len(asked) == 1
    assert asked[0] >= 6


# ---- faults ----


def test_a_damaged_piece_ends_its_own_block_only(
    make_pool: MakePool, rng: np.random.Generator
) -> None:
    layout = layout_of()
    pool = make_pool(layout=layout, threads=2)
    tokens = 2 * PAGE
    source, target = (Paged(rng, layout, 9, tokens) for _ in range(2))
    sequences = [pool.sequence() for _ in range(3)]
    batch = pool.batch(sequences)
    table, starts = rng.permutation(9), [0, 2, 6, 9]
    for layer in range(2):
        batch.append_blocks(layer, source.keys, source.values, table, starts)
    damage(pool, sequences[1], 1, 3)  # in the second of four blocks
    damage(pool, sequences[1], 1, 6)
    to = (target.keys, target.values, table, starts, [0, 0, 0])
    batch.fetch_blocks(0, *to)
    np.testing.assert_array_equal(target.bits(), source.bits())
    with pytest.raises(CorruptError, match=r"sequence 1 of the batch, block [13] of it: page \d+, "
                       r"layer 1, kv head 0: the CRC of its K is wrong") as caught:  # fmt: skip
        batch.fetch_blocks(1, *to)
    assert caught.value.good == (2, 1, 3)
    assert pool.stats()["corrupt_pieces"] == 2
    bad = table[[3, 5]]
    for here, there in zip(target.bits(), source.bits(), strict=True):
        assert not here[bad].any(), "nothing of a bad block looks right"
        right = np.setdiff1d(np.arange(9), bad)
        np.testing.assert_array_equal(here[right], there[right])
    damage(pool, sequences[1], 1, 3)  # the bit is what it was: pools are audited
    damage(pool, sequences[1], 1, 6)
    batch.fetch_blocks(1, *to)
    np.testing.assert_array_equal(target.bits(), source.bits())


def test_memory_that_fails_is_named_by_sequence(tmp_path: Path, rng: np.random.Generator) -> None:
    """A bus error in one page: its sequence is told to be recomputed, the pool goes on."""
    layout = layout_of()
    path = tmp_path / "kv.pool"
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=2) as pool:
        source, target = (Paged(rng, layout, 4, PAGE) for _ in range(2))
        whole, hurt = pool.sequence(), pool.sequence()
        batch = pool.batch([hurt, whole])
        for layer in range(2):
            batch.append_blocks(layer, source.keys, source.values, [0, 1, 2, 3], [0, 4, 4])
        tails = np.zeros((3, 2, 8), np.float32)
        whole.append(0, tails, tails)
        faults.poison(path, pool.pages.geometry["extents_offset"])
        to = (target.keys, target.values, [0, 1, 2, 3], [0, 4, 4], [0, 0])
        with pytest.raises(PoisonError, match=r"sequence 0 of the batch.* bus error") as got:
            batch.fetch_blocks(0, *to)
        assert got.value.good == (0, 0)
        assert pool.stats()["pages_retired"] > 0
        assert not target.keys.any()
        hurt.release()
        whole.release()


# ---- what is refused ----


@pytest.fixture
def given(make_pool: MakePool, rng: np.random.Generator) -> tuple[Batch, Paged]:
    layout = layout_of()
    pool = make_pool(layout=layout, threads=2)
    source = Paged(rng, layout, 4, 2 * PAGE)
    batch = pool.batch([pool.sequence(), pool.sequence()])
    for layer in range(2):
        batch.append_blocks(layer, source.keys, source.values, [0, 1, 2], [0, 1, 3])
    return batch, source


F32 = np.float32
Arguments = tuple[object, object, npt.ArrayLike, npt.ArrayLike]
REFUSED: dict[str, tuple[str, Callable[[Floats, Floats], Arguments]]] = {
    "an id too large": (
        r"blocks\[1\] is 4: there are blocks 0 to 3",
        lambda k, v: (k, v, [3, 4], [0, 1, 2]),
    ),
    "a negative id": (r"blocks\[0\] is -1", lambda k, v: (k, v, [-1], [0, 1, 1])),
    "an id of 64 bits": ("whole numbers below", lambda k, v: (k, v, [1 << 32], [0, 1, 1])),
    "ids that are no numbers": ("blocks are float64", lambda k, v: (k, v, [0.5], [0, 1, 1])),
    "fewer ids": (r"blocks has shape \(1,\), wanted \(2,\)", lambda k, v: (k, v, [0], [0, 1, 2])),
    "starts that fall": ("must not fall", lambda k, v: (k, v, [0], [0, 2, 1])),
    "starts below 0": ("must not fall", lambda k, v: (k, v, [], [0, 1, -1])),
    "starts from 1": ("must begin with 0", lambda k, v: (k, v, [0, 1], [1, 1, 2])),
    "starts of others": (r"wanted \(3,\)", lambda k, v: (k, v, [0], [0, 1])),
    "blocks of 6 tokens": (
        "blocks of 6 tokens are no multiple of the pool's pages of 4",
        lambda k, v: (k[:, :, :6], v[:, :, :6], [0], [0, 1, 1]),
    ),
    "blocks of no tokens": (
        "blocks of 0 tokens",
        lambda k, v: (k[:, :, :0], v[:, :, :0], [0], [0, 1, 1]),
    ),
    "no blocks": ("there are blocks 0 to -1", lambda k, v: (k[:0], v[:0], [0], [0, 1, 1])),
    "values of fewer tokens": (
        "other blocks or tokens",
        lambda k, v: (k, v[:, :, :4], [0], [0, 1, 1]),
    ),
    "three axes": (r"keys has shape \(2, 8, 8\)", lambda k, v: (k[0], v, [0], [0, 1, 1])),
    "other heads": ("values has shape", lambda k, v: (k, v[:, :1], [0], [0, 1, 1])),
    "another dtype": (
        "keys is float16, the pool stores float32",
        lambda k, v: (k.view(np.float16)[..., ::2], v, [0], [0, 1, 1]),
    ),
    "tokens apart": (
        "keys: tokens of a block and head are not contiguous",
        lambda k, v: (np.zeros((4, 2, 16, 8), F32)[:, :, ::2], v, [0], [0, 1, 1]),
    ),
    "channels apart": (
        "values: tokens of a block and head are not contiguous",
        lambda k, v: (k, np.zeros((4, 2, 8, 16), F32)[..., ::2], [0], [0, 1, 1]),
    ),
    "no values": ("values is None: the pool", lambda k, v: (k, None, [0], [0, 1, 1])),
    "a list": ("keys is a list", lambda k, v: ([], v, [0], [0, 1, 1])),
    "too much at once": (
        "copy fewer at once",
        lambda k, v: (
            as_strided(k, (1, 2, 1 << 30, 8), (1 << 36, 1 << 35, 32, 4)),
            as_strided(v, (1, 2, 1 << 30, 8), (1 << 36, 1 << 35, 32, 4)),
            [0, 0],
            [0, 1, 2],
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(given: tuple[Batch, Paged], name: str) -> None:
    batch, source = given
    text, arguments = REFUSED[name]
    v = source.values
    assert v is not None
    before = source.bits()
    with pytest.raises(BadArgumentError, match=text):
        batch.append_blocks(0, *arguments(source.keys, v))
    with pytest.raises(BadArgumentError, match=text) as caught:
        batch.fetch_blocks(0, *arguments(source.keys, v), [0, 0])
    assert caught.value.good in ((), (0, 0))
    assert [s.tokens(0) for s in batch.sequences] == [2 * PAGE, 4 * PAGE]
    np.testing.assert_array_equal(source.bits(), before)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ([0, 3], "sequence 1: pages 3 to 4 wanted, its complete pages are 0 to 3"),
        ([-1, 0], "sequence 0: pages -1 to 0"),
        ([2**31 - 1, 0], "sequence 0: pages 2147483647 to 2147483648"),
        ([0], r"first has shape \(1,\), wanted \(2,\)"),
        ([0.0, 0.5], "first are float64"),
    ],
)
def test_pages_that_are_not_there(given: tuple[Batch, Paged], first: list[int], text: str) -> None:
    batch, source = given
    before = source.bits()
    with pytest.raises(BadArgumentError, match=text):
        batch.fetch_blocks(0, source.keys, source.values, [0, 1], [0, 1, 2], first)
    np.testing.assert_array_equal(source.bits(), before)


def test_an_open_tail(given: tuple[Batch, Paged]) -> None:
    """Blocks go behind whole pages, and only whole pages fill blocks."""
    batch, source = given
    k, v = source.rows(np.array([0], np.int32))
    assert v is not None
    batch.sequences[1].append(0, k[:5], v[:5])
    with pytest.raises(BadArgumentError, match=r"sequence 1 has 21 tokens in layer 0, no multiple"):
        batch.append_blocks(0, source.keys, source.values, [0, 1], [0, 1, 2])
    with pytest.raises(BadArgumentError, match="its complete pages are 0 to 4"):
        batch.fetch_blocks(0, source.keys, source.values, [0], [0, 0, 1], [0, 4])
    batch.append_blocks(0, source.keys, source.values, [0], [0, 1, 1])  # the other one's is none
    assert [s.tokens(0) for s in batch.sequences] == [4 * PAGE, 21]


def test_other_refusals(given: tuple[Batch, Paged]) -> None:
    batch, source = given
    keys, values = source.keys, source.values
    with pytest.raises(OrderError, match="sequence 0: layer 1 would have"):
        batch.append_blocks(1, keys, values, [0], [0, 1, 1])
    for layer in (2, 1 << 31):
        with pytest.raises(BadArgumentError, match=f"layer {layer}: the pool has 2"):
            batch.append_blocks(layer, keys, values, [0], [0, 1, 1])
        with pytest.raises(BadArgumentError, match=f"layer {layer}: the pool has 2"):
            batch.fetch_blocks(layer, keys, values, [0], [0, 1, 1], [0, 0])
    frozen = keys.view()
    frozen.flags.writeable = False
    with pytest.raises(BadArgumentError, match="keys is read-only"):
        batch.fetch_blocks(0, frozen, values, [0], [0, 1, 1], [0, 0])
    batch.append_blocks(0, frozen, values, [], [0, 0, 0])
    batch.fetch_blocks(0, keys, values, [], [0, 0, 0], [7, -7])
    batch.sequences[0].release()
    with pytest.raises(CXLKVError, match="released"):
        batch.fetch_blocks(0, keys, values, [0], [0, 1, 1], [0, 0])
