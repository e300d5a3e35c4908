"""PoolRequests: what an engine asks of a pool, by request."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.adapters.base import PoolRequests
from cxlkv.adapters.identity import block_keys, namespace
from cxlkv.errors import BadArgumentError
from cxlkv.prefix import PageKeys

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")


def keys_of(count: int, word: str = "a") -> PageKeys:
    hashes = [hashlib.sha256(f"text {i}".encode()).digest() for i in range(count)]
    return block_keys(hashes, LAYOUT.page_tokens, namespace({"model": word}))


def append(requests: PoolRequests, request: str, tokens: int) -> None:
    made = np.random.default_rng(tokens).standard_normal((tokens, 2, 64)).astype(np.float16)
    for layer in range(LAYOUT.layers):
        requests.sequences[request].append(layer, made, made)


def test_what_one_request_stored_another_loads() -> None:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="8MiB") as pool:
        requests = PoolRequests(pool)
        assert requests.load("one", None, 0) == 0
        append(requests, "one", 70)
        assert requests.store("one", keys_of(8)) == 4
        assert requests.store("one", keys_of(8)) == 0
        with requests.match(keys_of(8)) as hit:
            assert hit.tokens == 64
            assert requests.load("two", hit.handle, 50) == 50
        with requests.match(keys_of(8, "b")) as other:
            assert other.tokens == 0
        with pytest.raises(BadArgumentError, match="two is there already"):
            requests.load("two", None, 0)
        picked = requests.select("two", 0, np.ones((4, 64), np.float16), Budget(pages=2))
        assert picked.pages.shape[0] == LAYOUT.kv_heads
        assert [event.kind for event in requests.events()] == ["stored"]
        for name in ("one", "two", "two"):
            requests.release(name)
        assert requests.forget(keys_of(8)) == 4
        assert [event.kind for event in requests.events()] == ["removed"]
        assert pool.check()["clean"]
        assert not requests.failures()


def test_pages_that_are_gone_or_damaged_are_a_miss() -> None:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="8MiB") as pool:
        requests = PoolRequests(pool)
        requests.load("one", None, 0)
        append(requests, "one", 64)
        requests.store("one", keys_of(4))
        with requests.match(keys_of(4)) as hit:
            handle = hit.handle
        requests.release("one")
        requests.forget(keys_of(4))
        assert requests.load("two", handle, 64) == 0
        assert requests.failures() == {"stale": 1}
        assert pool.check()["clean"]
