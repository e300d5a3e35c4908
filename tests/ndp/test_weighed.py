"""Log-weights of tokens and virtual rows in attend, against numpy's softmax in float64, token by
token: by encodings, windows, latents, several rows, lists of queries and of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Batch, Budget, CXLPool, Sequence
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.ndp.engine import Selection, VirtualRows, same_pages

from ..support.lengths import matrix
from ..support.one_layer import ISAS, Doubles, OneLayer, doubles

Floats = npt.NDArray[np.float32]
Result = tuple[Doubles, Doubles, Doubles]


@dataclass(frozen=True)
class Shape(OneLayer):
    """error: of an output, relative to the values' size."""

    error: float = 2e-5


SHAPES = {
    "float32": Shape(),
    "float16": Shape(dtype="float16", group=1, dim=24, value_dim=40, page=4),
    "bfloat16": Shape(dtype="bfloat16", group=4, dim=64, value_dim=64, error=1e-2),
    "odd": Shape(kv_heads=3, dim=10, value_dim=7, page=5),
    "tokens": Shape(page=1),
    "larger pages": Shape(page=80, kv_heads=1),
    "window": Shape(window=150),
    "latent": Shape(kv_heads=1, group=100, dim=32, value_dim=24, latent=True),
    "fp8_e4m3": Shape(encoding="fp8_e4m3", dim=32, value_dim=32, error=1e-3),
    "int8": Shape(encoding="int8", dim=64, value_dim=48, error=5e-3),
    "int4": Shape(encoding="int4", dim=64, value_dim=64, error=5e-3),
    "progressive": Shape(encoding="progressive", dim=64, value_dim=80, error=5e-3),
}


@dataclass(frozen=True)
class Seen:
    """What the rows of a kv head attend to: keys and values [n, dim], what is added to each logit
    [n], and the place of its page in the list, or -1 for a virtual row."""

    keys: Doubles
    values: Doubles
    added: Doubles
    places: npt.NDArray[np.int_]


def softmax(
    q: Doubles, seen: Seen, scale: float, softcap: float | None
) -> tuple[Doubles, float, Doubles]:
    """(out, lse, the share of each)."""
    if not len(seen.keys):
        return np.zeros(seen.values.shape[1]), -math.inf, np.zeros(0)
    logits = seen.keys @ q * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    logits += seen.added
    top = logits.max()
    weights = np.exp(logits - top)
    total = weights.sum()
    return weights @ seen.values / total, top + math.log(total), weights / total


