"""Keys of tails: of what a text has beyond its last whole block, up to block_tokens - 1 tokens.

    key of n tokens = tail_keys(n ids, H(key of the block before, what else the engine hashes))

The engine hashes whole blocks only, so these are made here, of all that is in a block's hash: the
text before, the ids, and the words that the engine hashes beside them (adapter, images, salt). A
page that is found by one has these tokens, and behind them whatever the engine's block had.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from cxlkv.adapters.vllm.texts import EngineRequest
from cxlkv.arrays import Hashes
from cxlkv.prefix import HASH_BYTES, tail_keys

Words = Callable[[EngineRequest, int, int], bytes]
"""What the engine hashes of a request's tokens [first, end) beside their ids."""


class Tails:
    """Keys of the tails of one engine's texts."""

    def __init__(self, block_tokens: int, words: Words):
        self._most, self._words = block_tokens - 1, words

    def keys(self, request: EngineRequest, before: bytes, first: int, end: int) -> Hashes:
        """uint8 [n, 16]: of the tails that begin at token `first` and have 1, 2 ... n tokens, up to
        token `end`. before: the key of all text before `first`.

        An image that begins in it ends it: the words of all these tails are those of the first.
        """
        count = min(end - first, self._most)
        if count <= 0:
            return np.empty((0, HASH_BYTES), np.uint8)
        words = self._words(request, first, first + 1)
        if self._words(request, first, first + count) != words:
            counts = range(1, count + 1)
            count = bisect_left(
                counts, True, key=lambda n: self._words(request, first, first + n) != words
            )
        root = hashlib.blake2b(before + words, digest_size=HASH_BYTES, person=b"cxlkv.tail")
        ids = np.array(request.all_token_ids[first : first + count], np.int64)
        return tail_keys(ids, root.digest())
