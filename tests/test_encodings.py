"""One suite over the encodings of keys and values, the instruction sets and the methods.

What a pool keeps is that of support/kept.py; scores and attention are those of
support/reference.py over what is kept, as near as the rounding of queries and weights allows. How
tokens came, by which path, changes no bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Selection, Sequence
from cxlkv.arrays import Doubles, Floats
from cxlkv.errors import BadArgumentError
from cxlkv.prefix import prefix_keys

from .conftest import audit
from .support import kept, reference
from .support.lengths import matrix
from .support.one_layer import ISAS
from .test_records import names_of_keys, read_all

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
STEP = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 1e-6}
"""Error of what fetch gives, relative to the largest channel of its row."""
METHODS = ("exact", "digest", "two_stage", "attention")
FP8 = "fp8_e4m3"
ENCODED = [
    (k, v)
    for k, v in itertools.product(("none", "int8", "int4"), repeat=2)
    if (k, v) != ("none", "none")
]
PLANES = ("progressive", "progressive")
ENCODED += [(FP8, FP8), (FP8, "int4"), ("int8", FP8), (FP8, "none"), ("none", FP8)]
ENCODED += [PLANES, ("progressive", "int8"), ("int4", "progressive"), ("none", "progressive")]
BOTH = (("int8", "int4"), ("int4", "int8"), PLANES)
"""Pairs of codes."""
PAIRS = (*BOTH, (FP8, FP8))


@pytest.fixture(params=ENCODED, ids="-".join)
def encodings(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Encodings of keys and values: all pairs of codes, and some with planes, or in fp8."""
    pair: tuple[str, str] = request.param
    return pair