class Texts:
    """Sequences of a pool in a batch, and their keys and values as they are kept, decoded."""

    def __init__(self, shape: Shape, pool: CXLPool, rng: np.random.Generator):
        self.shape, self.pool, self.rng = shape, pool, rng
        self.sequences: list[Sequence] = []
        self.kept: list[tuple[Doubles, Doubles]] = []  # [kv_heads, tokens, dim]

    def add(self, tokens: int) -> Sequence:
        shape, sequence = self.shape, self.pool.sequence()
        k = self.shape.drawn(self.rng, tokens, shape.kv_heads, shape.dim)
        v = (
            None
            if shape.latent
            else self.shape.drawn(self.rng, tokens, shape.kv_heads, shape.value_dim)
        )
        sequence.append(0, k, v)
        kept = [doubles(k).swapaxes(0, 1), doubles(k if v is None else v).swapaxes(0, 1)]
        if shape.encoding != "none":
            decoded = sequence.fetch(0)
            kept = [doubles(each).reshape(shape.kv_heads, -1, each.shape[-1]) for each in decoded]
        self.sequences.append(sequence)
        self.kept.append((kept[0], kept[1][..., : shape.value_dim]))
        return sequence

    @property
    def batch(self) -> Batch:
        return self.pool.batch(self.sequences)

    def pages(self, rows: list[int], per: str, k: int = 0) -> Selection:
        """Lists of pages in any order, each once, padded here and there; or of k pages each."""
        lists = []
        for sequence, count in zip(self.sequences, rows, strict=True):
            there = sequence.page_count(0)
            for _ in range(count if per == "query" else 1):
                heads = [self.rng.permutation(there) for _ in range(self.shape.kv_heads)]
                lists.append([np.where(self.rng.random(there) < 0.2, -1, one) for one in heads])
        wide = k or max(len(one[0]) for one in lists)
        pages = np.full((len(lists), self.shape.kv_heads, wide), -1, np.int32)
        for place, heads in zip(pages, lists, strict=True):
            for head, one in zip(place, heads, strict=True):
                head[: min(wide, len(one))] = one[:wide]
        starts = np.cumsum([0, *rows], dtype=np.int32)
        return Selection(
            pages, np.zeros(pages.shape, np.float32), (pages >= 0).sum(-1), 0, 0, per, starts
        )

    def weights(self, of: Selection, tokens: int | None = None) -> Floats:
        """Some far above the others, a fifth left out, and here and there a whole page."""
        shape = (*of.pages.shape, tokens or self.shape.page)
        weights = (4 * self.rng.standard_normal(shape)).astype(np.float32)
        weights[self.rng.random(shape) < 0.2] = -np.inf
        weights[self.rng.random(shape[:3]) < 0.2] = -np.inf
        return weights

    def rows(self, of: Selection, n: int) -> VirtualRows:
        """A third of them is not there: their keys and values are NaN."""
        shape = (*of.pages.shape[:2], n)
        k = self.rng.standard_normal((*shape, self.shape.dim), np.float32)
        v = self.rng.standard_normal((*shape, self.shape.value_dim), np.float32)
        log_counts = np.log(self.rng.integers(1, 40, shape)).astype(np.float32)
        gone = self.rng.random(shape) < 1 / 3
        log_counts[gone], k[gone], v[gone] = -np.inf, np.nan, np.nan
        return VirtualRows(k, v, log_counts)

    def expected(self, q: Floats, picked: Selection, scale: float, softcap: float | None) -> Result:
        """(out, lse, mass), row by row and head by head."""
        shape, starts = self.shape, picked.starts.tolist()
        heads = shape.kv_heads * shape.group
        out = np.zeros((starts[-1], heads, shape.value_dim))
        lse = np.full((starts[-1], heads), -math.inf)
        mass = np.zeros((starts[-1], shape.kv_heads, picked.pages.shape[-1]))
        for i, sequence in enumerate(self.sequences):
            for row in range(starts[i], starts[i + 1]):
                position = sequence.tokens(0) - (starts[i + 1] - row)
                low = max(0, position - shape.window + 1) if shape.window else 0
                one = row if picked.per == "query" else i
                for head in range(shape.kv_heads):
                    seen = self.seen(picked, one, head, i, (low, position + 1))
                    for q_head in range(head * shape.group, (head + 1) * shape.group):
                        asked = q[row, q_head].astype(np.float64)
                        out[row, q_head], lse[row, q_head], shares = softmax(
                            asked, seen, scale, softcap
                        )
                        is_page = seen.places >= 0
                        np.add.at(
                            mass[row, head], seen.places[is_page], shares[is_page] / shape.group
                        )
        return out, lse, mass

    def seen(self, picked: Selection, one: int, head: int, i: int, sight: tuple[int, int]) -> Seen:
        """By list `one` of sequence i, which sees the tokens [sight)."""
        shape, (kept_keys, kept_values) = self.shape, self.kept[i]
        keys, values = [np.empty((0, shape.dim))], [np.empty((0, shape.value_dim))]
        added, places = [], []
        for place, page in enumerate(picked.pages[one, head].tolist()):
            first = page * shape.page
            for token in range(max(first, sight[0]), min(first + shape.page, sight[1])):
                if page < 0:
                    continue
                weight = 0.0
                if picked.log_weights is not None:
                    mine = picked.log_weights[one, head, place]
                    weight = float(mine[(token - first) % len(mine)] if len(mine) > 1 else mine[0])
                if weight > -math.inf:
                    keys.append(kept_keys[head, token : token + 1])
                    values.append(kept_values[head, token : token + 1])
                    added.append(weight)
                    places.append(place)
        if picked.rows is not None:
            there = picked.rows.log_counts[one, head] > -np.inf
            keys.append(picked.rows.k[one, head, there].astype(np.float64))
            values.append(picked.rows.v[one, head, there].astype(np.float64))
            added.extend(picked.rows.log_counts[one, head, there].tolist())
            places.extend([-1] * int(there.sum()))
        return Seen(
            np.concatenate(keys), np.concatenate(values), np.array(added), np.array(places, int)
        )

    def check(
        self,
        picked: Selection,
        *,
        scale: float = 0.3,
        softcap: float | None = None,
        error: float = 0.0,
        loss: float | None = None,
    ) -> Result:
        """With and without the pages' mass."""
        shape, rows = self.shape, int(picked.starts[-1])
        q = self.rng.standard_normal((rows, shape.kv_heads * shape.group, shape.dim), np.float32)
        call = (0, q, picked.starts, picked, scale, softcap, error)
        out, lse, mass = map(doubles, self.batch.attend(*call, page_mass=True))
        plain = self.batch.attend(*call)
        np.testing.assert_array_equal(out, doubles(plain[0]))
        np.testing.assert_array_equal(lse, doubles(plain[1]))
        want = self.expected(q, picked, scale, softcap)
        limit = shape.error if loss is None else loss
        np.testing.assert_array_equal(lse == -np.inf, want[1] == -np.inf)
        np.testing.assert_allclose(out, want[0], atol=4 * limit)
        np.testing.assert_allclose(lse, want[1], atol=4 * limit, rtol=1e-5)
        np.testing.assert_allclose(mass, want[2], atol=limit)
        return out, lse, mass


