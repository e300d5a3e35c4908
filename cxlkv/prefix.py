"""Makes the keys under which pages are published and matched: chained, salted hashes of tokens.

What they are, H being BLAKE2s (RFC 7693) with a person= of its own for each purpose:

    root        = H(salt)                                 16 bytes
    page i      = H(its ids: the low 4 bytes of each; if one needs more, also the high 4)   32 bytes
    key i       = H(key i - 1 + page i)                   16 bytes; before key 0 stands the root
    tail of n   = H(key before it + its n ids, 8 bytes each)                                16 bytes
    content i   = H(root + page i), with salt=i           16 bytes

Against whom. An attacker who finds two texts with one key makes the pool serve one's K and V to the
other. A tenant who chooses texts and knows the salt needs 2**64 hashes for any such pair, and
2**128 for a text that has the key of somebody else's; no better attack on BLAKE2s is known. One who
does not know the salt cannot try out a single text away from the pool, nor ask by its keys whether
another tenant has a text. So give each tenant that does not trust the others a secret salt of 16
random bytes. Nothing here hides the K and V of a pool from a process that has it open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from cxlkv import _core
from cxlkv._core import every_key as every_key
from cxlkv._core import tail_keys as tail_keys
from cxlkv.arrays import Hashes
from cxlkv.errors import BadArgumentError
from cxlkv.numbers import array_of, is_whole

__all__ = ["prefix_keys"]

HASH_BYTES = 16


class PageKey(bytes):
    """A key that is a hash of token ids already: the pool does not hash it again."""

    strict = True


class ContentKey(PageKey):
    """One of content_keys()."""

    strict = False


class PageKeys(Sequence[bytes]):
    """Keys of a text's pages: a sequence of PageKey, kept as one array uint8 [n, 16]."""

    def __init__(self, packed: Hashes, page_tokens: int, strict: bool = True):
        self.packed = packed
        self.page_tokens = page_tokens
        self.strict = strict

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice[int | None, int | None, int | None]) -> PageKeys: ...

    def __getitem__(
        self, place: int | slice[int | None, int | None, int | None]
    ) -> bytes | PageKeys:
        if isinstance(place, slice):
            packed = np.ascontiguousarray(self.packed[place])
            return PageKeys(packed, self.page_tokens, self.strict)
        return (PageKey if self.strict else ContentKey)(self.packed[place].tobytes())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PageKeys):
            return self.strict == other.strict and np.array_equal(self.packed, other.packed)
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.packed.tobytes())

    def __repr__(self) -> str:
        return f"<{len(self)} keys{'' if self.strict else ' of content'}>"


def key_hashes(keys: Iterable[bytes], strict: bool = True, *, either: bool = False) -> bytes:
    """The 128-bit hashes, joined, under which the pool indexes `keys`.

    Keys of pages are such hashes; of other bytes it is BLAKE2b, another one for strict=False.
    Raises BadArgumentError for what is not bytes, and, unless `either` kind will do, for keys of
    content where strict is True and chained ones where it is not.
    """
    if isinstance(keys, PageKeys):
        _check_kind(keys.strict, keys.strict if either else strict)
        return keys.packed.tobytes()
    person = b"cxlkv.key" if strict else b"cxlkv.loose"
    digests: list[bytes] = []
    if not isinstance(keys, Iterable):
        raise BadArgumentError(f"keys are a list of bytes, not {type(keys).__name__}")
    for key in keys:
        if isinstance(key, PageKey):
            _check_kind(key.strict, key.strict if either else strict)
            digests.append(key)
        elif isinstance(key, (bytes, bytearray, memoryview)):
            digests.append(hashlib.blake2b(key, digest_size=HASH_BYTES, person=person).digest())
        else:
            raise BadArgumentError(f"a key is bytes, not {type(key).__name__}")
    return b"".join(digests)


def _check_kind(given: bool, wanted: bool) -> None:
    if given and not wanted:
        raise BadArgumentError("strict=False, and the keys are chained: use content_keys()")
    if wanted and not given:
        raise BadArgumentError(
            "keys of content fit where other text came before, too: strict=False if that will do"
        )


def prefix_keys(
    token_ids: npt.ArrayLike, page_tokens: int, salt: bytes = b"", *, tail: bool = False
) -> PageKeys:
    """A key for each full page of token ids: the hash of the page chained to the one before.

    Two sequences share key i exactly when they agree in all tokens up to page i and in salt.
    tail=True: one more, of the ids behind the last full page, if there are any; it names their
    number too. Arrays of int64 are hashed where they lie; all else is made one first, which for a
    list takes many times as long as the hashing.
    """
    ids = whole_ids(token_ids)
    first = root(salt)
    keys = chain(first, ids, page_tokens)
    rest = ids[len(keys) * page_tokens :]
    if tail and len(rest):
        before = keys[-1].tobytes() if len(keys) else first
        keys = np.concatenate([keys, tail_keys(rest, before)[-1:]])
    return PageKeys(keys, page_tokens)


def chain(before: bytes, ids: npt.NDArray[np.int64], page_tokens: int) -> Hashes:
    """Keys of the full pages of ids that follow the page of key `before`, or a root()."""
    return _core.page_keys(ids, _page_tokens(page_tokens), _core.KEYS_CHAINED, before)


def content_keys(token_ids: npt.ArrayLike, page_tokens: int, salt: bytes = b"") -> PageKeys:
    """A key for each full page of token ids that does not depend on the text before it.

    For publish() and match() with strict=False only. K and V of a token depend on all tokens before
    it, so such a page is an approximation: what to do about it is the caller's, as CacheBlend (Yao
    et al., EuroSys 2025, arXiv 2405.16444) recomputes some tokens, and EPIC (Hu et al., ICML 2025,
    arXiv 2410.15332) the first ones of each page. A key names the page's place in its text, because
    positions are in the keys (RoPE): at another place the page is not found.
    """
    ids = whole_ids(token_ids)
    keys = _core.page_keys(ids, _page_tokens(page_tokens), _core.KEYS_CONTENT, root(salt))
    return PageKeys(keys, page_tokens, strict=False)


def root(salt: bytes) -> bytes:
    """What the first page's key hangs on. Raises BadArgumentError for what is not bytes."""
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        hint = f"salt={salt.encode()!r}" if isinstance(salt, str) else 'salt=b"..."'
        raise BadArgumentError(f"a salt is bytes, not {type(salt).__name__}: {hint}")
    return hashlib.blake2s(salt, digest_size=HASH_BYTES, person=b"cxlkvslt").digest()


def whole_ids(token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Token ids as int64, one after the other."""
    given = array_of(token_ids, "token ids")
    if given.ndim != 1:
        raise BadArgumentError(f"token ids have shape {given.shape}, wanted one dimension")
    if given.size and given.dtype.kind not in "iu":
        raise BadArgumentError(f"token ids have dtype {given.dtype}, wanted whole numbers")
    return np.ascontiguousarray(given, np.int64)


def _page_tokens(page_tokens: int) -> int:
    if not is_whole(page_tokens, 1, 2**32 - 1):
        raise BadArgumentError(f"pages of {page_tokens} tokens: at least 1")
    return page_tokens
