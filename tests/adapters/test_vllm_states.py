"""Layers with states in the small engine: what is saved, found and loaded, and their probe."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.vllm.groups import BlockGroup, layout_of, page_tokens_of
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.adapters.vllm.messages import offered
from cxlkv.adapters.vllm.states import Blocks, Bytes, StateMemory, check_states, words_of
from cxlkv.arrays import Names
from cxlkv.errors import PoolFullError, UnsupportedError
from cxlkv.pages import NO_PAGE
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit

from ..support.damaging import damage_piece
from ..support.paged_engine import SPACE, TOKENS, Engine, Grouping, Request, text
from ..support.paged_engines import Engines, engines_in

torch = pytest.importorskip("torch", reason="the engine's blocks are torch's")
if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as Dtype

from cxlkv.adapters.vllm.device_attention import DeviceAttention  # noqa: E402  it needs torch
from cxlkv.adapters.vllm.device_blocks import Link  # noqa: E402
from cxlkv.adapters.vllm.device_states import DeviceStates  # noqa: E402
from cxlkv.adapters.vllm.saving import Ring  # noqa: E402
from cxlkv.adapters.vllm.state_probe import StateProbe, memory_of  # noqa: E402

from ..support.late_streams import Schedule  # noqa: E402

FULL, STATE = BlockGroup(TOKENS), BlockGroup(TOKENS, state=True)
GROUPINGS = {
    "one": Grouping((STATE, FULL), (0, 2), (1, 1, 1), (0, 0)),
    "two tables": Grouping((FULL, STATE, STATE), (2, 0, 0), (0, 0, 0), (1, 2, 1)),
    "a window, too": Grouping((BlockGroup(TOKENS, 10), STATE, FULL), (2, 0, 2), (0, 2, 0), (1, 1)),
}
GROUPINGS |= {f"{name}, device": replace(of, on_device=True) for name, of in GROUPINGS.items()}


@pytest.fixture(params=GROUPINGS)
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path, blocks=600, grouping=GROUPINGS[request.param]) as made:
        yield made


def run(engine: Engine, name: str, ids: list[int], chunk: int = 16) -> Request:
    """To its first own token, with states kept every `chunk` tokens."""
    request = engine.add(name, ids)
    while request.computed < len(ids):
        engine.step(chunk=chunk)
    return request


def checkpoint(pool: CXLPool, ids: list[int], tokens: int) -> Names:
    """Names of the pages of the one behind so many tokens of the text."""
    keys = block_keys(Request("", ids).block_hashes, TOKENS, SPACE)
    key = keys[tokens // TOKENS - 1 : tokens // TOKENS].packed
    names: Names = pool.records.state_names(key.tobytes(), pool.records.state_pages)[0]
    return names


def test_what_the_engine_offers_by_tokens() -> None:
    found = offered([(1, 7, 8), (2, 9, 8), (1, 3, 4), (1, 5, 16), (2, 6, 6)], 8)
    assert found == [(8, {1: 7, 2: 9}), (16, {1: 5})]


def test_a_state_is_in_the_last_block_alone() -> None:
    assert [BlockGroup(4, state=True).first_block(n) for n in (0, 1, 4, 5, 8)] == [0, 0, 0, 1, 1]


def test_blocks_that_are_longer_than_a_page_are_several() -> None:
    """vLLM makes blocks of attention as long as a state."""
    assert page_tokens_of([BlockGroup(1056), BlockGroup(1056, state=True)]) == 528
    assert page_tokens_of([BlockGroup(784)]) == 784


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hit_ends_where_the_engine_kept_a_state(engines: Engines, ranks: int) -> None:
    first, second = engines(ranks), engines(ranks)
    run(first, "a", text(1, 50))
    for end, wanted in ((50, 48), (48, 32), (33, 32), (20, 16), (16, 0), (50, 48)):
        name = f"{end}"
        run(second, name, [*text(1, 50)[: end - 1], 96], 1 << 20)
        assert second.cached[name] == wanted
        second.end(name)
    assert second.recomputed == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_of_decode_steps_are_found(engines: Engines, ranks: int) -> None:
    engine = engines(ranks)
    request = run(engine, "a", text(2, 45))
    for _ in range(20):
        engine.step()
    said = list(request.all_token_ids)
    engine.end("a")
    engine.step()
    for end in range(len(said), 49, -3):
        run(engine, f"{end}", said[:end], 1 << 20)
        assert engine.cached[f"{end}"] == (end - 1) // TOKENS * TOKENS


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("place", "kind"), [(0, "values"), (-1, "keys")])
def test_a_damaged_state_is_computed_again_and_healed(
    engines: Engines, ranks: int, place: int, kind: str
) -> None:
    first, second = engines(ranks), engines(ranks)
    run(first, "a", text(1, 50))
    with CXLPool.open(engines.paths[ranks - 1], threads=1) as pool:
        pages, _ = pool.records.find(checkpoint(pool, text(1, 50), 48))
        assert len(pages) > 1
        assert (pages != NO_PAGE).all()
        damage_piece(pool, int(pages[place]), 0, kind)
    request = run(second, "a", text(1, 50))
    assert (second.recomputed, request.computed >= 50) == (1, True)
    assert second.ranks[ranks - 1].worker.requests.failures() == {"corrupt": 1}
    third = engines(ranks)
    run(third, "a", text(1, 50))
    assert (third.cached["a"], third.recomputed) == (48, 0)


def test_ranks_agree_on_a_state_that_all_of_them_have(engines: Engines) -> None:
    first, second = engines(2), engines(2)
    run(first, "a", text(1, 50))
    first.end("a")
    first.step()
    worker = first.ranks[1].worker
    gone = checkpoint(worker.pool, text(1, 50), 48)
    worker.tiers.evict_among(gone, len(gone))
    run(second, "a", text(1, 50), 1 << 20)
    assert (second.cached["a"], second.recomputed) == (32, 0)


def test_a_state_that_is_gone_before_it_is_loaded_is_computed(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines(), engines()
    run(first, "a", text(1, 50))
    pool = second.ranks[0].worker.pool
    match = pool.match
    monkeypatch.setattr(pool, "match", lambda keys, **more: match(keys[:-1], **more))
    run(second, "a", text(1, 50))
    assert second.recomputed == 1
    assert second.ranks[0].worker.requests.failures() == {"stale": 1}


def moved_by(engines: Engines) -> dict[str, tuple[type[StateMemory], str]]:
    """Methods that take states out of blocks, and bring them there; blocks come last."""
    if engines.grouping.on_device:
        return {"save": (DeviceStates, "gathered"), "load": (DeviceStates, "load")}
    return {"save": (StateMemory, "gather"), "load": (StateMemory, "scatter")}


def test_what_the_pool_has_is_not_written_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[object] = []
    kind, name = moved_by(engines)["save"]
    gather = getattr(kind, name)

    def counted(self: StateMemory, blocks: Blocks) -> object:
        saved.append(blocks)
        return gather(self, blocks)

    monkeypatch.setattr(kind, name, counted)
    run(engines(), "a", text(1, 50))
    assert len(saved) == 3
    second = engines()
    second.join(Request("a", text(1, 50), skip_reading_prefix_cache=True))
    for _ in range(4):
        second.step(chunk=16)
    assert (second.cached["a"], len(saved)) == (0, 3)


def test_a_request_may_ask_not_to_be_saved(engines: Engines) -> None:
    engine = engines()
    engine.add("a", text(1, 50), save=False)
    for _ in range(4):
        engine.step(chunk=16)
    assert engines.published() == 0


def test_a_full_pool_has_no_room_for_a_state(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()

    def full(request: str, keys: PageKeys, states: Bytes) -> int:
        raise PoolFullError("no pages for a checkpoint")

    with monkeypatch.context() as planted:
        planted.setattr(engine.ranks[0].saving, "store_states", full)
        run(engine, "a", text(1, 50), 32)
    assert engine.ranks[0].saving.failures() == {"full": 1}
    for _ in range(4):
        engine.step()
    engine.end("a")
    engine.step()
    run(engine, "b", text(1, 50))
    assert engine.cached["b"] == 0  # K and V alone, behind which nothing goes on
    run(engine, "c", [*text(1, 50), 1])
    assert engine.cached["c"] == 48


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path, blocks=600, grouping=GROUPINGS["two tables, device"]) as made:
        yield made


def late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> DeviceAttention:
    """Its worker; what it saves waits for work()."""
    rank = engine.ranks[0]
    assert isinstance(rank.worker, DeviceAttention)
    monkeypatch.setattr(rank, "wait_for_saves", lambda: None)
    monkeypatch.setattr(rank.worker._saver, "_threaded", False)
    return rank.worker


def work(worker: DeviceAttention) -> None:
    while worker._saver._waiting:
        worker._saver.work()


def has_checkpoint(worker: DeviceAttention, ids: list[int], tokens: int) -> bool:
    pages, _ = worker.pool.records.find(checkpoint(worker.pool, ids, tokens))
    return bool((pages != NO_PAGE).all())


def refused(*given: object) -> int:
    raise PoolFullError("no pages")


def short(*given: object) -> object:
    raise torch.OutOfMemoryError("CUDA out of memory")


def invalidate(worker: DeviceAttention) -> bool:
    """As a load that went wrong does."""
    worker._held["a"].valid = 12
    return True


@pytest.mark.parametrize(
    "what", ["nothing", "dropped", "dropped late", "not published", "wrong", "a step"]
)
def test_a_checkpoint_on_its_way_is_saved_if_its_pages_are(
    device: Engines, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine, ids = device(), text(1, 50)
    worker = late(engine, monkeypatch)
    engine.add("a", ids)
    with monkeypatch.context() as planted:
        if what == "wrong":
            planted.setattr(worker, "_audit", partial(invalidate, worker))
        planted.setattr(engine, "fails", what == "a step")
        engine.step(chunk=16)
        if what == "dropped":
            worker.stop_saving(["a"])
        if what == "not published":
            planted.setattr(worker._saver._requests, "store", refused)
        worker._saver.work()  # the pages
        if what == "dropped late":
            worker.stop_saving(["a"])
        work(worker)
    assert worker._saver._requests.failures() == ({"save": 1} if what == "not published" else {})
    assert has_checkpoint(worker, ids, 16) == (what == "nothing")
    for ring in (worker._ring, worker._state_ring):
        assert ring.room == ring._memory.numel()


def test_a_device_without_memory_for_a_checkpoint_is_no_end(
    device: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = device(), text(1, 50)
    worker = late(engine, monkeypatch)
    engine.add("a", ids)
    with monkeypatch.context() as planted:
        planted.setattr(DeviceStates, "gathered", short)
        engine.step(chunk=16)
    engine.step(chunk=16)
    work(worker)
    assert [has_checkpoint(worker, ids, tokens) for tokens in (16, 32)] == [False, True]
    assert worker.requests.failures() == {"save": 1}
    assert not worker._state_ring._taken


def test_a_checkpoint_for_which_there_is_no_memory_is_late(
    device: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = device(), text(1, 50)
    worker = late(engine, monkeypatch)
    assert worker._states is not None
    size = worker._states.states.bytes
    monkeypatch.setattr(worker, "_state_ring", Ring(size, torch.device("cpu")))
    engine.add("a", ids)
    engine.step(chunk=16)
    engine.step(chunk=16)
    work(worker)
    engine.step(chunk=16)
    assert engine.scheduling.failures == {"late": 1}
    work(worker)
    assert [has_checkpoint(worker, ids, tokens) for tokens in (16, 32, 48)] == [True, False, True]


def test_the_engine_waits_for_gathers_before_it_clears_blocks(
    device: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM writes to blocks of the next step before it says that it begins."""
    engine, calls = device(), Mock()
    worker = engine.ranks[0].worker
    assert isinstance(worker, DeviceAttention)
    for name in ("begin_gathers", "_take_out", "fence"):
        calls.attach_mock(Mock(wraps=getattr(worker._link, name)), name)
        monkeypatch.setattr(worker._link, name, getattr(calls, name))
    calls.attach_mock(Mock(wraps=worker.end_step), "end_step")
    monkeypatch.setattr(worker, "end_step", lambda: (calls.end_step(), calls.ended()))
    run(engine, "a", text(1, 50))
    names = [call[0] for call in calls.mock_calls]
    ends = [place for place, name in enumerate(names) if name == "ended"]
    assert len(ends) == 4
    assert all(names[end - 1] == "fence" for end in ends)
    last = names[ends[0] - 3 : ends[0]]  # states come last
    assert last == ["begin_gathers", "_take_out", "fence"]