def texts_of(shape: Shape, pool: CXLPool, rng: np.random.Generator) -> Texts:
    texts = Texts(shape, pool, rng)
    for tokens in (700, 150, 37):
        texts.add(tokens)
    return texts


@matrix(name=SHAPES, per=["query", "sequence"])
def test_weights_and_rows(name: str, per: str, rng: np.random.Generator) -> None:
    """Each alone and both, by tokens and by pages; several rows, which see other ends."""
    with SHAPES[name].pool() as pool:
        texts = texts_of(SHAPES[name], pool, rng)
        picked = texts.pages([30, 0, 37] if per == "sequence" else [3, 1, 5], per)
        weights, rows = texts.weights(picked), texts.rows(picked, 100)
        texts.check(replace(picked, log_weights=weights))
        texts.check(replace(picked, log_weights=texts.weights(picked, 1)), softcap=2.0)
        _, _, mass = texts.check(replace(picked, rows=rows))
        assert mass.sum(axis=-1).max() < 1
        texts.check(replace(picked, rows=rows, log_weights=weights), softcap=3.0)


@matrix(name=["float32", "bfloat16", "int8", "fp8_e4m3", "odd"], isa=ISAS, times=2)
def test_every_instruction_set(
    name: str, isa: str, rng: np.random.Generator, force_isa: Callable[[str], str]
) -> None:
    force_isa(isa)
    with SHAPES[name].pool() as pool:
        texts = texts_of(SHAPES[name], pool, rng)
        picked = texts.pages([1, 2, 1], "sequence")
        weights, rows = texts.weights(picked), texts.rows(picked, 70)
        texts.check(replace(picked, rows=rows, log_weights=weights))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8_e4m3", "progressive"])
def test_weights_of_zero_change_nothing(name: str, rng: np.random.Generator) -> None:
    """To the bit, and neither does no row at all; what calls without them give stays."""
    with SHAPES[name].pool() as pool:
        texts = texts_of(SHAPES[name], pool, rng)
        shape = SHAPES[name]
        q = rng.standard_normal((4, shape.kv_heads * shape.group, shape.dim), np.float32)
        picked = texts.pages([1, 1, 2], "sequence")
        zeros = np.zeros((*picked.pages.shape, shape.page), np.float32)
        none = texts.rows(picked, 0)
        plain = texts.batch.attend(0, q, picked.starts, picked, softcap=4.0)
        for other in (
            replace(picked, log_weights=zeros),
            replace(picked, log_weights=zeros[..., :1]),
            replace(picked, rows=none),
            picked,
        ):
            found = texts.batch.attend(0, q, picked.starts, other, softcap=4.0)
            np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(plain[0]))
            np.testing.assert_array_equal(np.asarray(found[1]), np.asarray(plain[1]))


