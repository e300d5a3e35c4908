"""A trace replayed with real bytes: prefix index, tiers and mover of a pool; every hit is verified.

A page of the trace becomes a page of a small pool, whose content follows from its name. A request
matches its prompt, reads each byte that it hit and compares it, computes (that is, makes up) the
others, and publishes them. The far tier's size is in pages, as is all else: only pages are small.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cxlkv.bench.replay.simulation import mixed
from cxlkv.bench.replay.traces import Request
from cxlkv.errors import BadArgumentError, PoolFullError
from cxlkv.layout import KVLayout, parse_bytes
from cxlkv.machine.state import write_whole
from cxlkv.ndp.engine import same_pages
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Batch
from cxlkv.tiers import Tiers

PAGE_TOKENS = 16
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=PAGE_TOKENS, dtype="float32")
PAGE_BYTES = 2 * PAGE_TOKENS * 32 * 4
"""K and V of a page."""
SAVE_EVERY = 256
"""Requests between two notes of how far it is, and steps of the mover."""


@dataclass
class Counts:
    """In pages, but for the first and last two. Local hits were read from copies, cold ones were
    in the file when they were asked for; the others were in the pool."""

    requests: int = 0
    asked: int = 0
    hits: int = 0
    cold_hits: int = 0
    local_hits: int = 0
    unpublished: int = 0
    wrong: int = 0
    resumed: int = 0
    seconds: float = 0.0


@dataclass
class Where:
    """Pages of each tier, and where the pool lies; without a path it ends with the process."""

    far: int
    local: int = 0
    cold: int = 0
    policy: str = "adaptive"
    path: Path | None = None


def parse_size(text: str, distinct: int) -> int:
    """Pages: "10%" of the distinct ones, a number of pages, or bytes with a unit."""
    given = text.strip()
    try:
        if given.endswith("%"):
            pages = float(given[:-1]) / 100 * distinct
        elif given[-1:].isdigit():
            pages = float(given)
        else:
            pages = parse_bytes(given) / PAGE_BYTES
    except ValueError:
        pages = -1.0
    if not 0 <= pages < 1 << 31:
        raise BadArgumentError(f"size {text!r}: 10%, a number of pages, or bytes like 2GiB")
    return int(pages)


def replay(
    requests: Sequence[Request],
    where: Where,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Counts, dict[str, float], list[str]]:
    """What came of it, the tiers' own counts (of the last process that ran it), and what the pool's
    check found at the end.

    With a path: goes on where an earlier run of the same requests was killed. Raises
    BadArgumentError for sizes that do not fit.
    """
    widest = max(len(request.pages) for request in requests)
    if where.far < 2 * widest:
        raise BadArgumentError(
            f"far has {where.far} pages, the longest prompt {widest}: at least twice that"
        )
    counts, pool = open_at(where, requests)
    cold = None
    if where.cold:
        cold = Path(f"{where.path or f'/dev/shm/cxlkv-replay-{os.getpid()}'}.cold")
    try:
        with pool, tiers_of(pool, where, cold) as tiers:
            began = time.monotonic() - counts.seconds
            for number in range(counts.requests, len(requests)):
                one(tiers, requests[number], counts)
                counts.requests = number + 1
                if number % SAVE_EVERY == SAVE_EVERY - 1 or counts.requests == len(requests):
                    tiers.step()
                    counts.seconds = time.monotonic() - began
                    save(where, counts, len(requests))
                    progress(counts.requests)
            return counts, tiers.stats(), list(pool.admin.check()["problems"])
    finally:
        if cold is not None and where.path is None:
            cold.unlink(missing_ok=True)


def tiers_of(pool: CXLPool, where: Where, cold: Path | None) -> Tiers:
    local = where.local * PAGE_BYTES if where.local else None
    capacity = f"{(where.cold + 2) * 8192 + (64 << 10)}" if cold else None
    return Tiers(
        pool, local=local, cold=cold, cold_capacity=capacity, fsync="none", policy=where.policy
    )


def open_at(where: Where, requests: Sequence[Request]) -> tuple[Counts, CXLPool]:
    """A new pool, or the one of a run that was killed, and how far that was. where.far becomes what
    the pool really has: it is made of whole extents."""
    notes = notes_of(where)
    is_ours = notes is not None and notes.is_file()
    if where.path and notes and is_ours and where.path.exists():
        said = json.loads(notes.read_text())
        if said.pop("of") == len(requests):
            counts = Counts(**said)
            counts.resumed += 1
            pool = CXLPool.open(where.path, layout=LAYOUT)
            where.far = pool.stats()["pages_total"]
            return counts, pool
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="16MiB") as small:
        page_bytes = (16 << 20) / small.stats()["pages_total"]
    capacity = int(where.far * page_bytes) + (2 << 20)
    if where.path is None:
        pool = CXLPool.create("anonymous:", layout=LAYOUT, capacity=capacity)
    else:
        cold = Path(f"{where.path}.cold")
        if cold.exists() and not is_ours:
            raise BadArgumentError(f"{cold} is no replay's: give another --pool, or move it away")
        pool = CXLPool.create(where.path, layout=LAYOUT, capacity=capacity, replace=is_ours)
        cold.unlink(missing_ok=True)
    where.far = pool.stats()["pages_total"]
    return Counts(), pool


def notes_of(where: Where) -> Path | None:
    return None if where.path is None else where.path.with_name(f"{where.path.name}.replay")


def save(where: Where, counts: Counts, total: int) -> None:
    notes = notes_of(where)
    if notes is not None:
        write_whole(notes, json.dumps({**asdict(counts), "of": total}))


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
