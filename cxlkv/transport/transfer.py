"""pull() and push() copy prefixes between pools; what arrives is published under its keys.

Prefill on one machine, decode on another: push() where the prefill ran, or pull() where the decode
will. A record is published only when every byte of it is what a CRC says, so what is damaged, or
was given away meanwhile, is left out and counted, and the prefix is found as far as it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from cxlkv.arrays import Bytes, Codes, Offsets
from cxlkv.errors import PeerError
from cxlkv.pages import CORRUPT, PRESENT, STALE, names_of
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.transport.base import chunk_records
from cxlkv.transport.client import Remote
from cxlkv.transport.far import in_order, pages_of_parts, parents_of
from cxlkv.transport.wire import Deadline

LEASE_S = 600.0


@dataclass
class Moved:
    """What a pull or push did. tokens: of `keys`, that the pool which was to get them has now.

    pages: that were published there. present: that were there before. damaged: that had other bytes
    than were written. stale: that were given away before they could be read.
    """

    tokens: int = 0
    pages: int = 0
    present: int = 0
    damaged: int = 0
    stale: int = 0
    bytes: int = 0

    def count(self, codes: Codes, record_bytes: int) -> None:
        published = int((codes == 0).sum())
        self.pages += published
        self.bytes += published * record_bytes
        self.present += int((codes == PRESENT).sum())
        self.damaged += int((codes == CORRUPT).sum())
        self.stale += int((codes == STALE).sum())


def pull(remote: Remote, pool: CXLPool, keys: Iterable[bytes], *, strict: bool = True) -> Moved:
    """Bring the longest prefix of `keys` that the far pool has into `pool`, so that pool.match()
    finds it. Pages that are here already are not read again.

    A connection that breaks is made again, as long as that brings pages. Raises GeometryError for
    pools of other layouts, PoolFullError (what came before it stays), PeerError.
    """
    wanted = keys if isinstance(keys, PageKeys) else list(keys)
    moved = _going_on(lambda so_far: _pull(remote, pool, wanted, strict, so_far), remote.deadline_s)
    with pool.match(wanted, strict=strict) as hit:
        moved.tokens = hit.tokens
    return moved


def push(remote: Remote, pool: CXLPool, keys: Iterable[bytes], *, strict: bool = True) -> Moved:
    """Publish the longest prefix of `keys` that `pool` has in the far pool; as pull()."""
    wanted = keys if isinstance(keys, PageKeys) else list(keys)
    moved = _going_on(lambda so_far: _push(remote, pool, wanted, strict, so_far), remote.deadline_s)
    with remote.match(wanted, strict=strict) as hit:
        moved.tokens = hit.tokens
    return moved


def _going_on(attempt: Callable[[Moved], None], deadline_s: float) -> Moved:
    """Tries again after a break, if pages came since the last one, and once where none did; but not
    where none did for the time in which a connection is tried for."""
    so_far, before, breaks = Moved(), 0, 0
    while True:
        so_far.present = 0
        deadline = Deadline(deadline_s)
        try:
            attempt(so_far)
        except PeerError:
            if so_far.pages > before:
                breaks = 0
            elif deadline.is_over():
                raise
            breaks += 1
            if breaks > 1:
                raise
            before = so_far.pages
            continue
        so_far.present -= before
        return so_far


def _pull(remote: Remote, pool: CXLPool, keys: Iterable[bytes], strict: bool, moved: Moved) -> None:
    remote.check_fits(pool)
    record_bytes, _ = pool.records.shape
    seen: dict[tuple[int, int], Bytes] = {}

    with remote.match(keys, lease_s=LEASE_S, strict=strict) as hit:
        order = in_order(hit.parts) if hit else np.zeros(0, np.int64)
        for some in _chunks(order, record_bytes):
            deadline = Deadline(remote.deadline_s)
            with remote.records(hit, some, deadline, pool.records.here) as (records, codes):
                came = codes == 0
                parents = parents_of(records, seen)
                write = partial(pool.records.write, records[came], parents[came])
                codes[came] = pool.pages.retry(write, int(came.sum()))
            moved.count(codes, record_bytes)


def _push(remote: Remote, pool: CXLPool, keys: Iterable[bytes], strict: bool, moved: Moved) -> None:
    remote.check_fits(pool)
    record_bytes, _ = pool.records.shape
    seen: dict[tuple[int, int], Bytes] = {}
    with pool.match(keys, lease_s=LEASE_S, strict=strict) as hit:
        parts = pages_of_parts(pool, hit._sequence) if hit else []
        if not parts:
            return
        order = in_order([len(pages) for pages, _ in parts])
        pages = np.concatenate([pages for pages, _ in parts])
        generations = np.concatenate([generations for _, generations in parts])
        buffer = np.zeros((0, record_bytes), np.uint8)
        for some in _chunks(order, record_bytes):
            if len(some) > len(buffer):
                buffer = np.zeros((len(some), record_bytes), np.uint8)
            records = buffer[: len(some)]
            codes = pool.records.read(pages[some], generations[some], records)
            parents = parents_of(records, seen)
            codes[(codes == 0) & ~remote.lacks(names_of(records))] = PRESENT
            go = codes == 0
            if go.any():
                codes[go] = remote.write(records[go], parents[go])
            moved.count(codes, record_bytes)


def _chunks(order: Offsets, record_bytes: int) -> list[Offsets]:
    step = chunk_records(record_bytes)
    return [order[first : first + step] for first in range(0, len(order), step)]
