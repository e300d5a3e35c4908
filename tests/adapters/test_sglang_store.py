"""What one rank of SGLang stores; its host pools are arrays here, SGLang's own in tests/sglang."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from cxlkv import KVLayout, ObjectPool
from cxlkv.adapters.common.metrics import Counting
from cxlkv.adapters.common.settings import PoolSettings
from cxlkv.adapters.sglang.metrics import COUNTS, KINDS
from cxlkv.adapters.sglang.store import MAIN, Rank, Store, restorable
from cxlkv.adapters.sglang.weights import HeardWeights
from cxlkv.arrays import leading
from cxlkv.errors import BadArgumentError, GeometryError, UnsupportedError
from cxlkv.pages import NO_PAGE

from ..support.damaging import damage_object
from ..support.kept_rows import check_kept
from .test_sglang_settings import Config

TOKENS = 4
PAGES = 24


class Host:
    """Pages of so many buffers each, as a layout by layers has them; from SGLang's HostKVCache."""

    def __init__(self, buffers: int = 2, size: int = 4096, heads: int = 2, layout: str = "flat"):
        self.layout, self.page_size, self.head_num = layout, TOKENS, heads
        self.dtype = "torch.bfloat16"
        self.memory = np.zeros((buffers, PAGES, size), np.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        assert len(indices) % self.page_size == 0
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        begins = [self.memory[k, page].ctypes.data for page in pages for k in range(self.buffers)]
        return begins, [self.memory.shape[2]] * len(begins)

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor, split_factor: int
    ) -> tuple[list[int], list[int]]:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        part = self.memory.shape[2] // split_factor
        begins = [
            self.memory[k, page].ctypes.data + number * part
            for page in pages
            for number in range(split_factor)
            for k in range(self.buffers)
        ]
        return begins, [part] * len(begins)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.buffers * self.memory.shape[2], dtype=torch.uint8)

    @property
    def buffers(self) -> int:
        return self.memory.shape[0]

    def fill(self, seed: int, pages: int) -> None:
        made = np.random.default_rng(seed).integers(0, 256, self.memory[:, :pages].shape)
        self.memory[:, :pages] = made


def indices(pages: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first * TOKENS, (first + pages) * TOKENS)


class Engine:
    """A rank with host pools; the one of K and V is "kv". Those of a test are closed at its end."""

    made: ClassVar[list[Engine]] = []

    def __init__(
        self,
        where: str,
        hosts: Mapping[str, Host] | None = None,
        config: Config | None = None,
        zero_copy: bool = True,
        model: str = "a",
        capacity: str = "16MiB",
        salt: str = "",
        quota: int | None = None,
        encoding: str = "none",
    ) -> None:
        self.counting = Counting(COUNTS, KINDS)
        given = PoolSettings.model_validate(
            {
                "where": where,
                "capacity": capacity,
                "salt": salt,
                "quota": quota,
                "encoding": encoding,
            }
        )
        words: dict[str, object] = {"engine": "sglang", "model": model, "weights": "stated"}
        words |= {"draft": None, "random": None}
        rank = Rank(config or Config(), words, given, zero_copy)
        self.weights = HeardWeights(rank.config)
        self.store = Store(rank, self.counting, self.weights)
        self.hosts: Mapping[str, Host] = hosts or {MAIN: Host()}
        for name, host in self.hosts.items():
            self.store.add(name, host)
        self.made.append(self)
        self.store.make()


@pytest.fixture
def where(tmp_path: Path) -> Iterator[str]:
    yield f"{tmp_path}/"
    while Engine.made:
        Engine.made.pop().store.close()
    for path in tmp_path.glob("*.pool"):
        with ObjectPool.open(path) as pool:
            report = pool.admin.check(deep=True)
            assert report["clean"], report["problems"]
            assert pool.stats()["pages_held"] == 0


KEYS = [f"{number:064x}" for number in range(8)]


# ---- up to where a text can be restored ----


@pytest.mark.parametrize("trailing", [None, 1, 2, 3])
def test_restorable_lengths(trailing: int | None) -> None:
    """Against what it says, page by page."""
    for number in range(64):
        there = np.array([number >> bit & 1 for bit in range(6)], np.bool_)
        wanted = []
        for length in range(7):
            begin = 0 if trailing is None else max(0, length - trailing)
            wanted.append(bool(there[begin:length].all()))
        assert restorable(there, trailing).tolist() == wanted