@pytest.mark.parametrize("name", ["float32", "int4", "latent"])
def test_nothing_is_left(name: str, rng: np.random.Generator) -> None:
    """All tokens left out: 0 and -inf; then the rows alone, with lists of no page, too."""
    with SHAPES[name].pool() as pool:
        texts = texts_of(SHAPES[name], pool, rng)
        picked = texts.pages([2, 1, 1], "query")
        gone = np.full((*picked.pages.shape, SHAPES[name].page), -np.inf, np.float32)
        out, lse, mass = texts.check(replace(picked, log_weights=gone))
        assert not out.any()
        assert not mass.any()
        assert (lse == -np.inf).all()
        rows = texts.rows(picked, 33)
        _, lse, _ = texts.check(replace(picked, log_weights=gone, rows=rows))
        assert (lse > -np.inf).all()
        empty = replace(picked, pages=picked.pages[..., :0], scores=picked.scores[..., :0])
        texts.check(replace(empty, rows=rows))
        rows.log_counts[:] = -np.inf
        out, lse, _ = texts.check(replace(picked, log_weights=gone, rows=rows))
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_in_parts(threads: int, rng: np.random.Generator) -> None:
    """Thousands of rows beside few pages and beside many: each takes part once."""
    with SHAPES["float32"].pool(threads) as pool:
        texts = Texts(SHAPES["float32"], pool, rng)
        texts.add(5000)
        for k in (0, 3):
            picked = texts.pages([2], "sequence", k)
            texts.check(replace(picked, rows=texts.rows(picked, 3001)))


def test_what_is_left_out_is_not_read(rng: np.random.Generator) -> None:
    """Pages that nothing is left of, and keys of tokens that are left out, may be NaN."""
    shape = Shape(kv_heads=1)
    with shape.pool() as pool:
        sequence = pool.sequence()
        k, v = rng.standard_normal((2, 64, 1, 16), np.float32)
        k[5] = np.nan
        k[16:32], v[16:32] = np.inf, np.nan
        sequence.append(0, k, v)
        picked = same_pages(range(4), 1).at(0)
        weights = np.zeros((1, 4, 16), np.float32)
        weights[0, 0, 5] = weights[0, 1] = -np.inf
        q = rng.standard_normal((3, 16), np.float32)
        out, lse = sequence.attend(0, q, replace(picked, log_weights=weights))
        there = np.r_[0:5, 6:16, 32:64]
        logits = k[there, 0].astype(np.float64) @ q.T * 0.25
        want = np.exp(logits) / np.exp(logits).sum(axis=0)
        np.testing.assert_allclose(np.asarray(out), want.T @ v[there, 0], atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse), np.log(np.exp(logits).sum(axis=0)), rtol=1e-5)
        assert np.isnan(np.asarray(sequence.attend(0, q, picked)[0])).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [1, 16])
def test_wrong_weights_are_refused(wrong: float, tokens: int, rng: np.random.Generator) -> None:
    """And not where there is no token: of padding, and behind the end of the sequence."""
    with SHAPES["float32"].pool() as pool:
        texts = Texts(SHAPES["float32"], pool, rng)
        texts.add(37)
        picked = texts.pages([1], "query")
        picked.pages[0] = [[0, 2, -1], [1, 2, 0]]
        weights = np.zeros((1, 2, 3, tokens), np.float32)
        weights[0, 0, 2] = wrong
        if tokens > 1:
            weights[0, 0, 1, 5:] = wrong
        texts.check(replace(picked, log_weights=weights))
        weights[0, 1, 0, -1] = wrong
        q = np.zeros((1, 6, 16), np.float32)
        with pytest.raises(BadArgumentError, match=r"log_weights .* list 0 of kv head 1"):
            texts.batch.attend(0, q, [0, 1], replace(picked, log_weights=weights))
        rows = texts.rows(picked, 90)
        rows.log_counts[0, 1, 77] = wrong
        with pytest.raises(BadArgumentError, match=r"log_counts .* list 0 of kv head 1"):
            texts.batch.attend(0, q, [0, 1], replace(picked, rows=rows))


