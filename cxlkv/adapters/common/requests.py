"""Answers what a serving engine asks, request by request, from a pool.

    held = requests.match(keys)                             how much of a prompt is there already?
    requests.load(request, held.handle, held.tokens, keys)  a worker: go on from it
    requests.store(request, keys)                           publish what became complete
    requests.prioritize(keys, 3)                            what of it is published goes later
    requests.release(request)                               done, aborted or preempted

Keys name blocks of keys.page_tokens tokens, a page or several, each for all text before its end:
`prefix.PageKeys`. They must also name all that makes K and V what they are (model, dtype, rope,
shard: `identity`), so that a mismatch is a miss. A handle is bytes, so match() and load() may be in
different processes. Whatever is wrong with stored pages is a miss that is counted in failures(): an
engine computes then.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from cxlkv.adapters.common.audits import difference, withdraw
from cxlkv.adapters.common.metrics import Failures
from cxlkv.errors import BadArgumentError, CorruptError, CXLKVError, QuotaError, StaleError
from cxlkv.ndp.engine import same_pages
from cxlkv.numbers import is_whole
from cxlkv.pages import CORRUPT, NO_PAGE
from cxlkv.pool import CXLPool
from cxlkv.prefix import PageKeys
from cxlkv.sequence import Hit, Sequence
from cxlkv.tiers import Tiers
from cxlkv.tiers.quota import Quota

MEND_BYTES = 16 << 20
"""Bytes of pages that are read at once to find damaged ones."""


class PoolRequests:
    """Requests of one engine process, each a Sequence of a pool.

    The suite in tests/support/adapters.py is its contract, and that of the engines' own ones.

    tiers: makes room in a full pool by evicting published pages, and looks into the cold tier.
    quota: of the tenant that this engine serves, of the same tiers: what is refused for it is not
    published, and counted. Calls that name a request which is not there raise BadArgumentError, but
    for release().
    """

    def __init__(self, pool: CXLPool, tiers: Tiers | None = None, quota: Quota | None = None):
        self.pool, self.tiers, self.quota = pool, tiers, quota
        self.sequences: dict[str, Sequence] = {}
        self._stored: dict[str, int] = {}  # tokens of a request that were published, or came so
        self._failures = Failures()
        self._unsaid = set[bytes]()  # namespaces that no mark in the pool withdraws yet

    def match(self, keys: PageKeys) -> Hit:
        """The longest published prefix, held until its release(); tokens may be 0."""
        return (self.quota or self.tiers or self.pool).match(keys)

    def load(
        self,
        request: str,
        handle: bytes | None,
        tokens: int,
        keys: PageKeys | None = None,
        *,
        verify: bool = True,
    ) -> int:
        """Begin a request with `tokens` of a hit's, none without a handle; returns how many it has.

        Less where pages are gone or damaged, or a window lacks what `tokens` see: failures() counts
        it, and the engine computes. keys, those of the hit: damaged ones are taken out, so that
        nobody finds them again, and what is left of the prefix is loaded; without them 0.
        verify=False: for callers that read the pages by a call that verifies them on the way, and
        then calls mend() if one is damaged. Raises BadArgumentError for a request that is there
        already, and for more tokens than the hit has.
        """
        if request in self.sequences:
            raise BadArgumentError(f"request {request} is there already: release() it first")
        if not is_whole(tokens):
            raise BadArgumentError(f"{tokens!r:.40} tokens: a whole number, 0 or more")
        sequence = None
        if handle is not None and tokens:
            sequence = self._adopted(handle, tokens, keys, verify)
            if sequence is None and keys is not None:
                with self.match(keys[: tokens // keys.page_tokens]) as rest:
                    if rest:
                        sequence = self._adopted(rest.handle, rest.tokens, keys, verify)
        if sequence is None:
            sequence = self.pool.sequence()
        self.sequences[request] = sequence
        self._stored[request] = len(sequence)
        return len(sequence)

    def _adopted(
        self, handle: bytes, tokens: int, keys: PageKeys | None, verify: bool
    ) -> Sequence | None:
        """The hit's sequence, its pieces verified; None, and counted, when it cannot be."""
        sequence = None
        try:
            sequence = self.pool.adopt(handle)
            self._cut(sequence, tokens)
            if verify:
                self._verify(sequence)
        except (StaleError, CorruptError, _WindowError) as error:
            self.fail(_KINDS[type(error)], error)
            if sequence is not None:
                sequence.release()
            if isinstance(error, CorruptError) and keys is not None:
                self.mend(keys)
            return None
        return sequence

    def _cut(self, sequence: Sequence, tokens: int) -> None:
        if tokens > len(sequence):
            raise BadArgumentError(f"{tokens} tokens of a hit of {len(sequence)}")
        try:
            sequence.truncate(tokens)
        except BadArgumentError as error:
            raise _WindowError(str(error)) from error

    def _verify(self, sequence: Sequence) -> None:
        """Raises CorruptError. What this process has found right before is not read again."""
        layout, tokens = self.pool.layout, len(sequence)
        batch = self.pool.batch([sequence])
        for layer, window in enumerate(layout.windows):
            oldest = 0 if window is None else max(0, tokens + 1 - window)  # that the next one sees
            first = oldest // layout.page_tokens
            pages = np.arange(first, tokens // layout.page_tokens, dtype=np.int32)
            batch.verify(layer, same_pages(pages, layout.of_layer(layer).kv_heads))

    def sequence(self, request: str) -> Sequence:
        """The sequence of the request's K and V; append to it, attend to it."""
        if request not in self.sequences:
            raise BadArgumentError(f"request {request} is not there: load() begins one")
        return self.sequences[request]

    def store(self, request: str, keys: PageKeys) -> int:
        """Publish what is complete of the request; returns how many pages are new. Keys from its
        first token on. A request whose pages are published already gives 0."""
        new, self._stored[request] = self._publish(
            self.sequence(request), keys, self._stored.get(request, 0)
        )
        return new

    def _publish(self, sequence: Sequence, keys: PageKeys, before: int) -> tuple[int, int]:
        """Pages that are new, and up to which token the sequence is published then."""
        size = keys.page_tokens
        there, known = min(len(sequence) // size, len(keys)), before // size
        if there <= known:
            return 0, before
        try:
            if self.quota is not None:
                new = self.quota.publish(sequence, keys[:there])
            else:
                new = self.pool.publish(sequence, keys[:there], size)
        except QuotaError as error:
            self.fail("quota", error)
            return 0, before
        return new, there * size

    def store_states(self, request: str, keys: PageKeys, states: npt.NDArray[np.uint8]) -> int:
        """Publish the state checkpoint behind all tokens of these keys, whose pages store() has
        published; returns how many of its pages are new."""
        sequence = self.sequence(request)
        try:
            if self.quota is not None:
                return self.quota.publish(sequence, keys, states)
            return self.pool.publish(sequence, keys, keys.page_tokens, states=states)
        except QuotaError as error:
            self.fail("quota", error)
            return 0

    def prioritize(self, keys: PageKeys, priority: int) -> int:
        """Pages of these keys make room after all of lower priority, as pool.admin.prioritize();
        returns how many this host has."""
        return self.pool.admin.prioritize(keys, priority, strict=keys.strict)

    def audit(self, keys: PageKeys, own: Sequence, place: int) -> bool:
        """Compares the published block of the last key with pages of `own` from `place` on. False
        where they differ: the block is forgotten then, and failures() counts it. True also where
        the block is gone or cannot be read."""
        if not is_whole(place):
            raise BadArgumentError(f"place {place!r:.40}: pages are counted from 0")
        size = self.pool.layout.page_tokens
        count, text = keys.page_tokens // size, ""
        try:
            with self.pool.match(keys) as hit:
                if hit.tokens < len(keys) * keys.page_tokens:
                    return True
                found, first = hit.sequence(), (len(keys) - 1) * count
                try:
                    text = difference(self.pool, found, own, first, place, count)
                finally:
                    found.release()
        except CXLKVError as error:
            self.fail(_KINDS.get(type(error), "stale"), error)
            return True
        if text:
            self.fail("audit", CorruptError(f"an audited hit is wrong: {text}"))
            self.forget(keys[-1:])
        return not text

    def withdraw(self, *spaces: bytes) -> None:
        """Marks these namespaces as withdrawn. Where a full pool has no room for a mark, the next
        call tries again."""
        self._unsaid.update(spaces)
        for one in tuple(self._unsaid):
            try:
                withdraw(self.pool, one, None if self.tiers is None else self.tiers.cold)
                self._unsaid.discard(one)
            except CXLKVError as error:
                self.fail("save", error)

    def truncate(self, request: str, tokens: int) -> None:
        """The request has only `tokens` tokens: what was computed after them is not its text."""
        self.sequence(request).truncate(tokens)
        self._stored[request] = min(self._stored[request], tokens)

    def release(self, request: str) -> None:
        """Give the request's pages back; of one that is not there nothing."""
        sequence = self.sequences.pop(request, None)
        self._stored.pop(request, None)
        if sequence is not None:
            sequence.release()

    def forget(self, keys: PageKeys) -> int:
        """Take published pages out of the index, whatever they are; returns how many."""
        return self.pool.forget(keys)

    def mend(self, keys: PageKeys) -> list[int]:
        """Take out damaged pages of these keys, after a CorruptError while a request's pages were
        read; returns which keys' (by number). The request is released and computed anew."""
        damaged = np.flatnonzero(self._damaged(keys))
        if len(damaged):
            self.forget(PageKeys(keys.packed[damaged], keys.page_tokens, keys.strict))
        found: list[int] = damaged.tolist()
        return found

    def _damaged(self, keys: PageKeys) -> npt.NDArray[np.bool_]:
        """Which keys' published pages are not what was written; every byte is read."""
        records = self.pool.records
        places = -(-keys.page_tokens // self.pool.layout.page_tokens)
        names = records.names(keys.packed.tobytes(), places)
        per_key = names.shape[1] * names.shape[2]
        pages, generations = records.find(names.reshape(-1, 16))
        there = np.flatnonzero(pages != NO_PAGE)
        record_bytes, _ = records.shape
        many = max(1, MEND_BYTES // record_bytes)
        buffer = np.empty((min(many, len(there)), record_bytes), np.uint8)
        wrong = np.zeros(len(pages), np.bool_)
        for first in range(0, len(there), many):
            some = there[first : first + many]
            codes = records.read(pages[some], generations[some], buffer[: len(some)])
            wrong[some] = codes == CORRUPT
        found: npt.NDArray[np.bool_] = np.logical_or.reduce(wrong.reshape(-1, per_key), axis=1)
        return found

    def stored(self, request: str) -> int:
        """Tokens of the request that this process knows to be published."""
        return self._stored.get(request, 0)

    def brought(self, keys: PageKeys) -> None:
        """Another process of this engine has brought these back from below the pool."""
        if self.quota is not None:
            self.quota.brought(keys)

    def reopened(self, pool: CXLPool, tiers: Tiers | None = None) -> None:
        """Go on in this pool: the one before was closed, and what requests held there is gone."""
        self.pool, self.tiers = pool, tiers
        if self.quota is not None and tiers is not None:
            self.quota.reopened(tiers)
        self.sequences.clear()
        self._stored.clear()

    def failures(self) -> Counter[str]:
        """Counts since the start: "stale", "corrupt", "full", "quota", "window", "host",
        "audit"."""
        return Counter(self._failures)

    def fail(self, kind: str, error: Exception) -> None:
        self._failures.add(kind, error)


class _WindowError(CXLKVError):
    """A window has given back what the next token would see."""


_KINDS: dict[type[CXLKVError], str] = {
    StaleError: "stale",
    CorruptError: "corrupt",
    _WindowError: "window",
}
