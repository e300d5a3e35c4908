"""Keys under which pages are published and matched: chained hashes of token ids, salted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError

HASH_BYTES = 16


def key_hashes(keys: Iterable[bytes]) -> bytes:
    """The 128-bit hashes, joined, under which the pool indexes `keys` (BLAKE2b)."""
    digests = []
    for key in keys:
        if not isinstance(key, (bytes, bytearray, memoryview)):
            raise BadArgumentError(f"a key is bytes, not {type(key).__name__}")
        digests.append(hashlib.blake2b(key, digest_size=HASH_BYTES, person=b"cxlkv.key").digest())
    return b"".join(digests)


def prefix_keys(token_ids: npt.ArrayLike, page_tokens: int, salt: bytes = b"") -> list[bytes]:
    """A key for each full page of token ids: the hash of the page chained to the one before.

    Two sequences share key i exactly when they agree in all tokens up to page i and in salt.
    """
    given = np.asarray(token_ids)
    if given.ndim != 1:
        raise BadArgumentError(f"token ids have shape {given.shape}, wanted one dimension")
    if given.size and given.dtype.kind not in "iu":
        raise BadArgumentError(f"token ids have dtype {given.dtype}, wanted whole numbers")
    ids = np.ascontiguousarray(given, np.int64)
    keys: list[bytes] = []
    last = hashlib.blake2b(salt, digest_size=HASH_BYTES, person=b"cxlkv.salt").digest()
    for first in range(0, len(ids) - page_tokens + 1, page_tokens):
        page = ids[first : first + page_tokens].tobytes()
        last = hashlib.blake2b(last + page, digest_size=HASH_BYTES, person=b"cxlkv.chain").digest()
        keys.append(last)
    return keys
