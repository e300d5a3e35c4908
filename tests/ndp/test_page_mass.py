"""Each page's share of the attention, against numpy's softmax in float64, summed by page.

By all the ways that attend goes: encodings, windows, latents, several rows, lists, shared prefixes,
parts and threads, lower planes that are left out, and the instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Batch, Budget, CXLPool, Sequence, _core
from cxlkv.arrays import address_of, view
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Selection
from cxlkv.tiers.local import LocalTier, units_of

from ..support.lengths import matrix
from ..support.one_layer import ISAS, OneLayer, doubles

PAGE = 16
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shape(OneLayer):
    """error: of a share, relative to it and, a hundredth of that, to the whole."""

    error: float = 2e-4


SHAPES = {
    "float32": Shape(),
    "float16": Shape(dtype="float16", group=1, dim=24, page=4),
    "bfloat16": Shape(dtype="bfloat16", group=4, dim=64, error=2e-2),
    "odd": Shape(kv_heads=3, dim=10, page=5),
    "small pages": Shape(page=4),
    "large pages": Shape(page=32, kv_heads=1),
    "larger pages": Shape(page=80, kv_heads=1),
    "window": Shape(window=150),
    "latent": Shape(kv_heads=1, group=100, dim=32, latent=True),
    "fp8_e4m3": Shape(encoding="fp8_e4m3", dim=32, error=1e-2),
    "int8": Shape(encoding="int8", dim=64, error=1e-2),
    "int4": Shape(encoding="int4", dim=64, error=1e-2),
    "progressive": Shape(encoding="progressive", dim=64, error=1e-2),
}


class Texts:
    """Sequences of a pool in a batch, and the keys that it keeps of them, decoded."""

    def __init__(self, shape: Shape, pool: CXLPool, rng: np.random.Generator):
        self.shape, self.pool, self.rng = shape, pool, rng
        self.sequences: list[Sequence] = []
        self.keys: dict[Sequence, Shares] = {}

    def grow(self, sequence: Sequence, tokens: int, keys: object | None = None) -> Sequence:
        k = (
            self.shape.drawn(self.rng, tokens, self.shape.kv_heads, self.shape.dim)
            if keys is None
            else keys
        )
        v = (
            None
            if self.shape.latent
            else self.shape.drawn(self.rng, tokens, self.shape.kv_heads, self.shape.value_dim)
        )
        sequence.append(0, k, v)
        before = [self.keys[sequence]] if sequence in self.keys else []
        self.keys[sequence] = np.concatenate([*before, doubles(k)])
        return sequence

    def add(self, tokens: int, keys: object | None = None) -> Sequence:
        self.sequences.append(self.grow(self.pool.sequence(), tokens, keys))
        return self.sequences[-1]

    def fork(self, of: Sequence, tokens: int) -> Sequence:
        child = of.fork()
        self.keys[child] = self.keys[of]
        self.sequences.append(self.grow(child, tokens) if tokens else child)
        return child

    @property
    def batch(self) -> Batch:
        return self.pool.batch(self.sequences)

    def kept(self, sequence: Sequence) -> Shares:
        """[kv_heads, tokens, dim]: as appended, or what codes say."""
        if self.shape.encoding == "none":
            return self.keys[sequence].swapaxes(0, 1)
        keys = doubles(sequence.fetch(0)[0])
        return keys.reshape(len(keys), -1, self.shape.dim)

    def shares(
        self,
        q: npt.NDArray[np.float32],
        starts: list[int],
        picked: Selection | None,
        scale: float,
        softcap: float | None,
    ) -> Shares:
        """[rows, kv_heads, k]: token by token, list by list."""
        lengths = [sequence.tokens(0) for sequence in self.sequences]
        k = max(-(-n // self.shape.page) for n in lengths)
        if picked is not None:
            k = picked.pages.shape[-1]
        made = np.zeros((starts[-1], self.shape.kv_heads, k))
        for i, length in enumerate(lengths):
            keys = self.kept(self.sequences[i])
            for row in range(starts[i], starts[i + 1]):
                position = length - (starts[i + 1] - row)
                low = max(0, position - self.shape.window + 1) if self.shape.window else 0
                for head in range(self.shape.kv_heads):
                    pages = list(range(-(-length // self.shape.page)))
                    if picked is not None:
                        pages = picked.pages[row if picked.per == "query" else i, head].tolist()
                    seen = [
                        np.arange(
                            max(page * self.shape.page, low),
                            min((page + 1) * self.shape.page, position + 1),
                        )
                        if page >= 0
                        else np.arange(0)
                        for page in pages
                    ]
                    made[row, head, : len(pages)] = self.row(
                        q[row, head * self.shape.group :][: self.shape.group].astype(np.float64),
                        keys[head],
                        seen,
                        scale,
                        softcap,
                    )
        return made

    def row(
        self,
        q: Shares,
        keys: Shares,
        seen: list[npt.NDArray[np.int64]],
        scale: float,
        softcap: float | None,
    ) -> Shares:
        """[pages]: of one row and kv head."""
        tokens = np.concatenate([*seen, np.arange(0)]).astype(np.int64)
        if not len(tokens):
            return np.zeros(len(seen))
        logits = q @ keys[tokens].T * scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        ends = np.cumsum([len(each) for each in seen])
        by_page = [
            weights[:, end - len(each) : end].sum(axis=1)
            for each, end in zip(seen, ends, strict=True)
        ]
        return np.asarray(np.stack(by_page, axis=1).mean(axis=0))

    def check(
        self,
        rows: list[int],
        picked: Selection | None = None,
        *,
        scale: float = 0.3,
        softcap: float | None = None,
        error: float = 0.0,
        queries: npt.NDArray[np.float32] | None = None,
    ) -> Shares:
        """The shares are right, sum to 1, and what else attend gives is what it gives without."""
        starts, batch = np.cumsum([0, *rows]).tolist(), self.batch
        q = queries
        if q is None:
            heads = self.shape.kv_heads * self.shape.group
            q = self.rng.standard_normal((starts[-1], heads, self.shape.dim), np.float32)
        out, lse, found = batch.attend(0, q, starts, picked, scale, softcap, error, page_mass=True)
        plain = batch.attend(0, q, starts, picked, scale, softcap, error)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(plain[0]))
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(plain[1]))
        mass = np.asarray(found, np.float64)
        want = self.shares(q, starts, picked, scale, softcap)
        assert mass.shape == want.shape
        sums = want.sum(axis=-1)
        np.testing.assert_allclose(mass.sum(axis=-1), sums, atol=1e-5)
        assert set(np.round(sums, 9).ravel()) <= {0.0, 1.0}
        if not error:
            limit = self.shape.error
            np.testing.assert_allclose(mass, want, rtol=limit, atol=limit / 100)
        return mass


@matrix(name=SHAPES, threads=[1, 2])
def test_all_pages(name: str, threads: int, rng: np.random.Generator) -> None:
    """Sequences of several lengths, and rows that do not see all; none of the third."""
    with SHAPES[name].pool(threads) as pool:
        texts = Texts(SHAPES[name], pool, rng)
        for tokens in (1700, 37, 400, 1):
            texts.add(tokens)
        texts.check([1, 1, 0, 1])
        texts.check([5, 37, 0, 1], softcap=2.0)


@matrix(name=SHAPES, per=["query", "sequence"])
def test_picked_pages(name: str, per: str, rng: np.random.Generator) -> None:
    """Lists as selects make them, and lists in any order, some pages named twice, with gaps."""
    shape = SHAPES[name]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        for tokens in (1700, 150, 37):
            texts.add(tokens)
        rows, starts = [3, 0, 2], [0, 3, 3, 5]
        q = rng.standard_normal((5, shape.kv_heads * shape.group, shape.dim), np.float32)
        method = "exact" if shape.encoding == "none" else "auto"
        chosen = texts.batch.select(0, q, starts, Budget(share=0.4, per=per), method)
        texts.check(rows, chosen, queries=q)
        lists = rng.integers(-1, -(-37 // shape.page), chosen.pages.shape).astype(np.int32)
        lists[0, 0] = -1  # which nothing is seen of
        any_order = Selection(lists, chosen.scores, chosen.counts, 0, 0, per, chosen.starts)
        mass = texts.check(rows, any_order, softcap=3.0, queries=q)
        assert (mass[0, 0] == 0).all()


@matrix(name=["float32", "bfloat16", "int8", "large pages", "odd"], isa=ISAS, times=2)
def test_every_instruction_set(
    name: str, isa: str, rng: np.random.Generator, force_isa: Callable[[str], str]
) -> None:
    force_isa(isa)
    with SHAPES[name].pool() as pool:
        texts = Texts(SHAPES[name], pool, rng)
        texts.add(1300)
        texts.check([1])
        texts.check([7])


@pytest.mark.parametrize("name", ["small pages", "float16", "bfloat16", "window", "int8"])
def test_pages_that_sequences_share(name: str, rng: np.random.Generator) -> None:
    """A group is read once; its pages and each one's own are of one sum."""
    shape = SHAPES[name]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        first = texts.add(110 * shape.page)
        texts.fork(first, 3 * shape.page + 1)
        second = texts.fork(first, 70 * shape.page)
        texts.fork(second, 5)
        texts.add(40)
        texts.fork(second, 0)
        texts.check([1, 1, 1, 1, 1, 1])
        texts.check([2, 1, 0, 3, 1, 1], softcap=4.0)


