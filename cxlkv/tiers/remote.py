"""Prefixes that another machine's pool has come into a pool here: docs/explanation/remote-tier.md.

The far pool is served by `cxlkv serve`, and only read. Nothing here raises for what is wrong there:
what did not come, or makes no sense, is a shorter hit. After a failure no request asks that pool,
until a thread has reached it again: so no request waits for a dead pool twice.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes, Codes, Hashes, Mask, Names, Offsets, RecordBytes, leading
from cxlkv.errors import BadArgumentError, CXLKVError, PoolFullError, UnsupportedError
from cxlkv.machine import lifetime
from cxlkv.machine.lifetime import Closing
from cxlkv.pages import CORRUPT, PRESENT, STALE, layout_crc
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys, every_key, root
from cxlkv.sequence import Hit
from cxlkv.tiers.states import Chain, Checkpoints
from cxlkv.transport import Remote, RemoteHit, read_secret
from cxlkv.transport.base import chunk_records
from cxlkv.transport.far import HEADER_BYTES, Shape, in_order, parents_of, shape_of
from cxlkv.transport.shards import (
    Heads,
    check_heads,
    heads_between,
    layout_among,
    put_headers,
    put_heads,
    renamed,
    same_names,
)
from cxlkv.transport.wire import BODY_BYTES_MAX, CODE_BYTES, Deadline, parse_address

DEADLINE_S = 5.0
LEASE_S = 60.0  # of what is held there
LOOK_S = 1.0  # for a far pool, when the tier is made
ATTEMPTS = 2  # the first one may meet a connection that broke long ago
PAUSE_S = (1.0, 30.0)  # until a far pool that failed is looked for again: first, at most
SAME = bytes(16)

log = logging.getLogger("cxlkv")


def parse_remote(text: str) -> tuple[str, str | None]:
    """HOST:PORT, and the RDMA device to read with, of tcp://HOST:PORT or
    rdma://HOST:PORT?device=NAME. Raises BadArgumentError."""
    found = urlsplit(text)
    device = parse_qs(found.query).get("device", [None])[0]
    wanted = (found.scheme == "tcp" and not found.query) or (found.scheme == "rdma" and device)
    if not wanted or found.path.strip("/"):
        raise BadArgumentError(
            f"{text!r}: tcp://HOST:PORT of a `cxlkv serve`, or rdma://HOST:PORT?device=NAME, the "
            "device being this machine's"
        )
    parse_address(found.netloc)
    return found.netloc, device


@dataclass(frozen=True)
class Source:
    """A far pool that has `heads` of the pages here.

    layout_crc: of the layout that it must have. delta: 16 bytes, by which names there differ from
    those here (xor).
    """

    remote: Remote
    heads: Heads
    layout_crc: int
    delta: bytes = SAME

    def shape(self, here: Shape) -> Shape:
        """The shape of the far pool. Raises GeometryError where its heads are none of those
        here."""
        far = self.remote.shape(self.layout_crc)
        check_heads(here, far, self.heads)
        return far

    def match(self, keys: PageKeys) -> RemoteHit:
        there = PageKeys(renamed(keys.packed, self.delta), keys.page_tokens, keys.strict)
        return self.remote.match(there, lease_s=LEASE_S, strict=keys.strict)


