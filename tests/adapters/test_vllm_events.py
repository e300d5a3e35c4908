"""What vLLM's connector tells routers of the pools is what the pools have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, LayerGroup, Tiers
from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.common.metrics import Failures
from cxlkv.adapters.vllm.events import Events, Removed, Stored
from cxlkv.adapters.vllm.messages import Report, Span

from ..support.events_worker import Said
from ..support.lengths import nightly
from ..support.paged_engine import SPACE, TOKENS, Request
from ..support.processes import Child, Prepared
from ..support.router import Router, as_array
from ..support.texts import SMALL, grown

ROOM = 150  # pages of each pool
NAMES = ("one", "two")


class World:
    """Two engines on the pools of one model, each a process, and what a router knows of them.

    told: of each engine the blocks that it has told of, with the space of their keys.
    """

    def __init__(self, folder: Path, ranks: int, chance: Random, ending: ExitStack):
        self.chance, self.ending, self.router = chance, ending, Router(TOKENS)
        self.paths = [str(folder / f"{rank}.pool") for rank in range(ranks)]
        self.pools = [self._pool(rank, path) for rank, path in enumerate(self.paths)]
        self.tiers = [ending.enter_context(Tiers(pool)) for pool in self.pools]
        self.engines: dict[str, Child] = {}
        self.told: dict[str, dict[str, bytes]] = {}
        self.running: dict[str, list[str]] = {}
        self.counts = dict.fromkeys(("requests", "cached", "stored", "removed", "killed"), 0)
        for name in NAMES:
            self.start(name)

    def _pool(self, rank: int, path: str) -> CXLPool:
        shard = (rank, len(self.paths), 0, 1)
        layout = KVLayout(
            layers=3, kv_heads=2, head_dim=8, page_tokens=TOKENS, dtype="float32", shard=shard
        )
        made = CXLPool.create(path, layout=layout, capacity="8MiB", threads=1, sketch=False)
        pool = self.ending.enter_context(made)
        pool.pages.alloc(pool.stats()["pages_free"] - ROOM)
        return pool

    def start(self, name: str) -> None:
        child = self.ending.enter_context(Prepared("tests.support.events_worker", *self.paths))
        assert child.hear() == "ready"
        self.engines[name], self.told[name], self.running[name] = child, {}, []

    def ask(self, name: str, do: str, request: str = "", ids: list[int] | None = None) -> Said:
        asked = json.dumps({"do": do, "name": request, "ids": ids or []})
        said: Said = json.loads(self.engines[name].ask(asked))
        if do == "forgotten":
            self.router.hear(name, {"type": "AllBlocksCleared"})
        if do in ("forgotten", "reset"):
            self.told[name].clear()
        for number, event in enumerate(said["events"]):
            self.router.hear(name, as_array(event) if number % 2 else event)
            blocks = cast("list[str]", event["block_hashes"])
            if event["type"] == "BlockStored":
                self.told[name].update(dict.fromkeys(blocks, bytes.fromhex(said["space"])))
            self.counts["stored" if event["type"] == "BlockStored" else "removed"] += len(blocks)
        return said

    def serve(self, name: str, ids: list[int]) -> None:
        """What it found or stored from the text's begin on is told of when the step has ended."""
        request = f"{name} {self.counts['requests']}"
        self.counts["requests"] += 1
        self.running[name].append(request)
        said = self.ask(name, "serve", request, ids)
        self.counts["cached"] += said["cached"]
        hashes = Request("", ids).block_hashes[: (len(ids) - 1) // TOKENS]
        here = self.present(hashes, bytes.fromhex(said["space"]))
        served = hashes[: here.index(False) if False in here else len(here)]
        assert {one.hex() for one in served} <= self.router.holds(name)

    def present(self, hashes: list[bytes], space: bytes) -> list[bool]:
        keys = block_keys(hashes, TOKENS, space).packed
        found = np.ones(len(hashes), np.bool_)
        for pool in self.pools:
            found &= pool.records.here(pool.records.names(keys.tobytes()).reshape(-1, 16))
        there: list[bool] = found.tolist()
        return there

    def check(self) -> None:
        """A router has of each engine what that has told of, less what was not there any more when
        it looked."""
        for name in NAMES:
            self.ask(name, "look")
            told = self.told[name]
            for one, space in list(told.items()):
                if self.present([bytes.fromhex(one)], space) == [False]:
                    del told[one]
            assert self.router.holds(name) == set(told)
        assert not self.router.dropped

    def kill(self, name: str, ids: list[int]) -> None:
        """While it serves; the router notices that it is gone, and the next one begins anew."""
        child = self.engines[name]
        child.tell(json.dumps({"do": "serve", "name": "last", "ids": ids}))
        child.kill()
        self.router.forget(name)
        self.counts["killed"] += 1
        self.start(name)


def test_what_lies_in_the_cold_file_is_served(tmp_path: Path) -> None:
    now_s = 0.0
    ids, failures = list(range(40)), Failures()
    with (
        CXLPool.create("anonymous:", layout=SMALL, capacity="4MiB", threads=1) as pool,
        Tiers(pool, cold=tmp_path / "a.cold", cold_capacity="1MiB") as tiers,
    ):
        events = Events([pool], failures, TOKENS, clock=lambda: now_s, cold=[tiers.cold])
        request = Request("a", ids)
        keys = block_keys(request.block_hashes, TOKENS, SPACE)
        sequence = grown(pool, ids)
        pool.publish(sequence, keys, TOKENS)
        sequence.release()
        events.begin(request, SPACE)
        events.found("a", 10)
        (told,) = events.changes()
        assert told.hashes == request.block_hashes
        assert tiers.reclaim(pool.stats()["pages_total"]) == 10
        now_s = 10.0
        assert events.changes() == []
        assert tiers.cold is not None
        assert tiers.cold.clear()
        now_s = 20.0
        (gone,) = events.changes()
        assert sorted(gone.hashes) == sorted(request.block_hashes)


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize("ranks", [2, nightly(1)])
def test_a_router_holds_what_the_pools_hold(
    tmp_path: Path, ending: ExitStack, ranks: int, seed: int
) -> None:
    """Two engines; evictions by them, by operators and by a full pool, kills, resets."""
    world = World(tmp_path, ranks, chance := Random(seed), ending)
    texts = [[chance.randrange(97) for _ in range(90)] for _ in range(4)]
    acts = {"serve": 10, "end": 8, "step": 6, "forget": 4, "evict": 4, "check": 4}
    acts |= {"kill": 1, "forgotten": 1, "reset": 1}
    fixed = dict.fromkeys(range(20), "serve") | {60: "kill", 120: "kill"}
    for number in range(160):
        act = fixed.get(number) or chance.choices(list(acts), list(acts.values()))[0]
        name, ids = chance.choice(NAMES), chance.choice(texts)[: chance.randrange(1, 91)]
        ids = ids + [chance.randrange(97) for _ in range(chance.randrange(20))]
        rank = chance.randrange(ranks)
        if act == "serve":
            world.serve(name, ids)
        if (act == "end" or len(world.running[name]) > 4) and world.running[name]:
            running = world.running[name]
            world.ask(name, "end", running.pop(chance.randrange(len(running))))
        elif act == "forget":
            keys = block_keys(Request("", ids).block_hashes, TOKENS, SPACE)
            place = chance.randrange(len(keys) + 1)
            world.pools[rank].forget(keys[place : place + chance.randrange(3)])
        elif act == "evict":
            free = world.pools[rank].stats()["pages_free"]
            world.tiers[rank].reclaim(free + chance.randrange(1, 30))
        elif act == "check":
            world.check()
        elif act == "kill":
            world.kill(name, ids)
        elif act in ("step", "forgotten", "reset"):
            world.ask(name, act)
    world.check()
    assert all(world.counts.values()), world.counts


def publish(pool: CXLPool, request: Request) -> None:
    """Whole blocks of its text, by a sequence that ends."""
    sequence = pool.sequence()
    zeros = np.zeros((len(request.block_hashes) * TOKENS, 1, 8), np.float32)
    for layer in range(pool.layout.layers):
        sequence.append(layer, zeros, zeros)
    pool.publish(sequence, block_keys(request.block_hashes, TOKENS, SPACE), TOKENS)
    sequence.release()


def test_a_block_is_there_with_its_pages_of_layers_that_see_all_tokens(tmp_path: Path) -> None:
    """Pages of a block are several, and those behind a window are not needed."""
    groups = [
        LayerGroup(layers=1, kv_heads=1, head_dim=8, dtype="float32", window=window)
        for window in (TOKENS, None)
    ]
    layout = KVLayout.of(groups, [0, 1], page_tokens=TOKENS // 2)
    request = Request("a", list(range(4 * TOKENS)))
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as pool:
        now_s = [0.0]
        failures = Failures()
        events = Events([pool], failures, TOKENS, clock=lambda: now_s[0])
        publish(pool, request)
        events.begin(request, SPACE)
        events.end("a")
        events.heard([Report(stored=[Span("a", 3, 4)])])  # the first three are another's
        (told,) = events.changes()
        assert isinstance(told, Stored)
        assert (told.first, told.hashes, told.parent) == (0, request.block_hashes, None)
        assert told.token_ids == request.all_token_ids
        keys = block_keys(request.block_hashes, TOKENS, SPACE).packed.tobytes()
        names = pool.records.names(keys, 2)  # of block, page, layer
        for block, page, layer in ((0, 0, 0), (2, 1, 1)):
            found = pool.records.find(names[block, page, layer : layer + 1])
            assert pool.records.forget(*found, only_unheld=True).tolist() == [0]
        assert events.changes() == []  # too early to look again
        now_s[0] += 1
        assert events.changes() == [Removed(request.block_hashes[2:3])]
    now_s[0] += 1
    assert events.changes() == []  # who cannot be asked says of nothing that it is gone
    assert failures == {"host": 1}


def test_what_stands_behind_a_gap_is_told_of_when_that_is_filled(tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=TOKENS, dtype="float32")
    request = Request("a", list(range(5 * TOKENS)))
    hashes = request.block_hashes
    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="8MiB", threads=1) as pool:
        events = Events([pool], Failures(), TOKENS)
        publish(pool, request)
        pool.forget(block_keys(hashes, TOKENS, SPACE)[2:3])
        events.begin(request, SPACE)
        for first, told in ((0, [hashes[:2]]), (4, [])):
            events.heard([Report(stored=[Span("a", first, 5)])])
            assert [change.hashes for change in events.changes()] == told
        publish(pool, request)
        events.found("a", 5)
        (change,) = events.changes()
        assert isinstance(change, Stored)
        assert (change.first, change.hashes, change.parent) == (2, hashes[2:], hashes[1])


def test_looking_takes_its_share_of_the_time_and_no_more(tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=TOKENS, dtype="float32")
    request = Request("a", list(range(3000 * TOKENS)))
    now_s = [0.0]

    def clock() -> float:  # each reading of it takes 4 ms, as 1024 blocks do then
        now_s[0] += 0.004
        return now_s[0]

    with CXLPool.create(tmp_path / "a.pool", layout=layout, capacity="16MiB", threads=1) as pool:
        events = Events([pool], Failures(), TOKENS, clock=clock)
        publish(pool, request)
        events.begin(request, SPACE)
        events.found("a", 3000)
        events.changes()
        pool.forget(block_keys(request.block_hashes, TOKENS, SPACE))
        found = []
        for passed_s in (1, 0, 0.2, 0.2, 0, 1):
            now_s[0] += passed_s
            found.append(sum(len(change.hashes) for change in events.changes()))
        assert found == [2048, 0, 0, 952, 0, 0]  # 8 ms for 5, of which 2 and then 4 are earned