def test_a_quota_counts_checkpoints(tmp_path: Path) -> None:
    with engines_in(tmp_path, blocks=600, grouping=GROUPINGS["one"], quota="64KiB") as engines:
        engine = engines()
        quota = engine.ranks[0].worker.requests.quota
        assert quota is not None
        run(engine, "a", text(1, 19))
        pages = quota.stats()
        assert pages["used_state_pages"] == engine.ranks[0].worker.pool.records.state_pages
        assert pages["used_pages"] == engines.published()


@pytest.mark.parametrize(("ranks", "page_tokens"), [(1, TOKENS), (2, TOKENS), (1, TOKENS // 2)])
def test_states_come_back_from_the_cold_tier(tmp_path: Path, ranks: int, page_tokens: int) -> None:
    """With K and V before them, by the same engine and by one that starts with empty pools; also
    where a block is several pages."""
    cold: dict[str, object] = {"cold": f"{tmp_path}/cold/", "cold_capacity": "8MiB"}
    grouping = replace(GROUPINGS["one"], groups=(STATE, BlockGroup(page_tokens)))
    with engines_in(tmp_path, "2370KiB", 1024, grouping, **cold) as engines:
        first = engines(ranks)
        for number in range(10):
            run(first, f"{number}", text(number, 50))
            first.end(f"{number}")
            first.step()
        second = engines(ranks)
        for engine in (first, second):
            for number in range(10):
                name = f"again {number}"
                run(engine, name, text(number, 50), 1 << 20)
                assert engine.cached[name] == 48
                engine.end(name)
                engine.step()
            assert engine.recomputed == 0


@pytest.mark.parametrize("what", ["save", "load"])
def test_states_of_another_block_are_told(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Mutants that save those of the block behind it, or load into that one."""
    first, second = engines(), engines(shares=True)  # which looks for itself below
    kind, name = moved_by(engines)[what]
    moved = getattr(kind, name)

    def wrongly(self: StateMemory, *given: object) -> object:
        *rest, blocks = given
        assert isinstance(blocks, dict)
        return moved(self, *rest, {group: block + 1 for group, block in blocks.items()})

    with monkeypatch.context() as planted:
        planted.setattr(kind, name, wrongly)
        run(first, "a", text(1, 50))
        second.add("a", text(1, 50))
        while second.waiting:
            second.step()
    assert second.wrong()


def test_audits_compare_k_and_v(engines: Engines) -> None:
    """Of a hit that has a state a block before its end."""
    first, second = engines(), engines(audit_hits=1)
    run(first, "a", text(1, 50), TOKENS)
    run(second, "a", text(1, 50), 1 << 20)
    assert second.cached["a"] == 44
    assert second.scheduling.failures == {}
    first.weights = b"other"  # which its keys do not say
    run(first, "b", text(2, 50), TOKENS)
    third = engines(audit_hits=1, shares=True)  # which does not look whether blocks are right
    third.add("b", text(2, 50))
    third.settle()
    third.step()
    assert third.scheduling.failures == {"audit": 1}
    third.end("b")


def test_anything_in_any_order(engines: Engines, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([1, 2])
    both = [engines(ranks) for _ in range(2)]
    texts = [text(number, 60) for number in range(3)]
    names = iter(range(1 << 30))
    for _ in range(80):
        engine = chance.choice(both)
        act = chance.choice(["add", "add", "step", "step", "step", "end", "preempt", "damage"])
        running = [n for n, r in engine.requests.items() if r not in engine.waiting]
        if act == "add" and len(engine.requests) < 8:
            ids = chance.choice(texts)[: chance.randrange(1, 60)]
            ids += text(chance.randrange(1 << 30), chance.randrange(1, 20))
            engine.add(str(next(names)), ids)
        elif act == "end" and engine.requests:
            engine.end(chance.choice(list(engine.requests)))
        elif act == "preempt" and running:
            engine.preempt(chance.choice(running))
        elif act == "damage":
            with CXLPool.open(chance.choice(engines.paths[:ranks]), threads=1) as pool:
                damage_piece(pool, chance.randrange(64), chance.randrange(3))
        engine.step(chunk=chance.choice([4, 8, 16, 1 << 20]))
        assert not engine.wrongly_stored
    for engine in both:
        for name in list(engine.requests):
            engine.end(name)
        engine.settle()
        engine.step()
    for path in engines.paths:  # pages that were not read since are still damaged
        with CXLPool.open(path, threads=1) as pool:
            pool.admin.check(deep=True, repair=True)


# ---- the engine's memory ----

SHAPES, DTYPES = ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32)
SIZE, BLOCKS = 3 * 8 * 2 + 2 * 4 * 4 * 4, 6
OF_LAYER = {"one": 0, "two": 2, "three": 0}  # their groups
GROUPS = [STATE, FULL, STATE]


@dataclass(frozen=True)
class Spec:
    block_size: int = TOKENS
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    dtypes: Sequence[Dtype] = DTYPES
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    mamba_type: str = "mamba2"


def caches_of(stride: int = 256) -> dict[str, Tensor]:
    """A page of each block is longer than a state; layers of two groups share memory."""
    flat = {name: torch.zeros(BLOCKS * stride, dtype=torch.int8) for name in ("one", "three")}
    flat["two"] = flat["one"]
    return {
        name: flat[name].as_strided((BLOCKS, 1, 1, SIZE), (stride, SIZE, SIZE, 1))
        for name in OF_LAYER
    }


def tensors_of(cache: Tensor, at: tuple[int, int] = (0, 48)) -> list[Tensor]:
    """As vLLM makes them from a layer's bytes."""
    found = []
    for shape, dtype, start in zip(SHAPES, DTYPES, at, strict=True):
        size = int(np.prod(shape)) * dtype.itemsize
        part = cache.view(BLOCKS, SIZE)[:, start : start + size].view(dtype)
        found.append(part.reshape(BLOCKS, *shape))
    return found


@pytest.fixture(params=["host", "device"])
def link(request: pytest.FixtureRequest) -> Link | None:
    return Link(torch.device("cpu")) if request.param == "device" else None


def memory(link: Link | None = None) -> tuple[StateMemory, dict[str, Tensor]]:
    caches, specs = caches_of(), {name: (group, Spec()) for name, group in OF_LAYER.items()}
    return memory_of(caches, specs, link), caches


def test_a_checkpoint_has_all_layers_bytes(link: Link | None) -> None:
    found, caches = memory(link)
    for number, name in enumerate(OF_LAYER):
        caches[name][1 + OF_LAYER[name]] = number + 1
    taken = found.gather({0: 1, 2: 3})
    assert sorted(set(taken.tolist())) == [0, 1, 2, 3]  # and what is between them
    found.scatter(taken, {0: 2, 2: 4})
    for number, name in enumerate(OF_LAYER):
        assert (caches[name][2 + OF_LAYER[name]] == number + 1).all()
    one, other = (
        memory()[0].states,
        memory_of(
            caches, {name: (0, Spec(dtypes=(torch.float16, torch.float32))) for name in OF_LAYER}
        ).states,
    )
    assert one == found.states != other


@pytest.mark.parametrize("wrong", ["dtype", "size", "stride"])
def test_memory_of_another_form_is_refused_by_name(wrong: str, link: Link | None) -> None:
    caches = caches_of()
    caches["two"] = {
        "dtype": caches["two"].view(torch.uint8),
        "size": caches["two"][..., :-1],
        "stride": torch.zeros((BLOCKS, 1, 1, 2 * SIZE), dtype=torch.int8)[..., ::2],
    }[wrong]
    with pytest.raises(UnsupportedError, match=rf"cxlkv: two does not .*, 1, 1, {SIZE}\) bytes"):
        memory_of(caches, {name: (group, Spec()) for name, group in OF_LAYER.items()}, link)


def test_memory_elsewhere_is_refused_by_name() -> None:
    caches = caches_of() | {"two": caches_of()["two"].to("meta")}
    for link in (None, Link(torch.device("cpu"))):
        with pytest.raises(UnsupportedError, match=r"cxlkv: two does not .* on cpu, which"):
            memory_of(caches, {name: (group, Spec()) for name, group in OF_LAYER.items()}, link)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CXLPool]:
    rows = [(1, SimpleNamespace(num_kv_heads=2, head_size=16))]
    layout = layout_of(rows, GROUPS, "float32", (0, 1, 0, 1), memory()[0].states)
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as made:
        yield made


def probe_of(
    link: Link | None, at: tuple[int, int] = (0, 48)
) -> tuple[StateProbe, dict[str, Tensor]]:
    """Of an engine that keeps the states of its second layer there, and of the others as usual."""
    found, caches = memory(link)
    own = {
        name: tensors_of(cache, at if name == "two" else (0, 48)) for name, cache in caches.items()
    }
    rows = torch.zeros((BLOCKS, 2, 2 * TOKENS, 16))
    of_rows = BlockMemory(rows[:, :, :TOKENS], rows[:, :, TOKENS:], 1)
    return StateProbe(own, found, [of_rows], GROUPS), caches


def test_the_usual_place_is_served_and_nothing_is_left_behind(
    pool: CXLPool, link: Link | None
) -> None:
    probe, caches = probe_of(link)
    probe.run(pool)
    assert not any(cache.any() for cache in caches.values())
    stats = pool.stats()
    assert stats["fetched_bytes"] >= memory()[0].states.bytes
    assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.parametrize("at", [(0, 40), (128, 0), (0, 0)])
def test_states_elsewhere_are_refused_by_name(
    pool: CXLPool, link: Link | None, at: tuple[int, int]
) -> None:
    """Views that overlap, in another order, or on one another."""
    probe, caches = probe_of(link, at)
    with pytest.raises(UnsupportedError, match="cxlkv: two: a state of a block is not where"):
        probe.run(pool)
    assert not any(cache.any() for cache in caches.values())


def test_states_in_pieces_are_refused_by_name(pool: CXLPool, link: Link | None) -> None:
    probe, _ = probe_of(link)
    probe._own = {name: [own[0].mT, own[1]] for name, own in probe._own.items()}
    with pytest.raises(UnsupportedError, match="cxlkv: one: a state of a block is in several"):
        probe.run(pool)


def test_a_missing_state_is_refused_by_name(pool: CXLPool, link: Link | None) -> None:
    probe, _ = probe_of(link)
    probe._own = {name: own[:1] for name, own in probe._own.items()}
    with pytest.raises(UnsupportedError, match=f"cxlkv: one: its states have 48 bytes, .* {SIZE}"):
        probe.run(pool)


def test_a_pool_that_mixes_up_states_is_told(
    pool: CXLPool, link: Link | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Hit.read_states

    def read_wrongly(self: Hit) -> Bytes:
        found = read(self)
        found[SIZE + 64] ^= 1  # in the second layer's; each begins on a line
        return found

    monkeypatch.setattr(Hit, "read_states", read_wrongly)
    probe, _ = probe_of(link)
    with pytest.raises(UnsupportedError, match="cxlkv: two: the pool gives back another state"):
        probe.run(pool)
    assert pool.stats()["pages_free"] == pool.stats()["pages_total"]


def test_states_of_a_device_are_looked_at_when_they_are_there(
    pool: CXLPool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        schedule = Schedule(seed + number)
        with monkeypatch.context() as planted:
            schedule.stand_in(planted)
            probe, caches = probe_of(Link(torch.device("cpu")))
            with schedule:
                probe.run(pool)
            schedule.pass_by(schedule.current.end())
        assert not any(cache.any() for cache in caches.values())


def test_a_full_pool_is_no_reason_to_refuse(pool: CXLPool, link: Link | None) -> None:
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    probe_of(link)[0].run(pool)
    pool.pages.free(taken)


# ---- what is served, and under which keys ----


def test_states_that_are_not_served_are_named_with_the_remedy() -> None:
    kinds = [("MambaSpec", Spec()), ("FullAttentionSpec", SimpleNamespace(block_size=TOKENS))]
    check_states(kinds, replays=False, remote=False)
    for spec, given, said in [
        (Spec(mamba_cache_mode="none"), {}, "add --enable-prefix-caching$"),
        (Spec(num_speculative_blocks=2), {}, "leave out --speculative-config$"),
        (Spec(), {"replays": True}, "--use-replayssm keeps .* leave it out$"),
        (Spec(), {"remote": True}, '"remote" does not .* leave it out$'),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            check_states(
                [("MambaSpec", spec), kinds[1]], **{"replays": False, "remote": False, **given}
            )
        check_states(kinds[1:], replays=True, remote=True)


def test_each_word_of_the_states_makes_other_keys() -> None:
    full = ("FullAttentionSpec", SimpleNamespace(block_size=TOKENS))
    cache = SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="float32")
    assert words_of([full], cache) == {}
    usual = words_of([full, ("MambaSpec", Spec())], cache)
    assert words_of([("MambaSpec", Spec()), ("MambaSpec", Spec()), full], cache) == usual
    others = [
        words_of([full, ("MambaSpec", replace(Spec(), **changed))], cache)
        for changed in (
            {"block_size": 8},
            {"shapes": SHAPES[::-1]},
            {"dtypes": DTYPES[::-1]},
            {"mamba_type": "gdn"},
        )
    ]
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        changed = SimpleNamespace(**{**vars(cache), name: "bfloat16"})
        others.append(words_of([full, ("MambaSpec", Spec())], changed))
    for number, one in enumerate(others):
        assert one not in [usual, *others[:number]]