def open_remote(
    pool: CXLPool,
    addresses: Sequence[str],
    secret: str | os.PathLike[str],
    *,
    ranks: int | None = None,
    delta: bytes = SAME,
    deadline_s: float = DEADLINE_S,
) -> RemoteTier:
    """addresses: of the far pool that stores what this one does; or of those of all `ranks` of
    another number of tensor-parallel ranks, in their order; None: as many as there are addresses,
    if there are several. secret: a file. delta: as in Source.

    Looks for each once, and warns of those that do not answer: they may come later. Raises
    BadArgumentError, SecretError.
    """
    layout, known = pool.layout, read_secret(secret)
    size = layout.shard[1]
    ranks = ranks or (size if len(addresses) == 1 else len(addresses))
    if len(addresses) != (1 if ranks == size else ranks):
        raise BadArgumentError(f"{len(addresses)} addresses: one for each of {ranks} ranks")
    if layout.states is not None and ranks != size:
        raise UnsupportedError(
            f"a pool of {size} ranks with states, and one of {ranks}: pages are cut by heads, "
            "state checkpoints are not. Use a far pool of as many ranks"
        )
    sources = []
    for rank, text in enumerate(addresses):
        far = layout if ranks == size else layout_among(layout, rank, ranks)
        heads = heads_between(far, layout)
        address, device = parse_remote(text)
        if heads.count:
            made = Remote(
                address,
                known,
                device=device,
                deadline_s=deadline_s,
                attempts=ATTEMPTS,
                connect=False,
            )
            sources.append(Source(made, heads, layout_crc(far, pool.sketch), delta))
    for source in sources:
        try:
            source.remote.connect(LOOK_S)
        except CXLKVError as error:
            log.warning("cxlkv: %s; it is asked again when something is looked for", error)
    return RemoteTier(pool, sources, deadline_s=deadline_s)


