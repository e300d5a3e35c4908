"""The connector's parts in a small engine with paged blocks: what is saved, loaded, and refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.vllm.events import Stored
from cxlkv.adapters.vllm.loading import BlockMemory, Load, Loader
from cxlkv.adapters.vllm.messages import KEY_BYTES, Continued, Message
from cxlkv.emulation.link import emulate
from cxlkv.emulation.profiles import Profile
from cxlkv.tiers.policy import policy_named

from ..support.damaging import damage_piece
from ..support.paged_engine import (
    LAYERS,
    SPACE,
    TOKENS,
    Adapter,
    Engine,
    Grouping,
    Request,
    text,
    words_of,
)
from ..support.paged_engines import Engines, engines_in, use_references
from ..support.weight_files import change, safetensors


@pytest.fixture(params=["host", "device", "device, few blocks at once", "reads", "reads, few"])
def engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engines]:
    if "few" in request.param:
        device_blocks = pytest.importorskip("cxlkv.adapters.vllm.device_blocks")
        monkeypatch.setattr(device_blocks, "LOAD_BYTES", 3 * 2 * 2 * TOKENS * 8 * 4)  # of 3
    reads = "reads" in request.param
    if reads:
        use_references(monkeypatch)
    grouping = Grouping(on_device=request.param != "host", reads=reads)
    with engines_in(tmp_path, grouping=grouping) as made:
        yield made


def damage(path: str, page: int, layer: int) -> None:
    with CXLPool.open(path, threads=1) as pool:
        damage_piece(pool, page, layer)


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_second_engine_hits_what_the_first_saved(engines: Engines, load: str, ranks: int) -> None:
    first, second = engines(ranks, load=load), engines(ranks, load=load)
    first.serve("a", text(1, 30))
    first.step()
    assert [engines.published(rank) for rank in range(ranks)] == [7] * ranks  # 28 of 30 tokens
    again = second.add("a", text(1, 30))
    longer = second.serve("b", [*text(1, 30)[:21], 5, 6, 7])
    second.settle()
    second.step()
    assert (second.cached["a"], second.cached["b"]) == (28, 20)
    assert again.computed >= 30
    assert longer.computed >= 24
    assert second.recomputed == 0


def test_last_token_is_left_to_the_engine(engines: Engines) -> None:
    first, second = engines(), engines()
    first.serve("a", text(1, 32))
    second.serve("a", text(1, 32))
    assert second.cached["a"] == 28


def test_chunks_and_steps_are_saved_as_they_complete(engines: Engines) -> None:
    engine = engines()
    engine.add("a", text(2, 22))
    for pages in (1, 3, 5):
        engine.step(chunk=7)
        assert engines.published() == pages  # 7, 14, 21 tokens
    for _ in range(4):
        engine.step()
    assert engines.published() == 6  # 22 of the prompt and 3 more


@pytest.mark.parametrize("unnamed", [{0}, {1}, set(range(LAYERS))])
def test_layers_that_the_engine_does_not_name_are_saved_behind_the_step(
    engines: Engines, unnamed: set[int]
) -> None:
    first, second = engines(), engines()
    first.unnamed = unnamed
    first.serve("a", text(2, 22))
    assert engines.published() == 5
    second.serve("b", text(2, 22))
    assert (second.cached["b"], second.wrong()) == (20, [])


def test_nothing_of_a_step_that_has_failed_is_saved(engines: Engines) -> None:
    engine = engines()
    engine.serve("a", text(2, 22))
    engine.fails = True
    engine.serve("b", text(3, 22))
    assert engines.published() == 5


def test_only_what_the_pool_lacks_is_written(engines: Engines) -> None:
    """Another engine stores the text while this one is at it."""
    engine, other = engines(), engines()
    engine.add("a", text(3, 24) + text(4, 8))
    engine.step(chunk=4)
    other.serve("b", text(3, 24))
    engine.step()
    pool = engine.ranks[0].worker.pool
    assert pool.stats()["appended_bytes"] == 3 * 4 * pool.layout.token_bytes  # blocks 0, 6 and 7
    assert engines.published() == 8


def test_two_of_one_text_in_one_step_are_written_once(engines: Engines) -> None:
    engine = engines()
    engine.add("a", text(3, 21))
    engine.serve("b", text(3, 21))
    with CXLPool.open(engines.paths[0], threads=1) as pool:
        assert pool.stats()["pages_total"] - pool.stats()["pages_free"] == 5
    engine.step()
    engine.step()
    assert engines.published() == 5


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("defers", [False, True])
def test_damaged_page_is_computed_again_and_healed(
    engines: Engines, load: str, ranks: int, defers: bool
) -> None:
    first, second = engines(ranks, load=load), engines(ranks, load=load)
    second.defers = defers
    first.serve("a", text(1, 33))
    damage(engines.paths[ranks - 1], 3, layer=1)
    request = second.add("a", text(1, 33))
    second.serve("b", text(9, 9))
    second.settle()
    for _ in range(6):
        second.step()
    assert second.recomputed == 1
    assert second.ranks[ranks - 1].worker.requests.failures() == {"corrupt": 1}
    assert second.scheduling.failures["corrupt"] == 1
    assert request.computed > 33
    third = engines(ranks, load=load)
    third.serve("a", text(1, 33))
    third.settle()
    third.step()
    assert third.cached["a"] == 32
    assert third.recomputed == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_shares_damaged_blocks_publishes_nothing_of_them(engines: Engines, ranks: int) -> None:
    """The engine finds a hit's blocks for another request of the same step, before they came."""
    first = engines(ranks)
    second = engines(ranks, shares=True)
    first.serve("a", text(1, 33))
    damage(engines.paths[ranks - 1], 3, layer=1)
    second.add("a", text(1, 33) + text(2, 8))
    second.add("b", text(1, 33) + text(3, 8))
    second.step()  # b still counts on what a computes again in the next one
    for _ in range(8):
        assert not second.wrongly_stored
        second.step()
        assert not second.wrong()
    assert (second.cached["a"], second.cached["b"], second.recomputed) == (32, 0, 1)
    assert engines.published() >= 10  # of a


