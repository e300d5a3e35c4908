"""Keys of prefixes, and publish, match and forget by them: a hit never holds more than agrees."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool, Hit, KVLayout, _core
from cxlkv.errors import BadArgumentError, PoolFullError, ReleasedError, StaleError
from cxlkv.layout import LayerGroup
from cxlkv.prefix import PageKeys, content_keys, key_hashes, prefix_keys, root
from cxlkv.sequence import Batch

from .support.damaging import poke
from .support.texts import SMALL, append, grown, numbers, publish, rows, verify

PAGE = 4  # tokens of a page of the pool fixture


def keys(count: int, name: str = "k") -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


# ---- keys ----


def test_keys_are_chained_and_salted() -> None:
    ids = list(range(13))
    made = prefix_keys(ids, 4)
    assert len(made) == 3
    assert len(set(made)) == 3
    assert all(len(key) == 16 for key in made)
    assert prefix_keys(np.array(ids, np.int32), 4) == made
    assert prefix_keys(ids[:8], 4) == made[:2]
    assert prefix_keys([*ids[:4], 99, *ids[5:]], 4)[0] == made[0]
    changed_first = prefix_keys([99, *ids[1:]], 4)
    assert not set(changed_first) & set(made)  # later pages hang on the first
    assert not set(prefix_keys(ids, 4, b"tenant")) & set(made)
    assert not set(prefix_keys(ids, 3)) & set(made)
    assert prefix_keys([], 4) == prefix_keys([1, 2, 3], 4) == []


# What cxlkv/prefix.py promises, in hashlib: the reference of the hashing in C.


def blake2s(data: bytes, purpose: bytes, size: int = 16, salt: int = 0) -> bytes:
    named = salt.to_bytes(8, "little")
    return hashlib.blake2s(data, digest_size=size, person=purpose, salt=named).digest()


def page_hash(ids: list[int]) -> bytes:
    low = b"".join((x & 0xFFFFFFFF).to_bytes(4, "little") for x in ids)
    high = b"".join((x >> 32 & 0xFFFFFFFF).to_bytes(4, "little") for x in ids)
    return blake2s(low + (high if any(high) else b""), b"cxlkvpag", 32)


def hashlib_keys(ids: list[int], page_tokens: int, salt: bytes) -> list[bytes]:
    """With the key of the tail."""
    keys, last, full = [], blake2s(salt, b"cxlkvslt"), len(ids) // page_tokens * page_tokens
    for first in range(0, full, page_tokens):
        last = blake2s(last + page_hash(ids[first : first + page_tokens]), b"cxlkvkey")
        keys.append(last)
    rest = b"".join(x.to_bytes(8, "little", signed=True) for x in ids[full:])
    return [*keys, blake2s(last + rest, b"cxlkvtai")] if rest else keys


def hashlib_content_keys(ids: list[int], page_tokens: int, salt: bytes) -> list[bytes]:
    first = blake2s(salt, b"cxlkvslt")
    pages = [ids[i : i + page_tokens] for i in range(0, len(ids), page_tokens)]
    whole = [page for page in pages if len(page) == page_tokens]
    return [blake2s(first + page_hash(p), b"cxlkvcon", salt=i) for i, p in enumerate(whole)]


@pytest.mark.parametrize("isa", ["serial", "auto"])
@pytest.mark.parametrize("page_tokens", [1, 2, 7, 15, 16, 17, 31, 64, 100])
def test_keys_in_c_are_those_of_hashlib(
    isa: str, page_tokens: int, rng: np.random.Generator, force_isa: Callable[[str], str]
) -> None:
    """Up to 20 pages: one by one and eight together; small ids, large ones and negative ones."""
    force_isa(isa)
    for pages in (0, 1, 7, 8, 9, 16, 20):
        for large in (0.0, 0.02):
            count = pages * page_tokens + int(rng.integers(page_tokens))
            ids = rng.integers(0, 2**32, count)
            odd = rng.random(count) < large
            ids[odd] = rng.integers(-(2**63), 2**63 - 1, odd.sum())
            salt = rng.bytes(int(rng.integers(70)))
            wanted = hashlib_keys(ids.tolist(), page_tokens, salt)
            assert prefix_keys(ids, page_tokens, salt, tail=True) == wanted
            assert prefix_keys(ids, page_tokens, salt) == wanted[:pages]
            contents = hashlib_content_keys(ids.tolist(), page_tokens, salt)
            assert content_keys(ids, page_tokens, salt) == contents
    assert root(b"salt") == blake2s(b"salt", b"cxlkvslt")


def test_a_key_names_what_came_before_and_a_tail_its_length() -> None:
    ids = [1, 2, 3, 4, 5, 0, 0]
    tails = [prefix_keys(ids[:count], 4, tail=True)[1] for count in (5, 6, 7)]
    assert len({*tails, prefix_keys([1, 2, 3, 4, 5, 0, 0, 0], 4)[1]}) == 4
    other = prefix_keys([0, *ids[1:]], 4, tail=True)
    assert not set(other) & set(prefix_keys(ids, 4, tail=True))
    assert len(prefix_keys(ids[:4], 4, tail=True)) == 1  # no tail, no key of one
    first, second = content_keys([7, 8, 7, 8], 2)
    assert first != second  # another place
    assert content_keys([0, 0, 7, 8], 2)[1] == second  # other text before it
    assert not {first, second} & {*prefix_keys([7, 8, 7, 8], 2), *prefix_keys([7], 2, tail=True)}


def test_keys_of_pages_are_bytes_and_are_not_hashed_again() -> None:
    keys = prefix_keys(range(12), 4)
    packed = b"".join(keys)
    assert keys.packed.shape == (3, 16)
    assert key_hashes(keys) == key_hashes(list(keys)) == packed
    assert key_hashes([b"a", keys[0]])[16:] == packed[:16]
    assert key_hashes([bytes(keys[0])]) != packed[:16]
    assert isinstance(keys[1:], PageKeys)
    assert key_hashes(keys[1::2]) == packed[16:32]
    assert keys[-1] == packed[32:]
    assert hash(keys[:2]) == hash(prefix_keys(range(8), 4))
    assert (keys == 5) is False
    assert keys != content_keys(range(12), 4)
    assert repr(keys) == "<3 keys>"
    assert repr(content_keys(range(4), 4)) == "<1 keys of content>"
    for wrong in (0, -1, 2**32):
        with pytest.raises(BadArgumentError, match="at least 1"):
            prefix_keys(range(8), wrong)


def test_torch_token_ids() -> None:
    torch = pytest.importorskip("torch")
    assert prefix_keys(torch.arange(9), 4) == prefix_keys(range(9), 4)


@pytest.mark.parametrize("wrong", [[1.5, 2, 3, 4], 7, [[1, 2], [3, 4]], ["a"] * 4, [True] * 4])
def test_token_ids_are_whole_numbers_in_a_row(wrong: object) -> None:
    with pytest.raises(BadArgumentError, match="token ids"):
        prefix_keys(wrong, 4)  # type: ignore[arg-type]


def test_keys_are_bytes() -> None:
    mixed: list[bytes] = [b"a", bytearray(b"b"), memoryview(b"c")]  # type: ignore[list-item]
    assert len(key_hashes(mixed)) == 3 * 16
    assert key_hashes([b"a"]) != key_hashes([b"b"])
    for wrong in ("text", 5, None):
        with pytest.raises(BadArgumentError, match="bytes"):
            key_hashes([wrong])  # type: ignore[list-item]


# ---- leases: the clock is asked until it says so, nobody sleeps for a guessed time ----


def ended(hit: Hit) -> None:
    """Returns when the lease has ended."""
    for _ in range(10_000_000):
        try:
            hit._sequence.tokens(0)
        except StaleError:
            return
    raise AssertionError("the lease does not end")


def test_a_lease_ends(pool: CXLPool) -> None:
    ids = list(range(8))
    publish(pool, ids)
    hit = pool.match_prefix(ids, lease_s=1e-4)
    ended(hit)
    for use in (hit.sequence, lambda: hit.handle):
        with pytest.raises(StaleError, match="match again"):
            use()
    assert pool.stats()["pages_held"] == 0
    hit.release()
    kept = pool.match_prefix(ids, lease_s=1e-1)
    taken = kept.sequence()  # outlives the hit
    ended(kept)
    verify(taken, ids)
    assert pool.stats()["pages_held"] == 2


def test_a_match_takes_as_long_with_many_sequences_alive(pool: CXLPool) -> None:
    """What has not ended is not looked at: a walk over 20,000 took thirty times a match."""
    ids = list(range(8))
    source = grown(pool, ids)
    pool.publish_prefix(source, ids)

    def fastest() -> float:
        times = []
        for _ in range(200):
            begun = time.perf_counter()
            pool.match_prefix(ids).release()
            times.append(time.perf_counter() - begun)
        return min(times)

    alone = fastest()
    kept = [(pool.sequence(), pool.match_prefix(ids, lease_s=1000 + i % 7)) for i in range(10_000)]
    among_many = fastest()
    assert len(kept) == 10_000
    assert among_many < 3 * alone


def test_ended_leases_make_room(make_pool: Callable[[], CXLPool]) -> None:
    """A full pool takes back what is only pinned by leases that are over."""
    pool = make_pool()
    total = pool.stats()["pages_total"]
    sequence = grown(pool, list(range(PAGE)))
    pool.publish(sequence, [b"k"], PAGE)
    hits = [pool.match([b"k"], lease_s=1e-4)]
    pool.forget([b"k"])
    sequence.release()
    ended(hits[0])
    other = pool.sequence()
    append(other, range(total * PAGE))
    assert len(other) == total * PAGE


def test_released_hits_say_so(pool: CXLPool) -> None:
    hit = pool.match([])
    assert hit.tokens == 0
    assert len(hit.sequence()) == 0
    hit.release()
    with pytest.raises(ReleasedError):
        hit.sequence()
    with pytest.raises(ReleasedError):
        Batch(pool._handle, pool.layout, [hit._sequence]).fetch(0)


# ---- a last page that is not full ----


def test_a_text_that_goes_on_loses_no_token(pool: CXLPool) -> None:
    ids = list(range(11))
    assert pool.publish_prefix(grown(pool, ids), ids, tail=True) == 3
    assert pool.publish_prefix(grown(pool, ids), ids, tail=True) == 0
    with pool.match_prefix([*ids, 50, 51]) as hit:
        taken = hit.sequence()
    assert (hit.tokens, len(taken)) == (11, 11)
    verify(taken, ids)
    assert pool.stats()["pages_held"] == 2  # the tail's page was copied and let go
    append(taken, [50, 51])
    verify(taken, [*ids, 50, 51])
    assert pool.publish_prefix(taken, [*ids, 50, 51]) == 1
    assert pool.match_prefix([*ids, 50, 51]).tokens == 12
    assert pool.match_prefix([*ids, 99]).tokens == 11  # parts from it within that page
    assert pool.forget(prefix_keys(ids, PAGE, tail=True)[2:]) == 1
    assert pool.match_prefix([*ids, 99]).tokens == 8
    assert pool.stats()["pages_published"] == 3


def test_a_tail_from_the_middle_of_a_longer_sequence(pool: CXLPool) -> None:
    """The tokens lie in a full page of the sequence, or in its tail with more behind them."""
    ids = list(range(11))
    sequence = grown(pool, ids)
    sequence.append(0, np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 8), np.float32))  # a page
    for count in (2, 7, 10):
        assert pool.publish_prefix(sequence, ids[:count], tail=True) == (2 if count > 4 else 1)
        with pool.match_prefix(ids[:count]) as hit:
            verify(hit.sequence(), ids[:count])
    with pytest.raises(BadArgumentError, match="ends at 11, the sequence has 10"):
        pool.publish_prefix(grown(pool, ids[:10]), ids, tail=True)


def test_no_tail_behind_a_chain_that_is_not_published(pool: CXLPool) -> None:
    ids = list(range(6))
    sequence = grown(pool, ids)
    assert pool.publish(sequence, keys(1), PAGE) == 1  # its page has another key
    free = pool.stats()["pages_free"]
    assert pool.publish_prefix(sequence, ids, tail=True) == 0
    assert pool.stats()["pages_free"] == free


def test_no_page_for_a_tail(make_pool: Callable[[], CXLPool]) -> None:
    pool = make_pool()
    ids = list(range(6))
    sequence = grown(pool, ids)
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    with pytest.raises(PoolFullError):
        pool.publish_prefix(sequence, ids, tail=True)
    assert pool.match_prefix(ids).tokens == 4
    pool.pages.free(taken)
    assert pool.publish_prefix(sequence, ids, tail=True) == 1
    assert pool.match_prefix(ids).tokens == 6
    assert pool.match(prefix_keys(ids, PAGE, tail=True)).tokens == 4  # full pages only


def test_a_damaged_tail_is_a_miss(tmp_path: Path) -> None:
    ids, path = list(range(6)), tmp_path / "pool"
    with CXLPool.create(path, layout=SMALL, capacity="4MiB", threads=1) as pool:
        pool.publish_prefix(grown(pool, ids), ids, tail=True)
        assert pool.match_prefix(ids).tokens == 6
        full = pool.match_prefix(ids).sequence().pages.tolist()
        published = np.flatnonzero(pool.pages.evictable())
        (page,) = set(published.tolist()) - set(full)
        geometry = _core.pool_geometry(pool._handle)
        assert page < geometry["slab_slots"]
        at = geometry["extents_offset"] + geometry["layers_offset"] + geometry["keys_offset"]
        at += page * SMALL.kv_heads * geometry["key_piece_bytes"]
        poke(path, at + 5, b"?")
        with CXLPool.open(path, threads=1) as other:  # this one has verified it already
            with other.match_prefix(ids) as hit:
                verify(hit.sequence(), ids[:4])
            assert other.stats()["corrupt_pieces"] == 1
        assert pool.admin.check(deep=True, repair=True)["repairs"]
        assert pool.stats()["pages_published"] == 1
        assert pool.publish_prefix(grown(pool, ids), ids, tail=True) == 1
        (again,) = set(np.flatnonzero(pool.pages.evictable()).tolist()) - set(full)
        poke(path, geometry["descriptors_offset"] + 64 * again + 30, b"?")
        assert pool.match_prefix(ids).tokens == 4
        assert "is published again" in pool.admin.check(repair=True)["repairs"][0]
        assert pool.match_prefix(ids).tokens == 6
        assert pool.forget(prefix_keys(ids, PAGE, tail=True)[1:]) == 1
        assert pool.match_prefix(ids).tokens == 4


def test_tails_with_windows_and_parts() -> None:
    """Layers with a window keep the last pages only: the tail follows what the next token sees."""
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    groups = [LayerGroup(**shape, window=6), LayerGroup(**shape)]  # type: ignore[arg-type]
    layout = KVLayout.of(groups, page_tokens=PAGE)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        ids, parts = list(range(23)), 2
        sequence = grown(pool, ids)
        assert pool.publish_prefix(sequence, ids, tail=True) > 0
        with pool.match_prefix([*ids, 7]) as hit:
            assert hit.tokens == 23
            taken = hit.sequence()
        assert np.array_equal(rows(taken, 1, 1), numbers(ids, 1, 1))
        append(sequence, [99])  # and what is behind the window is given back
        assert pool.publish_prefix(sequence, ids[:6], tail=True) == 0
        assert pool.publish_prefix(sequence, ids[:22], tail=True) == parts
        assert pool.match_prefix([*ids[:22], 99]).tokens == 22
        for text in (ids[:22], ids):
            assert pool.forget(prefix_keys(text, PAGE, tail=True)[5:]) == parts
        pool.forget(prefix_keys(ids, PAGE))
        assert pool.stats()["pages_published"] == 0


# ---- pins ----


def test_pinned_pages_are_not_for_eviction(pool: CXLPool) -> None:
    ids = list(range(10))
    sequence = grown(pool, ids)
    pool.publish_prefix(sequence, ids, tail=True)
    names = prefix_keys(ids, PAGE, tail=True)
    assert pool.pages.evictable().sum() == 1  # the sequence holds the others
    sequence.release()
    assert pool.pages.evictable().sum() == 3
    assert pool.admin.pin(names[:1]) == 1
    assert pool.admin.pin(names) == pool.admin.pin(names) == 3
    assert pool.stats()["pages_pinned"] == pool.admin.overview().pinned_pages == 3
    assert not pool.pages.evictable().any()
    assert pool.admin.unpin(names[1:]) == 2
    assert pool.pages.evictable().sum() == 2
    with pool.match_prefix(ids):
        assert pool.pages.evictable().sum() == 1  # leased; the tail was copied
    assert pool.admin.pin(keys(2)) == pool.admin.unpin(keys(2)) == 0
    assert pool.forget(names) == 3
    stats = pool.stats()
    assert (stats["pages_pinned"], stats["pages_free"]) == (0, stats["pages_total"])
    pool.publish_prefix(grown(pool, ids), ids)
    assert pool.stats()["pages_pinned"] == 0  # a mark goes with its page


def test_pins_of_keys_that_cover_several_pages(pool: CXLPool) -> None:
    sequence = grown(pool, list(range(16)))
    pool.publish(sequence, keys(2), 8)
    assert pool.admin.pin(keys(1)) == 2
    assert pool.admin.pin(keys(2)) == 4
    assert pool.admin.unpin(keys(1)) == 2
    assert pool.stats()["pages_pinned"] == 2


# ---- reuse that is not a strict prefix ----


def test_content_is_found_behind_other_text_only_when_asked_for(pool: CXLPool) -> None:
    one, two = [1, 1, 1, 1, 5, 6, 7, 8, 9], [2, 2, 2, 2, 5, 6, 7, 8, 9]
    first, second = grown(pool, one), grown(pool, two)
    assert pool.publish(first, content_keys(one, PAGE), PAGE, strict=False) == 2
    assert pool.publish(second, content_keys(two, PAGE), PAGE, strict=False) == 1
    assert pool.match_prefix(two).tokens == pool.match_prefix(one).tokens == 0
    with pool.match(content_keys(two, PAGE), strict=False) as hit:
        assert (hit.tokens, hit.strict) == (8, False)
        mixed = hit.sequence()
        assert mixed.pages.tolist() == [int(second.pages[0]), int(first.pages[1])]
    with pool.match_prefix(one) as nothing:
        assert nothing.strict
    elsewhere = [*one[:4], *one[:4], *one[4:8]]  # the second page's text, one page later
    assert pool.match(content_keys(elsewhere, PAGE), strict=False).tokens == 4
    assert pool.admin.pin(content_keys(one, PAGE)) == 2
    assert pool.forget(content_keys(two, PAGE)) == 2
    assert pool.forget(content_keys(one, PAGE)) == 1


def test_keys_of_one_kind_are_refused_where_the_other_is_meant(pool: CXLPool) -> None:
    ids = list(range(8))
    sequence = grown(pool, ids)
    contents, chained = content_keys(ids, PAGE), prefix_keys(ids, PAGE)
    for wrong in (contents, list(contents)):
        with pytest.raises(BadArgumentError, match="strict=False if that will do"):
            pool.match(wrong)
        with pytest.raises(BadArgumentError, match="strict=False if that will do"):
            pool.publish(sequence, wrong, PAGE)
    for mistaken in (chained, list(chained)):
        with pytest.raises(BadArgumentError, match="use content_keys"):
            pool.match(mistaken, strict=False)
        with pytest.raises(BadArgumentError, match="use content_keys"):
            pool.publish(sequence, mistaken, PAGE, strict=False)
    assert pool.stats()["pages_published"] == 0


def test_own_keys_that_are_not_strict(pool: CXLPool) -> None:
    sequence = grown(pool, list(range(8)))
    assert pool.publish(sequence, keys(2), PAGE, strict=False) == 2
    assert pool.match(keys(2)).tokens == pool.forget(keys(2)) == pool.admin.pin(keys(2)) == 0
    assert pool.match(keys(2), strict=False).tokens == 8
    assert pool.admin.pin(keys(2), strict=False) == 2
    assert pool.forget(keys(2), strict=False) == 2


def test_what_goes_on_from_other_text_is_not_published_as_strict(pool: CXLPool) -> None:
    """Else a strict match would one day find what was computed behind other text."""
    ids = list(range(8))
    pool.publish(grown(pool, ids), content_keys(ids, PAGE), PAGE, strict=False)
    hit = pool.match(content_keys(ids, PAGE), strict=False)
    taken = hit.sequence()
    kept = grown(pool, ids)
    pool.publish_prefix(kept, ids)  # its pages bridge the gap in the strict chain
    append(taken, [50] * 6)
    longer = [*ids, *[50] * 6]
    for source in (taken, taken.fork(), pool.adopt(taken.handle), pool.adopt(hit.handle)):
        with pytest.raises(BadArgumentError, match="behind other text"):
            pool.publish_prefix(source, longer[: len(source)])
        with pytest.raises(BadArgumentError, match="behind other text"):
            pool.publish_prefix(source, longer[: len(source) // 4 * 4 - 2], tail=True)
    assert pool.match_prefix(longer).tokens == 8
    assert pool.publish(taken, content_keys(longer, PAGE), PAGE, strict=False) == 1


def test_keys_for_other_page_sizes_than_the_pools(pool: CXLPool) -> None:
    """A key may cover two pages, or half a one: then a missing page does not end the search."""
    ids = list(range(16))
    for page_tokens in (8, 2):
        names = prefix_keys(ids, page_tokens)
        assert pool.publish(grown(pool, ids), names, page_tokens) == 4
        assert pool.match(names).tokens == 16
        assert pool.forget(names) == 4