def test_wrong_shapes_are_refused(rng: np.random.Generator) -> None:
    with SHAPES["float32"].pool() as pool:
        texts = Texts(SHAPES["float32"], pool, rng)
        texts.add(37)
        picked = texts.pages([1], "query")
        q = np.zeros((1, 6, 16), np.float32)

        def attend(**more: object) -> None:
            texts.batch.attend(0, q, [0, 1], replace(picked, **more))  # type: ignore[arg-type]

        for shape in ((1, 2, 3), (1, 2, 3, 15), (1, 2, 2, 16), (2, 2, 3, 16)):
            with pytest.raises(BadArgumentError, match=r"log_weights .* wanted \(1, 2, 3, 16\)"):
                attend(log_weights=np.zeros(shape, np.float32))
        good = texts.rows(picked, 4)
        attend(rows=good)
        with pytest.raises(BadArgumentError, match=r"rows.k has .* wanted \(1, 2, 4, 16\)"):
            attend(rows=replace(good, k=good.k[..., :15]))
        with pytest.raises(BadArgumentError, match=r"rows.v has .* wanted \(1, 2, 4, 16\)"):
            attend(rows=replace(good, v=good.v[:, :, :3]))
        with pytest.raises(BadArgumentError, match=r"rows.log_counts has .* wanted \(1, 2, 4\)"):
            attend(rows=replace(good, log_counts=good.log_counts[:, :1]))


def test_lower_planes_are_all_read_under_weights(rng: np.random.Generator) -> None:
    """error= holds with rows alone; with weights it reads as much as without error=."""
    shape = SHAPES["progressive"]
    with shape.pool() as pool:
        texts = texts_of(shape, pool, rng)
        picked = texts.pages([1, 1, 1], "sequence")
        weighed = replace(picked, log_weights=texts.weights(picked))
        texts.check(weighed, error=0.5)
        texts.check(replace(picked, rows=texts.rows(picked, 20)), error=1e-6)
        texts.check(replace(picked, rows=texts.rows(picked, 20)), error=0.05, loss=0.1)


def test_a_sequences_own_shapes(rng: np.random.Generator) -> None:
    """A select of one query row gives lists without the first axis: so do weights and rows."""
    with SHAPES["float32"].pool() as pool:
        texts = Texts(SHAPES["float32"], pool, rng)
        sequence = texts.add(300)
        q = rng.standard_normal((6, 16), np.float32)
        picked = sequence.select(0, q, Budget(pages=5), method="exact")
        more = replace(picked.at(None), starts=np.array([0, 1], np.int32))
        more = replace(more, log_weights=texts.weights(more), rows=texts.rows(more, 9))
        found = sequence.attend(0, q, more.at(0))
        whole = texts.batch.attend(0, q[None], [0, 1], more)
        np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(whole[0])[0])
        want = texts.expected(q[None], more, 0.25, None)
        np.testing.assert_allclose(np.asarray(whole[0]), want[0], atol=1e-4)
        assert repr(more.at(0)) == repr(picked).replace(";", ", weighed, 9 virtual rows each;")
        k, v = sequence.fetch(0, more.at(0))
        np.testing.assert_array_equal(np.asarray(k), np.asarray(sequence.fetch(0, picked)[0]))
        assert v.shape == (2, 5, 16, 16)


def test_what_looks_at_pages_only_refuses_the_rest(rng: np.random.Generator) -> None:
    with SHAPES["float32"].pool() as pool:
        texts = Texts(SHAPES["float32"], pool, rng)
        texts.add(40)
        picked = texts.pages([1], "query")
        assert picked.plain("this") is picked
        for more in (
            replace(picked, log_weights=texts.weights(picked)),
            replace(picked, rows=texts.rows(picked, 2)),
        ):
            assert not more.is_plain
            with pytest.raises(UnsupportedError, match="this takes pages only, and this choice"):
                more.plain("this")
