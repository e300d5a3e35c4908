"""scrub(): nothing of a page outlives its last holder, whoever that is and however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import CXLPool, KVLayout, ObjectPool
from cxlkv.prefix import PageKeys, prefix_keys

PAGE, HEADS, DIM = 16, 2, 32
SALT = b"a tenant's"
LAYOUT = KVLayout(layers=2, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="float32")
TOKENS = 4 * PAGE + 5
IDS = np.arange(TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def pool(path: Path) -> Iterator[CXLPool]:
    with CXLPool.create(path, layout=LAYOUT, capacity="8MiB", threads=1) as pool:
        yield pool
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def made(layer: int) -> npt.NDArray[np.float32]:
    """[tokens, heads, channels], nowhere the same."""
    return np.random.default_rng(layer).random((TOKENS, HEADS, DIM), np.float32) + 1


K, V = ([made(layer + of) for layer in range(LAYOUT.layers)] for of in (0, 10))
FIRSTS = np.concatenate([of[:, 0, :2] for of in (*K, *V)]).copy().view(np.uint64)[:, 0]
"""8 bytes of each token's key and value, [4 x tokens]."""


def publish(pool: CXLPool) -> PageKeys:
    seq = pool.sequence()
    for layer in range(LAYOUT.layers):
        seq.append(layer, K[layer], V[layer])
    assert pool.publish_prefix(seq, IDS, SALT, tail=True) == 5
    seq.release()
    return prefix_keys(IDS, PAGE, SALT, tail=True)


def left(path: Path) -> list[int]:
    """Tokens that the file still has of the first layer's keys and so on."""
    data = np.frombuffer(path.read_bytes(), np.uint64)
    data = np.unique(data[data != 0])
    return (np.flatnonzero(np.isin(FIRSTS, data)) % TOKENS).tolist()


def extents_of(pool: CXLPool, path: Path) -> bytes:
    """Where records lie; the file without its metadata."""
    geometry = pool.pages.geometry
    return path.read_bytes()[geometry["extents_offset"] :]


def test_nothing_is_left(pool: CXLPool, path: Path) -> None:
    """Nor of sketches, digests, checksums and headers."""
    before = extents_of(pool, path)
    keys = publish(pool)
    assert len(left(path)) == 4 * TOKENS
    assert pool.admin.scrub(keys) == (5, 0, 0)
    assert left(path) == []
    assert extents_of(pool, path) == before
    assert pool.admin.scrub(keys) == (0, 0, 0)
    assert pool.match_prefix(IDS, SALT).tokens == 0


def test_forget_leaves_the_bytes(pool: CXLPool, path: Path) -> None:
    keys = publish(pool)
    assert pool.forget(keys) == 5
    assert len(left(path)) == 4 * TOKENS


def test_only_these_pages(pool: CXLPool, path: Path) -> None:
    keys = publish(pool)
    assert pool.admin.scrub(keys[2:]) == (3, 0, 0)
    assert left(path) == 4 * list(range(2 * PAGE))
    with pool.match_prefix(IDS, SALT) as hit:
        assert hit.tokens == 2 * PAGE
    pool.forget(keys)


def test_who_holds_a_page_keeps_it(pool: CXLPool, path: Path) -> None:
    keys = publish(pool)
    with pool.match(keys[:3]):
        assert pool.admin.scrub(keys) == (2, 3, 0)
        assert len(left(path)) == 4 * 3 * PAGE
        assert left(path) == 4 * list(range(3 * PAGE))
    assert left(path) == []


def test_a_holder_that_is_killed(pool: CXLPool, path: Path) -> None:
    keys = publish(pool)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        hit = pool.match(keys)
        os.write(writing, bytes([hit.tokens]))
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1) == bytes([4 * PAGE])
    os.close(reading)
    held = pool.admin.scrub(keys)
    assert held.held >= 4
    assert left(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert pool.admin.scrub(keys) == (0, 0, 0)  # who looks for the dead gives back what they held
    assert left(path) == []


def test_a_page_that_is_used_again_is_not_scrubbed_twice(pool: CXLPool, path: Path) -> None:
    assert pool.admin.scrub(publish(pool)).pages == 5
    keys = publish(pool)
    assert pool.forget(keys) == 5
    assert len(left(path)) == 4 * TOKENS


def test_objects(tmp_path: Path) -> None:
    layout = KVLayout.objects("64KiB")
    secret = b"not to be kept" * 1000
    with ObjectPool.create(tmp_path / "objects", layout=layout, capacity="8MiB", threads=1) as pool:
        pool.put("a", secret)
        pool.put("b", secret[::-1])
        assert secret in (tmp_path / "objects").read_bytes()
        assert pool.admin.scrub(["a", "c"]) == (1, 0, 0)
        data = (tmp_path / "objects").read_bytes()
        assert secret[:64] not in data
        assert secret[::-1] in data
        assert pool.object_sizes(["a", "b"]).tolist() == [-1, len(secret)]
