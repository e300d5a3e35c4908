"""Several groups of layers in the small engine: windows, chunks, blocks of unlike sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cxlkv import CXLPool
from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.vllm import engine_attention
from cxlkv.adapters.vllm.events import there
from cxlkv.adapters.vllm.groups import BlockGroup, are_whole, unit_of
from cxlkv.adapters.vllm.loading import BlockMemory
from cxlkv.pages import layer_places

from ..support.damaging import damage_piece
from ..support.paged_engine import SPACE, TOKENS, Engine, Grouping, text
from ..support.paged_engines import Engines, engines_in, use_references

FULL, WINDOW = BlockGroup(TOKENS), BlockGroup(TOKENS, 10)
GROUPINGS = {
    "windows": Grouping((FULL, WINDOW), (2, 2), (1, 0, 1)),
    "two tables": Grouping((WINDOW, FULL, WINDOW), (2, 2, 2), (0, 1, 2)),
    "one window": Grouping((WINDOW,), (2,), (0, 0, 0)),
    "chunks": Grouping((BlockGroup(TOKENS, 12, chunked=True), FULL), (2, 2), (0, 0, 1)),
    "longer full blocks": Grouping((BlockGroup(2 * TOKENS), WINDOW), (2, 4), (1, 0, 1)),
    "longer window blocks": Grouping((FULL, BlockGroup(2 * TOKENS, 10)), (4, 2), (1, 0, 1)),
    "two windows": Grouping((FULL, WINDOW, BlockGroup(TOKENS, 21)), (2, 2, 2), (0, 1, 2)),
}
GROUPINGS |= {f"{name}, device": replace(of, on_device=True) for name, of in GROUPINGS.items()}
GROUPINGS |= {
    name.replace("device", "reads"): replace(of, reads=True)
    for name, of in GROUPINGS.items()
    if of.on_device and len(set(of.heads)) == 1
}


@pytest.fixture(params=GROUPINGS)
def engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engines]:
    if GROUPINGS[request.param].reads:
        use_references(monkeypatch)
    with engines_in(tmp_path, blocks=600, grouping=GROUPINGS[request.param]) as made:
        yield made


@contextmanager
def engines_of(folder: Path, name: str) -> Iterator[Engines]:
    with engines_in(folder, blocks=600, grouping=GROUPINGS[name]) as made:
        yield made


def whole(engines: Engines, tokens: int) -> int:
    """Of so many tokens, those that are found."""
    unit = unit_of(engines.grouping.groups)
    return (tokens - 1) // unit * unit


def test_windows_end_where_the_engine_lets_go() -> None:
    """As vLLM's get_num_skipped_tokens(): its own examples."""
    assert BlockGroup(4, 4).first_token(7) == 4
    chunks = BlockGroup(4, 8, chunked=True)
    assert [chunks.first_token(n) for n in (7, 8, 13)] == [0, 8, 8]
    assert [BlockGroup(4, 6).first_block(n) for n in (0, 8, 9, 13)] == [0, 0, 1, 2]
    assert BlockGroup(4).first_block(1000) == 0
    assert are_whole([BlockGroup(4)])
    assert not are_whole([BlockGroup(4), BlockGroup(4)])
    assert not are_whole([BlockGroup(4, 4)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_engine_hits_what_the_first_saved(engines: Engines, ranks: int) -> None:
    """Every prefix of it: windows of all of them are there."""
    first, second = engines(ranks), engines(ranks)
    first.serve("a", text(1, 50))
    first.step()
    for end in (50, 49, 33, 24, 17, 9, 50):
        name = f"{end}"
        second.add(name, [*text(1, 50)[: end - 1], 96])
        second.settle()
        second.step()
        assert second.cached[name] == whole(engines, end)
        second.end(name)
    assert second.recomputed == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_chunks_and_steps_are_saved_before_the_engine_lets_go(engines: Engines, ranks: int) -> None:
    engine = engines(ranks)
    request = engine.add("a", text(2, 45))
    for _ in range(8):
        engine.step(chunk=7)
    for _ in range(20):
        engine.step()
    said = list(request.all_token_ids)
    engine.end("a")
    engine.step()
    for end in range(len(said), 8, -9):
        engine.add(f"{end}", said[:end])
        engine.settle()
        assert engine.cached[f"{end}"] == whole(engines, end)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_page_is_computed_again_from_the_first_token(
    engines: Engines, ranks: int
) -> None:
    first, second = engines(ranks), engines(ranks)
    first.serve("a", text(1, 33))
    first.step()
    last = whole(engines, 33)
    with CXLPool.open(engines.paths[ranks - 1], threads=1) as pool:
        for page in range(pool.stats()["pages_published"]):
            damage_piece(pool, page, 1)
    request = second.add("a", text(1, 33))
    second.settle()
    for _ in range(6):
        second.step()
    assert (second.recomputed, request.computed > 33) == (1, True)
    assert second.ranks[ranks - 1].worker.requests.failures() == {"corrupt": 1}
    assert engines(ranks).scheduling.failures == {}
    for path in engines.paths:  # each try forgets one of them
        with CXLPool.open(path, threads=1) as pool:
            pool.admin.check(deep=True, repair=True)
    third = engines(ranks)
    for name, wanted in (("a", None), ("b", last)):
        third.add(name, text(1, 33))
        third.settle()
        third.step()
        assert wanted in (None, third.cached[name])
    assert third.recomputed == 0


def test_what_another_connector_loaded_is_saved_as_far_as_windows_reach(engines: Engines) -> None:
    """Of what is before the window there, no layer with one has any blocks."""
    engine = engines()
    engine.elsewhere["a"] = 24
    request = engine.serve("a", text(1, 50))
    for _ in range(24):
        engine.step()
    assert not engine.wrongly_stored
    said = list(request.all_token_ids)
    engine.end("a")
    engine.step()
    engine.add("b", said)
    engine.settle()
    engine.step()
    assert engine.cached["b"] == whole(engines, len(said))
    engine.add("c", [*said[:10], 1, 2, 3])
    engine.settle()
    assert engine.cached["c"] in (0, 8)


def test_ranks_agree_on_a_hit_whose_windows_all_of_them_have(tmp_path: Path) -> None:
    """One has 44 tokens of it; the other one 48, but at 44 its window has a gap."""
    with engines_of(tmp_path, "windows") as engines:
        first, second = engines(2), engines(2)
        request = first.serve("a", text(1, 50))
        first.end("a")
        first.step()
        keys = block_keys(request.block_hashes, TOKENS, SPACE)
        for rank, unit in ((1, 11), (0, 8)):
            worker = first.ranks[rank].worker
            pool, layout = worker.pool, worker.pool.layout
            places = layer_places(layout, pool.pages.geometry)
            parts = [p.part for p, w in zip(places, layout.windows, strict=True) if w]
            names = pool.records.names(keys[unit : unit + 1].packed.tobytes(), 1)
            gone = np.ascontiguousarray(names[0, 0, parts])
            worker.tiers.evict_among(gone, len(parts))
            assert not there(pool, gone).any()
        second.add("a", text(1, 50))
        second.settle()
        assert second.cached["a"] == 32
        assert (second.recomputed, second.scheduling.failures) == (0, {})


def test_blocks_of_another_group_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that saves a layer from the blocks of the first group, whatever its own is."""

    def append(self: engine_attention._Writing, layer: int, own: BlockMemory) -> None:
        where = (self.blocks[0], self.starts[0], self.rewind)
        self.batch.append_blocks(layer, own.keys, own.values, *where)
        self.layers = layer + 1

    with engines_of(tmp_path, "windows") as engines:
        first, second = engines(), engines(shares=True)  # which looks for itself below
        with monkeypatch.context() as planted:
            planted.setattr(engine_attention._Writing, "append", append)
            first.serve("a", text(1, 33))
        second.add("a", text(1, 33))
        second.settle()
        second.step()
        assert second.wrong()


def test_audits_compare_all_groups_blocks(engines: Engines) -> None:
    """Where they differ, nothing is found any more. vLLM cannot go back to compute what runs."""
    first, second = engines(), engines(audit_hits=1)
    first.serve("a", text(1, 50))
    unit = unit_of(engines.grouping.groups)
    second.add("a", text(1, 50))
    second.settle()
    second.step()
    assert second.cached["a"] == whole(engines, 50) - unit
    assert second.scheduling.failures == {}
    first.weights = b"other"  # which its keys do not say
    first.serve("b", text(2, 50))
    third = engines(audit_hits=1, shares=True)  # which does not look whether blocks are right
    third.add("b", text(2, 50))
    third.settle()
    third.step()
    assert third.scheduling.failures == {"audit": 1}
    third.end("b")
    for engine in (third, second):
        engine.step()
        engine.add("c", text(1, 50))
        engine.settle()
        assert engine.cached["c"] == 0


def test_requests_wait_for_their_hits_whatever_the_settings_say(tmp_path: Path) -> None:
    """A step that has computed with a damaged one could not be taken back (vLLM's scheduler)."""
    with engines_of(tmp_path, "windows") as engines:
        first, second = engines(load="sync", tails=True), engines(load="sync", tails=True)
        first.serve("a", text(1, 33))
        assert second.scheduling._loads_beside
        assert second.scheduling._tails is None
        second.add("a", text(1, 33))
        second.settle()


def test_pages_behind_windows_are_kept_to_be_found(tmp_path: Path) -> None:
    with engines_of(tmp_path, "windows") as engines:
        engines().serve("a", text(1, 33))
        assert engines.published() == 3 * 8  # each layer is a part here, and has all of the text


def test_anything_in_any_order(engines: Engines, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([1, 2])
    both = [engines(ranks) for _ in range(2)]
    texts = [text(number, 60) for number in range(3)]
    names = iter(range(1 << 30))
    for _ in range(60):
        engine = chance.choice(both)
        act = chance.choice(["add", "add", "step", "step", "step", "end", "preempt", "damage"])
        running = [n for n, r in engine.requests.items() if r not in engine.waiting]
        if act == "add" and len(engine.requests) < 8:
            ids = chance.choice(texts)[: chance.randrange(1, 60)]
            ids += text(chance.randrange(1 << 30), chance.randrange(1, 20))
            name = str(next(names))
            if chance.random() < 0.1:
                unit = unit_of(engines.grouping.groups)
                engine.elsewhere[name] = (len(ids) - 1) // unit * unit
            engine.add(name, ids)
        elif act == "end" and engine.requests:
            engine.end(chance.choice(list(engine.requests)))
        elif act == "preempt" and running:
            engine.preempt(chance.choice(running))
        elif act == "damage":
            with CXLPool.open(chance.choice(engines.paths[:ranks]), threads=1) as pool:
                damage_piece(pool, chance.randrange(32), chance.randrange(3))
        engine.step(chunk=chance.choice([5, 16, 1 << 20]))
        assert not engine.wrongly_stored
    for engine in both:
        settle(engine)
    for path in engines.paths:  # pages that were not read since are still damaged
        with CXLPool.open(path, threads=1) as pool:
            pool.admin.check(deep=True, repair=True)


def settle(engine: Engine) -> None:
    for name in list(engine.requests):
        engine.end(name)
    engine.settle()
    engine.step()