@matrix(name=["small pages", "float16", "int8"], order=["rising", "falling"])
def test_logits_that_rise_from_page_to_page(
    name: str, order: str, rng: np.random.Generator
) -> None:
    """Over more pages than are taken together, in one part: each has a larger logit than all
    before, or a smaller one."""
    shape, pages, rows = SHAPES[name], 333, 70
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        line = np.linspace(0, 9, pages * shape.page, dtype=np.float32)
        if order == "falling":
            line = line[::-1]
        keys = np.ones((len(line), shape.kv_heads, shape.dim), np.float32) * line[:, None, None]
        texts.add(len(line), keys.astype(shape.dtype))
        heads = shape.kv_heads * shape.group
        q = np.ones((rows, heads, shape.dim), np.float32)
        q += rng.standard_normal(q.shape, np.float32) / 10
        every = np.arange(pages, dtype=np.int32)
        lists = np.ascontiguousarray(np.broadcast_to(every, (rows, shape.kv_heads, pages)))
        counts = np.full(lists.shape[:2], pages, np.int32)
        chosen = Selection(
            lists,
            np.zeros(lists.shape, np.float32),
            counts,
            0,
            0,
            "query",
            np.array([0, rows], np.int32),
        )
        texts.check([rows], chosen, scale=2 / shape.dim, queries=q)
        texts.check([rows], scale=2 / shape.dim, queries=q)


