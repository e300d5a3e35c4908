"""Quotas: no tenant has more published than it may, and only its own pages make room for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cxlkv import CXLPool, KVLayout, ObjectPool, States, object_keys
from cxlkv.adapters.common.requests import PoolRequests
from cxlkv.errors import BadArgumentError, QuotaError
from cxlkv.prefix import PageKeys, every_key, prefix_keys, root
from cxlkv.sequence import Hit
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

PAGE = 4
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=PAGE, dtype="float32")
STATES = States(600, 7)  # in two pages
WITH_STATES = KVLayout(
    layers=1, kv_heads=1, head_dim=8, page_tokens=PAGE, dtype="float32", states=STATES
)


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


# ---- state checkpoints ----


def ids_of(text: int, tokens: int) -> npt.NDArray[np.int64]:
    return np.arange(tokens) + 100 * text


def states_of(text: int, tokens: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng((text, tokens)).integers(0, 256, STATES.bytes, np.uint8)


def publish_states(quota: Quota, tenant: bytes, text: int, tokens: int, states: bool = True) -> int:
    zeros = np.zeros((tokens, 1, 8), np.float32)
    sequence = quota.tiers.pool.sequence()
    try:
        sequence.append(0, zeros, zeros)
        checkpoint = states_of(text, tokens) if states else None
        return quota.publish_prefix(sequence, ids_of(text, tokens), tenant, states=checkpoint)
    finally:
        sequence.release()


def there(pool: CXLPool, tenant: bytes, texts: int, most: int) -> tuple[set[bytes], set[bytes]]:
    """Names of a tenant's pages in the pool, and of those that are of checkpoints."""
    found: list[set[bytes]] = [set(), set()]
    for text in range(texts):
        keys = every_key(ids_of(text, most), PAGE, root(tenant)).tobytes()
        both = (pool.records.names(keys, 1), pool.records.state_names(keys, 2))
        for of, names in zip(found, both, strict=True):
            flat = names.reshape(-1, 16)
            of.update(row.tobytes() for row in flat[pool.records.here(flat)])
    return found[0], found[1]


def hit_of(quota: Quota, tenant: bytes, text: int, tokens: int) -> int:
    with quota.match_prefix(np.append(ids_of(text, tokens), -1), tenant) as hit:
        if hit:
            np.testing.assert_array_equal(hit.read_states(), states_of(text, hit.tokens))
        return hit.tokens


@pytest.fixture
def state_tiers() -> Iterator[Tiers]:
    with (
        CXLPool.create("anonymous:", layout=WITH_STATES, capacity="4MiB", threads=1) as pool,
        Tiers(pool) as made,
    ):
        yield made


def test_checkpoints_make_room_for_checkpoints(state_tiers: Tiers) -> None:
    """The oldest of the tenant's own go whole, and none of its other pages."""
    quota = Quota(state_tiers, 100, state_pages=5)
    for text in range(3):
        assert publish_states(quota, b"a", text, 9) == 2 + 1 + 2
    assert [hit_of(quota, b"a", text, 9) for text in range(3)] == [0, 9, 9]
    pages, states = there(state_tiers.pool, b"a", 3, 9)
    assert (len(pages), len(states)) == (9, 4)
    assert quota.stats() == {
        "pages": 100,
        "used_pages": 13,
        "evicted_pages": 2,
        "refused_pages": 0,
        "state_pages": 5,
        "used_state_pages": 4,
    }
    with quota.match_prefix(ids_of(1, 9), b"a"), quota.match_prefix(ids_of(2, 9), b"a"):
        with pytest.raises(QuotaError, match=r"2 pages of checkpoints more would be 6 .* have 5"):
            publish_states(quota, b"a", 0, 9)
        assert publish_states(quota, b"a", 3, 8, states=False) == 2, "pages have room"
    assert publish_states(quota, b"a", 0, 9) == 2
    assert hit_of(quota, b"a", 1, 9) == 0
    publish_states(Quota(state_tiers, 100), b"b", 0, 9)
    assert there(state_tiers.pool, b"a", 3, 9)[1] != states


def test_quotas_of_states_that_are_none(tiers: Tiers, state_tiers: Tiers) -> None:
    with pytest.raises(BadArgumentError, match="the pool's layout has none"):
        Quota(tiers, 10, state_pages=4)
    for wrong in (1, 11, 2.5, True):
        with pytest.raises(BadArgumentError, match="at least 2, which a checkpoint takes"):
            Quota(state_tiers, 10, state_pages=wrong)  # type: ignore[arg-type]
    quota = Quota.of(state_tiers, "64KiB", states="16KiB")
    assert quota.state_pages == quota.pages // 4
    with pytest.raises(BadArgumentError, match="at least 2"):
        Quota.of(state_tiers, "64KiB", states=100)


