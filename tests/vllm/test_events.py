"""With vLLM: a router that hears an engine's KV events holds what the pool holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pytest

from cxlkv import CXLPool, Tiers

from ..support.router import ORDER, Router, as_array
from .conftest import MakeEngine
from .engines import BLOCK_TOKENS, VOCABULARY_SIZE, Engine

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

Event = dict[str, object]
END = (-1).to_bytes(8, "big", signed=True)
ENGINE = "engine"


def prompt(seed: int, tokens: int = 200) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(one) for one in rng.integers(0, VOCABULARY_SIZE, tokens)]


class Socket(Protocol):
    """zmq's socket, as far as it is used here."""

    def poll(self, timeout: int) -> int: ...
    def recv_multipart(self) -> list[bytes]: ...
    def send_multipart(self, parts: list[bytes]) -> None: ...


class Subscriber:
    """Hears an engine's batches, in order and each once: what was sent before it was connected, or
    got lost, it has the engine send again."""

    def __init__(self, live: Socket, again: Socket):
        self._live, self._again, self._next = live, again, 0
        self.events: list[Event] = []
        self.maps, self.arrays = Router(BLOCK_TOKENS), Router(BLOCK_TOKENS)

    def hear(self) -> None:
        """What has come; never waits for long."""
        while self._live.poll(50):
            self._batch(*self._live.recv_multipart())

    def _batch(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert topic == b"kv"
        if int.from_bytes(number, "big") > self._next:
            self._again.send_multipart([b"", self._next.to_bytes(8, "big")])
            while (missed := self._again.recv_multipart()[2:])[0] != END:
                self._take(*missed)
        self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") != self._next:
            return
        self._next += 1
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            assert set(event) - {"type"} <= set(ORDER[event["type"]])
            self.events.append(event)
            self.maps.hear(ENGINE, event)
            array = msgspec.msgpack.decode(msgspec.msgpack.encode(as_array(event)))
            self.arrays.hear(ENGINE, array)

    def holds(self) -> set[bytes]:
        """What the pool holds."""
        assert self.maps.holds(ENGINE) == self.arrays.holds(ENGINE)
        assert not self.maps.dropped
        return {cast("bytes", one) for one in self.maps.holds(ENGINE)}

    def until(self, engine: Engine, ready: Callable[[], bool]) -> None:
        """The engine looks once a second while it makes steps, so it is kept busy meanwhile with a
        prompt that is shorter than a block."""
        for _ in range(200):
            self.hear()
            if ready():
                return
            engine.generate([[1, 2, 3]], max_tokens=8)
        raise AssertionError(f"{len(self.holds())} blocks are held, which never became right")


@contextmanager
def subscribed(make: MakeEngine, extra: Event, folder: Path) -> Iterator[tuple[Engine, Subscriber]]:
    live, again = (f"ipc://{folder}/{name}" for name in ("events", "again"))
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    config |= {"endpoint": live, "replay_endpoint": again}
    whole = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}  # hashes, not 8 bytes of them
    engine = make(extra, environment=whole, kv_events_config=config)
    context = zmq.Context()
    with context, context.socket(zmq.SUB) as heard, context.socket(zmq.DEALER) as asked:
        heard.connect(live)
        heard.subscribe("kv")
        asked.connect(again)
        assert engine.ready() is None
        yield engine, Subscriber(heard, asked)


def is_right(subscriber: Subscriber, pool: CXLPool) -> bool:
    """Whether it holds the blocks that the pool has pages of. A page's name is its block's hash xor
    the engine's namespace, which is not known here: any page may be the first block's, but only one
    of them makes pages of all others."""
    held = [np.frombuffer(one[:16], np.uint64) for one in subscriber.holds()]
    there = {row.tobytes() for row in pool.hotness.published().rows["hash"]}
    spaces = (held[0] ^ np.frombuffer(name, np.uint64) for name in there if held)
    return any({(one ^ space).tobytes() for one in held} == there for space in spaces)


def test_a_router_holds_what_the_pool_holds(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A small pool evicts; operators evict and forget; the engine forgets what it has itself."""
    extra: Event = {"where": f"{tmp_path}/a.pool", "capacity": "8MiB"}
    with subscribed(make_engine, extra, tmp_path) as (engine, subscriber):
        with CXLPool.open(tmp_path / "a.pool", threads=1) as pool, Tiers(pool) as tiers:
            total = pool.stats()["pages_total"]
            for seed in range(total // 6 * 2):
                engine.generate([prompt(seed)], max_tokens=4)
            subscriber.until(engine, lambda: is_right(subscriber, pool))
            told = [e for e in subscriber.events if e.get("medium") == "CPU"]
            stored = [e for e in told if e["type"] == "BlockStored"]
            assert sum(len(cast("list[bytes]", e["block_hashes"])) for e in stored) > total
            tiers.reclaim(total // 2)
            subscriber.until(engine, lambda: is_right(subscriber, pool))
            rows = pool.hotness.published().rows[:3]
            pool.records.forget(rows["page"].copy(), rows["generation"].copy(), only_unheld=True)
            subscriber.until(engine, lambda: is_right(subscriber, pool))
            engine.forget()
            subscriber.until(engine, lambda: subscriber.events[-1]["type"] == "AllBlocksCleared")
            assert not subscriber.holds()
        last = prompt(total // 6 * 2 - 1)
        engine.generate([last], max_tokens=1)
        subscriber.until(engine, lambda: len(subscriber.holds()) == len(last) // BLOCK_TOKENS)


def test_events_say_of_a_block_what_the_engines_own_say(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """All but where it is: token ids, parent, salt, kind and group."""
    with subscribed(make_engine, {"where": f"{tmp_path}/"}, tmp_path) as (engine, subscriber):
        engine.ask(do="generate", prompts=[prompt(1)], max_tokens=1, more={}, salt="secret")
        engine.generate([prompt(2) + prompt(3)], max_tokens=1)
        engine.generate([prompt(2) + prompt(4)], max_tokens=70)
        subscriber.until(engine, lambda: len(subscriber.holds()) == 6 + 12 + 8)
        own, ours = (
            [block for event in subscriber.events for block in blocks_of(event, medium)]
            for medium in ("GPU", "CPU")
        )
    assert sorted(own, key=repr) == sorted(ours, key=repr)
    assert [block["extra_keys"] for block in ours[:2]] == [["secret"], None]
    assert {event.get("locality") for event in subscriber.events} == {None, "LOCAL"}


def blocks_of(event: Event, medium: str) -> Iterator[Event]:
    """One by one, each with its own parent: events may have several."""
    if event.get("medium") != medium:
        return
    assert event["type"] == "BlockStored"
    hashes, ids = (cast("list[object]", event[name]) for name in ("block_hashes", "token_ids"))
    keys = cast("list[object]", event["extra_keys"])
    several = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")
    rest = {name: event[name] for name in event if name not in (*several, "medium", "locality")}
    for place, one in enumerate(hashes):
        yield {
            **rest,
            "hash": one,
            "parent": hashes[place - 1] if place else event["parent_block_hash"],
            "token_ids": ids[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS],
            "extra_keys": keys[place],
        }