# ---- one host pool ----


def test_pages_go_and_come(where: str) -> None:
    first, second = Engine(where), Engine(where)
    host = first.hosts[MAIN]
    host.fill(1, 4)
    assert first.store.store(MAIN, KEYS[:4], indices(4)).all()
    assert second.store.leading(KEYS) == 4
    assert second.store.load(MAIN, KEYS[:4], indices(4, first=10)).all()
    assert np.array_equal(second.hosts[MAIN].memory[:, 10:14], host.memory[:, :4])
    assert not second.hosts[MAIN].memory[:, :10].any()
    assert second.counting.counts["asked_pages"] == 8
    assert second.counting.counts["hit_pages"] == 4
    assert second.counting.counts["loaded_bytes"] == 4 * 8192
    assert first.counting.counts["stored_pages"] == 4
    assert [one.pages for one in second.store.take_moves()[0]] == [4]
    assert second.store.take_moves() == ([], [])


@pytest.mark.parametrize("how", ["told", "asked"])
def test_of_texts_in_several_calls_the_beginnings_stay(where: str, how: str) -> None:
    """SGLang says which pages are before those of a call, or has asked for the text before."""
    engine = Engine(where, {MAIN: Host(size=64 << 10)})
    texts = [[f"{text:032x}{page:032x}" for page in range(PAGES)] for text in range(20)]
    total = engine.store.cache().pool.stats()["pages_total"]
    for first in range(0, PAGES, 4):
        for text in texts:
            if how == "asked":
                engine.store.leading(text)
            before = text[:first] if how == "told" else None
            assert engine.store.store(MAIN, text[first : first + 4], indices(4), before).all()
    there = [engine.store.present(MAIN, text) for text in texts]
    stay, found = sum(map(np.count_nonzero, there)), sum(map(leading, there))
    assert total - 8 <= stay <= total
    assert stay - found <= 4, "one call's at most, the last that found no beginning"


def test_what_is_loaded_is_known_as_a_text(where: str) -> None:
    """After a restart of all engines nobody has told the pool of any."""
    Engine(where).store.store(MAIN, KEYS, indices(8))
    Engine.made.pop().store.close()
    engine = Engine(where)
    pool = engine.store.cache().pool

    def before() -> int:
        return int((pool.hotness.published().rows["parent"] != NO_PAGE).sum())

    assert before() == 0
    assert engine.store.load(MAIN, KEYS[:4], indices(4)).all()
    assert before() == 3
    assert engine.store.load(MAIN, KEYS[4:], indices(4), KEYS[:4]).all()
    assert before() == 7


def test_an_object_of_another_size_is_not_there(where: str) -> None:
    engine = Engine(where)
    cache = engine.store.cache()
    cache.pool.put_batch(cache.keys([f"{KEYS[1]}.0"]), [b"x"])
    engine.store.store(MAIN, [KEYS[0], KEYS[2]], indices(2))
    assert engine.store.leading(KEYS) == 1
    assert engine.counting.failures["mismatch"] == 1
    assert engine.store.store(MAIN, KEYS[:3], indices(3)).all()
    assert engine.store.leading(KEYS) == 3


def test_copies_of_pages_have_other_names(where: str) -> None:
    """SGLang may copy a page's bytes in another order."""
    first, copies = Engine(where), Engine(where, zero_copy=False)
    first.store.store(MAIN, KEYS[:1], indices(1))
    assert copies.store.leading(KEYS) == 0
    pages = [torch.arange(8192, dtype=torch.int16).to(torch.uint8) for _ in range(2)]
    assert copies.store.store_copies(KEYS[:2], pages).all()
    targets = [first.hosts[MAIN].get_dummy_flat_data_page() for _ in range(2)]
    assert copies.store.load_copies(KEYS[:2], targets).all()
    assert all(torch.equal(page, target) for page, target in zip(pages, targets, strict=True))