class RemoteTier(Closing):
    """Extends hits by what far pools have; any thread may call it.

    sources: which together have all heads of a page here; closed with this. deadline_s: of one
    extend(); what has come by then stays.
    """

    def __init__(self, pool: CXLPool, sources: Sequence[Source], *, deadline_s: float = DEADLINE_S):
        self._pool, self._shape = pool, shape_of(pool)
        self._sources, self._deadline_s = list(sources), deadline_s
        self._counts: Counter[str] = Counter()
        self.error: Exception | None = None  # the last one
        self._is_off = self._ended = False
        self._pause_s = PAUSE_S[0]
        self._lock = threading.Lock()
        self._wake = SimpleQueue[None]()
        self._watcher: threading.Thread | None = None
        lifetime.watch(self)

    @property
    def is_on(self) -> bool:
        """Whether it is worth asking: not until a far pool that has failed answers again."""
        return not (self._is_off or self._ended)

    def extend(self, keys: PageKeys, hit: Hit, *, lease_s: float = 60.0) -> Hit:
        """The hit of `keys`, or in its place a longer one, of pages that came into the pool."""
        again = partial(self._pool.match, keys, lease_s=lease_s, strict=keys.strict)
        if hit.tokens >= len(keys) * keys.page_tokens:
            return hit
        return self._extended(_Coming(self._pool, hit, again), partial(self._bring, keys))

    def extend_prefix(
        self, ids: npt.NDArray[np.int64], salt: bytes, hit: Hit, *, lease_s: float = 60.0
    ) -> Hit:
        """The hit of a text of a model with states, or in its place a longer one."""
        if hit.tokens == len(ids) or not self.is_on:
            return hit
        again = partial(self._pool.match_prefix, ids, salt, lease_s=lease_s)
        keys = every_key(ids, self._shape.page_tokens, root(salt))
        return self._extended(_Coming(self._pool, hit, again), partial(self._bring_states, keys))

    def _extended(self, coming: _Coming, bring: Callable[[_Coming], None]) -> Hit:
        with self._lock:
            if not self.is_on:
                return coming.hit
            coming.deadline = Deadline(self._deadline_s)
            try:
                bring(coming)
                self._pause_s = PAUSE_S[0]
            except Exception as error:  # a peer may say anything, and no engine is to end by it
                if coming.counts["pages"] and coming.deadline.is_over():
                    self._counts["late"] += 1  # slow, but there
                else:
                    self._fail(error)
            self._counts.update(coming.counts)
            return coming.hit

    def _bring(self, keys: PageKeys, coming: _Coming) -> None:
        """Page after page, until the far pools have no more, or what they have is not right."""
        with ExitStack() as held:
            hits = self._match(keys, coming, held)
            same = all(hit.parts == hits[0].parts for hit in hits)
            if hits[0].tokens <= coming.hit.tokens or not same:
                return
            order = coming.missing(hits[0])
            shapes = [self._shape, *(source.shape(self._shape) for source in self._sources)]
            step = min(chunk_records(shape.record_bytes) for shape in shapes)
            for first in range(0, len(order), step):
                records, codes = self._read(coming, hits, order[first : first + step])
                if not self._take(coming, records, codes):
                    return

    def _take(
        self, coming: _Coming, records: RecordBytes, codes: Codes, parents: Names | None = None
    ) -> bool:
        """Whether all of them are in the pool then."""
        try:
            if coming.take(records, codes, parents):
                return True
        except PoolFullError:
            self._counts["refused"] += 1
        if coming.counts["damaged"] and not coming.counts["pages"]:
            self._forget()  # what it has said of its pool may be wrong
        return False

    def _bring_states(self, keys: Hashes, coming: _Coming) -> None:
        """The last checkpoint that the far pool has, with its pages: one that ends a page as
        _bring() does, one behind a tail by names, as no hit there has a tail's page."""
        source, page_tokens = self._sources[0], self._shape.page_tokens
        source.shape(self._shape)
        there = partial(self._is_anywhere, source, coming.deadline)
        chain = Checkpoints(self._pool, there).last_whole(keys, coming.hit.tokens)
        if chain is None:
            return
        if chain.end % page_tokens:
            wanted = there(chain.names) & ~self._pool.records.here(chain.names)
            self._bring_named(source, chain, np.flatnonzero(wanted), coming)
        if coming.hit.tokens < chain.end:
            ends = np.ascontiguousarray(keys[page_tokens - 1 : chain.end : page_tokens])
            self._bring(PageKeys(ends, page_tokens), coming)

    def _bring_named(self, source: Source, chain: Chain, wanted: Offsets, coming: _Coming) -> None:
        """Those of the chain at these places; a window has gaps by right."""
        step = chunk_records(self._shape.record_bytes)
        if self._shape.record_bytes + CODE_BYTES > BODY_BYTES_MAX:
            return
        for first in range(0, len(wanted), step):
            some = wanted[first : first + step]
            names = renamed(chain.names[some], source.delta)
            records, codes = source.remote.named(names, coming.deadline)
            right = codes == 0
            if source.delta != SAME and right.any():
                rows = records[right]
                put_headers(rows, self._shape, rows[:, :HEADER_BYTES], source.delta)
                records[right] = rows
            if not self._take(coming, records, codes, chain.parents[some]):
                return

    def _is_anywhere(self, source: Source, deadline: Deadline, names: Names) -> Mask:
        """Which names have a page here or there."""
        found = self._pool.records.here(names)
        rest = renamed(names[~found], source.delta)
        if len(rest):
            deadline.left()  # raises
            found[~found] = ~source.remote.retried(lambda _: source.remote.lacks(rest))
        return found

    def _match(self, keys: PageKeys, coming: _Coming, held: ExitStack) -> list[RemoteHit]:
        """What all of the far pools have of the prefix, held there."""
        while True:
            coming.deadline.left()  # raises; each round asks all of them
            for source in self._sources:
                source.shape(self._shape)  # raises for a pool of something else
            hits = [held.enter_context(source.match(keys)) for source in self._sources]
            tokens = min(hit.tokens for hit in hits)
            if all(hit.tokens == tokens for hit in hits):
                return hits
            keys = keys[: tokens // keys.page_tokens]

    def _read(
        self, coming: _Coming, hits: Sequence[RemoteHit], some: Offsets
    ) -> tuple[RecordBytes, Codes]:
        """Records as they are to lie here, and a code for each."""
        out = np.zeros((len(some), self._shape.record_bytes), np.uint8)
        codes = np.zeros(len(some), np.int32)
        lines: Bytes = np.zeros((0, HEADER_BYTES), np.uint8)
        for source, hit in zip(self._sources, hits, strict=True):
            is_here = partial(self._is_here, source.delta)
            with source.remote.records(hit, some, coming.deadline, is_here) as (rows, found):
                if source.delta == SAME and source.layout_crc == self._shape.layout_crc:
                    return rows.copy(), found
                if not len(lines):
                    lines = rows[:, :HEADER_BYTES].copy()
                found[(found == 0) & ~same_names(rows, lines)] = STALE
                far = source.shape(self._shape)
                put_heads(out, self._shape, rows, far, source.heads)
            np.copyto(codes, found, where=codes == 0)
        put_headers(out, self._shape, lines, self._sources[0].delta)
        return out, codes

    def _is_here(self, delta: bytes, names: Names) -> Mask:
        return self._pool.records.here(renamed(names, delta))

    # ---- when it fails ----

    def _forget(self) -> None:
        """All that the far pools have said: the next call connects again."""
        for source in self._sources:
            source.remote.close()

    def _fail(self, error: Exception) -> None:
        self._counts["errors"] += 1
        self.error, self._is_off = error, True
        where = ", ".join(source.remote.address for source in self._sources)
        fault = None if isinstance(error, CXLKVError) else error  # of ours, maybe: where it was
        said = "cxlkv: nothing comes from %s until it answers again: %s"
        log.warning(said, where, error, exc_info=fault)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S[1])
        watcher = threading.Thread(
            target=self._watch, args=(pause_s, where), name="cxlkv-remote", daemon=True
        )
        try:
            watcher.start()
            self._watcher = watcher
        except RuntimeError:  # no thread to be had now: the next who wants something tries it
            self._is_off = False

    def _watch(self, pause_s: float, where: str) -> None:
        while True:
            with suppress(Empty):
                self._wake.get(timeout=pause_s)
            if self._ended:
                return
            with suppress(Exception):  # without this thread the tier would be off for ever
                self._forget()
                for source in self._sources:
                    source.shape(self._shape)
                log.info("cxlkv: %s answers again", where)
                self._is_off = False
                return
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def stats(self) -> dict[str, int]:
        """pages, bytes: that came; link_bytes: read for them, also of heads and pages that were of
        no use. damaged, stale: pages that were not right. refused: prefixes
        that found no room; late: of which only a part came; errors: far pools that failed."""
        names = "pages bytes damaged stale refused late errors"
        found = {name: self._counts[name] for name in names.split()}
        return {**found, "link_bytes": self.link_bytes, "off": int(self._is_off)}

    @property
    def link_bytes(self) -> int:
        """Read of far pools so far."""
        return sum(source.remote.read_bytes for source in self._sources)

    def close(self) -> None:
        """A second time does nothing."""
        self._ended = True
        self._wake.put(None)
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            self._forget()

    def reset_after_fork(self) -> None:
        """The thread stays with the parent, and connections do."""
        self._lock, self._wake = threading.Lock(), SimpleQueue()
        self._watcher, self._is_off = None, False


