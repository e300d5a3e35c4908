"""The connector's parts with a cold file below a small pool: what had to go comes back ahead of its
request, right, whoever dies; what cannot come is computed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.vllm import engine_attention, scheduler
from cxlkv.adapters.vllm.prefetch import TRIES_MAX
from cxlkv.adapters.vllm.scheduler import Step
from cxlkv.tiers import Tiers
from cxlkv.tiers.cold_shared import SharedColdTier

from ..support.paged_engine import Engine, Request, layout_of, make_pool, text
from ..support.paged_engines import Engines, engines_in
from ..support.waiting import until

CAPACITY = "2370KiB"  # 128 pages
TEXT = 162  # tokens, of which 160 are whole blocks


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """With one folder of cold files, below pools that hold three texts."""
    cold = {"cold": f"{tmp_path}/cold/", "cold_capacity": "8MiB"}
    with engines_in(tmp_path, CAPACITY, 1024, None, **cold) as made:
        yield made
        for engine in made.made:
            check_files(engine)


def check_files(engine: Engine) -> None:
    for rank in engine.ranks:
        cold = rank.worker.tiers.cold
        assert isinstance(cold, SharedColdTier)
        assert cold.check(deep=True) == []
        assert cold.stats()["corrupt"] == 0


def serve(engine: Engine, *numbers: int) -> list[int]:
    """A request for each text; how many of its tokens came from the pool."""
    return [engine.run_to_end(f"{number}", text(number, TEXT)) for number in numbers]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_four_times_the_pool_is_found_again(engines: Engines, load: str, ranks: int) -> None:
    """By the same engine, by another beside it, and by one that starts with empty pools."""
    first = engines(ranks, load=load)
    texts = list(range(13))
    assert serve(first, *texts) == [0] * 13
    assert serve(first, *texts) == [160] * 13
    second = engines(ranks, load=load)
    assert serve(second, *texts) == [160] * 13
    assert first.ranks[0].worker.pool.stats()["pages_total"] == 128
    for engine in (first, second):
        check_files(engine)
        engines.close(engine)
    for rank, path in enumerate(engines.paths):
        os.unlink(path)
        make_pool(path, layout_of(rank), CAPACITY)
    third = engines(ranks, load=load)
    assert serve(third, *texts) == [160] * 13
    assert not third.scheduling.failures


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_quota_counts_what_is_saved_and_what_comes_back(engines: Engines, ranks: int) -> None:
    """The scheduler brings it, another process than the workers, which save. Another engine's text
    stays."""
    serve(engines(ranks), 99)
    with CXLPool.open(engines.paths[0], threads=1) as pool:
        geometry = pool.pages.geometry
        page_bytes = geometry["extent_bytes"] // geometry["slab_slots"]
    engine = engines(ranks, quota=41 * page_bytes * ranks)
    quotas = [rank.worker.requests.quota for rank in engine.ranks]
    for wanted in (0, 160):
        for number in range(6):
            assert serve(engine, number) == [wanted]
            for quota, pool in zip(quotas, engine.scheduling.pools, strict=True):
                assert quota is not None
                assert quota.pages == 41
                assert len(pool.hotness.published()[0]) == 40 + quota.used()
                assert 40 <= quota.used() <= 41
    assert serve(engine, 99) == [160]
    assert not engine.scheduling.failures
    small = engines(ranks, quota=30 * page_bytes * ranks)
    assert serve(small, 50, 50) == [0, 0]
    assert small.scheduling.failures == {"quota": 2 * ranks}
    assert small.told_blocks == 0


def test_it_comes_while_others_run(engines: Engines) -> None:
    """A wait for the file delays no other; all come in the order of the queue, or are computed."""
    engine = engines()
    serve(engine, *range(12))
    engine.add("long", text(99, 60))
    engine.step()
    for number in range(12):
        engine.add(f"{number}", text(number, TEXT))
    engine.settle()
    assert all(engine.cached[f"{number}"] in range(0, 161, 4) for number in range(12))
    assert engine.requests["long"].computed > 60
    for name in list(engine.requests):
        engine.end(name)


def test_a_prefix_is_only_in_part_in_the_file(engines: Engines) -> None:
    """The first blocks are in the pool, the others come, what is new behind them is computed."""
    engine = engines()
    whole = text(5, TEXT)
    engine.serve("a", whole)
    engine.end("a")
    serve(engine, *range(10, 18))  # they push it out
    engine.add("b", [*whole[:104], *text(6, 30)])
    engine.settle()
    assert engine.cached["b"] == 104
    engine.end("b")
    engine.add("c", whole)
    engine.settle()
    assert engine.cached["c"] == 160


def test_a_deadline_ends_the_waiting(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(deadline_s=1e-6)
    serve(engine, *range(8))
    assert 0 in serve(engine, *range(8))
    assert engine.scheduling.failures["late"]


def test_requests_that_end_while_they_wait(engines: Engines, seed: int) -> None:
    """Aborted, preempted, asked again at random; nothing is held by them at the end."""
    rng, engine = random.Random(seed), engines()
    serve(engine, *range(12))
    for turn in range(60):
        name = f"r{turn}"
        engine.add(name, text(rng.randrange(12), TEXT))
        for _ in range(rng.randrange(3)):
            engine.step()
        running = [one for one in engine.requests if engine.requests[one] not in engine.waiting]
        if running and rng.random() < 0.3:
            engine.preempt(rng.choice(running))
        while len(engine.requests) > 2:
            engine.end(rng.choice(list(engine.requests)))
    engine.settle()
    for name in list(engine.requests):
        engine.end(name)


def test_an_engine_that_cannot_read_its_file_computes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    serve(engine, *range(8))

    def damaged(self: Tiers, *rest: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Tiers, "_promote", damaged)
    assert 0 in serve(engine, *range(8))
    assert engine.recomputed == 0


def test_a_request_says_how_far_down_and_how_long(engines: Engines) -> None:
    """tier: one that takes no file does not wait. ttl_s: its prefix is not evicted before."""
    engine = engines()
    now_s = [0.0]
    engine.scheduling._keeping._clock = lambda: now_s[0]
    kept = text(77, 82)
    engine.serve("kept", kept, ttl_s=60)
    engine.end("kept")
    serve(engine, *range(8))
    engine.serve("far", text(0, TEXT), tier="far")
    assert engine.cached["far"] == 0
    assert engine.requests["far"].computed >= TEXT
    engine.serve("kept", kept, tier="far")
    assert engine.cached["kept"] == 80
    for name in ("kept", "far"):
        engine.end(name)
    now_s[0] = 61.0
    serve(engine, *range(8, 16))
    engine.serve("kept", kept, tier="far")
    assert engine.cached["kept"] < 80
    engine.end("kept")


def test_what_is_kept_leaves_room(engines: Engines) -> None:
    """Half of the pool: the oldest go first; one that is longer than that is not kept at all."""
    engine = engines()
    for number in range(6):
        engine.serve(f"{number}", text(number, 82), ttl_s=600)
        engine.end(f"{number}")
    engine.serve("long", text(50, 266), ttl_s=600)
    engine.end("long")
    keeping = engine.scheduling._keeping
    assert [one.tokens for one in keeping._kept] == [80, 80, 80]
    assert serve(engine, 20, 21) == [0, 0]


def test_a_session_keeps_its_longest_turn_until_it_lets_go(engines: Engines) -> None:
    """Each turn takes the place of the one before; a turn that says nothing changes nothing."""
    engine = engines()
    turns = ((42, 600.0, [40, 40]), (82, 600.0, [40, 80]), (98, None, [40, 80]), (90, 0.0, [40]))
    engine.serve("other", text(2, 42), ttl_s=600)
    engine.end("other")
    for tokens, ttl_s, kept in turns:
        params = {} if ttl_s is None else {"ttl_s": ttl_s}
        engine.add(f"{tokens}", text(1, tokens), **params)
        engine.step()
        engine.end(f"{tokens}")
        assert [one.tokens for one in engine.scheduling._keeping._kept] == kept


def test_a_step_with_nothing_to_do_waits_for_what_comes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the second step has it: no steps follow each other while the thread is at work."""
    engine = engines()
    serve(engine, *range(8))
    monkeypatch.setattr(scheduler, "IDLE_S", 60)
    for number in range(4):
        engine.add(f"{number}", text(number, TEXT))
        for _ in range(2):
            engine.step()
        assert engine.cached[f"{number}"] == 160
        engine.end(f"{number}")
        engine.step()