def test_step_that_was_scheduled_before_a_failure_was_known_is_not_published(
    engines: Engines,
) -> None:
    """With asynchronous scheduling the engine goes back one step later."""
    first, second = engines(), engines()
    first.serve("a", text(1, 33))
    damage(engines.paths[0], 3, layer=1)
    request = second.add("a", text(1, 33) + text(2, 10))
    second.step(chunk=1)
    worker = second.ranks[0].worker
    keys = block_keys(request.block_hashes, TOKENS, SPACE).packed.tobytes()
    worker.hear(Message(continued=[Continued("a", [[60, 61]], keys[-2 * KEY_BYTES :], 33, 7)]))
    for layer in range(LAYERS):
        worker.save_layer(f"layers.{layer}")
    worker.end_step()
    assert worker.report().stored == []
    second.free.remove(60)
    second.free.remove(61)
    request.blocks[0] += [60, 61]
    second.users.update([60, 61])
    worker.hear(Message(continued=[Continued("a", [], b"", 12, 28)]))
    assert worker._writing is not None  # from where the engine goes back to


def slow(engine: Engine, seconds: float) -> None:
    """Each bulk operation of its workers takes so long, as over a bad link."""
    profile = Profile(
        what="a slow link",
        source="made up",
        standing="assumed",
        latency_ns=seconds * 1e9,
        read_gb_per_s=1,
    )
    for rank in engine.ranks:
        engine.links.enter_context(emulate(rank.worker.pool, profile))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_connector_loaded_is_saved_when_it_has_arrived(
    engines: Engines, ranks: int
) -> None:
    """Not before: nobody in the worker knows in the step of the load whether it went well."""
    engine = engines(ranks)
    engine.elsewhere["a"] = 16
    engine.serve("a", text(1, 30))
    assert [engines.published(rank) for rank in range(ranks)] == [0] * ranks
    engine.step()
    assert [engines.published(rank) for rank in range(ranks)] == [7] * ranks
    engine.end("a")
    engine.elsewhere["b"], engine.fails_elsewhere = 16, True
    engine.serve("b", text(2, 30), samples=False)
    assert not engine.wrongly_stored
    assert [engines.published(rank) for rank in range(ranks)] == [7] * ranks
    engine.step()  # computed again
    engine.step()
    assert [engines.published(rank) for rank in range(ranks)] == [14] * ranks
    assert not engine.wrongly_stored
    again = engines(ranks)
    for name, seed in (("a", 1), ("b", 2)):
        again.serve(name, text(seed, 30))
        assert again.cached[name] == 28


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_load_that_is_late_is_given_up_and_computed(
    engines: Engines, load: str, ranks: int
) -> None:
    first = engines(ranks)
    first.serve("a", text(1, 33))
    second = engines(ranks, load=load, deadline_s=0.02)
    slow(second, 0.2)
    request = second.add("a", text(1, 33))
    for _ in range(3):
        second.step()
        second.settle()
    assert request.computed > 32
    assert 1 <= second.recomputed <= ranks
    assert second.ranks[0].worker.requests.failures() == {"late": 1}


