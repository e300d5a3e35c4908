"""Pages that sequences share are attended to once for all of them, with the output of each alone.

A family of sequences goes on from one text: forks, forks of forks, adopted prefixes, beside others
that share nothing. numpy's attention over the same tokens says what is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cxlkv import CXLPool, Sequence
from cxlkv.arrays import Floats
from cxlkv.prefix import content_keys

from ..support import reference
from ..support.lengths import matrix
from ..support.one_layer import ISAS, OneLayer

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-5}  # of out, which has the dtype
PAGE = 4
Shape = partial(OneLayer, page=PAGE)


@dataclass
class Text:
    """A sequence, and what it should hold: [tokens, kv_heads, dim]."""

    sequence: Sequence
    keys: Floats
    values: Floats


class Family:
    def __init__(self, pool: CXLPool, rng: np.random.Generator, shape: OneLayer):
        self.pool, self.rng, self.shape = pool, rng, shape

    def drawn(self, *sizes: int) -> Floats:
        kind = DTYPES[self.shape.dtype]
        return self.rng.standard_normal(sizes).astype(kind).astype(np.float32)

    def longer(self, text: Text, tokens: int) -> Text:
        """The same one, with so many tokens more, of its own."""
        keys = self.drawn(tokens, self.shape.kv_heads, self.shape.dim)
        values = self.drawn(tokens, self.shape.kv_heads, self.shape.value_dim)
        if self.shape.latent:
            values = keys[:, :, : self.shape.value_dim]
        kind = DTYPES[self.shape.dtype]
        v = None if self.shape.latent else values.astype(kind)
        text.sequence.append(0, keys.astype(kind), v)
        text.keys = np.concatenate([text.keys, keys])
        text.values = np.concatenate([text.values, values])
        return text

    def fresh(self, tokens: int) -> Text:
        none = np.zeros((0, self.shape.kv_heads, self.shape.dim), np.float32)
        return self.longer(
            Text(self.pool.sequence(), none, none[:, :, : self.shape.value_dim]), tokens
        )

    def fork(self, text: Text, own: int, kept: int | None = None) -> Text:
        """A fork of the first `kept` tokens, or all, that goes on by `own`."""
        child = Text(text.sequence.fork(), text.keys[:kept], text.values[:kept])
        if kept is not None:
            child.sequence.truncate(kept)
        return self.longer(child, own) if own else child

    def adopted(self, text: Text, own: int) -> Text:
        """Its complete pages, found by their keys in the pool."""
        keys = [self.rng.bytes(32) for _ in range(len(text.keys) // PAGE)]
        self.pool.publish(text.sequence, keys, PAGE)
        with self.pool.match(keys) as hit:
            found = Text(hit.sequence(), text.keys[: hit.tokens], text.values[: hit.tokens])
        return self.longer(found, own)

    def attend(
        self, texts: list[Text], queries: list[Floats], softcap: float | None = None
    ) -> tuple[Floats, Floats, int]:
        """(out, lse, bytes that were read) of all in one batch."""
        before = self.pool.stats()["attended_bytes"]
        out, lse = self.pool.batch([text.sequence for text in texts]).attend(
            0,
            np.concatenate(queries).astype(DTYPES[self.shape.dtype]),
            np.cumsum([0, *map(len, queries)]).astype(np.int32),
            softcap=softcap,
        )
        assert isinstance(out, np.ndarray)
        assert isinstance(lse, np.ndarray)
        return out, lse, self.pool.stats()["attended_bytes"] - before

    def check(
        self, texts: list[Text], rows: list[int], saves: float, softcap: float | None = None
    ) -> None:
        """In several orders the output is right, and at most the part `saves` is read of what is
        read for each alone."""
        heads = self.shape.kv_heads * self.shape.group
        queries = [self.drawn(count, heads, self.shape.dim) for count in rows]
        alone = sum(self.attend([t], [q], softcap)[2] for t, q in zip(texts, queries, strict=True))
        orders = [[*range(len(texts))], [*range(len(texts))][::-1]]
        for order in [*orders, self.rng.permutation(len(texts)).tolist()]:
            mine, asked = [texts[i] for i in order], [queries[i] for i in order]
            out, lse, read = self.attend(mine, asked, softcap)
            want, want_lse = reference.attend(
                [text.keys for text in mine],
                [text.values for text in mine],
                np.concatenate(asked),
                np.cumsum([0, *map(len, asked)]).astype(np.int32),
                page_tokens=PAGE,
                softcap=softcap,
                window=self.shape.window,
            )
            np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
            error = ERROR[self.shape.dtype]
            floor = error * np.abs(want).max()
            np.testing.assert_allclose(out.astype(np.float64), want, rtol=error, atol=floor)
            assert read <= saves * alone, "shared pages were read again"


@contextmanager
def family(rng: np.random.Generator, shape: OneLayer) -> Iterator[Family]:
    with CXLPool.create("anonymous:", layout=shape.layout, capacity=64 << 20) as pool:
        yield Family(pool, rng, shape)


def relatives(f: Family) -> tuple[list[Text], list[int]]:
    """Sequences of each kind; the first four part from a text of 402 tokens, or from each other,
    at tokens 402, 400, 443 and 290. And how many query rows each has.
    """
    text = f.fresh(402)
    child = f.fork(text, 41)
    texts = [
        f.fork(text, 3),
        f.adopted(text, 9),
        f.fork(child, 60),
        f.fork(text, 30, kept=290),
        child,
        f.fresh(350),
        f.fresh(5),
        f.fork(text, 0),
        f.fork(text, 45),
    ]
    return texts, [1, 1, 3, 2, 1, 2, 1, 0, 30]


@matrix(name=ISAS, dtype=DTYPES, group=[1, 3, 8], times=2)
def test_forks_and_adopted_prefixes_get_what_they_get_alone(
    force_isa: Callable[[str], str], rng: np.random.Generator, name: str, dtype: str, group: int
) -> None:
    force_isa(name)
    with family(rng, Shape(group=group, dtype=dtype)) as f:
        texts, rows = relatives(f)
        f.check(texts, rows, saves=0.8)  # groups of 8 heads are full earlier


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dim", "value_dim", "latent"), [(24, 7, False), (40, 32, True)])
def test_other_shapes(
    rng: np.random.Generator, softcap: float | None, dim: int, value_dim: int, latent: bool
) -> None:
    """Values of another length, and latent attention's, which are the keys' first channels."""
    shape = Shape(kv_heads=1, group=5, dim=dim, value_dim=value_dim, latent=latent)
    with family(rng, shape) as f:
        texts, rows = relatives(f)
        f.check(texts, rows, saves=0.75, softcap=softcap)


def test_windows(rng: np.random.Generator) -> None:
    """Windows that begin at different pages: what is read together, all of the rows see."""
    with family(rng, Shape(window=330)) as f:
        text = f.fresh(402)
        texts = [f.fork(text, own) for own in (3, 40, 0, 12, 300)]
        f.check([*texts, f.fresh(500)], [1, 3, 1, 7, 1, 1], saves=0.75)


def test_a_group_has_room_for_so_many_queries(rng: np.random.Generator) -> None:
    """Sixteen queries a sequence and kv head: four go together, and the fifth begins anew."""
    with family(rng, Shape(group=8)) as f:
        text = f.fresh(400)
        texts = [f.fork(text, 4 + i) for i in range(9)]
        f.check(texts, [2] * 9, saves=0.45)


def test_pages_behind_the_first_difference_are_not_shared(rng: np.random.Generator) -> None:
    """Pages that were found by their own text alone may be the same again behind others."""
    with family(rng, Shape()) as f:
        ids = rng.integers(1, 1 << 30, 800)
        other = np.concatenate([ids[:300], rng.integers(1, 1 << 30, 40), ids[340:]])
        first = f.fresh(800)
        second = f.fork(first, 40, kept=300)
        for text, own in ((first, ids), (second, other[:340])):
            f.pool.publish(text.sequence, content_keys(own, PAGE), PAGE, strict=False)
        with f.pool.match(content_keys(other, PAGE), strict=False) as hit:
            assert hit.tokens == 800
            mixed = Text(
                hit.sequence(),
                np.concatenate([second.keys, first.keys[340:]]),
                np.concatenate([second.values, first.values[340:]]),
            )
        f.check([first, mixed], [1, 1], saves=0.9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(rng: np.random.Generator, dtype: str) -> None:
    with family(rng, Shape(dtype=dtype)) as f:
        texts, rows = relatives(f)
        queries = [f.drawn(count, 6, 16) for count in rows]
        results = []
        for threads in (1, 2, 5):
            f.pool.set_threads(threads)
            results.append(f.attend(texts, queries))
        for one, other in itertools.pairwise(results):
            for ours, theirs in zip(one, other, strict=True):
                np.testing.assert_array_equal(ours, theirs)