def test_a_step_with_nothing_to_do_waits_for_loads(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(load="async")
    serve(engine, 1)
    monkeypatch.setattr(engine_attention, "IDLE_S", 60)
    for turn in range(8):
        request = engine.serve(f"{turn}", text(1, TEXT))
        assert not request.is_loading
        engine.step()
        engine.end(f"{turn}")
        engine.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_comes_when_who_has_ended_lets_go(engines: Engines, ranks: int) -> None:
    """A request comes between the end of another one and the step in which the workers hear of
    that: pages that it needs are still held."""
    engine = engines(ranks)
    serve(engine, *range(8))
    prefetch = engine.scheduling._prefetch
    assert prefetch is not None
    for turn in range(3):
        engine.serve("large", text(50 + turn, 400))
        engine.end("large")
        engine.add("next", text(turn, TEXT))
        tried = turn + 1
        until(lambda: prefetch.tiers[0].moved_pages("refused") >= 40 * tried)  # noqa: B023
        engine.settle()
        assert engine.cached["next"] == 160
        engine.end("next")
    assert not engine.scheduling.failures


def test_for_a_request_that_skips_reading_nothing_comes(engines: Engines) -> None:
    """One that wants the logprobs of its prompt: the engine computes it all, whatever we have."""
    engine = engines()
    serve(engine, *range(8))
    (pool,) = engine.scheduling.pools
    request = Request("a", text(0, TEXT), skip_reading_prefix_cache=True)
    engine.scheduling.expect(request)
    prefetch = engine.scheduling._prefetch
    assert prefetch is not None
    prefetch.rest(60)
    assert engine.scheduling.match(request, 0) == (0, False)
    assert pool.stats()["pages_held"] == 0
    engine.scheduling.ended(request)


def test_what_is_held_for_later_ones_gives_way(engines: Engines) -> None:
    """One in front of them is asked and not let in, and none runs: prefixes that came for later
    ones, and those that were kept of earlier ones."""
    engine = engines()
    serve(engine, *range(8))
    (pool,) = engine.scheduling.pools
    engine.serve("kept", text(77, 82), ttl_s=600)
    engine.end("kept")
    engine.step()
    behind, front = Request("behind", text(0, TEXT)), Request("front", text(60, 266))
    engine.scheduling.expect(behind)
    prefetch = engine.scheduling._prefetch
    assert prefetch is not None
    prefetch.rest(60)
    assert pool.stats()["pages_held"] == 60
    assert engine.scheduling.match(front, 0) == (0, False)
    engine.scheduling.message(Step())
    assert pool.stats()["pages_held"] == 0
    for request in (front, behind):
        engine.scheduling.ended(request)


def test_a_prefix_without_room_comes_when_there_is_some(engines: Engines) -> None:
    """Where its request waits for that room, too; not again and again, as others may take it."""
    engine = engines()
    serve(engine, *range(8))
    scheduling = engine.scheduling
    prefetch, has_room = scheduling._prefetch, [False]
    assert prefetch is not None
    scheduling.plan_by(lambda tokens: has_room[0] and 0 < tokens <= 160)
    request = Request("a", text(0, TEXT))

    def match() -> tuple[int, int | None]:
        """How often it waits, and what there is then."""
        waits = 0
        while (found := scheduling.match(request, 0)[0]) is None:
            prefetch.rest(60)
            waits += 1
        return waits, found

    engine.serve("large", text(50, 400))
    assert match() == (1, 0)
    assert match() == (0, 0)
    engine.end("large")
    engine.step()
    has_room[0] = True
    assert match() == (1, 160)
    scheduling.ended(request)
    serve(engine, *range(8, 12))
    engine.serve("large", text(51, 400))
    waits, found = match()
    assert waits == TRIES_MAX
    assert found is not None
    assert found < 160
    scheduling.ended(request)
