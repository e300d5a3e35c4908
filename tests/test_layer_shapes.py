"""Pools whose layers are unlike: each layer gives, bit by bit, what a pool of layers like it gives.

Those pools are looked at by the other tests: by numpy's reference, by a model of their pages. Walks
over pages of unlike groups are in test_groups.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Batch, Budget, CXLPool, KVLayout, LayerGroup, _core
from cxlkv.arrays import NUMPY_DTYPES, Array, Bytes, Floats
from cxlkv.emulation import faults
from cxlkv.errors import BadArgumentError, GeometryError, PoisonError, UnsupportedError
from cxlkv.layout import DTYPES, States
from cxlkv.machine import sizes
from cxlkv.pages import layer_places
from cxlkv.tiers.local import LocalTier, units_of

from .ndp.test_worker import WorkerProcess
from .support.damaging import poke
from .support.lengths import matrix

OWN = LayerGroup(layers=3, kv_heads=4, head_dim=16, dtype="float32")
WIDE = LayerGroup(layers=2, kv_heads=2, head_dim=48, value_head_dim=24, dtype="float32")
LATENT = LayerGroup(
    layers=2, kv_heads=1, head_dim=40, value_head_dim=32, dtype="bfloat16", values="key_prefix"
)
INDEXER = replace(LATENT, layers=2, head_dim=20, value_head_dim=1)


def encoded(keys: str, values: str) -> list[LayerGroup]:
    return [
        replace(group, k_encoding=keys, v_encoding=values)
        for group in (OWN, replace(WIDE, window=50), replace(WIDE, layers=1, kv_heads=3))
    ]


GROUPS: dict[str, tuple[list[LayerGroup], list[int] | None]] = {
    "windows of wide heads": ([replace(OWN, window=40), WIDE], [0, 1, 0, 0, 1]),
    "latent and indexers": ([LATENT, INDEXER], [0, 1, 0, 1]),
    "all": ([WIDE, replace(LATENT, window=70), OWN, INDEXER], None),
    "dtypes": ([OWN, replace(OWN, dtype="float16"), replace(OWN, dtype="bfloat16")], None),
    "codes": (encoded("int8", "int4"), None),
    "fp8": (encoded("fp8_e4m3", "fp8_e4m3"), None),
    "planes": (encoded("progressive", "int8"), None),
}
BUDGETS = [Budget(pages=3), Budget(share=0.4), Budget(share=0.3, sinks=1, recent=2, per="sequence")]
METHODS = ("exact", "digest", "attention", "two_stage", "sketch", "auto")


class Twins:
    """A pool of unlike groups, and beside it one for each group: layer l of the model is layer
    `at[l]` of pool `order[l]`."""

    def __init__(self, name: str, page_tokens: int, rng: np.random.Generator, where: Path | None):
        groups, order = GROUPS[name]
        self.layout = KVLayout.of(groups, order, page_tokens=page_tokens)
        self.order = self.layout.order
        self.at = [self.order[:layer].count(one) for layer, one in enumerate(self.order)]
        self.rng = rng
        sketch = groups[0].k_encoding == "none"
        self.stack = ExitStack()

        def pool(layout: KVLayout, path: Path | None) -> CXLPool:
            made = CXLPool.create(
                path or "anonymous:", layout=layout, capacity="16MiB", sketch=sketch, threads=2
            )
            return self.stack.enter_context(made)

        self.pool = pool(self.layout, where)
        self.others = [pool(KVLayout.of([one], page_tokens=page_tokens), None) for one in groups]
        self.sequences = [(self.pool.sequence(), [p.sequence() for p in self.others])]

    def queries(self, layer: int, count: int) -> Floats:
        shape = self.layout.of_layer(layer)
        return self.rng.standard_normal((count, 2 * shape.kv_heads, shape.head_dim), np.float32)

    def keys(self, layer: int, count: int) -> Array:
        shape = self.layout.of_layer(layer)
        made = self.rng.standard_normal((count, shape.kv_heads, shape.head_dim))
        return made.astype(NUMPY_DTYPES[DTYPES.index(shape.dtype)])

    def values(self, layer: int, count: int) -> Array | None:
        shape = self.layout.of_layer(layer)
        made = self.rng.standard_normal((count, shape.kv_heads, shape.value_head_dim))
        stored = made.astype(NUMPY_DTYPES[DTYPES.index(shape.dtype)])
        return stored if shape.values == "own" else None

    def append(self, which: int, count: int) -> None:
        whole, parts = self.sequences[which]
        for layer, group in enumerate(self.order):
            k, v = self.keys(layer, count), self.values(layer, count)
            whole.append(layer, k, v)
            parts[group].append(self.at[layer], k, v)

    def fork(self) -> None:
        whole, parts = self.sequences[0]
        self.sequences.append((whole.fork(), [one.fork() for one in parts]))

    def batches(self) -> tuple[Batch, list[Batch]]:
        whole = self.pool.batch([one for one, _ in self.sequences])
        of_groups = [
            pool.batch([parts[i] for _, parts in self.sequences])
            for i, pool in enumerate(self.others)
        ]
        return whole, of_groups

    def compare(
        self, ask: Callable[[Batch, int, Floats, npt.NDArray[np.int32]], object], rows: int = 2
    ) -> None:
        """One question to each layer, of so many rows of each sequence."""
        whole, of_groups = self.batches()
        starts = rows * np.arange(len(self.sequences) + 1, dtype=np.int32)
        for layer, group in enumerate(self.order):
            q = self.queries(layer, int(starts[-1]))
            mine = ask(whole, layer, q, starts)
            yours = ask(of_groups[group], self.at[layer], q, starts)
            assert same(mine, yours), f"layer {layer}"


def same(one: object, other: object) -> bool:
    if isinstance(one, tuple):
        assert isinstance(other, tuple)
        return len(one) == len(other) and all(map(same, one, other))
    if one is None or isinstance(one, (int, float, str)):
        return one == other
    a, b = (np.ascontiguousarray(each) for each in (one, other))
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def twins(request: pytest.FixtureRequest, rng: np.random.Generator) -> Iterator[Twins]:
    name, page_tokens = request.param
    made = Twins(name, page_tokens, rng, None)
    with made.stack:
        yield made


def grown(twins: Twins) -> Twins:
    """Two sequences with a common beginning, and open tails."""
    for count in (61, 1, 30):
        twins.append(0, count)
    twins.fork()
    twins.append(1, 7)
    twins.append(0, 2)
    return twins


CASES = [(name, [4, 16, 20][i % 3]) for i, name in enumerate(GROUPS)]


@pytest.mark.parametrize("twins", CASES, indirect=True)
def test_each_layer_is_what_it_is_alone(twins: Twins) -> None:
    grown(twins)
    has_sketch = twins.pool.sketch or "planes" in str(twins.layout)
    for method in METHODS:
        if method in ("two_stage", "sketch") and not has_sketch:
            continue
        for budget in BUDGETS:

            def choose(b: Batch, layer: int, q: Floats, starts: npt.NDArray[np.int32]) -> object:
                picked = b.select(layer, q, starts, budget, method)  # noqa: B023
                return (
                    picked.pages,
                    picked.scores,
                    b.fetch(layer, picked),
                    b.fetch(layer, picked, decoded=False),
                    b.attend(layer, q, starts, picked, page_mass=True),
                )

            twins.compare(choose)
    twins.compare(lambda b, layer, q, starts: b.attend(layer, q, starts, softcap=9.0))
    assert twins.pool.admin.check(deep=True)["clean"]


@pytest.mark.parametrize("twins", CASES[:4], indirect=True)
def test_decode_and_truncate(twins: Twins) -> None:
    grown(twins)
    windowed = any(twins.layout.windows)  # which have given back what a longer cut would see
    for cut in (None, None) if windowed else (None, 3, 20):
        for whole, parts in twins.sequences:
            if cut:
                tokens = len(whole) - cut
                for one in (whole, *parts):
                    one.truncate(tokens)
        batch, of_groups = twins.batches()
        starts = np.arange(len(twins.sequences) + 1, dtype=np.int32)
        for layer, group in enumerate(twins.order):
            rows = int(starts[-1])
            q = twins.queries(layer, rows)
            k, v = twins.keys(layer, rows), twins.values(layer, rows)
            budget = Budget(pages=4)
            mine = batch.decode(layer, q, k, v, starts, budget)
            yours = of_groups[group].decode(twins.at[layer], q, k, v, starts, budget)
            assert same((mine.out, mine.lse, mine.method), (yours.out, yours.lse, yours.method))
    twins.compare(lambda b, layer, q, starts: b.attend(layer, q, starts), rows=1)


@pytest.mark.parametrize("twins", CASES[:3], indirect=True)
def test_blocks_of_an_engine(twins: Twins) -> None:
    """append_blocks and fetch_blocks, where a window has not passed the blocks."""
    tokens, count = twins.layout.page_tokens, 2
    whole, of_groups = twins.batches()
    starts, ids = np.array([0, count], np.int32), np.array([1, 0], np.int32)
    wanted = []
    for layer, group in enumerate(twins.order):
        shape = twins.layout.of_layer(layer)
        dtype = NUMPY_DTYPES[DTYPES.index(shape.dtype)]
        own = shape.values == "own"
        k = twins.rng.standard_normal((3, shape.kv_heads, tokens, shape.head_dim)).astype(dtype)
        v = twins.rng.standard_normal((3, shape.kv_heads, tokens, shape.value_head_dim))
        values = v.astype(dtype) if own else None
        whole.append_blocks(layer, k, values, ids, starts)
        of_groups[group].append_blocks(twins.at[layer], k, values, ids, starts)
        wanted.append((k, values))
    twins.compare(lambda b, layer, q, _: b.attend(layer, q, np.array([0, len(q)], np.int32)))
    for layer, (k, values) in enumerate(wanted):
        got_k = np.zeros_like(k)
        got_v = None if values is None else np.zeros_like(values)
        whole.fetch_blocks(layer, got_k, got_v, ids, starts, [0])
        assert same(
            (got_k[:2], got_v if got_v is None else got_v[:2]),
            (k[:2], values if values is None else values[:2]),
        )


def test_a_layer_takes_rows_of_its_own_shape(rng: np.random.Generator) -> None:
    twins = Twins("windows of wide heads", 4, rng, None)
    with twins.stack:
        rows = np.zeros((1, 4, 16), np.float32)
        whole, _ = twins.sequences[0]
        whole.append(0, rows, rows)
        with pytest.raises(BadArgumentError, match=r"k has shape .*, wanted \(1, 2, 48\)"):
            whole.append(1, rows, rows)
        with pytest.raises(BadArgumentError, match="layer 5: the pool has 5"):
            whole.append(5, rows, rows)
        with pytest.raises(UnsupportedError, match="4 x 16 float32, 2 x 48 float32: this works"):
            _ = twins.layout.kv_heads
        assert "4 kv heads x 16 float32 and 2 kv heads x 48 float32" in twins.layout.summary


@matrix(name=["windows of wide heads", "latent and indexers", "codes"], checksum=[True, False])
def test_local_copies_and_a_worker(
    name: str, checksum: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The same bits from copies in this process, and from the process near the memory."""
    twins = Twins(name, 16, rng, tmp_path / "pool")
    with twins.stack:
        grown(twins)
        batch, _ = twins.batches()
        starts = np.array([0, 1, 2], np.int32)
        queries = [twins.queries(n, 2) for n in range(twins.layout.layers)]

        def answers() -> list[Bytes]:
            made: list[object] = []
            for layer, q in enumerate(queries):
                picked = batch.select(layer, q, starts, Budget(pages=4))
                made += [picked.pages, picked.scores, *batch.attend(layer, q, starts, picked)]
                made += [*batch.attend(layer, q, starts), *batch.fetch(layer, picked)]
            return [np.ascontiguousarray(one).view(np.uint8) for one in made]

        here = answers()
        with LocalTier(twins.pool, "4MiB") as tier:
            for layer, q in enumerate(queries):
                picked = batch.select(layer, q, starts, Budget(pages=4))
                assert not tier.promote(units_of(batch, layer, picked)).refused
            assert all(map(np.array_equal, here, answers()))
            assert tier.stats()["reads_local"] > 0
        with WorkerProcess(tmp_path / "pool"):
            twins.pool.use_worker("only")
            assert all(map(np.array_equal, here, answers()))
            use = twins.pool.worker
            assert min(use.selects, use.attends) > 0 == use.selects_here + use.attends_here, use