@pytest.mark.parametrize("load", ["sync", "async"])
def test_hit_that_is_gone_is_computed(engines: Engines, load: str) -> None:
    """The scheduler's hit is held; who removes it all the same (repair, a lost lease) is heard."""
    first, second = engines(load=load), engines(load=load)
    first.serve("a", text(1, 33))
    request = second.add("a", text(1, 33))
    hear = second.ranks[0].worker.hear

    def broken(message: Message) -> None:
        for start in message.started:
            start.handles = [bytes(len(one)) for one in start.handles or []] or None
        hear(message)

    second.ranks[0].worker.hear = broken  # type: ignore[method-assign]
    for _ in range(3):
        second.step()
        second.settle()
    assert request.computed > 32
    assert second.recomputed == 1
    assert sum(second.ranks[0].worker.requests.failures().values()) == 1


def test_full_pool_saves_what_fits_and_goes_on(engines: Engines) -> None:
    engine = engines(blocks=4096)
    with CXLPool.open(engines.paths[0], threads=1) as pool:
        free = pool.stats()["pages_free"]
    engine.add("small", text(1, 41))
    engine.serve("large", text(2, (free - 3) * TOKENS))
    assert engines.published() == 10
    engine.serve("other", text(3, 41))
    engine.step()
    assert engines.published() == 20
    assert engine.scheduling.failures == {"full": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_of_higher_priority_make_room_later(engines: Engines, ranks: int) -> None:
    """Blocks that a request saves, those that it saves when it ends, and those that it finds, also
    when it saves nothing. By age alone, nothing else would be left."""
    engine = engines(ranks, blocks=4096)
    for rank in engine.ranks:
        rank.worker.tiers._policy = policy_named("lru")
    for name, tokens in (("found", 41), ("plain", 41)):
        engine.serve(name, text(ord(name[0]), tokens))
        engine.end(name)
    saved = engine.serve("saved", text(1, 41), priority=1)
    for _ in range(2 * TOKENS):
        engine.step()
    engine.serve("found", text(ord("f"), 41), priority=2, save=False)
    longer = list(saved.all_token_ids)
    for name in ("saved", "found"):
        engine.end(name)
    engine.step()
    for path in engines.paths[:ranks]:
        with CXLPool.open(path, threads=1) as pool:
            given = pool.hotness.published().rows["priority"].tolist()
            assert sorted(given) == [0] * 10 + [1] * ((len(longer) - 1) // TOKENS) + [2] * 10
    fill(engine, engines.paths[0])
    for name, ids, there in (
        ("saved", longer, (len(longer) - 1) // TOKENS * TOKENS),
        ("found", text(ord("f"), 41), 40),
        ("plain", text(ord("p"), 41), 0),
    ):
        engine.serve(name, ids)
        assert engine.cached[name] == there
    assert not engine.scheduling.failures


def fill(engine: Engine, path: str) -> None:
    """With new texts, twice the pool."""
    with CXLPool.open(path, threads=1) as pool:
        tokens = pool.stats()["pages_total"] // 4 * TOKENS
    for number in range(1000, 1008):
        engine.serve(f"{number}", text(number, tokens))
        engine.end(f"{number}")
        engine.step()


def test_preempted_request_starts_again_from_the_pool(engines: Engines) -> None:
    engine = engines()
    engine.serve("a", text(1, 30))
    engine.preempt("a")
    engine.step()
    assert engine.cached["a"] == 28
    engine.step()


def test_request_may_ask_not_to_be_saved(engines: Engines) -> None:
    engine = engines()
    engine.serve("a", text(1, 30), save=False)
    assert engines.published() == 0
    engine.add("b", text(2, 30), saves=False)  # a word that nobody knows
    engine.step()
    assert engines.published() == 7
    assert engine.scheduling.failures == {"bad_options": 1}


def test_another_namespace_is_a_miss(engines: Engines) -> None:
    """Another model, dtype, shape of ranks or tenant on one pool."""
    first, second = engines(), engines(space=bytes(16))
    for engine in (first, second):
        engine.serve("a", text(1, 33))
        assert engine.cached["a"] == 0
    assert engines.published() == 16


def test_adapter_with_other_weights_under_its_name_is_a_miss(
    engines: Engines, tmp_path: Path
) -> None:
    engine, folder = engines(), tmp_path / "lora"
    folder.mkdir()
    weights = safetensors(folder / "adapter_model.safetensors")

    def cached(name: str, number: int = 1) -> int:
        engine.add(name, text(1, 33)).lora_request = Adapter(str(folder), number)
        engine.step()
        return engine.cached[name]

    assert [cached("a"), cached("b")] == [0, 32]
    change(weights, -1)
    assert [cached("c", 2), cached("d", 2)] == [0, 32]
    change(weights, -1)
    assert cached("e", 3) == 32, "what it was at first"
    engine.serve("f", text(1, 33))
    assert engine.cached["f"] == 0


def test_reset_makes_all_that_was_stored_a_miss(engines: Engines) -> None:
    """What an engine is told when its weights have changed. What was kept is let go, too."""
    engine = engines()
    engine.serve("kept", text(2, 33), ttl_s=600)
    engine.end("kept")
    engine.step()
    with CXLPool.open(engines.paths[0], threads=1) as pool:
        assert pool.stats()["pages_held"] == 8
        engine.scheduling.reset()
        assert pool.stats()["pages_held"] == 0
    for name, cached in (("a", 0), ("b", 32)):
        engine.serve(name, text(1, 33))
        assert engine.cached[name] == cached
    engine.scheduling.reset()
    for name, cached in (("c", 0), ("d", 32)):
        engine.serve(name, text(1, 33))
        assert engine.cached[name] == cached


def test_pool_that_was_removed_serves_those_who_have_it_open(
    engines: Engines, tmp_path: Path
) -> None:
    engine = engines()
    engine.serve("a", text(1, 33))
    hidden = tmp_path / "hidden"
    Path(engines.paths[0]).rename(hidden)
    for name in "bc":
        engine.serve(name, text(ord(name), 33))
        engine.serve(name * 2, text(ord(name), 33))
        assert engine.cached[name * 2] == 32
    hidden.rename(engines.paths[0])


def test_pool_that_fails_at_every_call_costs_hits_only(engines: Engines) -> None:
    engine = engines()
    engine.serve("a", text(1, 33))
    engine.scheduling.pools[0].close()
    engine.serve("b", text(1, 33))
    assert engine.scheduling.failures == {"host": 1}
    for name in list(engine.ranks[0].worker.requests.sequences):
        engine.ranks[0].worker.requests.release(name)
    engine.ranks[0].worker.pool.close()
    for name in "cd":
        engine.serve(name, text(ord(name), 33))
    assert engine.scheduling.failures["host"] > 1


def test_changes_are_told_once_all_ranks_have_them(engines: Engines) -> None:
    engine = engines(2)
    request = engine.serve("a", text(1, 30))
    (change,) = engine.scheduling.changes()
    assert isinstance(change, Stored)
    assert (change.hashes, change.parent) == (request.block_hashes[:7], None)
    assert change.token_ids == request.all_token_ids[:28]
    for _ in range(3):
        engine.step()
    (change,) = engine.scheduling.changes()
    assert isinstance(change, Stored)
    assert (change.hashes, change.parent) == ([request.block_hashes[7]], request.block_hashes[6])
    other = engines(2)
    again = other.serve("b", text(1, 30))
    (change,) = other.scheduling.changes()
    assert change.hashes == again.block_hashes[:7]  # which the first has stored


# ---- tails: what is left behind the last whole block ----


def finish(engine: Engine, request: Request, tokens: int = 0) -> list[int]:
    """Has it say so many tokens more, and ends it; its text."""
    engine.settle()
    for _ in range(tokens):
        engine.step()
    engine.end(request.request_id)
    engine.step()
    return request.all_token_ids


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_turn_of_a_chat_begins_where_the_last_one_ended(
    engines: Engines, load: str, ranks: int
) -> None:
    """To the token: all but the last one, which has no K and V yet. In another engine, too."""
    both = [engines(ranks, load=load, tails=True) for _ in range(2)]
    said: list[int] = []
    for turn in range(12):
        engine, name = both[turn % 2], f"turn{turn}"
        request = engine.add(name, [*said, *text(turn, 1 + turn % 5)])
        answered = finish(engine, request, tokens=turn % 7)
        assert engine.cached[name] == max(0, len(said) - 1)
        said = answered
    assert not any(engine.recomputed for engine in both)


def test_a_prompt_of_whole_blocks_is_found_to_its_last_token(engines: Engines) -> None:
    first, second = engines(tails=True), engines(tails=True)
    finish(first, first.serve("a", text(1, 32)))
    for name, tokens, cached in (("a", 32, 31), ("b", 33, 32), ("c", 30, 28)):
        request = second.serve(name, text(1, tokens))
        assert second.cached[name] == cached
        second.end(request.request_id)


def test_a_hit_is_as_long_as_any_text_that_was_left(engines: Engines, seed: int) -> None:
    """Texts that part anywhere, of several salts and images, against a list of what was left: the
    longest of whole blocks, and of a text's end behind them, and nothing of another's words."""
    chance, engine = random.Random(seed), engines(blocks=512, tails=True)
    left: set[tuple[object, ...]] = set()
    texts = [text(number, 30) for number in range(2)]
    for number in range(120):
        ids = chance.choice(texts)[: chance.randrange(1, 30)] + [chance.randrange(97)] * (
            chance.randrange(3)
        )
        images = {chance.randrange(len(ids)): b"image"} if chance.random() < 0.3 else {}
        salt = chance.choice([b"", b"salt"])
        request = engine.join(Request(f"{number}", ids, salt=salt, images=images))
        known = {end for end in range(len(ids) + 1) if text_of(request, end) in left}
        wanted = longest(request, known)
        engine.step()
        assert engine.cached[request.request_id] == wanted, (ids, images)
        finish(engine, request, chance.randrange(3))
        ends = range(TOKENS, request.computed + 1, TOKENS)
        # An image that begins in a tail ends it.
        whole = request.computed // TOKENS * TOKENS
        end = min([request.computed, *(at for at in images if at > whole)])
        left |= {text_of(request, tokens) for tokens in (*ends, end)}


def text_of(request: Request, end: int) -> tuple[object, ...]:
    return (words_of(request, 0, end), *request.all_token_ids[:end])


def longest(request: Request, ends: set[int]) -> int:
    """Longest hit of a text. K and V of its first `ends` tokens are there."""
    whole = 0
    while whole + TOKENS in ends:
        whole += TOKENS
    return min(request.num_tokens - 1, max(end for end in {*ends, whole} if end < whole + TOKENS))


def test_a_tail_does_not_come_over_what_the_step_has_written(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine writes a layer's new K and V before it waits for its hits: here they come as late
    as they may."""
    engine = engines(tails=True)
    said = finish(engine, engine.add("a", text(1, 30)))
    waiting: dict[Load, Sequence[BlockMemory]] = {}
    wait = Load.wait

    def begin(self: Loader, load: Load) -> None:
        waiting[load] = self._memory

    def wait_late(self: Load, layers: int) -> None:
        if self in waiting and self._layers < layers:
            self.run(waiting.pop(self))
        wait(self, layers)

    monkeypatch.setattr(Loader, "begin", begin)
    monkeypatch.setattr(Load, "wait", wait_late)
    for name, ids, cached in (("b", said, 30), ("c", said[:28], 27), ("d", said[:29], 28)):
        request = engine.serve(name, ids)
        assert engine.cached[name] == cached
        finish(engine, request)


def test_a_damaged_tail_is_computed_again_and_forgotten(engines: Engines) -> None:
    engine = engines(tails=True)
    said = list(finish(engine, engine.add("a", text(1, 30))))
    assert (len(said), engines.published()) == (31, 8)
    damage(engines.paths[0], page=7, layer=1)
    other = engines(tails=True)
    for name, more, cached in (("b", 1, 30), ("c", 2, 28)):
        request = other.serve(name, [*said[:30], more, more])
        assert other.cached[name] == cached
        finish(other, request, tokens=1)
    assert other.recomputed == 1


@pytest.mark.parametrize(("page", "right"), [(3, 12), (7, 28)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_aborted_in_the_step_of_a_damaged_hit_leaves_no_tail(
    engines: Engines, ranks: int, page: int, right: int
) -> None:
    """In no rank: what those compute whose own hit is right is nonsense, too."""
    first, second, third, fourth = (engines(ranks, load="sync", tails=True) for _ in range(4))
    said = finish(first, first.serve("a", text(1, 30), samples=False))
    damage(engines.paths[ranks - 1], page, layer=1)
    second.aborts.add("b")
    ids = [*said, 1]
    second.serve("b", ids)
    second.step()
    assert (second.cached["b"], second.recomputed) == (29, 1)
    finish(third, third.serve("c", ids, samples=False))
    fourth.serve("d", [*ids, 4])
    assert (third.cached["c"], fourth.cached["d"]) == (right, 30)


def test_one_aborted_while_its_tail_loads_leaves_none(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another has found it damaged since, so that the pool has none."""
    first, late, other, last = (engines(load="async", tails=True) for _ in range(4))
    said = finish(first, first.add("a", text(1, 30)))
    damage(engines.paths[0], page=7, layer=1)
    begun: list[tuple[Loader, Load]] = []
    begin = Loader.begin
    monkeypatch.setattr(Loader, "begin", lambda self, load: begun.append((self, load)))
    late.serve("b", [*said, 4])
    monkeypatch.setattr(Loader, "begin", begin)
    other.serve("c", [*said, 4])
    other.settle()
    assert (late.cached["b"], other.cached["c"], other.recomputed) == (30, 30, 1)
    late.end("b")
    late.step()
    for loader, load in begun:
        loader.begin(load)
    late.settle()
    last.serve("d", [*said[:30], 5, 6])
    last.settle()
    assert last.cached["d"] == 28


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_anything_in_any_order(engines: Engines, load: str, ranks: int, seed: int) -> None:
    """Two engines, few blocks, aborts, preemptions, damage, pools that are lost and found: no block
    that counts is ever wrong."""
    chance = random.Random(seed)
    both = [engines(ranks, load=load, blocks=512, tails=True) for _ in range(2)]
    texts = [text(number, 60) for number in range(3)]
    names = iter(range(1 << 30))
    lost: dict[Engine, list[bool]] = {}  # whose pools are to be found again: the scheduler's or not
    for _ in range(60):
        engine = chance.choice(both)
        acts = ["add", "add", "step", "step", "step", "end", "preempt", "damage", "lose", "find"]
        act = chance.choice(acts)
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
            damage(
                chance.choice(engines.paths[:ranks]), chance.randrange(16), chance.randrange(LAYERS)
            )
        elif act == "lose" and engine not in lost:
            engine.lost_in, lost[engine] = chance.randrange(LAYERS), [True, False]
        elif act == "find" and engine in lost and engine.lost_in is None:
            engine.find(scheduler=lost[engine].pop(chance.randrange(len(lost[engine]))))
            if not lost[engine]:
                del lost[engine]
        engine.step(chunk=chance.choice([5, 16, 1 << 20]))
        assert not engine.wrongly_stored
    for engine in both:
        for name in list(engine.requests):
            engine.end(name)
        engine.settle()
        engine.step()
    for path in engines.paths:  # pages that were not read since are still damaged
        with CXLPool.open(path, threads=1) as pool:
            pool.admin.check(deep=True, repair=True)