@pytest.mark.parametrize("error", [1e-6, 0.03, 0.3])
def test_lower_planes_that_are_not_read(error: float, rng: np.random.Generator) -> None:
    """Shares are of the logits that the outputs are made of."""
    shape = SHAPES["progressive"]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        for tokens in (1700, 900):
            texts.add(tokens)
        q = 1 + rng.standard_normal((2, shape.kv_heads * shape.group, shape.dim), np.float32)
        mass = texts.check([1, 1], error=error, queries=q)
        want = texts.shares(q, [0, 1, 2], None, 0.3, None)
        gap = np.abs(mass - want).sum(axis=-1).max()
        print(f"error {error}: shares are off by {gap:.4f} in all")
        assert gap < (0.005 if error < 1e-5 else 3 * error)
        chosen = texts.batch.select(0, q, [0, 1, 2], Budget(share=0.5), "two_stage")
        texts.check([1, 1], chosen, error=error, queries=q)


def test_local_copies(rng: np.random.Generator) -> None:
    shape = SHAPES["float32"]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        texts.add(1000)
        q = rng.standard_normal((1, shape.kv_heads * shape.group, shape.dim), np.float32)
        chosen = texts.batch.select(0, q, [0, 1], Budget(pages=20))
        far = texts.check([1], chosen, queries=q)
        with LocalTier(pool, "1MiB") as tier:
            assert not tier.promote(units_of(texts.batch, 0, chosen)).refused
            np.testing.assert_array_equal(texts.check([1], chosen, queries=q), far)