def test_states_take_the_pages_that_hold_most(rng: np.random.Generator) -> None:
    layout = KVLayout.of([INDEXER, WIDE], page_tokens=8, states=States(70_000, 3))
    with CXLPool.create("anonymous:", layout=layout, capacity="16MiB") as pool:
        sequence = pool.sequence()
        for layer in range(layout.layers):
            shape = layout.of_layer(layer)
            rows = rng.standard_normal((24, shape.kv_heads, shape.head_dim), np.float32)
            values = None if shape.values != "own" else rows[..., : shape.value_head_dim]
            dtype = NUMPY_DTYPES[DTYPES.index(shape.dtype)]
            sequence.append(layer, rows.astype(dtype), values)
        states = rng.integers(0, 256, 70_000, np.uint8)
        pool.publish_prefix(sequence, range(24), states=states)
        hit = pool.match_prefix(range(30))
        assert hit.tokens == 24
        np.testing.assert_array_equal(hit.read_states(), states)
        plan = sizes.plan(layout, 16 << 20)
        taken = pool.stats()["pages_published"] - plan.geometry["part_count"] * 3
        assert taken == plan.state_pages
        assert 70_000 / taken > 0.8 * plan.geometry["layer_bytes"]


def test_where_pieces_lie() -> None:
    """No two pieces share a byte, all lie within their page, and pages waste little."""
    for name, (groups, order) in GROUPS.items():
        layout = KVLayout.of(groups, order, page_tokens=16)
        geometry = sizes.plan(layout, 16 << 20).geometry
        end = geometry["layers_offset"] + geometry["layer_bytes"]
        taken: dict[int, list[tuple[int, int]]] = {}
        used = 0
        for layer, place in enumerate(layer_places(layout, geometry)):
            heads = layout.of_layer(layer).kv_heads
            for kind, size in enumerate(place.piece_bytes):
                first = place.offsets[kind]
                if size:
                    assert geometry["layers_offset"] <= first <= end - heads * size
                    assert place.slot_bytes[kind] == geometry["layer_bytes"]
                    taken.setdefault(place.part, []).append((first, first + heads * size))
                    used += heads * size
        for spans in taken.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), name
        assert used > 0.7 * geometry["layer_bytes"] * geometry["part_count"], name


