"""Keys of prefixes, and publish, match and forget by them: a hit never holds more than agrees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cxlkv import CXLPool, Hit, Sequence
from cxlkv.errors import BadArgumentError, ReleasedError, StaleError
from cxlkv.prefix import key_hashes, prefix_keys
from cxlkv.sequence import Batch

PAGE = 4  # tokens of a page of the pool fixture


def grown(pool: CXLPool, ids: list[int]) -> Sequence:
    """A sequence whose K and V follow from the token ids."""
    sequence = pool.sequence()
    rows = np.array(ids, np.float32).reshape(-1, 1, 1) * np.ones((1, 2, 8), np.float32)
    for layer in range(pool.layout.layers):
        sequence.append(layer, rows, rows + layer)
    return sequence


def ids_of(sequence: Sequence, layer: int = 1) -> list[int]:
    v = np.asarray(sequence.fetch(layer)[1])
    return [int(x) - layer for x in v[1].reshape(-1, 8)[: len(sequence), 3]]


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


# ---- publish and match ----


@pytest.mark.parametrize("per_key", [1, 2, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("key_count", [1, 2, 3, 4, 7])
def test_key_sizes_that_divide_the_page_or_not(pool: CXLPool, per_key: int, key_count: int) -> None:
    """A match of n keys is all complete pages within n * per_key tokens."""
    ids = list(range(7 * per_key + 2))
    sequence = grown(pool, ids)
    names = keys(key_count)
    covered = key_count * per_key // PAGE
    assert pool.publish(sequence, names, per_key) == covered
    assert pool.publish(sequence, names, per_key) == 0
    assert pool.stats()["pages_published"] == covered
    for asked in range(key_count + 1):
        with pool.match(names[:asked]) as hit:
            assert hit.tokens == asked * per_key // PAGE * PAGE
            assert bool(hit) == (hit.tokens > 0)
            assert ids_of(hit.sequence()) == ids[: hit.tokens]
    if per_key >= PAGE:
        with pool.match([*names[:1], b"other", *names[2:]]) as hit:
            assert hit.tokens == per_key // PAGE * PAGE  # a gap ends it
        assert pool.match(names[1:]).tokens == 0
    assert pool.forget(names) == covered
    assert pool.match(names).tokens == 0
    assert pool.stats()["pages_published"] == 0


def test_tokens_and_salt_decide_what_matches(pool: CXLPool) -> None:
    ids = [5, 6, 7, 8, 1, 2, 3, 4, 9]
    assert pool.publish_prefix(grown(pool, ids), ids) == 2
    assert pool.match_prefix(ids).tokens == 8
    assert pool.match_prefix([*ids[:8], 77, 78, 79, 80]).tokens == 8
    assert pool.match_prefix([*ids[:7], 99, 9]).tokens == 4
    assert pool.match_prefix([99, *ids[1:]]).tokens == 0
    assert pool.match_prefix(ids[:7]).tokens == 4
    assert pool.match_prefix(ids[:3]).tokens == 0
    assert pool.match_prefix(ids, b"tenant").tokens == 0
    own = grown(pool, ids)
    assert pool.publish_prefix(own, ids, b"tenant") == 2
    assert pool.match_prefix(ids, b"tenant").tokens == 8


def test_the_first_copy_serves_all(pool: CXLPool) -> None:
    ids = list(range(12))
    first, second = grown(pool, ids), grown(pool, ids)
    assert pool.publish_prefix(first, ids[:8]) == 2
    assert pool.publish_prefix(second, ids) == 1  # the third page only
    with pool.match_prefix(ids) as hit:
        taken = hit.sequence()
        assert taken.pages.tolist() == [*first.pages[:2].tolist(), int(second.pages[2])]
        assert ids_of(taken) == ids


def test_a_page_has_one_key_and_a_chain_ends_at_its_gap(pool: CXLPool) -> None:
    """A page published under other keys ends the chain: what is behind could not be forgotten."""
    sequence = grown(pool, list(range(12)))
    assert pool.publish(sequence, keys(3, "own"), 4) == 3
    assert pool.forget(keys(1, "own")) == 1
    assert pool.forget([keys(3, "own")[2]]) == 1  # the middle page keeps its key
    assert pool.publish(sequence, [b"wide"], 12) == 1
    assert pool.match([b"wide"]).tokens == 4
    assert pool.forget([b"wide"]) == 1
    assert pool.forget(keys(3, "own")) == 1
    assert pool.stats()["pages_published"] == 0


def test_only_complete_tokens_of_all_layers_are_published(pool: CXLPool) -> None:
    sequence = grown(pool, list(range(8)))
    sequence.append(0, np.zeros((4, 2, 8), np.float32), np.zeros((4, 2, 8), np.float32))
    with pytest.raises(BadArgumentError, match="3 keys of 4 tokens"):
        pool.publish(sequence, keys(3), 4)
    assert pool.stats()["pages_published"] == 0
    assert pool.publish(sequence, keys(2), 4) == 2
    for wrong in (0, -1):
        with pytest.raises(BadArgumentError):
            pool.publish(sequence, keys(1), wrong)
    assert pool.publish(sequence, [], 4) == 0


def test_a_sequence_of_another_pool_is_refused(
    pool: CXLPool, make_pool: Callable[[], CXLPool]
) -> None:
    other = make_pool()
    with pytest.raises(BadArgumentError, match="another pool"):
        other.publish(grown(pool, [1, 2, 3, 4]), [b"k"], 4)
    assert pool.stats()["pages_published"] == 0


def test_published_pages_outlive_their_sequence_until_forgotten(pool: CXLPool) -> None:
    ids = list(range(9))
    sequence = grown(pool, ids)
    pool.publish_prefix(sequence, ids)
    sequence.release()
    stats = pool.stats()
    assert (stats["pages_held"], stats["pages_published_only"]) == (0, 2)
    hit = pool.match_prefix(ids)
    assert pool.stats()["pages_held"] == 2
    assert pool.forget(prefix_keys(ids, PAGE)) == 2
    assert pool.stats()["pages_held"] == 2  # the hit pins them
    assert ids_of(hit.sequence()) == ids[:8]
    hit.release()
    hit.release()
    stats = pool.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert pool.forget(prefix_keys(ids, PAGE)) == 0


def test_a_forgotten_page_can_be_published_again(pool: CXLPool) -> None:
    ids = list(range(8))
    sequence = grown(pool, ids)
    for salt in (b"a", b"b", b"a"):
        assert pool.publish_prefix(sequence, ids, salt) == 2
        assert pool.match_prefix(ids, salt).tokens == 8
        assert pool.forget(prefix_keys(ids, PAGE, salt)) == 2


def test_a_writer_after_the_hit_does_not_touch_it(pool: CXLPool) -> None:
    ids = list(range(8))
    sequence = grown(pool, ids)
    pool.publish_prefix(sequence, ids)
    hit = pool.match_prefix(ids)
    one, two = hit.sequence(), hit.sequence()
    one.truncate(6)
    row = np.full((1, 2, 8), 50, np.float32)
    for layer in range(2):
        one.append(layer, row, row + layer)
    assert ids_of(one) == [*ids[:6], 50]
    assert ids_of(two) == ids_of(sequence) == ids


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
    sequence = grown(pool, ids)
    pool.publish_prefix(sequence, ids)
    sequence.release()
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
    assert ids_of(taken) == ids
    assert pool.stats()["pages_held"] == 2


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
    rows = np.zeros((total * PAGE, 2, 8), np.float32)
    other.append(0, rows, rows)
    assert len(other) == total * PAGE


@pytest.mark.parametrize("lease_s", [0, -1.0, float("nan"), float("inf"), 1e10])
def test_leases_are_positive_and_end(pool: CXLPool, lease_s: float) -> None:
    with pytest.raises(BadArgumentError, match="lease"):
        pool.match([b"k"], lease_s=lease_s)


def test_released_hits_say_so(pool: CXLPool) -> None:
    hit = pool.match([])
    assert hit.tokens == 0
    assert len(hit.sequence()) == 0
    hit.release()
    with pytest.raises(ReleasedError):
        hit.sequence()
    with pytest.raises(ReleasedError):
        Batch(pool._handle, pool.layout, [hit._sequence]).fetch(0)