def test_one_sequence_has_no_axis_of_rows(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    shape = SHAPES["float32"]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        sequence = texts.add(100)
        q = rng.standard_normal((6, 16), np.float32)
        tensor = sequence.attend(0, torch.from_numpy(q), page_mass=True)[2]  # the first of all
        out, lse, mass = sequence.attend(0, q, page_mass=True)
        assert (out.shape, lse.shape, mass.shape) == ((6, 16), (6,), (2, 7))
        assert sequence.attend(0, q[None], page_mass=True)[2].shape == (1, 2, 7)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), mass)
        picked = sequence.select(0, q, top_k=3)
        assert sequence.attend(0, q, picked, page_mass=True)[2].shape == (2, 3)
        assert len(sequence.attend(0, q)) == len(sequence.attend(0, q, page_mass=False)) == 2


def test_nothing_to_see(rng: np.random.Generator) -> None:
    shape = SHAPES["float32"]
    with shape.pool() as pool:
        batch = pool.batch([pool.sequence(), Texts(shape, pool, rng).add(5)])
        q = rng.standard_normal((1, 6, 16), np.float32)
        mass = batch.attend(0, q, [0, 0, 1], page_mass=True)[2]
        np.testing.assert_allclose(mass, np.ones((1, 2, 1)), rtol=1e-6)
        assert batch.attend(0, q[:0], [0, 0, 0], page_mass=True)[2].shape == (0, 2, 1)
        none = np.full((1, 2, 3), -1, np.int32)
        counts = np.zeros((1, 2), np.int32)
        starts = np.array([0, 0, 1], np.int32)
        chosen = Selection(none, np.zeros(none.shape, np.float32), counts, 0, 0, "query", starts)
        _, lse, mass = batch.attend(0, q, starts, chosen, page_mass=True)
        assert (np.asarray(mass) == 0).all()
        assert (np.asarray(lse) == -np.inf).all()


def test_a_key_that_is_no_number_is_seen(rng: np.random.Generator) -> None:
    shape = SHAPES["float32"]
    with shape.pool() as pool:
        texts = Texts(shape, pool, rng)
        keys = rng.standard_normal((900, 2, 16), np.float32)
        keys[300, 0, 3] = np.nan
        sequence = texts.add(900, keys)
        mass = np.asarray(sequence.attend(0, np.ones((6, 16), np.float32), page_mass=True)[2])
        assert np.isnan(mass[0]).all()
        assert abs(mass[1].sum() - 1) < 1e-5


def test_the_core_says_how_much_room_it_wants(rng: np.random.Generator) -> None:
    """A thread has appended since the buffer was made: nothing is read, and k is returned."""
    shape = SHAPES["float32"]
    with shape.pool() as pool:
        sequence = Texts(shape, pool, rng).add(100)
        batch = pool.batch([sequence])
        q = np.ones((1, 6, 16), np.float32)
        out, lse = np.empty((1, 6, 16), np.float32), np.empty((1, 6), np.float32)
        starts = np.array([0, 1], np.int32)

        def asked(room: int) -> tuple[tuple[int, int], npt.NDArray[np.float32]]:
            mass = np.full(room, -1, np.float32)
            views = [view(a, "array") for a in (q, out, lse)]
            found = _core.batch_attend(
                batch._handle,
                0,
                views[0],
                starts,
                None,
                0.25,
                0.0,
                0.0,
                views[1].address,
                views[2].address,
                (address_of(mass, "mass"), room),
            )
            return found, mass

        before = pool.stats()["attended_bytes"]
        assert asked(13)[0] == (_core.E_ROOM, 7)
        assert pool.stats()["attended_bytes"] == before
        (read, k), wider = asked(17)
        assert (read > 0, k) == (True, 7)
        assert (wider[14:] == -1).all()
        np.testing.assert_array_equal(wider[:14], asked(14)[1])
        whole = batch.attend(0, q, starts, scale=0.25, page_mass=True)[2]
        np.testing.assert_array_equal(np.ravel(whole), wider[:14])
        sequence.truncate(20)
        assert batch.attend(0, q, starts, page_mass=True)[2].shape == (1, 2, 2)
        with pytest.raises(BadArgumentError):
            batch.attend(0, q, starts, scale=-1.0, page_mass=True)