def test_split_heads_of_engines_of_one_and_two_ranks(where: str) -> None:
    """Ranks of an engine of 2 find what one of 1 stored: each its heads."""
    one = Engine(
        where, {MAIN: Host(size=8192, heads=4)}, Config(tp_lcm_size=2, should_split_heads=True)
    )
    host = one.hosts[MAIN]
    host.fill(2, 3)
    assert one.store.store(MAIN, KEYS[:3], indices(3)).all()
    for rank in range(2):
        config = Config(tp_rank=rank, tp_size=2, tp_lcm_size=2)
        other = Engine(where, {MAIN: Host(size=4096, heads=2)}, config)
        assert other.store.leading(KEYS) == 3
        assert other.store.load(MAIN, KEYS[:3], indices(3)).all()
        wanted = host.memory[:, :3, 4096 * rank : 4096 * (rank + 1)]
        assert np.array_equal(other.hosts[MAIN].memory[:, :3], wanted)
        other.store.close()
    cache = one.store.cache()
    cache.pool.forget(cache.keys([f"{KEYS[2]}.1"]))
    assert one.store.leading(KEYS) == 2, "of the third page one half is missing"
    assert one.store.store(MAIN, KEYS[:3], indices(3)).all()
    back = np.zeros_like(host.memory)
    back, host.memory = host.memory, back
    assert one.store.load(MAIN, KEYS[:3], indices(3)).all()
    assert np.array_equal(host.memory[:, :3], back[:, :3])


