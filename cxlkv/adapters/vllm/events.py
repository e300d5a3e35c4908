"""What routers are told of the pools: which blocks this engine finds there, and which no more.

A block is told of when all ranks' pools have it, this engine has stored it or found it, and the
block before it was told of: routers place a block behind its parent, and some drop one whose parent
they do not know. It is told of once, as some count.

Nobody tells this process what other engines, hosts and operators evict or forget. So it looks for
all blocks that it has told of, once a second while the engine makes steps, and tells which are
gone. A block behind one that is gone stays told of as long as the pools have it: it is found again
as soon as the gap is filled.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv.adapters.common.keys import block_keys
from cxlkv.adapters.common.metrics import Failures
from cxlkv.adapters.vllm.counting import LOOK_EVERY_S, LOOK_SHARE
from cxlkv.adapters.vllm.messages import KEY_BYTES, Report
from cxlkv.adapters.vllm.texts import EngineRequest, hashes_of
from cxlkv.arrays import Names
from cxlkv.errors import CXLKVError
from cxlkv.pages import layer_places
from cxlkv.pool import CXLPool
from cxlkv.tiers.cold_store import ColdStore

ENDED_MAX = 1024
"""Requests that have ended and whose texts are kept: reports of what they stored come later."""
NAMES_MAX = 4096
"""Looked up while the pool's lock is held once: some 0.05 ms."""
LOOK_BLOCKS = 1024  # at once
LOOK_MAX_S = 0.005  # in a step, and what the last of these blocks take


@dataclass
class Stored:
    """Blocks of a text, from block `first` on, that can be found in all ranks' pools now."""

    request: EngineRequest
    first: int
    hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]


@dataclass
class Removed:
    """Blocks that were told of, and cannot be found any more."""

    hashes: list[bytes]


@dataclass
class _Text:
    request: EngineRequest
    space: bytes  # of its keys