class _Coming:
    """A hit that grows as pages arrive. again: matches anew. deadline: of all arrivals together."""

    deadline: Deadline

    def __init__(self, pool: CXLPool, hit: Hit, again: Callable[[], Hit]):
        self._pool, self.hit, self._again = pool, hit, again
        self._seen: dict[tuple[int, int], Bytes] = {}
        self.counts: Counter[str] = Counter()

    def missing(self, far: RemoteHit) -> Offsets:
        """Which of the far pages this hit lacks, in the order of their tokens."""
        page_tokens = self._pool.layout.page_tokens
        from_end = np.concatenate([np.arange(1 - count, 1) for count in far.parts])
        order = in_order(far.parts)
        wanted = far.tokens + from_end * page_tokens > self.hit.tokens
        if self._pool.layout.states is not None:  # the last part: a checkpoint is of one token
            wanted[len(wanted) - far.parts[-1] :] = True
        return order[wanted[order]]

    def take(self, records: RecordBytes, codes: Codes, before: Names | None = None) -> bool:
        """Publishes them up to the first that is not right, and holds them; whether all are.
        before: the name before each, where it is known."""
        right = (codes == 0) | (codes == PRESENT)
        good = leading(right)
        parents = parents_of(records[:good], self._seen) if before is None else before[:good]
        came = codes[:good] == 0
        if came.any():
            write = partial(self._pool.records.write, records[:good][came], parents[came])
            codes = codes.copy()
            codes[:good][came] = self._pool.pages.retry(write, int(came.sum()))
        published = int((codes[:good][came] == 0).sum())
        for name, code in (("damaged", CORRUPT), ("stale", STALE)):
            self.counts[name] += int((codes == code).sum())
        self.counts["pages"] += published
        self.counts["bytes"] += published * records.shape[1]
        shorter, self.hit = self.hit, self._again()
        shorter.release()
        return bool(((codes == 0) | (codes == PRESENT)).all())
