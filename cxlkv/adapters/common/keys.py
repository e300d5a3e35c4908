"""Key namespaces name everything, beside the text, that makes K and V what they are.

    namespace = H(model, weights, dtype, page size, rope, layout, shard, packing, salt)    16 bytes
    key i     = the engine's hash of the text up to block i, its first 16 bytes, xor namespace

Engines hash their blocks themselves, with what they know of a request beside its tokens (adapters,
images, a salt of the request). Two engines that differ in any word of the namespace have other
keys for the same text: a miss. H is BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np

from cxlkv.errors import BadArgumentError
from cxlkv.prefix import HASH_BYTES, PageKeys


def namespace(words: Mapping[str, object]) -> bytes:
    """16 bytes of all words, by name; what JSON does not know counts as its text."""
    text = json.dumps(words, sort_keys=True, default=str, ensure_ascii=False)
    person = b"cxlkv.space"
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES, person=person).digest()


def space_of(words: Mapping[str, object], salt: str) -> bytes:
    """The namespace of the keys of one engine, or model, and tenant."""
    return namespace({**words, "salt": salt})


def unshared(space: bytes) -> bytes:
    """A namespace of one engine's run, which no other has."""
    return xor(space, os.urandom(HASH_BYTES))


def xor(space: bytes, other: bytes) -> bytes:
    """One namespace of two. Two spaces combined with the same third differ as they did before."""
    return bytes(a ^ b for a, b in zip(space, other, strict=True))


def block_keys(hashes: Sequence[bytes], page_tokens: int, space: bytes) -> PageKeys:
    """Keys of an engine's blocks; raises BadArgumentError for hashes of less than 16 bytes."""
    joined = b"".join(hashes)
    if not hashes:
        return PageKeys(np.empty((0, HASH_BYTES), np.uint8), page_tokens)
    size = len(hashes[0])
    if size < HASH_BYTES or len(joined) != size * len(hashes):
        raise BadArgumentError(
            f"block hashes of {size} bytes: the engine must hash blocks with sha256 "
            "(vLLM: --prefix-caching-hash-algo sha256), others are no proof of equal text"
        )
    packed = np.frombuffer(joined, np.uint8).reshape(len(hashes), size)[:, :HASH_BYTES]
    return PageKeys(packed ^ np.frombuffer(space, np.uint8), page_tokens)