class Events:
    """One for each engine that publishes KV events; pools are those of all ranks, by rank, cold
    what they have below them: what lies there is served, too.

    every: hashes of the engine for a block.
    """

    def __init__(
        self,
        pools: Sequence[CXLPool],
        failures: Failures,
        block_tokens: int,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
        cold: Sequence[ColdStore | None] = (),
    ):
        below = cold or [None] * len(pools)
        self._pools = [
            (pool, _parts_of(pool), store) for pool, store in zip(pools, below, strict=True)
        ]
        self._failures, self._tokens, self._every = failures, block_tokens, every
        self._clock, self._looked_s, self._credit_s = clock, clock(), 0.0
        self._next_s = self._looked_s + LOOK_EVERY_S
        self._texts: dict[str, _Text] = {}
        self._ended: OrderedDict[str, _Text] = OrderedDict()
        self._told: dict[bytes, bytes] = {}  # the engine's hash of each block, by its key here
        self._left: list[bytes] = []  # keys that this round has still to look for
        self._changes: list[Stored | Removed] = []

    def reopened(self, rank: int, pool: CXLPool, cold: ColdStore | None) -> None:
        """This rank's pool was lost, and is open again."""
        self._pools[rank] = (pool, _parts_of(pool), cold)

    # ---- requests ----

    def begin(self, request: EngineRequest, space: bytes) -> None:
        """It comes, or comes again."""
        self._texts[request.request_id] = _Text(request, space)

    def end(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is None:
            return
        self._ended[name] = text
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    # ---- what is there ----

    def found(self, name: str, blocks: int) -> None:
        """A match found so many blocks of its text, whoever stored them."""
        self._tell(self._texts[name], 0, blocks)

    def heard(self, reports: Sequence[Report]) -> None:
        """Hear the reports of all ranks about one step."""
        for span in {span for report in reports for span in report.stored}:
            text = self._texts.get(span.request) or self._ended.get(span.request)
            if text is not None:
                self._tell(text, span.first, span.last)

    def _tell(self, text: _Text, first: int, last: int) -> None:
        """Announces those of blocks [first, last) that the pools have, and earlier blocks that were
        never announced: another engine may have stored them."""
        if first and not all(key in self._told for key in self._keys(text, first - 1, first)):
            first = 0
        keys = self._keys(text, first, last)
        new = [index for index, key in enumerate(keys) if key not in self._told]
        if not new:
            return
        here = self._present([keys[index] for index in new])
        hashes = hashes_of(text.request, self._every, first, last)
        runs: list[range] = []
        for index in (index for index, there in zip(new, here, strict=True) if there):
            if index and keys[index - 1] not in self._told:
                continue
            self._told[keys[index]] = hashes[index]
            if runs and runs[-1].stop == index:
                runs[-1] = range(runs[-1].start, index + 1)
            else:
                runs.append(range(index, index + 1))
        self._changes += [
            self._stored(text.request, first + run.start, first + run.stop) for run in runs
        ]

    def _stored(self, request: EngineRequest, first: int, last: int) -> Stored:
        hashes = hashes_of(request, self._every, max(0, first - 1), last)
        parent = hashes.pop(0) if first else None
        ids = list(request.all_token_ids[first * self._tokens : last * self._tokens])
        return Stored(request, first, hashes, parent, ids)

    def _keys(self, text: _Text, first: int, last: int) -> list[bytes]:
        hashes = hashes_of(text.request, self._every, first, last)
        joined = block_keys(hashes, self._tokens, text.space).packed.tobytes()
        return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]

    # ---- what is gone ----

    def changes(self) -> list[Stored | Removed]:
        """What there is to tell since the last call."""
        self._look(self._clock())
        found, self._changes = self._changes, []
        return found

    def _look(self, now_s: float) -> None:
        """Some blocks further in this round, so that no step waits for long; a round a second, if
        their share of the time is enough for it."""
        if not self._left and now_s >= self._next_s:
            self._left, self._next_s = list(self._told), now_s + LOOK_EVERY_S
        self._credit_s = min(self._credit_s + (now_s - self._looked_s) * LOOK_SHARE, LOOK_MAX_S)
        self._looked_s = now_s
        gone: list[bytes] = []
        while self._left and self._credit_s > 0:
            keys = self._left[-LOOK_BLOCKS:]
            del self._left[-LOOK_BLOCKS:]
            here = self._present(keys, if_unknown=True)
            gone += [self._told.pop(keys[index]) for index in np.flatnonzero(~here)]
            now_s = self._clock()
            self._credit_s -= now_s - self._looked_s
            self._looked_s = now_s
        if gone:
            self._changes.append(Removed(gone))

    def _present(self, keys: Sequence[bytes], if_unknown: bool = False) -> npt.NDArray[np.bool_]:
        """Which of the blocks all ranks' pools have; if_unknown: where a pool cannot be asked."""
        found = np.ones(len(keys), np.bool_)
        joined = b"".join(keys)
        try:
            for pool, parts, cold in self._pools:
                places = self._tokens // pool.layout.page_tokens
                names = pool.records.names(joined, places)[:, :, parts]
                rows = np.ascontiguousarray(names).reshape(-1, KEY_BYTES)
                found &= there(pool, rows, cold).reshape(len(keys), -1).all(axis=1)
        except CXLKVError as error:
            self._failures.add("match", error)
            found[:] = if_unknown
        return found

    def reset(self) -> None:
        """Nothing that was stored is found any more, of requests that run neither."""
        if self._told:
            self._changes.append(Removed(list(self._told.values())))
        for kept in (self._told, self._left, self._texts, self._ended):
            kept.clear()

    def forgotten(self) -> None:
        """Routers have dropped all that they knew of this engine: it is told of when it is found
        again, or a text is stored that goes on from it."""
        for kept in (self._told, self._left, self._changes):
            kept.clear()


def there(pool: CXLPool, names: Names, cold: ColdStore | None = None) -> npt.NDArray[np.bool_]:
    """Which of the names the pool serves, or the store below it."""
    found = np.empty(len(names), np.bool_)
    for at in range(0, len(names), NAMES_MAX):
        found[at : at + NAMES_MAX] = pool.records.here(names[at : at + NAMES_MAX])
    if cold is not None and not found.all():
        found[~found] = cold.contains(names[~found])
    return found


def _parts_of(pool: CXLPool) -> list[int]:
    """Whose pages a block needs: those of layers that see all tokens. Pages of a layer with a
    window go when no later token sees them, and their block is served all the same; only where all
    layers have windows there are no others to look for."""
    layout = pool.layout
    parts = [place.part for place in layer_places(layout, pool.pages.geometry)]
    full = {part for part, window in zip(parts, layout.windows, strict=True) if window is None}
    return sorted(full or set(parts))
