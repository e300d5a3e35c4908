"""Moves of state checkpoints: one comes back from another tier with the pages that it needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cxlkv.arrays import Hashes, Mask, Names, PageIds
from cxlkv.pages import NO_PAGE
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys


class Chain(NamedTuple):
    """A checkpoint behind `end` tokens, and all that it needs: names [n, 16] in the order in which
    they are published, the name before each."""

    end: int
    names: Names
    parents: Names


def page_ends(keys: PageKeys) -> Hashes:
    """By token: each page's key at its last one, zeros at the others."""
    spread = np.zeros((len(keys), keys.page_tokens, 16), np.uint8)
    spread[:, -1] = keys.packed
    return spread.reshape(-1, 16)


class Checkpoints:
    """Finds checkpoints of a pool's layout in tiers. there: which names these have;
    key_pages: that a key names."""

    def __init__(self, pool: CXLPool, there: Callable[[Names], Mask], key_pages: int = 1):
        self._pool, self._there, self._key_pages = pool, there, key_pages

    def last_whole(self, keys: Hashes, tokens: int) -> Chain | None:
        """The last checkpoint behind `tokens` tokens of which all is there, with all pages before
        it. keys: by token, as of every_key(); of texts that are known by their pages' keys only,
        zeros between these."""
        for end in self._ends(keys, tokens):
            chain = self._chain(keys, end)
            if self._is_whole(self._there(chain.names), end):
                return chain
        return None

    def _ends(self, keys: Hashes, tokens: int) -> list[int]:
        """Behind how many tokens there may be checkpoints, the last one first."""
        names = self._pool.records.state_names(keys[tokens:].tobytes(), 1)
        ends: list[int] = (np.flatnonzero(self._there(names[:, 0])) + tokens + 1).tolist()
        return ends[::-1]

    def _chain(self, keys: Hashes, end: int) -> Chain:
        """Of the text's first `end` tokens: full pages, by place and part; what has the tokens
        behind them, a tail's copies or the page that it is now; the checkpoint, its first page
        last."""
        records, tokens = self._pool.records, self._pool.layout.page_tokens * self._key_pages
        texts = keys[tokens - 1 : end : tokens]
        if end % tokens:
            texts = np.concatenate([texts, [self._last(keys, end)]])
        names = records.names(texts.tobytes(), self._key_pages)
        parents = np.repeat(names[:, :, :1], names.shape[2], axis=2)
        parents[1:, 0, 0], parents[0, 0, 0] = names[:-1, 0, 0], 0
        parents[:, 1:, 0] = names[:, :-1, 0]
        states = records.state_names(keys[end - 1].tobytes(), records.state_pages)[0, ::-1]
        before = np.concatenate([names[-1:, 0, 0], states[:-1]])
        return Chain(
            end,
            np.concatenate([names.reshape(-1, 16), states]),
            np.concatenate([parents.reshape(-1, 16), before]),
        )

    def _last(self, keys: Hashes, end: int) -> Hashes:
        """The key under which the last page is found that is not full."""
        page_tokens = self._pool.layout.page_tokens
        tail: Hashes = keys[end - 1]
        full = end // page_tokens * page_tokens + page_tokens
        if full > len(keys) or self._there(self._pool.records.names(tail.tobytes(), 1)[0, 0]).all():
            return tail
        whole: Hashes = keys[full - 1]
        return whole

    def _is_whole(self, found: Mask, end: int) -> bool:
        """Is all there? A part with a window has gaps by right, which a match looks at."""
        states = self._pool.records.state_pages
        places = found[:-states].reshape(-(-end // self._pool.layout.page_tokens), -1)
        return bool(found[-states:].all() and places.any(axis=1).all())


class StateMoves:
    """The part of Tiers that is about models with states."""

    pool: CXLPool

    @abstractmethod
    def _where(self, names: Names) -> tuple[PageIds, Mask]: ...

    @abstractmethod
    def _pays(self, tokens: int, pages: int) -> bool: ...

    @abstractmethod
    def _promote(self, names: Names, parents: Names, beside: PageIds) -> int: ...

    def _bring_checkpoint(self, keys: Hashes, tokens: int, key_pages: int = 1) -> bool:
        """Bring back what the cold tier has of the last checkpoint behind `tokens` tokens, and of
        all pages before it; says whether something came. key_pages: that a key names."""
        chain = self._checkpoints(key_pages).last_whole(keys, tokens)
        if chain is None:
            return False
        pages, there = self._where(chain.names)
        here = pages != NO_PAGE
        missing = there & ~here
        if not missing.any() or not self._pays(tokens, int(missing.sum())):
            return False
        wanted = np.flatnonzero(missing)
        return bool(self._promote(chain.names[wanted], chain.parents[wanted], pages[here]))

    def _checkpoints(self, key_pages: int = 1) -> Checkpoints:
        """Of the pool and the cold tier together."""
        return Checkpoints(self.pool, self._is_there, key_pages)

    def _is_there(self, names: Names) -> Mask:
        pages, there = self._where(names)
        found: Mask = (pages != NO_PAGE) | there
        return found