@dataclass(frozen=True)
class Case:
    """Keys and values [tokens, kv_heads, dim] by sequence, of the dtype; queries [rows, q_heads,
    dim] float32."""

    layout: KVLayout
    keys: list[Floats]
    values: list[Floats]
    queries: Floats
    starts: npt.NDArray[np.int32]

    def kept(self, kind: int) -> list[Doubles]:
        encoding = (self.layout.k_encoding, self.layout.v_encoding)[kind]
        own = (self.keys, self.values)[kind]
        return [kept.kept(rows.astype(np.float32), encoding) for rows in own]

    @property
    def scale(self) -> float:
        return float(self.layout.head_dim**-0.5)

    def logit_error(self) -> float:
        """Largest error of any query's logit to any key kept."""
        heads = self.layout.kv_heads
        group = self.queries.shape[1] // heads
        return max(
            kept.score_error(
                own[:, q_head // group],
                self.queries[row, q_head].astype(np.float64),
                self.scale,
                self.layout.k_encoding,
            )
            for i, own in enumerate(self.kept(0))
            for row in range(int(self.starts[i]), int(self.starts[i + 1]))
            for q_head in range(self.queries.shape[1])
        )


def layout_of(
    encodings: tuple[str, str],
    *,
    dim: int = 16,
    value_dim: int | None = None,
    page_tokens: int = 4,
    dtype: str = "float32",
    kv_heads: int = 2,
    layers: int = 1,
    window: int | None = None,
) -> KVLayout:
    group = LayerGroup(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=dim,
        value_head_dim=value_dim,
        dtype=dtype,
        window=window,
        k_encoding=encodings[0],
        v_encoding=encodings[1],
    )
    return KVLayout.of([group], page_tokens=page_tokens)


def drawn(rng: np.random.Generator, layout: KVLayout, tokens: int) -> tuple[Floats, Floats]:
    """Keys and values of one layer, with channels that are larger than others, as models have."""
    made = []
    for dim in (layout.head_dim, layout.value_head_dim):
        rows = rng.standard_normal((tokens, layout.kv_heads, dim))
        rows *= np.exp(rng.standard_normal(dim))
        made.append(rows.astype(DTYPES[layout.dtype]))
    return made[0], made[1]


def case_of(
    rng: np.random.Generator,
    layout: KVLayout,
    lengths: tuple[int, ...],
    rows: tuple[int, ...],
    group: int = 2,
) -> Case:
    pairs = [drawn(rng, layout, n) for n in lengths]
    return Case(
        layout,
        [k for k, _ in pairs],
        [v for _, v in pairs],
        rng.standard_normal((sum(rows), layout.kv_heads * group, layout.head_dim), np.float32),
        np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
    )


def pool_of(layout: KVLayout, tokens: int = 100, **more: object) -> CXLPool:
    capacity = 4 * (tokens + 2 * layout.page_tokens) * layout.token_bytes + (8 << 20)
    where = more.pop("path", "anonymous:")
    more.setdefault("sketch", layout.k_encoding != "progressive")  # which has estimates without
    return CXLPool.create(
        where,  # type: ignore[arg-type]
        layout=layout,
        capacity=capacity,
        threads=1,
        **more,  # type: ignore[arg-type]
    )


def rows_of(pages: object, tokens: int) -> Doubles:
    """What fetch gives of one sequence, [tokens, kv_heads, dim]; the rest must be zeros."""
    got = np.asarray(pages).astype(np.float64).transpose(1, 2, 0, 3)
    flat = got.reshape(-1, *got.shape[2:])
    assert not flat[tokens:].any()
    return flat[:tokens]


def bits(array: object) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def seen(sequence: Sequence, queries: Floats) -> list[bytes]:
    """All that can be asked of each layer of a sequence, as bytes."""
    found: list[bytes] = []
    for layer in range(sequence._layout.layers):
        picked = None
        for method in METHODS:
            picked = sequence.select(layer, queries, Budget(pages=4), method=method)
            found += [bits(picked.pages), bits(picked.scores)]
        found += map(bits, sequence.attend(layer, queries, picked))
        found += map(bits, sequence.attend(layer, queries, softcap=3.0))
        found += map(bits, sequence.fetch(layer))
    return found


# ---- what is kept, and what comes of it ----


@matrix(
    encodings=ENCODED,
    dtype=DTYPES,
    sizes=[
        (16, 16, 1),
        (80, 24, 7),
        (96, 256, 8),
        (256, 100, 16),
        (100, 3, 20),
        (576, 64, 64),
        (1, 5, 32),
    ],
)
def test_fetch_gives_what_the_reference_keeps(
    encodings: tuple[str, str],
    dtype: str,
    sizes: tuple[int, int, int],
    rng: np.random.Generator,
) -> None:
    dim, value_dim, page_tokens = sizes
    layout = layout_of(
        encodings, dim=dim, value_dim=value_dim, page_tokens=page_tokens, dtype=dtype
    )
    tokens = 2 * page_tokens + page_tokens // 2
    case = case_of(rng, layout, (tokens,), (1,))
    with pool_of(layout, tokens) as pool:
        sequence = pool.sequence()
        sequence.append(0, case.keys[0], case.values[0])
        for kind, pages in enumerate(sequence.fetch(0)):
            got, want = rows_of(pages, tokens), case.kept(kind)[0]
            if encodings[kind] in ("none", FP8):
                np.testing.assert_array_equal(got, want)
            step = STEP[dtype] * np.abs(want).max(axis=-1, keepdims=True)
            assert (np.abs(got - want) <= step + 2**-25).all()  # the smallest half is 2^-24
        audit(pool)


@pytest.mark.parametrize(
    "bits_of",
    [("int8", 0.012), ("int4", 0.19), ("progressive", 0.012)],
    ids=lambda given: given[0],
)
def test_codes_are_near_what_they_stand_for(
    bits_of: tuple[str, float], rng: np.random.Generator
) -> None:
    """Squared error of Gaussian rows of 128 channels, as the decision says: 4.2e-5 and 0.0108."""
    encoding, root = bits_of
    rows = rng.standard_normal((400, 128), np.float32)
    error = kept.kept(rows, encoding) - rows
    relative = float((error**2).sum() / (rows.astype(np.float64) ** 2).sum())
    assert root**2 / 5 < relative < root**2
    assert relative == pytest.approx(0.0108 if encoding == "int4" else 4.2e-5, rel=0.1)


def check_lists(
    case: Case, picked: Selection, budget: Budget, method: str, window: int | None
) -> None:
    """Each list has as many pages as the reference's, with its scores, and none is left out that
    is better than one that was taken, all of it as near as the logits are."""
    layout, off = case.layout, case.logit_error()
    keys = [own.astype(np.float32) for own in case.kept(0)]
    group = case.queries.shape[1] // layout.kv_heads
    for i, own in enumerate(keys):
        for row in range(int(case.starts[i]), int(case.starts[i + 1])):
            position = len(own) - (int(case.starts[i + 1]) - row)
            for head in range(layout.kv_heads):
                queries = [
                    (position, case.queries[row, head * group + g].astype(np.float64))
                    for g in range(group)
                ]
                want = reference.list_scores(
                    own[:, head], queries, budget, method, layout.page_tokens, case.scale, window
                )
                near = math.expm1(2 * off) if reference.is_by_mass(budget, method) else off
                if method == "digest" and layout.k_encoding in kept.BITS:
                    near += digest_slack(own[:, head], queries, case.scale)
                check_list(picked, row, head, want, near + 1e-6)


def digest_slack(keys: Floats, queries: list[tuple[int, Doubles]], scale: float) -> float:
    """How much wider bounds in 8 bits are than the true ones: a step of each channel."""
    step = 1.01 * float(np.abs(keys).max()) / 127
    return scale * step * max(float(np.abs(query).sum()) for _, query in queries)


def check_list(picked: Selection, row: int, head: int, want: list[float], near: float) -> None:
    count = int(picked.counts[row, head])
    pages = picked.pages[row, head, :count].tolist()
    scores = np.asarray(picked.scores)[row, head, :count]
    for page, score in zip(pages, scores.tolist(), strict=True):
        assert abs(score - want[page]) <= near, (row, head, page)
    left = [score for page, score in enumerate(want) if page not in pages]
    if left and len(pages):
        assert max(left) <= min(want[page] for page in pages) + 2 * near


SHAPES = {
    "one": {"page_tokens": 1, "dim": 16},
    "seven": {"page_tokens": 7, "dim": 80, "value_dim": 24},
    "eight": {"page_tokens": 8, "dim": 64, "dtype": "bfloat16"},
    "sixteen": {"page_tokens": 16, "dim": 100, "value_dim": 36, "dtype": "float16"},
    "twenty": {"page_tokens": 20, "dim": 96, "kv_heads": 3},
    "window": {"page_tokens": 7, "dim": 32, "window": 40},
    "many": {"page_tokens": 32, "dim": 40, "kv_heads": 1},
}


@matrix(
    name=SHAPES,
    pair=[*PAIRS, ("none", "int8"), ("int4", "none"), (FP8, "int8"), ("int4", FP8)],
    times=2,
)
def test_select_and_attend_are_the_references(
    name: str, pair: tuple[str, str], rng: np.random.Generator
) -> None:
    layout = layout_of(pair, **SHAPES[name])  # type: ignore[arg-type]
    window = layout.windows[0]
    lengths = (5 * layout.page_tokens + layout.page_tokens // 2 + 1, 3 * layout.page_tokens)
    group = 20 if name == "many" else int(rng.integers(1, 5))
    rows = (2, 1) if layout.page_tokens > 1 else (1, 1)
    case = case_of(rng, layout, lengths, rows, group)
    budget = Budget(pages=2, sinks=0, recent=0)
    with pool_of(layout, sum(lengths)) as pool:
        batch = pool.batch([pool.sequence() for _ in lengths])
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        batch.append(0, np.concatenate(case.keys), np.concatenate(case.values), ends)
        for method in ("exact", "digest", "attention"):
            picked = batch.select(0, case.queries, case.starts, budget, method, case.scale)
            check_lists(case, picked, budget, method, window)
        by_mass = Budget(mass=0.6, sinks=0, recent=0)
        masses = batch.select(0, case.queries, case.starts, by_mass)
        check_lists(case, masses, by_mass, "exact", window)
        for chosen, softcap in ((None, None), (picked, None), (None, 2.0)):
            check_attend(
                case,
                batch.attend(0, case.queries, case.starts, chosen, softcap=softcap),
                chosen,
                softcap,
                window,
            )
        audit(pool)


def check_attend(
    case: Case,
    got: tuple[object, object],
    picked: Selection | None,
    softcap: float | None,
    window: int | None,
) -> None:
    keys = [own.astype(np.float32) for own in case.kept(0)]
    values = [own.astype(np.float32) for own in case.kept(1)]
    out, lse = reference.attend(
        keys,
        values,
        case.queries,
        case.starts,
        page_tokens=case.layout.page_tokens,
        picked=picked,
        softcap=softcap,
        window=window,
    )
    off = case.logit_error()
    longest = max(kept.out_error(own, off, case.layout.v_encoding) for own in case.kept(1))
    difference = np.linalg.norm(np.asarray(got[0]).astype(np.float64) - out, axis=-1)
    assert difference.max() <= longest
    np.testing.assert_allclose(np.asarray(got[1]), lse, atol=off + 2e-5, rtol=2e-6)


def test_far_from_the_raw_numbers_no_more_than_codes_are(rng: np.random.Generator) -> None:
    """The reference is not what the pool does by accident: 8 bits are near the raw attention."""
    layout = layout_of(("int8", "int8"), dim=64, page_tokens=16)
    case = case_of(rng, layout, (200,), (1,))
    with pool_of(layout, 200) as pool:
        sequence = pool.sequence()
        sequence.append(0, case.keys[0], case.values[0])
        got, _ = sequence.attend(0, case.queries[0], scale=0.05)
    raw, _ = reference.attend(
        case.keys, case.values, case.queries, case.starts, page_tokens=16, scale=0.05
    )
    length = float(np.linalg.norm(raw[0], axis=-1).max())
    assert np.linalg.norm(np.asarray(got) - raw[0], axis=-1).max() < 0.05 * length


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_instruction_sets_give_the_same_bits(
    pair: tuple[str, str], force_isa: Callable[[str], str], rng: np.random.Generator
) -> None:
    """For fetch, and for scores by codes; sums of floats, of softmax and digests differ in their
    order.
    """
    layout = layout_of(pair, dim=80, value_dim=36, page_tokens=20)
    case = case_of(rng, layout, (107,), (2,), 3)
    found, outs = dict[str, list[bytes]](), dict[str, Doubles]()
    for isa in ISAS:
        try:
            force_isa(isa)
        except pytest.skip.Exception:
            continue
        with pool_of(layout, 107) as pool:
            sequence = pool.sequence()
            sequence.append(0, case.keys[0][:50], case.values[0][:50])
            sequence.append(0, case.keys[0][50:], case.values[0][50:])
            picked = sequence.select(0, case.queries, Budget(pages=3), method="exact")
            found[isa] = [bits(picked.pages)]
            if pair[0] in kept.BITS:
                found[isa].append(bits(picked.scores))
            found[isa] += [bits(pages) for pages in sequence.fetch(0)]
            outs[isa] = np.asarray(sequence.attend(0, case.queries)[0]).astype(np.float64)
    assert len(found) > 1
    for isa, other in found.items():
        assert other == found["serial"], isa
        np.testing.assert_allclose(outs[isa], outs["serial"], rtol=1e-4, atol=1e-4)


# ---- however the tokens came ----


def chunks(rng: np.random.Generator, tokens: int, most: int) -> Iterator[tuple[int, int]]:
    first = 0
    while first < tokens:
        last = min(tokens, first + int(rng.integers(1, most + 1)))
        yield first, last
        first = last


def backwards(rows: Floats) -> Floats:
    """The same numbers, one behind the other from the end on."""
    return np.ascontiguousarray(rows[::-1])[::-1]


def apart(rows: Floats) -> Floats:
    """The same numbers, with others in between."""
    wide = np.full((*rows.shape[:-1], 2 * rows.shape[-1]), 7, rows.dtype)
    wide[..., ::2] = rows
    return wide[..., ::2]


def heads_first(rows: Floats) -> Floats:
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).transpose(1, 0, 2)


@matrix(encodings=ENCODED, page_tokens=[7, 16, 20], dtype=["bfloat16", "float32"])
def test_any_chunks_and_strides_give_the_same_bits(
    encodings: tuple[str, str], page_tokens: int, dtype: str, rng: np.random.Generator
) -> None:
    layout = layout_of(encodings, dim=24, value_dim=40, page_tokens=page_tokens, dtype=dtype)
    case = case_of(rng, layout, (6 * page_tokens + 5,), (2,), 3)
    keys, values = case.keys[0], case.values[0]
    with pool_of(layout, 10 * len(keys)) as pool:
        whole = pool.sequence()
        whole.append(0, keys, values)
        want = seen(whole, case.queries)
        for most in (1, 3, page_tokens, 3 * page_tokens):
            for form in (np.asarray, backwards, apart, heads_first):
                other = pool.sequence()
                for first, last in chunks(rng, len(keys), most):
                    other.append(0, form(keys[first:last]), form(values[first:last]))
                assert seen(other, case.queries) == want, (most, form)
                other.release()
        whole.release()
        audit(pool)


def test_blocks_give_the_same_bits(encodings: tuple[str, str], rng: np.random.Generator) -> None:
    layout = layout_of(encodings, dim=24, value_dim=40, page_tokens=20)
    case = case_of(rng, layout, (120,), (1,))
    keys, values = (
        a[0].reshape(3, 40, 2, -1).transpose(0, 2, 1, 3) for a in (case.keys, case.values)
    )
    k, v = (np.ascontiguousarray(a[::-1]) for a in (keys, values))
    with pool_of(layout, 500) as pool:
        whole, other = pool.sequence(), pool.sequence()
        whole.append(0, case.keys[0], case.values[0])
        batch = pool.batch([other])
        batch.append_blocks(0, k, v, np.array([2, 1, 0], np.int32), [0, 3])
        assert seen(other, case.queries) == seen(whole, case.queries)
        for array in (k, v):
            array[:] = 9
        batch.fetch_blocks(0, k, v, np.array([1, 0, 2], np.int32), [0, 3], [0])
        for array, pages in zip((k, v), other.fetch(0), strict=True):
            got = array[[1, 0, 2]].transpose(1, 0, 2, 3).reshape(2, 6, 20, -1)
            np.testing.assert_array_equal(got, np.asarray(pages))
        audit(pool)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_order_of_a_batch_changes_no_bit(
    pair: tuple[str, str], rng: np.random.Generator
) -> None:
    layout = layout_of(pair, dim=24, page_tokens=8)
    lengths = (50, 9, 33, 3)
    case = case_of(rng, layout, lengths, (1, 1, 1, 1))
    with pool_of(layout, 400) as pool:
        found = []
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
            batch = pool.batch([pool.sequence() for _ in lengths])
            for part in (0, 1):
                cut = [n // 2 for n in lengths]
                own = [slice(0, cut[i]) if part == 0 else slice(cut[i], None) for i in order]
                pairs = list(zip(order, own, strict=True))
                starts = np.cumsum([0, *(len(case.keys[i][s]) for i, s in pairs)])
                k = np.concatenate([case.keys[i][s] for i, s in pairs])
                v = np.concatenate([case.values[i][s] for i, s in pairs])
                batch.append(0, k, v, starts)
            picked = batch.select(0, case.queries[order], case.starts, Budget(pages=3))
            arrays = [
                picked.scores,
                *batch.fetch(0),
                *batch.attend(0, case.queries[order], case.starts),
            ]
            back = np.argsort(order)
            found.append([bits(np.asarray(a)[back]) for a in arrays])
        assert found[0] == found[1] == found[2]


def test_forks_and_what_was_truncated_change_no_bit(
    encodings: tuple[str, str], rng: np.random.Generator
) -> None:
    """Speculation: tokens that are taken back leave nothing behind."""
    layout = layout_of(encodings, dim=24, value_dim=40, page_tokens=20)
    case = case_of(rng, layout, (107,), (2,))
    keys, values = case.keys[0], case.values[0]
    wrong = [100 * np.roll(a, 1, axis=0) for a in (keys, values)]
    with pool_of(layout, 1000) as pool:
        whole = pool.sequence()
        whole.append(0, keys, values)
        want = seen(whole, case.queries)
        for cut in (1, 19, 20, 21, 63, 95, 106):
            one = pool.sequence()
            one.append(0, keys[:cut], values[:cut])
            other = one.fork()
            one.append(0, wrong[0][cut : cut + 44], wrong[1][cut : cut + 44])
            one.truncate(cut)
            one.append(0, keys[cut:], values[cut:])
            other.append(0, keys[cut:], values[cut:])
            assert seen(one, case.queries) == want, cut
            assert seen(other, case.queries) == want, cut
            one.release()
            other.release()
        whole.release()
        audit(pool)


@matrix(encodings=ENCODED, filled=[0, 1, 5, 17, 19])
def test_handles_and_published_tails_change_no_bit(
    encodings: tuple[str, str], filled: int, rng: np.random.Generator
) -> None:
    layout = layout_of(encodings, dim=24, value_dim=40, page_tokens=20, layers=2)
    tokens = 40 + filled
    case = case_of(rng, layout, (tokens + 30,), (2,))
    keys, values = case.keys[0], case.values[0]
    ids = list(range(tokens))
    with pool_of(layout, 1000) as pool:
        first, want = pool.sequence(), pool.sequence()
        for sequence, end in ((first, tokens), (want, tokens + 30)):
            for layer in range(2):
                sequence.append(layer, keys[:end], values[:end])
        adopted = pool.adopt(first.handle)
        pool.publish_prefix(first, ids, tail=True)
        with pool.match_prefix([*ids, 1000]) as hit:
            assert hit.tokens == tokens
            matched = hit.sequence()
        assert seen(adopted, case.queries) == seen(matched, case.queries)
        assert seen(adopted, case.queries) == seen(first, case.queries)
        for other in (adopted, matched, first):
            for layer in range(2):
                other.append(layer, keys[tokens:], values[tokens:])
            assert seen(other, case.queries) == seen(want, case.queries)
        for sequence in (first, want, adopted, matched):
            sequence.release()
        audit(pool)


def test_a_published_tail_says_nothing_of_other_texts(
    encodings: tuple[str, str], rng: np.random.Generator
) -> None:
    """All of its record is the same, whatever was written and taken back before it."""
    layout = layout_of(encodings, dim=64, page_tokens=64)
    keys, values = drawn(rng, layout, 69)
    others = drawn(rng, layout, 300)
    found = []
    for noisy in (False, True):
        with pool_of(layout, 500) as pool:
            sequence = pool.sequence()
            if noisy:
                pool.sequence().append(0, *others)
            sequence.append(0, keys, values)
            if noisy:
                sequence.append(0, others[0][:50], others[1][:50])
                sequence.truncate(69)
            assert pool.publish_prefix(sequence, range(69), tail=True) == 2
            names = names_of_keys(pool, prefix_keys(range(69), 64, tail=True))
            found.append(read_all(pool, names))
    np.testing.assert_array_equal(found[0], found[1])


# ---- bytes that are kept as they are ----


def in_bytes(rows: Floats, kind: str) -> object:
    """Rows in float8_e4m3fn as the reference has them, held by one library or another."""
    found = kept.in_fp8(rows.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
    if kind == "float8":
        return found
    if kind == "torch":
        return torch.from_numpy(found.view(np.uint8)).view(torch.float8_e4m3fn)
    return found.view(np.uint8)


@pytest.mark.parametrize("page_tokens", [7, 16])
@pytest.mark.parametrize("kind", ["float8", "torch", "uint8"])
def test_bytes_are_kept_as_they_are(kind: str, page_tokens: int, rng: np.random.Generator) -> None:
    """Keys, values or both of them, in any chunks and strides, beside rows of the pool's dtype."""
    layout = layout_of((FP8, FP8), dim=24, value_dim=40, page_tokens=page_tokens, dtype="bfloat16")
    case = case_of(rng, layout, (5 * page_tokens + 3,), (2,), 3)
    keys, values = case.keys[0], case.values[0]
    k, v = in_bytes(keys, kind), in_bytes(values, kind)
    with pool_of(layout, 1000) as pool:
        whole = pool.sequence()
        whole.append(0, keys, values)
        want = seen(whole, case.queries)
        for most, pair in ((1, (k, v)), (20, (keys, v)), (33, (k, values)), (1000, (k, v))):
            other = pool.sequence()
            for first, last in chunks(rng, len(keys), most):
                other.append(0, *(rows[first:last] for rows in pair))  # type: ignore[index]
            assert seen(other, case.queries) == want, most
        other = pool.sequence()
        other.append(0, heads_first(np.asarray(in_bytes(keys, "uint8"))), v)
        assert seen(other, case.queries) == want
        stepped = pool.sequence()
        stepped.append(0, k[:-2], v[:-2])  # type: ignore[index]
        new = [rows[-2:] for rows in (k, v)]  # type: ignore[index]
        batch, starts = pool.batch([stepped]), np.array([0, 2], np.int32)
        found = batch.decode(0, case.queries, new[0], new[1], starts)
        assert bits(found.out) == bits(other.attend(0, case.queries)[0])
        assert seen(stepped, case.queries) == want
        audit(pool)


@pytest.mark.parametrize("page_tokens", [8, 16])
def test_blocks_of_bytes_come_back_as_they_were(page_tokens: int, rng: np.random.Generator) -> None:
    """Any byte, also one that no number becomes, and however an engine packs them; and the same
    pages can be fetched as numbers."""
    layout = layout_of((FP8, FP8), dim=24, value_dim=40, page_tokens=page_tokens, dtype="float16")
    k, v = (rng.integers(0, 256, (3, 2, 16, dim), np.uint8) for dim in (24, 40))
    with pool_of(layout, 200) as pool:
        sequence = pool.sequence()
        batch = pool.batch([sequence])
        batch.append_blocks(0, k, v, np.array([2, 0], np.int32), [0, 2])
        got_k, got_v = np.zeros_like(k), np.zeros_like(v)
        batch.fetch_blocks(0, got_k, got_v, np.array([1, 0], np.int32), [0, 2], [0])
        np.testing.assert_array_equal(got_k[[1, 0]], k[[2, 0]])
        np.testing.assert_array_equal(got_v[[1, 0]], v[[2, 0]])
        numbers = [np.zeros(a.shape, np.float16) for a in (k, v)]
        places = np.array([1, 0], np.int32)
        batch.fetch_blocks(0, numbers[0], numbers[1], places, [0, 2], [0])
        for made, given in zip(numbers, (k, v), strict=True):
            want = given[[2, 0]].view(ml_dtypes.float8_e4m3fn).astype(np.float16)
            np.testing.assert_array_equal(made[[1, 0]], want)
        with pytest.raises(BadArgumentError, match="one dtype"):
            batch.fetch_blocks(0, k, numbers[1], places, [0, 2], [0])
        audit(pool)


def test_a_byte_that_is_no_number_is_seen(rng: np.random.Generator) -> None:
    """Its page is chosen first by keys and by digests, and what attends to it is NaN."""
    layout = layout_of((FP8, FP8), dim=24, page_tokens=8)
    case = case_of(rng, layout, (80,), (1,), 1)
    keys = np.asarray(in_bytes(case.keys[0], "uint8")).copy()
    keys[19, 0, 5] = 0xFF
    with pool_of(layout, 100) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, case.values[0])
        for method in ("exact", "digest", "two_stage"):
            budget = Budget(pages=2, sinks=0, recent=0)
            picked = sequence.select(0, case.queries[0], budget, method=method)
            assert 2 in picked.pages[0]
            assert np.isnan(np.asarray(picked.scores)[0]).sum() == 1
            assert not np.isnan(np.asarray(picked.scores)[1]).any()
        out = np.asarray(sequence.attend(0, case.queries[0])[0])
        assert np.isnan(out[0]).all()
        assert not np.isnan(out[1]).any()


@pytest.mark.parametrize("pair", [("none", "none"), ("int8", "int8"), (FP8, "none")], ids="-".join)
def test_bytes_are_for_what_is_kept_in_fp8(pair: tuple[str, str], rng: np.random.Generator) -> None:
    layout = layout_of(pair, dim=16, page_tokens=4)
    rows = drawn(rng, layout, 8)
    k, v = (np.asarray(in_bytes(a, "uint8")) for a in rows)
    with pool_of(layout) as pool:
        sequence = pool.sequence()
        for given in ((k, v), (rows[0], v)):
            with pytest.raises(BadArgumentError, match="uint8"):
                sequence.append(0, *given)
        keys, values = (a.transpose(1, 0, 2)[None] for a in (k, v))
        with pytest.raises(BadArgumentError, match=r"uint8|contiguous"):
            pool.batch([sequence]).append_blocks(0, keys, values, [0], [0, 1])
        assert len(sequence) == 0


@pytest.mark.parametrize(("dim", "value_dim"), [(80, 36), (256, 160), (1000, 1024)])
def test_numbers_in_a_byte_are_those_of_bfloat16_that_stand_for_them(
    dim: int, value_dim: int, rng: np.random.Generator
) -> None:
    """Selecting and attending near the data give what a pool without an encoding gives of the same
    numbers, to the bit where as many pages are taken together."""
    layout = layout_of((FP8, FP8), dim=dim, value_dim=value_dim, page_tokens=64, dtype="bfloat16")
    plain = layout.encoded("none")
    case = case_of(rng, layout, (64 * 5 + 9,), (2,), 3)
    found = []
    for one in (layout, plain):
        with pool_of(one, 400) as pool:
            sequence = pool.sequence()
            k, v = (kept.in_fp8(a[0].astype(np.float32)) for a in (case.keys, case.values))
            k, v = ((a + 0.0).astype(ml_dtypes.bfloat16) for a in (k, v))  # no -0
            sequence.append(0, k, v)
            found.append(seen(sequence, case.queries))
    assert found[0] == found[1]