GROUP_TABLE, FEATURES, CRC = 504, 2072, 2108  # of the superblock
ROW = ("layers", "kv_heads", "head_dim", "value_head_dim", "dtype", "kind", "values", "window")


@pytest.mark.parametrize(
    ("group", "field", "value", "text"),
    [
        (0, "kv_heads", 8, "its offsets do not follow"),
        (1, "head_dim", 16, "its offsets do not follow"),
        (1, "kv_heads", 0, "the shape of group 1 is of 0 kv heads"),
        (0, "head_dim", 5000, "head_dim is 5000, outside 1 to 4096"),
        (1, "dtype", 3, "objects are bytes"),
        (1, "values", 2, "values code 2"),
        (1, "value_head_dim", 49, ""),
        (1, "kind", 1, "a feature that this build does not have"),
        (2, "kv_heads", 1, ""),
        (None, "feature", 0, "a feature that this build does not have"),
    ],
)
def test_a_superblock_of_other_shapes(
    tmp_path: Path, group: int | None, field: str, value: int, text: str
) -> None:
    """Its CRC is right; it is refused, or nothing depends on what was changed."""
    path, layout = tmp_path / "pool", KVLayout.of([OWN, WIDE], page_tokens=16)
    CXLPool.create(path, layout=layout, capacity="4MiB").close()
    block = bytearray(poke(path, 0, b"", 4096))
    at = FEATURES if group is None else GROUP_TABLE + 32 * group + 4 * ROW.index(field)
    block[at : at + 4] = value.to_bytes(4, "little")
    block[CRC : CRC + 4] = _core.crc32c(bytes(block[:CRC])).to_bytes(4, "little")
    before = poke(path, 0, block)
    if text:
        with pytest.raises(GeometryError, match=text):
            CXLPool.open(path)
    else:
        CXLPool.open(path).close()
    poke(path, 0, before)
    with CXLPool.open(path) as pool:
        assert pool.layout == layout


def test_bad_memory_of_one_page(tmp_path: Path, rng: np.random.Generator) -> None:
    """It takes that page and its neighbours in the same 4 KiB, and nothing else."""
    layout = KVLayout.of([WIDE, OWN], page_tokens=16)
    path = tmp_path / "pool"
    with CXLPool.create(path, layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        for layer in range(layout.layers):
            own = layout.of_layer(layer)
            k = rng.standard_normal((64, own.kv_heads, own.head_dim), np.float32)
            sequence.append(layer, k, k[..., : own.value_head_dim])
        hurt = sequence.places(0)
        faults.poison(path, int(hurt.keys[1]) // 4096 * 4096)
        with pytest.raises(PoisonError, match=r"[1-3] pages were retired"):
            sequence.fetch(0)
        assert 1 <= pool.stats()["pages_retired"] <= 3
        sequence.release()