def test_whatever_fails_is_a_miss_and_said_once(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(where)
    caplog.clear()
    for wrong in (None, indices(3), torch.arange(2)):
        assert engine.store.store(MAIN, KEYS[:2], wrong).tolist() == [False, False]
        assert engine.store.load(MAIN, KEYS[:2], wrong).tolist() == [False, False]
    assert engine.store.load("mamba", KEYS[:1], indices(1)).tolist() == [False]
    engine.hosts[MAIN].memory = np.zeros((0, 0, 0), np.uint8)  # SGLang's own code fails
    assert engine.store.store(MAIN, KEYS[:1], indices(1)).tolist() == [False]
    engine.store.close()
    assert engine.store.leading(KEYS) == 0
    assert {kind: n for kind, n in engine.counting.failures.items() if n} == {"pool": 9}
    assert [one for one in caplog.messages if "could not be used" in one] == [
        "cxlkv: the pool could not be used, so this was a miss, or was not stored: "
        "BadArgumentError: 0 indices for 2 pages of 4 tokens (said once; counted as pool)"
    ]


def test_clear_takes_all_of_the_model_away(where: str) -> None:
    first, tenant = Engine(where), Engine(where, salt="other")
    for engine in (first, tenant):
        engine.store.store(MAIN, KEYS, indices(8))
    first.store.clear()
    assert (first.store.leading(KEYS), tenant.store.leading(KEYS)) == (0, 0)
    assert first.store.store(MAIN, KEYS, indices(8)).all()
    first.store.close()
    tenant.store.close()
    first.store.clear()  # of nothing


# ---- several host pools ----


def sides() -> dict[str, Host]:
    return {MAIN: Host(), "indexer": Host(1, 1024), "swa": Host(3, 2048)}


def test_all_host_pools_must_have_their_part(where: str) -> None:
    engine = Engine(where, sides(), capacity="64MiB")
    for name, pages in ((MAIN, 8), ("indexer", 5), ("swa", 8)):
        assert engine.store.store(name, KEYS[:pages], indices(pages)).all()
    assert engine.store.hits(KEYS, {}).lengths[-1] == 8
    both = engine.store.hits(KEYS, {"indexer": None, "swa": 2})
    assert both.pages == {MAIN: 8, "indexer": 5, "swa": 8}
    assert both.lengths == [1, 2, 3, 4, 5]
    cache = engine.store.cache("swa")
    cache.pool.forget(cache.keys([f"{KEYS[k]}.0" for k in (2, 5)]))
    gaps = engine.store.hits(KEYS, {"swa": 2})
    assert gaps.lengths == [1, 2, 5, 8], "lengths whose last 2 pages are there"
    assert engine.store.hits(KEYS, {"swa": 2, "indexer": None}).lengths == [1, 2, 5]
    assert engine.store.hits(KEYS, {"mamba": 1}).lengths == [], "of which there is none"
    assert engine.store.hits(KEYS[::-1], {"indexer": None}).pages == {MAIN: 8, "indexer": 0}


def test_each_host_pool_has_its_own_pages(where: str) -> None:
    engine = Engine(where, sides(), capacity="64MiB")
    for seed, (name, host) in enumerate(engine.hosts.items()):
        host.fill(seed, 8)
        assert engine.store.store(name, KEYS, indices(8)).all()
    for name, host in engine.hosts.items():
        assert engine.store.load(name, KEYS, indices(8, first=12)).all()
        assert np.array_equal(host.memory[:, 12:20], host.memory[:, :8]), name
    with ObjectPool.open(str(engine.store.cache("indexer").pool.path)) as pool:
        damage_object(pool, engine.store.cache("indexer").keys([f"{KEYS[3]}.0"]))
    assert (
        engine.store.load("indexer", KEYS, indices(8)).tolist() == [True] * 3 + [False] + [True] * 4
    )
    assert engine.store.hits(KEYS, {"indexer": None}).lengths == [1, 2, 3]


def test_pools_hold_the_same_pages_and_capacity_is_of_all(where: str) -> None:
    engine = Engine(where, sides(), capacity="64MiB")
    pools = [engine.store.cache(name).pool for name in sides()]
    pages = [pool.stats()["pages_total"] for pool in pools]
    assert min(pages) > 0.5 * max(pages), pages
    assert sum(Path(str(pool.path)).stat().st_size for pool in pools) <= 64 << 20
    assert len({pool.path for pool in pools}) == 3
    assert str(pools[1].path).endswith("-indexer.pool")
    late = Host(1, 4096)
    engine.store.add("draft", late)
    assert engine.store.store("draft", KEYS, indices(8)).all()
    count = engine.store.cache("draft").pool.stats()["pages_total"]
    assert count > 0.5 * pages[0], "as many as of K and V, where it comes later"
    engine.store.add("draft", late)  # a second time does nothing


class MambaPoolHost(Host):
    """A state is after all tokens of a text."""


@pytest.mark.parametrize("size", [4096, 512 << 10])
def test_states_have_half_of_the_bytes_at_most(where: str, size: int) -> None:
    """A small one for each page of K and V, and a few large ones beside as many pages as fit."""
    hosts = {MAIN: Host(), "mamba": MambaPoolHost(1, size)}
    engine = Engine(where, hosts, capacity="64MiB")
    pages, states = (engine.store.cache(name).pool.stats()["pages_total"] for name in hosts)
    if size < 8192:
        assert states > 0.5 * pages, (states, pages)
    else:
        assert 0.4 < states * size / (pages * 8192) < 1.2, (states, pages)
        assert pages * 8192 > 24 << 20
    files = [engine.store.cache(name).pool.path for name in hosts]
    assert sum(Path(str(path)).stat().st_size for path in files) <= 64 << 20


# ---- what cannot be served ----


class Indices(Host):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


class ByLayers(Host):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        raise ValueError("Unsupported layout: layer_first")


def test_a_quota_is_of_all_ranks_and_host_pools(where: str) -> None:
    """A rank of two has half of it, dealt out by the size of pages, and stores that much."""
    hosts = {MAIN: Host(), "side": Host(buffers=2)}
    sizes = {name: host.buffers * host.memory.shape[2] for name, host in hosts.items()}
    engine = Engine(where, hosts, Config(tp_size=2), quota=2 * 5 * sum(sizes.values()))
    for name, size in sizes.items():
        quota = engine.store.cache(name).quota
        assert quota is not None
        geometry = engine.store.cache(name).pool.pages.geometry
        page_bytes = geometry["extent_bytes"] // geometry["slab_slots"]
        assert quota.pages == 5 * size // page_bytes
        hosts[name].fill(1, 8)
        assert engine.store.store(name, KEYS, indices(8)).tolist() == [
            place < quota.pages for place in range(8)
        ]
        assert quota.used() == quota.pages
    assert engine.counting.failures["quota"] > 0


def test_host_pools_without_addresses_are_refused(where: str) -> None:
    with pytest.raises(UnsupportedError, match="no memory of its own"):
        Engine(where, {MAIN: Indices()})
    with pytest.raises(UnsupportedError, match=r"layer_first. --hicache-mem-layout page_first"):
        Engine(where, {MAIN: Host(), "indexer": ByLayers()})


def test_one_path_for_pools_of_other_objects_is_refused(where: str) -> None:
    one = f"{where}one.pool"
    first = Engine(one)
    with pytest.raises(GeometryError, match="Give a folder as where"):
        Engine(one, {MAIN: Host(size=8192)})
    with pytest.raises(BadArgumentError, match=r"\(kv, indexer, swa\): give a folder as where"):
        Engine(one, sides())
    with pytest.raises(BadArgumentError, match="and give a folder as where"):
        Engine(one, sides(), capacity="all")
    other = Engine(one, model="b")
    first.store.store(MAIN, KEYS, indices(8))
    assert other.store.leading(KEYS) == 0


def test_a_pool_of_larger_objects_serves_for_smaller_ones(where: str) -> None:
    one = f"{where}one.pool"
    first, small = Engine(one), Engine(one, {MAIN: Host(size=1000)})
    small.hosts[MAIN].fill(3, 4)
    assert first.store.store(MAIN, KEYS[:4], indices(4)).all()
    assert small.store.leading(KEYS) == 0
    assert small.store.store(MAIN, KEYS[:4], indices(4)).all()
    assert small.store.leading(KEYS) == 4
    assert small.store.load(MAIN, KEYS[:4], indices(4, first=10)).all()
    memory = small.hosts[MAIN].memory
    assert np.array_equal(memory[:, 10:14], memory[:, :4])
    assert not small.counting.failures.total()


@pytest.mark.parametrize("quota", [None, 4 << 20])
def test_a_pool_of_small_slots_serves(where: str, quota: int | None) -> None:
    """Copies need no object in one piece; a pool that is too small for them is named."""
    for slot, most in ((512, 64 << 10), (512, 600)):
        path = f"{where}{most}.pool"
        ObjectPool.create(path, layout=KVLayout.objects(most, slot=slot), capacity="8MiB").close()
    engine = Engine(f"{where}{64 << 10}.pool", quota=quota)
    assert engine.store._caches[MAIN].object_bytes > 600
    engine.hosts[MAIN].fill(0, 4)
    assert engine.store.store(MAIN, KEYS[:4], indices(4)).all()
    assert engine.store.leading(KEYS) == 4
    assert engine.store.load(MAIN, KEYS[:4], indices(4, first=10)).all()
    memory = engine.hosts[MAIN].memory
    assert np.array_equal(memory[:, 10:14], memory[:, :4])
    assert not engine.counting.failures.total()
    with pytest.raises(GeometryError, match="objects up to 600 B in slots of 512 B there"):
        Engine(f"{where}600.pool")


def test_the_first_rank_says_where_the_pool_is(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cxlkv")
    for rank in (1, 0):
        Engine(where, config=Config(tp_rank=rank, tp_size=2)).store.close()
    (said,) = [one for one in caplog.messages if "cxlkv-sglang-" in one]
    with ObjectPool.open(next(Path(where).glob("*.pool"))) as pool:
        tokens = pool.stats()["pages_total"] // 2 * TOKENS
    assert f"cxlkv: found {where}cxlkv-sglang-" in said
    assert f"for {tokens} tokens (" in said


# ---- encoded ----


class MHATokenToKVPoolHost(Host):
    """SGLang's pool of that name: rows of K and V in turn, a buffer of each for every layer."""

    def __init__(
        self,
        dim: int = 64,
        value_dim: int = 64,
        heads: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self._row_count, self._torch_dtype = TOKENS * heads, dtype
        size = self._row_count * max(dim, value_dim) * dtype.itemsize
        super().__init__(2 * 2, size, heads)
        self.dtype, self.head_dim, self.v_head_dim = str(dtype), dim, value_dim

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        begins, _ = super().get_page_buffer_meta(indices) or ([], [])
        sizes = [self._bytes_of(i) for i in range(len(begins))]
        return begins, sizes

    def _bytes_of(self, buffer: int) -> int:
        dim = self.v_head_dim if buffer % 2 else self.head_dim
        return self._row_count * dim * self._torch_dtype.itemsize

    def rows(self, buffer: int, first: int, pages: int) -> torch.Tensor:
        """[pages, rows, dim] of some pages, which may be written."""
        dim = self.v_head_dim if buffer % 2 else self.head_dim
        some = torch.from_numpy(self.memory[buffer, first : first + pages])
        return some[:, : self._bytes_of(buffer)].view(self._torch_dtype).view(pages, -1, dim)

    def fill(self, seed: int, pages: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for buffer in range(self.buffers):
            rows = self.rows(buffer, 0, pages)
            rows.copy_(3 * torch.randn(rows.shape, generator=made))


@pytest.mark.parametrize("encoding", ["int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [(64, 64, torch.bfloat16), (128, 80, torch.float16), (80, 80, torch.float32)],
)
def test_rows_come_back_as_they_are_kept(
    where: str, encoding: str, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    first, second = (MHATokenToKVPoolHost(dim, value_dim, 2, dtype) for _ in range(2))
    writer = Engine(where, {MAIN: first}, encoding=encoding)
    reader = Engine(where, {MAIN: second}, encoding=encoding)
    first.fill(1, 4)
    assert writer.store.store(MAIN, KEYS[:4], indices(4)).all()
    assert reader.store.load(MAIN, KEYS[:4], indices(4, first=10)).all()
    for buffer in range(first.buffers):
        check_kept(second.rows(buffer, 10, 4), first.rows(buffer, 0, 4), encoding)
    assert not second.memory[:, 14:].any()
    taken = writer.counting.counts["stored_bytes"]
    assert taken == reader.counting.counts["loaded_bytes"] == 4 * writer.store.cache().object_bytes
    assert len(list(Path(where).glob("*.pool"))) == 1


def test_each_encoding_has_a_file_and_keys_of_its_own(where: str) -> None:
    path = f"{where}one.pool"
    for place in (where, path):
        for encoding in ("none", "int8", "int4"):
            engine = Engine(place, {MAIN: MHATokenToKVPoolHost(heads=16)}, encoding=encoding)
            assert engine.store.leading(KEYS) == 0
            engine.hosts[MAIN].fill(1, 2)
            assert engine.store.store(MAIN, KEYS[:2], indices(2)).all()
            assert engine.store.leading(KEYS) == 2
    assert len(list(Path(where).glob("cxlkv-sglang-*.pool"))) == 3


def test_a_capacity_holds_more_pages_of_fewer_bits(where: str) -> None:
    pages = {
        encoding: Engine(where, {MAIN: MHATokenToKVPoolHost(128, 128, 16)}, encoding=encoding)
        .store.cache()
        .pool.stats()["pages_total"]
        for encoding in ("none", "int8", "int4")
    }
    assert pages["int8"] > 1.8 * pages["none"]
    assert pages["int4"] > 3.2 * pages["none"]


def test_a_full_pool_of_encoded_pages_has_the_first_of_a_batch(where: str) -> None:
    """Stored one by one, each with its forms."""
    host = MHATokenToKVPoolHost(128, 128, 256)
    engine = Engine(where, {MAIN: host}, encoding="int8", capacity="9MiB")
    host.fill(1, PAGES)
    names = [f"{number:064x}" for number in range(PAGES)]
    room = engine.store.cache().pool.stats()["pages_total"]
    assert room < PAGES
    assert engine.store.store(MAIN, names, indices(PAGES)).tolist() == [
        number < room for number in range(PAGES)
    ]
    before = [host.rows(buffer, 0, room).clone() for buffer in range(host.buffers)]
    assert engine.store.load(MAIN, names[:room], indices(room)).all()
    for buffer, was in enumerate(before):
        check_kept(host.rows(buffer, 0, room), was, "int8")


def test_pools_beside_k_and_v_stay_as_they_are(where: str) -> None:
    hosts = {MAIN: MHATokenToKVPoolHost(), "indexer": Host(1, 1000)}
    engine = Engine(where, hosts, encoding="int4")
    hosts["indexer"].fill(2, 3)
    assert engine.store.store("indexer", KEYS[:3], indices(3)).all()
    assert engine.store.load("indexer", KEYS[:3], indices(3, first=5)).all()
    memory = hosts["indexer"].memory
    assert np.array_equal(memory[:, 5:8], memory[:, :3])


def test_what_has_no_rows_to_encode_is_refused(where: str) -> None:
    fp8 = MHATokenToKVPoolHost()
    fp8.dtype = "torch.uint8"
    for host, zero_copy, said in (
        (Host(), True, r"host pool kv \(Host\) has no rows of K and V by head"),
        (MHATokenToKVPoolHost(), False, 'write "interface_v1": 1'),
        (fp8, True, "keeps its cache as uint8, in fewer bits already"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            Engine(where, {MAIN: host}, zero_copy=zero_copy, encoding="int8")
    odd = MHATokenToKVPoolHost()
    odd.head_dim = 60
    odd.memory = np.zeros((4, PAGES, 1000), np.uint8)
    odd._bytes_of = lambda buffer: 1000  # type: ignore[method-assign]
    with pytest.raises(BadArgumentError, match="1000 bytes is no whole number of rows of 60"):
        Engine(where, {MAIN: odd}, encoding="int8")
