"""The prefix index against a dictionary of prefixes: random texts over a small alphabet.

Each text is published, matched, forgotten, pinned or unpinned; texts share beginnings, so chains
have gaps, tails of several lengths hang behind one page, and tails are overgrown by full pages.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cxlkv import CXLPool, KVLayout
from cxlkv.prefix import prefix_keys

from .conftest import audit
from .support.texts import grown, verify

PAGE = 3
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, page_tokens=PAGE, dtype="float32")

Text = tuple[int, ...]
texts = st.lists(st.integers(0, 1), max_size=3 * PAGE + 2).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(["publish", "match", "match", "forget", "pin", "unpin"]),
        texts,
        st.booleans(),
    ),
    min_size=5,
    max_size=60,
)


class Model:
    """Published prefixes and pinned ones: those of whole pages are full pages, others tails."""

    def __init__(self) -> None:
        self.published: set[Text] = set()
        self.pinned: set[Text] = set()

    @staticmethod
    def named(text: Text, tail: bool) -> set[Text]:
        ends = list(range(PAGE, len(text) + 1, PAGE))
        if tail and len(text) % PAGE:
            ends.append(len(text))
        return {text[:end] for end in ends}

    def publish(self, text: Text, tail: bool) -> int:
        fresh = self.named(text, tail) - self.published
        self.published |= fresh
        return len(fresh)

    def match(self, text: Text) -> int:
        full = 0
        while full + PAGE <= len(text) and text[: full + PAGE] in self.published:
            full += PAGE
        ends = range(min(full + PAGE - 1, len(text)), full, -1)
        return next((end for end in ends if text[:end] in self.published), full)

    def forget(self, text: Text, tail: bool) -> int:
        gone = self.named(text, tail) & self.published
        self.published -= gone
        self.pinned -= gone
        return len(gone)

    def pin(self, text: Text, tail: bool, pinned: bool) -> int:
        there = self.named(text, tail) & self.published
        self.pinned = self.pinned | there if pinned else self.pinned - there
        return len(there)


def ids_of(text: Text) -> list[int]:
    """K and V of a token follow from all tokens up to it, as in a model."""
    return list(accumulate(text, lambda number, token: number * 3 + token, initial=1))[1:]


def publish(pool: CXLPool, text: Text, tail: bool) -> int:
    sequence = grown(pool, ids_of(text))
    published = pool.publish_prefix(sequence, np.array(text, np.int64), tail=tail)
    sequence.release()
    return published


def match(pool: CXLPool, text: Text) -> int:
    with pool.match_prefix(np.array(text, np.int64)) as hit:
        taken = hit.sequence()
        verify(taken, ids_of(text[: hit.tokens]))
        taken.release()
        return hit.tokens


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(steps)
def test_random_walks_agree_with_a_dictionary(walk: list[tuple[str, Text, bool]]) -> None:
    model = Model()
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool:
        for name, text, tail in walk:
            ids = np.array(text, np.int64)
            keys = prefix_keys(ids, PAGE, tail=tail)
            if name == "publish":
                assert publish(pool, text, tail) == model.publish(text, tail)
            elif name == "match":
                assert match(pool, text) == model.match(text)
            elif name == "forget":
                assert pool.forget(keys) == model.forget(text, tail)
            elif name == "pin":
                assert pool.admin.pin(keys) == model.pin(text, tail, True)
            else:
                assert pool.admin.unpin(keys) == model.pin(text, tail, False)
            stats = pool.stats()
            assert stats["pages_published"] == len(model.published)
            assert stats["pages_pinned"] == len(model.pinned)
            assert stats["pages_free"] + len(model.published) == stats["pages_total"]
            assert pool.pages.evictable().sum() == len(model.published) - len(model.pinned)
        audit(pool)
