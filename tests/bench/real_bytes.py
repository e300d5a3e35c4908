"""Replays a trace on real tiers: small pages whose bytes follow from their names, all compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv.bench.replay.simulation import mixed
from cxlkv.bench.replay.traces import Request
from cxlkv.errors import PoolFullError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers

PAGE_TOKENS = 16
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=PAGE_TOKENS, dtype="float32")
PAGE_BYTES = 2 * PAGE_TOKENS * 32 * 4
"""K and V of a page."""
STEP_EVERY = 256
"""Requests between two steps of the mover."""


@dataclass
class Counts:
    """In pages. far: that the pool really has, made of whole extents. Local hits were read from
    copies, cold ones were in the file when they were asked for; the others were in the pool."""

    far: int
    asked: int = 0
    hits: int = 0
    cold_hits: int = 0
    local_hits: int = 0
    unpublished: int = 0
    wrong: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def replay(
    requests: Sequence[Request], far: int, local: int = 0, cold: int = 0, policy: str = "adaptive"
) -> Counts:
    """Tiers of so many pages each; what their counts and the pool's check said at the end, too."""
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB") as small:
        page_bytes = (16 << 20) / small.stats()["pages_total"]
    capacity = int(far * page_bytes) + (2 << 20)
    file = Path(f"/dev/shm/cxlkv-replay-{os.getpid()}.cold") if cold else None
    try:
        with (
            CXLPool.create("anonymous:", layout=LAYOUT, capacity=capacity) as pool,
            Tiers(
                pool,
                local=local * PAGE_BYTES or None,
                cold=file,
                cold_capacity=f"{(cold + 2) * 8192 + (64 << 10)}" if file else None,
                fsync="none",
                policy=policy,
            ) as tiers,
        ):
            counts = Counts(pool.stats()["pages_total"])
            for number, request in enumerate(requests, 1):
                one(tiers, request, counts)
                if number % STEP_EVERY == 0 or number == len(requests):
                    tiers.step()
            counts.stats, counts.problems = tiers.stats(), list(pool.admin.check()["problems"])
            return counts
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def one(tiers: Tiers, request: Request, counts: Counts) -> None:
    """One request: match, read, compute the rest, publish."""
    names = np.fromiter(request.pages, np.uint64, len(request.pages))
    keys = keys_of(names)
    brought = tiers.brought_pages
    with tiers.match(keys) as hit:
        sequence = hit.sequence()
    hits = len(sequence) // PAGE_TOKENS
    counts.asked += len(names)
    counts.hits += hits
    counts.cold_hits += tiers.brought_pages - brought
    if hits:
        before = local_reads(tiers)
        counts.wrong += verify(tiers.pool.batch([sequence]), names[:hits])
        counts.local_hits += local_reads(tiers) - before
    if hits < len(names):
        rows = content(names[hits:])
        try:
            sequence.append(0, rows[0], rows[1])
            tiers.pool.publish(sequence, keys, PAGE_TOKENS)
        except PoolFullError:
            counts.unpublished += len(names) - hits
    sequence.release()


def local_reads(tiers: Tiers) -> int:
    return 0 if tiers.local is None else int(tiers.local.stats()["reads_local"])


def keys_of(names: npt.NDArray[np.uint64]) -> PageKeys:
    """Names of a trace are chained already: each stands for all before it."""
    words = np.stack([mixed(names), mixed(names + np.uint64(1 << 63))], axis=1)
    return PageKeys(words.view(np.uint8).reshape(-1, 16), PAGE_TOKENS)


def content(names: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """[2, tokens, 1, 32]: K and V of pages, numbers that follow from name and place."""
    places = np.arange(2 * PAGE_TOKENS * 32, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    words = (mixed(names)[:, None] ^ places) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (words >> np.uint64(41)).astype(np.float32).reshape(-1, 2, PAGE_TOKENS, 32)
    return np.ascontiguousarray(numbers.transpose(1, 0, 2, 3)).reshape(2, -1, 1, 32)


def verify(batch: Batch, names: npt.NDArray[np.uint64]) -> int:
    """Pages whose bytes are not those of their names; CRCs are checked on the way."""
    count = len(names)
    wanted = content(names).reshape(2, count, PAGE_TOKENS * 32)
    wrong = np.zeros(count, np.bool_)
    for kind, got in enumerate(batch.fetch(0, same_pages(range(count), 1))):
        wrong |= (np.asarray(got).reshape(count, -1) != wanted[kind]).any(axis=1)
    return int(wrong.sum())
