"""Models with states: SGLang's own host pool of states beside that of K and V."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from cxlkv.arrays import Bytes

from .hicache import WAIT_S, Engine, page_bytes, read_pages, write_pages

# isort: split
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

NODE_PAGES = (64, 64, 4)
"""A text of 132 pages, as chunks of its prefill leave it: a state after each."""
TEXTS, EVICTED = 200, 8


def text_of(engine: Engine, seed: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, sum(NODE_PAGES) * engine.page_tokens)
    return [int(one) for one in tokens]


def bytes_of(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def state_of(engine: Engine, seed: int, node: int) -> Bytes:
    return bytes_of(1000 * seed + node, page_bytes(engine.hosts["mamba"]))


def page_of(engine: Engine, seed: int) -> Bytes:
    return bytes_of(seed, page_bytes(engine.host))


def save(engine: Engine, seed: int) -> None:
    """Node after node, as SGLang's unified radix tree has each stored, with its state."""
    states, ids = engine.hosts["mamba"], text_of(engine, seed)
    hashes, first = engine.hashes(ids), 0
    for node, pages in enumerate(NODE_PAGES):
        last = first + pages
        indices, slot = engine.host.alloc(pages * engine.page_tokens), states.alloc(1)
        write_pages(engine.host, indices, [page_of(engine, seed)] * pages)
        write_pages(states, slot, [state_of(engine, seed, node)])
        own = hashes[first:last]
        side = PoolTransfer(
            PoolName.MAMBA, slot, keys=own[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        part = ids[first * engine.page_tokens : last * engine.page_tokens]
        engine.controller.write_storage(indices, part, own, hashes[:first], [side])
        done = engine.controller.ack_backup_queue.get(timeout=WAIT_S)
        assert done.completed_tokens == len(part)
        engine.host.free(indices)
        states.free(slot)
        first = last


def fetch(engine: Engine, ids: list[int]) -> tuple[list[Bytes], Bytes | None]:
    """Pages of K and V, and the state after them, as SGLang's tree fetches a prompt."""
    controller, states = engine.controller, engine.hosts["mamba"]
    side = PoolTransfer(
        PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    controller.prefetch(CacheRequestHandle("request", 0), ids, extra_pools=[side])
    operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    operation.host_indices = engine.host.alloc(operation.storage_hit_count)
    side.host_indices = slot = states.alloc(1)
    write_pages(states, slot, [np.full(page_bytes(states), 7, np.uint8)])
    controller.prefetch_buffer.put(operation)
    tokens, are_there = 0, 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
        tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens
        are_there = max(are_there, (ack.pool_hits or {}).get(PoolName.MAMBA, 0))
        if ack.completed_req:
            break
    pages = read_pages(engine.host, operation.host_indices[:tokens])
    (state,) = read_pages(states, slot)
    engine.host.free(operation.host_indices)
    states.free(slot)
    return pages, state if are_there else None


@pytest.mark.parametrize("restarted", [False, True])
def test_states_of_old_texts_are_there_as_long_as_their_pages(folder: str, restarted: bool) -> None:
    """As much memory as SGLang's own host pools had, where states are 42 pages large, and states
    of the oldest of 200 texts were gone: of 8 none was hit. Here all 8 are, with their states."""
    engine = Engine(folder, "mamba", capacity="144MiB")
    print("seeds 0 to", TEXTS - 1)
    for seed in range(TEXTS):
        save(engine, seed)
    if restarted:
        engine.close()
        engine = Engine(folder, "mamba", capacity="144MiB")
    for seed in range(EVICTED):
        ids = text_of(engine, seed)
        pages, state = fetch(engine, ids)
        assert len(pages) == sum(NODE_PAGES)
        assert all(np.array_equal(page, page_of(engine, seed)) for page in pages)
        assert state is not None
        assert np.array_equal(state, state_of(engine, seed, len(NODE_PAGES) - 1))
        # Another end: the tree has no use for pages behind the last state.
        pages, state = fetch(engine, ids[: 100 * engine.page_tokens])
        assert len(pages) == NODE_PAGES[0]
        assert state is not None
        assert np.array_equal(state, state_of(engine, seed, 0))
    assert engine.backend.counting.failures.total() == 0
    engine.close()


def test_sglangs_tree_finds_what_its_host_pools_have_evicted(folder: str) -> None:
    """In the whole of it but for a GPU, in a process of its own. Its host pool has 33 states beside
    65 pages, and of the oldest texts nothing is left in it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.tree", folder, "40"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["slots"], said["pages"], said["failures"]) == (33, 65, 0)
    assert said["before"] == [0] * EVICTED
    assert said["after"] == [3 * 64] * EVICTED