@pytest.mark.parametrize("by_keys", [False, True])
def test_checkpoints_that_come_back_from_cold_count(tmp_path: Path, by_keys: bool) -> None:
    with (
        CXLPool.create("anonymous:", layout=WITH_STATES, capacity="4MiB", threads=1) as pool,
        Tiers(pool, cold=tmp_path / "c", cold_capacity="2MiB") as tiers,
    ):
        quota, total = Quota(tiers, 20, state_pages=4), pool.stats()["pages_total"]
        for text in range(3):
            publish_states(quota, b"a", text, 8 if by_keys else 9)
        for text in range(3):
            if by_keys:
                with quota.match(prefix_keys(ids_of(text, 8), PAGE, b"a")) as hit:
                    assert hit.tokens == 8
            else:
                assert hit_of(quota, b"a", text, 9) == 9
            pages, states = there(pool, b"a", 3, 9)
            assert (len(pages), len(states)) == (6 if by_keys else 9, 4)
            assert quota.used() == len(pages | states)
        with ExitStack() as held:
            for text in range(3):
                held.enter_context(quota.match(prefix_keys(ids_of(text, 8), PAGE, b"a")))
            brought = quota.stats()["used_state_pages"]
            assert brought == (6 if by_keys else 4), "those that are held stay"
            assert publish_states(quota, b"a", 3, 8, states=False) == 2
        tiers.reclaim(total)
        assert quota.used() == quota.stats()["used_state_pages"] == 0
        Quota(tiers, 20).match_prefix(ids_of(1, 9), b"a").release()
        assert quota.used() == 0, "the other one has brought them"


class StatesModel(RuleBasedStateMachine):
    """Two tenants that publish texts with checkpoints and without, find and hold them."""

    TEXTS, MOST = 4, 11

    @initialize(pages=st.integers(4, 16), states=st.integers(2, 9), others=st.integers(4, 16))
    def begin(self, pages: int, states: int, others: int) -> None:
        self.stack = ExitStack()
        pool = CXLPool.create("anonymous:", layout=WITH_STATES, capacity="4MiB", threads=1)
        self.pool = self.stack.enter_context(pool)
        tiers = self.stack.enter_context(Tiers(self.pool))
        limited = Quota(tiers, pages, state_pages=min(states, pages))
        self.quotas = [limited, Quota(tiers, others)]
        self.hits: list[Hit] = []

    def there(self, tenant: int) -> tuple[set[bytes], set[bytes]]:
        return there(self.pool, bytes([tenant]), self.TEXTS, self.MOST)

    @rule(
        tenant=st.integers(0, 1),
        text=st.integers(0, TEXTS - 1),
        tokens=st.integers(1, MOST),
        states=st.booleans(),
    )
    def publish(self, tenant: int, text: int, tokens: int, states: bool) -> None:
        quota, name = self.quotas[tenant], bytes([tenant])
        others, (pages, checkpoints) = self.there(1 - tenant), self.there(tenant)
        try:
            new = publish_states(quota, name, text, tokens, states)
        except QuotaError:
            assert self.there(tenant)[0] <= pages
            assert self.there(tenant)[1] <= checkpoints
        else:
            assert hit_of(quota, name, text, tokens) == tokens or not states
            if len(pages | checkpoints) + new <= quota.pages:
                assert pages <= self.there(tenant)[0], "only checkpoints make room for checkpoints"
        assert self.there(1 - tenant) == others

    @rule(tenant=st.integers(0, 1), text=st.integers(0, TEXTS - 1))
    def hold(self, tenant: int, text: int) -> None:
        name = bytes([tenant])
        self.hits.append(self.quotas[tenant].match_prefix(ids_of(text, self.MOST), name))

    @rule()
    def release(self) -> None:
        while self.hits:
            self.hits.pop().release()

    @invariant()
    def nobody_has_more_than_its_quota(self) -> None:
        for tenant, quota in enumerate(getattr(self, "quotas", [])):
            (pages, states), stats = self.there(tenant), quota.stats()
            assert len(pages | states) == stats["used_pages"] <= quota.pages
            assert len(states) == stats["used_state_pages"] <= stats["state_pages"]

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.release()
            assert self.pool.admin.check()["clean"]
            self.stack.close()


TestStatesModel = StatesModel.TestCase
TestStatesModel.settings = settings(max_examples=60, stateful_step_count=30)
