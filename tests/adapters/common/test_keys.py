"""Keys of engines' blocks: what differs in one word of the namespace has no key in common."""

from __future__ import annotations

import hashlib

import pytest

from cxlkv.adapters.common.keys import block_keys, namespace, unshared, xor
from cxlkv.errors import BadArgumentError

WORDS: dict[str, object] = {"model": "m", "dtype": "bfloat16", "page": 32, "tp": [0, 2]}


def test_every_word_counts() -> None:
    spaces = {namespace(WORDS)}
    for name in WORDS:
        spaces.add(namespace({**WORDS, name: "other"}))
    assert len(spaces) == 1 + len(WORDS)
    assert namespace(dict(reversed(WORDS.items()))) == namespace(WORDS)


def test_keys_are_the_hashes_in_a_space() -> None:
    hashes = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
    one, other = (block_keys(hashes, 32, namespace({"model": name})) for name in "ab")
    assert (len(one), one.page_tokens) == (5, 32)
    assert not (one.packed == other.packed).all(axis=1).any()
    assert one[0] == bytes(
        a ^ b for a, b in zip(hashes[0], namespace({"model": "a"}), strict=False)
    )
    assert len(block_keys([], 32, namespace({}))) == 0
    assert block_keys(hashes[:2], 32, namespace({"model": "a"})) == one[:2]


def test_short_hashes_are_refused() -> None:
    with pytest.raises(BadArgumentError, match="sha256"):
        block_keys([b"12345678"], 32, bytes(16))
    with pytest.raises(BadArgumentError, match="sha256"):
        block_keys([bytes(32), bytes(16)], 32, bytes(16))


def test_a_run_that_shares_nothing_has_a_space_of_its_own() -> None:
    space = namespace({})
    assert len({space, unshared(space), unshared(space)}) == 3
    assert xor(xor(space, namespace(WORDS)), namespace(WORDS)) == space
