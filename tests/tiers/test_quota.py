"""Quotas: no tenant has more published than it may, and only its own pages make room for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cxlkv import CXLPool, KVLayout, ObjectPool, object_keys
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.errors import BadArgumentError, QuotaError
from cxlkv.prefix import PageKeys, prefix_keys
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

PAGE = 4
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=PAGE, dtype="float32")


def keys_of(tenant: bytes, text: int, pages: int = 4) -> PageKeys:
    return prefix_keys(np.full(pages * PAGE, text), PAGE, tenant)


def publish(quota: Quota, keys: PageKeys) -> int:
    """A sequence of zeros, under these keys, released then."""
    zeros = np.zeros((len(keys) * PAGE, 1, 8), np.float32)
    sequence = quota.tiers.pool.sequence()
    try:
        sequence.append(0, zeros, zeros)
        return quota.publish(sequence, keys)
    finally:
        sequence.release()


def found(pool: CXLPool, keys: PageKeys) -> int:
    with pool.match(keys) as hit:
        return hit.tokens // PAGE


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    with (
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool,
        Tiers(pool) as made,
    ):
        yield made


def test_the_tenants_oldest_make_room(tiers: Tiers) -> None:
    ours, others = Quota(tiers, 10), Quota(tiers, 100)
    theirs = [keys_of(b"b", text) for text in range(5)]
    for keys in theirs:
        assert publish(others, keys) == 4
    texts = [keys_of(b"a", text) for text in range(3)]
    for keys in texts:
        assert publish(ours, keys) == 4
    assert ours.used() == 10
    assert ours.stats() == {
        "pages": 10,
        "used_pages": 10,
        "evicted_pages": 2,
        "refused_pages": 0,
    }
    assert [found(tiers.pool, keys) for keys in texts] == [2, 4, 4]  # its last pages went
    assert [found(tiers.pool, keys) for keys in theirs] == [4] * 5
    assert publish(ours, texts[2]) == 0  # there: nothing has to go
    assert ours.used() == 10


def test_what_is_held_stays_and_the_refusal_is_named(tiers: Tiers) -> None:
    quota = Quota(tiers, 6)
    first, second = keys_of(b"a", 1), keys_of(b"a", 2)
    publish(quota, first)
    with (
        tiers.pool.match(first),
        pytest.raises(QuotaError, match=r"4 pages more would be 8 of a tenant that may have 6"),
    ):
        publish(quota, second)
    assert found(tiers.pool, first) == 4
    assert found(tiers.pool, second) == 0
    assert quota.stats()["refused_pages"] == 4
    assert publish(quota, second) == 4
    with pytest.raises(QuotaError, match="Release what it holds, publish less, or raise"):
        publish(quota, keys_of(b"a", 3, pages=7))
    assert quota.used() == 6, "a text that never fits lets nothing go"
    with pytest.raises(BadArgumentError, match="at least 1"):
        Quota(tiers, 0)


def test_what_comes_back_from_cold_counts(tmp_path: Path) -> None:
    with (
        CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as pool,
        Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB") as tiers,
    ):
        quota, texts = Quota(tiers, 8), [keys_of(b"a", text) for text in range(4)]
        for keys in texts:
            publish(quota, keys)
        assert quota.used() == 8
        for keys in texts:
            with quota.match(keys) as hit:
                assert hit.tokens == 4 * PAGE
            assert quota.used() <= 8
        assert tiers.stats()["promoted_pages"] > 0


def test_what_others_take_away_is_counted_no_more(tiers: Tiers) -> None:
    quota, keys = Quota(tiers, 4), keys_of(b"a", 1)
    publish(quota, keys)
    assert tiers.pool.forget(keys) == 4
    assert publish(quota, keys_of(b"a", 2)) == 4
    assert quota.stats()["evicted_pages"] == 0


def test_a_size_is_whole_pages_of_the_pool(tiers: Tiers) -> None:
    pages = Quota.of(tiers, "2MiB").pages  # the pool has 4, of which 2 are for alignment
    assert pages == Quota.of(tiers, 2 << 20).pages
    assert 0.9 * pages <= tiers.pool.stats()["pages_total"] <= pages
    with pytest.raises(BadArgumentError, match=r"a quota of 100 B: a page has .*each process"):
        Quota.of(tiers, 100)


def test_objects_and_what_others_bring_back_count() -> None:
    layout, value = KVLayout.objects(4096), [[b"value"]]
    with ObjectPool.create("anonymous:", layout=layout, capacity="8MiB", threads=1) as pool:
        quota, names = Quota(Tiers(pool), 2), [object_keys([f"{one}"]) for one in range(4)]
        for name in names[:3]:
            with quota.room_for(name):
                pool.put_batch(name, value)
        assert [pool.object_sizes(name)[0] > 0 for name in names] == [False, True, True, False]
        with quota.bringing(names[3]):
            pool.put_batch(names[3], value)
        pool.put_batch(names[0], value)  # as another process would
        assert quota.used() == 2
        quota.brought(names[0])
        assert quota.used() == 2
        assert [pool.object_sizes(name)[0] > 0 for name in names] == [True, False, False, True]
        with (
            pool.lease(object_keys(["0", "3"])),
            pytest.raises(QuotaError, match="1 pages more"),
            quota.room_for(names[1]),
        ):
            pytest.fail("what has no room is not published")
        with suppress(InterruptedError), quota.room_for(names[2]):
            pool.put_batch(names[2], value)
            raise InterruptedError
        assert [pool.object_sizes(name)[0] > 0 for name in names].count(True) == 2
        assert quota.used() == 2, "what was published counts, though its caller was interrupted"
        quota.tiers.close()


def test_an_engine_goes_on_without_publishing(tiers: Tiers) -> None:
    requests = PoolRequests(tiers.pool, tiers, Quota(tiers, 2))
    keys, zeros = keys_of(b"a", 1), np.zeros((4 * PAGE, 1, 8), np.float32)
    assert requests.load("r", None, 0) == 0
    requests.sequence("r").append(0, zeros, zeros)
    assert requests.store("r", keys) == 0
    assert requests.failures() == {"quota": 1}
    assert len(requests.sequence("r")) == 4 * PAGE
    requests.release("r")
    with requests.match(keys) as hit:
        assert hit.tokens == 0
    assert tiers.pool.admin.check()["clean"]


class QuotaModel(RuleBasedStateMachine):
    """Two tenants that publish, find and hold; nobody ever has more than its quota, and nobody's
    pages go because another one publishes."""

    @initialize(pages=st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def begin(self, pages: tuple[int, int]) -> None:
        self.stack = ExitStack()
        pool = CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1)
        self.pool = self.stack.enter_context(pool)
        self.tiers = self.stack.enter_context(Tiers(self.pool))
        self.quotas = [Quota(self.tiers, count) for count in pages]
        self.hits: list[Hit] = []

    def texts(self, tenant: int) -> list[int]:
        return [found(self.pool, keys_of(bytes([tenant]), text, 5)) for text in range(5)]

    @rule(tenant=st.integers(0, 1), text=st.integers(0, 4), pages=st.integers(1, 5))
    def publish(self, tenant: int, text: int, pages: int) -> None:
        keys, others = keys_of(bytes([tenant]), text, pages), self.texts(1 - tenant)
        before = found(self.pool, keys)
        try:
            count = publish(self.quotas[tenant], keys)
        except QuotaError:
            assert found(self.pool, keys) <= before
        else:
            assert count == pages - before
            assert found(self.pool, keys) == pages
        assert self.texts(1 - tenant) == others

    @rule(tenant=st.integers(0, 1), text=st.integers(0, 4))
    def hold(self, tenant: int, text: int) -> None:
        self.hits.append(self.quotas[tenant].match(keys_of(bytes([tenant]), text, 5)))

    @rule()
    def release(self) -> None:
        while self.hits:
            self.hits.pop().release()

    @invariant()
    def nobody_has_more_than_its_quota(self) -> None:
        for tenant, quota in enumerate(getattr(self, "quotas", [])):
            assert sum(self.texts(tenant)) == quota.used() <= quota.pages

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.release()
            assert self.pool.admin.check()["clean"]
            self.stack.close()


TestQuotaModel = QuotaModel.TestCase
TestQuotaModel.settings = settings(max_examples=40, stateful_step_count=20)
